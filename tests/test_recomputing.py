"""An `autograd.Function` that is given modules is traced where its backward is the gradient of its forward."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from autopar.capture import capture
from autopar.errors import CaptureError
from tests.as_eager import assert_as_eager


class Halves(nn.Module):
    """A reversible layer, which keeps no activations."""

    def __init__(self, drop: float = 0.0) -> None:
        super().__init__()
        self.f = nn.Sequential(nn.Linear(4, 4), nn.Tanh())
        self.g = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        one, other = x.chunk(2, 1)
        with torch.no_grad():
            first = one + self.f(other)
            second = other + self.g(first)
        return torch.cat([first, second], 1)

    def back(self, y: Tensor, gradient: Tensor) -> tuple[Tensor, Tensor]:
        (first, second), (d_first, d_second) = y.chunk(2, 1), gradient.chunk(2, 1)
        with torch.enable_grad():
            first = first.detach().requires_grad_()
            added = self.g(first)
            torch.autograd.backward(added, d_second)  # type: ignore[no-untyped-call]
        assert first.grad is not None
        with torch.no_grad():
            other, d_first = second - added, d_first + first.grad
        with torch.enable_grad():
            other = other.detach().requires_grad_()
            added = self.f(other)
            torch.autograd.backward(added, d_first)  # type: ignore[no-untyped-call]
        assert other.grad is not None
        return torch.cat([first - added, other], 1).detach(), torch.cat([d_first, d_second + other.grad], 1)


class Reversed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, layers: nn.ModuleList, options: dict[str, Any]) -> Tensor:
        for layer in layers:
            x = layer(x)
        ctx.y, ctx.layers = x.detach(), layers
        return x

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        y = ctx.y
        for layer in reversed(list(ctx.layers)):
            y, gradient = layer.back(y, gradient)
        return gradient, None, None


class Again(torch.autograd.Function):
    """A checkpoint, whose parameters are operands."""

    @staticmethod
    def forward(ctx: Any, run: Callable[[Tensor], Tensor], x: Tensor, *parameters: Tensor) -> Tensor:
        ctx.run = run
        ctx.save_for_backward(x, *parameters)
        with torch.no_grad():
            return run(x.detach())

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        x, *parameters = ctx.saved_tensors
        with torch.enable_grad():
            x = x.detach().requires_grad_()
            gradients = torch.autograd.grad(ctx.run(x), [x, *parameters], gradient)
        return None, *gradients


class Doubled(Again):
    """Not the gradient of its forward."""

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return Again.backward(ctx, 2 * gradient)


class Net(nn.Module):
    def __init__(self, body: Callable[["Net", Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.linear, self.inner = nn.Linear(8, 8), nn.Sequential(nn.Linear(8, 8), nn.Tanh())
        self.layers = nn.ModuleList(Halves() for _ in range(2))
        self.body = [body]

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return F.mse_loss(self.body[0](self, x, self.linear(x)), y)


def reversible(net: Net, _: Tensor, h: Tensor) -> Tensor:
    return Reversed.apply(h, net.layers, {})  # type: ignore[no-any-return,no-untyped-call]


def checkpointed(net: Net, _: Tensor, h: Tensor) -> Tensor:
    return Again.apply(net.inner, h, *net.inner.parameters())  # type: ignore[no-any-return,no-untyped-call]


def by_a_method(net: Net, _: Tensor, h: Tensor) -> Tensor:
    return Again.apply(net.inner.forward, h, *net.inner.parameters())  # type: ignore[no-any-return,no-untyped-call]


def doubled(net: Net, _: Tensor, h: Tensor) -> Tensor:
    return Doubled.apply(net.inner, h, *net.inner.parameters())  # type: ignore[no-any-return,no-untyped-call]


def of_an_input(net: Net, x: Tensor, h: Tensor) -> Tensor:
    """No operand has a gradient, so that the layers get none in eager."""
    return h + Reversed.apply(x, net.layers, {})  # type: ignore[no-any-return,no-untyped-call]


def case(body: Callable[[Net, Tensor, Tensor], Tensor]) -> tuple[Net, dict[str, Tensor]]:
    torch.manual_seed(0)
    return Net(body).double(), {"x": torch.randn(8, 8).double(), "y": torch.randn(8, 8).double()}


@pytest.mark.parametrize("body", [reversible, checkpointed, by_a_method])
def test_captured_is_eager(body: Any) -> None:
    assert_as_eager(*case(body))


@pytest.mark.parametrize("body", [doubled, of_an_input])
def test_another_backward_is_refused(body: Any) -> None:
    model, inputs = case(body)
    with pytest.raises(CaptureError, match=r"test_recomputing\.py:\d+: .* is not what autograd makes"):
        capture(model, (), inputs)


def test_a_comparison_leaves_nothing_behind() -> None:
    model, inputs = case(reversible)
    values = {name: value.clone() for name, value in model.state_dict().items()}
    draws = torch.get_rng_state()
    capture(model, (), inputs)
    assert torch.equal(torch.get_rng_state(), draws)
    assert all(torch.equal(value, model.state_dict()[name]) for name, value in values.items())
    assert all(parameter.grad is None for parameter in model.parameters())
