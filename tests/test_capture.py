"""A captured graph is the eager module: same loss, gradients and buffers, in every precision; or a named error."""

import collections
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from autopar.capture import capture
from autopar.errors import CaptureError, NoLossError
from autopar.oracle.reference import buffers_of, parameters_of, run_captured
from autopar.passes.promote_casts import promote_casts, promoted_eager
from autopar.values.graph import CapturedModel, target_name
from autopar.values.inputs import bind_inputs
from tests.zoo import FAMILIES, zoo

# Relative to the largest element of each gradient, floored where a gradient is truly zero (key biases).
TOLERANCE = {torch.float64: 1e-13, torch.float32: 1e-5, torch.bfloat16: 3e-2}
FLOOR = {torch.float64: 1e-6, torch.float32: 1e-4, torch.bfloat16: 1e-3}


def run(
    captured: CapturedModel, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[Tensor, dict[str, Tensor], dict[str, Tensor]]:
    """Loss, gradient by placeholder and new buffers of the captured graph on copies of the model's state."""
    parameters = {
        name: parameter.detach().clone().requires_grad_(parameter.requires_grad)
        for name, parameter in parameters_of(captured, model).items()
    }
    buffers = {name: buffer.clone() for name, buffer in buffers_of(captured, model).items()}
    loss, mutated = run_captured(captured, parameters, buffers, bind_inputs(captured.inputs, args, kwargs))
    loss.backward()  # type: ignore[no-untyped-call]
    gradients = {name: parameter.grad for name, parameter in parameters.items() if parameter.grad is not None}
    return loss.detach(), gradients, mutated


def assert_equal_to_eager(
    captured: CapturedModel, model: nn.Module, loss: Tensor, kwargs: dict[str, Any], args: tuple[Any, ...] = ()
) -> None:
    """`loss` is the eager one, not yet differentiated."""
    own = dict(model.named_parameters(remove_duplicate=False))
    dtype = next(iter(own.values())).dtype
    loss.backward()  # type: ignore[no-untyped-call]
    loss = loss.detach()
    found, gradients, _ = run(captured, model, args, kwargs)
    assert abs(float(found - loss)) <= TOLERANCE[dtype] * abs(float(loss))
    for spec in captured.parameters:
        expected, gradient = own[spec.names[0]].grad, gradients.get(spec.placeholder)
        assert (expected is None) == (gradient is None), spec.names
        if expected is not None and gradient is not None:
            error = float((gradient - expected).abs().max()) / max(float(expected.abs().max()), FLOOR[dtype])
            assert error <= TOLERANCE[dtype], (spec.names, error)


@pytest.mark.parametrize(
    ("family", "dtype"),
    [*((family, torch.float32) for family in FAMILIES), *((family, torch.bfloat16) for family in FAMILIES[1::2])],
    ids=str,
)
def test_captured_is_eager(family: str, dtype: torch.dtype) -> None:
    model, kwargs = zoo(family, dtype=dtype)
    captured = capture(model, (), kwargs)
    before = {name: buffer.clone() for name, buffer in model.named_buffers()}
    _, _, mutated = run(captured, model, (), kwargs)
    loss = model(**kwargs).loss
    after = dict(model.named_buffers())
    changed = {name for name, buffer in after.items() if not torch.equal(buffer, before[name])}
    assert {b.names[0] for b in captured.buffers if b.mutated_by} == changed
    for buffer in captured.buffers:
        if buffer.mutated_by:
            torch.testing.assert_close(mutated[buffer.placeholder], after[buffer.names[0]])
    assert_equal_to_eager(captured, model, loss, kwargs)  # in training mode batch norm reads no running statistics


@pytest.mark.parametrize("family", FAMILIES[::2])
def test_promoted_captured_is_promoted_eager(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    moe = pytest.importorskip("transformers.integrations.moe")
    monkeypatch.setattr(moe, "_can_use_grouped_mm", lambda *_: False)  # torch's kernel has no float64
    model, kwargs = zoo(family, dtype=torch.float64)
    captured = promote_casts(capture(model, (), kwargs))
    floating = [n for n in captured.graph.nodes if n.op != "output" and isinstance(n.meta["val"], Tensor)]
    assert {n.meta["val"].dtype for n in floating if n.meta["val"].is_floating_point()} == {torch.float64}
    with promoted_eager():
        loss = model(**kwargs).loss
    assert loss.dtype == torch.float64
    assert_equal_to_eager(captured, model, loss, kwargs)


@pytest.mark.parametrize("family", ["llama", "resnet"])
def test_meta_and_real_models_give_one_graph(family: str) -> None:
    model, kwargs = zoo(family)
    on_meta = {k: v.to("meta") if isinstance(v, Tensor) else v for k, v in kwargs.items()}
    before = [(name, id(tensor)) for name, tensor in (*model.named_parameters(), *model.named_buffers())]
    real = capture(model, (), kwargs)
    assert before == [(name, id(tensor)) for name, tensor in (*model.named_parameters(), *model.named_buffers())]
    assert capture(model.to("meta"), (), on_meta).fingerprint == real.fingerprint


def test_specs_name_parameters_buffers_inputs_and_ties() -> None:
    model, kwargs = zoo("gpt2")
    captured = capture(model, (), kwargs)
    names = [set(spec.names) for spec in captured.parameters]
    assert {"transformer.wte.weight", "lm_head.weight"} in names
    assert set.union(*names) == {name for name, _ in model.named_parameters(remove_duplicate=False)}
    assert captured.parameters[0].placeholder == "p_transformer_wte_weight"
    assert [(i.placeholder, i.path, i.shape) for i in captured.inputs] == [
        ("input_ids", "input_ids", (8, 16)),
        ("labels", "labels", (8, 16)),
    ]
    modules = {node.meta["module"] for node in captured.graph.nodes}
    assert {"transformer.h.0.attn", "transformer.h.1.mlp", "lm_head"} <= {m.removesuffix(".c_fc") for m in modules}


def test_one_tensor_for_two_inputs_stays_two_inputs() -> None:
    model, kwargs = zoo("gpt2")
    kwargs["labels"] = kwargs["input_ids"]
    assert [spec.path for spec in capture(model, (), kwargs).inputs] == ["input_ids", "labels"]


class Mlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = torch.tensor([1.0, 2.0, 0.5, 1.5])
        self.first = nn.Linear(4, 4)
        self.second = nn.Linear(4, 4)
        self.head = nn.Linear(4, 3, bias=False)
        self.second.weight = self.first.weight
        self.head.weight.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.relu(self.first(x * self.scale + torch.arange(4)))
        with torch.no_grad():
            gate = torch.sigmoid(self.second(hidden))
        output: Tensor = self.head(self.second(hidden) * gate + hidden.detach())
        return output


def mean_loss(output: Tensor, batch: Any) -> Tensor:
    target: Tensor = batch["y"] if isinstance(batch, dict) else batch[1]
    return F.cross_entropy(output, target) + output.square().mean()


@pytest.mark.parametrize("by_keyword", [True, False])
def test_a_users_module_with_ties_frozen_parameters_stopped_gradients_and_a_loss_function(by_keyword: bool) -> None:
    torch.manual_seed(0)
    model = Mlp().double()
    x, y = torch.randn(6, 4, dtype=torch.float64), torch.tensor([0, 2, 1, 0, 1, 2])
    args: tuple[Tensor, ...] = () if by_keyword else (x, y)
    kwargs = {"x": x, "y": y} if by_keyword else {}
    captured = capture(model, args, kwargs, loss_fn=mean_loss)
    assert captured.parameters[0].names == ("first.weight", "second.weight")
    assert [spec.trainable for spec in captured.parameters] == [True, True, True, False]
    assert [spec.path for spec in captured.inputs] == (["x", "y"] if by_keyword else ["0", "1"])
    assert_equal_to_eager(captured, model, mean_loss(model(x), kwargs or args), kwargs, args)


def test_dropout_is_numbered_and_gone_in_eval_mode() -> None:
    model, kwargs = zoo("gpt2", dropout=0.1)
    nodes = capture(model, (), kwargs).graph.nodes
    sites = [n.kwargs["site"] for n in nodes if "site" in n.kwargs]
    assert sorted(sites) == list(range(1 + 2 * 3))  # embeddings; attention weights and two residuals a layer
    evaluated = capture(model.eval(), (), kwargs)
    assert not any("site" in n.kwargs for n in evaluated.graph.nodes)
    assert_equal_to_eager(evaluated, model, model(**kwargs).loss, kwargs)


def test_batch_norm_in_eval_mode_uses_running_statistics() -> None:
    model, kwargs = zoo("resnet", dtype=torch.float64)
    model(**kwargs)
    captured = capture(model.eval(), (), kwargs)
    assert not any(buffer.mutated_by for buffer in captured.buffers)
    targets = collections.Counter(target_name(n.target) for n in captured.graph.nodes)
    assert targets["aten.batch_norm.default"] == 11
    assert_equal_to_eager(captured, model, model(**kwargs).loss, kwargs)


class Branching(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        if x.sum() > 0:  # BRANCH
            x = -x
        total: Tensor = self.linear(x).sum()
        return total


class Selecting(Branching):
    def forward(self, x: Tensor) -> Tensor:
        kept = x[x > 0]  # SELECT
        total: Tensor = (self.linear.weight.sum() * kept).sum()
        return total


class Broken(Branching):
    def forward(self, x: Tensor) -> Tensor:
        total: Tensor = self.linear(x.reshape(3, 5)).sum()  # BROKEN
        return total


class Nested(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.scale = torch.ones(4)

    def forward(self, batch: dict[str, Any], flag: str) -> dict[str, Tensor]:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            hidden = self.linear(batch["parts"][0])
        return {"hidden": hidden, "total": (hidden.float() * batch["factor"] * self.scale).sum()}


def test_inputs_may_nest_and_what_is_no_tensor_is_a_constant() -> None:
    model = Nested()
    kwargs = {"batch": {"parts": [torch.randn(2, 4)], "factor": 3}, "flag": "x"}
    captured = capture(model, (), kwargs)
    assert [(spec.path, spec.placeholder) for spec in captured.inputs] == [("batch.parts.0", "batch_parts_0")]
    assert_equal_to_eager(captured, model, model(**kwargs)["total"], kwargs)


def test_an_attribute_without_a_value_cannot_become_a_constant() -> None:
    with torch.device("meta"):
        model = Nested()
    with pytest.raises(CaptureError, match="'scale' has no value"):
        capture(model, (), {"batch": {"parts": [torch.randn(2, 4)], "factor": 3}, "flag": "x"})


@pytest.mark.parametrize(
    ("cls", "mark", "remedy"), [(Branching, "BRANCH", "where"), (Selecting, "SELECT", "mask"), (Broken, "BROKEN", "")]
)
def test_what_cannot_be_captured_names_the_users_line(cls: type[nn.Module], mark: str, remedy: str) -> None:
    line = next(i for i, text in enumerate(Path(__file__).read_text().splitlines(), 1) if text.endswith(f"# {mark}"))
    with pytest.raises(CaptureError) as error:
        capture(cls(), (torch.randn(2, 4),))
    assert f"{Path(__file__).name}:{line}:" in str(error.value)
    assert remedy in str(error.value)


def test_models_without_a_loss_are_told_what_to_give() -> None:
    model, kwargs = zoo("llama")
    del kwargs["labels"]
    with pytest.raises(NoLossError, match="loss_fn="):
        capture(model, (), kwargs)
    with pytest.raises(NoLossError, match=r"a tensor \(2, 3\) of float32"):
        capture(nn.Linear(4, 3), (torch.randn(2, 4),), loss_fn=lambda output: output)
    frozen = nn.Linear(4, 3).requires_grad_(False)
    with pytest.raises(NoLossError, match="no gradient"):
        capture(frozen, (torch.randn(2, 4),), loss_fn=lambda output: output.sum())


def test_lazy_parameters_have_no_shape_to_capture() -> None:
    with pytest.raises(CaptureError, match="run its forward once"):
        capture(nn.LazyLinear(3), (torch.randn(2, 4),), loss_fn=lambda output: output.sum())


def test_constants_that_nothing_reads_are_left_out() -> None:
    """`len(torch.tensor([]))` is known while tracing: the tensor is no part of the graph, whatever value it has."""

    class Empty(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 2)

        def forward(self, x: Tensor) -> Tensor:
            chosen = torch.tensor([], dtype=torch.int64)
            weights = torch.ones(len(x)) if len(chosen) == 0 else chosen
            loss: Tensor = (self.linear(x).sum(1) * weights).sum()
            return loss

    captured = capture(Empty(), (torch.randn(3, 4),))
    assert all(any(node.name == name and node.users for node in captured.graph.nodes) for name in captured.constants)


def test_a_part_that_a_method_hides_is_named() -> None:
    class Hidden(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.parameters = nn.ParameterList([nn.Parameter(torch.ones(4))])  # type: ignore[assignment]

    with pytest.raises(CaptureError, match="Hidden has a part 'parameters'"):
        capture(Hidden(), (torch.randn(3, 4),))
