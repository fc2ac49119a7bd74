"""Which plan is best over all meshes of a cluster, all numbers of micro-batches and of stages? The search as a whole.

Graphs of all numbers of micro-batches come from two captures (`capture.rebatch`), one of them in another process; the
problems are those of `search.joint`, the order in which they are solved that of `search.best_first`. Here they are put
together, and the certificate is written.
"""

import gc
import math
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace

from autopar.capture.rebatch import Batches
from autopar.errors import ArgumentError, InfeasibleError, MeshError, PinError, SearchTimeoutError
from autopar.lower.program import Program
from autopar.passes.accumulate_gradients import accumulate_gradients
from autopar.search.costs.pricing import Pricer
from autopar.search.costs.states import check_states
from autopar.search.joint.best_first import PROVED, SearchOutcome, best_first
from autopar.search.joint.candidates import EVERY_MESH, Candidate, CandidateSpace, candidates, num_devices
from autopar.search.joint.joint import MANY, Joint
from autopar.search.joint.questions import Setup
from autopar.search.joint.workers import Workers, spare_workers
from autopar.search.known.baselines import memory_limit
from autopar.search.meshes import parts
from autopar.search.microbatches import with_reason
from autopar.search.planner import compare, plan_program
from autopar.search.search_options import LATER, SearchOptions, silent
from autopar.search.staged.stages import block_starts, written_text
from autopar.values.choices import near
from autopar.values.cluster import Cluster
from autopar.values.divisors import divisors
from autopar.values.graph import CapturedModel
from autopar.values.pins import Pins
from autopar.values.plan import Plan, one_stage
from autopar.values.schedules import check_microbatches
from autopar.values.search_report import LeastInTurn, SpaceSearched
from autopar.values.train_config import TrainConfig

NEAR = 8
"""How many alternatives a plan names."""
SURELY_MANY = 2 * MANY
"""Problems, for a model of blocks without end, from which on workers start before the model is captured."""


