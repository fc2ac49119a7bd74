"""An explanation's figures are those that planning again gives, its items add up to the estimate, its bounds hold."""

import random
from dataclasses import replace
from functools import lru_cache

import numpy as np
import pytest

from autopar.api.model_plan import model_plan, plan_from_text
from autopar.errors import ClusterError, InfeasibleError, PlanMismatchError
from autopar.report.explain_text import explain_text
from autopar.search.costs.evaluate import evaluate, evaluate_program
from autopar.search.costs.ledger import ledger
from autopar.search.costs.pricing import make_pricer
from autopar.search.exact.ilp import solve
from autopar.search.explanation import explain_stage, questions
from autopar.search.explanation.alternatives import Space
from autopar.search.explanation.explain import explain
from autopar.search.explanation.what_if import faster_arithmetic, faster_link
from autopar.search.graph.build import build
from autopar.search.known.random_plan import random_plan, random_recompute
from autopar.search.planner import make_plan
from autopar.search.search_options import SearchOptions
from autopar.values.explanation import Explanation
from autopar.values.mesh import make_mesh
from autopar.values.plan import one_stage
from autopar.values.stage_plan import StagePlan
from autopar.values.train_config import TrainConfig
from tests.search_cases import captured_of, machine, program_of

STEP = 3e4
"""Bytes that stand for a GB in these tests: tiny models do not feel more."""
GAP = 5e-3


@pytest.mark.parametrize("family", ["llama", "gpt2"])
@pytest.mark.parametrize("shape", [(4,), (2, 2)])
def test_items_add_up_to_the_estimate(family: str, shape: tuple[int, ...]) -> None:
    program, captured = program_of(family), captured_of(family)
    pricer = make_pricer(mesh=make_mesh(shape), cluster=machine(), config=TrainConfig())
    for seed in range(2):
        rng = random.Random(seed)
        plan = random_recompute(random_plan(captured, pricer.mesh, rng), captured, rng, share=0.5)
        estimate = evaluate_program(plan, program, pricer)
        made = ledger(plan, program, pricer)
        for items, amounts in ((made.seconds, estimate.seconds), (made.nbytes, estimate.memory)):
            assert [item.amount for item in items] == sorted((item.amount for item in items), reverse=True)
            for kind, amount in amounts.items():
                own = [item.amount for item in items if item.kind == kind]
                assert sum(own) == pytest.approx(amount, rel=1e-9), kind
        sent = sum(item.amount for item in made.seconds if item.over)
        assert sent > 0 and sum(made.levels.values()) == pytest.approx(sent)


@lru_cache
def tight() -> tuple[StagePlan, TrainConfig]:
    """A plan whose limit binds, and how it is trained."""
    free = make_plan(
        captured_of("llama"), machine(), make_mesh((4,)), TrainConfig(), SearchOptions(with_baselines=False)
    )
    config = TrainConfig(memory_nbytes=0.85 * free.estimate.peak_nbytes)
    plan = make_plan(
        captured_of("llama"), machine(), make_mesh((4,)), config, SearchOptions(relative_gap=GAP, with_baselines=False)
    )
    assert free.estimate.step_seconds < plan.estimate.step_seconds
    return plan, config


@pytest.fixture(scope="module")
def explanation() -> Explanation:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(questions, "GB", STEP)
        patch.setattr(explain_stage, "DECISIONS", 1)
        plan = tight()[0]
        priced = plan.with_estimate(replace(plan.estimate, baselines={"ddp": "does not fit"}))
        return explain(one_stage(priced), captured_of("llama"), machine(), relative_gap=GAP, seconds=1e4)


def replanned(limit: float) -> StagePlan:
    config = replace(tight()[1], memory_nbytes=limit)
    return make_plan(
        captured_of("llama"), machine(), make_mesh((4,)), config, SearchOptions(relative_gap=GAP, with_baselines=False)
    )


def test_more_memory_buys_what_planning_with_it_gives(explanation: Explanation) -> None:
    plan, limit = tight()[0], tight()[1].memory_nbytes
    assert limit is not None and explanation.limit == limit
    free, more, less = explanation.offers[:3]
    for offer, room in ((free, np.inf), (more, limit + STEP), (less, limit - STEP)):
        try:
            again = replanned(room).estimate
        except InfeasibleError as error:
            assert offer.best is None and offer.why_not == str(error)
            continue
        best = again.step_seconds if offer.same is None else min(again.step_seconds, plan.estimate.step_seconds)
        assert offer.best == pytest.approx(best, rel=1e-9) and offer.bound == pytest.approx(min(again.bound, best))
    assert free.best is not None and more.best is not None
    assert free.best <= more.best < plan.estimate.step_seconds
    assert less.same is None or plan.estimate.peak_nbytes <= limit - STEP
    assert explanation.limit_costs is not None
    least, most = explanation.limit_costs
    assert 0 < least <= plan.estimate.step_seconds - free.best <= most
    assert "memory binds: " in explain_text(explanation)
    assert explanation.baselines == {"ddp": "does not fit"}, "those of the plan are not priced again"


