"""What was made of a plan is made once, under the same prices and of the same plan alone."""

from dataclasses import replace

import pytest

from autopar.search.costs.evaluate import evaluate_program
from autopar.search.costs.pricing import Pricer, make_pricer
from autopar.search.known.remembered import LAST, remembered
from autopar.search.planner import plan_program
from autopar.search.search_options import SearchOptions
from autopar.values.estimate import Estimate
from autopar.values.mesh import make_mesh
from autopar.values.stage_plan import StagePlan
from autopar.values.train_config import TrainConfig
from tests.search_cases import machine, program_of


def test_the_same_plan_under_the_same_prices_is_made_once() -> None:
    program = replace(program_of("gpt2"))
    pricer = make_pricer(mesh=make_mesh((2, 2)), cluster=machine(4), config=TrainConfig(), in_buckets=True)
    plan = plan_program(program, pricer, SearchOptions(relative_gap=0.01, with_baselines=False))
    made: list[StagePlan] = []

    def price(bare: StagePlan) -> StagePlan:
        assert bare.estimate == Estimate()
        made.append(bare.with_estimate(evaluate_program(bare, program, pricer.alone)))
        return made[-1]

    def asked(plan: StagePlan, prices: Pricer, kind: object = "test") -> StagePlan:
        return remembered(kind, plan, program, prices, price)

    first = asked(plan, pricer.alone)
    again = replace(plan, estimate=Estimate(hidden=1.0), choices=dict(plan.choices))
    assert asked(again, pricer.alone) is first and len(made) == 1
    name = next(iter(plan.lifetimes))
    other = replace(plan, lifetimes={**plan.lifetimes, name: "use" if plan.lifetimes[name] != "use" else "always"})
    slower = make_pricer(mesh=pricer.mesh, cluster=replace(pricer.cluster, name="other"), config=pricer.config)
    for count, (one, prices, kind) in enumerate(
        [
            (other, pricer.alone, "test"),
            (plan, pricer, "test"),
            (plan, pricer.sharing(0.5), "test"),
            (plan, slower, "test"),
            (plan, pricer.alone, "another kind"),
        ],
        start=2,
    ):
        asked(one, prices, kind)
        assert len(made) == count
    assert asked(plan, pricer.alone) is first
    for number in range(LAST):
        asked(plan, pricer.alone, number)
    assert asked(plan, pricer.alone) is not first, "no more than the last few are kept"


def test_planning_again_prices_nothing_again(monkeypatch: pytest.MonkeyPatch) -> None:
    program = replace(program_of("gpt2"))
    pricer = make_pricer(mesh=make_mesh((2, 2)), cluster=machine(4), config=TrainConfig(), in_buckets=True)
    options = SearchOptions(relative_gap=0.01, with_baselines=False)
    plan = plan_program(program, pricer, options)

    def never(*_: object) -> Estimate:
        raise AssertionError("priced again")

    monkeypatch.setattr("autopar.search.planner.evaluate_program", never)
    monkeypatch.setattr("autopar.search.timeline.buckets.evaluate_program", never)
    again = plan_program(program, pricer, options)
    assert again.estimate.seconds == plan.estimate.seconds and again.buckets == plan.buckets
