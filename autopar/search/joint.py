"""Which mesh, how many stages and micro-batches? All meshes that follow the levels, all divisors of the batch.

Bounds, from cheap to dear, each of them proved; t and o are seconds of a micro-batch and once a step of the whole model
on the mesh of one of p stages, m the number of micro-batches:

    work           all work split evenly over all devices, nothing sent (`work_bound`)
    of a divisor   what d micro-batches take at least without a memory limit holds for every multiple of d (with fewer
                   samples at a time nothing gets faster, see `microbatches`)
    its own        the strategy graph without a memory limit, which has neither recompute nor lifetimes that save bytes:
                   the least r t + o, shared out over p stages, with r the rounds of the schedule (`rounds`)
    its plan's     the mixed program's, memory and recompute included; it stops once that reaches the best plan known

`best_first` solves no more than it must. Equal blocks are split alike in all stages.
"""

import gc
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from typing import Any

from autopar.capture.rebatch import SIZES, Batches
from autopar.cluster import Cluster
from autopar.errors import ArgumentError, BatchError, InfeasibleError, MeshError, SearchTimeoutError
from autopar.graph import CapturedModel
from autopar.mesh import Mesh
from autopar.passes.accumulate_gradients import accumulate_gradients
from autopar.plan import Plan, TrainConfig
from autopar.search.best_first import PROVED, Outcome, best_first
from autopar.search.ilp import CutoffError
from autopar.search.meshes import Arrangement, arrangements, divisors, parts
from autopar.search.planner import compare, plan_program
from autopar.search.pricing import Pricer
from autopar.search.program import Program, make_program
from autopar.search.relaxing import Asked, Relaxations
from autopar.search.stages import best_staged, block_starts
from autopar.search.work_bound import work_seconds
from autopar.staged_plan import StagedPlan, check_microbatches

SEARCHED = ("gpipe", "1f1b", "interleaved-1f1b")
CHUNKS = (2, 4, 8)
"""Stages a rank of interleaved schedules."""
MANY = 32
"""Problems from which on a second process is worth its start, a few seconds of imports."""
PLAN_SECONDS = 15.0
"""Bound on solving one problem, which then gives the best plan found and its true gap: others wait."""
NEAR = 8
"""How many alternatives a plan names."""


Answer = Plan | StagedPlan


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """One problem of the joint space; `chunks`: stages a pipeline rank."""

    arrangement: Arrangement
    microbatches: int
    schedule: str = ""
    chunks: int = 1

    def __str__(self) -> str:
        text = f"{self.arrangement}, {self.microbatches} micro-batch{'es' * (self.microbatches > 1)}"
        text += f", {self.schedule}" if self.schedule else ""
        return text + (f" x {self.chunks}" if self.chunks > 1 else "")

    @property
    def rounds(self) -> float:
        return rounds(self.schedule, self.arrangement.pipeline, self.microbatches)


def rounds(schedule: str, p: int, m: int) -> float:
    """r such that no step of p stages, however uneven, whose micro-batch takes t in all is below r t / p.

    1f1b, m > p     m + p - 1. Stage k's first backward waits for the whole forward and the backward behind it, its last
                    forward is followed by the same, and between lie (m - p + k - 1) of its micro-batches; so a step
                    takes T + S_k + (m - p + k - 1) t_k, S_k = t_k + ... + t_(p-1). Weights w_k >= 0 with
                    w_0 + ... + w_s + w_s (m - p + s - 1) the same for all s average these to T (1 + (m - 1) / p).
    gpipe           m + p - 1: forward and backward are two flow shops, T + (m - 1) (max f + max b).
    1f1b, m <= p    p / (1 - (1 - 1 / m)^p): stage k works m t_k after and before the stages in front of it.
    others          m: no rank works less than its share.
    """
    if schedule == "gpipe" or (schedule == "1f1b" and m > p):
        return m + p - 1
    return p / (1 - (1 - 1 / m) ** p) if schedule == "1f1b" else m


def candidates(
    cluster: Cluster, counts: tuple[int, ...], pipelines: tuple[int, ...], schedule: str, num_blocks: int
) -> list[Candidate]:
    """All problems; of `schedule`, auto for 1f1b: gpipe takes as long and more memory, and the bound known of
    interleaved stages has no bubble, so that it excludes little."""
    if schedule not in ("auto", *SEARCHED):
        raise ArgumentError(f"schedule {schedule!r} is not searched; choose auto or one of {', '.join(SEARCHED)}")
    name = "1f1b" if schedule == "auto" else schedule
    out = []
    for arrangement in arrangements(cluster, pipelines):
        p = arrangement.pipeline
        for count in counts:
            if p == 1:
                out.append(Candidate(arrangement=arrangement, microbatches=count))
            elif p <= num_blocks:
                chunks = [v for v in CHUNKS if v * p <= num_blocks and count % p == 0]
                out += [
                    Candidate(arrangement=arrangement, microbatches=count, schedule=name, chunks=v)
                    for v in (chunks if name == "interleaved-1f1b" else [1])
                ]
    return out


