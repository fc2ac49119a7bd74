"""When does each op and each collective of a plan's step run, and how long does the step take? Its timeline.

One rank stands for all of its stage, which do the same. A plan without stages is a pipeline of one stage, whose
micro-batches follow each other; one with stages runs in the order of its schedule (`cost_models.pipeline`). Streams are
the device, one for each link level whose links are the slowest that a collective crosses, and a stage's links to its
neighbours.

Without overlap, as the runtime works today, it takes what `evaluate` and `stages.priced` say; two micro-batches at once
(`StagePlan.copies`) run beside each other's collectives, and the bounds below hold for them. What is paid once a step
then stands at its end, when every rank has ended its micro-batches: gradients are reduced, the optimizer runs, copies
that live for the step are gathered from what it wrote. Overlapped (`search.weave`), these gathers come before the first
micro-batch's ops and reductions beside the last one's, and of a plan without stages

    max over streams of their seconds <= seconds <= sum over streams of their seconds,

for whenever a step is not done some stream runs. Not seen: compute that is slower while links are busy; buckets, every
collective goes alone.
"""

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from autopar.cost_models.collectives import cheapest
from autopar.cost_models.links import axis_links
from autopar.cost_models.pipeline import COMPUTE, Passage, Pipeline, Segment, StageWork, Woven, make_pipeline
from autopar.cost_models.schedules import make_order
from autopar.cost_models.timeline import Timeline, busy_seconds, simulate
from autopar.cost_models.trace import chrome_trace, write_trace
from autopar.lower.interleaved import running
from autopar.lower.lowered_step import lower
from autopar.lower.program import Program, make_program
from autopar.search.costs.pricing import Pricer, make_pricer
from autopar.search.costs.runs import Runs, Task, find_runs, labels
from autopar.search.pipeline_parts import part_of
from autopar.search.staged.stages import sent_seconds, shared_seconds
from autopar.search.timeline.weave import NamesOfTasks, Overlap, beside, chain, weave
from autopar.values.cluster import Cluster
from autopar.values.graph import CapturedModel
from autopar.values.placement import Layout
from autopar.values.plan import Plan
from autopar.values.schedules import SPLITTING
from autopar.values.stage_plan import StagePlan


@dataclass(frozen=True, kw_only=True)
class PlanTimeline:
    """The step of a plan over time."""

    pipeline: Pipeline
    timeline: Timeline

    @property
    def seconds(self) -> float:
        """Of the step."""
        return self.timeline.makespan

    @cached_property
    def busy(self) -> dict[str, float]:
        """Seconds that each stream of the busiest rank works, by name; of a pipeline the most of any rank."""
        out: dict[str, float] = {}
        for (_, lane), seconds in zip(self.pipeline.streams(), busy_seconds(self.pipeline.tasks), strict=True):
            out[lane] = max(out.get(lane, 0.0), float(seconds))
        return {lane: seconds for lane, seconds in out.items() if seconds}

    def trace(self) -> dict[str, Any]:
        """The step for ui.perfetto.dev."""
        pipeline = self.pipeline
        return chrome_trace(pipeline.tasks, self.timeline, names=pipeline.describe(), streams=pipeline.streams())

    def save(self, path: str | Path) -> None:
        """Write the trace to a file.

        Raises:
            ArgumentError: if it cannot be written.
        """
        write_trace(self.trace(), path)


def plan_timeline(
    plan: Plan,
    graphs: Sequence[CapturedModel],
    cluster: Cluster,
    overlap: Overlap | None = None,
) -> PlanTimeline:
    """The timeline of one step; `graphs` are those of the plan's stages (`passes.split_stages`).

    overlap: None for none.

    Raises:
        MeshError: if the cluster cannot be shared out over so many pipeline ranks.
    """
    if plan.num_stages > 1:
        return _staged(plan, graphs, cluster, overlap)
    pricer = make_pricer(mesh=plan.mesh, cluster=cluster, config=plan.config)
    return program_timeline(plan.single, make_program(graphs[0]), pricer, overlap)


def program_timeline(plan: StagePlan, program: Program, pricer: Pricer, overlap: Overlap | None = None) -> PlanTimeline:
    """`plan_timeline` for a program and prices at hand."""
    plan, program = running(replace(plan, buckets=(), ways={}), program)
    stage = _Stage(plan, program, pricer, {}, hoisted=plan.microbatches > 1)
    lanes = _Lanes([stage])
    return _simulated("1f1b", 1, plan.microbatches, [stage.work(lanes, overlap)], lanes)


