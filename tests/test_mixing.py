"""Some blocks as one plan says and the rest as another: still the model, and near what the relaxation promises."""

import random
from dataclasses import replace

import numpy as np
import pytest
import torch

from autopar.lower.program import Program, make_program
from autopar.search.costs.evaluate import evaluate_program
from autopar.search.costs.pricing import Pricer, make_pricer
from autopar.search.exact.completion import Completed
from autopar.search.exact.mixture import Seen
from autopar.search.find_exactly import Exact
from autopar.search.graph.moments import Share
from autopar.search.joint.best_staged import best_staged, held_by_ranks
from autopar.search.joint.candidates import Candidate
from autopar.search.joint.mixed_stages import mix_stages
from autopar.search.known.random_plan import random_plan
from autopar.search.meshes import Arrangement, parts
from autopar.search.mixing import blocks_of, mixed, mixed_within
from autopar.search.planner import make_plan, plan_rank
from autopar.search.search_options import SearchAim, SearchOptions
from autopar.search.staged.stages import PricedStages, even_cuts, even_starts, priced, simulated, staged
from autopar.values.blocks import block_of
from autopar.values.cluster import Cluster
from autopar.values.graph import CapturedModel
from autopar.values.mesh import make_mesh
from autopar.values.plan import Plan
from autopar.values.stage_plan import StagePlan
from autopar.values.train_config import TrainConfig
from tests.plans_in_threads import errors_of, one_process
from tests.search_cases import exact_of, machine, pricer_of, program_of, small_llama
from tests.zoo import zoo

LAYERS = 8
PARTS = (0.95, 0.85, 0.75)
"""Of what the fastest plan holds."""


def graph(microbatches: int = 1) -> CapturedModel:
    return small_llama(LAYERS, 32, microbatches)


def kept_and_recomputed(program: Program, pricer: Pricer, rng: random.Random) -> tuple[StagePlan, StagePlan]:
    """A slow plan that runs every block again, and a fast one that keeps everything; both as one drawn at random."""
    fast = random_plan(program.captured, pricer.mesh, rng)
    again = frozenset(op.name for op in program.ops if block_of(op.module) and any(op.result_grads))
    slow = replace(fast, recompute=again)
    return slow.with_estimate(evaluate_program(slow, program, pricer)), fast


@pytest.mark.parametrize("family", ["gpt2", "llama", "bert"])
def test_mixtures_of_random_plans_equal_one_process(family: str) -> None:
    model, kwargs = zoo(family, dtype=torch.float64)
    captured = exact_of(family)
    program, reference, rng = make_program(captured), one_process(captured, model, kwargs), random.Random(family)
    blocks, trained = list(blocks_of(program)), 0
    for mesh in ((4,), (2, 2)):
        slow, fast = (random_plan(captured, make_mesh(mesh), rng) for _ in range(2))
        shared = {name for name, tensor in program.tensors.items() if tensor.kind != "parameter"}
        slow = replace(slow, layouts=slow.layouts | {n: v for n, v in fast.layouts.items() if n in shared})
        slowly = rng.sample(blocks, rng.randint(1, len(blocks) - 1))
        if (plan := mixed(slow, fast, program, slowly, rng.choice((slow, fast)))) is None:
            continue
        trained += 1
        loss_error, gradient_error, parameter = errors_of(reference, plan)
        assert loss_error <= 1e-10 and gradient_error <= 1e-8, (mesh, slowly, parameter)
    assert trained


def test_blocks_follow_their_plan_and_the_rest_the_one_that_is_said() -> None:
    program, rng = program_of("llama"), random.Random(0)
    slow, fast = kept_and_recomputed(program, pricer_of((2, 2)), rng)
    first, second = blocks_of(program)
    assert mixed(slow, fast, program, [first, second], slow) == slow
    assert mixed(slow, fast, program, [], fast) == replace(fast, estimate=slow.estimate)
    plan = mixed(slow, fast, program, [second], fast)
    assert plan is not None
    assert {block_of(op.module) for op in program.ops if op.name in plan.recompute} == {second}


