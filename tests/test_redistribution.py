"""Every redistribution computes, differentiates and sends what the table says, on real processes, exactly.

A leaf of whole numbers is dealt out in the source layout, taken through the calls that passes insert, and its results
and gradients are collected by the law of placements. Bytes counted are those that `messages` predicts.
"""

import itertools
import random
from collections import Counter

import pytest
import torch
from torch import Tensor

from autopar.ops.groups import use_groups
from autopar.passes.collective_call import collective_call
from autopar.runtime.groups import build_groups
from autopar.values.mesh import Mesh, make_mesh
from autopar.values.placement import INVARIANT, PARTIAL, REPLICATE, Layout, Placement, Shard, parse_layout
from autopar.values.redistribution import TABLE, Step, is_possible, messages, route, steps_from
from tests.dealing import Parts, axis_product, collect, deal, whole_numbers
from tests.process_group import ranks

PLACEMENTS: tuple[Placement, ...] = (Shard(0), Shard(1), REPLICATE, INVARIANT, PARTIAL)
Chain = tuple[Step, ...]
Sent = dict[tuple[str, tuple[str, ...]], tuple[int, int]]


def layouts_of(mesh: Mesh) -> list[Layout]:
    """All layouts of a matrix, nested in any order."""
    out = []
    for axes in itertools.product(PLACEMENTS, repeat=mesh.num_axes):
        sharding = [axis for axis, placement in enumerate(axes) if isinstance(placement, Shard)]
        out += [Layout(axes, order) for order in itertools.permutations(sharding)]
    return list(dict.fromkeys(out))


def redistribute(
    mesh: Mesh, shape: tuple[int, ...], chains: list[Chain], seed: int, memory_format: torch.memory_format
) -> list[tuple[Tensor, Tensor, Sent]]:
    """One rank's results: value and gradient of each chain, and what it sent."""
    torch.manual_seed(seed)
    axes = {tuple(mesh.names[a] for a in step.axes) for chain in chains for step in chain if len(step.axes) > 1}
    _, groups = build_groups(mesh, "cpu", axes)
    groups.counting = True
    out = []
    for number, chain in enumerate(chains):
        value, gradient = dealt(mesh, shape, chain, seed + number)
        leaf = value[groups.rank].contiguous(memory_format=memory_format).requires_grad_()
        groups.sent = {}
        with use_groups(groups):
            x = leaf
            for step in chain:
                function, keywords = collective_call(step, shape, mesh)
                x = function(x, **keywords)
            x.backward(gradient[groups.rank].contiguous(memory_format=memory_format))
        assert leaf.grad is not None
        out.append((x.detach().clone(), leaf.grad, groups.sent))
    return out


def wholes(mesh: Mesh, shape: tuple[int, ...], seed: int) -> tuple[Tensor, Tensor, torch.Generator]:
    generator = torch.Generator().manual_seed(seed)
    multiple = axis_product(mesh)
    return whole_numbers(shape, generator, multiple), whole_numbers(shape, generator, multiple), generator


def dealt(mesh: Mesh, shape: tuple[int, ...], chain: Chain, seed: int) -> tuple[Parts, Parts]:
    """The leaf by the law of values at the source, the result's gradient by the law of gradients at the target."""
    value, gradient, generator = wholes(mesh, shape, seed)
    # summands of a Replicate gradient are whole multiples too, since Replicate -> Partial divides each of them
    multiple = axis_product(mesh)
    summands = deal(gradient / multiple, chain[-1].target, mesh, REPLICATE, generator)
    values = deal(value / multiple, chain[0].source, mesh, PARTIAL, generator)
    return [v * multiple for v in values], [g * multiple for g in summands]


def predicted(chain: Chain, shape: tuple[int, ...], mesh: Mesh) -> Sent:
    calls: Counter[tuple[str, tuple[str, ...]]] = Counter()
    nbytes: Counter[tuple[str, tuple[str, ...]]] = Counter()
    for step in chain:
        for message in itertools.chain(*messages(step, shape, 8, mesh)):
            key = message.kind, tuple(mesh.names[a] for a in message.axes)
            calls[key] += 1
            nbytes[key] += message.nbytes
    return {key: (calls[key], nbytes[key]) for key in calls}


