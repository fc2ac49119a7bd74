"""Does a captured graph compute what an op of torch's own tests does? Its samples as small models, each compared.

A sample's tensors with gradients are parameters, its others inputs; the loss is the sum of all elements of all results
under fixed random weights. Each result is also scaled by a parameter of its own, whose gradient is the result's value.
"""

import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from itertools import islice
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from autopar.capture import capture
from autopar.errors import AutoparError
from autopar.oracle.reference import buffers_of, parameters_of, run_captured
from autopar.passes.call_natively import call_natively
from autopar.values.graph import CapturedModel
from autopar.values.inputs import bind_inputs

DTYPES = (torch.float64, torch.float32, torch.int64, torch.bool, torch.complex128)
"""float32 counts only for ops without float64."""
TOLERANCE, LOOSE = 1e-7, 2e-3
"""Relative and absolute, of float64 and of float32; a graph may call other kernels, which add in another order."""
LOOKED_AT = 200
"""Of how many samples of an op those that run are drawn, evenly."""


SEED = 42
"""What torch's own samples of in-place random ops seed the generator with, inside the call."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Key:
    """Names one sample. table: `op` or `module`; variant: `""`, or `inplace` on a copy of the first operand."""

    table: str
    op: str
    dtype: str
    index: int
    variant: str = ""

    def __str__(self) -> str:
        called = f"{self.op}{f' ({self.variant})' if self.variant else ''}"
        return f"{called} {self.dtype}[{self.index}]"


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What became of a sample. kind: `equal`, `wrong`, `refused`, `failed` or `skipped`; random: it draws numbers."""

    kind: str
    reason: str = ""
    random: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """One call of torch's tests.

    call: of `leaves` (tensors and other values), to results; inner: a module that it calls, if any.
    """

    key: Key
    call: Callable[[list[Any]], Any]
    leaves: list[Any]
    inner: nn.Module | None = None


