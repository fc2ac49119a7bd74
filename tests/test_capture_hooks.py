"""Hooks are in the graph: those of forward as they run, those on gradients as a node's backward; or an error."""

import inspect
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.modules.module import register_module_forward_hook

from autopar.api.captures import captured_model
from autopar.capture import capture
from autopar.errors import BatchError, CaptureError
from autopar.values.calls import call_of
from tests.as_eager import assert_as_eager, assert_shards_as_whole

WIDTH = 16


class Net(nn.Module):
    """Linear layers with a value in the middle that hooks may look at."""

    def __init__(self, middle: Callable[[Tensor], Any] = lambda h: None) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.register_buffer("mask", (torch.rand(WIDTH, WIDTH) < 0.5).double())
        self.middle = middle
        self.seen: list[Any] = []

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        h = torch.relu(self.a(torch.tanh(self.b(x))))
        early = h.sum()
        self.middle(h)
        return F.mse_loss(self.b(h * h), y) + 1e-3 * early


def inputs() -> dict[str, Tensor]:
    torch.manual_seed(0)
    return {"x": torch.randn(8, WIDTH, dtype=torch.float64), "y": torch.randn(8, WIDTH, dtype=torch.float64)}


def net(middle: Callable[[Tensor], Any] = lambda h: None) -> Net:
    torch.manual_seed(1)
    return Net(middle).double()


def forward_hooks(own: Net) -> None:
    own.a.register_forward_pre_hook(lambda m, a, k: ((a[0] * 2,), k), with_kwargs=True)
    own.b.register_forward_hook(lambda m, a, k, out: out + 1, with_kwargs=True, always_call=True)


def parameter_hooks(own: Net) -> None:
    scattered = (torch.rand(WIDTH, WIDTH) < 0.5).double()
    own.a.weight.register_hook(lambda g: g * own.mask)  # type: ignore[no-untyped-call]
    own.a.weight.register_hook(lambda g: g * scattered + 1)  # type: ignore[no-untyped-call]
    own.b.weight.register_hook(lambda g: g.clamp(-0.01, 0.01))  # type: ignore[no-untyped-call]
    own.b.bias.register_hook(lambda g: g / (g.norm() + 1))  # type: ignore[no-untyped-call]


def two_hooks(h: Tensor) -> None:
    h.register_hook(lambda g: g + 0.01)  # type: ignore[no-untyped-call]
    h.register_hook(lambda g: g * 2)  # type: ignore[no-untyped-call]


KEPT: dict[str, Callable[[], Net]] = {
    "forward": lambda: _with(net(), forward_hooks),
    "parameter": lambda: _with(net(), parameter_hooks),
    "tensor": lambda: net(two_hooks),
}


def _with(own: Net, register: Callable[[Net], None]) -> Net:
    register(own)
    return own


@pytest.mark.parametrize("kind", KEPT)
def test_hooks_that_compute_are_kept_whole_and_in_shards(kind: str) -> None:
    own = KEPT[kind]()
    captured = assert_as_eager(own, inputs())
    assert_shards_as_whole(captured, own, inputs())


