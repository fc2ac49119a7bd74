"""What do data-parallel ranks send in a step, and how long does it take?

Gradients: an all-reduce; with ZeRO-1, -2 a reduce-scatter, and the updated parameters are gathered; with ZeRO-3 they
are gathered for each pass of each micro-batch (Rajbhandari et al. 2020, arXiv:1910.02054). Of the fullest stage.

`Exchange.sent` is by the collective model; contention slows its bytes (`Efficiency.data_link`). Copies beside it take
`copy_seconds` at the memory bandwidth and `launch_seconds` of the host: torch's `all_gather` into a list of tensors
receives into one buffer and copies each rank's part out of it, a launch a rank (pytorch v1.8, ProcessGroupNCCL.cpp,
`allgather`, `reduce_scatter`), which is what DeepSpeed's ZeRO-3 of 2021 calls for each weight.
"""

from dataclasses import dataclass

from autopar.cost_models.collectives import NOTHING_SENT, Transfer, transfer
from autopar.cost_models.layer_work import products_of_layer
from autopar.cost_models.links import axis_links
from autopar.cost_models.training_config import TrainingConfig, grad_nbytes, param_nbytes, rank_layers, stage_params
from autopar.cost_models.transformer import TransformerShape, layer_parameters
from autopar.values.cluster import Cluster

PP, REPLICATE, DP, CP, TP = range(5)
# Bytes a byte that is gathered into a list: its place filled with zeros, the buffer read, its place written; scattered
# from a list: read and written.
GATHERED_LIST, SCATTERED_LIST = 3, 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Exchange:
    """Of a step, or of a micro-batch if `each_microbatch`."""

    sent: Transfer
    copy_seconds: float
    launch_seconds: float
    each_microbatch: bool

    def seconds(self, data_link: float, memory: float) -> float:
        """Where messages reach `data_link` of their bandwidth and copies `memory` of theirs."""
        return self.sent.seconds(data_link) + self.copy_seconds / memory + self.launch_seconds


NOTHING_EXCHANGED = Exchange(sent=NOTHING_SENT, copy_seconds=0.0, launch_seconds=0.0, each_microbatch=False)


def data_exchange(shape: TransformerShape, config: TrainingConfig, cluster: Cluster, part: float) -> Exchange:
    """What the fullest stage exchanges, by the algorithms that are the cheapest at `part` of the bandwidth."""
    each = config.zero == 3
    if config.dp * config.cp == 1:  # nothing but what tensor parallel ranks sum
        sent = _norms(shape, config, cluster, part)
    elif config.per_tensor_exchange:
        sent = _tensor_by_tensor(shape, config, cluster, part)
    else:
        sent = _in_buckets(shape, config, cluster, part)
        if each and config.deepspeed_zero3:
            copies, launches = _list_copies(shape, config, cluster)
            return Exchange(sent=sent, copy_seconds=copies, launch_seconds=launches, each_microbatch=each)
    return Exchange(sent=sent, copy_seconds=0.0, launch_seconds=0.0, each_microbatch=each)


def _in_buckets(shape: TransformerShape, config: TrainingConfig, cluster: Cluster, part: float) -> Transfer:
    links = axis_links(cluster, config.mesh_shape, (REPLICATE, DP, CP))
    params = _most_params(shape, config)
    grads = params * (4 if config.float32_exchange else grad_nbytes(config))
    weights = params * param_nbytes(config)
    norms = _norms(shape, config, cluster, part)
    if config.zero == 0:
        return norms.plus(transfer("all_reduce", grads, links, part))
    pieces = _pieces(shape, config) if config.zero == 3 else 1
    within = axis_links(cluster, config.mesh_shape, (DP, CP))
    gather = transfer("all_gather", weights / pieces, within, part).times(pieces)
    if config.whole_gradients:
        return norms.plus(transfer("all_reduce", grads, links, part)).plus(gather)
    scatter = transfer("reduce_scatter", grads / pieces, within, part).times(pieces)
    if config.replicate > 1:
        across = axis_links(cluster, config.mesh_shape, (REPLICATE,))
        scatter = scatter.plus(transfer("all_reduce", grads / config.shards / pieces, across, part).times(pieces))
    return norms.plus(scatter).plus(gather.times(_gathers(shape, config) if config.zero == 3 else 1))


def _most_params(shape: TransformerShape, config: TrainingConfig) -> float:
    return max(stage_params(shape, config, stage) for stage in range(config.pp))


