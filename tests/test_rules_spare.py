"""What a call allocates beside operands, results and gradients, and the gradients it hands on, are what torch does."""

import math

import pytest
import torch

from autopar.ops.random import Draws, use_draws
from autopar.rules.describe import result_values, shapes_of
from autopar.rules.registry import rule_of
from autopar.rules.spare import BACKWARD, gives_all, handed_on, short_name, spare
from autopar.runtime.peak_memory import PeakMemory
from autopar.values.graph import operands
from tests.op_sample import Sample
from tests.op_samples import SAMPLES

LARGE = 200
"""Bytes: in samples below, scalars and rows weigh as much as tensors."""


def size(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().nbytes()


@pytest.mark.parametrize("sample", SAMPLES, ids=lambda s: s.name)
def test_backward_hands_on_and_allocates_as_declared(sample: Sample) -> None:
    node = sample.node(torch.float32)
    rule = rule_of(node)
    if not node.meta["requires_grad"] or short_name(node) == "detach":
        return
    tensors = [
        t.requires_grad_(spec.needs_grad)
        for t, spec in zip(sample.tensors(dtype=torch.float32), sample.inputs, strict=True)
    ]
    numbers = [int(s.name.removeprefix("x")) for s in operands(node)]
    memory = PeakMemory()
    memory.hold("known", tensors)
    with memory, use_draws(Draws(seed=1, step=1, exact=True)):
        results = [r for r in sample.run(*tensors) if r.requires_grad]
    given = [torch.ones_like(r) for r in results]
    memory.hold("known", given)
    before = memory.peak = memory.live
    wanted = [i for i, t in enumerate(tensors) if t.requires_grad]
    with memory:
        gradients = torch.autograd.grad(results, [tensors[i] for i in wanted], given)
    storages = {g.untyped_storage().data_ptr() for g in given}
    handed = {i for i, g in zip(wanted, gradients, strict=True) if g.untyped_storage().data_ptr() in storages}
    declared = {numbers[i] for i in handed_on(node, rule)} & set(wanted)
    assert handed == declared or len(set(numbers)) < len(numbers)
    largest = max(map(size, [*tensors, *results]))
    written = sum(size(g) for i, g in zip(wanted, gradients, strict=True) if i not in handed)
    beside = memory.peak - before - written
    if rule.spare is not None:
        shapes = shapes_of(operands(node)), tuple(tuple(value.shape) for value in result_values(node))
        numel = rule.spare(*shapes)[1]
        indices = 3 * 8 * math.prod(shapes[0][1])  # orders of rows
        assert rule.in_turn or numel * 4 <= beside + LARGE  # a net lets go of a layer before it comes to the next
        assert beside <= numel * 4 + indices + LARGE
    if short_name(node) not in BACKWARD or largest < LARGE:
        return
    assert beside <= (spare(node, rule)[1] + 0.85) * largest


def made_for(sample: Sample, asked: list[int]) -> int:
    """Bytes that calls of backward make for the gradients of these tensors."""
    tensors = [
        t.requires_grad_(spec.needs_grad)
        for t, spec in zip(sample.tensors(dtype=torch.float32), sample.inputs, strict=True)
    ]
    with use_draws(Draws(seed=1, step=1, exact=True)):
        results = [r for r in sample.run(*tensors) if r.requires_grad]
    given = [torch.ones_like(r) for r in results]
    made = 0

    class Summing(PeakMemory):
        def _count(self, tensor: torch.Tensor, kind: str, made_by: str) -> None:
            nonlocal made
            made += size(tensor)

    with Summing():
        torch.autograd.grad(results, [tensors[i] for i in asked], given, allow_unused=True)
    return made


@pytest.mark.parametrize("sample", SAMPLES, ids=lambda s: s.name)
def test_backward_that_makes_all_gradients_at_once_is_declared(sample: Sample) -> None:
    """Not the other way round: what attention runs as products makes no more than is asked for."""
    node = sample.node(torch.float32)
    differentiable = [i for i, spec in enumerate(sample.inputs) if spec.needs_grad]
    if not node.meta["requires_grad"] or len(differentiable) < 2:
        return
    for_one = [made_for(sample, [i]) for i in differentiable]
    if min(for_one) == made_for(sample, differentiable) > 0:
        assert gives_all(node)
    if gives_all(node):
        assert max(for_one) == made_for(sample, differentiable) or sample.name in ("sdpa three dims", "sdpa bias")
