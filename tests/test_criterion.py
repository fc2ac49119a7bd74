"""A loss that the user's loop computes of what the module returns trains like one inside, at the same cost."""

import random
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from autopar.api.again import Again
from autopar.capture import capture, capture_call
from autopar.errors import ArgumentError
from autopar.lower.emit import emit
from autopar.oracle.reference import buffers_of, parameters_of
from autopar.runtime import DistributedModule, count_messages
from autopar.runtime.peak_memory import watch
from autopar.search.following import following_plan
from autopar.search.known.random_plan import random_plan, random_recompute
from autopar.values.calls import Call
from autopar.values.cluster import load_cluster
from autopar.values.graph import requires_grad
from autopar.values.mesh import make_mesh
from autopar.values.train_config import TrainConfig
from tests.process_group import ranks
from tests.runtime_cases import whole

ROWS, WIDTH, CLASSES = 8, 12, 6
SLACK = 2 * ROWS * WIDTH * 8
"""Bytes of whole inputs, of which a rank keeps its slices alone where it is planned so."""


class Classifier(nn.Module):
    """A model without a loss; batch norm says whether it ran once."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.norm, self.head = nn.Linear(WIDTH, 16), nn.BatchNorm1d(16), nn.Linear(16, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.head(self.norm(self.up(x)).relu())
        return result


def cross_entropy(output: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(output, y, ignore_index=0)


def smoothed(output: Tensor, y: Tensor) -> Tensor:
    """Several functions of torch, and a tensor of its own."""
    rows = torch.arange(len(y))
    chosen = output.log_softmax(-1)[rows, y]
    return (-(chosen * torch.linspace(0.5, 1.5, len(y)).double())).mean() + 0.01 * output.square().mean()


def made() -> tuple[Classifier, Tensor, Tensor]:
    with torch.random.fork_rng():
        torch.manual_seed(3)
        return Classifier().double(), torch.randn(ROWS, WIDTH).double(), torch.randint(0, CLASSES, (ROWS,))


def distributed(seed: int, criterion: Callable[..., Any]) -> DistributedModule:
    own, x, y = made()
    loss_fn = lambda output, batch: criterion(output, batch[1])  # noqa: E731
    captured = capture(own, (x, y), loss_fn=loss_fn)
    plan = random_plan(captured, make_mesh((2, 2)), random.Random(seed))
    plan = replace(plan, config=TrainConfig(precision="fp64"))
    values = {**parameters_of(captured, own), **buffers_of(captured, own)}
    captor = Again(
        model=own,
        plans=[plan],
        planned=[captured],
        precision="fp64",
        call=Call(args=(x, y), bare=True),
        loss_fn=loss_fn,
    )
    return DistributedModule(emit(captured, plan), values, captor=captor, bare=True)


def check_gradients(module: nn.Module, eager: nn.Module) -> None:
    for name, parameter in eager.named_parameters():
        torch.testing.assert_close(whole(module.get_parameter(name).grad), parameter.grad, rtol=1e-9, atol=1e-13)
    for name, buffer in eager.named_buffers():
        torch.testing.assert_close(module.get_buffer(name), buffer)
    module.zero_grad()
    eager.zero_grad()


def outside(seed: int, name: str) -> None:
    criterion = {"cross_entropy": cross_entropy, "smoothed": smoothed}[name]
    module, (eager, x, y) = distributed(seed, criterion), made()
    given = {"x": x, "y": y}
    module(x, y).backward()
    module.zero_grad()
    module.load_state_dict(eager.state_dict())  # what only the first step makes is there
    with count_messages(module) as inside, watch(module, given) as memory:
        module(x + 0, y).backward()
    eager_loss = criterion(eager(x), y)
    eager_loss.backward()
    check_gradients(module, eager)
    peaks = []
    for step in range(4):
        with count_messages(module) as sent, watch(module, given) as beside:
            loss = criterion(module(x + step), y)
            loss.backward()
        peaks.append(beside.peak)
        more = {
            key: found
            for key, found in sent.items()
            if not all(a <= b for a, b in zip(found, inside[key], strict=True))
        }
        assert not more, f"{sent} outside, {inside} inside"  # labels that ranks share out are sliced of whole ones
        wanted = criterion(eager(x + step), y)
        wanted.backward()
        assert loss.item() == pytest.approx(float(wanted.detach()), rel=1e-12)
        check_gradients(module, eager)
    # the first call is captured; Gloo's threads may hold what was sent for a moment after a collective has returned
    least = min(peaks[1:])
    assert least <= memory.peak + SLACK, f"{least} bytes outside, {memory.peak} inside"


@pytest.mark.parametrize(("seed", "name"), [(0, "cross_entropy"), (3, "smoothed")])
def test_a_criterion_outside_is_the_loss_inside_at_its_cost(seed: int, name: str) -> None:
    ranks(4).run(outside, seed, name)


def loops() -> None:
    """What loops do with outputs, in every order."""
    module, (eager, x, y) = distributed(0, cross_entropy), made()
    found, wanted = module(x), eager(x)  # a metric first, then the loss
    assert found.shape == wanted.shape and found.dtype == wanted.dtype and found.requires_grad and len(found) == ROWS
    assert int((found.argmax(-1) == y).sum()) == int((wanted.argmax(-1) == y).sum())
    loss, expected = cross_entropy(found, y) / 2, cross_entropy(wanted, y) / 2
    assert f"{loss:.6f}" == f"{expected:.6f}"
    loss.backward()
    expected.backward()
    check_gradients(module, eager)
    found, wanted = module(x), eager(x)  # the loss first, then a metric
    loss, expected = cross_entropy(found, y), cross_entropy(wanted, y)
    loss.backward()
    expected.backward()
    torch.testing.assert_close(found.detach().softmax(-1), wanted.detach().softmax(-1))
    check_gradients(module, eager)
    module(x), eager(x)  # nothing of it is read: statistics are written all the same
    module.eval(), eager.eval()
    with torch.no_grad():
        torch.testing.assert_close(module(x), eager(x))
    module.train(), eager.train()
    own, other = (x.clone().requires_grad_() for _ in range(2))  # gradients of the input
    module(own).square().sum().backward()
    eager(other).square().sum().backward()
    torch.testing.assert_close(own.grad, other.grad)
    check_gradients(module, eager)
    found, changed = module(x), y.clone()
    loss = cross_entropy(found, changed)
    changed.zero_()
    with pytest.raises(ArgumentError, match="changed in place"):
        loss.backward()


def test_outputs_are_read_in_any_order() -> None:
    ranks(4).run(loops)


def alternating() -> None:
    """Losses that differ in a keyword, or a property, alone are different losses."""
    module, (eager, x, y) = distributed(1, cross_entropy), made()
    losses: list[Callable[[Tensor], Tensor]] = [
        lambda out: out.clamp(min=0.0).sum(),
        lambda out: out.clamp(max=0.0).sum(),
        lambda out: (out.T @ out).square().mean(),
        lambda out: (out.mT.cumsum(0)).square().mean(),
        lambda out: F.cross_entropy(out, y, label_smoothing=0.5),
    ]
    for loss in losses * 2:
        found, wanted = loss(module(x)), loss(eager(x))
        assert float(found.detach()) == pytest.approx(float(wanted.detach()), rel=1e-12)
        found.backward()
        wanted.backward()
        check_gradients(module, eager)


def test_losses_that_differ_in_a_keyword_alone_are_not_taken_for_each_other() -> None:
    ranks(4).run(alternating)


def changed_meanwhile() -> None:
    """A call that waits reads its inputs and parameters as they were when it was made, or says that it cannot."""
    module, (eager, x, y) = distributed(0, cross_entropy), made()
    own, theirs = (torch.optim.SGD(m.parameters(), lr=0.5) for m in (module, eager))
    for model in (module, eager):
        cross_entropy(model(x), y).backward()
    found, wanted = module(x), eager(x)
    own.step()
    theirs.step()
    torch.testing.assert_close(found.detach().sum(), wanted.detach().sum())
    given = x.clone()
    waits = module(given)
    given.zero_()
    with pytest.raises(ArgumentError, match="changed in place"):
        waits.sum().backward()
    with pytest.raises(ArgumentError, match="failed before"):
        waits.sum().backward()
    module(x, y)  # the next call is not the failed one's


def test_a_call_that_waits_is_of_its_own_time() -> None:
    ranks(4).run(changed_meanwhile)


def test_a_criterion_outside_keeps_what_is_run_again() -> None:
    own, x, y = made()
    loss_fn = lambda output, batch: cross_entropy(output, batch[1])  # noqa: E731
    captured = capture(own, (x, y), loss_fn=loss_fn)
    plan = random_plan(captured, make_mesh((2,)), random.Random(0))
    plan = random_recompute(plan, captured, random.Random(1), share=1.0)
    call = capture_call(own, (x,), {}, loss_fn=loss_fn)[0]
    followed = following_plan(call, plan, captured, load_cluster("2xcpu"))
    differentiable = {node.name for node in call.graph.nodes if requires_grad(node)}
    assert followed.recompute and followed.recompute == plan.recompute & differentiable


def edits_in_place(model: Any, x: Tensor, y: Tensor) -> Tensor:
    """Tensors made like an output and written, outputs written themselves and through views."""
    output = model(x)
    targets = torch.zeros_like(output)
    targets[torch.arange(len(y)), y] = 1
    weights = torch.ones_like(output).scatter_(1, y[:, None], 2.0)
    shifted = output * 2
    shifted += 1
    part = output.clone()[:, 1:]
    part *= 3
    return ((output - targets).square() * weights).mean() + shifted.square().mean() + part.square().mean()


def edits_a_view(model: Any, x: Tensor, y: Tensor) -> Tensor:
    output = model(x) * 1.0
    output[:, 1:].mul_(2)
    output[0] = 0
    return F.cross_entropy(output, y)


def watches(model: Any, x: Tensor, y: Tensor) -> Tensor:
    output = model(x)
    output.register_hook(lambda gradient: gradient * 3)
    return F.cross_entropy(output, y)


def adds_parameters(model: Any, x: Tensor, y: Tensor) -> Tensor:
    total: Tensor = F.cross_entropy(model(x), y) + 0.1 * sum(p.square().sum() for p in model.parameters())
    return total


ODD = (edits_in_place, edits_a_view, watches, adds_parameters)


def odd_loops(seed: int) -> None:
    """On a rank: what is written, watched or made of parameters is as in one process, or refused in words."""
    module = distributed(seed, cross_entropy)
    for loop in ODD:
        eager, x, y = made()
        eager.train()
        module.load_state_dict(eager.state_dict())
        module.zero_grad(set_to_none=True)
        found, wanted = loop(module, x, y), loop(eager, x, y)
        found.backward()  # type: ignore[no-untyped-call]
        wanted.backward()  # type: ignore[no-untyped-call]
        torch.testing.assert_close(whole(found.detach()), wanted.detach(), msg=loop.__name__)
        for name, parameter in eager.named_parameters():
            torch.testing.assert_close(whole(module.get_parameter(name).grad), parameter.grad, msg=loop.__name__)
    waits = module(x)
    eager(x)
    torch.testing.assert_close(module.norm.running_mean, eager.norm.running_mean)
    waits = module(x)
    with torch.no_grad():
        next(module.parameters()).mul_(2)
    with pytest.raises(ArgumentError, match="parameter was changed in place"):
        waits.sum().item()
    with pytest.raises(ArgumentError, match=r"autograd\.Function was applied"):
        Doubled.apply(module(x)).sum().backward()  # type: ignore[no-untyped-call]
    head = nn.Linear(CLASSES, 1).double()
    (slope,) = torch.autograd.grad(head(module(x)).sum(), [head.weight])  # a plain part after it
    torch.testing.assert_close(slope, whole(module(x).detach()).sum(0, keepdim=True))
    seen = module(x)[:, 1:]
    assert seen.sum().item() != 0
    with pytest.raises(ArgumentError, match="before anything is read"):
        seen.mul_(2)
    with pytest.raises(ArgumentError, match="call backward"):
        torch.autograd.grad(cross_entropy(module(x), y), list(module.parameters()))
    next(module.parameters()).register_hook(lambda gradient: gradient)  # type: ignore[no-untyped-call]
    with pytest.raises(ArgumentError, match="would never run"):
        module(x)


class Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        return gradients[0] * 2


def test_outputs_are_tensors_that_may_be_written_and_watched() -> None:
    ranks(4).run(odd_loops, 2)
