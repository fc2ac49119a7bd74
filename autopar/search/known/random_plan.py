"""Which plan tests rules and passes hardest? A random valid choice for every node, storage and input."""

import itertools
import random
from dataclasses import replace

from autopar.errors import ArgumentError
from autopar.lower.emit import emit, emit_stage
from autopar.lower.program import Op, Program, Tensor, make_program
from autopar.passes.split_stages import split_stages
from autopar.rules.rule import is_splittable, layouts
from autopar.search.costs.bucket_ways import ways_between
from autopar.search.costs.storages import input_layouts, orders, storages
from autopar.values.graph import CapturedModel, requires_grad
from autopar.values.local_model import LocalModel
from autopar.values.mesh import Mesh
from autopar.values.placement import INVARIANT, PARTIAL, REPLICATE, Layout, Shard
from autopar.values.plan import Plan
from autopar.values.redistribution import Step
from autopar.values.stage_plan import StagePlan
from autopar.values.train_config import TrainConfig

TRIES = 30
GATHERED = ("use", "microbatch")
"""Lifetimes of one batch; with several `step` is another."""


def random_plan(
    captured: CapturedModel, mesh: Mesh, rng: random.Random, config: TrainConfig | None = None
) -> StagePlan:
    """A uniformly random choice for every node on every axis, redrawn until its sizes allow it; default routes.

    Axes of size 1 are Invariant, as in the search's space. Parameters get a random storage (axes that the first use
    splits too come first, the others innermost) and a random lifetime, inputs a random even layout.
    """
    program = make_program(captured)
    choices = {op.name: _random_choice(op, mesh, rng) for op in program.ops}
    placed: dict[str, Layout] = {}
    lifetimes: dict[str, str] = {}
    for name, tensor in program.tensors.items():
        if tensor.kind == "parameter":
            placed[name] = _random_storage(tensor, _first_use(program, tensor, choices), mesh, rng)
            lifetimes[name] = rng.choice((*GATHERED, "step") if captured.microbatches > 1 else GATHERED)
        elif tensor.kind == "input":
            placed[name] = rng.choice(input_layouts(tensor.shape, mesh))
        elif tensor.kind != "op":
            placed[name] = Layout((REPLICATE,) * mesh.num_axes)
    return StagePlan(
        model=captured.name,
        fingerprint=captured.fingerprint,
        mesh=mesh,
        cluster="",
        config=config or TrainConfig(),
        choices=choices,
        layouts=placed,
        lifetimes=lifetimes,
        microbatches=captured.microbatches,
        origin="random",
    )


def _random_choice(op: Op, mesh: Mesh, rng: random.Random) -> tuple[str, ...]:
    names = list(op.choices)
    for _ in range(TRIES):
        drawn = tuple(rng.choice(names) if n > 1 else "invariant" for n in mesh.shape)
        if is_splittable(op.rule, tuple(op.choices[n] for n in drawn), mesh):
            return drawn
    whole = [n for n in names if n in ("replicate", "invariant")]
    return tuple(rng.choice(whole) if n > 1 else "invariant" for n in mesh.shape)


def _first_use(program: Program, tensor: Tensor, choices: dict[str, tuple[str, ...]]) -> Layout | None:
    for position, slot in program.readers[tensor.name]:
        op = program.ops[position]
        chosen = tuple(op.choices[n] for n in choices[op.name])
        return layouts(chosen, op.operand_grads, op.result_grads)[0][slot]
    return None


def _random_storage(tensor: Tensor, use: Layout | None, mesh: Mesh, rng: random.Random) -> Layout:
    storage = rng.choice(storages(tensor.shape, mesh, tensor.requires_grad, nested=False))
    return nested_under(storage, use) if use is not None else storage


def nested_under(storage: Layout, use: Layout) -> Layout:
    """The same shards, nested so that a gather of the axes that only the storage splits leads to `use`."""
    shared = [a for dim in use.sharded_dims() for a in use.axes_of(dim) if storage.axes[a] == Shard(dim)]
    extra = [a for a, p in enumerate(storage.axes) if isinstance(p, Shard) and a not in shared]
    return next(v for v in orders(storage.axes) if v == Layout(storage.axes, (*shared, *extra)))


def random_cuts(captured: CapturedModel, num_stages: int, rng: random.Random) -> tuple[str, ...]:
    """Cuts anywhere before the loss.

    Raises:
        ArgumentError: if the model has not so many calls.
    """
    names = [node.name for node in captured.graph.nodes if node.op == "call_function"]
    names = names[1 : names.index(captured.loss) + 1]
    if num_stages - 1 > len(names):
        raise ArgumentError(
            f"{captured.name} has {len(names) + 1} calls up to its loss, too few for {num_stages} stages; use fewer"
        )
    return tuple(names[i] for i in sorted(rng.sample(range(len(names)), num_stages - 1)))


