"""A backward pass in two parts: nothing read before it is made, nothing run twice for nothing."""

import random

import pytest

from autopar.lower.lowered_step import LoweredStep, lower
from autopar.lower.program import make_program
from autopar.passes.split_stages import split_stages
from autopar.search.costs.pricing import Pricer, make_pricer
from autopar.search.costs.runs import Runs, find_runs
from autopar.search.known.random_plan import random_cuts, random_staged_plan
from autopar.values.mesh import make_mesh
from tests.search_cases import captured_of, machine

CASES = [("llama", 1, 0.0), ("vit", 2, 0.4), ("resnet", 3, 0.0), ("llama", 4, 0.5)]


@pytest.mark.parametrize(("family", "seed", "recompute"), CASES)
def test_parts_read_what_is_made_and_take_what_the_whole_takes(family: str, seed: int, recompute: float) -> None:
    captured, rng, mesh = captured_of(family), random.Random(seed), make_mesh((2,))
    cuts = random_cuts(captured, 4, rng)
    plan = random_staged_plan(captured, mesh, "zbv", 2, cuts, rng, recompute=recompute)
    stages = split_stages(captured, cuts)
    for number, stage in enumerate(stages):
        own, program = plan.stages[number], make_program(stage)
        after = plan.stages[number + 1].layouts if number + 1 < len(stages) else {}
        sends = {name: after[name] for name in stage.sends}
        pricer = make_pricer(mesh=mesh, cluster=machine(2), config=plan.config)
        step = lower(own, program, pricer.target, sends)
        runs = find_runs(step, pricer, hoisted=True, splits=True)
        check_order(runs, {*stage.ends, *stage.received})
        check_seconds(runs, step, pricer)
        if not stage.received:
            assert (
                not any(task.event.kind == "backward" and task.seconds for task in runs.parts[0])
                or len(stage.sends) > 1
            )


def check_order(runs: Runs, outside: set[str]) -> None:
    """Gradients are made before they are read, those of the first part by the first part."""
    whole = {fact for task in runs.backward for fact in task.event.makes}
    made = set()
    for task in (task for part in runs.parts for task in part):
        read = {
            fact for fact in task.event.reads if fact[0] in ("gradient", "gathered", "again") and fact[1] not in outside
        }
        assert read & whole <= made, task
        made.update(task.event.makes)
    assert made == whole


def check_seconds(runs: Runs, step: LoweredStep, pricer: Pricer) -> None:
    """A product's parts are the whole and a launch; other ops that run in both take at most twice as long."""
    launch = pricer.cluster.device.launch_seconds
    parts = [[task for task in part if task.event.kind == "backward"] for part in runs.parts]
    assert parts[0] or not step.program.captured.received
    for task in runs.backward:
        if task.event.kind == "backward":
            alike = [t.seconds for part in parts for t in part if t.event.name == task.event.name]
            op = task.event.op
            assert op is not None and 1 <= len(alike) <= 2
            assert len(alike) == 2 or alike == [task.seconds]
            most = task.seconds + launch if op.rule.product is not None else 2 * task.seconds
            assert task.seconds * (1 - 1e-9) <= sum(alike) <= most * (1 + 1e-9)
