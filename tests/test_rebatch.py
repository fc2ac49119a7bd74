"""The graph of a batch size made from two others is the graph that is captured at that size."""

import pytest

from autopar.capture.rebatch import Batches, NotLinearError, rebatched
from autopar.graph import CapturedModel
from tests.zoo import FAMILIES
from tests.zoo_graphs import zoo_graph

LIKE_ONE = ("gpt2", "llama", "resnet")
"""Families whose graph of one sample is written like that of more."""


@pytest.mark.parametrize("family", FAMILIES)
def test_a_rebatched_graph_is_the_captured_one(family: str) -> None:
    asked = []

    def captured(size: int) -> CapturedModel:
        asked.append(size)
        return zoo_graph(family, size)

    batches = Batches(capture=captured, batch=8)
    made, expected = batches.at(4), zoo_graph(family, 4)
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
    asked = []

    def captured(size: int) -> CapturedModel:
        asked.append(size)
        return zoo_graph("gpt2", size)

    batches = Batches(capture=captured, batch=8)
    for expected in ([1, 8], [1, 8, 2], [1, 8, 2, 4], [1, 8, 2, 4]):
        assert batches.at(4).fingerprint == zoo_graph("gpt2", 4).fingerprint
        assert asked == expected
        batches.distrust()


def test_graphs_that_differ_in_more_than_sizes_are_not_taken_for_a_line() -> None:
    with pytest.raises(NotLinearError):
        rebatched(zoo_graph("bert", 2), zoo_graph("vit", 3), (2, 3), 4)
