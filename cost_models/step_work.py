"""What does each pipeline stage do for one micro-batch, and what does every rank do once a step?

Communication is in seconds of the collective model at its nominal links; `Efficiency` says which part of these a
training step reaches. Tensor parallelism: two all-reduces forward and two backward a layer (Shoeybi et al. 2019,
arXiv:1909.08053), as reduce-scatter and all-gather with sequence parallelism, whose backward gathers the input once
more (Korthikanti et al. 2022), and again what is recomputed. Context parallelism passes keys and values round.
Pipeline: one activation a boundary, forward and backward, 1/tp of it a rank and gathered behind (Narayanan et al. 2021,
section 4.1).
"""

from dataclasses import dataclass

import numpy as np

from autopar.cluster import Cluster
from autopar.cost_models.collectives import collective_seconds
from autopar.cost_models.layer_work import (
    Kind,
    PassWork,
    Work,
    embedding_work,
    head_work,
    layer_work,
    no_work,
)
from autopar.cost_models.links import Links, axis_links
from autopar.cost_models.memory import update_nbytes
from autopar.cost_models.training_config import TrainingConfig, check_fits, grad_nbytes, param_nbytes, stage_layers
from autopar.cost_models.transformer import (
    TransformerShape,
    layer_parameters,
)
from autopar.errors import MeshError

PP, DP, CP, TP = range(4)


@dataclass(frozen=True, slots=True, kw_only=True)
class StepWork:
    """Stages that work alike are one row: `counts` of them; `forward`, `backward` (recompute and weight gradients in
    it) and `weight` are (rows, kinds), of one micro-batch.

    `data_seconds`: gradient exchange and parameter gathers of the fullest stage by the collective model, of a step, or
    of a micro-batch if `data_per_microbatch`. `optimizer_seconds` at the nominal memory bandwidth.
    """

    config: TrainingConfig
    counts: Work
    forward: Work
    backward: Work
    weight: Work
    data_seconds: float
    data_per_microbatch: bool
    optimizer_seconds: float


def step_work(shape: TransformerShape, config: TrainingConfig, cluster: Cluster, num_sms: int) -> StepWork:
    """The work of one step.

    Raises:
        MeshError: if the degrees do not multiply to the cluster's devices, or do not divide what they split.
    """
    check_devices(config, cluster)
    check_fits(shape, config)
    device = cluster.device
    layer = layer_work(shape, config, device, num_sms) + tensor_work(shape, config, cluster)
    stages = stage_layers(shape.layers, config.pp)
    rows: dict[tuple[int, bool, bool], tuple[int, PassWork]] = {}
    for stage, layers in enumerate(stages):
        key = (layers, stage == 0, stage == config.pp - 1)
        if key in rows:
            rows[key] = (rows[key][0] + 1, rows[key][1])
            continue
        work = layer.times(layers) + _boundary(shape, config, cluster)
        if stage == 0:
            work += embedding_work(shape, config, device) + _vocabulary_traffic(shape, config, cluster, head=False)
        if stage == config.pp - 1:
            work += head_work(shape, config, device, num_sms) + _vocabulary_traffic(shape, config, cluster, head=True)
        rows[key] = (1, work + _accumulate(stage_params(shape, config, stage), config, cluster))
    passes = [work for _, work in rows.values()]
    params = max(stage_params(shape, config, stage) for stage in (0, config.pp - 1))
    return StepWork(
        config=config,
        counts=np.array([count for count, _ in rows.values()], dtype=np.float64),
        forward=np.stack([p.forward for p in passes]),
        backward=np.stack([p.backward + p.weight + p.recompute for p in passes]),
        weight=np.stack([p.weight for p in passes]),
        data_seconds=data_seconds(shape, config, cluster),
        data_per_microbatch=config.zero == 3,
        optimizer_seconds=_optimizer_bytes(config) * params / device.memory_bandwidth,
    )


def check_devices(config: TrainingConfig, cluster: Cluster) -> None:
    """Raise `MeshError` unless the degrees multiply to the cluster's devices."""
    if config.num_devices != cluster.num_devices:
        raise MeshError(
            f"tp {config.tp} x pp {config.pp} x dp {config.dp} x cp {config.cp} = {config.num_devices} ranks, but "
            f"cluster {cluster.name} has {cluster.num_devices} devices; make them equal"
        )


def stage_params(shape: TransformerShape, config: TrainingConfig, stage: int) -> float:
    """Parameters of one rank of a stage, before any sharding over data-parallel ranks."""
    layers = stage_layers(shape.layers, config.pp)[stage]
    table = shape.vocab * shape.hidden / config.tp
    total = layers * float(sum(count for count, _ in layer_parameters(shape, config.tp, config.ep)))
    if stage == 0:
        total += table + shape.positions * shape.hidden
    if stage == config.pp - 1:
        total += shape.norm_vectors * shape.hidden + (0 if shape.tied and config.pp == 1 else table)
    return total


