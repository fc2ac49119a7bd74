"""What would the recipes used today cost here? Each baseline is the best plan of a restricted space.

No baseline matches names of parameters: a restriction says which factors may be split on which axis (`search.words`)
and how parameters may be stored. The same program solves it, so a baseline is the best of its kind.

    ddp        every axis splits the batch; parameters whole on every rank
    fsdp       every axis splits the batch; parameters sharded wherever a dim divides, gathered for each use (ZeRO-3)
    megatron   the last axis splits linears by columns or rows, attention by heads, the embedding by vocabulary, what is
               between by sequence or not at all; the other axes split the batch; parameters whole on these
    ulysses    the last axis splits by sequence, attention by heads; the other axes the batch; parameters as in fsdp
"""

from collections.abc import Callable

from autopar.cluster import Cluster
from autopar.errors import ArgumentError, InfeasibleError
from autopar.graph import CapturedModel, target_name
from autopar.mesh import Mesh
from autopar.placement import Layout, Shard
from autopar.plan import Plan, TrainConfig
from autopar.search.build import build
from autopar.search.evaluate import evaluate_program
from autopar.search.extract import extract
from autopar.search.ilp import solve
from autopar.search.options import Allowed, Restriction
from autopar.search.pricing import Pricer
from autopar.search.program import Op, Program, Tensor, make_program
from autopar.search.storages import storages
from autopar.search.words import dim_tags, factor_tags

BASELINES = ("ddp", "fsdp", "megatron", "ulysses")

GAP = 1e-3

Meaning = Callable[[Op, str], str]
"""(op, choice) -> what people call the factor that it splits, or `whole`, or `summands`."""


def make_baseline(name: str, captured: CapturedModel, cluster: Cluster, mesh: Mesh, config: TrainConfig) -> Plan:
    """The best plan of a named kind, with its estimate.

    Raises:
        ArgumentError: for an unknown name.
        InfeasibleError: if the kind does not apply to this model and mesh, or does not fit the memory.
    """
    program = make_program(captured)
    return baseline_plan(
        name, program, Pricer(mesh=mesh, cluster=cluster, config=config), memory_limit(cluster, config)
    )


def memory_limit(cluster: Cluster, config: TrainConfig) -> float:
    """Bytes a device that a plan may use."""
    return cluster.device.memory_bytes if config.memory_nbytes is None else config.memory_nbytes


def baseline_plan(name: str, program: Program, pricer: Pricer, limit: float | None) -> Plan:
    """`make_baseline` for a program and prices at hand; `limit` bytes a device, None for unlimited."""
    if name not in BASELINES:
        raise ArgumentError(f"baseline {name!r} is none of {', '.join(BASELINES)}")
    if pricer.mesh.size == 1:
        raise InfeasibleError(f"{name} does not apply: the mesh has one rank")
    unknown = sorted({target_name(op.node.target) for op in program.ops if _is_trained(op) and not op.rule.known})
    if unknown:
        raise InfeasibleError(
            f"{name} does not apply: {', '.join(unknown)} has no sharding rule and runs whole on every rank, which no "
            "recipe of that name does"
        )
    restriction = _restriction(name, program, pricer)
    problem = build(program, pricer, limit=limit, restriction=restriction)
    solution = solve(problem.graph, relative_gap=GAP)
    plan = extract(problem, solution, pricer.cluster, pricer.config, name)
    return plan.with_estimate(evaluate_program(plan, program, pricer))


def _restriction(name: str, program: Program, pricer: Pricer) -> Restriction:
    mesh = pricer.mesh
    meaning = _meanings(program)
    last = mesh.num_axes - 1
    batch = _batch_only(program, meaning, pricer)
    if name in ("ddp", "fsdp"):
        _check_batch(name, program, meaning, mesh, tuple(range(mesh.num_axes)))
        storage = _whole_storage if name == "ddp" else _sharded_storage(mesh, tuple(range(mesh.num_axes)))
        return Restriction(choice=batch, storage=storage, lifetimes=("step", "keep") if name == "ddp" else ("use",))
    tensor = _megatron(meaning) if name == "megatron" else _ulysses(meaning)
    _check_parts(name, program, meaning, mesh.shape[last])
    _check_batch(name, program, meaning, mesh, tuple(range(last)))

    def choice(op: Op, axis: int, option: str) -> bool:
        return tensor(op, axis, option) if axis == last else batch(op, axis, option)

    if name == "megatron":
        return Restriction(
            choice=choice, storage=lambda t, s: _whole_storage(t, s, except_axis=last), lifetimes=("step", "keep")
        )
    return Restriction(choice=choice, storage=_sharded_storage(mesh, tuple(range(mesh.num_axes))), lifetimes=("use",))


