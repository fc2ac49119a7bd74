"""The step model's step on the timeline: the same seconds where stages are equal, a trace of all of it."""

import json
from pathlib import Path

import pytest

from autopar.cli.main import main
from autopar.cost_models.efficiency import load_efficiency
from autopar.cost_models.named_shapes import named_shape
from autopar.cost_models.step_memory import in_flight, step_memory
from autopar.cost_models.step_time import simulate_step
from autopar.cost_models.step_timeline import step_pipeline
from autopar.cost_models.timeline import busy_seconds, simulate
from autopar.cost_models.training_config import TrainingConfig
from autopar.values.cluster import load_cluster

CLUSTER = load_cluster("4x8xh100")
EFFICIENCY = load_efficiency(CLUSTER.device.name)
SHAPE = named_shape("gpt-175b")


def config(**changes: object) -> TrainingConfig:
    fields: dict[str, object] = {"tp": 8, "dp": 4, "micro_batch": 1, "global_batch": 32, "seq": 2048}
    return TrainingConfig(**(fields | changes))  # type: ignore[arg-type]


@pytest.mark.parametrize("changes", [{}, {"recompute": "full"}, {"tp": 4, "dp": 8}, {"zero": 3}, {"zero": 1}])
def test_without_a_pipeline_it_is_the_step_model(changes: dict[str, object]) -> None:
    asked = config(**changes)
    pipeline = step_pipeline(SHAPE, asked, CLUSTER, EFFICIENCY)
    step = simulate_step(SHAPE, asked, CLUSTER, EFFICIENCY)
    assert simulate(pipeline.tasks).makespan == pytest.approx(step.seconds, rel=1e-9)


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"schedule": "gpipe"},
        {"schedule": "zb-1p"},
        {"schedule": "zb-2p"},
        {"schedule": "zbv"},
        {"virtual_stages": 3},
    ],
)
def test_of_uneven_stages_the_model_and_the_simulation_agree(changes: dict[str, object]) -> None:
    """Stages with embedding and head are longer: the closed forms are near, exact for GPipe."""
    asked = config(pp=4, dp=1, global_batch=16, **changes)
    pipeline = step_pipeline(SHAPE, asked, CLUSTER, EFFICIENCY)
    timeline = simulate(pipeline.tasks)
    seconds = pipeline.longest_span(timeline) if asked.schedule == "zb-2p" else timeline.makespan
    exact = 1e-9 if asked.schedule == "gpipe" else 0.03
    assert seconds == pytest.approx(simulate_step(SHAPE, asked, CLUSTER, EFFICIENCY).seconds, rel=exact)
    assert timeline.makespan >= busy_seconds(pipeline.tasks).max()


@pytest.mark.parametrize("p", [1, 2, 4, 8])
def test_every_rank_of_zbv_holds_what_the_first_of_1f1b_holds(p: int) -> None:
    """Qi et al. 2024, section 4: a V of the peak memory of 1F1B, on each rank, with a smaller bubble."""
    folded, plain = (config(pp=p, dp=1, global_batch=4 * p, schedule=name) for name in ("zbv", "1f1b"))
    assert [in_flight(folded, rank) for rank in range(p)] == [in_flight(plain, 0)] * p
    if p > 1:
        cluster = load_cluster(f"{p}x8xh100")
        idle = [simulate_step(SHAPE, asked, cluster, EFFICIENCY).bubble_seconds for asked in (folded, plain)]
        assert idle[0] < 0.4 * idle[1]
        held = [step_memory(SHAPE, asked) for asked in (folded, plain)]
        assert held[0].allocated_nbytes == pytest.approx(held[1].allocated_nbytes, rel=0.1)


def test_gradients_beside_backward_are_never_slower() -> None:
    times = [
        simulate(step_pipeline(SHAPE, config(overlap_data=flag), CLUSTER, EFFICIENCY).tasks).makespan
        for flag in (True, False)
    ]
    assert times[0] < times[1]


def test_simulate_writes_a_trace(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "step.json"
    arguments = f"simulate gpt-175b --cluster 4x8xh100 --tp 8 --pp 4 --global-batch 4 --json --trace {path}"
    with pytest.raises(SystemExit) as exit_:
        main(arguments.split())
    assert not exit_.value.code
    answer = json.loads(capsys.readouterr().out)
    events = [event for event in json.loads(path.read_text())["traceEvents"] if event["ph"] == "X"]
    assert max(event["ts"] + event["dur"] for event in events) == pytest.approx(answer["timeline_seconds"] * 1e6)
    assert {event["pid"] for event in events} == {0, 1, 2, 3}
    with pytest.raises(SystemExit) as exit_:
        main([*arguments.split()[:-1], str(tmp_path / "none" / "step.json")])
    assert exit_.value.code == 2
    assert "cannot be written" in capsys.readouterr().out
