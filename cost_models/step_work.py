"""What does each pipeline stage do for one micro-batch, and what does every rank do once a step?

Communication is in seconds of the collective model; `Efficiency` says which part of the bandwidth a training step
reaches. Tensor parallelism: two all-reduces forward and two backward a layer (Shoeybi et al. 2019,
arXiv:1909.08053), as reduce-scatter and all-gather with sequence parallelism, whose backward gathers the input once
more (Korthikanti et al. 2022), and again what is recomputed. Context parallelism passes keys and values round.
Pipeline: one activation a boundary, forward and backward, 1/tp of it a rank and gathered behind (Narayanan et al. 2021,
section 4.1).
"""

from dataclasses import dataclass

import numpy as np

from autopar.cost_models.collectives import NOTHING_SENT, Transfer, transfer
from autopar.cost_models.data_exchange import CP, PP, TP, Exchange, data_exchange
from autopar.cost_models.efficiency import Efficiency
from autopar.cost_models.host_offload import offload_seconds
from autopar.cost_models.layer_work import (
    Kind,
    PassWork,
    Work,
    embedding_work,
    head_work,
    layer_work,
    no_work,
    send,
)
from autopar.cost_models.links import axis_links
from autopar.cost_models.memory import fused_update_nbytes
from autopar.cost_models.training_config import (
    TrainingConfig,
    check_fits,
    grad_nbytes,
    param_nbytes,
    rank_layers,
    stage_params,
)
from autopar.cost_models.transformer import TransformerShape
from autopar.errors import MeshError
from autopar.values.cluster import Cluster


@dataclass(frozen=True, slots=True, kw_only=True)
class StepWork:
    """Stages that work alike are one row: `counts` of them; `forward`, `backward` (recompute and weight gradients in
    it) and `weight` are (rows, kinds), of one micro-batch.

    `exchange`: of gradients and parameters with other data-parallel ranks. `optimizer_seconds` at the nominal memory
    bandwidth. `host_seconds`: copies to the host and its update.
    """

    config: TrainingConfig
    counts: Work
    forward: Work
    backward: Work
    weight: Work
    exchange: Exchange
    optimizer_seconds: float
    host_seconds: float


def step_work(shape: TransformerShape, config: TrainingConfig, cluster: Cluster, efficiency: Efficiency) -> StepWork:
    """The work of one step. Of `efficiency` it takes which algorithm of a collective is the cheapest at the part of the
    links that it reaches, and the number of multiprocessors; prices come later.

    Raises:
        MeshError: if the degrees do not multiply to the cluster's devices, or do not divide what they split.
    """
    check_devices(config, cluster)
    check_fits(shape, config)
    device = cluster.device
    num_sms = efficiency.num_sms
    layer = layer_work(shape, config, device, num_sms) + tensor_work(shape, config, cluster, efficiency)
    stages = rank_layers(shape, config)
    rows: dict[tuple[int, bool, bool], tuple[int, PassWork]] = {}
    for stage, layers in enumerate(stages):
        key = (layers, stage == 0, stage == config.head_rank)
        if key in rows:
            rows[key] = (rows[key][0] + 1, rows[key][1])
            continue
        work = layer.times(layers) + _boundary(shape, config, cluster, efficiency.pipe_link)
        if stage == 0:
            traffic = _vocabulary_traffic(shape, config, cluster, efficiency.tensor_link, head=False)
            work += embedding_work(shape, config, device) + traffic
        if stage == config.head_rank:
            traffic = _vocabulary_traffic(shape, config, cluster, efficiency.tensor_link, head=True)
            work += head_work(shape, config, device, num_sms) + traffic
        rows[key] = (1, work + _accumulate(stage_params(shape, config, stage), config, cluster))
    passes = [work for _, work in rows.values()]
    params = max(stage_params(shape, config, stage) for stage in (0, config.pp - 1))
    by_host = config.offload != "none"
    return StepWork(
        config=config,
        counts=np.array([count for count, _ in rows.values()], dtype=np.float64),
        forward=np.stack([p.forward for p in passes]),
        backward=np.stack([p.backward + p.weight + p.recompute for p in passes]),
        weight=np.stack([p.weight for p in passes]),
        exchange=data_exchange(shape, config, cluster, efficiency.data_link),
        optimizer_seconds=0.0 if by_host else _optimizer_bytes(config) * params / device.memory_bandwidth,
        host_seconds=offload_seconds(config, params, cluster) if by_host else 0.0,
    )


def check_devices(config: TrainingConfig, cluster: Cluster) -> None:
    """Raise `MeshError` unless the degrees multiply to the cluster's devices."""
    if config.num_devices != cluster.num_devices:
        raise MeshError(
            f"tp {config.tp} x pp {config.pp} x dp {config.dp} x cp {config.cp} = {config.num_devices} ranks, but "
            f"cluster {cluster.name} has {cluster.num_devices} devices; make them equal"
        )


