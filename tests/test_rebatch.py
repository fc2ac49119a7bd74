"""The graph of a batch size made from two others is the graph that is captured at that size."""

from functools import cache, partial
from typing import Any

import pytest
from torch import Tensor, nn

from autopar.capture import capture
from autopar.capture.rebatch import Batches, NotLinearError, rebatched
from autopar.graph import CapturedModel
from tests.zoo import FAMILIES, zoo


def at(model: nn.Module, kwargs: dict[str, Any], size: int) -> CapturedModel:
    return capture(model, (), {k: v[:size] if isinstance(v, Tensor) else v for k, v in kwargs.items()})


LIKE_ONE = ("gpt2", "llama", "resnet")
"""Families whose graph of one sample is written like that of more."""


@pytest.mark.parametrize("family", FAMILIES)
def test_a_rebatched_graph_is_the_captured_one(family: str) -> None:
    model, kwargs = zoo(family, batch=8)
    asked = []

    sized = cache(partial(at, model, kwargs))

    def captured(size: int) -> CapturedModel:
        asked.append(size)
        return sized(size)

    batches = Batches(capture=captured, batch=8)
    made, expected = batches.at(4), sized(4)
    assert made.fingerprint == expected.fingerprint
    assert (made.inputs, made.buffers, made.parameters) == (expected.inputs, expected.buffers, expected.parameters)
    for one, other in zip(made.graph.nodes, expected.graph.nodes, strict=True):
        values = [
            m.meta["val"] if isinstance(m.meta.get("val"), (tuple, list)) else (m.meta.get("val"),)
            for m in (one, other)
        ]
        for got, want in zip(*values, strict=True):
            assert got is None or (got.shape, got.dtype, got.stride()) == (want.shape, want.dtype, want.stride()), one
        assert one.meta.get("requires_grad") == other.meta.get("requires_grad")
    assert asked == ([1, 8] if family in LIKE_ONE else [1, 8, 2] if family != "mixtral" else [1, 8, 2, 4])


def test_a_line_that_proved_wrong_gives_way_to_the_next_and_then_to_captures() -> None:
    model, kwargs = zoo("gpt2", batch=8)
    asked = []

    sized = cache(partial(at, model, kwargs))

    def captured(size: int) -> CapturedModel:
        asked.append(size)
        return sized(size)

    batches = Batches(capture=captured, batch=8)
    for expected in ([1, 8], [1, 8, 2], [1, 8, 2, 4], [1, 8, 2, 4]):
        assert batches.at(4).fingerprint == sized(4).fingerprint
        assert asked == expected
        batches.distrust()


def test_graphs_that_differ_in_more_than_sizes_are_not_taken_for_a_line() -> None:
    model, kwargs = zoo("bert", batch=4)
    other, its = zoo("vit", batch=4)
    with pytest.raises(NotLinearError):
        rebatched(at(model, kwargs, 2), at(other, its, 3), (2, 3), 4)
