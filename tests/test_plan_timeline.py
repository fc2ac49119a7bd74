"""The timeline of a plan's step: the estimate without overlap, its bounds and its dependencies with it, its trace."""

import json
import random
from dataclasses import replace
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from autopar.api.model_plan import load_plan
from autopar.cli.main import main
from autopar.errors import ArgumentError, PlanMismatchError
from autopar.lower.lowered_step import lower
from autopar.lower.program import make_program
from autopar.passes.accumulate_gradients import accumulate_gradients
from autopar.passes.split_stages import split_stages
from autopar.search.costs.evaluate import evaluate
from autopar.search.costs.pricing import make_pricer
from autopar.search.costs.runs import Fact, Runs, Task, find_runs
from autopar.search.known.baselines import make_baseline
from autopar.search.known.random_plan import random_cuts, random_plan, random_recompute, random_staged_plan
from autopar.search.meshes import parts
from autopar.search.staged.stages import priced
from autopar.search.timeline.plan_timeline import PlanTimeline, plan_timeline
from autopar.search.timeline.weave import Overlap
from autopar.values.cluster import Cluster
from autopar.values.graph import CapturedModel
from autopar.values.mesh import make_mesh
from autopar.values.plan import one_stage
from autopar.values.stage_plan import StagePlan
from autopar.values.train_config import TrainConfig
from tests.search_cases import captured_of, machine
from tests.zoo import FAMILIES
from tests.zoo_graphs import zoo_graph

EACH = Overlap(bucket_nbytes=0)
OVERLAPS = (EACH, Overlap(bucket_nbytes=3e4, ahead=1), Overlap(ahead=0))


@cache
def part_of(family: str, count: int, rows: int = 1) -> CapturedModel:
    batch = rows * count
    return accumulate_gradients(zoo_graph(family, rows), count, lambda: zoo_graph(family, batch=batch))


def drawn(captured: CapturedModel, seed: int) -> StagePlan:
    rng = random.Random(seed)
    plan = random_plan(captured, make_mesh((4,) if seed % 2 else (2, 2)), rng)
    return random_recompute(plan, captured, rng, share=0.4) if seed > 1 else plan


def spans(timeline: PlanTimeline) -> list[dict[str, float]]:
    """What a trace shows, as it is read from its file."""
    return [e for e in json.loads(json.dumps(timeline.trace()))["traceEvents"] if e["ph"] == "X"]


def check_bounds(timeline: PlanTimeline, most: float) -> None:
    busy = timeline.busy
    assert max(busy.values()) * (1 - 1e-9) <= timeline.seconds <= sum(busy.values()) * (1 + 1e-9)
    assert timeline.seconds <= most * (1 + 1e-9)
    by_stream: dict[float, list[tuple[float, float]]] = {}
    for event in spans(timeline):
        by_stream.setdefault(event["tid"], []).append((event["ts"], event["ts"] + event["dur"]))
    for own in by_stream.values():
        own.sort()
        assert all(end <= start + 1e-6 for (_, end), (start, _) in pairwise(own)), "one at a time"


