"""What do all ranks measure together? Where they run, their collectives, their operations, training steps.

Every rank calls `measure` with the same arguments, which is checked before the first collective; a rank that fails or
hangs is an error on all others within the process group's timeout.
"""

import datetime
import os
import socket
from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path

import torch
import torch.distributed as dist

from autopar.calibration.measure_collectives import KINDS, CollectiveRounds, sizes_between
from autopar.calibration.measure_skew import SkewRounds
from autopar.calibration.measure_steps import StepRounds
from autopar.calibration.measure_work import DTYPES, WorkRounds
from autopar.calibration.samples import Measurements, Origin
from autopar.calibration.timing import Tell
from autopar.errors import ArgumentError, AutoparError, MeshError, RankError
from autopar.runtime.agreement import agree
from autopar.runtime.launch import device as own_device
from autopar.values.choices import near
from autopar.values.cluster import preset_devices
from autopar.values.domains import Domain, checked_number

EFFORT = {
    "least_nbytes": Domain(most=2**40),
    "most_nbytes": Domain(most=2**40),
    "num_sizes": Domain(least=2, most=1000),
    "num_rounds": Domain(most=10**6),
}
"""Numbers of an `Effort`. A message of 2^40 bytes is more than any device holds."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Effort:
    """How much is measured: message sizes from `least_nbytes` to `most_nbytes`, log-spaced; rounds of everything."""

    kinds: tuple[str, ...] = KINDS
    least_nbytes: int = 1 << 10
    most_nbytes: int = 64 << 20
    num_sizes: int = 13
    num_rounds: int = 7
    dtypes: tuple[str, ...] = ("fp32", "bf16", "fp64")

    def __post_init__(self) -> None:
        for name, domain in EFFORT.items():
            checked_number(name, getattr(self, name), domain)
        if self.least_nbytes > self.most_nbytes:
            raise ArgumentError(
                f"message sizes from {self.least_nbytes} to {self.most_nbytes} bytes: the first must be no larger"
            )
        for what, given, known in (("collective", self.kinds, KINDS), ("dtype", self.dtypes, tuple(DTYPES))):
            if not given or set(given) - set(known):
                wrong = next((name for name in given if name not in known), "")
                raise ArgumentError(
                    f"{what} {', '.join(given) or 'none'}: choose some of {', '.join(known)}{near(wrong, known)}"
                )


BRIEF = Effort(num_sizes=5, num_rounds=3, dtypes=("fp32",))


class Measuring:
    """Everything that is measured, round by round; all ranks make and call this together.

    Raises:
        MeshError: if there is no process group, or hosts hold unequal numbers of ranks or ranks out of order.
        RankError: on every rank, if ranks differ in what they are to measure or run.
    """

    def __init__(self, effort: Effort, tell: Tell) -> None:
        if not dist.is_initialized():
            raise MeshError(
                "there is no process group to measure; call autopar.runtime.init() under torchrun first, or let "
                "autopar calibrate --processes 4 start processes"
            )
        device = own_device()
        facts = {"torch": torch.__version__, "device": device.type, "threads": str(torch.get_num_threads())}
        agree(facts | {field.name: str(getattr(effort, field.name)) for field in fields(effort)})
        self.origin = _origin(device)
        sizes = sizes_between(effort.least_nbytes, effort.most_nbytes, effort.num_sizes)
        levels = tuple(size for size in self.origin.level_sizes if size > 1)
        self.collectives = (
            CollectiveRounds(levels, kinds=effort.kinds, sizes=sizes, device=device, tell=tell) if levels else None
        )
        self.skew = SkewRounds(levels, device=device, tell=tell) if levels else None
        self.work = WorkRounds(effort.dtypes, device=device, tell=tell)
        self.steps = StepRounds(effort.dtypes, device=device, tell=tell)

    def run(self, tell: Tell) -> None:
        """One round of everything; operations twice, or all of a round's would fall into the same second or two."""
        self._compute(tell)
        if self.collectives is not None and self.skew is not None:
            self.collectives.run(tell)
            self.skew.run(tell)
            self._compute(tell)

    def _compute(self, tell: Tell) -> None:
        self.work.run(tell)
        self.steps.run(tell)

    def result(self) -> Measurements:
        collectives = () if self.collectives is None else self.collectives.samples()
        skew = () if self.skew is None else self.skew.samples()
        steps, work = self.steps.samples(), self.work.samples()
        return Measurements(origin=self.origin, collectives=collectives, work=work, skew=skew, steps=steps)


def measure(effort: Effort, tell: Tell) -> Measurements:
    """The measurements, the same on every rank; all ranks call this together.

    Raises:
        MeshError: if there is no process group, or hosts hold unequal numbers of ranks or ranks out of order.
        RankError: on every rank, if ranks differ in what they are to measure or run, or one fails.
    """
    try:
        measuring = Measuring(effort, tell)
        for _ in range(effort.num_rounds):
            measuring.run(lambda text: tell(f"{text} of {effort.num_rounds}"))
        return measuring.result()
    except AutoparError:
        raise
    except RuntimeError as error:
        raise RankError(
            f"rank {dist.get_rank()}: calibration failed: {error}; another rank may have died or may hang, "
            "its own output says why"
        ) from error


def _origin(device: torch.device) -> Origin:
    """All ranks' hosts, in the order of ranks."""
    world = dist.get_world_size()
    names: list[str] = [""] * world
    dist.all_gather_object(names, f"{socket.gethostname()}")
    return origin_of(
        names,
        date=datetime.date.today().isoformat(),
        backend="nccl" if device.type == "cuda" else "gloo",
        torch_version=torch.__version__,
        device=device_name(torch.cuda.get_device_name(device)) if device.type == "cuda" else "cpu",
        memory_bytes=_memory_nbytes(device, world // len(set(names))),
    )


def origin_of(
    names: Sequence[str], *, date: str, backend: str, torch_version: str, device: str, memory_bytes: int
) -> Origin:
    """Where ranks run whose hosts are `names`, by rank.

    Raises:
        MeshError: unless every host holds equally many ranks, and these are neighbours.
    """
    hosts = list(dict.fromkeys(names))
    per_host, rest = divmod(len(names), len(hosts))
    if rest or any(names[k] != hosts[k // per_host] for k in range(len(names))):
        counts = ", ".join(f"{names.count(host)} on {host}" for host in hosts)
        raise MeshError(
            f"hosts hold {counts} of {len(names)} ranks, or hold them out of order; start equally many on each, "
            "numbered host by host, as torchrun --nnodes N --nproc-per-node M does"
        )
    return Origin(
        date=date,
        hosts=tuple(hosts),
        num_ranks=len(names),
        backend=backend,
        torch=torch_version,
        device=device,
        memory_bytes=memory_bytes,
    )


def device_name(reported: str) -> str:
    """The preset device that CUDA's name for a GPU speaks of, or that name itself."""
    words = reported.lower().replace(" ", "")
    known = [name for name in preset_devices() if all(part in words for part in name.split("-"))]
    return max(known, key=len, default=reported)


def _memory_nbytes(device: torch.device, ranks_per_host: int) -> int:
    if device.type == "cuda":
        return int(torch.cuda.get_device_properties(device).total_memory)
    total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    limit = Path("/sys/fs/cgroup/memory.max")  # of the container, if there is one
    if limit.is_file() and (text := limit.read_text().strip()).isdigit():
        total = min(total, int(text))
    return total // ranks_per_host
