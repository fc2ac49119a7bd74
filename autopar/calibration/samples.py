"""What did a calibration see? Values only: seconds of collectives and of operations, and where they were measured."""

import math
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class CollectiveSample:
    """`seconds` of a collective of `nbytes` (counted as in `cost_models.collectives`) in groups of `group_size`.

    level: 0 for groups of one rank a host, if there are several hosts, and one more for groups inside a host. None for
    the group of all ranks of several hosts.
    """

    kind: str
    level: int | None
    group_size: int
    nbytes: int
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class SkewSample:
    """`seconds` that computation and a collective of `kind`, one after the other, take beyond the two alone, a negative
    number where they take less. level, group_size: as in `CollectiveSample`. compute_seconds: of the computation."""

    kind: str
    level: int
    group_size: int
    compute_seconds: float
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkSample:
    """`seconds` of one operation, forward and backward, while all ranks run it.

    product: (rows, columns, inner) of a matrix product, whose backward is two of as many flops and bytes; attention:
    (batch, heads, rows, head) of causal attention; both () of a memory-bound operation. The bytes are those that
    planning counts for each pass.
    """

    name: str
    dtype: str
    product: tuple[int, ...] = ()
    attention: tuple[int, ...] = ()
    nbytes: float
    backward_nbytes: float
    seconds: float

    @property
    def flops(self) -> float:
        """Of the forward pass."""
        if self.attention:
            return 2.0 * math.prod(self.attention) * self.attention[2]
        return 2.0 * math.prod(self.product) if self.product else 0.0

    @property
    def subject(self) -> str:
        """What kind of operation it is."""
        if self.attention:
            return f"{self.dtype} attention"
        return f"{self.dtype} products" if self.product else "memory-bound"


@dataclass(frozen=True, slots=True, kw_only=True)
class StepSample:
    """`seconds` of a training step of `reference_steps` with so many samples on the slowest rank, while all take it.

    size, kind: which of its decoders, and what of the step.
    """

    batch: int
    seconds: float
    size: str = "small"
    kind: str = "whole"


@dataclass(frozen=True, slots=True, kw_only=True)
class Origin:
    """Where and with what it was measured."""

    date: str
    hosts: tuple[str, ...]
    num_ranks: int
    backend: str
    torch: str
    device: str
    memory_bytes: int

    @property
    def ranks_per_host(self) -> int:
        return self.num_ranks // len(self.hosts)

    @property
    def level_sizes(self) -> tuple[int, ...]:
        """Hosts, if there are several, and ranks of one host, if there are several."""
        sizes = tuple(size for size in (len(self.hosts), self.ranks_per_host) if size > 1)
        return sizes or (1,)

    def __str__(self) -> str:
        where = self.hosts[0] if len(self.hosts) == 1 else f"{len(self.hosts)} hosts, {self.hosts[0]} the first"
        return f"autopar calibrate, {self.date}, {where}, torch {self.torch}, {self.backend}, {self.num_ranks} ranks"


@dataclass(frozen=True, slots=True, kw_only=True)
class Measurements:
    origin: Origin
    collectives: tuple[CollectiveSample, ...]
    work: tuple[WorkSample, ...]
    skew: tuple[SkewSample, ...] = ()
    steps: tuple[StepSample, ...] = ()
