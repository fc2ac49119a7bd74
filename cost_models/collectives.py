"""How long does a collective take, and how many bytes does a rank send? The cheapest algorithm of the library, named.

`nbytes` is the full tensor: the result of an all-gather or gather, the input of a reduce-scatter or scatter, the
tensor of an all-reduce, broadcast or reduce, the local tensor of an all-to-all, the message of a send/recv (every rank
sends to its neighbour). A form is one algorithm under one protocol, `alpha + nbytes * beta` (`algorithms` has the
formulas); the time is the least of them, so it is concave and piecewise linear in `nbytes`. The call's `launch` is
part of alpha.

That the library takes the cheapest is its own rule too: NCCL's tuner takes the least of the same kind of forms.

In a training step ranks have computed since they last met, and a collective waits for the last. If each is late by an
exponential time of mean `skew`, the last of n is late by skew H(n), where H(n) = 1 + 1/2 + ... + 1/n. A rank's own mean
is in the time of its computation already, so a step's collective waits skew (H(n) - 1), whatever it sends.
"""

import itertools
import math
from collections.abc import Iterator, Sequence
from functools import lru_cache
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from autopar.cost_models.algorithms import ALGORITHMS, LIBRARIES, Hop, RankGroup
from autopar.cost_models.links import Crossing, Links
from autopar.errors import ArgumentError
from autopar.values.choices import near
from autopar.values.link import Line

KINDS = tuple(ALGORITHMS)


class Form(NamedTuple):
    """`alpha_seconds + nbytes * seconds_per_byte` of one algorithm under one protocol, for `above` to `up_to` bytes.

    `floor`: what the least message of that range takes in the range below; no larger one takes less.
    """

    algorithm: str
    protocol: str
    alpha_seconds: float
    seconds_per_byte: float
    above: float = 0.0
    up_to: float = math.inf
    floor: float = 0.0

    @property
    def name(self) -> str:
        return f"{self.algorithm} {self.protocol}" if self.protocol else self.algorithm

    def seconds(self, nbytes: float) -> float:
        return max(self.floor, self.alpha_seconds + nbytes * self.seconds_per_byte)


@lru_cache(maxsize=65536)
def algorithms(kind: str, links: Links) -> tuple[Form, ...]:
    """Every form that the library has for a collective over a group; `none`, at no cost, for a group of one.

    Raises:
        ArgumentError: if `kind` is not one of `KINDS`.
    """
    _require_kind(kind)
    if links.size == 1:
        return (Form("none", "", 0.0, 0.0),)
    return tuple(form for name in LIBRARIES[links.library][kind] for form in _forms(kind, name, links))


@lru_cache(maxsize=65536)
def cheapest(kind: str, links: Links) -> tuple[Form, ...]:
    """Those of `algorithms` that are the cheapest for some `nbytes`, from small to large messages.

    All of them, if some hold for a range of sizes only.

    Raises:
        ArgumentError: if `kind` is not one of `KINDS`.
    """
    every = algorithms(kind, links)
    if any(form.above > 0 or form.up_to < math.inf for form in every):
        return every
    rest = sorted(every, key=lambda form: (form.alpha_seconds, form.seconds_per_byte))
    hull: list[Form] = []
    for form in rest:
        if hull and form.seconds_per_byte >= hull[-1].seconds_per_byte:
            continue
        # The middle one of three lines is never the lowest if the outer two meet before it comes below the first.
        while len(hull) > 1 and _meet(hull[-2], form) <= _meet(hull[-2], hull[-1]):
            hull.pop()
        hull.append(form)
    return tuple(hull)


def collective_seconds(kind: str, nbytes: float, links: Links) -> tuple[float, str]:
    """Seconds of the cheapest form, and its name.

    Raises:
        ArgumentError: if `kind` is not one of `KINDS`, or `nbytes` is negative.
    """
    _require_nbytes(kind, nbytes)
    return least(cheapest(kind, links), nbytes)


def skew_seconds(links: Links) -> float:
    """Seconds that a group of ranks that computed waits for the last of them, by the latest level that it crosses."""
    latest = max((crossing.level.skew for crossing in links.crossings), default=0.0)
    return latest * sum(1 / rank for rank in range(2, links.size + 1)) if latest else 0.0


