"""Is a plan one of this model? What its parts name is there, and every rank can have each tensor as the plan says.

A plan that the search made is; one that was read from a file is what somebody wrote. A layout that is none of its
tensor's leaves the loss right and gradients wrong, so nothing runs before this is asked.
"""

import itertools
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

from autopar.errors import PlanMismatchError
from autopar.lower.program import Program
from autopar.passes.recompute import check_recompute
from autopar.passes.weave_copies import check_copies
from autopar.rules.rule import is_splittable
from autopar.values.graph import CapturedModel
from autopar.values.lifetimes import LIFETIMES
from autopar.values.mesh import Mesh
from autopar.values.placement import PARTIAL, REPLICATE, Layout, divides, is_even
from autopar.values.redistribution import is_possible, step_between
from autopar.values.stage_plan import StagePlan

AGAIN = "plan again"


@dataclass(frozen=True, slots=True, kw_only=True)
class Held:
    """A tensor that ranks hold when a step begins.

    label: what its user calls it. kind: parameter, buffer, constant or input, or received, of the stage before, which
    sends it in any layout.
    """

    name: str
    label: str
    kind: str
    shape: tuple[int, ...]
    requires_grad: bool


def check_legal(program: Program, plan: StagePlan) -> None:
    """Raises PlanMismatchError if the plan is for another model, chooses what rules do not offer, or lays a tensor out
    as no rank can have it."""
    own = [tensor for tensor in program.tensors.values() if tensor.producer is None]
    received = program.captured.received
    labels = {spec.placeholder: spec.names[0] for spec in program.captured.parameters}
    held = [
        Held(
            name=tensor.name,
            label=labels.get(tensor.name, tensor.name),
            kind="received" if tensor.name in received else tensor.kind,
            shape=tensor.shape,
            requires_grad=tensor.requires_grad,
        )
        for tensor in own
    ]
    check_held(held, plan)
    _check_names("choices", plan.choices, {op.name for op in program.ops})
    check_recompute(program.captured, plan)
    check_copies(plan.copies, program.captured)
    _check_choices(program, plan)
    _check_paths(program, plan)


def check_held(held: Sequence[Held], plan: StagePlan) -> None:
    """Raises PlanMismatchError if ranks cannot hold these tensors as the plan says."""
    parameters = {tensor.name for tensor in held if tensor.kind == "parameter"}
    _check_names("layouts", plan.layouts, {tensor.name for tensor in held})
    _check_names("lifetimes", plan.lifetimes, parameters)
    for tensor in held:
        layout, mesh, shape = plan.layouts[tensor.name], plan.mesh, tensor.shape
        _check_layout(tensor.name, shape, layout, mesh)
        if tensor.kind == "parameter":
            check_storage(tensor.label, shape, layout, mesh, tensor.requires_grad)
        elif tensor.kind != "received" and (PARTIAL in layout.axes or not is_even(shape, layout, mesh)):
            raise PlanMismatchError(
                f"the plan holds {tensor.kind} {tensor.name} {shape} as {layout} on mesh {mesh}: each rank has the "
                f"whole of it, or an equal slice; {AGAIN}"
            )
    for name, lifetime in plan.lifetimes.items():
        if lifetime not in LIFETIMES:
            raise PlanMismatchError(f"the plan keeps {name} for {lifetime!r}, none of {', '.join(LIFETIMES)}; {AGAIN}")
    _check_buckets(plan, parameters)


def check_shared(stages: Sequence[CapturedModel], plans: Sequence[StagePlan]) -> None:
    """Raises PlanMismatchError if stages that share a weight store it differently: ranks could not sum gradients."""
    stored: dict[str, dict[str, int]] = {}
    for number, (stage, plan) in enumerate(zip(stages, plans, strict=True)):
        for spec in stage.parameters:
            if spec.placeholder in plan.layouts:
                stored.setdefault(spec.names[0], {}).setdefault(str(plan.layouts[spec.placeholder]), number)
    for name, layouts in stored.items():
        if len(layouts) > 1:
            said = ", ".join(f"{layout} in stage {number}" for layout, number in layouts.items())
            raise PlanMismatchError(
                f"stages share {name}, which the plan stores as {said}; a shared weight is stored alike everywhere; "
                f"{AGAIN}"
            )


def check_sent(stage: CapturedModel, sent: Mapping[str, Layout], mesh: Mesh) -> None:
    """Raises PlanMismatchError if the next stage cannot take what a stage sends as its plan says."""
    for name, layout in sent.items():
        _check_layout(name, tuple(stage.nodes[name].meta["val"].shape), layout, mesh)


