"""Which plan of the whole model is best as the stages of a pipeline, within the memory of each rank?

The memory of the rank that may hold most is limited in the strategy graph of the whole model, of which only its ops
count; then all ranks are counted call by call (`search.staged_memory`).
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from operator import itemgetter
from typing import NamedTuple

from autopar.cost_models.collectives import cheapest, least
from autopar.cost_models.links import axis_links
from autopar.cost_models.pipeline import Pipeline
from autopar.cost_models.schedules import make_order
from autopar.errors import InfeasibleError, SearchTimeoutError
from autopar.lower.program import Program
from autopar.search.costs.pricing import Pricer
from autopar.search.costs.work_bound import ops_work
from autopar.search.exact.ilp import CutoffError
from autopar.search.find_exactly import Exact
from autopar.search.graph.moments import Share
from autopar.search.joint.candidates import Candidate
from autopar.search.joint.critical_path import CriticalWay, guessed_way, longest_way
from autopar.search.joint.fullest_rank import fullest_share
from autopar.search.joint.messages import least_messages
from autopar.search.joint.mixed_stages import mix_stages
from autopar.search.known.baselines import memory_limit
from autopar.search.staged.stages import PricedStages, choose_cuts, even_cuts, even_starts, simulated, staged, starts_of
from autopar.search.timeline.staged_buckets import Finish
from autopar.values.cluster import Cluster
from autopar.values.estimate import Estimate
from autopar.values.graph import CapturedModel
from autopar.values.plan import Plan
from autopar.values.search_report import SolvedGraph
from autopar.values.stage_plan import StagePlan

ATTEMPTS = 4
"""How often a whole plan is made smaller until its stages fit."""
MARGIN = 0.002
"""Of the limit: how much more than what is beyond it a whole plan is made smaller."""
FEWEST = 3
"""Blocks a rank, from which on some of them may do as one choice says and some as another."""
SPARED = 0.005
"""Part of the limit that is left to buckets where blocks of a rank are made to fit."""
SLOWER = 0.1
"""By what part a step is expected to get slower for as much memory less as the limit (70B, H100: 0.1 to 0.3)."""


def way_before_planning(program: Program, pricer: Pricer, cluster: Cluster, key: Candidate) -> CriticalWay:
    """A way through the step of evenly dealt stages that no plan is needed for."""
    pipeline, schedule, chunks = key.arrangement.pipeline, key.schedule, key.chunks
    send = cheapest("send_recv", axis_links(cluster, (pipeline, pricer.mesh.size), (0,)))
    begins = even_starts(program, pipeline, chunks)
    order = make_order(schedule, pipeline, program.microbatches, chunks)
    share = fullest_share(program, pricer.mesh.size, schedule, pipeline, chunks, begins)
    return guessed_way(program, pricer, ops_work(program, pricer), order, begins, share, send)


class StagedRun(NamedTuple):
    """A plan of the whole model in stages: these, the plan of them, its timeline, and the rank that pays most once."""

    plan: StagePlan
    stages: Sequence[CapturedModel]
    made: Plan
    timeline: Pipeline
    slowest: int


def held_by_ranks(plan: Plan) -> list[float]:
    """Bytes at the peak of each pipeline rank."""
    return [cost.nbytes for cost in plan.estimate.search.stages[: plan.pipeline]]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Staged:
    """`plan`: None if none was found that fits. way: through the step of what was found."""

    plan: Plan | None
    bound: float
    way: CriticalWay


def best_staged(
    program: Program,
    pricer: Pricer,
    cluster: Cluster,
    key: Candidate,
    whole: Callable[[Pricer, Share, bool], Exact],
    cutoff: float = math.inf,
    finish: Finish | None = None,
) -> Staged:
    """A plan that fits, a bound on the seconds of every plan with blocks dealt evenly, and a way to better that.

    Raises InfeasibleError or CutoffError if the first search of `whole` does, within the memory of a rank.

    whole: the best plan of the whole model for a pricer, within the memory of the fullest rank, blocks dealt evenly; so
        its bound, shared out over the stages, is one for all of theirs; or a mixture of two, if that is asked for, of
        which each rank has as many blocks of the slow one as it needs to fit.
    cutoff: seconds from which on a plan is of no use: stages that are slower with more memory than there is are not
        planned again.
    finish: puts a plan in buckets, whose memory is then spared where blocks differ.

    Stages that do not fit are planned within the memory of the rank that holds too much as well, then with ever less
    memory, which proves nothing. Those of one chunk a rank are cut where they are fastest too, if that fits.
    """
    pipeline, schedule, chunks = key.arrangement.pipeline, key.schedule, key.chunks
    limit = memory_limit(pricer.cluster, pricer.config)
    begins = even_starts(program, pipeline, chunks)
    fullest = share = fullest_share(program, pricer.mesh.size, schedule, pipeline, chunks, begins)
    send = cheapest("send_recv", axis_links(cluster, (pipeline, pricer.mesh.size), (0,)))
    room, bound, others = limit, 0.0, list[int]()
    solved: SolvedGraph | None = None
    best: Plan | None = None
    fitting: list[Plan] = []
    even = even_cuts(program, pipeline, chunks)
    few_blocks = len(starts_of(program)) + 1 < FEWEST * pipeline
    known: dict[tuple[int, tuple[str, ...]], StagedRun] = {}
    prices, spared = PricedStages(), 0.0 if finish is None else SPARED

    def run(plan: StagePlan, cuts: tuple[str, ...]) -> StagedRun:
        if (id(plan), cuts) not in known:
            cut, stages = staged(plan, program, pricer, pipeline, schedule, cuts)
            known[id(plan), cuts] = StagedRun(plan, stages, *simulated(cut, stages, cluster, pricer.cluster, prices))
        return known[id(plan), cuts]

    def held(plan: StagePlan) -> list[float]:
        return held_by_ranks(run(plan, even).made)

    for attempt in range(ATTEMPTS):
        try:
            planned = whole(pricer.within(room), share, not few_blocks)
        except (InfeasibleError, CutoffError, SearchTimeoutError):
            if attempt == 0:
                raise
            break  # in less room than there is: that proves nothing
        if attempt == 0:
            bound, solved = planned.bound / pipeline, planned.solved
        plan, mixture = replace(planned.plan, config=pricer.config), None
        if planned.mixture is not None:
            slow, fast = (replace(one, config=pricer.config) for one in planned.mixture)
            mixture = mix_stages(slow, fast, program, begins, pipeline, held, limit * (1 - spared))
            plan = mixture or plan
        every = [even]
        if chunks == 1:
            every.append(choose_cuts(plan, program, pricer, pipeline))
        runs = [run(plan, cuts) for cuts in every]
        made = [one.made for one in runs]
        if finish is not None:  # that of the cuts which are best alone
            first = min(runs, key=lambda one: (one.made.estimate.peak_nbytes > limit, one.made.estimate.step_seconds))
            made = [finish(first.made, first.stages, prices)]
        ran = run(plan, even)
        passes, messages = longest_way(ran.timeline, len(ran.stages))
        nbytes = min(least_messages(program, pricer.mesh.size, [stage.sends for stage in ran.stages[:-1]]))
        way = CriticalWay(
            forward=passes[0],
            backward=passes[1],
            rank=ran.slowest,
            sent=messages * least(send, nbytes)[0],
            share=fullest,
            begins=begins,
            num_ranks=pipeline,
        )
        fitting += [one for one in made if one.estimate.peak_nbytes <= limit]
        best = min(fitting, key=lambda one: one.estimate.step_seconds, default=None)
        with_less, hopeful = min(((_with_less(one.estimate, limit), one) for one in made), key=itemgetter(0))
        if mixture or with_less >= cutoff or (best and best.estimate.step_seconds <= with_less):
            break
        of_ranks = held_by_ranks(hopeful)
        rank = of_ranks.index(max(of_ranks))
        if rank not in share.ranks:
            others.append(rank)
            share = fullest_share(program, pricer.mesh.size, schedule, pipeline, chunks, begins, others)
            continue
        beyond = hopeful.estimate.peak_nbytes - limit + MARGIN * limit
        room = min(planned.counted_nbytes, room) - beyond
    if best is not None:
        report = replace(best.estimate.search, solved=solved)
        best = best.with_estimate(replace(best.estimate, search=report))
    return Staged(plan=best, bound=bound, way=way)


def _with_less(estimate: Estimate, limit: float) -> float:
    """Seconds that are expected of a plan once it is planned again to fit."""
    return estimate.step_seconds * (1 + SLOWER * max(estimate.peak_nbytes / limit - 1, 0.0))
