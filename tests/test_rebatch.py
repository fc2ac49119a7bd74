"""The graph of a batch size made from two others is the graph that is captured at that size."""

from typing import Any

import pytest
from torch import Tensor, nn

from autopar.capture import capture
from autopar.capture.rebatch import SIZES, Batches, NotLinearError, rebatched
from autopar.graph import CapturedModel
from tests.zoo import FAMILIES, zoo


def at(model: nn.Module, kwargs: dict[str, Any], size: int) -> CapturedModel:
    return capture(model, (), {k: v[:size] if isinstance(v, Tensor) else v for k, v in kwargs.items()})


@pytest.mark.parametrize("family", FAMILIES)
def test_a_rebatched_graph_is_the_captured_one(family: str) -> None:
    model, kwargs = zoo(family, batch=8)
    asked = []

    def captured(size: int) -> CapturedModel:
        asked.append(size)
        return at(model, kwargs, size)

    batches = Batches(capture=captured)
    made, expected = batches.at(8), at(model, kwargs, 8)
    assert made.fingerprint == expected.fingerprint
    assert (made.inputs, made.buffers, made.parameters) == (expected.inputs, expected.buffers, expected.parameters)
    for one, other in zip(made.graph.nodes, expected.graph.nodes, strict=True):
        values = [
            m.meta["val"] if isinstance(m.meta.get("val"), (tuple, list)) else (m.meta.get("val"),)
            for m in (one, other)
        ]
        for got, want in zip(*values, strict=True):
            assert got is None or (got.shape, got.dtype) == (want.shape, want.dtype), one.name
        assert one.meta.get("requires_grad") == other.meta.get("requires_grad")
    assert asked == (list(SIZES) if family != "mixtral" else [*SIZES, 8])
    if family in ("gpt2", "llama", "vit", "resnet"):
        assert batches.at(1).fingerprint == at(model, kwargs, 1).fingerprint


def test_graphs_that_differ_in_more_than_sizes_are_not_taken_for_a_line() -> None:
    model, kwargs = zoo("bert", batch=4)
    other, its = zoo("vit", batch=4)
    with pytest.raises(NotLinearError):
        rebatched(at(model, kwargs, 2), at(other, its, 3), SIZES, 4)
