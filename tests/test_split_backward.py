"""Backward in two parts is backward: equal gradients, the inputs' first, and nothing run twice that need not be."""

import random
import weakref
from collections import Counter
from typing import Any

import pytest
import torch
from torch import Tensor

from autopar.runtime.private_torch import NODES_HOLD
from autopar.runtime.split_backward import backward_input

ran: Counter[str] = Counter()


class Noted(torch.autograd.Function):
    """Identity whose backward pass is counted, as a collective's is."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, name: str) -> Tensor:
        ctx.name = name
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        ran[ctx.name] += 1
        return gradients[0], None


def noted(x: Tensor, name: str) -> Tensor:
    result: Tensor = Noted.apply(x, name)  # type: ignore[no-untyped-call]
    return result


def leaves(rng: random.Random, number: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(rng.randrange(1 << 30))
    return [torch.randn(4, 4, dtype=torch.float64, generator=generator).requires_grad_() for _ in range(number)]


def program(rng: random.Random, inputs: list[Tensor], weights: list[Tensor]) -> list[Tensor]:
    """Products and sums of anything made so far; some of the last values, unread ones among them, are the results."""
    pool = [noted(x, f"input {i}") for i, x in enumerate(inputs)]
    pool += [noted(w, f"weight {i}") for i, w in enumerate(weights)]
    for number in range(rng.randint(4, 14)):
        one, other = rng.choice(pool), rng.choice(pool)
        made = one @ other.tanh() if rng.random() < 0.6 else one + other
        pool.append(noted(made, f"call {number}"))
    return [made for made in rng.sample(pool[len(inputs) + len(weights) :], rng.randint(1, 3)) if made.requires_grad]


@pytest.mark.parametrize("seed", range(60))
def test_two_parts_are_one(seed: int) -> None:
    rng = random.Random(seed)
    inputs, weights = leaves(rng, rng.randint(0, 2)), leaves(rng, rng.randint(0, 5))
    if not inputs and not weights:
        return
    state = rng.getstate()
    ends = program(rng, inputs, weights)
    gradients = leaves(random.Random(seed), len(ends))
    ran.clear()
    torch.autograd.backward(ends, gradients)
    whole = dict(ran)
    wanted = [x.grad for x in (*inputs, *weights)]
    for leaf in (*inputs, *weights):
        leaf.grad = None
    rng.setstate(state)
    ends = program(rng, inputs, weights)
    ran.clear()
    found, later = backward_input(ends, gradients, inputs, weights)
    first = set(ran)
    later()
    for got, want in zip((*found, *(w.grad for w in weights)), wanted, strict=True):
        assert (got is None) == (want is None)
        if want is not None:
            torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-12)
    assert ran == whole, "what is no head runs once"
    assert {name for name in whole if name.startswith("input")} <= first


def test_weights_read_once_wait() -> None:
    """A chain of three layers, the last weight read twice: the first part does not touch the other two."""
    rng = random.Random(0)
    (x,), (a, b, c) = leaves(rng, 1), leaves(rng, 3)
    y = (x @ noted(a, "a")).sin() @ noted(b, "b")
    shared = noted(c, "c")
    ran.clear()
    found, later = backward_input([(y @ shared) @ shared], leaves(rng, 1), [x], [a, b, c])
    assert found[0] is not None and set(ran) == {"c"} and a.grad is None and b.grad is None and c.grad is not None
    later()
    assert ran == {"a": 1, "b": 1, "c": 1} and a.grad is not None and b.grad is not None


@pytest.mark.skipif(
    not NODES_HOLD, reason="before torch 2.13 all of a stage's graph is kept until its second part ends"
)
def test_the_second_part_lets_go_of_what_is_above_the_head_that_it_is_at() -> None:
    x, weights = torch.randn(4, 4, requires_grad=True), leaves(random.Random(0), 3)
    kept: list[weakref.ref[torch.UntypedStorage]] = []
    y, alive = x.double(), []
    for weight in weights:
        y = (y @ weight).exp()
        kept.append(weakref.ref(y.untyped_storage()))
        weight.register_hook(lambda _: alive.append([storage() is not None for storage in kept]))
    end = y.sum()
    del y
    _, later = backward_input([end], [torch.ones_like(end)], [x], weights)
    del end
    assert alive == []
    later()
    assert alive == [[True, True, False], [True, False, False], [False, False, False]]


def test_a_gradient_lies_as_its_leaf_does() -> None:
    weight, x = torch.randn(3, 4, requires_grad=True), torch.randn(2, requires_grad=True)
    ends = [weight.t(), x * 2]
    _, later = backward_input(ends, [torch.ones(4, 3), torch.ones(2)], [x], [weight])
    later()
    assert weight.grad is not None and weight.grad.stride() == weight.stride()
