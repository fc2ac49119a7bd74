"""How may one kind of parameter be stored and brought to its uses? Its options and arcs, dominated ones left out.

An option is (storage, lifetime): `keep`, the copy in use lives to its backward; `use`, gathered again by every op that
saves it; with several micro-batches also `step`, the copy and the sum of gradients live in the layout in use for the
whole step and are paid for once (without, `keep` is that too). For each layout in use those options are kept that no
other beats in seconds of a step, persistent, kept and passing bytes at once. Copies for different uses of one tied
parameter are priced as if each came from storage by itself, so that for these a plan may cost less than its graph says.
"""

from dataclasses import dataclass

import numpy as np

from autopar.placement import Layout
from autopar.redistribution import Step
from autopar.search.costs.live import regathered
from autopar.search.costs.pricing import Pricer, total
from autopar.search.costs.program import Program, Tensor
from autopar.search.costs.storages import storages
from autopar.search.graph.lattice import Distances, Lattices, cheapest_ways
from autopar.search.graph.moments import Moments
from autopar.search.graph.options import Restriction
from autopar.search.graph.strategy_graph import Floats


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Way:
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
    ways: tuple[Way, ...]


def parameter_space(
    tensor: Tensor,
    uses: tuple[Layout, ...],
    savers: int,
    in_backward: bool,
    shared: bool,
    regatherable: bool,
    lattices: Lattices,
    restriction: Restriction,
    microbatches: float,
    limited: bool = True,
) -> ParameterSpace:
    """The options of a parameter used in `uses`; each copy is gathered again `savers` times if it lives for a use.

    `limited`: bytes count; else only the cheapest in seconds are kept, for every use one (of a `shared` one, all).

    `shared`: several readers may want different copies, so an option kept for one of them is kept for all.
    `regatherable`: no view of it leaves a cluster (whose readers would gather it again); else its copies are kept.
    """
    pricer = lattices.pricer
    once = "step" if microbatches > 1 else "keep"
    lifetimes = tuple(v for v in restriction.lifetimes if v != "step" or microbatches > 1)
    lifetimes = lifetimes if regatherable else tuple(v for v in lifetimes if v != "use") or (once,)
    trained = in_backward and tensor.requires_grad
    stored = [
        s for s in storages(tensor.shape, pricer.mesh, tensor.requires_grad, True) if restriction.storage(tensor, s)
    ]
    axes = tuple(frozenset(v.axes[a] for v in (*stored, *uses)) for a in range(pricer.mesh.num_axes))
    lattice = lattices.of(tensor.shape, tensor.element_size, tensor.requires_grad, axes, True)
    back = lattice.backward if trained else np.zeros_like(lattice.backward)
    if not limited and once in lifetimes:
        lifetimes = (once,)  # a copy kept longest is made least often
    ways: list[tuple[tuple[Layout, str], Way]] = []
    numbers: dict[tuple[Layout, str], int] = {}
    updates = {s: pricer.optimizer_seconds(tensor, s) if tensor.requires_grad else 0.0 for s in stored}
    sizes = {s: pricer.stored_nbytes(tensor, s) for s in stored}
    casts = {s: pricer.cast_nbytes(tensor, s) for s in stored}
    gradients = sizes if microbatches > 1 else {s: casts[s] or sizes[s] for s in stored}
    states = {s: pricer.state_nbytes(tensor, s) if tensor.requires_grad else 0 for s in stored}
    for lifetime in lifetimes:
        times = savers if lifetime == "use" else 0
        distances = cheapest_ways(lattice, lattice.forward * (1 + times) + back)
        paid = 1 if lifetime == "step" else microbatches
        for use in uses:
            found = []
            for storage in stored if limited or shared else _cheapest(stored, use, updates, distances, paid):
                way = _way(tensor, storage, use, lifetime, distances, back, pricer, microbatches, trained)
                if way is not None:
                    found.append(((storage, lifetime), way))
                elif once not in lifetimes:
                    way = _way(tensor, storage, use, once, distances, back, pricer, microbatches, trained)
                    assert way is not None
                    found.append(((storage, once), way))
            ways += found
    kept: list[tuple[tuple[Layout, str], Way]] = []
    rows_of: dict[Layout, list[tuple[tuple[Layout, str], Way]]] = {use: [] for use in uses}
    for option, way in ways:
        rows_of[way.use].append((option, way))
    for rows in rows_of.values():
        table = np.array(
            [
                (
                    updates[o[0]] + w.seconds + w.again * savers,
                    sizes[o[0]] + states[o[0]],
                    sizes[o[0]],
                    casts[o[0]] + (w.gradient + w.copy if o[1] == "step" else gradients[o[0]]),
                    casts[o[0]]
                    + (w.gradient + w.copy if o[1] == "step" else gradients[o[0]] + (w.copy if o[1] == "keep" else 0)),
                    casts[o[0]] + (w.gradient + w.copy if o[1] == "step" else gradients[o[0]] + w.copy),
                )
                for o, w in rows
            ]
        )
        kept += [rows[i] for i in _efficient(table)]
    chosen = {option for option, _ in kept}
    for option in (o for o, _ in ways if o in chosen):
        if option in numbers:
            continue
        numbers[option] = len(numbers)
    final = [(o, w) for o, w in ways if o in chosen] if shared else kept
    return ParameterSpace(
        options=tuple(numbers),
        seconds=tuple(updates[s] for s, _ in numbers),
        stored=tuple(sizes[s] for s, _ in numbers),
        casts=tuple(casts[s] for s, _ in numbers),
        states=tuple(states[s] for s, _ in numbers),
        ways=tuple(
            Way(
                option=numbers[o],
                use=w.use,
                steps=w.steps,
                seconds=w.seconds,
                again=w.again,
                copy=w.copy,
                gradient=w.gradient,
            )
            for o, w in final
        ),
    )


