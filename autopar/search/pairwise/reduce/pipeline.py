"""Which smaller graph has the same optimum? All reductions, until none finds anything.

    evaluate(reduced.problem, choice) + reduced.offset == evaluate(original, reduced.lift(choice))

for every choice that the reduced graph allows, which fits if and only if the lifted one does, and some choice that is
optimal in the original is among those lifted. Sums are exact for integers below 9e15; otherwise as float64 has them.
"""

from collections.abc import Callable
from dataclasses import dataclass
from time import monotonic

import numpy as np

from autopar.errors import InfeasibleError
from autopar.search.pairwise.problem import Ints, Pairwise
from autopar.search.pairwise.reduce.contract import contract
from autopar.search.pairwise.reduce.dominance import drop_dominated
from autopar.search.pairwise.reduce.eliminate import eliminate
from autopar.search.pairwise.reduce.fold import fold
from autopar.search.pairwise.reduce.graph import (
    ALIVE,
    CHANGES,
    CLOCK,
    COST_AT,
    LOG_TOP,
    MEMBERS,
    NO_OPTION,
    NODE,
    NONE,
    OPTIONS,
    SHORT,
    STAMP,
    Graph,
    from_problem,
    ranges,
    roomier,
    to_problem,
)
from autopar.search.pairwise.reduce.lift import replay
from autopar.search.pairwise.reduce.members import settle_members
from autopar.search.pairwise.reduce.pairs import prune_pairs
from autopar.search.pairwise.reduce.room import drop_oversized
from autopar.search.pairwise.reduce.tighten import tighten
from autopar.search.pairwise.reduce.times import drop_times

MOST_WORK = 1_000_000_000
"""Pairs of options times entries of a row: about a second. Nodes beyond are spared rules that compare all options."""

CHUNK = 100_000_000
"""As much work between two looks at the clock."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Reduced:
    problem: Pairwise
    offset: float
    """What every choice of the reduced graph costs less than the original's."""
    nodes: Ints
    """Of the original, that are still there."""
    options: Ints
    """Numbers in the original of the options still there, node by node."""
    log: Ints
    num_original: int

    def lift(self, choice: Ints) -> Ints:
        """The original's choice that a choice of the reduced graph stands for."""
        original = np.zeros(self.num_original, np.int64)
        original[self.nodes] = self.options[self.problem.first_option[:-1] + choice]
        replay(self.log, original)
        return original

    def lower(self, choice: Ints) -> Ints | None:
        """The choice that agrees with one of the original on the nodes left; None where one of these options is gone.

        Lifted again it may differ, and cost another sum: nodes taken out are decided anew.
        """
        first = self.problem.first_option
        owner = np.repeat(np.arange(len(self.nodes)), np.diff(first))
        found = np.flatnonzero(self.options == choice[self.nodes][owner])
        return found - first[:-1] if len(found) == len(self.nodes) else None


class Reduction:
    """A graph on its way: which rule last looked when, and what the limit has decided."""

    def __init__(self, problem: Pairwise) -> None:
        self.graph = from_problem(problem)
        self.limit = problem.limit
        self.spared = np.full(1, np.inf)
        self.looked: dict[str, int] = {}

    @property
    def changes(self) -> int:
        return int(self.graph.counts[CHANGES])

    def apply(self, rule: Callable[..., int], *arguments: int) -> None:
        """One rule, over what has changed since it was last applied."""
        since = self.looked.get(rule.__name__, 0)
        self.graph.counts[CLOCK] += 1
        self.looked[rule.__name__] = int(self.graph.counts[CLOCK])
        while (status := rule(self.graph, since, *arguments)) == SHORT:
            self.graph = roomier(self.graph)
        if status == NO_OPTION:
            raise self.infeasible()

    def apply_to_options(self, rule: Callable[[Graph, Ints], None], stop: float) -> None:
        """A rule that compares the options of a node with each other, until the time is up."""
        since = self.looked.get(rule.__name__, 0)
        self.graph.counts[CLOCK] += 1
        self.looked[rule.__name__] = int(self.graph.counts[CLOCK])
        node, half = self.graph.node, self.graph.half
        halves = np.flatnonzero(half[:, NODE] != NONE)
        entries = node[:, MEMBERS] + 1
        np.add.at(entries, half[halves, NODE], node[half[halves ^ 1, NODE], OPTIONS])
        work = node[:, OPTIONS] ** 2 * entries
        nodes = np.flatnonzero(
            (node[:, ALIVE] == 1) & (node[:, STAMP] >= since) & (node[:, OPTIONS] > 1) & (work <= MOST_WORK)
        )
        chunk = np.cumsum(work[nodes]) // CHUNK
        for some in np.split(nodes, np.flatnonzero(np.diff(chunk)) + 1):
            if monotonic() >= stop:
                return
            rule(self.graph, some)

    def apply_limit(self) -> None:
        """Times and options that the limit decides."""
        self.graph.counts[CLOCK] += 1
        self.require_base_fits()
        self.graph = drop_times(self.graph, self.limit)
        drop_oversized(self.graph, self.limit, self.spared)

    def require_base_fits(self) -> None:
        if np.cumsum(self.graph.base)[:-1].max(initial=0.0) > self.limit:
            raise self.infeasible()

    def infeasible(self) -> InfeasibleError:
        """The proof of it holds for every limit below what dropped options would have needed, and below the base."""
        exceeded = np.cumsum(self.graph.base)[:-1].max(initial=0.0)
        if exceeded <= self.limit and np.isinf(self.spared[0]):
            return InfeasibleError("no choice is allowed: every choice has an option or a pair of infinite cost")
        least = float(min(self.spared[0], exceeded if exceeded > self.limit else np.inf))
        return InfeasibleError(
            f"no choice fits into {self.limit:,.0f} bytes: at least {least:,.0f} are needed; raise the limit",
            least_nbytes=least,
        )

    def result(self) -> Reduced:
        problem, nodes = to_problem(self.graph, self.limit)
        graph = self.graph
        return Reduced(
            problem=problem,
            offset=float(graph.offset[0]),
            nodes=nodes,
            options=graph.option[ranges(graph.node[nodes, COST_AT], problem.num_options())],
            log=graph.log[: graph.counts[LOG_TOP]].copy(),
            num_original=len(graph.node),
        )


def reduce(problem: Pairwise, *, seconds: float | None = None) -> Reduced:
    """The smaller graph; after `seconds` the one reached by then, as exact as any."""
    stop = np.inf if seconds is None else monotonic() + seconds
    reduction = Reduction(problem)
    heaviest = 8
    while True:
        before = reduction.changes
        _cheap(reduction, heaviest, stop)
        reduction.apply_limit()
        _cheap(reduction, heaviest, stop)
        reduction.apply_to_options(drop_dominated, stop)
        reduction.apply_to_options(prune_pairs, stop)
        if monotonic() >= stop:
            break
        if reduction.changes == before:
            if heaviest > 2 * len(reduction.graph.node):
                break
            heaviest *= 4
            reduction.looked.pop("contract", None)
    reduction.apply(tighten)
    reduction.apply(settle_members)
    reduction.require_base_fits()
    return reduction.result()


def _cheap(reduction: Reduction, heaviest: int, stop: float) -> None:
    """The rules that look at a node and its edges once."""
    while True:
        before = reduction.changes
        for rule in (tighten, fold, settle_members, eliminate):
            reduction.apply(rule)
        reduction.apply(contract, heaviest)
        if reduction.changes == before or monotonic() >= stop:
            return
