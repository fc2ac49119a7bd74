"""How a model is trained, as a value."""

from dataclasses import dataclass

from autopar.values.choices import check_choice
from autopar.values.pins import NO_PINS, Pins
from autopar.values.schema import of_file

STATES = {"adamw": 2, "adam": 2, "sgd": 0, "sgd-momentum": 1}
"""Tensors that torch's optimizers keep of each parameter."""
FUSED = "-fused"
NUM_STATES = STATES | {name + FUSED: count for name, count in STATES.items()}

REDUCE_SIZES = {"fp32": 4, "fp64": 8}
"""Dtypes in which gradients may be summed, wider than they are computed in, and bytes of an element."""


@of_file
@dataclass(frozen=True, slots=True, kw_only=True)
class TrainConfig:
    """How the model is trained: what planning needs to know beside the model and the cluster."""

    optimizer: str = "adamw"
    precision: str = "fp32"
    memory_nbytes: float | None = None
    """Memory limit a device; None for what the device has."""
    reduce_dtype: str | None = None
    """One of `REDUCE_SIZES`, in which gradients of parameters are summed over ranks; None for that of compute."""
    pins: Pins = NO_PINS
    """What a person decided: every search stays within it, as within the memory limit."""

    def __post_init__(self) -> None:
        if self.reduce_dtype is not None:
            check_choice("reduce_dtype", self.reduce_dtype, REDUCE_SIZES)

    @property
    def dtypes(self) -> str:
        """What is computed, stored and summed in which dtype, in words."""
        return self.precision + (f", gradients summed in {self.reduce_dtype}" if self.reduce_dtype else "")

    def reduced_size(self, element_size: int) -> int:
        """Bytes of an element of a parameter's gradient while ranks sum it; element_size: of what is computed on."""
        return element_size if self.reduce_dtype is None else max(element_size, REDUCE_SIZES[self.reduce_dtype])
