"""The graph of a batch size made from two others is the graph that is captured at that size."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import autopar.capture as capturing
from autopar.api.captures import Captures
from autopar.capture.rebatch import Batches
from autopar.passes.accumulate_gradients import accumulate_gradients
from autopar.passes.batch_line import NotLinearError, rebatched
from autopar.values.calls import Call
from autopar.values.graph import CapturedModel
from tests.zoo import FAMILIES
from tests.zoo_graphs import zoo_graph

LIKE_ONE = ("gpt2", "llama", "mixtral", "resnet")
"""Families whose graph of one sample is written like that of more."""


@pytest.mark.parametrize("family", FAMILIES[::2])
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
    assert asked == ([8, 1] if family in LIKE_ONE else [8, 1, 2])
    for count in (
        (2, 8) if family != "resnet" else ()
    ):  # between the ends, where the graph is changed as it is, and at one, where it is kept
        part = accumulate_gradients(zoo_graph(family, 8 // count), count, lambda: zoo_graph(family, 8))
        assert batches.microbatch(count).fingerprint == part.fingerprint == batches.microbatch(count).fingerprint
        assert batches.microbatch(count).accumulation == part.accumulation
    assert batches.at(1).fingerprint == zoo_graph(family, 1).fingerprint


def test_a_line_that_proved_wrong_gives_way_to_the_next_and_then_to_captures() -> None:
    asked = []

    def captured(size: int) -> CapturedModel:
        asked.append(size)
        return zoo_graph("gpt2", size)

    batches = Batches(capture=captured, batch=8)
    for expected in ([8, 1], [8, 1, 2], [8, 1, 2, 4], [8, 1, 2, 4]):
        assert batches.at(4).fingerprint == zoo_graph("gpt2", 4).fingerprint
        assert asked == expected
        batches.distrust()


def test_what_sizes_share_is_taken_for_granted_at_the_ends_of_lines_alone() -> None:
    """And found once, when the first end is asked for; what is asked for as captured is captured anew."""
    asked, shared = list[int](), list[int]()

    def captured(size: int) -> CapturedModel:
        asked.append(size)
        return zoo_graph("gpt2", size)

    def sharing() -> Callable[[int], CapturedModel]:
        def capture(size: int) -> CapturedModel:
            shared.append(size)
            return zoo_graph("gpt2", size)

        return capture

    batches = Batches(capture=captured, batch=8, shared=sharing)
    for size in (4, 2, 1, 8, 4):
        assert batches.at(size).fingerprint == zoo_graph("gpt2", size).fingerprint
    assert (asked, shared) == ([8], [1])
    assert batches.captured(1).fingerprint == zoo_graph("gpt2", 1).fingerprint
    assert (asked, shared) == ([8, 1], [1])
    batches.distrust()
    assert batches.at(4).fingerprint == zoo_graph("gpt2", 4).fingerprint
    assert (asked, shared) == ([8, 1], [1, 2])


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.linear(x)


class Stack(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer() for _ in range(9))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x.square().mean()


def test_layers_that_are_alike_are_looked_for_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the whole batch, whatever is captured beside; the graphs are those of captures that look for themselves."""
    model = Stack()
    call = Call(args=(torch.zeros(8, 4, 16),))
    finder, found = capturing.find_repeats, []

    def noted(*args: Any) -> Any:
        found.append(finder(*args))
        return found[-1]

    monkeypatch.setattr(capturing, "find_repeats", noted)
    alone = Captures(model=model, call=call, precision="fp32")
    expected = {size: alone.at(size).fingerprint for size in (8, 4, 1)}
    assert len(found) == 3 and found[0] and found[0] == found[1] == found[2]
    for begun in (False, True):
        sharing = Captures(model=model, call=call, precision="fp32")
        batches = Batches(capture=sharing.at, batch=8, shared=sharing.sharing)
        found.clear()
        if begun:
            batches.begin_line()
        assert {size: batches.at(size).fingerprint for size in (8, 4, 1)} == expected
        assert len(found) == (1 if begun else 2)  # the first capture looks for itself where nothing was begun
        batches.close()


def test_graphs_that_differ_in_more_than_sizes_are_not_taken_for_a_line() -> None:
    with pytest.raises(NotLinearError):
        rebatched(zoo_graph("bert", 2), zoo_graph("vit", 3), (2, 3), 4)
