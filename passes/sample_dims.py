"""Where the samples of a batch are in a value, and where an op leaves them.

A value is one of four kinds. `Fixed`: the same whatever the samples are. `Each`: one block a sample, in order, along
one dim, so that a micro-batch has the blocks of its samples. `Total`: a sum over samples, in which all that comes after
has to be linear. `Joined`: anything else, and why.

An op treats samples alone if, by its sharding rule, one factor runs over the batch in all operands and results; an op
without a rule, if running it says so (`passes.alone_by_running`). Views are followed by row-major order.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, fx

from autopar.graph import operands, target_name
from autopar.ops.cross_entropy import cross_entropy
from autopar.passes.alone_by_running import runs_alone
from autopar.rules.describe import aligned, argument, normalized_dim, normalized_dims, result_values, shapes_of
from autopar.rules.registry import rule_of
from autopar.rules.rule import Rule

MEAN, SUM = 1, 2
"""Of ATen's `reduction` arguments."""


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
PRODUCTS = frozenset({"linear", "matmul", "mm", "bmm", "addmm", "baddbmm"})
UNIFORM = frozenset(
    {"zeros", "ones", "full", "empty", "scalar_tensor", "new_zeros", "new_ones", "new_full", "new_empty"}
)
SIZED = VIEWS | frozenset(
    {"expand", "repeat", "slice", "split", "split_with_sizes", "zeros", "ones", "empty", "arange", "narrow"}
    | {"new_zeros", "new_ones", "new_empty", "rand", "randn", "chunk", "slice_scatter", "new_empty_strided"}
)
"""Ops whose numbers are sizes and places, which follow the batch as shapes do."""
ON_ELEMENTS = frozenset(
    {"mse_loss", "l1_loss", "smooth_l1_loss", "huber_loss", "soft_margin_loss", "kl_div"}
    | {"binary_cross_entropy", "binary_cross_entropy_with_logits"}
)
"""ATen's losses that are reductions of a value of each element."""


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


def is_random(node: fx.Node) -> bool:
    """Whether an op draws numbers, which are others in every micro-batch as they are in every step."""
    target = node.target
    if isinstance(target, torch._ops.OpOverload):
        return torch.Tag.nondeterministic_seeded in target.tags
    return getattr(target, "__module__", "") in ("autopar.ops.random", "autopar.ops.dropout")


def states_after(node: fx.Node, states: Sequence[State], batch: Batch) -> tuple[State, ...]:
    """The states of an op's results for those of its operands."""
    num = len(result_values(node))
    if (first := next((s for s in states if isinstance(s, Joined)), None)) is not None:
        return (first,) * num
    if name_of(node) in UNIFORM or all(isinstance(s, Fixed) for s in states):
        return (_fixed(node, states, batch),) * num
    if any(isinstance(s, Fixed) and s.sized for s in states):
        return (joined(node, "takes a value that depends on how many samples there are"),) * num
    growth = _growth(node, batch)
    if growth is None:
        return (joined(node, "takes a number that depends on how many samples there are"),) * num
    found = _after(node, states, batch)
    return tuple(_checked(node, i, _grown(state, growth), batch) for i, state in enumerate(found))


def _after(node: fx.Node, states: Sequence[State], batch: Batch) -> tuple[State, ...]:
    num = len(result_values(node))
    if any(isinstance(s, Total) for s in states):
        return (_linear(node, states, batch),) * num
    name = name_of(node)
    for known in (_loss, _sum, _view, _slice, _split, _cat, _repeat, _index):
        if (state := known(node, name, states, batch)) is not None:
            return state
    return _by_rule(node, states, batch)


def _grown(state: State, growth: int) -> State:
    return state if isinstance(state, Fixed | Joined) or not growth else replace(state, power=state.power + growth)


def _checked(node: fx.Node, index: int, state: State, batch: Batch) -> State:
    """The state, if sizes with few samples are what it says."""
    few = batch.shapes(node)
    if few is None or isinstance(state, Joined | Fixed):
        return state
    shape, small = tuple(result_values(node)[index].shape), few[index]
    expected = list(shape)
    if isinstance(state, Each):
        expected[state.dim] = expected[state.dim] * batch.few // batch.size
    if tuple(expected) == small:
        return state
    return joined(node, f"has the sizes {shape} with {batch.size} samples, but {small} with {batch.few}")


