"""Each normalising pass: the form it leaves, and that the value stays; then the whole pipeline's op set."""

import operator
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn
from torch.nn import functional as F

from autopar.capture import capture
from autopar.oracle.reference import buffers_of, parameters_of, run_captured
from autopar.passes.graph_tools import verify
from autopar.passes.normalize.attention import mask_kind
from autopar.passes.normalize.constants import Compressed, compress, evaluate
from autopar.values.graph import CapturedModel, operands, shape_of, target_name
from autopar.values.inputs import bind_inputs
from tests.other_models import other_model
from tests.zoo import FAMILIES, zoo
from tests.zoo_graphs import zoo_graph

SDPA = torch.ops.aten.scaled_dot_product_attention.default


class Body(nn.Module):
    """A function of x[6, 4], a parameter w[4, 12] and a bias as a model."""

    def __init__(self, function: Callable[[Tensor, Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.weight = nn.Parameter(torch.randn(4, 12, dtype=torch.float64))
        self.bias = nn.Parameter(torch.randn(12, dtype=torch.float64))
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x, self.weight, self.bias).square().mean()


def captured_and_checked(function: Callable[[Tensor, Tensor, Tensor], Tensor]) -> list[str]:
    """Targets of the normal form of a body, in order, after checking its value and gradients."""
    model = Body(function)
    x = torch.randn(2, 3, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    captured = capture(model, (x,))
    expected = model(x)
    expected.backward()
    parameters = {k: v.detach().clone().requires_grad_() for k, v in parameters_of(captured, model).items()}
    loss, _ = run_captured(captured, parameters, buffers_of(captured, model), bind_inputs(captured.inputs, (x,), {}))
    torch.testing.assert_close(loss, expected)
    loss.backward()  # type: ignore[no-untyped-call]
    torch.testing.assert_close(parameters["p_weight"].grad, model.weight.grad)
    return [short(n) for n in captured.graph.nodes if n.op == "call_function"][:-2]  # less square and mean


def short(node: fx.Node) -> str:
    return target_name(node.target).removeprefix("aten.").removeprefix("transformers.").split(".")[0]


FORMS: dict[str, tuple[Callable[[Tensor, Tensor, Tensor], Tensor], list[str]]] = {
    "noops": (lambda x, w, b: (x.clone().to(x.dtype) + 0) * 1 @ w.contiguous().expand(4, 12), ["permute", "linear"]),
    "flattened linear": (
        lambda x, w, b: torch.addmm(b, x.reshape(-1, 4), w).view(2, 3, 12),
        ["permute", "linear"],
    ),
    "heads merged by the flattening": (
        lambda x, w, b: torch.mm(x.view(2, 3, 2, 2).transpose(1, 2).transpose(1, 2).exp().view(6, 4), w).view(2, 3, 12),
        ["reshape", "exp", "permute", "reshape", "linear"],
    ),
    "merged views": (
        lambda x, w, b: F.linear(x, w.t(), b).view(6, 12).view(6, 3, 4).flatten().view(2, 36),
        ["permute", "linear", "reshape"],
    ),
    "merged orders": (
        lambda x, w, b: (x @ w).transpose(0, 1).permute(2, 0, 1).movedim(0, 2),
        ["permute", "linear", "permute"],
    ),
    "cancelled orders": (lambda x, w, b: (x @ w).transpose(-1, -2).transpose(1, 2), ["permute", "linear"]),
    "select": (lambda x, w, b: (x @ w)[:, -1], ["permute", "linear", "slice", "reshape"]),
    "unbind": (
        lambda x, w, b: operator.sub(*(x @ w).unbind(0)),
        ["permute", "linear", "slice", "reshape", "slice", "reshape", "sub"],
    ),
    "fused projection": (
        lambda x, w, b: operator.sub(*torch.addmm(b, x.view(6, 4), w).view(2, 3, 12).split([6, 6], -1)),
        ["slice", "permute", "slice", "linear", "slice", "permute", "slice", "linear", "sub"],
    ),
    "projection read whole as well": (
        lambda x, w, b: (y := x @ w) + y[..., :6].repeat(1, 1, 2),
        ["permute", "linear", "slice", "repeat", "add"],
    ),
    "constant condition": (
        lambda x, w, b: torch.where(torch.ones(3, 1, dtype=torch.bool).expand(3, 12), x @ w, 0.0),
        ["permute", "linear"],
    ),
    "assigned slices": (
        lambda x, w, b: torch.zeros(2, 3, 13, dtype=x.dtype).slice_scatter(x @ w, 2, 1),
        ["permute", "linear", "expand", "cat"],
    ),
    "dtypes of others": (
        lambda x, w, b: (x @ w).type_as(b) + (x @ w).float().type_as(w),
        ["permute", "linear", "permute", "linear", "_to_copy", "_to_copy", "add"],
    ),
    "expand sinks": (lambda x, w, b: w.unsqueeze(0).expand(2, 4, 12) * 2.0 + b, ["unsqueeze", "mul", "add", "square"]),
    "broadcast together": (
        lambda x, w, b: operator.add(*torch.broadcast_tensors(x @ w, b)),
        ["permute", "linear", "add"],
    ),
    "a loss and its mean": (
        lambda x, w, b: F.mse_loss(x @ w, b.expand(2, 3, 12)),
        ["permute", "linear", "expand", "mse_loss", "mean"],
    ),
    "a loss and its sum": (
        lambda x, w, b: F.smooth_l1_loss(x @ w, b.expand(2, 3, 12), reduction="sum", beta=0.5),
        ["permute", "linear", "expand", "smooth_l1_loss", "sum"],
    ),
    "a loss of each element": (
        lambda x, w, b: F.l1_loss(x @ w, b.expand(2, 3, 12), reduction="none"),
        ["permute", "linear", "sub", "abs"],
    ),
    "random follows its operand": (
        lambda x, w, b: x @ w + 0.0 * torch.rand(2, 3, 12, dtype=x.dtype),
        ["permute", "linear", "noise", "mul", "add"],
    ),
}


@pytest.mark.parametrize("name", FORMS)
def test_forms(name: str) -> None:
    function, expected = FORMS[name]
    assert captured_and_checked(function) == expected


@pytest.mark.parametrize("seed", range(20))
def test_compression_is_exact_and_tight(seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)

    def pick(high: int) -> int:
        return int(torch.randint(1, high, (), generator=generator))

    shape = [pick(5) for _ in range(pick(5))]
    varies = [pick(3) == 1 for _ in shape]
    seedling = torch.randn([n if v else 1 for n, v in zip(shape, varies, strict=True)], generator=generator)
    for whole in (seedling.expand(shape), seedling.expand(shape).clone()):
        small = compress(whole)
        assert small.shape == seedling.shape
        assert torch.equal(small.expand(shape), whole)


@pytest.mark.parametrize("seed", range(30))
def test_calls_on_compressed_values_give_what_whole_ones_give(seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)

    def pick(low: int, high: int) -> int:
        return int(torch.randint(low, high, (), generator=generator))

    graph, values, whole = fx.Graph(), dict[str, Compressed](), dict[str, Tensor]()

    def constant(shape: list[int], highest: int = 100) -> fx.Node:
        """A constant that varies along some of its dims."""
        node = graph.placeholder(f"c{len(values)}")
        varying = [n if pick(0, 2) else 1 for n in shape]
        tensor = torch.randint(highest, varying, generator=generator)
        whole[node.name] = tensor.expand(shape)
        values[node.name] = Compressed(tensor=compress(whole[node.name]), shape=tuple(shape))
        return node

    shape = [pick(1, 5) for _ in range(pick(1, 4))]
    dim, aten = pick(0, len(shape)), torch.ops.aten
    x = constant(shape)
    calls: list[tuple[Any, tuple[Any, ...], dict[str, Any]]] = [
        (aten.cumsum.default, (x, dim - len(shape)), {}),
        (aten.diff.default, (x, 1, dim, constant([*shape[:dim], 2, *shape[dim + 1 :]])), {}),
        (aten.diff.default, (x,), {"dim": dim, "append": constant([*shape[:dim], 1, *shape[dim + 1 :]])}),
        (aten.flip.default, (x, [dim]), {}),
    ]
    places = [pick(1, 4) for _ in range(pick(1, 4))]  # the shape of what is looked up
    indices = [constant([n if pick(0, 2) else 1 for n in places], size) if pick(0, 3) else None for size in shape]
    indices[dim] = constant(places, shape[dim])
    calls.append((aten.index.Tensor, (x, indices), {}))
    for target, args, kwargs in calls:
        node = graph.call_function(target, args, kwargs)
        expected = target(
            *fx.node.map_arg(args, lambda n: whole[n.name]), **fx.node.map_arg(kwargs, lambda n: whole[n.name])
        )
        node.meta["val"] = expected.to("meta")
        assert torch.equal(evaluate(node, values).whole, expected), (target, shape, places)


def test_masks_are_read_exactly() -> None:
    causal = torch.ones(1, 1, 5, 5, dtype=torch.bool).tril()
    lowest = torch.finfo(torch.float32).min
    assert mask_kind(causal) == "causal"
    assert mask_kind(torch.zeros(5, 5).masked_fill(~causal[0, 0], lowest)) == "causal"
    assert mask_kind(torch.zeros(5, 5).masked_fill(~causal[0, 0], -torch.inf)) == "causal"
    assert mask_kind(torch.ones(1, 1, 1, 1, dtype=torch.bool)) == "all"
    assert mask_kind(torch.zeros(1, 5)) == "all"
    for row in range(5):
        for column in range(5):
            flipped = causal.clone()
            flipped[0, 0, row, column] ^= True
            assert mask_kind(flipped) == "other"
    assert mask_kind(torch.zeros(5, 5).masked_fill(~causal[0, 0], -1.0)) == "other"
    assert mask_kind(causal.expand(2, 1, 5, 5)) == "other"
    assert mask_kind(causal[..., :4, :]) == "other"


def nodes_of(captured: CapturedModel, target: Any) -> list[fx.Node]:
    return [node for node in captured.graph.nodes if node.target is target]


@pytest.fixture(scope="module")
def captured() -> dict[str, CapturedModel]:
    return {family: zoo_graph(family) for family in FAMILIES}


def _called(family: str) -> tuple[nn.Module, tuple[()], dict[str, Any]]:
    model, kwargs = zoo(family)
    return model, (), kwargs


ALLOWED = """
adaptive_avg_pool2d add batch_norm cat constant_pad_nd conv1d conv2d cos cross_entropy cumsum div embedding eq
expand gather gelu getitem grouped_linear index layer_norm linear masked_fill max_pool2d mean mul neg permute pow relu
reshape rsqrt scaled_dot_product_attention silu sin slice softmax sum tanh topk unsqueeze where _to_copy
"""


@pytest.mark.parametrize("family", FAMILIES)
def test_the_op_set_is_small_and_regular(family: str, captured: dict[str, CapturedModel]) -> None:
    graph = captured[family].graph
    verify(captured[family])
    calls = [node for node in graph.nodes if node.op == "call_function"]
    assert {short(node) for node in calls} <= set(ALLOWED.split())
    for node in calls:
        assert not {"device", "layout", "pin_memory", "memory_format"} & set(node.kwargs), node
        assert node.users
        if short(node) in ("reshape", "expand"):
            assert tuple(node.args[1]) == shape_of(node)
    for name, value in captured[family].constants.items():
        assert value.device.type == "cpu"
        assert name in captured[family].nodes


@pytest.mark.parametrize("family", ["gpt2", "llama", "mixtral"])
def test_causal_masks_are_recognised(family: str, captured: dict[str, CapturedModel]) -> None:
    attentions = nodes_of(captured[family], SDPA)
    assert len(attentions) == 2
    assert all(node.args[3] is None and node.kwargs["is_causal"] is True for node in attentions)
    assert all(node.kwargs["enable_gqa"] is (family != "gpt2") for node in attentions)


def test_only_relative_biases_and_nothing_else_are_masks(captured: dict[str, CapturedModel]) -> None:
    for family in ("bert", "vit"):
        assert all(n.args[3] is None and not n.kwargs["is_causal"] for n in nodes_of(captured[family], SDPA))
    masks = [node.args[3] for node in nodes_of(captured["t5"], SDPA)]
    shapes = [shape_of(mask) if isinstance(mask, fx.Node) else None for mask in masks]
    assert shapes == [(1, 4, 16, 16)] * 2 + [(1, 4, 12, 12), None] * 2


def test_calls_that_read_a_boolean_mask_share_one_to_add() -> None:
    model, kwargs = other_model("masked: documents")
    captured = capture(model, (), kwargs)
    [added] = {node.args[3] for node in nodes_of(captured, SDPA)}
    assert isinstance(added, fx.Node) and added.target is torch.ops.aten.log.default and len(added.users) == 2
    assert added.meta["module"] == operands(operands(added)[0])[0].meta["module"]


def test_dropout_probability_survives_mask_recognition() -> None:
    model, kwargs = zoo("llama", dropout=0.25)
    [first, _] = [n for n in capture(model, (), kwargs).graph.nodes if short(n) == "attention"]
    assert (first.args[3], first.kwargs["is_causal"], first.kwargs["dropout_p"]) == (None, True, 0.25)


def test_the_fused_projection_of_gpt2_becomes_three(captured: dict[str, CapturedModel]) -> None:
    linears = nodes_of(captured["gpt2"], torch.ops.aten.linear.default)
    assert len(linears) == 2 * (3 + 3) + 1
    assert {len(shape_of(node)) for node in linears} == {3}


@pytest.mark.parametrize("family", ["gpt2", "llama", "mixtral", "bert", "t5", "whisper"])
def test_the_loss_sees_unflattened_logits(family: str, captured: dict[str, CapturedModel]) -> None:
    [loss] = [node for node in captured[family].graph.nodes if short(node) == "cross_entropy"]
    logits, target = loss.args
    assert isinstance(logits, fx.Node) and isinstance(target, fx.Node)
    assert shape_of(logits)[:-1] == shape_of(target) and len(shape_of(target)) == 2


def test_constants_are_never_as_large_as_the_batch() -> None:
    model, kwargs = zoo("t5")
    elements = sum(value.numel() for value in capture(model, (), kwargs).constants.values())
    large = {k: v.repeat(16, 1) if isinstance(v, Tensor) else v for k, v in kwargs.items()}
    assert sum(value.numel() for value in capture(model, (), large).constants.values()) == elements


@pytest.mark.parametrize("shape", [(4, 7), (4, 7, 5), (2, 7, 3, 5)])
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_cross_entropy_puts_classes_last(shape: tuple[int, ...], reduction: str) -> None:
    target = torch.randint(0, 7, (shape[0], *shape[2:]))
    target.flatten()[::3] = -100
    model = nn.Conv1d(7, 7, 1).double()

    class Wrapped(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv = model

        def forward(self, x: Tensor) -> Tensor:
            y = self.conv(x.reshape(shape[0], 7, -1)).reshape(shape)
            return F.cross_entropy(y, target.to(y.device), reduction=reduction, label_smoothing=0.1).sum()

    wrapped = Wrapped()
    x = torch.randn(shape, dtype=torch.float64)
    captured = capture(wrapped, (x,))
    assert any(short(node) == "cross_entropy" for node in captured.graph.nodes)
    parameters = parameters_of(captured, wrapped)
    loss, _ = run_captured(captured, parameters, {}, bind_inputs(captured.inputs, (x,), {}))
    torch.testing.assert_close(loss, wrapped(x))


def test_verify_rejects_what_a_pass_may_not_leave(captured: dict[str, CapturedModel]) -> None:
    from autopar.errors import PassError

    model, kwargs = zoo("vit")
    broken = capture(model, (), kwargs)
    node = next(n for n in broken.graph.nodes if n.op == "call_function")
    module = node.meta.pop("module")
    with pytest.raises(PassError, match="module"):
        verify(broken)
    node.meta["module"] = module
    value = node.meta["val"]
    node.meta["val"] = torch.zeros(value.shape)
    with pytest.raises(PassError, match="meta tensor"):
        verify(broken)
    node.meta["val"] = value
    verify(broken)
    extra = broken.graph.nodes.__iter__().__next__()
    with broken.graph.inserting_before(extra):
        unknown = broken.graph.placeholder("unknown")
    unknown.meta = dict(extra.meta)
    with pytest.raises(PassError, match="unknown"):
        verify(broken)
