"""What does a simulated step look like over time? The step model's seconds as a pipeline on the timeline.

Every stage runs its own seconds of `step_work` at the same prices: receive, then layer by layer compute and the
collectives that hold it up. Gradients follow the last backward, layer by layer beside it where `overlap_data` says so,
and the optimizer follows them; parameters gathered a micro-batch (ZeRO-3) are part of each backward. For equal stages
without overlap the makespan is the step model's (zb-2p: the longest span of a rank); with uneven stages or overlap it
is the simulation's own answer.
"""

from autopar.cost_models.efficiency import Efficiency
from autopar.cost_models.layer_work import Kind, Work
from autopar.cost_models.pipeline import COMPUTE, Beside, Pipeline, Segment, StageWork, make_pipeline
from autopar.cost_models.schedules import make_order
from autopar.cost_models.step_work import StepWork, step_work
from autopar.cost_models.training_config import TrainingConfig, rank_layers
from autopar.cost_models.transformer import TransformerShape
from autopar.values.cluster import Cluster

LANES = ("compute", "tensor parallel", "pipeline", "data parallel")
TENSOR, PIPE, DATA = 1, 2, 3
_LANE_OF_KIND = {
    **dict.fromkeys((Kind.TENSOR, Kind.TENSOR_OVERLAPPED), TENSOR),
    **dict.fromkeys((Kind.TENSOR_LATENCY, Kind.TENSOR_OVERLAPPED_LATENCY), TENSOR),
    **dict.fromkeys((Kind.PIPE, Kind.PIPE_LATENCY), PIPE),
}
ORDERS = {"gpipe": "gpipe", "1f1b": "1f1b", "zb-1p": "zb-h1", "zb-2p": "zb-h2", "zbv": "zbv"}


def step_pipeline(
    shape: TransformerShape, config: TrainingConfig, cluster: Cluster, efficiency: Efficiency
) -> Pipeline:
    """One step, to be simulated or drawn.

    Raises:
        MeshError: if the degrees do not fit the cluster or the model.
        ArgumentError: if the schedule does not run with these stages and micro-batches.
    """
    work = step_work(shape, config, cluster, efficiency)
    name = "interleaved-1f1b" if config.virtual_stages > 1 else ORDERS[config.schedule]
    order = make_order(name, config.pp, config.num_microbatches, config.chunks)
    layers = rank_layers(shape, config)
    rows: dict[tuple[int, bool, bool], int] = {}  # stages that work alike share a row of the step's work
    keys = [(count, rank == 0, rank == config.head_rank) for rank, count in enumerate(layers)]
    for key in keys:
        rows.setdefault(key, len(rows))
    owner = {action.stage: rank for rank, actions in enumerate(order.ranks) for action in actions}
    stages = [
        _stage(work, rows[keys[owner[stage]]], layers[owner[stage]], config, efficiency)
        for stage in range(order.num_stages)
    ]
    return make_pipeline(order, stages, LANES)


def _stage(work: StepWork, row: int, layers: int, config: TrainingConfig, efficiency: Efficiency) -> StageWork:
    """One of the stages of a rank."""
    price = efficiency.seconds_per_unit()
    share = config.chunks
    pieces = max(1, layers // share)
    backward, weight = work.backward[row] * price / share, work.weight[row] * price / share
    exchange = work.exchange.seconds(efficiency.data_link, efficiency.memory) / share
    after = (Segment(DATA, exchange),) if work.exchange.each_microbatch and exchange else ()
    whole = _chain(backward, pieces)
    actions = {
        "F": _chain(work.forward[row] * price / share, pieces),
        "B": whole + after,
        "I": _chain(backward - weight, pieces) + after,
        "W": _chain(weight, pieces),
    }
    beside: tuple[Beside, ...] = ()
    if exchange and not work.exchange.each_microbatch:
        final = actions["W"] if config.schedule.startswith("zb") else whole
        # a layer's gradients are complete with the last segment of its part of backward
        ends = [len(final) * (piece + 1) // pieces - 1 for piece in range(pieces)]
        if not config.overlap_data:
            ends = ends[-1:]
        beside = tuple(Beside(end, DATA, exchange / len(ends)) for end in ends)
    update = Segment(COMPUTE, work.optimizer_seconds / efficiency.memory / share)
    return StageWork(actions=actions, beside=beside, after=(update,) if update.seconds else ())


def _chain(seconds: Work, pieces: int) -> tuple[Segment, ...]:
    """What is received, then `pieces` of compute and of the collectives of each."""
    lanes = dict.fromkeys((COMPUTE, TENSOR, PIPE), 0.0)
    for kind in Kind:
        lanes[_LANE_OF_KIND.get(kind, COMPUTE)] += float(seconds[kind])
    received = [Segment(PIPE, lanes[PIPE])] if lanes[PIPE] else []
    piece = [Segment(lane, lanes[lane] / pieces) for lane in (COMPUTE, TENSOR) if lane == COMPUTE or lanes[lane]]
    return tuple(received + piece * pieces)
