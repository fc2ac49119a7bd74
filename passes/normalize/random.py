"""Where is randomness drawn? Every random call becomes one of `autopar.ops`, numbered by its place in the model.

    randn, rand, randint, *_like, bernoulli, normal, randperm, x.uniform_() and its like    ops.noise
    dropout of elements and features, alpha dropout, rrelu                                  ops.dropout
    every other (multinomial, poisson, ..., a recurrent layer with dropout)                 ops.drawn

Calls keep their order, and those that nothing reads stay: a graph run without bound draws then draws from torch's
default generator what the model does.
"""

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, fx

from autopar.errors import CaptureError
from autopar.ops.drawn import drawn
from autopar.ops.dropout import ALPHA, alpha_dropout, dropout, rrelu
from autopar.ops.noise import PERMUTATION, noise
from autopar.passes.graph_tools import aten, calls, insert, is_aten, needs_grad, results, rewrite, substitute
from autopar.values.graph import CapturedModel, dtype_of, is_random, shape_of

UNNUMBERED = -1

FILLS = {
    "normal_functional": "normal_",
    **{name: name + "_" for name in ("uniform", "exponential", "geometric", "cauchy", "log_normal", "random")},
}
"""Functional forms of methods that fill a tensor: their arguments are those of the method."""

UNIT = {"rand": ("uniform_", 0.0, 1.0), "randn": ("normal_", 0.0, 1.0)}
CREATED = (aten.empty_like.default, aten.new_empty.default, aten.empty.memory_format, aten.zeros_like.default)
ATTENTION = (aten.scaled_dot_product_attention.default,)
"""What `normalize.attention` writes, once masks are known."""

WITHOUT_GRADIENT = ("poisson", "binomial", "multinomial")
"""Other ops whose operands have a gradient of zero, or none."""


def normalize_random(captured: CapturedModel) -> CapturedModel:
    """Rewrite all random calls of ATen; what only tells their shape is read no more, and no gradient passes noise.

    Raises:
        CaptureError: if the model draws from a generator of its own.
    """
    for node in calls(captured.graph, aten.bernoulli.p):
        _join_dropout(node)
    for node in list(captured.graph.nodes):
        if node.op == "call_function" and is_aten(node.target) and node.target not in ATTENTION:
            if is_random(node):
                _rewrite(node, _arguments(node))
            elif torch.Tag.nondeterministic_seeded in node.target.tags:
                _switch_off(node, _arguments(node))
    for node in captured.graph.nodes:
        if node.op == "call_function":
            node.meta["requires_grad"] = needs_grad(node, node.meta["val"])
    return captured


def number_sites(captured: CapturedModel) -> CapturedModel:
    """Sites in the order in which the graph draws."""
    drawing = (node for node in captured.graph.nodes if node.op == "call_function" and "site" in node.kwargs)
    for number, node in enumerate(drawing):
        node.kwargs = {**node.kwargs, "site": number}
    return captured


def _arguments(node: fx.Node) -> dict[str, Any]:
    """All arguments of an ATen call by name."""
    names = [argument.name for argument in node.target._schema.arguments]  # type: ignore[union-attr]
    defaults = {a.name: a.default_value for a in node.target._schema.arguments}  # type: ignore[union-attr]
    return {**defaults, **dict(zip(names, node.args, strict=False)), **node.kwargs}


def _rewrite(node: fx.Node, given: dict[str, Any]) -> None:
    if given.get("generator") is not None:
        raise CaptureError(
            f"{node.meta['module'] or 'the model'}: {node.target} draws from a torch.Generator of its own, whose state "
            "no other rank has; leave generator= out, and seed with torch.manual_seed"
        )
    name, _, kind = str(node.target).removeprefix("aten.").partition(".")
    maker = _MAKERS.get(name)
    if name in FILLS:
        source: Any = given["self"]
        numbers = (value for word, value in given.items() if word not in ("self", "generator"))
        _fill(node, FILLS[name], *numbers, lying=source.meta["val"])
    elif maker is not None and maker(node, kind, given):
        pass
    else:
        args = node.args if name not in WITHOUT_GRADIENT else [_without_gradient(node, arg) for arg in node.args]
        rewrite(node, drawn, (f"{name}.{kind}", *args), {**node.kwargs, "site": UNNUMBERED})


