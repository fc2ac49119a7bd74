"""Which call on a rank's local tensor is a redistribution step? A function of `autopar.ops.collectives`, its arguments.

The step says what is computed forward and backward; the arguments name dims, mesh axes and, where a dim does not
divide, the local size to narrow to after a gather (collectives pad by themselves before they slice or scatter).
"""

import math
from collections.abc import Callable
from typing import Any

from torch import Tensor

from autopar.ops import collectives
from autopar.ops.groups import Axis
from autopar.values.mesh import Mesh
from autopar.values.placement import Shard, local_shape
from autopar.values.redistribution import Step

Collective = Callable[..., Tensor]


def collective_call(step: Step, shape: tuple[int, ...], mesh: Mesh) -> tuple[Collective, dict[str, Any]]:
    """The function and keywords of `step` for a tensor of global `shape`; the local tensor is the only operand."""
    axis = _axis(step.axes, mesh)
    before, after = step.before, step.after
    if isinstance(before, Shard) and isinstance(after, Shard):
        keywords = {"split_dim": after.dim, "concat_dim": before.dim, "axis": axis}
        return collectives.all_to_all, keywords | _narrowed(step, before.dim, shape, mesh)
    if isinstance(before, Shard):
        dim = before.dim
        if step.forward == "pad":
            size = local_shape(shape, step.target, mesh)[dim]
            return collectives.place_slice, {"dim": dim, "axis": axis, "size": size}
        keywords = {"dim": dim, "axis": axis, "backward": step.backward}
        return collectives.all_gather, keywords | _narrowed(step, dim, shape, mesh)
    if isinstance(after, Shard):
        if step.forward == "reduce_scatter":
            return collectives.reduce_scatter, {"dim": after.dim, "axis": axis}
        return collectives.local_slice, {"dim": after.dim, "axis": axis, "backward": step.backward}
    if step.forward:
        function = {"all_reduce": collectives.all_reduce, "divide": collectives.divide}[step.forward]
        return function, {"axis": axis, "backward": step.backward or "none"}
    if step.inside:
        inside = _axis(step.inside, mesh)
        outside = _axis(tuple(a for a in step.axes if a not in step.inside), mesh)
        return collectives.all_reduce_gradient, {"axis": outside, "inside": inside}
    return {"all_reduce": collectives.all_reduce_gradient, "divide": collectives.divide_gradient}[step.backward], {
        "axis": axis
    }


def _axis(axes: tuple[int, ...], mesh: Mesh) -> Axis:
    names = tuple(mesh.names[a] for a in axes)
    return names[0] if len(names) == 1 else names


def _narrowed(step: Step, dim: int, shape: tuple[int, ...], mesh: Mesh) -> dict[str, int]:
    """`size` of the gathered dim where the chunks gathered hold padding."""
    gathered = local_shape(shape, step.source, mesh)[dim] * math.prod(mesh.shape[a] for a in step.axes)
    size = local_shape(shape, step.target, mesh)[dim]
    return {} if size == gathered else {"size": size}
