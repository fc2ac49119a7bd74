"""How does a module under a plan run another call: other sizes, evaluation, what it returns? As the plan does its own.

Parameters lie where the plan stores them. An op that the plan's graph has too does what it does there, where its sizes
allow it; with gradients it is run again, and its result travels, as there. Any other takes what is cheapest after the
ops before it, its operands' redistribution included. Nothing is searched, so that a new call waits for its capture
alone; every call has such a plan.
"""

import itertools
from collections import Counter
from collections.abc import Mapping
from dataclasses import replace

from torch import fx

from autopar.lower.program import Op, Program, make_program
from autopar.search.costs.pricing import Pricer, make_pricer, total
from autopar.search.graph.options import axis_choices
from autopar.values.cluster import Cluster
from autopar.values.estimate import Estimate
from autopar.values.graph import CapturedModel, requires_grad, target_name
from autopar.values.placement import INVARIANT, REPLICATE, Layout, is_even
from autopar.values.redistribution import route
from autopar.values.stage_plan import StagePlan

WIDE = 64
"""Most combinations of axes' choices of one op that are all priced; of more, axis by axis."""


def following_plan(call: CapturedModel, plan: StagePlan, planned: CapturedModel, cluster: Cluster) -> StagePlan:
    """The plan of `call`, another graph of the model that `planned` is a graph of, under whose `plan` it lives."""
    program = make_program(call)
    walk = _Walk(
        program, make_pricer(mesh=plan.mesh, cluster=cluster, config=plan.config), _placed(call, plan, planned)
    )
    known = _by_place(planned)
    choices: dict[str, tuple[str, ...]] = {}
    alike: set[str] = set()
    for op, place in zip(program.ops, _by_place(call), strict=True):
        other = known.get(place)
        choices[op.name] = walk.decide(op, plan.choices.get(other) if other is not None else None)
        if other == op.name and choices[op.name] == plan.choices.get(other) and op.has_backward:
            alike.update((op.name, *(result for result in op.results if result is not None)))
    same_size = {name for name in alike if _shapes(call, name) == _shapes(planned, name)}
    names = {spec.placeholder for spec in call.parameters}
    parameters = {spec.placeholder for spec in call.parameters if spec.trainable}
    return replace(
        plan,
        model=call.name,
        fingerprint=call.fingerprint,
        choices=choices,
        layouts=walk.placed,
        lifetimes=_lifetimes(call, plan, planned),
        routes={name: paths for name, paths in plan.routes.items() if name in same_size | parameters},
        recompute=plan.recompute & alike,
        remade={name: layouts for name, layouts in plan.remade.items() if name in alike},
        microbatches=1,
        copies=1,
        buckets=plan.buckets if names == {spec.placeholder for spec in planned.parameters} else (),
        ways={name: way for name, way in plan.ways.items() if name in parameters},
        origin="following",
        estimate=Estimate(),
    )


def _shapes(captured: CapturedModel, name: str) -> tuple[tuple[int, ...], ...]:
    node = captured.nodes.get(name)
    value = () if node is None else node.meta["val"]
    return tuple(tuple(one.shape) for one in (value if isinstance(value, (tuple, list)) else (value,)))


def _by_place(captured: CapturedModel) -> dict[tuple[str, str, int], str]:
    """Names of calls by the module that makes them, their target and which such call of it they are."""
    seen: Counter[tuple[str, str]] = Counter()
    found = {}
    for node in captured.graph.nodes:
        if node.op == "call_function" and not _is_part(node):
            kind = (node.meta.get("module", ""), target_name(node.target))
            found[*kind, seen[kind]] = node.name
            seen[kind] += 1
    return found


def _is_part(node: fx.Node) -> bool:
    return target_name(node.target) == "getitem"


