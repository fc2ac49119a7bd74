"""Are two stages the same but for names? Then what one costs, the other does.

Most stages of a pipeline are the same blocks decided alike. The key has all that prices and bytes are made of: calls in
their order with shapes, dtypes and constants, what is which of the placeholders, and what the plan says of each.
"""

from collections.abc import Hashable, Mapping
from typing import Any

from torch import Tensor, fx

from autopar.values.graph import CapturedModel, requires_grad, target_name
from autopar.values.placement import Layout
from autopar.values.stage_plan import StagePlan


def stage_key(plan: StagePlan, stage: CapturedModel, sent: Mapping[str, Layout]) -> Hashable:
    """Equal for stages that cost the same; `sent`: layouts in which the next stage takes what it is sent."""
    number = {node.name: i for i, node in enumerate(stage.graph.nodes)}
    specs: dict[str, tuple[object, ...]] = {p.placeholder: (p.dtype, p.storage, p.trainable) for p in stage.parameters}
    specs |= {b.placeholder: ("buffer", number.get(b.mutated_by or "", -1)) for b in stage.buffers}
    specs |= {name: ("constant",) for name in stage.constants}
    specs |= {i.placeholder: ("input", i.placeholder in stage.received) for i in stage.inputs}
    calls = []
    for node in stage.graph.nodes:
        name, arguments = node.name, fx.node.map_arg((node.args, node.kwargs), lambda n: f"%{number[n.name]}")
        made = (node.op, target_name(node.target) if node.op == "call_function" else "", repr(arguments))
        chosen = (plan.choices.get(name), plan.layouts.get(name), plan.lifetimes.get(name), name in plan.recompute)
        ways = (plan.routes.get(name), plan.remade.get(name), plan.ways.get(name), sent.get(name))
        calls.append((*made, _seen(node.meta.get("val")), requires_grad(node), specs.get(name), chosen, repr(ways)))
    ends = tuple(tuple(number[name] for name in names) for names in (stage.ends, stage.results, stage.received))
    buckets = tuple(tuple(number.get(name, -1) for name in bucket) for bucket in plan.buckets)
    return tuple(calls), ends, buckets, stage.accumulation is not None, plan.microbatches, plan.copies


def _seen(value: Any) -> Hashable:
    if isinstance(value, Tensor):
        return tuple(value.shape), value.dtype
    return tuple(_seen(one) for one in value) if isinstance(value, tuple | list) else None
