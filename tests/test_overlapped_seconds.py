"""What is hidden beside backward is what an event by event simulation of the graph that runs hides."""

import math
import random
from dataclasses import replace

import pytest
from torch import fx

from autopar.lower.emit import emit
from autopar.ops import collectives
from autopar.ops.buckets import all_reduce_told
from autopar.ops.cross_entropy import start_count
from autopar.passes.fuse_collectives import fused_groups
from autopar.passes.start_early import start_early
from autopar.passes.wait_late import wait_late
from autopar.search.costs.evaluate import evaluate_program
from autopar.search.costs.pricing import Pricer, make_pricer
from autopar.search.known.baselines import make_baseline
from autopar.search.known.random_plan import random_buckets
from autopar.search.timeline.buckets import with_buckets
from autopar.values.cluster import Cluster
from autopar.values.mesh import make_mesh
from autopar.values.stage_plan import StagePlan
from autopar.values.train_config import TrainConfig
from tests.search_cases import captured_of, machine, program_of


def told(plan: StagePlan, family: str, pricer: Pricer) -> float:
    """Seconds of the count of labels and of the loss's last sum that the graph which runs hides: all but what it takes
    to begin them."""
    local = emit(captured_of(family), plan)
    graph = start_early(wait_late(local.graph))
    early = [8 for node in graph.nodes if node.target is start_count]
    late = [4 for node in graph.nodes if node.target is all_reduce_told]
    assert len(early) == len(late) == 1
    seconds = sum(pricer.message("all_reduce", (0,), nbytes, False)[0] for nbytes in early + late)
    return seconds - 2 * pricer.cluster.levels[0].launch


def simulated(plan: StagePlan, family: str, pricer: Pricer) -> float:
    """Seconds hidden on one link: a clock of what backward computes and starts, bucket after bucket of the graph. Ranks
    wait for each other at its end alone."""
    captured, program = captured_of(family), program_of(family)
    specs = {spec.placeholder: spec for spec in captured.parameters}
    wait = pricer.cluster.levels[0].skew / 2  # of two ranks
    due: dict[int, list[tuple[float, float, bool]]] = {}
    for group in fused_groups(emit(captured, plan).graph, captured.parameters, plan):
        names = [source.name for node in group for source in node.all_input_nodes if source.op == "placeholder"]
        if len(names) < len(group) or not specs[names[0]].trainable:
            continue
        scatters = group[0].target is collectives.all_gather
        nbytes = sum(math.prod(specs[name].shape) * specs[name].dtype.itemsize for name in names)
        kind = "reduce_scatter" if scatters else "all_reduce"
        seconds, start = (pricer.message(kind, (0,), n, True)[0] - wait for n in (nbytes, 1))
        copied = pricer.rates.copied_seconds(nbytes)
        start, seconds = start + copied, seconds + copied
        first_read = min(position for name in names for position, _ in program.readers[name])
        due.setdefault(first_read, []).append((seconds, start, scatters))
    clock = computed = link = held = 0.0
    for op in reversed(program.ops):
        backward = pricer.op(op, plan.choices[op.name]).backward
        clock, computed = clock + backward, computed + backward
        for seconds, start, scatters in sorted(due.get(op.position, [])):
            if scatters:
                clock = max(clock, held)
            link = max(link, clock) + seconds
            held = link if scatters else held
            clock += start
    total = sum(seconds + wait for found in due.values() for seconds, _, _ in found)
    return total - (max(clock, link) + (wait if due else 0.0) - computed)


def linked(alpha: float, bandwidth: float, skew: float = 0.0, launch: float = 0.0) -> Cluster:
    """Two devices with such a link."""
    cluster = machine(2)
    levels = tuple(
        replace(v, alpha=alpha, bandwidth=bandwidth, skew=skew, launch=launch, lines=()) for v in cluster.levels
    )
    return replace(cluster, levels=levels, library="nccl", device=replace(cluster.device, name="another"))


@pytest.mark.parametrize("seed", range(8))
def test_hidden_seconds_are_those_of_a_simulation(seed: int) -> None:
    rng = random.Random(seed)
    family, name = rng.choice(["gpt2", "llama"]), rng.choice(["ddp", "fsdp"])
    captured, program = captured_of(family), program_of(family)
    cluster = linked(
        10 ** rng.uniform(-9, -5),
        10 ** rng.uniform(7, 11),
        skew=rng.choice([0.0, 10 ** rng.uniform(-9, -5)]),
        launch=10 ** rng.uniform(-9, -6),
    )
    if seed % 2:  # a host, which copies gradients itself
        cluster = replace(cluster, library="gloo", device=machine(2).device)
    plan = make_baseline(name, captured, cluster, make_mesh((2,)), TrainConfig())
    pricer = make_pricer(mesh=plan.mesh, cluster=cluster, config=plan.config)
    for found in (with_buckets(plan, captured, cluster), random_buckets(plan, captured, rng)):
        found = replace(found, prefetch=False)
        estimate = evaluate_program(found, program, pricer)
        beside = max(simulated(found, family, pricer), 0.0) + told(found, family, pricer)
        assert estimate.hidden == pytest.approx(beside, rel=1e-9, abs=1e-15)
        assert estimate.step_seconds == pytest.approx(estimate.in_turn_seconds - estimate.hidden)
    assert evaluate_program(plan, program, pricer).hidden == 0.0


def test_a_fast_link_hides_nearly_all_and_starts_hide_nothing() -> None:
    captured, program = captured_of("llama"), program_of("llama")
    hidden = []
    for alpha, bandwidth in ((1e-12, 1e12), (1.0, 1e12)):
        cluster = linked(alpha, bandwidth)
        plan = make_baseline("ddp", captured, cluster, make_mesh((2,)), TrainConfig())
        names = [spec.placeholder for spec in captured.parameters]
        apart = replace(plan, buckets=tuple((name,) for name in names))
        estimate = evaluate_program(apart, program, make_pricer(mesh=plan.mesh, cluster=cluster, config=plan.config))
        hidden.append(estimate.hidden / estimate.seconds["all_reduce"])
    assert hidden[0] > 0.5 and hidden[1] < 1e-4


def test_lone_reductions_are_fused_and_lone_gathers_are_not() -> None:
    captured = captured_of("llama")
    for name, count in (("ddp", len(captured.parameters)), ("fsdp", 0)):
        plan = make_baseline(name, captured, machine(2), make_mesh((2,)), TrainConfig())
        plan = replace(plan, buckets=tuple((spec.placeholder,) for spec in captured.parameters))
        groups: list[tuple[fx.Node, ...]] = fused_groups(emit(captured, plan).graph, captured.parameters, plan)
        assert [len(group) for group in groups] == [1] * count
