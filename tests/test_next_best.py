"""The next best plans: different, legal, priced, cheapest first; and the timeline that picks among them."""

import random
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from typing import Literal

import pytest
import torch
from torch import Tensor, nn

import autopar
from autopar.api.model_plan import ModelPlan
from autopar.lower.emit import emit
from autopar.report.plan_text import plan_text
from autopar.search.costs.evaluate import evaluate
from autopar.search.explanation.next_best import _decisions
from autopar.search.known.random_plan import random_plan
from autopar.search.overlapped import Ranking
from autopar.search.timeline.plan_timeline import plan_timeline
from autopar.values.cluster import Cluster
from autopar.values.graph import CapturedModel
from autopar.values.mesh import make_mesh
from autopar.values.plan import Plan, one_stage
from autopar.values.search_report import SearchReport, SpaceSearched
from tests.search_cases import machine

NOTHING = SpaceSearched(
    space="", status="proved", candidates=0, planned=0, do_not_fit=0, seconds=0.0, near={}, not_below={}
)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(64, 64) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x).relu()
        return x.square().mean()


@cache
def made(overlap: autopar.Overlap | None = None) -> ModelPlan:
    with torch.device("meta"):
        model, x = Net(), torch.empty(32, 64)
    return autopar.plan(model, {"x": x}, cluster=machine(4, 1e9), mesh="4", overlap=overlap, with_baselines=False)


def decided(whole: Plan) -> tuple[object, ...]:
    plan = whole.single
    return plan.mesh.shape, sorted(plan.choices.items()), str(plan.layouts), str(plan.lifetimes), plan.recompute


def ranked(plan: Plan, others: Sequence[Plan], captured: CapturedModel, cluster: Cluster) -> Plan:
    ranking = Ranking(cluster=cluster, overlap=autopar.Overlap(bucket_nbytes=0))
    for one in (plan, *others):
        ranking.add(one, captured)
    return ranking.best()[0]


def test_the_next_best_plans_differ_run_and_cost_more() -> None:
    plan = made()
    others = plan.alternatives(50)
    assert len(others) >= 5
    seconds = [other.estimate.step_seconds for other in others]
    assert seconds == sorted(seconds)
    assert min(other.estimate.in_turn_seconds for other in others) >= plan.estimate.bound * (1 - 1e-9)
    seen = [decided(plan)]
    for other in others:
        assert plan.captured is not None
        emit(plan.captured, other.single)
        found = evaluate(other.single, plan.captured, machine(4, 1e9))
        assert (found.seconds, found.memory) == (other.estimate.seconds, other.estimate.memory)
        assert other.call == plan.call and other.estimate.search.instead
        assert decided(other) not in seen and other.mesh == plan.mesh
        seen.append(decided(other))
    searched = replace(plan, estimate=replace(plan.estimate, search=SearchReport(space=NOTHING)))
    fewer = searched.alternatives(len(others) + 1)
    assert {other.mesh.shape for other in fewer} == {(4,), (2, 2)}, "over all meshes if the plan was searched so"


def test_plans_in_stages_have_other_stages_and_none_beside_them() -> None:
    with torch.device("meta"):
        model, x = Net(), torch.empty(32, 64)
    plan = autopar.plan(model, {"x": x}, cluster=machine(4, 1e9), mesh="auto", pipeline=2, microbatches=4)
    others = plan.alternatives(20)
    assert plan.num_stages > 1 and {other.pipeline for other in others} == {1, 2}, "three blocks"
    assert "gpipe" in {other.schedule for other in others if other.num_stages > 1}
    assert any(other.num_stages == 1 for other in others)
    assert [o.estimate.step_seconds for o in others] == sorted(o.estimate.step_seconds for o in others)
    for other in others:
        assert other.captured is plan.captured is not None
        other.check(plan.captured)
        seconds = other.timeline().seconds
        assert seconds == pytest.approx(other.estimate.step_seconds, rel=1e-9), other.estimate.search.instead
    best = ranked(plan, others, plan.captured, machine(4, 1e9))
    assert best.estimate.bound == plan.estimate.bound


