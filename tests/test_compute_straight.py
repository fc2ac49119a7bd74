"""Gradients computed straight into their bucket are those that autograd makes, lie there, and are counted once."""

import random
from dataclasses import replace
from math import prod
from unittest import mock

import pytest
import torch
from test_peak_memory import case, measured
from torch import Tensor
from torch.nn import functional as F

from autopar.mesh import make_mesh
from autopar.ops.straight import LEAST_NBYTES, Room, linear_straight
from autopar.passes import compute_straight
from autopar.passes.fuse_collectives import fuse_collectives
from autopar.passes.insert_collectives import insert_collectives
from autopar.passes.recompute import again_graph
from autopar.plan import Plan, TrainConfig
from autopar.search.costs import straight
from autopar.search.costs.evaluate import evaluate, find_live
from autopar.search.costs.pricing import Pricer
from autopar.search.costs.straight import find_straight
from autopar.search.known.baselines import make_baseline
from autopar.search.known.random_plan import random_buckets, random_plan, random_recompute
from autopar.search.timeline.buckets import with_buckets
from autopar.serialize import dump
from tests.process_group import ranks
from tests.search_cases import captured_of, machine, program_of


def leaf(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, requires_grad=True)


@pytest.mark.parametrize("num_parts", [1, 4])
@pytest.mark.parametrize("is_transposed", [False, True])
@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("shape", [(5,), (2, 5), (2, 3, 5)])
def test_a_linear_makes_the_same_and_writes_its_weights_gradient_in_place(
    shape: tuple[int, ...], has_bias: bool, is_transposed: bool, num_parts: int
) -> None:
    torch.manual_seed(0)
    x, other = leaf(*shape), leaf(3)
    weight = leaf(5, 7) if is_transposed else leaf(7, 5)
    bias = leaf(7) if has_bias else None
    inputs = [t for t in (x, weight, bias) if t is not None]
    room = Room([other, weight], num_parts)
    read = weight.t() if is_transposed else weight
    got = linear_straight(x, read, bias, room=room, place=1, is_transposed=is_transposed)
    want = F.linear(x, read, bias)
    assert torch.equal(got, want)
    up = torch.randn_like(want)
    expected = torch.autograd.grad(want, inputs, up)
    for _ in range(2):  # the buffer of another pass is another
        found = torch.autograd.grad(got, inputs, up, retain_graph=True)
        for one, two in zip(found, expected, strict=True):
            torch.testing.assert_close(one, two, rtol=1e-14, atol=1e-14)
        flat, (first, second) = room.filled([0, 1], [torch.full((3,), 2.0, dtype=torch.float64), found[1]])
        assert second.data_ptr() == found[1].data_ptr() and torch.equal(second, found[1])
        assert torch.equal(first, torch.full((3,), 2.0))
        views = (first, second)
        assert {v.untyped_storage().data_ptr() for v in views} == {flat.untyped_storage().data_ptr()}
        assert flat.numel() == sum(-(-v.numel() // num_parts) * num_parts for v in views)
        assert float(flat.sum()) == pytest.approx(float(sum(v.sum() for v in views)))


def test_what_is_there_is_not_written_over() -> None:
    """Two reads of one weight: the second's gradient is made elsewhere, and added."""
    x, y, weight = leaf(4, 5), leaf(4, 5), leaf(7, 5)
    room = Room([weight], 1)
    out = linear_straight(x, weight, room=room, place=0).sum() + linear_straight(y, weight, room=room, place=0).sum()
    (found,) = torch.autograd.grad(out, [weight])
    (expected,) = torch.autograd.grad(F.linear(x, weight).sum() + F.linear(y, weight).sum(), [weight])
    torch.testing.assert_close(found, expected)
    torch.testing.assert_close(room.filled([0], [found])[1][0], expected)


def test_a_pass_that_leaves_gradients_out_sends_the_others_alone() -> None:
    x, weight, other = leaf(4, 5), leaf(7, 5), leaf(3)
    room = Room([other, weight], 1)
    (found,) = torch.autograd.grad(linear_straight(x, weight, room=room, place=1).sum(), [weight])
    flat, (only,) = room.filled([1], [found])
    assert torch.equal(only, found) and flat.numel() == found.numel()


@pytest.mark.parametrize("kind", ["strided", "no gradient", "frozen", "vector", "autocast"])
def test_what_it_cannot_do_autograd_does(kind: str) -> None:
    x = leaf(5, 4).t() if kind == "strided" else leaf(4, 5)
    weight = leaf(5) if kind == "vector" else leaf(7, 5).detach().requires_grad_(kind != "frozen")
    room = Room([weight], 1)
    with torch.set_grad_enabled(kind != "no gradient"), torch.autocast("cpu", enabled=kind == "autocast"):
        out = linear_straight(x, weight, room=room, place=0)
    assert torch.equal(out, F.linear(x, weight))
    if kind != "no gradient":
        out.sum().backward()
    assert room.flat is None


@pytest.mark.parametrize("family", ["llama", "gpt2", "mixtral", "t5"])
def test_tables_say_what_the_graph_does(family: str) -> None:
    captured, program, rng = captured_of(family), program_of(family), random.Random(family)
    some = 0
    for shape in ((2,), (2, 2)):
        plans = [make_baseline("ddp", captured, machine(prod(shape)), make_mesh(shape), TrainConfig())]
        plans += [random_plan(captured, make_mesh(shape), rng) for _ in range(4)]
        plans.append(random_recompute(plans[0], captured, rng, share=0.5))
        for plan in (random_buckets(p, captured, rng) for p in plans):
            local = insert_collectives(captured, plan)
            fused = fuse_collectives(again_graph(local.graph), captured.parameters, plan)
            with mock.patch.object(compute_straight, "LEAST_NBYTES", 0):
                graph = compute_straight.compute_straight(fused, local)
            pricer = Pricer(mesh=plan.mesh, cluster=machine(plan.mesh.size), config=plan.config)
            live = find_live(plan, program, pricer)
            with mock.patch.object(straight, "LEAST_NBYTES", 0):
                found = find_straight(program, plan, pricer, live.journeys, live.fused)
            readers = {program.ops[p].name for name, _ in found for p, slot in program.readers[name] if slot == 1}
            made = {node.name for node in graph.nodes if node.target is linear_straight}
            strided = {op.name for op in program.ops if not live.journeys[op.operands[0]].is_contiguous}
            assert readers <= made and made - readers <= strided
            some += len(made)
    assert some > 10


def measured_with_all(plan: Plan, graph: bytes, values: dict[str, Tensor], inputs: dict[str, Tensor]) -> int:
    with mock.patch.object(compute_straight, "LEAST_NBYTES", 0):
        return measured(plan, graph, values, inputs)


@pytest.mark.parametrize(("family", "shape"), [("llama", (2,)), ("gpt2", (2,)), ("bert", (2,)), ("llama", (2, 2))])
def test_peaks_are_as_predicted(family: str, shape: tuple[int, ...]) -> None:
    captured, values, inputs = case(family)
    own = machine(prod(shape))
    plan = make_baseline("ddp", captured, own, make_mesh(shape), TrainConfig())
    plan = replace(plan, buckets=(tuple(spec.placeholder for spec in captured.parameters),))
    with mock.patch.object(straight, "LEAST_NBYTES", 0):
        predicted = evaluate(plan, captured, own).peak_nbytes
    assert abs(predicted / evaluate(plan, captured, own).peak_nbytes - 1) > 0.02  # the buffer is there earlier
    peak = max(ranks(own.num_devices).run(measured_with_all, plan, dump(captured), values, inputs))
    assert peak == pytest.approx(predicted, rel=0.05)


def test_small_gradients_are_copied() -> None:
    captured = captured_of("llama")
    plan = with_buckets(
        make_baseline("ddp", captured, machine(2), make_mesh((2,)), TrainConfig()), captured, machine(2)
    )
    local = insert_collectives(captured, plan)
    graph = fuse_collectives(again_graph(local.graph), captured.parameters, plan)
    assert max(4 * prod(spec.shape) for spec in captured.parameters) < LEAST_NBYTES
    assert compute_straight.compute_straight(graph, local) is graph
