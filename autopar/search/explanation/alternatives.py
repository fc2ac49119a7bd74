"""Which other plans were near? The best plan without one thing that this plan does, or with one decision forbidden.

Each is solved in the same space less what is forbidden, under the same limit, so its bound is one for all plans of that
part. A technique is forbidden everywhere; a decision is what one kind of op, or of parameter, was given.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
from torch import fx

from autopar.errors import InfeasibleError, SearchTimeoutError
from autopar.lower.factor_words import factor_words
from autopar.lower.program import Op, Program, Tensor
from autopar.rules.words import WHOLE, Tags, dim_tags
from autopar.rules.words import describe as words
from autopar.search.costs.evaluate import evaluate_program
from autopar.search.costs.ledger import describe
from autopar.search.costs.pricing import Pricer
from autopar.search.exact.completion import within
from autopar.search.exact.ilp import solve
from autopar.search.find_exactly import TRIAL_GAP, make_problem
from autopar.search.graph.build import Builder, build
from autopar.search.graph.build_recompute import RecomputeBuilder
from autopar.search.graph.extract import extract
from autopar.search.graph.first_builder import first_builder
from autopar.search.graph.options import Restriction
from autopar.search.graph.problem import Problem
from autopar.search.timeline.buckets import bucketed
from autopar.values.explanation import Alternative
from autopar.values.gigabytes import least_gigabytes
from autopar.values.placement import Layout, Placement, Shard
from autopar.values.stage_plan import StagePlan

Question = tuple[str, Callable[[float], Alternative]]
"""What it is about, and its answer within so many seconds of solving."""


@dataclass(frozen=True, kw_only=True)
class Space:
    """Where alternatives are looked for: the plan's own mesh, micro-batches and limit; in buckets, if prices are."""

    plan: StagePlan
    program: Program
    pricer: Pricer
    limit: float
    relative_gap: float

    def techniques(self) -> Iterator[Question]:
        """The best plan without each thing that the plan does anywhere, or with what it does nowhere."""
        plan = self.plan
        gathered = {v for v in plan.lifetimes.values() if v != "always"}
        if gathered:
            without = "parameters stored as they are used, none gathered"
            yield self.restricted(without, Restriction(storage=self._as_used()))
        if "use" in gathered:
            without = "none gathered again for backward"
            yield self.restricted(without, Restriction(lifetimes=("step", "keep")))
        elif gathered:
            yield self.restricted("all gathered again for backward (ZeRO-3)", Restriction(lifetimes=("use",)))
        if not (plan.recompute or plan.remade):
            again = Restriction(recompute=lambda op: True)
            yield self.restricted("blocks run again from their input", again, RecomputeBuilder)
        elif self._first is Builder:  # else pins want something run again
            yield self.restricted("nothing run again in backward", Restriction(), Builder)
        meaning = self._meanings()
        trained = [op for op in self.program.ops if any(op.result_grads)]
        used = {meaning(op, name) for op in trained for name in plan.choices[op.name]} - {"", "whole", "summands"}
        for said in sorted(used):

            def allowed(op: Op, axis: int, name: str, said: str = said) -> bool:
                return meaning(op, name) != said

            yield self.restricted(f"nothing split by {said}", Restriction(choice=allowed))

    def _meanings(self) -> Callable[[Op, str], str]:
        named = factor_words(self.program)

        def meaning(op: Op, name: str) -> str:
            return "whole" if name in ("replicate", "invariant") else named[op.name].get(name, "summands")

        return meaning

    def _as_used(self) -> Callable[[Tensor, Layout], bool]:
        read: dict[tuple[str, int], set[Placement]] = {}

        def allowed(tensor: Tensor, storage: Layout) -> bool:
            for axis, placement in enumerate(storage.axes):
                if isinstance(placement, Shard):
                    key = tensor.name, axis
                    if key not in read:
                        readers = self.program.readers[tensor.name]
                        ops = [(self.program.ops[p], slot) for p, slot in readers]
                        read[key] = {op.choices[self.plan.choices[op.name][axis]].operands[s] for op, s in ops}
                    if placement not in read[key]:
                        return False
            return True

        return allowed

    def restricted(self, without: str, restriction: Restriction, builder: type[Builder] | None = None) -> Question:
        """The best plan in a part of the space, which is called by what is `without`."""

        def answer(seconds: float) -> Alternative:
            def problem() -> Problem:
                if builder is not None:
                    return build(self.program, self.pricer, limit=self.limit, restriction=restriction, builder=builder)
                return make_problem(self.program, self.pricer, self.limit, restriction=restriction, seconds=seconds)

            return self._solved(problem, without, lambda _: "", seconds)

        return without, answer

    def decisions(self, most: int) -> Iterator[Question]:
        """The best plan with another decision for each of the `most` dearest kinds of ops and largest of parameters."""
        problem = self._keeping
        tags = dim_tags(self.program.captured)
        spent = {node: self._node_seconds(problem, node) for node in problem.options}
        for node in sorted(spent, key=lambda n: -spent[n])[:most]:
            root = problem.clusters[node].root
            call = self.program.captured.nodes[root.name]
            chosen = self.plan.choices[root.name]

            def said(plan: StagePlan, call: fx.Node = call) -> str:
                return words_of(call, plan, tags)

            def is_banned(problem: Problem, node: int = node, chosen: tuple[str, ...] = chosen) -> list[bool]:
                return [option.names[-1] == chosen for option in problem.options[node]]

            label = f"{describe(self.program, root.name)}: {said(self.plan)}"
            yield label, self._forbidden(node, is_banned, label, said)
        stored = {
            node: sum(self.pricer.target.local_nbytes(self.program.tensors[n], self.plan.layouts[n]) for n in names)
            for node, (names, _) in problem.parameters.items()
        }
        for node in sorted(stored, key=lambda n: -stored[n])[: max(most // 2, 1)]:
            name = problem.parameters[node][0][0]
            lifetime = {"always": "step", "microbatch": "keep"}.get(
                self.plan.lifetimes[name], self.plan.lifetimes[name]
            )

            def said_of(plan: StagePlan, name: str = name) -> str:
                return stored_as(plan, name)

            lifetimes = {lifetime, "keep"} if lifetime == "step" else {lifetime}
            banned = {(self.plan.layouts[name], v) for v in lifetimes}

            def is_stored(problem: Problem, node: int = node, banned: set[tuple[Layout, str]] = banned) -> list[bool]:
                return [option in banned for option in problem.parameters[node][1].options]

            label = f"{describe(self.program, name)}: {stored_as(self.plan, name)}"
            yield label, self._forbidden(node, is_stored, label, said_of)

    @cached_property
    def _first(self) -> type[Builder]:
        return first_builder(self.program, self.pricer)

    @cached_property
    def _keeping(self) -> Problem:
        return build(self.program, self.pricer, limit=self.limit, builder=self._first)

    @cached_property
    def _recomputing(self) -> Problem:
        return build(self.program, self.pricer, limit=self.limit, builder=RecomputeBuilder)

    def _node_seconds(self, problem: Problem, node: int) -> float:
        """What the plan's ops of a cluster take, all instances."""
        positions = [p for instance in problem.clusters[node].instances for p in instance]
        ops = (self.program.ops[p] for p in positions)
        return sum(self.pricer.op(op, self.plan.choices[op.name]).seconds for op in ops)

    def _forbidden(
        self, node: int, is_banned: Callable[[Problem], list[bool]], without: str, said: Callable[[StagePlan], str]
    ) -> Callable[[float], Alternative]:
        """Without some options of a node; recompute is allowed where the fastest plan without them does not fit."""

        def less(problem: Problem) -> Problem:
            graph, banned = problem.graph, np.array(is_banned(problem))
            changed = replace(graph.nodes[node], seconds=np.where(banned, np.inf, graph.nodes[node].seconds))
            return replace(
                problem, graph=replace(graph, nodes=(*graph.nodes[:node], changed, *graph.nodes[node + 1 :]))
            )

        def answer(seconds: float) -> Alternative:
            if all(is_banned(self._keeping)):
                return Alternative(without=without, why_not="there is no other")

            def problem() -> Problem:
                keeping = less(self._keeping)
                fastest = solve(replace(keeping.graph, memory=None), relative_gap=TRIAL_GAP, seconds=seconds)
                fits = within(keeping.graph, fastest.choice, fastest.arcs)
                return keeping if fits else less(self._recomputing)

            return self._solved(problem, without, said, seconds)

        return answer

    def _solved(
        self, make: Callable[[], Problem], without: str, said: Callable[[StagePlan], str], seconds: float
    ) -> Alternative:
        try:
            problem = make()
            solution = solve(problem.graph, relative_gap=self.relative_gap, seconds=seconds)
        except InfeasibleError as error:
            least = error.least_nbytes
            needs = f"does not fit: needs {least_gigabytes(least)} GB a device" if least else str(error)
            return Alternative(without=without, why_not=needs)
        except SearchTimeoutError:
            return Alternative(without=without, why_not=f"no plan found in {seconds:.0f} s")
        plan = extract(problem, solution, self.pricer.cluster, self.pricer.config, "ilp")
        if self.pricer.in_buckets:
            plan = bucketed(plan, self.program, self.pricer.alone)
        plan = plan.with_estimate(evaluate_program(plan, self.program, self.pricer.alone))
        return Alternative(
            without=without,
            instead=said(plan),
            seconds=plan.estimate.step_seconds,
            bound=min(solution.bound, plan.estimate.in_turn_seconds),
            nbytes=plan.estimate.peak_nbytes,
            plan=plan,
        )


_GATHERED = {
    "always": "never gathered",
    "step": "gathered once a step",
    "microbatch": "gathered and kept to backward",
    "use": "gathered again for backward",
}


def words_of(node: fx.Node, plan: StagePlan, tags: Tags) -> str:
    """An op's choices: `split by batch on data, split by columns on model`."""
    how = [words(node, name, tags) for name in plan.choices[node.name]]
    if len(set(how)) == 1:
        return how[0]
    pairs = zip(how, plan.mesh.names, strict=True)
    return ", ".join(f"{text if text != WHOLE else 'whole'} on {axis}" for text, axis in pairs)


def stored_as(plan: StagePlan, name: str) -> str:
    """Where a parameter lies and how long a gathered copy lives: `(S0, I), gathered again for backward`."""
    return f"({plan.layouts[name]}), {_GATHERED[plan.lifetimes[name]]}"
