"""A strategy graph shaped like a folded Llama block with embedding and head, on a mesh of any number of axes.

Options and vertices are products of per-axis choices: S(batch), S(sequence), S(hidden), Replicate, Invariant, Partial.
Seconds are per-step sums over all layers, from local bytes and flops; rough, but with the structure of the real ones.
"""

import itertools
import math

import numpy as np

from autopar.search.graph.strategy_graph import Consumer, Group, KeptMemory, Memory, Node, NodeMemory, StrategyGraph

B, S, H, R, INVARIANT, P = range(6)
KINDS = 6
LINEAR = {
    "b": (B, B, R),
    "s": (S, S, R),
    "col": (R, H, B),
    "row": (H, P, S),
    "R": (R, R, R),
    "INVARIANT": (INVARIANT, INVARIANT, INVARIANT),
}
"""Per axis (input, output, weight); a weight's B is its first dim split, its S the second."""
LAYERS, TOKENS, HIDDEN = 32, 64 * 4096, 4096
FLOPS, BANDWIDTH = 400e12, (300e9, 40e9, 10e9)
COEFFICIENT = np.array([1.0, 0.5])


class Builder:
    """Collects nodes, groups and memory terms; `axes` are sizes, fastest link first."""

    def __init__(self, axes: tuple[int, ...]) -> None:
        self.axes = axes
        self.points = list(itertools.product(range(KINDS), repeat=len(axes)))
        self.nodes: list[Node] = []
        self.groups: list[Group] = []
        self.node_memory: list[NodeMemory] = []
        self.kept: list[KeptMemory] = []

    def op(self, name: str, choices: list[tuple[int, ...]], flops: float, layers: int) -> tuple[int, list[np.ndarray]]:
        """A node whose options are products of per-axis choices; returns it and the vertices of each operand."""
        options = list(itertools.product(choices, repeat=len(self.axes)))
        split = np.array(
            [math.prod(n for n, c in zip(self.axes, o, strict=True) if set(c) & {B, S, H}) for o in options]
        )
        self.nodes.append(Node(name=name, seconds=layers * flops / FLOPS / split + layers * 1e-5))
        width = len(choices[0])
        return len(self.nodes) - 1, [
            np.array([self.vertex(tuple(c[part] for c in o)) for o in options]) for part in range(width)
        ]

    def vertex(self, point: tuple[int, ...]) -> int:
        return int(np.ravel_multi_index(point, (KINDS,) * len(self.axes)))

    def local(self, nbytes: float) -> np.ndarray:
        """Bytes on a device at every vertex."""
        return np.array(
            [nbytes / math.prod(n for n, k in zip(self.axes, p, strict=True) if k < R) for p in self.points]
        )

    def tensor(
        self, name: str, nbytes: float, layers: int, producer: tuple[int, np.ndarray], users: list, kept: list[int]
    ) -> None:
        source, target, seconds = [], [], []
        for point, (axis, n) in itertools.product(self.points, enumerate(self.axes)):
            others = math.prod(m for i, (m, k) in enumerate(zip(self.axes, point, strict=True)) if i != axis and k < R)
            unit = nbytes / others * (n - 1) / n / BANDWIDTH[axis]
            for kind in range(KINDS):
                if kind != point[axis]:
                    units = _units(point[axis], kind, n)
                    source.append(self.vertex(point))
                    target.append(self.vertex((*point[:axis], kind, *point[axis + 1 :])))
                    seconds.append(layers * (units * unit + (1e-5 * n if units else 0.0)))
        self.groups.append(
            Group(
                name=name,
                producer=producer[0],
                gives=producer[1],
                consumers=tuple(Consumer(node=node, wants=wants) for node, wants in users),
                num_vertices=len(self.points),
                arc_source=np.array(source),
                arc_target=np.array(target),
                arc_seconds=np.array(seconds),
            )
        )
        if kept:
            self.kept.append(
                KeptMemory(
                    group=len(self.groups) - 1,
                    nbytes=self.local(nbytes) * layers,
                    coefficient=COEFFICIENT,
                    keeps_given=False,
                    keepers=tuple(kept),
                )
            )

    def weight(self, name: str, params: float, layers: int, user: tuple[int, np.ndarray]) -> None:
        """Storage x lifetime: gathered per use (dearer, smaller) or kept gathered."""
        storage = [p for p in self.points if set(p) <= {B, S, INVARIANT}]
        local = np.array([self.local(params)[self.vertex(p)] for p in storage])
        whole = params / local > 1
        gather = params * 2 / BANDWIDTH[min(1, len(self.axes) - 1)] * whole
        seconds = layers * np.concatenate([local * 16 / 3e12, local * 16 / 3e12 + gather / 2])
        self.nodes.append(Node(name=name, seconds=seconds))
        nbytes = layers * np.concatenate([local * 16 + params / 8 * 2 * whole, local * 16])
        self.node_memory.append(NodeMemory(node=len(self.nodes) - 1, nbytes=nbytes, coefficient=np.ones(2)))
        gives = np.tile([self.vertex(p) for p in storage], 2)
        self.tensor(name, params * 2, layers, (len(self.nodes) - 1, gives), [user], [])


