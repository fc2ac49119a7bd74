"""A plan against one process, its ranks threads of this process: hundreds of random plans in a minute.

The rewritten graph runs with the same autograd functions and bodies as under torchrun; only the backend's collectives
are threads that meet.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor, fx, nn

from autopar.lower.emit import emit
from autopar.lower.messages import messages_of
from autopar.ops import collectives
from autopar.ops.buckets import use_sink
from autopar.ops.random import Draws, use_draws
from autopar.ops.regather import regathering
from autopar.oracle.compare import FLOOR
from autopar.oracle.reference import run_captured
from autopar.passes.fuse_collectives import fuse_collectives
from autopar.passes.prefetch import prefetch
from autopar.passes.recompute import again_graph
from autopar.passes.start_and_wait import start_and_wait
from autopar.passes.start_early import start_early
from autopar.passes.weave_copies import weave_copies, weave_graph
from autopar.runtime.accumulate import Accumulator
from autopar.runtime.reductions import Late
from autopar.values.graph import CapturedModel
from autopar.values.lifetimes import ONCE_A_STEP
from autopar.values.placement import local_ranges
from autopar.values.stage_plan import StagePlan
from tests.ranks_in_threads import Done, run_in_threads


def all_gather(out: Tensor, x: Tensor, group: Any = None, async_op: bool = False) -> Done:
    out.copy_(torch.stack(group.group.exchange(group.index, x)).reshape(out.shape))
    return Done()


def reduce_scatter(out: Tensor, x: Tensor, group: Any = None, async_op: bool = False) -> Done:
    everyone = group.group.exchange(group.index, x)
    out.copy_(torch.stack(everyone).sum(0).chunk(len(everyone))[group.index].reshape(out.shape))
    return Done()


def all_to_all_single(out: Tensor, x: Tensor, group: Any = None, async_op: bool = False) -> Done:
    everyone = group.group.exchange(group.index, x)
    out.copy_(torch.cat([e.chunk(len(everyone))[group.index] for e in everyone]))
    return Done()


@dataclass(frozen=True, kw_only=True)
class Reference:
    """One process: values and inputs by placeholder, the loss, the gradients on the parameters, and new buffers."""

    captured: CapturedModel
    parameters: Mapping[str, Tensor]
    buffers: Mapping[str, Tensor]
    inputs: Mapping[str, Tensor]
    loss: Tensor
    new_buffers: Mapping[str, Tensor]


def one_process(captured: CapturedModel, model: nn.Module, kwargs: Mapping[str, Any]) -> Reference:
    """The captured graph run whole, dropout masks drawn for whole tensors."""
    values = dict(model.named_parameters(remove_duplicate=False)) | dict(model.named_buffers(remove_duplicate=False))
    parameters = {
        p.placeholder: values[p.names[0]].detach().clone().requires_grad_(p.trainable) for p in captured.parameters
    }
    buffers = {b.placeholder: values[b.names[0]].detach().clone() for b in captured.buffers}
    inputs = {spec.placeholder: kwargs[spec.path] for spec in captured.inputs}
    with use_draws(Draws(seed=1, step=0, exact=True)):
        loss, new_buffers = run_captured(captured, parameters, buffers, inputs)
    loss.backward()
    return Reference(
        captured=captured,
        parameters=parameters,
        buffers=buffers,
        inputs=inputs,
        loss=loss.detach(),
        new_buffers=new_buffers,
    )


def errors_of(
    reference: Reference, plan: StagePlan, captured: CapturedModel | None = None, *, late: bool = True
) -> tuple[float, float, str]:
    """Largest relative error of loss, of any gradient on any rank, and that parameter; asserts bytes and buffers.

    captured: the graph of a micro-batch, if the plan is for that; the reference runs the whole batch.
    `late`: gradients of buckets are waited for when backward ends.
    """
    if not plan.recompute:
        kept = {n: "step" if v in ONCE_A_STEP else "microbatch" for n, v in plan.lifetimes.items()}
        plan = replace(plan, lifetimes=kept)
    local = emit(captured or reference.captured, plan, exact_random=True)
    parts, copies = plan.microbatches, plan.copies
    written = again_graph(local.graph)
    running = local if copies == 1 else weave_copies(local)
    written = written if copies == 1 else weave_graph(written, local.captured)
    accumulation = running.captured.accumulation
    inputs = [spec.placeholder for spec in running.captured.inputs]
    fused = fuse_collectives(written, local.captured.parameters, plan)
    final = start_early(prefetch(fused) if plan.prefetch else fused)
    graph = fx.GraphModule(nn.Module(), final if copies == 1 else start_and_wait(final, set(inputs)))
    # Made once: fx writes names onto a graph's nodes while it compiles it, which threads would see of one another.
    accumulator = None if accumulation is None else Accumulator(running, written, accumulation)
    whole = {**local.captured.constants, **reference.buffers, **reference.inputs, **reference.parameters}
    trainable = {name: p for name, p in reference.parameters.items() if p.requires_grad}
    gradients = {n: torch.zeros_like(p) if p.grad is None else p.grad for n, p in trainable.items()}
    floor = FLOOR * max(float(g.abs().max()) for g in gradients.values() if g.numel())

    def one_rank(rank: int) -> tuple[float, float, str]:
        coordinate = plan.mesh.coordinate(rank)

        def own(name: str, value: Tensor) -> Tensor:
            ranges = local_ranges(tuple(value.shape), plan.layouts[name], plan.mesh, coordinate)
            part = value.detach()[tuple(slice(start, start + n) for start, n in ranges)].clone()
            return part.requires_grad_(name in trainable)

        placeholders = [node.name for node in graph.graph.nodes if node.op == "placeholder"]
        arguments = {n: own(n, whole[n]) for n in placeholders if n not in inputs}
        batches = [
            [own(n, value.chunk(parts)[i]) if value.dim() else value for n, value in reference.inputs.items()]
            for i in range(parts)
        ]
        calls = [
            dict(zip(inputs, [value for batch in batches[at : at + copies] for value in batch], strict=True))
            for at in range(0, parts, copies)
        ]
        if accumulation is None or accumulator is None:

            def add(name: str, gradient: Tensor) -> None:
                leaf = arguments[name]
                leaf.grad = gradient.clone() if leaf.grad is None else leaf.grad + gradient

            with use_draws(Draws(seed=1, step=0, exact=True)), regathering(), use_sink(Late(add) if late else None):
                loss, *mutated = graph(*({**arguments, **calls[0]}[n] for n in placeholders))
            loss.backward()
            for spec, value in zip(reference.captured.written, mutated, strict=True):
                torch.testing.assert_close(value, reference.new_buffers[spec.placeholder])
        else:

            def run(body: fx.GraphModule, values: Any, batch: Any) -> tuple[Tensor, Tensor | None]:
                given = {**arguments, **values, **batch}
                with regathering():
                    loss, *results = body(*(given[n.name] for n in body.graph.nodes if n.op == "placeholder"))
                return loss, results[-1] if accumulation.count is not None else None

            leaves = {p.placeholder: arguments[p.placeholder] for p in local.captured.parameters}
            loss, found = accumulator.step(leaves, calls, run)
            for name, gradient in found:
                arguments[name].grad = gradient
        worst, name = 0.0, ""
        for placeholder, gradient in gradients.items():
            ranges = local_ranges(tuple(gradient.shape), plan.layouts[placeholder], plan.mesh, coordinate)
            want = gradient[tuple(slice(start, start + n) for start, n in ranges)]
            got = arguments[placeholder].grad
            if want.numel():
                got = torch.zeros_like(want) if got is None else got
                error = float((got - want).abs().max()) / max(float(gradient.abs().max()), floor)
                if not error <= worst:
                    worst, name = error, placeholder
        return float((loss.detach() - reference.loss).abs() / reference.loss.abs()), worst, name

    with (
        mock.patch.object(collectives, "run_all_gather", all_gather),
        mock.patch.object(collectives, "run_reduce_scatter", reduce_scatter),
        mock.patch.object(dist, "all_to_all_single", all_to_all_single),
    ):
        outcomes, groups = run_in_threads(plan.mesh, one_rank)
    predicted = messages_of(local.captured, local.plan, on_host=True, exact_random=True)
    for rank, group in enumerate(groups):
        assert group.sent == predicted, f"rank {rank} sent {group.sent}, predicted {predicted}"
    worst = max(outcomes, key=lambda o: (o[1] != o[1], o[1]))
    return max(o[0] for o in outcomes), worst[1], worst[2]
