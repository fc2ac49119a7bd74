"""What is the optimum of a small strategy graph, by trying everything? The oracle of every other solver.

All choices of options, and for each choice all sets of arcs of every group in which arcs matter for memory; elsewhere
the cheapest set of arcs, found by a search over sets of reached vertices that shares nothing with the solvers.
"""

import heapq
import itertools
import math

import numpy as np

from autopar.errors import InfeasibleError
from autopar.search.graph.strategy_graph import Group, Ints, Solution, StrategyGraph, evaluate, usage

MAX_CHOICES = 200_000
MAX_ARC_SETS = 4_096


def solve(graph: StrategyGraph) -> Solution:
    """The exact optimum; `seconds` equals `bound`.

    Raises ValueError for a graph that is too large to enumerate; InfeasibleError, with the `least_nbytes` that would do
    where only the memory limit stands in the way.
    """
    num_choices = math.prod(len(node.seconds) for node in graph.nodes)
    if num_choices > MAX_CHOICES:
        raise ValueError(f"{num_choices} choices are too many to enumerate; at most {MAX_CHOICES}")
    weighted = {term.group for term in graph.memory.arcs} if graph.memory is not None else set()
    best: tuple[float, Ints, tuple[Ints, ...]] | None = None
    least = math.inf
    limit = math.inf if graph.memory is None else graph.memory.limit
    cache: dict[tuple[int, int, frozenset[int]], list[Ints]] = {}
    for options in itertools.product(*(range(len(node.seconds)) for node in graph.nodes)):
        choice = np.array(options, np.int64)
        per_group = []
        for i, group in enumerate(graph.groups):
            root = int(group.gives[choice[group.producer]])
            wanted = frozenset(int(c.wants[choice[c.node]]) for c in group.consumers) - {-1}
            if (i, root, wanted) not in cache:
                sets = arc_sets(group, root, wanted) if i in weighted else cheapest_set(group, root, wanted)
                cache[i, root, wanted] = sets
            per_group.append(cache[i, root, wanted])
        for arcs in itertools.product(*per_group):
            seconds = evaluate(graph, choice, arcs)
            if not math.isfinite(seconds):
                continue
            peak = float(usage(graph, choice, arcs).max(initial=-math.inf))
            least = min(least, peak)
            if peak <= limit and (best is None or seconds < best[0]):
                best = (seconds, choice, arcs)
    if best is None:
        if not math.isfinite(least):
            raise InfeasibleError("no choice of options is compatible")
        raise InfeasibleError(f"no choice fits: limit {limit} bytes, least {least} bytes", least_nbytes=least)
    return Solution(choice=best[1], arcs=best[2], seconds=best[0], bound=best[0], status="optimal")


def arc_sets(group: Group, root: int, wanted: frozenset[int]) -> list[Ints]:
    """Every set of arcs that reaches what is wanted and of which no part does (more arcs never help)."""
    num_arcs = len(group.arc_source)
    if 1 << num_arcs > MAX_ARC_SETS:
        raise ValueError(f"group {group.name!r}: 2^{num_arcs} sets of arcs are too many to enumerate")
    ends = [(a, int(group.arc_source[a]), int(group.arc_target[a])) for a in range(num_arcs)]
    minimal: list[int] = []
    for bits in sorted(range(1 << num_arcs), key=int.bit_count):
        if any(part & bits == part for part in minimal):
            continue
        reached = {root}
        for _ in range(bits.bit_count()):
            reached |= {target for a, source, target in ends if bits >> a & 1 and source in reached}
        if wanted <= reached:
            minimal.append(bits)
    return [np.array([a for a in range(num_arcs) if bits >> a & 1], np.int64) for bits in minimal]


def cheapest_set(group: Group, root: int, wanted: frozenset[int]) -> list[Ints]:
    """The cheapest set of arcs (none where it does not exist): uniform-cost search over sets of reached vertices."""
    queue: list[tuple[float, int, frozenset[int], tuple[int, ...]]] = [(0.0, 0, frozenset({root}), ())]
    closed: set[frozenset[int]] = set()
    pushed = 0
    while queue:
        seconds, _, reached, arcs = heapq.heappop(queue)
        if wanted <= reached:
            return [np.array(sorted(arcs), np.int64)]
        if reached in closed:
            continue
        closed.add(reached)
        for arc in range(len(group.arc_source)):
            target = int(group.arc_target[arc])
            if int(group.arc_source[arc]) in reached and target not in reached and np.isfinite(group.arc_seconds[arc]):
                pushed += 1
                longer = seconds + float(group.arc_seconds[arc])
                heapq.heappush(queue, (longer, pushed, reached | {target}, (*arcs, arc)))
    return []
