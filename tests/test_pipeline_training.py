"""A pipeline trains as one process does: every schedule, cuts anywhere, shared weights, every lifetime, recompute.

Loss, every gradient on every rank, buffers, and every byte that collectives and stages send.
"""

import pytest

import tests.pipeline_cases as cases
from tests.process_group import ranks

# schedule, mesh of a stage, pipeline ranks, stages, micro-batches
SHAPES = [
    ("gpipe", (2,), 2, 2, 1),
    ("gpipe", (1,), 4, 4, 3),
    ("1f1b", (2,), 2, 2, 2),
    ("1f1b", (1,), 4, 4, 5),
    ("interleaved-1f1b", (2,), 2, 4, 4),
    ("zbv", (2,), 2, 4, 2),
    ("zbv", (1,), 4, 8, 8),
]


def check(family: str, shape: tuple[str, tuple[int, ...], int, int, int], **keywords: object) -> None:
    schedule, mesh, pipeline, num_stages, microbatches = shape
    captured, file = cases.case(family, microbatches)
    plans = cases.random_plans(captured, schedule, mesh, pipeline, num_stages, **keywords)  # type: ignore[arg-type]
    for answers in ranks(pipeline * plans_mesh(mesh)).run(cases.compared, file, plans):
        for number, (loss_error, error, name) in enumerate(answers):
            assert loss_error <= 1e-10, f"plan {number}: loss"
            assert error <= 1e-8, f"plan {number}: gradient of {name}"


def plans_mesh(mesh: tuple[int, ...]) -> int:
    size = 1
    for n in mesh:
        size *= n
    return size


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_schedules(shape: tuple[str, tuple[int, ...], int, int, int]) -> None:
    check("gpt2", shape)


@pytest.mark.parametrize("family", ["frozen_resnet", "t5", "whisper"])
def test_families(family: str) -> None:
    check(family, ("zbv", (2,), 2, 4, 2))


@pytest.mark.parametrize("schedule", ["1f1b", "zbv"])
def test_recompute_inside_stages(schedule: str) -> None:
    check("llama", (schedule, (2,), 2, 2 if schedule == "1f1b" else 4, 2), recompute=0.5)


def test_on_eight_ranks() -> None:
    check("llama", ("interleaved-1f1b", (2, 2), 2, 4, 2))
