"""An `autograd.Function` stays the user's: its own backward in the graph, split where its dims are independent."""

import importlib.util
import inspect
import pickle
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from autopar.capture import capture
from autopar.errors import CaptureError
from autopar.ops.own_gradient import Applied, is_own, place_of
from autopar.passes.promote_casts import promote_casts
from autopar.rules.registry import rule_of
from autopar.values.graph import operands
from autopar.values.serialize import dump, load
from tests.as_eager import assert_as_eager, assert_shards_as_whole
from tests.process_group import run_apart

WIDTH = 16


class Round(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.round()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient


class Clip(torch.autograd.Function):
    """Not linear in the gradient that arrives."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, bound: float) -> Tensor:
        ctx.bound = bound
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return gradient.clamp(-ctx.bound, ctx.bound), None


class Normed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient / (gradient.norm() + 1e-6)


class Scale(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, scale: Tensor) -> Tensor:
        ctx.save_for_backward(x, scale)
        return x * scale

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        x, scale = ctx.saved_tensors
        return gradient * scale, (gradient * x).sum(0)


class Product(torch.autograd.Function):
    """Its backward takes signs of the weight, and sums over rows."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return x @ weight.t()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        x, weight = ctx.saved_tensors
        return gradient @ weight.sign(), gradient.t() @ x


class Softmax(torch.autograd.Function):
    @staticmethod
    def forward(x: Tensor, dim: int = -1) -> Tensor:
        return x.softmax(dim)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.save_for_backward(output)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> Any:
        (y,) = ctx.saved_tensors
        return y * (gradient - (gradient * y).sum(-1, keepdim=True)), None


class Several(torch.autograd.Function):
    """Of its results one is differentiable, one is marked as not, one holds integers, one is no tensor."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, times: int) -> Any:
        order, size = x.argmax(-1), x.abs()
        ctx.mark_non_differentiable(order, size)
        ctx.set_materialize_grads(False)
        ctx.times = times
        return x * times, order, size, None

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        return None if gradients[0] is None else 2 * gradients[0] * ctx.times, None


class Squares(torch.autograd.Function):
    """A loss: a sum over everything."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, y: Tensor) -> Tensor:
        ctx.save_for_backward(x, y)
        return ((x - y) ** 2).sum()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        x, y = ctx.saved_tensors
        return 2 * (x - y) * gradient, None


class Dirty(Round):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.mark_dirty(x)
        return x.mul_(2)


class Noisy(Round):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x + torch.rand_like(x)


class Reaching(Round):
    """Reads a tensor that it is not given."""

    held: Any = None

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * Reaching.held


class Inner(nn.Module):
    """Two linear layers around what is done between them."""

    def __init__(self, between: Callable[["Inner", Tensor], Tensor]) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.scale = nn.Parameter(torch.rand(WIDTH) + 0.5)
        self.between = between

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return F.mse_loss(self.b(self.between(self, self.a(x))), y)


def inputs() -> dict[str, Tensor]:
    torch.manual_seed(0)
    return {"x": torch.randn(8, WIDTH, dtype=torch.float64), "y": torch.randn(8, WIDTH, dtype=torch.float64)}


def model(between: Callable[[Inner, Tensor], Tensor]) -> Inner:
    torch.manual_seed(1)
    return Inner(between).double()


round_ = Round.apply  # bound before anybody captures


def several(own: Inner, h: Tensor) -> Tensor:
    value, order, size, nothing = Several.apply(h, 3)  # type: ignore[no-untyped-call]
    assert nothing is None and not size.requires_grad
    return value + size + F.one_hot(order, WIDTH)  # type: ignore[no-any-return]


KEPT: dict[str, Callable[[Inner, Tensor], Any]] = {
    "round": lambda own, h: round_(h),  # type: ignore[no-untyped-call]
    "clip": lambda own, h: Clip.apply(h, 1e-3),  # type: ignore[no-untyped-call]
    "normed": lambda own, h: Normed.apply(h),  # type: ignore[no-untyped-call]
    "scale": lambda own, h: Scale.apply(h, own.scale),  # type: ignore[no-untyped-call]
    "product": lambda own, h: torch.relu(Product.apply(h, own.b.weight)),  # type: ignore[no-untyped-call]
    "softmax": lambda own, h: Softmax.apply(h),  # type: ignore[no-untyped-call]
    "several": several,
    "loss": lambda own, h: h + Squares.apply(h, own.scale.expand_as(h).detach()),  # type: ignore[no-untyped-call]
    "reentrant": lambda own, h: checkpoint(lambda t: torch.sin(own.b(t)), h, use_reentrant=True),
    "checkpointed": lambda own, h: checkpoint(lambda t: torch.sin(Round.apply(t)), h, use_reentrant=False),  # type: ignore[no-untyped-call]
}


@pytest.mark.parametrize("name", KEPT)
def test_a_function_keeps_its_backward_whole_and_in_shards(name: str) -> None:
    own = model(KEPT[name])
    captured = assert_as_eager(own, inputs())
    assert_shards_as_whole(captured, own, inputs())
    assert_shards_as_whole(load(dump(captured)), own, inputs(), plans=1)


@pytest.mark.parametrize(
    ("name", "dims", "whole_gradient"),
    [
        ("round", {0, 1}, False),
        ("clip", {0, 1}, True),
        ("normed", set(), True),
        ("softmax", {0}, False),
        ("product", {0, 1}, False),
    ],
)
def test_dims_are_split_where_running_parts_gives_parts(name: str, dims: set[int], whole_gradient: bool) -> None:
    captured = capture(model(KEPT[name]), (), inputs())
    (node,) = [n for n in captured.graph.nodes if n.op == "call_function" and is_own(n.target)]
    rule = rule_of(node)
    assert {dim for dim, factor in enumerate(rule.operands[0]) if factor is not None} == dims
    assert rule.whole_gradient == whole_gradient
    assert len(rule.operands) == len(operands(node))


def test_a_large_call_is_tried_at_small_shapes() -> None:
    with torch.device("meta"):
        own = Inner(KEPT["softmax"])
        own.a, own.b = nn.Linear(WIDTH, 4096), nn.Linear(4096, WIDTH)
        batch = {"x": torch.zeros(8192, WIDTH), "y": torch.zeros(8192, WIDTH)}
    captured = capture(own, (), batch)
    (node,) = [n for n in captured.graph.nodes if n.op == "call_function" and is_own(n.target)]
    rule = rule_of(node)
    assert rule.operands == (("dim0", None),)
    assert rule.factors["dim0"].size == 8192


def test_a_checkpoint_without_gradients_at_its_inputs_has_none_inside() -> None:
    own = model(lambda own, h: h)
    own.forward = lambda x, y: F.mse_loss(checkpoint(own.a, x, use_reentrant=True), y) + F.mse_loss(own.b(x), y)  # type: ignore[method-assign]
    captured = capture(own, (), inputs())
    reached = {node.name for node in captured.graph.nodes if node.op == "placeholder" and node.users}
    assert "p_a_weight" in reached
    assert [n.meta["requires_grad"] for n in captured.graph.nodes if "linear" in n.name] != [True, True]


@pytest.mark.parametrize(("cls", "why"), [(Dirty, "mark_dirty"), (Noisy, "random numbers"), (Reaching, "not given")])
def test_what_one_call_cannot_be_is_refused_by_the_users_line(cls: Any, why: str) -> None:
    def between(own: Inner, h: Tensor) -> Tensor:
        Reaching.held = own.scale
        return cls.apply(h * 1)  # type: ignore[no-any-return]

    line = inspect.getsourcelines(between)[1] + 2
    with pytest.raises(CaptureError, match=rf"{__name__.rpartition('.')[2]}\.py:{line}: .*{why}"):
        capture(model(between), (), inputs())


def test_a_function_that_nobody_can_import_is_captured_but_not_sent() -> None:
    class Local(Round):
        pass

    captured = assert_as_eager(model(lambda own, h: Local.apply(h)), inputs())
    with pytest.raises(CaptureError, match="Local cannot be imported"):
        dump(captured)


def test_calls_are_equal_by_what_they_call_and_with_what() -> None:
    one, other = Applied(Clip, (0.5,)), Applied(Clip, (0.25,))
    assert one == Applied(Clip, (0.5,)) and one != other
    assert one.__name__ != other.__name__
    assert place_of(Clip) == (__name__, "Clip", None)


def tells_what_it_reads(tell: Callable[[Any], None], file: str) -> None:
    tell(pickle.loads(Path(file).read_bytes()).function.__qualname__)


def test_a_function_in_a_file_that_no_import_finds_is_read_from_it(tmp_path: Path) -> None:
    file, sent = tmp_path / "away.py", tmp_path / "sent"
    file.write_text("import torch\nfrom typing import Any\n" + inspect.getsource(Round).replace("Tensor", "Any"))
    spec = importlib.util.spec_from_file_location("away", file)
    assert spec is not None and spec.loader is not None
    module = sys.modules["away"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    sent.write_bytes(pickle.dumps(Applied(module.Round, ())))
    del sys.modules["away"]
    assert run_apart(1, tells_what_it_reads, str(sent)) == [(0, "Round")]


def test_functions_are_kept_in_promoted_graphs() -> None:
    captured = promote_casts(capture(model(KEPT["several"]).float(), (), {k: v.float() for k, v in inputs().items()}))
    assert any(isinstance(node.target, Applied) for node in captured.graph.nodes)


class NoisyBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x * 2

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return gradient * torch.rand_like(x) if float(gradient.norm()) > 0 else gradient


class Noise(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(WIDTH, WIDTH, dtype=torch.float64)

    def forward(self, x: Tensor) -> Tensor:
        return NoisyBackward.apply(self.a(x)).square().mean()  # type: ignore[no-any-return, no-untyped-call]


def test_a_backward_that_draws_numbers_is_refused_by_line() -> None:
    line = inspect.getsourcelines(Noise.forward)[1] + 1
    with pytest.raises(CaptureError, match=rf"test_autograd_functions\.py:{line}: the backward of NoisyBackward draws"):
        capture(Noise(), (), {"x": torch.randn(4, WIDTH, dtype=torch.float64)})
