"""Does torchtitan's graph trainer train a planned model as it trains the model alone? Exit code 1 if not.

    python -m examples.integrations.torchtitan_loop

The model is torchtitan's Llama 3 for debugging. One process trains six steps. Four Gloo ranks train three under a plan
(data and tensor parallel) and save by `torch.distributed.checkpoint`, as torchtitan's checkpointer does; two ranks
resume under a plan of their own (sharded parameters) and train three more. The step is torchtitan's own
`GraphTrainer.train_step`: it traces forward, loss and backward with make_fx, clips, and updates. torchtitan's Trainer
starts on GPUs only, so its parts are put together here.
"""

import os
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torchtitan.distributed.parallel_dims
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torchtitan.components.loss import CrossEntropyLoss
from torchtitan.distributed import ParallelDims
from torchtitan.distributed.utils import get_spmd_context
from torchtitan.experiments.graph_trainer.configs import GraphTrainerCompileConfig
from torchtitan.experiments.graph_trainer.llama3 import model_registry
from torchtitan.experiments.graph_trainer.trainer import GraphTrainer

import autopar
from autopar.integrations.torchtitan import parallelize_fn
from autopar.runtime import init
from examples.integrations.tiny import (
    GLOBAL_BATCH,
    SEQUENCE,
    STEPS_AN_EPOCH,
    Words,
    compare,
    on_ranks,
    say,
)

DEGREES = {1: (1, 1), 2: (2, 1), 4: (2, 2)}
"""Data and tensor parallel degree by number of ranks."""
CLIP = 0.5
LEARNING_RATE = 1e-3  # at ten times that the first steps of AdamW, by signs of gradients, carry rounding to 1e-5
torchtitan.distributed.parallel_dims.device_type = "cpu"  # torchtitan takes a machine without a GPU for one with


def model_spec() -> Any:
    """torchtitan's own Llama 3 for debugging, two layers of it."""
    spec = model_registry("debugmodel", attn_backend="sdpa")
    spec.model.layers = spec.model.layers[:2]
    return spec


def loss_fn(logits: Tensor, batch: dict[str, Tensor]) -> Tensor:
    """What is planned for: torchtitan's loss, of all ranks' rows."""
    return nn.functional.cross_entropy(logits.flatten(0, 1).float(), batch["labels"].flatten())


def planned(world: int) -> autopar.ModelPlan:
    """Four ranks split the batch in two, and heads, columns and words in two; two ranks share parameters out."""
    with torch.device("meta"):
        model = model_spec().model.build()
        tokens = torch.zeros(GLOBAL_BATCH, SEQUENCE, dtype=torch.int64)
    how = {4: "megatron:tp=2", 2: "fsdp"}[world]
    inputs = {"tokens": tokens, "labels": tokens}
    return autopar.plan(model, inputs, cluster=f"{world}xcpu", baseline=how, loss_fn=loss_fn)


def batches(rank: int, degree: int, first: int) -> Iterator[tuple[dict[str, Tensor], Tensor]]:
    """This rank's rows of each global batch, as torchtitan's loaders give them."""
    words, rows = Words(2 * STEPS_AN_EPOCH), GLOBAL_BATCH // degree
    for step in range(first, 2 * STEPS_AN_EPOCH):
        begin = step * GLOBAL_BATCH + rank * rows
        pairs = [words[index] for index in range(begin, begin + rows)]
        tokens, labels = (torch.stack(column) for column in zip(*pairs, strict=True))
        yield {"input": tokens}, labels


