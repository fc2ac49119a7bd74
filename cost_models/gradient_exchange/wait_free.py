"""WFBP, wait-free backpropagation: each gradient is a message of its own as soon as backward has produced it.

    end(i) = max(end(i - 1), ready(i)) + alpha + beta s(i)        on one link; the step ends with the last

Zhang et al. 2017, "Poseidon: An Efficient Communication Architecture for Distributed Deep Learning on GPU Clusters";
Awan et al. 2017, "S-Caffe".
"""

from dataclasses import dataclass

from autopar.cost_models.gradient_exchange.contract import Architecture, GradientMessage
from autopar.cost_models.gradient_exchange.model import ExchangeModel


@dataclass(frozen=True, slots=True, kw_only=True)
class WaitFree:
    name: str = "wfbp"
    overlaps_forward: bool = False
    credit_nbytes: float = 0.0
    overhead_seconds: float = 0.0

    def messages(self, model: ExchangeModel, architecture: Architecture) -> tuple[GradientMessage, ...]:
        return tuple(GradientMessage(k, k, gradient.nbytes) for k, gradient in enumerate(model.gradients))
