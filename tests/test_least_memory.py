"""What is said to be the least memory that would do does, as it is printed; and below it nothing fits that is asked."""

import re

import pytest
import torch
from torch import Tensor, nn

import autopar
from autopar.errors import InfeasibleError
from autopar.search.fitting import fitting
from autopar.values.gigabytes import gigabytes, least_gigabytes


class Net(nn.Module):
    def __init__(self, width: int, depth: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(depth))
        self.never = nn.Parameter(torch.ones(width + 1, 3))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x)) * x
        return x.square().mean()


def planned(width: int, depth: int, mesh: str, memory: str) -> float:
    """Bytes at the peak."""
    world = torch.tensor([int(n) for n in mesh.split("x")]).prod()
    plan = autopar.plan(
        Net(width, depth), torch.ones(6, width), cluster=f"{world}xcpu", mesh=mesh, memory_gb=float(memory),
        with_baselines=False, check=False,
    )  # fmt: skip
    return plan.estimate.peak_nbytes


@pytest.mark.parametrize(("width", "depth", "mesh"), [(7, 3, "3"), (12, 1, "2x2"), (9, 2, "2")])
def test_the_least_that_is_said_does_as_it_is_printed(width: int, depth: int, mesh: str) -> None:
    with pytest.raises(InfeasibleError, match=r"fits in 1e-08 GB a device") as caught:
        planned(width, depth, mesh, "1e-8")
    said = re.search(r"the least that would do is (\S+) GB", str(caught.value))
    assert said is not None
    assert planned(width, depth, mesh, said[1]) <= float(said[1]) * 1e9
    below = f"{float(said[1]) * 0.8:.5g}"
    with pytest.raises(InfeasibleError, match=f"fits in {re.escape(gigabytes(float(below) * 1e9))} GB") as again:
        planned(width, depth, mesh, below)
    assert again.value.least_nbytes is not None and again.value.least_nbytes > float(below) * 1e9


def test_a_limit_is_printed_as_it_was_given_and_a_least_one_rounded_up() -> None:
    for text in ("0.00087", "80", "5e-06", "0.1", "123.456"):
        assert gigabytes(float(text) * 1e9) == text
    assert least_gigabytes(1) == "1e-09" and least_gigabytes(843_210_001) == "0.84322"
    assert all(float(least_gigabytes(n)) * 1e9 >= n * (1 - 1e-12) for n in range(1, 10**7, 99_991))


def search(counted: dict[int, int]) -> "tuple[list[float], object]":
    """A search that counts bytes of plans (named by what they hold) otherwise than they do."""
    asked: list[float] = []

    def found(aim: float) -> int:
        asked.append(aim)
        fits = [plan for plan, nbytes in counted.items() if nbytes <= aim]
        if not fits:
            raise InfeasibleError("none", least_nbytes=min(counted.values()))
        return max(fits)

    return asked, found


def test_where_none_fits_as_counted_the_one_that_would_do_is_tried() -> None:
    _, found = search({100: 110, 200: 210})
    assert fitting(found, float, 105) == 100  # type: ignore[arg-type]
    with pytest.raises(InfeasibleError, match=r"fits in 9.9e-08 GB .* would do is 1e-07 GB") as caught:
        fitting(found, float, 99, "of two")  # type: ignore[arg-type]
    assert caught.value.least_nbytes == 100


def test_tries_below_what_fits_as_counted_end_with_the_least_plan() -> None:
    asked, found = search({120: 100, 200: 119})
    assert fitting(found, float, 125) == 120  # type: ignore[arg-type]
    assert asked[0] == 125
    with pytest.raises(InfeasibleError, match=r"fits in 1.19e-07 GB .* would do is 1.2e-07 GB"):
        fitting(found, float, 119)  # type: ignore[arg-type]
