"""Gathers that begin early change no value and no byte sent, hide what a simulation hides, are chosen if they pay."""

import itertools
import random
import re
import threading
from dataclasses import replace
from typing import Any

import pytest
import torch

from autopar.lower.emit import emit
from autopar.lower.events import Event, find_events
from autopar.lower.lowered_step import lower
from autopar.lower.prefetch import prefetched_buckets
from autopar.ops import buckets
from autopar.ops.buckets import all_gather_bucket, prefetched
from autopar.passes.fuse_collectives import fuse_collectives
from autopar.passes.prefetch import prefetch
from autopar.search.costs.evaluate import evaluate_program
from autopar.search.costs.pricing import Pricer, make_pricer
from autopar.search.known.baselines import make_baseline
from autopar.search.known.random_plan import random_buckets, random_plan, random_recompute
from autopar.search.timeline.buckets import with_buckets
from autopar.values.mesh import make_mesh
from autopar.values.plan import one_stage
from autopar.values.plan_file import plan_from_json
from autopar.values.stage_plan import StagePlan
from autopar.values.train_config import TrainConfig
from tests.plans_in_threads import errors_of, one_process
from tests.search_cases import captured_of, exact_of, machine, program_of
from tests.test_overlapped_seconds import linked
from tests.zoo import zoo


def blocks_of(plan: StagePlan) -> StagePlan:
    """The plan with parameters gathered for use, early: each block in a bucket, what is before and after in others."""
    blocks: dict[str, list[str]] = {}
    for name in plan.lifetimes:
        number = re.search(r"_([0-9])_", name)
        if "wte" not in name:  # tied: read first and last
            blocks.setdefault(number.group(1) if number else str("embed" in name or "wpe" in name), []).append(name)
    return replace(
        plan,
        buckets=tuple(map(tuple, blocks.values())),
        lifetimes=dict.fromkeys(plan.lifetimes, "use"),
        prefetch=True,
    )


@pytest.mark.parametrize("family", ["llama", "t5"])
def test_random_plans_with_early_gathers_equal_one_process(family: str) -> None:
    """Messages are compared too."""
    model, kwargs = zoo(family, dtype=torch.float64)
    captured = exact_of(family)
    reference, rng = one_process(captured, model, kwargs), random.Random(f"early {family}")
    for shape, share in (((2,), 0.0), ((2, 2), 0.4)):
        plan = random_buckets(random_plan(captured, make_mesh(shape), rng), captured, rng)
        plan = replace(plan, prefetch=True, lifetimes=dict.fromkeys(plan.lifetimes, rng.choice(["use", "microbatch"])))
        plan = random_recompute(plan, captured, rng, share=share) if share else plan
        errors = errors_of(reference, plan)
        assert errors[0] <= 1e-10 and errors[1] <= 1e-8, errors


def test_each_gather_begins_when_the_one_before_is_there() -> None:
    captured = captured_of("llama")
    plan = blocks_of(make_baseline("fsdp", captured, machine(2), make_mesh((2,)), TrainConfig()))
    assert plan_from_json(one_stage(plan).to_json()).single.prefetch
    graph = prefetch(fuse_collectives(emit(captured, plan).graph, captured.parameters, plan))
    calls = [node for node in graph.nodes if node.op == "call_function"]
    gathers = [node for node in calls if node.target is all_gather_bucket]
    begun = [node.kwargs["begun"] for node in gathers]
    assert len(gathers) == 3 and all(node.target is prefetched for node in begun)  # one is alone in its bucket
    places = [(calls.index(gather), calls.index(node)) for gather, node in zip(gathers, begun, strict=True)]
    assert all(after[1] == before[0] + 1 < after[0] - 1 for before, after in itertools.pairwise(places))


def test_backward_gathers_the_next_before_it_sends_gradients(monkeypatch: pytest.MonkeyPatch) -> None:
    model, kwargs = zoo("llama", dtype=torch.float64)
    captured = exact_of("llama")
    plan = blocks_of(make_baseline("fsdp", captured, machine(2), make_mesh((2,)), TrainConfig()))
    plan = replace(plan, recompute=frozenset({"silu"}))  # else threads keep what was gathered
    logs: dict[int, list[str]] = {}

    def logged(what: str, name: str) -> None:
        function = getattr(buckets, name)

        def call(*args: Any, **kwargs: Any) -> Any:
            logs.setdefault(threading.get_ident(), []).append(what)
            return function(*args, **kwargs)

        monkeypatch.setattr(buckets, name, call)

    logged("gather", "_begin_rows")
    logged("take", "_apart")
    logged("scatter", "_scatter_sums")
    errors_of(one_process(captured, model, kwargs), plan)
    forward = ["gather", "take"] * 3
    backward = ["gather", "take", "gather", "scatter", "take", "gather", "scatter", "take", "scatter"]
    assert list(logs.values()) == [forward + backward] * 2


