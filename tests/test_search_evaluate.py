"""The evaluated cost of a plan is the price of exactly what the rewritten graph sends, and of memory that it holds."""

import random

import pytest

from autopar.cost_models.collectives import collective_seconds
from autopar.cost_models.links import axis_links
from autopar.lower.emit import emit
from autopar.lower.messages import messages_of
from autopar.search.costs.evaluate import evaluate
from autopar.search.known.random_plan import random_plan
from autopar.values.local_model import LocalModel
from autopar.values.mesh import Mesh, make_mesh
from autopar.values.placement import local_shape
from autopar.values.train_config import TrainConfig
from tests.search_cases import captured_of, machine
from tests.zoo import FAMILIES


def _sent_seconds(local: LocalModel, mesh: Mesh) -> dict[str, float]:
    """Calls times latency plus bytes over bandwidth of all that the local graph sends, by collective."""
    out: dict[str, float] = {}
    for (kind, names), (calls, nbytes) in messages_of(local.captured, local.plan, on_host=True).items():
        links = axis_links(machine(), mesh.shape, tuple(mesh.names.index(n) for n in names))
        latency = collective_seconds(kind, 0, links)[0]
        per_byte = (collective_seconds(kind, 1e6, links)[0] - latency) / 1e6
        out[kind] = out.get(kind, 0.0) + calls * latency + nbytes * per_byte
    return out


@pytest.mark.parametrize("family", FAMILIES[1::2])
@pytest.mark.parametrize("shape", [(4,), (2, 2)])
def test_collectives_cost_what_the_local_graph_sends(family: str, shape: tuple[int, ...]) -> None:
    captured, mesh = captured_of(family), make_mesh(shape)
    for seed in range(3):
        plan = random_plan(captured, mesh, random.Random(seed))
        seconds = evaluate(plan, captured, machine()).seconds
        sent = _sent_seconds(emit(captured, plan), mesh)
        for kind in ("all_gather", "reduce_scatter", "all_reduce", "all_to_all"):
            assert seconds[kind] == pytest.approx(sent.get(kind, 0.0), rel=1e-6, abs=1e-15), kind


@pytest.mark.parametrize(("optimizer", "states"), [("sgd", 0), ("sgd-momentum", 1), ("adamw", 2)])
def test_storage_gradients_and_state_are_those_of_the_shards(optimizer: str, states: int) -> None:
    captured, mesh = captured_of("llama"), make_mesh((2, 2))
    plan = random_plan(captured, mesh, random.Random(1), TrainConfig(optimizer=optimizer))
    memory = evaluate(plan, captured, machine()).memory
    stored = 0
    for parameter in captured.parameters:
        elements = 1
        for size in local_shape(parameter.shape, plan.layouts[parameter.placeholder], mesh):
            elements *= size
        stored += elements * parameter.dtype.itemsize
    assert memory["parameters"] == stored
    assert memory["optimizer"] == states * stored
    assert 0 <= memory["gradients"] <= stored


def test_gathering_for_every_use_never_takes_less_time_nor_more_gathered_memory() -> None:
    from dataclasses import replace

    captured, mesh = captured_of("gpt2"), make_mesh((4,))
    plan = random_plan(captured, mesh, random.Random(2))
    kept = replace(plan, lifetimes=dict.fromkeys(plan.lifetimes, "microbatch"))
    used = replace(plan, lifetimes=dict.fromkeys(plan.lifetimes, "use"))
    a, b = (evaluate(p, captured, machine()) for p in (kept, used))
    assert b.seconds["all_gather"] > a.seconds["all_gather"]
    assert {k: v for k, v in a.seconds.items() if k != "all_gather"} == pytest.approx(
        {k: v for k, v in b.seconds.items() if k != "all_gather"}
    )
    assert b.peak_nbytes < a.peak_nbytes
