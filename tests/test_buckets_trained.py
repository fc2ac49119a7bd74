"""Plans with buckets train on real processes as one process does, exported or not; borders follow the cost model."""

import math
import random
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from test_runtime_train_step import PLANS, exported, train_distributed, train_whole

import tests.runtime_cases as cases
from autopar.api.model_plan import model_plan
from autopar.capture import capture
from autopar.lower.messages import messages_of
from autopar.lower.program import make_program
from autopar.oracle.reference import buffers_of
from autopar.search.costs.evaluate import evaluate, evaluate_program
from autopar.search.costs.pricing import make_pricer
from autopar.search.known.baselines import make_baseline
from autopar.search.known.random_plan import random_buckets, random_plan
from autopar.search.timeline import buckets
from autopar.search.timeline.buckets import choose_buckets, with_buckets
from autopar.values.cluster import Cluster, load_cluster
from autopar.values.graph import CapturedModel
from autopar.values.mesh import make_mesh
from autopar.values.plan import one_stage
from autopar.values.stage_plan import StagePlan
from autopar.values.train_config import TrainConfig
from tests.process_group import ranks
from tests.search_cases import captured_of, machine, program_of


def fused(name: str, count: int) -> StagePlan:
    plan = PLANS[name]((2,), count)
    return random_buckets(plan, cases.captured(microbatches=count), random.Random(name))


@pytest.mark.parametrize(("name", "count"), [("ddp", 1), ("use", 1), ("random1", 1), ("step", 2), ("use", 2)])
def test_training_equals_one_process(name: str, count: int) -> None:
    losses, state = train_whole(count)
    for got_losses, got_state, bytes_as_said in ranks(2).run(train_distributed, fused(name, count)):
        assert bytes_as_said
        assert got_losses == pytest.approx(losses, rel=1e-10)
        for key, value in state.items():
            torch.testing.assert_close(got_state[key], value, rtol=1e-8, atol=1e-9, msg=key)


@pytest.mark.parametrize("name", ["ddp", "use"])
def test_exported_code_trains_in_buckets(name: str, tmp_path: Path) -> None:
    graph = cases.captured()
    model_plan(one_stage(fused(name, 1)), captured=graph, values=buffers_of(graph, cases.words())).export(tmp_path)
    for got, want, same in ranks(2).run(exported, str(tmp_path)):
        assert same and got == pytest.approx(want, rel=1e-12)


@pytest.mark.parametrize("family", ["gpt2", "llama"])
def test_what_is_priced_is_what_is_predicted(family: str) -> None:
    """With links that cost a second a message and nothing a byte, seconds count messages."""
    captured, program = captured_of(family), program_of(family)
    rng = random.Random(family)
    for shape in ((2,), (2, 2)):
        plan = random_buckets(random_plan(captured, make_mesh(shape), rng), captured, rng)
        pricer = make_pricer(mesh=plan.mesh, cluster=counting(plan.mesh.size), config=plan.config)
        pricer.message = lambda *_: (1.0, "")  # type: ignore[method-assign]
        seconds = evaluate_program(plan, program, pricer).seconds
        for kind in ("all_gather", "reduce_scatter", "all_reduce", "all_to_all"):
            sent = messages_of(captured, plan, on_host=True)
            assert round(seconds[kind]) == sum(calls for (k, _), (calls, _) in sent.items() if k == kind), kind


def counting(count: int) -> Cluster:
    return load_cluster(f"{count}xcpu")


def ddp(alpha: float) -> tuple[StagePlan, CapturedModel, Cluster]:
    captured = captured_of("llama")
    plan = make_baseline("ddp", captured, machine(2), make_mesh((2,)), TrainConfig())
    cluster = machine(2)
    return plan, captured, replace(cluster, levels=tuple(replace(v, alpha=alpha) for v in cluster.levels))


def test_slow_starts_make_one_bucket_and_quick_ones_many() -> None:
    counts = []
    for alpha in (1.0, 1e-6, 1e-12):
        plan, captured, cluster = ddp(alpha)
        hiding = replace(cluster, library="nccl")
        pricer = make_pricer(mesh=plan.mesh, cluster=hiding, config=plan.config)
        buckets = choose_buckets(plan, make_program(captured), pricer).buckets
        counts.append(len(captured.parameters) - sum(len(names) - 1 for names in buckets))
    assert counts[0] == 1 and counts == sorted(counts) and counts[-1] > 1


