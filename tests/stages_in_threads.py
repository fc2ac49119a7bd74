"""A plan in stages against one process: the ranks of each stage are threads, the stages run one after the other."""

from collections.abc import Sequence
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor, fx, nn

from autopar.lower.emit import emit_stage
from autopar.lower.messages import sent_by_rank
from autopar.ops import collectives
from autopar.ops.random import Draws, use_draws
from autopar.ops.regather import regathering
from autopar.oracle.compare import FLOOR
from autopar.passes.recompute import again_graph
from autopar.values.graph import CapturedModel
from autopar.values.placement import Layout, local_ranges
from autopar.values.plan import Plan
from autopar.values.schedules import PIPELINE
from tests.plans_in_threads import Reference, all_gather, all_to_all_single, reduce_scatter
from tests.ranks_in_threads import run_in_threads


def staged_error_of(reference: Reference, stages: Sequence[CapturedModel], plan: Plan) -> tuple[float, str]:
    """The largest relative error of loss, new buffers and gradients on any rank, and whose; asserts bytes.

    What a stage sends stays on its thread: the same place of the next stage's mesh receives it.
    """
    locals_ = [emit_stage(stages, plan.stages, number) for number in range(plan.num_stages)]
    graphs = [fx.GraphModule(nn.Module(), again_graph(local.graph)) for local in locals_]
    layouts: dict[str, Layout] = {}
    for stage in plan.stages:
        layouts |= stage.layouts
    trainable = {name: p for name, p in reference.parameters.items() if p.requires_grad}
    gradients = {n: torch.zeros_like(p) if p.grad is None else p.grad for n, p in trainable.items()}
    floor = FLOOR * max(float(g.abs().max()) for g in gradients.values() if g.numel())

    def one_rank(rank: int) -> tuple[float, str]:
        coordinate = plan.mesh.coordinate(rank)

        def own(name: str, value: Tensor) -> Tensor:
            ranges = local_ranges(tuple(value.shape), layouts[name], plan.mesh, coordinate)
            return value.detach()[tuple(slice(start, start + n) for start, n in ranges)]

        leaves = {n: own(n, p).clone().requires_grad_(n in trainable) for n, p in reference.parameters.items()}
        errors: dict[str, float] = {}
        sent: dict[str, Tensor] = {}
        loss = torch.zeros(())
        for local, graph in zip(locals_, graphs, strict=True):
            captured = local.captured
            whole = {**captured.constants, **reference.buffers, **reference.inputs}
            names = [node.name for node in graph.graph.nodes if node.op == "placeholder"]
            given = [sent[n] if n in sent else leaves[n] if n in leaves else own(n, whole[n]) for n in names]
            with use_draws(Draws(seed=1, step=0, exact=True)), regathering():
                results = graph(*given)
            for spec, value in zip(captured.written, results[len(captured.ends) :], strict=True):
                want = reference.new_buffers[spec.placeholder]
                errors[spec.placeholder] = float((value - want).abs().max())
            sent = dict(zip(captured.sends, results, strict=False))
            loss = results[0] if captured.loss else loss
        loss.backward()  # type: ignore[no-untyped-call]
        errors["loss"] = float((loss.detach() - reference.loss).abs() / reference.loss.abs())
        for name, gradient in gradients.items():
            want, got = own(name, gradient), leaves[name].grad
            if want.numel():
                difference = float((want - (0 if got is None else got)).abs().max())
                errors[name] = difference / max(float(gradient.abs().max()), floor)
        worst = max(errors, key=lambda name: (errors[name] != errors[name], errors[name]))
        return errors[worst], worst

    with (
        mock.patch.object(collectives, "run_all_gather", all_gather),
        mock.patch.object(collectives, "run_reduce_scatter", reduce_scatter),
        mock.patch.object(dist, "all_to_all_single", all_to_all_single),
    ):
        outcomes, groups = run_in_threads(plan.mesh, one_rank)
    for rank, group in enumerate(groups):
        predicted = sent_by_rank(stages, plan, range(plan.num_stages), rank, on_host=True, exact_random=True)
        predicted = {key: sent for key, sent in predicted.items() if PIPELINE not in key[1]}
        assert group.sent == predicted, f"rank {rank} sent {group.sent}, predicted {predicted}"
    return max(outcomes, key=lambda o: (o[0] != o[0], o[0]))
