"""Where a batch is after an op that only moves elements: views by row-major order, joined and cut dims by their sizes.

A dim may hold the batch several times in a row (two views of it joined), which is cut again where it was joined.
"""

import math
from collections.abc import Sequence
from dataclasses import replace

from torch import fx

from autopar.passes.sample_states import VIEWS, Batch, Each, Fixed, State, joined, moved
from autopar.rules.describe import argument, normalized_dim, result_values, shapes_of
from autopar.values.graph import operands


def moved_by(node: fx.Node, name: str, states: Sequence[State], batch: Batch) -> tuple[State, ...] | None:
    """The states of the results of an op that moves elements; None for another, or one that is as its rule says."""
    for known in (_view, _slice, _split, _cat, _repeat, _index):
        if (found := known(node, name, states, batch)) is not None:
            return found
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
    places = [_batches_of(n, operands(n)[0].meta["val"].shape[dim] // state.outer) for n in (node, twin)]
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
    rank = max(map(len, shapes))
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
