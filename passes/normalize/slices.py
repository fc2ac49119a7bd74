"""How are parts of a tensor taken? Always `slice(x, dim, start, end)`; parts put together always by `cat`."""

from itertools import accumulate, pairwise
from typing import Any

from torch import fx

from autopar.passes.graph_tools import aten, calls, insert, results, substitute
from autopar.values.graph import CapturedModel, dtype_of, shape_of

SPLITS = (
    aten.split.Tensor,
    aten.split_with_sizes.default,
    aten.chunk.default,
    aten.tensor_split.sections,
    aten.unbind.int,
    aten.split.sizes,
)


def normalize_slices(captured: CapturedModel) -> CapturedModel:
    """Split, chunk, unbind, select and narrow become slices; slice_scatter and select_scatter become cat."""
    graph = captured.graph
    for node in list(graph.nodes):
        if node.op != "call_function":
            continue
        if node.target in SPLITS:
            _split(node)
        elif node.target is aten.slice.Tensor:
            _slice(node)
        elif node.target is aten.narrow.default:
            x, dim, start, length = node.args
            start = start + shape_of(x)[dim] if start < 0 else start
            substitute(node, take(node, x, dim, start, start + length))
        elif node.target is aten.select.int:
            x, dim, index = node.args
            index = index + shape_of(x)[dim] if index < 0 else index
            part = take(node, x, dim, index, index + 1)
            substitute(node, insert(node, aten.reshape.default, (part, list(shape_of(node)))))
        elif node.target is aten.slice_scatter.default:
            _slice_scatter(node)
        elif node.target is aten.select_scatter.default:
            x, source, dim, index = node.args
            index = index + shape_of(x)[dim] if index < 0 else index
            row = insert(node, aten.unsqueeze.default, (source, dim))
            substitute(node, _written(node, x, row, dim, index, index + 1))
    for node in calls(graph, aten.slice.Tensor):
        piece = _piece_of_cat(node)
        if piece is not None:
            substitute(node, piece)
    return captured


def take(anchor: fx.Node, x: Any, dim: int, start: int, end: int) -> Any:
    """`x[start:end]` along `dim`, x itself when that is all of it."""
    if start == 0 and end == shape_of(x)[dim]:
        return x
    return insert(anchor, aten.slice.Tensor, (x, dim, start, end))


def bounds(node: fx.Node) -> tuple[Any, int, int, int, int]:
    """(x, dim, start, end, step) of a slice call, negative and open ends resolved."""
    args: list[Any] = [*node.args, *(None,) * (5 - len(node.args))]
    x, dim = args[0], args[1] or 0
    start, end, _ = slice(args[2], args[3]).indices(shape_of(x)[dim])
    return x, dim, start, max(start, end), args[4] or 1


def _slice(node: fx.Node) -> None:
    x, dim, start, end, step = bounds(node)
    if step != 1:
        node.args = (x, dim, start, end, step)
    else:
        substitute(node, take(node, x, dim, start, end))


def _split(node: fx.Node) -> None:
    x: Any = node.args[0]
    unbind = node.target is aten.unbind.int
    dim: Any = node.args[1 if unbind else 2] if len(node.args) > (1 if unbind else 2) else 0
    sizes = [1 if unbind else int(part.shape[dim]) for part in node.meta["val"]]
    spans = list(pairwise(accumulate(sizes, initial=0)))
    for position, result in results(node).items():
        part = take(result, x, dim, *spans[position])
        if unbind:
            part = insert(result, aten.reshape.default, (part, list(shape_of(result))))
        substitute(result, part)


def _slice_scatter(node: fx.Node) -> None:
    args: list[Any] = [*node.args, *(None,) * (6 - len(node.args))]
    x, source, dim = args[0], args[1], args[2] or 0
    start, end, _ = slice(args[3], args[4]).indices(shape_of(x)[dim])
    if (args[5] or 1) == 1:
        substitute(node, _written(node, x, source, dim, start, max(start, end)))


def _written(node: fx.Node, x: Any, source: Any, dim: int, start: int, end: int) -> fx.Node:
    """`x` with `source` in place of its part from `start` to `end`."""
    size = shape_of(x)[dim]
    if dtype_of(source) != dtype_of(x):
        source = insert(node, aten._to_copy.default, (source,), {"dtype": dtype_of(x)})
    before = [take(node, x, dim, 0, start)] if start > 0 else []
    after = [take(node, x, dim, end, size)] if end < size else []
    parts = [*before, source, *after]
    if len(parts) == 1:
        return parts[0]  # type: ignore[no-any-return]
    return insert(node, aten.cat.default, (parts, dim))


def _piece_of_cat(node: fx.Node) -> fx.Node | None:
    """The operand of a cat that a slice takes exactly, if it does."""
    x, dim, start, end, step = bounds(node)
    if x.target is not aten.cat.default or step != 1 or (x.args[1] if len(x.args) > 1 else 0) != dim:
        return None
    parts: Any = [part for part in x.args[0] if len(shape_of(part)) == len(shape_of(x))]
    ends = list(accumulate((shape_of(part)[dim] for part in parts), initial=0))
    for part, span in zip(parts, pairwise(ends), strict=True):
        if span == (start, end) and dtype_of(part) == dtype_of(x):
            return part  # type: ignore[no-any-return]
    return None
