"""What does backward wait for, and from which moment? Kept or replayed values, and the ops and steps run again.

A *value* is a tensor in a layout that has storage of its own: views, and steps that compute nothing, lead back to it.
Some op's backward needs it because the op saves it; a replay needs what it reads. A value is kept from forward to its
last use, unless the plan recomputes its op (`recompute`) or redistributes it again (`remade`): then it lives
from the first backward that waits for it, directly or through other replays, when it is replayed, to its last use.
Positions stand for the backward of the op there; a replay of demand d runs at the beginning of the backward of op d.
"""

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field

from autopar.lower.program import Op, Program
from autopar.lower.redistributions import Redistributed
from autopar.lower.target import LocalOp, Target
from autopar.values.placement import Layout
from autopar.values.redistribution import Step
from autopar.values.stage_plan import StagePlan

Value = tuple[str, Layout]
"""A tensor in a layout."""


@dataclass(slots=True, kw_only=True)
class Recomputation:
    """uses[value]: positions at whose backward it is read, by the op that saves it or by replays (`savers` alone of
    the former). first[value]: where a replayed value is made. ops[position], steps[value]: where they run again."""

    uses: dict[Value, list[int]] = field(default_factory=lambda: defaultdict(list))
    savers: dict[Value, list[int]] = field(default_factory=lambda: defaultdict(list))
    first: dict[Value, int] = field(default_factory=dict)
    ops: dict[int, int] = field(default_factory=dict)
    steps: dict[Value, tuple[Step, int]] = field(default_factory=dict)


def root_of(
    program: Program,
    plan: StagePlan,
    target: Target,
    redistributed: dict[str, Redistributed],
    name: str,
    layout: Layout,
    copies: bool = False,
) -> Value:
    """The value whose storage a tensor in a layout is; `copies`: or was, before a view that copies."""
    while True:
        one = redistributed[name]
        while layout != one.source and not one.made[layout].forward:
            layout = one.made[layout].source
        view = program.aliases.get(name)
        if view is None or layout != one.source or (one.is_copy and not copies):
            return name, layout
        op = program.ops[view[0]]
        name, layout = op.operands[view[1]], target.op(op, plan.choices[op.name]).operands[view[1]]


VALUES = 2
"""Operand of attention: what is added up by its weights."""


def saved_of(op: Op, local: LocalOp, target: Target, redistributed: Mapping[str, Redistributed]) -> list[Value]:
    """Operands and results of an op that autograd keeps themselves.

    Products of attention keep copies, but for values that are contiguous.
    """
    slots, results = target.saves(op)
    if target.are_products(op):
        one = redistributed[op.operands[VALUES]]
        is_kept = one.is_contiguous or one.is_laid_anew(local.operands[VALUES])
        slots = (VALUES,) if is_kept else ()
    kept = [(op.operands[i], local.operands[i]) for i in slots]
    return kept + [(r, local.results[i]) for i in results if (r := op.results[i]) is not None]


def find_recomputation(
    plan: StagePlan, program: Program, target: Target, redistributed: dict[str, Redistributed]
) -> Recomputation:
    """What the backward pass of a plan waits for."""
    return _Search(plan, program, target, redistributed).run()


class _Search:
    def __init__(
        self, plan: StagePlan, program: Program, target: Target, redistributed: dict[str, Redistributed]
    ) -> None:
        self.plan, self.program, self.target, self.redistributed = plan, program, target, redistributed
        self.found = Recomputation()
        self.demand: dict[Value, int] = {}

    def run(self) -> Recomputation:
        found = self.found
        for op in self.program.ops:
            if op.has_backward:
                price = self.target.op(op, self.plan.choices[op.name])
                for saved, layout in saved_of(op, price, self.target, self.redistributed):
                    value = self.value(saved, layout)
                    found.savers[value].append(op.position)
                    self._wait(value, op.position)
        for op in reversed(self.program.ops):
            for name in op.results:
                if name is not None:
                    self._copies(name)
            self._replay(op.position)
        return found

    def value(self, name: str, layout: Layout) -> Value:
        return root_of(self.program, self.plan, self.target, self.redistributed, name, layout)

    def _wait(self, value: Value, position: int) -> None:
        self.found.uses[value].append(position)
        self.demand[value] = max(position, self.demand.get(value, -1))

    def _copies(self, name: str) -> None:
        one = self.redistributed[name]
        again = self.plan.remade.get(name, ()) if one.tensor.requires_grad else ()
        for layout, step in reversed(one.made.items()):
            position = self.demand.get((name, layout))
            if position is not None and layout in again and step.forward:
                self.found.first[name, layout] = position
                self.found.steps[name, layout] = (step, position)
                self._wait(self.value(name, step.source), position)

    def _is_chosen(self, op: Op) -> bool:
        """Whether the plan has an op run again; a view that copies is, where what it views is."""
        if op.rule.alias is None:
            return op.name in self.plan.recompute and any(op.result_grads)
        (result,) = op.results[:1]
        if result is None or not self.redistributed[result].is_copy:
            return False
        name, layout = root_of(
            self.program,
            self.plan,
            self.target,
            self.redistributed,
            result,
            self.redistributed[result].source,
            copies=True,
        )
        tensor = self.redistributed[name].tensor
        if layout != self.redistributed[name].source:
            return tensor.requires_grad and layout in self.plan.remade.get(name, ())
        return tensor.producer is not None and self._is_chosen(self.program.ops[tensor.producer])

    def _replay(self, number: int) -> None:
        op = self.program.ops[number]
        if not self._is_chosen(op):
            return
        price = self.target.op(op, self.plan.choices[op.name])
        made = [(n, price.results[i]) for i, n in enumerate(op.results) if n is not None]
        waited = [self.demand[v] for v in made if v in self.demand]
        if op.has_backward and (op.rule.saves_results or op.rule.saves_nbytes):
            waited.append(number)
        if not waited:
            return
        position = self.found.ops[number] = max(waited)
        self.found.first.update((v, position) for v in made if v in self.demand)
        for name, layout in zip(op.operands, price.operands, strict=True):
            self._wait(self.value(name, layout), position)