def _growth(node: fx.Node, batch: Batch) -> int | None:
    """With which power of the number of samples the op's numbers scale its results; None if otherwise."""
    twin, name = batch.twins.get(node), name_of(node)
    if not batch.twins or name in SIZED:
        return 0
    if twin is None:  # numbers that do nothing with so few samples leave no call
        here, there = ((node.args[1] if len(node.args) > 1 else None), 1)
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
    blocks = {(d, 1): value.unflatten(d, (batch.size, -1)) for d in over if d in varies}
    alike = frozenset(at for at, v in blocks.items() if bool((v == v.narrow(at[0], 0, 1)).all()))
    positions = None
    for d in over:
        counted = torch.arange(value.shape[d], device=value.device).view(-1, *(1,) * (value.dim() - d - 1))
        if value.shape[d] == batch.size and bool((value == counted).all()):
            positions = d
    sized = not any(torch.equal(value[tuple(map(slice, t.shape))], t) for t in small if t.dim() == value.dim())
    return Fixed(varies=varies, alike=alike, positions=positions, sized=sized)


def _fixed(node: fx.Node, states: Sequence[State], batch: Batch) -> Fixed:
    name, value = name_of(node), result_values(node)[0]
    sized = any(isinstance(s, Fixed) and s.sized for s in states) and name not in UNIFORM
    if name not in SIZED and (twin := batch.twins.get(node)) is not None:
        here, there = ((n.args, dict(n.kwargs)) for n in (node, twin))
        if "full" in name:
            here, there = ((n.args[-1], dict(n.kwargs)) for n in (node, twin))
        sized = sized or _differ(here, there)
    everywhere = frozenset(range(value.dim()))
    if name in UNIFORM or (is_random(node) and name != "randperm" and not states):
        return Fixed(sized=sized)
    if not any(size and size % batch.size == 0 for size in value.shape):
        return Fixed(varies=everywhere, sized=sized)
    if name == "arange":
        counts = node.args == (value.shape[0],) and value.shape[0] == batch.size
        return Fixed(varies=everywhere, positions=0 if counts else None, sized=sized)
    shapes = shapes_of(operands(node))
    fixed = [s for s in states if isinstance(s, Fixed)]
    if all(not s.varies for s in fixed) and fixed and rule_of(node).known:
        return Fixed(sized=sized)
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
    dim, outer = at
    before = math.prod(source[:dim]) * outer
    passed = 1
    for d, size in enumerate(target):
        if before % passed == 0 and passed * size % (before * batch) == 0 and passed <= before < passed * size:
            return d, before // passed
        passed *= size
    return None


def _view(node: fx.Node, name: str, states: Sequence[State], batch: Batch) -> tuple[State, ...] | None:
    (state, *_) = states
    if name not in VIEWS or not isinstance(state, Each):
        return None
    source, target = shapes_of(operands(node))[0], tuple(node.meta["val"].shape)
    at = moved(source, target, (state.dim, state.outer), batch.size)
    if at is None:
        return (joined(node, f"cuts the batch across dims: {source} as {target}"),)
    return (replace(state, dim=at[0], outer=at[1]),)


