"""Parameters that forward writes are state: later reads see the new value, the leaf has the gradient, it stays."""

import inspect
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from autopar.api.captures import captured_model
from autopar.capture import capture
from autopar.errors import ArgumentError, BatchError, CaptureError, PlanMismatchError
from autopar.passes.split_stages import split_stages
from autopar.values.calls import call_of
from tests.as_eager import assert_as_eager, assert_shards_as_whole
from tests.process_group import run_apart

WIDTH = 8


class Net(nn.Module):
    """Two layers, a scale, a teacher without gradients, and buffers; `between` writes into some of them."""

    def __init__(self, between: Callable[["Net", Tensor], Tensor]) -> None:
        super().__init__()
        self.a, self.b, self.teacher = (nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.scale = nn.Parameter(torch.tensor(3.0))
        self.embedding = nn.Embedding(5, WIDTH, max_norm=0.7)
        self.teacher.requires_grad_(False)
        self.register_buffer("mean", torch.zeros(WIDTH))
        self.register_buffer("queue", torch.randn(4, WIDTH), persistent=False)
        self.between = between

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return F.mse_loss(self.b(torch.sin(self.between(self, self.a(x)))), y)


def inputs() -> dict[str, Tensor]:
    torch.manual_seed(0)
    return {"x": torch.randn(8, WIDTH, dtype=torch.float64), "y": torch.randn(8, WIDTH, dtype=torch.float64)}


def net(between: Callable[[Net, Tensor], Tensor]) -> Net:
    torch.manual_seed(1)
    return Net(between).double()


def no_grad(own: Net, h: Tensor) -> Tensor:
    with torch.no_grad():
        own.scale.clamp_(max=1.0)
    return h * own.scale.exp()


def data_set(own: Net, h: Tensor) -> Tensor:
    own.scale.data = torch.clamp(own.scale.data, max=1.0)
    return h * own.scale.exp()


def data_in_place(own: Net, h: Tensor) -> Tensor:
    own.scale.data.clamp_(max=1.0)
    return h * own.scale.exp()


def held(own: Net, h: Tensor) -> Tensor:
    """The parameter under another name, and a view that was made before it is written."""
    weight, row = own.b.weight, own.b.weight.detach()[0]
    row.mul_(0.5)
    return h @ weight


def view(own: Net, h: Tensor) -> Tensor:
    with torch.no_grad():
        own.b.weight[1].mul_(0.5)
        own.b.weight[:, 0] = 0
    return h


def max_norm(own: Net, h: Tensor) -> Tensor:
    return h + own.embedding(torch.tensor([0, 2, 1, 2, 0, 3, 1, 1]))  # type: ignore[no-any-return]


def moving_average(own: Net, h: Tensor) -> Tensor:
    with torch.no_grad():
        for kept, new in zip(own.teacher.parameters(), own.a.parameters(), strict=True):
            kept.data.mul_(0.9).add_(new.data, alpha=0.1)
    return h + own.teacher(h).detach()  # type: ignore[no-any-return]


def moving_average_by_data(own: Net, h: Tensor) -> Tensor:
    before = own.teacher(h).detach()
    for kept, new in zip(own.teacher.parameters(), own.a.parameters(), strict=True):
        kept.data = kept.data * 0.9 + new.data * 0.1
    return h + before  # type: ignore[no-any-return]


def buffers(own: Net, h: Tensor) -> Tensor:
    own.mean.data.mul_(0.9).add_(h.detach().mean(0), alpha=0.1)
    own.mean = own.mean + 0.1
    with torch.no_grad():
        queue: Any = own.queue
        queue[0].mul_(0.9)
        own.queue[1:3] = h[:2]
        queue[3].copy_(h[0])
    return h - own.mean + own.queue.sum(0)


def hidden_value(own: Net, h: Tensor) -> Tensor:
    with torch.no_grad():
        h[:, :2] = 0
        h.clamp_(-0.5, 0.5)
    return h


KEPT = (
    no_grad,
    data_set,
    data_in_place,
    held,
    view,
    max_norm,
    moving_average,
    moving_average_by_data,
    buffers,
    hidden_value,
)


@pytest.mark.parametrize("between", KEPT, ids=lambda function: function.__name__)
def test_what_forward_writes_is_written_whole_and_in_shards(between: Any) -> None:
    own = net(between)
    before = [(name, id(p), p.detach().clone()) for name, p in own.named_parameters()]
    captured = assert_as_eager(own, inputs())
    assert all(id(own.get_parameter(name)) == known for name, known, _ in before)
    assert all(torch.equal(own.get_parameter(name), value) for name, _, value in before)
    assert_shards_as_whole(captured, own, inputs())


def tells_what_is_written(tell: Callable[[Any], None]) -> None:
    tell([spec.names[0] for spec in capture(net(buffers), (), inputs()).buffers if spec.mutated_by])


def test_data_of_a_buffer_does_not_end_the_process() -> None:
    assert run_apart(1, tells_what_is_written) == [(0, ["mean", "queue"])]


def other_shape(own: Net, h: Tensor) -> Tensor:
    own.scale.data = h.detach().mean(0)
    return h * own.scale


def part_of_hidden(own: Net, h: Tensor) -> Tensor:
    with torch.no_grad():
        h[:, :2].mul_(0.5)
    return h


def read_before(own: Net, h: Tensor) -> Tensor:
    before = h * own.scale
    own.scale.data.clamp_(max=1.0)
    return before


def inner_backward(own: Net, h: Tensor) -> Tensor:
    h.sum().backward(retain_graph=True)  # type: ignore[no-untyped-call]
    return h


@pytest.mark.parametrize(
    ("between", "line", "why"),
    [
        (other_shape, 1, "other sizes"),
        (part_of_hidden, 2, "part of a tensor"),
        (inner_backward, 1, "backward"),
        (read_before, 2, "before it writes"),
    ],
)
def test_what_cannot_be_written_is_refused_by_the_users_line(between: Any, line: int, why: str) -> None:
    at = inspect.getsourcelines(between)[1] + line
    with pytest.raises(CaptureError, match=rf"test_changed_parameters\.py:{at}: .*{why}"):
        capture(net(between), (), inputs())


def test_other_parameters_or_frozen_ones_are_refused() -> None:
    def replaced(own: Net, h: Tensor) -> Tensor:
        own.scale = nn.Parameter(own.scale.detach() * 2)
        return h * own.scale

    def frozen(own: Net, h: Tensor) -> Tensor:
        own.b.weight.requires_grad_(False)
        return h

    for between, why in ((replaced, "other parameters"), (frozen, "requires_grad")):
        own = net(between)
        with pytest.raises(CaptureError, match=why):
            capture(own, (), inputs())
        assert own.b.weight.requires_grad


def test_a_written_parameter_has_no_micro_batches_stages_or_master_weights() -> None:
    with pytest.raises(BatchError, match="writes the parameter scale"):
        captured_model(net(no_grad), call_of(inputs()), "fp64", microbatches=2)
    with pytest.raises(ArgumentError, match="mixed precision"):
        captured_model(net(no_grad), call_of(inputs()), "fp32-mixed")
    captured = capture(net(no_grad), (), inputs())
    with pytest.raises(PlanMismatchError, match="without pipeline stages"):
        split_stages(captured, (next(n.name for n in captured.graph.nodes if "sin" in n.name),))