def check(
    mesh: Mesh,
    shape: tuple[int, ...],
    chains: list[Chain],
    seed: int = 0,
    memory_format: torch.memory_format = torch.contiguous_format,
) -> None:
    results = ranks(mesh.size).run(redistribute, mesh, shape, chains, seed, memory_format, timeout=120)
    for number, chain in enumerate(chains):
        value, gradient, _ = wholes(mesh, shape, seed + number)
        source, target = chain[0].source, chain[-1].target
        words = f"{source} -> {' -> '.join(str(s.target) for s in chain)} of {shape} on {mesh}"
        got = collect([result[number][0] for result in results], shape, target, mesh, PARTIAL)
        assert torch.equal(got, value), f"value of {words}"
        got = collect([result[number][1] for result in results], shape, source, mesh, REPLICATE)
        assert torch.equal(got, gradient), f"gradient of {words}"
        for rank, result in enumerate(results):
            assert result[number][2] == predicted(chain, shape, mesh), f"messages of {words} on rank {rank}"


MESHES = ((2,), (3,), (2, 2))
EVEN = {(2,): (4, 6), (3,): (3, 6), (2, 2): (8, 4)}


@pytest.mark.parametrize("even", [True, False])
@pytest.mark.parametrize("mesh_shape", MESHES)
def test_every_single_and_flattened_step(mesh_shape: tuple[int, ...], even: bool) -> None:
    mesh = make_mesh(mesh_shape)
    shape = EVEN[mesh_shape] if even else (7, 5)
    chains = [
        (step,) for layout in layouts_of(mesh) for step in steps_from(layout, 2, True) if is_possible(step, shape, mesh)
    ]
    assert {(type(c[0].before), type(c[0].after)) for c in chains} == set(TABLE)
    check(mesh, shape, chains)


def test_pixels_that_lie_channels_last() -> None:
    """torch.stack and torch.cat keep such strides, which collectives refuse."""
    mesh, shape = make_mesh((2,)), (2, 4, 6, 2)
    sources = [Layout((placement,)) for placement in (*(Shard(d) for d in range(4)), REPLICATE, INVARIANT, PARTIAL)]
    check(
        mesh,
        shape,
        [(step,) for source in sources for step in steps_from(source, 4, True)],
        memory_format=torch.channels_last,
    )


@pytest.mark.parametrize("even", [True, False])
def test_steps_on_three_axes(even: bool) -> None:
    mesh = make_mesh((2, 2, 2))
    shape = (8, 16) if even else (9, 11)
    source = random.Random(1)
    chains = [
        (step,)
        for layout in source.sample(layouts_of(mesh), 60)
        for step in source.sample(steps_from(layout, 2, True), 3)
        if is_possible(step, shape, mesh)
    ]
    assert {len(chain[0].axes) for chain in chains} == ({1, 2, 3} if even else {1, 2})
    check(mesh, shape, chains)


@pytest.mark.parametrize("mesh_shape", [(2,), (2, 2), (2, 2, 2)])
@pytest.mark.parametrize("shape", [(8, 16), (7, 13)])
def test_routes_between_any_two_layouts(mesh_shape: tuple[int, ...], shape: tuple[int, ...]) -> None:
    mesh = make_mesh(mesh_shape)
    source = random.Random(2)
    layouts = layouts_of(mesh)
    pairs = [(a, b) for a in layouts for b in layouts if a != b]
    pairs = source.sample(pairs, min(len(pairs), 80))
    check(mesh, shape, [route(a, b, shape, 8, mesh, True) for a, b in pairs])


def test_a_batch_split_on_two_axes_in_either_order() -> None:
    """Nesting matters: the same placements in another order are other rows."""
    mesh = make_mesh((2, 2))
    plain, turned = parse_layout("S0,S0"), parse_layout("S0,S0:10")
    assert plain != turned
    chains = [route(a, b, (8, 3), 8, mesh, True) for a, b in ((plain, turned), (turned, plain))]
    assert all(chains)
    check(mesh, (8, 3), chains)
