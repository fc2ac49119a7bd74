"""Sample calls for every rule, shared by the checks in one process and those over processes."""

import operator
from typing import Any

import torch

from autopar.ops.attention import attention
from autopar.ops.batch_norm import batch_norm
from autopar.ops.cross_entropy import count_labels, cross_entropy
from tests.op_sample import Input, Sample, X, aten
from tests.other_samples import OTHERS
from tests.product_samples import EINSUMS, TRANSPOSED
from tests.product_samples import floats as _floats
from tests.random_samples import RANDOM


def _ids(shape: tuple[int, ...], high: int, low: int = 0) -> Input:
    return Input(shape=shape, kind="ids", high=high, low=low)


def _on_one(name: str, *args: Any, shape: tuple[int, ...] = (4, 6, 5), kind: str = "float", **kwargs: Any) -> Sample:
    """A sample of `aten.<name>(x, *args)`."""
    target = operator.attrgetter(name)(aten)
    title = " ".join([name, *map(str, args), *(f"{k}={v}" for k, v in kwargs.items()), "x".join(map(str, shape))])
    return Sample(name=title, target=target, args=(X(0), *args), kwargs=kwargs, inputs=(Input(shape=shape, kind=kind),))


def _on(name: str, *inputs: Input, title: str = "", **kwargs: Any) -> Sample:
    """A sample of `aten.<name>` on all its inputs."""
    target = operator.attrgetter(name)(aten)
    shapes = " ".join("x".join(map(str, i.shape)) + ("" if i.grad else "!") for i in inputs)
    label = " ".join(filter(None, (name, title, shapes, *(f"{k}={v}" for k, v in kwargs.items()))))
    return Sample(name=label, target=target, args=tuple(map(X, range(len(inputs)))), kwargs=kwargs, inputs=inputs)


def _attention(
    title: str,
    q: tuple[int, ...],
    k: tuple[int, ...],
    mask: Input | None = None,
    *,
    causal: bool = False,
    p: float = 0.0,
) -> Sample:
    inputs = (*_floats(q, k, k), *((mask,) if mask else ()))
    grouped = len(q) == 4 and q[1] != k[1]
    args = (X(0), X(1), X(2), X(3) if mask else None)
    kwargs = {"dropout_p": p, "is_causal": causal, "scale": 0.3, "enable_gqa": grouped}
    if p:
        return Sample(
            name=f"attention {title}", target=attention, args=args, kwargs={**kwargs, "site": 3}, inputs=inputs
        )
    target = aten.scaled_dot_product_attention.default
    return Sample(name=f"sdpa {title}", target=target, args=args, kwargs=kwargs, inputs=inputs)


def _cross_entropy(shape: tuple[int, ...], ignored: int = 0, **kwargs: Any) -> Sample:
    labels = _ids(shape[:-1], shape[-1])
    title = " ".join(f"{k}={v}" for k, v in kwargs.items())
    return Sample(
        name=f"cross_entropy {'x'.join(map(str, shape))} {ignored} ignored {title}",
        target=cross_entropy,
        args=(X(0), X(1)),
        kwargs={"ignore_index": -100, **kwargs},
        inputs=(Input(shape=shape), labels),
        ignored=ignored,
    )


UNARY = "gelu silu mish abs sin cos erf relu tanh sigmoid exp neg clone hardswish softplus square"
POSITIVE = "log sqrt rsqrt reciprocal log1p"

