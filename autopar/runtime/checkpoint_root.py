"""Which checkpoints are below a root? Folders `step-00000120` whose manifest and files are all there.

One is written under a hidden name (`.step-00000120-<12 digits>.partial`) and takes its own when it is whole. What has
such names, and nothing else, is ever deleted here: a folder that holds a file which its manifest does not list stays.
"""

import errno
import hashlib
import os
import re
import secrets
import shutil
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from autopar.errors import CheckpointError
from autopar.runtime.manifest import MANIFEST, REMEDY, Manifest, StoredFile, manifest_from
from autopar.values.schema import file_text

_COMPLETE = re.compile(r"step-(\d{8,18})")
_PARTIAL = re.compile(r"\.step-\d{8,18}-[0-9a-f]{12}\.partial")
_CHUNK_NBYTES = 2**22


@dataclass(frozen=True, slots=True, kw_only=True)
class NamedFolder:
    """A folder that may be a checkpoint. problem: why it is none, empty if all its files are there with their sizes."""

    step: int
    folder: Path
    problem: str = ""


def folder_of(root: Path, step: int) -> Path:
    return root / f"step-{step:08d}"


def steps_below(root: Path) -> list[tuple[int, Path]]:
    """Steps and folders of what is named as a checkpoint, newest first; none if there is no root."""
    if not root.is_dir():
        return []
    named = ((_COMPLETE.fullmatch(path.name), path) for path in root.iterdir())
    return sorted(((int(name[1]), path) for name, path in named if name), reverse=True)


def candidates(root: Path, step: int | None = None) -> list[NamedFolder]:
    """What is named as a checkpoint, newest first; step: of this step alone."""
    found = []
    for number, folder in steps_below(root):
        if step in (None, number):
            try:
                complete(folder)
                found.append(NamedFolder(step=number, folder=folder))
            except CheckpointError as error:
                found.append(NamedFolder(step=number, folder=folder, problem=str(error)))
    return found


def complete(folder: Path) -> Manifest:
    """The manifest of a folder that has all its files, in their sizes.

    Raises:
        CheckpointError: if it has not, naming what is missing or cut short.
    """
    manifest = read_manifest(folder)
    problems = []
    for name, file in manifest.files.items():
        path = folder / name
        found = path.stat().st_size if path.is_file() and not path.is_symlink() else None
        if found is None:
            problems.append(f"{name} is missing")
        elif found != file.nbytes:
            problems.append(f"{name} has {found} bytes of {file.nbytes}")
    if problems:
        raise CheckpointError(f"{folder} is torn: " + _some(problems))
    return manifest


def read_manifest(folder: Path) -> Manifest:
    """Raises CheckpointError if there is none, or it is of another step than the folder's name says."""
    path = folder / MANIFEST
    if not path.is_file():
        raise CheckpointError(f"{folder} has no {MANIFEST}: saving it never ended, or it is no checkpoint")
    try:
        manifest = manifest_from(file_text(path, CheckpointError, REMEDY, 1 << 28))
    except CheckpointError as error:
        raise CheckpointError(f"{folder}: {error}") from error
    name = _COMPLETE.fullmatch(folder.name)
    if name and int(name[1]) != manifest.step:
        raise CheckpointError(
            f"{path} is of step {manifest.step}, which its folder is not; give folders their names back"
        )
    return manifest


def check_contents(folder: Path, files: Iterable[tuple[str, StoredFile]]) -> None:
    """Raises CheckpointError if a file has another checksum than its manifest says."""
    changed = []
    for name, file in files:
        found = stored_file(folder / name)
        if found != file:
            changed.append(f"{name} has SHA-256 {found.sha256[:16]}..., written was {file.sha256[:16]}...")
    if changed:
        raise CheckpointError(f"{folder} is not what was written: " + _some(changed))


def _is_sound(folder: Path) -> bool:
    """Whether a folder has the contents that its manifest lists."""
    try:
        check_contents(folder, complete(folder).files.items())
    except CheckpointError:
        return False
    return True


def stored_file(path: Path) -> StoredFile:
    """What a manifest says of a file."""
    digest, nbytes = hashlib.sha256(), 0
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK_NBYTES):
            digest.update(chunk)
            nbytes += len(chunk)
    return StoredFile(nbytes=nbytes, sha256=digest.hexdigest())


def begin(root: Path, step: int) -> Path:
    """A new folder for a checkpoint that is being written.

    Raises:
        CheckpointError: if there is one of that step or of a later one: the newest is where a run goes on.
        OSError: if no folder can be made.
    """
    newest = next((c.step for c in candidates(root) if c.step >= step and not c.problem and _is_sound(c.folder)), None)
    if newest is not None:
        raise CheckpointError(
            f"{root} holds step {newest} and step {step} is to be saved: loading takes the newest, so steps below a "
            "root only grow; save below another root, or move away what is no longer wanted"
        )
    folder = root / f".step-{step:08d}-{secrets.token_hex(6)}.partial"
    folder.mkdir(parents=True)
    return folder


def rename(partial: Path, step: int) -> Path:
    """Give a whole checkpoint its name; what has it and is none is moved aside."""
    folder = folder_of(partial.parent, step)
    if folder.exists():
        folder.rename(folder.with_name(f"{folder.name}.incomplete-{secrets.token_hex(6)}"))
    partial.rename(folder)
    sync_folder(folder.parent)
    return folder


def drop_old(root: Path, step: int, keep: int) -> list[str]:
    """Delete all but `keep` whole checkpoints up to `step`, and what saves that never ended have left; what was in the
    way."""
    problems: list[str] = []
    for candidate in [c for c in candidates(root) if c.step <= step and not c.problem][keep:]:
        try:
            others = _others(candidate.folder)
            if others:
                problems.append(f"{candidate.folder} stays: {_some(others)} is of somebody else")
                continue
            # Under a hidden name first: a process that dies while deleting leaves no torn checkpoint.
            hidden = root / f".{candidate.folder.name}-{secrets.token_hex(6)}.partial"
            candidate.folder.rename(hidden)
        except (OSError, CheckpointError) as error:
            problems.append(f"{candidate.folder} stays: {error}")
    for path in list(root.iterdir()):
        if _PARTIAL.fullmatch(path.name) and path.is_dir() and not path.is_symlink():
            try:
                shutil.rmtree(path)
            except OSError as error:
                problems.append(f"{path} stays: {error}")
    return problems


def _others(folder: Path) -> list[str]:
    """What of a checkpoint's folder its save did not write."""
    if folder.is_symlink():
        return ["the link"]
    return sorted({path.name for path in folder.iterdir()} - {MANIFEST, *complete(folder).files})


def discard(partial: Path) -> None:
    """Delete what a failed save wrote, as far as that is possible: it may fill the disk that the next one needs."""
    shutil.rmtree(partial, ignore_errors=True)


def sync_folder(folder: Path) -> None:
    """Have the names in a folder on disk; a file system that knows no such thing (EINVAL) is left to itself."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
    finally:
        os.close(handle)


def sync_file(path: Path) -> None:
    with path.open("rb+") as file:
        os.fsync(file.fileno())


def _some(texts: list[str], count: int = 5) -> str:
    return "; ".join(texts[:count]) + (f"; and {len(texts) - count} more" if len(texts) > count else "")
