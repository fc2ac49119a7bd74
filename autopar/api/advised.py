"""Which data-parallel configuration of a framework trains a model of any kind fastest? Each is priced as a plan.

`autopar.advice` has formulas for decoder transformers. Of any other model each policy that the framework has (DDP,
ZeRO, FSDP) is a named configuration of it, planned and priced as every plan is. Larger micro-batches take less time and
more memory: the largest that fits is looked for without recompute, and where not even one sample fits, with it. What is
recomputed, or wrapped by itself, is an element of the model's lists of layers.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

from torch import nn

from autopar.advice.framework import Fields, Framework, Sharding, Site
from autopar.advice.planned import ModelAdvice, ModelJob, PlannedConfiguration
from autopar.api.model_plan import ModelPlan
from autopar.api.planning import plan
from autopar.cost_models.training_config import TrainingConfig
from autopar.errors import ArgumentError, BatchError, InfeasibleError, MeshError
from autopar.values.cluster import Cluster
from autopar.values.divisors import divisors
from autopar.values.train_config import NUM_STATES

MOST_MICRO_BATCH = 256
"""Samples of a micro-batch that are tried first."""


def advise_model(
    framework: Framework,
    model: nn.Module,
    example_inputs: Any,
    *,
    job: ModelJob,
    own: Fields | None = None,
    progress: Callable[[str], None] | None = None,
) -> ModelAdvice:
    """Rank the data-parallel configurations of a framework for a model that returns its loss.

    Args:
        framework: whose.
        model: unmodified, on any device.
        example_inputs: of one call, as for `plan`.
        job: how it is trained where.
        own: fields of the user's configuration, which is priced beside.
        progress: told what is being priced.

    Raises:
        ArgumentError: if the framework trains models of its own only, or no plan prices the user's configuration.
        BatchError: if the devices do not divide the batch.
        AutoparError: as `plan`, of a model that cannot be captured.
    """
    if framework.own_models:
        raise ArgumentError(
            f"{framework.name} trains the transformers that it has itself; give one by its name or hf:config.json, or "
            "--for trainer, accelerate, lightning, deepspeed or fsdp"
        )
    devices = job.cluster.num_devices
    if job.global_batch % devices:
        raise BatchError(
            f"global batch {job.global_batch} is not divisible by {devices} data-parallel ranks; use a multiple of "
            f"{devices}"
        )
    tell = progress or (lambda _: None)
    paths, layer = equal_layers(model)
    kinds = framework.space.recompute if paths else framework.space.recompute[:1]
    asked = {
        "dp": devices,
        "micro_batch": 1,
        "global_batch": job.global_batch,
        "seq": 1,  # a model of any kind has samples, not tokens
        "precision": job.precision,
        "optimizer_states": NUM_STATES[job.optimizer],
    }

    def priced(config: TrainingConfig, sharding: Sharding) -> PlannedConfiguration:
        words = f"{_recipe(sharding)},mbs={config.micro_batch}"
        words += f",recompute={config.recompute}" if config.recompute != "none" else ""
        tell(f"pricing {words}")
        kept = [name for name in (job.optimizer, *NUM_STATES) if NUM_STATES[name] == config.optimizer_states]
        found = plan(
            model,
            example_inputs,
            cluster=job.cluster,
            global_batch=config.global_batch,
            precision=replace(job, precision=config.precision).storage,
            optimizer=kept[0],
            baseline=words,
            with_baselines=False,
            check=False,
        )
        return _planned(found, config, sharding, words, job.cluster)

    mine = None
    if own is not None:
        config = framework.config(**{**asked, **own})
        sharding = framework.sharding_of(config)
        _check_planned(config, sharding, devices)
        mine = priced(config, sharding)
    best: list[PlannedConfiguration] = []
    too_large: list[PlannedConfiguration] = []
    left_out: list[str] = []
    for sharding in framework.space.shardings:
        if _recipe(sharding) is None:
            left_out.append(f"{sharding.name}: autopar has no plan that splits state in this way")
            continue
        base = framework.config(**asked, zero=sharding.zero, keep_gathered=sharding.keep_gathered)

        def sized(size: int, kind: str, base: TrainingConfig = base, by: Sharding = sharding) -> PlannedConfiguration:
            return priced(replace(base, micro_batch=size, recompute=kind), by)

        try:
            for each in _largest(sized, job.global_batch // devices, kinds):
                (best if each.fits else too_large).append(each)
        except InfeasibleError as error:
            left_out.append(f"{sharding.name}: {error}")
    return ModelAdvice(
        framework=framework,
        site=Site(cluster=job.cluster, model=type(model).__name__, layer_paths=paths, layer_class=layer),
        job=job,
        own=mine,
        num_params=sum(parameter.numel() for parameter in model.parameters()),
        has_switch=hasattr(model, "gradient_checkpointing_enable"),
        best=tuple(sorted(best, key=lambda each: (each.seconds, each.nbytes))),
        too_large=tuple(sorted(too_large, key=lambda each: each.nbytes)),
        left_out=tuple(left_out),
    )


def _check_planned(config: TrainingConfig, sharding: Sharding, devices: int) -> None:
    """Raises if no plan prices a user's configuration of a model of any kind.

    Raises:
        ArgumentError: naming what is not priced.
        MeshError: if it is for another number of devices.
    """
    for what, is_so in (
        ("tensor, context, expert or pipeline ranks", config.tp * config.cp * config.ep * config.pp > 1),
        (f"offload {config.offload}", config.offload != "none"),
        (f"precision {config.precision}", config.precision not in ("bf16", "fp32")),
        (f"optimizer_states {config.optimizer_states}", config.optimizer_states not in NUM_STATES.values()),
        (sharding.name, _recipe(sharding) is None),
    ):
        if is_so:
            raise ArgumentError(
                f"your configuration has {what}, which is priced for transformers with formulas only; for a model of "
                "any kind autopar plan --baseline prices tensor ranks and stages"
            )
    if config.num_devices != devices:
        raise MeshError(f"your configuration is for {config.num_devices} devices, the cluster has {devices}")


def equal_layers(model: nn.Module) -> tuple[tuple[str, ...], str]:
    """Paths of the lists of two or more modules of one class, the class that holds most of the model's parameters in
    such lists, and its name; () and "" if there is none."""
    paths: dict[type[nn.Module], list[str]] = {}
    sizes: Counter[type[nn.Module]] = Counter()
    for path, module in model.named_modules():
        classes = {type(child) for child in module.children()}
        if path and isinstance(module, (nn.ModuleList, nn.Sequential)) and len(module) > 1 and len(classes) == 1:
            paths.setdefault(kind := classes.pop(), []).append(path)
            sizes[kind] += sum(parameter.numel() for parameter in module.parameters())
    if not paths:
        return (), ""
    kind = max(sizes, key=sizes.__getitem__)
    return tuple(paths[kind]), kind.__name__


def _recipe(sharding: Sharding) -> str | None:
    """The named configuration of a policy; DeepSpeed's ZeRO-2 keeps weights for the step and gradients sharded, hybrid
    groups are no named one."""
    if sharding.hybrid or sharding.zero == 2:
        return None
    if sharding.zero == 3:
        return f"fsdp:zero={2 if sharding.keep_gathered else 3}"
    return f"ddp:zero={sharding.zero}"


def _largest(
    priced: Callable[[int, str], PlannedConfiguration], samples: int, kinds: Sequence[str]
) -> Iterator[PlannedConfiguration]:
    """What was priced until one fits: micro-batches from the largest on by halves, then with recompute."""
    sizes = [size for size in divisors(samples) if size <= MOST_MICRO_BATCH]
    for kind in dict.fromkeys((kinds[0], kinds[-1])):
        upper = len(sizes)
        while upper:
            each = priced(sizes[upper - 1], kind)
            yield each
            if each.fits:
                return
            below = [n for n, size in enumerate(sizes[: upper - 1], start=1) if size * 2 <= sizes[upper - 1]]
            upper = max(below, default=upper - 1)


def _planned(
    found: ModelPlan, config: TrainingConfig, sharding: Sharding, words: str, cluster: Cluster
) -> PlannedConfiguration:
    estimate = found.estimate
    return PlannedConfiguration(
        config=config,
        sharding=sharding,
        words=words,
        seconds=estimate.step_seconds,
        nbytes=estimate.peak_nbytes,
        fits=estimate.peak_nbytes <= cluster.device.memory_bytes,
        memory=dict(estimate.memory),
    )
