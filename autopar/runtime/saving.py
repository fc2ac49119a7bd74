"""How is a checkpoint written so that it is there whole or not at all? Phase by phase, all ranks together:

1. `copy_state` (runtime.checkpoint): what is to be written; beside training, a copy.
2. `begin`: rank 0 makes a hidden folder.
3. `write_shards`: each rank writes its part of the tensors and its own files.
4. `report_files`: each rank has its files on disk and tells sizes and checksums.
5. `write_manifest`: rank 0 sees that it sees them all, and writes the manifest.
6. `rename`: rank 0 gives the folder its name. From here on it is the newest checkpoint.
7. `drop_old`: rank 0 deletes what is no longer kept.

Ranks agree after each phase: if one fails all raise the same error, and the hidden folder is deleted.
"""

import atexit
import sys
import threading
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from autopar.errors import CheckpointError
from autopar.runtime import checkpoint_root
from autopar.runtime.checkpoint_group import Group, from_all, on_all, on_first
from autopar.runtime.manifest import MANIFEST, Manifest, StoredFile
from autopar.runtime.torch_checkpoint import write_tensors
from autopar.values.group_lock import GROUP_LOCK
from autopar.values.whole_file import write_whole

PLAN = "plan.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class RunCopy:
    """What this rank writes of a run.

    tensors: nested state that torch writes. files: contents of the rank's own files, by name.
    alike: what all ranks are to ask for alike.
    model, fingerprint: of the plan. holds: what can be loaded besides the module. keep: how many checkpoints stay.
    """

    root: Path
    step: int
    keep: int
    alike: Mapping[str, str]
    model: str
    fingerprint: str
    holds: tuple[str, ...]
    tensors: Mapping[str, Any]
    files: Mapping[str, bytes]


def write_checkpoint(run: RunCopy, group: Group) -> Path:
    """Write a checkpoint; its folder. All ranks call this together.

    Raises:
        CheckpointError, RankError: as said above.
    """
    partial = on_first(f"beginning step {run.step}", lambda: checkpoint_root.begin(run.root, run.step), group)
    try:
        write_shards(run, partial, group)
        files = report_files(run, partial, group)
        write_manifest(run, partial, files, group)
        folder = rename(run, partial, group)
    except Exception:
        if dist.get_rank() == 0:
            checkpoint_root.discard(partial)
        raise
    drop_old(run, group)
    return folder


def write_shards(run: RunCopy, partial: Path, group: Group) -> None:
    """Write this rank's tensors and files."""
    write_tensors(run.tensors, partial, group)
    on_all(f"writing step {run.step}", lambda: _write_own(run, partial), group)


def _write_own(run: RunCopy, partial: Path) -> None:
    for name, content in run.files.items():
        (partial / name).write_bytes(content)


def report_files(run: RunCopy, partial: Path, group: Group) -> dict[str, StoredFile]:
    """Have this rank's files on disk; sizes and checksums of those of all ranks, by name."""
    found: dict[str, StoredFile] = {}
    for own in from_all(f"checking step {run.step}", lambda: _report_own(run, partial), group):
        found |= own
    return found


def _report_own(run: RunCopy, partial: Path) -> dict[str, StoredFile]:
    rank = dist.get_rank()
    names = {*run.files, *(path.name for path in partial.glob(f"__{rank}_*"))}
    if rank == 0:  # torch's index, and ours
        names |= {path.name for path in partial.iterdir() if path.name in (".metadata", "tensors.json")}
    for name in names:
        checkpoint_root.sync_file(partial / name)
    return {name: checkpoint_root.stored_file(partial / name) for name in sorted(names)}


def write_manifest(run: RunCopy, partial: Path, files: Mapping[str, StoredFile], group: Group) -> None:
    """On rank 0."""
    on_first(f"writing the manifest of step {run.step}", lambda: _write_manifest(run, partial, files), group)


def _write_manifest(run: RunCopy, partial: Path, files: Mapping[str, StoredFile]) -> None:
    unseen = [name for name, file in files.items() if not _has(partial / name, file)]
    if unseen:
        raise CheckpointError(
            f"rank 0 does not see {', '.join(unseen[:3])} in {partial}, which other ranks wrote; give a root on a file "
            "system that all ranks share"
        )
    manifest = Manifest(
        step=run.step,
        model=run.model,
        fingerprint=run.fingerprint,
        world=dist.get_world_size(),
        torch=torch.__version__,
        autopar=version("autopar"),
        holds=run.holds,
        files=files,
    )
    write_whole(partial / MANIFEST, manifest.to_json())
    checkpoint_root.sync_folder(partial)


def _has(path: Path, file: StoredFile) -> bool:
    return path.is_file() and path.stat().st_size == file.nbytes


def rename(run: RunCopy, partial: Path, group: Group) -> Path:
    """On rank 0."""
    return on_first(f"naming step {run.step}", lambda: checkpoint_root.rename(partial, run.step), group)


def drop_old(run: RunCopy, group: Group) -> None:
    """On rank 0; what cannot be deleted is a warning, for the new checkpoint is there."""
    problems = on_first(
        "deleting old checkpoints", lambda: checkpoint_root.drop_old(run.root, run.step, run.keep), group
    )
    for problem in problems:
        warnings.warn(problem, stacklevel=2)


@dataclass(slots=True)
class _Beside:
    """A save that runs beside training."""

    thread: threading.Thread | None = None
    error: BaseException | None = None
    step: int = 0


_beside = _Beside()


def write_beside(run: RunCopy, group: Group) -> None:
    """Write a checkpoint in a thread; `finish_saving` waits for it."""
    _beside.step, _beside.error = run.step, None
    gpu = torch.cuda.current_device() if torch.cuda.is_available() else -1
    _beside.thread = threading.Thread(target=_write, args=(run, group, gpu), name=f"autopar-save-{run.step}")
    _beside.thread.start()


def _write(run: RunCopy, group: Group, gpu: int) -> None:
    """gpu: the process's own, for a new thread has the first; none below 0."""
    try:
        with GROUP_LOCK, torch.cuda.device(gpu):
            write_checkpoint(run, group)
    except BaseException as error:
        _beside.error = error


def finish_saving() -> None:
    """Wait for a save that runs beside training, if there is one; every rank calls this before it ends.

    Raises:
        CheckpointError, RankError: if that save failed.
    """
    thread, _beside.thread = _beside.thread, None
    if thread is not None:
        thread.join()
    error, _beside.error = _beside.error, None
    if error is not None:
        raise error


@atexit.register
def _say_what_failed() -> None:
    """A save that failed after the last look at it is not silent."""
    if _beside.thread is not None and _beside.error is not None:
        sys.stderr.write(f"autopar: step {_beside.step} was not saved: {_beside.error}\n")
