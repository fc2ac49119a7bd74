"""The search: its objective is the evaluated cost of its plan, folding changes nothing, nothing valid is cheaper."""

import math
import random
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from autopar.capture import capture
from autopar.errors import InfeasibleError, SearchTimeoutError
from autopar.lower.emit import emit
from autopar.lower.program import make_program
from autopar.report.plan_text import plan_text
from autopar.search import planner
from autopar.search.costs.evaluate import evaluate_program
from autopar.search.costs.pricing import Pricer, make_pricer
from autopar.search.exact.ilp import CutoffError, solve
from autopar.search.graph.build import build
from autopar.search.graph.extract import extract
from autopar.search.graph.moments import Moments
from autopar.search.graph.options import Restriction
from autopar.search.graph.problem import Problem
from autopar.search.graph.reduce_moments import few_moments
from autopar.search.graph.strategy_graph import Solution, usage
from autopar.search.known.baselines import BASELINES, baseline_plan
from autopar.search.known.random_plan import random_plan
from autopar.search.planner import make_plan
from autopar.search.search_options import SearchAim, SearchOptions
from autopar.values.mesh import make_mesh
from autopar.values.plan import one_stage
from autopar.values.plan_file import plan_from_json
from autopar.values.stage_plan import StagePlan
from autopar.values.train_config import TrainConfig
from tests.plans_in_threads import errors_of, one_process
from tests.search_cases import captured_of, machine, pricer_of, program_of
from tests.zoo import FAMILIES

LIMIT = 1e9
TIED = ("gpt2", "bert", "t5", "whisper")
"""Families whose embedding is also the head: two uses of a weight may share a gather that the graph prices twice."""


def _solved(family: str, pricer: Pricer, **how: bool) -> tuple[Problem, Solution, StagePlan]:
    program = program_of(family)
    problem = build(program, pricer, limit=LIMIT, **how)  # type: ignore[arg-type]
    solution = solve(problem.graph, relative_gap=1e-7)
    plan = extract(problem, solution, pricer.cluster, pricer.config, "ilp")
    return problem, solution, plan.with_estimate(evaluate_program(plan, program, pricer))


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("mesh", [(4,), (2, 2)])
def test_the_objective_is_the_evaluated_cost_and_memory_is_counted_alike(family: str, mesh: tuple[int, ...]) -> None:
    problem, solution, plan = _solved(family, pricer_of(mesh))
    assert plan.estimate.step_seconds <= solution.seconds * (1 + 1e-9)
    assert plan.estimate.step_seconds == pytest.approx(solution.seconds, rel=2e-2 if family in TIED else 1e-9)
    used = usage(problem.graph, solution.choice, solution.arcs).max()
    assert plan.estimate.peak_nbytes / 1.02 <= used <= 1.2 * plan.estimate.peak_nbytes
    emit(captured_of(family), plan)