def shared(forms: Sequence[Form], nbytes: int, part: float, share: float) -> float:
    """Seconds of a message with so much of its start: what any algorithm that goes so far takes beyond the least that
    the bytes take, at least. Of a larger message it is no less, where the cheapest form may take less than its range
    begins with."""
    least_byte = min(form.seconds_per_byte for form in forms) / part
    start = min(
        form.alpha_seconds + nbytes * (form.seconds_per_byte / part - least_byte)
        for form in forms
        if form.up_to >= nbytes
    )
    return nbytes * least_byte + share * start


@lru_cache(maxsize=65536)
def cheapest_in_step(kind: str, links: Links) -> tuple[Form, ...]:
    """`cheapest`, each with what ranks that computed wait for each other. A send has none: who receives waits for its
    sender, which is what a pipeline's schedule is simulated for.

    Raises:
        ArgumentError: if `kind` is not one of `KINDS`.
    """
    waits = 0.0 if kind == "send_recv" else skew_seconds(links)
    return tuple(
        form._replace(alpha_seconds=form.alpha_seconds + waits, floor=form.floor + waits)
        for form in cheapest(kind, links)
    )


def least(forms: tuple[Form, ...], nbytes: float, part: float = 1.0) -> tuple[float, str]:
    """Seconds and name of the cheapest of some forms, for callers that hold on to `cheapest`, where messages reach
    `part` of the bandwidth: other traffic slows bytes, not the latency of a hop."""
    seconds, form = _least(forms, nbytes, part)
    return seconds, form.name


class Transfer(NamedTuple):
    """Seconds of messages: latencies, and bytes at the whole bandwidth."""

    latency_seconds: float
    wire_seconds: float

    def plus(self, other: "Transfer") -> "Transfer":
        return Transfer(self.latency_seconds + other.latency_seconds, self.wire_seconds + other.wire_seconds)

    def times(self, count: float) -> "Transfer":
        return Transfer(count * self.latency_seconds, count * self.wire_seconds)

    def seconds(self, part: float) -> float:
        """Where they reach `part` of the bandwidth."""
        return self.latency_seconds + self.wire_seconds / part


NOTHING_SENT = Transfer(0.0, 0.0)


def transfer(kind: str, nbytes: float, links: Links, part: float) -> Transfer:
    """A step's collective in the form that is the cheapest where it reaches `part` of the bandwidth.

    Raises:
        ArgumentError: if `kind` is not one of `KINDS`, or `nbytes` is negative.
    """
    _require_nbytes(kind, nbytes)
    seconds, form = _least(cheapest_in_step(kind, links), nbytes, part)
    wire = nbytes * form.seconds_per_byte
    return Transfer(seconds - wire / part, wire)


def _least(forms: tuple[Form, ...], nbytes: float, part: float) -> tuple[float, Form]:
    best, seconds = forms[0], math.inf
    for form in forms:
        other = max(form.floor, form.alpha_seconds + nbytes * form.seconds_per_byte / part)
        if other < seconds and form.above <= nbytes <= form.up_to:
            best, seconds = form, other
    return seconds, best


def collective_seconds_array(kind: str, nbytes: npt.NDArray[np.float64], links: Links) -> npt.NDArray[np.float64]:
    """`collective_seconds` of every entry of `nbytes`, without the names.

    Raises:
        ArgumentError: if `kind` is not one of `KINDS`, or an entry is negative.
    """
    nbytes = np.asarray(nbytes, dtype=np.float64)
    if not (nbytes >= 0).all():
        raise ArgumentError(f"{kind} of {nbytes.min()} bytes: a message has 0 bytes or more")
    forms = cheapest(kind, links)
    result = np.full(nbytes.shape, math.inf)
    for form in forms:
        holds = (form.above <= nbytes) & (nbytes <= form.up_to)
        own = np.maximum(form.floor, form.alpha_seconds + nbytes * form.seconds_per_byte)
        result = np.where(holds, np.minimum(result, own), result)
    return result


