"""A plan's placements go to DTensor and spmd_types and come back as they were."""

from itertools import product

import pytest
from torch.distributed.tensor import Partial, Replicate, Shard

import autopar
from autopar.errors import ArgumentError
from autopar.integrations.placements import from_dtensor, gradient_to_dtensor, named_layouts, to_dtensor
from autopar.values.mesh import Mesh, make_mesh
from autopar.values.placement import INVARIANT, PARTIAL, REPLICATE, Layout
from autopar.values.placement import Shard as Split
from examples.integrations import tiny as cases

MESH = Mesh(shape=(2, 3, 2), names=("pod", "data", "model"))


def every_layout() -> list[Layout]:
    """Of a tensor of two dims on three axes, in every order of splits."""
    found = set()
    for axes in product((REPLICATE, INVARIANT, PARTIAL, Split(0), Split(1)), repeat=3):
        plain = Layout(axes)
        for order in product(range(3), repeat=len([a for a in axes if isinstance(a, Split)])):
            if len(set(order)) == len(order) and all(isinstance(axes[a], Split) for a in order):
                found.add(Layout(axes, order))
        found.add(plain)
    return sorted(found, key=str)


def test_dtensor_and_back() -> None:
    assert len(every_layout()) > 125
    for layout in every_layout():
        there = to_dtensor(layout, MESH), gradient_to_dtensor(layout, MESH)
        assert from_dtensor(there[0], MESH, there[1]) == layout, layout


def test_what_dtensor_leaves_open_is_what_dtensor_does() -> None:
    mesh = make_mesh((2, 2))
    assert from_dtensor((Replicate(), Shard(1)), mesh) == Layout((INVARIANT, Split(1)))
    assert from_dtensor((Replicate(), Partial()), mesh, (Partial(), Replicate())) == Layout((REPLICATE, PARTIAL))
    with pytest.raises(ArgumentError, match="1 placements for mesh 2x2"):
        from_dtensor((Replicate(),), mesh)
    with pytest.raises(ArgumentError, match="partial sums only"):
        from_dtensor((Partial("max"), Replicate()), mesh)


@pytest.mark.parametrize("how", ["megatron:tp=2", "ddp:pp=2,mbs=2"])
def test_a_plan_names_its_borders(how: str) -> None:
    plan = autopar.plan(cases.tiny(), cases.example_batch(), cluster="4xcpu", baseline=how, loss_fn=cases.loss_fn)
    found = named_layouts(plan)
    assert set(found.parameters) == {name for name, _ in cases.tiny().named_parameters()}
    assert set(found.inputs) == {"0", "1"} and set(found.outputs) == {"loss"}
    assert found.num_dims["head.weight"] == 2 and found.num_dims["loss"] == 0
    if how == "megatron:tp=2":
        assert str(found.parameters["o.weight"]) == "I,S1"
        assert to_dtensor(found.parameters["o.weight"], found.mesh) == (Replicate(), Shard(1))


def test_spmd_types_and_back() -> None:
    pytest.importorskip("spmd_types", reason="spmd_types is not installed: pip install spmd_types")
    import spmd_types as spmd

    from autopar.integrations.spmd import from_spmd, plan_from_spmd, plan_to_spmd, to_spmd

    for layout in every_layout():
        assert from_spmd(to_spmd(layout, MESH, 2), MESH, 2) == layout, layout
    nested = to_spmd(Layout((Split(0), REPLICATE, Split(0)), (2, 0)), MESH, 2)
    assert nested.partition_spec == spmd.PartitionSpec(("model", "pod"), None)
    assert nested.local_type == {"pod": spmd.V, "data": spmd.R, "model": spmd.V}
    given = spmd.SpmdType({"pod": spmd.S(-1), "data": spmd.I, "model": spmd.P})
    assert from_spmd(given, MESH, 2) == Layout((Split(1), INVARIANT, PARTIAL))
    plan = autopar.plan(
        cases.tiny(), cases.example_batch(), cluster="4xcpu", baseline="megatron:tp=2", loss_fn=cases.loss_fn
    )
    own = named_layouts(plan)
    assert plan_from_spmd(plan_to_spmd(plan), own) == own
    for typed, said in (
        ({"pod": spmd.S(0), "data": spmd.R, "model": spmd.S(0)}, r"S\(0\) does not say which splits first"),
        ({"pod": spmd.V, "data": spmd.R, "model": spmd.R}, "axis pod says V, which has no dim"),
        ({"pod": spmd.R, "data": spmd.R}, "axis model says nothing"),
        ({"tp": spmd.R}, "'tp' is no axis of mesh"),
    ):
        with pytest.raises(ArgumentError, match=said):
            from_spmd(spmd.SpmdType(typed), MESH, 2)
    with pytest.raises(ArgumentError, match="no parameter 'x'"):
        plan_from_spmd({"parameters": {"x": nested}}, own)


def test_types_say_of_gradients_what_placements_do() -> None:
    """The gradient of R is a sum over ranks to come, of I and P the whole."""
    pytest.importorskip("spmd_types", reason="spmd_types is not installed: pip install spmd_types")
    import spmd_types as spmd

    from autopar.integrations.spmd import to_spmd

    mesh, whole = make_mesh((2,)), (Replicate(),)
    for placement, theirs in ((REPLICATE, (Partial(),)), (INVARIANT, whole), (PARTIAL, whole), (Split(0), (Shard(0),))):
        assert gradient_to_dtensor(Layout((placement,)), mesh) == theirs
        kind = to_spmd(Layout((placement,)), mesh, 1).local_type["data"].backward_type()
        assert (kind is spmd.P) == (placement == REPLICATE) and (kind is spmd.V) == isinstance(placement, Split)