@contextmanager
def _uncollected() -> Iterator[None]:
    """Strategy graphs hold no cycles, but are so many objects that looking for some took a quarter of the search. As a
    decorator: when the function ends most of them are gone before any is looked at."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


@_uncollected()
def search_meshes(
    batch: int | None,
    capture: Callable[[int | None], CapturedModel],
    cluster: Cluster,
    config: TrainConfig,
    options: SearchOptions,
    space: CandidateSpace = EVERY_MESH,
    *,
    finish: Callable[[Plan, Program, Pricer], Plan] = lambda answer, *_: answer,
    shared: Callable[[], Callable[[int], CapturedModel]] | None = None,
) -> tuple[Plan, CapturedModel]:
    """The best plan of a space, and the graph that it is for.

    batch: samples of a step, None where the inputs have no batch in common.
    capture: the graph of so many samples, of the whole batch for None; shared: see `Batches`.
    options: in `buckets` are plans without stages, and bounds on them.
    finish: what is still done to the plan found, while its graph is captured in another process.

    The plan's search report says what was searched and which alternatives were near.

    Raises:
        BatchError: if the number of micro-batches is open, but the inputs have no batch in common (None).
        InfeasibleError: if no plan fits.
    """
    began = time.monotonic()
    batches = Batches(capture=capture, batch=batch or 1, shared=shared)
    counts = (1,) if batch is None else divisors(batch)
    if space.microbatches is not None:
        counts = (space.microbatches,)

    def graph(count: int) -> CapturedModel:
        if batch is None:
            return accumulate_gradients(capture(batch), count, lambda: capture(batch))
        return batches.microbatch(count)

    def begin(count: int) -> None:
        if batch is not None:
            batches.begin(batch // count)

    def keys(num_blocks: int, written: str = "") -> list[Candidate]:
        possible = tuple(n for n in parts(cluster) if n <= num_blocks)
        if wrong := sorted(set(space.pipelines or ()) - set(possible)):
            raise MeshError(
                f"{wrong[0]} pipeline ranks: {cluster} and the model's {num_blocks} blocks{written} allow "
                f"{', '.join(map(str, possible))}; choose one of them or auto"
            )
        pipelines = space.pipelines or tuple(n for n in possible if n >= space.least_pipeline)
        found = candidates(cluster, counts, pipelines, space.schedule, num_blocks)
        found = [key for key in found if key.arrangement.pipeline == 1 or _runs(key)]
        if (mesh := space.mesh) is not None:
            found = list(dict.fromkeys(replace(k, arrangement=replace(k.arrangement, mesh=mesh)) for k in found))
        if config.pins:
            found = _with_axes(found, config.pins)
        if not found:
            raise InfeasibleError(
                f"no schedule ({space.schedule}) runs {_listed(counts)} micro-batches on {_listed(pipelines)} pipeline "
                "ranks; choose another number of micro-batches, or schedule gpipe"
            )
        return found

    setup = Setup(counts=counts, cluster=cluster, config=config, options=replace(options, tell=silent))
    with ExitStack() as held:
        held.callback(batches.close)
        workers = _entered(held) if len(keys(sys.maxsize)) >= SURELY_MANY else None
        if batch is not None and counts != (1,):  # else there is one size
            batches.begin_line()
        while True:
            left = None if options.seconds is None else max(options.seconds - (time.monotonic() - began), 1.0)
            whole = graph(min(counts))
            why = batches.why_whole() if batch is not None and space.microbatches is None else None
            if why is not None:
                counts, setup = (1,), replace(setup, counts=(1,))
            asked = keys(len(block_starts(whole)) + 1, written_text(whole))
            if workers is None and len(asked) >= MANY:
                workers = _entered(held)
            joint = Joint(
                graph=graph,
                line=batches.find_line,
                line_at_hand=lambda: batches.line,
                setup=setup,
                tell=options.tell,
                workers=workers,
                improved=begin,
            )
            limit = memory_limit(cluster, config)
            check_states(joint.program(min(counts)), cluster, config, max(map(num_devices, asked)), limit)
            outcome = best_first(joint, asked, relative_gap=options.relative_gap, seconds=left, tell=options.tell)
            if outcome.answer is None or outcome.key is None:
                _take_smallest(joint, outcome, why)
            best = _worth_finishing(outcome)
            begin(best[-1][0].microbatches)
            finished: list[Plan] = []
            for key, answer in best:
                taken = time.monotonic() - began
                plan = _certified(key, answer, outcome, _searched(key, outcome, options, space, taken))
                program, pricer = joint.program(key.microbatches), joint.pricer(key)
                if options.with_baselines and outcome.status == PROVED and plan.num_stages == 1:
                    plan = one_stage(compare(plan.single, program, pricer.alone, options))
                finished.append(with_reason(finish(plan, program, pricer), why))
            found = min(finished, key=lambda plan: plan.estimate.step_seconds)
            count = found.microbatches
            begin(count)
            own = graph(count) if batch is None else batches.captured_microbatch(count)
            if own.fingerprint == found.fingerprint:
                return found, own
            batches.distrust()


def _entered(held: ExitStack) -> Workers | None:
    """Processes beside this one, where there are cores for them."""
    found = spare_workers()
    return None if found is None else held.enter_context(found)


def _with_axes(keys: Iterable[Candidate], pins: Pins) -> list[Candidate]:
    """Those whose meshes have the axes that pins speak of.

    Raises:
        PinError: if there are none.
    """
    every = [replace(key, arrangement=replace(key.arrangement, is_named=True)) for key in keys]
    found = [key for key in every if pins.axes <= set(key.arrangement.mesh.names)]
    if every and not found:
        names = sorted({name for key in every for name in key.arrangement.mesh.names})
        unknown = sorted(pins.axes - set(names)) or sorted(pins.axes)
        raise PinError(
            f"pins speak of {' and '.join(pins.axes)}, no mesh that is searched has {unknown[0]}; its axes are "
            f"{', '.join(names)}{near(unknown[0], names)}"
        )
    return found


def _runs(key: Candidate) -> bool:
    """Whether the schedule runs so many micro-batches."""
    try:
        check_microbatches(key.schedule, key.arrangement.pipeline, key.microbatches)
    except ArgumentError:
        return False
    return True


def _worth_finishing(outcome: SearchOutcome[Candidate, Plan]) -> list[tuple[Candidate, Plan]]:
    """The best answer with everything in turn, which is what bounds are of; then one that takes less as it runs, more
    of it beside compute, if another was met that does."""
    assert outcome.answer is not None and outcome.key is not None
    best = [(outcome.key, outcome.answer)]
    for key, answer in outcome.answers.items():
        if answer.estimate.step_seconds < best[-1][1].estimate.step_seconds:
            best[1:] = [(key, answer)]
    return best


def _certified(key: Candidate, plan: Plan, outcome: SearchOutcome[Candidate, Plan], space: SpaceSearched) -> Plan:
    """A plan found with the bound of the whole space and what there is to say of it."""
    assert outcome.answer is not None
    if key != outcome.key:
        least, as_it_runs = outcome.cost, outcome.answer.estimate.step_seconds
        in_turn = LeastInTurn(plan=str(outcome.key), in_turn_seconds=least, step_seconds=as_it_runs)
        space = replace(space, in_turn=in_turn)
    report = replace(plan.estimate.search, space=space)
    return plan.with_estimate(replace(plan.estimate, bound=outcome.bound, search=report))


def _searched(
    key: Candidate,
    outcome: SearchOutcome[Candidate, Plan],
    options: SearchOptions,
    space: CandidateSpace,
    seconds: float,
) -> SpaceSearched:
    """What was searched in so many seconds, and what is near the candidate whose plan is taken."""
    planned = sorted((cost, str(k)) for k, cost in outcome.solved.items() if cost is not None and k != key)
    left_out = sorted((bound, str(k)) for k, bound in outcome.excluded.items() if k != key)
    every = {*outcome.solved, *outcome.excluded}
    staged = ", ".join(sorted({k.schedule for k in every if k.schedule}))
    staged += ", stages with every collective alone" if staged and options.buckets else ""
    places = "meshes of at most 3 axes that follow the cluster's levels"
    if space.mesh is not None:
        places = f"mesh {space.mesh}"
    return SpaceSearched(
        space=places + (", " + staged if staged else ""),
        status=outcome.status,
        candidates=len(every),
        planned=len(outcome.solved),
        do_not_fit=sum(cost is None for cost in outcome.solved.values()),
        seconds=seconds,
        near={name: cost for cost, name in planned[:NEAR]},
        not_below={name: bound for bound, name in left_out[:NEAR]},
    )


def _take_smallest(joint: Joint, outcome: SearchOutcome[Candidate, Plan], why: str | None) -> None:
    """Where no candidate fits as memory is counted: the plan of the one of fewest samples at a time, of fewest axes,
    for that is seen soonest, if it fits as it runs.

    Raises:
        InfeasibleError: else; says what that candidate needs.

    why: a step is one micro-batch.
    """
    given_up = ", ".join(str(key) for key, bound in outcome.excluded.items() if bound < math.inf)
    if not outcome.failures:
        raise InfeasibleError(
            f"no plan was found that fits, though none is proved not to: {given_up}; use more devices"
        )
    said = "nothing fits on any mesh"
    if given_up:
        said = f"no plan was found that fits, and none does but, perhaps, on {given_up}"
    key = max(outcome.failures, key=lambda k: (k.schedule == "", k.microbatches, -k.arrangement.mesh.num_axes))
    failure = outcome.failures[key]
    if not key.schedule:  # else it is of a rank, which has a part of the model
        try:
            seconds = joint.setup.options.seconds
            options = replace(
                joint.setup.options, with_baselines=False, seconds=None if seconds is None else seconds / LATER
            )
            plan = plan_program(joint.program(key.microbatches), joint.pricer(key), options)
        except (InfeasibleError, SearchTimeoutError) as error:
            failure = error if isinstance(error, InfeasibleError) else failure
        else:
            outcome.take(key, one_stage(plan), plan.estimate.in_turn_seconds)
            outcome.bound = min(plan.estimate.bound, *outcome.excluded.values(), math.inf)
            return
    least = None if key.schedule else failure.least_nbytes
    whole = f"; the batch is not split into micro-batches, for {why}" if why is not None else ""
    raise InfeasibleError(f"{said}; on {key}: {failure}{whole}", least_nbytes=least)


def _listed(numbers: Iterable[int]) -> str:
    return " or ".join(map(str, numbers))