def random_staged_plan(
    captured: CapturedModel,
    mesh: Mesh,
    schedule: str,
    pipeline: int,
    cuts: tuple[str, ...],
    rng: random.Random,
    *,
    recompute: float = 0.0,
    buckets: float = 0.0,
) -> Plan:
    """A random plan for each of the stages between `cuts`; what is sent travels in a random layout.

    recompute: the share of ops and copies that backward makes again. buckets: the share of stages with buckets.
    """
    stages = split_stages(captured, cuts)
    plans: list[StagePlan] = []
    shared: dict[str, Layout] = {}
    for stage in stages:
        plan = random_plan(stage, mesh, rng)
        taken = {name: _random_boundary(plan.layouts[name], stage, name, mesh, rng) for name in stage.received}
        stored = {
            p.placeholder: shared.setdefault(p.placeholder, plan.layouts[p.placeholder]) for p in stage.parameters
        }
        plan = replace(plan, layouts={**plan.layouts, **taken, **stored})
        plans.append(random_buckets(plan, stage, rng) if buckets and rng.random() < buckets else plan)
    whole = Plan(
        model=captured.name,
        fingerprint=captured.fingerprint,
        cluster="",
        config=TrainConfig(),
        mesh=mesh,
        pipeline=pipeline,
        schedule=schedule,
        microbatches=captured.microbatches,
        cuts=cuts,
        stages=tuple(plans),
        origin="random",
    )
    if not recompute:
        return whole
    again = [
        _recomputed(plans[s], emit_stage(stages, whole.stages, s), make_program(stages[s]), rng, recompute)
        for s in range(len(stages))
    ]
    return replace(whole, stages=tuple(again))


def _random_boundary(layout: Layout, stage: CapturedModel, name: str, mesh: Mesh, rng: random.Random) -> Layout:
    """The layout with whole axes made Invariant or Partial now and then, which tensors with gradients can be."""
    if not requires_grad(stage.nodes[name]):
        return layout
    choices = [(p, INVARIANT, PARTIAL) if n > 1 else (INVARIANT,) for p, n in zip(layout.axes, mesh.shape, strict=True)]
    axes = tuple(rng.choice(c) if p == REPLICATE else p for p, c in zip(layout.axes, choices, strict=True))
    return Layout(axes, layout.order)


def random_buckets(plan: StagePlan, captured: CapturedModel, rng: random.Random, *, share: float = 0.8) -> StagePlan:
    """The plan with that share of the parameters in a random number of buckets, gathered early or not."""
    names = [p.placeholder for p in captured.parameters if rng.random() < share]
    buckets: dict[int, list[str]] = {}
    count = rng.randint(1, max(1, len(names) // 2))
    for name in names:
        buckets.setdefault(rng.randrange(count), []).append(name)
    return replace(plan, buckets=tuple(tuple(found) for found in buckets.values()), prefetch=rng.random() < 0.5)


def random_ways(plan: StagePlan, captured: CapturedModel, rng: random.Random) -> StagePlan:
    """The plan with a random one of all ways over several axes for every parameter that is used in one layout."""
    walked: dict[str, list[Step]] = {}
    for node in emit(captured, plan).graph.nodes:
        if "step" in node.meta and node.meta["origin"].op == "placeholder":
            walked.setdefault(node.meta["origin"].name, []).append(node.meta["step"])
    ways = {}
    for spec in captured.parameters:
        steps = walked.get(spec.placeholder, [])
        if steps and all(a.target == b.source for a, b in itertools.pairwise(steps)):
            found = ways_between(plan.layouts[spec.placeholder], steps[-1].target, spec.shape, plan.mesh)
            if found:
                ways[spec.placeholder] = rng.choice(list(found.values()))
    return replace(plan, ways=ways)


def random_recompute(plan: StagePlan, captured: CapturedModel, rng: random.Random, *, share: float) -> StagePlan:
    """The plan with each op recomputed, and each layout that an op's result travels through remade, in that share."""
    return _recomputed(plan, emit(captured, plan), make_program(captured), rng, share)


def _recomputed(plan: StagePlan, local: LocalModel, program: Program, rng: random.Random, share: float) -> StagePlan:
    copies: dict[str, list[Layout]] = {}
    for node in local.graph.nodes:
        step, origin = node.meta.get("step"), node.meta.get("origin")
        if step is not None and origin.op == "call_function" and rng.random() < share:
            copies.setdefault(origin.name, []).append(step.target)
    return replace(
        plan,
        recompute=frozenset(op.name for op in program.ops if rng.random() < share),
        remade={name: tuple(found) for name, found in copies.items()},
    )
