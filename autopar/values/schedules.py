"""Which schedules does a pipeline have, which rank runs which stage, and how many micro-batches does each take?"""

from autopar.errors import ArgumentError
from autopar.values.choices import check_choice

SCHEDULES = ("gpipe", "1f1b", "interleaved-1f1b", "zbv")

PIPELINE = "pipeline"
"""The axis across stages in what is counted."""
SPLITTING = ("zbv",)
"""Schedules that run the backward pass in two parts."""


def stage_ranks(schedule: str, pipeline: int, num_stages: int) -> tuple[int, ...]:
    """The pipeline rank of each stage.

    Raises:
        ArgumentError: for an unknown schedule, or a number of stages that it cannot run on so many ranks.
    """
    check_choice("schedule", schedule, SCHEDULES)
    each, rest = divmod(num_stages, pipeline)
    fits = {"zbv": each == 2, "interleaved-1f1b": each >= 2}.get(schedule, each == 1)
    if rest or not fits:
        wanted = {
            "zbv": f"two stages a rank, {2 * pipeline}",
            "interleaved-1f1b": f"two or more stages a rank, a multiple of {pipeline} from {2 * pipeline}",
        }.get(schedule, f"one stage a rank, {pipeline}")
        raise ArgumentError(
            f"schedule {schedule} on {pipeline} pipeline ranks needs {wanted}; got {num_stages} stages; "
            "change the number of stages, the number of pipeline ranks or the schedule"
        )
    if schedule == "zbv":
        return (*range(pipeline), *reversed(range(pipeline)))
    return tuple(stage % pipeline for stage in range(num_stages))


def check_microbatches(schedule: str, pipeline: int, microbatches: int) -> None:
    """Raises ArgumentError for a number of micro-batches that `torch.distributed.pipelining` does not run so."""
    if schedule == "1f1b" and microbatches < pipeline:
        raise ArgumentError(
            f"schedule 1f1b on {pipeline} pipeline ranks needs as many micro-batches, got {microbatches}; use "
            f"{pipeline} or more, fewer ranks, or gpipe"
        )
    rounds = max(1, microbatches // pipeline)
    if schedule == "interleaved-1f1b" and microbatches % rounds:
        low = microbatches // pipeline * pipeline
        raise ArgumentError(
            f"schedule interleaved-1f1b on {pipeline} pipeline ranks runs micro-batches in {rounds} equal rounds, "
            f"which {microbatches} are not; use {low} or {low + pipeline}"
        )


def parse_pipeline(text: str) -> tuple[str, int, int]:
    """`1f1b:4` or `interleaved-1f1b:2:6` as schedule, pipeline ranks and stages (by default as few as can be).

    Raises:
        ArgumentError: if the text is of neither form, or the schedule does not run so many stages on so many ranks.
    """
    schedule, *numbers = text.split(":")
    if len(numbers) not in (1, 2) or not all(n.isdecimal() and int(n) > 0 for n in numbers):
        raise ArgumentError(
            f"pipeline {text!r} is not of the form schedule:ranks or schedule:ranks:stages, such as 1f1b:4 or "
            "interleaved-1f1b:2:6"
        )
    pipeline = int(numbers[0])
    num_stages = int(numbers[1]) if len(numbers) == 2 else pipeline * (2 if schedule in SCHEDULES[2:] else 1)
    stage_ranks(schedule, pipeline, num_stages)
    return schedule, pipeline, num_stages
