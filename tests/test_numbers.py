"""A number taken out of a tensor (`x.item()`) computes as in eager, and is refused where Python needs the number."""

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
    def __init__(self, between: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.a = nn.Linear(WIDTH, WIDTH, dtype=torch.float64)
        self.between = between

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return F.mse_loss(self.between(self.a(x)), y)


def inputs() -> dict[str, Tensor]:
    torch.manual_seed(0)
    return {"x": torch.randn(6, WIDTH, dtype=torch.float64), "y": torch.randn(6, WIDTH, dtype=torch.float64)}


def positive(h: Tensor) -> Tensor:
    return (h.detach() > 0).sum()


def arithmetic(h: Tensor) -> Tensor:
    mean, count = h.detach().abs().mean().item(), positive(h).item()
    share, rest = divmod(count, 7)
    total = sum([mean, count / 3, round(mean, 2), abs(-mean), mean**2, share, rest, count // 5, 2 - mean, 3 / mean])
    return h * total + (count > 3) * h


def widths(h: Tensor) -> Tensor:
    mean = h.detach().abs().mean().item()
    narrow, whole = h.float(), positive(h) + torch.arange(3)
    scaled, filled = narrow.sum() * mean, whole * mean + torch.tensor(mean)
    assert scaled.dtype == filled.dtype == torch.float32
    return h * (scaled.double() * filled.double().sum()).tanh()


def kinds(h: Tensor) -> Tensor:
    mean, count = h.detach().mean().item(), positive(h).item()
    return h * 2 if isinstance(mean, float) and isinstance(count, int) and mean is not None else h


def told(h: Tensor) -> Tensor:
    text = f"{h.detach().mean().item():.2f}"
    print(text)
    return h


def largest(h: Tensor) -> Tensor:
    return h * max(h.detach().mean().item(), 0.1)


def asserted_largest(h: Tensor) -> Tensor:
    assert max(h.detach().mean().item(), 0.1)
    return h


@pytest.mark.filterwarnings("ignore:To copy construct from a tensor")
@pytest.mark.parametrize("between", [arithmetic, widths, kinds, told, largest, asserted_largest])
def test_numbers_compute_as_in_eager(between: Any) -> None:
    assert_as_eager(Net(between), inputs())


def as_key(h: Tensor) -> Tensor:
    return h * {1: 2.0}.get(positive(h).item(), 3.0)


def in_tuple(h: Tensor) -> Tensor:
    return h * 2 if positive(h).item() in (1, 2) else h


def in_set(h: Tensor) -> Tensor:
    return h * 2 if positive(h).item() in {1, 2} else h


def in_list(h: Tensor) -> Tensor:
    return h * 2 if 1 in positive(h).reshape(1).tolist() else h


def hashed(h: Tensor) -> Tensor:
    return h * (1 + hash(positive(h).item()))


def identified(h: Tensor) -> Tensor:
    flag = (h.detach().sum() < 1e9).item()
    return h * 2 if flag is True else h


def of_type(h: Tensor) -> Tensor:
    return h * 2 if type(h.detach().mean().item()) is float else h


def matched(h: Tensor) -> Tensor:
    match positive(h).item():
        case 1:
            return h * 2
        case _:
            return h


def as_text(h: Tensor) -> Tensor:
    return h * {"1": 2.0}.get(f"{positive(h).item()}", 3.0)


def by_variable(h: Tensor) -> Tensor:
    name = str(positive(h).item())
    return h * {"1": 2.0}.get(name, 3.0)


def as_repr(h: Tensor) -> Tensor:
    return h * 2 if "1" in repr(positive(h)) else h


def as_int(h: Tensor) -> Tensor:
    return h * {1: 2.0}.get(int(positive(h)), 3.0)


def as_index(h: Tensor) -> Tensor:
    return h * list(range(1, 100))[int(positive(h).item())]


def asserted_in(h: Tensor) -> Tensor:
    assert positive(h).item() in (1, 2)
    return h


def counted(h: Tensor) -> Tensor:
    return h * [positive(h).item()].count(1)


def alike(h: Tensor) -> Tensor:
    return h * 2 if (positive(h).item(), 2) == (1, 2) else h


REFUSED = (
    *(as_key, in_tuple, in_set, in_list, hashed, identified, of_type, matched, as_text, by_variable, as_repr, as_int),
    *(as_index, asserted_in, counted, alike),
)


@pytest.mark.parametrize("between", REFUSED)
def test_a_number_that_python_needs_is_refused_by_line(between: Any) -> None:
    lines, first = inspect.getsourcelines(between)
    with pytest.raises(CaptureError, match=r"test_numbers\.py:\d+: forward (branches|asks|makes text)") as caught:
        capture(Net(between), (), inputs())
    line = int(str(caught.value).split("test_numbers.py:")[1].split(":")[0])
    assert first < line < first + len(lines), str(caught.value)