def held(
    space: ParameterSpace, names: tuple[str, ...], program: Program, moments: Moments
) -> list[tuple[Floats, Floats]]:
    """Bytes that each option holds whatever its use, and at which moments: storage, state, casts and gradients."""
    always, step, gradient, reduced = (moments.nothing() for _ in range(4))
    for name in names:
        reading = [p for p, _ in program.readers[name]]
        weight = moments.weight(*reading) if reading else 1.0
        always += weight
        step[moments.step()] += weight
        last = [p for p in reading if program.ops[p].has_backward]
        if program.tensors[name].requires_grad and last:
            gradient[moments.gradient(max(last))] += weight
            reduced[moments.update()] += weight
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


def _cheapest(
    stored: list[Layout], use: Layout, updates: dict[Layout, float], distances: Distances, paid: float
) -> list[Layout]:
    """The storage whose way to `use`, paid so often, and optimizer's step take least."""
    number = distances.lattice.number
    return [min(stored, key=lambda s: updates[s] + paid * distances.seconds[number[s], number[use]])]


def _way(
    tensor: Tensor,
    storage: Layout,
    use: Layout,
    lifetime: str,
    distances: Distances,
    backward: Floats,
    pricer: Pricer,
    microbatches: float,
    trained: bool,
) -> Way | None:
    lattice = distances.lattice
    arcs = distances.path(lattice.number[storage], lattice.number[use])
    steps = tuple(lattice.steps[a] for a in arcs)
    gathered = any(step.forward == "all_gather" for step in steps)
    if lifetime == "use" and not gathered:
        return None
    again = 0.0
    if lifetime == "use":
        again = microbatches * sum(
            total(pricer.step(s, tensor.shape, tensor.element_size, True)[0]) for s in regathered(list(steps))
        )
    times = 1 if lifetime == "step" else microbatches
    nbytes = pricer.local_nbytes(tensor, use)
    return Way(
        option=-1,
        use=use,
        steps=steps,
        seconds=float(lattice.forward[arcs].sum() + backward[arcs].sum()) * times if arcs else 0.0,
        again=again,
        copy=nbytes if any(s.forward for s in steps) else 0,
        gradient=pricer.stored_nbytes(tensor, use) if lifetime == "step" and trained else 0,
    )


def _efficient(table: Floats) -> list[int]:
    """Rows that no other row beats or equals in every column, the first of equal ones."""
    order = np.lexsort(table.T[::-1])
    kept: list[int] = []
    for i in order:
        if not any((table[k] <= table[i] + 1e-15).all() for k in kept):
            kept.append(int(i))
    return sorted(kept)
