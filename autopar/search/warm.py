"""`python -m autopar.search.warm`: compile every kernel of the search now, so that no search waits for it.

`make` does it once after installing. The kernels stay in the user's cache (`compiled.cache_folder`) until one changes.
"""

from time import monotonic

import numpy as np

from autopar.search.exact.array_worker import Worker
from autopar.search.exact.dual_ascent import dual_ascent
from autopar.search.graph.strategy_graph import Consumer, Group, Node, StrategyGraph
from autopar.search.graph.undominated import beaten
from autopar.search.graph.ways_kernel import everywhere, reached, shortest_arcs
from autopar.search.pairwise.anytime import AnytimeSearch, Outside
from autopar.search.pairwise.bound import DualBound
from autopar.search.pairwise.guide import Guide
from autopar.search.pairwise.problem import Pairwise
from autopar.search.pairwise.solve import solve

NODES, OPTIONS, TIMES = 40, 4, 10


def sample() -> Pairwise:
    """A ring with chords, random costs, and memory that binds."""
    rng = np.random.default_rng(0)
    a = np.concatenate([np.arange(NODES), np.arange(NODES)])
    b = np.concatenate([(np.arange(NODES) + 1) % NODES, (np.arange(NODES) + 7) % NODES])
    begin = rng.integers(0, TIMES - 1, NODES)
    usage = rng.integers(0, 100, NODES * OPTIONS).astype(float)
    return Pairwise(
        first_option=np.arange(NODES + 1) * OPTIONS,
        cost=rng.integers(0, 1000, NODES * OPTIONS).astype(float),
        edge_a=a,
        edge_b=b,
        first_pair=np.arange(len(a) + 1) * OPTIONS**2,
        pair_cost=rng.integers(0, 1000, len(a) * OPTIONS**2).astype(float),
        member_node=np.arange(NODES),
        begin=begin,
        end=rng.integers(begin + 1, TIMES + 1),
        first_usage=np.arange(NODES + 1) * OPTIONS,
        usage=usage,
        base=np.zeros(TIMES),
        limit=float(usage.sum() / OPTIONS * 0.5),
    )


def tensor() -> StrategyGraph:
    """One, on its way from a node to another."""
    number, nothing = np.zeros(1, np.int64), np.zeros(1)
    group = Group(
        name="tensor",
        producer=0,
        gives=number,
        consumers=(Consumer(node=1, wants=number + 1),),
        num_vertices=2,
        arc_source=number,
        arc_target=number + 1,
        arc_seconds=nothing,
    )
    return StrategyGraph(nodes=(Node(name="from", seconds=nothing), Node(name="to", seconds=nothing)), groups=(group,))


def main() -> None:
    """Every part at least once: what a solve of one small graph reaches is up to the clock."""
    ends = np.zeros(1, np.int64), np.zeros(1, np.int64)
    reached(1, *ends, ends[0])
    shortest_arcs(1, *ends, np.zeros(1))
    everywhere(1, *ends, np.zeros(1))
    beaten(np.zeros((1, 1)))
    dual_ascent(tensor())
    problem = sample()
    solve(problem, relative_gap=0.05)
    dual = DualBound(problem)
    dual.ascend(passes=5)
    outside = Outside(heard=lambda *_: None, better=lambda _: None, worker=Worker())
    search = AnytimeSearch(Guide(problem=problem, remainder=dual.remainder()), outside, seed=0, stop=np.inf)
    search.fresh(search.guide.unit(), 200)
    search.stop = monotonic() + 1.0
    with outside.worker:
        search.polish(1.0)


if __name__ == "__main__":
    main()
