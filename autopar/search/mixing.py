"""Equal blocks need not all decide alike: some do as a slow plan that fits, the rest as a fast one that does not.

Folded searches decide a kind of block as one, so that what they find goes in steps of all its blocks; between two such
steps lies what the relaxation promises (`exact.mixture`). A mixture is priced, and its memory counted, as any plan is.
"""

import math
from collections.abc import Collection

from autopar.lower.program import Program
from autopar.search.costs.evaluate import evaluate_program
from autopar.search.costs.pricing import Pricer
from autopar.values.blocks import block_of
from autopar.values.placement import Layout
from autopar.values.stage_plan import StagePlan

TRIES = 5
"""How often the number of slow blocks is tried until it is the least that fits."""


def blocks_of(program: Program) -> dict[str, int]:
    """The blocks in the order of their first ops, and where these are."""
    first: dict[str, int] = {}
    for op in program.ops:
        if block := block_of(op.module):
            first.setdefault(block, op.position)
    return first


def mixed(
    slow: StagePlan, fast: StagePlan, program: Program, slowly: Collection[str], rest: StagePlan
) -> StagePlan | None:
    """The blocks `slowly` as the slow plan has them, other blocks as the fast one, what is in no block as `rest`, one
    of them. None where blocks that differ share something stored."""

    def plan_of(block: str) -> StagePlan:
        return rest if not block else slow if block in slowly else fast

    own = {op.name: plan_of(block_of(op.module)) for op in program.ops}
    recompute = frozenset(name for name, plan in own.items() if name in plan.recompute)
    layouts, lifetimes, routes = {}, {}, {}
    remade: dict[str, tuple[Layout, ...]] = {}
    for name, tensor in program.tensors.items():
        reading = dict.fromkeys(block_of(program.ops[p].module) for p, _ in program.readers[name])
        again = {layout for block in reading for layout in plan_of(block).remade.get(name, ())}
        if again:
            remade[name] = tuple(sorted(again, key=str))
        if tensor.producer is not None:
            source = own[program.ops[tensor.producer].name]
        else:
            plans = {id(plan): plan for plan in map(plan_of, reading)} or {id(rest): rest}
            source = next(iter(plans.values()))
            layouts[name] = source.layouts[name]
            if name in source.lifetimes:
                lifetimes[name] = source.lifetimes[name]
            told = {(plan.layouts[name], plan.lifetimes.get(name)) for plan in plans.values()}
            if len(told) > 1:
                return None
        if name in source.routes:
            routes[name] = source.routes[name]
    return StagePlan(
        model=slow.model,
        fingerprint=slow.fingerprint,
        mesh=slow.mesh,
        cluster=slow.cluster,
        config=slow.config,
        choices={name: plan.choices[name] for name, plan in own.items()},
        layouts=layouts,
        lifetimes=lifetimes,
        routes=routes,
        microbatches=slow.microbatches,
        recompute=recompute,
        remade=remade,
        origin=slow.origin,
        estimate=slow.estimate,
    )


def mixed_within(slow: StagePlan, fast: StagePlan, program: Program, pricer: Pricer, limit: float) -> StagePlan | None:
    """The mixture of fewest slow blocks that holds no more than the limit, with its estimate; None if none does.

    slow: with its estimate. The first blocks are the slow ones: what they run again comes when the others have gone.
    """
    blocks = list(blocks_of(program))

    def made(count: int, rest: StagePlan) -> StagePlan | None:
        plan = mixed(slow, fast, program, blocks[:count], rest)
        return None if plan is None else plan.with_estimate(evaluate_program(plan, program, pricer))

    if (whole := made(0, fast)) is None or whole.estimate.peak_nbytes <= limit:
        return whole
    best: StagePlan | None = None
    few, many = (
        (-1, whole.estimate.peak_nbytes),
        (len(blocks), slow.estimate.peak_nbytes),
    )  # slow blocks, beside the rest
    for _ in range(TRIES):
        if many[0] - few[0] < 2 or many[1] > limit:
            break
        count = math.ceil(few[0] + (few[1] - limit) / (few[1] - many[1]) * (many[0] - few[0]))
        count = min(max(count, few[0] + 1), many[0] - 1)
        if (plan := made(count, slow)) is None:
            return None
        if plan.estimate.peak_nbytes <= limit:
            best, many = plan, (count, plan.estimate.peak_nbytes)
        else:
            few = count, plan.estimate.peak_nbytes
    if best is not None and (plan := made(many[0], fast)) is not None and plan.estimate.peak_nbytes <= limit:
        return min(best, plan, key=lambda one: one.estimate.step_seconds)
    return best