def data_seconds(shape: TransformerShape, config: TrainingConfig, cluster: Cluster) -> float:
    """Gradients of one step, or of one micro-batch with ZeRO-3 (which also gathers parameters forward and backward)."""
    replicas = config.dp * config.cp
    if replicas == 1:  # nothing but what tensor parallel ranks sum
        return _norm_seconds(shape, config, cluster)
    links = axis_links(cluster, config.mesh_shape, (DP, CP))
    params = max(stage_params(shape, config, stage) for stage in range(config.pp))
    grads = params * grad_nbytes(config)
    weights = params * param_nbytes(config)
    if config.per_tensor_exchange:
        return _per_tensor_seconds(shape, config, cluster)
    norms = _norm_seconds(shape, config, cluster)
    if config.zero == 0:
        return norms + _seconds("all_reduce", grads, links)
    pieces = shape.layers / config.pp * config.gathers_per_layer if config.zero == 3 else 1
    gather = pieces * _seconds("all_gather", weights / pieces, links)
    scatter = pieces * _seconds("reduce_scatter", grads / pieces, links)
    if config.zero < 3:
        return norms + gather + scatter
    return norms + scatter + gather * (1 if config.recompute == "none" and config.pp > 1 else 2)


def _per_tensor_seconds(shape: TransformerShape, config: TrainingConfig, cluster: Cluster) -> float:
    """Every parameter and gradient of the fullest stage by itself. Backward gathers all but the embedding, whose
    gradient does not depend on it; unsharded norms' gradients are summed over all ranks that have a part at once."""
    links = axis_links(cluster, config.mesh_shape, (DP, CP))
    tables, norms = _parameter_tensors(shape, config)
    first = tables[:2]  # the embedding's

    def seconds(kind: str, counts: list[int], nbytes: int) -> float:
        return sum(_seconds(kind, count * nbytes, links) for count in counts if count)

    if config.zero == 0:
        split = config.tp > 1 and config.sequence_parallel
        wide = axis_links(cluster, config.mesh_shape, (DP, CP, TP)) if split else links
        summed = sum(_seconds("all_reduce", count * grad_nbytes(config), wide) for count in norms)
        return summed + seconds("all_reduce", tables, grad_nbytes(config))
    scatter = seconds("reduce_scatter", tables + norms, grad_nbytes(config)) + _norm_seconds(shape, config, cluster)
    again = 2 if config.zero == 3 and (config.recompute != "none" or config.pp == 1) else 1
    gather = again * seconds("all_gather", tables[2:] + norms, param_nbytes(config))
    return scatter + gather + seconds("all_gather", first, param_nbytes(config))


def _parameter_tensors(shape: TransformerShape, config: TrainingConfig) -> tuple[list[int], list[int]]:
    """Elements of the fullest stage's tensors on one tensor parallel rank: token and position embedding, then other
    matrices and their biases; norms'."""
    table = shape.vocab * shape.hidden // config.tp
    layers = max(stage_layers(shape.layers, config.pp))
    found = layer_parameters(shape, config.tp, config.ep)
    others = [count for count, is_norm in found if not is_norm] * layers
    norms = [count for count, is_norm in found if is_norm] * layers + [shape.hidden] * shape.norm_vectors
    return [table, shape.positions * shape.hidden, *others] + ([] if shape.tied or config.pp > 1 else [table]), norms


def _norm_seconds(shape: TransformerShape, config: TrainingConfig, cluster: Cluster) -> float:
    """With sequence parallelism a tensor parallel rank has its positions' part of the norms' gradients."""
    if config.tp == 1 or not config.sequence_parallel:
        return 0.0
    counts = _parameter_tensors(shape, config)[1]
    messages = counts if config.per_tensor_exchange else [sum(counts)]
    links = axis_links(cluster, config.mesh_shape, (TP,))
    return sum(_seconds("all_reduce", count * grad_nbytes(config), links) for count in messages)


def _seconds(kind: str, nbytes: float, links: Links) -> float:
    return collective_seconds(kind, nbytes, links)[0]


