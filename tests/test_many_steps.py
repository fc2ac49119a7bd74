"""What all steps between layouts take at once is what each of them takes."""

import random

import numpy as np
import pytest

from autopar.search.costs.many_steps import step_seconds
from autopar.search.costs.pricing import make_pricer, total
from autopar.search.graph.lattice import Lattices, _steps
from autopar.values.cluster import load_cluster
from autopar.values.mesh import make_mesh
from autopar.values.placement import INVARIANT, PARTIAL, REPLICATE, Placement, Shard
from autopar.values.redistribution import is_possible
from autopar.values.train_config import TrainConfig


@pytest.mark.parametrize("seed", range(24))
def test_each_step_takes_what_it_takes_alone(seed: int) -> None:
    draw = random.Random(seed)
    shape = draw.choice([(32,), (4, 8), (2, 16), (2, 4, 4), (8, 1, 4), (1, 32)])
    pricer = make_pricer(
        mesh=make_mesh(shape), cluster=load_cluster("4x8xh100"), config=TrainConfig(), in_buckets=draw.random() < 0.5
    )
    share = draw.choice((0.0, 0.2, 1.0)) if pricer.in_buckets else 1.0
    rank, grad, parameter = draw.choice((1, 2, 3)), draw.random() < 0.7, draw.random() < 0.5
    every: list[Placement] = [REPLICATE, PARTIAL, *(Shard(dim) for dim in range(rank))]
    every += [INVARIANT] if grad else []
    axes = tuple(frozenset(draw.sample(every, draw.randint(1, len(every)))) for _ in shape)
    found = _steps(axes, rank, grad, tuple(n > 1 for n in shape), parameter)
    size = tuple(draw.choice((1, 3, 8, 30, 64, 1000)) for _ in range(rank))
    possible, forward, backward = step_seconds(found, size, 2, pricer, parameter, share)
    assert possible.tolist() == [is_possible(step, size, pricer.mesh) for step in found.steps]
    alone = [pricer.step(step, size, 2, parameter, share) for step in found.steps]
    np.testing.assert_allclose(forward, [total(there) for there, _ in alone], rtol=1e-12)
    np.testing.assert_allclose(backward, [total(back) for _, back in alone], rtol=1e-12)
    made = Lattices(pricer).of(size, 2, grad, axes, parameter, share)
    kept = [step for step, is_kept in zip(found.steps, possible, strict=True) if is_kept]
    assert made.steps == tuple(kept) and made.forward.tolist() == forward[possible].tolist()
    assert [made.layouts[i] for i in made.source] == [step.source for step in kept]
    assert [made.layouts[i] for i in made.target] == [step.target for step in kept]
