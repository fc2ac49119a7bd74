"""How does a person write this call? One graph node as a Python expression: `F.linear(x, w)`, `x * y`, `x[:, 4:]`.

An expression comes with its precedence, so that it can stand inside another one. Calls that have no form of their own
are written as the aten op itself: always exact, if less pleasant.
"""

import inspect
import math
import operator
from collections.abc import Callable
from string import ascii_lowercase
from typing import Any, NamedTuple

import torch
from torch import fx

from autopar.export.naming import quoted
from autopar.values.graph import LABELS, operands


class Text(NamedTuple):
    """Python source and how tightly it binds: 20 a name or call, 14 unary, 12 product, 10 sum, 8, 6 bits, 4 compare."""

    source: str
    precedence: int = 20

    def inside(self, precedence: int) -> str:
        return self.source if self.precedence >= precedence else f"({self.source})"


class Label(NamedTuple):
    """The value of a keyword in `LABELS`."""

    number: int


Write = Callable[[Any], Text]
"""Writes an argument: a node as its name or inlined expression, a literal as itself."""

BINARY = {
    "add.Tensor": ("+", 10),
    "sub.Tensor": ("-", 10),
    "mul.Tensor": ("*", 12),
    "div.Tensor": ("/", 12),
    "add.Scalar": ("+", 10),
    "sub.Scalar": ("-", 10),
    "mul.Scalar": ("*", 12),
    "div.Scalar": ("/", 12),
    "matmul.default": ("@", 12),
    "bitwise_and.Tensor": ("&", 8),
    "__and__.Tensor": ("&", 8),
    "bitwise_or.Tensor": ("|", 6),
    "__or__.Tensor": ("|", 6),
    **{f"{name}.{kind}": (sign, 4) for kind in ("Tensor", "Scalar") for name, sign in (
        ("eq", "=="), ("ne", "!="), ("lt", "<"), ("le", "<="), ("gt", ">"), ("ge", ">="))},
}  # fmt: skip

METHODS = {
    "view.default": "view", "reshape.default": "reshape", "transpose.int": "transpose", "permute.default": "permute",
    "expand.default": "expand", "unsqueeze.default": "unsqueeze", "squeeze.dim": "squeeze",
    "flatten.using_ints": "flatten",
    "pow.Tensor_Scalar": "pow", "rsqrt.default": "rsqrt", "sqrt.default": "sqrt", "exp.default": "exp",
    "log.default": "log",
    "tanh.default": "tanh", "sigmoid.default": "sigmoid", "cos.default": "cos", "sin.default": "sin",
    "abs.default": "abs",
    "relu.default": "relu", "clamp.default": "clamp", "cumsum.default": "cumsum", "detach.default": "detach",
    "logical_not.default": "logical_not", "masked_fill.Scalar": "masked_fill", "masked_fill.Tensor": "masked_fill",
    "select.int": "select", "split.Tensor": "split", "split_with_sizes.default": "split_with_sizes",
    "chunk.default": "chunk", "unbind.int": "unbind", "amax.default": "amax", "gather.default": "gather",
    "index_select.default": "index_select", "contiguous.default": "contiguous", "t.default": "t",
    "topk.default": "topk", "argmax.default": "argmax", "reciprocal.default": "reciprocal",
}  # fmt: skip

FUNCTIONS = {
    "linear.default": "F.linear", "layer_norm.default": "F.layer_norm", "rms_norm.default": "F.rms_norm",
    "gelu.default": "F.gelu", "silu.default": "F.silu", "softplus.default": "F.softplus", "cat.default": "torch.cat",
    "stack.default": "torch.stack", "where.self": "torch.where", "where.Scalar": "torch.where",
    "where.ScalarSelf": "torch.where", "where.ScalarOther": "torch.where", "bmm.default": "torch.bmm",
    "addmm.default": "torch.addmm", "mm.default": "torch.mm", "conv1d.default": "F.conv1d",
    "conv2d.default": "F.conv2d",
    "convolution.default": "torch.convolution", "minimum.default": "torch.minimum", "maximum.default": "torch.maximum",
    "full_like.default": "torch.full_like", "zeros_like.default": "torch.zeros_like",
    "ones_like.default": "torch.ones_like",
    "einsum.default": "torch.einsum", "constant_pad_nd.default": "aten.constant_pad_nd",
}  # fmt: skip


