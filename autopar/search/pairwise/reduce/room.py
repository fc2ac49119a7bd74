"""Which options can never fit? Those that exceed what is left once everyone else takes the least.

With least usages in the base, an option that takes more than limit - base at some time breaks it in every choice.
What it would have needed is noted: with a limit below that, all that was concluded would have been concluded too.
"""

import numpy as np

from autopar.search.compiled import compiled
from autopar.search.pairwise.problem import Floats
from autopar.search.pairwise.reduce.graph import ALIVE, COST_AT, DONE, MEMBERS, OPTIONS, Graph, touch
from autopar.search.pairwise.reduce.profile import profile


def drop_oversized(graph: Graph, limit: float, spared: Floats) -> int:
    """`spared[0]` becomes the least limit under which some option dropped here might have stayed."""
    room = limit - np.cumsum(graph.base)[:-1]
    if not len(room):
        return DONE
    levels = [room]
    while 2 ** len(levels) <= len(room):
        step = 2 ** (len(levels) - 1)
        level = levels[-1].copy()
        np.minimum(level[:-step], levels[-1][step:], out=level[:-step])
        levels.append(level)
    return int(_drop(graph, np.array(levels), limit, spared))


@compiled
def _drop(graph: Graph, least: Floats, limit: float, spared: Floats) -> int:
    """`least[k, t]` is the least room at times t to t + 2**k."""
    for n in range(len(graph.node)):
        if not graph.node[n, ALIVE] or graph.node[n, MEMBERS] == 0:
            continue
        at = graph.node[n, COST_AT]
        times, taken = profile(graph, n)
        for s in range(len(times) - 1):
            level = 0
            while 2 << level <= times[s + 1] - times[s]:
                level += 1
            room = min(least[level, times[s]], least[level, times[s + 1] - (1 << level)])
            for i in range(graph.node[n, OPTIONS]):
                if taken[i, s] > room and graph.cost[at + i] < np.inf:
                    graph.cost[at + i] = np.inf
                    spared[0] = min(spared[0], limit - room + taken[i, s])
                    touch(graph, n)
    return DONE
