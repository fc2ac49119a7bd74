"""Each rank gets its part of a batch: by slicing global batches, or by loading only its own rows."""

from dataclasses import replace

import pytest
import torch
from torch.utils.data import DataLoader, Dataset

import tests.runtime_cases as cases
from autopar.errors import BatchError
from autopar.runtime import DistributedBatchSampler, LocalBatch
from autopar.values.placement import parse_layout
from autopar.values.stage_plan import StagePlan
from tests.process_group import ranks


class Samples(Dataset[dict[str, torch.Tensor]]):
    """Row i of one large batch; notes which rows were read."""

    def __init__(self, count: int) -> None:
        self.rows = cases.batch(0, rows=count)
        self.read: list[int] = []

    def __len__(self) -> int:
        return len(self.rows["ids"])

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        self.read.append(index)
        return {name: value[index] for name, value in self.rows.items()}


def with_inputs(layout: str, mesh_shape: tuple[int, ...], **others: str) -> StagePlan:
    plan = cases.data_parallel(mesh_shape)
    inputs = {spec.placeholder: parse_layout(others.get(spec.path, layout)) for spec in cases.captured().inputs}
    return replace(plan, layouts={**plan.layouts, **inputs})


def loaded(plan: StagePlan) -> tuple[list[float], list[float], list[int]]:
    """Losses of an epoch by own rows, losses of the same global batches, rows read."""
    module, twin = cases.distributed(plan), cases.distributed(plan)
    samples = Samples(20)
    sampler = DistributedBatchSampler(samples, module, seed=4)
    sampler.set_epoch(1)
    assert len(sampler) == 2
    mine = [module(LocalBatch(batch)).item() for batch in DataLoader(samples, batch_sampler=sampler)]
    order = torch.randperm(20, generator=torch.Generator().manual_seed(5)).tolist()
    whole = []
    for first in (0, 8):
        rows = order[first : first + 8]
        whole.append(twin(**{name: value[rows] for name, value in samples.rows.items()}).item())
    return mine, whole, samples.read


@pytest.mark.parametrize(
    ("layout", "mesh_shape", "rows"), [("S0", (2,), 8), ("S0,S0", (2, 2), 4), ("S0,S1", (2, 2), 8), ("S0,R", (2, 2), 8)]
)
def test_own_rows_make_the_global_batch(layout: str, mesh_shape: tuple[int, ...], rows: int) -> None:
    results = ranks(2 * len(mesh_shape)).run(loaded, with_inputs(layout, mesh_shape))
    for mine, whole, read in results:
        assert mine == pytest.approx(whole, rel=1e-12)
        assert mine == pytest.approx(results[0][0], rel=1e-12)
        assert len(read) == rows
    assert len({index for _, _, read in results for index in read}) == 16


def refusals(plan: StagePlan) -> str:
    module = cases.distributed(plan)
    with pytest.raises(BatchError) as error:
        DistributedBatchSampler(Samples(20), module)
    return str(error.value)


def test_inputs_split_differently_need_global_batches() -> None:
    for text in ranks(2).run(refusals, with_inputs("S0", (2,), labels="S1")):
        assert "ids: 4 of 8" in text and "labels: 8 of 8" in text and "local_batch" in text


def small(plan: StagePlan) -> None:
    with pytest.raises(BatchError, match="7 samples"):
        DistributedBatchSampler(Samples(7), cases.distributed(plan))


def test_a_dataset_smaller_than_a_batch_is_refused() -> None:
    ranks(2).run(small, cases.data_parallel((2,)))


def structures(plan: StagePlan) -> None:
    module, whole = cases.distributed(plan), cases.batch(3)
    rank = module.groups.rank
    expected = whole["ids"][4 * rank : 4 * rank + 4]
    extra = {**whole, "note": "kept"}
    sliced = module.local_batch(extra)
    assert list(sliced.batch) == list(extra) and sliced.batch["note"] == "kept"
    assert torch.equal(sliced.batch["ids"], expected)
    assert module.local_batch(sliced) is sliced
    with pytest.raises(BatchError, match="drop_last"):
        module.local_batch(cases.batch(3, rows=5))


def test_a_batch_keeps_its_structure() -> None:
    ranks(2).run(structures, cases.data_parallel((2,)))


def saved_between_epochs(plan: StagePlan) -> tuple[int, int]:
    """Batches of an epoch, and of the one whose position was saved before it began."""
    module = cases.distributed(plan)
    sampler, other = (DistributedBatchSampler(Samples(20), module, seed=4) for _ in range(2))
    batches = len(list(sampler))
    sampler.set_epoch(1)
    other.load_state_dict(sampler.state_dict())
    return batches, len(list(other))


def test_a_position_between_epochs_is_the_beginning_of_the_next() -> None:
    for batches, after in ranks(2).run(saved_between_epochs, with_inputs("S0", (2,))):
        assert after == batches == 2
