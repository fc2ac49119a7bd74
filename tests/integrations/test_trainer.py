"""The Trainer's loop over a planned model is the Trainer's loop over the model."""

import warnings
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from autopar.errors import ArgumentError, BatchError, OptimizerError, RankError
from tests.process_group import ranks

pytest.importorskip("accelerate", reason="accelerate is not installed: pip install 'autopar[integrations]'")

import transformers
from torch import nn

import autopar
from autopar.integrations.in_place import distribute_with
from autopar.integrations.refused import ARGUMENTS, refuse_arguments, refuse_optimizer
from autopar.integrations.transformers import _joined
from examples.integrations import trainer_loop as cases

pytestmark = pytest.mark.filterwarnings("ignore")  # the frameworks' advice
STEPS, SAVED, BATCH = 4, 2, 4


def made(kind: Any, folder: str, world: int, rows: int = 5 * BATCH, **more: Any) -> Any:
    """A Trainer of `STEPS` steps of `BATCH` samples in two parts."""
    given = dict(
        per_device_train_batch_size=BATCH // world // 2,
        gradient_accumulation_steps=2,
        max_steps=STEPS,
        learning_rate=1e-2,
        max_grad_norm=0.3,
        logging_steps=1,
        save_steps=SAVED,
        include_num_input_tokens_seen="all",
        use_cpu=True,
        report_to=[],
        disable_tqdm=True,
    )
    args = transformers.TrainingArguments(folder, **(given | more.pop("args", {})))
    return kind(cases.llama(1), args=args, train_dataset=cases.rows(rows, 1), **more)


def history(trainer: Any) -> list[dict[str, float]]:
    kept = ("loss", "grad_norm", "learning_rate", "num_input_tokens_seen", "total_flos")
    return [{name: entry[name] for name in kept if name in entry} for entry in trainer.state.log_history]


def refuse_batches(kind: Any, folder: str, plan: str) -> None:
    with pytest.raises(BatchError, match=r"size 1 x 1 processes x gradient_accumulation_steps 2 are 2; change one"):
        made(kind, folder, 2, args={"accelerator_config": {"split_batches": True}}, plan=plan)
    with pytest.raises(BatchError, match=r"an epoch of 18 samples ends with 2, and .* of 4 alone; give the Trainer 16"):
        made(kind, folder, 2, rows=18, args={"max_steps": 5}, plan=plan)


def on_rank(folder: str, plans: dict[str, str]) -> Any:
    """Train under one plan, and from what that saved on under another."""
    from autopar.integrations.transformers import Trainer

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        whole = made(Trainer, folder, 2, plan=plans["fsdp"])
        whole.train()
        refuse_batches(Trainer, folder, plans["stages"])
        resumed = made(Trainer, f"{folder}/resumed", 2, plan=plans["stages"])
        resumed.train(resume_from_checkpoint=f"{folder}/checkpoint-{SAVED}")
        resumed.save_model()
        Path(folder, "a file").touch()
        with pytest.raises(Exception, match=r"Not a directory|rank 0 failed with NotADirectoryError") as failed:
            resumed.save_model(f"{folder}/a file/below")
        assert isinstance(failed.value, RankError if torch.distributed.get_rank() else NotADirectoryError)
    return history(whole), history(resumed)