def test_texts_of_a_file_are_single_words_of_the_command_that_checks(explanation: Explanation) -> None:
    source = {"spec": "net.py:net; id", "batch": 8, "seq": None, "overrides": {"width": "$(id)"}}
    plan = model_plan(explanation.plan, source=source)
    [command] = (line for line in explain_text(replace(explanation, plan=plan)).splitlines() if "autopar plan" in line)
    assert command.startswith("autopar plan 'net.py:net; id' --global-batch 8 --precision fp32 ")
    assert command.endswith(" --set 'width=$(id)'")


def test_a_faster_link_buys_what_planning_on_it_gives(explanation: Explanation) -> None:
    plan = tight()[0]
    for offer, cluster in (
        (explanation.offers[3], faster_link(machine(), 0, 2.0)),
        (explanation.offers[4], faster_arithmetic(machine(), 2.0)),
    ):
        same = evaluate(plan, captured_of("llama"), cluster).step_seconds
        config = tight()[1]
        again = make_plan(
            captured_of("llama"), cluster, plan.mesh, config, SearchOptions(relative_gap=GAP, with_baselines=False)
        ).estimate
        assert offer.same == pytest.approx(same, rel=1e-9)
        assert offer.best == pytest.approx(min(same, again.step_seconds), rel=1e-9)
        assert offer.bound <= offer.best < plan.estimate.step_seconds  # type: ignore[operator]
    sent = sum(explanation.ledger.levels.values())
    faster = explanation.offers[3].same
    assert faster is not None and plan.estimate.step_seconds - sent / 2 <= faster, "α is as before"


def test_alternatives_are_no_better_than_the_bound_and_say_what_they_cost(explanation: Explanation) -> None:
    plan = tight()[0]
    without = {other.without: other for other in explanation.alternatives}
    assert "nothing split by batch" in without and any(name.startswith("model.layers.*") for name in without)
    for other in explanation.alternatives:
        if other.seconds is None:
            assert other.why_not
            continue
        assert plan.estimate.bound * (1 - 1e-9) <= other.seconds
        assert other.bound <= other.seconds and other.nbytes <= explanation.limit
    if plan.recompute:
        again = without["nothing run again in backward"]
        assert again.why_not.startswith("does not fit") or again.seconds is not None
    for label, other in without.items():
        if other.instead:
            assert label.partition(": ")[2] != other.instead


def test_a_forbidden_decision_is_the_best_of_all_others() -> None:
    """Brute force: every other option of the node fixed in turn."""
    plan = make_plan(
        captured_of("gpt2"), machine(), make_mesh((4,)), TrainConfig(), SearchOptions(with_baselines=False)
    )
    program = program_of("gpt2")
    pricer = make_pricer(mesh=plan.mesh, cluster=machine(), config=plan.config)
    space = Space(plan=plan, program=program, pricer=pricer, limit=1e9, relative_gap=1e-7)
    label, answer = next(space.decisions(1))
    found = answer(60.0)
    problem = build(program, pricer, limit=None)
    spent = {n: space._node_seconds(problem, n) for n in problem.options}
    node = max(spent, key=lambda n: spent[n])
    chosen = plan.choices[problem.clusters[node].root.name]
    others = []
    for number, option in enumerate(problem.options[node]):
        if option.names[-1] == chosen:
            continue
        seconds = np.where(np.arange(len(problem.options[node])) == number, problem.graph.nodes[node].seconds, np.inf)
        nodes = list(problem.graph.nodes)
        nodes[node] = replace(nodes[node], seconds=seconds)
        others.append(solve(replace(problem.graph, nodes=tuple(nodes)), relative_gap=1e-7).seconds)
    assert found.without == label and found.seconds == pytest.approx(min(others), rel=1e-2)
    assert found.bound <= min(others) * (1 + 1e-6)


def test_without_time_nothing_is_asked_and_everything_said() -> None:
    plan = tight()[0]
    made = explain(one_stage(plan), captured_of("llama"), machine(), seconds=0.0)
    assert not made.offers and not made.alternatives and not made.baselines
    assert {"no memory limit", "baseline ddp"} <= set(made.unanswered)
    assert "whether the limit binds was not asked" in explain_text(
        made
    ) and "not asked, for the time was over" in explain_text(made)
    assert max(map(len, explain_text(made).splitlines())) <= 120


def test_a_plan_without_its_model_or_machine_says_so() -> None:
    bound = model_plan(one_stage(tight()[0]), captured=captured_of("llama"))
    loaded = plan_from_text(bound.to_json())
    with pytest.raises(PlanMismatchError, match="no graph of LlamaForCausalLM"):
        loaded.explain(cluster=machine())
    with pytest.raises(PlanMismatchError, match="another architecture"):
        explain(loaded, captured_of("gpt2"), machine())
    with pytest.raises(ClusterError, match="is neither a preset"):
        replace(bound, cluster="my cluster").explain()
