"""What cannot be captured is refused in one sentence with the line at fault, and torch says nothing of its own."""

import inspect
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from autopar.capture import capture
from autopar.errors import CaptureError
from tests.as_eager import assert_as_eager

WIDTH = 8


class Net(nn.Module):
    def __init__(self, between: Callable[..., Tensor]) -> None:
        super().__init__()
        self.a = nn.Linear(WIDTH, WIDTH, dtype=torch.float64)
        self.between = between
        self.generator = torch.Generator()

    def forward(self, x: Tensor, n: Tensor, y: Tensor) -> Tensor:
        return F.mse_loss(self.between(self, self.a(x), n), y)


def inputs() -> dict[str, Tensor]:
    torch.manual_seed(0)
    x, y = torch.randn(2, 6, WIDTH, dtype=torch.float64)
    return {"x": x, "n": torch.ones(6, dtype=torch.int64), "y": y}


def repeated(own: Net, h: Tensor, n: Tensor) -> Tensor:
    return torch.repeat_interleave(h, n, dim=0)


def selected(own: Net, h: Tensor, n: Tensor) -> Tensor:
    return h[n > 0]


def own_generator(own: Net, h: Tensor, n: Tensor) -> Tensor:
    return h + torch.rand(h.shape, generator=own.generator, dtype=h.dtype)


def by_lengths(own: Net, h: Tensor, n: Tensor) -> Tensor:
    return h + F.ctc_loss(h[:, None].log_softmax(-1), n[None, :2], torch.tensor([6]), torch.tensor([2]))


def cut(own: Net, h: Tensor, n: Tensor) -> Tensor:
    return repeated(own, h, n)[:6]


def doubled(own: Net, h: Tensor, n: Tensor) -> Tensor:
    found = selected(own, h, n)
    return found * 2 if found.shape[0] > 3 else h


@pytest.mark.parametrize(
    ("between", "at", "what"),
    [
        (cut, repeated, "the data says how many places repeat_interleave gives"),
        (doubled, selected, "the data says how many places __getitem__ gives"),
        (by_lengths, by_lengths, "sizes inside ctc_loss depend on the values"),
        (own_generator, own_generator, "forward draws from a torch.Generator of its own"),
    ],
)
def test_the_line_at_fault_is_named_and_nothing_else_is_said(
    between: Any, at: Any, what: str, capfd: pytest.CaptureFixture[str]
) -> None:
    line = inspect.getsourcelines(at)[1] + 1
    with pytest.raises(CaptureError, match=rf"test_typed_refusals\.py:{line}: {what}"):
        capture(Net(between), (), inputs())
    assert capfd.readouterr() == ("", "")


@pytest.mark.filterwarnings("ignore:`torch.jit.trace:DeprecationWarning")
def test_a_compiled_part_is_named() -> None:
    own = Net(lambda own, h, n: own.part(h))
    own.part = torch.jit.trace(nn.Linear(WIDTH, WIDTH, dtype=torch.float64), torch.ones(2, WIDTH, dtype=torch.float64))  # type: ignore[no-untyped-call]
    with pytest.raises(CaptureError, match=r"part is a torch\.jit\.ScriptModule \(Linear\)"):
        capture(own, (), inputs())


def test_repetitions_whose_number_later_calls_fix_are_captured_and_checked() -> None:
    captured = assert_as_eager(Net(repeated_to_six), inputs())
    call = next(node for node in captured.graph.nodes if "repeat_interleave" in str(node.target))
    assert call.kwargs["output_size"] == 6


def repeated_to_six(own: Net, h: Tensor, n: Tensor) -> Tensor:
    return repeated(own, h, n) + h