def _slice(node: fx.Node, name: str, states: Sequence[State], batch: Batch) -> tuple[State, ...] | None:
    (state, *_) = states
    if name != "slice" or not isinstance(state, Each):
        return None
    size = shapes_of(operands(node))[0][state.dim]
    dim = normalized_dim(argument(node, 1, "dim", 0), node.meta["val"].dim())
    if dim != state.dim or size == node.meta["val"].shape[dim]:
        return (state,)
    twin = batch.twins.get(node, node)
    units = [n for n in (node, twin)]
    places = [_batches_of(n, operands(n)[0].meta["val"].shape[dim] // state.outer) for n in units]
    if places[0] is None or places[0] != places[1]:
        return (joined(node, "takes a part of the batch"),)
    return (replace(state, outer=places[0][1] - places[0][0]),)


def _batches_of(node: fx.Node, unit: int) -> tuple[int, int] | None:
    """From which batch to which a slice goes, of the several in its dim; None if it cuts one."""
    dim = normalized_dim(argument(node, 1, "dim", 0), node.meta["val"].dim())
    size = operands(node)[0].meta["val"].shape[dim]
    start, end = argument(node, 2, "start") or 0, argument(node, 3, "end")
    start = max(start + size, 0) if start < 0 else start
    end = start + node.meta["val"].shape[dim]
    if argument(node, 4, "step", 1) != 1 or start % unit or end % unit:
        return None
    return start // unit, end // unit


def _split(node: fx.Node, name: str, states: Sequence[State], batch: Batch) -> tuple[State, ...] | None:
    (state, *_) = states
    if name not in ("split", "split_with_sizes", "chunk") or not isinstance(state, Each):
        return None
    source = shapes_of(operands(node))[0]
    if normalized_dim(argument(node, 2, "dim", 0), len(source)) != state.dim:
        return (state,) * len(result_values(node))
    unit = source[state.dim] // state.outer
    sizes = [value.shape[state.dim] for value in result_values(node)]
    if any(size % unit for size in sizes):
        return (joined(node, "takes the batch apart"),) * len(sizes)
    return tuple(replace(state, outer=size // unit) for size in sizes)


def _cat(node: fx.Node, name: str, states: Sequence[State], batch: Batch) -> tuple[State, ...] | None:
    if name not in ("cat", "concat"):
        return None
    shapes = shapes_of(operands(node))
    dim = normalized_dim(argument(node, 1, "dim", 0), node.meta["val"].dim())
    if not any(isinstance(s, Each) and s.dim == dim for s in states):
        return None
    first = states[0]
    if not isinstance(first, Each) or any(s != first for s in states) or len(set(shapes)) > 1:
        return (joined(node, "puts the batch beside something of another size"),)
    return (replace(first, outer=first.outer * len(states)),)


def _repeat(node: fx.Node, name: str, states: Sequence[State], batch: Batch) -> tuple[State, ...] | None:
    (state, *_) = states
    if name != "repeat" or not isinstance(state, Each):
        return None
    shape = tuple(node.meta["val"].shape)
    source = shapes_of(operands(node))[0]
    dim = state.dim + len(shape) - len(source)
    return (replace(state, dim=dim, outer=state.outer * (shape[dim] // source[state.dim])),)


def _sum(node: fx.Node, name: str, states: Sequence[State], batch: Batch) -> tuple[State, ...] | None:
    (state, *_) = states
    if name not in ("sum", "mean") or not isinstance(state, Each):
        return None
    rank = len(shapes_of(operands(node))[0])
    dims = normalized_dims(argument(node, 1, "dim"), rank)
    if state.dim in dims:
        return (Total(power=state.power + (name == "sum"), kind=f"{node.name} ({name})"),)
    keepdim = bool(argument(node, 2, "keepdim", False))
    return (state if keepdim else replace(state, dim=state.dim - sum(d < state.dim for d in dims)),)


def _loss(node: fx.Node, name: str, states: Sequence[State], batch: Batch) -> tuple[State, ...] | None:
    if node.target is cross_entropy:
        return (_cross_entropy(node, states),)
    reduction = _reduction(node)
    if reduction is None:
        return None
    shapes = shapes_of(operands(node))
    power = int(reduction[1] == SUM)
    if name in ON_ELEMENTS:
        shape = torch.broadcast_shapes(*shapes)
        _, dims, result = aligned(shapes, tuple(shape))
        rule = Rule(factors={}, operands=dims, results=(result,))
        ((state),) = _by_factors(node, rule, states)
    else:
        args = list(node.args)
        kwargs = dict(node.kwargs)
        if reduction[0] < len(args):
            args[reduction[0]] = 0
        else:
            kwargs["reduction"] = 0
        state = _by_running(node, states, batch, args, kwargs)[0]
    if not isinstance(state, Each):
        return (state,)
    word = ("", "mean", "sum")[reduction[1]]
    return (Total(power=power, kind=f"{node.name} ({word})"),)


def _reduction(node: fx.Node) -> tuple[int, int] | None:
    """Which argument of ATen's own losses says how they are reduced, and how; None for what is none, is not reduced or
    weighs samples by their labels."""
    if not isinstance(node.target, torch._ops.OpOverload):
        return None
    arguments = {a.name: (i, a.default_value) for i, a in enumerate(node.target._schema.arguments)}
    if "reduction" not in arguments:
        return None
    position, default = arguments["reduction"]
    value: Any = argument(node, position, "reduction", default)
    labelled = "ignore_index" in arguments and not operands(node)[1].meta["val"].is_floating_point()
    return (position, int(value)) if value in (MEAN, SUM) and not (labelled and value == MEAN) else None


def _cross_entropy(node: fx.Node, states: Sequence[State]) -> State:
    reduction = node.kwargs.get("reduction", "mean")
    (state,) = _by_factors(node, rule_of(node), states, kept=True)
    if not isinstance(state, Each) or reduction == "none":
        return state
    if reduction == "sum":
        return Total(power=1, kind=f"{node.name} (sum)")
    if node.kwargs.get("count") is not None:
        return joined(node, "divides by a number of labels")
    labels = operands(node)[1].name, node.kwargs.get("ignore_index", -100)
    kind = f"{node.name} (mean over labels that are not ignored)"
    return Total(power=0, labels=labels, losses=(node.name,), kind=kind)


def _index(node: fx.Node, name: str, states: Sequence[State], batch: Batch) -> tuple[State, ...] | None:
    """`x[arange(batch), labels]`: of each sample what its own index says."""
    x = states[0]
    if name != "index" or not isinstance(x, Each) or x.outer != 1:
        return None
    sources = operands(node)
    indices = list(argument(node, 1, "indices"))
    places = [d for d, index in enumerate(indices) if index is not None]
    if x.dim not in places or places != list(range(places[0], places[-1] + 1)):
        return None
    by = states[1 + places.index(x.dim)]
    shapes = shapes_of(sources)[1:]
    if not isinstance(by, Fixed) or by.positions is None or shapes_of(sources)[0][x.dim] != batch.size:
        return None
    rank = len(torch.broadcast_shapes(*shapes))
    own = shapes[places.index(x.dim)]
    along = by.positions + rank - len(own)
    if len(own) != 1 and math.prod(own) != own[by.positions]:
        return None
    for state, shape in zip(states[1:], shapes, strict=True):
        if state is by:
            continue
        dim = along - rank + len(shape)
        agrees = isinstance(state, Each) and state.dim == dim and state.outer == 1 and not state.power
        if not agrees and not (isinstance(state, Fixed) and (dim < 0 or shape[dim] == 1)):
            return None
    return (replace(x, dim=places[0] + along),)


def _by_rule(node: fx.Node, states: Sequence[State], batch: Batch) -> tuple[State, ...]:
    num = len(result_values(node))
    if is_random(node) and len(states) == 1 and isinstance(states[0], Each):
        same = [v for v in result_values(node) if v.dim() > states[0].dim]
        size = shapes_of(operands(node))[0][states[0].dim]
        if len(same) == num and all(v.shape[states[0].dim] == size for v in same):
            return tuple(states) * num
    rule = rule_of(node)
    if not rule.known:
        return _by_running(node, states, batch, node.args, dict(node.kwargs))
    return _by_factors(node, rule, states)


def _by_factors(node: fx.Node, rule: Rule, states: Sequence[State], *, kept: bool = False) -> tuple[State, ...]:
    """By one factor that runs over the batch. kept: results without it are taken as one value a sample."""
    num = len(rule.results)
    found = [(i, s, rule.operands[i][s.dim]) for i, s in enumerate(states) if isinstance(s, Each)]
    factor, outer = found[0][2], found[0][1].outer
    name = name_of(node)
    if any(f is None for _, _, f in found):
        return (joined(node, "joins the samples of the batch"),) * num
    if any((f, s.outer) != (factor, outer) for _, s, f in found):
        return (joined(node, "brings every sample together with every other"),) * num
    for state, dims in zip(states, rule.operands, strict=True):
        if isinstance(state, Fixed) and factor in dims:
            dim = dims.index(factor)
            if dim in state.varies and (dim, outer) not in state.alike:
                return (joined(node, "takes a constant that differs from sample to sample"),) * num
    scaled = {i for i, s, _ in found if s.power}
    power = max((s.power for _, s, _ in found), default=0)
    is_product = name in PRODUCTS and not rule.added
    if is_product:
        power = sum(s.power for _, s, _ in found)
    elif scaled and not (
        any(scaled <= together for together in rule.linear)
        and all(s.power == power for i, s, _ in found)
        and not (name in ADDED and len(found) < len(node.args))
    ):
        return (joined(node, "is not linear in what the number of samples scales"),) * num
    results: list[State] = []
    summed = factor in rule.factors and rule.factors[factor].summed if factor is not None else False
    for dims in rule.results:
        if factor in dims and not summed:
            results.append(Each(dim=dims.index(factor), outer=outer, power=power))
        elif kept and factor != "classes":
            dim = dims.index(factor) if factor in dims else 0
            results.append(Each(dim=dim, outer=outer, power=power))
        elif is_product and summed:
            results.append(Total(power=power + 1, kind=f"{node.name} (sum)"))
        else:
            results.append(joined(node, "joins the samples of the batch"))
    return tuple(results)


def _by_running(
    node: fx.Node, states: Sequence[State], batch: Batch, args: Any, kwargs: dict[str, Any]
) -> tuple[State, ...]:
    num = len(result_values(node))
    each = [s for s in states if isinstance(s, Each)]
    if any(s.outer != 1 or s.power for s in each) or is_random(node):
        return (joined(node, "has no sharding rule, and was not run to see whether it treats samples alone"),) * num
    dims = [s.dim if isinstance(s, Each) else None for s in states]
    found = runs_alone(node, args, kwargs, dims, batch.size)
    if found is None:
        return (joined(node, "has no sharding rule, and gives other values where samples are run apart"),) * num
    return tuple(Each(dim=dim) for dim in found)


def _linear(node: fx.Node, states: Sequence[State], batch: Batch) -> State:
    """After a sum over samples: all has to be linear in it, and what is added has to be a sum of its kind."""
    totals = [s for s in states if isinstance(s, Total)]
    if any(isinstance(s, Each) for s in states):
        return joined(node, "joins single samples with a sum over the batch")
    first, where = totals[0], {i for i, s in enumerate(states) if isinstance(s, Total)}
    name = name_of(node)
    numbers = [a for a in node.args[:2] if isinstance(a, int | float) and a] if name in ADDED else []
    sets = rule_of(node).linear if name not in ADDED else (frozenset(range(len(states))),)
    together = min((s for s in sets if where <= s), key=len, default=None)
    if name in ("sum", "mean", *VIEWS):
        together = frozenset({0})
    if together is None:
        return joined(node, "is not linear in a sum over the batch")
    adds = len(together) > len(totals) or bool(numbers)
    mixed = any((s.power, s.labels) != (first.power, first.labels) for s in totals)
    if mixed or (adds and (first.power or first.labels)):
        kinds = list(dict.fromkeys(k for s in totals for k in s.kind.split("; ")))
        kinds += ["a constant"] if adds else []
        return Joined(
            why=f"the loss adds up means of several kinds: {', '.join(kinds)}; their sums over micro-batches have no "
            "common weight (reduce all terms alike: all means over every element, or all sums)"
        )
    if not batch.is_exact and math.prod(node.meta["val"].shape) > max(math.prod(v) for v in shapes_of(operands(node))):
        return joined(node, "repeats a sum over the batch")
    losses = tuple(dict.fromkeys(loss for s in totals for loss in s.losses))
    kind = "; ".join(dict.fromkeys(k for s in totals for k in s.kind.split("; ")))
    return replace(first, losses=losses, kind=kind)


Known = Callable[[fx.Node, str, Sequence[State], Batch], tuple[State, ...] | None]
