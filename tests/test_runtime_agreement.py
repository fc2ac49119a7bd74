"""Ranks that do not mean the same, fail, or die: an error on every rank, soon, that says which rank and what."""

import os
import signal
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch.distributed as dist

import tests.runtime_cases as cases
from autopar.errors import MeshError, RankError
from autopar.runtime import init
from autopar.runtime.agreement import agree, compare, failing_together, shared_number
from autopar.runtime.groups import build_groups
from autopar.values.mesh import make_mesh
from autopar.values.stage_plan import StagePlan
from tests.process_group import ranks, run_apart


def test_what_differs_is_named() -> None:
    same = {"plan": "a", "torch": "2.13"}
    assert compare({0: same, 1: same}) == ""
    text = compare({0: same, 1: {**same, "plan": "b"}, 2: same})
    assert "plan: a on ranks [0, 2], b on ranks [1]" in text and "torch" not in text
    assert compare({0: same, 1: {"failed": "BatchError: x"}}) == "rank 1 failed with BatchError: x"
    assert "mesh: None on ranks [0], 2 on ranks [1]" in compare({0: same, 1: {**same, "mesh": "2"}})


def with_own_plan(plans: list[StagePlan]) -> str:
    try:
        cases.distributed(plans[dist.get_rank()])
    except RankError as error:
        return str(error)
    return ""


def test_different_plans_are_an_error_on_every_rank() -> None:
    plan, other = cases.data_parallel((4,)), cases.data_parallel((4,), "whole")
    for text in ranks(4).run(with_own_plan, [plan, plan, other, plan], timeout=50):
        assert "plan: " in text and "on ranks [0, 1, 3]" in text and "on ranks [2]" in text
    meshes = [plan, plan, plan, cases.data_parallel((2, 2))]
    for text in ranks(4).run(with_own_plan, meshes, timeout=50):
        assert "mesh: 4 (data) on ranks [0, 1, 2], 2x2 (data, model) on ranks [3]" in text


def test_a_plan_that_took_another_solver_the_same_way_is_the_same() -> None:
    plan = cases.data_parallel((2,))
    estimated = plan.with_estimate(replace(plan.estimate, bound=1.0))
    assert ranks(2).run(with_own_plan, [plan, estimated]) == ["", ""]


def one_fails(failing: int) -> str:
    try:
        with failing_together():
            if dist.get_rank() == failing:
                raise FileNotFoundError("no plan here")
        agree({"plan": "a"})
    except (RankError, FileNotFoundError) as error:
        return f"{type(error).__name__}: {error}"
    return ""


@pytest.mark.parametrize("failing", [0, 1])
def test_a_rank_that_fails_on_the_way_is_named_by_the_others(failing: int) -> None:
    results = ranks(2).run(one_fails, failing, timeout=50)
    assert results[failing] == "FileNotFoundError: no plan here"
    assert results[1 - failing] == f"RankError: rank {failing} failed with FileNotFoundError: no plan here"
    assert ranks(2).run(with_own_plan, [cases.data_parallel((2,))] * 2) == ["", ""]  # and they meet again


def test_a_number_of_rank_zero_for_all() -> None:
    assert ranks(4).run(number_of_first) == [100, 100, 100, 100]


def number_of_first() -> int:
    return shared_number(100 + dist.get_rank())


def mesh_error(shape: tuple[int, ...]) -> str:
    with pytest.raises(MeshError) as error:
        build_groups(make_mesh(shape), "cpu")
    return str(error.value)


def test_a_mesh_of_another_size_names_both_numbers() -> None:
    for text in ranks(2).run(mesh_error, (2, 2)):
        assert "4 ranks" in text and "2 processes" in text and "--nproc-per-node 4" in text


def test_init_outside_of_torchrun_says_how_to_start(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(MeshError, match="torchrun"):
        init()


def dying(tell: Callable[[str], None]) -> None:
    init(timeout_seconds=20)
    module = cases.distributed(cases.data_parallel((2,)))
    module(**cases.batch(0)).backward()
    if os.environ["RANK"] == "1":
        os.kill(os.getpid(), signal.SIGKILL)
    try:
        for step in range(100):
            module(**cases.batch(step)).backward()
    except RankError as error:
        tell(str(error))


def test_a_rank_that_dies_is_an_error_for_the_others() -> None:
    """Two processes of their own, started as a launcher would; within seconds the survivor knows which group broke."""
    (code, text), killed = run_apart(2, dying, timeout=120)
    assert killed == (-signal.SIGKILL, None) and code == 0 and text is not None
    assert "rank 0" in text and "axis data" in text and "[0, 1]" in text and "died" in text
