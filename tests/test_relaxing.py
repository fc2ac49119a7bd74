"""Bounds found by a second process are those found here, and a search that has it finds the same."""

import os
import signal

import pytest

from autopar.cluster import load_cluster
from autopar.plan import TrainConfig
from autopar.search.costs.pricing import Pricer
from autopar.search.joint.relaxing import Asked, Relaxations, relaxed_seconds
from autopar.search.meshes import Arrangement, arrangements
from tests.search_cases import program_of

CLUSTER = load_cluster("2x4xh100")


def relaxations(*, beside: bool) -> Relaxations:
    def pricer(arrangement: Arrangement, _microbatches: int) -> Pricer:
        return Pricer(mesh=arrangement.mesh, cluster=arrangement.cluster, config=TrainConfig())

    return Relaxations(program=lambda _: program_of("gpt2"), pricer=pricer, fold=True, beside=beside)


def questions() -> list[Asked]:
    return [(arrangement, 1, 1) for arrangement in arrangements(CLUSTER, (1, 2)) if arrangement.mesh.num_axes < 3][:5]


def test_who_finds_a_bound_does_not_matter() -> None:
    asked = questions()
    with relaxations(beside=False) as here, relaxations(beside=True) as both:
        both.foresee(iter(asked[1:]))
        there = {one: future.result() for one, future in both._asked.items()}
        assert there
        found = [both.of(one) for one in asked]
        assert all(both.of(one) == seconds for one, seconds in there.items())
        assert found == pytest.approx([here.of(one) for one in asked], rel=1e-12)
    arrangement, _, times = asked[0]
    own = relaxed_seconds(program_of("gpt2"), here.pricer(arrangement, 1), times, True)
    assert found[0] == pytest.approx(own, rel=1e-12)


def test_without_the_other_process_bounds_are_found_here() -> None:
    asked = questions()[:2]
    with relaxations(beside=False) as here, relaxations(beside=True) as both:
        both.foresee(iter(asked))
        assert both._other is not None
        os.kill(both._other._process.pid, signal.SIGKILL)
        assert [both.of(one) for one in asked] == pytest.approx([here.of(one) for one in asked], rel=1e-12)
