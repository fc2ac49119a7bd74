"""What goes along with gradients, in a message that is sent anyway? The loss's last sum and the count of its labels.

Nothing in a step waits for the loss, nor, if the loss is a multiple of one mean over labels, for how many of these
count: dividing by all rows instead scales every gradient alike, and by the same number on all ranks. So both travel at
the end of a bucket's gradients. Where every label counts, as it mostly does, there is nothing left to scale.

Only where the processor sends (Gloo): there a message of eight bytes takes a share of a small step, wherever it stands.
An accelerator hides it, and would have to be asked whether to scale.
"""

from collections.abc import Iterable, Set

import torch
from torch import fx
from torch.fx.node import Argument

from autopar.graph import CapturedModel, LocalModel, Rider, dtype_of, operands
from autopar.ops.buckets import all_gather_bucket, all_reduce_gradient_bucket, all_reduce_riding
from autopar.ops.collectives import all_gather, all_reduce_gradient
from autopar.passes.accumulate_gradients import is_mean_over_labels, rows_of_mean
from autopar.passes.fuse_collectives import axis_of, fused_groups
from autopar.passes.recompute import is_replayed
from autopar.passes.start_early import counts_labels
from autopar.passes.wait_late import last_sums

MOST_ROWS = 2**24
"""Up to which float32 counts."""


def find_rider(local: LocalModel) -> Rider | None:
    """What of a step of one batch may go along with gradients, None if nothing."""
    captured, plan = local.captured, local.plan
    if captured.accumulation is not None or not captured.loss:
        return None
    sums = last_sums(local.graph)
    if not sums or dtype_of(sums[-1]) not in (torch.float32, torch.float64):
        return None
    axis = _over(sums)
    buckets = [
        group
        for group in fused_groups(local.graph, captured.parameters, plan)
        if _reduces(group[0], axis)
        and dtype_of(group[0]) == dtype_of(sums[-1])
        and group[0].meta["messages"][1]
        and all(operands(member)[0].op == "placeholder" for member in group)
    ]
    if not buckets:
        return None
    whole = [group for group in buckets if group[0].target is all_reduce_gradient]  # cheaper: there they go once
    direct = [group for group in whole if not axis_of(group[0], "inside")]
    carrier = (direct or whole or buckets)[-1][0]
    return Rider(
        bucket=operands(carrier)[0].name,
        scatters=not whole,
        inside=axis_of(carrier, "inside"),
        rows=_rows(local, axis),
    )


def _over(sums: Iterable[fx.Node]) -> set[str]:
    """The axes that a loss is summed over, in one all-reduce or one after the other."""
    return {axis for one in sums for axis in axis_of(one)}


def _reduces(call: fx.Node, axes: Set[str]) -> bool:
    """Whether backward of a call of parameters, alone or in a bucket, sums gradients, as they are made, over exactly
    these axes."""
    if {*axis_of(call), *axis_of(call, "inside")} != axes or call.kwargs.get("bits"):
        return False
    if call.target in (all_gather, all_gather_bucket):
        return call.kwargs.get("backward", "reduce_scatter") == "reduce_scatter"
    return call.target in (all_reduce_gradient, all_reduce_gradient_bucket)


def _rows(local: LocalModel, axes: Set[str]) -> float | None:
    """Of how many labels the loss is a mean whose count can go along."""
    for node in filter(is_mean_over_labels, local.graph.nodes):
        if not counts_labels(node) or set(axis_of(node, "row_axes")) != axes or is_replayed(node):
            return None  # divided by the count where it stands
    return countable_rows(local.captured)


def countable_rows(captured: CapturedModel) -> float | None:
    """Over how many labels the loss is a mean, None if gradients of another mean cannot be scaled to be of that."""
    rows = rows_of_mean(captured)
    if any(spec.dtype == torch.float16 for spec in captured.parameters):  # they may be too small for it
        return None
    is_exact = dtype_of(captured.nodes[captured.loss]) == torch.float64
    return rows if rows is not None and (rows <= MOST_ROWS or is_exact) else None


def ride_along(graph: fx.Graph, rider: Rider) -> fx.Graph:
    """A copy of the graph, in buckets (`fuse_collectives`), in which `rider` goes along."""
    copy = fx.Graph()
    copy.output(copy.graph_copy(graph, {}))
    sums = last_sums(copy)
    told, summand = sums[-1], operands(sums[0])[0]
    axes = _over(sums)
    keywords: dict[str, Argument] = {"axes": tuple(map(axis_of, sums))}
    told.args = (summand,)
    for node in list(copy.nodes):
        target = all_gather_bucket if rider.scatters else all_reduce_gradient_bucket
        is_it = node.target is target and rider.bucket in node.kwargs.get("names", ())
        if is_it and _reduces(node, axes) and axis_of(node, "inside") == rider.inside:
            node.kwargs = {**node.kwargs, "carries": True}
        elif rider.rows is not None and counts_labels(node):
            node.kwargs = {**node.kwargs, "count": rider.rows}
            told.args = (summand, node.args[1])
            keywords |= {"rows": rider.rows, "ignore_index": node.kwargs.get("ignore_index", -100)}
    told.target, told.kwargs = all_reduce_riding, keywords
    for one in reversed(sums[:-1]):
        copy.erase_node(one)
    copy.lint()
    return copy