KEPT = ("dim", "axis")
"""Keywords of collectives that are always written."""

LIGHT = {"neg.default", "rsub.Scalar", "mean.dim", "slice.Tensor",
         "cat.default", "_to_copy.default", "to.dtype", "index.Tensor", "bitwise_not.default", "sum.dim_IntList",
         *BINARY, *METHODS}  # fmt: skip
"""Calls that read well inside another call."""


def op_name(node: fx.Node) -> str:
    """`linear.default` of an aten op, "" of anything else."""
    target = node.target
    if isinstance(target, torch._ops.OpOverload) and target.namespace == "aten":
        return str(target).removeprefix("aten.")
    return ""


def short_name(node: fx.Node) -> str:
    """The op in one word: `linear`, `mul`, `attention`."""
    target = node.target
    if isinstance(target, torch._ops.OpOverload):
        return str(target).split(".")[1].strip("_")
    return str(getattr(target, "__name__", target))


def is_light(node: fx.Node) -> bool:
    return op_name(node) in LIGHT or node.target is operator.getitem


def literal(value: Any) -> Text:
    """A constant argument."""
    if isinstance(value, float) and not math.isfinite(value):
        return Text(f'float("{value}")')
    if isinstance(value, torch.device):
        return Text(f'"{value}"')
    if isinstance(value, int | float) and not isinstance(value, bool) and value < 0:
        return Text(repr(value), 14)
    if isinstance(value, str):
        return Text(quoted(value))
    return Text(repr(value))


def expression(node: fx.Node, write: Write) -> Text:
    """The node's call as Python source."""
    name = op_name(node)
    if name in BINARY and not node.kwargs and len(node.args) == 2 and isinstance(node.args[0], fx.Node):
        sign, precedence = BINARY[name]
        left, right = write(node.args[0]), write(node.args[1])
        # Comparisons chain in Python, so both sides must bind tighter.
        return Text(f"{left.inside(precedence + (sign in _CHAINED))} {sign} {right.inside(precedence + 1)}", precedence)
    if name in _FORMS and (text := _FORMS[name](node, write)) is not None:
        return text
    args = _stripped(node)
    if name in METHODS and isinstance(args[0], fx.Node):
        return Text(f"{write(args[0]).inside(20)}.{METHODS[name]}({_arguments(args[1:], node.kwargs, write)})")
    return Text(f"{_function(node)}({_arguments(args, _given(node), write)})")


def _given(node: fx.Node) -> dict[str, Any]:
    """Keywords that differ from the defaults of a function of ours."""
    if isinstance(node.target, torch._ops.OpOverload):
        return dict(node.kwargs)
    defaults = {name: p.default for name, p in inspect.signature(node.target).parameters.items()}  # type: ignore[arg-type]
    given = {k: Label(int(v)) if k in LABELS else v for k, v in node.kwargs.items()}  # type: ignore[arg-type]
    return {k: v for k, v in given.items() if isinstance(v, fx.Node) or k in KEPT or not _same(v, defaults.get(k))}


def _same(value: Any, default: Any) -> bool:
    return type(value) is type(default) and bool(value == default)


_CHAINED = ("==", "!=", "<", "<=", ">", ">=")


def _function(node: fx.Node) -> str:
    name = op_name(node)
    if name in FUNCTIONS:
        return FUNCTIONS[name]
    if name:
        return "aten." + name.removesuffix(".default")
    if isinstance(node.target, torch._ops.OpOverload):
        return f"torch.ops.{node.target}"
    return str(getattr(node.target, "__name__", node.target))


