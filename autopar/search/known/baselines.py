"""What would the recipes used today cost here? Each baseline is the best plan of a restricted space.

No baseline matches names of parameters: a restriction says which factors may be split on which axis (`search.words`)
and how parameters may be stored. The same program solves it, so a baseline is the best of its kind.

    ddp        every axis splits the batch; parameters whole on every rank. What mixes samples (`sample_factors`) runs
               whole, gathered before and split again after; what reads no parameter may stay whole from there on
    fsdp       every axis splits the batch; parameters sharded wherever a dim divides, gathered for each use (ZeRO-3)
    megatron   the last axis splits linears by columns or rows, attention by heads, the embedding by vocabulary, what is
               between by sequence or not at all; the other axes split the batch; parameters whole on these
    ulysses    the last axis splits by sequence, attention by heads; the other axes the batch; parameters as in fsdp

With keys (`megatron:tp=8,zero=1,recompute=full`, see `named_configuration`) more is fixed: what ZeRO's stages shard on
data-parallel ranks and for how long a gathered copy lives, whether sequences are split too, what is run again.
"""

import math
from collections.abc import Callable
from dataclasses import replace

from autopar.errors import ImpossiblePinError, InfeasibleError
from autopar.lower.factor_words import factor_words, word_of
from autopar.lower.pinned import find_pinned
from autopar.lower.program import Op, Program, Tensor, make_program
from autopar.lower.redistributions import redistribute
from autopar.search.costs.evaluate import evaluate_program
from autopar.search.costs.pricing import Pricer, make_pricer
from autopar.search.costs.storages import storages
from autopar.search.exact.ilp import solve
from autopar.search.fitting import fitting
from autopar.search.graph.build import Builder, build
from autopar.search.graph.build_recompute import RecomputeBuilder
from autopar.search.graph.extract import extract
from autopar.search.graph.options import Allowed, Restriction
from autopar.search.known.attention_core import attention_core
from autopar.search.known.named_configuration import KINDS, NamedConfiguration, parse_configuration
from autopar.search.known.sample_factors import SampleFactors, check_samples, sample_factors, splits_samples
from autopar.values.blocks import block_of
from autopar.values.cluster import Cluster
from autopar.values.gigabytes import gigabytes, least_gigabytes
from autopar.values.graph import CapturedModel
from autopar.values.mesh import Mesh
from autopar.values.placement import Layout, Placement, Shard
from autopar.values.stage_plan import StagePlan
from autopar.values.train_config import TrainConfig

BASELINES = tuple(KINDS)

GAP = 1e-3

Meaning = Callable[[Op, str], str]
"""(op, choice) -> what people call the factor that it splits, or `whole`, or `summands`."""


def make_baseline(name: str, captured: CapturedModel, cluster: Cluster, mesh: Mesh, config: TrainConfig) -> StagePlan:
    """The best plan of a named kind, or of a configuration (`megatron:tp=8,zero=1`), with its estimate.

    Raises:
        ArgumentError: for an unknown name, key or value.
        InfeasibleError: if it does not apply to this model and mesh, or does not fit the memory.
    """
    program = make_program(captured)
    return baseline_plan(
        name, program, make_pricer(mesh=mesh, cluster=cluster, config=config), memory_limit(cluster, config)
    )


def memory_limit(cluster: Cluster, config: TrainConfig) -> float:
    """Bytes a device that a plan may use."""
    return cluster.device.memory_bytes if config.memory_nbytes is None else config.memory_nbytes


def baseline_plan(text: str, program: Program, pricer: Pricer, limit: float | None) -> StagePlan:
    """`make_baseline` for a program and prices at hand; `limit` bytes a device, None for unlimited."""
    configuration = parse_configuration(text)
    name = configuration.kind
    if pricer.mesh.size == 1 and configuration.pp == 1:
        raise InfeasibleError(f"{name} does not apply: the mesh has one rank")
    restriction = _restriction(configuration, program, pricer)
    if limit is None:
        return _solved(configuration, program, pricer, None, restriction)

    def search(aim: float) -> StagePlan:
        return _solved(configuration, program, pricer, aim, restriction)

    try:
        return fitting(search, lambda plan: plan.estimate.peak_nbytes, limit)
    except InfeasibleError as error:
        if error.least_nbytes is None:
            raise
        # The strategy graph counts memory from above, and what is run again by whole clusters: the plan may fit.
        plan = _solved(configuration, program, pricer, None, restriction)
        if plan.estimate.peak_nbytes <= limit:
            return plan
        raise InfeasibleError(
            f"{configuration} does not fit: it needs {least_gigabytes(error.least_nbytes)} GB of {gigabytes(limit)} GB "
            "a device; use more devices, a smaller (micro-)batch, another ZeRO stage or recompute=full",
            least_nbytes=error.least_nbytes,
        ) from error