def test_what_blocks_share_must_be_stored_alike() -> None:
    program, rng = program_of("llama"), random.Random(0)
    fast = random_plan(program.captured, make_mesh((4,)), rng)
    first, _ = blocks_of(program)
    own = {op.position: op.module for op in program.ops}
    name = next(n for n, t in program.tensors.items() if t.kind == "parameter"
                and {block_of(own[p]) for p, _ in program.readers[n]} == {first})  # fmt: skip
    other = next(lifetime for lifetime in ("use", "microbatch") if lifetime != fast.lifetimes[name])
    slow = replace(fast, lifetimes={**fast.lifetimes, name: other})
    assert mixed(slow, fast, program, [first], fast) is not None
    program = replace(program, readers={**program.readers, name: [*program.readers[name], (len(program.ops) - 1, 0)]})
    assert mixed(slow, fast, program, [first], fast) is None


def test_the_best_mixture_is_the_best_of_all_pairs() -> None:
    """Against every pair and every part in small steps."""
    rng = np.random.default_rng(0)
    found = 0
    for _ in range(80):
        moments = int(rng.integers(1, 4))
        choices = [(float(rng.uniform(1, 2)), rng.uniform(-1, 1, moments)) for _ in range(5)]
        seen = Seen()
        for seconds, beyond in choices:
            none = np.zeros(0, np.int64)
            seen.add(Completed(choice=none, arcs=(), seconds=seconds, fits=bool((beyond <= 0).all())), beyond)
        steps = np.linspace(0.0, 1.0, 401)
        best = np.inf
        for slow, room in choices:
            for fast, beyond in choices:
                if (room <= 0).all():
                    fits = [(room + step * (beyond - room) <= 1e-12).all() for step in steps]
                    best = min(best, min(slow + step * (fast - slow) for step, f in zip(steps, fits, strict=True) if f))
        alone = min((s for s, beyond in choices if (beyond <= 0).all()), default=np.inf)
        mixture = seen.best()
        promised = min(alone, np.inf if mixture is None else mixture.seconds)
        assert promised <= best + 1e-9 if np.isfinite(best) else mixture is None
        assert not np.isfinite(best) or promised >= best - 1 / 400 - 2e-3 * best
        found += mixture is not None
    assert found > 8


@pytest.mark.parametrize("part", PARTS)
def test_a_mixture_fits_with_as_few_slow_blocks_as_can_be(part: float) -> None:
    program, pricer = make_program(graph()), pricer_of((4,))
    slow, fast = kept_and_recomputed(program, pricer, random.Random(1))
    most = evaluate_program(fast, program, pricer).peak_nbytes
    limit = slow.estimate.peak_nbytes + part * (most - slow.estimate.peak_nbytes)
    plan = mixed_within(slow, fast, program, pricer, limit)
    assert plan is not None and plan.estimate.peak_nbytes <= limit
    assert plan.estimate.step_seconds < slow.estimate.step_seconds
    again = [block for block in blocks_of(program) if any(
        block_of(op.module) == block for op in program.ops if op.name in plan.recompute)]  # fmt: skip
    assert 0 < len(again) < LAYERS
    fewer = mixed(slow, fast, program, again[:-1], slow)
    assert fewer is not None and evaluate_program(fewer, program, pricer).peak_nbytes > limit


def test_of_equal_blocks_some_run_again_and_some_do_not_where_that_is_nearer_the_bound() -> None:
    """The planner's own: no plan of blocks that decide alike is faster, and every plan fits."""
    cluster, apart = machine(4, 2e9), 0
    free = make_plan(graph(), cluster, make_mesh((4,)), TrainConfig(), SearchOptions(with_baselines=False))
    for part in PARTS:
        limit = part * free.estimate.peak_nbytes
        config = TrainConfig(memory_nbytes=limit)
        plan = make_plan(
            graph(), cluster, make_mesh((4,)), config, SearchOptions(with_baselines=False, relative_gap=2e-2)
        )
        assert plan.estimate.peak_nbytes <= limit
        assert plan.estimate.bound <= plan.estimate.step_seconds * (1 + 1e-9)
        program = make_program(graph())
        kinds = {block: 0 for block in blocks_of(program)}
        for op in program.ops:
            if op.name in plan.recompute:
                kinds[block_of(op.module)] += 1
        apart += len(set(kinds.values())) > 1
    assert apart, "equal blocks always decided alike"


