"""The module itself is the oracle: what a graph does otherwise is found, and the line that does it is named."""

import copy
import random
import re
import sys
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import autopar
from autopar.api.checked import check_call, first_samples, flops_of
from autopar.capture import capture
from autopar.errors import CaptureError, FidelityError
from autopar.oracle import Subject, check_module, module_steps, not_checkable, other_samples
from autopar.oracle.compare import relative_error
from autopar.oracle.unchanged import unchanged
from autopar.values.calls import Call
from autopar.values.graph import CapturedModel

WIDTH, ROWS = 6, 4


class Net(nn.Module):
    mean: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.register_buffer("mean", torch.zeros(WIDTH))
        self.calls = 0
        self.seen: list[int] = []

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        hidden = torch.tanh(self.first(x))
        with torch.no_grad():
            self.mean.mul_(0.9).add_(hidden.mean(0), alpha=0.1)
        hidden = F.dropout(hidden + self.mean, 0.2)
        return F.mse_loss(self.second(hidden), y)


def net(kind: type[Net] = Net) -> tuple[Net, dict[str, Tensor]]:
    torch.manual_seed(0)
    return kind().double(), {name: torch.randn(ROWS, WIDTH, dtype=torch.float64) for name in "xy"}


def subject(model: nn.Module, kwargs: Mapping[str, Tensor], captured: CapturedModel | None = None) -> Subject:
    return Subject(model=model, captured=captured or capture(model, (), kwargs), args=(), kwargs=kwargs)


def test_a_captured_graph_is_the_module_step_after_step() -> None:
    """Noise, a buffer that is carried on, other samples a step: nothing differs, and each step is another."""
    model, kwargs = net()
    checked = check_module(subject(model, kwargs), 3)
    assert max(d.error for d in checked.differences) < 1e-12
    losses = [float(step.loss) for step in checked.steps]
    assert len(set(losses)) == 3
    assert not torch.equal(checked.steps[0].state["mean"], checked.steps[1].state["mean"])


def test_the_steps_are_those_of_a_copy_that_is_trained_so() -> None:
    model, kwargs = net()
    own = subject(model, kwargs)
    steps, twin = module_steps(model, own.captured, own.calls(2)), copy.deepcopy(model)
    for number, (_, given) in enumerate(own.calls(2)):
        torch.manual_seed(20_240_229 + number)
        loss = twin(**given)
        loss.backward()
        torch.testing.assert_close(steps[number].loss, loss.detach(), rtol=0, atol=0)
        torch.testing.assert_close(steps[number].gradients["first.weight"], twin.first.weight.grad, rtol=0, atol=0)
        torch.testing.assert_close(steps[number].state["mean"], twin.mean, rtol=0, atol=0)
        twin.zero_grad()


class ScaledOut(Net):
    """Two lines of a user, one of which a graph may have otherwise."""

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        hidden = torch.tanh(self.first(x))
        hidden = torch.sigmoid(hidden)  # the line that is changed
        return F.mse_loss(self.second(hidden), y)


def changed(captured: CapturedModel, name: str, target: Any) -> CapturedModel:
    for node in captured.graph.nodes:
        if name in str(node.target):
            node.target = target
    return replace(captured)


class HalfGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return torch.sigmoid(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        return gradients[0] * 0.5


def half_gradient(x: Tensor) -> Tensor:
    result: Tensor = HalfGradient.apply(x)
    return result


@pytest.mark.parametrize(
    ("target", "said"),
    [(torch.ops.aten.cos.default, "the first value"), (half_gradient, "the first gradient")],
)
def test_what_differs_is_named_with_the_users_line(target: Callable[..., Any], said: str) -> None:
    model, kwargs = net(ScaledOut)
    own = subject(model, kwargs)
    with pytest.raises(FidelityError, match=said) as caught:
        check_module(replace(own, captured=changed(own.captured, "sigmoid", target)))
    found = re.search(r"that of (\S+) at (\S+):(\d+)", str(caught.value))
    assert found is not None and found[2] == __file__
    lines = Path(__file__).read_text().splitlines()
    wanted = "the line that is changed" if "value" in said else "torch.tanh(self.first(x))"
    assert wanted in lines[int(found[3]) - 1]


class Watched(Net):
    """A buffer that only tells what was."""

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        with torch.no_grad():
            self.mean.copy_(torch.exp(x.mean(0)))
        return F.mse_loss(torch.sigmoid(self.first(x)), y)


@pytest.mark.parametrize(
    ("name", "target", "said"),
    [
        ("sigmoid", torch.ops.aten.sin.default, "the loss is"),
        ("sigmoid", half_gradient, "the gradient of first"),
        ("exp", torch.ops.aten.sin.default, "mean after the step"),
    ],
)
def test_each_kind_of_difference_is_one(name: str, target: Callable[..., Any], said: str) -> None:
    model, kwargs = net(Watched)
    own = subject(model, kwargs)
    with pytest.raises(FidelityError, match=said):
        check_module(replace(own, captured=changed(own.captured, name, target)))


CALLS: list[int] = vars(sys).setdefault("counted_calls", [])


class Counting(Net):
    """It counts where tracing does not look: in a list of Python's own library."""

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        calls: list[int] = vars(sys)["counted_calls"]
        calls.append(1)
        return F.mse_loss(self.first(x), y) * len(calls)


def test_what_changes_from_call_to_call_is_said_to() -> None:
    model, kwargs = net(Counting)
    captured = capture(model, (), kwargs)
    scaled = len(CALLS)
    CALLS.clear()
    for node in captured.graph.nodes:  # the graph of the first call
        node.args = tuple(1 if type(arg) is int and arg == scaled else arg for arg in node.args)
    with pytest.raises(FidelityError, match="from call to call"):
        check_module(subject(model, kwargs, captured))


def test_a_module_is_left_as_it_was() -> None:
    model, kwargs = net(Counting)
    model.first.weight.grad = torch.ones(WIDTH, WIDTH, dtype=torch.float64)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    storage, grad = model.first.weight.data_ptr(), model.first.weight.grad
    generators = torch.get_rng_state(), random.getstate()
    with unchanged(model):
        model(**kwargs).backward()
        model.first.weight.data = torch.zeros(2, 2, dtype=torch.float64)
        model.mean.add_(1)
        model.calls, model.new = 7, 1  # type: ignore[assignment]
        model.second.requires_grad_(False)
        torch.rand(3), random.random()
    assert model.first.weight.grad is grad and model.first.weight.data_ptr() == storage
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert (model.calls, model.seen, hasattr(model, "new")) == (0, [], False)
    assert all(p.requires_grad for p in model.parameters())
    assert torch.equal(torch.get_rng_state(), generators[0]) and random.getstate() == generators[1]


def test_a_module_that_fails_by_itself_is_said_to_with_its_line() -> None:
    model, kwargs = net()
    captured = capture(model, (), kwargs)
    model.forward = lambda x, y: F.mse_loss(model.second(x[:, 1:]), y)  # type: ignore
    with pytest.raises(CaptureError, match=rf"{re.escape(__file__)}:\d+: Net itself fails"):
        check_module(subject(model, kwargs, captured))


def test_plan_compares_and_says_so_or_why_not() -> None:
    model, kwargs = net()
    options = {"cluster": "2xcpu", "with_baselines": False}
    made = autopar.plan(model, kwargs, **options)
    assert "compared with the module, fp64" in made.checked and made.checked in " ".join(str(made).split())
    unchecked = autopar.plan(model, kwargs, check=False, **options)
    assert "as was asked" in unchecked.checked
    with torch.device("meta"):
        on_meta = Net().double()
    assert "meta device" in autopar.plan(on_meta, kwargs, **options).checked
    assert "no values" in not_checkable(model, (), {name: value.to("meta") for name, value in kwargs.items()})


def test_a_large_call_is_compared_on_few_samples(monkeypatch: pytest.MonkeyPatch) -> None:
    model, kwargs = net()
    call = Call(kwargs=kwargs)
    monkeypatch.setattr("autopar.api.checked.FLOPS", flops_of(capture(model, (), kwargs)) / 2 + 1)
    told: list[str] = []
    assert f"on 2 of {ROWS} samples" in check_call(model, call, tell=told.append)[0]
    steps = [text.partition(": ")[2].partition(" (--no-check")[0] for text in told]
    assert steps == ["running", "capturing", "two calls, 2 samples"]
    monkeypatch.setattr("autopar.api.checked.FLOPS", 1.0)
    assert "one sample takes" in check_call(model, call)[0]
    assert first_samples(call, 2).batch() == 2


def test_other_samples_are_the_same_rows_of_every_input() -> None:
    rows = torch.arange(ROWS)
    calls = other_samples((rows, rows * 10), {"flag": True, "one": torch.tensor(3)}, 3)
    for args, kwargs in calls:
        assert torch.equal(args[0] * 10, args[1]) and kwargs == {"flag": True, "one": kwargs["one"]}
    assert len({tuple(args[0].tolist()) for args, _ in calls}) == 3
    uneven = other_samples((rows, rows[:2]), {}, 2)
    assert torch.equal(uneven[1][0][0], rows)


def test_relative_error() -> None:
    nan, one = torch.tensor([float("nan"), 2.0]), torch.tensor([1.0, 2.0])
    assert relative_error(nan, nan) == 0 and relative_error(one, one) == 0
    assert not relative_error(nan, one) <= 1e9
    assert relative_error(one, torch.tensor([1.0, 4.0])) == 0.5
    assert relative_error(one, one[:1]) == float("inf")
    assert relative_error(torch.zeros(1) + 1e-9, torch.zeros(1), floor=1.0) < 1e-8
    assert relative_error(torch.tensor([1j]), torch.tensor([1.0 + 0j])) > 1


MASKS: dict[int, Tensor] = {}


class Lazy(Net):
    """What forward makes at its first call: a buffer, a mask in a table of this file; and an input written in place."""

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        if not hasattr(self, "scale"):
            self.register_buffer("scale", torch.linspace(1, 2, WIDTH, dtype=x.dtype))
        if len(x) not in MASKS:
            MASKS[len(x)] = torch.ones(len(x), 1, dtype=x.dtype).tril()
        x.mul_(2)
        return F.mse_loss(self.first(x) * self.scale * MASKS[len(x)], y)


def test_what_forward_makes_at_its_first_call_leaves_model_inputs_and_process_alone() -> None:
    MASKS.clear()
    model, kwargs = net(Lazy)
    before = kwargs["x"].clone()
    assert "compared with the module" in check_call(model, Call(kwargs=kwargs))[0]
    assert not hasattr(model, "scale") and torch.equal(kwargs["x"], before)
    assert all(type(mask) is Tensor for mask in MASKS.values())
    assert float(model(**kwargs).detach()) > 0


class Grows(Net):
    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        if not hasattr(self, "extra"):
            self.extra = nn.Parameter(torch.ones(WIDTH, dtype=x.dtype))
        return F.mse_loss(self.first(x) * self.extra, y)


def test_a_parameter_that_forward_makes_is_refused() -> None:
    model, kwargs = net(Grows)
    with pytest.raises(CaptureError, match="makes the parameter 'extra'"):
        capture(model, (), kwargs)
    assert not hasattr(model, "extra")


class BeforeNorm(nn.Module):
    """The bias before a batch norm has no gradient in truth, in float32 what rounding leaves of one."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm, self.last = nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.Linear(8, 4)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return 100 * F.mse_loss(self.last(F.relu(self.norm(self.conv(x))).mean((2, 3))), y)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_gradient_that_is_rounding_alone_is_no_difference(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    model, kwargs = (
        BeforeNorm().to(dtype),
        {"x": torch.randn(8, 3, 9, 9, dtype=dtype), "y": torch.randn(8, 4, dtype=dtype)},
    )
    checked = check_module(subject(model, kwargs), 3)
    assert all(d.error < 1e-3 for d in checked.differences)
    (bias,) = (step.gradients["conv.bias"].abs().max() for step in checked.steps[:1])
    assert 0 < bias < 1e-5 * max(g.abs().max() for g in checked.steps[0].gradients.values())