def _stripped(node: fx.Node) -> tuple[Any, ...]:
    """Positional arguments without those at the end that are the op's defaults."""
    args = list(node.args)
    if isinstance(node.target, torch._ops.OpOverload):
        schema = node.target._schema.arguments
        while args and len(args) <= len(schema) and not isinstance(args[-1], fx.Node):
            argument = schema[len(args) - 1]
            if not argument.has_default_value() or argument.default_value != args[-1]:
                break
            args.pop()
    return tuple(args)


def _arguments(args: tuple[Any, ...], kwargs: dict[str, Any], write: Write) -> str:
    return ", ".join([*(write(a).source for a in args), *(f"{k}={write(v).source}" for k, v in kwargs.items())])


def _unary(sign: str) -> Callable[[fx.Node, Write], Text]:
    return lambda node, write: Text(f"{sign}{write(node.args[0]).inside(14)}", 14)


def _getitem(node: fx.Node, write: Write) -> Text:
    return Text(f"{write(node.args[0]).inside(20)}[{node.args[1]}]")


def _slice(node: fx.Node, write: Write) -> Text | None:
    x, dim, start, end, step = list(node.args) + [0, None, None, 1][len(node.args) - 1 :]
    if not isinstance(x, fx.Node) or not isinstance(dim, int) or step != 1:
        return None
    rank = x.meta["val"].dim()
    low = "" if start in (None, 0) else str(start)
    high = "" if end is None or (isinstance(end, int) and end >= 2**62) else str(end)
    if not low and not high:
        return None
    dim = dim % rank
    if dim == rank - 1 and dim > 1:
        return Text(f"{write(x).inside(20)}[..., {low}:{high}]")
    return Text(f"{write(x).inside(20)}[{':, ' * dim}{low}:{high}]")


def _embedding(node: fx.Node, write: Write) -> Text | None:
    weight, ids, *rest = _stripped(node)
    if node.kwargs or len(rest) > 1:
        return None
    padding = f", padding_idx={rest[0]}" if rest else ""
    return Text(f"F.embedding({write(ids).source}, {write(weight).source}{padding})")


def _reduction(method: str) -> Callable[[fx.Node, Write], Text]:
    def form(node: fx.Node, write: Write) -> Text:
        x, dims, *rest = (*node.args, None)[: max(2, len(node.args))]
        dims = dims[0] if isinstance(dims, list | tuple) and len(dims) == 1 else dims
        words = [] if dims is None else [write(dims).source]
        words += [f"keepdim={rest[0]}"] if rest and rest[0] else []
        words += [f"{k}={write(v).source}" for k, v in node.kwargs.items()]
        return Text(f"{write(x).inside(20)}.{method}({', '.join(words)})")

    return form


def _softmax(node: fx.Node, write: Write) -> Text:
    x, dim, *dtype = node.args
    words = [write(dim).source, *(f"dtype={write(d).source}" for d in (*dtype, *node.kwargs.values()) if d is not None)]
    return Text(f"{write(x).inside(20)}.softmax({', '.join(words)})")


def _to(node: fx.Node, write: Write) -> Text | None:
    args = {**dict(zip(("dtype",), node.args[1:], strict=False)), **node.kwargs}
    if set(args) != {"dtype"} or len(node.args) > 2:
        return None
    return Text(f"{write(node.args[0]).inside(20)}.to({write(args['dtype']).source}, copy=True)")


def _cast(node: fx.Node, write: Write) -> Text | None:
    return None if node.kwargs or len(node.args) != 2 else Text(f"{write(node.args[0]).inside(20)}.to({node.args[1]})")


def _attention(node: fx.Node, write: Write) -> Text:
    names = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal")
    given = {**dict(zip(names, node.args, strict=False)), **node.kwargs}
    defaults = {"attn_mask": None, "dropout_p": 0.0, "is_causal": False, "scale": None, "enable_gqa": False}
    qkv = [write(given.pop(name)).source for name in names[:3]]
    rest = [f"{k}={write(v).source}" for k, v in given.items() if isinstance(v, fx.Node) or v != defaults[k]]
    return Text(f"F.scaled_dot_product_attention({', '.join([*qkv, *rest])})")


