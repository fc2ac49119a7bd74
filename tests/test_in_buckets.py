"""The choice knows what buckets save: the best of what is ranked, never below what is proved of plans in buckets."""

import itertools
import math
import random
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from autopar.capture import capture
from autopar.cost_models.collectives import Form, least, shared
from autopar.errors import InfeasibleError
from autopar.lower.program import Program, make_program
from autopar.report.explain_text import explain_text
from autopar.search.costs.evaluate import evaluate_program
from autopar.search.costs.pricing import Pricer, make_pricer
from autopar.search.explanation import explain_stage as explaining
from autopar.search.explanation.explain import explain
from autopar.search.explanation.questions import UNLIMITED
from autopar.search.explanation.what_if import faster_link
from autopar.search.in_buckets import best_in_buckets
from autopar.search.joint.mesh_search import search_meshes
from autopar.search.known.baselines import BASELINES, make_baseline
from autopar.search.known.random_plan import random_buckets, random_plan, random_recompute, random_ways
from autopar.search.meshes import meshes
from autopar.search.planner import make_plan
from autopar.search.search_options import SearchOptions
from autopar.search.timeline.buckets import with_buckets
from autopar.values.blocks import block_of
from autopar.values.cluster import Cluster, load_cluster
from autopar.values.graph import CapturedModel
from autopar.values.mesh import make_mesh
from autopar.values.plan import one_stage
from autopar.values.stage_plan import StagePlan
from autopar.values.train_config import TrainConfig
from tests.search_cases import captured_of, program_of

GAP = 1e-3
ALONE = SearchOptions(relative_gap=GAP, with_baselines=False)
IN_BUCKETS = replace(ALONE, buckets=True)


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


def hosts(start: float, bandwidth: float = 1e8, device: str = "cpu") -> Cluster:
    """Two hosts of two; seconds of a start."""
    cluster = load_cluster("2x2xcpu@10gbe")
    slow, fast = cluster.levels
    levels = replace(slow, bandwidth=bandwidth, alpha=start), replace(fast, alpha=start / 10)
    return replace(cluster, levels=levels, device=replace(cluster.device, name=device, launch_seconds=1e-8))


def searched(cluster: Cluster) -> StagePlan:
    return make_plan(net(), cluster, make_mesh((2, 2)), TrainConfig(), IN_BUCKETS)


def prices(plan: StagePlan, cluster: Cluster) -> Pricer:
    return make_pricer(mesh=plan.mesh, cluster=cluster, config=plan.config)


def alone(cluster: Cluster) -> StagePlan:
    """The best whose collectives all go alone."""
    return make_plan(net(), cluster, make_mesh((2, 2)), TrainConfig(), ALONE)


def chosen(plan: StagePlan, cluster: Cluster, *, with_baselines: bool = True, beside: bool = True) -> StagePlan:
    options = SearchOptions(relative_gap=GAP, with_baselines=with_baselines)
    return best_in_buckets(plan, make_program(net()), prices(plan, cluster), options, beside=beside, spent=math.inf)


@pytest.mark.parametrize("start", [1e-7, 1e-3])
def test_the_best_of_all_that_is_ranked_is_chosen(start: float) -> None:
    """Brute force over the search's plan and the baselines; random plans of all kinds stay above the bound."""
    cluster = hosts(start)
    plan = searched(cluster)
    found = chosen(plan, cluster)
    ranked = {"search": plan, "alone": with_buckets(alone(cluster), net(), cluster)}
    for name in BASELINES:
        try:
            ranked[name] = with_buckets(make_baseline(name, net(), cluster, plan.mesh, TrainConfig()), net(), cluster)
        except InfeasibleError:
            assert isinstance(found.estimate.baselines[name], str)
        else:
            assert found.estimate.baselines[name] == pytest.approx(ranked[name].estimate.step_seconds)
    least = min(other.estimate.step_seconds for other in ranked.values())
    assert found.estimate.step_seconds <= least * (1 + 1e-9)
    assert found.estimate.step_seconds == min(found.estimate.search.in_buckets.values())
    assert 0 < found.estimate.bound <= found.estimate.in_turn_seconds
    rng = random.Random(start)
    program, pricer = make_program(net()), make_pricer(mesh=plan.mesh, cluster=cluster, config=plan.config)
    others = [random_plan(net(), plan.mesh, rng) for _ in range(3)] + list(ranked.values())
    for other in others:
        for _ in range(2):
            moved = random_buckets(random_ways(other, net(), rng), net(), rng)
            seconds = evaluate_program(within_blocks(moved, program), program, pricer).in_turn_seconds
            assert seconds >= found.estimate.bound * (1 - 1e-9)


