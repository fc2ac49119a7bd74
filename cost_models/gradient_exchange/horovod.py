"""Horovod: every cycle, the gradients that have become ready since go out together, up to a buffer's size a message.

Sergeev, Del Balso 2018, "Horovod: fast and easy distributed deep learning in TensorFlow"; defaults of version 0.19:
HOROVOD_FUSION_THRESHOLD 64 MiB, HOROVOD_CYCLE_TIME 5 ms.
"""

import math
from dataclasses import dataclass

from autopar.cost_models.gradient_exchange.contract import Architecture, GradientMessage
from autopar.cost_models.gradient_exchange.model import ExchangeModel
from autopar.errors import ArgumentError


@dataclass(frozen=True, slots=True, kw_only=True)
class Horovod:
    fusion_nbytes: float = 64 * 2.0**20
    cycle_seconds: float = 5e-3
    name: str = "horovod"
    overlaps_forward: bool = False
    credit_nbytes: float = 0.0
    overhead_seconds: float = 0.0

    def __post_init__(self) -> None:
        if not (self.fusion_nbytes >= 0 and self.cycle_seconds > 0):
            raise ArgumentError(
                f"Horovod with a buffer of {self.fusion_nbytes} bytes and cycles of {self.cycle_seconds} s: the buffer "
                "must not be negative and the cycle must take some time"
            )

    def messages(self, model: ExchangeModel, architecture: Architecture) -> tuple[GradientMessage, ...]:
        out: list[GradientMessage] = []
        ticks = [math.ceil(time / self.cycle_seconds) * self.cycle_seconds for time in model.ready.tolist()]
        first, total = 0, 0.0
        for k, nbytes in enumerate(model.nbytes.tolist()):
            if k > first and (ticks[k] != ticks[first] or total + nbytes > self.fusion_nbytes):
                out.append(self._message(model, ticks, first, k - 1, total))
                first, total = k, 0.0
            total += nbytes
        return (*out, self._message(model, ticks, first, len(ticks) - 1, total))

    def _message(
        self, model: ExchangeModel, ticks: list[float], first: int, last: int, nbytes: float
    ) -> GradientMessage:
        return GradientMessage(first, last, nbytes, delay=max(0.0, ticks[last] - float(model.ready[last])))
