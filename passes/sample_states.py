"""What is known of a value's samples, and of one that no sample changes.

A value is one of four kinds. `Fixed`: the same whatever the samples are. `Each`: one block a sample, in order, along
one dim, so that a micro-batch has the blocks of its samples. `Total`: a sum over samples, in which all that comes after
has to be linear. `Joined`: anything else, and why.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, fx

from autopar.ops.noise import PERMUTATION, noise
from autopar.rules.describe import result_values, shapes_of
from autopar.rules.registry import rule_of
from autopar.values.graph import is_random, operands, target_name


@dataclass(frozen=True, slots=True, kw_only=True)
class Fixed:
    """A value that no sample changes.

    varies: dims along which it is not the same throughout. alike: dims, and how many times the batch is in each, along
    which the blocks of all samples are equal. positions: the dim along which it counts 0, 1, 2, ..., and nothing else.
    sized: it depends on how many samples there are.
    """

    varies: frozenset[int] = frozenset()
    alike: frozenset[tuple[int, int]] = frozenset()
    positions: int | None = None
    sized: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Each:
    """A block of each sample along `dim`, where the whole batch is `outer` times in a row.

    power: of how many times as many samples the values of the whole batch are a multiple (a number that is its size).
    """

    dim: int
    outer: int = 1
    power: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Total:
    """A sum over samples. power: 1 if it grows with their number, 0 if it is their mean.

    labels: of a mean over labels that are not ignored, the labels (a node's name) and what is ignored; losses: the
    calls that take it. kind: in words.
    """

    power: int
    labels: tuple[str, Any] | None = None
    losses: tuple[str, ...] = ()
    kind: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Joined:
    """A value that depends on several samples otherwise than as a sum of terms of single ones. why: a clause."""

    why: str


State = Fixed | Each | Total | Joined
VIEWS = frozenset({"view", "reshape", "_unsafe_view", "squeeze", "unsqueeze", "flatten", "unflatten"})
ADDED = frozenset({"add", "sub", "rsub"})
UNIFORM = frozenset(
    {"zeros", "ones", "full", "empty", "scalar_tensor", "new_zeros", "new_ones", "new_full", "new_empty"}
)
SIZED = VIEWS | frozenset(
    {"expand", "repeat", "slice", "split", "split_with_sizes", "zeros", "ones", "empty", "arange", "narrow"}
    | {"new_zeros", "new_ones", "new_empty", "rand", "randn", "randint", "chunk", "slice_scatter", "new_empty_strided"}
    | {"noise"}
)
"""Ops whose numbers are sizes and places, which follow the batch as shapes do."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """Two graphs of a model, of `size` and of `few` samples.

    twins: nodes of the first with those of the second. is_exact: they are the same calls of the same values.
    """

    size: int
    few: int
    twins: Mapping[fx.Node, fx.Node] = field(default_factory=dict)
    is_exact: bool = False

    def shapes(self, node: fx.Node) -> tuple[tuple[int, ...], ...] | None:
        """Of the results with few samples."""
        twin = self.twins.get(node) if self.is_exact else None
        return None if twin is None else tuple(tuple(v.shape) for v in result_values(twin))


def name_of(node: fx.Node) -> str:
    """An op's name without library and overload."""
    return target_name(node.target).removeprefix("aten.").split(".")[0]


def joined(node: fx.Node, what: str) -> Joined:
    """`what` is said of the op, which is named with its module and the shapes of its operands."""
    module = node.meta.get("module") or ""
    shapes = " and ".join(str(tuple(shape)) for shape in dict.fromkeys(shapes_of(operands(node))))
    return Joined(why=f"{name_of(node)} of {shapes}{f' in {module}' if module else ''} {what}")


def growth(node: fx.Node, batch: Batch) -> int | None:
    """With which power of the number of samples the op's numbers scale its results; None if otherwise."""
    twin, name = batch.twins.get(node), name_of(node)
    if not batch.twins or name in SIZED:
        return 0
    if twin is None:  # numbers that do nothing with so few samples leave no call
        here = node.args[1] if len(node.args) > 1 else None
        there: Any = 1
        if not any(type(a) in (int, float) for a in (*node.args, *node.kwargs.values())):
            return 0
    elif not _differ((node.args, dict(node.kwargs)), (twin.args, dict(twin.kwargs))):
        return 0
    else:
        here, there = (n.args[1] if len(n.args) > 1 else None for n in (node, twin))
    if name not in ("mul", "div") or not isinstance(here, int | float) or not isinstance(there, int | float):
        return None
    if node.kwargs.get("rounding_mode") is not None or here <= 0 or there <= 0:
        return None
    power = round(math.log(here / there, batch.size / batch.few))
    if abs(here / there - (batch.size / batch.few) ** power) > 1e-9 * here / there:
        return None
    return power if name == "mul" else -power


def _differ(here: Any, there: Any) -> bool:
    if isinstance(here, fx.Node) and isinstance(there, fx.Node):
        return False
    if isinstance(here, list | tuple) and isinstance(there, list | tuple) and len(here) == len(there):
        return any(_differ(a, b) for a, b in zip(here, there, strict=True))
    if isinstance(here, dict):
        return any(_differ(value, there.get(key)) for key, value in here.items())
    return bool(type(here) is not type(there) or here != there)


def constant(value: Tensor, small: Sequence[Tensor], batch: Batch) -> Fixed:
    """The state of a tensor with values; small: one that it may be with few samples."""
    over = [d for d, size in enumerate(value.shape) if size and size % batch.size == 0]
    if batch.is_exact:  # what is as long with few samples is no batch
        over = [d for d in over if all(t.shape[d] != value.shape[d] for t in small)]
    varies = frozenset(range(value.dim())) - {d for d in over if bool((value == value.narrow(d, 0, 1)).all())}
    blocks = {(d, 1): value.view(*value.shape[:d], batch.size, -1, *value.shape[d + 1 :]) for d in over if d in varies}
    alike = frozenset(at for at, v in blocks.items() if bool((v == v.narrow(at[0], 0, 1)).all()))
    positions = None
    for d in over:
        counted = torch.arange(value.shape[d], device=value.device).view(-1, *(1,) * (value.dim() - d - 1))
        if value.shape[d] == batch.size and bool((value == counted).all()):
            positions = d
    small = [t for t in small if t.dim() == value.dim() and t.dtype == value.dtype]
    sized = not any(torch.equal(value[tuple(map(slice, t.shape))], t) for t in small)
    return Fixed(varies=varies, alike=alike, positions=positions, sized=sized)


def fixed_after(node: fx.Node, states: Sequence[State], batch: Batch) -> Fixed:
    name, value = name_of(node), result_values(node)[0]
    sized = any(isinstance(s, Fixed) and s.sized for s in states) and name not in UNIFORM
    if name not in SIZED and (twin := batch.twins.get(node)) is not None:
        given = [(n.args[-1] if "full" in name else n.args, dict(n.kwargs)) for n in (node, twin)]
        sized = sized or _differ(*given)
    everywhere = frozenset(range(value.dim()))
    if node.target is noise and PERMUTATION in node.args:
        few = batch.shapes(node)
        of_samples = value.shape[0] % batch.size == 0 if few is None else few[0] != tuple(value.shape)
        return Fixed(varies=everywhere, sized=of_samples and batch.few < batch.size)
    if name in UNIFORM or (is_random(node) and not any(isinstance(s, Fixed) and s.varies for s in states)):
        return Fixed(sized=sized)  # every sample draws for itself
    if not any(size and size % batch.size == 0 for size in value.shape):
        return Fixed(varies=everywhere, sized=sized)
    if name == "arange":
        counts = node.args == (value.shape[0],) and value.shape[0] == batch.size
        return Fixed(varies=everywhere, positions=0 if counts else None, sized=sized)
    shapes = shapes_of(operands(node))
    fixed = [s for s in states if isinstance(s, Fixed)]
    if name in VIEWS:
        source = fixed[0]
        uniform = [(d, 1) for d, size in enumerate(shapes[0]) if d not in source.varies and size == batch.size]
        placed = [moved(shapes[0], tuple(value.shape), at, batch.size) for at in (*uniform, *source.alike)]
        alike = frozenset(at for at in placed if at is not None)
        same = {d for d, outer in alike if outer == 1 and value.shape[d] == batch.size}
        return Fixed(varies=everywhere - same, alike=alike, sized=sized)
    rule = rule_of(node)
    named = rule.results[0]
    if name == "expand":
        offset = len(named) - len(shapes[0])
        kept = {d for d in everywhere if d >= offset and d - offset in fixed[0].varies}
        return Fixed(varies=frozenset(d for d in kept if shapes[0][d - offset] == value.shape[d]), sized=sized)
    varying = {f for s, dims in zip(fixed, rule.operands, strict=True) for d, f in enumerate(dims) if d in s.varies}
    return Fixed(varies=frozenset(d for d in everywhere if named[d] is None or named[d] in varying), sized=sized)


def moved(source: tuple[int, ...], target: tuple[int, ...], at: tuple[int, int], batch: int) -> tuple[int, int] | None:
    """Where a batch at `at` (a dim, and how many times it is in there) is after a reshape; None where it is cut."""
    if 0 in target:
        return None
    dim, outer = at
    before = math.prod(source[:dim]) * outer
    passed = 1
    for d, size in enumerate(target):
        if before % passed == 0 and passed * size % (before * batch) == 0 and passed <= before < passed * size:
            return d, before // passed
        passed *= size
    return None