def test_the_estimate_says_what_buckets_save() -> None:
    plan, captured, cluster = ddp(1e-3)
    found = with_buckets(plan, captured, cluster)
    alone = evaluate(plan, captured, cluster)
    assert found.estimate.alone_seconds == pytest.approx(alone.step_seconds)
    assert found.estimate.saved > 0.5 * alone.seconds["all_reduce"]


def test_what_backward_asks_for_first_is_kept_if_it_fits() -> None:
    """The norm and the output after the blocks are gathered once a step, and no more is."""
    captured, cluster = captured_of("llama"), machine(2)
    plan = make_baseline("fsdp", captured, cluster, make_mesh((2,)), TrainConfig())
    found = with_buckets(plan, captured, cluster)
    changed = {name for name, lifetime in found.lifetimes.items() if lifetime != plan.lifetimes[name]}
    owners = {captured_name for p in captured.parameters if p.placeholder in changed for captured_name in p.names}
    assert owners and not any("layers" in name or "embed" in name for name in owners)
    late = evaluate(replace(found, prefetch=False), captured, cluster)
    tight = replace(plan, config=replace(plan.config, memory_nbytes=late.peak_nbytes - 1))
    assert with_buckets(tight, captured, cluster).lifetimes == plan.lifetimes
    before, after = (messages_of(captured, p, on_host=True) for p in (plan, found))
    saved = before["all_gather", ("data",)][1] - after["all_gather", ("data",)][1]
    assert saved == sum(math.prod(p.shape) * 4 for p in captured.parameters if p.placeholder in changed)


def test_a_plan_that_would_not_fit_with_buckets_goes_without() -> None:
    captured, cluster = captured_of("llama"), machine(2)
    plan = make_baseline("fsdp", captured, cluster, make_mesh((2,)), TrainConfig())
    late = replace(with_buckets(plan, captured, cluster), prefetch=False)
    with_them = evaluate(late, captured, cluster).peak_nbytes
    without = evaluate(plan, captured, cluster).peak_nbytes
    assert without < with_them
    limited = replace(plan, config=replace(plan.config, memory_nbytes=(without + with_them) / 2))
    assert with_buckets(limited, captured, cluster).buckets == ()


def deep(alpha: float, layers: int = 16) -> tuple[StagePlan, CapturedModel, Cluster]:
    """Data parallelism of a model of which gradients are most."""
    with torch.random.fork_rng():
        model = torch.nn.Sequential(*(torch.nn.Linear(64, 64, bias=False) for _ in range(layers)), torch.nn.Flatten(0))
        captured = capture(Summed(model), (), {"x": torch.ones(2, 64)})
    cluster = machine(2)
    cluster = replace(cluster, levels=tuple(replace(v, alpha=alpha, bandwidth=1e8, lines=()) for v in cluster.levels))
    return make_baseline("ddp", captured, cluster, make_mesh((2,)), TrainConfig()), captured, cluster


class Summed(torch.nn.Module):
    def __init__(self, model: torch.nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        loss: torch.Tensor = self.model(x).sum()
        return loss


def whole_buckets(plan: StagePlan, captured: CapturedModel, cluster: Cluster) -> StagePlan:
    """As the cost model merges them, whatever they hold."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(buckets, "HALVINGS", 0)
        return with_buckets(plan, captured, cluster)


def test_buckets_that_raise_the_peak_are_halved_while_that_costs_no_time() -> None:
    peaks = []
    for alpha in (1e-7, 1e-2):
        plan, captured, cluster = deep(alpha)
        whole, found = whole_buckets(plan, captured, cluster), with_buckets(plan, captured, cluster)
        assert whole.estimate.peak_nbytes > evaluate(plan, captured, cluster).peak_nbytes
        assert found.estimate.step_seconds <= whole.estimate.step_seconds * (1 + buckets.SLACK)
        peaks.append(found.estimate.peak_nbytes / whole.estimate.peak_nbytes)
    assert peaks[0] < 0.9 and peaks[1] == 1


def test_buckets_that_do_not_fit_are_halved_until_they_do() -> None:
    plan, captured, cluster = deep(1e-2)
    whole, alone = whole_buckets(plan, captured, cluster), evaluate(plan, captured, cluster)
    limit = (whole.estimate.peak_nbytes + alone.peak_nbytes) / 2
    limited = replace(plan, config=replace(plan.config, memory_nbytes=limit))
    assert whole_buckets(limited, captured, cluster).buckets == ()
    found = with_buckets(limited, captured, cluster)
    assert len(whole.buckets) < len(found.buckets) < 16 and found.estimate.peak_nbytes <= limit
    assert whole.estimate.step_seconds < found.estimate.step_seconds < alone.step_seconds
