"""How does a plan of the whole model run as the stages of a pipeline, and what does its step then take?

A stage is a run of blocks; what comes before the first block is the first stage's, what comes after the last the last
one's. Every stage decides as the whole plan does, and what crosses a cut travels in the layout in which it is made.
Layers a stage: those for which the slowest stage is fastest (`balanced`, exact by dynamic programming); of interleaved
stages as many each (`even_cuts`).

    seconds    the order of `cost_models.schedules` simulated with each stage's own forward and backward of a
               micro-batch (of zbv each part of it) and its messages to the next; then the slowest rank's share of what
               is paid once a step
    bubble     the step less what its busiest rank works
    memory     of the fullest rank, counted along its order (`search.staged_memory`)
"""

import math
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from autopar.cost_models.collectives import Form, cheapest, least
from autopar.cost_models.links import axis_links
from autopar.cost_models.pipeline import COMPUTE, Pipeline, Segment, StageWork, make_pipeline
from autopar.cost_models.schedules import PipelineOrder, make_order
from autopar.cost_models.timeline import simulate
from autopar.errors import InfeasibleError
from autopar.lower.live import Live
from autopar.lower.lowered_step import lower
from autopar.lower.program import Program, make_program
from autopar.passes.split_stages import owners, possible_cuts, split_stages
from autopar.search.costs.evaluate import charges_of
from autopar.search.costs.pricing import Pricer, make_pricer
from autopar.search.costs.runs import find_runs
from autopar.search.staged.alike import stage_key
from autopar.search.staged.rounds import dealt
from autopar.search.staged.staged_memory import StageMemory, rank_memories, stage_memory
from autopar.values.blocks import block_of
from autopar.values.cluster import Cluster
from autopar.values.estimate import Estimate
from autopar.values.graph import CapturedModel, operands, requires_grad
from autopar.values.lifetimes import ONCE_A_STEP
from autopar.values.placement import Layout, local_shape
from autopar.values.plan import Plan
from autopar.values.schedules import SPLITTING
from autopar.values.search_report import StageCost
from autopar.values.stage_plan import StagePlan


@dataclass(frozen=True, slots=True, kw_only=True)
class StagePrice:
    """Seconds of one micro-batch and once a step. `sent`: seconds of its message to the next stage; `weights`: of the
    second part of backward, None where that has one."""

    forward: float
    backward: float
    once: float
    memory: StageMemory | None = None
    sent: float = 0.0
    weights: float | None = None

    @property
    def passing(self) -> float:
        return self.forward + self.back

    @property
    def back(self) -> float:
        """Backward, both parts of it."""
        return self.backward + (self.weights or 0.0)


@dataclass(frozen=True, slots=True, eq=False)
class PricedStages:
    """What was priced and read before, of plans in stages that all have the same part of a cluster.

    prices: by `stage_key`; programs: by fingerprint.
    """

    prices: dict[Hashable, StagePrice] = field(default_factory=dict)
    programs: dict[str, Program] = field(default_factory=dict)

    def program(self, stage: CapturedModel) -> Program:
        """The stage's, made once."""
        if stage.fingerprint not in self.programs:
            self.programs[stage.fingerprint] = make_program(stage)
        return self.programs[stage.fingerprint]


def block_starts(captured: CapturedModel) -> tuple[str, ...]:
    """The first call of every block but the first, where the model may be cut; of a model without blocks, of every
    module that has parameters of its own."""
    parameters = {p.placeholder for p in captured.parameters}
    calls = [n for n in captured.graph.nodes if n.op == "call_function" and requires_grad(n)]
    reading = ((n, any(s.name in parameters for s in operands(n))) for n in calls)
    return possible_cuts(captured, _firsts((n.name, n.meta["module"], reads) for n, reads in reading))


def _firsts(calls: Iterable[tuple[str, str, bool]]) -> tuple[str, ...]:
    """Of calls as (name, module, whether it reads parameters)."""
    blocks: dict[str, str] = {}
    modules: dict[str, str] = {}
    for name, module, reads in calls:
        if block := block_of(module):
            blocks.setdefault(block, name)
        if reads:
            modules.setdefault(module, name)
    return tuple((blocks if len(blocks) > 1 else modules).values())[1:]