def test_data_parallel_wins_in_buckets_where_starts_are_dear() -> None:
    """Alone its many messages lose; a search that counts every start never sees it."""
    cluster = hosts(2e-3, 3e8)
    found = chosen(searched(cluster), cluster, with_baselines=False)
    own = with_buckets(alone(cluster), net(), cluster)
    assert found.estimate.step_seconds < 0.99 * own.estimate.step_seconds
    assert found.estimate.alone_seconds > own.estimate.alone_seconds
    assert not found.estimate.baselines


@pytest.mark.parametrize(("start", "bandwidth"), [(3e-3, 1e8), (1e-2, 3e8), (1e-4, 1e6)])
def test_no_plan_is_dearer_than_one_of_a_host_alone(start: float, bandwidth: float) -> None:
    """Over a link that is not worth using, hosts that do the same are a plan of both, and cost what one does."""
    cluster = hosts(start, bandwidth)
    both = chosen(searched(cluster), cluster, with_baselines=False)
    host = replace(cluster, levels=cluster.levels[1:])
    ddp = make_baseline("ddp", net(), host, make_mesh((2,)), TrainConfig())
    assert both.estimate.step_seconds <= with_buckets(ddp, net(), host).estimate.step_seconds * (1 + 1e-9)


def test_what_is_proved_of_the_sum_needs_no_second_search_by_it() -> None:
    """Where starts have no length, and copies take none."""
    cluster = hosts(0.0, device="another")
    plan = searched(cluster)
    found = best_in_buckets(
        plan,
        make_program(net()),
        prices(plan, cluster),
        SearchOptions(relative_gap=5 * GAP, with_baselines=False),
        beside=False,
    )
    assert found.choices == plan.choices
    assert found.estimate.gap <= 5 * GAP
    assert list(found.estimate.search.in_buckets) == ["the search"]


@pytest.mark.parametrize("start", [1e-5, 1e-4])
def test_a_plan_whose_reductions_hide_is_found_though_it_adds_up_to_more(start: float) -> None:
    cluster = hosts(start)
    plan = searched(cluster)
    by_sum = chosen(plan, cluster, with_baselines=False, beside=False)
    found = chosen(plan, cluster, with_baselines=False)
    assert found.estimate.step_seconds < 0.95 * by_sum.estimate.step_seconds
    assert found.estimate.in_turn_seconds > by_sum.estimate.in_turn_seconds >= found.estimate.bound
    again = evaluate_program(
        found, make_program(net()), make_pricer(mesh=plan.mesh, cluster=cluster, config=plan.config)
    )
    assert found.estimate.step_seconds == pytest.approx(again.step_seconds)  # as it is, not as it was searched for


