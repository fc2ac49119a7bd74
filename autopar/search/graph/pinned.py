"""Which part of the space do pins leave on a mesh? A restriction like those of baselines, which it narrows further.

Every strategy graph is built within it, and the double recursion chooses within it, so that whatever is searched
honours them: bounds, baselines, stages, plans near the best.
"""

import itertools
from collections.abc import Iterable
from dataclasses import replace
from functools import partial

from autopar.errors import ImpossiblePinError, InfeasibleError, PinError
from autopar.lower.factor_words import factor_words, word_of
from autopar.lower.pinned import Allowance, PinnedProgram, find_pinned
from autopar.lower.program import Op, Program, Tensor
from autopar.search.costs.pricing import Pricer
from autopar.search.costs.storages import input_layouts, storages
from autopar.search.graph.options import EVERYTHING, Allowed, Restriction, axis_choices
from autopar.search.graph.problem import Problem
from autopar.values.choices import near
from autopar.values.mesh import Mesh
from autopar.values.placement import Layout, Shard


def pinned(base: Restriction, program: Program, pricer: Pricer, decided_apart: Iterable[str] = ()) -> Restriction:
    """`base`, and what the pins of the pricer's configuration leave of it.

    decided_apart: names of ops.

    Raises:
        PinError: if a pin matches nothing, or speaks of no axis of the mesh.
        ImpossiblePinError: if a pinned op or parameter has no choice left on the mesh.
    """
    pins = pricer.config.pins
    if not pins:
        return base
    apart = frozenset(decided_apart)
    key = "within pins", pricer.mesh, pins, apart
    if base is EVERYTHING and key in program.made:
        known: Restriction = program.made[key]
        return known
    found = find_pinned(program, pins)
    check_possible(found, program, pricer)
    made = _narrowed(base, found, program, pricer.mesh, apart)
    if base is EVERYTHING:
        program.made[key] = made
    return made


def apart_ops(program: Program, pricer: Pricer) -> set[str]:
    """Ops that are decided by themselves, because some cluster has no option that honours all pins; it grows."""
    found: set[str] = program.form.setdefault(("apart", pricer.config.pins.texts, pricer.mesh.shape), set())
    return found


def _narrowed(
    base: Restriction, found: PinnedProgram, program: Program, mesh: Mesh, apart: frozenset[str]
) -> Restriction:
    def narrowed(allowed: Allowed) -> Allowed:
        def choice(op: Op, axis: int, name: str) -> bool:
            return allowed(op, axis, name) and all(
                name in one.allowed for one in found.choices.get(op.name, ()) if one.holds_on(mesh.names[axis])
            )

        return choice

    def storage(tensor: Tensor, layout: Layout) -> bool:
        is_whole = not any(isinstance(place, Shard) for place in layout.axes)
        if tensor.name in found.sharded and is_whole and _can_be_sharded(tensor, mesh):
            return False
        return base.storage(tensor, layout) and _lies(layout, found.storage.get(tensor.name, ()), mesh)

    lived = {name: frozenset.intersection(*(one.allowed for one in said)) for name, said in found.lifetimes.items()}
    return replace(
        base,
        choice=narrowed(base.choice),
        otherwise=None if base.otherwise is None else narrowed(base.otherwise),
        apart=base.apart | apart,
        storage=storage,
        together=partial(_holds, found) if found.somewhere else None,
        handed={
            name: tuple(v for v in input_layouts(program.tensors[name].shape, mesh) if _lies(v, said, mesh))
            for name, said in found.handed.items()
        },
        lived=lived,
        again=frozenset(found.again),
        keeps=frozenset(found.keeps),
    )


def _lies(layout: Layout, decisions: Iterable[Allowance], mesh: Mesh) -> bool:
    return all(
        placement in one.allowed
        for one in decisions
        for axis, size, placement in zip(mesh.names, mesh.shape, layout.axes, strict=True)
        if size > 1 and one.holds_on(axis)
    )


def _can_be_sharded(tensor: Tensor, mesh: Mesh) -> bool:
    return any(isinstance(place, Shard) for storage in _storages(tensor, mesh) for place in storage.axes)


def check_possible(found: PinnedProgram, program: Program, pricer: Pricer) -> None:
    """Raises PinError or ImpossiblePinError for the first pin that leaves an op or a parameter nothing on the mesh."""
    mesh, key = pricer.mesh, ("possible", pricer.mesh, pricer.config.pins)
    if key in program.made:
        return
    if unknown := sorted(pricer.config.pins.axes - set(mesh.names)):
        raise PinError(
            f"pins speak of axis {unknown[0]!r}, mesh {mesh} has {', '.join(mesh.names)}; name one of them, lifetime "
            f"or recompute{near(unknown[0], mesh.names)}"
        )
    ops = {op.name: op for op in program.ops}
    for name in dict.fromkeys((*found.choices, *found.somewhere)):
        if name in ops:
            _check_op(found, ops[name], program, pricer)
    called = _called_by_users(program)
    for table, layouts in ((found.storage, _storages), (found.handed, _input_layouts)):
        for name, decisions in table.items():
            tensor = program.tensors[name]
            every = layouts(tensor, mesh)
            if not any(_lies(layout, decisions, mesh) for layout in every):
                raise ImpossiblePinError(
                    f"{_said(found, decisions)}: {called.get(name, name)} {tensor.shape} cannot be stored so on mesh "
                    f"{mesh}; it can be {', '.join(dict.fromkeys(map(str, every)))[:200]}"
                )
    for name, decisions in found.lifetimes.items():
        if not frozenset.intersection(*(one.allowed for one in decisions)):
            raise PinError(
                f"{_said(found, decisions)} contradict each other about how long copies of {called[name]} live; leave "
                "one out"
            )
    program.made[key] = True


