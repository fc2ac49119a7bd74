"""How does a loader of each process's rows become one of global batches, which every rank reads alike?

A framework gives each of P processes batches of b rows. A planned step takes the b·P rows that they would have had
together, on every rank.
"""

from collections.abc import Iterator
from typing import Any

from torch.utils.data import BatchSampler, DataLoader, IterableDataset

from autopar.errors import BatchError


class JoinedBatches(BatchSampler):
    """`count` batches of another sampler as one; a last one of fewer is dropped where the other drops short ones.

    batch_size: rows of a whole one.
    """

    def __init__(self, batch_sampler: Any, count: int) -> None:
        if not isinstance(size := getattr(batch_sampler, "batch_size", None), int):
            raise BatchError(
                f"the batch sampler {type(batch_sampler).__name__} has no batch_size, so the rows of a global batch "
                "are not known; give it the attribute batch_size, the rows of each of its batches"
            )
        self.batch_sampler, self.count = batch_sampler, count
        self.batch_size = size * count
        self.drop_last = bool(getattr(batch_sampler, "drop_last", False))

    @property
    def sampler(self) -> Any:
        return getattr(self.batch_sampler, "sampler", None)

    @sampler.setter
    def sampler(self, sampler: Any) -> None:
        self.batch_sampler.sampler = sampler

    def set_epoch(self, epoch: int) -> None:
        """Of the sampler, if it has epochs."""
        if hasattr(self.batch_sampler, "set_epoch"):
            self.batch_sampler.set_epoch(epoch)

    def __len__(self) -> int:
        whole, rest = divmod(len(self.batch_sampler), self.count)
        return whole + (rest > 0 and not self.drop_last)

    def __iter__(self) -> Iterator[list[Any]]:
        joined: list[Any] = []
        for number, batch in enumerate(self.batch_sampler, start=1):
            joined += batch
            if number % self.count == 0:
                yield joined
                joined = []
        if joined and not self.drop_last:
            yield joined


def with_batches_joined(loader: DataLoader[Any], count: int) -> DataLoader[Any]:
    """A loader that reads `count` batches of another as one, in the same order.

    Raises:
        BatchError: for a loader without batches, or whose batch sampler does not say their size.
    """
    if count == 1:
        return loader
    options: dict[str, Any] = {
        name: getattr(loader, name)
        for name in (
            *("num_workers", "collate_fn", "pin_memory", "timeout", "worker_init_fn", "multiprocessing_context"),
            *("generator", "prefetch_factor", "persistent_workers", "pin_memory_device", "in_order"),
        )
        if hasattr(loader, name)
    }
    if isinstance(loader.dataset, IterableDataset):
        if loader.batch_size is None:
            raise BatchError(
                "the loader's dataset makes the batches itself, and cannot be asked for global ones; let it yield "
                "samples and give the loader a batch_size, or let it yield global batches and use split_batches=True"
            )
        return DataLoader(loader.dataset, batch_size=loader.batch_size * count, drop_last=loader.drop_last, **options)
    if loader.batch_sampler is None:
        raise BatchError(
            "the loader has batch_size=None, so the rows of a global batch are not known; give it a batch_size or a "
            "batch sampler, or let it read global batches and use split_batches=True"
        )
    if type(loader.batch_sampler) is BatchSampler:
        plain = loader.batch_sampler
        joined: Any = BatchSampler(plain.sampler, plain.batch_size * count, plain.drop_last)
    else:
        joined = JoinedBatches(loader.batch_sampler, count)
    return DataLoader(loader.dataset, batch_sampler=joined, **options)
