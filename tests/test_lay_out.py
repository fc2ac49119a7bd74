"""Tensors lie as the graph says, in the whole and in stages that compute of contiguous copies."""

import random
from collections.abc import Container
from typing import Any

import pytest
import torch
from torch import Tensor, fx

from autopar.graph import CapturedModel
from autopar.inputs import bind_inputs
from autopar.passes.split_stages import split_stages
from autopar.reference import buffers_of, parameters_of
from autopar.search.known.random_plan import random_cuts
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
