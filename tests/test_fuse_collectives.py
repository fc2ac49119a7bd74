"""Buckets change how many messages there are, and nothing else: values, gradients and bytes are those of one process.

Random partitions of the parameters, whatever the search would choose, on random plans of every family: fused or not,
the rewritten graph computes the model and sends what is predicted, in one message where calls go together.
"""

import random
from dataclasses import replace

import pytest
import torch

from autopar.lower.emit import emit
from autopar.lower.messages import messages_of
from autopar.ops import collectives
from autopar.ops.buckets import all_gather_bucket
from autopar.passes.accumulate_gradients import accumulate_gradients
from autopar.passes.fuse_collectives import fuse_collectives, fused_groups
from autopar.passes.promote_casts import promote_casts
from autopar.search.known.baselines import make_baseline
from autopar.search.known.random_plan import random_buckets, random_plan, random_recompute, random_ways
from autopar.values.mesh import make_mesh
from autopar.values.plan import one_stage
from autopar.values.plan_file import plan_from_json
from autopar.values.stage_plan import StagePlan
from autopar.values.train_config import TrainConfig
from tests.plans_in_threads import errors_of, one_process
from tests.ranks_in_threads import Done, Member, run_in_threads
from tests.search_cases import captured_of, exact_of, machine
from tests.zoo import FAMILIES, zoo
from tests.zoo_graphs import zoo_graph

MESHES = ((2,), (2, 2))


@pytest.mark.parametrize("family", FAMILIES[::2])
def test_random_buckets_of_random_plans_equal_one_process(family: str) -> None:
    model, kwargs = zoo(family, dtype=torch.float64)
    captured = exact_of(family)
    reference = one_process(captured, model, kwargs)
    rng = random.Random(f"buckets {family}")
    for number, shape in enumerate(MESHES):
        plan = random_ways(random_plan(captured, make_mesh(shape), rng), captured, rng)
        plan = random_buckets(plan, captured, rng)
        if number % 2 and family in ("llama", "bert"):
            plan = random_recompute(plan, captured, rng, share=0.3)
        errors = errors_of(reference, plan, late=rng.random() < 0.7)
        assert errors[0] <= 1e-10 and errors[1] <= 1e-8, f"plan {number} on {plan.mesh}: {errors}"


@pytest.mark.parametrize("lifetime", ["step", "microbatch", "use"])
def test_micro_batches_with_every_lifetime(lifetime: str) -> None:
    model, kwargs = zoo("gpt2", dtype=torch.float64)
    captured = exact_of("gpt2")
    reference = one_process(captured, model, kwargs)
    half = promote_casts(zoo_graph("gpt2", 4, dtype=torch.float64))
    half = accumulate_gradients(half, 2, lambda: captured)
    rng = random.Random(lifetime)
    plan = random_buckets(random_plan(half, make_mesh((2, 2)), rng), half, rng)
    plan = replace(plan, lifetimes=dict.fromkeys(plan.lifetimes, lifetime))
    errors = errors_of(reference, plan, half)
    assert errors[0] <= 1e-10 and errors[1] <= 1e-8, errors


def baseline(name: str, family: str = "llama") -> tuple[StagePlan, object]:
    captured = captured_of(family)
    plan = make_baseline(name, captured, machine(2), make_mesh((2,)), TrainConfig())
    return plan, captured


def test_one_bucket_is_one_message() -> None:
    plan, captured = baseline("ddp")
    alone = messages_of(captured, plan, on_host=True)
    names = tuple(p.placeholder for p in captured.parameters)
    local = emit(captured, replace(plan, buckets=(names,)))
    (((kind, axes), (calls, nbytes)),) = alone.items()
    assert messages_of(local.captured, local.plan, on_host=True) == {(kind, axes): (calls - len(names) + 1, nbytes)}


def test_buckets_of_parameters_gathered_for_use_are_gathered_again_once() -> None:
    plan, captured = baseline("fsdp")
    names = tuple(p.placeholder for p in captured.parameters)
    local = emit(captured, replace(plan, buckets=(names,)))
    (gathers,) = (
        v for (kind, _), v in messages_of(local.captured, local.plan, on_host=True).items() if kind == "all_gather"
    )
    groups = fused_groups(local.graph, captured.parameters, local.plan)
    gathered = [group for group in groups if group[0].kwargs.get("regather")]
    alone = sum(node.kwargs.get("regather", False) for node in local.graph.nodes) - sum(map(len, gathered))
    assert gathers[0] >= 2 * len(gathered)
    assert alone or gathers[0] == 2 * len(gathered)


def test_without_buckets_the_graph_stays_as_it_is() -> None:
    plan, captured = baseline("fsdp")
    local = emit(captured, plan)
    assert fuse_collectives(local.graph, captured.parameters, plan) is local.graph


def test_buckets_are_saved_with_the_plan() -> None:
    plan, captured = baseline("ddp")
    plan = random_buckets(plan, captured, random.Random(0))
    assert plan.buckets and plan_from_json(one_stage(plan).to_json()).single.buckets == plan.buckets


def gather(out: torch.Tensor, own: torch.Tensor, group: Member, async_op: bool) -> Done:
    out.copy_(torch.cat(group.group.exchange(group.index, own)))
    return Done()


def test_what_is_gathered_together_is_whole_and_holds_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    """Parts of every dim, of one row too, which there is nothing to reorder in."""
    monkeypatch.setattr(collectives, "run_all_gather", gather)
    shapes: list[tuple[tuple[int, ...], int]] = [
        ((1, 64), 0),
        ((1,), 0),
        ((3, 5), 0),
        ((64, 1), 1),
        ((2, 3, 4), 1),
        ((4, 6), 1),
    ]

    def one_rank(rank: int) -> tuple[list[torch.Tensor], tuple[torch.Tensor, ...]]:
        rng = torch.Generator().manual_seed(rank)
        parts = [torch.randn(shape, generator=rng) for shape, _ in shapes]
        dims, sizes = tuple(dim for _, dim in shapes), (None,) * len(shapes)
        return parts, all_gather_bucket(*parts, axis=("data",), dims=dims, sizes=sizes)

    outcomes, _ = run_in_threads(make_mesh((2,)), one_rank)
    for number, (_, dim) in enumerate(shapes):
        want = torch.cat([parts[number] for parts, _ in outcomes], dim)
        for _, wholes in outcomes:
            got = wholes[number]
            torch.testing.assert_close(got, want, rtol=0, atol=0)
            assert got.is_contiguous() and got.untyped_storage().nbytes() == got.numel() * got.element_size()
