"""What do two plans of one model decide differently, and what does each take? Equal blocks are one line.

Mesh, stages, micro-batches and machine may differ: choices are compared in the words of each plan's own axes, op by op,
then parameters, inputs, what is run again in backward, tensors that are sent another way than usual, and the stage of
each block. A plan in stages counts collectives as forward and backward, so beside one without only work and bubble
are compared.
"""

from collections.abc import Mapping

from autopar.errors import PlanMismatchError
from autopar.lower.program import Op, Program, make_program
from autopar.passes.split_stages import split_stages
from autopar.rules.rule import layouts
from autopar.rules.words import dim_tags
from autopar.search.costs.ledger import describe
from autopar.search.explanation.alternatives import stored_as, words_of
from autopar.values.blocks import block_of, kind_of
from autopar.values.difference import PlanChange, PlanDifference
from autopar.values.graph import CapturedModel
from autopar.values.plan import Plan
from autopar.values.stage_plan import StagePlan


def compare(left: Plan, right: Plan, left_graph: CapturedModel, right_graph: CapturedModel) -> PlanDifference:
    """The difference of two plans, each with the graph that it is for.

    Raises:
        PlanMismatchError: if the plans are for different models.
    """
    left.check(left_graph)
    right.check(right_graph)
    _check_model(left_graph, right_graph)
    one, other = _decisions(left, left_graph), _decisions(right, right_graph)
    counted: dict[tuple[str, str, str, str], int] = {}
    for key in dict.fromkeys((*one, *other)):
        kind, what, _ = key
        a, b = one.get(key, _absent(kind)), other.get(key, _absent(kind))
        if a != b:
            counted[kind, what, a, b] = counted.get((kind, what, a, b), 0) + 1
    changes = (PlanChange(kind=k, what=w, count=n, left=a, right=b) for (k, w, a, b), n in counted.items())
    return PlanDifference(
        model=left.model,
        facts={name: (a, b) for name, (a, b) in _facts(left, right).items() if a != b},
        changes=tuple(changes),
        seconds=_pairs(*_seconds(left, right)),
        nbytes=_pairs(left.estimate.memory, right.estimate.memory),
    )


def _check_model(left: CapturedModel, right: CapturedModel) -> None:
    one, other = ({p.names[0]: tuple(p.shape) for p in graph.parameters} for graph in (left, right))
    if one == other:
        return
    name = next((n for n in (*one, *other) if one.get(n) != other.get(n)), "")
    raise PlanMismatchError(
        f"the plans are for different models, {left.name} and {right.name}: parameter {name} is "
        f"{one.get(name, 'missing')} in the first and {other.get(name, 'missing')} in the second; compare plans of one"
    )


def _absent(kind: str) -> str:
    return {
        "stage": "not cut",
        "recompute": "kept",
        "way": "as usual",
        "way in a bucket": "as alone",
        "sent again": "kept",
    }.get(kind, "not there")


def _seconds(left: Plan, right: Plan) -> tuple[Mapping[str, float], Mapping[str, float]]:
    """Of a step by kind, in kinds that both plans have."""
    one, other = left.estimate.seconds, right.estimate.seconds
    if (left.num_stages > 1) == (right.num_stages > 1):
        return one, other
    bubbles = one.get("bubble", 0.0), other.get("bubble", 0.0)
    totals = left.estimate.step_seconds, right.estimate.step_seconds
    first, second = ({"work": t - b, "bubble": b} for t, b in zip(totals, bubbles, strict=True))
    return first, second


def _decisions(plan: Plan, graph: CapturedModel) -> dict[tuple[str, str, str], str]:
    """Those of all its stages, and of several the stage of each block."""
    out: dict[tuple[str, str, str], str] = {}
    for number, stage in enumerate(split_stages(graph, plan.cuts)):
        program, where = make_program(stage), f"stage {number} of {plan.num_stages}"
        for key, said in _decided(plan.stages[number], program).items():
            if key[2] in stage.received:
                continue
            if out.setdefault(key, said) != said:
                out[key] = f"{out[key]}; in stage {number} {said}"
        for op in program.ops if plan.num_stages > 1 else ():
            if block := block_of(op.module):
                out.setdefault(("stage", kind_of(block), block), where)
    return out


def _decided(plan: StagePlan, program: Program) -> dict[tuple[str, str, str], str]:
    """(kind, what equal blocks share, the thing) -> what was decided of it, in words."""
    tags, nodes = dim_tags(program.captured), program.captured.nodes
    out: dict[tuple[str, str, str], str] = {}
    for op in program.ops:
        what = describe(program, op.name)
        how = words_of(nodes[op.name], plan, tags)
        out["op", what, op.name] = f"{how} {_given(op, plan)}"
        if op.name in plan.recompute:
            out["recompute", what, op.name] = "run again"
    for name, tensor in program.tensors.items():
        what = describe(program, name)
        if tensor.kind == "parameter":
            out["parameter", what, name] = stored_as(plan, name)
        elif tensor.producer is None:
            out["input", what, name] = f"({plan.layouts[name]})"
        if name in plan.routes:
            ways = ("→".join(f"({layout})" for layout in path) for path in plan.routes[name])
            out["way", what, name] = "; ".join(ways)
        if name in plan.ways:
            inside = f" in levels, {', '.join(plan.ways[name].inside)} first" if plan.ways[name].inside else ""
            out["way in a bucket", what, name] = "→".join(f"({v})" for v in plan.ways[name].path) + inside
        if name in plan.remade:
            out["sent again", what, name] = ", ".join(f"({layout})" for layout in plan.remade[name])
    return out


def _given(op: Op, plan: StagePlan) -> str:
    """Layouts of the op's results."""
    chosen = tuple(op.choices[name] for name in plan.choices[op.name])
    given = layouts(chosen, op.operand_grads, op.result_grads)[1]
    return f"({'; '.join(dict.fromkeys(map(str, given)))})"


def _facts(left: Plan, right: Plan) -> dict[str, tuple[str, str]]:
    def pipeline(plan: Plan) -> str:
        if plan.num_stages == 1:
            return "none"
        return f"{plan.num_stages} stages on {plan.pipeline} ranks, {plan.schedule}"

    def limit(plan: Plan) -> str:
        own = plan.config.memory_nbytes
        return "what the device has" if own is None else f"{own / 1e9:.4g} GB"

    return {
        "cluster": (left.cluster, right.cluster),
        "mesh": (str(left.mesh), str(right.mesh)),
        "pipeline": (pipeline(left), pipeline(right)),
        "micro-batches": (str(left.microbatches), str(right.microbatches)),
        "optimizer": (left.config.optimizer, right.config.optimizer),
        "precision": (left.config.dtypes, right.config.dtypes),
        "pins": ("; ".join(left.config.pins.texts), "; ".join(right.config.pins.texts)),
        "memory limit": (limit(left), limit(right)),
        "buckets": (_buckets(left), _buckets(right)),
        "shapes": (left.fingerprint, right.fingerprint) if left.microbatches == right.microbatches else ("", ""),
    }


def _buckets(plan: Plan) -> str:
    count = sum(len(stage.buckets) for stage in plan.stages)
    return f"{count}{', gathers begin early' if any(stage.prefetch for stage in plan.stages) else ''}"


def _pairs(left: Mapping[str, float], right: Mapping[str, float]) -> dict[str, tuple[float, float]]:
    pairs = {kind: (left.get(kind, 0.0), right.get(kind, 0.0)) for kind in dict.fromkeys((*left, *right))}
    return {kind: pair for kind, pair in pairs.items() if any(pair)}
