"""BSP: all gradients in one message once backward has ended. Nothing overlaps.

    step = compute + overhead + alpha + beta S

Valiant 1990, "A Bridging Model for Parallel Computation".
"""

from dataclasses import dataclass

from autopar.cost_models.gradient_exchange.contract import Architecture, GradientMessage
from autopar.cost_models.gradient_exchange.model import ExchangeModel


@dataclass(frozen=True, slots=True, kw_only=True)
class BulkSynchronous:
    name: str = "bsp"
    overlaps_forward: bool = False
    credit_nbytes: float = 0.0
    overhead_seconds: float = 0.0

    def messages(self, model: ExchangeModel, architecture: Architecture) -> tuple[GradientMessage, ...]:
        return (GradientMessage(0, len(model.gradients) - 1, float(model.nbytes.sum())),)
