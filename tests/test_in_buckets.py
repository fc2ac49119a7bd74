"""The choice knows what buckets save: the best of what is ranked, never below what is proved of plans in buckets."""

import random
from dataclasses import replace
from functools import cache

import pytest
import torch
from torch import Tensor, nn

from autopar.capture import capture
from autopar.cluster import Cluster, load_cluster
from autopar.errors import InfeasibleError
from autopar.graph import CapturedModel
from autopar.mesh import make_mesh
from autopar.plan import Plan, TrainConfig
from autopar.search.costs.evaluate import evaluate_program
from autopar.search.costs.pricing import Pricer
from autopar.search.costs.program import make_program
from autopar.search.in_buckets import best_in_buckets
from autopar.search.known.baselines import BASELINES, make_baseline
from autopar.search.known.random_plan import random_buckets, random_plan, random_ways
from autopar.search.planner import make_plan
from autopar.search.timeline.buckets import with_buckets
from tests.search_cases import captured_of, program_of

GAP = 1e-3


class Net(nn.Module):
    """Wide enough that splitting pays; as many weights as start-ups that buckets can share."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(256, 256) for _ in range(6))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x).relu()
        return x.square().mean()


@cache
def net() -> CapturedModel:
    with torch.device("meta"):
        return capture(Net(), (torch.empty(2048, 256),), {})


def hosts(start: float, bandwidth: float = 1e8) -> Cluster:
    """Two hosts of two; seconds of a start."""
    cluster = load_cluster("2x2xcpu@10gbe")
    slow, fast = cluster.levels
    levels = replace(slow, bandwidth=bandwidth, alpha=start), replace(fast, alpha=start / 10)
    return replace(cluster, levels=levels, device=replace(cluster.device, launch_seconds=1e-8))


def searched(cluster: Cluster) -> Plan:
    return make_plan(net(), cluster, make_mesh((2, 2)), TrainConfig(), relative_gap=GAP, with_baselines=False)


def chosen(plan: Plan, cluster: Cluster, *, with_baselines: bool = True) -> Plan:
    return best_in_buckets(plan, net(), cluster, with_baselines=with_baselines, relative_gap=GAP, fold=True)


@pytest.mark.parametrize("start", [1e-7, 1e-3])
def test_the_best_of_all_that_is_ranked_is_chosen(start: float) -> None:
    """Brute force over the search's plan and the baselines; random plans of all kinds stay above the bound."""
    cluster = hosts(start)
    plan = searched(cluster)
    found = chosen(plan, cluster)
    ranked = {"search": with_buckets(plan, net(), cluster)}
    for name in BASELINES:
        try:
            ranked[name] = with_buckets(make_baseline(name, net(), cluster, plan.mesh, TrainConfig()), net(), cluster)
        except InfeasibleError:
            assert isinstance(found.estimate.baselines[name], str)
        else:
            assert found.estimate.baselines[name] == pytest.approx(ranked[name].estimate.step_seconds)
    least = min(other.estimate.step_seconds for other in ranked.values())
    assert found.estimate.step_seconds <= least * (1 + 1e-9)
    assert found.estimate.step_seconds == min(found.estimate.solver["in_buckets"]["seconds"].values())
    assert 0 < found.estimate.bound_in_buckets <= found.estimate.in_turn_seconds
    assert found.estimate.alone_seconds >= found.estimate.bound * (1 - 1e-9)
    rng = random.Random(start)
    program, pricer = make_program(net()), Pricer(mesh=plan.mesh, cluster=cluster, config=plan.config)
    others = [random_plan(net(), plan.mesh, rng) for _ in range(3)] + list(ranked.values())
    for other in others:
        for _ in range(2):
            moved = random_buckets(random_ways(other, net(), rng), net(), rng)
            seconds = evaluate_program(moved, program, pricer).in_turn_seconds
            assert seconds >= found.estimate.bound_in_buckets * (1 - 1e-9)


def test_data_parallel_wins_in_buckets_where_starts_are_dear() -> None:
    """Alone its many messages lose; a search that counts every start never sees it."""
    cluster = hosts(2e-3, 3e8)
    plan = searched(cluster)
    found = chosen(plan, cluster, with_baselines=False)
    own = with_buckets(plan, net(), cluster)
    assert found.estimate.step_seconds < 0.99 * own.estimate.step_seconds
    assert found.estimate.alone_seconds > plan.estimate.step_seconds
    assert not found.estimate.baselines


@pytest.mark.parametrize(("start", "bandwidth"), [(3e-3, 1e8), (1e-2, 3e8), (1e-4, 1e6)])
def test_no_plan_is_dearer_than_one_of_a_host_alone(start: float, bandwidth: float) -> None:
    """Over a link that is not worth using, hosts that do the same are a plan of both, and cost what one does."""
    cluster = hosts(start, bandwidth)
    both = chosen(searched(cluster), cluster, with_baselines=False)
    host = replace(cluster, levels=cluster.levels[1:])
    alone = make_baseline("ddp", net(), host, make_mesh((2,)), TrainConfig())
    assert both.estimate.step_seconds <= with_buckets(alone, net(), host).estimate.step_seconds * (1 + 1e-9)


def test_what_is_proved_needs_no_second_search() -> None:
    """With starts of no length the plan at hand is the best in buckets too."""
    cluster = hosts(0.0)
    plan = searched(cluster)
    found = best_in_buckets(plan, net(), cluster, relative_gap=5 * GAP, fold=True)
    assert found.choices == plan.choices
    assert found.estimate.gap_in_buckets <= 5 * GAP
    assert "10% of starts" not in found.estimate.solver["in_buckets"]["seconds"]


def test_without_starts_a_plan_costs_no_more_than_in_any_buckets() -> None:
    captured, program, rng = captured_of("llama"), program_of("llama"), random.Random(1)
    for shape in ((4,), (2, 2)):
        plan = random_ways(random_plan(captured, make_mesh(shape), rng), captured, rng)
        plan = replace(plan, lifetimes=dict.fromkeys(plan.lifetimes, "microbatch"))
        cluster = hosts(1e-4)
        pricer = Pricer(mesh=plan.mesh, cluster=cluster, config=plan.config)
        free = Pricer(mesh=plan.mesh, cluster=cluster, config=plan.config, start_share=0.0)
        part = Pricer(mesh=plan.mesh, cluster=cluster, config=plan.config, start_share=0.5)
        alone, least, half = (evaluate_program(plan, program, p).step_seconds for p in (pricer, free, part))
        assert least < half < alone
        for _ in range(5):
            seconds = evaluate_program(random_buckets(plan, captured, rng), program, pricer).in_turn_seconds
            assert least <= seconds <= alone * (1 + 1e-9)