def wire_bytes(kind: str, nbytes: float, size: int) -> float:
    """Bytes that a rank of a group of `size` must receive, or of a scatter or reduce send, unless switches reduce.

    An all-reduce in the network sends at least `nbytes` instead. `nbytes` as in the module's text.

    Raises:
        ArgumentError: if `kind` is not one of `KINDS`.
    """
    _require_kind(kind)
    if size == 1:
        return 0.0
    if kind == "all_reduce":
        return 2 * (size - 1) / size * nbytes
    if kind in ("broadcast", "reduce", "send_recv"):
        return float(nbytes)
    return (size - 1) / size * nbytes


def _forms(kind: str, algorithm: str, links: Links) -> list[Form]:
    lines = [_lines(algorithm, kind, crossing) for crossing in links.crossings]
    if any(not one for one in lines):
        return []
    found = []
    for protocol, chosen in _on_every_level(lines):
        hops = tuple(_hop(line, crossing) for line, crossing in zip(chosen, links.crossings, strict=True))
        cost = ALGORITHMS[kind][algorithm](RankGroup(links.size, hops, links.regular))
        above, up_to = max(line.above for line in chosen), min(line.up_to for line in chosen)
        if cost is not None and above < up_to:
            launch = max(line.launch for line in chosen)
            found.append(Form(algorithm, protocol, launch + cost.alpha_seconds, cost.seconds_per_byte, above, up_to))
    found.sort(key=lambda form: form.above)
    for position, form in enumerate(found):
        below = [other.seconds(form.above) for other in found[:position] if other.above < form.above <= other.up_to]
        found[position] = form._replace(floor=min(below, default=0.0))
    return found


def _on_every_level(lines: list[dict[str, Line]]) -> Iterator[tuple[str, tuple[Line, ...]]]:
    """Protocols, each with its line of every level. A message keeps its protocol on its way.

    Levels that were measured apart may have no protocol in common; then each of one level goes with the fastest of the
    others. Lines that hold for ranges of sizes go with all of the others, because each level has its own ranges.
    """
    common = [name for name in lines[0] if all(name in one for one in lines)]
    if any(line.above > 0 for one in lines for line in one.values()):
        for names in itertools.product(*lines):
            words = ", ".join(dict.fromkeys(filter(None, names)))
            yield words, tuple(one[name] for one, name in zip(lines, names, strict=True))
    elif common:
        yield from ((name, tuple(one[name] for one in lines)) for name in common)
    else:
        for name in dict.fromkeys(name for one in lines for name in one):
            fastest = (one.get(name) or max(one.values(), key=lambda line: line.bandwidth) for one in lines)
            yield name, tuple(fastest)


def _lines(algorithm: str, kind: str, crossing: Crossing) -> dict[str, Line]:
    """Protocol -> line of one level; none if the algorithm needs switches that reduce and the level has none."""
    level = crossing.level
    if algorithm == "in_network" or (algorithm == "in_network_tree" and level.scope == "node"):
        return {} if level.in_network is None else {"": level.in_network}
    # What NVLSTree sends between nodes is the tree's.
    return dict(level.lines_of("tree" if algorithm == "in_network_tree" else algorithm, kind, crossing.members))


def _hop(line: Line, crossing: Crossing) -> Hop:
    return Hop(
        alpha=line.alpha,
        bandwidth=line.bandwidth / crossing.share,
        members=crossing.members,
        lanes=crossing.lanes,
        hops=crossing.hops,
        peers=crossing.peers,
        in_node=crossing.level.scope == "node",
    )


def _meet(a: Form, b: Form) -> float:
    """Bytes from which b is as cheap as a; a has the smaller alpha and the greater seconds a byte."""
    return (b.alpha_seconds - a.alpha_seconds) / (a.seconds_per_byte - b.seconds_per_byte)


def _require_kind(kind: str) -> None:
    if kind not in KINDS:
        raise ArgumentError(f"collective {kind!r} is unknown; choose one of {', '.join(KINDS)}{near(kind, KINDS)}")


def _require_nbytes(kind: str, nbytes: float) -> None:
    if not nbytes >= 0:
        raise ArgumentError(f"{kind} of {nbytes} bytes: a message has 0 bytes or more")
