"""Micro-batches are exact or refused: what the analysis says of a loss is what running its parts says."""

import random
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn
from torch.nn import functional as F

import autopar
from autopar.capture import capture
from autopar.errors import BatchError
from autopar.oracle.reference import run_captured
from autopar.passes.accumulate_gradients import accumulate_gradients
from autopar.passes.joined_samples import loss_over_samples
from autopar.passes.sample_states import Joined, moved
from autopar.values.graph import CapturedModel
from tests.sample_losses import ALONE, BATCH, JOINED, STEPS, WIDTH, Loss, inputs, net
from tests.zoo import FAMILIES
from tests.zoo_graphs import zoo_graph

Step = tuple[Tensor, list[Tensor]]


def eager(loss: Loss, parts: int, weight: float) -> Step:
    """Loss and gradients of the module itself, of its micro-batches one after the other."""
    model = net()
    total = torch.zeros((), dtype=torch.float64)
    for part in zip(*(t.chunk(parts) for t in inputs(BATCH)), strict=True):
        total = total + weight * loss(model(*part), part)
    return total.detach(), list(torch.autograd.grad(total, list(model.parameters())))


def in_micro_batches(captured: CapturedModel) -> Step:
    """The same of the graph of a micro-batch."""
    model, accumulation = net(), captured.accumulation
    assert accumulation is not None
    values = {p.placeholder: model.get_parameter(p.names[0]) for p in captured.parameters}
    buffers = {b.placeholder: model.get_buffer(b.names[0]) for b in captured.buffers}
    total, counted = torch.zeros((), dtype=torch.float64), torch.zeros((), dtype=torch.float64)
    for part in zip(*(t.chunk(accumulation.microbatches) for t in inputs(BATCH)), strict=True):
        given = {spec.placeholder: part[int(spec.path)] for spec in captured.inputs}
        loss, results = run_captured(captured, values, buffers, given)
        total = total + loss * accumulation.weight
        counted = counted + results[accumulation.count] if accumulation.count else counted
    total = total * accumulation.rows / counted if accumulation.count else total
    return total.detach(), list(torch.autograd.grad(total, [*values.values()]))


def is_equal(one: Step, other: Step) -> bool:
    pairs = [(one[0], other[0]), *zip(one[1], other[1], strict=True)]
    return all(torch.allclose(a, b, rtol=1e-9, atol=1e-12) for a, b in pairs)


def graph(loss: Loss, rows: int) -> CapturedModel:
    return capture(net(), inputs(rows), loss_fn=loss, repeats=())


@cache
def graphs(kind: str, rows: int) -> dict[str, CapturedModel]:
    """Of each loss of a kind, all of them captured as one sum."""
    losses = {"alone": ALONE, "joined": JOINED}[kind]
    captured = graph(lambda o, b: sum((loss(o, b) for loss in losses.values()), torch.zeros(()).double()), rows)
    node, terms = captured.nodes[captured.loss], []
    for _ in range(len(losses) - 1):
        node, term = node.args  # type: ignore[assignment, misc]
        terms.append(term.name)
    terms.append(node.name)
    return {name: of_term(captured, term) for name, term in zip(losses, reversed(terms), strict=True)}


def of_term(captured: CapturedModel, term: str) -> CapturedModel:
    """The graph with a term of its loss as the loss."""
    made, env = fx.Graph(), dict[fx.Node, fx.Node]()
    *others, output = captured.graph.nodes
    for node in others:
        env[node] = made.node_copy(node, env.__getitem__)
    last = made.output((env[captured.nodes[term]],))
    last.meta = {**output.meta, "val": (captured.nodes[term].meta["val"],)}
    for node in reversed(list(made.nodes)):
        if node.op == "call_function" and not node.users:
            made.erase_node(node)
    return replace(captured, graph=made, loss=term)


SCALED = ("each sample divided by the batch", "weighted terms", "index by position", "two views", "instance norm")
"""Of these the graph of one sample is looked at too: some of its calls are not there."""


