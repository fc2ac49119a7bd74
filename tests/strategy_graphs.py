"""Random strategy graphs: small ones of every shape for the oracle, and a Llama-like one for sizes that matter."""

import numpy as np

from autopar.search.graph.strategy_graph import (
    ArcMemory,
    Consumer,
    Edge,
    Group,
    KeptMemory,
    Memory,
    Node,
    NodeMemory,
    StrategyGraph,
)


def random_graph(seed: int) -> StrategyGraph:
    """2 to 5 nodes of 1 to 4 options, up to 3 edges, up to 4 groups; two thirds with memory."""
    rng = np.random.default_rng(seed)
    num_nodes = int(rng.integers(2, 6))
    sizes = rng.integers(1, 5, num_nodes)
    nodes = tuple(Node(name=f"node{i}", seconds=_seconds(rng, (n,), p_inf=0.05)) for i, n in enumerate(sizes))
    edges = tuple(_edge(rng, sizes) for _ in range(int(rng.integers(0, 4)) if num_nodes > 1 else 0))
    groups = tuple(_group(rng, sizes, i) for i in range(int(rng.integers(0, 5))))
    memory = _memory(rng, sizes, groups) if rng.random() < 0.65 else None
    return StrategyGraph(nodes=nodes, groups=groups, edges=edges, memory=memory)


def _seconds(rng: np.random.Generator, shape: tuple[int, ...], *, p_inf: float) -> np.ndarray:
    seconds = rng.integers(0, 30, shape).astype(float) / 7
    seconds[rng.random(shape) < p_inf] = np.inf
    return seconds


def _edge(rng: np.random.Generator, sizes: np.ndarray) -> Edge:
    a, b = rng.choice(len(sizes), 2, replace=bool(rng.random() < 0.1))
    return Edge(a=int(a), b=int(b), seconds=_seconds(rng, (sizes[a], sizes[b]), p_inf=0.1))


def _group(rng: np.random.Generator, sizes: np.ndarray, index: int) -> Group:
    num_vertices = int(rng.integers(2, 6))
    ring = rng.permutation(num_vertices) if rng.random() < 0.85 else np.zeros(0, np.int64)
    num_others = int(rng.integers(0, 6))
    num_arcs = len(ring) + num_others
    producer = int(rng.integers(len(sizes)))
    consumers = []
    for _ in range(int(rng.integers(0, 4))):
        node = int(rng.integers(len(sizes)))
        lowest = -1 if rng.random() < 0.3 else 0
        consumers.append(Consumer(node=node, wants=rng.integers(lowest, num_vertices, sizes[node])))
    return Group(
        name=f"group{index}",
        producer=producer,
        gives=rng.integers(0, num_vertices, sizes[producer]),
        consumers=tuple(consumers),
        num_vertices=num_vertices,
        arc_source=np.concatenate([ring, rng.integers(0, num_vertices, num_others)]),
        arc_target=np.concatenate([np.roll(ring, 1), rng.integers(0, num_vertices, num_others)]),
        arc_seconds=np.where(rng.random(num_arcs) < 0.2, 0.0, _seconds(rng, (num_arcs,), p_inf=0.03)),
    )


def _memory(rng: np.random.Generator, sizes: np.ndarray, groups: tuple[Group, ...]) -> Memory:
    num_moments = int(rng.integers(1, 5))

    def coefficient() -> np.ndarray:
        return rng.integers(0, 3, num_moments).astype(float)

    def nbytes(num: int) -> np.ndarray:
        return rng.integers(0, 20, num) * 1e9

    nodes = tuple(
        NodeMemory(node=i, nbytes=nbytes(sizes[i]), coefficient=coefficient())
        for i in rng.integers(0, len(sizes), rng.integers(0, 6))
    )
    kept = []
    for _ in range(int(rng.integers(0, 4)) if groups else 0):
        g = int(rng.integers(len(groups)))
        keepers = tuple(i for i in range(len(groups[g].consumers)) if rng.random() < 0.5)
        kept.append(
            KeptMemory(
                group=g,
                nbytes=nbytes(groups[g].num_vertices),
                coefficient=coefficient(),
                keeps_given=bool(rng.random() < 0.5),
                keepers=keepers,
            )
        )
    arcs = tuple(
        ArcMemory(group=g, nbytes=nbytes(len(groups[g].arc_source)), coefficient=coefficient())
        for g in range(len(groups))
        if rng.random() < 0.25
    )
    base = rng.integers(0, 10, num_moments) * 1e9
    return Memory(limit=float(rng.integers(10, 80)) * 1e9, base=base, nodes=nodes, kept=tuple(kept), arcs=arcs)
