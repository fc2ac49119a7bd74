"""A parameter gathered for use leaves memory after the forward pass, and comes back, exact, for the backward pass."""

import gc
import time
from functools import reduce
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from autopar.ops.collectives import all_gather, pad_dim
from autopar.ops.groups import use_groups
from autopar.ops.regather import once, pack, regathering
from autopar.runtime.groups import build_groups
from autopar.values.mesh import make_mesh
from tests.process_group import ranks

AXES = ("data", "model")


def gathered(weight: Tensor, regather: bool, seen: list[StorageWeakRef]) -> Tensor:
    """Two gathers, along another dim each; the storages that a forward pass should not leave behind are noted."""
    rows = all_gather(weight, dim=0, axis="data", size=5, regather=regather)
    whole = all_gather(rows, dim=1, axis="model", regather=regather)
    seen += [StorageWeakRef(t.untyped_storage()) for t in (rows, whole)]
    return whole


def loss_of(x: Tensor, whole: Tensor) -> Tensor:
    """Uses that save the weight as it is, transposed, as a slice, and not at all."""
    y = torch.nn.functional.linear(x, whole).sin()
    z = x @ whole.t()
    v = (whole[1:3] * whole[2:4]).sum()
    return (y * z).sum() + v + whole.sum()


def still_alive(storages: list[StorageWeakRef]) -> list[bool]:
    """After Gloo's own threads, which drop their tensors when they please, had time to."""
    deadline = time.monotonic() + 1.0
    while not all(ref.expired() for ref in storages) and time.monotonic() < deadline:  # type: ignore[no-untyped-call]
        time.sleep(0.01)
    return [not ref.expired() for ref in storages]  # type: ignore[no-untyped-call]


def both_ways() -> dict[str, Any]:
    _, groups = build_groups(make_mesh((2, 2)), "cpu")
    groups.counting = True
    torch.manual_seed(groups.rank)
    start = torch.randn(3, 4, dtype=torch.float64)
    x = torch.randn(6, 8, dtype=torch.float64)
    results: dict[str, Any] = {}
    for regather in (False, True):
        weight, data = start.clone().requires_grad_(), x.clone().requires_grad_()
        groups.sent = {}
        seen: list[StorageWeakRef] = []
        with use_groups(groups), regathering():
            loss = loss_of(data, gathered(weight, regather, seen))
        alive = still_alive(seen)
        forward = dict(groups.sent)
        loss.backward()  # outside use_groups, as users call it
        assert weight.grad is not None and data.grad is not None
        results["again" if regather else "kept"] = {
            "loss": loss.detach(),
            "gradients": (weight.grad, data.grad),
            "alive": alive,
            "forward": forward,
            "sent": dict(groups.sent),
        }
    return results


def test_gathered_parameters_are_released_and_gathered_again() -> None:
    for result in ranks(4).run(both_ways):
        kept, again = result["kept"], result["again"]
        assert torch.equal(kept["loss"], again["loss"])
        assert all(map(torch.equal, kept["gradients"], again["gradients"]))
        assert kept["alive"] == [False, True], "the whole weight stays for backward, its rows are not needed"
        assert again["alive"] == [False, False]
        assert kept["forward"] == again["forward"]
        # saved uses: linear, matmul with the transpose, and the product of two slices, which saves both
        for axis in AXES:
            calls, nbytes = kept["sent"]["all_gather", (axis,)]
            assert calls == 1
            assert again["sent"]["all_gather", (axis,)] == (5 * calls, 5 * nbytes)
        assert again["sent"]["reduce_scatter", ("data",)] == kept["sent"]["reduce_scatter", ("data",)]


