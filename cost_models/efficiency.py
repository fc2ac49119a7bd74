"""Which part of a device's nominal rates does training reach? A dozen constants a GPU type, from a TOML file.

Every file says of each constant what it was fitted on or where it was read. Their physical ranges are below; a value
outside is refused, so that no fit can pass off a missing effect as a rate that no device has.
"""

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, fields
from functools import lru_cache
from importlib import resources
from typing import Any

import numpy as np
import numpy.typing as npt

from autopar.errors import ClusterError
from autopar.values.cluster import load_cluster
from autopar.values.device import Device

# (least, most) of each constant: parts of a nominal rate are at most 1
RANGES: dict[str, tuple[float, float]] = {
    "gemm": (0.3, 1.0),
    "gemm_fp8": (0.2, 1.0),
    "attention": (0.2, 1.0),
    "scores": (0.1, 1.0),
    "memory": (0.3, 1.0),
    "tensor_link": (0.2, 1.0),
    "pipe_link": (0.2, 1.0),
    "data_link": (0.2, 1.0),
    "data_overlap": (0.0, 1.0),
    "tensor_overlap": (0.0, 1.0),
    "kernel_seconds": (0.0, 2e-5),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Efficiency:
    """Constants of one GPU type; parts of a nominal rate unless they carry seconds.

    gemm, gemm_fp8: of the peak, large matrix products in 16-bit and fp8. attention: of the peak, a flash kernel's
    forward. scores: of the peak, the batched products of attention with scores in memory. memory: of the memory
    bandwidth, elementwise kernels. *_link: of the collective model's bandwidth under a training step's contention, by
    what the traffic is for. *_overlap: of communication that can be hidden, the part that is. kernel_seconds: a launch
    that compute does not hide. num_sms: streaming multiprocessors. borrowed: the GPU type whose parts of nominal rates
    these are, where no measured step of this one is at hand; "" if they are its own.
    """

    name: str
    num_sms: int
    gemm: float
    gemm_fp8: float
    attention: float
    scores: float
    memory: float
    tensor_link: float
    pipe_link: float
    data_link: float
    data_overlap: float
    tensor_overlap: float
    kernel_seconds: float
    borrowed: str = ""
    sources: tuple[tuple[str, str], ...] = ()

    def __post_init__(self) -> None:
        if self.num_sms < 1:
            raise ClusterError(f"efficiency {self.name}: num_sms {self.num_sms} must be at least 1")
        for key, (least, most) in RANGES.items():
            if not least <= getattr(self, key) <= most:
                raise ClusterError(
                    f"efficiency {self.name}: {key} {getattr(self, key)} is outside its physical range, "
                    f"{least} to {most}"
                )

    @property
    def title(self) -> str:
        """Whose constants these are, in words."""
        whose = f"constants borrowed from {self.borrowed} for" if self.borrowed else "fitted constants of"
        return f"{whose} {self.name}"

    def seconds_per_unit(self) -> npt.NDArray[np.float64]:
        """What one unit of each `Kind` of work costs, in its order."""
        return np.array(
            [
                1 / self.gemm, 1 / self.gemm_fp8, 1 / self.attention, 1 / self.scores, 1 / self.memory,
                self.kernel_seconds, 1 / self.tensor_link, (1 - self.tensor_overlap) / self.tensor_link,
                1 / self.pipe_link, 1.0, 1.0, 1 - self.tensor_overlap, 1.0,
            ]
        )  # fmt: skip


def known_efficiencies() -> tuple[str, ...]:
    """GPU types with a file of constants."""
    return tuple(sorted(p.name.removesuffix(".toml") for p in _folder().iterdir() if p.name.endswith(".toml")))


@lru_cache(maxsize=32)
def load_efficiency(device: str) -> Efficiency:
    """The constants of a device: of its own file, or of the longest file name that its name begins with.

    Raises:
        ClusterError: if there is none.
    """
    candidates = [name for name in known_efficiencies() if device == name or device.startswith(name + "-")]
    if not candidates:
        raise ClusterError(
            f"no training constants are known for device {device!r}; there are files for "
            f"{', '.join(known_efficiencies())}; simulate on one of these"
        )
    name = max(candidates, key=len)
    return efficiency_from_table(tomllib.loads((_folder() / f"{name}.toml").read_text(encoding="utf-8")), name)


@lru_cache(maxsize=64)
def fitted_efficiency(device: Device) -> Efficiency | None:
    """The constants of a device that nobody calibrated: one whose `efficiency` is the shipped one; None if it has none.

    Constants are parts of nominal figures, and what `autopar calibrate` writes are reached ones.
    """
    try:
        fitted, shipped = load_efficiency(device.name), load_cluster(f"1x{device.name}").device
    except ClusterError:
        return None
    own, known = ((d.efficiency, dict(d.sources).get("efficiency")) for d in (device, shipped))
    return fitted if own == known else None


def nominal_efficiency(device: Device) -> Efficiency:
    """The constants of a device whose figures are nominal: parts of what a calibrated one reached would count twice.

    Raises:
        ClusterError: if there are none, or the device's figures are measured ones.
    """
    fitted = load_efficiency(device.name)
    if fitted_efficiency(device) is None:
        raise ClusterError(
            f"the figures of this {device.name} are what it reached when it was calibrated, and constants of training "
            f"steps are parts of nominal ones; simulate on the preset, as in 1x{device.name}, or plan with this cluster"
        )
    return fitted


def efficiency_from_table(table: Mapping[str, Any], name: str) -> Efficiency:
    """Constants of a table of `{ value, source }`.

    Raises:
        ClusterError: if a constant is missing, unknown, or outside its range.
    """
    keys = [f.name for f in fields(Efficiency) if f.name not in ("name", "borrowed", "sources")]
    if set(table) - {"borrowed"} != set(keys):
        raise ClusterError(f"efficiency {name}: keys are {sorted(table)} but must be {sorted(keys)}, borrowed optional")
    values = {key: table[key]["value"] for key in keys}
    sources = tuple((key, table[key]["source"]) for key in keys)
    return Efficiency(name=name, borrowed=table.get("borrowed", ""), sources=sources, **values)


def _folder() -> Any:
    return resources.files("autopar.cost_models") / "rates"
