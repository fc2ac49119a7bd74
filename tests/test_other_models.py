"""Masked attention, graphs, tables, recurrent nets and science under random plans: as in one process.

`benchmarks/verify_others.py` draws more plans of more models, on processes.
"""

import random

import pytest

from autopar.capture import capture
from autopar.oracle import Subject, check_module
from autopar.search.known.random_plan import random_plan
from autopar.values.mesh import make_mesh
from tests.other_models import other_model
from tests.plans_in_threads import errors_of, one_process

NAMES = (
    "masked: documents",
    "masked: packed",
    "masked: swin bias",
    "masked: cross",
    "messages: index_add",
    "messages: scatter_reduce mean",
    "messages: graph attention",
    "messages: index_put",
    "tables: bags of means",
    "tables: bags by offset",
    "tables: weighted bags",
    "recurrent: lstm",
    "recurrent: gru cells",
    "losses: weighted cross entropy",
    "losses: soft labels",
    "losses: nll",
    "losses: bce",
)


@pytest.mark.parametrize("name", NAMES)
def test_the_graph_is_the_model_and_random_plans_equal_it(name: str) -> None:
    model, kwargs = other_model(name)
    captured = capture(model, (), kwargs, name=type(model).__name__)
    assert (
        max(
            d.error
            for d in check_module(Subject(model=model, captured=captured, args=(), kwargs=kwargs), 1).differences
        )
        <= 1e-10
    )
    reference, rng = one_process(captured, model, kwargs), random.Random(name)
    plan = random_plan(captured, make_mesh(((2,), (2, 2))[NAMES.index(name) % 2]), rng)
    loss_error, gradient_error, parameter = errors_of(reference, plan)
    assert loss_error <= 1e-10, f"loss off by {loss_error} on {plan.mesh}"
    assert gradient_error <= 1e-8, f"gradient of {parameter} off by {gradient_error} on {plan.mesh}"
