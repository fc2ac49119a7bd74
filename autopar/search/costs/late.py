"""For how long do reductions of gradients run while backward computes? They are waited for late (`runtime.reductions`).

A bucket's reduction begins when backward has computed the last of its gradients, the link takes one after the other,
and what is still on its way when backward ends is not hidden; nor are the levels of a reduction after the first, which
begin then. Each start delays backward by its alpha, and a reduce-scatter waits for the one before, because both would
hold a buffer. Collectives that backward waits for where they stand hide nothing: time counts only what it computes.

Gloo sends with the processors that compute: of a message they are busy for what the fastest link of the cluster would
take, which delays backward like a start. So nothing is hidden within a host, and between hosts what the wire takes.
"""

from collections.abc import Iterable, Mapping

import numpy as np

from autopar.cost_models.links import axis_links
from autopar.plan import Plan
from autopar.search.costs.fused import Fused, fused_messages
from autopar.search.costs.journeys import Journey
from autopar.search.costs.pricing import Pricer
from autopar.search.costs.program import Program


def late_seconds(
    plan: Plan, program: Program, pricer: Pricer, journeys: Mapping[str, Journey], groups: Iterable[Fused]
) -> float:
    """Seconds of reductions in buckets that are hidden, in a step of one micro-batch."""
    after = np.zeros(len(program.ops) + 1)
    for op in reversed(program.ops):
        after[op.position] = after[op.position + 1] + pricer.op(op, plan.choices[op.name]).backward
    sent = []
    for group in groups:
        messages = fused_messages(group, plan, journeys, backward=True)
        if not group.direct or not messages or not any(journeys[name].tensor.requires_grad for name, _ in group.values):
            continue
        first = messages[0]
        uses = [position for name, _ in group.values for position, _, _ in journeys[name].wanted]
        start, whole = (pricer.message(first.kind, first.axes, n, True)[0] for n in (1, first.nbytes))
        start += busy_share(pricer, first.axes) * (whole - start)
        sent.append((float(after[max(min(uses), 0)]), whole, start, first.kind == "reduce_scatter"))
    link = held = stalled = 0.0
    for ready, seconds, start, holds in sorted(sent):
        stalled += max(held - (ready + stalled), 0.0) if holds else 0.0
        link = max(link, ready + stalled) + seconds
        held = link if holds else held
        stalled += start
    shown = stalled + max(link - (float(after[0]) + stalled), 0.0)
    return max(sum(seconds for _, seconds, _, _ in sent) - shown, 0.0)


def busy_share(pricer: Pricer, axes: tuple[int, ...]) -> float:
    """For which part of the time that a message's bytes take the processor that computes is busy with them."""
    cluster = pricer.cluster
    crossings = axis_links(cluster, pricer.mesh.shape, axes).crossings
    if cluster.library != "gloo" or not crossings:
        return 0.0
    return min(1.0, crossings[0].level.bandwidth / max(level.bandwidth for level in cluster.levels))
