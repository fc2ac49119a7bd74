"""What does a choice of options really cost? The cheapest arcs for it, exactly, and whether it fits the memory.

The mixed program leaves more in its solutions than they need: free cycles of arcs, and, where its arcs are continuous,
halves of two trees. Every solution that leaves the solver is completed here.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from autopar.search.exact.formulation import Formulation
from autopar.search.exact.steiner import Metric, arborescence, cheapest_arcs, metric
from autopar.search.graph.strategy_graph import Floats, Group, Ints, Solution, StrategyGraph, evaluate, usage

DEARER = (1.5, 3.0, 10.0)
"""How much more than their price bytes of arcs cost, in turn, until arcs fit."""
MAX_TERMINALS = 8
"""Beyond so many different wanted vertices the union of shortest paths is taken instead of the exact tree."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Completed:
    """A choice with arcs, its exact seconds, and whether it stays within the limit at every moment."""

    choice: Ints
    arcs: tuple[Ints, ...]
    seconds: float
    fits: bool

    def solution(self, bound: float) -> Solution:
        return Solution(
            choice=self.choice, arcs=self.arcs, seconds=self.seconds, bound=bound, status="one of a mixture"
        )


def complete(
    graph: StrategyGraph, metrics: Sequence[Metric], choice: Ints, proposed: Sequence[Ints] | None = None
) -> Completed | None:
    """The choice with the cheapest arcs; where these do not fit, with the `proposed` ones where arcs take memory.

    None when the choice is not compatible.
    """
    ends = [terminals(group, choice) for group in graph.groups]
    ways = list(zip(metrics, ends, strict=True))
    try:
        arcs = [tree(m, root, wanted) for m, (root, wanted) in ways]
    except ValueError:
        return None
    fits = within(graph, choice, arcs)
    if not fits and proposed is not None and graph.memory is not None:
        for i in {term.group for term in graph.memory.arcs}:
            try:
                arcs[i] = arborescence(graph.groups[i], proposed[i], *ends[i])
            except ValueError:
                return None
        fits = within(graph, choice, arcs)
    seconds = evaluate(graph, choice, tuple(arcs))
    return Completed(choice=choice, arcs=tuple(arcs), seconds=seconds, fits=fits) if np.isfinite(seconds) else None


def lean(graph: StrategyGraph, metrics: Sequence[Metric], choice: Ints, prices: Floats) -> Completed | None:
    """The choice with the arcs that are cheapest where their bytes cost more, and more, until they fit; else None.

    prices: of memory, seconds a byte by moment. What a program splits in halves between fast arcs and small ones is
    hardly more than the limit allows.
    """
    assert graph.memory is not None
    extra: dict[int, Floats] = {}
    for term in graph.memory.arcs:
        extra[term.group] = extra.get(term.group, 0.0) + term.nbytes * float(term.coefficient @ prices)
    for times in DEARER:
        own = list(metrics)
        for i, seconds in extra.items():
            if seconds.any():
                own[i] = metric(replace(graph.groups[i], arc_seconds=graph.groups[i].arc_seconds + times * seconds))
        if (found := complete(graph, own, choice)) is not None and found.fits:
            return found
    return None


def terminals(group: Group, choice: Ints) -> tuple[int, set[int]]:
    """The vertex that is given and those that are wanted under a choice."""
    wanted = {int(c.wants[choice[c.node]]) for c in group.consumers} - {-1}
    return int(group.gives[choice[group.producer]]), wanted


def tree(metric: Metric, root: int, wanted: set[int]) -> Ints:
    """The cheapest arcs, exact up to `MAX_TERMINALS` different wanted vertices."""
    if len(wanted - {root}) <= MAX_TERMINALS:
        return cheapest_arcs(metric, root, wanted)
    union = sorted({arc for vertex in wanted for arc in metric.path(root, vertex)})
    return arborescence(metric.group, np.array(union, np.int64), root, wanted)


def within(graph: StrategyGraph, choice: Ints, arcs: Sequence[Ints]) -> bool:
    """Whether memory stays within the limit at every moment."""
    return graph.memory is None or bool((usage(graph, choice, tuple(arcs)) <= graph.memory.limit).all())


def better(best: Completed | None, other: Completed | None) -> Completed | None:
    """The cheaper of two that fit."""
    if other is None or not other.fits:
        return best
    return other if best is None or other.seconds < best.seconds else best


def loose_groups(graph: StrategyGraph, program: Formulation, values: Floats, found: Completed | None) -> set[int]:
    """Groups whose continuous arcs made the solution cheaper, or smaller, than any set of arcs is."""
    weighted = set() if graph.memory is None else {term.group for term in graph.memory.arcs}
    misfit = found is None or not found.fits
    loose = set()
    for i, columns in enumerate(program.arcs):
        if not columns.size:
            continue
        if i in weighted and misfit:
            loose.add(i)
        elif found is not None:
            paid = float(values[columns] @ graph.groups[i].arc_seconds)
            exact = float(graph.groups[i].arc_seconds[found.arcs[i]].sum())
            if exact > paid + 1e-7 * abs(found.seconds):
                loose.add(i)
    return loose
