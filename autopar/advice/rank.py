"""Which of a framework's configurations is the fastest that fits? Each is priced by the models that `simulate` uses.

Of one layout, micro-batch and offload the configuration that recomputes least and fits is the fastest, so that the
others are not priced. Memory grows with the micro-batch: the first that does not fit under any recompute ends the row.
A zbv configuration whose bound (no bubbles) is above what is already found is not simulated.
"""

from dataclasses import dataclass, replace

from autopar.advice.candidates import FrameworkLayout, layouts, micro_batches, offloads
from autopar.advice.framework import Framework, Sharding, TransformerJob
from autopar.cost_models.efficiency import Efficiency, nominal_efficiency
from autopar.cost_models.step_memory import StepMemory, step_memory
from autopar.cost_models.step_time import StepTime, least_seconds, simulate_step
from autopar.cost_models.training_config import TrainingConfig
from autopar.errors import ArgumentError

Miss = tuple[FrameworkLayout, TrainingConfig, StepMemory]

RESERVE = "nvidia-smi"
"""Of the memory model: what a device shows, with context, communicators and the allocator's free pieces."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Priced:
    """A configuration and what it takes. nbytes: the fullest device's, reserve included. fits: within its memory."""

    framework: str
    config: TrainingConfig
    sharding: Sharding
    time: StepTime
    memory: StepMemory
    nbytes: float
    fits: bool

    @property
    def seconds(self) -> float:
        return self.time.seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class FrameworkRanking:
    """The fastest that fit, fastest first, and the nearest that do not, fewest bytes first.

    num_priced: configurations whose time was computed. num_weighed: those whose memory was.
    """

    framework: Framework
    best: tuple[Priced, ...]
    too_large: tuple[Priced, ...]
    num_priced: int
    num_weighed: int


def rank(framework: Framework, job: TransformerJob, count: int = 10) -> FrameworkRanking:
    """The `count` fastest configurations of a framework that fit, and as many that do not fit by the least.

    Raises:
        ArgumentError: if the framework can express nothing for this model, batch and number of devices, or not this
            precision.
        ClusterError: if no constants of training steps are known for the device.
    """
    if job.precision not in framework.space.precisions:
        known = ", ".join(framework.space.precisions)
        raise ArgumentError(f"advice for {framework.title} is for {known}, not for {job.precision}")
    efficiency = nominal_efficiency(job.cluster.device)
    limit = job.cluster.device.memory_bytes
    best: list[Priced] = []
    misses: list[Miss] = []
    simulated: list[tuple[float, FrameworkLayout, TrainingConfig, StepMemory]] = []
    weighed = 0

    def add(layout: FrameworkLayout, config: TrainingConfig, memory: StepMemory) -> None:
        best.append(_priced(framework, job, config, layout.sharding, memory, efficiency))

    for layout in layouts(framework, job):
        for size in micro_batches(layout):
            fit = False
            for offload in offloads(framework, job, layout):
                for kind in framework.space.recompute:
                    config = replace(layout.config, micro_batch=size, recompute=kind, offload=offload)
                    memory = step_memory(job.shape, config)
                    weighed += 1
                    if memory.with_reserve(RESERVE) > limit:
                        misses.append((layout, config, memory))
                        continue
                    fit = True
                    if config.schedule == "zbv":
                        bound = least_seconds(job.shape, config, job.cluster, efficiency)
                        simulated.append((bound, layout, config, memory))
                    else:
                        add(layout, config, memory)
                    break
            if not fit:
                break
    if not weighed:
        raise ArgumentError(_nothing(framework, job))
    for bound, layout, config, memory in sorted(simulated, key=lambda each: each[0]):
        best.sort(key=lambda each: (each.seconds, each.nbytes))
        if len(best) >= count and best[count - 1].seconds <= bound:
            break
        add(layout, config, memory)
    best.sort(key=lambda each: (each.seconds, each.nbytes))
    fitting = {each.sharding.name for each in best}
    nearest = _nearest(misses, fitting)[:count]
    return FrameworkRanking(
        framework=framework,
        best=tuple(best[:count]),
        too_large=tuple(_priced(framework, job, c, kind.sharding, m, efficiency) for kind, c, m in nearest),
        num_priced=len(best),
        num_weighed=weighed,
    )


def _nearest(misses: list[Miss], fitting: set[str]) -> list[Miss]:
    """Of each policy, recompute and kind of layout the one with the fewest bytes; first the policies that never fit."""
    misses.sort(key=lambda miss: miss[2].with_reserve(RESERVE))
    kinds: dict[tuple[object, ...], Miss] = {}
    for layout, config, memory in misses:
        key = (layout.sharding.name, config.recompute, config.offload, config.tp > 1, config.pp > 1, config.cp > 1)
        kinds.setdefault(key, (layout, config, memory))
    return sorted(kinds.values(), key=lambda miss: (miss[0].sharding.name in fitting, miss[2].with_reserve(RESERVE)))


def _nothing(framework: Framework, job: TransformerJob) -> str:
    devices = job.cluster.num_devices
    return (
        f"{framework.title} has no configuration for {job.shape.name} on {devices} devices with a global batch of "
        f"{job.global_batch}: the data-parallel ranks of every layout leave a rest; give a batch that {devices} or one "
        "of its divisors divides"
    )


def price(framework: Framework, job: TransformerJob, config: TrainingConfig) -> Priced:
    """One configuration, whether it fits or not.

    Raises:
        AutoparError: if the framework, the model or the cluster cannot have it.
    """
    memory = step_memory(job.shape, config)
    efficiency = nominal_efficiency(job.cluster.device)
    return _priced(framework, job, config, framework.sharding_of(config), memory, efficiency)


def _priced(
    framework: Framework,
    job: TransformerJob,
    config: TrainingConfig,
    sharding: Sharding,
    memory: StepMemory,
    efficiency: Efficiency,
) -> Priced:
    nbytes = memory.with_reserve(RESERVE)
    return Priced(
        framework=framework.name,
        config=config,
        sharding=sharding,
        time=simulate_step(job.shape, config, job.cluster, efficiency),
        memory=memory,
        nbytes=nbytes,
        fits=nbytes <= job.cluster.device.memory_bytes,
    )
