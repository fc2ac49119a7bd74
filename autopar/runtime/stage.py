"""What does a rank do of one stage? For each micro-batch a pass forward and, later, one back; once a step, parameters.

To `torch.distributed.pipelining` a stage is a module that takes what the stage before sends and the number of the
micro-batch, and gives what it sends on, or the loss. Each pass is one node of autograd's graph with a graph of its own
inside: the node's backward runs that graph, in one piece or (`splits`) the part of the inputs at once and the part of
the weights when `later()` is called.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor, fx, nn

from autopar.ops.buckets import use_sink
from autopar.ops.groups import Groups, use_groups
from autopar.ops.random import Draws, use_draws
from autopar.ops.regather import detach, regathering
from autopar.passes.recompute import again_graph
from autopar.runtime.accumulate import Accumulator, Prepared
from autopar.runtime.data import local_input
from autopar.runtime.evaluation import evaluation_graph
from autopar.runtime.split_backward import backward_input
from autopar.runtime.state import State
from autopar.values.graph import Accumulation
from autopar.values.local_model import LocalModel
from autopar.values.schedules import PIPELINE
from autopar.values.stage_plan import StagePlan

Written = Callable[[LocalModel, bool], fx.Graph]
"""The graph that is run of a stage, in training or in evaluation."""

ONE_BATCH = Accumulation(microbatches=1, weight=1.0)


class Stage(nn.Module):
    """One stage on one rank.

    root: the module that has the buffers. written: gives the graph that is run. splits: backward in two parts.
    sends_away, returns_away: the next stage, the stage before is on another rank (for counting what is sent).
    losses, counts: of the micro-batches so far, if this is the last stage.
    """

    def __init__(
        self,
        number: int,
        local: LocalModel,
        state: State,
        groups: Groups,
        root: nn.Module,
        *,
        splits: bool,
        written: Written,
    ) -> None:
        super().__init__()
        self.number, self.local, self.state, self.groups, self.splits = number, local, state, groups, splits
        self.written = written
        self.root = (root,)  # in a tuple, or it would be registered as a part of its own part
        self.remakes = "use" in self.plan.lifetimes.values() or bool(self.plan.recompute or self.plan.remade)
        self.changed = [b for b in local.captured.buffers if b.mutated_by]
        self.sends_away = self.returns_away = False
        self.losses: list[Tensor] = []
        self.counts: list[Tensor] = []
        self.prepared: Prepared | None = None
        self._parts: Sequence[Mapping[str, Tensor]] = ()
        self._draws: Sequence[Draws] = ()
        self._accumulators: dict[bool, Accumulator] = {}
        self._later: list[Callable[[], None]] = []
        self._anchor = torch.zeros((), requires_grad=True)

    @property
    def plan(self) -> StagePlan:
        return self.local.plan

    @property
    def device(self) -> torch.device:
        return self.state.device

    @property
    def accumulation(self) -> Accumulation:
        return self.local.captured.accumulation or ONE_BATCH

    def begin(self, parts: Sequence[Mapping[str, Tensor]], draws: Sequence[Draws]) -> None:
        """Prepare parameters for a step whose micro-batches have these inputs (by placeholder) and random numbers."""
        self.losses.clear()
        self.counts.clear()
        self._parts, self._draws = parts, draws
        with use_groups(self.groups):
            self.prepared = self._accumulator.prepare(self.state.leaves)

    def abandon(self) -> None:
        """Let go of a step that has no backward pass."""
        self.prepared = None

    def end(self, scale: Tensor | None) -> dict[str, Tensor]:
        """The step's gradients by placeholder, times `scale`."""
        assert self.prepared is not None and not self._later
        with use_groups(self.groups):
            gradients = dict(self.prepared.gradients(scale))
        self.prepared = None
        return gradients

    def forward(self, *received: Tensor, index: Tensor) -> tuple[Tensor, ...] | Tensor:
        """One micro-batch: what is sent on, or its weighted loss."""
        sent: tuple[Tensor, ...] = _Pass.apply(self, int(index), self._anchor, *received)  # type: ignore[no-untyped-call]
        return sent[0] if self.local.captured.loss else sent

    def count(self, sent: Iterable[Tensor]) -> None:
        """Count what goes to another rank."""
        for tensor in sent:
            self.groups.count("send", PIPELINE, tensor.numel() * tensor.element_size())

    def taken(self, number: int, received: Tensor) -> Tensor:
        """A leaf for what was received, in its own dtype."""
        value = received.detach().requires_grad_(received.requires_grad)
        spec = self.local.captured.inputs[len(self.local.captured.inputs) - len(self.local.captured.received) + number]
        return value.view(spec.dtype) if spec.dtype == torch.bool else value

    def later(self) -> Callable[[], None]:
        """The second part of the backward pass that ran last; nothing where no gradient was wanted."""
        if not self._later:
            return _nothing
        backward_weights = self._later.pop()

        def run() -> None:
            backward_weights()
            self._collect()

        return run

    def _collect(self) -> None:
        if self.prepared is not None:
            self.prepared.collect()

    def run(self, index: int, received: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """What the graph makes of micro-batch `index` and what was received, differentiable."""
        captured = self.local.captured
        assert self.prepared is not None
        arguments = {**self.state.arguments, **self.prepared.used}
        arguments.update(zip(captured.received, received, strict=True))
        for spec in captured.inputs[: len(captured.inputs) - len(captured.received)]:
            arguments[spec.placeholder] = local_input(self, self.plan, spec, self._parts[index][spec.placeholder])
        body = self._accumulator.body
        names = [node.name for node in body.graph.nodes if node.op == "placeholder"]
        with ExitStack() as stack:
            stack.enter_context(use_groups(self.groups))
            stack.enter_context(use_draws(self._draws[index]))
            stack.enter_context(use_sink(self.prepared.late))
            if self.remakes and torch.is_grad_enabled():
                stack.enter_context(regathering())
            results: tuple[Tensor, ...] = body(*(arguments[name] for name in names))
        ends, rest = results[: len(captured.ends)], results[len(captured.ends) :]
        for end in ends:
            detach(end)  # it may outlive this pass, or be another stage's
        if self.root[0].training:
            with torch.no_grad():
                for buffer, value in zip(self.changed, rest, strict=False):
                    self.root[0].get_buffer(buffer.names[0]).copy_(value)
        if captured.loss:
            self.losses.append(ends[0].detach())
            self.counts += [count.detach() for count in rest[len(self.changed) :]]
            return (ends[0] * self.accumulation.weight,)
        return ends

    def backward(self, ends: Sequence[Tensor], gradients: Sequence[Tensor], received: Sequence[Tensor]) -> None:
        """Run a pass back; gradients of what was received are left on `received`."""
        with use_groups(self.groups):
            if not self.splits:
                torch.autograd.backward(ends, gradients)
                return
            weights = [w for w in self.prepared.used.values() if w.requires_grad] if self.prepared is not None else []
            found, later = backward_input(ends, gradients, received, weights)
        for tensor, gradient in zip(received, found, strict=True):
            tensor.grad = gradient
        self._collect()
        self._later.append(later)

    @property
    def _accumulator(self) -> Accumulator:
        training = self.root[0].training
        if training not in self._accumulators:
            graph = self.written(self.local, training)
            self._accumulators[training] = Accumulator(
                self.local, graph, self.accumulation, self.state.masters, fuse_body=not self.splits
            )
        return self._accumulators[training]


def written(local: LocalModel, training: bool) -> fx.Graph:
    """The stage's own graph, what is recomputed marked, or without dropout and batch statistics."""
    return again_graph(local.graph) if training else evaluation_graph(local.graph)


def _nothing() -> None:
    """The backward pass of a stage without gradients."""


class _Pass(torch.autograd.Function):
    """A micro-batch's pass through a stage. `anchor`: autograd comes back even if nothing received needs a gradient."""

    @staticmethod
    def forward(ctx: Any, stage: Stage, index: int, anchor: Tensor, *received: Tensor) -> tuple[Tensor, ...]:
        leaves = [stage.taken(number, x) for number, x in enumerate(received)]
        with torch.set_grad_enabled(any(ctx.needs_input_grad)):
            ends = stage.run(index, leaves)
        ctx.stage, ctx.leaves, ctx.ends = stage, leaves, ends
        ctx.set_materialize_grads(False)
        sent = tuple(_sendable(end) for end in ends)
        if stage.sends_away:
            stage.count(sent)
        ctx.mark_non_differentiable(*(x for x, end in zip(sent, ends, strict=True) if not end.requires_grad))
        return sent

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        pairs = [(end, g) for end, g in zip(ctx.ends, gradients, strict=True) if g is not None and end.requires_grad]
        wanted = [x for x in ctx.leaves if x.requires_grad]
        ctx.stage.backward([end for end, _ in pairs], [g for _, g in pairs], wanted)
        if ctx.stage.returns_away:
            ctx.stage.count(wanted)  # zeros are sent where there is no gradient
        found = [_given_back(leaf) for leaf in ctx.leaves]
        del ctx.leaves, ctx.ends
        return (None, None, None, *found)


def _given_back(leaf: Tensor) -> Tensor | None:
    """The gradient of what was received, contiguous, no longer the leaf's, which lives on where backward has a second
    part."""
    gradient, leaf.grad = leaf.grad, None
    return None if gradient is None else gradient.contiguous()


def _sendable(value: Tensor) -> Tensor:
    """What is sent of a value: contiguous, and bytes for bools, which Gloo does not send."""
    value = value.detach().contiguous()
    return value.view(sent_dtype(value.dtype))


def sent_dtype(dtype: torch.dtype) -> torch.dtype:
    """As what a dtype is sent."""
    return torch.uint8 if dtype == torch.bool else dtype
