"""When does each op and each collective of a step of one stage run, buckets and all? Its spans on a device and links.

The device runs the events of `lower.events` in their order and waits for what it sends, but for gathers that begin when
the bucket before is there (`lower.prefetch`), which it waits for where they are read, and for reductions of buckets in
a step of one micro-batch, which it waits for when backward ends. Those are on their way as the estimate counts them
(`search.costs.overlapped_seconds`): one after the other, while the device computes, so that what it waits for
interrupts them; each delays the device by its start, a gather by what it takes apart, and ranks wait for one another
when they wait for it. Other than in the estimate the loss's sum and the count of labels are waited for.
"""

import itertools
from bisect import bisect_left, bisect_right
from collections.abc import Iterable

from autopar.lower.buckets import Bucket
from autopar.lower.events import Event, find_events
from autopar.lower.live import Live
from autopar.lower.lowered_step import LoweredStep
from autopar.lower.prefetch import begun_backward, prefetched_buckets
from autopar.search.costs.event_prices import EventPrices
from autopar.search.costs.pricing import Pricer
from autopar.search.costs.runs import labels
from autopar.values.step_picture import Span, Track

DEVICE = "compute"

Sent = tuple[str, float, tuple[int, ...]]
"""Collective, seconds, mesh axes."""


class DrawnStep:
    """seconds: of the step as it is drawn; tracks and spans as in `values.step_picture.DrawnTimeline`.

    `_now` counts seconds that the device computes or waits for what was on its way. `_waits` are the moments of it at
    which the device waits for what it sends, and `_waited` for how long up to each: a moment is drawn so much later.
    """

    def __init__(self, step: LoweredStep, live: Live, pricer: Pricer) -> None:
        self._step, self._pricer, self._prices = step, pricer, EventPrices(step, pricer)
        self._words = labels(step.program)
        self._lanes: dict[str, dict[str, None]] = {DEVICE: {}}
        self._now = self._free = self._held = self._apart = 0.0
        self._waits, self._waited = list[float](), [0.0]
        self._on_their_way: list[tuple[float, float, str, str, str]] = []
        self._later: list[tuple[Event, Sent]] = []
        self._action = ""
        self.spans: list[Span] = []
        self._run(live)
        self.seconds = self._now + self._waited[-1]

    @property
    def tracks(self) -> tuple[Track, ...]:
        lanes = ((f"{level}: {', '.join(axes)}" if axes else level, level) for level, axes in self._lanes.items())
        return tuple(Track(rank=0, lane=lane, is_device=level == DEVICE) for lane, level in lanes)

    def _run(self, live: Live) -> None:
        step, found = self._step, find_events(self._step)
        several = step.plan.microbatches > 1
        ahead = dict(itertools.pairwise(prefetched_buckets(step)))
        again = {before: after for after, before in begun_backward(step, live.again).items()}
        self._pass((event for event in found.forward if several and event.once), {}, late=False)
        for number in range(step.plan.microbatches):
            for action, events, following in (("F", found.forward, ahead), ("B", found.backward, again)):
                self._action = f"{action}{number}" if several else action
                once = [event for event in events if not (several and event.once)]
                self._pass(once, following, late=not several and action == "B")
            self._ended()
        self._action = ""
        self._pass((event for event in found.backward if several and event.once), {}, late=False)
        self._pass(found.update, {}, late=False)
        for begins, ends, level, name, action in self._on_their_way:
            self._draw_interrupted(begins, ends, level, name, action)

    def _pass(self, events: Iterable[Event], following: dict[Bucket, Bucket], *, late: bool) -> None:
        """One pass; following: the bucket whose gather begins when a bucket's is there. late: reductions are waited
        for at the end."""
        events = list(events)
        gathers = {group: event for event in events if not event.is_back and (group := self._group(event))}
        arrives: dict[Bucket, float] = {}
        for event in events:
            if not event.messages:
                self._compute(event)
                continue
            group = self._group(event)
            if late and group is not None and event.is_back and group.direct:
                self._reduce_late(event)
                continue
            if group is not None and not event.is_back and group in arrives:
                self._now = max(self._now, arrives.pop(group))
                self._on_device(self._met(event) + self._copied(event), f"end of {event.kind}")
            else:
                self._wait_for(event, self._prices.sent(event))
            if group in following and not event.is_back and (then := gathers.get(following[group])) is not None:
                arrives[following[group]] = self._begin(then, self._prices.sent(then)[0])

    def _group(self, event: Event) -> Bucket | None:
        return self._step.fused.get(event.members[0]) if event.members else None

    def _compute(self, event: Event) -> None:
        more = ", again" * (event.kind == "recompute") + ", update" * (event.kind == "optimizer")
        self._on_device(self._prices.computed(event), self._words.get(event.name, event.name) + more)

    def _on_device(self, seconds: float, name: str) -> None:
        self._add(DEVICE, self._now + self._waited[-1], seconds, self._said(name), self._action)
        self._now += seconds

    def _wait_for(self, event: Event, sent: Iterable[Sent]) -> None:
        for kind, seconds, axes in sent:
            self._add(
                self._level(axes), self._now + self._waited[-1], seconds, self._sending(event, kind, axes), self._action
            )
            self._waits.append(self._now)
            self._waited.append(self._waited[-1] + seconds)

    def _begin(self, event: Event, sent: Sent) -> float:
        """When a message that nothing waits for yet is there."""
        kind, seconds, axes = sent
        copied, start = self._copied(event), self._pricer.message(kind, axes, 1, True)[0] - self._met(event)
        begins = max(self._free, self._now)
        self._free = begins + seconds - self._met(event) - (0.0 if event.is_back else copied)
        name = self._sending(event, kind, axes)
        self._on_their_way.append((begins, self._free, self._level(axes), name, self._action))
        self._on_device(start + (copied if event.is_back else 0.0), f"start of {kind}")
        return self._free

    def _met(self, event: Event) -> float:
        """For how long ranks wait for one another."""
        return self._pricer.waiting(event.messages[0].axes)

    def _copied(self, event: Event) -> float:
        """What a bucket takes to be put together or apart."""
        return self._pricer.rates.copied_seconds(event.messages[0].nbytes)

    def _reduce_late(self, event: Event) -> None:
        """The first level of a reduction begins, a reduce-scatter when the one before is there."""
        first, *rest = self._prices.sent(event)
        holds = first[0] == "reduce_scatter"
        if holds:
            self._now = max(self._now, self._held)
        there = self._begin(event, first)
        self._held = there if holds else self._held
        self._apart = max(self._apart, self._met(event))
        self._later += [(event, one) for one in rest]

    def _ended(self) -> None:
        """Wait for what is still on its way, then send what follows it."""
        self._now = max(self._now, self._free) + self._apart
        self._apart = 0.0
        for event, one in self._later:
            self._wait_for(event, (one,))
        self._later.clear()

    def _level(self, axes: tuple[int, ...]) -> str:
        """The link that a message along mesh axes takes."""
        level = self._pricer.slowest_level(axes) or DEVICE
        names = self._step.plan.mesh.names
        self._lanes.setdefault(level, {}).update((names[axis], None) for axis in axes)
        return level

    def _sending(self, event: Event, kind: str, axes: tuple[int, ...]) -> str:
        more = f" and {len(event.members) - 1} more" if len(event.members) > 1 else ""
        over = ", ".join(self._step.plan.mesh.names[axis] for axis in axes)
        return self._said(f"{kind} of {self._words.get(event.name, event.name)}{more} over {over}")

    def _said(self, name: str) -> str:
        return f"{self._action} {name}" if self._action else name

    def _draw_interrupted(self, begins: float, ends: float, level: str, name: str, action: str) -> None:
        """What was on its way from one moment to another, in pieces between what the device waited for."""
        first, last = bisect_right(self._waits, begins), bisect_left(self._waits, ends)
        moments = [begins, *self._waits[first:last], max(begins, ends)]
        for place, (one, other) in enumerate(itertools.pairwise(moments), start=first):
            self._add(level, one + self._waited[place], other - one, name, action)

    def _add(self, level: str, start: float, seconds: float, name: str, action: str) -> None:
        if seconds > 0:
            track = list(self._lanes).index(level)
            self.spans.append(Span(track=track, start=start, seconds=seconds, name=name, action=action[:1]))