def simulated(plan: StagePlan, family: str, pricer: Pricer) -> float:
    """Seconds hidden, event by event: a clock of compute, and one link that takes a message after the other."""
    step = lower(plan, program_of(family), pricer.target)
    found, early = find_events(step), [group.values for group in prefetched_buckets(step)]

    def seconds(event: Event) -> tuple[float, float]:
        first = event.messages[0]
        copied = pricer.rates.copied_seconds(first.nbytes) if event.is_back else 0.0
        whole, start = (pricer.message(first.kind, first.axes, n, True)[0] + copied for n in (first.nbytes, 1))
        return whole, start

    def one_pass(events: tuple[Event, ...], phase: str) -> float:
        gathers = [e for e in events if e.members in early and not e.is_back]
        clock = computed = link = held = total = 0.0
        arrives: dict[int, float] = {}
        for event in events:
            if event.kind == phase and event.op is not None and not event.messages:
                price = pricer.op(event.op, plan.choices[event.op.name])
                clock += price.forward if phase == "forward" else price.backward
                computed += price.forward if phase == "forward" else price.backward
            elif event in gathers:
                place = gathers.index(event)
                clock = max(clock, arrives.get(place, 0.0))
                if place + 1 < len(gathers):
                    whole, start = seconds(gathers[place + 1])
                    link = arrives[place + 1] = max(link, clock) + whole
                    clock, total = clock + start, total + whole
            elif event.is_back and event.members and event.messages:
                whole, start = seconds(event)
                scatters = event.kind == "reduce_scatter"
                clock = max(clock, held) if scatters else clock
                link = max(link, clock) + whole
                held = link if scatters else held
                clock, total = clock + start, total + whole
        is_waited = phase == "backward"
        return total - (max(clock, link if is_waited else 0.0) - computed)

    return one_pass(found.forward, "forward") + one_pass(found.backward, "backward")


@pytest.mark.parametrize("seed", range(6))
def test_hidden_seconds_are_those_of_a_simulation(seed: int) -> None:
    rng = random.Random(seed)
    family = rng.choice(["llama", "gpt2"])
    captured, program = captured_of(family), program_of(family)
    cluster = linked(10 ** rng.uniform(-9, -5), 10 ** rng.uniform(7, 11), launch=10 ** rng.uniform(-9, -6))
    plan = blocks_of(make_baseline("fsdp", captured, cluster, make_mesh((2,)), TrainConfig()))
    plan = replace(plan, lifetimes=dict.fromkeys(plan.lifetimes, rng.choice(["use", "microbatch"])))
    pricer = make_pricer(mesh=plan.mesh, cluster=cluster, config=plan.config)
    late = evaluate_program(replace(plan, prefetch=False), program, pricer)
    early = evaluate_program(plan, program, pricer)
    assert early.seconds == late.seconds and early.peak_nbytes >= late.peak_nbytes
    of_gathers = simulated(plan, family, pricer) - simulated(replace(plan, prefetch=False), family, pricer)
    assert early.hidden - late.hidden == pytest.approx(of_gathers, rel=1e-9, abs=1e-15)


def test_they_begin_early_where_it_pays_and_fits() -> None:
    captured = captured_of("llama")
    cluster = linked(1e-9, 1e9)
    plan = make_baseline("fsdp", captured, cluster, make_mesh((2,)), TrainConfig())
    early = with_buckets(plan, captured, cluster)
    assert early.prefetch
    tight = TrainConfig(memory_nbytes=early.estimate.peak_nbytes - 1)
    late = with_buckets(replace(plan, config=tight), captured, cluster)
    assert not late.prefetch and late.estimate.peak_nbytes < early.estimate.peak_nbytes
    assert late.estimate.step_seconds > early.estimate.step_seconds