ELEMENTWISE = (
    *(_on_one(f"{name}.default") for name in UNARY.split()),
    *(_on_one(f"{name}.default", kind="positive") for name in POSITIVE.split()),
    *(_on_one(f"{name}.Tensor", 1.7) for name in ("add", "sub", "mul", "div")),
    *(_on_one("pow.Tensor_Scalar", e, kind="positive") for e in (2, 3.0, 0.5, -1)),
    _on_one("clamp.default", -0.5, 0.5),
    _on_one("_to_copy.default", dtype=torch.float32),
    *(
        _on(f"{name}.Tensor", Input(shape=a), Input(shape=b, kind="positive"))
        for name in ("add", "sub", "mul", "div")
        for a, b in (((4, 6, 5), (4, 6, 5)), ((4, 6, 5), (5,)), ((4, 1, 5), (6, 1)), ((4, 6), ()))
    ),
    _on("mul.Tensor", Input(shape=(4, 6)), Input(shape=(4, 6), grad=False)),
    _on("div.Tensor", Input(shape=(4, 6)), Input(shape=(4, 6), kind="positive", grad=False)),
    _on("pow.Tensor_Tensor", Input(shape=(4, 6), kind="positive"), Input(shape=(6,))),
    _on("maximum.default", *_floats((4, 6), (4, 6))),
    _on("min.other", *_floats((4, 6), (6,))),
    *(
        Sample(name=name, target=target, args=(X(0), X(1), 0), inputs=_floats((4, 6), (4, 6)))
        for name, target in (
            ("mse_loss", aten.mse_loss.default),
            ("smooth_l1_loss", aten.smooth_l1_loss.default),
            ("huber_loss", aten.huber_loss.default),
        )
    ),
    Sample(
        name="soft_margin_loss",
        target=aten.soft_margin_loss.default,
        args=(X(0), X(1), 0),
        inputs=(Input(shape=(4, 6)), Input(shape=(4, 6), grad=False)),
    ),
    Sample(name="mse_loss, reduced", target=aten.mse_loss.default, args=(X(0), X(1)), inputs=_floats((4, 6), (4, 6))),
    _on("where.self", Input(shape=(4, 1, 5), kind="bool"), *_floats((4, 6, 5), (6, 1))),
    Sample(
        name="where.ScalarOther",
        target=aten.where.ScalarOther,
        args=(X(0), X(1), 0.0),
        inputs=(Input(shape=(6, 5), kind="bool"), Input(shape=(4, 6, 5))),
    ),
    *(
        Sample(
            name=f"masked_fill {value}",
            target=aten.masked_fill.Scalar,
            args=(X(0), X(1), value),
            inputs=(Input(shape=(4, 6, 5)), Input(shape=(6, 5), kind="bool")),
        )
        for value in (0.0, -1e9)
    ),
    _on_one("detach.default"),
    _on("floor_divide.default", _ids((4, 6), 9), _ids((6,), 4, low=1)),
    _on("eq.Tensor", _ids((4, 6), 3), _ids((6,), 3)),
    _on("__and__.Tensor", Input(shape=(4, 6), kind="bool"), Input(shape=(1, 6), kind="bool")),
    _on("atan2.default", *_floats((4, 6), (4, 6)), title="(pointwise by its tag)"),
)

VIEWS = (
    *(
        _on_one("reshape.default", list(target), shape=source)
        for source, target in (
            ((4, 6, 12), (4, 6, 4, 3)),
            ((4, 6, 4, 3), (4, 6, 12)),
            ((4, 6, 12), (24, 12)),
            ((24, 5), (4, 6, 5)),
            ((4, 1, 6), (4, 6, 1, 1)),
            ((6, 4), (4, 6)),
            ((12, 4), (6, 8)),
            ((1, 12), (2, 6)),
            ((), (1,)),
        )
    ),
    _on_one("view.default", [4, 6, 2, 3], shape=(4, 6, 6)),
    _on_one("squeeze.default", shape=(4, 1, 6)),
    _on_one("squeeze.dims", [1], shape=(4, 1, 6)),
    _on_one("unsqueeze.default", 1),
    _on_one("unsqueeze.default", -1),
    _on_one("expand.default", [4, 6, 5], shape=(1, 5)),
    _on_one("expand.default", [4, -1, 6, 5], shape=(4, 1, 1, 5)),
    _on_one("repeat.default", [4, 1, 6, 1], shape=(4, 1, 5)),
    _on_one("repeat.default", [1, 2, 1]),
    _on_one("permute.default", [2, 0, 1]),
    _on_one("transpose.int", 1, -1),
    _on_one("t.default", shape=(4, 6)),
    _on_one("select.int", 1, 2),
    _on_one("slice.Tensor", 1, 1, 5),
    _on_one("slice.Tensor", 1, 0, 6),
    _on_one("slice.Tensor", -1, 0, 4, 2),
    _on_one("split.Tensor", 2, 1),
    _on_one("split_with_sizes.default", [4, 1], -1),
    _on_one("unbind.int", 2, shape=(4, 6, 2)),
    _on_one("flip.default", [1]),
    _on_one("tril.default"),
    _on_one("cumsum.default", 1),
    _on_one("constant_pad_nd.default", [0, 1, 2, 0]),
    _on_one("constant_pad_nd.default", [0, 1], 3.0),
    _on_one("pad.default", [1, 1]),
    Sample(
        name="cat",
        target=aten.cat.default,
        args=([X(0), X(1), X(0)], 1),
        inputs=_floats((4, 3, 5), (4, 2, 5)),
    ),
    Sample(name="stack", target=aten.stack.default, args=([X(0), X(1)], 1), inputs=_floats((4, 5), (4, 5))),
    Sample(
        name="slice_scatter",
        target=aten.slice_scatter.default,
        args=(X(0), X(1), 1, 2, 4),
        inputs=_floats((4, 6, 5), (4, 2, 5)),
    ),
    Sample(
        name="select_scatter",
        target=aten.select_scatter.default,
        args=(X(0), X(1), 1, 2),
        inputs=_floats((4, 6, 5), (4, 5)),
    ),
)