def test_stages_priced_before_cost_what_they_cost_alone() -> None:
    """Plans of one model in the same stages, of which most are alike: whichever was priced first."""
    program, cluster = make_program(graph(4)), machine(4)
    pricer = make_pricer(mesh=make_mesh((2,)), cluster=parts(cluster)[2], config=TrainConfig())
    known, cuts = PricedStages(), even_cuts(program, 2, 2)
    slow, fast = kept_and_recomputed(program, pricer, random.Random(3))
    half = mixed(slow, fast, program, list(blocks_of(program))[::2], fast)
    assert half is not None
    seen = set()
    for plan in (slow, fast, half, slow):
        cut, stages = staged(plan, program, pricer, 2, "interleaved-1f1b", cuts)
        alone = simulated(cut, stages, cluster, pricer.cluster)[0].estimate
        assert simulated(cut, stages, cluster, pricer.cluster, known)[0].estimate == alone
        seen.add((alone.step_seconds, alone.peak_nbytes))
    assert len(seen) == 3 and len(known.programs) == 4 and len(known.prices) <= 12, "slow twice"


@pytest.mark.parametrize(("schedule", "chunks"), [("1f1b", 1), ("interleaved-1f1b", 2)])
def test_each_rank_has_the_slow_blocks_that_it_needs(schedule: str, chunks: int) -> None:
    program, cluster = make_program(graph(4)), machine(4)
    pricer = make_pricer(mesh=make_mesh((2,)), cluster=parts(cluster)[2], config=TrainConfig())
    slow, fast = kept_and_recomputed(program, pricer, random.Random(2))
    cuts, begins = even_cuts(program, 2, chunks), even_starts(program, 2, chunks)

    def held(plan: StagePlan) -> list[float]:
        cut, stages = staged(plan, program, pricer, 2, schedule, cuts)
        return held_by_ranks(priced(cut, stages, cluster, pricer.cluster))

    least, most = np.array(held(slow)), np.array(held(fast))
    limits = least.max() + np.array([0.8, 0.5, 0.2]) * (most.max() - least.max())
    counts: list[int] = []
    for limit in limits.tolist():
        plan = mix_stages(slow, fast, program, begins, 2, held, limit)
        assert plan is not None and max(held(plan)) <= limit
        counts.append(len(plan.recompute & slow.recompute))
    assert 0 < counts[0] <= counts[1] <= counts[2] <= len(slow.recompute) and counts[0] < counts[2]
    assert mix_stages(slow, fast, program, begins, 2, held, 0.99 * least.max()) is None


def test_the_best_stages_are_mixed_and_fit() -> None:
    program, cluster = make_program(graph(4)), machine(4, 2e9)
    free = _best(program, cluster, None)
    apart = 0
    for part in PARTS:
        plan = _best(program, cluster, part * free.estimate.peak_nbytes)
        assert plan.estimate.peak_nbytes <= part * free.estimate.peak_nbytes
        blocks: dict[str, int] = {}
        for op in program.ops:
            if block := block_of(op.module):
                again = any(op.name in stage.recompute for stage in plan.stages)
                blocks[block] = blocks.get(block, 0) + again
        apart += len(set(blocks.values())) > 1
    assert apart, "equal blocks always decided alike"


def _best(program: Program, cluster: Cluster, limit: float | None) -> Plan:
    config = TrainConfig(memory_nbytes=limit)
    pricer = make_pricer(mesh=make_mesh((2,)), cluster=parts(cluster)[2], config=config)

    def whole(own: Pricer, share: Share, mixes: bool) -> Exact:
        options = SearchOptions(relative_gap=2e-2, seconds=10.0)
        return plan_rank(program, own, share, options, SearchAim(), mixes=mixes)

    arrangement = Arrangement(pipeline=2, cluster=pricer.cluster, mesh=pricer.mesh)
    key = Candidate(arrangement=arrangement, microbatches=program.microbatches, schedule="1f1b")
    found = best_staged(program, pricer, cluster, key, whole).plan
    assert found is not None
    return found