def test_a_run_is_that_of_the_trainer_alone_and_goes_on_under_another_plan(tmp_path: Path) -> None:
    if not hasattr(transformers.Trainer, "_get_num_items_in_batch"):
        pytest.skip(f"the Trainer of transformers {transformers.__version__} counts labels that nothing predicts")
    alone = made(transformers.Trainer, str(tmp_path / "alone"), 1)
    alone.train()
    batch = torch.zeros(BATCH, cases.SEQUENCE, dtype=torch.int64)
    plans = {}
    for name, how in (("fsdp", {"baseline": "fsdp"}), ("stages", {"baseline": "ddp:pp=2,mbs=2"})):
        inputs = {"input_ids": batch, "labels": batch.clone()}
        plans[name] = str(tmp_path / f"{name}.json")
        autopar.plan(cases.llama(1), inputs, cluster="2xcpu", check=False, **how).save(plans[name])
    expected = history(alone)
    for whole, resumed in ranks(2).run(on_rank, str(tmp_path / "ranks"), plans):
        for found in (whole, resumed):
            assert len(found) == len(expected)
            for one, other in zip(found[:-1], expected[:-1], strict=True):
                assert one == pytest.approx(other, abs=2e-6)
            assert found[-1]["total_flos"] == expected[-1]["total_flos"]
    saved = tmp_path / "ranks" / f"checkpoint-{SAVED}"
    there = {path.name for path in saved.iterdir()}
    assert {"autopar", "config.json", "model.safetensors", "scheduler.pt", "trainer_state.json"} <= there
    assert "optimizer.pt" not in there
    kept = transformers.LlamaForCausalLM.from_pretrained(tmp_path / "ranks" / "resumed")
    for one, other in zip(kept.parameters(), alone.model.parameters(), strict=True):
        assert torch.allclose(one, other, atol=1e-5)


PLAN = SimpleNamespace(config=SimpleNamespace(precision="fp32"))


def arguments(**given: Any) -> Any:
    plain = transformers.TrainingArguments("unused", use_cpu=True, report_to=[])
    for name, value in given.items():
        setattr(plain, name, value)
    return plain


@pytest.mark.parametrize("name", sorted(ARGUMENTS))
def test_arguments_that_the_plan_decides_are_refused(name: str) -> None:
    if not hasattr(arguments(), name):
        pytest.skip(f"transformers {transformers.__version__} has no such argument")
    with pytest.raises(ArgumentError, match=rf"TrainingArguments\({name}="):
        refuse_arguments(arguments(**{name: True}), PLAN)


def test_other_arguments_are_refused_where_they_do_not_fit() -> None:
    refuse_arguments(arguments(), PLAN)
    with pytest.raises(ArgumentError, match="the plan computes in fp32; plan with precision='bf16-mixed'"):
        refuse_arguments(arguments(bf16=True), PLAN)
    refuse_arguments(arguments(bf16=True), SimpleNamespace(config=SimpleNamespace(precision="bf16-mixed")))
    with pytest.raises(ArgumentError, match="deals each process its own rows"):
        refuse_arguments(arguments(train_sampling_strategy="batch_rebalance"), PLAN)
    with pytest.raises(ArgumentError, match=r"sees 2 GPUs .* start one process a GPU with torchrun"):
        refuse_arguments(arguments(_n_gpu=2), PLAN)
    with pytest.raises(ArgumentError, match=r"optim='adafactor'\): only adamw_torch, .* were seen"):
        refuse_optimizer(arguments(optim="adafactor"))


def test_the_batches_of_a_step_make_one() -> None:
    rows = torch.arange(6).view(2, 3)
    assert torch.equal(_joined([{"x": rows}, {"x": rows[:1]}])["x"], torch.cat([rows, rows[:1]]))
    with pytest.raises(BatchError, match=r"x of sizes \(2, 3\), \(2, 2\), which do not make one batch"):
        _joined([{"x": rows}, {"x": rows[:, :2]}])
    for one, other in (({"x": rows}, {"x": rows, "y": rows}), ({"x": rows, "y": rows}, {"x": rows})):
        with pytest.raises(BatchError, match=r"have y of sizes .*NoneType.* give each the same tensors"):
            _joined([one, other])


def test_an_optimizer_that_is_not_of_the_new_model_is_refused() -> None:
    model = nn.Linear(2, 2)
    other = torch.optim.SGD(nn.Linear(3, 3).parameters(), lr=0.1)
    with pytest.raises(OptimizerError, match=r"holds 2 parameters that are not the model's .* \(3, 3\)"):
        distribute_with(model, PLAN, [other], {})
    used = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    model(torch.ones(2)).sum().backward()
    used.step()
    with pytest.raises(OptimizerError, match="has made steps on the model's whole parameters"):
        distribute_with(model, PLAN, [used], {})
