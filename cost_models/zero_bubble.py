"""Which order of forwards, backwards and weight gradients leaves a pipeline least idle under a limit of activations?

Handcrafted orders assume that the three parts of a micro-batch take equal time and messages none. Here each stage takes
at each moment what it can do now: a backward that has arrived, else a forward (if memory has room), else the weights'
part of an earlier backward, unless more urgent work is known to arrive within `patience` of that part's time. Patience,
the time kept free for the first backward and the lead over the next stage are tried over a small grid, the order with
the shortest span is kept. The idea and its limit: Qi et al. 2023, "Zero Bubble Pipeline Parallelism", section 3.1;
ZB-1p and ZB-2p there are limits of p and 2p micro-batches.
"""

import heapq
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product

from autopar.cost_models.pipeline import make_pipeline, uniform_work
from autopar.cost_models.schedules import Action, PipelineOrder, make_order
from autopar.cost_models.timeline import simulate
from autopar.errors import ArgumentError


@dataclass(frozen=True, slots=True, kw_only=True)
class Passes:
    """Seconds of one micro-batch on one stage: forward, backward of input and of weights, a message to a neighbour.

    `kept_for_weights`: what remains of a micro-batch's activations between the two parts of backward, as a fraction.
    """

    forward: float
    backward_input: float
    backward_weight: float
    send: float = 0.0
    kept_for_weights: float = 0.5


def automatic_order(num_ranks: int, num_microbatches: int, passes: Passes, limit: float) -> PipelineOrder:
    """The best order found in which no rank holds activations of more than `limit` micro-batches.

    Raises:
        ArgumentError: if the limit has no room for one micro-batch, or a pass takes no time.
    """
    if limit < 1:
        raise ArgumentError(f"a limit of {limit} micro-batches holds none; give at least 1, {num_ranks} for zb-h1")
    if min(passes.forward, passes.backward_input, passes.backward_weight) <= 0:
        raise ArgumentError(f"each pass must take some time: {passes}")
    orders = [_Greedy(num_ranks, num_microbatches, passes, limit, policy).run() for policy in policies()]
    if limit >= num_ranks:
        orders.append(make_order("zb-h1", num_ranks, num_microbatches))
    return min(orders, key=lambda order: span(order, passes))


def span(order: PipelineOrder, passes: Passes) -> float:
    """The longest time of a rank from its first to its last action."""
    backward = passes.backward_input + passes.backward_weight
    seconds = {"F": passes.forward, "B": backward, "I": passes.backward_input, "W": passes.backward_weight}
    pipeline = make_pipeline(order, uniform_work(order, seconds, passes.send))
    return pipeline.longest_span(simulate(pipeline.tasks))


@dataclass(frozen=True, slots=True, kw_only=True)
class Policy:
    """patience: wait for known work rather than start a `W`, if it arrives within that part of the `W`.

    reserve: before its first backward, keep a rank free from that part of a forward before the backward can arrive.
    ahead: forwards that a rank does more than the next rank at most, in steady state; None for no bound.
    """

    patience: float
    reserve: float
    ahead: int | None


def policies() -> Iterator[Policy]:
    for patience, reserve, ahead in product((0.0, 0.6), (0.0, 0.5, 1.0), (None, 2)):
        yield Policy(patience=patience, reserve=reserve, ahead=ahead)


class _Greedy:
    def __init__(self, p: int, m: int, passes: Passes, limit: float, policy: Policy) -> None:
        self.p, self.m, self.passes, self.limit, self.policy = p, m, passes, limit, policy
        self.done = [{"F": 0, "I": 0, "W": 0} for _ in range(p)]
        self.arrived = [{"F": m if rank == 0 else 0, "I": 0} for rank in range(p)]
        self.coming: list[list[float]] = [[] for _ in range(p)]  # when what is under way to a rank arrives
        self.free = [0.0] * p
        self.actions: list[list[Action]] = [[] for _ in range(p)]
        # (time, 0 arrival | 1 decision, rank, kind): at one moment all arrives before a rank decides
        self.events: list[tuple[float, int, int, str]] = [(0.0, 1, 0, "")]

    def run(self) -> PipelineOrder:
        while self.events:
            now, phase, rank, kind = heapq.heappop(self.events)
            if phase == 0:
                self.arrived[rank][kind] += 1
                self.coming[rank].remove(now)
                heapq.heappush(self.events, (now, 1, rank, ""))
            elif self.free[rank] <= now and (chosen := self._choose(rank, now)):
                self._start(rank, chosen, now)
        return PipelineOrder(ranks=tuple(map(tuple, self.actions)), num_stages=self.p, num_microbatches=self.m)

    def _held(self, rank: int) -> float:
        done = self.done[rank]
        return done["F"] - done["I"] + self.passes.kept_for_weights * (done["I"] - done["W"])

    def _choose(self, rank: int, now: float) -> str | None:
        done = self.done[rank]
        if done["I"] < self.arrived[rank]["I"]:
            return "I"
        if done["F"] < self.arrived[rank]["F"] and self._held(rank) + 1 <= self.limit and not self._too_far(rank, now):
            return "F"
        if done["W"] < done["I"]:
            soon = now + self.policy.patience * self.passes.backward_weight
            blocked = self._held(rank) + 1 > self.limit and done["F"] < self.m
            if blocked or not any(time <= soon for time in self.coming[rank]):
                return "W"
        return None

    def _too_far(self, rank: int, now: float) -> bool:
        """Whether a forward now would only delay a backward."""
        if not self.done[rank]["I"]:
            return now + self.policy.reserve * self.passes.forward > self._first_backward(rank) + 1e-9
        if self.policy.ahead is None or rank == self.p - 1:
            return False
        return self.done[rank]["F"] - self.done[rank + 1]["F"] >= self.policy.ahead

    def _first_backward(self, rank: int) -> float:
        """The earliest moment at which the first micro-batch can be back at the rank."""
        passes = self.passes
        there = self.p * passes.forward + (self.p - 1) * passes.send
        return there + (self.p - 1 - rank) * (passes.backward_input + passes.send)

    def _start(self, rank: int, kind: str, now: float) -> None:
        passes = self.passes
        seconds = {"F": passes.forward, "I": passes.backward_input, "W": passes.backward_weight}[kind]
        self.actions[rank].append(Action(rank, kind, self.done[rank][kind]))
        self.done[rank][kind] += 1
        end = now + seconds
        self.free[rank] = end
        heapq.heappush(self.events, (end, 1, rank, ""))
        if kind == "F":
            # the last rank's backward needs no message
            target, what, send = (rank + 1, "F", passes.send) if rank + 1 < self.p else (rank, "I", 0.0)
        elif kind == "I" and rank > 0:
            target, what, send = rank - 1, "I", passes.send
        else:
            return
        heapq.heappush(self.events, (end + send, 0, target, what))
        self.coming[target].append(end + send)
