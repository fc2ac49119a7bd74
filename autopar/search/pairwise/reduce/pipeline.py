"""Which smaller graph has the same optimum? All reductions, until none finds anything.

    evaluate(reduced.problem, choice) + reduced.offset == evaluate(original, reduced.lift(choice))

for every choice that the reduced graph allows, which fits if and only if the lifted one does, and some choice that is
optimal in the original is among those lifted. Sums are exact for integers below 9e15; otherwise as float64 has them.
"""

from collections.abc import Callable
from dataclasses import dataclass
from time import monotonic

import numpy as np

from autopar.search.pairwise.problem import Ints, Pairwise
from autopar.search.pairwise.reduce.limit import drop_oversized, drop_times
from autopar.search.pairwise.reduce.rules import contract, drop_dominated, eliminate, fold, settle, tighten
from autopar.search.pairwise.reduce.tables import Follows, Tables

Rule = Callable[[Tables, int], None]
CHEAP: tuple[Rule, ...] = (tighten, settle, fold, eliminate)
FIRST_WEIGHT = 8
"""Edges and members of the first nodes that join others."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Reduced:
    """`offset`: what every choice costs less than the original's. `nodes`: of the original, that are still there;
    `options`: numbers in the original of the options still there, node by node."""

    problem: Pairwise
    offset: float
    nodes: Ints
    options: Ints
    log: tuple[Follows, ...]
    num_original: int

    def lift(self, choice: Ints) -> Ints:
        """The original's choice that a choice of the reduced graph stands for."""
        original = np.zeros(self.num_original, np.int64)
        original[self.nodes] = self.options[self.problem.first_option[:-1] + choice]
        for entry in reversed(self.log):
            entry.put(original)
        return original

    def lower(self, choice: Ints) -> Ints | None:
        """The choice that agrees with one of the original on the nodes left; None where one of these options is gone.

        Lifted again it may differ, and cost another sum: nodes taken out are decided anew.
        """
        first = self.problem.first_option
        owner = np.repeat(np.arange(len(self.nodes)), np.diff(first))
        found = np.flatnonzero(self.options == choice[self.nodes][owner])
        return found - first[:-1] if len(found) == len(self.nodes) else None


def started(problem: Pairwise) -> Tables:
    """Tables at which every rule is still to look."""
    return Tables(problem, [rule.__name__ for rule in (*CHEAP, contract, drop_dominated)])


def apply(tables: Tables, rule: Callable[..., None], stop: float = np.inf, **options: float) -> None:
    """One rule, over the nodes that have changed since it was last applied, until the time is up."""
    waiting = tables.waiting[rule.__name__]
    nodes = sorted(waiting)
    waiting.clear()
    for place, node in enumerate(nodes):
        if place % 64 == 0 and monotonic() >= stop:
            return
        if node in tables.alive:
            rule(tables, node, **options)


def finished(tables: Tables, num_original: int) -> Reduced:
    problem, nodes = tables.to_problem()
    return Reduced(
        problem=problem,
        offset=tables.offset,
        nodes=np.array(nodes, np.int64),
        options=np.concatenate([np.zeros(0, np.int64), *(tables.option[node] for node in nodes)]),
        log=tuple(tables.log),
        num_original=num_original,
    )


def reduce(problem: Pairwise, *, seconds: float | None = None) -> Reduced:
    """The smaller graph; after `seconds` the one reached by then, as exact as any.

    Raises InfeasibleError where no choice is allowed or fits.
    """
    stop = np.inf if seconds is None else monotonic() + seconds
    tables, heaviest = started(problem), FIRST_WEIGHT
    while monotonic() < stop:
        before = tables.changes
        _cheap(tables, heaviest, stop)
        drop_times(tables)
        drop_oversized(tables)
        _cheap(tables, heaviest, stop)
        apply(tables, drop_dominated, stop)
        while tables.changes == before and heaviest <= 2 * problem.num_nodes and monotonic() < stop:
            heaviest *= 4
            tables.waiting[contract.__name__] |= tables.alive
            _cheap(tables, heaviest, stop)
        if tables.changes == before:
            break
    apply(tables, tighten)
    apply(tables, settle)
    tables.certain()
    return finished(tables, problem.num_nodes)


def _cheap(tables: Tables, heaviest: float, stop: float) -> None:
    """The rules that look at a node and its edges once."""
    names = [rule.__name__ for rule in (*CHEAP, contract)]
    while any(tables.waiting[name] for name in names) and monotonic() < stop:
        for rule in CHEAP:
            apply(tables, rule)
        apply(tables, contract, heaviest=heaviest)
