"""Parameters that the search sends on ways of their own share a bucket on one that all can take, where starts are dear.

The oracle of borders is brute force: every way to cut the gradients of a chain, each priced as a plan.
"""

import itertools
import math
import random
from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from test_buckets_trained import deep
from test_runtime_train_step import train_distributed, train_whole

import tests.runtime_cases as cases
from autopar.lower.messages import messages_of
from autopar.search.costs.evaluate import evaluate, evaluate_program
from autopar.search.costs.pricing import make_pricer
from autopar.search.known.baselines import make_baseline
from autopar.search.known.random_plan import random_plan
from autopar.search.timeline import buckets
from autopar.search.timeline.buckets import bucketed, used_last, with_buckets
from autopar.values.cluster import Cluster, load_cluster
from autopar.values.mesh import make_mesh
from autopar.values.placement import INVARIANT, REPLICATE, Layout, Shard
from autopar.values.stage_plan import StagePlan
from autopar.values.train_config import TrainConfig
from tests.plans_in_threads import errors_of, one_process
from tests.process_group import ranks
from tests.search_cases import captured_of, exact_of, machine, program_of
from tests.zoo import zoo

WHOLE, PART, COPY = Layout((INVARIANT,)), Layout((Shard(0),)), Layout((REPLICATE,))


def on_two_ways(rng: random.Random) -> StagePlan:
    """Whole copies on two ranks; gradients of some go by reduce-scatter and all-gather, of the others by all-reduce."""
    captured = exact_of("llama")
    plan = make_baseline("ddp", captured, machine(2), make_mesh((2,)), TrainConfig())
    trained = [p.placeholder for p in captured.parameters if p.trainable and p.shape[0] % 2 == 0]
    some = rng.sample(trained, len(trained) // 2)
    return replace(
        plan,
        routes={**plan.routes, **dict.fromkeys(some, ((WHOLE, PART, COPY),))},
        lifetimes={**plan.lifetimes, **dict.fromkeys(some, "microbatch")},
    )


def starting(alpha: float, cluster: Cluster) -> Cluster:
    return replace(cluster, levels=tuple(replace(v, alpha=alpha, bandwidth=1e9, lines=()) for v in cluster.levels))


@pytest.mark.parametrize("seed", range(3))
def test_one_bucket_for_two_ways_sends_one_message_and_trains_as_one_process(seed: int) -> None:
    captured, plan, cluster = exact_of("llama"), on_two_ways(random.Random(seed)), starting(1e-2, machine(2))
    apart = with_buckets(plan, captured, cluster, flatten=False)
    found = with_buckets(plan, captured, cluster)
    assert len(apart.buckets) == 2 and len(found.buckets) == 1
    assert {v for n, v in found.lifetimes.items() if n in found.buckets[0]} == {"always"}
    assert found.estimate.step_seconds < apart.estimate.step_seconds
    nbytes = sum(math.prod(p.shape) * 8 for p in captured.parameters if p.trainable)
    sent = messages_of(captured, found, on_host=True)
    assert sent == {("all_reduce", ("data",)): (3, nbytes + 16)}, "the bucket, the loss and the count of its labels"
    model, kwargs = zoo("llama", dtype=torch.float64)
    errors = errors_of(one_process(captured, model, kwargs), found, late=True)
    assert errors[0] <= 1e-10 and errors[1] <= 1e-8, errors


def test_what_is_gathered_for_use_keeps_to_its_own() -> None:
    captured, plan = exact_of("llama"), on_two_ways(random.Random(3))
    gathered = {name for name, lifetime in plan.lifetimes.items() if lifetime == "microbatch"}
    used = replace(plan, lifetimes={**plan.lifetimes, **dict.fromkeys(gathered, "use")})
    found = with_buckets(used, captured, starting(1e-2, machine(2)))
    assert all(set(names) <= gathered or not set(names) & gathered for names in found.buckets)
    changed = {name for name in found.lifetimes if found.lifetimes[name] != used.lifetimes[name]}
    assert changed == set(used_last(used, program_of("llama"))), "kept, for backward asks for them first"


@pytest.mark.parametrize(("lifetime", "count"), [("step", 1), ("microbatch", 2)])
def test_of_several_micro_batches_what_is_paid_once_shares_a_bucket(lifetime: str, count: int) -> None:
    graph = cases.captured(microbatches=2)
    plan = make_baseline("ddp", graph, machine(2), make_mesh((2,)), TrainConfig())
    trained = [p.placeholder for p in graph.parameters if p.trainable and p.shape[0] % 2 == 0]
    some = trained[::2]
    plan = replace(
        plan,
        routes={**plan.routes, **dict.fromkeys(some, ((WHOLE, PART, COPY),))},
        lifetimes={**plan.lifetimes, **dict.fromkeys(some, lifetime)},
    )
    found = with_buckets(plan, graph, starting(1e-2, machine(2)))
    assert len(found.buckets) == count
    losses, state = train_whole(2)
    for got_losses, got_state, bytes_as_said in ranks(2).run(train_distributed, found):
        assert bytes_as_said
        assert got_losses == pytest.approx(losses, rel=1e-10)
        for key, value in state.items():
            torch.testing.assert_close(got_state[key], value, rtol=1e-8, atol=1e-9, msg=key)


def test_together_costs_no_more_than_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    """Random plans of two axes; what is counted in turn falls, and what is hidden may eat a little of that."""
    ratios = []
    for family, name, seed in itertools.product(("gpt2", "vit"), ("2x2xh100", "2x2xcpu@10gbe"), range(3)):
        program, cluster = program_of(family), load_cluster(name)
        plan = random_plan(captured_of(family), make_mesh((2, 2)), random.Random(seed))
        pricer = make_pricer(mesh=plan.mesh, cluster=cluster, config=plan.config)
        together = bucketed(plan, program, pricer).estimate
        with monkeypatch.context() as patch:
            patch.setattr(buckets, "_united", lambda runs, *_: runs)
            apart = bucketed(plan, program, pricer).estimate
        ratios.append(together.step_seconds / apart.step_seconds)
    assert max(ratios) < 1.002 and min(ratios) < 0.99, ratios


def cuts(names: tuple[str, ...]) -> Iterator[tuple[tuple[str, ...], ...]]:
    """All ways to cut them into neighbours."""
    for borders in itertools.product((False, True), repeat=len(names) - 1):
        ends = [0, *(i + 1 for i, border in enumerate(borders) if border), len(names)]
        yield tuple(names[a:b] for a, b in itertools.pairwise(ends))


@pytest.mark.parametrize("network", ["2x1xcpu@10gbe", "2xh100"])
@pytest.mark.parametrize("alpha", [1e-6, 1e-4, 1e-2])
def test_no_borders_are_better(network: str, alpha: float, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(buckets, "HALVINGS", 0)
    plan, captured, _ = deep(alpha, layers=8)
    cluster = starting(alpha, load_cluster(network))
    found = with_buckets(plan, captured, cluster)
    pricer, program = make_pricer(mesh=plan.mesh, cluster=cluster, config=plan.config), buckets.make_program(captured)
    names = tuple(name for bucket in found.buckets for name in bucket)
    in_order = tuple(sorted(names, key=[p.placeholder for p in captured.parameters].index))
    seconds = {
        borders: evaluate_program(replace(found, buckets=borders), program, pricer).step_seconds
        for borders in cuts(in_order)
    }
    assert found.estimate.step_seconds <= min(seconds.values()) * (1 + 1e-9)
    assert evaluate(found, captured, cluster).step_seconds == pytest.approx(found.estimate.step_seconds)
