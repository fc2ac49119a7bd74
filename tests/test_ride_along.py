"""The loss and the count of its labels go along with gradients: one message less or two, nothing else changes."""

from collections.abc import Callable
from dataclasses import replace
from math import nan, prod
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import tests.runtime_cases as cases
from autopar.capture import capture
from autopar.graph import CapturedModel, Rider
from autopar.mesh import make_mesh
from autopar.ops import collectives
from autopar.passes import ride_along
from autopar.passes.insert_collectives import insert_collectives
from autopar.passes.predict import predicted_messages
from autopar.passes.ride_along import countable_rows
from autopar.placement import INVARIANT, PARTIAL, REPLICATE, Layout
from autopar.plan import Plan, TrainConfig, Way
from autopar.rules.registry import rule_of
from autopar.rules.rule import choices
from autopar.runtime import count_messages
from autopar.search.known.baselines import make_baseline
from tests.process_group import ranks
from tests.search_cases import machine


def in_a_bucket(plan: Plan) -> Plan:
    """All trained parameters in one, those alone that are split if any are."""
    names = tuple(spec.placeholder for spec in cases.captured().parameters if spec.trainable)
    split = tuple(name for name in names if plan.layouts[name].sharded_dims())
    return replace(plan, buckets=(split or names,))


def data_parallel(shape: tuple[int, ...], stored: str = "whole", lifetime: str = "use") -> Plan:
    """stored: whole, split, or whole with gradients that are summed level by level, over the last axis first, and the
    loss over one axis after the other."""
    plan = in_a_bucket(cases.data_parallel(shape, "whole" if stored == "levels" else stored, lifetime))
    if stored != "levels":
        return plan
    wholes, copies = (Layout((one,) * len(shape)) for one in (INVARIANT, REPLICATE))
    way = Way(path=(wholes, copies), inside=plan.mesh.names[-1:])
    sums = tuple(Layout(axes) for axes in ((PARTIAL, PARTIAL), (INVARIANT, PARTIAL), (INVARIANT, INVARIANT)))
    routes = {**plan.routes, cases.captured().loss: (sums,)}
    return replace(plan, ways=dict.fromkeys(plan.buckets[0], way), routes=routes)