@dataclass(slots=True, kw_only=True)
class Joint:
    """The problems of `best_first`. `graph`: the captured model of one of so many micro-batches, for each of `counts`.

    The work of the fewest micro-batches bounds all: more parts do the same work, and launch it more often.
    """

    graph: Callable[[int], CapturedModel]
    counts: tuple[int, ...]
    cluster: Cluster
    config: TrainConfig
    relative_gap: float
    fold: bool = True
    tell: Callable[[str], None] = lambda _: None
    _programs: dict[int, Program] = field(default_factory=dict)
    _pricers: dict[Arrangement, Pricer] = field(default_factory=dict)
    _work: dict[int, tuple[float, float]] = field(default_factory=dict)
    _own: dict[Candidate, float] = field(default_factory=dict)
    _least: dict[tuple[Arrangement, int], float] = field(default_factory=dict)
    _relaxations: Relaxations = field(init=False)

    def __post_init__(self) -> None:
        self._relaxations = Relaxations(program=self.program, pricer=self._prices, fold=self.fold)

    def beside(self, number: int) -> Relaxations:
        """A context in which a second process finds bounds ahead, where so many problems and two cores are worth it."""
        self._relaxations.beside = number >= MANY and (os.cpu_count() or 1) > 1
        return self._relaxations

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
        return self._prices(key.arrangement)

    def _prices(self, arrangement: Arrangement) -> Pricer:
        if arrangement not in self._pricers:
            self._pricers[arrangement] = Pricer(mesh=arrangement.mesh, cluster=arrangement.cluster, config=self.config)
        return self._pricers[arrangement].for_another()

    def bound(self, key: Candidate) -> float:
        p = key.arrangement.pipeline
        if p not in self._work:
            self._work[p] = work_seconds(self.program(min(self.counts)), self.pricer(key))
        known = [self._work_bound(key, key.microbatches), self._own.get(key, 0.0)]
        least = [self._least.get((key.arrangement, n), 0.0) for n in divisors(key.microbatches)]
        return max([*known, max(least) + self._more_rounds(key, key.microbatches)])

    def _more_rounds(self, key: Candidate, rounds: int) -> float:
        """What the rounds beyond so many take at least: their work."""
        p = key.arrangement.pipeline
        return (key.rounds - rounds) * self._work[p][0] / key.microbatches / p

    def effort(self, key: Candidate) -> float:
        """Tables grow with the power of the axes; stages are planned as a whole, then each is priced."""
        return key.arrangement.mesh.num_axes + (key.arrangement.pipeline > 1) / 2

    def foresee(self, keys: Iterator[Candidate], cutoff: float) -> None:
        with suppress(InfeasibleError):  # a batch that does not divide: said when its turn comes
            self._relaxations.foresee(self._wanted(key, cutoff) for key in keys)

    def sharpen(self, key: Candidate, cutoff: float) -> bool:
        """First what the fewest micro-batches that may be below the cutoff take, which holds for their multiples, then
        the candidate's own rounds."""
        arrangement, m, times = wanted = self._wanted(key, cutoff)
        is_own = (arrangement, m) in self._least or key.rounds == m
        found = self._relaxations.of(wanted) / arrangement.pipeline
        # r t + o is concave in r: of fewer rounds at least their share
        self._least[arrangement, m] = max(self._least.get((arrangement, m), 0.0), found * m / times)
        if m != key.microbatches or not is_own:
            return False
        self._own[key] = found + self._more_rounds(key, times)
        return True

    def _wanted(self, key: Candidate, cutoff: float) -> Asked:
        """The relaxation that comes next for this candidate."""
        shared = [n for n in divisors(key.microbatches) if n in self.counts]
        first = next((n for n in shared if self._work_bound(key, n) < cutoff), key.microbatches)
        if (key.arrangement, first) not in self._least:
            return key.arrangement, first, first
        return key.arrangement, key.microbatches, int(key.rounds) if key.microbatches > 1 else 1

    def _work_bound(self, key: Candidate, microbatches: int) -> float:
        """What the candidate's work alone takes with so many micro-batches."""
        p = key.arrangement.pipeline
        passing, update = self._work[p]
        return (passing * rounds(key.schedule, p, microbatches) / microbatches + update) / p

    def solve(self, key: Candidate, cutoff: float, seconds: float | None) -> tuple[Answer, float, float]:
        p = key.arrangement.pipeline
        program = self.program(key.microbatches)

        def whole(pricer: Pricer) -> Plan:
            return plan_program(
                program,
                pricer,
                relative_gap=self.relative_gap / 4,  # a better plan leaves fewer bounds to be found
                seconds=PLAN_SECONDS if seconds is None else min(seconds, PLAN_SECONDS),
                with_baselines=False,
                fold=self.fold,
                progress=lambda text: self.tell(f"{key}: {text}"),
                cutoff=cutoff * p,
                say_least=False,
            )

        if p == 1:
            plan = whole(self.pricer(key))
            return plan, plan.estimate.step_seconds, plan.estimate.bound
        try:
            made, bound = best_staged(program, self.pricer(key), self.cluster, p, key.schedule, key.chunks, whole)
        except CutoffError as error:
            raise CutoffError(error.bound / p) from error
        self._own[key] = max(self._own.get(key, 0.0), bound)
        if made is None:
            raise SearchTimeoutError(f"{key}: no plan was found that fits, which proves nothing")
        return made, made.estimate.step_seconds, bound


