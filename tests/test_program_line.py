"""The program of a batch size made from those at both ends of a line is the program of the graph of that size."""

import dataclasses
from typing import Any

import numpy as np
import pytest
import torch
from test_programs_alike import fields_of
from torch import Tensor, nn

from autopar.api.captures import Captures
from autopar.capture.rebatch import Batches
from autopar.lower.program import Program, make_program
from autopar.passes.batch_line import BatchLine
from autopar.search.costs.program_line import ProgramLine
from autopar.search.graph.build import build
from autopar.search.graph.build_recompute import RecomputeBuilder
from autopar.search.joint.programs import Programs
from autopar.search.staged.stages import block_starts, starts_of
from autopar.values.calls import Call
from autopar.values.graph import Accumulation
from tests.search_cases import pricer_of
from tests.zoo import SPLIT_FAMILIES
from tests.zoo_graphs import zoo_graph

BATCH = 12


def line_of(family: str) -> tuple[Batches, BatchLine]:
    batches = Batches(capture=lambda size: zoo_graph(family, size), batch=BATCH)
    batches.at(4)
    assert batches.line is not None
    return batches, batches.line


@pytest.mark.parametrize("family", SPLIT_FAMILIES[::2])
def test_a_program_on_a_line_is_that_of_its_graph(family: str) -> None:
    batches, line = line_of(family)
    asked = list[int]()

    def graph(count: int) -> Any:
        asked.append(count)
        return batches.microbatch(count)

    programs = ProgramLine(line=line, whole=make_program(line.large), graph=graph)
    for count in (2, 3, 4):
        made, expected = programs.microbatch(count), make_program(batches.microbatch(count))
        assert made is not None
        for got, want in zip(made.ops, expected.ops, strict=True):
            assert fields_of(got) == fields_of(want)
        assert made.tensors.keys() == expected.tensors.keys()
        for name, tensor in expected.tensors.items():
            assert dataclasses.asdict(made.tensors[name]) == dataclasses.asdict(tensor)
        for part in ("readers", "loss", "ends", "mutated", "microbatches", "copies"):
            assert getattr(made, part) == getattr(expected, part)
        for part in ("parameters", "buffers", "inputs", "accumulation", "results", "sends", "received"):
            assert getattr(made.captured, part) == getattr(expected.captured, part)
        assert same_graphs(made, expected)
        assert starts_of(made) == block_starts(expected.captured)
        assert not asked  # until now no graph was needed
        assert made.captured.accumulated(Accumulation(microbatches=7, weight=1.0)).microbatches == 7 and not asked
        assert made.captured.fingerprint == expected.captured.fingerprint and asked == [count]
        assert made.strided.keys() == expected.strided.keys()
        asked.clear()
    assert programs.microbatch(1) is programs.microbatch(BATCH) is None  # of the whole batch, and of one sample


class Tail(nn.Module):
    """A loss of a kind: how it is reduced, and what scales it."""

    def __init__(self, reduction: str, scale: float | None) -> None:
        super().__init__()
        self.linear, self.reduction, self.scale = nn.Linear(4, 4), reduction, scale

    def forward(self, x: Tensor) -> Tensor:
        loss: Tensor = getattr(self.linear(x).square(), self.reduction)()
        return loss if self.scale is None else loss * self.scale


@pytest.mark.parametrize(("reduction", "scale"), [("mean", None), ("sum", None), ("mean", 0.5)])
def test_losses_without_labels_are_weighed_as_the_graphs_say(reduction: str, scale: float | None) -> None:
    """A number that scales a loss is followed along the line as sizes are, so that no graph is needed."""
    captures = Captures(model=Tail(reduction, scale), call=Call(args=(torch.zeros(12, 3, 4),)), precision="fp32")
    batches = Batches(capture=captures.at, batch=12)
    joint = Programs(graph=batches.microbatch, line=batches.find_line)
    line = batches.find_line()
    assert line is not None
    made = ProgramLine(line=line, whole=joint.of(1), graph=batches.microbatch).microbatch(4)
    assert made is not None
    assert joint.of(4).captured.accumulation == batches.microbatch(4).accumulation
    assert joint.graphs.keys() == {1}


def same_graphs(made: Program, expected: Program) -> bool:
    """Whether strategy graphs, with and without memory, are equal number by number."""
    pricer = pricer_of((2, 2))
    for limit, builder in ((None, None), (1e9, RecomputeBuilder)):
        both = [build(one, pricer, limit=limit, builder=builder).graph for one in (made, expected)]
        for got, want in zip(both[0].nodes, both[1].nodes, strict=True):
            assert got.name == want.name and np.array_equal(got.seconds, want.seconds)
        for one, other in zip(both[0].groups, both[1].groups, strict=True):
            assert one.name == other.name and np.array_equal(one.arc_seconds, other.arc_seconds)
            assert np.array_equal(one.arc_target, other.arc_target)
        if limit is not None:
            memory, other_memory = both[0].memory, both[1].memory
            assert memory is not None and other_memory is not None
            assert np.array_equal(memory.base, other_memory.base) and memory.moments == other_memory.moments
            for held, other_held in zip(memory.nodes, other_memory.nodes, strict=True):
                assert np.array_equal(held.nbytes, other_held.nbytes)
                assert np.array_equal(held.coefficient, other_held.coefficient)
    return True
