"""On ranks, a model's own checks see bad data, and a state of another branch than was captured is refused."""

import random

import pytest
import torch

from autopar.capture import capture
from autopar.errors import DataCheckError, PlanMismatchError
from autopar.lower.emit import emit
from autopar.oracle.reference import buffers_of, parameters_of
from autopar.runtime import DistributedModule
from autopar.search.known.random_plan import random_plan
from autopar.values.mesh import make_mesh
from tests.branching_models import CHECKS, KNOWN, Asking
from tests.process_group import ranks


def distributed(model: Asking, inputs: dict[str, torch.Tensor]) -> DistributedModule:
    captured = capture(model, (), inputs)
    plan = random_plan(captured, make_mesh((2,)), random.Random(0))
    values = {**parameters_of(captured, model), **buffers_of(captured, model)}
    return DistributedModule(emit(captured, plan), values, bare=True)


def case(name: str) -> tuple[Asking, dict[str, torch.Tensor]]:
    torch.manual_seed(0)
    return Asking({**KNOWN, **CHECKS}[name]), {"x": torch.randn(8, 8), "y": torch.randn(8, 8)}


def guarded_run() -> None:
    model, inputs = case("a_buffer_that_stays")
    module = distributed(model, inputs)
    torch.testing.assert_close(module(**inputs), model(**inputs))
    state = {name: value.clone() for name, value in module.state_dict().items()}
    module.load_state_dict(state)
    module(**inputs)
    state["threshold"] = torch.tensor(0.1)
    module.load_state_dict(state)
    with pytest.raises(PlanMismatchError, match="buffer threshold"):
        module(**inputs)


def checked_run() -> None:
    model, inputs = case("raises")
    module = distributed(model, inputs)
    torch.testing.assert_close(module(**inputs), model(**inputs))
    inputs["x"][:] = float("nan")
    with pytest.raises(DataCheckError, match="input is not finite"):
        module(**inputs)


def test_a_state_of_another_branch_is_refused() -> None:
    ranks(2).run(guarded_run)


def test_a_check_fails_on_the_ranks_that_see_it() -> None:
    ranks(2).run(checked_run)
