"""What is priced once and used again is what it would be if priced afresh: stages alike, and graphs of one program."""

from dataclasses import replace
from functools import cache

import numpy as np
import pytest
import torch
import transformers as hf

from autopar.capture import capture
from autopar.cost_models.collectives import cheapest
from autopar.cost_models.links import axis_links
from autopar.lower.program import make_program
from autopar.search.costs.pricing import make_pricer
from autopar.search.graph.build import build
from autopar.search.graph.build_recompute import RecomputeBuilder
from autopar.search.graph.problem import Problem
from autopar.search.meshes import parts
from autopar.search.planner import make_plan
from autopar.search.search_options import SearchOptions
from autopar.search.staged.alike import stage_key
from autopar.search.staged.stages import block_starts, price_stage, staged
from autopar.values.graph import CapturedModel
from autopar.values.mesh import make_mesh
from autopar.values.train_config import TrainConfig
from tests.search_cases import machine


@cache
def captured_llama(layers: int, batch: int = 4) -> CapturedModel:
    config = hf.LlamaConfig(
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=4,
        vocab_size=96,
    )
    ids = torch.randint(96, (batch, 8))
    return capture(hf.LlamaForCausalLM(config).train(), (), {"input_ids": ids, "labels": ids, "use_cache": False})


def test_stages_of_one_key_cost_the_same() -> None:
    captured = captured_llama(layers=4)
    cluster, mesh = parts(machine(8))[4], make_mesh((2,))
    pricer = make_pricer(mesh=mesh, cluster=cluster, config=TrainConfig())
    plan = make_plan(captured, cluster, mesh, TrainConfig(), SearchOptions(relative_gap=1e-2, with_baselines=False))
    made, stages = staged(plan, make_program(captured), pricer, 4, "gpipe", block_starts(captured))
    send = cheapest("send_recv", axis_links(machine(8), (4, 2), (0,)))
    sent = [{name: made.stages[n + 1].layouts[name] for name in stages[n].sends} for n in range(3)] + [{}]
    keys = [stage_key(made.stages[n], stages[n], sent[n]) for n in range(4)]
    prices = [price_stage(made.stages[n], stages[n], make_program(stages[n]), cluster, sent[n], send) for n in range(4)]
    assert keys[1] == keys[2] and len(set(keys)) == 3  # the ends have embedding and head
    one, other = prices[1], prices[2]
    assert (one.forward, one.backward, one.once, one.sent) == (other.forward, other.backward, other.once, other.sent)
    assert one.memory is not None and other.memory is not None
    for field in ("always", "gradients", "update", "kept", "left"):
        np.testing.assert_array_equal(getattr(one.memory, field), getattr(other.memory, field))
    for kind, peak in one.memory.passes.items():
        np.testing.assert_array_equal(peak, other.memory.passes[kind])
    middle = made.stages[1]
    name = next(name for name, choice in middle.choices.items() if set(choice) != {"invariant"})
    parameter = next(iter(middle.lifetimes))
    kept = next(node.name for node in stages[1].graph.nodes if node.op == "call_function")
    for changed in (
        replace(middle, choices={**middle.choices, name: ("another",)}),
        replace(middle, lifetimes={**middle.lifetimes, parameter: "another"}),
        replace(middle, recompute=middle.recompute | {kept}),
        replace(middle, microbatches=2),
    ):
        assert stage_key(changed, stages[1], sent[1]) != keys[1]


@pytest.mark.parametrize("builder", [None, RecomputeBuilder])
def test_graphs_from_shared_prices_are_those_from_fresh_ones(builder: "type[RecomputeBuilder] | None") -> None:
    """Limits, restricted bytes and other programs on the mesh in between."""
    captured, other = captured_llama(layers=2), captured_llama(layers=2, batch=2)
    cluster, mesh = machine(4), make_mesh((2, 2))
    shared = make_pricer(mesh=mesh, cluster=cluster, config=TrainConfig())
    program = make_program(captured)
    build(make_program(other), shared.for_another(), limit=None)
    for limit in (None, 1e6, 1e7):
        kind = builder if limit is not None else None
        fresh = make_pricer(mesh=mesh, cluster=cluster, config=TrainConfig())
        found = build(program, shared.within(1e6), limit=limit, builder=kind)
        same(found, build(make_program(captured), fresh, limit=limit, builder=kind))


def same(one: Problem, other: Problem) -> None:
    assert len(one.graph.nodes) == len(other.graph.nodes) and len(one.graph.groups) == len(other.graph.groups)
    for a, b in zip(one.graph.nodes, other.graph.nodes, strict=True):
        np.testing.assert_array_equal(a.seconds, b.seconds)
    for c, d in zip(one.graph.groups, other.graph.groups, strict=True):
        for field in ("gives", "arc_source", "arc_target", "arc_seconds"):
            np.testing.assert_array_equal(getattr(c, field), getattr(d, field))
    assert (one.graph.memory is None) == (other.graph.memory is None)
    if one.graph.memory is not None and other.graph.memory is not None:
        for e, f in zip(one.graph.memory.nodes, other.graph.memory.nodes, strict=True):
            np.testing.assert_array_equal(e.nbytes, f.nbytes)
            np.testing.assert_array_equal(e.coefficient, f.coefficient)