def test_the_timeline_picks_the_shortest_and_keeps_the_bound() -> None:
    captured, overlap = made().captured, autopar.Overlap(bucket_nbytes=0)
    assert captured is not None
    plans = []
    for seed in range(4):
        plan = one_stage(random_plan(captured, make_mesh((4,)), random.Random(seed)))
        report = SearchReport(instead=f"plan {seed}")
        estimate = replace(evaluate(plan.single, captured, machine()), bound=1e-9, search=report)
        plans.append(plan.with_estimate(estimate))
    times = [plan_timeline(plan, [captured], machine(), overlap).seconds for plan in plans]
    slowest = times.index(max(times))
    rest = [plan for number, plan in enumerate(plans) if number != slowest]
    best = ranked(plans[slowest], rest, captured, machine())
    shown = best.estimate.search.timeline
    assert shown is not None
    assert best.estimate.bound == 1e-9
    assert shown.plans[shown.chosen].timeline_seconds == pytest.approx(min(times))
    assert best.stages == plans[times.index(min(times))].stages
    assert shown.chosen > 0 and "which is what the bound is of" in plan_text(best, (), machine())
    fastest = times.index(min(times))
    same = ranked(plans[fastest], plans[fastest + 1 :], captured, machine())
    again = same.estimate.search.timeline
    assert again is not None and again.chosen == 0 and "as by the sum" in plan_text(same, (), machine())


def test_planning_for_overlap() -> None:
    plan = made(autopar.Overlap())
    shown = plan.estimate.search.timeline
    assert shown is not None and len(shown.plans) == 6
    own = shown.plans[shown.chosen].timeline_seconds
    assert own == min(row.timeline_seconds for row in shown.plans)
    assert plan.timeline(overlap=autopar.Overlap()).seconds == pytest.approx(own)
    assert own < plan.timeline().seconds == pytest.approx(plan.estimate.alone_seconds)
    assert "collectives beside compute" in str(plan)


def test_numbers_of_micro_batches_are_ranked_as_one_by_one() -> None:
    """The shortest overlapped step of all numbers of micro-batches, each planned by itself; 1f1b does not run one."""
    with torch.device("meta"):
        model, x = Net(), torch.empty(4, 64)

    def step(number: int | Literal["auto"], schedule: str = "auto") -> float:
        plan = autopar.plan(
            model,
            {"x": x},
            cluster=machine(4, 1e9),
            mesh="2",
            pipeline=2,
            schedule=schedule,
            microbatches=number,
            overlap=autopar.Overlap(),
            with_baselines=False,
        )
        shown = plan.estimate.search.timeline
        assert shown is not None
        assert plan.num_stages == 2 and plan.mesh.shape == (2,), "as asked"
        assert number == "auto" or {row.plan.partition(" micro-")[0] for row in shown.plans}.isdisjoint("124")
        seconds = shown.plans[shown.chosen].timeline_seconds
        assert plan.timeline(overlap=autopar.Overlap()).seconds == pytest.approx(seconds)
        return seconds

    each = [step(1, "gpipe"), step(2), step(4)]
    assert each[0] < 0.99 * min(each[1:]), "another number than that of the first by the sum"
    assert step("auto") == pytest.approx(min(each), rel=1e-3)


def test_plans_that_differ_in_names_alone_are_one() -> None:
    """Without a gradient, invariant and replicated run alike."""
    plan = made()
    assert plan.captured is not None
    own = plan.single
    op = next(iter(own.choices))
    one, other = (one_stage(replace(own, choices={**own.choices, op: (word,)})) for word in ("invariant", "replicate"))
    for without, same in ((frozenset({op}), True), (frozenset[str](), False)):
        assert (_decisions(one, without) == _decisions(other, without)) is same