def test_what_explains_a_plan_that_hides_something_is_said_as_plans_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """And is what planning so gives; one that adds up to less is none that saves anything."""
    allowed: list[float] = []

    def noted(*args: Any, most: float, **own: Any) -> StagePlan:
        allowed.append(most)
        return best_in_buckets(*args, most=most, **own)

    monkeypatch.setattr(explaining, "best_in_buckets", noted)
    monkeypatch.setattr(explaining, "DECISIONS", 1)
    cluster = hosts(1e-4)
    plan = chosen(searched(cluster), cluster)
    made = explain(one_stage(plan), net(), cluster, relative_gap=GAP, seconds=1e4)
    limits = [UNLIMITED, explaining.AS_IT_IS, *(o.change for o in made.offers if "GB" in o.change)]
    assert len(allowed) == len(made.offers) - len(limits) + 1, "without a limit it fits all the others"
    assert 0 < min(allowed) <= max(allowed) <= 5.0
    step, offers = plan.estimate.step_seconds, {offer.change: offer for offer in made.offers}
    for change in (explaining.AS_IT_IS, UNLIMITED):
        offer = offers[change]
        assert offer.best == offer.same == pytest.approx(step)
        assert offer.in_turn is not None and offer.bound <= offer.in_turn < plan.estimate.in_turn_seconds
    (faster,) = (offer for offer in made.offers if offer.change.startswith(cluster.levels[0].name))
    other = faster_link(cluster, 0, 2.0)
    own = evaluate_program(plan, make_program(net()), make_pricer(mesh=plan.mesh, cluster=other, config=plan.config))
    again = chosen(searched(other), other)
    assert faster.best == pytest.approx(min(own.step_seconds, again.estimate.step_seconds))
    assert made.baselines == plan.estimate.baselines and made.limit_costs == (0.0, 0.0)
    assert "if nothing ran beside compute" in explain_text(
        made
    ) and "what is proved counts everything in turn" in explain_text(made)


