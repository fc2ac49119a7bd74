"""How may one kind of parameter be stored and brought to its uses? Its options and arcs, dominated ones left out.

An option is (storage, lifetime): `keep`, the copy in use lives to its backward; `use`, gathered again by every op that
saves it; with several micro-batches also `step`, the copy and the sum of gradients live in the layout in use for the
whole step and are paid for once (without, `keep` is that too). For each layout in use those options are kept that no
other beats in seconds of a step, persistent, kept and passing bytes at once. Copies for different uses of one tied
parameter are priced as if each came from storage by itself, so that for these a plan may cost less than its graph says.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from autopar.lower.program import Program, Tensor
from autopar.search.costs.storages import storages
from autopar.search.graph.lattice import Distances, Lattices, cheapest_ways
from autopar.search.graph.moments import Moments
from autopar.search.graph.options import EVERYTHING, Restriction
from autopar.search.graph.strategy_graph import Floats, Ints
from autopar.search.graph.undominated import undominated
from autopar.values.placement import Layout
from autopar.values.redistribution import Step

Mask = NDArray[np.bool_]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ParameterWay:
    """From option to layout in use: seconds of one instance (once, and again for each op that saves the copy), bytes of
    the copy (0 if none is made) and of a gradient in that layout (0 unless the lifetime is `step`)."""

    option: int
    use: Layout
    steps: tuple[Step, ...]
    seconds: float
    again: float
    copy: int
    gradient: int


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ParameterSpace:
    """`options[i]` = (storage, lifetime); seconds and bytes of one instance. `casts`: of parts as computed on."""

    options: tuple[tuple[Layout, str], ...]
    seconds: tuple[float, ...]
    stored: tuple[int, ...]
    casts: tuple[int, ...]
    states: tuple[int, ...]
    ways: tuple[ParameterWay, ...]


class _Storages(NamedTuple):
    """Of each way to store a parameter: seconds of its update, bytes stored, of casts and of optimizer state."""

    updates: Floats
    sizes: Ints
    casts: Ints
    states: Ints


@dataclass(frozen=True, slots=True, kw_only=True)
class Used:
    """A kind of parameter and how it is used.

    uses: the layouts that its readers want.
    savers: how often a copy that lives for a use is gathered again.
    in_backward: some reader has a backward pass.
    shared: several readers may want different copies, so an option kept for one of them is kept for all.
    regatherable: no view of it leaves a cluster (whose readers would gather it again); else its copies are kept.
    microbatches: how often a micro-batch's passes are paid for, beside what is paid for once.
    limited: bytes count; else only the cheapest in seconds are kept, for every use one (of a `shared` one, all).
    """

    tensor: Tensor
    uses: tuple[Layout, ...]
    savers: float
    in_backward: bool
    shared: bool
    regatherable: bool
    microbatches: float
    limited: bool


def parameter_space(used: Used, lattices: Lattices, restriction: Restriction) -> ParameterSpace:
    """The options of a parameter, found once for all graphs of the program on the mesh."""
    made, tensor = lattices.pricer.made, used.tensor
    lived = restriction.lived.get(tensor.name)
    if restriction.storage is EVERYTHING.storage:  # else it may ask for the parameter's name
        tensor = replace(tensor, name="")
    in_buckets = lattices.pricer.in_buckets
    key = replace(used, tensor=tensor), restriction.storage, restriction.lifetimes, lived, in_buckets
    if key not in made:
        made[key] = _parameter_space(used, lattices, restriction)
    found: ParameterSpace = made[key]
    return found


def _parameter_space(used: Used, lattices: Lattices, restriction: Restriction) -> ParameterSpace:
    pricer, tensor, uses, microbatches = lattices.pricer, used.tensor, used.uses, used.microbatches
    savers, shared, limited = used.savers, used.shared, used.limited
    once = "step" if microbatches > 1 else "keep"
    lived = restriction.lived.get(tensor.name)
    lifetimes = tuple(v for v in restriction.lifetimes if v != "step" or microbatches > 1)
    if lived is not None:
        is_once = "always" in lived
        lifetimes = tuple(
            v for v in lifetimes if lives(v, True, microbatches > 1, lived) or (is_once and v == once)
        ) or (once,)
    lifetimes = lifetimes if used.regatherable else tuple(v for v in lifetimes if v != "use") or (once,)
    trained = used.in_backward and tensor.requires_grad
    stored = [
        s for s in storages(tensor.shape, pricer.mesh, tensor.requires_grad, True) if restriction.storage(tensor, s)
    ]
    if not stored:
        return ParameterSpace(options=(), seconds=(), stored=(), casts=(), states=(), ways=())
    axes = tuple(frozenset(v.axes[a] for v in (*stored, *uses)) for a in range(pricer.mesh.num_axes))
    shape = tensor.shape, tensor.element_size, tensor.requires_grad
    if not limited and once in lifetimes:
        lifetimes = (once,)  # a copy kept longest is made least often
    costs = _Storages(
        updates=np.array([pricer.optimizer_seconds(tensor, s) if trained else 0.0 for s in stored]),
        sizes=np.array([pricer.target.stored_nbytes(tensor, s) for s in stored]),
        casts=np.array([pricer.target.cast_nbytes(tensor, s) for s in stored]),
        states=np.array([pricer.target.state_nbytes(tensor, s) if trained else 0 for s in stored]),
    )
    if not uses:  # nothing reads it: an output layer that the loss has no part of
        lifetime = once if once in lifetimes else lifetimes[0]
        return ParameterSpace(
            options=tuple((s, lifetime) for s in stored),
            seconds=tuple(costs.updates.tolist()),
            stored=tuple(costs.sizes.tolist()),
            casts=tuple(costs.casts.tolist()),
            states=tuple(costs.states.tolist()),
            ways=(),
        )
    copies = np.array([pricer.target.local_nbytes(tensor, use) for use in uses])
    width = pricer.target.widening(tensor)
    wanted = np.array(
        [max(pricer.target.stored_nbytes(tensor, use), width * pricer.target.local_nbytes(tensor, use)) for use in uses]
    )
    wanted *= trained
    # Every way there is: storage, lifetime, use by number, and its passages.
    found: list[tuple[int, str, int, float, float, bool]] = []
    known: dict[str, Distances] = {}

    def along(lifetime: str) -> _Passages:
        times = savers if lifetime == "use" else 0
        lattice = lattices.of(*shape, axes, True, pricer.share(tensor, lifetime))
        back = lattice.backward if trained else np.zeros_like(lattice.backward)
        distances = known[lifetime] = cheapest_ways(lattice, lattice.forward * (1 + times) + back)
        return _passages(distances, stored, uses, back)

    instead = along(once) if once not in lifetimes else None  # of what nothing gathers
    for lifetime in lifetimes:
        passages = along(lifetime)
        paid = 1 if lifetime == "step" else microbatches
        for u in range(len(uses)):
            near = (
                range(len(stored))
                if limited or shared or lived is not None
                else [int((costs.updates + paid * passages.least[:, u]).argmin())]
            )
            for s in near:
                if lived is not None and not lives(lifetime, bool(passages.gathered[s, u]), microbatches > 1, lived):
                    continue
                moved = bool(passages.moved[s, u])
                # of shared ones that must live for a use, another use may be gathered
                if lifetime != "use" or passages.gathered[s, u] or (shared and instead is not None):
                    again = microbatches * float(passages.again[s, u]) if lifetime == "use" else 0.0
                    found.append((s, lifetime, u, float(passages.seconds[s, u]) * paid, again, moved))
                elif instead is not None:
                    seconds = float(instead.seconds[s, u]) * (1 if once == "step" else microbatches)
                    found.append((s, once, u, seconds, 0.0, bool(instead.moved[s, u])))
    kept = _efficient_ways(found, costs, copies, wanted, savers, several=microbatches > 1)
    chosen = {found[i][:2] for i in kept}
    numbers: dict[tuple[int, str], int] = {}
    for row in found:
        if row[:2] in chosen:
            numbers.setdefault(row[:2], len(numbers))
    ways = []
    for s, lifetime, u, seconds, again, moved in found if shared else (found[i] for i in kept):
        if (s, lifetime) in chosen:
            lattice = known[lifetime].lattice
            arcs = known[lifetime].path(lattice.number[stored[s]], lattice.number[uses[u]])
            way = ParameterWay(
                option=numbers[s, lifetime],
                use=uses[u],
                steps=tuple(lattice.steps[a] for a in arcs),
                seconds=seconds,
                again=again,
                copy=int(copies[u]) if moved else 0,
                gradient=int(wanted[u]) if lifetime == "step" else 0,
            )
            ways.append(way)
    return ParameterSpace(
        options=tuple((stored[s], lifetime) for s, lifetime in numbers),
        seconds=tuple(float(costs.updates[s]) for s, _ in numbers),
        stored=tuple(int(costs.sizes[s]) for s, _ in numbers),
        casts=tuple(int(costs.casts[s]) for s, _ in numbers),
        states=tuple(int(costs.states[s]) for s, _ in numbers),
        ways=tuple(ways),
    )


def lives(lifetime: str, gathered: bool, several: bool, lived: frozenset[object]) -> bool:
    """Whether an option's lifetime is one of these as plans call them (`extract`), all of which what is never gathered
    for once a step honours."""
    if not gathered and (lifetime == "step" or not several):
        return True
    words = {"step": {"step"}, "use": {"use"}, "keep": {"microbatch"} if several else {"microbatch", "step"}}
    return bool(words[lifetime] & lived)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Passages:
    """`[storage, use]`: least as the distance that was minimised; seconds of one passage, those of gathers at its end
    (`regathered`), whether anything is gathered, and made at all."""

    least: Floats
    seconds: Floats
    again: Floats
    gathered: Mask
    moved: Mask


def _passages(distances: Distances, stored: Sequence[Layout], uses: Sequence[Layout], backward: Floats) -> _Passages:
    """Along the cheapest ways from every storage to every use, all walked back from their ends at once."""
    lattice = distances.lattice
    source = np.array([lattice.number[v] for v in stored])[:, None]
    now = np.broadcast_to(np.array([lattice.number[v] for v in uses]), (len(stored), len(uses)))
    least = distances.seconds[source, now]
    assert np.isfinite(least).all(), f"of {lattice.layouts} some storage leads to no use"
    value = lattice.forward + backward
    gather = np.array([step.forward == "all_gather" for step in lattice.steps], dtype=bool)
    makes = np.array([bool(step.forward) for step in lattice.steps], dtype=bool)
    seconds, again = np.zeros(now.shape), np.zeros(now.shape)
    gathered, moved, at_end = np.zeros(now.shape, bool), np.zeros(now.shape, bool), np.ones(now.shape, bool)
    while (under_way := now != source).any():
        arc = np.where(under_way, distances.last[source, now], 0)
        gathers, made = under_way & gather[arc], under_way & makes[arc]
        seconds += np.where(under_way, value[arc], 0.0)
        again += np.where(gathers & at_end, lattice.forward[arc], 0.0)
        at_end &= gathers | ~made
        gathered |= gathers
        moved |= made
        now = np.where(under_way, lattice.source[arc], now)
    return _Passages(least=least, seconds=seconds, again=again, gathered=gathered, moved=moved)


def _efficient_ways(
    found: Sequence[tuple[int, str, int, float, float, bool]],
    costs: _Storages,
    copies: Ints,
    wanted: Ints,
    savers: float,
    *,
    several: bool,
) -> list[int]:
    """Of each use the ways that no other beats in seconds of a step, persistent, kept and passing bytes at once."""
    if not found:
        return []
    updates, sizes, casts, states = costs
    storage, lifetime, use, seconds, again, moved = map(np.array, zip(*found, strict=True))
    for_step, for_use = lifetime == "step", lifetime == "use"
    copy = np.where(moved, copies[use], 0)
    gradient = sizes if several else np.where(casts > 0, casts, sizes)
    whole = wanted[use] + copy
    table = np.stack(
        [
            updates[storage] + seconds + again * savers,
            sizes[storage] + states[storage],
            sizes[storage],
            casts[storage] + np.where(for_step, whole, gradient[storage]),
            casts[storage] + np.where(for_step, whole, gradient[storage] + np.where(for_use, 0, copy)),
            casts[storage] + np.where(for_step, whole, gradient[storage] + copy),
        ],
        axis=1,
    )
    kept: list[int] = []
    for u in dict.fromkeys(use.tolist()):
        rows = np.flatnonzero(use == u)
        kept += rows[undominated(table[rows])].tolist()
    return kept


def held(
    space: ParameterSpace, names: tuple[str, ...], program: Program, moments: Moments
) -> list[tuple[Floats, Floats]]:
    """Bytes that each option holds whatever its use, and at which moments: storage, state, casts and gradients."""
    reading = [[p for p, _ in program.readers[name]] for name in names]
    trained = [row for name, row in zip(names, reading, strict=True) if program.tensors[name].requires_grad]
    last = [[p for p in row if program.ops[p].has_backward] for row in trained]
    trained = [row for row, found in zip(trained, last, strict=True) if found]
    always = moments.holding(reading)
    step, reduced = always * moments.in_step, moments.holding(trained) * moments.in_update
    gradient = moments.gradients([found for found in last if found], moments.count)
    stored = np.array(space.stored)
    for_step = np.array([lifetime == "step" for _, lifetime in space.options], dtype=bool)
    casts = np.array(space.casts)
    if casts.any() and not moments.several:  # gradients are cast after backward
        return [(stored + np.array(space.states), always), (casts, step + gradient - reduced), (stored, reduced)]
    return [
        *([(casts, step)] if casts.any() else []),
        (stored + np.array(space.states), always),
        (np.where(for_step, 0, stored), gradient),
        (np.where(for_step, stored, 0), reduced),
    ]