def tensor_work(shape: TransformerShape, config: TrainingConfig, cluster: Cluster, efficiency: Efficiency) -> PassWork:
    """Communication inside one layer."""
    forward, backward, again = no_work(), no_work(), no_work()
    part = efficiency.tensor_link
    kind = Kind.TENSOR_OVERLAPPED if config.overlap_tensor == "all" else Kind.TENSOR
    backward_kind = Kind.TENSOR if config.overlap_tensor == "none" else Kind.TENSOR_OVERLAPPED
    if config.tp > 1:
        links = axis_links(cluster, config.mesh_shape, (TP,))
        activation = config.tokens * shape.hidden * param_nbytes(config)
        if config.sequence_parallel:
            gather = transfer("all_gather", activation, links, part)
            whole = gather.plus(transfer("reduce_scatter", activation, links, part))
            send(backward, backward_kind, whole.times(2))
            if config.regather_inputs:  # for weight gradients, beside the products with the input's gradient
                send(backward, Kind.TENSOR_OVERLAPPED, gather.times(2))
        else:
            whole = transfer("all_reduce", activation, links, part)
            send(backward, backward_kind, whole.times(3 if shape.gated and config.separate_gate else 2))
        send(forward, kind, whole.times(2))
    if config.cp > 1:
        links = axis_links(cluster, config.mesh_shape, (CP,))
        keys = 2 * config.micro_batch * config.seq * shape.kv_dim / config.tp * param_nbytes(config)
        send(forward, Kind.TENSOR, transfer("all_gather", keys, links, part))
        gathered = transfer("all_gather", keys, links, part)
        send(backward, Kind.TENSOR, gathered.plus(transfer("reduce_scatter", keys, links, part)))
    if config.ep > 1:
        shape_ep = (config.pp, config.dp // config.ep, config.ep, config.cp, config.tp)
        links = axis_links(cluster, shape_ep, (2,))
        tokens = config.tokens * shape.experts_per_token * shape.hidden * param_nbytes(config)
        for work in (forward, backward):
            send(work, Kind.TENSOR, transfer("all_to_all", tokens, links, part).times(2))
    again = forward * {"full": 1.0, "alternate": 0.5, "op": 0.5}.get(config.recompute, 0.0)
    return PassWork(forward=forward, backward=backward, weight=no_work(), recompute=again)


def _vocabulary_traffic(
    shape: TransformerShape, config: TrainingConfig, cluster: Cluster, part: float, *, head: bool
) -> PassWork:
    """What tensor parallel ranks exchange around an embedding or a head that is split over the vocabulary: the
    embedding's rows are summed forward, the gradient of the head's input backward, gathered logits forward."""
    forward, backward = no_work(), no_work()
    if config.tp > 1:
        links = axis_links(cluster, config.mesh_shape, (TP,))

        def sent(kind: str, nbytes: float) -> Transfer:
            return transfer(kind, nbytes, links, part)

        activation = config.tokens * shape.hidden * param_nbytes(config)
        summed = sent("reduce_scatter" if config.sequence_parallel else "all_reduce", activation)
        gathered = sent("all_gather", activation) if config.sequence_parallel else NOTHING_SENT
        if head:
            send(forward, Kind.TENSOR, gathered)
            send(backward, Kind.TENSOR if config.overlap_tensor == "none" else Kind.TENSOR_OVERLAPPED, summed)
        else:
            send(forward, Kind.TENSOR, summed)
            send(backward, Kind.TENSOR, gathered)
        if head and not config.gathered_logits:  # maxima, then sums and picked logits of the cross-entropy, in float32
            for numbers in (1, 2):
                send(forward, Kind.TENSOR, sent("all_reduce", numbers * 4 * config.tokens))
        if head and config.gathered_logits:
            send(forward, Kind.TENSOR, sent("all_gather", config.tokens * shape.vocab * param_nbytes(config)))
    return PassWork(forward=forward, backward=backward, weight=no_work(), recompute=no_work())


def _boundary(shape: TransformerShape, config: TrainingConfig, cluster: Cluster, part: float) -> PassWork:
    """A stage's receives of one micro-batch, one a virtual stage; the send is its neighbour's receive."""
    forward, backward = no_work(), no_work()
    if config.pp > 1:
        activation = config.tokens * shape.hidden * param_nbytes(config)
        links = axis_links(cluster, config.mesh_shape, (PP,))
        whole, piece = (transfer("send_recv", n, links, part) for n in (activation, activation / config.tp))
        if config.tp > 1 and not config.sequence_parallel:
            within = axis_links(cluster, config.mesh_shape, (TP,))
            piece = piece.plus(transfer("all_gather", activation, within, part))
        split = config.sequence_parallel  # then stages hand over what each rank holds
        for work, in_pieces in ((forward, config.split_pipe_activations), (backward, config.split_pipe_gradients)):
            send(work, Kind.PIPE, (piece if split or in_pieces else whole).times(config.chunks))
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
    if not config.master_copies:
        return fused_update_nbytes(config.optimizer_states, param_nbytes(config)) / config.shards
    return (2 * grad_nbytes(config) + 8 * (1 + config.optimizer_states) + param_nbytes(config)) / config.shards
