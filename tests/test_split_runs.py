"""A backward pass in two parts: each collective as often as the runtime sends it, nothing read before it is made."""

import random
from collections import Counter

import pytest

from autopar.lower.live import Live
from autopar.lower.program import make_program
from autopar.mesh import make_mesh
from autopar.passes.insert_collectives import insert_collectives
from autopar.passes.predict import predicted_messages
from autopar.passes.split_stages import split_stages
from autopar.search.costs.evaluate import find_live
from autopar.search.costs.pricing import make_pricer
from autopar.search.costs.runs import Runs, Task, find_runs
from autopar.search.known.random_plan import random_cuts, random_staged_plan
from autopar.search.staged.split_runs import split_backward
from tests.search_cases import captured_of, machine

CASES = [("llama", 1, 0.0), ("vit", 2, 0.4), ("resnet", 3, 0.0), ("llama", 4, 0.5)]


@pytest.mark.parametrize(("family", "seed", "recompute"), CASES)
def test_parts_send_what_the_runtime_sends_and_take_what_the_whole_takes(
    family: str, seed: int, recompute: float
) -> None:
    captured, rng, mesh = captured_of(family), random.Random(seed), make_mesh((2,))
    cuts = random_cuts(captured, 4, rng)
    plan = random_staged_plan(captured, mesh, "zbv", 2, cuts, rng, recompute=recompute)
    stages = split_stages(captured, cuts)
    for number, stage in enumerate(stages):
        own, program = plan.stages[number], make_program(stage)
        after = plan.stages[number + 1].layouts if number + 1 < len(stages) else {}
        sends = {name: after[name] for name in stage.sends}
        pricer = make_pricer(mesh=mesh, cluster=machine(2), config=plan.config)
        live = find_live(own, program, pricer, sends)
        runs = find_runs(own, program, pricer, live, hoisted=True)
        parts = split_backward(own, runs, live, pricer)
        local = insert_collectives(stage, own, sends)
        sent = Counter[tuple[str, tuple[str, ...]]]()
        for task in (*runs.forward, *parts[0], *parts[1]):
            if task.axes:
                sent[task.kind, tuple(mesh.names[a] for a in task.axes)] += 1 if task.once else own.microbatches
        assert sent == {key: calls for key, (calls, _) in predicted_messages(local, splits=True).items()}
        check_order(runs, parts, {*stage.ends, *stage.received})
        check_seconds(runs, parts, live)
        if not stage.received:
            assert not any(task.kind == "backward" and task.seconds for task in parts[0]) or len(stage.sends) > 1


def check_order(runs: Runs, parts: tuple[tuple[Task, ...], tuple[Task, ...]], outside: set[str]) -> None:
    """Gradients are made before they are read, those of the first part by the first part."""
    whole = {fact for task in runs.backward for fact in task.makes}
    made = set()
    for task in (*parts[0], *parts[1]):
        read = {fact for fact in task.reads if fact[0] in ("gradient", "gathered", "again") and fact[1] not in outside}
        assert read & whole <= made, task
        made.update(task.makes)
    assert made == whole


def check_seconds(runs: Runs, parts: tuple[tuple[Task, ...], tuple[Task, ...]], live: Live) -> None:
    """A product's parts are the whole and a launch; other ops that run in both take at most twice as long."""
    launch = live.pricer.cluster.device.launch_seconds
    halves = {(t.name, t.seconds) for t in parts[0] if t.kind == "backward"}
    assert halves or not live.program.captured.received
    for task in runs.backward:
        if task.kind == "backward":
            alike = [t.seconds for part in parts for t in part if (t.name, t.kind) == (task.name, "backward")]
            op = live.calls[task.call].op
            assert op is not None and 1 <= len(alike) <= 2
            assert len(alike) == 2 or alike == [task.seconds]
            most = task.seconds + launch if op.rule.product is not None else 2 * task.seconds
            assert task.seconds * (1 - 1e-9) <= sum(alike) <= most * (1 + 1e-9)
