"""Lightning's loop over a planned model is Lightning's loop over the model."""

import os
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch

import autopar
from autopar.errors import ArgumentError, OptimizerError
from examples.integrations import tiny as cases
from tests.process_group import run_apart

pytest.importorskip("lightning", reason="lightning is not installed: pip install 'autopar[integrations]'")

import lightning as L
from lightning.pytorch.callbacks import ModelCheckpoint
from torch.utils.data import DataLoader

from autopar.integrations.lightning import AutoparStrategy
from autopar.runtime import latest

ARGUMENTS = dict(
    accelerator="cpu",
    num_sanity_val_steps=0,
    logger=False,
    enable_progress_bar=False,
    enable_model_summary=False,
    enable_checkpointing=False,
    max_epochs=1,
)
PLANS: dict[int, dict[str, dict[str, Any]]] = {
    2: {
        "micro-batches": {"baseline": "fsdp", "microbatches": 2},
        "stages": {"baseline": "ddp:pp=2,mbs=2"},
        "local rows": {"baseline": "ddp"},
    },
    4: {"outside": {"baseline": "megatron:tp=2"}},
}
"""By number of ranks, which run them one after the other: kinds of calls, and keywords of their plans."""
ACCUMULATED = {"local rows": 1, "micro-batches": 2, "stages": 2, "outside": 2}


class Lit(L.LightningModule):
    """calls: how the loss is made: outside of the model, by a planned call, or by one of this rank's rows."""

    def __init__(self, calls: str = "outside") -> None:
        super().__init__()
        self.model, self.calls = cases.tiny(), calls
        self.losses: list[float] = []

    def training_step(self, batch: Any, index: int) -> Any:
        tokens, labels = batch
        if self.calls == "outside":
            loss = cases.loss_of(self.model(tokens), labels)
        elif self.calls == "local rows":
            loss = self.model(autopar.LocalBatch((tokens, labels)))
        else:
            loss = self.model(tokens, labels)
        self.log("loss", loss, on_step=True, on_epoch=True, sync_dist=True, reduce_fx="sum")
        self.losses.append(float(loss.detach()))
        return loss

    def train_dataloader(self) -> Any:
        data = cases.Words(4)
        if self.calls == "local rows":
            sampler = autopar.runtime.DistributedBatchSampler(data, self.trainer.strategy.module, shuffle=False)
            return DataLoader(data, batch_sampler=sampler)
        return DataLoader(data, batch_size=cases.GLOBAL_BATCH)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.5, momentum=0.9)


def fit(lit: Any, strategy: Any, devices: int, accumulate: int) -> list[float]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Lightning's advice
        trainer = L.Trainer(
            **ARGUMENTS,
            strategy=strategy,
            devices=devices,
            accumulate_grad_batches=accumulate,
            gradient_clip_val=0.3,
        )
        trainer.fit(lit)
    return [*lit.losses, float(trainer.callback_metrics["loss_epoch"])]


def on_rank(tell: Any, folder: str, devices: int) -> None:
    os.environ["TORCHELASTIC_RUN_ID"] = "test"
    found = {}
    for kind in PLANS[devices]:
        strategy = AutoparStrategy(autopar.load_plan(Path(folder, f"{kind}.json")), loss_fn=cases.loss_fn)
        lit = Lit(kind)
        losses = fit(lit, strategy, devices, ACCUMULATED[kind])
        assert isinstance(lit.model, cases.Tiny), "the part stays what it is"
        found[kind] = losses, sorted(name for name, value in lit.named_parameters() if not value.is_meta)
    tell(found)


@pytest.mark.parametrize("world", sorted(PLANS))
def test_losses_clipping_and_accumulation_are_those_of_lightning_alone(world: int, tmp_path: Path) -> None:
    given = {"cluster": f"{world}xcpu", "loss_fn": cases.loss_fn, "check": False}
    for kind, how in PLANS[world].items():
        autopar.plan(cases.tiny(), cases.example_batch(), **given, **how).save(tmp_path / f"{kind}.json")
    results = run_apart(world, on_rank, str(tmp_path), world)
    assert [code for code, _ in results] == [0] * world
    for kind in PLANS[world]:
        alone = fit(Lit(), "auto", 1, ACCUMULATED[kind])
        seen = set()
        for _, found in results:
            losses, names = found[kind]
            assert losses == pytest.approx(alone, abs=1e-6), kind
            seen |= set(names)
        assert seen == {name for name, _ in Lit().named_parameters()}, kind