def starts_of(program: Program) -> tuple[str, ...]:
    """`block_starts` of the program's graph."""
    return tuple(_starts(program))


def start_positions(program: Program) -> tuple[int, ...]:
    """Their positions."""
    return tuple(_starts(program).values())


def _starts(program: Program) -> dict[str, int]:
    if "block starts" not in program.form:
        trained = [op for op in program.ops if any(op.result_grads)]
        firsts = _firsts((op.name, op.module, bool(op.parameters)) for op in trained)
        positions = {op.name: op.position for op in trained}
        program.form["block starts"] = {name: positions[name] for name in possible_cuts(program.captured, firsts)}
    found: dict[str, int] = program.form["block starts"]
    return found


def even_starts(program: Program, p: int, chunks: int) -> tuple[int, ...]:
    """Positions of the ops with which interleaved stages begin after the first: blocks dealt evenly."""
    positions = _starts(program)
    return tuple(positions[name] for name in even_cuts(program, p, chunks))


def even_cuts(program: Program, p: int, chunks: int) -> tuple[str, ...]:
    """Cuts that deal blocks evenly to p ranks of so many stages."""
    starts = starts_of(program)
    ends = np.cumsum(dealt(len(starts) + 1, p, chunks))[:-1]
    return tuple(starts[end - 1] for end in ends)


def balanced(seconds: Sequence[float], parts: int) -> tuple[int, ...]:
    """Where each part after the first begins, none empty, so that the largest sum of a part is least."""
    sums = np.concatenate([[0.0], np.cumsum(seconds)])
    count = len(seconds)
    best = np.full((parts + 1, count + 1), np.inf)
    begins = np.zeros((parts + 1, count + 1), dtype=np.int64)
    best[0, 0] = 0.0
    for part in range(1, parts + 1):
        for end in range(part, count + 1):
            starts = np.arange(part - 1, end)
            worst = np.maximum(best[part - 1, starts], sums[end] - sums[starts])
            chosen = int(worst.argmin())
            best[part, end], begins[part, end] = worst[chosen], starts[chosen]
    out, end = [], count
    for part in range(parts, 1, -1):
        end = int(begins[part, end])
        out.append(end)
    return tuple(reversed(out))


def choose_cuts(plan: StagePlan, program: Program, pricer: Pricer, num_stages: int) -> tuple[str, ...]:
    """Cuts at blocks, or before any calls that read parameters if there are too few, so that the slowest stage's
    micro-batch is fastest.

    Raises:
        InfeasibleError: if the model cannot be cut in so many stages.
    """
    positions = {op.name: op.position for op in program.ops}
    starts = starts_of(program)
    if len(starts) + 1 < num_stages:
        reading = [op.name for op in program.ops if op.parameters and any(op.result_grads)]
        starts = possible_cuts(program.captured, reading[1:])
    if len(starts) + 1 < num_stages:
        captured = program.captured
        raise InfeasibleError(
            f"{num_stages} stages need as many parts that read parameters; {captured.name} can be cut into "
            f"{len(starts) + 1}{written_text(captured)}"
        )
    begins = np.array([positions[name] for name in starts])
    seconds = np.zeros(len(starts) + 1)
    for charge in charges_of(lower(plan, program, pricer.target), pricer):
        if charge.kind == "optimizer" or plan.lifetimes.get(charge.name) in ONCE_A_STEP:
            continue
        position = positions.get(charge.name)
        if position is None:
            tensor = program.tensors[charge.name]
            readers = [p for p, _ in program.readers[charge.name]]
            position = tensor.producer if tensor.producer is not None else min(readers, default=0)
        seconds[int(np.searchsorted(begins, position, side="right"))] += charge.seconds
    return tuple(starts[i - 1] for i in balanced(seconds.tolist(), num_stages))


def written_text(captured: CapturedModel) -> str:
    """Why there may be fewer cuts than blocks, as a clause: nothing where forward writes nothing."""
    written = [spec.names[0] for spec in captured.written]
    return f" (one stage has all calls that read or write {written[0]})" if written else ""