def check_storage(name: str, shape: tuple[int, ...], layout: Layout, mesh: Mesh, trainable: bool) -> None:
    """Raises PlanMismatchError for storage that no DTensor can have."""
    if trainable and REPLICATE in layout.axes:
        raise PlanMismatchError(
            f"the plan stores {name} as {layout}: the gradient of a Replicate parameter is never summed over ranks; "
            "store it Invariant (I) or split, and use it as Replicate"
        )
    if PARTIAL in layout.axes:
        raise PlanMismatchError(f"the plan stores {name} as {layout}: a stored parameter is whole or split; {AGAIN}")
    nested = [dim for dim in layout.sharded_dims() if len(layout.axes_of(dim)) > 1]
    if not all(divides(shape, layout, mesh, dim) for dim in nested):
        raise PlanMismatchError(
            f"the plan stores {name} {shape} as {layout} on mesh {mesh}: a dim split by several axes must divide; "
            f"{AGAIN}"
        )


def _check_names(what: str, given: Collection[str], known: Collection[str]) -> None:
    missing, unknown = [n for n in known if n not in given], [n for n in given if n not in known]
    if missing or unknown:
        said = f"has no {what} of {_few(missing)}" if missing else f"has {what} of {_few(unknown)}, which are not here"
        raise PlanMismatchError(f"the plan {said}; {AGAIN}")


def _few(names: Iterable[str]) -> str:
    return ", ".join([*names][:3])


def _check_choices(program: Program, plan: StagePlan) -> None:
    for op in program.ops:
        names = plan.choices[op.name]
        if len(names) != plan.mesh.num_axes or not set(names) <= set(op.choices):
            raise PlanMismatchError(
                f"the plan chooses {names} for {op.name} on mesh {plan.mesh}, its rule offers {sorted(op.choices)}; "
                f"{AGAIN}"
            )
        if not is_splittable(op.rule, tuple(op.choices[name] for name in names), plan.mesh):
            raise PlanMismatchError(f"the plan splits {op.name} by {names}, which its sizes do not allow; {AGAIN}")


def _check_layout(name: str, shape: tuple[int, ...], layout: Layout, mesh: Mesh) -> None:
    if len(layout.axes) != mesh.num_axes or any(dim >= len(shape) for dim in layout.sharded_dims()):
        raise PlanMismatchError(
            f"the plan lays {name} {shape} out as {layout} on mesh {mesh}: it has no such dim or axis; {AGAIN}"
        )


def _check_buckets(plan: StagePlan, parameters: Collection[str]) -> None:
    bucketed = [name for names in plan.buckets for name in names]
    if unknown := [name for name in bucketed if name not in parameters]:
        raise PlanMismatchError(f"the plan has {_few(unknown)} in its buckets, which are no parameters here; {AGAIN}")
    if len(set(bucketed)) < len(bucketed):
        twice = [name for name in dict.fromkeys(bucketed) if bucketed.count(name) > 1]
        raise PlanMismatchError(f"the plan has {_few(twice)} in two buckets; {AGAIN}")


def _check_paths(program: Program, plan: StagePlan) -> None:
    """Of routes, ways and what is remade: steps that there are, of tensors that have these dims."""
    paths = [(name, path) for name, several in plan.routes.items() for path in several]
    paths += [(name, way.path) for name, way in plan.ways.items()]
    for name, path in [*paths, *((name, (layout,)) for name, layouts in plan.remade.items() for layout in layouts)]:
        tensor = program.tensors.get(name)
        if tensor is None:
            raise PlanMismatchError(
                f"the plan redistributes {name}, which {program.captured.name} does not have; {AGAIN}"
            )
        for layout in path:
            _check_layout(name, tensor.shape, layout, plan.mesh)
        for before, after in itertools.pairwise(path):
            if not is_possible(step_between(before, after), tensor.shape, plan.mesh):
                raise PlanMismatchError(
                    f"the plan sends {name} {tensor.shape} from {before} to {after}, whose parts are not equal; {AGAIN}"
                )
    for name, way in plan.ways.items():
        if program.tensors[name].kind != "parameter":
            raise PlanMismatchError(f"the plan has a way of {name}, which is no parameter here; {AGAIN}")
        try:
            way.steps(plan.mesh)
        except ValueError as error:
            raise PlanMismatchError(f"the plan's way of {name}: {error}; {AGAIN}") from error