class Classes(nn.Module):
    """A loss that is summed over ranks, beside the count of its labels; work that splitting by batch shares out."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(128, 128) for _ in range(2))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x).relu()
        return nn.functional.cross_entropy(x, y)


@cache
def classes() -> CapturedModel:
    with torch.device("meta"):
        return capture(Classes(), (torch.empty(1 << 14, 128), torch.empty(1 << 14, dtype=torch.int64)), {})


def test_a_loss_that_goes_along_with_gradients_is_not_kept_from_being_split() -> None:
    """Two starts, which a sum counts, would keep all from being split; they are not paid where gradients are sent."""
    captured = classes()
    cluster, program = hosts(3e-2, 1e9), make_program(captured)
    plan = make_plan(captured, cluster, make_mesh((2, 2)), TrainConfig(), IN_BUCKETS)
    by_sum, found = (
        best_in_buckets(
            plan,
            program,
            prices(plan, cluster),
            ALONE,
            beside=beside,
            spent=math.inf,
        )
        for beside in (False, True)
    )
    assert found.estimate.step_seconds < 0.9 * by_sum.estimate.step_seconds


def test_what_counts_less_beside_backward_leaves_other_prices_as_they_are() -> None:
    """Of reductions of parameters what travels, of sums of one element the start; nothing else."""
    cluster, program = hosts(1e-3), make_program(classes())
    pricer = make_pricer(mesh=make_mesh((2, 2)), cluster=cluster, config=TrainConfig(), in_buckets=True)
    half = pricer.sharing(0.5)
    for kind in ("all_gather", "reduce_scatter", "all_reduce", "all_to_all"):
        for axes, nbytes, parameter in itertools.product([(0,), (1,), (0, 1)], [8, 1 << 12, 1 << 22], [False, True]):
            shares = (1.0, 0.1) if parameter else (1.0,)
            whole, part = zip(
                *([p.message(kind, axes, nbytes, parameter, s)[0] for p in (pricer, half)] for s in shares), strict=True
            )
            less = [one - other for one, other in zip(whole, part, strict=True)]
            start = pricer.message(kind, axes, 1, parameter)[0]
            if parameter and kind in ("reduce_scatter", "all_reduce"):
                assert all(0 < a <= 0.5 * (whole[0] - start) + 1e-6 for a in less)
                assert less[0] == pytest.approx(less[1]), "however much of the start counts"
            elif kind == "all_reduce" and nbytes == 8 and not parameter:
                assert 0 < part[0] < 1e-2 * whole[0]
            else:
                assert part == whole
    ddp = make_baseline("ddp", classes(), cluster, pricer.mesh, TrainConfig())
    fresh = make_pricer(mesh=pricer.mesh, cluster=cluster, config=TrainConfig())
    for other in (half, half.alone.sharing(0.5)):
        assert evaluate_program(ddp, program, other) != evaluate_program(ddp, program, fresh)
        assert evaluate_program(ddp, program, other.alone) == evaluate_program(ddp, program, fresh)


def within_blocks(plan: StagePlan, program: Program) -> StagePlan:
    """The plan whose buckets of what is gathered for each use are of one block, as all that we make are."""
    first = {name: min(readers, default=(0, 0))[0] for name, readers in program.readers.items()}
    parts: dict[tuple[int, str], list[str]] = {}
    for number, names in enumerate(plan.buckets):
        for name in names:
            block = block_of(program.ops[first[name]].module) if plan.lifetimes.get(name) == "use" else "-"
            parts.setdefault((number, block), []).append(name)
    return replace(plan, buckets=tuple(map(tuple, parts.values())))


@pytest.mark.parametrize("family", ["llama", "gpt2", "t5"])
def test_with_its_share_of_starts_a_plan_costs_no_more_than_in_any_buckets(family: str) -> None:
    captured, program, rng = captured_of(family), program_of(family), random.Random(1)
    for shape in ((4,), (2, 2)):
        for device in ("cpu", "another", "cpu", "another"):  # which copies into messages, or not
            plan = random_ways(random_plan(captured, make_mesh(shape), rng), captured, rng)
            plan = random_recompute(plan, captured, rng, share=rng.choice([0.0, 0.5]))
            cluster = hosts(rng.choice([1e-5, 1e-4, 1e-3]), device=device)
            pricer = make_pricer(mesh=plan.mesh, cluster=cluster, config=plan.config)
            together = make_pricer(mesh=plan.mesh, cluster=cluster, config=plan.config, in_buckets=True)
            alone, least = (evaluate_program(plan, program, p).in_turn_seconds for p in (pricer, together))
            assert least < alone
            for _ in range(4):
                other = within_blocks(random_buckets(plan, captured, rng), program)
                seconds = evaluate_program(other, program, pricer).in_turn_seconds
                assert least * (1 - 1e-9) <= seconds <= (alone * (1 + 1e-9) if device != "cpu" else math.inf)


def test_one_bucket_of_all_costs_what_its_shares_add_up_to() -> None:
    """So the bound is no further below what data parallelism takes than its algorithms differ: those of one here."""
    cluster = hosts(1e-3)
    plan = make_baseline("ddp", net(), cluster, make_mesh((4,)), TrainConfig())
    plan = replace(plan, buckets=(tuple(p.placeholder for p in net().parameters),))
    program = make_program(net())
    real = make_pricer(mesh=plan.mesh, cluster=cluster, config=plan.config)
    whole = evaluate_program(plan, program, real)
    shared = make_pricer(mesh=plan.mesh, cluster=cluster, config=plan.config, in_buckets=True)
    counted = evaluate_program(replace(plan, buckets=()), program, shared)
    assert counted.in_turn_seconds == pytest.approx(whole.in_turn_seconds, rel=0.02)
    assert counted.in_turn_seconds <= whole.in_turn_seconds * (1 + 1e-12)


@pytest.mark.parametrize("family", ["llama", "gpt2", "t5"])
def test_shares_of_a_block_and_of_the_model_add_up(family: str) -> None:
    """For each reader one copy may be in a bucket; to 1 where every parameter has one reader."""
    program = program_of(family)
    of_block: dict[str, float] = {}
    whole, tied = 0.0, False
    for tensor in program.tensors.values():
        if tensor.kind != "parameter":
            assert tensor.shares == (1.0, 1.0)
            continue
        readers = program.readers[tensor.name]
        tied |= len(readers) > 1
        whole += tensor.shares[1] * len(readers)
        for position, _ in readers:
            block = block_of(program.ops[position].module)
            of_block[block] = of_block.get(block, 0.0) + tensor.shares[0]
    assert len(of_block) > 2 and max(of_block.values()) <= 1 + 1e-9 and whole == pytest.approx(1.0)
    assert tied or list(of_block.values()) == pytest.approx([1.0] * len(of_block))


def test_no_message_takes_less_than_shares_of_its_parts() -> None:
    """Also where lines hold for a range of sizes, so that a larger message may start for less."""
    rng = random.Random(5)
    for _ in range(300):
        split = 10 ** rng.uniform(3, 7)
        small, large = (Form("", name, 10 ** rng.uniform(-6, -3), 10 ** rng.uniform(-10, -8)) for name in ("s", "l"))
        small = small._replace(up_to=split)
        forms = [small, large._replace(above=split, floor=small.seconds(split))]
        forms += [Form("", "any", 10 ** rng.uniform(-4, -2), 10 ** rng.uniform(-10, -8))] if rng.random() < 0.5 else []
        sizes = [int(10 ** rng.uniform(2, 7)) for _ in range(rng.randint(2, 6))]
        weights = [rng.random() for _ in sizes]
        part = rng.choice([1.0, 0.7])
        shares = [weight / sum(weights) for weight in weights]
        parts = sum(shared(forms, size, part, own) for size, own in zip(sizes, shares, strict=True))
        assert parts <= least(tuple(forms), sum(sizes), part)[0] * (1 + 1e-9)


class Wide(nn.Module):
    """Blocks of several weights, which a bucket gathers for use together."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.ModuleList(nn.Linear(256, 256, bias=False) for _ in range(4)) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.layers:
            assert isinstance(block, nn.ModuleList)
            for layer in block:
                x = layer(x).relu()
        return x.square().mean()