def staged(
    plan: StagePlan, program: Program, pricer: Pricer, pipeline: int, schedule: str, cuts: tuple[str, ...]
) -> tuple[Plan, tuple[CapturedModel, ...]]:
    """The whole model's plan a stage at a time, and the stages."""
    given = dict(plan.layouts)
    for op in program.ops:
        results = pricer.op(op, plan.choices[op.name]).results
        given.update((name, layout) for name, layout in zip(op.results, results, strict=True) if name is not None)
    if ("stages", cuts) not in program.made:
        program.made["stages", cuts] = split_stages(program.captured, cuts)
    stages: tuple[CapturedModel, ...] = program.made["stages", cuts]
    made = Plan(
        model=plan.model,
        fingerprint=plan.fingerprint,
        cluster=plan.cluster,
        config=plan.config,
        mesh=plan.mesh,
        pipeline=pipeline,
        schedule=schedule,
        microbatches=plan.microbatches,
        cuts=cuts,
        stages=tuple(_restricted(plan, stage, given) for stage in stages),
        origin=plan.origin,
    )
    return made, stages


def _restricted(plan: StagePlan, stage: CapturedModel, given: Mapping[str, Layout]) -> StagePlan:
    """What the whole plan says of one stage."""
    names = {node.name for node in stage.graph.nodes}
    placeholders = [node.name for node in stage.graph.nodes if node.op == "placeholder"]
    return replace(
        plan,
        model=stage.name,
        fingerprint=stage.fingerprint,
        choices={name: choice for name, choice in plan.choices.items() if name in names and name not in placeholders},
        layouts={name: given[name] for name in placeholders},
        lifetimes={name: lifetime for name, lifetime in plan.lifetimes.items() if name in names},
        routes={name: routes for name, routes in plan.routes.items() if name in names},
        recompute=plan.recompute & names - set(placeholders),
        remade={name: layouts for name, layouts in plan.remade.items() if name in names},
        estimate=Estimate(),
    )


def price_stage(
    plan: StagePlan,
    stage: CapturedModel,
    program: Program,
    cluster: Cluster,
    sent: Mapping[str, Layout],
    send: tuple[Form, ...],
    *,
    splits: bool = False,
) -> StagePrice:
    """One stage on its part of the cluster. `sent`: layouts in which the next takes what it sends, by way of `send`.

    splits: backward in two parts.
    """
    pricer = make_pricer(mesh=plan.mesh, cluster=cluster, config=plan.config)
    step = lower(plan, program, pricer.target, sent)
    passes = dict.fromkeys(("forward", "backward", "once"), 0.0)
    for charge in charges_of(step, pricer):
        if charge.kind == "optimizer" or plan.lifetimes.get(charge.name) in ONCE_A_STEP:
            passes["once"] += charge.seconds
        else:
            passes["backward" if charge.backward else "forward"] += charge.seconds / plan.microbatches
    if splits:
        runs = find_runs(step, pricer, hoisted=True, splits=True)
        for part, tasks in zip(("backward", "weights"), runs.parts, strict=True):
            passes[part] = sum(task.seconds for task in tasks if not task.event.once)
    return StagePrice(
        **passes,
        memory=stage_memory(Live(step), stage, splits=splits),
        sent=sent_seconds(program, pricer, sent, send),
    )


def sent_seconds(program: Program, pricer: Pricer, sent: Mapping[str, Layout], send: tuple[Form, ...]) -> float:
    """What a stage's message to the next takes, one way."""
    crossing = sum(pricer.target.local_nbytes(program.tensors[name], layout) for name, layout in sent.items())
    return least(send, crossing)[0] if crossing else 0.0


def priced(
    plan: Plan,
    stages: Sequence[CapturedModel],
    cluster: Cluster,
    part: Cluster,
    known: PricedStages | None = None,
) -> Plan:
    """The plan with its estimate: of a step, and of its fullest rank. `part`: what a stage has of the cluster."""
    return simulated(plan, stages, cluster, part, known)[0]


