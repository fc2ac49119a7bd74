"""Parameters are DTensors that say what they hold, in any layout and nesting order."""

import itertools

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Shard

from autopar.errors import ArgumentError, PlanMismatchError
from autopar.lower.legality import check_storage
from autopar.runtime import private_torch
from autopar.runtime.groups import build_groups
from autopar.runtime.parameters import (
    check_names,
    local_part,
    padded_part,
    register_under,
    to_dtensor,
    torch_placements,
)
from autopar.values.mesh import Mesh, make_mesh
from autopar.values.placement import INVARIANT, REPLICATE, Layout, is_even, parse_layout
from autopar.values.placement import Shard as OurShard
from tests.process_group import ranks


def stored_layouts(mesh: Mesh, rank: int) -> list[Layout]:
    placements = [INVARIANT, REPLICATE, *(OurShard(d) for d in range(rank))]
    out = []
    for axes in itertools.product(placements, repeat=mesh.num_axes):
        sharding = [axis for axis, placement in enumerate(axes) if isinstance(placement, OurShard)]
        out += [Layout(axes, order) for order in itertools.permutations(sharding)]
    return list(dict.fromkeys(out))


def rejoined(mesh: Mesh, shape: tuple[int, ...], layouts: list[Layout]) -> list[tuple[str, bool, bool, bool]]:
    """For each layout: is the whole tensor right, and after an in-place DTensor update, and its norm?"""
    device_mesh, groups = build_groups(mesh, "cpu")
    whole = torch.arange(float(torch.Size(shape).numel())).reshape(shape)
    out = []
    for layout in layouts:
        local = local_part(whole, layout, mesh, mesh.coordinate(groups.rank)).clone()
        tensor = to_dtensor(local, layout, shape, mesh, device_mesh)
        right = torch.equal(tensor.full_tensor(), whole)
        norm = torch.linalg.vector_norm(tensor)
        assert isinstance(norm, DTensor)
        right_norm = torch.allclose(norm.full_tensor(), torch.linalg.vector_norm(whole))
        local.add_(1.0)  # storage is shared
        out.append((str(layout), right, torch.equal(tensor.full_tensor(), whole + 1.0), right_norm))
    return out


@pytest.mark.parametrize(
    ("mesh_shape", "shape"), [((2,), (4, 3)), ((2,), (5, 3)), ((3,), (7, 4)), ((2, 2), (8, 4)), ((2, 2, 2), (16, 8))]
)
def test_the_whole_tensor_comes_back(mesh_shape: tuple[int, ...], shape: tuple[int, ...]) -> None:
    mesh = make_mesh(mesh_shape)
    layouts = stored_layouts(mesh, 2)
    for result in ranks(mesh.size).run(rejoined, mesh, shape, layouts):
        assert [entry for entry in result if not all(entry[1:])] == []


def test_uneven_storage_on_two_dims_comes_back() -> None:
    mesh = make_mesh((2, 2))
    layouts = [layout for layout in stored_layouts(mesh, 2) if not layout.order and layout.axes[0] != layout.axes[1]]
    for result in ranks(4).run(rejoined, mesh, (7, 5), layouts):
        assert [entry for entry in result if not all(entry[1:])] == []


def test_an_uneven_dim_beside_an_evenly_nested_one_comes_back() -> None:
    mesh = make_mesh((2, 2, 2))
    for result in ranks(8).run(rejoined, mesh, (5, 8), [parse_layout("S1,S1,S0")]):
        assert [entry for entry in result if not all(entry[1:])] == []


def test_a_rank_may_store_nothing() -> None:
    """Chunks are ceil(5 / 4) = 2 rows: the last rank has none, as with torch.chunk."""
    mesh, whole = make_mesh((4,)), torch.arange(5.0)
    parts = [local_part(whole, parse_layout("S0"), mesh, (i,)) for i in range(4)]
    assert [part.tolist() for part in parts] == [[0, 1], [2, 3], [4], []]
    padded = [padded_part(whole, parse_layout("S0"), mesh, (i,)) for i in range(4)]
    assert [part.tolist() for part in padded] == [[0, 1], [2, 3], [4, 0], [0, 0]]
    for result in ranks(4).run(rejoined, mesh, (5,), [parse_layout("S0")]):
        assert [entry for entry in result if not all(entry[1:])] == []


def test_order_is_told_to_torch() -> None:
    """Declared as plain Shards, a dim whose later axis is outermost would come back permuted."""
    mesh = make_mesh((2, 2))
    assert torch_placements(parse_layout("S0,S0"), mesh) == (Shard(0), Shard(0))
    assert torch_placements(parse_layout("S0,S0:10"), mesh) != (Shard(0), Shard(0))


def test_private_torch_is_still_there() -> None:
    """Each name of private_torch.py, so that a new torch says here what it took away."""
    from torch.distributed import distributed_c10d
    from torch.distributed.tensor import placement_types

    assert hasattr(placement_types, "_StridedShard"), "private_torch.strided_shard needs another way"
    assert private_torch.strided_shard(1, 2) == placement_types._StridedShard(1, split_factor=2)
    assert hasattr(distributed_c10d, "_get_default_store"), "private_torch.default_store needs another way"
    assert hasattr(torch._C, "_current_autograd_node"), "private_torch.in_backward needs another way"
    assert not private_torch.in_backward()
    for good in ranks(2).run(private_torch_on_a_rank):
        assert good == {"local_tensor": True, "store": True}


def private_torch_on_a_rank() -> dict[str, bool]:
    device_mesh, _ = build_groups(make_mesh((2,)), "cpu")
    local = torch.zeros(3)
    tensor = to_dtensor(local, parse_layout("S0"), (6,), make_mesh((2,)), device_mesh)
    store = private_torch.default_store()
    store.set("here", "1")
    return {
        "local_tensor": private_torch.local_tensor(tensor).data_ptr() == local.data_ptr(),
        "store": store.check(["here"]) and store.get("here") == b"1",
    }


@pytest.mark.parametrize(
    ("layout", "shape", "trainable"), [("P,R", (4, 4), False), ("R,S0", (4, 4), True), ("S0,S0", (6, 4), True)]
)
def test_storage_that_no_dtensor_can_have_is_refused(layout: str, shape: tuple[int, ...], trainable: bool) -> None:
    with pytest.raises(PlanMismatchError, match=r"blocks\.0\.weight"):
        check_storage("blocks.0.weight", shape, parse_layout(layout), make_mesh((2, 2)), trainable)
    assert is_even((8, 4), parse_layout("S0,S0"), make_mesh((2, 2)))
    check_storage("w", (8, 4), parse_layout("S0,S0"), make_mesh((2, 2)), True)
    check_storage("w", (101, 32), parse_layout("S1,S1,S0"), make_mesh((2, 2, 2)), True)


def test_names_mirror_the_original_tree() -> None:
    root, weight = nn.Module(), nn.Parameter(torch.zeros(2))
    register_under(root, "layers.0.fc.weight", weight)
    register_under(root, "layers.0.fc.scale", torch.zeros(1), persistent=False)
    register_under(root, "head.weight", weight)
    assert list(root.state_dict()) == ["layers.0.fc.weight", "head.weight"]
    assert [name for name, _ in root.named_parameters()] == ["layers.0.fc.weight"]
    assert isinstance(root.get_buffer("layers.0.fc.scale"), Tensor)


def test_a_model_may_not_name_its_parts_as_our_methods() -> None:
    check_names(["model.run"], ["run"])
    with pytest.raises(ArgumentError, match="'run'"):
        check_names(["run.weight"], ["run", "groups"])
