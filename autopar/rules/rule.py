"""What does an op do to placements? Its factors say: the loop dimensions, and the dims they run over, as in an einsum.

`linear: x[b s i], w[o i], bias[o] -> y[b s o]` has factors b, s, i, o, and i is summed. On each mesh axis one *choice*
is made: one factor is split, or none. From the factors alone follow (design section 3)

    factor in an operand or result     Shard(that dim)
    factor missing from an operand     Replicate, or Partial if that operand is added to a summed result (a bias)
    factor missing from the result     Partial; only a summed factor may be missing
    no factor                          all Replicate, or all Invariant: valid for every op whose gradient function is
                                       linear in the gradient that arrives; only all Invariant for others
    no factor, op linear in operands   those operands Partial, the others Replicate, the results Partial

Choices that need a local body of their own (vocabulary-split embedding, ...) are listed in `extra`.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from torch import fx

from autopar.values.mesh import Mesh
from autopar.values.placement import (
    INVARIANT,
    PARTIAL,
    REPLICATE,
    Layout,
    Placement,
    Shard,
    chunk_size,
    local_shape,
    without_gradient,
)
from autopar.values.redistribution import Message


@dataclass(frozen=True, slots=True, kw_only=True)
class Factor:
    """A loop dimension of `size` iterations. `even`: a split must divide it; otherwise it may be padded in use."""

    size: int
    summed: bool = False
    even: bool = True


Dims = tuple[str | None, ...]
"""The factor that each dim of a tensor runs over, None for a dim that cannot be split."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """What one mesh axis does to an op. `name` is the split factor, or `replicate`, `invariant`, `partial<i>`."""

    name: str
    operands: tuple[Placement, ...]
    results: tuple[Placement, ...]


def splits(choice: str) -> bool:
    """Whether a choice of this name splits the work."""
    return not choice.startswith(("replicate", "invariant", "partial"))


@dataclass(frozen=True, slots=True, kw_only=True)
class Local:
    """An op on one rank: what its choices make of it, for rules that rewrite arguments or have a body."""

    node: fx.Node
    mesh: Mesh
    choices: tuple[Choice, ...]
    operands: tuple[Layout, ...]
    results: tuple[Layout, ...]
    operand_shapes: tuple[tuple[int, ...], ...]
    result_shapes: tuple[tuple[int, ...], ...]

    def axes(self, *factors: str) -> tuple[str, ...]:
        """Names of the mesh axes that split any of `factors`, in mesh order."""
        return tuple(n for n, c in zip(self.mesh.names, self.choices, strict=True) if c.name in factors)

    def axis_indices(self, *factors: str) -> tuple[int, ...]:
        return tuple(i for i, c in enumerate(self.choices) if c.name in factors)

    def parts(self) -> int:
        """Into how many parts the work is split."""
        return math.prod(n for n, c in zip(self.mesh.shape, self.choices, strict=True) if splits(c.name))


Shapes = tuple[tuple[int, ...], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Product:
    """An op whose work is matrix products: of operands `left` and `right`, each of the two products of their gradients.

    `sizes` of operands' and results' shapes: (batch, m, n, k) of `batch` products (m, k) x (k, n). in_rows: whether n
    and k are lengths of rows in memory, as of a library's matrix product (a convolution's are not).
    """

    left: int
    right: int
    sizes: Callable[[Shapes, Shapes], tuple[int, int, int, int]]
    in_rows: bool = False


Call = tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """The sharding rule of one node.

    operands, results: dims as factors, one entry a tensor operand (`graph.operands` order) or result.
    added: operands that are added to the result, so Partial where a summed factor is split (a bias).
    linear: each entry a set of operands in which the op is linear *together* (add of two: {0, 1}; mul: {0} and {1}).
    extra: choices that the factors do not give; they replace a factor's choice of the same name.
    saves, saves_results: operands and results that autograd keeps for backward.
    saves_nbytes: bytes that autograd keeps beside them (masks, statistics) for the whole op; split as the work is.
    products_nbytes: of attention: the weights, which products keep, and copies besides, where no kernel does it all.
    products_on_host, products_on_gpu: whether that is so where Python computes itself, and on a GPU.
    alias: the operand whose storage the result shares (views), or None.
    flops: forward floating-point operations of the whole op.
    backward_flops: of its backward pass, None for twice the forward (matmuls) .
    localize: the call that runs on one rank; None where the node's own call fits local shapes as it is.
    messages: collectives inside the body (forward, backward).
    product: the matrix products that the op is, if it is; `is_attention`: it is a fused attention.
    reads: times that forward reads its operands (a softmax: for the maximum, the sum, the result).
    looked_up: operands of which no more is read than the results hold (a table).
    spare: elements of a result that forward and backward allocate beside, of a rank's shapes, negative for gradients
        that backward makes when as much of what it keeps is gone; None for what `rules.spare` says of its name.
    in_turn: operands that backward reads one after another, and others only when what it keeps inside is gone, so that
        of those gathered again one is there at a time; empty where it reads all at once.
    known: False for ops that nothing is known to split. discovered: the rule is what running the call showed.
    whole_gradient: backward is not linear in the gradient that arrives, so that no result may be Replicate, whose
        gradient is a summand.
    """

    factors: Mapping[str, Factor]
    operands: tuple[Dims, ...]
    results: tuple[Dims, ...]
    added: frozenset[int] = frozenset()
    linear: tuple[frozenset[int], ...] = ()
    extra: tuple[Choice, ...] = ()
    saves: tuple[int, ...] = ()
    saves_results: tuple[int, ...] = ()
    saves_nbytes: int = 0
    products_nbytes: int = 0
    products_on_host: bool = False
    products_on_gpu: bool = False
    alias: int | None = None
    flops: float = 0.0
    backward_flops: float | None = None
    localize: Callable[[Local], Call] | None = None
    messages: Callable[[Local], tuple[tuple[Message, ...], tuple[Message, ...]]] | None = None
    product: Product | None = None
    is_attention: bool = False
    reads: int = 1
    looked_up: frozenset[int] = frozenset()
    spare: Callable[[Shapes, Shapes], tuple[int, int]] | None = None
    in_turn: frozenset[int] = frozenset()
    known: bool = True
    discovered: bool = False
    whole_gradient: bool = False


def replicated_rule(operand_ranks: tuple[int, ...], result_ranks: tuple[int, ...]) -> Rule:
    """The rule of an op without a rule: whole on every rank. It is assumed to save all it touches."""
    return Rule(
        factors={},
        operands=tuple((None,) * r for r in operand_ranks),
        results=tuple((None,) * r for r in result_ranks),
        saves=tuple(range(len(operand_ranks))),
        saves_results=tuple(range(len(result_ranks))),
        known=False,
    )


def _place(dims: Dims, factor: str) -> Placement | None:
    return Shard(dims.index(factor)) if factor in dims else None


def choices(rule: Rule) -> tuple[Choice, ...]:
    """All choices of one mesh axis, whole ones first."""
    num_operands, num_results = len(rule.operands), len(rule.results)
    out = {
        name: Choice(name=name, operands=(whole,) * num_operands, results=(whole,) * num_results)
        for name, whole in (("replicate", REPLICATE), ("invariant", INVARIANT))
    }
    if rule.whole_gradient:
        del out["replicate"]
    for name, factor in rule.factors.items():
        missing = {i: PARTIAL if factor.summed and i in rule.added else REPLICATE for i in range(num_operands)}
        operands = tuple(_place(dims, name) or missing[i] for i, dims in enumerate(rule.operands))
        results = tuple(_place(dims, name) or PARTIAL for dims in rule.results)
        assert factor.summed or PARTIAL not in results, f"factor {name} misses from a result but is not summed"
        out[name] = Choice(name=name, operands=operands, results=results)
    for i, together in enumerate(rule.linear):
        operands = tuple(PARTIAL if j in together else REPLICATE for j in range(num_operands))
        out[f"partial{i}"] = Choice(name=f"partial{i}", operands=operands, results=(PARTIAL,) * num_results)
    out.update({choice.name: choice for choice in rule.extra})
    return tuple(out.values())


def is_splittable(rule: Rule, chosen: tuple[Choice, ...], mesh: Mesh) -> bool:
    """Whether every factor divides over the axes that split it (or may be padded, no rank left without work)."""
    parts: dict[str, int] = {}
    for axis, choice in enumerate(chosen):
        if choice.name in rule.factors:
            parts[choice.name] = parts.get(choice.name, 1) * mesh.shape[axis]
    return is_divisible(rule, parts)


def is_divisible(rule: Rule, parts: Mapping[str, int]) -> bool:
    """Whether each factor of these divides into so many parts (or may be padded, no rank left without work)."""
    for name, n in parts.items():
        factor = rule.factors.get(name)
        if factor is None or factor.size % n == 0:
            continue
        if factor.even or chunk_size(factor.size, n) * (n - 1) >= factor.size:
            return False
    return True


@lru_cache(maxsize=1 << 18)
def _layout(placements: tuple[Placement, ...], needs_gradient: bool) -> Layout:
    layout = Layout(placements)
    return layout if needs_gradient else without_gradient(layout)


def layouts(
    chosen: tuple[Choice, ...], operand_grads: tuple[bool, ...], result_grads: tuple[bool, ...]
) -> tuple[tuple[Layout, ...], tuple[Layout, ...]]:
    """Layouts of operands and results under one choice per mesh axis."""
    operands = tuple(_layout(tuple(c.operands[i] for c in chosen), g) for i, g in enumerate(operand_grads))
    results = tuple(_layout(tuple(c.results[i] for c in chosen), g) for i, g in enumerate(result_grads))
    return operands, results


def localized(
    node: fx.Node,
    chosen: tuple[Choice, ...],
    mesh: Mesh,
    operand_layouts: tuple[Layout, ...],
    result_layouts: tuple[Layout, ...],
    operand_shapes: tuple[tuple[int, ...], ...],
    result_shapes: tuple[tuple[int, ...], ...],
) -> Local:
    """The op on one rank; shapes given are global."""
    return Local(
        node=node,
        mesh=mesh,
        choices=chosen,
        operands=operand_layouts,
        results=result_layouts,
        operand_shapes=tuple(local_shape(s, v, mesh) for s, v in zip(operand_shapes, operand_layouts, strict=True)),
        result_shapes=tuple(local_shape(s, v, mesh) for s, v in zip(result_shapes, result_layouts, strict=True)),
    )