def _keywords(function: str, *names: str) -> Callable[[fx.Node, Write], Text]:
    """A call whose arguments after the first read better with their names."""

    def form(node: fx.Node, write: Write) -> Text:
        first, *rest = _stripped(node)
        words = [write(first).source, *(f"{n}={write(v).source}" for n, v in zip(names, rest, strict=False))]
        words += [f"{k}={write(v).source}" for k, v in node.kwargs.items()]
        return Text(f"{function}({', '.join(words)})")

    return form


def _reversed_sub(node: fx.Node, write: Write) -> Text | None:
    if node.kwargs or len(node.args) != 2:
        return None
    return Text(f"{write(node.args[1]).inside(10)} - {write(node.args[0]).inside(11)}", 10)


def _index(node: fx.Node, write: Write) -> Text:
    x, indices = node.args
    assert isinstance(indices, list | tuple)
    words = ", ".join(":" if index is None else write(index).source for index in indices)
    return Text(f"{write(x).inside(20)}[{words}]")


def _arange(node: fx.Node, write: Write) -> Text:
    return Text(f"torch.arange({_arguments(node.args, _without_device(node.kwargs), write)})")


def _full(node: fx.Node, write: Write) -> Text:
    return Text(f"torch.full({_arguments(node.args, _without_device(node.kwargs), write)})")


def _without_device(kwargs: dict[str, Any]) -> dict[str, Any]:
    return {k: v for k, v in kwargs.items() if not (k == "pin_memory" and not v) and k != "layout"}


_FORMS: dict[str, Callable[[fx.Node, Write], Text | None]] = {
    "neg.default": _unary("-"),
    "bitwise_not.default": _unary("~"),
    "slice.Tensor": _slice,
    "embedding.default": _embedding,
    "mean.dim": _reduction("mean"),
    "sum.dim_IntList": _reduction("sum"),
    "softmax.int": _softmax,
    "_to_copy.default": _to,
    "to.dtype": _cast,
    "scaled_dot_product_attention.default": _attention,
    "cat.default": _keywords("torch.cat", "dim"),
    "stack.default": _keywords("torch.stack", "dim"),
    "rsub.Scalar": _reversed_sub,
    "index.Tensor": _index,
    "arange.default": _arange,
    "arange.start": _arange,
    "arange.start_step": _arange,
    "full.default": _full,
    "layer_norm.default": lambda node, write: _keywords("F.layer_norm", "normalized_shape", "weight", "bias", "eps")(
        node, write
    ),
}


def call_text(node: fx.Node, write: Write) -> Text:
    """As `expression`, results of tuples too."""
    if node.meta.get("again"):
        return _again(node, write)
    return _getitem(node, write) if node.target is operator.getitem else expression(node, write)


def _again(node: fx.Node, write: Write) -> Text:
    """`again(F.linear, x, w)`, or with a lambda where the call is no plain one: `again(lambda a, b: a + b, x, y)`."""
    sources = tuple(dict.fromkeys(operands(node)))
    letters = {source: ascii_lowercase[i] if i < 26 else f"x{i}" for i, source in enumerate(sources)}
    given = ", ".join(write(source).source for source in sources)

    def lettered(value: Any) -> Text:
        if isinstance(value, fx.Node):
            return Text(letters[value])
        if isinstance(value, list) or (isinstance(value, tuple) and not isinstance(value, Label)):
            inside = ", ".join(lettered(v).source for v in value)
            return Text(f"[{inside}]" if isinstance(value, list) else f"({inside}{',' * (len(value) == 1)})")
        return write(value)

    made = expression(node, lettered).source
    names = ", ".join(letters.values())
    function, _, rest = made.partition(f"({names})")
    if not rest and function.replace(".", "_").isidentifier() and len(sources) == len(operands(node)):
        return Text(f"again({function}, {given})")
    return Text(f"again(lambda {names}: {made}, {given})")
