"""A small run that is saved and goes on: a model under a plan, AdamW, a schedule of learning rates, a shuffled sampler,
noise from every generator."""

import hashlib
import itertools
import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

import tests.runtime_cases as cases
from autopar.runtime import DistributedBatchSampler, DistributedModule, LocalBatch
from autopar.runtime.manifest import MANIFEST, checksum_of
from autopar.values.stage_plan import StagePlan

PLAN = cases.data_parallel((2,))


def adamw(module: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW([p for p in module.parameters() if p.requires_grad], lr=0.01, weight_decay=0.1)


class Run:
    """One rank's; `train` gives losses plus what each generator draws."""

    def __init__(self, plan: StagePlan = PLAN, dropout: float = 0.0) -> None:
        self.module: DistributedModule = cases.distributed(plan, dropout)
        self.optimizer = adamw(self.module)
        self.scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(self.optimizer, 10)
        self.rows = cases.batch(0, rows=36)
        self.data = DistributedBatchSampler(range(36), self.module, seed=7)
        self.coming: Iterator[LocalBatch] | None = None

    def seed(self, number: int) -> None:
        torch.manual_seed(number)
        random.seed(number)
        np.random.seed(number)

    def batches(self) -> Iterator[LocalBatch]:
        while True:
            for rows in self.data:
                yield LocalBatch({name: value[rows] for name, value in self.rows.items()})
            self.data.set_epoch(self.data.epoch + 1)

    def train(self, steps: int) -> list[float]:
        """Go on for some steps."""
        self.coming = self.coming or self.batches()
        found = []
        for batch in itertools.islice(self.coming, steps):
            loss = self.module.train_step(batch)
            self.optimizer.step()
            self.optimizer.zero_grad()
            self.scheduler.step()
            found.append(float(loss) + float(torch.rand(())) + random.random() + float(np.random.rand()))
        return found

    @property
    def kept(self) -> dict[str, Any]:
        return {"scheduler": self.scheduler, "data": self.data}

    def state(self) -> dict[str, Tensor]:
        return {**cases.whole_state(self.module), "lr": torch.tensor(self.optimizer.param_groups[0]["lr"])}


def reseal(folder: Path) -> None:
    """Make the manifest right for what the files are now, as somebody would who wants them loaded."""
    body = json.loads((folder / MANIFEST).read_text())
    for name in body["files"]:
        data = (folder / name).read_bytes()
        body["files"][name] = {"nbytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}
    body.pop("checksum")
    (folder / MANIFEST).write_text(json.dumps({**body, "checksum": checksum_of(body)}))
