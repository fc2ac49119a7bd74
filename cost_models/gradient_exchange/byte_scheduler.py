"""ByteScheduler: gradients cut into partitions, the first layers' sent first, and forward starts layer by layer.

The next step's forward of a layer waits only for the layer's own gradients, so that what backward produced first may
still be on its way. A credit of bytes is handed to the network ahead, to keep it busy; only the rest can be overtaken.

Peng et al. 2019, "A Generic Communication Scheduler for Distributed DNN Training Acceleration". The defaults
are those of the survey's runs: partitions of 4,000,000 and a credit of 16,000,000 parameters of 4 bytes.
"""

from dataclasses import dataclass

from autopar.cost_models.gradient_exchange.contract import Architecture, GradientMessage
from autopar.cost_models.gradient_exchange.model import ExchangeModel
from autopar.errors import ArgumentError


@dataclass(frozen=True, slots=True, kw_only=True)
class ByteScheduler:
    """`overlaps_forward` is false where the engine waits for all gradients at the end of a step, as BytePS for
    PyTorch does: then partition and priority are all that remains."""

    partition_nbytes: float = 16e6
    name: str = "bytescheduler"
    overlaps_forward: bool = True
    credit_nbytes: float = 64e6
    overhead_seconds: float = 0.0

    def __post_init__(self) -> None:
        if not self.partition_nbytes > 0:
            raise ArgumentError(f"partitions of {self.partition_nbytes} bytes: give more than 0")

    def messages(self, model: ExchangeModel, architecture: Architecture) -> tuple[GradientMessage, ...]:
        out = []
        for k, gradient in enumerate(model.gradients):
            parts = max(1, -int(-gradient.nbytes // self.partition_nbytes))
            priority = float(len(model.gradients) - k)
            out += [GradientMessage(k, k, gradient.nbytes / parts, priority)] * parts
        return tuple(out)