def check_run_again(problem: Problem) -> None:
    """Raises ImpossiblePinError for the first pin by which something runs again, where nothing that it matches can."""
    program, found = problem.program, find_pinned(problem.program, problem.pricer.config.pins)
    able = {
        program.ops[position].name
        for node, count in problem.num_kept.items()
        if found.again and count < len(problem.options[node])
        for positions in problem.clusters[node].instances
        for position in positions
    }
    if unable := {*found.again.values()} - {found.again[name] for name in able & found.again.keys()}:
        raise ImpossiblePinError(
            f"{found.said(min(unable))}: nothing that it matches can be run again in backward; what a block (a module "
            "with a number) makes for itself can"
        )


def homeless(name: str, program: Program, pricer: Pricer) -> InfeasibleError:
    """What is said where no storage and lifetime of a parameter is in the part of the space that is asked for."""
    called, pins = _called_by_users(program).get(name, name), pricer.config.pins
    if not pins:
        return InfeasibleError(f"{called} has no storage and lifetime in the part of the space that is asked for")
    found = find_pinned(program, pins)
    said = _said(found, (one for table in (found.storage, found.lifetimes) for one in table.get(name, ())))
    said = said or "what is asked for"
    return ImpossiblePinError(f"{said}: {called} cannot be stored and live so, as its readers use it; leave one out")


def _said(found: PinnedProgram, decisions: Iterable[Allowance]) -> str:
    """The lines that decide so, in words."""
    return " and ".join(map(found.said, dict.fromkeys(one.line for one in decisions)))


def _storages(tensor: Tensor, mesh: Mesh) -> Iterable[Layout]:
    return storages(tensor.shape, mesh, tensor.requires_grad, True)


def _input_layouts(tensor: Tensor, mesh: Mesh) -> Iterable[Layout]:
    return input_layouts(tensor.shape, mesh)


def _called_by_users(program: Program) -> dict[str, str]:
    return {spec.placeholder: spec.names[0] for spec in program.captured.parameters}


def _check_op(found: PinnedProgram, op: Op, program: Program, pricer: Pricer) -> None:
    mesh, decisions = pricer.mesh, found.choices.get(op.name, ())
    left: list[list[str]] = []
    for axis, size, index in zip(mesh.names, mesh.shape, range(mesh.num_axes), strict=True):
        own = [one for one in decisions if one.holds_on(axis)]
        names = frozenset.intersection(frozenset(op.choices), *(one.allowed for one in own))
        left.append(axis_choices(op, index, pricer, _among(names)))
        if size > 1 and own and not left[-1]:
            raise ImpossiblePinError(
                f"{_said(found, own)}: {_called(op)} cannot be decided so on {axis}, which has {size} ranks: "
                f"{_reason(op, own, size)}; it can be {_offers(op, index, program, pricer)}"
            )
    if not any(_holds(found, op, names) and pricer.target.is_allowed(op, names) for names in itertools.product(*left)):
        said = _said(found, (*decisions, *found.somewhere.get(op.name, ())))
        raise ImpossiblePinError(
            f"{said}: {_called(op)} cannot be decided so on all axes of mesh {mesh} at once; its sizes are "
            f"{_sizes(op, op.rule.factors)}"
        )


def _among(names: frozenset[object]) -> Allowed:
    return lambda op, axis, name: name in names


def _holds(found: PinnedProgram, op: Op, names: tuple[str, ...]) -> bool:
    return all(one.allowed & set(names) for one in found.somewhere.get(op.name, ()))


def _called(op: Op) -> str:
    return f"{op.name} ({op.module})" if op.module else op.name


def _sizes(op: Op, names: Iterable[str]) -> str:
    return ", ".join(f"{op.rule.factors[name].size} {name}" for name in names)


def _reason(op: Op, decisions: Iterable[Allowance], size: int) -> str:
    names = [name for name in op.rule.factors if all(name in one.allowed for one in decisions)]
    return f"{_sizes(op, names)} cannot be shared out over {size}" if names else "pins leave it no choice"


def _offers(op: Op, axis: int, program: Program, pricer: Pricer) -> str:
    words, offered = factor_words(program), axis_choices(op, axis, pricer, lambda *_: True)
    return ", ".join(dict.fromkeys(word_of(op, name, words) for name in offered))
