"""Memory: the peak by sweep is the peak over all moments; optimizer state is what torch allocates."""

import random
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from autopar.cost_models.compute import Rates
from autopar.cost_models.memory import (
    KERNELS,
    Interval,
    Peak,
    fused_update_nbytes,
    optimizer_state_nbytes,
    optimizer_step_seconds,
    peak,
)
from autopar.errors import ArgumentError
from autopar.values.cluster import load_cluster
from autopar.values.train_config import NUM_STATES


def live_at(intervals: list[Interval], moment: int) -> int:
    return sum(i.nbytes for i in intervals if i.start <= moment < i.end)


@pytest.mark.parametrize("seed", range(200))
def test_the_peak_is_the_maximum_over_every_moment(seed: int) -> None:
    rng = random.Random(seed)
    span = rng.choice([3, 20, 1000])
    intervals = [
        Interval(start=rng.randrange(-span, span), end=rng.randrange(-span, span), nbytes=rng.randrange(2**40))
        for _ in range(rng.randrange(1, 40))
    ]
    found = peak(intervals)
    assert found.nbytes == max(live_at(intervals, m) for m in range(-span, span))
    if found.contributors:
        assert found.nbytes == live_at(intervals, found.moment)
        assert found.nbytes == sum(intervals[k].nbytes for k in found.contributors)
        earlier = range(-span, found.moment)
        assert all(live_at(intervals, m) < found.nbytes for m in earlier), "the first such moment"


def test_nothing_live_is_no_peak() -> None:
    assert peak([]) == Peak(0, 0, ())
    assert peak([Interval(start=3, end=3, nbytes=5), Interval(start=4, end=2, nbytes=5)]) == Peak(0, 0, ())


def test_an_end_frees_before_a_start_at_the_same_moment_takes() -> None:
    found = peak([Interval(start=0, end=5, nbytes=10), Interval(start=5, end=9, nbytes=10)])
    assert found == Peak(10, 0, (0,))


OPTIMIZERS: dict[str, Callable[[Iterable[torch.Tensor]], torch.optim.Optimizer]] = {
    "adamw": torch.optim.AdamW,
    "adam": torch.optim.Adam,
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1),
    "sgd-momentum": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
    "adamw-fused": lambda p: torch.optim.AdamW(p, fused=True),
    "adam-fused": lambda p: torch.optim.Adam(p, fused=True),
    "sgd-fused": lambda p: torch.optim.SGD(p, lr=0.1, fused=True),
    "sgd-momentum-fused": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, fused=True),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("name", NUM_STATES)
def test_state_bytes_are_those_that_torch_allocates(name: str, dtype: torch.dtype) -> None:
    weight = torch.nn.Parameter(torch.ones(16, 4, dtype=dtype))
    optimizer = OPTIMIZERS[name]([weight])
    weight.grad = torch.ones_like(weight)
    optimizer.step()
    tensors = [t for t in optimizer.state[weight].values() if torch.is_tensor(t) and t.ndim]
    allocated = sum(t.numel() * t.element_size() for t in tensors)
    assert allocated == weight.numel() * optimizer_state_nbytes(name, weight.element_size())


class _Moved(TorchDispatchMode):
    """Elements of large tensors that kernels read and write, and how many kernels do; one given twice is read once."""

    def __init__(self, numel: int) -> None:
        super().__init__()
        self.numel, self.elements, self.kernels = numel, 0, 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        read = {id(t): t.numel() for t in tree_leaves((args, kwargs)) if torch.is_tensor(t)}
        moved = sum(n for n in read.values() if n == self.numel)
        moved += sum(t.numel() for t in tree_leaves(result) if torch.is_tensor(t) and t.numel() == self.numel)
        self.elements, self.kernels = self.elements + moved, self.kernels + (moved > 0)
        return result


@pytest.mark.parametrize("name", KERNELS)
def test_a_step_moves_what_torchs_kernels_move(name: str) -> None:
    weight = torch.nn.Parameter(torch.ones(50, 20))
    optimizer = OPTIMIZERS[name]([weight])
    for _ in range(2):  # the second finds its state
        weight.grad = torch.ones_like(weight)
        with _Moved(weight.numel()) as moved:
            optimizer.step()
    if name.endswith("-fused"):  # in place on lists, and returns nothing: all that it reads it writes, but the gradient
        moved.elements += moved.elements - weight.numel()
    assert moved.elements == sum(KERNELS[name]) * weight.numel()
    assert moved.kernels == len(KERNELS[name])


@pytest.mark.parametrize("name", KERNELS)
def test_a_step_takes_its_bytes_and_its_launches(name: str) -> None:
    kernels = len(KERNELS[name])
    for cluster, launches in (("8xh100", 1), ("4xcpu", kernels if kernels > 1 else 0.5)):
        device = load_cluster(cluster).device
        expected = sum(KERNELS[name]) * 1e9 * 4 / device.memory_bandwidth + launches * device.launch_seconds
        assert optimizer_step_seconds(name, 1e9, 4, Rates(device, None)) == pytest.approx(expected)
    assert sum(KERNELS[name]) * 4 >= fused_update_nbytes(NUM_STATES[name], 4)


def test_an_unknown_optimizer_is_refused() -> None:
    with pytest.raises(ArgumentError, match="unknown optimizer 'lion'; choose one of adamw, adam, sgd, sgd-momentum"):
        optimizer_state_nbytes("lion", 4)
