"""The explanation of a plan in stages: its parts are the step, its bytes the estimate, its offers what planning again
with the same arrangement gives; and two plans differ, with stages or without, in what was changed of one."""

from dataclasses import replace
from functools import lru_cache

import pytest

from autopar.api import planning as api
from autopar.api.model_plan import ModelPlan
from autopar.errors import PlanMismatchError
from autopar.passes.split_stages import split_stages
from autopar.report.explain_text import explain_text
from autopar.search.explanation import explain_stages as explain_module
from autopar.search.explanation import questions
from autopar.search.explanation.compare import compare
from autopar.search.explanation.explain import explain
from autopar.search.explanation.what_if import faster_arithmetic
from autopar.search.known.baselines import make_baseline
from autopar.search.pipeline_parts import part_of
from autopar.search.staged.stages import priced
from autopar.values.explanation import Explanation
from autopar.values.mesh import make_mesh
from autopar.values.placement import INVARIANT, Layout
from autopar.values.plan import Plan, one_stage
from autopar.values.search_report import SearchReport, SpaceSearched
from autopar.values.train_config import TrainConfig
from tests.search_cases import machine
from tests.test_staged_configurations import llama, made_of
from tests.zoo import zoo

GAP = 5e-3
TEXTS = ("fsdp:pp=2", "ddp:pp=2,schedule=gpipe", "megatron:tp=2,pp=2,vpp=2", "fsdp:pp=2,schedule=zbv")


@lru_cache
def recipe(text: str) -> Plan:
    return made_of(text, llama(4))


def quick(plan: Plan, seconds: float = 0.0) -> Explanation:
    """Nothing asked, everything priced."""
    return explain(plan, llama(4), machine(), seconds=seconds)


@pytest.mark.parametrize("text", TEXTS)
def test_parts_are_the_step_and_bytes_those_of_the_fullest_rank(text: str) -> None:
    plan = recipe(text)
    made = quick(plan)
    step = made.plan.estimate.step_seconds
    assert step == pytest.approx(plan.estimate.step_seconds, rel=1e-12)
    assert sum(made.parts.values()) == pytest.approx(step, rel=1e-9)
    assert all(seconds >= -1e-9 * step for name, seconds in made.parts.items() if name != "uneven stages")
    held = [0.0] * plan.pipeline
    for stage in made.stages:
        held[stage.rank] += sum(stage.memory.values()) + stage.in_flight
    assert max(held) >= 0.95 * plan.estimate.peak_nbytes  # stage by stage; the estimate walks the rank's whole order
    work = plan.microbatches * sum(s.forward + s.backward for s in made.stages) / plan.pipeline
    assert made.parts["work, shared out evenly"] == pytest.approx(work, rel=1e-9)
    slowest = made.stages[made.slowest]
    spent = plan.microbatches * (slowest.forward + slowest.backward) + slowest.once
    assert sum(item.amount for item in made.ledger.seconds) == pytest.approx(spent, rel=1e-9)
    assert made.unanswered and not made.offers
    assert "fill and drain of the schedule" in explain_text(made) and "model.layers." in explain_text(made)


