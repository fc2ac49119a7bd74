"""How are tensors written and read? By torch's own checkpoints, in a folder, without its pickles being executed.

DTensors say which part of which whole tensor a rank holds; `torch.distributed.checkpoint` writes parts and reads
whatever part another layout asks for. Reading, torch would unpickle three things: its index `.metadata` with Python's
pickle (here it comes from `tensors.json`), values that are no tensors with `torch.load(weights_only=False)` (here they
are read with `weights_only=True` first), and tensors with `weights_only=True`.
"""

import io
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint import state_dict_loader, state_dict_saver
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import ReadItem

from autopar.errors import CheckpointError, PlanMismatchError
from autopar.runtime.checkpoint_group import Group, lost
from autopar.runtime.manifest import REMEDY, StoredFile
from autopar.runtime.run_state import packed
from autopar.runtime.tensor_index import INDEX, index_from, index_text
from autopar.values.schema import MAX_NBYTES, file_text


class IndexedWriter(FileSystemWriter):
    """Writes the index that is no pickle, too."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.folder = folder

    def finish(self, metadata: Metadata, results: Any) -> None:
        super().finish(metadata, results)
        text = index_text(metadata)
        if len(text) > MAX_NBYTES:
            raise CheckpointError(f"{INDEX} would have {len(text)} bytes, more than the {MAX_NBYTES} that are read")
        (self.folder / INDEX).write_text(text, encoding="utf-8")


class IndexedReader(FileSystemReader):
    """Reads pieces where an index says that they are."""

    def __init__(self, folder: Path, index: Metadata) -> None:
        super().__init__(folder)
        self.index = index

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        return self.index


class PlainPlanner(DefaultLoadPlanner):
    """Takes values that are no tensors without executing what a file says."""

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        read = torch.load(value, map_location="cpu", weights_only=True)
        super().load_bytes(read_item, io.BytesIO(packed(read, read_item.dest_index.fqn)))


def write_tensors(state: Mapping[str, Any], folder: Path, group: Group) -> None:
    """Write the parts of all ranks; they call this together, each with what it holds.

    Raises:
        CheckpointError: on every rank, if one cannot write.
        RankError: if a rank is lost.
    """
    try:
        state_dict_saver.save(dict(state), storage_writer=IndexedWriter(folder), process_group=group)
    except CheckpointException as error:
        raise CheckpointError(f"writing tensors failed on {_reasons(error)}") from error
    except RuntimeError as error:
        raise lost("writing tensors", error) from error


def read_index(folder: Path, files: Mapping[str, StoredFile]) -> Metadata:
    """Where the tensors of a checkpoint are."""
    if INDEX not in files:
        raise CheckpointError(f"{folder} lists no {INDEX}")
    try:
        return index_from(file_text(folder / INDEX, CheckpointError, REMEDY, 1 << 30), files)
    except CheckpointError as error:
        raise CheckpointError(f"{folder}: {error}") from error


def read_tensors(state: dict[str, Any], folder: Path, index: Metadata, group: Group) -> None:
    """Fill `state` in place; all ranks call this together.

    Raises:
        PlanMismatchError: on every rank, if one asks for what the checkpoint has not.
        CheckpointError: on every rank, if one cannot read.
        RankError: if a rank is lost.
    """
    try:
        state_dict_loader.load(
            state, storage_reader=IndexedReader(folder, index), planner=PlainPlanner(), process_group=group
        )
    except CheckpointException as error:
        if error.args[0] == "plan":
            raise PlanMismatchError(
                f"{folder} does not hold a checkpoint of this model and optimizer: {_reasons(error)}; load "
                "into the same model with the same kind of optimizer, or give the root of another run"
            ) from error
        raise CheckpointError(f"reading {folder} failed on {_reasons(error)}") from error
    except RuntimeError as error:
        raise lost(f"reading {folder}", error) from error


def _reasons(error: CheckpointException) -> str:
    return "; ".join(f"rank {rank}: {type(why).__name__}: {why}" for rank, (why, _) in error.failures.items())