def _units(source: int, target: int, n: int) -> float:
    """Link units, forward plus backward, of the redistributions of one axis."""
    if source < R and target < R:
        return 2.0 / n
    if source < R:
        return {R: 2.0, INVARIANT: 1.0, P: 0.0}[target]
    if target < R:
        return {R: 0.0, INVARIANT: 1.0, P: 2.0}[source]
    return {(INVARIANT, R): 2.0, (P, R): 4.0, (P, INVARIANT): 2.0}.get((source, target), 0.0)


def llama_like(axes: tuple[int, ...], limit: float | None = None) -> StrategyGraph:
    """One folded block, embedding and head; `limit` in bytes a device."""
    b = Builder(axes)
    linear = list(LINEAR.values())
    act, mlp, kv = TOKENS * HIDDEN * 2.0, TOKENS * 14336 * 2.0, TOKENS * 1024 * 2.0
    square = float(HIDDEN * HIDDEN)
    norm = [(B, B), (S, S), (R, R), (INVARIANT, INVARIANT)]
    add = [(k, k, k) for k in range(KINDS)]
    cheap = TOKENS * HIDDEN * 200.0
    embedding, (e_out,) = b.op("embedding", [(B,), (S,), (H,), (R,), (INVARIANT,), (P,)], cheap, 1)
    start, (s_in, s_out) = b.op("block input", [(k, k) for k in range(KINDS)], 0.0, LAYERS)
    norm1, (n1_in, n1_out) = b.op("norm1", norm, cheap, LAYERS)
    flops = {name: 6.0 * TOKENS * size for name, size in _sizes(square).items()}
    ops = {name: b.op(name, linear, flops[name], 1 if name == "head" else LAYERS) for name in flops}
    attention, (a_q, a_k, a_v, a_out) = b.op(
        "attention",
        [(B,) * 4, (H,) * 4, (R,) * 4, (INVARIANT,) * 4, (S, R, R, S)],
        6.0 * TOKENS * 4096 * HIDDEN,
        LAYERS,
    )
    add1, (x1, y1, z1) = b.op("add1", add, cheap, LAYERS)
    norm2, (n2_in, n2_out) = b.op("norm2", norm, cheap, LAYERS)
    product, (p_x, p_y, p_out) = b.op(
        "product", [(B,) * 3, (S,) * 3, (H,) * 3, (R,) * 3, (INVARIANT,) * 3], cheap, LAYERS
    )
    add2, (x2, y2, z2) = b.op("add2", add, cheap, LAYERS)
    loss, (l_in,) = b.op("loss", [(B,), (S,), (H,), (R,), (INVARIANT,)], cheap, 1)

    def into(*names: str) -> list:
        return [(ops[name][0], ops[name][1][0]) for name in names]

    def out(name: str) -> tuple[int, np.ndarray]:
        return ops[name][0], ops[name][1][1]

    b.tensor("x", act, LAYERS, (start, s_out), [(norm1, n1_in), (add1, x1)], [0])
    b.tensor("normed", act, LAYERS, (norm1, n1_out), into("q", "k", "v"), [0, 1, 2])
    for name, wants, size in (("q", a_q, act), ("k", a_k, kv), ("v", a_v, kv)):
        b.tensor(f"{name} out", size, LAYERS, out(name), [(attention, wants)], [0])
    b.tensor("attended", act, LAYERS, (attention, a_out), into("o"), [0])
    b.tensor("o out", act, LAYERS, out("o"), [(add1, y1)], [])
    b.tensor("residual", act, LAYERS, (add1, z1), [(norm2, n2_in), (add2, x2)], [0])
    b.tensor("normed2", act, LAYERS, (norm2, n2_out), into("gate", "up"), [0, 1])
    b.tensor("gate out", mlp, LAYERS, out("gate"), [(product, p_x)], [0])
    b.tensor("up out", mlp, LAYERS, out("up"), [(product, p_y)], [0])
    b.tensor("product", mlp, LAYERS, (product, p_out), into("down"), [0])
    b.tensor("down out", act, LAYERS, out("down"), [(add2, y2)], [])
    b.tensor("block output", act, LAYERS - 1, (add2, z2), [(start, s_in)], [])
    b.tensor("embedded", act, 1, (embedding, e_out), [(start, s_in)], [])
    b.tensor("last", act, 1, (add2, z2), into("head"), [0])
    b.tensor("logits", TOKENS * 128256 * 2.0, 1, out("head"), [(loss, l_in)], [])
    for name, size in _sizes(square).items():
        b.weight(f"{name} weight", size, 1 if name == "head" else LAYERS, (ops[name][0], ops[name][1][2]))
    memory = None
    if limit is not None:
        memory = Memory(limit=limit, base=np.array([1e9, 2e9]), nodes=tuple(b.node_memory), kept=tuple(b.kept))
    return StrategyGraph(nodes=tuple(b.nodes), groups=tuple(b.groups), memory=memory)


def _sizes(square: float) -> dict[str, float]:
    mlp = square * 3.5
    return {"q": square, "k": square / 4, "v": square / 4, "o": square, "gate": mlp, "up": mlp, "down": mlp} | {
        "head": HIDDEN * 128256.0
    }
