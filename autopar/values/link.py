"""What is one level of links between devices? Figures in seconds, bytes and bytes/s.

A message of `nbytes` over a link takes `alpha + nbytes / bandwidth` seconds, a call `launch` once. Where one such line
does not fit, a level has several: a library sends small messages by a protocol of little latency and little bandwidth
(NCCL's LL, LL128, Simple), a calibration measures each collective apart. `LinkLevel.lines_of` says which of them hold
where.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from autopar.errors import ClusterError
from autopar.values.choices import near

SCOPES = ("node", "network")


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """`alpha` seconds a message and hop, `bandwidth` bytes/s of a link, `launch` seconds a call.

    protocol: its name in reports, "" where there is but one. algorithm, kind: of which collective algorithm and of
    which collective it holds, "" of all. members: of groups with so many ranks side by side at the level, 0 of all.
    above, up_to: of which message sizes, in bytes as the collective counts them.
    """

    alpha: float
    bandwidth: float
    launch: float = 0.0
    protocol: str = ""
    algorithm: str = ""
    kind: str = ""
    members: int = 0
    above: float = 0.0
    up_to: float = math.inf

    def __post_init__(self) -> None:
        what = " ".join(word for word in ("line", self.protocol, self.algorithm, self.kind) if word)
        require_positive(self.bandwidth, f"{what}: bandwidth")
        require_not_negative(self.alpha, f"{what}: alpha")
        require_not_negative(self.launch, f"{what}: launch")
        if self.members < 0:
            raise ClusterError(f"{what}: members {self.members} must be 0, for groups of any size, or more")
        if not 0 <= self.above < self.up_to:
            raise ClusterError(
                f"{what}: above {self.above} and up_to {self.up_to} enclose no message size; above must be the smaller"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkLevel:
    """How the `size` groups inside one group of the level above are joined.

    `alpha`, `bandwidth`, `launch`: its general line, see `Line`; `lines`: further ones. `devices_per_link` devices
    share a link: all of them send at once in a step, so each has `bandwidth / devices_per_link`.

    scope: "node" (a switch or bus of one machine, where a library's tree is a chain) or "network". `line_rate` bytes/s
    that the link is built for. `in_network`: a line on which switches reduce (NVLink SHARP, InfiniBand SHARP). skew:
    seconds by which a rank that computed comes late to a collective, on average.
    """

    name: str
    size: int
    alpha: float
    bandwidth: float
    launch: float = 0.0
    devices_per_link: int = 1
    scope: str = "network"
    line_rate: float | None = None
    lines: tuple[Line, ...] = ()
    in_network: Line | None = None
    skew: float = 0.0
    sources: tuple[tuple[str, str], ...] = ()

    def __post_init__(self) -> None:
        where = f"link level {self.name}"
        for field in ("size", "devices_per_link"):
            if getattr(self, field) < 1:
                raise ClusterError(f"{where}: {field} {getattr(self, field)} must be at least 1")
        require_positive(self.bandwidth, f"{where}: bandwidth")
        require_not_negative(self.alpha, f"{where}: alpha")
        require_not_negative(self.launch, f"{where}: launch")
        require_not_negative(self.skew, f"{where}: skew")
        if self.scope not in SCOPES:
            raise ClusterError(
                f"{where}: scope {self.scope!r} is none of {', '.join(SCOPES)}{near(self.scope, SCOPES)}"
            )
        for algorithm, kind, members in {(line.algorithm, line.kind, line.members) for line in self.lines}:
            own = [x for x in self.lines if (x.algorithm, x.kind, x.members) == (algorithm, kind, members)]
            _require_every_size(own, f"{where}: lines of {algorithm or 'any algorithm'}, {kind or 'any collective'}")
        if self.line_rate is None:
            return
        require_positive(self.line_rate, f"{where}: line_rate")
        fastest = max(line.bandwidth for line in self.all_lines())
        if fastest > self.line_rate:
            raise ClusterError(
                f"{where}: bandwidth {fastest:.4g} bytes/s is above its line rate {self.line_rate:.4g}; "
                "no message can be faster than the link, correct one of the two"
            )

    @property
    def bandwidth_per_device(self) -> float:
        return self.bandwidth / self.devices_per_link

    def all_lines(self) -> tuple[Line, ...]:
        general = Line(alpha=self.alpha, bandwidth=self.bandwidth, launch=self.launch)
        return (general, *self.lines, *(() if self.in_network is None else (self.in_network,)))

    def lines_of(self, algorithm: str, kind: str, members: int = 0) -> Mapping[str, Line]:
        """Protocol -> line for an algorithm of a collective in groups of `members`: those that fit most specially.

        A line for the collective counts more than one for the size of the group, that more than one for the algorithm.
        The general line, protocol "", is always among those that fit least.
        """
        fitting = [
            (4 * bool(line.kind) + 2 * bool(line.members) + bool(line.algorithm), line)
            for line in (Line(alpha=self.alpha, bandwidth=self.bandwidth, launch=self.launch), *self.lines)
            if line.algorithm in ("", algorithm) and line.kind in ("", kind) and line.members in (0, members)
        ]
        best = max(score for score, _ in fitting)
        return {line.protocol: line for score, line in fitting if score == best}


def require_positive(value: float, what: str) -> None:
    if not 0 < value < math.inf:
        raise ClusterError(f"{what} {value} must be positive and finite")


def require_not_negative(value: float, what: str) -> None:
    if not 0 <= value < math.inf:
        raise ClusterError(f"{what} {value} must be finite and not negative")


def _require_every_size(lines: Sequence[Line], where: str) -> None:
    end = 0.0
    for line in sorted(lines, key=lambda line: line.above):
        if line.above > end:
            break
        end = max(end, line.up_to)
    if end < math.inf:
        raise ClusterError(f"{where}: no line holds for messages above {end:g} bytes; together they must hold for all")