def ignored(data: dict[str, Tensor], kind: str) -> dict[str, Tensor]:
    """The batch with some labels ignored."""
    rows = len(data["labels"])
    if kind == "unevenly":
        for row in range(rows):
            data["labels"][row, : row * 3 // rows] = -100
    elif kind == "of one rank":
        data["labels"][rows // 2 :] = -100
    elif kind == "all":
        data["labels"][:] = -100
    return data


def one_process(data: dict[str, Tensor]) -> tuple[float, dict[str, Tensor]]:
    model = cases.words()
    loss = model(**data)["loss"]
    loss.backward()
    return float(loss.detach()), {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def step(
    plan: Plan, data: dict[str, Tensor], steps: int, cleared_by: int | None = None
) -> tuple[float, dict[str, Tensor], list[str]]:
    """Loss and gradients after some steps on the same batch, and of each whether it sent what rides or all alone.

    cleared_by: the rank that alone forgets its gradients between steps.
    """
    module = cases.distributed(plan)
    riding, alone = (predicted_messages(module.local, by_processor=by_processor) for by_processor in (True, False))
    kinds = []
    for _ in range(steps):
        module.num_calls = 0
        with count_messages(module) as sent:
            loss = float(module.train_step(data))
        if cleared_by == torch.distributed.get_rank() and len(kinds) < steps - 1:
            module.zero_grad()
        kinds.append("riding" if sent == riding else "alone" if sent == alone else f"{sent}")
    gradients = {name: cases.whole(p.grad) for name, p in module.named_parameters() if p.grad is not None}
    return loss, gradients, kinds


SHAPES = [
    ((2,), "whole"),
    ((2, 2), "whole"),
    ((2,), "split"),
    ((2, 2), "split"),
    ((2, 2), "levels"),
    ((2, 4), "levels"),
]


@pytest.mark.parametrize(("shape", "stored"), SHAPES)
@pytest.mark.parametrize("kind", ["none", "unevenly", "of one rank"])
def test_a_step_is_that_of_one_process(shape: tuple[int, ...], stored: str, kind: str) -> None:
    data = ignored(cases.batch(1), kind)
    loss, gradients = one_process(data)
    for got, found, kinds in ranks(prod(shape)).run(step, data_parallel(shape, stored), data, 1):
        assert kinds == ["riding"]
        assert got == pytest.approx(loss, rel=1e-12)
        for name, gradient in gradients.items():
            torch.testing.assert_close(found[name], gradient, rtol=1e-10, atol=1e-12, msg=name)


@pytest.mark.parametrize(("shape", "stored"), [((2,), "whole"), ((2,), "split"), ((2, 2), "levels")])
def test_a_step_that_adds_to_gradients_scales_its_own_alone(shape: tuple[int, ...], stored: str) -> None:
    data = ignored(cases.batch(1), "unevenly")
    loss, gradients = one_process(data)
    for got, found, kinds in ranks(prod(shape)).run(step, data_parallel(shape, stored), data, 3):
        assert kinds == ["riding"] * 3
        assert got == pytest.approx(loss, rel=1e-12)
        for name, gradient in gradients.items():
            torch.testing.assert_close(found[name], 3 * gradient, rtol=1e-10, atol=1e-12, msg=name)


def test_ranks_that_begin_with_other_gradients_send_the_same() -> None:
    data = ignored(cases.batch(1), "unevenly")
    loss, gradients = one_process(data)
    for rank, (got, found, kinds) in enumerate(ranks(2).run(step, data_parallel((2,)), data, 2, 1)):
        assert kinds == ["riding"] * 2 and got == pytest.approx(loss, rel=1e-12)
        for name, gradient in gradients.items():
            times = 1 if rank == 1 else 2
            torch.testing.assert_close(found[name], times * gradient, rtol=1e-10, atol=1e-12, msg=name)


def test_where_every_label_is_ignored_loss_and_gradients_are_those_of_one_process() -> None:
    data = ignored(cases.batch(1), "all")
    loss, gradients = one_process(data)
    for got, found, _ in ranks(2).run(step, data_parallel((2,)), data, 1):
        assert [got] == pytest.approx([loss], nan_ok=True) and [got] == pytest.approx([nan], nan_ok=True)
        for name, gradient in gradients.items():
            torch.testing.assert_close(found[name], gradient, msg=name)


def begun_in(plan: Plan) -> list[int]:
    """Elements of the all-reduces of a step as they begin."""
    module, data = cases.distributed(plan), cases.batch(0)
    begun: list[int] = []
    run = torch.distributed.all_reduce

    def noted(x: Tensor, **keywords: Any) -> Any:
        begun.append(x.numel())
        return run(x, **keywords)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.distributed, "all_reduce", noted)
        module.train_step(data)
    return begun


def test_the_loss_and_the_count_are_at_the_end_of_the_gradients() -> None:
    """Before them batch norm sends its own, nothing is of one element."""
    gradients = sum(prod(spec.shape) for spec in cases.captured().parameters if spec.trainable)
    for begun in ranks(2).run(begun_in, data_parallel((2,))):
        assert begun[-1] == gradients + 2 and 1 not in begun


@pytest.mark.parametrize("shape", [(2, 2), (2, 4)])
def test_what_goes_level_by_level_carries_both_through_every_level(shape: tuple[int, ...]) -> None:
    """As a part of their own, padded as every gradient is."""
    plan = data_parallel(shape, "levels")
    own = insert_collectives(cases.captured(), plan).rider
    assert own is not None and own.inside == plan.mesh.names[1:] and own.rows == cases.BATCH * cases.LENGTH
    parts = [-(-prod(spec.shape) // shape[1]) for spec in cases.captured().parameters if spec.trainable]
    for begun in ranks(prod(shape)).run(begun_in, plan):
        assert begun[-1] == sum(parts) + -(-2 // shape[1]) and 1 not in begun


def scattered_in(plan: Plan) -> tuple[list[int], list[str]]:
    """Elements of the reduce-scatters of a step as they begin, and what it sends beside."""
    module, data = cases.distributed(plan), cases.batch(0)
    begun: list[int] = []
    run = collectives.run_reduce_scatter

    def noted(out: Tensor, rows: Tensor, **keywords: Any) -> Any:
        begun.append(rows.numel())
        return run(out, rows, **keywords)

    with pytest.MonkeyPatch.context() as patch, count_messages(module) as sent:
        patch.setattr(collectives, "run_reduce_scatter", noted)
        module.train_step(data)
    return begun, [kind for kind, _ in sent]


@pytest.mark.parametrize("lifetime", ["use", "microbatch", "step"])
def test_scattered_gradients_carry_both_to_every_rank(lifetime: str) -> None:
    plan = data_parallel((2,), "split", lifetime)
    own = insert_collectives(cases.captured(), plan).rider
    assert own is not None and own.scatters and own.rows == cases.BATCH * cases.LENGTH
    alone = ranks(2).run(scattered_in, replace(plan, buckets=()))
    for (begun, kinds), (each, all_kinds) in zip(ranks(2).run(scattered_in, plan), alone, strict=True):
        assert sum(begun) == sum(each) + 2 * 2  # both in both ranks' rows
        assert len(begun) < len(each) and set(kinds) == set(all_kinds)


def failing(plan: Plan) -> list[str]:
    """A step that fails on the way leaves nothing of itself."""
    module, data = cases.distributed(plan), cases.batch(1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(type(module), "_call", lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            module.train_step(data)
    losses = [module(**data).item()]  # the count is sent where it is needed
    losses.append(float(module.train_step(data)))
    assert losses[0] == pytest.approx(losses[1], rel=1e-12)
    return ["done"]


def test_a_call_after_a_step_that_failed() -> None:
    assert ranks(2).run(failing, data_parallel((2,))) == [["done"]] * 2


class Head(nn.Module):
    """Rows to classes, and a loss of them."""

    def __init__(self, loss: Callable[[Tensor, Tensor], Tensor], dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 4, dtype=dtype)
        self.loss = loss

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        return self.loss(self.linear(x), labels)


def head(loss: Callable[[Tensor, Tensor], Tensor], dtype: torch.dtype = torch.float32) -> CapturedModel:
    inputs = {"x": torch.ones(8, 8, dtype=dtype), "labels": torch.zeros(8, dtype=torch.int64)}
    return capture(Head(loss, dtype), (), inputs)


def rider(captured: CapturedModel, *, buckets: bool = True) -> Rider | None:
    """Of plain data parallelism."""
    plan = make_baseline("ddp", captured, machine(2), make_mesh((2,)), TrainConfig())
    names = tuple(spec.placeholder for spec in captured.parameters)
    return insert_collectives(captured, replace(plan, buckets=(names,) if buckets else ())).rider


def mean(x: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(x, labels)


LOSSES: dict[str, tuple[Callable[[Tensor, Tensor], Tensor], float | None]] = {
    "a mean": (mean, 8.0),
    "a multiple": (lambda x, labels: -3 * mean(x, labels) / 7, 8.0),
    "two over the same labels": (lambda x, labels: mean(x, labels) + 2 * mean(2 * x, labels), 8.0),
    "two over other labels": (lambda x, labels: mean(x, labels) + F.cross_entropy(x, labels, ignore_index=1), None),
    "a mean of another kind beside": (lambda x, labels: mean(x, labels) + x.square().mean(), None),
    "not linear": (lambda x, labels: mean(x, labels).square(), None),
    "its logarithm": (lambda x, labels: mean(x, labels).log(), None),
    "a mean over all elements": (lambda x, _: x.square().mean(), None),
    "a sum": (lambda x, labels: F.cross_entropy(x, labels, reduction="sum"), None),
}


@pytest.mark.parametrize("kind", LOSSES)
def test_the_count_goes_along_only_if_every_gradient_is_divided_by_it(kind: str) -> None:
    loss, rows = LOSSES[kind]
    assert countable_rows(head(loss)) == rows


def test_a_loss_that_is_a_sum_over_ranks_goes_along() -> None:
    names = "p_linear_weight", "p_linear_bias"
    assert rider(head(mean)) in [Rider(bucket=name, scatters=False, rows=8.0) for name in names]
    summed = rider(head(LOSSES["a sum"][0]))
    assert summed in [Rider(bucket=name, scatters=False, rows=None) for name in names]
    assert rider(head(LOSSES["its logarithm"][0])) is None


@pytest.mark.parametrize("whole", [0, 1])
def test_a_mean_that_no_rank_shares_keeps_the_count_behind(whole: int) -> None:
    """It is divided by the count where it is computed, and must not be scaled too."""
    captured = head(lambda x, labels: mean(x, labels) + mean(2 * x, labels))
    plan = make_baseline("ddp", captured, machine(2), make_mesh((2,)), TrainConfig())
    names = tuple(spec.placeholder for spec in captured.parameters)
    losses = [name for name in plan.choices if name.startswith("cross_entropy")]
    summands = next(c.name for c in choices(rule_of(captured.nodes[captured.loss])) if c.results == (PARTIAL,))
    rows = {name: plan.choices[name] for name in losses}
    both = replace(plan, buckets=(names,), choices={**plan.choices, captured.loss: (summands,)})
    one = replace(both, choices={**both.choices, **rows, losses[whole]: ("replicate",)})
    found = [insert_collectives(captured, made).rider for made in (both, one)]
    assert [own and own.rows for own in found] == [8, None]


def test_gradients_that_may_be_too_small_for_float16_are_not_scaled() -> None:
    assert countable_rows(head(lambda x, labels: mean(x.float(), labels), torch.float16)) is None


def test_nothing_goes_along_without_a_bucket_of_gradients_of_its_dtype() -> None:
    assert rider(head(mean), buckets=False) is None
    assert rider(head(lambda x, labels: mean(x.float(), labels), torch.bfloat16)) is None
    assert rider(head(mean, torch.bfloat16)) is None
    fsdp = make_baseline("fsdp", head(mean), machine(2), make_mesh((2,)), TrainConfig())
    assert insert_collectives(head(mean), fsdp).rider is None
    names = tuple(spec.placeholder for spec in head(mean).parameters)
    found = insert_collectives(head(mean), replace(fsdp, buckets=(names,))).rider
    assert found is not None and found.scatters and found.rows == 8


def test_a_count_that_float32_cannot_hold_stays_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ride_along, "MOST_ROWS", 7)
    found = rider(head(mean))
    assert found is not None and found.rows is None
    exact = rider(head(mean, torch.float64))
    assert exact is not None and exact.rows == 8
