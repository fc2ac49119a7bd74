"""How long is one step of an explicit configuration? Stages' work priced, put in a pipeline, gradients exchanged.

    stage i, one micro-batch:  f_i, b_i seconds (b_i with weight gradients w_i and what is recomputed)
    1F1B, interleaved:  m max(f+b) + (sum(f+b) - max(f+b)) / v
    GPipe:              m (max f + max b) + sum f - max f + sum b - max b
    zbv:                the order of its 2p stages simulated, each half of its rank's f, b and w (no closed form)
    ZB-H1 ("zb-1p"), ZB-H2 ("zb-2p"):  m max(f+b) + sum(f+b - k w) - max(f+b - k w), k = 2, 3, each term at least 0

with m micro-batches, v virtual stages a rank. Equal stages: bubbles (p-1)(f+b)/v (Narayanan et al. 2021, section 2.2)
and (p-1)(f+b-2w), (p-1)(f+b-3w) (Qi et al. 2023, arXiv:2401.10241, table 2). Gradient exchange beyond what overlap
hides and the optimizer follow.
"""

from dataclasses import dataclass

import numpy as np

from autopar.cost_models.efficiency import Efficiency
from autopar.cost_models.layer_work import Work, dense_precision
from autopar.cost_models.pipeline import COMPUTE, Segment, StageWork, make_pipeline
from autopar.cost_models.schedules import make_order
from autopar.cost_models.step_work import StepWork, step_work
from autopar.cost_models.timeline import simulate
from autopar.cost_models.training_config import TrainingConfig
from autopar.cost_models.transformer import TransformerShape, model_flops
from autopar.values.cluster import Cluster


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTime:
    """Seconds of one step and what they are: of the busiest stage's compute and communication, idle, after it.

    `mfu` is model flops (attention halved for the causal mask, nothing recomputed, no input embedding) a second over
    the devices' peak in the precision of the matrix products' 16-bit form.
    """

    seconds: float
    pipeline_seconds: float
    bubble_seconds: float
    data_seconds: float
    optimizer_seconds: float
    tokens_per_second: float
    mfu: float


def simulate_step(
    shape: TransformerShape, config: TrainingConfig, cluster: Cluster, efficiency: Efficiency
) -> StepTime:
    """The step's seconds and what follows from them.

    Raises:
        MeshError: if the degrees do not fit the cluster or the model.
    """
    work = step_work(shape, config, cluster, efficiency)
    pipeline, busy, exposed, optimizer = step_parts(work, efficiency)
    seconds = pipeline + exposed + optimizer
    tokens = config.global_batch * config.seq
    flops = model_flops(shape, tokens, config.seq, causal=True)
    return StepTime(
        seconds=seconds,
        pipeline_seconds=pipeline,
        bubble_seconds=pipeline - busy,
        data_seconds=exposed,
        optimizer_seconds=optimizer,
        tokens_per_second=tokens / seconds,
        mfu=flops / seconds / (cluster.num_devices * cluster.device.peak(dense_precision(config))),
    )


def least_seconds(shape: TransformerShape, config: TrainingConfig, cluster: Cluster, efficiency: Efficiency) -> float:
    """Seconds of a step whose pipeline has no bubbles: no schedule takes less."""
    work = step_work(shape, config, cluster, efficiency)
    return _busy(work, efficiency) + sum(_after_pipeline(work, efficiency))


def step_parts(work: StepWork, efficiency: Efficiency) -> tuple[float, float, float, float]:
    """(pipeline with its bubbles, busiest stage, exposed gradient exchange, optimizer) in seconds."""
    price = efficiency.seconds_per_unit()
    config = work.config
    f, b, w = work.forward @ price, work.backward @ price, work.weight @ price
    m = config.num_microbatches
    pipeline = pipeline_seconds(f, b, w, work.counts, m, config.schedule, config.virtual_stages)
    return pipeline, _busy(work, efficiency), *_after_pipeline(work, efficiency)


def _busy(work: StepWork, efficiency: Efficiency) -> float:
    return work.config.num_microbatches * float(((work.forward + work.backward) @ efficiency.seconds_per_unit()).max())


def _after_pipeline(work: StepWork, efficiency: Efficiency) -> tuple[float, float]:
    """Seconds of the exchange that nothing hides, and of the optimizer."""
    config, each = work.config, work.exchange.each_microbatch
    m = config.num_microbatches if each else 1
    exchange = work.exchange.seconds(efficiency.data_link, efficiency.memory) * m
    hidden = 0.0
    if config.overlap_data:
        # Backward of the last micro-batch can hide gradients; with parameters gathered layer by layer all of it can.
        last = float((work.backward @ efficiency.seconds_per_unit()).max())
        hidden = min(efficiency.data_overlap * exchange, _busy(work, efficiency) if each else last)
    return exchange - hidden, work.optimizer_seconds / efficiency.memory + work.host_seconds


def pipeline_seconds(
    forward: Work, backward: Work, weight: Work, counts: Work, num_microbatches: int, schedule: str, virtual_stages: int
) -> float:
    """Seconds of all micro-batches through stages of which `counts[i]` take `forward[i]` and `backward[i]`."""
    both = forward + backward
    m = num_microbatches
    if schedule == "gpipe":
        ramps = _all_but_most(forward, counts) + _all_but_most(backward, counts)
        return m * float(forward.max() + backward.max()) + ramps
    if schedule == "zbv":
        ranks = counts.astype(np.int64)
        return _folded_seconds(np.repeat(forward, ranks), np.repeat(backward, ranks), np.repeat(weight, ranks), m)
    saved = {"1f1b": 0, "zb-1p": 2, "zb-2p": 3}[schedule]
    ramp = _all_but_most(np.maximum(both - saved * weight, 0.0), counts)
    return m * float(both.max()) + ramp / virtual_stages


def _folded_seconds(forward: Work, backward: Work, weight: Work, num_microbatches: int) -> float:
    """Of zbv, for the seconds of each rank."""
    order = make_order("zbv", len(forward), num_microbatches, 2)
    ranks = [
        StageWork(actions={kind: (Segment(COMPUTE, float(x) / 2),) for kind, x in zip("FIW", each, strict=True)})
        for each in zip(forward, backward - weight, weight, strict=True)
    ]
    return simulate(make_pipeline(order, [*ranks, *reversed(ranks)]).tasks).makespan


def bubble_fraction(stages: int, num_microbatches: int, virtual_stages: int = 1) -> float:
    """Idle over useful time of equal stages under GPipe, 1F1B and interleaved 1F1B: (p-1)/(m v)."""
    return (stages - 1) / (num_microbatches * virtual_stages)


def _all_but_most(seconds: Work, counts: Work) -> float:
    return float(seconds @ counts - seconds.max())