@pytest.mark.parametrize("family", FAMILIES[::2])
def test_without_overlap_it_is_the_estimate_with_it_between_its_bounds(family: str) -> None:
    captured, number = captured_of(family), FAMILIES.index(family)
    plan = drawn(captured, number // 2)
    estimate = evaluate(plan, captured, machine())
    step = plan_timeline(one_stage(plan), [captured], machine())
    assert step.seconds == pytest.approx(estimate.step_seconds, rel=1e-9)
    assert sum(event["dur"] for event in spans(step)) == pytest.approx(estimate.step_seconds * 1e6, rel=1e-9)
    computed = sum(estimate.seconds[kind] for kind in ("forward", "backward", "recompute", "optimizer"))
    assert step.busy["compute"] == pytest.approx(computed, rel=1e-9)
    check_bounds(
        plan_timeline(one_stage(plan), [captured], machine(), OVERLAPS[number // 2 % 2]), estimate.step_seconds
    )


@pytest.mark.parametrize(("family", "count"), [("llama", 2), ("gpt2", 3), ("frozen_resnet", 4)])
def test_micro_batches_follow_each_other(family: str, count: int) -> None:
    captured = part_of(family, count, 4)
    plan = drawn(captured, count)
    seconds = evaluate(plan, captured, machine()).step_seconds
    assert plan_timeline(one_stage(plan), [captured], machine()).seconds == pytest.approx(seconds, rel=1e-9)
    for overlap in OVERLAPS[count % 2 :]:
        check_bounds(plan_timeline(one_stage(plan), [captured], machine(), overlap), seconds)


@pytest.mark.parametrize(
    ("schedule", "chunks", "family", "recompute"),
    [("gpipe", 1, "vit", 0.3), ("1f1b", 1, "gpt2", 0.0), ("interleaved-1f1b", 2, "vit", 0.3), ("zbv", 2, "gpt2", 0.0)],
)
def test_stages_take_what_their_estimate_says(schedule: str, chunks: int, family: str, recompute: float) -> None:
    captured, rng, cluster = part_of(family, 4), random.Random(int(recompute > 0)), machine(4)
    cuts = random_cuts(captured, 2 * chunks, rng)
    plan = random_staged_plan(captured, make_mesh((2,)), schedule, 2, cuts, rng, recompute=recompute)
    stages = split_stages(captured, cuts)
    estimate = priced(plan, stages, cluster, parts(cluster)[2]).estimate
    step = plan_timeline(plan, stages, cluster)
    assert step.seconds == pytest.approx(estimate.step_seconds, rel=1e-9)
    for overlap in OVERLAPS:
        ahead = plan_timeline(plan, stages, cluster, overlap)
        busy = max(seconds for lane, seconds in ahead.busy.items())
        assert busy * (1 - 1e-9) <= ahead.seconds <= estimate.step_seconds * 1.02


def runs_of(plan: StagePlan, captured: CapturedModel, cluster: Cluster) -> Runs:
    pricer, program = make_pricer(mesh=plan.mesh, cluster=cluster, config=plan.config), make_program(captured)
    return find_runs(lower(plan, program, pricer.target), pricer, hoisted=False)


@pytest.mark.parametrize("family", ("mixtral", *FAMILIES[1::2]))
def test_nothing_starts_before_what_it_reads_is_there(family: str) -> None:
    """Every value that is read is made, and in the overlapped step no task begins before that."""
    captured = captured_of(family)
    plan = drawn(captured, 5)
    runs = runs_of(plan, captured, machine())
    step = plan_timeline(one_stage(plan), [captured], machine(), EACH)
    finish, start = step.timeline.finish, step.timeline.start
    places = [*range(1, 1 + sum(t.seconds > 0 for t in runs.forward))]
    begin = places[-1] + 2  # the end of forward, the beginning of backward
    places += range(begin + 1, begin + 1 + sum(t.seconds > 0 for t in runs.backward))
    tasks = [*runs.forward, *runs.backward]
    numbers = iter(places)
    ready: dict[Fact, float] = {}
    sources = {p.name for p in captured.graph.nodes if p.op == "placeholder"}
    for task in tasks:
        needed = 0.0
        gradients = [fact for fact in task.event.reads if fact[0] == "gradient"]
        assert not gradients or any(f in ready or f[1] == captured.loss for f in gradients), task
        for fact in task.event.reads:
            word, name = fact[:2]
            assert fact in ready or name in sources or word != "value", fact
            needed = max(needed, ready.get(fact, 0.0))
        if task.seconds:
            place = next(numbers)
            assert finish[place] - start[place] == pytest.approx(task.seconds)
            assert start[place] >= needed - 1e-12, task
            needed = finish[place]
        for fact in task.event.makes:
            ready[fact] = max(ready.get(fact, 0.0), needed)


def test_gradients_of_data_parallel_ranks_are_exchanged_as_wait_free_backpropagation_says() -> None:
    """end(j) = max(end(j - 1), ready(j)) + t(j), gradients in the order in which they appear: Zhang et al. 2017."""
    captured, cluster = captured_of("vit"), machine(4, 5e8)
    plan = make_baseline("ddp", captured, cluster, make_mesh((4,)), TrainConfig())
    runs = runs_of(plan, captured, cluster)

    def reduces(task: Task) -> bool:
        return task.stored and task.event.kind == "all_reduce"

    others = [t for t in (*runs.forward, *runs.backward) if t.axes and t.seconds and not reduces(t)]
    assert all(t in runs.forward for t in others), "the loss is summed before backward begins"
    step = plan_timeline(one_stage(plan), [captured], cluster, EACH)
    now = float(step.timeline.finish[sum(t.seconds > 0 for t in runs.forward) + 1])
    end, computed = now, dict[Fact, float]()
    for task in runs.backward:
        if reduces(task):
            end = max(end, max(computed[f] for f in task.event.reads)) + task.seconds
            continue
        now += task.seconds
        computed.update(
            (f, now if task.seconds else max(computed.get(r, now) for r in task.event.reads)) for f in task.event.makes
        )
    expected = max(now, end) + sum(t.seconds for t in runs.optimizer)
    assert step.seconds == pytest.approx(expected, rel=1e-9)
    assert step.seconds < 0.95 * evaluate(plan, captured, cluster).step_seconds, "something is hidden"


def test_buckets_save_the_start_of_messages_and_gathers_ahead_hide() -> None:
    captured = captured_of("gpt2")
    slow = machine(4, 5e8)
    slow = replace(slow, levels=tuple(replace(level, alpha=2e-5) for level in slow.levels))
    plan = make_baseline("fsdp", captured, slow, make_mesh((4,)), TrainConfig())
    each, merged, late = (
        plan_timeline(one_stage(plan), [captured], slow, o)
        for o in (EACH, Overlap(bucket_nbytes=1e5), Overlap(ahead=0, bucket_nbytes=0))
    )
    assert merged.seconds < each.seconds < late.seconds
    assert len(spans(merged)) < len(spans(each))
    names = {e["name"].split(" ", 1)[1] for e in spans(each) if " " in e["name"]}
    assert "all_gather of transformer.h.0.mlp.c_fc.weight over data" in names
    assert "transformer.h.1.ln_1: layer_norm" in names
    threads = [e["args"]["name"] for e in each.trace()["traceEvents"] if e["name"] == "thread_name"]
    assert threads[0] == "compute" and len(threads) == 2 and threads[1].endswith(": data")
    with pytest.raises(ArgumentError, match="ahead -1 is not a whole number"):
        Overlap(ahead=-1)
    with pytest.raises(ArgumentError, match="cannot be written"):
        each.save("/nowhere/step.json")


MODEL_FILE = """
import torch
from torch import nn

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(16, 16) for _ in range(4))

    def forward(self, x):
        for block in self.blocks:
            x = block(x).relu()
        return x.square().mean()

def net():
    return Net(), {"x": torch.randn(8, 16)}
"""


def test_the_command_line_writes_traces(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def ran(*arguments: object) -> dict[str, Any]:
        with pytest.raises(SystemExit) as exit_:
            main([*(str(argument) for argument in arguments), "--json"])
        answer = json.loads(capsys.readouterr().out)
        return {**answer, "code": exit_.value.code}

    def ends(path: Path) -> float:
        return max(e["ts"] + e["dur"] for e in json.loads(path.read_text())["traceEvents"] if e["ph"] == "X") / 1e6

    (tmp_path / "net.py").write_text(MODEL_FILE)
    model, saved = f"{tmp_path / 'net.py'}:net", tmp_path / "plan.json"
    traces = [tmp_path / f"{number}.json" for number in range(3)]
    answer = ran("plan", model, "--cluster", "2xcpu", "--out", saved, "--trace", traces[0])
    seconds = sum(answer["estimate"]["seconds"].values())
    assert ends(traces[0]) == pytest.approx(seconds)
    ran("explain", saved, "--trust", "--seconds", "0.1", "--trace", traces[1])
    assert ends(traces[1]) == pytest.approx(seconds)
    staged = ran(
        "plan",
        model,
        "--cluster",
        "2xcpu",
        "--mesh",
        "auto",
        "--pipeline",
        "2",
        "--microbatches",
        "2",
        "--trace",
        traces[2],
    )
    assert ends(traces[2]) == pytest.approx(sum(staged["estimate"]["seconds"].values()))
    woven = ran("plan", model, "--cluster", "2xcpu", "--overlap", "--no-baselines", "--trace", traces[0])
    facts = woven["estimate"]["search"]["timeline"]
    assert ends(traces[0]) == pytest.approx(facts["plans"][facts["chosen"]]["timeline_seconds"])
    with pytest.raises(PlanMismatchError, match="bind"):
        load_plan(saved).timeline()


@pytest.mark.parametrize(("family", "count"), [("llama", 4)])
def test_two_micro_batches_at_once_take_what_is_estimated_between_the_bounds(family: str, count: int) -> None:
    """No less than compute or any link, no more than both together; tensor parallel plans hide some of it."""
    captured, mesh = part_of(family, count, 4), make_mesh((2,))
    cluster = machine(2, bandwidth=2e8)
    drawn_plan = random_plan(captured, mesh, random.Random(count))
    megatron = make_baseline("megatron", captured, cluster, mesh, TrainConfig())
    for plan in (drawn_plan, megatron):
        woven = replace(plan, copies=2)
        estimate, step = evaluate(woven, captured, cluster), plan_timeline(one_stage(woven), [captured], cluster)
        assert step.seconds == pytest.approx(estimate.step_seconds, rel=1e-9)
        check_bounds(step, estimate.alone_seconds)
        computed = sum(estimate.seconds[kind] for kind in ("forward", "backward", "recompute", "optimizer"))
        assert step.busy["compute"] == pytest.approx(computed, rel=1e-9)
    assert estimate.hidden > 0.1 * sum(estimate.seconds[kind] for kind in ("all_gather", "all_reduce"))