def test_fill_and_drain_are_those_of_equal_stages() -> None:
    """Of 1f1b and gpipe (p - 1) micro-batches; interleaved v times less."""
    for text in TEXTS[:3]:
        plan, made = recipe(text), quick(recipe(text))
        passing = sum(s.forward + s.backward for s in made.stages) / plan.pipeline
        fill = (plan.pipeline - 1) * passing / (plan.num_stages // plan.pipeline)
        assert made.parts["fill and drain of the schedule"] == pytest.approx(fill, rel=1e-9)


def test_other_schedules_are_priced_with_the_same_stages() -> None:
    made, other = quick(recipe("fsdp:pp=2")), made_of("fsdp:pp=2,schedule=gpipe", llama(4)).estimate
    assert set(made.schedules) == {"gpipe"}
    assert made.schedules["gpipe"] == pytest.approx((other.step_seconds, other.peak_nbytes))
    assert not quick(recipe("megatron:tp=2,pp=2,vpp=2")).schedules, "no other order has these stages"


def test_offers_are_what_planning_again_with_the_same_arrangement_gives(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a recipe, which is not the best with its stages: what is saved is what planning them saves."""
    model, kwargs = zoo("gpt2", batch=8)
    plan = api.plan(model, kwargs, cluster=machine(), baseline="fsdp:pp=2,mbs=1")
    best = api.plan(model, kwargs, cluster=machine(), mesh="2", pipeline=2, microbatches=4, relative_gap=GAP)
    assert isinstance(plan, ModelPlan) and best.estimate.step_seconds < plan.estimate.step_seconds
    asked = {"no memory limit", "2× the flop/s"}
    every = questions.changes
    few = lambda *given: [change for change in every(*given) if change[0].partition(":")[0] in asked]  # noqa: E731
    monkeypatch.setattr(explain_module, "changes", few)
    made = plan.explain(seconds=100.0)
    assert isinstance(made, Explanation) and not made.unanswered
    offers = {offer.change.partition(":")[0]: offer for offer in made.offers}
    assert set(offers) == asked
    for offer in made.offers:
        assert offer.best is None or offer.bound <= offer.best * (1 + 1e-9)
        assert offer.same is None or (offer.best is not None and offer.best <= offer.same * (1 + 1e-9))
    free = offers["no memory limit"]
    assert free.same == pytest.approx(plan.estimate.step_seconds)
    assert free.best == pytest.approx(best.estimate.step_seconds, rel=2 * GAP)
    faster = faster_arithmetic(machine(), 2.0)
    same = priced(plan, split_stages(plan.graph, plan.cuts), faster, part_of(faster, 2)).estimate.step_seconds
    assert offers["2× the flop/s"].same == pytest.approx(same)
    assert made.baselines["fsdp:pp=2,schedule=1f1b"] == pytest.approx(plan.estimate.step_seconds, rel=1e-3)
    text = str(made)
    assert (
        "what a change would buy" in text and "what named baselines cost" in text and "the same stages, gpipe" in text
    )


def test_what_the_search_met_is_near() -> None:
    plan = recipe("fsdp:pp=2")
    space = SpaceSearched(
        space="",
        status="proved",
        candidates=3,
        planned=2,
        do_not_fit=0,
        seconds=1.0,
        near={"2 stages of 1x2": 2.0},
        not_below={"4 stages of 1": 3.0},
    )
    made = quick(plan.with_estimate(replace(plan.estimate, search=SearchReport(space=space))))
    assert made.near == {"2 stages of 1x2": 2.0} and made.not_below == {"4 stages of 1": 3.0}
    assert "2 stages of 1x2" in explain_text(made) and "not planned: no plan of it takes less" in explain_text(made)


def test_a_plan_in_stages_and_itself_differ_in_nothing() -> None:
    plan = recipe("fsdp:pp=2")
    assert compare(plan, plan, llama(4), llama(4)).is_empty


def test_what_is_changed_of_a_stage_is_what_is_said() -> None:
    plan = recipe("ddp:pp=2")
    node = next(
        n for n in split_stages(llama(4), plan.cuts)[1].graph.nodes if "mlp.down_proj" in str(n.meta.get("module"))
    )
    stage = plan.stages[1]
    changed = replace(stage, choices={**stage.choices, node.name: ("invariant",)})
    found = compare(plan, replace(plan, stages=(plan.stages[0], changed)), llama(4), llama(4)).changes
    assert [(c.kind, c.what, c.count) for c in found] == [("op", "model.layers.*.mlp.down_proj: linear", 1)]
    assert (
        found[0].left.startswith("split by batch") and found[0].right == f"whole on every rank ({Layout((INVARIANT,))})"
    )


def test_other_cuts_are_other_stages_of_blocks() -> None:
    one, other = recipe("ddp:pp=2"), recipe("ddp:pp=2,vpp=2")
    made = compare(one, other, llama(4), llama(4))
    assert made.facts == {"pipeline": ("2 stages on 2 ranks, 1f1b", "4 stages on 2 ranks, interleaved-1f1b")}
    stages = {(c.left, c.right): c.count for c in made.changes if c.kind == "stage"}
    assert stages == {(f"stage {block // 2} of 2", f"stage {block} of 4"): 1 for block in range(4)}
    assert made.seconds["bubble"] == (one.estimate.seconds["bubble"], other.estimate.seconds["bubble"])


def test_with_and_without_stages_total_what_each_takes() -> None:
    staged, mesh = recipe("ddp:pp=2"), make_mesh((4,))
    whole = one_stage(make_baseline("ddp", llama(1), machine(), mesh, TrainConfig()))
    made = compare(whole, staged, llama(1), llama(4))
    assert made.facts["pipeline"] == ("none", "2 stages on 2 ranks, 1f1b") and made.facts["mesh"]
    for i, plan in enumerate((whole, staged)):
        assert sum(pair[i] for pair in made.seconds.values()) == pytest.approx(plan.estimate.step_seconds)
        assert sum(pair[i] for pair in made.nbytes.values()) == pytest.approx(plan.estimate.peak_nbytes)
    assert made.seconds["bubble"] == (0.0, staged.estimate.seconds["bubble"])
    assert {c.kind for c in made.changes if c.right.startswith("stage")} == {"stage"}
    back = compare(staged, whole, llama(4), llama(1))
    assert {(c.kind, c.what, c.right, c.left) for c in back.changes} == {
        (c.kind, c.what, c.left, c.right) for c in made.changes
    }
    with pytest.raises(PlanMismatchError):
        compare(staged, whole, llama(4), llama(4))