def _staged(plan: Plan, graphs: Sequence[CapturedModel], cluster: Cluster, overlap: Overlap | None) -> PlanTimeline:
    links = axis_links(cluster, (plan.pipeline, plan.mesh.size), (0,))
    send, part = cheapest("send_recv", links), part_of(cluster, plan.pipeline)
    stages, sends = [], []
    for number, captured in enumerate(graphs):
        program = make_program(captured)
        pricer = make_pricer(mesh=plan.mesh, cluster=part, config=plan.config)
        after = plan.stages[number + 1].layouts if number + 1 < plan.num_stages else {}
        sent = {name: after[name] for name in captured.sends}
        splits = plan.schedule in SPLITTING
        alone = replace(plan.stages[number], buckets=(), ways={})
        stages.append(_Stage(alone, program, pricer, sent, hoisted=True, splits=splits))
        sends.append(sent_seconds(program, pricer, sent, send))
    shared = shared_seconds(plan, graphs, cheapest("all_reduce", links))
    level = links.crossings[0].level.name if links.crossings else ""
    lanes = _Lanes(stages, (level,) if shared else ())
    works = []
    for stage, seconds in zip(stages, sends, strict=True):
        own = stage.work(lanes, overlap)
        works.append(replace(own, send_forward=seconds, send_backward=seconds))
    if shared:
        segment = Segment(lanes.number[level], shared, "all_reduce of gradients that stages share")
        for rank in range(plan.pipeline):
            first = plan.stages_of(rank)[0]
            works[first] = replace(works[first], after=(segment, *works[first].after))
    return _simulated(plan.schedule, plan.pipeline, plan.microbatches, works, lanes, barrier=overlap is None)


class _Lanes:
    """Streams of a rank: the device, then link levels, each with the mesh axes whose collectives it carries."""

    def __init__(self, stages: Iterable["_Stage"], more: tuple[str, ...] = ()) -> None:
        axes: dict[str, dict[str, None]] = defaultdict(dict)
        for stage in stages:
            for task in (*stage.runs.forward, *stage.runs.backward):
                if task.seconds and task.axes:
                    names = stage.pricer.mesh.names
                    axes[stage.pricer.slowest_level(task.axes)].update((names[a], None) for a in task.axes)
        for level in more:
            axes[level]["stages"] = None
        self.number = {level: number for number, level in enumerate(axes, start=1)}
        self.names = ("compute", *(f"{level}: {', '.join(names)}" for level, names in axes.items()))


class _Stage:
    """One stage's tasks, and its work by them."""

    def __init__(
        self,
        plan: StagePlan,
        program: Program,
        pricer: Pricer,
        sent: dict[str, Layout],
        *,
        hoisted: bool,
        splits: bool = False,
    ) -> None:
        self.plan, self.program, self.pricer, self.sent = plan, program, pricer, sent
        step = lower(plan, program, pricer.target, sent)
        self.runs: Runs = find_runs(step, pricer, hoisted=hoisted, splits=splits)
        self.back = dict(zip("IW" if splits else "B", self.runs.parts, strict=True))

    def work(self, lanes: _Lanes, overlap: Overlap | None) -> StageWork:
        runs, words = self.runs, labels(self.program)

        def name(task: Task, members: int) -> str:
            event = task.event
            if not task.axes:
                more = ", again" * (event.kind == "recompute") + ", update" * (event.kind == "optimizer")
                return words[event.name] + more
            more = f" and {members - 1} more" if members > 1 else ""
            over = ", ".join(self.plan.mesh.names[a] for a in task.axes)
            return f"{task.event.kind} of {words[task.event.name]}{more} over {over}"

        names = NamesOfTasks(lane=lambda axes: lanes.number[self.pricer.slowest_level(axes)], name=name)
        passes = {"F": runs.forward, **self.back}
        each = {kind: [task for task in tasks if not task.event.once] for kind, tasks in passes.items()}
        if overlap is None:
            once = [
                task
                for task in (*runs.backward, *runs.optimizer, *runs.forward)
                if task.event.once or not task.event.makes
            ]
            idle = (Segment(COMPUTE, 0.0),)
            actions: dict[str, Passage] = {kind: chain(tasks, names) or idle for kind, tasks in each.items()}
            if self.program.copies > 1:
                actions = {kind: beside(tasks, names) for kind, tasks in each.items()}
            return StageWork(actions=actions, after=chain(once, names))

        def price(kind: str, axes: tuple[int, ...], nbytes: int) -> float:
            return self.pricer.message(kind, axes, nbytes, True)[0]

        received = [("gradient", n, self.plan.layouts[n], -1) for n in self.program.captured.received]
        ends = {"F": [("value", n, layout, -1) for n, layout in self.sent.items()], "W": []}

        def overlapped(kind: str, tasks: Sequence[Task]) -> Woven:
            return weave(tasks, ends.get(kind, received), runs.leaves, names, price, overlap)

        woven = {kind: overlapped(kind, tasks) for kind, tasks in each.items()}
        first, last = (overlapped(kind, passes[kind]) for kind in ("F", [*self.back][-1]))
        return StageWork(actions=woven, first=first, last=last, after=chain(runs.optimizer, names))


def _simulated(
    schedule: str, pipeline: int, microbatches: int, works: list[StageWork], lanes: _Lanes, *, barrier: bool = False
) -> PlanTimeline:
    order = make_order(schedule, pipeline, microbatches, len(works) // pipeline)
    made = make_pipeline(order, works, lanes.names, barrier=barrier)
    return PlanTimeline(pipeline=made, timeline=simulate(made.tasks))
