"""How many micro-batches? Every divisor of the global batch that can still be better than the best found.

Without a memory limit more parts never help: every choice for n samples is one for k n, whose ops and collectives take
at most k times as long (roofline and α-β are linear beside what a launch or message costs at least). So the least that
M parts take without a limit is a lower bound for every multiple of M with one, and where the best plan found reaches
it, all multiples are left out.
"""

from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import TypeVar

from autopar.capture.rebatch import Batches
from autopar.errors import BatchError, InfeasibleError, SearchTimeoutError
from autopar.lower.program import make_program
from autopar.search.costs.pricing import make_pricer
from autopar.search.costs.work_bound import work_bound
from autopar.search.exact.ilp import solve
from autopar.search.graph.build import build
from autopar.search.recursion.ways import SEARCHED_AXES
from autopar.search.search_options import SearchOptions, Tell, silent
from autopar.values.cluster import Cluster
from autopar.values.divisors import divisors
from autopar.values.gigabytes import least_gigabytes
from autopar.values.graph import CapturedModel
from autopar.values.mesh import Mesh
from autopar.values.plan import Plan
from autopar.values.stage_plan import StagePlan
from autopar.values.train_config import TrainConfig

Answer = TypeVar("Answer", StagePlan, Plan)
"""Of a graph: a plan, or what is decided of a mesh alone."""

TOLERANCE = 1e-6
"""Bounds of a solver are no closer to the truth than this, relatively."""


def choose_microbatches(
    candidates: Iterable[int],
    graph: Callable[[int], CapturedModel],
    plan: Callable[[CapturedModel], Answer],
    bound: Callable[[CapturedModel], float],
    relative_gap: float,
    tell: Tell = silent,
    is_over: Callable[[], bool] = lambda: False,
) -> tuple[Answer, CapturedModel]:
    """The cheapest plan of all numbers of micro-batches in `candidates`, and the graph it is for.

    graph: of one of so many micro-batches. plan: the best for a graph. bound: seconds that no plan of a graph stays
    below, whatever memory there is. is_over: whether the time is, after which a plan found is taken. The plan's search
    report says what each number would cost, and its bound is one for all of them.

    Raises:
        InfeasibleError: if no number fits; that of the number which needs least.
        SearchTimeoutError: if the time ended before a plan was found.
        BatchError: if the loss of the global batch has no parts and one piece does not fit.
    """
    best: tuple[Answer, CapturedModel] | None = None
    said: dict[str, float | str] = {}
    least: dict[int, float] = {}
    proved: list[float] = []
    failures: list[InfeasibleError] = []
    late: SearchTimeoutError | None = None
    for count in candidates:
        lower = max((seconds for n, seconds in least.items() if count % n == 0), default=0.0)
        if best is not None and best[0].estimate.in_turn_seconds * (1 - relative_gap) <= lower * (1 + TOLERANCE):
            said[str(count)] = f"not searched: no plan takes less than {lower:.4g} s"
            proved.append(lower)
            continue
        if is_over() and (best is not None or late is not None):
            said[str(count)] = "not searched: the time was over"
            proved.append(lower)
            continue
        tell(f"planning {count} micro-batches")
        try:
            captured = graph(count)
        except BatchError as error:
            if not failures and best is None:
                raise
            said[str(count)] = str(error)
            continue
        try:
            made = plan(captured)
        except InfeasibleError as error:
            failures.append(error)
            said[str(count)] = _needs(error)
        except SearchTimeoutError as error:
            late, said[str(count)] = error, str(error)
            proved.append(max(lower, error.bound))
        else:
            said[str(count)] = made.estimate.in_turn_seconds
            proved.append(made.estimate.bound)
            if best is None or made.estimate.in_turn_seconds < best[0].estimate.in_turn_seconds:
                best = made, captured
        least[count] = lower if is_over() else max(lower, bound(captured))
    if best is None:
        if late is not None:
            raise late
        raise min(failures, key=lambda e: float("inf") if e.least_nbytes is None else e.least_nbytes)
    made, captured = best
    estimate = replace(
        made.estimate,
        bound=min([made.estimate.in_turn_seconds, *proved]),
        search=replace(made.estimate.search, microbatches=said),
    )
    return made.with_estimate(estimate), captured


def search_microbatches(
    batch: int | None,
    capture: Callable[[int], CapturedModel],
    plan: Callable[[CapturedModel], Answer],
    bound: Callable[[CapturedModel], float],
    relative_gap: float,
    tell: Tell,
    shared: Callable[[], Callable[[int], CapturedModel]] | None = None,
    is_over: Callable[[], bool] = lambda: False,
) -> Answer:
    """`choose_microbatches` among all divisors of `batch`; `capture` gives the graph of so many samples.

    shared: see `Batches`. is_over: see there.

    Raises:
        BatchError: if the inputs have no batch in common (None).
    """
    if batch is None:
        raise BatchError(
            "the best number of micro-batches was asked, but the inputs have no batch in common; give microbatches=1, "
            "or inputs with the batch first in every tensor"
        )
    batches = Batches(capture=capture, batch=batch, shared=shared)
    try:
        batches.begin_line()
        why = batches.why_whole()
        counts = divisors(batch) if why is None else (1,)
        while True:
            found, graph = choose_microbatches(counts, batches.microbatch, plan, bound, relative_gap, tell, is_over)
            found = with_reason(found, why)
            count = found.microbatches
            if not batches.lines or batches.captured_microbatch(count).fingerprint == graph.fingerprint:
                return found
            batches.distrust()
    finally:
        batches.close()


def with_reason(answer: Answer, why: str | None) -> Answer:
    """The answer, which says why a step is one micro-batch, if it has to be."""
    if why is None:
        return answer
    estimate = answer.estimate
    return answer.with_estimate(replace(estimate, search=replace(estimate.search, one_microbatch=why)))


def unlimited_bound(
    captured: CapturedModel,
    cluster: Cluster,
    mesh: Mesh,
    config: TrainConfig,
    options: SearchOptions,
) -> float:
    """Seconds that no plan of a graph takes less than, if memory has no limit."""
    program = make_program(captured)
    pricer = make_pricer(mesh=mesh, cluster=cluster, config=config, in_buckets=options.buckets)
    if options.solver == "double-recursive" or mesh.num_axes > SEARCHED_AXES:
        return work_bound(program, pricer)
    try:
        graph = build(program, pricer, limit=None).graph
        return solve(graph, relative_gap=options.relative_gap, seconds=options.seconds).bound
    except SearchTimeoutError as error:
        return error.bound


def _needs(error: InfeasibleError) -> str:
    least = error.least_nbytes
    return str(error) if least is None else f"does not fit: needs {least_gigabytes(least)} GB a device"