class _Unread(nn.Module):
    """Has a layer that the loss has no part of, as pre-trained models have heads and poolers."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.unread, self.last = (nn.Linear(16, 16) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.first(x).relu()).square().mean()


@pytest.mark.parametrize("limit", [None, LIMIT])
@pytest.mark.parametrize("mesh", [(4,), (2, 2)])
def test_a_parameter_that_nothing_reads_is_stored(limit: float | None, mesh: tuple[int, ...]) -> None:
    model, kwargs = _Unread().double(), {"x": torch.randn(8, 16, dtype=torch.float64)}
    captured = capture(model, (), kwargs)
    program = make_program(captured)
    pricer = make_pricer(mesh=make_mesh(mesh), cluster=machine(4), config=TrainConfig())
    problem = build(program, pricer, limit=limit)
    solution = solve(problem.graph, relative_gap=1e-7)
    plan = extract(problem, solution, pricer.cluster, pricer.config, "ilp")
    assert evaluate_program(plan, program, pricer).step_seconds == pytest.approx(solution.seconds, rel=1e-9)
    loss_error, gradient_error, _ = errors_of(one_process(captured, model, kwargs), plan)
    assert loss_error <= 1e-10 and gradient_error <= 1e-8


def _random_restriction(seed: int) -> Restriction:
    """Some choices and storages at random, the same for equal ops: far from the optimum, and so other arcs."""

    def choice(op: object, axis: int, name: str) -> bool:
        signature = op.signature  # type: ignore[attr-defined]
        return name in ("replicate", "invariant") or random.Random(f"{seed} {signature} {axis} {name}").random() < 0.5

    return Restriction(
        choice=choice,
        storage=lambda tensor, layout: (
            not layout.sharded_dims() or random.Random(f"{seed}{tensor.shape}{layout}").random() < 0.3
        ),
    )


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("family", ["llama", "whisper", "resnet", "bert"])
def test_the_objective_is_the_evaluated_cost_off_the_optimum_too(family: str, seed: int) -> None:
    program, pricer = program_of(family), pricer_of((2, 2))
    problem = build(program, pricer, limit=None, restriction=_random_restriction(seed))
    solution = solve(problem.graph, relative_gap=1e-7)
    plan = extract(problem, solution, pricer.cluster, pricer.config, "ilp")
    seconds = evaluate_program(plan, program, pricer).step_seconds
    assert seconds <= solution.seconds * (1 + 1e-9)
    assert seconds == pytest.approx(solution.seconds, rel=2e-2 if family in TIED else 1e-9)


@pytest.mark.parametrize("family", ["llama", "bert", "t5"])
def test_folding_changes_neither_optimum_nor_the_count_of_ops_decided(family: str) -> None:
    pricer = pricer_of((4,))
    folded, cheap, plan = _solved(family, pricer, fold=True)
    whole, exact, _ = _solved(family, pricer, fold=False)
    assert len(folded.graph.nodes) < len(whole.graph.nodes)
    assert cheap.seconds == pytest.approx(exact.seconds, rel=1e-6)
    assert set(plan.choices) == {op.name for op in program_of(family).ops}


def test_unfolded_plans_say_what_folding_costs() -> None:
    plan = make_plan(
        captured_of("llama"),
        machine(),
        make_mesh((2, 2)),
        TrainConfig(),
        SearchOptions(fold=False, with_baselines=False),
    )
    folded = make_plan(
        captured_of("llama"), machine(), make_mesh((2, 2)), TrainConfig(), SearchOptions(with_baselines=False)
    )
    assert plan.estimate.search.solved is not None and folded.estimate.search.solved is not None
    assert plan.estimate.search.solved.nodes > folded.estimate.search.solved.nodes
    assert plan.estimate.search.folded_seconds == pytest.approx(folded.estimate.step_seconds, rel=5e-3)
    assert plan.estimate.bound * (1 - 1e-9) <= plan.estimate.step_seconds <= plan.estimate.search.folded_seconds
    assert "equal layers deciding alike" in " ".join(plan_text(one_stage(plan), (), machine()).split())


def test_coarse_clusters_search_a_part_of_the_space() -> None:
    pricer = pricer_of((2, 2))
    _, fine, _ = _solved("gpt2", pricer, coarse=False)
    problem, coarse, plan = _solved("gpt2", pricer, coarse=True)
    assert coarse.seconds >= fine.seconds * (1 - 1e-6)
    assert plan.estimate.step_seconds == pytest.approx(coarse.seconds, rel=1e-2)
    assert len(problem.clusters) < len(program_of("gpt2").ops) / 2


@pytest.mark.parametrize("family", ["llama", "vit", "resnet"])
@pytest.mark.parametrize("mesh", [(4,), (2, 2)])
def test_no_baseline_and_no_random_plan_is_cheaper_than_the_plan(family: str, mesh: tuple[int, ...]) -> None:
    captured, program, pricer = captured_of(family), program_of(family), pricer_of(mesh)
    plan = make_plan(captured, machine(), pricer.mesh, pricer.config, SearchOptions(relative_gap=1e-6))
    best = plan.estimate.step_seconds
    assert 0 < plan.estimate.bound <= best
    assert set(plan.estimate.baselines) == set(BASELINES)
    priced = [v for v in plan.estimate.baselines.values() if not isinstance(v, str)]
    assert priced and best <= min(priced) * (1 + 1e-9)
    for seed in range(5):
        other = random_plan(captured, pricer.mesh, random.Random(seed))
        assert best <= evaluate_program(other, program, pricer).step_seconds
    assert plan_from_json(one_stage(plan).to_json()).single.choices == plan.choices


def test_less_memory_never_costs_less_and_infeasible_says_the_least_that_does() -> None:
    program = program_of("llama")
    pricer = pricer_of((4,), bandwidth=2e9)
    last, seen, limit = 0.0, set(), LIMIT
    while True:
        try:
            problem = build(program, pricer, limit=limit)
            solution = solve(problem.graph, relative_gap=1e-7)
        except InfeasibleError as error:
            assert error.least_nbytes is not None and error.least_nbytes >= limit
            least = error.least_nbytes
            break
        plan = extract(problem, solution, pricer.cluster, pricer.config, "ilp")
        peak = evaluate_program(plan, program, pricer).peak_nbytes
        assert peak <= limit
        assert solution.seconds >= last * (1 - 1e-6)
        last = solution.seconds
        seen.add(one_stage(plan).to_json())
        limit = 0.9 * usage(problem.graph, solution.choice, solution.arcs).max()
    assert len(seen) > 1
    solve(build(program, pricer, limit=least * 1.001).graph, relative_gap=1e-2)


def test_the_planner_says_what_would_do() -> None:
    with pytest.raises(InfeasibleError, match="the least that would do is"):
        make_plan(
            captured_of("llama"),
            machine(),
            make_mesh((4,)),
            TrainConfig(memory_nbytes=1e3),
            SearchOptions(with_baselines=False),
        )


def test_a_baseline_that_does_not_apply_says_why() -> None:
    with pytest.raises(InfeasibleError, match="no call of scaled_dot_product_attention was found"):
        baseline_plan("ulysses", program_of("resnet"), pricer_of((4,)), LIMIT)


def test_what_ops_keep_or_replay_is_there_from_its_making_to_its_last_use() -> None:
    """Moment by moment, of random ops; several at once add up."""
    rng = np.random.default_rng(0)
    for num_ops in (1, 4, 9):
        moments = Moments(num_ops=num_ops)
        made, again, last = (rng.integers(0, num_ops, 5).tolist() for _ in range(3))
        keeping, replaying = moments.keeping(made, last), moments.replaying(again, last)
        for moment in range(moments.count):
            before = [moment <= moments.backward(use) for use in last]
            kept = [a <= moment and b for a, b in zip(made, before, strict=True)]
            remade = [moments.backward(a) <= moment and b for a, b in zip(again, before, strict=True)]
            assert keeping[moment] == sum(kept) and replaying[moment] == sum(remade)
        assert (moments.keeping([], []) == 0).all()


def test_few_moments_keep_every_peak() -> None:
    """For random intervals of a repeated block and random bytes, the peak over the kept moments is the peak."""
    rng = np.random.default_rng(0)
    for _ in range(30):
        layers, ops, terms = int(rng.integers(5, 9)), 4, 6
        moments = Moments(num_ops=layers * ops)
        rows = []
        for _ in range(terms):
            begins = ops * np.arange(layers - int(rng.integers(0, 2)))
            made, savers = (
                np.minimum(begins + place, moments.num_ops - 1).tolist()
                for place in sorted(rng.integers(0, ops + 2, 2))
            )
            rows.append(moments.keeping(made, savers))
        table = np.array(rows)
        instances = [tuple((layer * ops + i,) for layer in range(layers)) for i in range(ops)]
        chosen = few_moments(table, moments, instances)
        assert len(chosen) < moments.count
        for _ in range(20):
            nbytes = rng.exponential(size=terms)
            assert (nbytes @ table[:, chosen]).max() == pytest.approx((nbytes @ table).max())


@pytest.mark.parametrize("error", [CutoffError(9.0), InfeasibleError("less"), SearchTimeoutError("late", bound=9.0)])
def test_what_is_proved_within_less_memory_is_none_of_the_limits(
    error: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A plan that was found does not fit, call by call, and with less memory there is none: the first bound stands."""
    find, bounds = planner.find_exactly, list[float]()

    def found(*args: Any, **kwargs: Any) -> Any:
        if bounds:
            raise error
        first = find(*args, **kwargs)
        bounds.append(first.bound)
        return first

    monkeypatch.setattr(planner, "find_exactly", found)
    monkeypatch.setattr(planner, "_peak_nbytes", lambda _: math.inf)
    pricer, program = pricer_of((4,)), program_of("gpt2")
    with pytest.raises(SearchTimeoutError, match="proves nothing") as refused:
        planner.plan_program(
            program, pricer, SearchOptions(relative_gap=0.01, with_baselines=False), SearchAim(says_least=False)
        )
    assert refused.value.bound == bounds[0] < 9.0
