"""Stages run one after the other are the whole model, wherever it is cut; what each stage has, sends and refuses."""

import itertools
import random
from collections.abc import Callable
from functools import cache, partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn
from torch.distributed import pipelining

from autopar.capture import capture
from autopar.errors import ArgumentError, PlanMismatchError
from autopar.lower.emit import emit_stage
from autopar.passes.accumulate_gradients import accumulate_gradients
from autopar.passes.split_stages import owners, split_stages
from autopar.passes.wait_late import last_sum, wait_late
from autopar.runtime.schedules import CLASSES
from autopar.search.known.random_plan import random_cuts, random_plan, random_staged_plan
from autopar.values.graph import CapturedModel, requires_grad
from autopar.values.mesh import make_mesh
from autopar.values.plan import VERSION, Plan
from autopar.values.plan_file import plan_from_json
from autopar.values.schedules import SCHEDULES, check_microbatches, stage_ranks
from autopar.values.serialize import dump, load
from autopar.values.stage_plan import StagePlan
from autopar.values.train_config import TrainConfig
from tests.plans_in_threads import one_process
from tests.search_cases import exact_of
from tests.zoo import FAMILIES, zoo


@cache
def captured_of(family: str) -> tuple[CapturedModel, nn.Module, dict[str, Any]]:
    model, kwargs = zoo(family, dtype=torch.float64)
    return exact_of(family), model, kwargs


def calls(captured: CapturedModel) -> list[str]:
    return [node.name for node in captured.graph.nodes if node.op == "call_function"]


def run_one_after_the_other(stages: tuple[CapturedModel, ...], values: dict[str, Tensor]) -> dict[str, Tensor]:
    """All results by name; every stage sees only its own placeholders and what the one before sent."""
    sent: dict[str, Tensor] = {}
    found: dict[str, Tensor] = {}
    for stage in stages:
        names = [node.name for node in stage.graph.nodes if node.op == "placeholder"]
        assert tuple(sent) == stage.received
        given = {**values, **stage.constants, **sent}
        results = fx.GraphModule(nn.Module(), stage.graph)(*(given[name] for name in names))
        found.update(zip((*stage.ends, *stage.results), results, strict=True))
        sent = {name: found[name] for name in stage.sends}
    return found