def _solved(
    configuration: NamedConfiguration, program: Program, pricer: Pricer, limit: float | None, restriction: Restriction
) -> StagePlan:
    builder = Builder if restriction.recompute is None else RecomputeBuilder
    try:
        problem = build(program, pricer, limit=limit, restriction=restriction, builder=builder)
    except InfeasibleError as error:
        if not pricer.config.pins:
            raise
        if forbidden := [name for name in configuration.techniques if name in pricer.config.pins.forbid]:
            raise ImpossiblePinError(
                f"{configuration} is not within the pins: 'forbid: {forbidden[0]}' forbids it"
            ) from error
        raise ImpossiblePinError(f"{configuration} is not within the pins: {error}") from error
    solution = solve(problem.graph, relative_gap=GAP)
    plan = extract(problem, solution, pricer.cluster, pricer.config, str(configuration))
    if configuration.recompute == "selective":
        wanted = attention_core(program) | find_pinned(program, pricer.config.pins).again.keys()
        plan = replace(plan, recompute=plan.recompute & wanted)
    elif configuration.recompute == "full":
        plan = replace(plan, remade=_remade_in_blocks(plan, program, pricer))
    return plan.with_estimate(evaluate_program(plan, program, pricer))


def _remade_in_blocks(plan: StagePlan, program: Program, pricer: Pricer) -> dict[str, tuple[Layout, ...]]:
    """Layouts that are made for ops of blocks alone: redistributed again with the block, whatever made the tensor."""
    out, keeps = {}, find_pinned(program, pricer.config.pins).keeps
    for name, one in redistribute(program, plan, pricer.target).items():
        if one.tensor.producer is None or program.ops[one.tensor.producer].name in keeps:
            continue
        outside = {
            step.target
            for position, _, layout in one.wanted
            if position < 0 or not block_of(program.ops[position].module)
            for step in one.path(layout)
        }
        made = [v for v, step in one.made.items() if step.forward and v not in outside]
        if made:
            out[name] = tuple(sorted(made, key=str))
    return out


def _restriction(configuration: NamedConfiguration, program: Program, pricer: Pricer) -> Restriction:
    mesh, name = pricer.mesh, configuration.kind
    last = mesh.num_axes - 1
    data = tuple(range(mesh.num_axes)) if name in ("ddp", "fsdp") else tuple(range(last))
    samples = sample_factors(program)
    batch, either = _by_samples(samples, pricer, data), _by_samples(samples, pricer, data, or_whole=True)
    whole = name in ("ddp", "fsdp", "ulysses")  # parameters are the same on all ranks, and ZeRO shards over all
    zero = configuration.zero_stage

    def choice(op: Op, axis: int, option: str) -> bool:
        return batch(op, axis, option) if axis in data else tensor(op, axis, option)

    def otherwise(op: Op, axis: int, option: str) -> bool:
        return either(op, axis, option) if axis in data else tensor(op, axis, option) or _is_whole(option)

    tensor = batch
    if name in ("megatron", "ulysses"):
        meaning = _meanings(program)
        tensor = _megatron(meaning, configuration, pricer) if name == "megatron" else _ulysses(meaning)
        _check_parts(name, program, mesh.shape[last])
    check_samples(name, program, samples, pricer, data)
    sharded = tuple(range(mesh.num_axes)) if whole else data
    except_axis = None if whole else last
    stored = (lambda t, s: _whole_storage(t, s, except_axis)) if zero == 0 else _sharded_storage(mesh, sharded)

    def storage(t: Tensor, s: Layout) -> bool:
        return stored(t, s) and (whole or not isinstance(s.axes[last], Shard) or s.axes[last] in _read(t))

    def _read(t: Tensor) -> set[Placement]:
        """How ops may read a parameter on the last axis: there it lies as it is used, and is never gathered."""
        readers = ((program.ops[position], slot) for position, slot in program.readers[t.name])
        return {c.operands[slot] for op, slot in readers for name, c in op.choices.items() if choice(op, last, name)}

    return Restriction(
        choice=choice,
        otherwise=otherwise,
        apart=_apart(program, samples, pricer, data),
        storage=storage,
        lifetimes=_lifetimes(configuration, program),
        recompute=_recompute(configuration, program, pricer),
    )


