"""Which mesh, and how many micro-batches? All meshes that follow the cluster's levels, all divisors of the batch.

Bounds, from cheap to dear, each of them proved:

    work           all work split evenly over all devices, nothing sent (`work_bound`)
    of a divisor   what d micro-batches take at least without a memory limit holds for every multiple of d (with fewer
                   samples at a time nothing gets faster, see `microbatches`)
    its own        the strategy graph without a memory limit, which has neither recompute nor lifetimes that save bytes
    its plan's     the mixed program's, memory and recompute included; it stops once that reaches the best plan known

`best_first` solves no more than it must.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

from autopar.capture.rebatch import SIZES, Batches
from autopar.cluster import Cluster
from autopar.errors import BatchError, InfeasibleError
from autopar.graph import CapturedModel
from autopar.passes.accumulate_gradients import accumulate_gradients
from autopar.plan import Plan, TrainConfig
from autopar.search.best_first import PROVED, Outcome, best_first
from autopar.search.build import build
from autopar.search.ilp import solve
from autopar.search.meshes import Arrangement, arrangements, divisors
from autopar.search.planner import compare, plan_program
from autopar.search.pricing import Pricer
from autopar.search.program import Program, make_program
from autopar.search.work_bound import work_bound

BOUND_GAP = 2e-3
"""How exactly the relaxed graphs are solved."""
NEAR = 8
"""How many alternatives a plan names."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """One problem of the joint space."""

    arrangement: Arrangement
    microbatches: int

    def __str__(self) -> str:
        return f"{self.arrangement}, {self.microbatches} micro-batch{'es' * (self.microbatches > 1)}"


@dataclass(slots=True, kw_only=True)
class Joint:
    """The problems of `best_first`. `graph`: the captured model of one of so many micro-batches, for each of `counts`.

    The work of the fewest micro-batches bounds all: more parts do the same work, and launch it more often.
    """

    graph: Callable[[int], CapturedModel]
    counts: tuple[int, ...]
    config: TrainConfig
    relative_gap: float
    fold: bool = True
    tell: Callable[[str], None] = lambda _: None
    _programs: dict[int, Program] = field(default_factory=dict)
    _pricers: dict[Arrangement, Pricer] = field(default_factory=dict)
    _work: float | None = None
    _relaxed: dict[Candidate, float] = field(default_factory=dict)

    def program(self, microbatches: int) -> Program:
        """The program of one of so many micro-batches.

        Raises InfeasibleError where the loss of the whole batch is no sum over so many parts.
        """
        if microbatches not in self._programs:
            try:
                self._programs[microbatches] = make_program(self.graph(microbatches))
            except BatchError as error:
                if microbatches == 1:
                    raise
                raise InfeasibleError(str(error)) from error
        return self._programs[microbatches]

    def pricer(self, key: Candidate) -> Pricer:
        """Fresh prices of the candidate's program; those of links are shared."""
        arrangement = key.arrangement
        if arrangement not in self._pricers:
            self._pricers[arrangement] = Pricer(mesh=arrangement.mesh, cluster=arrangement.cluster, config=self.config)
        return self._pricers[arrangement].for_another()

    def bound(self, key: Candidate) -> float:
        if self._work is None:
            first = min(self.counts)
            self._work = work_bound(self.program(first), self.pricer(key))
        others = (replace(key, microbatches=n) for n in divisors(key.microbatches))
        return max([self._work, *(self._relaxed[other] for other in others if other in self._relaxed)])

    def sharpen(self, key: Candidate) -> None:
        problem = build(self.program(key.microbatches), self.pricer(key), limit=None, fold=self.fold)
        self._relaxed[key] = solve(problem.graph, relative_gap=BOUND_GAP).bound

    def solve(self, key: Candidate, cutoff: float, seconds: float | None) -> tuple[Plan, float, float]:
        plan = plan_program(
            self.program(key.microbatches),
            self.pricer(key),
            relative_gap=self.relative_gap / 2,
            seconds=seconds,
            with_baselines=False,
            fold=self.fold,
            progress=lambda text: self.tell(f"{key}: {text}"),
            cutoff=cutoff,
            say_least=False,
        )
        return plan, plan.estimate.step_seconds, plan.estimate.bound


