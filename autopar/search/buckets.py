"""Which parameters are gathered, and their gradients reduced, in one message? Borders chosen in the cost model.

Parameters are taken in the order of their first use. Neighbours share a bucket only if their ways are alike: the same
collectives over the same axes, one dtype, both trained or both frozen, one lifetime.

    kept copies     the merge of MG-WFBP (`cost_models.gradient_exchange.merged_gradients`): gradients are ready when
                    the backward passes of all later ops are over, and a message costs alpha + beta bytes. Neighbours
                    are merged on where a message would take longer to start than to travel: starting takes the
                    processor's time, which nothing hides
    gathered for use (ZeRO-3)   those of one block that are used one after the other: a larger bucket would hold more
                    gathered copies at once, which such a parameter is there to avoid

Buckets are left out where with them the plan would not fit the memory limit.
"""

from collections.abc import Iterator
from dataclasses import replace

import numpy as np

from autopar.blocks import block_of
from autopar.cluster import Cluster
from autopar.cost_models.gradient_exchange.merged_gradients import Floats, optimal_merge
from autopar.graph import CapturedModel
from autopar.placement import is_even
from autopar.plan import Plan
from autopar.redistribution import Message, messages
from autopar.search.baselines import memory_limit
from autopar.search.evaluate import evaluate_program
from autopar.search.journeys import Journey, make_journeys
from autopar.search.pricing import Pricer
from autopar.search.program import Program, make_program

Buckets = tuple[tuple[str, ...], ...]


def with_buckets(plan: Plan, captured: CapturedModel, cluster: Cluster) -> Plan:
    """The plan with buckets, priced again."""
    program = make_program(captured)
    pricer = Pricer(mesh=plan.mesh, cluster=cluster, config=plan.config)
    limit = memory_limit(cluster, plan.config)
    for buckets in (choose_buckets(plan, program, pricer), ()):
        found = replace(plan, buckets=buckets)
        found = found.with_estimate(evaluate_program(found, program, pricer))
        if found.estimate.peak_nbytes <= limit:
            return found
    return plan


def choose_buckets(plan: Plan, program: Program, pricer: Pricer) -> Buckets:
    """Buckets of two and more parameters."""
    found = []
    for journeys in _runs(plan, program, pricer):
        use = plan.lifetimes.get(journeys[0].tensor.name) == "use"
        for group in [journeys] if use else _merged(journeys, plan, program, pricer):
            if len(group) > 1:
                found.append(tuple(journey.tensor.name for journey in group))
    return tuple(found)


def _runs(plan: Plan, program: Program, pricer: Pricer) -> Iterator[list[Journey]]:
    """Parameters that may share a bucket, in the order of their first use."""
    open_runs: dict[object, list[Journey]] = {}
    last_block: str | None = None
    moving = [j for j in make_journeys(program, plan, pricer).values() if j.tensor.kind == "parameter" and j.made]
    for journey in sorted(moving, key=_first_use):
        block = block_of(program.ops[max(_first_use(journey), 0)].module)
        if block != last_block:
            for key in [key for key in open_runs if "use" in key]:  # type: ignore[operator]
                yield open_runs.pop(key)
        last_block = block
        open_runs.setdefault(_alike(journey, plan), []).append(journey)
    yield from open_runs.values()


def _first_use(journey: Journey) -> int:
    return min(position for position, _, _ in journey.wanted)


def _alike(journey: Journey, plan: Plan) -> tuple[object, ...]:
    tensor = journey.tensor
    return (
        plan.lifetimes.get(tensor.name, ""),
        frozenset(
            (step.source == journey.source, step.forward, step.backward, step.axes) for step in journey.made.values()
        ),
        is_even(tensor.shape, journey.source, plan.mesh),
        tensor.element_size,
        tensor.requires_grad,
    )


def _merged(journeys: list[Journey], plan: Plan, program: Program, pricer: Pricer) -> list[list[Journey]]:
    """MG-WFBP's merge of the gradients, which are ready in the reverse order of use."""
    after = np.zeros(len(program.ops) + 1)
    for op in reversed(program.ops):
        after[op.position] = after[op.position + 1] + pricer.op(op, plan.choices[op.name]).backward
    order = journeys[::-1]
    ready = np.array([after[max(_first_use(journey), 0)] for journey in order])
    sent = [_messages(journey, plan) for journey in order]
    nbytes = np.array([float(sum(m.nbytes for m in found)) for found in sent])
    heaviest = max((m for found in sent for m in found), key=lambda m: m.nbytes, default=None)
    if heaviest is None:
        return [[journey] for journey in journeys]
    alpha = pricer.message(heaviest.kind, heaviest.axes, 1, True)[0]
    whole = pricer.message(heaviest.kind, heaviest.axes, int(nbytes.sum()), True)[0]
    beta = max(whole - alpha, 0.0) / nbytes.sum()
    groups = _none_too_small(optimal_merge(ready, nbytes, alpha, beta), nbytes, alpha / beta if beta else 0.0)
    return [order[first : last + 1][::-1] for first, last in groups]


def _none_too_small(groups: list[tuple[int, int]], nbytes: Floats, least: float) -> list[tuple[int, int]]:
    """Neighbours merged until every message has `least` bytes."""
    out: list[tuple[int, int]] = []
    for first, last in groups:
        if out and nbytes[out[-1][0] : out[-1][1] + 1].sum() < least:
            out[-1] = out[-1][0], last
        else:
            out.append((first, last))
    if len(out) > 1 and nbytes[out[-1][0] : out[-1][1] + 1].sum() < least:
        out[-2:] = [(out[-2][0], out[-1][1])]
    return out


def _messages(journey: Journey, plan: Plan) -> list[Message]:
    """What the gradient of a parameter sends, or the parameter itself if it has none."""
    tensor = journey.tensor
    sent = [messages(step, tensor.shape, tensor.element_size, plan.mesh) for step in journey.made.values()]
    return [message for pair in sent for message in pair[tensor.requires_grad]]
