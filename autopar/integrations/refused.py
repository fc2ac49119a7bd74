"""Which options of a framework would be ignored, or do something beside the plan? Each with what to do instead."""

from collections.abc import Mapping
from typing import Any

import torch.distributed as dist

from autopar.errors import ArgumentError
from autopar.values.plan import Plan

BF16 = ("bf16", "bf16-mixed")
"""Precisions of a plan that compute in bfloat16."""

SHARDED = "the plan says where parameters, gradients and optimizer state are; leave it out"

ACCELERATOR: Mapping[str, str] = {
    "deepspeed_plugin": SHARDED,
    "deepspeed_plugins": SHARDED,
    "fsdp_plugin": SHARDED,
    "torch_tp_plugin": SHARDED,
    "megatron_lm_plugin": SHARDED,
    "parallelism_config": SHARDED,
    "dynamo_backend": "torch.compile cannot follow messages between ranks; leave it out",
    "dynamo_plugin": "torch.compile cannot follow messages between ranks; leave it out",
}
"""Keywords of `accelerate.Accelerator`."""

ARGUMENTS: Mapping[str, str] = {
    "fp16": "a plan has no loss scaling; plan with precision='bf16-mixed'",
    "fp16_full_eval": "parameters keep the precision of the plan; leave it out",
    "bf16_full_eval": "parameters keep the precision of the plan; leave it out",
    "fsdp": SHARDED,
    "deepspeed": SHARDED,
    "parallelism_config": SHARDED,
    "torch_compile": "torch.compile cannot follow messages between ranks; leave it out",
    "gradient_checkpointing": "the plan says what is recomputed; give autopar.plan a memory limit instead",
    "activation_checkpointing": "the plan says what is recomputed; give autopar.plan a memory limit instead",
    "neftune_noise_alpha": "its hook would never run, because forward was captured; add the noise in the forward",
    "use_liger_kernel": "it exchanges parts of the model after it was planned; apply it before autopar.plan",
    "auto_find_batch_size": "the plan is for one batch size; plan with a memory limit instead",
    "enable_jit_checkpoint": "ranks hear of the signal at different steps, and save together; use save_steps",
}
"""Fields of `transformers.TrainingArguments` that are refused where they are set."""

TRIED_OPTIMIZERS = ("adamw_torch", "adamw_torch_fused", "sgd", "adagrad", "rmsprop")
"""Values of `TrainingArguments.optim` that update distributed parameters as in one process."""


def refuse_options(options: Mapping[str, Any]) -> None:
    """Raises ArgumentError for a keyword of an Accelerator that the plan decides."""
    for name, instead in ACCELERATOR.items():
        if options.get(name) is not None:
            raise ArgumentError(f"Accelerator({name}=...) with a plan: {instead}")
    for handler in options.get("kwargs_handlers") or ():
        refuse_handler(handler)


def refuse_handler(handler: Any) -> None:
    """Raises ArgumentError for a hook on DistributedDataParallel's messages, which would never run."""
    hook = getattr(handler, "comm_hook", None)
    if hook is not None and str(getattr(hook, "value", hook)).lower() != "no":
        raise ArgumentError(
            f"DistributedDataParallelKwargs(comm_hook={hook}) with a plan, which sends gradients itself; leave it out, "
            "and plan with reduce_dtype= for the precision in which ranks sum"
        )


def refuse_state(accelerator: Any) -> None:
    """Refuse what an Accelerator was told by its environment (`accelerate launch`), or is not one of the processes.

    Raises:
        ArgumentError: naming what to change.
    """
    if accelerator.num_processes != dist.get_world_size():
        raise ArgumentError(
            f"Accelerate sees {accelerator.num_processes} processes and there are {dist.get_world_size()}: it has no "
            "GPU and was not told to use the CPU; give use_cpu=True to TrainingArguments, cpu=True to an Accelerator "
            "or PartialState that is made before"
        )
    kind = str(getattr(accelerator.distributed_type, "value", accelerator.distributed_type))
    if kind not in ("NO", "MULTI_GPU", "MULTI_CPU"):
        raise ArgumentError(
            f"Accelerate was set up for {kind} (by a plugin, or by the configuration of accelerate launch); {SHARDED}: "
            "start with torchrun, or with a configuration of the kind MULTI_GPU"
        )
    mesh = getattr(accelerator, "parallelism_config", None)
    if mesh is not None:
        raise ArgumentError(f"Accelerate has a parallelism_config; {SHARDED}")
    backend = str(getattr(accelerator.state.dynamo_plugin.backend, "value", accelerator.state.dynamo_plugin.backend))
    if backend.upper() != "NO":
        raise ArgumentError(f"Accelerate was told to compile with {backend}; {ACCELERATOR['dynamo_plugin']}")
    if accelerator.dispatch_batches:
        raise ArgumentError(
            "dispatch_batches=True cuts each batch in parts for the processes, and a planned step takes the whole on "
            "every rank; leave it out"
        )


def refuse_precision(asked: str, plan: Plan) -> None:
    """Raises ArgumentError if a framework is asked for a precision that the plan does not compute in."""
    own = plan.config.precision
    if asked in (None, "no") or (asked == "bf16" and own in BF16):
        return
    if asked == "bf16":
        raise ArgumentError(
            f"bf16 is asked for, and the plan computes in {own}; plan with precision='bf16-mixed', or leave bf16 out"
        )
    raise ArgumentError(
        f"mixed precision {asked} is asked for, and a plan has no loss scaling and no float8; plan with "
        "precision='bf16-mixed' and ask for bf16"
    )


def refuse_arguments(args: Any, plan: Plan) -> None:
    """Refuse what of `transformers.TrainingArguments` the plan decides, or would be ignored.

    Raises:
        ArgumentError: for the first of them, with what to do instead.
    """
    for name, instead in ARGUMENTS.items():
        if value := getattr(args, name, None):
            raise ArgumentError(f"TrainingArguments({name}={value!r}) with a plan: {instead}")
    if args.n_gpu > 1:
        raise ArgumentError(
            f"this process sees {args.n_gpu} GPUs and the Trainer would copy the model to each (DataParallel); start "
            "one process a GPU with torchrun --nproc-per-node"
        )
    if args.bf16:
        refuse_precision("bf16", plan)
    if getattr(args, "train_sampling_strategy", None) == "batch_rebalance":
        raise ArgumentError(
            "train_sampling_strategy='batch_rebalance' deals each process its own rows, and a planned step takes the "
            "global batch; use 'random', 'sequential' or 'group_by_length'"
        )


def refuse_optimizer(args: Any) -> None:
    """Raises ArgumentError for a `TrainingArguments.optim` that was not seen to update DTensors as in one process."""
    name = str(getattr(args.optim, "value", args.optim))
    if name not in TRIED_OPTIMIZERS:
        raise ArgumentError(
            f"TrainingArguments(optim={name!r}): only {', '.join(TRIED_OPTIMIZERS)} were seen to update parameters "
            "that ranks share as in one process; use one of them, or give optimizers=(your_optimizer, None)"
        )
