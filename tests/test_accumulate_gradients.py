"""The micro-batches of a step add up to the step: losses and gradients of the global batch, whatever its labels."""

import random
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from autopar.capture import capture
from autopar.errors import BatchError, PlanMismatchError
from autopar.oracle.reference import run_captured
from autopar.passes.accumulate_gradients import accumulate_gradients
from autopar.passes.promote_casts import promote_casts
from autopar.search.known.random_plan import random_plan
from autopar.values.graph import CapturedModel
from autopar.values.mesh import make_mesh
from autopar.values.plan import one_stage
from autopar.values.plan_file import plan_from_json
from tests.plans_in_threads import Reference, errors_of, one_process
from tests.zoo import SPLIT_FAMILIES, zoo
from tests.zoo_graphs import zoo_graph

BATCH = 8
MESHES = ((4,), (2, 2))


@cache
def whole(family: str) -> Reference:
    model, kwargs = zoo(family, dtype=torch.float64, batch=BATCH)
    return one_process(promote_casts(zoo_graph(family, dtype=torch.float64, batch=BATCH)), model, kwargs)


@cache
def microbatch(family: str, count: int) -> CapturedModel:
    captured = promote_casts(zoo_graph(family, BATCH // count, dtype=torch.float64, batch=BATCH))
    return accumulate_gradients(captured, count, lambda: whole(family).captured)


@pytest.mark.parametrize(("family", "count"), [*((f, 2) for f in SPLIT_FAMILIES[1::4]), ("gpt2", 4)])
def test_random_plans_of_micro_batches_equal_one_process(family: str, count: int) -> None:
    """Every lifetime on every mesh; labels are ignored unevenly, so that means of means would be wrong."""
    rng = random.Random(f"{family} {count}")
    captured = microbatch(family, count)
    for number, mesh in enumerate(MESHES):
        plan = random_plan(captured, make_mesh(mesh), rng)
        loss_error, gradient_error, parameter = errors_of(whole(family), plan, captured)
        assert loss_error <= 1e-10, f"plan {number} on {plan.mesh}: loss off by {loss_error}"
        assert gradient_error <= 1e-8, f"plan {number} on {plan.mesh}: gradient of {parameter} off by {gradient_error}"


Loss = Callable[[Tensor, Any], Tensor]


def labels_of(batch: Any) -> Tensor:
    """Class indices of which the first half is ignored more often."""
    wanted: Tensor = batch[1].argmax(-1)
    return torch.where(batch[1][:, 0] > 1.0, -100, wanted)


def twice(o: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(o, labels) + F.cross_entropy(2 * o, labels) / 3


LOSSES: dict[str, Loss] = {
    "mse": lambda o, b: F.mse_loss(o, b[1]),
    "sum of squares": lambda o, b: F.mse_loss(o, b[1], reduction="sum"),
    "l1": lambda o, b: 3 * F.l1_loss(o, b[1]) - 1.0,
    "binary": lambda o, b: F.binary_cross_entropy_with_logits(o, b[1].sigmoid()),
    "mean written out": lambda o, b: ((o - b[1]) ** 2).mean(),
    "sum": lambda o, b: ((o - b[1]) ** 2).sum() * 0.25,
    "divided by the batch": lambda o, b: ((o - b[1]) ** 2).sum() / o.shape[0],
    "mean times the batch": lambda o, b: ((o - b[1]) ** 2).mean() * o.shape[0],
    "batchmean": lambda o, b: F.kl_div(o.log_softmax(-1), b[1].softmax(-1), reduction="batchmean"),
    "probabilities": lambda o, b: F.cross_entropy(o, b[1].softmax(-1)),
    "labels": lambda o, b: F.cross_entropy(o, labels_of(b)),
    "labels smoothed": lambda o, b: 0.5 * F.cross_entropy(o, labels_of(b), label_smoothing=0.1),
    "labels summed": lambda o, b: F.cross_entropy(o, labels_of(b), reduction="sum"),
    "labels twice": lambda o, b: twice(o, labels_of(b)),
}


def inputs(rows: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(rows)
    return tuple(torch.randn(2, rows, 4, dtype=torch.float64, generator=generator))  # type: ignore[return-value]


def model() -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return nn.Linear(4, 4).double()


def small(loss: Loss, count: int, rows: int = BATCH) -> CapturedModel:
    parts = tuple(t[: rows // count] for t in inputs(rows))
    return accumulate_gradients(capture(model(), parts, loss_fn=loss), count, lambda: small_whole(loss, rows))


@cache
def small_whole(loss: Loss, rows: int) -> CapturedModel:
    return capture(model(), inputs(rows), loss_fn=loss)


@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.parametrize("count", [2, 8])
def test_weights_of_losses(name: str, count: int) -> None:
    """`scale · sum of weight · loss` is the loss of the whole, for every way to reduce one."""
    captured, linear = small(LOSSES[name], count), model()
    values = {p.placeholder: linear.get_parameter(p.names[0]) for p in captured.parameters}
    given = inputs(BATCH)
    assert captured.accumulation is not None
    total, counted = torch.zeros((), dtype=torch.float64), 0.0
    for part in zip(*(t.chunk(count) for t in given), strict=True):
        by_name = {spec.placeholder: part[int(spec.path)] for spec in captured.inputs}
        loss, results = run_captured(captured, values, {}, by_name)
        assert loss.isfinite()
        total = total + loss * captured.accumulation.weight
        counted += float(results[captured.accumulation.count]) if captured.accumulation.count else 0.0
    scale = captured.accumulation.rows / counted if captured.accumulation.count else 1.0
    expected = LOSSES[name](model()(given[0]), given)
    # a constant that is added counts once, not once a micro-batch
    torch.testing.assert_close(total.detach() * scale, expected.detach(), rtol=1e-12, atol=1e-12)


def test_a_micro_batch_without_a_label_is_finite() -> None:
    def loss(o: Tensor, b: Any) -> Tensor:
        return F.cross_entropy(o, torch.where(b[1][:, 0] > -1e9, -100, b[1].argmax(-1)))

    captured, linear = small(loss, 2), model()
    values = {p.placeholder: linear.get_parameter(p.names[0]) for p in captured.parameters}
    part = {spec.placeholder: inputs(BATCH)[int(spec.path)][:4] for spec in captured.inputs}
    value, results = run_captured(captured, values, {}, part)
    assert value.item() == 0.0
    assert captured.accumulation is not None and captured.accumulation.count is not None
    assert results[captured.accumulation.count].item() == 0.0


REFUSED: dict[str, tuple[Loss, str]] = {
    "means of two kinds": (lambda o, b: F.cross_entropy(o, labels_of(b)) + 0.1 * (o**2).mean(), "several kinds"),
    "two counts": (
        lambda o, b: F.cross_entropy(o, labels_of(b)) + F.cross_entropy(o, b[1].argmax(-1)),
        "several kinds",
    ),
    "a mask": (lambda o, b: (o * (b[1] > 0)).sum() / (b[1] > 0).sum(), "div"),
    "class weights": (lambda o, b: F.cross_entropy(o, b[1].argmax(-1), weight=torch.ones(4).double()), "loss"),
    "a root": (lambda o, b: F.mse_loss(o, b[1]).sqrt(), "sqrt"),
    "batch squared": (lambda o, b: o.sum() * o.shape[0], "power 2"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_losses_that_do_not_add_up_are_refused(name: str) -> None:
    loss, said = REFUSED[name]
    with pytest.raises(BatchError, match=said):
        small(loss, 2)


def test_a_plan_is_for_its_number_of_micro_batches() -> None:
    captured = microbatch("vit", 2)
    plan = random_plan(captured, make_mesh((2,)), random.Random(0))
    other = replace(captured, accumulation=microbatch("vit", 4).accumulation)
    with pytest.raises(PlanMismatchError, match=r"2 micro-batches.*of 4"):
        plan.check(other)
    whole = one_stage(plan)
    assert plan_from_json(whole.to_json()) == whole
