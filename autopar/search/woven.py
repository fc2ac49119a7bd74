"""Does a step get shorter where two micro-batches run at once, one computing while the other communicates?

Two answers are priced beside the plan: the same plan with its micro-batches in pairs and, where their number is open,
the best plan of twice as many, each pair at once. Both as they would run (`costs.interleaved_seconds`), for time and
for memory: two micro-batches are held at once. The second is asked for only where there is as much to hide as makes a
difference. What was proved of plans one micro-batch at a time stays what is said of the answer.
"""

from collections.abc import Callable
from dataclasses import replace

from autopar.errors import BatchError, InfeasibleError, SearchTimeoutError
from autopar.lower.lowered_step import lower
from autopar.lower.program import make_program
from autopar.passes.weave_copies import COPIES
from autopar.search.costs.evaluate import charges_of, evaluate
from autopar.search.costs.pricing import make_pricer
from autopar.search.known.baselines import memory_limit
from autopar.search.search_options import Tell, silent
from autopar.values.cluster import Cluster
from autopar.values.graph import CapturedModel
from autopar.values.stage_plan import StagePlan

LEAST = 0.01
"""Part of a step that communication of activations takes, below which plans of more micro-batches are not searched."""

Capture = Callable[[int], CapturedModel]
"""The graph of one of so many micro-batches."""


def best_woven(
    plan: StagePlan,
    captured: CapturedModel,
    cluster: Cluster,
    search: Callable[[CapturedModel], StagePlan],
    capture: Capture | None = None,
    *,
    tell: Tell = silent,
) -> tuple[StagePlan, CapturedModel]:
    """`plan`, or the one of its answers that takes the shortest step within the memory limit; and its graph.

    search: the best plan for a graph. capture: None if the number of micro-batches is given.
    The search report says what each takes.
    """
    limit = memory_limit(cluster, plan.config)
    found = {f"{plan.microbatches}, one at a time": (plan, captured)}

    def add(other: StagePlan, graph: CapturedModel) -> None:
        both = replace(other, copies=COPIES)
        both = both.with_estimate(evaluate(both, graph, cluster))
        if both.estimate.peak_nbytes <= limit:
            found[f"{both.microbatches}, two at once"] = both, graph

    if plan.mesh.size > 1:
        tell("weaving micro-batches")
        if plan.microbatches % COPIES == 0:
            add(plan, captured)
        if capture is not None and _hideable_seconds(plan, captured, cluster) > LEAST * plan.estimate.step_seconds:
            try:
                graph = capture(COPIES * plan.microbatches)
                other = search(graph)
            except (BatchError, InfeasibleError, SearchTimeoutError):
                pass
            else:
                add(other, graph)
    best, graph = min(found.values(), key=lambda one: one[0].estimate.step_seconds)
    if len(found) == 1:
        return plan, captured
    first = plan.estimate
    estimate = replace(
        best.estimate,
        bound=min(first.bound, best.estimate.in_turn_seconds),
        baselines=first.baselines,
        search=replace(first.search, copies={name: one.estimate.step_seconds for name, (one, _) in found.items()}),
    )
    return best.with_estimate(estimate), graph


def _hideable_seconds(plan: StagePlan, captured: CapturedModel, cluster: Cluster) -> float:
    """Of collectives of activations, and no more than there is compute beside them."""
    program = make_program(captured)
    pricer = make_pricer(mesh=plan.mesh, cluster=cluster, config=plan.config)
    charges = charges_of(lower(plan, program, pricer.target), pricer)
    stored = {p.placeholder for p in captured.parameters}
    sent = sum(charge.seconds for charge in charges if charge.axes and charge.name not in stored)
    computed = sum(charge.seconds for charge in charges if not charge.axes)
    return min(sent, computed)