@pytest.mark.parametrize("name", ALONE)
def test_a_sum_over_samples_is_found_and_its_micro_batches_are_the_batch(name: str) -> None:
    loss = ALONE[name]
    whole, expected = graphs("alone", BATCH)[name], eager(loss, 1, 1.0)
    for count in (2, BATCH) if name in SCALED else (2,):
        part = graphs("alone", BATCH // 2)[name] if count == 2 else graph(loss, 1)
        captured = accumulate_gradients(part, count, lambda: whole)
        assert is_equal(in_micro_batches(captured), expected), f"{count} micro-batches are another step"


@pytest.mark.parametrize("name", JOINED)
def test_what_joins_samples_is_refused_and_its_micro_batches_are_not_the_batch(name: str) -> None:
    loss = JOINED[name]
    whole, part = (graphs("joined", rows)[name] for rows in (BATCH, BATCH // 2))
    expected = eager(loss, 1, 1.0)
    assert not any(is_equal(eager(loss, 2, weight), expected) for weight in (1.0, 0.5))
    with pytest.raises(BatchError, match=r"2 micro-batches were asked, but .*; use one"):
        accumulate_gradients(part, 2, lambda: whole)


STEPS_OF: dict[str, Loss] = {
    "tanh": lambda o, b: o.tanh(),
    "softmax of samples": lambda o, b: o.softmax(0),
    "softmax of steps": lambda o, b: o.softmax(1),
    "less the mean": lambda o, b: o - o.mean(0, keepdim=True),
    "less a sample's mean": lambda o, b: o - o.mean((1, 2), keepdim=True),
    "times y": lambda o, b: o * b[1],
    "flipped": lambda o, b: o.flip(0),
    "rows and back": lambda o, b: o.flatten(0, 1).unflatten(0, (-1, STEPS)),
    "rows and back otherwise": lambda o, b: o.transpose(0, 1).flatten(0, 1).unflatten(0, (-1, STEPS)),
    "sorted": lambda o, b: o.sort(0).values,
    "gram": lambda o, b: (
        (o.flatten(1) @ o.flatten(1).t())
        @ b[1].flatten(1).unflatten(1, (STEPS, WIDTH)).flatten(1).unflatten(1, (STEPS, WIDTH)).flatten(1)
    ),
    "divided by the batch": lambda o, b: o / o.shape[0],
    "rolled": lambda o, b: o.roll(1, 1),
    "cumulated": lambda o, b: o.cumsum(0),
    "twice": lambda o, b: torch.cat([o, o * b[1]])[: o.shape[0]],
    "second": lambda o, b: torch.cat([o, o * b[1]])[o.shape[0] :],
    "by position": lambda o, b: o + torch.arange(o.shape[0]).view(-1, *(1,) * (o.dim() - 1)),
}
ENDS: dict[str, Loss] = {
    "mean": lambda o, b: o.mean(),
    "sum": lambda o, b: o.sum(),
    "mean of sums": lambda o, b: o.sum(0).mean(),
    "sum of means": lambda o, b: o.mean(0).sum(),
    "square of the mean": lambda o, b: o.mean(0).square().mean(),
    "mean of squares": lambda o, b: o.square().mean(),
    "over the batch": lambda o, b: o.square().sum() / o.shape[0],
    "of two kinds": lambda o, b: o.square().mean() + o.sum(),
    "and a constant": lambda o, b: o.sum() + 3,
}


def random_loss(number: int) -> tuple[str, Loss]:
    rng = random.Random(number)
    names = [rng.choice(list(STEPS_OF)) for _ in range(rng.randint(1, 3))]
    end = rng.choice(list(ENDS))

    def loss(o: Tensor, b: object) -> Tensor:
        for name in names:
            o = STEPS_OF[name](o, b).reshape(-1, STEPS, WIDTH)
        return ENDS[end](o, b)

    return " | ".join([*names, end]), loss


@pytest.mark.parametrize("number", range(12))
def test_random_losses_are_exact_or_refused(number: int) -> None:
    name, loss = random_loss(number)
    try:
        captured = accumulate_gradients(graph(loss, 4), 2, lambda: graph(loss, BATCH))
    except BatchError:
        return
    assert is_equal(in_micro_batches(captured), eager(loss, 1, 1.0)), name


@pytest.mark.parametrize("family", FAMILIES[::4])
def test_losses_of_transformers_are_means_over_labels(family: str) -> None:
    """Batch norm in training apart, whose statistics are of a batch."""
    for rows in (1, 2):
        found = loss_over_samples(zoo_graph(family), zoo_graph(family, rows))
        assert isinstance(found, Joined) == (family == "resnet"), f"{found} of {rows} rows"


class Written(nn.Module):
    """A moving average is written, as in a codebook."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)
        self.register_buffer("mean", torch.zeros(WIDTH))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        h: Tensor = self.layer(x)
        if self.training:
            with torch.no_grad():
                self.mean.mul_(0.9).add_(h.mean((0, 1)), alpha=0.1)
        return F.mse_loss(h + self.mean.detach(), y)


def test_a_buffer_that_is_written_has_one_micro_batch_and_one_that_is_read_any_number() -> None:
    parts = tuple(t.float() for t in inputs(BATCH))
    for training in (True, False):
        model = Written().train(training)
        whole, half = (capture(model, tuple(t[:rows] for t in parts)) for rows in (BATCH, BATCH // 2))
        found = loss_over_samples(whole, half)
        assert isinstance(found, Joined) == training
    assert "buffer mean" in str(loss_over_samples(*(capture(Written(), tuple(t[:r] for t in parts)) for r in (8, 4))))


class Contrastive(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(self.layer(x) @ y.t(), torch.arange(x.shape[0]))


def test_a_search_does_not_split_what_joins_samples_and_says_why() -> None:
    call: dict[str, Any] = {"args": tuple(torch.randn(2, BATCH, WIDTH)), "cluster": "2xcpu", "with_baselines": False}
    for asked in ({"microbatches": "auto"}, {"mesh": "auto", "pipeline": 1}):
        plan = autopar.plan(Contrastive(), **call, **asked)
        assert plan.microbatches == 1
        assert "cannot be split, for matmul of (8, 4) and (4, 8)" in " ".join(str(plan).split())
    with pytest.raises(BatchError, match="2 micro-batches were asked, but matmul of"):
        autopar.plan(Contrastive(), **call, microbatches=2)


def test_a_batch_in_a_reshape_is_followed_in_row_major_order() -> None:
    """Brute force: where every sample's elements are one block of one dim, as often as `outer` says."""
    rng = random.Random(0)
    for _ in range(200):
        outer, batch, block, after = rng.choice([1, 2, 3]), 4, rng.choice([1, 2, 6]), rng.choice([1, 2])
        source = (outer * batch * block, after)
        samples = torch.arange(source[0]).div(block, rounding_mode="floor").remainder(batch)
        samples = samples[:, None].expand(source)
        target = _random_shape(samples.numel(), rng)
        found = moved(source, target, (0, outer), batch)
        after_view = samples.reshape(target)
        if found is not None:
            dim, times = found
            parts = after_view.unflatten(dim, (times, batch, -1)).movedim(dim + 1, 0)
            assert all(bool((part == sample).all()) for sample, part in enumerate(parts))


def _random_shape(numel: int, rng: random.Random) -> tuple[int, ...]:
    shape = []
    while numel > 1:
        size = rng.choice([n for n in range(1, numel + 1) if numel % n == 0])
        shape.append(size)
        numel //= size
    return tuple(shape) or (1,)
