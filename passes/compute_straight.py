"""Whose gradient is computed straight into its bucket's flat buffer? That of a weight which one `linear` reads.

Of a bucket of gradients that are summed over ranks (`fuse_collectives`); the weight may lie the other way round, as
GPT-2's do. Left out are calls that the plan may run again in backward, weights that several calls read, and small ones,
whose copy takes less time than a call through Python, and
gradients that are summed in another dtype. With several micro-batches gradients are added up first.
"""

import operator

import torch
from torch import fx
from torch.nn import functional as F

from autopar.graph import LocalModel
from autopar.ops.buckets import all_reduce_gradient_bucket
from autopar.ops.straight import LEAST_NBYTES, linear_straight

LINEAR = torch.ops.aten.linear.default, F.linear
PERMUTE = torch.ops.aten.permute.default, "permute"
"""As a graph has them, and as exported code calls them."""

WEIGHT = 1
"""Which operand of a linear."""


def compute_straight(graph: fx.Graph, local: LocalModel) -> fx.Graph:
    """The graph of `local`, in buckets, with such gradients computed where they are sent from (a copy, where there are
    some)."""
    nbytes = {node.name: node.meta["val"].nbytes for node in local.graph.nodes if node.op == "placeholder"}
    copy = fx.Graph()
    copy.output(copy.graph_copy(graph, {}))
    changed = False
    for bucket in list(copy.nodes):
        if bucket.target is not all_reduce_gradient_bucket or bucket.kwargs.get("bits"):
            continue
        names = bucket.kwargs.get("names", ())  # of parameters themselves
        values = [value for value in bucket.users if names and nbytes[names[value.args[1]]] >= LEAST_NBYTES]
        readers = {value.args[1]: reader for value in values if (reader := _reader(value)) is not None}
        readers = {place: found for place, found in readers.items() if found[0].name not in local.plan.recompute}
        if not readers:
            continue
        changed = True
        bucket.kwargs = {**bucket.kwargs, "straight": True}
        with copy.inserting_after(bucket):
            room = copy.call_function(operator.getitem, (bucket, len(bucket.args)))
        for place, (linear, is_transposed) in readers.items():
            linear.target = linear_straight
            linear.kwargs = {**linear.kwargs, "room": room, "place": place, "is_transposed": is_transposed}
    copy.lint()
    return copy if changed else graph


def _reader(value: fx.Node) -> tuple[fx.Node, bool] | None:
    """The linear that alone reads a value as its weight, and whether it reads the transpose."""
    if len(value.users) != 1:
        return None
    (reader,) = value.users
    weight, is_transposed = value, reader.target in PERMUTE and reader.args[1:] in (([1, 0],), ((1, 0),), (1, 0))
    if is_transposed:
        if len(reader.users) != 1:
            return None
        weight, (reader,) = reader, reader.users
    is_weight = [i for i, arg in enumerate(reader.args) if arg is weight] == [WEIGHT]
    return (reader, is_transposed) if reader.target in LINEAR and is_weight else None
