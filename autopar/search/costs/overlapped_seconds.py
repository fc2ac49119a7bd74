"""For how long do collectives run beside compute? What begins early, or is waited for late, hides.

Reductions of gradients are waited for late (`runtime.reductions`). A bucket's begins when backward has computed the
last of its gradients, the link takes one after the other, and what is still on its way when backward ends is not
hidden; nor are the levels of a reduction after the first, which begin then. Each start delays backward by its alpha,
and a reduce-scatter waits for the one before, because both would hold a buffer. Collectives that backward waits for
where they stand hide nothing: time counts only what it computes.

Gathers that begin early (`lower.prefetch`) run beside what reads the bucket before, and share the link with reductions.

Ranks that computed come late to a collective (`cost_models.collectives`), for which each pays where it stands. Late
reductions pay once, when backward ends, and so do the levels that follow, between which nothing is computed.

The count of labels begins before the first call (`passes.start_early`), when ranks have just met, and has the forward
pass up to the loss to arrive; the loss's last sum is waited for when the step is over (`passes.wait_late`), as
gradients are, and has the backward pass.
"""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from autopar.lower.buckets import Bucket, bucket_messages
from autopar.lower.lowered_step import LoweredStep
from autopar.lower.prefetch import begun_backward, begun_forward, prefetched_buckets
from autopar.search.costs.pricing import Pricer, Timed
from autopar.values.placement import INVARIANT, Layout

Floats = NDArray[np.float64]


def overlapped_seconds(step: LoweredStep, pricer: Pricer) -> float:
    """Seconds of collectives that are hidden in a step: gathers in every micro-batch, the rest where there is one."""
    ops, choices = step.program.ops, step.plan.choices
    prices = [pricer.op(op, choices[op.name]) for op in ops]
    before = np.cumsum([0.0, *(price.forward for price in prices)])
    after = np.cumsum([0.0, *(price.backward for price in reversed(prices))])[::-1]
    ahead, back = _gathers(step, pricer, before, after)
    hidden = _Link().run(ahead)
    if step.plan.microbatches > 1:
        return (hidden + _Link().run(back)) * step.plan.microbatches
    reductions, spared = _reductions(step, pricer, after)
    hidden += max(_Link(float(after[0])).run([*back, *reductions]) + spared, 0.0)
    for op, price in zip(ops, prices, strict=True):
        hidden += _beside(price.early, pricer, float(before[op.position]))
    return hidden + _beside(_told(step, pricer), pricer, float(after[0]))


@dataclass(frozen=True, slots=True, kw_only=True)
class InFlight:
    """A message beside compute, whose times are seconds of compute from the beginning of a pass.

    begins, read: when it can begin, and when it is waited for (None: at the end). start: what beginning it delays.
    holds: another that holds must be there before it begins.
    place: among gathers, each of which begins when the one before is there.
    """

    begins: float
    read: float | None
    seconds: float
    start: float
    holds: bool = False
    place: int = 0


@dataclass(slots=True)
class _Link:
    """One message after the other; compute waits where it reads one.

    end: when compute is over, and all must be there.
    """

    end: float = 0.0
    free: float = 0.0
    stalled: float = 0.0

    def run(self, messages: Sequence[InFlight]) -> float:
        """Seconds of these messages that compute does not wait for."""
        moments = [(sent.begins, 2 * sent.place, True, number) for number, sent in enumerate(messages)]
        reads = [(sent.read, sent.place, number) for number, sent in enumerate(messages) if sent.read is not None]
        moments += [(read, 2 * place + 1, False, number) for read, place, number in reads]
        arrives: dict[int, float] = {}
        held = 0.0
        for at, _, is_begun, number in sorted(moments):
            sent = messages[number]
            if not is_begun:
                self._wait(at, arrives[number])
                continue
            if sent.holds:
                self._wait(at, held)
            self.free = arrives[number] = max(self.free, at + self.stalled) + sent.seconds
            held = self.free if sent.holds else held
            self.stalled += sent.start
        if any(sent.read is None for sent in messages):
            self._wait(self.end, self.free)
        return sum(sent.seconds for sent in messages) - self.stalled

    def _wait(self, at: float, arrives: float) -> None:
        self.stalled += max(arrives - (at + self.stalled), 0.0)


def _gathers(step: LoweredStep, pricer: Pricer, before: Floats, after: Floats) -> tuple[list[InFlight], list[InFlight]]:
    """Those of buckets that are begun early, forward and back; the first of each pass is waited for."""
    groups = prefetched_buckets(step)
    following = _next_ops(step)
    first = {group: following[step.first[group]] for group in groups}
    uses = step.recomputation.uses
    last = {g: max((p for value in g.values for p in uses.get(value, ())), default=-1) for g in groups}
    forward, backward = begun_forward(step), begun_backward(step, {g: -p for g, p in last.items() if p >= 0})
    ahead = [
        _sent(step, pricer, group, place, float(before[first[earlier]]), float(before[first[group]]))
        for place, (earlier, group) in enumerate(itertools.pairwise(groups))
        if group in forward
    ]
    back = [
        _sent(step, pricer, group, -place, float(after[last[later] + 1]), float(after[last[group] + 1]))
        for place, (group, later) in enumerate(backward.items())
    ]
    return ahead, back


def _next_ops(step: LoweredStep) -> list[int]:
    """Of each call the position of the first op that is computed after it."""
    out, position = list[int](), len(step.program.ops)
    for call in reversed(step.calls):
        position = position if call.op is None else call.op.position
        out.append(position)
    return out[::-1]


def _sent(step: LoweredStep, pricer: Pricer, group: Bucket, place: int, begins: float, read: float) -> InFlight:
    message = bucket_messages(group, step.plan, step.redistributed, backward=False)[0]
    wait = pricer.waiting(message.axes)
    start, whole = (pricer.message(message.kind, message.axes, n, True)[0] - wait for n in (1, message.nbytes))
    return InFlight(begins=begins, read=read, seconds=whole, start=start, place=place)


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


def _reductions(step: LoweredStep, pricer: Pricer, after: Floats) -> tuple[list[InFlight], float]:
    """Those of gradients in buckets, and seconds that ranks wait for one another less."""
    redistributed, sent, paid, wait = step.redistributed, list[InFlight](), 0.0, 0.0
    for group in dict.fromkeys(step.fused.values()):
        messages = bucket_messages(group, step.plan, redistributed, backward=True)
        is_trained = any(redistributed[name].tensor.requires_grad for name, _ in group.values)
        if not group.direct or not messages or not is_trained:
            continue
        first = messages[0]
        own = pricer.rates.copied_seconds(first.nbytes)
        uses = [position for name, _ in group.values for position, _, _ in redistributed[name].wanted]
        waits = [pricer.waiting(message.axes) for message in messages]
        paid, wait = paid + sum(waits), max(wait, *waits)
        start, whole = (pricer.message(first.kind, first.axes, n, True)[0] - waits[0] for n in (1, first.nbytes))
        ready = float(after[max(min(uses), 0)])
        holds = first.kind == "reduce_scatter"
        sent.append(InFlight(begins=ready, read=None, seconds=whole + own, start=start + own, holds=holds))
    return sent, paid - wait
