"""Does Lightning train a planned model as it trains the model alone? Exit code 1 if not.

    python -m examples.integrations.lightning_loop

One process trains two epochs with Lightning. Four Gloo ranks train the first under a plan (data and tensor parallel)
and save; two ranks resume from that checkpoint under a plan of their own (sharded parameters) and train the second.
Validation losses are compared too.
"""

import os
import sys
import tempfile
from pathlib import Path
from typing import Any

import lightning as L
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor
from torch.utils.data import DataLoader

import autopar
from autopar.integrations.lightning import AutoparStrategy
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


class Lit(L.LightningModule):
    """Nothing here knows of ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.model = tiny()
        self.found: dict[str, list[float]] = {"training": [], "validation": []}

    def training_step(self, batch: tuple[Tensor, Tensor], index: int) -> Tensor:
        tokens, labels = batch
        loss = loss_of(self.model(tokens), labels)
        self.log("loss", loss, sync_dist=True)
        self.found["training"].append(float(loss.detach()))
        return loss

    def validation_step(self, batch: tuple[Tensor, Tensor], index: int) -> None:
        tokens, labels = batch
        loss = loss_of(self.model(tokens), labels)
        self.log("validation", loss, on_epoch=True, sync_dist=True)

    def on_validation_epoch_end(self) -> None:
        self.found["validation"].append(float(self.trainer.callback_metrics["validation"]))

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=LEARNING_RATE)
        return {"optimizer": optimizer, "lr_scheduler": torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)}


def fit(strategy: Any, devices: int, folder: str, epochs: int, resume: str | None = None) -> dict[str, list[float]]:
    """Train up to `epochs` epochs; losses."""
    lit = Lit()
    trainer = L.Trainer(
        accelerator="cpu",
        devices=devices,
        strategy=strategy,
        max_epochs=epochs,
        gradient_clip_val=CLIP,
        num_sanity_val_steps=0,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[ModelCheckpoint(dirpath=folder, filename="{epoch}", save_top_k=-1)],
    )
    loaders = DataLoader(Words(), batch_size=GLOBAL_BATCH), DataLoader(Words(1, seed=2), batch_size=GLOBAL_BATCH)
    trainer.fit(lit, *loaders, ckpt_path=resume)
    return lit.found


def main() -> int:
    with tempfile.TemporaryDirectory() as folder:
        expected = fit("auto", 1, f"{folder}/alone", EPOCHS)
        runs = ((4, ("1",)), (2, (str(EPOCHS), f"{folder}/ranks/epoch=0.ckpt")))
        found = in_turn("examples.integrations.lightning_loop", folder, runs)
    return 0 if agree("Lightning", expected, found) else 1


def worker(plan: str, folder: str, epochs: str, resume: str | None = None) -> None:
    """One of the ranks that torchrun started."""
    strategy = AutoparStrategy(autopar.load_plan(Path(plan)), loss_fn=loss_fn)
    say(**fit(strategy, int(os.environ["WORLD_SIZE"]), folder, int(epochs), resume))


if __name__ == "__main__":
    if len(sys.argv) > 1:
        worker(*sys.argv[1:])
    else:
        sys.exit(main())