class Chain(nn.Module):
    """Modules whose inputs all carry gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.a, self.b = (nn.Linear(WIDTH, WIDTH) for _ in range(3))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return F.mse_loss(self.b(torch.relu(self.a(self.first(x)))), y)


def test_full_backward_hooks_are_kept_whole_and_in_shards() -> None:
    torch.manual_seed(1)
    own = Chain().double()
    own.a.register_full_backward_hook(lambda m, gi, go: tuple(g * 3 for g in gi))
    own.b.register_full_backward_pre_hook(lambda m, go: tuple(g * 2 for g in go))
    clipped: Any = lambda m, gi, go: (gi[0].clamp(-1e-3, 1e-3),)  # noqa: E731
    own.b.register_full_backward_hook(clipped)
    captured = assert_as_eager(own, inputs())
    assert_shards_as_whole(captured, own, inputs())


def test_global_hooks_run() -> None:
    handle = register_module_forward_hook(lambda m, args, out: out * 2 if isinstance(m, nn.Linear) else None)
    try:
        assert_as_eager(net(), inputs())
    finally:
        handle.remove()


def test_parameters_hooks_outlive_a_change_of_precision() -> None:
    own = net()
    own.a.weight.register_hook(lambda g: g * 0.5)  # type: ignore[no-untyped-call]
    captured, _ = captured_model(own, call_of(inputs()), "fp32")
    assert any("hooked" in node.name for node in captured.graph.nodes)


def test_observers_of_forward_run_once_in_a_trace_and_leave_nothing() -> None:
    own, outside = net(), list[Any]()
    own.a.register_forward_hook(lambda m, args, out: own.seen.append(out))
    own.a.register_forward_hook(lambda m, args, out: outside.append(out))
    capture(own, (), inputs())
    assert own.seen == outside == []


def reads_a_value(h: Tensor) -> None:
    h.register_hook(lambda g: g * 2 if g.norm() > 1 else g)  # type: ignore[no-untyped-call]


def reads_forward(h: Tensor) -> None:
    h.register_hook(lambda g: g * h)  # type: ignore[no-untyped-call]


def looks(h: Tensor) -> None:
    h.register_hook(lambda g: print(g.shape))  # type: ignore[no-untyped-call]


def keeps(h: Tensor) -> None:
    found: list[Any] = []
    h.register_hook(lambda g: found.append(g))  # type: ignore[no-untyped-call]


def writes(h: Tensor) -> None:
    h.register_hook(lambda g: g.mul_(2))  # type: ignore[no-untyped-call]


def draws(h: Tensor) -> None:
    h.register_hook(lambda g: g + torch.randn_like(g))  # type: ignore[no-untyped-call]


@pytest.mark.parametrize(
    ("middle", "line", "why"),
    [
        (reads_a_value, 1, "plain function"),
        (reads_forward, 1, "reads a tensor that forward made"),
        (looks, 1, "only looks"),
        (keeps, 2, "writes down"),
        (writes, 1, "writes into the gradient"),
        (draws, 1, "random"),
    ],
)
def test_hooks_that_are_no_function_of_the_gradient_are_refused_by_their_line(middle: Any, line: int, why: str) -> None:
    at = inspect.getsourcelines(middle)[1] + line
    with pytest.raises(CaptureError, match=rf"test_capture_hooks\.py:{at}: the hook .*{why}"):
        capture(net(middle), (), inputs())


def old_hook(own: Net) -> None:
    own.a.register_backward_hook(lambda m, gi, go: None)  # type: ignore[arg-type, return-value]


def after_hook(own: Net) -> None:
    own.a.weight.register_post_accumulate_grad_hook(lambda p: None)  # type: ignore[no-untyped-call]


@pytest.mark.parametrize(("register", "why"), [(old_hook, "old kind"), (after_hook, "post-accumulate-grad")])
def test_hooks_that_a_plan_cannot_run_are_refused_by_their_line(register: Any, why: str) -> None:
    at = inspect.getsourcelines(register)[1] + 1
    with pytest.raises(CaptureError, match=rf"test_capture_hooks\.py:{at}: the hook .*{why}"):
        capture(_with(net(), register), (), inputs())


def test_a_hook_on_gradients_of_outputs_is_refused() -> None:
    torch.manual_seed(1)
    own = Chain().double()
    doubled: Any = lambda m, gi, go: (go[0] * 2,)  # noqa: E731
    own.a.register_full_backward_hook(doubled)
    with pytest.raises(CaptureError, match="reads gradients of its module's outputs"):
        capture(own, (), inputs())


def test_a_hook_that_is_not_linear_sees_no_part_of_a_batch() -> None:
    own = net()
    own.b.weight.register_hook(lambda g: g.clamp(-0.01, 0.01))  # type: ignore[no-untyped-call]
    with pytest.raises(BatchError, match="hooked"):
        captured_model(own, call_of(inputs()), "fp64", microbatches=2)
