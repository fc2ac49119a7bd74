"""The double recursion: its plans compute the model, fit the memory, cost what it says, never beat a proved bound."""

import random

import numpy as np
import pytest
import torch

from autopar.errors import ArgumentError, InfeasibleError
from autopar.lower.program import Tensor
from autopar.passes.promote_casts import promote_casts
from autopar.search.costs.evaluate import evaluate_program
from autopar.search.costs.pricing import Pricer, make_pricer, total
from autopar.search.costs.storages import is_storable, orders
from autopar.search.costs.work_bound import work_bound
from autopar.search.exact.ilp import solve
from autopar.search.graph.build import build
from autopar.search.known.random_plan import random_plan
from autopar.search.planner import make_plan
from autopar.search.recursion.double_recursion import double_recursion, prime_mesh
from autopar.search.recursion.to_plan import plan_of
from autopar.search.recursion.ways import SEARCHED_AXES, Ways
from autopar.search.search_options import SearchOptions
from autopar.values.cluster import load_cluster
from autopar.values.mesh import Mesh, make_mesh
from autopar.values.placement import INVARIANT, REPLICATE, Shard
from autopar.values.redistribution import cheapest_route
from autopar.values.train_config import TrainConfig
from tests.plans_in_threads import errors_of, one_process
from tests.search_cases import captured_of, machine, pricer_of, program_of
from tests.zoo import FAMILIES, zoo
from tests.zoo_graphs import zoo_graph

TIED = ("gpt2", "bert", "t5", "whisper")


@pytest.mark.parametrize(
    ("family", "shape"), [("gpt2", (2, 2, 2)), ("resnet", (2, 2)), ("t5", (4,)), ("mixtral", (2, 3)), ("vit", (2, 2))]
)
def test_plans_equal_one_process(family: str, shape: tuple[int, ...]) -> None:
    """Loss, gradients on every rank, and every byte."""
    batch = 12 if 3 in shape else 8
    model, kwargs = zoo(family, dtype=torch.float64, batch=batch)
    captured = promote_casts(zoo_graph(family, dtype=torch.float64, batch=batch))
    reference = one_process(captured, model, kwargs)
    mesh = make_mesh(shape)
    config = TrainConfig(precision="fp64")
    plan = make_plan(
        captured, machine(mesh.size), mesh, config, SearchOptions(solver="double-recursive", with_baselines=False)
    )
    loss_error, gradient_error, parameter = errors_of(reference, plan)
    assert loss_error <= 1e-10, f"loss off by {loss_error}"
    assert gradient_error <= 1e-8, f"gradient of {parameter} off by {gradient_error}"
    assert any(c not in ("replicate", "invariant") for names in plan.choices.values() for c in names)


@pytest.mark.parametrize(
    ("family", "mesh"), [*((family, (4,)) for family in FAMILIES), ("llama", (2, 2)), ("vit", (2, 2))]
)
@pytest.mark.parametrize("bandwidth", [5e8])
def test_it_says_what_its_plan_costs_which_is_no_less_than_the_bound(
    family: str, mesh: tuple[int, ...], bandwidth: float
) -> None:
    program, pricer = program_of(family), pricer_of(mesh, bandwidth=bandwidth)
    decider = double_recursion(program, pricer, limit=1e9)
    plan = plan_of(decider, program)
    seconds = evaluate_program(plan, program, pricer).step_seconds
    assert seconds <= decider.seconds() * (1 + 1e-9)
    assert seconds == pytest.approx(decider.seconds(), rel=2e-2 if family in TIED else 1e-9)
    whole = _whole_seconds(family, pricer)
    assert work_bound(program, pricer) <= seconds <= whole
    exact = solve(build(program, pricer, limit=None, coarse=False).graph, relative_gap=1e-3)
    assert exact.bound <= seconds * (1 + (2e-2 if family in TIED else 1e-9))
    assert seconds <= 1.25 * exact.seconds


def _whole_seconds(family: str, pricer: Pricer) -> float:
    """The plan that splits nothing."""
    program = program_of(family)
    alone = make_pricer(mesh=make_mesh((1,)), cluster=machine(1), config=pricer.config)
    decider = double_recursion(program, alone, limit=None)
    return evaluate_program(plan_of(decider, program), program, alone).step_seconds


@pytest.mark.parametrize("family", FAMILIES[1::2])
def test_the_bound_of_the_work_is_below_every_plan(family: str) -> None:
    program, pricer = program_of(family), pricer_of((2, 2))
    bound = work_bound(program, pricer)
    for seed in range(2):
        plan = random_plan(captured_of(family), pricer.mesh, random.Random(seed))
        assert 0 < bound <= evaluate_program(plan, program, pricer).step_seconds