def simulated(
    plan: Plan,
    stages: Sequence[CapturedModel],
    cluster: Cluster,
    part: Cluster,
    known: PricedStages | None = None,
) -> tuple[Plan, Pipeline, int]:
    """`priced`, the pipeline of one task an action, and the rank that pays most once a step."""
    links = axis_links(cluster, (plan.pipeline, plan.mesh.size), (0,))
    send, reduce = cheapest("send_recv", links), cheapest("all_reduce", links)
    prices: list[StagePrice] = []
    known = PricedStages() if known is None else known
    for number, stage in enumerate(stages):
        after = plan.stages[number + 1].layouts if number + 1 < len(stages) else {}
        sent = {name: after[name] for name in stage.sends}
        key = stage_key(plan.stages[number], stage, sent)
        if key not in known.prices:
            program, splits = known.program(stage), plan.schedule in SPLITTING
            known.prices[key] = price_stage(plan.stages[number], stage, program, part, sent, send, splits=splits)
        prices.append(known.prices[key])
    order = make_order(plan.schedule, plan.pipeline, plan.microbatches, plan.num_stages // plan.pipeline)
    pipeline = make_pipeline(order, [stage_work(price) for price in prices])
    makespan = float(simulate(pipeline.tasks).finish.max(initial=0.0))
    ranks = [plan.stages_of(rank) for rank in range(plan.pipeline)]
    shared = shared_seconds(plan, stages, reduce)
    once = [sum(prices[s].once for s in own) + shared for own in ranks]
    slowest = int(np.argmax(once))
    held = rank_memories(plan, stages, order, [price.memory for price in prices if price.memory is not None])
    memory = max(held, key=lambda kinds: sum(kinds.values()))
    busy = [plan.microbatches * sum(prices[s].passing for s in own) for own in ranks]
    forward = [plan.microbatches * sum(prices[s].forward for s in own) for own in ranks]
    fullest = int(np.argmax(busy))
    seconds = {
        "forward": forward[fullest],
        "backward": busy[fullest] - forward[fullest],
        "bubble": max(makespan - busy[fullest], 0.0),
        "once a step": once[slowest],
    }
    costs = tuple(
        StageCost(seconds=price.passing, once=price.once, nbytes=sum(held[plan.stage_rank(number)].values()))
        for number, price in enumerate(prices)
    )
    rates = make_pricer(mesh=plan.mesh, cluster=part, config=plan.config).rates.name
    report = replace(plan.estimate.search, stages=costs)
    estimate = replace(plan.estimate, seconds=seconds, memory=memory, rates=rates, search=report)
    return plan.with_estimate(estimate), pipeline, slowest


def stage_work(price: StagePrice) -> StageWork:
    """One task an action."""
    if price.weights is None:
        seconds = {"F": price.forward, "B": price.backward}
    else:
        seconds = {"F": price.forward, "I": price.backward, "W": price.weights}
    actions = {kind: (Segment(COMPUTE, value),) for kind, value in seconds.items()}
    return StageWork(actions=actions, send_forward=price.sent, send_backward=price.sent)


def shared_seconds(plan: Plan, stages: Sequence[CapturedModel], reduce: tuple[Form, ...]) -> float:
    """Gradients of weights that stages on several ranks share are summed once a step."""
    seconds = 0.0
    for name, sharing in owners(stages).items():
        if len({plan.stage_rank(number) for number in sharing}) > 1:
            spec = next(p for p in stages[sharing[0]].parameters if p.placeholder == name)
            if spec.trainable:
                shape = local_shape(spec.shape, plan.stages[sharing[0]].layouts[name], plan.mesh)
                seconds += least(reduce, math.prod(shape) * spec.storage.itemsize)[0]
    return seconds


def in_flight(order: PipelineOrder) -> list[int]:
    """The most micro-batches of each stage between their forward and their backward."""
    now, most = [0] * order.num_stages, [0] * order.num_stages
    for actions in order.ranks:
        for action in actions:
            now[action.stage] += {"F": 1, "B": -1, "W": -1}.get(action.kind, 0)
            most[action.stage] = max(most[action.stage], now[action.stage])
    return most
