"""Does Accelerate train a planned model as it trains the model alone? Exit code 1 if not.

    python -m examples.integrations.accelerate_loop

One process trains two epochs. Four Gloo ranks train the first under a plan (data and tensor parallel) and save; two
ranks load that under a plan of their own (sharded parameters) and train the second. The share of words that are
guessed right is compared too.
"""

import sys
import tempfile
from typing import Any

import accelerate
import torch
from accelerate.utils import DataLoaderConfiguration, set_seed
from torch.utils.data import DataLoader

from autopar.integrations.accelerate import Accelerator
from examples.integrations.tiny import (
    EPOCHS,
    GLOBAL_BATCH,
    LEARNING_RATE,
    Words,
    agree,
    in_turn,
    loss_fn,
    loss_of,
    say,
    tiny,
)

CLIP = 0.5
ONE_BATCH = DataLoaderConfiguration(split_batches=True, use_seedable_sampler=True)
"""A loader's batch is that of all processes, so schedulers too count steps whatever the number of ranks."""


def train(accelerator: Any, folder: str, first: int, last: int) -> dict[str, list[float]]:
    """Train epochs `first` to `last`, going on from what `folder` holds; losses, and hits after each epoch.

    Nothing here knows of ranks.
    """
    set_seed(0)
    model = tiny()
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    words, others = DataLoader(Words(), GLOBAL_BATCH, shuffle=True), DataLoader(Words(2, seed=2), GLOBAL_BATCH)
    model, optimizer, words, others, scheduler = accelerator.prepare(model, optimizer, words, others, scheduler)
    if first:
        accelerator.load_state(folder)
    losses, hits = [], []
    for epoch in range(first, last):
        words.set_epoch(epoch)
        model.train()
        for tokens, labels in words:
            with accelerator.accumulate(model):
                loss = loss_of(model(tokens), labels)
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), CLIP)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
            losses.append(loss.item())
        hits.append(evaluate(accelerator, model, others))
    accelerator.save_state(folder)
    return {"training": losses, "hits": hits}


def evaluate(accelerator: Any, model: Any, loader: Any) -> float:
    """The share of words that are guessed right."""
    model.eval()
    guessed = []
    for tokens, labels in loader:
        with torch.no_grad():
            guesses = model(tokens).argmax(-1)
        guesses, labels = accelerator.gather_for_metrics((guesses, labels))
        guessed.append(guesses == labels)
    return torch.cat(guessed).double().mean().item()


def main() -> int:
    with tempfile.TemporaryDirectory() as folder:
        alone = accelerate.Accelerator(cpu=True, gradient_accumulation_steps=1, dataloader_config=ONE_BATCH)
        expected = train(alone, f"{folder}/alone", 0, EPOCHS)
        runs = ((4, ("0", "1")), (2, ("1", str(EPOCHS))))
        found = in_turn("examples.integrations.accelerate_loop", folder, runs)
    return 0 if agree("Accelerate", expected, found) else 1


def worker(plan: str, folder: str, first: str, last: str) -> None:
    """One of the ranks that torchrun started."""
    accelerator = Accelerator(plan=plan, distribute={"loss_fn": loss_fn}, dataloader_config=ONE_BATCH)
    say(**train(accelerator, folder, int(first), int(last)))
    accelerator.end_training()


if __name__ == "__main__":
    if len(sys.argv) > 1:
        worker(*sys.argv[1:])
    else:
        sys.exit(main())