def trainer_of(module: nn.Module, dims: ParallelDims, optimizer: torch.optim.Optimizer) -> Any:
    """A graph trainer of torchtitan's parts."""
    trainer: Any = object.__new__(GraphTrainer)
    trainer.model_parts, trainer.parallel_dims, trainer.device = [module], dims, torch.device("cpu")
    trainer.loss_fn = CrossEntropyLoss.Config().build()
    trainer.train_context, trainer.model_config, trainer.tokenizer = get_spmd_context(), None, None
    trainer.step, trainer.ntokens_seen, trainer._traced_step = 0, 0, None
    trainer.gradient_accumulation_steps = trainer.num_pipeline_parallel_microbatches = 1
    trainer.optimizers = optimizer
    trainer.lr_schedulers = SimpleNamespace(get_metrics=dict, step=lambda: None)
    trainer.checkpointer = SimpleNamespace(maybe_wait_for_staging=lambda: None)
    trainer.metrics_processor = SimpleNamespace(should_log=lambda step: False)
    trainer.config = SimpleNamespace(
        compile=GraphTrainerCompileConfig(enable=True, mode="aot_fx_trace", enable_passes=False),
        parallelism=SimpleNamespace(spmd_backend="partial_dtensor", pipeline_parallel_degree=1),
        training=SimpleNamespace(max_norm=CLIP, disable_cuda_graphs=True),
    )
    return trainer


def worker(plan_file: str, steps: str, folder: str, resume: str) -> None:
    """One rank: `steps` steps of torchtitan's loop, from the checkpoint if asked."""
    init()
    world = dist.get_world_size()
    data, tensor = DEGREES[world]
    dims = ParallelDims(
        dp_replicate=1, dp_shard=data, cp=1, tp=tensor, pp=1, ep=1, world_size=world, spmd_backend="partial_dtensor"
    )
    dims.build_mesh()
    spec = model_spec()
    with torch.device("meta"):
        model: nn.Module = spec.model.build()
    if plan_file != "none":
        training = SimpleNamespace(mixed_precision_param="float32")
        spec.parallelize_fn = parallelize_fn(autopar.load_plan(Path(plan_file)), loss_fn=loss_fn)
        model = spec.parallelize_fn(model, parallel_dims=dims, training=training)
    model.to_empty(device="cpu")
    torch.manual_seed(0)
    with torch.no_grad():
        model.init_weights(buffer_device=None)
    model.train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE)
    first = 0
    if resume == "resume":
        params, states = get_state_dict(model, optimizer)
        state = {"model": params, "optimizer": states}
        dcp.load(state, checkpoint_id=folder)
        set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
        first = STEPS_AN_EPOCH
    trainer = trainer_of(model, dims, optimizer)
    seen: list[Tensor] = []
    step = trainer.forward_backward_step

    def noted(**batch: Any) -> Tensor:
        seen.append(step(**batch))
        return seen[-1]

    trainer.forward_backward_step = noted
    data_rank = dims.get_mesh("batch").get_local_rank() if data > 1 else 0
    loader = batches(data_rank, data, first)
    for _ in range(int(steps)):
        trainer.train_step(loader)
    losses = torch.stack([loss.detach() for loss in seen])
    dist.all_reduce(losses)  # each rank's is the sum over its rows, of which `tensor` ranks have the same
    if resume == "save":
        params, states = get_state_dict(model, optimizer)
        dcp.save({"model": params, "optimizer": states}, checkpoint_id=folder)
    ops = {str(node.target).split(".")[1] for node in trainer._traced_step.gm.graph.nodes if "c10d" in str(node.target)}
    say(losses=(losses / tensor).tolist(), traced=sorted(ops))
    dist.destroy_process_group()


def main() -> int:
    name = "examples.integrations.torchtitan_loop"
    with tempfile.TemporaryDirectory() as folder:
        for world in (4, 2):
            planned(world).save(f"{folder}/{world}.json")
        runs = ((1, "none", 6, "whole"), (4, f"{folder}/4.json", 3, "save"), (2, f"{folder}/2.json", 3, "resume"))
        said = [[*on_ranks(w, name, plan, str(n), f"{folder}/saved", how)][-1] for w, plan, n, how in runs]
    one, four, two = said
    print("collectives traced on 4 ranks:", four["traced"], "on 2 ranks:", two["traced"])
    return 0 if compare(one["losses"], four["losses"] + two["losses"], ("torchtitan alone", "4 ranks, then 2")) else 1


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    if len(sys.argv) > 1:
        worker(*sys.argv[1:])
    else:
        sys.exit(main())
