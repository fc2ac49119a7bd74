"""Nothing is lost when a rank dies: the others end with a typed error, new processes go on from a checkpoint.

A few runs of `benchmarks.faults`, one of a kind; the table of all is in docs/results/faults.md.
"""

import os
import random
from collections.abc import Callable, Iterator

import pytest

import tests.runtime_cases as cases
from autopar.errors import AutoparError, RankError
from autopar.lower.messages import messages_of
from autopar.runtime import init
from autopar.runtime.lost_ranks import among_ranks
from autopar.runtime.roll_call import joins_all_ranks
from autopar.values.plan import one_stage
from benchmarks.fault_cases import ALIKE, STAGES, Fault, make_cases, without_collectives
from benchmarks.fault_runs import ASYNCHRONOUS, SYNCHRONOUS, Run
from benchmarks.faults import Faults
from tests import word_pipelines
from tests.process_group import run_apart


@pytest.fixture(scope="module")
def faults(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Faults]:
    make_cases()
    made = Faults(tmp_path_factory.mktemp("faults"))
    yield made
    made.ranks.close()


@pytest.mark.parametrize(
    ("kind", "saving", "rank", "point"),
    [
        (ALIKE, SYNCHRONOUS, 0, "in the middle of backward"),
        (STAGES, SYNCHRONOUS, 1, "at the loss for all stages"),
        (ALIKE, SYNCHRONOUS, 0, "manifest in place, folder not named"),
        (ALIKE, ASYNCHRONOUS, 1, "in the middle of writing tensors"),
    ],
)
def test_a_killed_rank_costs_no_checkpoint(faults: Faults, kind: str, saving: str, rank: int, point: str) -> None:
    outcome = faults.try_out(Run(saving=saving, fault=Fault(rank=rank, how="killed", point=point, kind=kind)))
    assert not outcome.problems, outcome.problems
    assert set(outcome.errors) == {"RankError"}


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
