"""Which sizes of an exported graph are numbers after all? A mask's count that later calls fix is one.

`x[mask]` has as many rows as there are places in the mask, which tracing does not know; where the model adds a tensor
of 8 rows to it, only 8 can be meant, and export has noted that. Such a selection is by `nonzero_static(mask, size=8)`,
and the count is checked when the step runs: eager would fail there too.
"""

from typing import Any

import torch
from torch import Tensor, fx

from autopar.capture.user_frame import frame_of_stack
from autopar.ops.checked import ERROR

aten = torch.ops.aten
_SYMBOLIC = (torch.SymInt, torch.SymFloat, torch.SymBool)


def fix_sizes(graph: fx.Graph) -> None:
    """Write symbolic numbers and sizes that are known as numbers, in arguments and in meta."""
    known: dict[fx.Node, Any] = {}
    for node in list(graph.nodes):
        if known and node.op != "placeholder":
            node.args = fx.node.map_arg(node.args, lambda n: known.get(n, n))
            node.kwargs = fx.node.map_arg(node.kwargs, lambda n: known.get(n, n))
        value = node.meta.get("val")
        if isinstance(value, _SYMBOLIC) and (number := _number(value)) is not None:
            known[node] = number
        elif isinstance(value, Tensor) and not all(isinstance(n, int) for n in value.shape):
            sizes = [_number(n) for n in value.shape]
            if None not in sizes:
                node.meta["val"] = torch.empty(sizes, dtype=value.dtype, device="meta")
                if node.target is aten.index.Tensor:
                    _select(node, sizes)
                elif node.target is aten.repeat_interleave.self_Tensor:
                    _repeat(node, sizes)
    for node in reversed(list(known)):
        graph.erase_node(node)
    _drop_unread(graph)


def _drop_unread(graph: fx.Graph) -> None:
    """Remove what is only counted (`len(torch.unique(x))` in a log), which nothing reads but export's assertions."""
    for node in reversed(graph.nodes):
        if node.op == "call_function" and not node.users:
            value = node.meta.get("val")
            parts = value if isinstance(value, tuple | list) else [value]
            if node.target is aten._assert_scalar.default or any(map(_is_unknown, parts)):
                graph.erase_node(node)


def _is_unknown(value: Any) -> bool:
    """Whether a value is a size that tracing does not know, or has one."""
    sizes = value.shape if isinstance(value, Tensor) else [value]
    return any(isinstance(size, _SYMBOLIC) for size in sizes)


def _number(value: Any) -> Any:
    if not isinstance(value, _SYMBOLIC):
        return value
    kinds = {torch.SymInt: "maybe_as_int", torch.SymFloat: "maybe_as_float", torch.SymBool: "maybe_as_bool"}
    return getattr(value.node, kinds[type(value)])()


def _select(node: fx.Node, sizes: list[Any]) -> None:
    """Selection by one mask alone, in front, as selection by places."""
    source: Any = node.args[0]
    index: Any = node.args[1]
    first, *rest = index
    mask = first.meta["val"] if isinstance(first, fx.Node) else None
    if not isinstance(mask, Tensor) or mask.dtype != torch.bool or any(part is not None for part in rest):
        return
    count = sizes[0]
    with node.graph.inserting_before(node):
        places = _call(node, aten.nonzero_static.default, [count, mask.dim()], torch.int64, first, size=count)
        columns = [_call(node, aten.select.int, [count], torch.int64, places, 1, dim) for dim in range(mask.dim())]
        found = _call(node, aten.sum.default, [], torch.int64, first)
        _expect(node, found, count, "the mask selects")
    node.args = (source, columns)


def _repeat(node: fx.Node, sizes: list[Any]) -> None:
    """Repetition by numbers of the data, one for each place."""
    source: Any = node.args[0]
    repeats: Any = node.args[1]
    dim: Any = node.args[2] if len(node.args) > 2 else node.kwargs.get("dim")
    whole, given = source.meta["val"], repeats.meta["val"]
    places, count = (whole.numel(), sizes[0]) if dim is None else (whole.shape[dim], sizes[dim])
    with node.graph.inserting_before(node):
        found = _call(node, aten.sum.default, [], torch.int64, repeats)
        if given.numel() != places:
            found = _call(node, aten.mul.Scalar, [], torch.int64, found, places)
        _expect(node, found, count, "repeat_interleave gives")
    node.kwargs = {**node.kwargs, "output_size": count}


def _call(node: fx.Node, target: Any, shape: list[int], dtype: torch.dtype, *args: Any, **kwargs: Any) -> fx.Node:
    """A call of the same line as `node`."""
    made = node.graph.call_function(target, args, kwargs)
    made.meta = {**node.meta, "val": torch.empty(shape, dtype=dtype, device="meta")}
    return made


def _expect(node: fx.Node, found: fx.Node, count: int, what: str) -> None:
    """A check that a number of the data is as what follows needs it."""
    holds = _call(node, aten.eq.Scalar, [], torch.bool, found, count)
    where = frame_of_stack(str(node.meta.get("stack_trace", ""))) or "the model"
    message = f"{ERROR}{where}: {what} other than {count} places, which does not fit what follows"
    node.graph.call_function(aten._assert_async.msg, (holds, message)).meta = {**node.meta, "val": None}
