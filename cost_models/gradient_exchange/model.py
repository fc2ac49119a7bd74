"""What does a data-parallel step compute and have to exchange? A model as its gradients, in the order of backward."""

from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from autopar.errors import ArgumentError


class Gradient(NamedTuple):
    """One parameter's gradient: its bytes, and the seconds of backward and forward that its layer takes with it."""

    name: str
    nbytes: float
    backward_seconds: float
    forward_seconds: float


@dataclass(frozen=True, kw_only=True)
class ExchangeModel:
    """`gradients` as backward produces them; `update_seconds` of a step after all are exchanged (the optimizer)."""

    name: str
    gradients: tuple[Gradient, ...]
    update_seconds: float = 0.0

    def __post_init__(self) -> None:
        if not self.gradients:
            raise ArgumentError(f"model {self.name} has no gradient to exchange")
        for gradient in self.gradients:
            if not (gradient.nbytes > 0 and gradient.backward_seconds >= 0 and gradient.forward_seconds >= 0):
                raise ArgumentError(
                    f"model {self.name}, {gradient}: a gradient has more than 0 bytes and takes no negative time"
                )

    @cached_property
    def nbytes(self) -> npt.NDArray[np.float64]:
        return np.array([gradient.nbytes for gradient in self.gradients])

    @cached_property
    def forward_seconds(self) -> float:
        return sum(gradient.forward_seconds for gradient in self.gradients)

    @cached_property
    def ready(self) -> npt.NDArray[np.float64]:
        """Seconds from the start of the step until backward has produced each gradient."""
        return self.forward_seconds + np.cumsum([gradient.backward_seconds for gradient in self.gradients])

    @property
    def compute_seconds(self) -> float:
        """Seconds of a step in which nothing is exchanged."""
        return float(self.ready[-1]) + self.update_seconds
