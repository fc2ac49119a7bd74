"""Was the graph compared with the module before it was planned? On which numbers, or why not, in one line."""

from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from autopar.api.captures import as_it_is_now, captured_model
from autopar.errors import ArgumentError, ModelSpecError, TurningFlagError
from autopar.models import load_model
from autopar.oracle import Subject, check_module, not_checkable
from autopar.oracle.steps import module_loss
from autopar.oracle.unchanged import unchanged
from autopar.rules.registry import rule_of
from autopar.values.calls import Call
from autopar.values.graph import CapturedModel
from autopar.values.precision import precision_of

FLOPS = 4e11
"""Most floating-point operations of a compared call's forward pass: some seconds on two cores. With twice as many a
check takes twice as long; with half, models of 100 M parameters are compared on fewer tokens than a sample has."""

SMALL = 1e8
"""Parameters up to which a model runs once on all samples before it is traced."""

NBYTES = 2e9
"""Most bytes of parameters for which a model named on a command line is built to be compared."""

FEW, TOKENS = 4, 64
"""Samples, and tokens a sample where the model says how many, of a model that is built to be compared."""


COMPARING = "comparing graph and module: {} (--no-check skips it)"
"""Progress, of which step; in Python `check=False` skips it."""


class Compared(NamedTuple):
    """What was compared, in a line; whether forward decides on buffers that its first call turns, once; and the graph
    of the call with the call as it was seen, in the precision of the model, if it was traced."""

    words: str
    turns: bool = False
    known: tuple[CapturedModel, Call] | None = None


def silent(_: str) -> None:
    """Progress that nobody is told."""


def check_call(
    model: nn.Module,
    call: Call,
    loss_fn: Callable[..., Any] | None = None,
    *,
    tell: Callable[[str], None] = silent,
) -> Compared:
    """Compare `model` with its graph on `call`, or on as many of its samples as take little time.

    Args:
        model: in its own dtype.
        call: with values, at a batch that the model takes.
        loss_fn: as for `capture`.
        tell: told what is being done.

    Raises:
        FidelityError: if the graph is not the model.
        CaptureError, NoLossError: if the model cannot be captured, or itself fails.
    """
    if reason := not_checkable(model, call.args, call.kwargs):
        return Compared(f"not compared with the module: {reason}")
    try:
        precision = precision_of(model)
    except ArgumentError:
        return Compared("not compared with the module: its parameters are of several dtypes")
    tell(COMPARING.format("running"))
    run_before(model, call, loss_fn)
    tell(COMPARING.format("capturing"))
    turns = False
    try:
        known = captured_model(model, call, precision, loss_fn)
    except TurningFlagError:
        turns = True
        known = captured_model(model, call, precision, loss_fn, turns=True)
    captured = known[0]
    batch, flops = call.batch(), flops_of(captured)
    samples = batch
    if flops > FLOPS:
        samples = int((batch or 1) * FLOPS / flops)
        if batch is None or samples < 1:
            words = f"not compared with the module: one sample takes {flops / (batch or 1):.0e} operations"
            return Compared(words, turns, known)
        call = first_samples(call, samples)
        captured, _ = captured_model(model, call, precision, loss_fn, turns=turns)

    def again(buffers: Mapping[str, Tensor]) -> CapturedModel:
        with as_it_is_now(model, {}, buffers):
            return captured_model(model, call, precision, loss_fn, turns=True)[0]

    count = "whole" if samples is None else f"{samples} sample{'s' * (samples != 1)}"
    tell(COMPARING.format(f"two calls, {count}"))
    subject = Subject(model=model, captured=captured, args=call.args, kwargs=call.kwargs, loss_fn=loss_fn, again=again)
    errors = [found.error for found in check_module(subject).differences]
    of = "" if samples == batch else f" on {samples} of {batch} samples"
    words = (
        f"compared with the module{of}, {precision}: loss, gradients and state of two calls differ by at most "
        f"{max(errors, default=0.0):.0e} (relative)"
    )
    return Compared(words, turns, known)


def run_before(model: nn.Module, call: Call, loss_fn: Callable[..., Any] | None = None) -> None:
    """Let the module fill the caches that outlive a call (`functools.lru_cache`, tables of a file) with real tensors:
    those of a trace would be left in them. Of a large model one sample has to do."""
    size = sum(p.numel() for p in model.parameters())
    few = call if size <= SMALL or call.batch() is None else first_samples(call, 1)
    with suppress(Exception), unchanged(model), torch.no_grad():
        module_loss(model, few.args, few.kwargs, loss_fn, 0)


def check_spec(
    spec: str,
    nbytes: int,
    *,
    batch: int | None,
    seq: int | None,
    precision: str,
    overrides: Mapping[str, str],
    tell: Callable[[str], None] = silent,
) -> str:
    """The same for a model that a command line names, built once more with values, on few samples, in float32 where the
    plan computes in less.

    Args:
        spec, batch, seq, precision, overrides: as for `load_model`.
        nbytes: of its parameters.
        tell: told what is being done.
    """
    if nbytes > NBYTES:
        return (
            f"not compared with the module: its parameters take {nbytes / 1e9:.0f} GB; verify a smaller one of its kind"
        )
    is_hf = spec.startswith("hf:")
    tell(COMPARING.format("building with values"))
    try:
        loaded = load_model(
            spec,
            batch=min(batch or FEW, FEW) if is_hf or batch is not None else None,
            seq=min(seq or TOKENS, TOKENS) if is_hf else seq,
            precision="fp64" if precision == "fp64" else "fp32",
            overrides=overrides,
            device="cpu",
        )
    except (ModelSpecError, ArgumentError) as error:
        return f"not compared with the module, which cannot be built on the CPU: {error}"
    return check_call(loaded.model, Call(args=loaded.args, kwargs=loaded.kwargs), tell=tell).words


def first_samples(call: Call, count: int) -> Call:
    """The call on the first `count` of its samples."""
    return call.mapped(lambda t: t[:count] if t.dim() else t)


def flops_of(captured: CapturedModel) -> float:
    """Floating-point operations of a forward pass."""
    return sum(rule_of(node).flops for node in captured.graph.nodes if node.op == "call_function")
