"""`torch.autograd.grad` in forward is in the graph, and is differentiated by the step as eager does.

The oracle is the eager module: forces, gradient penalties, equations of physics, steps of learning inside.
"""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.autograd import grad
from torch.nn import functional as F

from autopar.capture import capture
from autopar.errors import CaptureError
from tests.as_eager import assert_as_eager, assert_shards_as_whole


class Energy(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(8, 16), nn.Linear(16, 1)
        self.layer, self.batch = nn.LayerNorm(16), nn.BatchNorm1d(16)
        self.bare = nn.BatchNorm1d(16, affine=False)
        self.conv, self.group = nn.Conv1d(1, 4, 3, padding=1, bias=False), nn.GroupNorm(2, 4)


Body = Callable[["Net", Tensor, Tensor, Tensor], Tensor]


class Net(nn.Module):
    """`body(self, x, self.linear(x), y)` is the loss."""

    def __init__(self, body: Body) -> None:
        super().__init__()
        self.linear, self.inner = nn.Linear(8, 8), Energy()
        self.body = [body]

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return self.body[0](self, x, self.linear(x), y)


def case(body: Body) -> tuple[Net, dict[str, Tensor]]:
    torch.manual_seed(0)
    return Net(body).double(), {"x": torch.randn(8, 8).double(), "y": torch.randn(8, 8).double()}


KEPT: dict[str, Body] = {}


def kept(body: Body) -> Body:
    KEPT[body.__name__] = body
    return body


def force(name: str, energy: Callable[[Energy, Tensor, Tensor], Tensor]) -> None:
    def body(net: Net, x: Tensor, h: Tensor, y: Tensor) -> Tensor:
        place = x.clone().requires_grad_()
        found = energy(net.inner, place, h)
        return F.mse_loss(-grad(found.sum(), place, create_graph=True)[0], y) + found.mean() + h.mean()

    KEPT[name] = body


def stopped(inner: Energy, x: Tensor, _: Tensor) -> Tensor:
    with torch.no_grad():
        weight = inner.first(x).exp()
    return inner.last(torch.tanh(inner.first(x)) * weight + torch.tanh(inner.first(x)).detach() * x.mean())


force("tanh", lambda e, x, h: e.last(torch.tanh(e.first(x)) * e.first(h).sigmoid()))
force("softmax", lambda e, x, h: e.last(e.first(x).softmax(-1)))
force("in_place", lambda e, x, h: e.last(F.relu_(e.first(x)) ** 2))
force("layer_norm", lambda e, x, h: e.last(F.gelu(e.layer(e.first(x)))))
force("batch_norm", lambda e, x, h: e.last(torch.tanh(e.batch(e.first(x)))))
force("convolution", lambda e, x, h: e.group(e.conv(x[:, None])).pow(3))
force(
    "indices",
    lambda e, x, h: e.last(torch.tanh(e.first(x)))[torch.tensor([0, 0, 3])] * (x[:3] - h[3:6]).norm(dim=-1)[:, None],
)
force("dropout_of_nothing", lambda e, x, h: e.last(F.dropout(torch.tanh(e.first(x)), 0.5, training=False)))
force("stops_inside", stopped)


@kept
def a_penalty(net: Net, x: Tensor, h: Tensor, y: Tensor) -> Tensor:
    between = (x + y).detach().requires_grad_()
    found = net.inner.last(F.leaky_relu(net.inner.first(between), 0.2))
    (slope,) = grad(found, between, torch.ones_like(found), create_graph=True, retain_graph=True)
    return found.mean() + 10 * (slope.norm(2, dim=1) - 1).pow(2).mean() + F.mse_loss(h, y)


@kept
def second_derivatives(net: Net, x: Tensor, h: Tensor, y: Tensor) -> Tensor:
    place = x.clone().requires_grad_()
    found = net.inner.last(torch.tanh(net.inner.first(place)))
    slope = grad(found.sum(), place, create_graph=True)[0]
    curvature = sum(grad(slope[:, i].sum(), place, create_graph=True)[0][:, i] for i in range(2))
    return (curvature + found[:, 0]).pow(2).mean() + h.mean()


@kept
def learns_inside(net: Net, x: Tensor, h: Tensor, y: Tensor) -> Tensor:
    weight = net.linear.weight
    for _ in range(2):
        (step,) = grad(F.mse_loss(torch.tanh(x[:4] @ weight.T), y[:4]), weight, create_graph=True)
        weight = weight - 0.1 * step
    return F.mse_loss(x[4:] @ weight.T, y[4:]) + h.mean()


@kept
def without_a_graph(net: Net, x: Tensor, h: Tensor, y: Tensor) -> Tensor:
    (slope,) = grad(torch.tanh(h).pow(2).sum(), h, retain_graph=True)
    place = x.clone().requires_grad_()
    (attack,) = grad(F.mse_loss(torch.tanh(net.linear(place)), y), [place])
    return (h * slope).mean() + F.mse_loss(torch.tanh(net.linear(x + 0.1 * attack.sign())), y)


@kept
def an_input_that_is_not_used(_: Net, x: Tensor, h: Tensor, y: Tensor) -> Tensor:
    one, other = h.clone(), y.clone().requires_grad_()
    first, none = grad(one.pow(3).sum(), [one, other], create_graph=True, allow_unused=True)
    (zero,) = grad(one.sum(), other, allow_unused=True, materialize_grads=True)
    return F.mse_loss(first, y) + (0 if none is None else 1) + zero.sum() + h.mean()


@kept
def a_jacobian(net: Net, x: Tensor, h: Tensor, y: Tensor) -> Tensor:
    found = torch.autograd.functional.jacobian(lambda z: torch.tanh(net.linear(z)).sum(0), x[:2], create_graph=True)
    return found.pow(2).mean() + F.mse_loss(h, y)


@pytest.mark.parametrize("name", KEPT)
def test_captured_is_eager(name: str) -> None:
    assert_as_eager(*case(KEPT[name]))


@pytest.mark.parametrize("name", ["tanh", "a_penalty"])
def test_shards_have_the_same_gradients(name: str) -> None:
    model, inputs = case(KEPT[name])
    assert_shards_as_whole(capture(model, (), inputs), model, inputs)


def with_noise(net: Net, x: Tensor, h: Tensor, y: Tensor) -> Tensor:
    place = x.clone().requires_grad_()
    return grad(F.dropout(net.linear(place), 0.5).pow(2).sum(), place, create_graph=True)[0].mean() + h.mean()


def into_a_part(net: Net, x: Tensor, h: Tensor, y: Tensor) -> Tensor:
    place = x.clone().requires_grad_()
    whole = torch.zeros(8, 8, dtype=x.dtype)
    whole += net.linear(place).pow(2)
    return grad(whole.sum(), place, create_graph=True)[0].mean() + h.mean()


@pytest.mark.parametrize(("body", "why"), [(with_noise, "random numbers"), (into_a_part, "in-place")])
def test_what_cannot_be_repeated_is_refused(body: Body, why: str) -> None:
    model, inputs = case(body)
    with pytest.raises(CaptureError, match=rf"test_inner_gradients\.py:\d+: .*{why}"):
        capture(model, (), inputs)
