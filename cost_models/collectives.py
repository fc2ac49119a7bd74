"""How long does a collective take, and how many bytes does a rank send? The cheapest algorithm of the library, named.

`nbytes` is the full tensor: the result of an all-gather or gather, the input of a reduce-scatter or scatter, the
tensor of an all-reduce, broadcast or reduce, the local tensor of an all-to-all, the message of a send/recv (every rank
sends to its neighbour). A form is one algorithm under one protocol, `alpha + nbytes * beta` (`algorithms` has the
formulas); the time is the least of them, so it is concave and piecewise linear in `nbytes`. The call's `launch` is
part of alpha.

That the library takes the cheapest is its own rule too: NCCL's tuner takes the least of the same kind of forms.
"""

from functools import lru_cache
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from autopar.cost_models.algorithms import ALGORITHMS, LIBRARIES, Group, Hop
from autopar.cost_models.links import Crossing, Links
from autopar.errors import ArgumentError
from autopar.link import Line

KINDS = tuple(ALGORITHMS)


class Form(NamedTuple):
    """`alpha_seconds + nbytes * seconds_per_byte` of one algorithm under one protocol."""

    algorithm: str
    protocol: str
    alpha_seconds: float
    seconds_per_byte: float

    @property
    def name(self) -> str:
        return f"{self.algorithm} {self.protocol}" if self.protocol else self.algorithm

    def seconds(self, nbytes: float) -> float:
        return self.alpha_seconds + nbytes * self.seconds_per_byte


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

    Raises:
        ArgumentError: if `kind` is not one of `KINDS`.
    """
    rest = sorted(algorithms(kind, links), key=lambda form: (form.alpha_seconds, form.seconds_per_byte))
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
    if not nbytes >= 0:
        raise ArgumentError(f"{kind} of {nbytes} bytes: a message has 0 bytes or more")
    return least(cheapest(kind, links), nbytes)


def least(forms: tuple[Form, ...], nbytes: float) -> tuple[float, str]:
    """Seconds and name of the cheapest of some forms, for callers that hold on to `cheapest`."""
    best = forms[0]
    seconds = best.alpha_seconds + nbytes * best.seconds_per_byte
    for form in forms[1:]:
        other = form.alpha_seconds + nbytes * form.seconds_per_byte
        if other < seconds:
            best, seconds = form, other
    return seconds, best.name


def collective_seconds_array(kind: str, nbytes: npt.NDArray[np.float64], links: Links) -> npt.NDArray[np.float64]:
    """`collective_seconds` of every entry of `nbytes`, without the names.

    Raises:
        ArgumentError: if `kind` is not one of `KINDS`, or an entry is negative.
    """
    nbytes = np.asarray(nbytes, dtype=np.float64)
    if not (nbytes >= 0).all():
        raise ArgumentError(f"{kind} of {nbytes.min()} bytes: a message has 0 bytes or more")
    forms = cheapest(kind, links)
    result = forms[0].alpha_seconds + nbytes * forms[0].seconds_per_byte
    for form in forms[1:]:
        result = np.minimum(result, form.alpha_seconds + nbytes * form.seconds_per_byte)
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
    for protocol in dict.fromkeys(name for one in lines for name in one):
        chosen = [one.get(protocol) or one.get("") or max(one.values(), key=lambda x: x.bandwidth) for one in lines]
        hops = tuple(_hop(line, crossing) for line, crossing in zip(chosen, links.crossings, strict=True))
        cost = ALGORITHMS[kind][algorithm](Group(links.size, hops, links.regular))
        if cost is not None:
            launch = max(line.launch for line in chosen)
            found.append(Form(algorithm, protocol, launch + cost.alpha_seconds, cost.seconds_per_byte))
    return found


def _lines(algorithm: str, kind: str, crossing: Crossing) -> dict[str, Line]:
    """Protocol -> line of one level; none if the algorithm needs switches that reduce and the level has none."""
    level = crossing.level
    if algorithm == "in_network" or (algorithm == "in_network_tree" and level.scope == "node"):
        return {} if level.in_network is None else {"": level.in_network}
    # What NVLSTree sends between nodes is the tree's.
    return dict(level.lines_of("tree" if algorithm == "in_network_tree" else algorithm, kind))


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
        raise ArgumentError(f"collective {kind!r} is unknown; choose one of {', '.join(KINDS)}")
