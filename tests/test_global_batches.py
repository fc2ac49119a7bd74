"""A loader of each process's rows becomes one of all their rows, in the same order."""

from itertools import chain
from typing import Any

import pytest
import torch
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, SequentialSampler

from autopar.errors import BatchError
from autopar.integrations.global_batches import JoinedBatches, with_batches_joined


class Backwards(BatchSampler):
    """Batches of a sampler of somebody's own."""

    def __iter__(self) -> Any:
        return reversed(list(super().__iter__()))

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch


class Counted(IterableDataset[int]):
    def __iter__(self) -> Any:
        return iter(range(7))


def rows(loader: Any) -> list[list[int]]:
    return [batch.tolist() for batch in loader]


@pytest.mark.parametrize("drop_last", [False, True])
@pytest.mark.parametrize("count", [1, 2, 3])
def test_batches_are_those_of_all_processes(count: int, drop_last: bool) -> None:
    data = list(range(11))
    single = rows(DataLoader(data, batch_size=2, drop_last=drop_last))
    grouped = [[*chain(*single[i : i + count])] for i in range(0, len(single), count)]
    if drop_last:
        grouped = [batch for batch in grouped if len(batch) == 2 * count]
    joined = with_batches_joined(DataLoader(data, batch_size=2, drop_last=drop_last), count)
    assert rows(joined) == grouped
    assert len(joined) == len(grouped)
    assert joined.batch_sampler.batch_size == 2 * count
    other = JoinedBatches(BatchSampler(SequentialSampler(data), 2, drop_last), count)
    assert [*other] == grouped
    assert len(other) == len(grouped)


def test_a_batch_sampler_of_somebodys_own_keeps_its_order() -> None:
    data = list(range(6))
    sampler = Backwards(SequentialSampler(data), 2, False)
    joined = with_batches_joined(DataLoader(data, batch_sampler=sampler), 2)
    assert rows(joined) == [[4, 5, 2, 3], [0, 1]]
    made = joined.batch_sampler
    made.set_epoch(3)
    assert sampler.epoch == 3
    assert made.sampler is sampler.sampler
    made.sampler = SequentialSampler(data[:2])
    assert rows(joined) == [[0, 1]]


def test_a_stream_is_read_in_larger_batches() -> None:
    assert rows(with_batches_joined(DataLoader(Counted(), batch_size=2), 2)) == [[0, 1, 2, 3], [4, 5, 6]]


def test_rows_that_are_not_known_are_refused() -> None:
    with pytest.raises(BatchError, match="the loader has batch_size=None"):
        with_batches_joined(DataLoader([1, 2], batch_size=None), 2)
    with pytest.raises(BatchError, match="the loader's dataset makes the batches itself"):
        with_batches_joined(DataLoader(Counted(), batch_size=None), 2)
    with pytest.raises(BatchError, match="the batch sampler list has no batch_size"):
        with_batches_joined(DataLoader(torch.arange(4), batch_sampler=[[0, 1], [2, 3]]), 2)
