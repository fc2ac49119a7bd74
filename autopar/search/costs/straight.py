"""Whose gradients are computed straight into a bucket? Those of `passes.compute_straight`, found without a graph."""

from collections.abc import Mapping

from autopar.ops.straight import LEAST_NBYTES
from autopar.passes.compute_straight import WEIGHT
from autopar.placement import Layout
from autopar.plan import Plan
from autopar.rules.spare import short_name
from autopar.search.costs.fused import Fused, fused_messages
from autopar.search.costs.journeys import Journey
from autopar.search.costs.pricing import Pricer
from autopar.search.costs.program import Program
from autopar.search.costs.replays import Value


def find_straight(
    program: Program,
    plan: Plan,
    pricer: Pricer,
    journeys: Mapping[str, Journey],
    fused: Mapping[Value, Fused],
) -> dict[Value, Fused]:
    """Weights as linears read them, the transposed ones of a model too, and the buckets of their gradients."""
    if plan.microbatches > 1 or program.captured.is_stage:
        return {}
    found: dict[Value, Fused] = {}
    for (name, layout), group in fused.items():
        journey = journeys[name]
        step, nbytes = journey.made[layout], pricer.local_nbytes(journey.tensor, layout)
        if step.forward or step.backward != "all_reduce" or not group.direct or nbytes < LEAST_NBYTES:
            continue
        if pricer.widening(journey.tensor) > 1:
            continue
        value = name, layout
        reader = _only_reader(journey, layout)
        if reader is not None and _transposes(program, reader[0]):
            (result,) = program.ops[reader[0]].results
            if result is None:
                continue
            value = result, journeys[result].source
            reader = _only_reader(journeys[result], value[1])
        if reader is not None and _is_weight(program, plan, journeys, *reader):
            found[value] = group
    return found


def gradients_copied(
    program: Program, plan: Plan, pricer: Pricer, journeys: Mapping[str, Journey], fused: Mapping[Value, Fused]
) -> dict[Fused, float]:
    """Seconds in which a host copies gradients into the message of each bucket, all but those computed there."""
    out = dict.fromkeys(fused.values(), 0.0)
    if not pricer.rates.copied_seconds(1.0):
        return out
    straight = find_straight(program, plan, pricer, journeys, fused)
    for group in out:
        sent = fused_messages(group, plan, journeys, backward=True)
        there = [value for value, own in straight.items() if own is group]
        nbytes = sent[0].nbytes if sent else 0
        nbytes -= sum(pricer.local_nbytes(journeys[name].tensor, layout) for name, layout in there)
        out[group] = pricer.rates.copied_seconds(max(nbytes, 0))
    return out


def _only_reader(journey: Journey, layout: Layout) -> tuple[int, int] | None:
    """Position and slot of the op that reads a tensor in a layout, if nothing else is made of it."""
    if any(step.source == layout for step in journey.made.values()):
        return None
    readers = [(position, slot) for position, slot, wanted in journey.wanted if wanted == layout]
    return readers[0] if len(readers) == 1 and readers[0][0] >= 0 else None


def _transposes(program: Program, position: int) -> bool:
    node = program.ops[position].node
    return short_name(node) == "permute" and node.args[1:] in (([1, 0],), ((1, 0),))


def _is_weight(program: Program, plan: Plan, journeys: Mapping[str, Journey], position: int, slot: int) -> bool:
    """Whether an op multiplies what lies in one piece by what it reads in this slot, once."""
    op = program.ops[position]
    if short_name(op.node) != "linear" or slot != WEIGHT or op.name in plan.recompute or not op.has_backward:
        return False
    wanted = [layout for at, place, layout in journeys[op.operands[0]].wanted if (at, place) == (position, 0)]
    journey = journeys[op.operands[0]]
    return len(op.operand_shapes[WEIGHT]) == 2 and (journey.is_contiguous or all(map(journey.is_laid_anew, wanted)))