def _switch_off(node: fx.Node, given: dict[str, Any]) -> None:
    """What a call is that does not train; a recurrent layer without dropout is itself."""
    name = node.target._schema.name.removeprefix("aten::")  # type: ignore[union-attr]
    if "dropout" in name:
        _substitute_first(node, given["input"])
    elif name == "rrelu":
        slope = (float(given["lower"]) + float(given["upper"])) / 2
        substitute(node, insert(node, aten.leaky_relu.default, (given["self"], slope)))


def _fill(node: fx.Node, fill: str, *numbers: Any, lying: Tensor | None = None) -> None:
    substitute(node, _noise(node, fill, *numbers, size=shape_of(node), dtype=dtype_of(node), lying=lying))


def _noise(
    node: fx.Node, fill: str, *numbers: Any, size: tuple[int, ...], dtype: torch.dtype, lying: Tensor | None = None
) -> fx.Node:
    """Noise in place of a call. lying: a tensor that lies in memory as it does, None for a contiguous one."""
    like = insert(node, aten.full.default, ([], 0.0 if dtype.is_floating_point else 0), {"dtype": dtype})
    options: dict[str, Any] = {"size": size, "site": UNNUMBERED}
    if lying is not None and not lying.is_contiguous():
        strides = lying.stride()
        options["order"] = tuple(sorted(range(lying.dim()), key=lambda dim: (-strides[dim], dim)))
    return insert(node, noise, (like, fill, *numbers), options)


def _without_gradient(node: fx.Node, source: Any) -> Any:
    stops = isinstance(source, fx.Node) and source.meta["requires_grad"]
    return insert(node, aten.detach.default, (source,)) if stops else source


def _unit(node: fx.Node, kind: str, given: dict[str, Any]) -> bool:
    name = node.target._schema.name.removeprefix("aten::").removesuffix("_like")  # type: ignore[union-attr]
    _fill(node, *UNIT[name], lying=node.meta["val"])
    return True


def _randint(node: fx.Node, kind: str, given: dict[str, Any]) -> bool:
    if isinstance(given["high"], fx.Node):
        return False
    _fill(node, "random_", given.get("low", 0), given["high"], lying=node.meta["val"])
    return True


def _bernoulli(node: fx.Node, kind: str, given: dict[str, Any]) -> bool:
    """`x.bernoulli_(p)` fills x as it lies, `torch.bernoulli(x)` a contiguous tensor."""
    source: Any = node.args[0]
    chance = source if kind == "default" else given["p"]
    lying = source.meta["val"] if source.target in CREATED else None
    _fill(node, "bernoulli_", _without_gradient(node, chance), lying=lying)
    return True


def _normal(node: fx.Node, kind: str, given: dict[str, Any]) -> bool:
    """As ATen computes it: the gradients of mean and deviation are zero."""
    mean, deviation = (_without_gradient(node, given[word]) for word in ("mean", "std"))
    if kind == "float_float":
        _fill(node, "normal_", mean, deviation)
        return True
    unit = 1.0 if isinstance(deviation, fx.Node) else deviation
    made = _noise(node, "normal_", 0.0, unit, size=shape_of(node), dtype=dtype_of(node))
    if isinstance(deviation, fx.Node):
        made = insert(node, aten.mul.Tensor, (made, deviation))
    substitute(node, insert(node, aten.add.Tensor, (made, mean)))
    return True


def _randperm(node: fx.Node, kind: str, given: dict[str, Any]) -> bool:
    _fill(node, PERMUTATION)
    return True


def _dropout(node: fx.Node, kind: str, given: dict[str, Any]) -> bool:
    p, x = float(given["p"]), given["input"]
    if p == 0:
        _substitute_first(node, x)
    elif isinstance(node.meta["val"], Tensor) or 0 in results(node):
        _substitute_first(node, insert(node, dropout, (x, p), {"site": UNNUMBERED}))
    elif p < 1:  # nothing reads it, but the model draws it
        val = x.meta["val"]
        _noise(node, "bernoulli_", 1 - p, size=shape_of(x), dtype=dtype_of(x), lying=val)
        node.graph.erase_node(node)
    return True


def _rrelu(node: fx.Node, kind: str, given: dict[str, Any]) -> bool:
    numbers = float(given["lower"]), float(given["upper"])
    if 1 in results(node):
        return False
    _substitute_first(node, insert(node, rrelu, (given["self"], *numbers), {"site": UNNUMBERED}))
    return True


