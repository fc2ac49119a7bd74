"""Which collectives of parameters go together in one message? Those of a bucket of the plan that do the same.

A bucket (`buckets`) lists parameters. Of these, calls are fused that redistribute alike: the same function over
the same axes, as many redistributions after storage, of parameters of one dtype, all trained or all frozen, prepared
once a step or once a micro-batch. A fused call stands where the first of them stood, which is legal since they read
nothing but parameters. In backward autograd runs it when the gradient of its last result is there.

A reduction that is alone in its bucket is fused too, for what is fused may be waited for late; a lone gather is not, it
would be copied twice more. Parameters that are padded first (stored unevenly) go apart: their gradients must go back
through the padding, at once.
"""

import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from torch import fx

from autopar.ops import collectives
from autopar.ops.buckets import all_gather_bucket, all_reduce_gradient_bucket
from autopar.values.graph import ParameterSpec, operands
from autopar.values.lifetimes import ONCE_A_STEP
from autopar.values.stage_plan import StagePlan

Group = tuple[fx.Node, ...]


def fused_groups(graph: fx.Graph, parameters: Iterable[ParameterSpec], plan: StagePlan) -> list[Group]:
    """Calls of the graph that go together, in order of the first of each."""
    if not plan.buckets:
        return []
    bucket = {name: number for number, names in enumerate(plan.buckets) for name in names}
    specs = {spec.placeholder: spec for spec in parameters}
    place: dict[fx.Node, tuple[ParameterSpec, int]] = {}
    found: dict[tuple[object, ...], list[fx.Node]] = {}
    for node in graph.nodes:
        if node.op == "placeholder" and node.name in specs:
            place[node] = specs[node.name], 0
        elif node.op == "call_function" and getattr(node.target, "__module__", "") == collectives.__name__:
            sources = operands(node)
            if len(sources) != 1 or sources[0] not in place:
                continue
            spec, depth = place[sources[0]]
            if node.target is collectives.pad_dim:
                place[node] = spec, depth
                continue
            place[node] = spec, depth + 1
            alike = _alike(node)
            if alike is not None and spec.placeholder in bucket and _num_ranks(node, plan) > 1:
                direct = sources[0].op == "placeholder"
                once = plan.lifetimes.get(spec.placeholder) in ONCE_A_STEP
                key = (direct, bucket[spec.placeholder], depth, once, spec.dtype, spec.trainable, *alike)
                found.setdefault(key, []).append(node)
    waits_late = {key for key, (first, *_) in found.items() if key[0] and first.target is not collectives.all_gather}
    return [tuple(group) for key, group in found.items() if len(group) > 1 or key in waits_late]


def fuse_collectives(graph: fx.Graph, parameters: Iterable[ParameterSpec], plan: StagePlan) -> fx.Graph:
    """A copy of the graph (itself, where nothing goes together) with a call for each of `fused_groups`."""
    groups = fused_groups(graph, parameters, plan)
    if not groups:
        return graph
    group_of = {node: group for group in groups for node in group}
    fused, made = fx.Graph(), dict[fx.Node, fx.Node]()

    def emit(node: fx.Node) -> fx.Node:
        if node not in made:
            group = group_of.get(node, ())
            sources = [emit(source) for member in group or (node,) for source in member.all_input_nodes]
            if group:
                made.update(_call(fused, group, sources))
            else:
                made[node] = fused.node_copy(node, made.__getitem__)
        return made[node]

    for node in graph.nodes:
        emit(node)
    fused.lint()
    return fused


def _call(graph: fx.Graph, group: Group, sources: Sequence[fx.Node]) -> Mapping[fx.Node, fx.Node]:
    """One call for a group; its results by member."""
    first = group[0]
    keywords = {key: value for key, value in first.kwargs.items() if key not in ("dim", "size")}
    if all(source.op == "placeholder" for source in sources):
        keywords["names"] = tuple(source.name for source in sources)
    if first.target is collectives.all_gather:
        keywords["dims"] = tuple(member.kwargs["dim"] for member in group)
        keywords["sizes"] = tuple(member.kwargs.get("size") for member in group)
    call = graph.call_function(_FUSED[first.target], tuple(sources), keywords)
    made = {}
    for number, member in enumerate(group):
        made[member] = graph.create_node("call_function", operator.getitem, (call, number), {}, member.name)
        made[member].meta = dict(member.meta)
    return made


_FUSED: dict[Any, Callable[..., Any]] = {
    collectives.all_gather: all_gather_bucket,
    collectives.all_reduce_gradient: all_reduce_gradient_bucket,
}


def _alike(node: fx.Node) -> tuple[object, ...] | None:
    """What must be equal for calls to go together, None for calls that go alone."""
    if node.target not in _FUSED:
        return None
    if node.target is collectives.all_gather:
        keywords = node.kwargs
        back = keywords.get("backward", "reduce_scatter"), keywords.get("bits")
        return node.target, axis_of(node), *back, keywords.get("regather", False)
    return node.target, axis_of(node), axis_of(node, "inside"), node.kwargs.get("bits")


def axis_of(node: fx.Node, keyword: str = "axis") -> tuple[str, ...]:
    """The axes that a call of a collective names."""
    axis = node.kwargs.get(keyword, ())
    return (axis,) if isinstance(axis, str) else tuple(str(name) for name in axis)  # type: ignore[union-attr]


def _num_ranks(node: fx.Node, plan: StagePlan) -> int:
    ranks = 1
    for name in (*axis_of(node), *axis_of(node, "inside")):
        ranks *= plan.mesh.shape[plan.mesh.names.index(name)]
    return ranks
