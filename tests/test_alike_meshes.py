"""Meshes that differ in the order of axes of one level share a bound: below each of theirs, and hardly so."""

import itertools
import math
import random

import pytest

from autopar.cost_models.links import axis_links
from autopar.lower.program import make_program
from autopar.search.alike_meshes import first_alike, loose_orders
from autopar.search.costs.evaluate import evaluate_program
from autopar.search.joint.relaxing import Pricers, relaxed_seconds
from autopar.search.known.random_plan import random_plan
from autopar.search.meshes import Arrangement, arrangements, parts
from autopar.values.cluster import Cluster, load_cluster
from autopar.values.mesh import make_mesh
from autopar.values.train_config import TrainConfig
from tests.search_cases import captured_of, machine


def arrangement(cluster: Cluster, *shape: int) -> Arrangement:
    return Arrangement(pipeline=1, cluster=cluster, mesh=make_mesh(shape))


def test_axes_of_one_level_may_change_places_and_those_of_two_may_not() -> None:
    nodes, node = load_cluster("8x8xh100"), load_cluster("8xa100")
    assert first_alike(arrangement(nodes, 4, 2, 8)) == arrangement(nodes, 2, 4, 8)
    assert first_alike(arrangement(nodes, 8, 4, 2)) == arrangement(nodes, 8, 2, 4)
    assert loose_orders(arrangement(nodes, 2, 4, 8)) == ((0, 1, 2), (1, 0, 2))
    assert first_alike(arrangement(node, 4, 2)) == arrangement(node, 2, 4)
    assert loose_orders(arrangement(nodes, 8, 8)) == ()  # the same axes either way, and other links
    for part in parts(load_cluster("2x4xa100")).values():
        for one in arrangements(part):
            assert first_alike(one) == one or len(part.levels) == 1 or part.levels[0].size == 1


@pytest.mark.parametrize("name", ["8x8xh100", "16x4xa100", "8xh100"])
def test_all_links_of_meshes_alike_are_the_same(name: str) -> None:
    """Each mesh is alike one first, whose axes in some order of `loose_orders` are its own, with their links."""
    cluster = load_cluster(name)
    seen: dict[Arrangement, set[tuple[int, ...]]] = {}
    for one in arrangements(cluster):
        first, shape = first_alike(one), one.mesh.shape
        assert first_alike(first) == first and sorted(first.mesh.shape) == sorted(shape)
        seen.setdefault(first, set()).add(shape)
        orders = loose_orders(first) or (tuple(range(first.mesh.num_axes)),)
        fitting = [order for order in orders if tuple(first.mesh.shape[axis] for axis in order) == shape]
        assert fitting
        for order in fitting:
            for count in range(1, len(shape) + 1):
                for axes in itertools.combinations(range(len(shape)), count):
                    named = tuple(sorted(order[axis] for axis in axes))
                    assert axis_links(cluster, shape, axes) == axis_links(cluster, first.mesh.shape, named)
    for first, shapes in seen.items():
        assert bool(loose_orders(first)) == (len(shapes) > 1)


@pytest.mark.parametrize(("family", "shape"), [("gpt2", (2, 4)), ("vit", (3, 2)), ("vit", (2, 2, 3))])
def test_a_shared_bound_is_below_every_mesh_alike_and_nearly_theirs(family: str, shape: tuple[int, ...]) -> None:
    """On one flat level; and below every random plan on each mesh."""
    program, rng = make_program(captured_of(family)), random.Random(0)
    cluster = machine(math.prod(shape))
    pricers = Pricers(TrainConfig())
    alike = sorted({tuple(shape[axis] for axis in order) for order in itertools.permutations(range(len(shape)))})
    first = first_alike(arrangement(cluster, *shape))
    assert first.mesh.shape == alike[0] and len(alike) > 1
    least = relaxed_seconds(program, pricers.of(first, 1, loose=True), program.microbatches, True)
    for other in alike:
        one = arrangement(cluster, *other)
        assert first_alike(one) == first
        own = relaxed_seconds(program, pricers.of(one, 1), program.microbatches, True)
        assert 0.97 * own <= least <= own * (1 + 1e-6), one
        for _ in range(3):
            plan = random_plan(program.captured, one.mesh, rng)
            assert evaluate_program(plan, program, pricers.of(one, 1)).step_seconds >= least * (1 - 1e-6)
