"""What a plan with stages is refused for, on every rank alike, and what is said when a step fails."""

import os
from dataclasses import replace
from unittest import mock

import pytest
from torch.distributed import pipelining

import autopar
import tests.runtime_cases as cases
from autopar.errors import ArgumentError, BatchError, MeshError, PlanMismatchError, RankError
from autopar.lower.legality import check_shared
from autopar.passes.split_stages import owners, split_stages
from autopar.values.placement import INVARIANT, Layout
from autopar.values.plan_file import plan_from_json
from tests.process_group import ranks
from tests.word_pipelines import MICROBATCHES, batch, pipelined, plan_of


def refusals(texts: list[str]) -> list[str]:
    """What each rank is told if ranks have different plans, if torch lacks the schedule, and of other world sizes."""
    messages = []
    plans = [plan_from_json(text) for text in texts]
    with pytest.raises(RankError) as caught:
        pipelined(plans[int(os.environ["RANK"]) == 3])
    messages.append(str(caught.value))
    with mock.patch.object(pipelining, "ScheduleZBVZeroBubble", create=False):
        del pipelining.ScheduleZBVZeroBubble
        with pytest.raises(ArgumentError) as lacking:
            pipelined(plans[2])
        pipelining.ScheduleZBVZeroBubble = None
    messages.append(str(lacking.value))
    with pytest.raises(MeshError) as world:
        autopar.distribute(cases.words(microbatches=MICROBATCHES), plans[3])
    messages.append(str(world.value))
    return messages


def test_what_ranks_are_refused() -> None:
    plans = [plan_of("1f1b"), plan_of("1f1b", seed=1), plan_of("zbv"), plan_of("1f1b", (2,), 3)]
    for differ, lacking, world in ranks(4).run(refusals, [plan.to_json() for plan in plans]):
        assert "ranks differ in plan" in differ and "on ranks [3]" in differ
        assert "zbv needs torch.distributed.pipelining.ScheduleZBVZeroBubble" in lacking
        assert "plan with one of gpipe, 1f1b, interleaved-1f1b" in lacking
        assert "a pipeline of 3 stage meshes 2 (data) has 6 ranks but 4 processes were started" in world


def failed(text: str) -> list[str]:
    """What a step raises if a rank is gone, if a pass fails with an error of ours, and with any other."""
    module = pipelined(plan_from_json(text))
    messages = []
    for cause in (None, BatchError("too many rows"), ZeroDivisionError("by zero")):
        error = RuntimeError("connection closed")
        error.__cause__ = cause
        with mock.patch.object(module._schedule._schedule, "step", side_effect=error):
            try:
                module.train_step(batch(0))
            except RuntimeError as caught:
                messages.append(f"{type(caught).__name__}: {caught}")
            except BatchError as caught:
                messages.append(str(caught))
    return messages


def test_errors_of_a_pass_are_raised_as_they_are_and_lost_ranks_are_named() -> None:
    for rank, (lost, ours, other) in enumerate(ranks(4).run(failed, plan_of("1f1b").to_json())):
        assert lost.startswith(f"RankError: rank {rank}: sending or receiving between stages failed: connection closed")
        assert (ours, other) == ("too many rows", "RuntimeError: connection closed")


def test_a_shared_weight_stored_in_two_ways_is_refused() -> None:
    plan = plan_of("1f1b")
    captured = cases.captured(0.0, MICROBATCHES)
    tied = next(name for name, stages in owners(split_stages(captured, plan.cuts)).items() if len(stages) > 1)
    other = Layout((INVARIANT,)) if plan.stages[0].layouts[tied] != Layout((INVARIANT,)) else Layout((cases.Shard(0),))
    last = replace(plan.stages[1], layouts={**plan.stages[1].layouts, tied: other})
    bad = replace(plan, stages=(plan.stages[0], last))
    with pytest.raises(
        PlanMismatchError, match=r"stages share embedding\.weight, which the plan stores as .* in stage 0"
    ):
        check_shared(split_stages(captured, plan.cuts), bad.stages)