def saved_and_resumed(tell: Any, plan: str, devices: int, folder: str, calls: str) -> None:
    """Losses and validation of a run that saves, of one that resumes, and what else a checkpoint is for."""
    os.environ["TORCHELASTIC_RUN_ID"] = "test"
    warnings.simplefilter("ignore")

    def trainer(**more: Any) -> Any:
        strategy = AutoparStrategy(autopar.load_plan(Path(plan)), loss_fn=cases.loss_fn)
        return L.Trainer(**(ARGUMENTS | {"strategy": strategy, "devices": devices} | more))

    first = trainer(
        enable_checkpointing=True,
        callbacks=[ModelCheckpoint(dirpath=folder, filename="kept", save_last=True, every_n_train_steps=2)],
        max_epochs=2,
    )
    whole = Validated(calls)
    first.fit(whole)
    first.save_checkpoint(f"{folder}/again.ckpt")
    first.save_checkpoint(f"{folder}/again.ckpt")
    first.save_checkpoint(f"{folder}/weights.ckpt", weights_only=True)
    found: dict[str, Any] = {"whole": whole.losses, "last step": latest(f"{folder}/last.ckpt")}
    other = Validated(calls)
    found["validated"] = trainer().validate(other, ckpt_path=f"{folder}/weights.ckpt", verbose=False)[0]["value"]
    found["counted"] = int(other.count)
    resumed = Validated(calls)
    trainer(max_epochs=3).fit(resumed, ckpt_path=f"{folder}/last.ckpt")
    found["resumed"] = resumed.losses
    predicted = trainer().predict(resumed, DataLoader(cases.Words(1), batch_size=5))
    found["predicted"] = [tuple(one.shape) for one in predicted]
    first.strategy.remove_checkpoint(f"{folder}/again.ckpt")
    first.strategy.barrier()
    found["files"] = sorted(file.name for file in Path(folder).iterdir())
    tell(found)


class Validated(Lit):
    """With a buffer beside the part, shuffled rows, and validation."""

    def __init__(self, calls: str) -> None:
        super().__init__(calls)
        self.register_buffer("count", torch.zeros((), dtype=torch.int64))

    def training_step(self, batch: Any, index: int) -> Any:
        self.count += 1
        return super().training_step(batch, index)

    def train_dataloader(self) -> Any:
        return DataLoader(cases.Words(4), batch_size=cases.GLOBAL_BATCH, shuffle=True)

    def val_dataloader(self) -> Any:
        return DataLoader(cases.Words(1, seed=3), batch_size=5)

    def validation_step(self, batch: Any, index: int) -> None:
        self.log("value", cases.loss_of(self.model(batch[0]), batch[1]), sync_dist=True, batch_size=len(batch[0]))

    def predict_step(self, batch: Any, index: int) -> Any:
        return self.model(batch[0])


@pytest.mark.parametrize(("how", "calls"), [("fsdp", "outside"), ("ddp:pp=2,mbs=2", "stages")])
def test_checkpoints_are_those_that_lightning_users_expect(how: str, calls: str, tmp_path: Path) -> None:
    plan = autopar.plan(cases.tiny(), cases.example_batch(), cluster="2xcpu", baseline=how, loss_fn=cases.loss_fn)
    plan.save(tmp_path / "plan.json")
    folder = tmp_path / "saved"
    results = run_apart(2, saved_and_resumed, str(tmp_path / "plan.json"), 2, str(folder), calls)
    for code, found in results:
        assert code == 0
        assert found == results[0][1]
        assert len(found["whole"]) == 8 and len(found["resumed"]) == 4 and found["last step"] == 8
        assert found["counted"] == 8 and found["validated"] > 0
        assert found["predicted"] == [(5, cases.SEQUENCE, cases.WORDS), (3, cases.SEQUENCE, cases.WORDS)]
        assert {"last.ckpt", "weights.ckpt"} <= set(found["files"]) and "again.ckpt" not in found["files"]


@pytest.mark.filterwarnings("ignore")  # Lightning's advice
def test_what_cannot_be_is_said() -> None:
    plan = autopar.plan(cases.tiny(), cases.example_batch(), cluster="1xcpu", loss_fn=cases.loss_fn)
    with pytest.raises(ArgumentError, match=r"MixedPrecision, which casts beside the plan; .* precision='bf16-mixed'"):
        L.Trainer(**ARGUMENTS, strategy=AutoparStrategy(plan), devices=1, precision="bf16-mixed")
    strategy = AutoparStrategy(plan, part="net")
    strategy._lightning_module = Lit()
    with pytest.raises(ArgumentError, match="has no part 'net' to distribute; its parts are: model"):
        strategy._distribute()
    with pytest.raises(ArgumentError, match="net is distributed when the trainer sets up the model"):
        strategy.module.train()
    outside = AutoparStrategy(plan)
    outside._lightning_module = Lit()
    outside._lightning_module.head = torch.nn.Linear(1, 1)
    with pytest.raises(ArgumentError, match=r"parameters outside model: head.weight, head.bias"):
        outside._distribute()
    with pytest.raises(ArgumentError, match="a folder that all ranks write"):
        outside._folder("s3://bucket/last.ckpt", None)
    with pytest.warns(UserWarning, match="the old checkpoint nowhere stays .* remove it by hand"):
        outside.remove_checkpoint("nowhere")
    optimizers = [torch.optim.SGD(cases.tiny().parameters(), lr=0.1) for _ in range(2)]
    with pytest.raises(OptimizerError, match="there are 2 optimizers"):
        outside.check_optimizers(optimizers)
    with pytest.raises(OptimizerError, match="parameters that the distributed model does not have; make it in conf"):
        outside.check_optimizers(optimizers[:1])