def _pieces(shape: TransformerShape, config: TrainingConfig) -> float:
    """Collectives in which ZeRO-3 gathers a stage: a layer each, or a weight each."""
    return shape.layers / config.pp * (len(products_of_layer(shape, config)) if config.deepspeed_zero3 else 1)


def _gathers(shape: TransformerShape, config: TrainingConfig) -> float:
    """How often ZeRO-3 gathers a parameter for one micro-batch: forward, and backward unless a stage of a pipeline
    or `keep_gathered` keeps it. A layer that is recomputed gathers once for both; released weight by weight, all but
    the last twice."""
    if config.keep_gathered or (config.recompute == "none" and config.pp > 1):
        return 1.0
    if not config.deepspeed_zero3 or config.recompute != "full":
        return 2.0
    layer = sum(count for count, _ in layer_parameters(shape, config.tp, config.ep))
    return 3.0 - shape.hidden * shape.ffn / config.tp / layer


def _list_copies(shape: TransformerShape, config: TrainingConfig, cluster: Cluster) -> tuple[float, float]:
    """Seconds of copies at the memory bandwidth, and of their launches."""
    device, gathers = cluster.device, _gathers(shape, config)
    params, pieces = _most_params(shape, config), _pieces(shape, config)
    nbytes = params * (GATHERED_LIST * gathers * param_nbytes(config) + SCATTERED_LIST * grad_nbytes(config))
    launches = pieces * (gathers + 1) * config.dp * config.cp
    return nbytes / device.memory_bandwidth, launches * device.launch_seconds


def _tensor_by_tensor(shape: TransformerShape, config: TrainingConfig, cluster: Cluster, part: float) -> Transfer:
    """Every parameter and gradient of the fullest stage by itself. Backward gathers all but the embedding, whose
    gradient does not depend on it; unsharded norms' gradients are summed over all ranks that have a part at once."""
    links = axis_links(cluster, config.mesh_shape, (REPLICATE, DP, CP))
    tables, norms = _parameter_tensors(shape, config)
    total = NOTHING_SENT

    def add(kind: str, counts: list[int], nbytes: int, times: int = 1) -> None:
        nonlocal total
        for count in counts:
            if count:
                total = total.plus(transfer(kind, count * nbytes, links, part).times(times))

    if config.zero == 0:
        split = config.tp > 1 and config.sequence_parallel
        wide = axis_links(cluster, config.mesh_shape, (REPLICATE, DP, CP, TP)) if split else links
        for count in norms:
            total = total.plus(transfer("all_reduce", count * grad_nbytes(config), wide, part))
        add("all_reduce", tables, grad_nbytes(config))
        return total
    add("reduce_scatter", tables + norms, grad_nbytes(config))
    again = 2 if config.zero == 3 and (config.recompute != "none" or config.pp == 1) else 1
    embedding, others = tables[:2], tables[2:]
    add("all_gather", others + norms, param_nbytes(config), again)
    add("all_gather", embedding, param_nbytes(config))
    return total.plus(_norms(shape, config, cluster, part))


def _parameter_tensors(shape: TransformerShape, config: TrainingConfig) -> tuple[list[int], list[int]]:
    """Elements of the fullest stage's tensors on one tensor parallel rank: token and position embedding, then other
    matrices and their biases; norms'."""
    table = shape.vocab * shape.hidden // config.tp
    layers = max(rank_layers(shape, config))
    found = layer_parameters(shape, config.tp, config.ep)
    others = [count for count, is_norm in found if not is_norm] * layers
    norms = [count for count, is_norm in found if is_norm] * layers + [shape.hidden] * shape.norm_vectors
    return [table, shape.positions * shape.hidden, *others] + ([] if shape.tied or config.pp > 1 else [table]), norms


def _norms(shape: TransformerShape, config: TrainingConfig, cluster: Cluster, part: float) -> Transfer:
    """With sequence parallelism a tensor parallel rank has its positions' part of the norms' gradients."""
    if config.tp == 1 or not config.sequence_parallel:
        return NOTHING_SENT
    counts = _parameter_tensors(shape, config)[1]
    links = axis_links(cluster, config.mesh_shape, (TP,))
    total = NOTHING_SENT
    for count in counts if config.per_tensor_exchange else [sum(counts)]:
        total = total.plus(transfer("all_reduce", count * grad_nbytes(config), links, part))
    return total
