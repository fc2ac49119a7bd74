"""What must an exchange system say? A schedule cuts the gradients into messages, an architecture sends a message.

Either is one small value with a name; any schedule runs on any architecture (Shi et al. 2020, "A Quantitative Survey of
Communication Optimizations in Distributed Deep Learning", whose seven methods are pairs of these).
"""

from collections.abc import Sequence
from typing import NamedTuple, Protocol

from autopar.cost_models.gradient_exchange.model import ExchangeModel
from autopar.cost_models.timeline import TaskList


class GradientMessage(NamedTuple):
    """Gradients `first` to `last`, or a part of one: `nbytes` sent `delay` seconds after the last is ready.

    The lowest `priority` of those that wait is sent first; of equals the first to be ready.
    """

    first: int
    last: int
    nbytes: float
    priority: float = 0.0
    delay: float = 0.0


class Architecture(Protocol):
    """Who sends what to whom."""

    @property
    def name(self) -> str: ...

    @property
    def streams(self) -> tuple[str, ...]:
        """The links that messages occupy, beside the device itself."""

    def line(self) -> tuple[float, float]:
        """alpha seconds and beta seconds a byte: how long a message holds the slowest link."""

    def send(
        self, build: TaskList, stream: int, nbytes: float, after: Sequence[int], priority: float, offset: float
    ) -> list[int]:
        """Add the tasks of one message; `stream` is the first of `streams`, `offset` the bytes of all messages before.

        The message has arrived when the tasks returned have ended.
        """


class ExchangeSchedule(Protocol):
    """When which gradients are sent."""

    @property
    def name(self) -> str: ...

    @property
    def overlaps_forward(self) -> bool:
        """Whether the next step's layers start one by one as their gradients arrive, or all when all have."""

    @property
    def credit_nbytes(self) -> float:
        """Bytes handed to the links ahead, which nothing more urgent overtakes; 0 for one message at a time."""

    @property
    def overhead_seconds(self) -> float:
        """Seconds a step that the engine itself holds the device up after backward, as measured: packing, threads."""

    def messages(self, model: ExchangeModel, architecture: Architecture) -> tuple[GradientMessage, ...]: ...
