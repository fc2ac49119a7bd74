"""Whatever set of ops and copies a plan recomputes: gradients, bytes sent and bytes kept are those predicted."""

import random
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import fx, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

from autopar.api.model_plan import ModelPlan
from autopar.lower.emit import emit
from autopar.lower.live import Live
from autopar.lower.lowered_step import lower
from autopar.lower.program import make_program
from autopar.ops.groups import Groups, use_groups
from autopar.ops.random import Draws, use_draws
from autopar.ops.regather import regathering
from autopar.oracle.reference import buffers_of, parameters_of
from autopar.passes.recompute import again_graph
from autopar.search.known.random_plan import random_plan, random_recompute
from autopar.values.cluster import load_cluster
from autopar.values.graph import CapturedModel
from autopar.values.mesh import make_mesh
from autopar.values.placement import INVARIANT, REPLICATE, Layout
from autopar.values.plan import one_stage
from autopar.values.plan_file import plan_from_json
from autopar.values.stage_plan import StagePlan
from tests.plans_in_threads import errors_of, one_process
from tests.search_cases import captured_of, exact_of, pricer_of
from tests.zoo import FAMILIES, zoo

MESHES = ((2,), (2, 2))


@pytest.mark.parametrize(
    ("family", "dropout"), [*((family, 0.0) for family in FAMILIES[1::2]), ("t5", 0.0), ("t5", 0.1)]
)
def test_random_recompute_sets_equal_one_process(family: str, dropout: float) -> None:
    model, kwargs = zoo(family, dtype=torch.float64, dropout=dropout)
    captured = exact_of(family, dropout)
    reference = one_process(captured, model, kwargs)
    rng = random.Random(f"{family} {dropout}")
    for number in range(2):
        plan = random_plan(captured, make_mesh(MESHES[number]), rng)
        plan = random_recompute(plan, captured, rng, share=rng.choice((0.3, 0.8, 1.0)))
        assert plan.recompute and plan.remade
        plan = plan_from_json(one_stage(plan).to_json()).single
        loss_error, gradient_error, parameter = errors_of(reference, plan)
        assert loss_error <= 1e-10, f"plan {number} on {plan.mesh}: loss off by {loss_error}"
        assert gradient_error <= 1e-8, f"plan {number} on {plan.mesh}: gradient of {parameter} off by {gradient_error}"


class Made(TorchDispatchMode):
    """Storages that calls made, and their bytes."""

    def __init__(self) -> None:
        super().__init__()
        self.storages: dict[StorageWeakRef, int] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for tensor in result if isinstance(result, tuple | list) else (result,):
            if isinstance(tensor, torch.Tensor):
                storage = tensor.untyped_storage()
                self.storages[StorageWeakRef(storage)] = storage.nbytes()
        return result

    def alive(self, known: Iterable[torch.Tensor]) -> int:
        """Bytes of what still lives, without what is known."""
        others = {StorageWeakRef(t.untyped_storage()) for t in known}
        return sum(n for ref, n in self.storages.items() if not ref.expired() and ref not in others)


@pytest.mark.parametrize("share", [0.0, 0.3, 0.7, 1.0])
@pytest.mark.parametrize("family", ["gpt2", "bert"])
def test_between_forward_and_backward_lives_what_evaluate_counts(family: str, share: float) -> None:
    """On one rank, so that no collective's buffer is in the way: each byte of each activation that is kept."""
    model, kwargs = zoo(family, dtype=torch.float64)
    captured = exact_of(family)
    program, pricer = make_program(captured), pricer_of((1,))
    for seed in range(2):
        rng = random.Random(f"{family} {share} {seed}")
        plan = random_recompute(whole_plan(captured), captured, rng, share=share)
        live = Live(lower(plan, program, pricer.target))
        predicted = live.bytes["activations"][live.at[len(program.ops) - 1]]
        measured = measured_nbytes(captured, plan, model, kwargs)
        assert measured == pytest.approx(predicted, abs=16 * len(program.ops)), f"{measured} bytes, not {predicted}"


def whole_plan(captured: CapturedModel) -> StagePlan:
    """One rank without redistribution."""
    plan = random_plan(captured, make_mesh((1,)), random.Random(0))
    trained = {spec.placeholder for spec in captured.parameters if spec.trainable}
    layouts = {name: Layout((INVARIANT if name in trained else REPLICATE,)) for name in plan.layouts}
    return replace(plan, choices=dict.fromkeys(plan.choices, ("invariant",)), layouts=layouts)


def measured_nbytes(captured: CapturedModel, plan: StagePlan, model: nn.Module, kwargs: dict[str, Any]) -> int:
    """Bytes of activations that live between the passes, the loss aside."""
    graph = fx.GraphModule(nn.Module(), again_graph(emit(captured, plan).graph))
    inputs = {spec.placeholder: kwargs[spec.path] for spec in captured.inputs}
    values = {**parameters_of(captured, model), **buffers_of(captured, model), **captured.constants, **inputs}
    arguments = [values[n.name] for n in graph.graph.nodes if n.op == "placeholder"]
    groups = Groups(mesh=plan.mesh, rank=0, groups={})
    with use_groups(groups), use_draws(Draws(seed=1, step=0)), regathering(), Made() as made:
        loss, *_ = graph(*arguments)
    nbytes = made.alive([loss, *arguments])
    loss.backward()
    model.zero_grad()
    return nbytes


def test_what_runs_again_is_what_the_plan_s_own_device_would_ask_for() -> None:
    """Attention with a learned bias has a kernel on a GPU alone; on a host backward waits for other values."""
    captured, rng = captured_of("t5"), random.Random(0)
    stage = random_recompute(random_plan(captured, make_mesh((2,)), rng), captured, rng, share=0.6)
    marked = {}
    for name in ("2xcpu", "2xh100"):
        graph = ModelPlan(**vars(one_stage(stage)), machine=load_cluster(name), captured=captured).locals[0].graph
        own = emit(captured, stage, on_host=name == "2xcpu").graph
        marked[name], wanted = ([n.name for n in g.nodes if n.meta.get("again")] for g in (graph, own))
        assert marked[name] == wanted
    assert marked["2xcpu"] != marked["2xh100"]
