"""What is one device? Figures in flop/s, bytes, bytes/s and seconds."""

import math
from dataclasses import dataclass

from autopar.errors import ArgumentError, ClusterError
from autopar.values.link import require_positive

DTYPE_NAMES = {
    "bfloat16": "bf16",
    "float16": "fp16",
    "half": "fp16",
    "float32": "fp32",
    "float": "fp32",
    "float64": "fp64",
    "double": "fp64",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Device:
    """One accelerator. `peak_flops` are pairs (dtype name, flop/s): of dense matrix products, not of sparse ones.

    `efficiency` is the part of the peak that large matrix products reach. `attention`, `attention_per_head`,
    `attention_per_key`: attention in 16 bits with heads of d elements, of whose queries each sees s keys on the
    average, takes `attention + attention_per_head / d + attention_per_key / s` times as long as products of as many
    flops, in other dtypes as long as products. `launch_in_step`, `bytes_in_step`, `flops_in_step`: how many times as
    much as alone launches, bytes and flops take within a training step, where `launch_seconds`, `memory_bandwidth` and
    peaks are of operations timed alone, as calibration does. `optimizer_bytes`: how many times as long as an
    operation's an optimizer's bytes take, which it updates in place: a host's operations fill new pages.
    `replay_launches`: launches that a host takes to have a call run again, beside the call. `sources` are pairs (field,
    source).
    """

    name: str
    peak_flops: tuple[tuple[str, float], ...]
    memory_bytes: int
    memory_bandwidth: float
    launch_seconds: float
    efficiency: float
    attention: float = 1.0
    attention_per_head: float = 0.0
    attention_per_key: float = 0.0
    launch_in_step: float = 1.0
    bytes_in_step: float = 1.0
    flops_in_step: float = 1.0
    optimizer_bytes: float = 1.0
    replay_launches: float = 2.0
    sources: tuple[tuple[str, str], ...] = ()

    def __post_init__(self) -> None:
        if not 0 < self.efficiency <= 1:
            raise ClusterError(f"device {self.name}: efficiency {self.efficiency} must be above 0 and at most 1")
        figures = {"memory_bytes": self.memory_bytes, "memory_bandwidth": self.memory_bandwidth}
        figures |= {"launch_in_step": self.launch_in_step, "bytes_in_step": self.bytes_in_step}
        figures |= {"flops_in_step": self.flops_in_step, "optimizer_bytes": self.optimizer_bytes}
        figures |= {f"peak_flops.{dtype}": peak for dtype, peak in self.peak_flops}
        for field, value in figures.items():
            require_positive(value, f"device {self.name}: {field}")
        for field in ("launch_seconds", "replay_launches", "attention", "attention_per_head", "attention_per_key"):
            if not 0 <= getattr(self, field) < math.inf:
                raise ClusterError(
                    f"device {self.name}: {field} {getattr(self, field)} must be finite and not negative"
                )
        if not self.attention:
            raise ClusterError(f"device {self.name}: attention 0.0 must be positive, 1 for as fast as products")

    def peak(self, dtype: str) -> float:
        """Peak flop/s in `dtype` ("bf16" or torch's "bfloat16").

        Raises:
            ArgumentError: if the device has no figure for that dtype.
        """
        name = DTYPE_NAMES.get(dtype, dtype)
        for known, peak in self.peak_flops:
            if known == name:
                return peak
        known_names = ", ".join(known for known, _ in self.peak_flops)
        raise ArgumentError(
            f"device {self.name} has no peak flop/s for {dtype}: it knows {known_names}; "
            "choose one of these as precision or add the figure to the cluster file"
        )
