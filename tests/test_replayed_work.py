"""What does not fit is made again, which takes seconds whatever is chosen: a bound beside the one without a limit."""

import random

import numpy as np
import pytest
from scipy.optimize import linprog

from autopar.errors import InfeasibleError
from autopar.lower.program import Program, make_program
from autopar.search.costs.pricing import Pricer, make_pricer
from autopar.search.costs.work_bound import again_seconds, ops_work, saved_nbytes
from autopar.search.joint.candidates import Candidate
from autopar.search.joint.joint import Joint
from autopar.search.joint.questions import Setup
from autopar.search.joint.relaxing import relaxed_seconds
from autopar.search.meshes import Arrangement
from autopar.search.planner import plan_program
from autopar.search.search_options import SearchOptions
from autopar.values.stage_plan import StagePlan
from autopar.values.train_config import TrainConfig
from tests.search_cases import pricer_of, small_llama


def test_what_is_let_go_of_is_the_optimum_of_the_linear_program() -> None:
    """Least seconds @ part, so that nbytes @ (1 - part) fits in the room."""
    draw = random.Random(0)
    for _ in range(40):
        nbytes = np.array([draw.choice((0.0, 1.0, 10 * draw.random())) for _ in range(draw.randint(1, 12))])
        seconds = np.array([draw.choice((0.0, draw.random())) for _ in nbytes])
        room = draw.random() * 1.2 * nbytes.sum()
        lp = linprog(seconds, A_ub=[-nbytes], b_ub=[room - nbytes.sum()], bounds=(0, 1))
        assert again_seconds(nbytes, seconds, room) == pytest.approx(lp.fun, abs=1e-9)


@pytest.mark.parametrize("mesh", [(1,), (4,)])
def test_no_plan_within_a_limit_takes_less_than_without_one_and_what_is_made_again(mesh: tuple[int, ...]) -> None:
    """Activations are most of what this model holds: lower limits, more made again, and the search's bound says it."""
    captured = small_llama(4, 128)
    program = make_program(captured)
    free = _plan(free_pricer := pricer_of(mesh), program)
    before, most = 0.0, 0.0
    for part in (0.7, 0.5):
        pricer = _within(free_pricer, part * free.estimate.peak_nbytes)
        bound = relaxed_seconds(program, pricer, 1, True)
        room = pricer.config.memory_nbytes
        assert room is not None
        again = again_seconds(saved_nbytes(program) / pricer.mesh.size, ops_work(program, pricer)[:, 0], room)
        assert again >= before
        before = again
        try:
            plan = _plan(pricer, program)
        except InfeasibleError:
            continue
        most = max(most, again / plan.estimate.step_seconds)
        assert plan.estimate.step_seconds >= (bound + again) * (1 - 1e-9)
        key = Candidate(arrangement=Arrangement(pipeline=1, cluster=pricer.cluster, mesh=pricer.mesh), microbatches=1)
        setup = Setup(
            counts=(1,), cluster=pricer.cluster, config=pricer.config, options=SearchOptions(relative_gap=0.01)
        )
        joint = Joint(graph=lambda _: captured, setup=setup)
        while not joint.sharpen(key, np.inf):
            pass
        assert joint.bound(key) == pytest.approx(bound + again)
    assert most > 0.01  # it says something


def _plan(pricer: Pricer, program: Program) -> StagePlan:
    return plan_program(program, pricer, SearchOptions(relative_gap=0.05, with_baselines=False))


def _within(pricer: Pricer, nbytes: float) -> Pricer:
    return make_pricer(mesh=pricer.mesh, cluster=pricer.cluster, config=TrainConfig(memory_nbytes=nbytes))
