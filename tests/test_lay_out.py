"""Tensors lie as the graph says, in the whole and in stages that compute of contiguous copies."""

import random
from collections.abc import Container
from typing import Any

import pytest
import torch
from torch import Tensor, fx

from autopar.lower.emit import emit
from autopar.lower.program import make_program
from autopar.lower.redistributions import redistribute
from autopar.ops import collectives
from autopar.ops.groups import Groups, use_groups
from autopar.oracle.reference import buffers_of, parameters_of
from autopar.passes.split_stages import split_stages
from autopar.rules.spare import short_name
from autopar.rules.views import RESHAPING
from autopar.search.costs.pricing import make_pricer
from autopar.search.known.random_plan import random_cuts, random_plan
from autopar.values.graph import CapturedModel
from autopar.values.inputs import bind_inputs
from autopar.values.mesh import make_mesh
from autopar.values.placement import local_shape
from autopar.values.train_config import TrainConfig
from tests.ranks_in_threads import Done
from tests.search_cases import machine
from tests.zoo import zoo
from tests.zoo_graphs import zoo_graph


def run(captured: CapturedModel, values: dict[str, Tensor]) -> dict[str, Any]:
    """What every node of a graph computes."""
    found: dict[str, Any] = {}

    class Noting(fx.Interpreter):
        def run_node(self, node: fx.Node) -> Any:
            found[node.name] = super().run_node(node)
            return found[node.name]

    names = [node.name for node in captured.graph.nodes if node.op == "placeholder"]
    Noting(fx.GraphModule({}, captured.graph)).run(*(values[name] for name in names))
    return found


def differ(captured: CapturedModel, found: dict[str, Any], given: Container[str]) -> list[str]:
    """Names of computed tensors that are contiguous where the graph says otherwise, or the other way round."""
    said = {name: captured.nodes[name].meta["val"] for name, v in found.items() if isinstance(v, Tensor)}
    return [n for n, v in said.items() if n not in given and v.is_contiguous() != found[n].is_contiguous()]


@pytest.mark.parametrize("family", ["whisper", "llama", "vit", "gpt2"])
def test_graphs_and_stages_lie_as_they_run(family: str) -> None:
    model, kwargs = zoo(family)
    whole = zoo_graph(family)
    values = {**parameters_of(whole, model), **buffers_of(whole, model), **whole.constants}
    values |= bind_inputs(whole.inputs, (), kwargs)
    with torch.no_grad():
        truth = run(whole, values)
        assert not differ(whole, truth, values)
        strides_differ = 0
        for seed in range(3):
            for stage in split_stages(whole, random_cuts(whole, 8, random.Random(seed))):
                found = run(stage, values | {name: truth[name].contiguous() for name in stage.received})
                assert not differ(stage, found, values)
                for name in (*stage.received, *stage.sends):
                    strides_differ += stage.nodes[name].meta["val"].stride() != whole.nodes[name].meta["val"].stride()
    assert strides_differ


def anything(out: Tensor, x: Tensor, **_: Any) -> Done:
    """In place of a collective: numbers of the right kind, for nobody looks at them."""
    out.copy_(x.reshape(-1)[:1].expand(out.shape))
    return Done()


@pytest.mark.parametrize("family", ["llama", "gpt2", "bert"])
def test_views_copy_under_a_plan_where_they_do_when_a_rank_runs(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Reshapes of a rank's graph that give new storage, though the whole graph has views there."""
    for name in ("run_all_gather", "run_reduce_scatter"):
        monkeypatch.setattr(collectives, name, anything)
    monkeypatch.setattr(collectives.dist, "all_to_all_single", anything)
    monkeypatch.setattr(collectives.dist, "all_reduce", lambda *_, **__: Done())
    monkeypatch.setattr(Groups, "group", lambda *_: None)
    model, kwargs = zoo(family)
    whole = zoo_graph(family)
    values = {**parameters_of(whole, model), **buffers_of(whole, model), **whole.constants}
    values |= bind_inputs(whole.inputs, (), kwargs)
    program, seen, mesh = make_program(whole), 0, make_mesh((2,))
    for seed in range(12):
        plan = random_plan(whole, mesh, random.Random(f"{family} {seed}"))
        local = emit(whole, plan).graph
        own = {n: v[tuple(slice(0, s) for s in local_shape(tuple(v.shape), plan.layouts[n], mesh))].contiguous()
               for n, v in values.items()}  # fmt: skip
        copied: set[str] = set()

        class Noting(fx.Interpreter):
            def run_node(self, node: fx.Node, copied: set[str] = copied) -> Any:
                found = super().run_node(node)
                if node.op == "call_function" and short_name(node) in RESHAPING:
                    (source,) = self.fetch_args_kwargs_from_env(node)[0][:1]
                    if source.untyped_storage()._cdata != found.untyped_storage()._cdata:
                        copied.add(node.name)
                return found

        names = [node.name for node in local.nodes if node.op == "placeholder"]
        with torch.no_grad(), use_groups(Groups(mesh=mesh, rank=0, groups={})):
            Noting(fx.GraphModule({}, local)).run(*(own[name] for name in names))
        redistributed = redistribute(program, plan, make_pricer(mesh=mesh, cluster=machine(2), config=TrainConfig()))
        assert copied == {name for name, one in redistributed.items() if one.is_copy}
        seen += len(copied)
    assert seen
