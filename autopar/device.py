"""What is one device, and one level of links between devices? Figures in flop/s, bytes, bytes/s and seconds."""

import math
from dataclasses import dataclass

from autopar.errors import ArgumentError, ClusterError

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

    `efficiency` is the part of the peak that large matrix products reach; `sources` are pairs (field, source).
    """

    name: str
    peak_flops: tuple[tuple[str, float], ...]
    memory_bytes: int
    memory_bandwidth: float
    launch_seconds: float
    efficiency: float
    sources: tuple[tuple[str, str], ...] = ()

    def __post_init__(self) -> None:
        if not 0 < self.efficiency <= 1:
            raise ClusterError(f"device {self.name}: efficiency {self.efficiency} must be above 0 and at most 1")
        figures = {"memory_bytes": self.memory_bytes, "memory_bandwidth": self.memory_bandwidth}
        figures |= {f"peak_flops.{dtype}": peak for dtype, peak in self.peak_flops}
        for field, value in figures.items():
            _require_positive(value, f"device {self.name}: {field}")
        if not 0 <= self.launch_seconds < math.inf:
            raise ClusterError(
                f"device {self.name}: launch_seconds {self.launch_seconds} must be finite and not negative"
            )

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


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkLevel:
    """How the `size` groups inside one group of the level above are joined.

    `alpha` seconds a message and hop, `bandwidth` bytes/s of one link in each direction, `devices_per_link` devices
    that share that link: all of them send at once in a step, so each has `bandwidth / devices_per_link`.
    """

    name: str
    size: int
    alpha: float
    bandwidth: float
    devices_per_link: int = 1
    sources: tuple[tuple[str, str], ...] = ()

    def __post_init__(self) -> None:
        for field in ("size", "devices_per_link"):
            if getattr(self, field) < 1:
                raise ClusterError(f"link level {self.name}: {field} {getattr(self, field)} must be at least 1")
        _require_positive(self.bandwidth, f"link level {self.name}: bandwidth")
        if not 0 <= self.alpha < math.inf:
            raise ClusterError(f"link level {self.name}: alpha {self.alpha} must be finite and not negative")

    @property
    def bandwidth_per_device(self) -> float:
        return self.bandwidth / self.devices_per_link


def _require_positive(value: float, what: str) -> None:
    if not 0 < value < math.inf:
        raise ClusterError(f"{what} {value} must be positive and finite")