PRODUCTS = (
    _on("linear.default", *_floats((4, 6, 12), (10, 12), (10,))),
    _on("linear.default", *_floats((4, 6), (7, 6))),
    _on("linear.default", Input(shape=(4, 6), grad=False), *_floats((9, 6), (9,))),
    _on("linear.default", Input(shape=(4, 6)), Input(shape=(9, 6), grad=False)),
    _on("mm.default", *_floats((4, 6), (6, 5))),
    _on("bmm.default", *_floats((4, 3, 6), (4, 6, 5))),
    _on("matmul.default", *_floats((4, 2, 3, 6), (6, 5))),
    _on("matmul.default", *_floats((4, 1, 3, 6), (2, 6, 5))),
    _on("addmm.default", *_floats((5,), (4, 6), (6, 5))),
    _on("addmm.default", *_floats((4, 1), (4, 6), (6, 5))),
    _on("baddbmm.default", *_floats((4, 3, 5), (4, 3, 6), (4, 6, 5))),
)

ATTENTION = (
    _attention("plain", (4, 6, 5, 8), (4, 6, 7, 8)),
    _attention("three dims", (4, 5, 8), (4, 7, 8)),
    _attention("causal", (2, 2, 6, 8), (2, 2, 6, 8), causal=True),
    _attention("causal, uneven query", (2, 2, 7, 8), (2, 2, 7, 8), causal=True),
    _attention("grouped", (2, 12, 6, 8), (2, 6, 6, 8), causal=True),
    _attention("one key head", (2, 4, 6, 8), (2, 1, 6, 8)),
    _attention("uneven heads", (2, 5, 6, 8), (2, 5, 6, 8)),
    _attention("float mask", (4, 6, 6, 8), (4, 6, 6, 8), Input(shape=(1, 6, 6, 6), grad=False)),
    _attention("mask of fewer keys", (4, 6, 5, 8), (4, 6, 16, 8), Input(shape=(4, 1, 5, 16), grad=False)),
    _attention("bias", (4, 6, 6, 8), (4, 6, 6, 8), Input(shape=(1, 6, 6, 6))),
    _attention("grouped, mask", (2, 4, 6, 8), (2, 2, 6, 8), Input(shape=(2, 1, 1, 6), grad=False)),
    _attention("dropout", (4, 4, 6, 8), (4, 4, 6, 8), p=0.3),
    _attention("dropout, causal, grouped", (2, 4, 7, 8), (2, 2, 7, 8), causal=True, p=0.3),
    _attention("dropout, bias", (4, 4, 6, 8), (4, 4, 6, 8), Input(shape=(1, 4, 6, 6)), p=0.3),
)

NORMS = (
    Sample(
        name="layer_norm",
        target=aten.layer_norm.default,
        args=(X(0), [5], X(1), X(2), 1e-5),
        inputs=_floats((4, 6, 5), (5,), (5,)),
    ),
    Sample(
        name="layer_norm, two dims, no weight",
        target=aten.layer_norm.default,
        args=(X(0), [6, 5]),
        inputs=_floats((4, 6, 5)),
    ),
    Sample(
        name="rms_norm",
        target=aten.rms_norm.default,
        args=(X(0), [5], X(1), 1e-5),
        inputs=_floats((4, 6, 5), (5,)),
    ),
    Sample(
        name="group_norm",
        target=aten.group_norm.default,
        args=(X(0), 2, X(1), X(2), 1e-5),
        inputs=_floats((4, 6, 3, 3), (6,), (6,)),
    ),
    _on_one("softmax.int", -1),
    _on_one("softmax.int", 1),
    _on_one("log_softmax.int", -1),
    Sample(
        name="batch_norm",
        target=batch_norm,
        args=(X(0), X(1), X(2), X(3), X(4)),
        kwargs={"momentum": 0.1, "eps": 1e-5},
        inputs=(
            *_floats((6, 4, 6, 6), (4,), (4,)),
            Input(shape=(4,), grad=False),
            Input(shape=(4,), kind="positive", grad=False),
        ),
    ),
    Sample(
        name="batch_norm, frozen",
        target=batch_norm,
        args=(X(0), None, None, X(1), X(2)),
        kwargs={"momentum": 0.1, "eps": 1e-5},
        inputs=(
            *_floats((4, 3)),
            Input(shape=(3,), grad=False),
            Input(shape=(3,), kind="positive", grad=False),
        ),
    ),
    Sample(
        name="batch_norm, evaluation",
        target=aten.batch_norm.default,
        args=(X(0), X(1), X(2), X(3), X(4), False, 0.1, 1e-5, False),
        inputs=(
            *_floats((4, 3, 6), (3,), (3,)),
            Input(shape=(3,), grad=False),
            Input(shape=(3,), kind="positive", grad=False),
        ),
    ),
)