class SampleModel(nn.Module):
    """Samples as a model that returns its loss. Tensors that require a gradient are parameters, others its inputs."""

    def __init__(self, samples: Sequence[Sample]) -> None:
        super().__init__()
        self.samples = tuple(samples)
        self.inner = nn.ModuleList([sample.inner for sample in samples if sample.inner is not None])
        for index, sample in enumerate(samples):
            for slot, leaf in enumerate(sample.leaves):
                if isinstance(leaf, Tensor) and leaf.requires_grad:
                    self.register_parameter(f"leaf{index}_{slot}", nn.Parameter(contiguous(leaf)))
        self.weigh()

    def inputs(self) -> tuple[Tensor, ...]:
        """Those that the model is called with, anew: an op may write them."""
        leaves = [leaf for sample in self.samples for leaf in sample.leaves]
        return tuple(contiguous(leaf) for leaf in leaves if isinstance(leaf, Tensor) and not leaf.requires_grad)

    def weigh(self) -> None:
        """Draw a weight for every element of all results, and one more parameter a result."""
        generator = torch.Generator().manual_seed(0)
        before = {name: buffer.clone() for name, buffer in self.named_buffers()}
        with torch.no_grad():
            results = self.results(self.inputs())
            for name, buffer in self.named_buffers():
                buffer.copy_(before[name])
        self.finite = [bool(torch.isfinite(real(result)).all()) for result in results]
        for index, result in enumerate(results):
            drawn = torch.rand(real(result).shape, generator=generator, dtype=torch.float64) + 0.5
            self.register_buffer(f"weight{index}", drawn)
            self.register_parameter(f"scale{index}", nn.Parameter(torch.tensor(1.25, dtype=torch.float64)))

    def results(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        given = iter(tensors)
        found: list[Tensor] = []
        for index, sample in enumerate(self.samples):
            leaves = list(sample.leaves)
            for slot, leaf in enumerate(leaves):
                if isinstance(leaf, Tensor):
                    leaves[slot] = self.get_parameter(f"leaf{index}_{slot}") if leaf.requires_grad else next(given)
            found += [leaf for leaf in pytree.tree_leaves(sample.call(leaves)) if isinstance(leaf, Tensor)]
        return found

    def forward(self, *tensors: Tensor) -> Tensor:
        total = torch.zeros((), dtype=torch.float64)
        for index, result in enumerate(self.results(tensors)):
            value = real(result)
            if not self.finite[index]:
                value = value.nan_to_num(0.7, posinf=1.3, neginf=-1.7)
            weighted = (value * self.get_buffer(f"weight{index}")).sum()
            total = total + self.get_parameter(f"scale{index}") * weighted
        return total


def contiguous(tensor: Tensor) -> Tensor:
    return tensor.detach().clone(memory_format=torch.contiguous_format)


def real(tensor: Tensor) -> Tensor:
    """Every element as float64, a complex one as two."""
    if tensor.is_complex():
        return torch.stack([tensor.real.to(torch.float64), tensor.imag.to(torch.float64)])
    return tensor.to(torch.float64)


UNDEFINED = ("empty", "empty_like", "empty_strided", "empty_permuted", "new_empty", "new_empty_strided")
"""Ops whose results are whatever memory held."""
NO_ORACLE = ("as_strided_scatter",)
"""Ops whose gradient torch gets wrong (zero for what is not written, too): only values are compared."""


@cache
def tables() -> dict[str, dict[str, Any]]:
    """torch's `op_db` and `module_db` by name."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from torch.testing._internal.common_methods_invocations import op_db
        from torch.testing._internal.common_modules import module_db
    defined = [info for info in op_db if info.name not in UNDEFINED]
    ops = {info.name + (f".{info.variant_test_name}" if info.variant_test_name else ""): info for info in defined}
    return {"op": ops, "module": {info.name: info for info in module_db}}


def samples_of(table: str, op: str, most: int) -> list[Sample]:
    """At most `most` samples of the op's chief dtype, a third as many of others, and one in place."""
    info = tables()[table][op]
    supported = info.supported_dtypes("cpu") if table == "op" else info.dtypes
    chief = next((d for d in DTYPES if d in supported), None)
    out: list[Sample] = []
    for dtype in DTYPES:
        if dtype not in supported or (dtype is torch.float32 and dtype is not chief):
            continue
        named = Key(table=table, op=op, dtype=str(dtype).removeprefix("torch."), index=0)
        make = op_samples if table == "op" else module_samples
        out += make(info, dtype, most if dtype is chief else max(1, most // 3), named)
        if table == "op" and dtype is chief and info.inplace_variant is not None:
            out += op_samples(info, dtype, 1, replace(named, variant="inplace"))
    return out


def drawn_evenly(found: Sequence[Any], count: int) -> list[tuple[int, Any]]:
    chosen = sorted({i * len(found) // count for i in range(min(count, len(found)))}) if len(found) > count else None
    return [(i, found[i]) for i in (chosen if chosen is not None else range(len(found)))]


def op_samples(info: Any, dtype: torch.dtype, count: int, named: Key) -> list[Sample]:
    torch.manual_seed(0)
    floating = dtype.is_floating_point or dtype.is_complex
    known = info.supports_autograd and info.name not in NO_ORACLE
    grad = floating and known and dtype in info.supported_backward_dtypes("cpu")
    made = list(islice(info.sample_inputs("cpu", dtype, requires_grad=grad), LOOKED_AT))
    out = []
    for index, sample in drawn_evenly(made, count):
        leaves, spec = pytree.tree_flatten((sample.input, tuple(sample.args), dict(sample.kwargs)))
        ended = sample.output_process_fn_grad
        call = partial(called_in_place, info, spec) if named.variant else partial(called, info.op, spec, ended)
        out.append(Sample(key=replace(named, index=index), call=call, leaves=leaves))
    return out


def called(op: Any, spec: Any, ended: Any, leaves: list[Any]) -> Any:
    first, args, kwargs = pytree.tree_unflatten(leaves, spec)
    return ended(op(first, *args, **kwargs))


def called_in_place(info: Any, spec: Any, leaves: list[Any]) -> Any:
    first, args, kwargs = pytree.tree_unflatten(leaves, spec)
    return info.inplace_variant(first.clone(), *args, **kwargs)


def module_samples(info: Any, dtype: torch.dtype, count: int, named: Key) -> list[Sample]:
    out = []
    modes = (True, False) if info.train_and_eval_differ else (True,)
    for training in modes:
        torch.manual_seed(0)
        made = list(
            islice(
                info.module_inputs_func(
                    info,
                    device="cpu",
                    dtype=dtype,
                    requires_grad=dtype.is_floating_point or dtype.is_complex,
                    training=training,
                ),
                LOOKED_AT,
            )
        )
        for index, sample in drawn_evenly(made, count):
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                given = sample.constructor_input
                inner = info.module_cls(*given.args, **given.kwargs).to(dtype).train(training)
            forward = sample.forward_input
            leaves, spec = pytree.tree_flatten((tuple(forward.args), dict(forward.kwargs)))
            key = replace(named, index=index, variant="train" if training else "eval")
            out.append(Sample(key=key, call=partial(forwarded, inner, spec), leaves=leaves, inner=inner))
    return out


def forwarded(inner: nn.Module, spec: Any, leaves: list[Any]) -> Any:
    args, kwargs = pytree.tree_unflatten(leaves, spec)
    return inner(*args, **kwargs)


def outcomes(samples: Sequence[Sample]) -> Iterator[tuple[Sample, Outcome]]:
    """Those of all samples: in one graph, as most of the time is each graph's own, and one by one where it is amiss."""
    runnable = []
    for sample in samples:
        reason = fails_in_eager(sample)
        if reason is None:
            runnable.append(sample)
        else:
            yield sample, Outcome(kind="skipped", reason=reason)
    together = outcome_of(runnable) if runnable else None
    for sample in runnable:
        alone = together is None or (len(runnable) > 1 and together.kind != "equal")
        yield sample, outcome_of([sample]) if alone or together is None else together


def fails_in_eager(sample: Sample) -> str | None:
    try:
        model = SampleModel([sample])
        torch.manual_seed(SEED)
        model(*model.inputs()).backward()
    except Exception as error:
        return f"eager: {one_line(error)}"
    return None


def outcome_of(samples: Sequence[Sample]) -> Outcome:
    """Capture samples as a model and compare loss, gradients and buffers with eager, as the graph is and natively."""
    model = SampleModel(samples)
    before = {name: buffer.clone() for name, buffer in model.named_buffers()}
    model.zero_grad()
    torch.manual_seed(SEED)
    loss = model(*model.inputs())
    loss.backward()
    expected = {f"gradient of {n}": or_zero(p.grad, p) for n, p in model.named_parameters()}
    expected |= {f"buffer {n}": b.clone() for n, b in model.named_buffers() if not n.startswith("weight")}
    with torch.no_grad():
        for name, buffer in model.named_buffers():
            buffer.copy_(before[name])
    try:
        captured = capture(model, model.inputs(), repeats=())
    except AutoparError as error:
        return Outcome(kind="refused", reason=one_line(error))
    except Exception as error:
        return Outcome(kind="failed", reason=f"capture: {one_line(error)}")
    random = draws(captured)
    tolerance = LOOSE if any(sample.key.dtype == "float32" for sample in samples) else TOLERANCE
    for side, graph in (("graph", captured.graph), ("natively", call_natively(captured.graph))):
        try:
            got = run(replace(captured, graph=graph), model)
        except Exception as error:
            return Outcome(kind="failed", reason=f"{side}: {one_line(error)}", random=random)
        for name in sorted(expected):
            try:
                torch.testing.assert_close(got[name], expected[name], rtol=tolerance, atol=tolerance, equal_nan=True)
            except AssertionError as error:
                return Outcome(kind="wrong", reason=f"{side}: {name}: {one_line(error, lines=8)}", random=random)
    return Outcome(kind="equal", random=random)


def run(captured: CapturedModel, model: SampleModel) -> dict[str, Tensor]:
    """Gradients and buffers after the captured graph's step, by what `outcome_of` calls them."""
    parameters = {k: v.detach().clone().requires_grad_() for k, v in parameters_of(captured, model).items()}
    buffers = {k: v.clone() for k, v in buffers_of(captured, model).items()}
    torch.manual_seed(SEED)
    loss, mutated = run_captured(captured, parameters, buffers, bind_inputs(captured.inputs, model.inputs(), {}))
    loss.backward()  # type: ignore[no-untyped-call]
    got = {
        f"gradient of {s.names[0]}": or_zero(parameters[s.placeholder].grad, parameters[s.placeholder])
        for s in captured.parameters
    }
    for spec in captured.buffers:
        got[f"buffer {spec.names[0]}"] = mutated.get(spec.placeholder, buffers[spec.placeholder]).detach()
    return got


def or_zero(gradient: Tensor | None, parameter: Tensor) -> Tensor:
    return torch.zeros_like(parameter).detach() if gradient is None else gradient


def draws(captured: CapturedModel) -> bool:
    """Does a graph draw random numbers?"""
    seeded = torch.Tag.nondeterministic_seeded
    return any("site" in node.kwargs or seeded in getattr(node.target, "tags", ()) for node in captured.graph.nodes)


def one_line(error: Exception, lines: int = 1) -> str:
    text = " ".join(str(error).strip().split("\n")[:lines]) or type(error).__name__
    return f"{type(error).__name__}: {text}"[:400]
