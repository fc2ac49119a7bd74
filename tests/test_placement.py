"""Layouts: nesting, local shapes and ranges, against slicing a real tensor."""

import copy
import pickle
import random

import pytest
import torch

from autopar.values.mesh import make_mesh
from autopar.values.placement import (
    INVARIANT,
    PARTIAL,
    REPLICATE,
    Layout,
    Shard,
    is_even,
    local_ranges,
    local_shape,
    parse_layout,
    without_gradient,
)


def random_layout(rng: random.Random, num_axes: int, num_dims: int) -> Layout:
    axes = tuple(rng.choice([REPLICATE, INVARIANT, PARTIAL, *map(Shard, range(num_dims))]) for _ in range(num_axes))
    order = [a for a, p in enumerate(axes) if isinstance(p, Shard)]
    rng.shuffle(order)
    return Layout(axes, tuple(order))


def test_text_and_back() -> None:
    rng = random.Random(0)
    for _ in range(500):
        layout = random_layout(rng, rng.randint(1, 4), rng.randint(1, 3))
        assert parse_layout(str(layout)) == layout


def test_equal_nestings_are_equal_layouts() -> None:
    assert Layout((Shard(0), Shard(1)), (1, 0)) == Layout((Shard(0), Shard(1)))
    assert Layout((Shard(0), Shard(0)), (1, 0)) != Layout((Shard(0), Shard(0)))
    assert parse_layout("S0,S0:10").axes_of(0) == (1, 0)


def test_a_new_shard_is_the_innermost_split() -> None:
    layout = parse_layout("R,S0").replace(0, Shard(0))
    assert layout.axes_of(0) == (1, 0)
    assert layout.is_innermost(0) and not layout.is_innermost(1)


def test_ranges_equal_repeated_chunking() -> None:
    """Cutting a padded tensor split by split, outermost first, gives every rank's range."""
    rng = random.Random(1)
    for _ in range(300):
        num_axes = rng.randint(1, 3)
        mesh = make_mesh(tuple(rng.randint(1, 3) for _ in range(num_axes)))
        shape = tuple(rng.randint(1, 9) for _ in range(2))
        layout = random_layout(rng, num_axes, 2)
        for coordinate in mesh.coordinates():
            piece = torch.arange(shape[0] * shape[1]).reshape(shape)
            for dim in layout.sharded_dims():
                for axis in layout.axes_of(dim):
                    n = mesh.shape[axis]
                    chunk = -(-piece.shape[dim] // n)
                    fill = [*piece.shape]
                    fill[dim] = n * chunk - piece.shape[dim]
                    padded = torch.cat([piece, torch.full(fill, -1)], dim)
                    piece = padded.narrow(dim, coordinate[axis] * chunk, chunk)
            assert tuple(piece.shape) == local_shape(shape, layout, mesh)
            ranges = local_ranges(shape, layout, mesh, coordinate)
            whole = torch.arange(shape[0] * shape[1]).reshape(shape)
            true = whole[tuple(slice(start, start + length) for start, length in ranges)]
            assert piece[piece >= 0].tolist() == true.flatten().tolist()


def test_even_means_no_padding() -> None:
    mesh = make_mesh((2, 3))
    assert is_even((12,), parse_layout("S0,S0"), mesh)
    assert not is_even((8,), parse_layout("S0,S0"), mesh)
    assert is_even((8, 7), parse_layout("S0,P"), mesh)


def test_without_gradient_invariant_is_replicate() -> None:
    assert without_gradient(parse_layout("I,S1")) == parse_layout("R,S1")


@pytest.mark.parametrize("text", ["X", "S", "S0,", "R;I"])
def test_not_a_layout(text: str) -> None:
    with pytest.raises(ValueError, match="none of"):
        parse_layout(text)


def test_equal_placements_are_one_object() -> None:
    """Also out of pickles and copies; the order of a set of them is the same in every process."""
    for placement in (REPLICATE, INVARIANT, PARTIAL, *map(Shard, range(5))):
        assert pickle.loads(pickle.dumps(placement)) is placement
        assert copy.deepcopy(placement) is placement
        assert [p for p in (REPLICATE, INVARIANT, PARTIAL, *map(Shard, range(5))) if p == placement] == [placement]
    assert len({hash(p) for p in (REPLICATE, INVARIANT, PARTIAL, *map(Shard, range(5)))}) == 8
