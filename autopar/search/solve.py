"""The one front door: which solver takes a strategy graph?

- Without redistribution groups: reductions, anytime search and bound of `pairwise`, for tens of thousands of nodes.
- With groups: the mixed program of `ilp`. Folded, these graphs have some hundred nodes however deep the model is.

Either returns a choice, its cost, a proved lower bound, and why it stopped.
"""

from collections.abc import Callable

import numpy as np
from numpy.typing import ArrayLike

from autopar.search.exact import ilp
from autopar.search.exact.highs_log import Progress
from autopar.search.graph.strategy_graph import Solution, StrategyGraph
from autopar.search.pairwise.problem import Pairwise


def solve(
    graph: StrategyGraph | Pairwise,
    *,
    relative_gap: float = 1e-3,
    seconds: float | None = None,
    hint: ArrayLike | None = None,
    seed: int = 0,
    on_progress: Callable[[Progress], None] | None = None,
) -> Solution:
    """The cheapest choice within the memory limit, proved to `relative_gap`, or the best found in `seconds`.

    `hint` is a choice (one option a node) to start from, `seed` that of the anytime search; `on_progress` is called
    with best and bound as they improve.

    Raises:
        InfeasibleError: if no choice is compatible, or none fits the limit.
        SearchTimeoutError: if `seconds` end before anything is found.
    """
    if isinstance(graph, StrategyGraph) and graph.groups:
        return ilp.solve(graph, relative_gap=relative_gap, seconds=seconds, hint=hint, on_progress=on_progress)
    # Numba's kernels cost a second to load: not for those who never come here.
    from autopar.search.pairwise import solve as pairwise
    from autopar.search.pairwise.convert import flatten

    problem = flatten(graph) if isinstance(graph, StrategyGraph) else graph
    start = None if hint is None else np.asarray(hint, np.int64)
    return pairwise.solve(
        problem, relative_gap=relative_gap, seconds=seconds, seed=seed, start=start, on_progress=on_progress
    )