def test_a_plan_costs_what_is_said_of_it_however_little_memory_there_is() -> None:
    """Where no buckets fit, every collective alone; and no baseline is below the bound."""
    with torch.device("meta"):
        captured = capture(Wide(), (torch.empty(256, 256),), {})
    cluster, mesh, program = hosts(1e-3, 1e9), make_mesh((4,)), make_program(captured)
    made = []
    for limit in (math.inf, 4.5e6, 3.7e6, 3.2e6, 2.8e6):
        config = TrainConfig(optimizer="sgd", memory_nbytes=limit)
        plan = make_plan(
            captured,
            cluster,
            mesh,
            config,
            SearchOptions(relative_gap=0.01, seconds=10.0, with_baselines=False, buckets=True),
        )
        again = evaluate_program(plan, program, make_pricer(mesh=mesh, cluster=cluster, config=config))
        assert plan.estimate.seconds == pytest.approx(again.seconds)
        assert plan.estimate.peak_nbytes == again.peak_nbytes <= limit
        assert plan.estimate.bound <= again.in_turn_seconds
        made.append(plan)
        for name in ("ddp", "fsdp"):
            named = make_baseline(name, captured, cluster, mesh, TrainConfig(optimizer="sgd"))
            named = with_buckets(named, captured, cluster)
            if named.estimate.peak_nbytes <= limit:
                assert plan.estimate.bound <= named.estimate.in_turn_seconds * (1 + 1e-9)
    assert made[0].buckets
    assert any("use" in plan.lifetimes.values() or not plan.buckets for plan in made)


def test_over_every_mesh_a_plan_is_no_worse_than_on_the_best_of_them() -> None:
    """Also where no first plan of a mesh is near what is proved there."""
    cluster = hosts(3e-4)
    found, _ = search_meshes(None, lambda _: net(), cluster, TrainConfig(), IN_BUCKETS)
    own = []
    for mesh in meshes(cluster):
        plan = make_plan(net(), cluster, mesh, TrainConfig(), IN_BUCKETS)
        own.append(chosen(plan, cluster, with_baselines=False, beside=False).estimate)
    assert found.estimate.in_turn_seconds <= min(one.in_turn_seconds for one in own) * (1 + 2 * GAP)
    assert found.estimate.bound <= min(one.in_turn_seconds for one in own)