@pytest.mark.parametrize(("family", "mesh"), [("llama", (4,)), ("bert", (4,)), ("resnet", (4,)), ("vit", (2, 2))])
def test_plans_fit_a_limit_that_binds_or_say_that_none_was_found(family: str, mesh: tuple[int, ...]) -> None:
    program, pricer = program_of(family), pricer_of(mesh)
    free = evaluate_program(plan_of(double_recursion(program, pricer, limit=None), program), program, pricer)
    last, fitted = free.step_seconds, 0
    for part in (0.9, 0.01):
        limit = part * free.peak_nbytes
        try:
            plan = plan_of(double_recursion(program, pricer, limit=limit), program)
        except InfeasibleError as error:
            assert "found no plan" in str(error)
            continue
        estimate = evaluate_program(plan, program, pricer)
        assert estimate.peak_nbytes <= limit * 1.02
        assert estimate.step_seconds >= last * 0.8
        fitted += 1
    assert fitted == 1


def test_equal_blocks_decide_once() -> None:
    """Folded or not, the same ops are decided; folded decisions cost what they say."""
    program, pricer = program_of("llama"), pricer_of((2, 2))
    folded = double_recursion(program, pricer, limit=None, coarse=True, fold=True)
    whole = double_recursion(program, pricer, limit=None, coarse=True, fold=False)
    assert len(folded.neighbours.clusters) < len(whole.neighbours.clusters)
    plans = [plan_of(d, program) for d in (folded, whole)]
    assert plans[0].choices.keys() == plans[1].choices.keys()


def test_a_cluster_is_split_by_its_prime_factors_slowest_level_first() -> None:
    assert prime_mesh(load_cluster("125x8xh100")).shape == (5, 5, 5, 2, 2, 2)
    assert prime_mesh(load_cluster("7xcpu")).shape == (7,)
    assert prime_mesh(load_cluster("1xcpu")).shape == (1,)


def test_a_mesh_of_prime_axes_plans() -> None:
    """More axes than any table over them could hold; the solver is then chosen by itself."""
    mesh = Mesh(shape=(2, 3, 2, 2), names=("a", "b", "c", "d"))
    plan = make_plan(captured_of("llama"), machine(24), mesh, TrainConfig(), SearchOptions())
    assert plan.origin == "double-recursive"
    assert 0 < plan.estimate.bound <= plan.estimate.step_seconds
    assert all(isinstance(v, str) for v in plan.estimate.baselines.values())


def test_an_unknown_solver_is_refused() -> None:
    with pytest.raises(ArgumentError, match="choose one of auto, ilp, double-recursive"):
        make_plan(captured_of("llama"), machine(), make_mesh((4,)), TrainConfig(), SearchOptions(solver="guess"))


@pytest.mark.parametrize("seed", range(40))
def test_ways_lead_where_they_should_and_are_seldom_dearer_than_a_full_search(seed: int) -> None:
    """Random layouts: every step starts where the last one ended, and the price is that of the steps."""
    rng = random.Random(seed)
    mesh = make_mesh((2, 2) if seed % 2 else (2, 2, 2))
    pricer = make_pricer(mesh=mesh, cluster=machine(mesh.size), config=TrainConfig())
    shape = tuple(rng.choice((8, 16, 24)) for _ in range(3))
    tensor = Tensor(
        name="t", kind="op", shape=shape, element_size=4, stored_size=4, dtype="float32", requires_grad=True
    )
    places = (REPLICATE, INVARIANT, Shard(0), Shard(1), Shard(2))
    source, target = (rng.choice(orders(tuple(rng.choice(places) for _ in mesh.shape))) for _ in range(2))
    if not (is_storable(shape, source, mesh) and is_storable(shape, target, mesh)):
        return
    ways = Ways(pricer=pricer)

    def price(step: object) -> float:
        forward, backward = pricer.step(step, shape, 4, False)  # type: ignore[arg-type]
        return total(forward) + total(backward)

    for path in (ways.path(source, target, tensor), ways.swift(source, target, tensor)):
        at = source
        for step in path:
            assert step.source == at
            at = step.target
        assert at == target
    path = ways.path(source, target, tensor)
    seconds = sum(map(price, path))
    assert ways.between(source, target, tensor, True) == pytest.approx(seconds)
    full = sum(map(price, cheapest_route(source, target, shape, mesh, True, lambda s: price(s) + 1e-12)))
    assert full <= seconds + 1e-9
    assert mesh.num_axes <= SEARCHED_AXES and np.isfinite(seconds)