def walked() -> tuple[bool, tuple[int, int], list[bool]]:
    """A net's weight that every step saves: whether its gradient is as it is of one that is kept, messages in backward,
    and what of the gathered weight is alive behind it."""
    _, groups = build_groups(make_mesh((2,)), "cpu")
    groups.counting = True
    weight, x = torch.randn(2, 4, generator=torch.Generator().manual_seed(0)), torch.ones(1, 4)
    seen: list[StorageWeakRef] = []
    gradients = []
    for regather in (False, True):
        leaf = weight.clone().requires_grad_()
        with use_groups(groups), regathering():
            whole = all_gather(leaf, dim=0, axis="data", regather=regather)
            seen.append(StorageWeakRef(whole.untyped_storage()))  # type: ignore[no-untyped-call]
            y = once(lambda w: reduce(lambda h, _: (h @ w).tanh(), range(3), x), whole).sum()
        del whole
        groups.sent = {}
        y.backward()
        assert leaf.grad is not None
        gradients.append(leaf.grad)
    return torch.equal(*gradients), groups.sent["all_gather", ("data",)], still_alive(seen)


def test_a_call_that_saves_a_weight_several_times_gathers_it_once() -> None:
    for is_equal, (calls, _), alive in ranks(2).run(walked):
        assert is_equal and calls == 1 and alive == [False, False]


def update_between() -> tuple[Tensor, Tensor]:
    """The leaf is packed by reference: what backward gathers is what the leaf holds then."""
    _, groups = build_groups(make_mesh((2,)), "cpu")
    weight = torch.ones(2, 2, requires_grad=True)
    x = torch.ones(1, 2, requires_grad=True)
    with use_groups(groups), regathering():
        y = torch.nn.functional.linear(x, all_gather(weight, dim=0, axis="data", regather=True)).sum()
    with torch.no_grad():
        weight.fill_(float(groups.rank))
    y.backward()
    assert x.grad is not None
    return y.detach(), x.grad


def test_a_recipe_reads_the_leaf_when_backward_comes() -> None:
    for value, gradient in ranks(2).run(update_between):
        assert value == 8.0
        assert gradient.tolist() == [[2.0, 2.0]]


def freed_storage() -> bool:
    """A storage made where a gathered one was freed is not taken for it."""
    _, groups = build_groups(make_mesh((2,)), "cpu")
    with use_groups(groups), regathering(), torch.no_grad():
        for _ in range(50):
            all_gather(torch.ones(64), dim=0, axis="data", regather=True)
            fresh = torch.zeros(128)
            if not isinstance(pack(fresh), Tensor):
                return False
    return True


def test_a_reused_address_is_no_gathered_tensor() -> None:
    assert ranks(2).run(freed_storage) == [True, True]


def test_nothing_is_registered_outside_a_forward_pass() -> None:
    tensor = torch.ones(2)
    packed = pack(tensor)
    assert isinstance(packed, Tensor) and packed.data_ptr() == tensor.data_ptr()


@pytest.mark.parametrize("regather", [False, True])
def test_no_cycle_keeps_a_graph_alive(regather: bool) -> None:
    assert ranks(2).run(graph_dies, regather) == [True, True]


def graph_dies(regather: bool) -> bool:
    """Results that autograd saves (exp, softmax) through the hooks do not keep themselves alive."""
    _, groups = build_groups(make_mesh((2,)), "cpu")
    gc.disable()
    try:
        weight = torch.ones(2, 2, requires_grad=True)
        with use_groups(groups), regathering():
            y = all_gather(weight, dim=0, axis="data", regather=regather).exp().softmax(0)
        storage = StorageWeakRef(y.untyped_storage())  # type: ignore[no-untyped-call]
        del y
        return still_alive([storage]) == [False]
    finally:
        gc.enable()


def test_a_part_that_is_padded_is_padded_again_for_backward() -> None:
    torch.manual_seed(0)
    weight = torch.randn(3, 4, dtype=torch.float64, requires_grad=True)
    x = torch.randn(6, 4, dtype=torch.float64, requires_grad=True)
    with regathering():
        whole = pad_dim(weight, 0, 5)
        loss = torch.nn.functional.linear(x, whole).sin().sum()
    storage = StorageWeakRef(whole.untyped_storage())
    del whole
    assert storage.expired()  # type: ignore[no-untyped-call]
    expected = torch.autograd.grad(torch.nn.functional.linear(x, weight).sin().sum(), (x, weight))
    torch.testing.assert_close(torch.autograd.grad(loss, (x, weight)), expected)
