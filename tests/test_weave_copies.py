"""Two micro-batches woven into one graph are the step that they are one after the other: loss, gradients, bytes."""

import random
from dataclasses import replace

import pytest

from autopar.errors import BatchError
from autopar.mesh import make_mesh
from autopar.passes.insert_collectives import insert_collectives
from autopar.plan import plan_from_json
from autopar.search.known.random_plan import random_buckets, random_plan, random_recompute
from tests.plans_in_threads import errors_of
from tests.test_accumulate_gradients import microbatch, whole


@pytest.mark.parametrize("family", ["gpt2", "llama", "mixtral", "vit", "t5"])
def test_random_plans_woven_equal_one_process(family: str) -> None:
    """Every lifetime, buckets, recompute; two micro-batches are one batch of their own, four are two steps of two."""
    rng = random.Random(family)
    for number, (count, mesh) in enumerate([(2, (2, 2)), (4, (2,)), (2, (4,))]):
        captured = microbatch(family, count)
        plan = random_plan(captured, make_mesh(mesh), rng)
        plan = random_buckets(plan, captured, rng) if number != 1 else plan
        plan = random_recompute(plan, captured, rng, share=0.3) if number == 2 else plan
        plan = plan_from_json(replace(plan, copies=2).to_json())
        loss_error, gradient_error, parameter = errors_of(whole(family), plan, captured, exact=number != 2)
        assert loss_error <= 1e-10, f"plan {number} on {plan.mesh}: loss off by {loss_error}"
        assert gradient_error <= 1e-8, f"plan {number} on {plan.mesh}: gradient of {parameter} off by {gradient_error}"


def test_what_is_no_pair_is_refused() -> None:
    captured = microbatch("vit", 2)
    plan = random_plan(captured, make_mesh((2,)), random.Random(0))
    with pytest.raises(BatchError, match="woven of pairs"):
        insert_collectives(captured, replace(plan, copies=3))