def _substitute_first(node: fx.Node, replacement: Any) -> None:
    """Readers of the (first) result read `replacement`."""
    if isinstance(node.meta["val"], Tensor):
        substitute(node, replacement)
        return
    for user in results(node).values():
        substitute(user, replacement)
    node.graph.erase_node(node)


_MAKERS: dict[str, Callable[[fx.Node, str, dict[str, Any]], bool]] = {
    "rand": _unit,
    "randn": _unit,
    "rand_like": _unit,
    "randn_like": _unit,
    "randint": _randint,
    "randint_like": _randint,
    "bernoulli": _bernoulli,
    "normal": _normal,
    "randperm": _randperm,
    "native_dropout": _dropout,
    "dropout": _dropout,
    "rrelu": _rrelu,
    "rrelu_with_noise_functional": _rrelu,
}


def _join_dropout(drawn_keep: fx.Node) -> None:
    """What export writes out of a dropout: `x * (bernoulli(q) / q)`, and of an alpha dropout."""
    keep = _number(drawn_keep.args[1])
    if keep is None or not 0 < keep < 1:
        return
    p = next((p for p in (round(1 - keep, 12), 1 - keep) if 1 - p == keep), None)
    if p is None:
        return
    users = list(drawn_keep.users)
    if len(users) == 1 and users[0].target in (aten.div.Scalar, aten.div.Tensor) and users[0].args[1:] == (keep,):
        _join(users[0], drawn_keep, list(users[0].users), dropout, p)
    elif len(users) == 2:
        scaled = next((n for n in users if n.target is aten.mul.Scalar), None)
        ends = [] if scaled is None else _shifted(scaled, drawn_keep, keep)
        if scaled is not None and ends:
            _join(scaled, drawn_keep, ends, alpha_dropout, p)


def _shifted(scaled: fx.Node, drawn_keep: fx.Node, keep: float) -> list[fx.Node]:
    """The end of `x * (keep * a) + ((keep - 1) * b + c)`, if that is what reads `keep * a`."""
    (lowered,) = (node for node in drawn_keep.users if node is not scaled)
    scale = 1 / math.sqrt((ALPHA * ALPHA * (1 - keep) + 1) * keep)
    chain = [
        (lowered, aten.add.Scalar, -1.0),
        (_only_user(lowered), aten.mul.Scalar, ALPHA * scale),
        (_only_user(_only_user(lowered)), aten.add.Scalar, ALPHA * scale * (1 - keep)),
        (scaled, aten.mul.Scalar, scale),
    ]
    for node, target, number in chain:
        found = None if node is None or node.target is not target else _number(node.args[1])
        if found is None or not math.isclose(found, number):
            return []
    product, end = _only_user(scaled), _only_user(chain[2][0])
    if product is None or end is None or end.target is not aten.add.Tensor or end.kwargs:
        return []
    return [end] if end in product.users else []


def _only_user(node: fx.Node | None) -> fx.Node | None:
    return next(iter(node.users)) if node is not None and len(node.users) == 1 else None


def _number(value: Any) -> float | None:
    return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else None


def _join(mask: fx.Node, drawn_keep: fx.Node, ends: list[fx.Node], op: Any, p: float) -> None:
    """`op(x, p)` in place of the one call that ends it; x is what is multiplied by `mask`."""
    product = _only_user(mask)
    if product is None or product.target is not aten.mul.Tensor or len(ends) != 1:
        return
    (end,) = ends
    x = next((arg for arg in product.args if arg is not mask), None)
    if not isinstance(x, fx.Node) or shape_of(x) != shape_of(end) or dtype_of(x) != dtype_of(end):
        return
    sizes, drawn_sizes = shape_of(x), (1,) * (len(shape_of(x)) - len(shape_of(mask))) + shape_of(mask)
    options: dict[str, Any] = {"site": UNNUMBERED}
    if drawn_sizes != sizes:
        options["along"] = tuple(dim for dim, size in enumerate(drawn_sizes) if size == sizes[dim])
    chain = _between(drawn_keep, end)
    if any(is_random(node) for node in chain):  # the order of what is drawn would be another
        return
    substitute(end, insert(end, op, (x, p), options))
    for node in (*reversed(chain), drawn_keep):
        if not node.users:
            node.graph.erase_node(node)


def _between(first: fx.Node, last: fx.Node) -> list[fx.Node]:
    """The calls after `first` and before `last`."""
    nodes = list(first.graph.nodes)
    return nodes[nodes.index(first) + 1 : nodes.index(last)]