def _meanings(program: Program) -> Meaning:
    tags = dim_tags(program.captured)
    named = {op.name: factor_tags(op.node, op.rule, tags) for op in program.ops}

    def meaning(op: Op, option: str) -> str:
        if option in ("replicate", "invariant"):
            return "whole"
        return named[op.name].get(option, "summands") or option

    return meaning


def _is_trained(op: Op) -> bool:
    return any(op.result_grads)


def _batch_only(program: Program, meaning: Meaning, pricer: Pricer) -> Allowed:
    """Ops that have a batch split it; others do not split at all."""

    def allowed(op: Op, axis: int, option: str) -> bool:
        said = meaning(op, option)
        if any(meaning(op, o) == "batch" for o in op.rule.factors):
            return said == "batch"
        return said == "whole" or (not _is_trained(op) and said == "summands")

    return allowed


def _megatron(meaning: Meaning) -> Allowed:
    def allowed(op: Op, axis: int, option: str) -> bool:
        said = meaning(op, option)
        offered = {meaning(op, o) for o in op.rule.factors}
        if not _is_trained(op):
            return True
        if {"columns", "rows"} <= offered and 1 in op.parameters:
            return said in ("columns", "rows")
        if _is_attention(op):
            return said == "heads"
        if "hidden" in offered and "vocabulary" in offered:
            return said in ("vocabulary", "whole")
        return said != "batch"

    return allowed


def _ulysses(meaning: Meaning) -> Allowed:
    def allowed(op: Op, axis: int, option: str) -> bool:
        said = meaning(op, option)
        if not _is_trained(op):
            return True
        if _is_attention(op):
            return said == "heads"
        offered = {meaning(op, o) for o in op.rule.factors}
        if {"columns", "rows"} <= offered:
            return said == ("sequence" if "sequence" in offered else "whole")
        return said in ("sequence", "whole") if op.parameters else said != "batch"

    return allowed


def _is_attention(op: Op) -> bool:
    return {"batch", "heads", "query"} <= set(op.rule.factors)


def _whole_storage(tensor: Tensor, storage: Layout, except_axis: int | None = None) -> bool:
    return not any(isinstance(p, Shard) and a != except_axis for a, p in enumerate(storage.axes))


def _sharded_storage(mesh: Mesh, axes: tuple[int, ...]) -> Callable[[Tensor, Layout], bool]:
    """Shards on as many of `axes` as the tensor allows."""

    def allowed(tensor: Tensor, storage: Layout) -> bool:
        most = max(
            sum(isinstance(s.axes[a], Shard) for a in axes)
            for s in storages(tensor.shape, mesh, tensor.requires_grad, True)
        )
        return sum(isinstance(storage.axes[a], Shard) for a in axes) == most

    return allowed


def _check_batch(name: str, program: Program, meaning: Meaning, mesh: Mesh, axes: tuple[int, ...]) -> None:
    n = 1
    for axis in axes:
        n *= mesh.shape[axis]
    for spec in program.captured.inputs:
        if spec.shape and spec.shape[0] % n:
            low = spec.shape[0] // n * n
            remedy = f"use {low} or {low + n}" if low else f"use {n}"
            raise InfeasibleError(
                f"{name} does not apply: global batch {spec.shape[0]} is not divisible by {n} data-parallel ranks; "
                f"{remedy}"
            )


def _check_parts(name: str, program: Program, meaning: Meaning, parts: int) -> None:
    """The last axis must divide what the kind splits."""
    attention = [op for op in program.ops if _is_attention(op)]
    if not attention:
        raise InfeasibleError(f"{name} does not apply: the model has no attention whose heads could be split")
    for op in attention:
        heads = op.rule.factors["heads"].size
        if heads % parts:
            raise InfeasibleError(
                f"{name} does not apply: {heads} (key/value) heads of {op.name} are not divisible by {parts} ranks of "
                "the last axis; make that axis smaller"
            )