def _lifetimes(configuration: NamedConfiguration, program: Program) -> tuple[str, ...]:
    """How long copies live (`search.parameters`): of one micro-batch, `keep` is for the step too."""
    zero = configuration.zero_stage
    if zero == 0 and configuration.zero is None:
        return ("step", "keep")
    once = "step" if program.microbatches > 1 else "keep"
    return {0: (once,), 1: (once,), 2: ("keep",), 3: ("use",)}[zero]


def _recompute(configuration: NamedConfiguration, program: Program, pricer: Pricer) -> Callable[[Op], bool] | None:
    if configuration.recompute == "full":
        return lambda op: True
    if configuration.recompute == "selective" and (core := attention_core(program)):
        return lambda op: op.name in core
    return (lambda op: False) if find_pinned(program, pricer.config.pins).again else None  # what pins want, no more


def _meanings(program: Program) -> Meaning:
    words = factor_words(program)
    return lambda op, option: word_of(op, option, words)


def _is_trained(op: Op) -> bool:
    return any(op.result_grads)


def _is_whole(option: str) -> bool:
    return option in ("replicate", "invariant")


def _by_samples(samples: SampleFactors, pricer: Pricer, data: tuple[int, ...], *, or_whole: bool = False) -> Allowed:
    """Ops that have samples split them; whole is what has none, where sizes forbid it and, if it is cheaper so, what
    reads no parameter and comes after samples were mixed. or_whole: any other op may be whole too."""

    def allowed(op: Op, axis: int, option: str) -> bool:
        factors = samples.factors[op.name]
        if option in factors:
            return True
        if not (_is_whole(option) or (option.startswith("partial") and not _is_trained(op))):
            return False
        return or_whole or not factors or _may_be_whole(op, samples) or not splits_samples(op, samples, pricer, data)

    return allowed


def _may_be_whole(op: Op, samples: SampleFactors) -> bool:
    return op.name in samples.after and not op.parameters


def _apart(program: Program, samples: SampleFactors, pricer: Pricer, data: tuple[int, ...]) -> frozenset[str]:
    """Ops that mix samples, or whose own sizes forbid to split them, and those that make what they read: all of that is
    redistributed."""
    whole = samples.mixing
    if samples.size % math.prod(pricer.mesh.shape[axis] for axis in data):
        having = [op for op in program.ops if samples.factors[op.name]]
        whole |= {op.name for op in having if not splits_samples(op, samples, pricer, data)}
    read = [program.tensors[name].producer for op in program.ops if op.name in whole for name in op.operands]
    makers = {program.ops[position].name for position in read if position is not None}
    return whole | {name for name in makers if samples.factors[name]}


def _megatron(meaning: Meaning, configuration: NamedConfiguration, pricer: Pricer) -> Allowed:
    split = configuration.sequence_parallel

    def splits_sequence(op: Op, axis: int) -> bool:
        names = (o for o in op.rule.factors if meaning(op, o) == "sequence")
        alone = (tuple(o if a == axis else "invariant" for a in range(pricer.mesh.num_axes)) for o in names)
        return any(pricer.target.is_allowed(op, choice) for choice in alone)

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
        if split is False and said == "sequence":
            return False
        if split and said == "whole" and splits_sequence(op, axis):
            return False
        return said in ("sequence", "whole") if op.parameters else said != "batch"

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
    return {"heads", "query"} <= set(op.rule.factors)  # a micro-batch of one sample has no batch to split


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


def _check_parts(name: str, program: Program, parts: int) -> None:
    """The last axis must divide what the kind splits."""
    attention = [op for op in program.ops if _is_attention(op)]
    if not attention:
        raise InfeasibleError(
            f"{name} does not apply: it splits heads, and no call of scaled_dot_product_attention was found; write "
            "attention as that"
        )
    for op in attention:
        heads = op.rule.factors["heads"].size
        if heads % parts:
            raise InfeasibleError(
                f"{name} does not apply: {heads} (key/value) heads of {op.name} are not divisible by {parts} ranks of "
                "the last axis; make that axis smaller"
            )