@pytest.mark.parametrize("family", FAMILIES[1::2])
def test_stages_one_after_the_other_are_the_model(family: str) -> None:
    captured, model, kwargs = captured_of(family)
    reference = one_process(captured, model, kwargs)
    rng = random.Random(family)
    for num_stages in (1, 2, 5):
        stages = split_stages(captured, random_cuts(captured, num_stages, rng))
        parameters = {n: p.detach().requires_grad_(p.requires_grad) for n, p in reference.parameters.items()}
        values = {**parameters, **reference.buffers, **reference.inputs}
        found = run_one_after_the_other(stages, values)
        assert torch.equal(found[captured.loss], reference.loss)
        for buffer in captured.buffers:
            if buffer.mutated_by:
                assert torch.equal(found[buffer.mutated_by], reference.new_buffers[buffer.placeholder])
        found[captured.loss].backward()
        for name, parameter in parameters.items():
            assert (parameter.grad is None) == (reference.parameters[name].grad is None)
            if parameter.grad is not None:
                torch.testing.assert_close(parameter.grad, reference.parameters[name].grad, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("family", FAMILIES[1::2])
def test_every_call_that_needs_a_gradient_is_in_one_stage(family: str) -> None:
    captured, *_ = captured_of(family)
    stages = split_stages(captured, random_cuts(captured, 4, random.Random(family)))
    for node in captured.graph.nodes:
        homes = [i for i, stage in enumerate(stages) if node.name in calls(stage)]
        if node.op == "call_function":
            assert homes and (len(homes) == 1 or not requires_grad(node))
    for before, after in itertools.pairwise(stages):
        assert before.sends == after.received == tuple(spec.placeholder for spec in after.inputs[-len(before.sends) :])
        assert not before.loss
    named = {spec.placeholder for stage in stages for spec in stage.parameters}
    assert named == {spec.placeholder for spec in captured.parameters}
    again = load(dump(stages[1]))
    assert (again.fingerprint, again.sends, again.received) == (
        stages[1].fingerprint,
        stages[1].sends,
        stages[1].received,
    )


def test_masks_and_tables_are_computed_again_and_tied_weights_are_in_both() -> None:
    captured, *_ = captured_of("gpt2")
    middle = next(n for n in calls(captured) if captured.nodes[n].meta["module"].startswith("transformer.h.1"))
    first, last = split_stages(captured, (middle,))
    assert len(first.sends) == 1 and requires_grad(captured.nodes[first.sends[0]])
    tied = next(p.placeholder for p in captured.parameters if len(p.names) > 1)
    assert owners((first, last))[tied] == (0, 1)
    llama, *_ = captured_of("llama")
    middle = next(n for n in calls(llama) if llama.nodes[n].meta["module"].startswith("model.layers.1"))
    assert len(split_stages(llama, (middle,))[1].received) == 1  # no rotary table crosses
    assert set(calls(split_stages(llama, (middle,))[0])) & set(calls(split_stages(llama, (middle,))[1]))


def test_labels_are_counted_in_the_last_stage() -> None:
    captured = accumulate_gradients(exact_of("gpt2"), 2, lambda: exact_of("gpt2"))
    first, last = split_stages(captured, random_cuts(captured, 2, random.Random(3)))
    assert (first.microbatches, first.accumulation.count, first.results) == (2, None, ())
    assert last.results == (captured.accumulation.count,)


def test_cuts_that_make_no_stages_are_refused() -> None:
    captured, *_ = captured_of("bert")
    names = calls(captured)
    for cuts, message in (
        ((names[9], names[5]), f"before {names[5]}, which does not come after {names[9]}"),
        ((names[5], names[5]), "a stage would be empty"),
        ((names[0],), "a stage would be empty"),
        (("nothing",), "before nothing, which it does not compute"),
    ):
        with pytest.raises(PlanMismatchError, match=message):
            split_stages(captured, cuts)
    with pytest.raises(ArgumentError, match="too few for 1000 stages"):
        random_cuts(captured, 1000, random.Random(0))


class Twice(nn.Module):
    """Batch norm used twice: its statistics are read at the start and written at the end."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.linear = nn.BatchNorm1d(4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        return {"loss": self.norm(self.linear(self.norm(x))).square().mean()}


def test_a_buffer_of_two_stages_is_refused() -> None:
    captured = capture(Twice(), (), {"x": torch.randn(8, 4)})
    cut = next(n for n in calls(captured) if "linear" in n)
    with pytest.raises(PlanMismatchError, match=r"norm\.(running|num).* is read in stage 0 and written in stage 1"):
        split_stages(captured, (cut,))


def staged(schedule: str, pipeline: int, num_stages: int, **changes: Any) -> Plan:
    captured, *_ = captured_of("gpt2")
    cuts = random_cuts(captured, num_stages, random.Random(0))
    mesh = make_mesh((2,))
    stages: tuple[StagePlan, ...] = tuple(random_plan(s, mesh, random.Random(0)) for s in split_stages(captured, cuts))
    parts: dict[str, Any] = {
        "model": captured.name,
        "fingerprint": captured.fingerprint,
        "cluster": "4xcpu",
        "config": TrainConfig(),
        "mesh": mesh,
        "pipeline": pipeline,
        "schedule": schedule,
        "microbatches": 1,
        "cuts": cuts,
        "stages": stages,
    }
    return Plan(**{**parts, **changes})


def test_which_rank_runs_which_stage() -> None:
    assert stage_ranks("1f1b", 4, 4) == stage_ranks("gpipe", 4, 4) == (0, 1, 2, 3)
    assert stage_ranks("interleaved-1f1b", 2, 6) == (0, 1, 0, 1, 0, 1)
    assert stage_ranks("zbv", 3, 6) == (0, 1, 2, 2, 1, 0)
    plan = staged("zbv", 2, 4)
    assert plan.world == 4 and plan.stages_of(0) == (0, 3) and plan.stages_of(1) == (1, 2)


@pytest.mark.parametrize(
    ("schedule", "pipeline", "num_stages", "needs"),
    [
        ("gpipe", 2, 4, "one stage a rank, 2; got 4"),
        ("1f1b", 4, 2, "one stage a rank, 4; got 2"),
        ("zbv", 4, 4, "two stages a rank, 8; got 4"),
        ("interleaved-1f1b", 2, 2, "a multiple of 2 from 4; got 2"),
        ("interleaved-1f1b", 2, 5, "a multiple of 2 from 4; got 5"),
        ("pipedream", 2, 2, "unknown schedule 'pipedream'; choose one of gpipe"),
    ],
)
def test_stages_that_do_not_fit_the_schedule_are_refused(
    schedule: str, pipeline: int, num_stages: int, needs: str
) -> None:
    with pytest.raises(ArgumentError, match=needs):
        stage_ranks(schedule, pipeline, num_stages)


def is_refused(refuse: Callable[[], object]) -> bool:
    try:
        refuse()
    except ValueError:
        return True
    return False


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_numbers_of_micro_batches_are_refused_as_torch_refuses_them(schedule: str) -> None:
    """torch's own classes, on stages that only say how many they are."""
    for pipeline, microbatches in itertools.product(range(1, 6), range(1, 13)):
        each = {"zbv": 2, "interleaved-1f1b": 3}.get(schedule, 1)
        stages = [
            SimpleNamespace(
                num_stages=each * pipeline,
                group_size=pipeline,
                group_rank=0,
                stage_index=i * pipeline,
                submod=nn.Module(),
            )
            for i in range(each)
        ]
        theirs = partial(getattr(pipelining, CLASSES[schedule]), stages if each > 1 else stages[0], microbatches)
        ours = partial(check_microbatches, schedule, pipeline, microbatches)
        assert is_refused(theirs) == is_refused(ours), (pipeline, microbatches)


def test_a_staged_plan_travels_as_json_and_checks_its_model() -> None:
    plan = staged("gpipe", 2, 2)
    assert plan_from_json(plan.to_json()) == plan
    captured, *_ = captured_of("gpt2")
    plan.check(captured)
    with pytest.raises(PlanMismatchError, match="this plan was made for"):
        plan.check(captured_of("bert")[0])
    with pytest.raises(PlanMismatchError, match="no JSON"):
        plan_from_json("stages")
    with pytest.raises(PlanMismatchError, match="schema version 'stages-0'"):
        plan_from_json(plan.to_json().replace(f'"schema": {VERSION}', '"schema": "stages-0"'))
    with pytest.raises(ArgumentError, match="2 stages need 1 cuts, got 0"):
        staged("gpipe", 2, 2, cuts=())
    with pytest.raises(ArgumentError, match="stage 0 is planned for mesh 2"):
        staged("gpipe", 2, 2, mesh=make_mesh((4,)))
    with pytest.raises(ArgumentError, match="stage 0 is planned for 1 micro-batches a step, the plan has 4"):
        staged("gpipe", 2, 2, microbatches=4)


def test_a_stage_that_nothing_is_left_for_has_a_graph_to_run() -> None:
    """All before the first call that needs its batch is known when the model is captured."""
    captured = exact_of("bert")
    cut = next(name for name in calls(captured)[1:] if not calls(split_stages(captured, (name,))[0]))
    plan = random_staged_plan(captured, make_mesh((1,)), "gpipe", 2, (cut,), random.Random(0))
    stages = split_stages(captured, plan.cuts)
    first, last = (emit_stage(stages, plan.stages, number) for number in range(2))
    assert not stages[0].sends and not calls(first.captured)
    assert last_sum(wait_late(first.graph)) is None
    assert calls(last.captured) == calls(captured)
