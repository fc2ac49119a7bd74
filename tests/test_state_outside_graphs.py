"""State that no graph keeps is refused at the user's line: seeds of generators, attributes of parameters or buffers."""

import copy
import inspect
import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.random import manual_seed
from torch.utils.checkpoint import checkpoint

from autopar.api.captures import captured_model
from autopar.api.planning import plan
from autopar.capture import capture
from autopar.errors import CaptureError
from autopar.oracle import Subject, check_module
from autopar.passes.promote_casts import promote_casts
from autopar.values.calls import call_of
from tests.as_eager import assert_as_eager

WIDTH = 6


class Net(nn.Module):
    def __init__(self, between: Callable[["Net", Tensor], Tensor]) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.register_buffer("mean", torch.zeros(WIDTH))
        self.a.weight.is_first = True  # type: ignore[attr-defined]
        self.b.weight.average = torch.ones(WIDTH)  # type: ignore[attr-defined]
        self.between = between

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return F.mse_loss(self.b(torch.sin(self.between(self, self.a(x)))), y)


def inputs() -> dict[str, Tensor]:
    torch.manual_seed(0)
    return {"x": torch.randn(8, WIDTH, dtype=torch.float64), "y": torch.randn(8, WIDTH, dtype=torch.float64)}


def seeded(own: Net, h: Tensor) -> Tensor:
    torch.manual_seed(0)
    return h + torch.randn_like(h)


def seeded_by_name(own: Net, h: Tensor) -> Tensor:
    manual_seed(0)
    return h + torch.randn_like(h)


def seeded_devices(own: Net, h: Tensor) -> Tensor:
    torch.cuda.manual_seed_all(0)
    return h + torch.randn_like(h)


def forked(own: Net, h: Tensor) -> Tensor:
    with torch.random.fork_rng(devices=[]):
        noise = torch.randn_like(h)
    return h + noise


def same_twice(own: Net, h: Tensor) -> Tensor:
    state = torch.get_rng_state()
    first = F.dropout(h)
    torch.set_rng_state(state)
    return first + F.dropout(h)


def average(own: Net, h: Tensor) -> Tensor:
    own.a.bias.average = own.a.bias.detach() * 0.1  # type: ignore[attr-defined]
    return h


def average_of_buffer(own: Net, h: Tensor) -> Tensor:
    own.mean.last = h.detach().mean(0)  # type: ignore[attr-defined]
    return h


def average_made_before(own: Net, h: Tensor) -> Tensor:
    held = getattr(own.b.weight, "average", None)
    return h if held is None else h + held.mul_(0.9)


SEEDS = (seeded, seeded_by_name, seeded_devices, forked, same_twice)
KEPT_ON_TENSORS = (average, average_of_buffer, average_made_before)


@pytest.mark.parametrize("between", [*SEEDS, *KEPT_ON_TENSORS], ids=lambda function: function.__name__)
def test_state_that_no_graph_keeps_is_refused_by_the_users_line(between: Any) -> None:
    own = Net(between).double()
    at = inspect.getsourcelines(between)[1] + 1
    why = "seeds torch's random generator" if between in SEEDS else "attribute '(average|last)'"
    with pytest.raises(CaptureError, match=rf"test_state_outside_graphs\.py:{at}: forward .*{why}"):
        capture(own, (), inputs())
    torch.manual_seed(0)  # as ever
    assert "__getattr__" not in vars(Tensor)


def draws_by_python(own: Net, h: Tensor) -> Tensor:
    return h if random.random() < 0.5 else h * 2


def draws_by_numpy(own: Net, h: Tensor) -> Tensor:
    return h * float(np.random.rand())


@pytest.mark.parametrize("between", [draws_by_python, draws_by_numpy])
def test_numbers_drawn_outside_torch_are_refused_by_line(between: Any) -> None:
    random.seed(3)
    np.random.seed(3)
    before = random.getstate(), np.random.get_state()[1].tolist()  # type: ignore[index]
    line = inspect.getsourcelines(between)[1] + 1
    with pytest.raises(
        CaptureError, match=rf"test_state_outside_graphs\.py:{line}: forward draws from (Python|NumPy)'s"
    ):
        capture(Net(between).double(), (), inputs())
    assert (random.getstate(), np.random.get_state()[1].tolist()) == before  # type: ignore[index]


def checkpointed(own: Net, h: Tensor) -> Tensor:
    """Reads the state of the generator for itself; a plain attribute is the tensor's own."""
    made = checkpoint(own.a, h, use_reentrant=False)
    assert isinstance(made, Tensor)
    return made * (2 if getattr(own.a.weight, "is_first", False) else 1)


def test_what_torch_does_for_itself_and_plain_attributes_are_kept() -> None:
    own, call = Net(checkpointed).double(), call_of(inputs())
    captured, _ = captured_model(own, call, "fp64")
    check_module(Subject(model=own, captured=captured, args=call.args, kwargs=call.kwargs))
    assert sum(node.target is torch.ops.aten.mul.Tensor for node in captured.graph.nodes) == 1


CACHE: dict[int, Tensor] = {}


class Helper:
    table: Tensor | None = None


def cached(own: Net, h: Tensor) -> Tensor:
    if len(h) not in CACHE:
        CACHE[len(h)] = torch.linspace(0, 1, WIDTH, dtype=h.dtype)
    if Helper.table is None:
        Helper.table = torch.arange(WIDTH, dtype=h.dtype)
    return h * CACHE[len(h)] + Helper.table


def test_a_first_call_that_is_a_trace_leaves_nothing_in_caches() -> None:
    own = Net(cached).double()
    capture(own, (), inputs())
    assert not CACHE
    assert Helper.table is None
    assert_as_eager(copy.deepcopy(own), inputs())


class Prior(Net):
    """A distribution made in the first call, whose constants are alike but for their sizes."""

    def __init__(self) -> None:
        super().__init__(cached)
        self.prior: torch.distributions.MultivariateNormal | None = None

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        if self.prior is None:
            mean, width = torch.zeros(WIDTH, dtype=x.dtype), torch.eye(WIDTH, dtype=x.dtype)
            self.prior = torch.distributions.MultivariateNormal(mean, 2 * width)
        summed = x.new_zeros(len(x)) + self.b(x).sum(1)
        return torch.as_tensor((summed - self.prior.log_prob(self.a(x))).mean())  # type: ignore[no-untyped-call]


def test_a_distribution_that_the_first_call_keeps_has_values() -> None:
    own = Prior().double()
    captured = assert_as_eager(own, inputs())
    assert own.prior is None
    assert all(not value.is_meta for value in captured.constants.values())


class Counted(Net):
    """`bincount` has no meta kernel."""

    def __init__(self) -> None:
        super().__init__(cached)
        self.register_buffer("counts", torch.zeros(WIDTH, dtype=torch.int64))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        made = self.b(self.a(x))
        self.counts += torch.bincount(made.argmax(1), minlength=WIDTH)
        return F.mse_loss(made, y)


def test_a_call_without_a_meta_kernel_has_a_plan() -> None:
    own = Counted().double()
    captured = assert_as_eager(own, inputs())
    assert promote_casts(captured).results
    planned = plan(own, inputs(), cluster="4xcpu", mesh="2x2", precision="fp64")
    assert planned.config.precision == "fp64"
