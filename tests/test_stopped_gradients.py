"""Where forward stops gradients in place: `detach_`, and a parameter's `requires_grad` turned off and on."""

import inspect
from typing import Any

import pytest
from torch import Tensor

from autopar.capture import capture
from autopar.errors import CaptureError
from tests.as_eager import assert_as_eager
from tests.test_changed_parameters import Net, inputs, net


def detached(own: Net, h: Tensor) -> Tensor:
    z = own.a(h)
    z.detach_()
    return h * own.scale + z


def written_after(own: Net, h: Tensor) -> Tensor:
    """What is written into the tensor afterwards has a gradient again."""
    z = own.a(h).detach_()
    z.add_(own.scale)
    return h * z


def edited(own: Net, h: Tensor) -> Tensor:
    h.data.clamp_(-0.5, 0.5)
    z = own.a(h)
    z.data = z.data * 2
    return h + z + own.a(h).detach_()


def frozen_meanwhile(own: Net, h: Tensor) -> Tensor:
    """As a generator's loss is computed."""
    own.a.requires_grad_(False)
    judged = own.a(h)
    own.a.requires_grad_(True)
    return judged + own.a(h.detach())


def frozen_by_attribute(own: Net, h: Tensor) -> Tensor:
    for p in own.b.parameters():
        p.requires_grad = False
    judged = own.b(h)
    assert not judged.detach().requires_grad
    for p in own.b.parameters():
        p.requires_grad = True
    return judged * (own.scale if own.b.weight.requires_grad else own.a(h))


KEPT = (detached, written_after, edited, frozen_meanwhile, frozen_by_attribute)


@pytest.mark.parametrize("between", KEPT, ids=lambda function: function.__name__)
def test_gradients_stop_where_eager_stops_them(between: Any) -> None:
    own = net(between)
    assert_as_eager(own, inputs())
    assert all(p.requires_grad for p in (*own.a.parameters(), *own.b.parameters()))


def left_frozen(own: Net, h: Tensor) -> Tensor:
    own.b.weight.requires_grad_(False)
    return h


def turned_on(own: Net, h: Tensor) -> Tensor:
    own.teacher.weight.requires_grad_(True)
    return own.teacher(h)


@pytest.mark.parametrize(("between", "why"), [(left_frozen, "leaves it so"), (turned_on, "turns requires_grad")])
def test_what_stays_turned_is_refused_by_the_users_line(between: Any, why: str) -> None:
    at = inspect.getsourcelines(between)[1] + 1
    with pytest.raises(CaptureError, match=rf"test_stopped_gradients\.py:{at}: .*{why}"):
        capture(net(between), (), inputs())
