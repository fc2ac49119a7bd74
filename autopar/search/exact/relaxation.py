"""What does every solution of a strategy graph take at least, memory aside, and which options and arcs can it not use?

The dual ascent answers that for a hundredth to a tenth of what the linear relaxation takes, and mostly finds a solution
that takes no more, so that its bound is the relaxation's optimum. Where it finds none, the relaxation of what the bound
leaves open is solved, a small program; where that takes more than the bound, the ascent stands still below the optimum,
and the whole relaxation is solved.
"""

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from autopar.errors import InfeasibleError
from autopar.search.exact.array_model import Answer
from autopar.search.exact.dual_ascent import Dual, dual_ascent
from autopar.search.exact.formulation import Formulation, formulate
from autopar.search.exact.reduction import Reduction, reduce
from autopar.search.graph.strategy_graph import Floats, Ints, StrategyGraph

NEAR = 1e-4
"""How near the bound, as a part of it, what a solution takes makes both the optimum."""
OPEN = 1e-3
"""Part of the bound that options and arcs may take beyond it and are in the small program."""

Extra = tuple[list[Floats], list[Floats]]
"""options[node], arcs[group]: how much more than the bound a solution takes that uses one, at least."""
Proof = tuple[float, Extra]
"""A bound, and what is beyond it."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Mixed:
    """A solution of the relaxation: how much of every option, and of every arc, is used, and what that takes."""

    seconds: float
    options: list[Floats]
    arcs: list[Floats]

    def choice(self) -> Ints:
        """The option that is used most of every node."""
        return np.array([int(used.argmax()) for used in self.options], np.int64)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Relaxed:
    """`bound`: seconds. extra: beyond it; None where neither labels nor a program proved any. mixed: a solution that
    takes no more than the bound, within a part of `NEAR`; None where enough was reached, time ended or HiGHS gave up.
    choices: to begin with."""

    bound: float
    extra: Extra | None
    mixed: Mixed | None
    choices: list[Ints]


def least_seconds(graph: StrategyGraph, cutoff: float = math.inf) -> float:
    """What every solution of a graph without a memory limit takes at least: the optimum of its linear relaxation, or
    less by a part of `NEAR`.

    cutoff: from which on it does not matter how much more that is.

    Raises InfeasibleError when no choice is compatible.
    """
    return relax(reduce(graph, replaces_arcs=False).graph, enough=cutoff).bound


def relax(graph: StrategyGraph, *, enough: float = math.inf, seconds: float | None = None) -> Relaxed:
    """The linear relaxation of a reduced graph without a memory limit, its optimum within a part of `NEAR`.

    enough: a bound that needs no better one. seconds: of time, about.

    Raises InfeasibleError when no choice is compatible.
    """
    began = time.monotonic()
    dual = dual_ascent(graph, enough, seconds)
    if dual is not None and dual.bound >= enough:
        return Relaxed(bound=dual.bound, extra=dual.extra, mixed=None, choices=[])
    if dual is None or dual.found is None:
        return _whole(graph, dual, enough, _left(seconds, began))
    choices = [dual.found[0]]
    if _is_near(dual.seconds, dual.bound):
        return Relaxed(bound=dual.bound, extra=dual.extra, mixed=_of_choice(graph, dual), choices=choices)
    mixed = _of_open(graph, dual, _left(seconds, began))
    if mixed is None:
        return _whole(graph, dual, enough, _left(seconds, began))
    return Relaxed(bound=dual.bound, extra=dual.extra, mixed=mixed, choices=[*choices, mixed.choice()])


def floor(graph: StrategyGraph) -> float:
    """What every solution costs at least: the cheapest option of every node and the cheapest pair of every edge."""
    parts = [*(node.seconds for node in graph.nodes), *(edge.seconds for edge in graph.edges)]
    return sum(float(seconds.min()) for seconds in parts)


def incompatible() -> InfeasibleError:
    return InfeasibleError(
        "no choice of options is compatible over all edges and redistributions (memory aside); allow more of them"
    )


def _is_near(seconds: float, bound: float) -> bool:
    return seconds - bound <= NEAR * abs(bound)


def _left(seconds: float | None, began: float) -> float | None:
    return None if seconds is None else seconds - (time.monotonic() - began)


def _of_choice(graph: StrategyGraph, dual: Dual) -> Mixed:
    assert dual.found is not None
    choice, arcs = dual.found
    return Mixed(
        seconds=dual.seconds,
        options=[_at(len(node.seconds), option) for node, option in zip(graph.nodes, choice, strict=True)],
        arcs=[_at(len(group.arc_seconds), used) for group, used in zip(graph.groups, arcs, strict=True)],
    )


def _at(num: int, places: Ints | int, values: Floats | float = 1.0) -> Floats:
    out = np.zeros(num)
    out[places] = values
    return out


def _of_open(graph: StrategyGraph, dual: Dual, seconds: float | None) -> Mixed | None:
    """A solution of what takes hardly more than the bound; None where none is near it."""
    masks = [[part <= OPEN * abs(dual.bound) for part in parts] for parts in dual.extra]
    try:
        rest = reduce(graph, options=masks[0], arcs=masks[1])
    except InfeasibleError:
        return None
    linear = formulate(rest.graph)
    answer = linear.model.solve(relaxed=True, seconds=seconds)
    if answer.values is None or not _is_near(answer.objective / linear.scale, dual.bound):
        return None
    return _of_values(graph, linear, answer, rest.options, rest.arcs)


def _of_values(
    graph: StrategyGraph, linear: Formulation, answer: Answer, options: Sequence[Ints], arcs: Sequence[Ints]
) -> Mixed:
    """In the numbers of a graph of which a program knows these options and arcs."""
    assert answer.values is not None
    values = answer.values
    return Mixed(
        seconds=answer.objective / linear.scale,
        options=[
            _at(len(node.seconds), kept, values[columns])
            for node, kept, columns in zip(graph.nodes, options, linear.options, strict=True)
        ],
        arcs=[
            _at(len(group.arc_seconds), kept[: len(columns)], values[columns])
            for group, kept, columns in zip(graph.groups, arcs, linear.arcs, strict=True)
        ],
    )


def _whole(graph: StrategyGraph, dual: Dual | None, enough: float, seconds: float | None) -> Relaxed:
    """By a linear program."""
    rest = reduce(graph)
    linear = formulate(rest.graph)
    cutoff = None if math.isinf(enough) else enough * linear.scale
    # without perturbation costs are those by which HiGHS ends at the cutoff
    answer = linear.model.solve(relaxed=True, seconds=seconds, cutoff=cutoff, perturbs=cutoff is None)
    if answer.infeasible:
        raise incompatible()
    is_bound = answer.optimal or (cutoff is not None and answer.bound >= cutoff)
    bound = max(answer.bound / linear.scale if is_bound else -math.inf, floor(graph))
    proofs: list[Proof] = [] if dual is None else [(dual.bound, dual.extra)]
    if answer.optimal and answer.reduced_costs is not None:
        proofs.append((bound, _of_rest(graph, rest, linear.least_extra(answer.reduced_costs))))
    bound = max([bound, *(proved for proved, _ in proofs)])
    mixed, choices = None, []
    if answer.values is not None and answer.optimal:
        mixed = _of_values(graph, linear, answer, rest.options, rest.arcs)
        choices.append(mixed.choice())
    if dual is not None and dual.found is not None:
        choices.append(dual.found[0])
    return Relaxed(bound=bound, extra=_beyond(bound, proofs), mixed=mixed, choices=choices)


def _of_rest(graph: StrategyGraph, rest: Reduction, extra: Extra) -> Extra:
    """Of the whole graph, nothing for what was left out."""
    options = [
        _at(len(node.seconds), kept, beyond)
        for node, kept, beyond in zip(graph.nodes, rest.options, extra[0], strict=True)
    ]
    arcs = [
        _at(len(group.arc_seconds), kept[: len(beyond)], beyond)  # a tensor that nobody reads has no columns
        for group, kept, beyond in zip(graph.groups, rest.arcs, extra[1], strict=True)
    ]
    return options, arcs


def _beyond(bound: float, proofs: Sequence[Proof]) -> Extra | None:
    """What all proofs say beyond a bound that is at least as high as theirs."""
    if not proofs:
        return None

    def most(parts: Sequence[Floats]) -> Floats:
        own = [part - (bound - proved) for part, (proved, _) in zip(parts, proofs, strict=True)]
        return np.asarray(np.maximum.reduce([*own, np.zeros_like(own[0])]))

    options = [most(parts) for parts in zip(*(extra[0] for _, extra in proofs), strict=True)]
    arcs = [most(parts) for parts in zip(*(extra[1] for _, extra in proofs), strict=True)]
    return options, arcs
