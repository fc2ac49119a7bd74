"""For how long do collectives run beside compute? What begins early, or is waited for late, hides.

Reductions of gradients are waited for late (`runtime.reductions`). A bucket's begins when backward has computed the
last of its gradients, the link takes one after the other, and what is still on its way when backward ends is not
hidden; nor are the levels of a reduction after the first, which begin then. Each start delays backward by its alpha,
and a reduce-scatter waits for the one before, because both would hold a buffer. Collectives that backward waits for
where they stand hide nothing: time counts only what it computes.

Ranks that computed come late to a collective (`cost_models.collectives`), for which each pays where it stands. Late
reductions pay once, when backward ends, and so do the levels that follow, between which nothing is computed.

The count of labels begins before the first call (`passes.start_early`), when ranks have just met, and has the forward
pass up to the loss to arrive; the loss's last sum is waited for when the step is over (`passes.wait_late`), as
gradients are, and has the backward pass.
"""

import numpy as np

from autopar.lower.buckets import bucket_messages
from autopar.lower.lowered_step import LoweredStep
from autopar.search.costs.pricing import Pricer, Timed
from autopar.values.placement import INVARIANT, Layout


def overlapped_seconds(step: LoweredStep, pricer: Pricer) -> float:
    """Seconds of collectives that are hidden, in a step of one micro-batch."""
    ops, choices = step.program.ops, step.plan.choices
    prices = [pricer.op(op, choices[op.name]) for op in ops]
    before = np.cumsum([0.0, *(price.forward for price in prices)])
    after = np.cumsum([0.0, *(price.backward for price in reversed(prices))])[::-1]
    hidden = _reductions(step, pricer, after)
    for op, price in zip(ops, prices, strict=True):
        hidden += _beside(price.early, pricer, float(before[op.position]))
    return hidden + _beside(_told(step, pricer), pricer, float(after[0]))


def _beside(sent: Timed, pricer: Pricer, room: float) -> float:
    """Seconds of messages that run beside so much compute, after or before which their ranks meet anyway."""
    hidden = 0.0
    for _, seconds, axes in sent:
        wait = pricer.waiting(axes)
        travel = min(max(seconds - wait - pricer.starting(axes), 0.0), room)
        hidden, room = hidden + wait + travel, room - travel
    return hidden


def _told(step: LoweredStep, pricer: Pricer) -> Timed:
    """The last sum of the loss over ranks, which nothing in the step waits for."""
    one = step.redistributed.get(step.program.loss)
    if one is None:
        return ()
    steps = one.path(Layout((INVARIANT,) * len(one.source.axes)))
    if not steps or (steps[-1].forward, steps[-1].backward) != ("all_reduce", ""):
        return ()
    return pricer.step(steps[-1], one.tensor.shape, one.tensor.element_size, False)[0][-1:]


def _reductions(step: LoweredStep, pricer: Pricer, after: "np.ndarray[tuple[int], np.dtype[np.float64]]") -> float:
    """Seconds of reductions in buckets that are hidden; after[i]: of backward from op i on."""
    redistributed, sent, paid, wait = step.redistributed, [], 0.0, 0.0
    for group in dict.fromkeys(step.fused.values()):
        messages = bucket_messages(group, step.plan, redistributed, backward=True)
        if (
            not group.direct
            or not messages
            or not any(redistributed[name].tensor.requires_grad for name, _ in group.values)
        ):
            continue
        first = messages[0]
        own = pricer.rates.copied_seconds(first.nbytes)
        uses = [position for name, _ in group.values for position, _, _ in redistributed[name].wanted]
        waits = [pricer.waiting(message.axes) for message in messages]
        paid, wait = paid + sum(waits), max(wait, *waits)
        start, whole = (pricer.message(first.kind, first.axes, n, True)[0] - waits[0] for n in (1, first.nbytes))
        sent.append((-max(min(uses), 0), whole + own, start + own, first.kind == "reduce_scatter"))
    link = held = stalled = 0.0
    for last, seconds, start, holds in sorted(sent):
        ready = float(after[-last])
        stalled += max(held - (ready + stalled), 0.0) if holds else 0.0
        link = max(link, ready + stalled) + seconds
        held = link if holds else held
        stalled += start
    shown = stalled + max(link - (float(after[0]) + stalled), 0.0)
    beside = sum(seconds for _, seconds, _, _ in sent) - shown
    return max(beside + paid - wait, 0.0)
