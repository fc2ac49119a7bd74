"""Recompute in the search: the graph prices what the plan costs, memory is never counted less, nothing is better."""

import itertools
import random
from dataclasses import replace

import pytest

from autopar.errors import InfeasibleError
from autopar.lower.emit import emit
from autopar.lower.program import Program
from autopar.report.recompute_text import recompute_text
from autopar.search.costs.evaluate import evaluate_program
from autopar.search.costs.pricing import Pricer
from autopar.search.exact.ilp import solve
from autopar.search.graph.build import build
from autopar.search.graph.build_recompute import RecomputeBuilder
from autopar.search.graph.extract import extract
from autopar.search.graph.options import Restriction
from autopar.search.graph.problem import Problem
from autopar.search.graph.strategy_graph import Solution, usage
from autopar.search.planner import make_plan
from autopar.search.search_options import SearchOptions
from autopar.values.blocks import block_of
from autopar.values.stage_plan import StagePlan
from autopar.values.train_config import TrainConfig
from tests.search_cases import captured_of, machine, pricer_of, program_of

TIED = ("gpt2", "bert", "t5", "whisper")
EXACT = 1e-7


def solved(
    program: Program, pricer: Pricer, limit: float, restriction: Restriction | None = None, gap: float = EXACT
) -> tuple[Problem, Solution, StagePlan]:
    problem = build(program, pricer, limit=limit, restriction=restriction, builder=RecomputeBuilder)
    solution = solve(problem.graph, relative_gap=gap)
    plan = extract(problem, solution, pricer.cluster, pricer.config, "ilp")
    return problem, solution, plan.with_estimate(evaluate_program(plan, program, pricer))


def free_peak(program: Program, pricer: Pricer, restriction: Restriction | None = None) -> float:
    problem = build(program, pricer, limit=None, restriction=restriction)
    plan = extract(problem, solve(problem.graph), pricer.cluster, pricer.config, "ilp")
    return evaluate_program(plan, program, pricer).peak_nbytes


@pytest.mark.parametrize("family", ["llama", "gpt2", "bert"])
def test_less_memory_never_costs_less_and_prices_are_those_of_the_plan(family: str) -> None:
    program, pricer = program_of(family), pricer_of((4,), bandwidth=2e9)
    peak, last, recomputed = free_peak(program, pricer), 0.0, 0
    for part in (1.5, 0.85, 0.65):
        try:
            problem, solution, plan = solved(program, pricer, part * peak, gap=1e-4)
        except InfeasibleError as error:
            assert error.least_nbytes is not None and error.least_nbytes > part * peak
            break
        seconds = plan.estimate.step_seconds
        assert seconds <= solution.seconds * (1 + 1e-9)
        assert seconds == pytest.approx(solution.seconds, rel=2e-2 if family in TIED else 1e-9)
        counted = usage(problem.graph, solution.choice, solution.arcs).max()
        assert counted <= part * peak and plan.estimate.peak_nbytes <= 1.02 * counted
        assert solution.seconds >= last * (1 - 1e-4)
        last, recomputed = solution.seconds, max(recomputed, len(plan.recompute))
        emit(captured_of(family), plan)
    assert recomputed, "memory never bound"


def test_without_a_limit_nothing_is_recomputed_and_the_optimum_is_the_same() -> None:
    program, pricer = program_of("llama"), pricer_of((4,))
    plain = solve(build(program, pricer, limit=1e9).graph, relative_gap=EXACT)
    _, solution, plan = solved(program, pricer, 1e9)
    assert solution.seconds == pytest.approx(plain.seconds, rel=1e-6)
    assert not plan.recompute and not plan.remade


def test_for_a_fixed_sharding_no_recompute_set_is_better() -> None:
    """All sets of the clusters that the graph may recompute, equal blocks alike, priced by `evaluate`.

    The graph counts replayed bytes while the whole block runs backward, so a tenth of the limit is left to it.
    """
    part = 0.9
    program, pricer = program_of("llama"), pricer_of((1,))
    peak = free_peak(program, pricer)
    problem, solution, plan = solved(program, pricer, part * peak)
    kinds = [
        {program.ops[p].name for positions in cluster.instances for p in positions}
        for node, cluster in enumerate(problem.clusters)
        if len(problem.options[node]) > problem.num_kept[node]
    ]
    assert len(kinds) > 8
    rng, best = random.Random(0), float("inf")
    sets = list(itertools.product((False, True), repeat=len(kinds)))
    for chosen in rng.sample(sets, min(len(sets), 100)):
        names = frozenset().union(*(names for names, is_in in zip(kinds, chosen, strict=True) if is_in))
        estimate = evaluate_program(replace(plan, recompute=names, remade={}), program, pricer)
        if estimate.peak_nbytes <= 0.9 * part * peak:
            best = min(best, estimate.step_seconds)
    assert best < float("inf")
    assert solution.seconds <= best * (1 + 1e-6)


def test_what_leaves_a_block_is_kept() -> None:
    """Else all blocks could lean on each other, and memory would be that of one block."""
    program, pricer = program_of("gpt2"), pricer_of((1,))
    problem = build(program, pricer, limit=1e9, builder=RecomputeBuilder)
    for node, cluster in enumerate(problem.clusters):
        if len(problem.options[node]) == problem.num_kept[node]:
            continue
        for positions in cluster.instances:
            waiting = [r for r in program.ops[positions[-1]].results if r is not None]
            while waiting:
                for position, slot in program.readers[waiting.pop()]:
                    op = program.ops[position]
                    assert block_of(op.module) == block_of(program.ops[positions[-1]].module) != ""
                    waiting += [r for r in op.results if r is not None and op.rule.alias == slot]


def test_the_planner_recomputes_where_the_limit_binds_and_says_what() -> None:
    captured, pricer = captured_of("llama"), pricer_of((4,))
    limit = 0.8 * free_peak(program_of("llama"), pricer)
    config = TrainConfig(memory_nbytes=limit)
    plan = make_plan(captured, machine(), pricer.mesh, config, SearchOptions(with_baselines=False))
    assert plan.recompute and plan.estimate.peak_nbytes <= limit
    text = recompute_text(plan, emit(captured, plan))
    assert "run again in backward, model.layers ×2: " in text and "a device less than" in text
    trade = plan.estimate.search.recompute
    assert trade is not None and trade.seconds > 0 and trade.nbytes > 0
    whole = make_plan(captured, machine(), pricer.mesh, TrainConfig(), SearchOptions(with_baselines=False))
    assert not whole.recompute and not recompute_text(whole, emit(captured, whole))
    assert whole.estimate.step_seconds < plan.estimate.step_seconds