REDUCTIONS = (
    _on_one("sum.dim_IntList", [1]),
    _on_one("sum.dim_IntList", [0, -1], True),
    _on_one("sum.default"),
    _on_one("mean.dim", [-1], True),
    _on_one("mean.dim", [1, 0]),
    _on_one("mean.default"),
    _on_one("amax.default", [1]),
    _on_one("logsumexp.default", [-1]),
    _on_one("max.dim", 1),
    _on_one("max.default"),
    _on_one("argmax.default", 1),
    _on_one("var.correction", [1]),
    _on_one("std.correction", [1], keepdim=True),
    _on_one("topk.default", 3, 1),
    _on_one("sort.default", 1),
)

LOOKUPS = (
    _on("embedding.default", Input(shape=(12, 6)), _ids((4, 5), 12)),
    _on("embedding.default", Input(shape=(11, 7)), _ids((6,), 11), title="uneven"),
    Sample(
        name="embedding with padding",
        target=aten.embedding.default,
        args=(X(0), X(1), 7),
        inputs=(Input(shape=(12, 6)), _ids((4, 5), 9, low=6)),
    ),
    Sample(
        name="index",
        target=aten.index.Tensor,
        args=(X(0), [X(1)]),
        inputs=(Input(shape=(9, 4, 6)), _ids((6, 2), 9)),
    ),
    Sample(
        name="index, two in the middle",
        target=aten.index.Tensor,
        args=(X(0), [None, X(1), X(2)]),
        inputs=(Input(shape=(4, 5, 3, 6)), _ids((6, 1), 5), _ids((2,), 3)),
    ),
    Sample(
        name="index_select",
        target=aten.index_select.default,
        args=(X(0), 1, X(1)),
        inputs=(Input(shape=(4, 5, 6)), _ids((6,), 5)),
    ),
    Sample(
        name="gather",
        target=aten.gather.default,
        args=(X(0), 1, X(1)),
        inputs=(Input(shape=(4, 5, 6)), _ids((4, 6, 3), 5)),
    ),
)

CONVOLUTIONS = (
    Sample(
        name="conv1d",
        target=aten.conv1d.default,
        args=(X(0), X(1), X(2), [1], [1]),
        inputs=_floats((4, 6, 9), (8, 6, 3), (8,)),
    ),
    Sample(
        name="conv2d",
        target=aten.conv2d.default,
        args=(X(0), X(1), None, [2, 2]),
        inputs=_floats((4, 6, 7, 7), (8, 6, 3, 3)),
    ),
    Sample(
        name="conv2d in groups",
        target=aten.conv2d.default,
        args=(X(0), X(1), X(2), [1, 1], [0, 0], [1, 1], 6),
        inputs=_floats((4, 6, 5, 5), (12, 1, 3, 3), (12,)),
    ),
    Sample(
        name="conv2d of an image",
        target=aten.conv2d.default,
        args=(X(0), X(1), X(2)),
        inputs=(Input(shape=(4, 3, 5, 5), grad=False), *_floats((8, 3, 3, 3), (8,))),
    ),
    _on_one("max_pool2d.default", [3, 3], [2, 2], [1, 1], shape=(4, 6, 8, 8)),
    _on_one("avg_pool2d.default", [2, 2], shape=(4, 6, 8, 8)),
    _on_one("adaptive_avg_pool2d.default", [1, 1], shape=(4, 6, 8, 8)),
    _on_one("adaptive_avg_pool2d.default", [2, 2], shape=(4, 6, 8, 8)),
)

LOSSES = (
    _cross_entropy((4, 6, 12), 5, reduction="mean"),
    _cross_entropy((4, 11), 3, reduction="mean"),
    _cross_entropy((4, 6, 11), 5, reduction="sum", label_smoothing=0.1),
    _cross_entropy((4, 6, 11), 5, reduction="mean", label_smoothing=0.1),
    _cross_entropy((4, 7, 12), 2, reduction="none"),
    _cross_entropy((4, 6, 12), 5, reduction="mean", count=24),
    Sample(
        name="count_labels", target=count_labels, args=(X(0),), kwargs={"ignore_index": 3}, inputs=(_ids((4, 6), 5),)
    ),
)

CREATION = (
    Sample(name="arange", target=aten.arange.default, args=(6,), inputs=()),
    Sample(name="histc (no rule)", target=aten.histc.default, args=(X(0), 4), inputs=(Input(shape=(6,), grad=False),)),
)

SAMPLES = (
    *ELEMENTWISE,
    *RANDOM,
    *VIEWS,
    *PRODUCTS,
    *EINSUMS,
    *TRANSPOSED,
    *ATTENTION,
    *NORMS,
    *REDUCTIONS,
    *LOOKUPS,
    *CONVOLUTIONS,
    *LOSSES,
    *CREATION,
    *OTHERS,
)
