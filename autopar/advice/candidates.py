"""Every configuration that a framework can express for a job: degrees, policies, schedules, micro-batches."""

from collections.abc import Iterator
from dataclasses import dataclass, replace

from autopar.advice.framework import Framework, FrameworkSpace, Sharding, TransformerJob
from autopar.cost_models.host_offload import has_host
from autopar.cost_models.training_config import TrainingConfig
from autopar.values.divisors import divisors

MOST_MICRO_BATCH = 64
"""Samples of a micro-batch, at most. Half and double change no choice of the questions in docs/results/advice.md."""
LEAST_CONTEXT = 1024
"""Tokens of a context parallel rank, at least: a judgement, attention kernels of few tokens idle. Of the questions in
docs/results/advice.md half changes no choice, double two, by 1.5% and 2.3% of a step."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FrameworkLayout:
    """Everything of a configuration but its micro-batch and what is recomputed."""

    config: TrainingConfig
    sharding: Sharding


def layouts(framework: Framework, job: TransformerJob) -> Iterator[FrameworkLayout]:
    """Degrees that divide what they split, with every policy and schedule, of micro-batches of one sample."""
    space, shape = framework.space, job.shape
    devices = job.cluster.num_devices
    for tp in _tensor(space, job):
        for cp in _context(space, job):
            for pp in divisors(devices // (tp * cp)) if devices % (tp * cp) == 0 else ():
                dp = devices // (tp * cp * pp)
                if job.global_batch % dp or (pp > 1 and not space.schedules):
                    continue
                for schedule, chunks in _pipelines(space, job, pp, job.global_batch // dp):
                    base = framework.config(
                        tp=tp,
                        pp=pp,
                        dp=dp,
                        cp=cp,
                        schedule=schedule,
                        virtual_stages=chunks,
                        sequence_parallel=space.sequence_parallel and tp > 1,
                        micro_batch=1,
                        global_batch=job.global_batch,
                        seq=job.seq,
                        precision=job.precision,
                        optimizer_states=job.optimizer_states,
                    )
                    for ep in divisors(dp) if space.expert and shape.experts > 1 else (1,):
                        if shape.experts % ep == 0:
                            yield from _sharded(space, replace(base, ep=ep), job)


def micro_batches(layout: FrameworkLayout) -> Iterator[int]:
    """Samples of a micro-batch, from one on; a pipeline has at least as many micro-batches as ranks, interleaved ones a
    multiple of that (Narayanan et al. 2021, section 2.2)."""
    config = layout.config
    for size in divisors(config.global_batch // config.dp):
        count = config.global_batch // (config.dp * size)
        if size > MOST_MICRO_BATCH or (config.pp > 1 and count < config.pp):
            return
        if config.virtual_stages == 1 or count % config.pp == 0:
            yield size


def offloads(framework: Framework, job: TransformerJob, layout: FrameworkLayout) -> tuple[str, ...]:
    """What the host may hold, where it is known: optimizer state that ZeRO splits, everything under ZeRO-3."""
    zero = layout.config.zero
    most = {"none": True, "optimizer": zero > 0, "all": zero == 3 and layout.config.pp == 1}
    return tuple(kind for kind in framework.space.offload if kind == "none" or (most[kind] and has_host(job.cluster)))


def _tensor(space: FrameworkSpace, job: TransformerJob) -> tuple[int, ...]:
    shape = job.shape
    fitting = space.tensor and (not space.tensor_needs_llama or (shape.gated and shape.experts <= 1))
    most = job.site.devices_per_node if fitting else 1
    found = (n for n in divisors(shape.heads) if n <= most and shape.ffn % n == 0)
    return tuple(n for n in found if shape.kv_heads % n == 0 or (space.repeats_keys and n % shape.kv_heads == 0))


def _context(space: FrameworkSpace, job: TransformerJob) -> tuple[int, ...]:
    """Powers of two: ranks take a piece from the front and one from the end each (load balance of causal attention)."""
    found = [1]
    while space.context and job.seq % (4 * found[-1]) == 0 and job.seq // (2 * found[-1]) >= LEAST_CONTEXT:
        found.append(2 * found[-1])
    return tuple(found)


def _pipelines(space: FrameworkSpace, job: TransformerJob, pp: int, samples: int) -> Iterator[tuple[str, int]]:
    if pp == 1:
        yield "1f1b", 1
        return
    if samples < pp:
        return
    layers = job.shape.layers
    for schedule in space.schedules:
        for chunks in space.virtual_stages if schedule == "1f1b" else (1,):
            stages = pp * (2 if schedule == "zbv" else chunks)
            even = not space.even_layers or layers % stages == 0 or (layers + 2) % stages == 0
            if stages <= layers and even:
                yield schedule, chunks


def _sharded(space: FrameworkSpace, config: TrainingConfig, job: TransformerJob) -> Iterator[FrameworkLayout]:
    alone = config.dp * config.cp == 1
    for sharding in space.shardings[:1] if alone else space.shardings:
        if sharding.alone and config.tp * config.cp > 1:
            continue
        if config.pp > 1 and sharding.keep_gathered:
            continue  # stages keep what they gathered as it is
        chosen = replace(config, zero=sharding.zero, keep_gathered=sharding.keep_gathered)
        if not sharding.hybrid:
            yield FrameworkLayout(config=chosen, sharding=sharding)
            continue
        for groups in divisors(config.dp)[1:-1]:
            yield FrameworkLayout(config=replace(chosen, replicate=groups), sharding=sharding)
