"""Where a rank dies the others are told. `benchmarks.faults` kills real processes (docs/results/faults.md): how long
they take to come together depends on what else the machine does."""

import os
import random
from collections.abc import Callable

import pytest

import tests.runtime_cases as cases
from autopar.errors import AutoparError, RankError
from autopar.lower.messages import messages_of
from autopar.runtime import init
from autopar.runtime.lost_ranks import among_ranks
from autopar.runtime.roll_call import joins_all_ranks
from autopar.values.plan import one_stage
from benchmarks.fault_cases import without_collectives
from tests import word_pipelines
from tests.process_group import run_apart


def test_where_a_plan_is_said_to_join_all_ranks_it_sends_over_every_axis() -> None:
    found = set()
    for seed in range(12):
        mesh_shape = random.Random(seed).choice([(2,), (4,), (2, 2)])
        plan = cases.some_plan(mesh_shape, seed)
        alike = without_collectives(plan)
        assert not joins_all_ranks(alike) and not messages_of(cases.captured(), alike, on_host=True)
        if joins_all_ranks(plan):
            sent = messages_of(cases.captured(), plan, on_host=True)
            assert {name for _, axes in sent for name in axes} == set(plan.mesh.names)
        assert joins_all_ranks(one_stage(plan)) == joins_all_ranks(plan)
        found.add(joins_all_ranks(plan))
    assert True in found
    assert joins_all_ranks(word_pipelines.plan_of(stage_mesh=(1,)))


def test_what_fails_between_ranks_is_a_rank_error_that_says_what_they_were_to_do() -> None:
    with (
        pytest.raises(RankError, match=r"meeting failed: connection closed; another rank died"),
        among_ranks("meeting"),
    ):
        raise RuntimeError("connection closed")
    with pytest.raises(ValueError, match="theirs"), among_ranks("meeting"):
        raise ValueError("theirs")
    assert issubclass(RankError, AutoparError)


def test_processes_that_do_not_come_are_a_rank_error() -> None:
    """Of two only one is started."""
    ended = run_apart(1, join_another)
    assert ended == [(0, "rank 0: joining the other processes failed")]


def join_another(tell: Callable[[str], None]) -> None:
    os.environ.update(WORLD_SIZE="2")
    try:
        init(timeout_seconds=1.0)
    except RankError as error:
        tell(str(error).split(":", 2)[0] + ":" + str(error).split(":", 2)[1])
