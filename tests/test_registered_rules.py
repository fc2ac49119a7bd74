"""A user's rule for an own op: read from one line, proved by running the op, taken before what is discovered."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import autopar
from autopar.capture import capture
from autopar.cli.main import main
from autopar.errors import RuleError
from autopar.rules.notation import parse
from autopar.rules.registry import rule_of
from autopar.rules.rule import choices
from autopar.search.known.baselines import make_baseline
from autopar.values.mesh import make_mesh
from autopar.values.train_config import TrainConfig
from tests.plans_in_threads import errors_of, one_process
from tests.search_cases import machine


@torch.library.custom_op("registered_rules::gated", mutates_args=())
def gated(x: Tensor, weight: Tensor, bias: Tensor, sharp: float) -> Tensor:
    return torch.sigmoid(sharp * x) @ weight.t() + bias


@gated.register_fake
def _(x: Tensor, weight: Tensor, bias: Tensor, sharp: float) -> Tensor:
    return x.new_empty((*x.shape[:-1], weight.shape[0]))


def keep(ctx: Any, inputs: Any, output: Any) -> None:
    x, weight, _, ctx.sharp = inputs
    ctx.save_for_backward(x, weight)


def gradient(ctx: Any, arriving: Tensor) -> Any:
    x, weight = ctx.saved_tensors
    gate = torch.sigmoid(ctx.sharp * x)
    flat = arriving.flatten(0, -2)
    into = (arriving @ weight) * ctx.sharp * gate * (1 - gate)
    return into, flat.t() @ gate.flatten(0, -2), flat.sum(0), None


gated.register_autograd(gradient, setup_context=keep)
DOCS = Path(__file__).parents[1] / "docs" / "how-to" / "own-ops.md"
RULE = "x[b.. i], w[o i], +bias[o] -> y[b.. o]"


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(6, 8), nn.Linear(10, 4)
        self.weight, self.bias = nn.Parameter(torch.randn(10, 8) / 3), nn.Parameter(torch.randn(10))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        h = gated(self.first(x), self.weight, self.bias, 1.5)
        return nn.functional.mse_loss(self.last(h), y)


@pytest.fixture
def clean(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("autopar.rules.registered._REGISTERED", {})


def tensors(*shapes: tuple[int, ...]) -> list[Tensor]:
    torch.manual_seed(0)
    return [torch.randn(shape, dtype=torch.float64, requires_grad=True) for shape in shapes]


def placed(node: Any) -> set[Any]:
    return {(c.operands, c.results) for c in choices(rule_of(node)) if c.name in rule_of(node).factors}


@pytest.mark.parametrize("registers", [False, True])
def test_a_model_with_an_own_op_is_trained_as_in_one_process(registers: bool, clean: None) -> None:
    """Under the rule of the user, and under what is discovered: the same one."""
    if registers:
        autopar.register_rule(gated, RULE)
    torch.manual_seed(0)
    model = Net().double()
    inputs = {"x": torch.randn(4, 5, 6).double(), "y": torch.randn(4, 5, 4).double()}
    captured = capture(model, (), inputs)
    (node,) = [n for n in captured.graph.nodes if "gated" in n.name]
    assert rule_of(node).discovered is not registers and len(placed(node)) == 4
    reference = one_process(captured, model, inputs)
    for name in ("ddp", "fsdp"):
        plan = make_baseline(name, captured, machine(2), make_mesh((2,)), TrainConfig())
        loss, gradients, _ = errors_of(reference, plan)
        assert loss <= 1e-10 and gradients <= 1e-8
        assert plan.choices[node.name] == ("dim0",)


def test_a_right_rule_is_proved(clean: None) -> None:
    autopar.register_rule("registered_rules::gated", RULE)
    assert autopar.check_rule(gated, *tensors((4, 6, 8), (10, 8), (10,)), 1.5) == ("b1", "b0", "i", "o")


def test_the_example_of_the_docs_runs(clean: None, capsys: pytest.CaptureFixture[str]) -> None:
    code = DOCS.read_text().split("```python\n")[1].split("```")[0]
    exec(code, {})
    assert capsys.readouterr().out.strip() == code.strip().rpartition("# ")[2]


@pytest.mark.parametrize(
    ("rule", "why"),
    [
        ("x[b.. i], w[o i], bias[o] -> y[b.. o]", "split by i .*result 0 differs"),
        ("x[b.. i], w[i _], +bias[_] -> y[b.. _]", "i of size 8 and, in dim 0 of w, of size 10"),
        ("x[b.. _], w[_ i], bias[_] -> y[b.. _]", "split by i .*parts do not run"),
        ("x[b i], w[o i], +bias[o] -> y[b o]", "tensors of .* dims .* does not take"),
    ],
)
def test_a_wrong_rule_is_refuted(rule: str, why: str, clean: None) -> None:
    autopar.register_rule(gated, rule)
    with pytest.raises(RuleError, match=why):
        autopar.check_rule(gated, *tensors((4, 6, 8), (10, 8), (10,)), 1.5)


class Clip(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient.clamp(-1, 1)


def test_a_backward_that_is_not_linear_has_to_be_said(clean: None) -> None:
    autopar.register_rule(Clip, "x[b _] -> y[b _]")
    with pytest.raises(RuleError, match="linear_gradient"):
        autopar.check_rule(Clip, *tensors((4, 6)))
    autopar.register_rule(Clip, "x[b _] -> y[b _]", linear_gradient=False)
    assert autopar.check_rule(Clip, *tensors((4, 6))) == ("b",)


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("x[b i], w[o i]", "has no result"),
        ("x[b i] -> ", "has no results"),
        ("x[b i] w[o i] -> y[b o]", "put a comma"),
        ("x[b i -> y[b]", "cannot be read at"),
        ("x[b i] -> y[b o]", "o in a result, but in no operand"),
        ("x[b b] -> y[b]", "b twice in x"),
        ("x[b.. c..] -> y[b.. c..]", r"two of `\.\.` in x"),
        ("x[2 i] -> y[i]", "'2' in x"),
        ("x[replicate] -> y[replicate]", "'replicate' in x"),
        ("x[b] -> +y[b]", "result y as added"),
    ],
)
def test_a_line_that_is_no_rule_says_why(text: str, why: str) -> None:
    with pytest.raises(RuleError, match=why):
        parse(text)


def test_what_is_no_op_is_refused(clean: None) -> None:
    for op in (torch.sigmoid, "gated", "registered_rules::none"):
        with pytest.raises(RuleError, match="no op that a graph calls"):
            autopar.register_rule(op, RULE)
    with pytest.raises(RuleError, match="no rule was given"):
        autopar.register_rule(gated)


def test_a_local_function_with_its_own_communication(
    clean: None, copied_processes: None, capsys: pytest.CaptureFixture[str]
) -> None:
    """A sequence that ranks share out, pinned: the user's function is what runs, in real processes."""
    from tests import own_local_ops

    autopar.register_rule(own_local_ops.shifted, own_local_ops.RULE, local={"s": own_local_ops.shifted_here})
    assert autopar.check_rule(own_local_ops.shifted, *tensors((4, 6, 8), (8,))) == ("b", "d"), "s is not in parts"
    pins = ["--pin", "op:*shifted*: data=batch, model=dim1"]
    with pytest.raises(SystemExit) as ended:
        main(["verify", "tests.own_local_ops:net", "--mesh", "2x2", *pins])
    assert not ended.value.code
    assert "equal to one process" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("local", "why"), [({"q": print}, "give one word of the rules"), ({"b..": print, "i": print}, "give one word")]
)
def test_a_local_function_is_of_one_word(clean: None, local: dict[str, Any], why: str) -> None:
    with pytest.raises(RuleError, match=why):
        autopar.register_rule(gated, RULE, local=local)