def search_meshes(
    batch: int | None,
    capture: Callable[[int | None], CapturedModel],
    cluster: Cluster,
    config: TrainConfig,
    *,
    microbatches: int | None = None,
    relative_gap: float,
    seconds: float | None = None,
    fold: bool = True,
    with_baselines: bool = True,
    tell: Callable[[str], None] = lambda _: None,
) -> tuple[Plan, CapturedModel]:
    """The best plan over all meshes of the cluster and, unless `microbatches` is given, all divisors of `batch`,
    with the graph that it is for.

    capture: the graph of so many samples, of the whole batch for None. The plan's `estimate.solver["search"]` says
    what was searched and which alternatives were near.

    Raises:
        BatchError: if the number of micro-batches is open, but the inputs have no batch in common (None).
        InfeasibleError: if no plan fits.
    """
    began = time.monotonic()
    batches = Batches(capture=capture, sizes=SIZES if batch is None or batch <= max(SIZES) else (min(SIZES), batch))
    counts = (microbatches,) if microbatches is not None else (1,) if batch is None else divisors(batch)

    def graph(count: int) -> CapturedModel:
        if batch is None:
            return accumulate_gradients(capture(batch), count, lambda: capture(batch))
        return accumulate_gradients(batches.at(batch // count), count, lambda: batches.at(batch))

    while True:
        left = None if seconds is None else max(seconds - (time.monotonic() - began), 1.0)
        joint = Joint(graph=graph, counts=counts, config=config, relative_gap=relative_gap, fold=fold, tell=tell)
        keys = [Candidate(arrangement=a, microbatches=n) for a in arrangements(cluster) for n in counts]
        outcome = best_first(joint, keys, relative_gap=relative_gap, seconds=left, tell=tell)
        if outcome.answer is None or outcome.key is None:
            raise _nothing_fits(joint, outcome)
        count = outcome.key.microbatches
        own = graph(count) if batch is None else _captured(batches, batch, count)
        if own.fingerprint == outcome.answer.fingerprint:
            return _certified(outcome, joint, len(keys), with_baselines, time.monotonic() - began), own
        batches.linear = False  # the graphs of other sizes are no line: capture each


def _captured(batches: Batches, batch: int, count: int) -> CapturedModel:
    """The graph of one of `count` micro-batches as it is captured, not moved along the line."""
    return accumulate_gradients(batches.captured(batch // count), count, lambda: batches.captured(batch))


def _certified(
    outcome: Outcome[Candidate, Plan], joint: Joint, count: int, with_baselines: bool, seconds: float
) -> Plan:
    """The plan found with the bound of the whole space and what there is to say of it."""
    assert outcome.answer is not None and outcome.key is not None
    plan, key = outcome.answer, outcome.key
    planned = sorted((cost, str(k)) for k, cost in outcome.solved.items() if cost is not None and k != key)
    left_out = sorted((bound, str(k)) for k, bound in outcome.excluded.items())
    facts: dict[str, Any] = {
        "space": "meshes of at most 3 axes that follow the cluster's levels, no pipeline",
        "candidates": count,
        "planned": len(outcome.solved),
        "do_not_fit": sum(cost is None for cost in outcome.solved.values()),
        "status": outcome.status,
        "seconds": seconds,
        "near": {name: cost for cost, name in planned[:NEAR]},
        "not_below": {name: bound for bound, name in left_out[:NEAR]},
    }
    estimate = replace(plan.estimate, bound=outcome.bound, solver={**plan.estimate.solver, "search": facts})
    plan = plan.with_estimate(estimate)
    if with_baselines and outcome.status == PROVED:
        return compare(plan, joint.program(key.microbatches), joint.pricer(key), joint.tell)
    return plan


def _nothing_fits(joint: Joint, outcome: Outcome[Candidate, Plan]) -> InfeasibleError:
    """Says what the candidate of fewest samples at a time and most axes needs."""
    key = max(outcome.failures, key=lambda k: (k.microbatches, k.arrangement.mesh.num_axes))
    said: InfeasibleError = outcome.failures[key]
    try:
        plan_program(
            joint.program(key.microbatches),
            joint.pricer(key),
            relative_gap=joint.relative_gap,
            seconds=None,
            with_baselines=False,
            fold=joint.fold,
        )
    except InfeasibleError as error:
        said = error
    return InfeasibleError(f"nothing fits on any mesh; on {key}: {said}", least_nbytes=said.least_nbytes)