def search_meshes(
    batch: int | None,
    capture: Callable[[int | None], CapturedModel],
    cluster: Cluster,
    config: TrainConfig,
    *,
    microbatches: int | None = None,
    pipelines: tuple[int, ...] | None = (1,),
    mesh: Mesh | None = None,
    schedule: str = "auto",
    relative_gap: float,
    seconds: float | None = None,
    fold: bool = True,
    with_baselines: bool = True,
    tell: Callable[[str], None] = lambda _: None,
) -> tuple[Answer, CapturedModel]:
    """The best plan over all meshes of the cluster (`mesh`: that alone, on each pipeline rank) and, unless
    `microbatches` is given, all divisors of `batch`, with the graph that it is for.

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
        joint = Joint(
            graph=graph,
            counts=counts,
            cluster=cluster,
            config=config,
            relative_gap=relative_gap,
            fold=fold,
            tell=tell,
        )
        num_blocks = len(block_starts(joint.program(min(counts)).captured)) + 1
        possible = tuple(n for n in parts(cluster) if n <= num_blocks)
        if wrong := sorted(set(pipelines or ()) - set(possible)):
            raise MeshError(
                f"{wrong[0]} pipeline ranks: {cluster} and the model's {num_blocks} blocks allow "
                f"{', '.join(map(str, possible))}; choose one of them or auto"
            )
        keys = candidates(cluster, counts, pipelines or possible, schedule, num_blocks)
        keys = [key for key in keys if key.arrangement.pipeline == 1 or _runs(key)]
        if mesh is not None:
            keys = list(dict.fromkeys(replace(k, arrangement=replace(k.arrangement, mesh=mesh)) for k in keys))
        if not keys:
            raise InfeasibleError(
                f"schedule {schedule} on {pipelines or possible} pipeline ranks does not run {counts} micro-batches; "
                "choose another number of them, gpipe or auto"
            )
        with joint.beside(len(keys)), _uncollected():
            outcome = best_first(joint, keys, relative_gap=relative_gap, seconds=left, tell=tell)
        if outcome.answer is None or outcome.key is None:
            raise _nothing_fits(joint, outcome)
        count = outcome.key.microbatches
        own = graph(count) if batch is None else _captured(batches, batch, count)
        if own.fingerprint == outcome.answer.fingerprint:
            return _certified(outcome, joint, len(keys), with_baselines, time.monotonic() - began, mesh), own
        batches.linear = False  # the graphs of other sizes are no line: capture each


@contextmanager
def _uncollected() -> Iterator[None]:
    """Strategy graphs hold no cycles, but are so many objects that looking for some took a quarter of the search."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def _runs(key: Candidate) -> bool:
    """Whether the schedule runs so many micro-batches."""
    try:
        check_microbatches(key.schedule, key.arrangement.pipeline, key.microbatches)
    except ArgumentError:
        return False
    return True


def _captured(batches: Batches, batch: int, count: int) -> CapturedModel:
    """The graph of one of `count` micro-batches as it is captured, not moved along the line."""
    return accumulate_gradients(batches.captured(batch // count), count, lambda: batches.captured(batch))


def _certified(
    outcome: Outcome[Candidate, Answer],
    joint: Joint,
    count: int,
    with_baselines: bool,
    seconds: float,
    mesh: Mesh | None,
) -> Answer:
    """The plan found with the bound of the whole space and what there is to say of it."""
    assert outcome.answer is not None and outcome.key is not None
    plan, key = outcome.answer, outcome.key
    planned = sorted((cost, str(k)) for k, cost in outcome.solved.items() if cost is not None and k != key)
    left_out = sorted((bound, str(k)) for k, bound in outcome.excluded.items())
    staged = ", ".join(sorted({k.schedule for k in (*outcome.solved, *outcome.excluded) if k.schedule}))
    places = "meshes of at most 3 axes that follow the cluster's levels" if mesh is None else f"mesh {mesh}"
    facts: dict[str, Any] = {
        "space": places + (", " + staged if staged else ""),
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
    if with_baselines and outcome.status == PROVED and isinstance(plan, Plan):
        return compare(plan, joint.program(key.microbatches), joint.pricer(key), joint.tell)
    return plan


def _nothing_fits(joint: Joint, outcome: Outcome[Candidate, Answer]) -> InfeasibleError:
    """Says what the candidate of fewest samples at a time and most axes needs."""
    if not outcome.failures:
        names = ", ".join(map(str, outcome.excluded))
        return InfeasibleError(f"no plan was found that fits, though none is proved not to: {names}; use more devices")
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
