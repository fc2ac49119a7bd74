"""Does the Trainer of transformers train a planned model as it trains the model alone? Exit code 1 if not.

    python -m examples.integrations.trainer_loop

One process trains eight steps. Four Gloo ranks train the first five under a plan (data and tensor parallel) and save;
two ranks resume from that checkpoint under a plan of their own (sharded parameters, two micro-batches) and train the
rest. Norms of gradients, evaluations and the saved weights are compared too.
"""

import os
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import transformers
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM, TrainingArguments

import autopar
from autopar.integrations.transformers import Trainer
from examples.integrations.tiny import GLOBAL_BATCH, agree, in_turn, say

WORDS, SEQUENCE, STEPS, SAVED = 64, 16, 8, 5
SETTINGS: dict[int, dict[str, Any]] = {
    1: {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 2},
    4: {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 1},
    2: {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 2},
}
"""Of each number of ranks: eight samples an optimizer step all of them."""


def llama(layers: int = 2) -> LlamaForCausalLM:
    """The same weights in any process."""
    config = LlamaConfig(
        vocab_size=WORDS,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=SEQUENCE,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=None,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return LlamaForCausalLM(config)


def rows(count: int, seed: int) -> list[dict[str, Tensor]]:
    """Samples, of some of which a part is not to be predicted (label -100)."""
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(0, WORDS, (count, SEQUENCE), generator=generator)
    labels = tokens.clone()
    labels[::3, : SEQUENCE // 2] = -100
    return [{"input_ids": one, "labels": other} for one, other in zip(tokens, labels, strict=True)]


def planned(world: int) -> autopar.ModelPlan:
    batch = torch.zeros(GLOBAL_BATCH, SEQUENCE, dtype=torch.int64)
    inputs = {"input_ids": batch, "labels": batch.clone()}
    how: dict[int, dict[str, Any]] = {4: {"baseline": "megatron:tp=2"}, 2: {"baseline": "fsdp", "microbatches": 2}}
    return autopar.plan(llama(), inputs, cluster=f"{world}xcpu", **how[world])


def trainer(kind: Any, world: int, steps: int, folder: str, **more: Any) -> Any:
    """A Trainer as anybody would make it."""
    args = TrainingArguments(
        folder,
        **SETTINGS[world],
        per_device_eval_batch_size=GLOBAL_BATCH // world,
        max_steps=STEPS,
        learning_rate=1e-3,
        warmup_steps=2,
        max_grad_norm=0.5,
        logging_steps=1,
        eval_strategy="steps",
        eval_steps=4,
        save_steps=SAVED,
        use_cpu=True,
        report_to=[],
        disable_tqdm=True,
    )
    made = kind(model=llama(), args=args, train_dataset=rows(60, 1), eval_dataset=rows(20, 2), **more)
    if steps < STEPS:
        made.add_callback(Stop(steps))
    return made


class Stop(transformers.TrainerCallback):
    """Ends a run early, as whatever ends runs does."""

    def __init__(self, steps: int) -> None:
        self.steps = steps

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        control.should_training_stop = state.global_step >= self.steps


def logged(trainer: Any, first: int = 0) -> dict[str, list[float]]:
    """What a Trainer logged after step `first`, by name."""
    entries = [entry for entry in trainer.state.log_history if entry["step"] > first]
    return {n: [entry[n] for entry in entries if n in entry] for n in ("loss", "grad_norm", "eval_loss")}


def main() -> int:
    with tempfile.TemporaryDirectory() as folder:
        alone = trainer(transformers.Trainer, 1, STEPS, f"{folder}/alone")
        alone.train()
        runs = ((4, (str(SAVED), "0")), (2, (str(STEPS), str(SAVED))))
        found = in_turn("examples.integrations.trainer_loop", folder, runs, planned)
        kept = LlamaForCausalLM.from_pretrained(f"{folder}/ranks")
        difference = max(
            float((a - b).detach().abs().max())
            for a, b in zip(kept.parameters(), alone.model.parameters(), strict=True)
        )
    same = agree("Trainer", logged(alone), found)
    print(f"largest difference of the saved weights: {difference:.1e}")
    return 0 if same and difference < 1e-5 else 1


def worker(plan: str, folder: str, steps: str, first: str) -> None:
    """One of the ranks that torchrun started, which trains from step `first`, saved by others if it is not 0, on."""
    made = trainer(Trainer, int(os.environ["WORLD_SIZE"]), int(steps), folder, plan=Path(plan))
    made.train(resume_from_checkpoint=f"{folder}/checkpoint-{first}" if int(first) else None)
    made.save_model()
    say(**logged(made, int(first)))
    dist.destroy_process_group()


if __name__ == "__main__":
    os.environ["HF_HUB_OFFLINE"] = "1"
    if len(sys.argv) > 1:
        worker(*sys.argv[1:])
    else:
        sys.exit(main())