def tensor_work(shape: TransformerShape, config: TrainingConfig, cluster: Cluster) -> PassWork:
    """Communication inside one layer."""
    forward, backward, again = no_work(), no_work(), no_work()
    kind = Kind.TENSOR_OVERLAPPED if config.overlap_tensor == "all" else Kind.TENSOR
    backward_kind = Kind.TENSOR if config.overlap_tensor == "none" else Kind.TENSOR_OVERLAPPED
    if config.tp > 1:
        links = axis_links(cluster, config.mesh_shape, (TP,))
        activation = config.tokens * shape.hidden * param_nbytes(config)
        if config.sequence_parallel:
            gather = _seconds("all_gather", activation, links)
            whole = gather + _seconds("reduce_scatter", activation, links)
            backward[backward_kind] = 2 * whole
            if config.regather_inputs:  # for weight gradients, beside the products with the input's gradient
                backward[Kind.TENSOR_OVERLAPPED] += 2 * gather
        else:
            whole = _seconds("all_reduce", activation, links)
            backward[backward_kind] = 2 * whole
        forward[kind] = 2 * whole
    if config.cp > 1:
        links = axis_links(cluster, config.mesh_shape, (CP,))
        keys = 2 * config.micro_batch * config.seq * shape.kv_dim / config.tp * param_nbytes(config)
        forward[Kind.TENSOR] += _seconds("all_gather", keys, links)
        backward[Kind.TENSOR] += _seconds("all_gather", keys, links) + _seconds("reduce_scatter", keys, links)
    if config.ep > 1:
        shape_ep = (config.pp, config.dp // config.ep, config.ep, config.cp, config.tp)
        links = axis_links(cluster, shape_ep, (2,))
        tokens = config.tokens * shape.experts_per_token * shape.hidden * param_nbytes(config)
        forward[Kind.TENSOR] += 2 * _seconds("all_to_all", tokens, links)
        backward[Kind.TENSOR] += 2 * _seconds("all_to_all", tokens, links)
    part = {"full": 1.0, "alternate": 0.5, "op": 0.5}.get(config.recompute, 0.0)
    again = forward * part
    return PassWork(forward=forward, backward=backward, weight=no_work(), recompute=again)


def _vocabulary_traffic(shape: TransformerShape, config: TrainingConfig, cluster: Cluster, *, head: bool) -> PassWork:
    """What tensor parallel ranks exchange around an embedding or a head that is split over the vocabulary: the
    embedding's rows are summed forward, the gradient of the head's input backward, gathered logits forward."""
    forward, backward = no_work(), no_work()
    if config.tp > 1:
        links = axis_links(cluster, config.mesh_shape, (TP,))
        activation = config.tokens * shape.hidden * param_nbytes(config)
        summed = _seconds("reduce_scatter" if config.sequence_parallel else "all_reduce", activation, links)
        gathered = _seconds("all_gather", activation, links) if config.sequence_parallel else 0.0
        if head:
            forward[Kind.TENSOR] += gathered
            backward[Kind.TENSOR if config.overlap_tensor == "none" else Kind.TENSOR_OVERLAPPED] += summed
        else:
            forward[Kind.TENSOR] += summed
            backward[Kind.TENSOR] += gathered
        if head and not config.gathered_logits:  # maxima, then sums and picked logits of the cross-entropy, in float32
            forward[Kind.TENSOR] += sum(_seconds("all_reduce", n * 4 * config.tokens, links) for n in (1, 2))
        if head and config.gathered_logits:
            logits = config.tokens * shape.vocab * param_nbytes(config)
            forward[Kind.TENSOR] += _seconds("all_gather", logits, links)
    return PassWork(forward=forward, backward=backward, weight=no_work(), recompute=no_work())


def _boundary(shape: TransformerShape, config: TrainingConfig, cluster: Cluster) -> PassWork:
    """A stage's receives of one micro-batch, one a virtual stage; the send is its neighbour's receive."""
    forward, backward = no_work(), no_work()
    if config.pp > 1:
        activation = config.tokens * shape.hidden * param_nbytes(config)
        links = axis_links(cluster, config.mesh_shape, (PP,))
        seconds = _seconds("send_recv", activation / config.tp, links)
        if config.tp > 1 and not config.sequence_parallel:
            seconds += _seconds("all_gather", activation, axis_links(cluster, config.mesh_shape, (TP,)))
        forward[Kind.PIPE] = config.virtual_stages * seconds
        if not config.split_pipe_gradients:
            seconds = _seconds("send_recv", activation, links)
        backward[Kind.PIPE] = config.virtual_stages * seconds
    return PassWork(forward=forward, backward=backward, weight=no_work(), recompute=no_work())


def _accumulate(params: float, config: TrainingConfig, cluster: Cluster) -> PassWork:
    """Gradients of a micro-batch added to the sum: read, read and write."""
    weight = no_work()
    if (config.num_microbatches > 1 or config.main_grads) and not config.fused_grad_sum:
        nbytes = param_nbytes(config) + 2 * grad_nbytes(config)
        weight[Kind.MEMORY] = nbytes * params / cluster.device.memory_bandwidth
    return PassWork(forward=no_work(), backward=no_work(), weight=weight, recompute=no_work())


def _optimizer_bytes(config: TrainingConfig) -> float:
    """Bytes that the optimizer moves for each parameter of the stage: with master copies the gradient (twice, for its
    norm), master copy and states read and written, the low-precision parameter written."""
    replicas = config.dp * config.cp if config.zero else 1
    if not config.master_copies:
        return update_nbytes(config.optimizer_states, param_nbytes(config)) / replicas
    return (2 * grad_nbytes(config) + 8 * (1 + config.optimizer_states) + param_nbytes(config)) / replicas
