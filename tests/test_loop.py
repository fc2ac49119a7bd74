"""A training loop as people write it does under every kind of plan what it does in one process."""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import autopar
from autopar.api.model_plan import load_plan
from autopar.runtime import load, save
from tests.process_group import ranks
from tests.runtime_cases import whole

ROWS, LENGTH, WIDTH, WORDS = 8, 4, 8, 12


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 16), nn.Linear(16, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = x + self.down(F.gelu(self.up(self.norm(x))))
        return result


class Words(nn.Module):
    """Logits, and the loss where there are labels; tied weights, other behaviour in evaluation."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(WORDS, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.head = nn.Linear(WIDTH, WORDS, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, ids: Tensor, labels: Tensor | None = None) -> dict[str, Tensor]:
        x = self.embedding(ids)
        for block in self.blocks:
            x = block(x)
        logits = self.head(x * (1.0 if self.training else 0.9))
        if labels is None:
            return {"logits": logits}
        return {"loss": F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=0), "logits": logits}


def words() -> Words:
    with torch.random.fork_rng():
        torch.manual_seed(11)
        return Words().double()


def data(step: int, rows: int = ROWS) -> dict[str, Tensor]:
    ids = torch.randint(0, WORDS, (2, rows, LENGTH), generator=torch.Generator().manual_seed(step))
    return {"ids": ids[0], "labels": ids[1]}


class Loop:
    """Parameter groups by kind of module, a scheduler, clipping, a moving average, evaluation, a short last batch."""

    def __init__(self, module: Any, by_step: bool) -> None:
        self.module, self.by_step = module, by_step
        plain = {id(p) for m in module.modules() if isinstance(m, (nn.LayerNorm, nn.Embedding)) for p in m.parameters()}
        named = [p for _, p in module.named_parameters()]
        groups = [
            {"params": [p for p in named if id(p) not in plain], "weight_decay": 0.1},
            {"params": [p for p in named if id(p) in plain], "weight_decay": 0.0},
        ]
        self.optimizer = torch.optim.AdamW([g for g in groups if g["params"]], lr=1e-2)
        self.scheduler = torch.optim.lr_scheduler.LambdaLR(self.optimizer, lambda step: 1 / (1 + step))
        self.average = copy.deepcopy(module)
        self.seen: list[float] = []

    def train(self, steps: range) -> None:
        clip = getattr(self.module, "clip_grad_norm_", None)
        for step in steps:
            batch = data(step, 6 if step == 3 and not self.by_step else ROWS)
            if self.by_step:
                loss = self.module.train_step(batch)
            else:
                loss = self.module(**batch)["loss"]
                loss.backward()
            norm = nn.utils.clip_grad_norm_(self.module.parameters(), 0.5) if clip is None else clip(0.5)
            self.optimizer.step()
            self.scheduler.step()
            self.optimizer.zero_grad()
            with torch.no_grad():
                for old, new in zip(self.average.parameters(), self.module.parameters(), strict=True):
                    old.mul_(0.9).add_(new, alpha=0.1)
            self.seen += [float(loss.detach()), float(whole(norm))]
            if step % 2:
                self.evaluate(step)

    def evaluate(self, step: int) -> None:
        for module in (self.module, self.average):
            module.eval()
            with torch.no_grad():
                batch = data(100 + step, 3)
                logits = module(batch["ids"])["logits"]
                self.seen += [
                    float(logits.square().mean()),
                    float((logits.argmax(-1) == batch["labels"]).double().mean()),
                ]
                self.seen.append(float(module(**batch)["loss"]))
            module.train()


class OneProcess(Words):
    """The same loop's model in one process, trained by steps too."""

    def train_step(self, batch: dict[str, Tensor]) -> Tensor:
        loss = self(**batch)["loss"]
        loss.backward()
        return loss.detach()  # type: ignore[no-any-return]


def expected(by_step: bool) -> list[float]:
    model = words()
    model.__class__ = OneProcess
    loop = Loop(model, by_step)
    loop.train(range(6))
    return loop.seen


def run(plan: str, folder: str, by_step: bool, steps: tuple[int, int]) -> list[float]:
    loop = Loop(autopar.distribute(words(), load_plan(plan)), by_step)
    if steps[0]:
        assert load(loop.module, loop.optimizer, folder, scheduler=loop.scheduler).step == steps[0]
        load(loop.average, None, Path(folder).parent / "average")
    loop.train(range(*steps))
    if not steps[0]:
        save(loop.module, loop.optimizer, folder, step=steps[1], scheduler=loop.scheduler)
        save(loop.average, None, Path(folder).parent / "average", step=steps[1])
    return loop.seen


KINDS: dict[str, dict[str, Any]] = {
    "best": {"mesh": "2x2"},
    "micro-batches": {"baseline": "fsdp", "microbatches": 2},
    "stages": {"mesh": "2", "pipeline": 2, "microbatches": 2},
}


@pytest.mark.parametrize("kind", KINDS)
def test_a_loop_is_that_of_one_process_killed_and_resumed_on_other_ranks(kind: str, tmp_path: Path) -> None:
    by_step = kind in ("micro-batches", "stages")
    keywords = {"with_baselines": False, **KINDS[kind]}
    autopar.plan(words(), data(0), cluster="4xcpu", **keywords).save(tmp_path / "first.json")
    autopar.plan(words(), data(0), cluster="2xcpu", baseline="fsdp", with_baselines=False).save(
        tmp_path / "second.json"
    )
    folder = str(tmp_path / "checkpoint")
    begun = ranks(4).run(run, str(tmp_path / "first.json"), folder, by_step, (0, 4))
    ended = ranks(2).run(run, str(tmp_path / "second.json"), folder, by_step, (4, 6))
    wanted = expected(by_step)
    for seen in begun:
        assert seen + ended[0] == pytest.approx(wanted, rel=1e-10)