def _placed(call: CapturedModel, plan: StagePlan, planned: CapturedModel) -> dict[str, Layout]:
    """Where parameters, buffers, constants and inputs lie: as under the plan, evenly, else whole."""
    stored = {name: plan.layouts[spec.placeholder] for spec in planned.parameters for name in spec.names}
    whole = Layout((REPLICATE,) * plan.mesh.num_axes)
    out = {}
    for spec in call.parameters:
        layout = stored[spec.names[0]]
        out[spec.placeholder] = layout if spec.trainable else _without_gradient(layout)
    given = {s.path: (len(s.shape), _without_gradient(plan.layouts[s.placeholder])) for s in planned.inputs}
    for own in call.inputs:
        if requires_grad(call.nodes[own.placeholder]):  # its gradient is wanted whole
            out[own.placeholder] = Layout((INVARIANT,) * plan.mesh.num_axes)
            continue
        rank, layout = given.get(own.path, (0, whole))
        fits = rank == len(own.shape) and is_even(own.shape, layout, plan.mesh)
        out[own.placeholder] = layout if fits else whole
    others = (*(spec.placeholder for spec in call.buffers), *call.constants)
    return {**out, **dict.fromkeys(others, whole)}


def _without_gradient(layout: Layout) -> Layout:
    return replace(layout, axes=tuple(REPLICATE if p == INVARIANT else p for p in layout.axes))


def _lifetimes(call: CapturedModel, plan: StagePlan, planned: CapturedModel) -> Mapping[str, str]:
    own = {name: plan.lifetimes.get(spec.placeholder) for spec in planned.parameters for name in spec.names}
    found = {spec.placeholder: own[spec.names[0]] for spec in call.parameters}
    return {placeholder: lifetime for placeholder, lifetime in found.items() if lifetime is not None}


class _Walk:
    """Ops in order. made: the layouts in which each tensor is there already, the first as it was made."""

    def __init__(self, program: Program, pricer: Pricer, placed: dict[str, Layout]) -> None:
        self.program, self.pricer, self.placed = program, pricer, placed
        self.made = {name: [layout] for name, layout in placed.items()}

    def decide(self, op: Op, known: tuple[str, ...] | None) -> tuple[str, ...]:
        """The op's choices, those that are known where its sizes allow it."""
        if known is None or not set(known) <= set(op.choices) or not self.pricer.target.is_allowed(op, known):
            known = min(self._offered(op), key=lambda names: self._seconds(op, names))
        price = self.pricer.op(op, known)
        for name, layout in zip(op.operands, price.operands, strict=True):
            if layout not in self.made[name]:
                self.made[name].append(layout)
        for result, layout in zip(op.results, price.results, strict=True):
            if result is not None:
                self.made[result] = [layout]
        return known

    def _offered(self, op: Op) -> list[tuple[str, ...]]:
        axes = [axis_choices(op, axis, self.pricer, lambda *_: True) for axis in range(self.pricer.mesh.num_axes)]
        count = 1
        for own in axes:
            count *= len(own)
        if count <= WIDE:
            combined = itertools.product(*axes)
            return [names for names in combined if self.pricer.target.is_allowed(op, names)]
        best = ("invariant",) * len(axes)
        for axis, own in enumerate(axes):
            tried = [(*best[:axis], name, *best[axis + 1 :]) for name in own]
            best = min((t for t in tried if self.pricer.target.is_allowed(op, t)), key=lambda t: self._seconds(op, t))
        return [best]

    def _seconds(self, op: Op, names: tuple[str, ...]) -> float:
        """Of the op, and of bringing its operands to where it wants them."""
        price = self.pricer.op(op, names)
        seconds = price.seconds if op.has_backward else price.forward + total(price.forward_sent)
        for name, wanted in zip(op.operands, price.operands, strict=True):
            made = self.made[name]
            if wanted not in made:
                seconds += self._travel(name, made[0], wanted)
        return seconds

    def _travel(self, name: str, source: Layout, wanted: Layout) -> float:
        tensor, mesh = self.program.tensors[name], self.pricer.mesh
        seconds = 0.0
        for step in route(source, wanted, tensor.shape, tensor.element_size, mesh, tensor.requires_grad):
            forward, backward = self.pricer.step(step, tensor.shape, tensor.element_size, tensor.kind == "parameter")
            seconds += total(forward) + (total(backward) if tensor.requires_grad else 0.0)
        return seconds
