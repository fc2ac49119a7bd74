"""A checkpoint is there whole or not at all, whatever fails on whichever rank; then all ranks raise the same."""

import io
import json
import pickle
import resource
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from autopar.errors import CheckpointError, RankError
from autopar.runtime import checkpoint_root, finish_saving, latest, load, save, saving, torch_checkpoint
from autopar.runtime.manifest import MANIFEST
from tests.checkpoint_cases import Run, reseal
from tests.process_group import ranks

FULL = OSError(28, "No space left on device")


@contextmanager
def no_file_grows(nbytes: int) -> Iterator[None]:
    """Writing more than that into a file fails, as on a full disk."""
    before, limits = signal.signal(signal.SIGXFSZ, signal.SIG_IGN), resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (nbytes, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, before)


def failing(where: Any, name: str) -> Any:
    return mock.patch.object(where, name, side_effect=FULL)


FAULTS = {
    "no folder": (0, lambda: failing(checkpoint_root, "begin")),
    "tensors": (1, lambda: no_file_grows(1000)),
    "index": (0, lambda: failing(torch_checkpoint, "index_text")),
    "own files": (1, lambda: failing(saving, "_write_own")),
    "not on disk": (1, lambda: failing(checkpoint_root, "sync_file")),
    "manifest": (0, lambda: failing(saving, "write_whole")),
    "name": (0, lambda: failing(checkpoint_root, "rename")),
}
"""The rank, and what fails there."""


def faulty(root: str, asynchronous: bool) -> dict[str, str]:
    run = Run()
    save(run.module, run.optimizer, root, step=1, **run.kept)
    saved = run.state()
    run.train(1)
    said = {}
    for name, (rank, fault) in FAULTS.items():
        with pytest.raises(CheckpointError) as raised:
            if dist.get_rank() == rank:
                with fault():
                    save(run.module, run.optimizer, root, step=2, asynchronous=asynchronous, **run.kept)
                    finish_saving()
            else:
                save(run.module, run.optimizer, root, step=2, asynchronous=asynchronous, **run.kept)
                finish_saving()
        said[name] = str(raised.value)
        assert f"rank {rank}: " in said[name]
        assert latest(root) == 1
    dist.barrier()
    assert [path.name for path in Path(root).iterdir()] == ["step-00000001"]
    other = Run()
    assert load(other.module, other.optimizer, root, **other.kept).step == 1
    assert all(torch.equal(value, saved[name]) for name, value in other.state().items())
    save(run.module, run.optimizer, root, step=2, **run.kept)
    assert latest(root) == 2
    return said


@pytest.mark.parametrize("asynchronous", [False, True], ids=["synchronous", "asynchronous"])
def test_what_fails_on_one_rank_fails_on_all_and_costs_nothing(asynchronous: bool, tmp_path: Path) -> None:
    first, second = ranks(2).run(faulty, str(tmp_path), asynchronous)
    assert first == second
    assert all("No space left" in said for name, said in first.items() if name != "tensors")


def beside(root: str) -> None:
    """Training goes on while a save has not begun to write; the next waits."""
    run = Run()
    run.train(1)
    at_save, gate = run.state(), threading.Event()

    def late(*args: Any) -> None:
        assert gate.wait(60)
        torch_checkpoint.write_tensors(*args)

    with mock.patch.object(saving, "write_tensors", late):
        save(run.module, run.optimizer, root, step=1, asynchronous=True, **run.kept)
        losses = run.train(2)
        assert latest(root) is None
        gate.set()
        save(run.module, run.optimizer, root, step=3, asynchronous=True, **run.kept)
        assert latest(root) == 1
        finish_saving()
    assert latest(root) == 3
    other = Run()
    load(other.module, other.optimizer, root, step=1, **other.kept)
    assert all(torch.equal(value, at_save[name]) for name, value in other.state().items())
    assert other.train(2) == losses


def test_training_goes_on_beside_a_save(tmp_path: Path) -> None:
    ranks(2).run(beside, str(tmp_path))


def kept(root: str) -> None:
    run = Run()
    dead = Path(root) / ".step-00000001-0123456789ab.partial"
    if dist.get_rank() == 0:
        for name in (dead.name, "step-of-somebody", ".step-00000001-mine.partial", "step-00000000"):
            (Path(root) / name).mkdir()
            (Path(root) / name / "file").touch()
    dist.barrier()
    for step in range(1, 5):
        save(run.module, run.optimizer, root, step=step, keep=2)
        if step == 3 and dist.get_rank() == 0:
            (Path(root) / "step-00000003" / "notes.txt").touch()
    others = {"step-of-somebody", ".step-00000001-mine.partial", "step-00000000"}
    dist.barrier()
    assert {path.name for path in Path(root).iterdir()} == {*others, "step-00000003", "step-00000004"}
    with pytest.warns(UserWarning, match=r"step-00000003 stays: notes\.txt is of somebody else"):
        save(run.module, run.optimizer, root, step=5, keep=1)
    dist.barrier()
    assert {path.name for path in Path(root).iterdir()} == {*others, "step-00000003", "step-00000005"}
    with pytest.raises(RankError, match=r"ranks differ in step: 6 on ranks.*, 7 on ranks"):
        save(run.module, run.optimizer, root, step=6 + dist.get_rank())


def test_the_newest_are_kept_and_what_is_somebody_elses(tmp_path: Path) -> None:
    ranks(2).run(kept, str(tmp_path))


def cut(folder: Path) -> None:
    file = folder / "__1_0.distcp"
    file.write_bytes(file.read_bytes()[:-1])


def flip(folder: Path) -> None:
    file = folder / "__1_0.distcp"
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)


def of_other_step(folder: Path) -> None:
    other = folder.parent / "step-00000001"
    (folder / "__1_0.distcp").write_bytes((other / "__1_0.distcp").read_bytes())


def renamed(folder: Path) -> None:
    (folder / MANIFEST).write_text((folder.parent / "step-00000001" / MANIFEST).read_text())


TORN = {
    "no manifest": (lambda folder: (folder / MANIFEST).unlink(), "no manifest"),
    "no file": (lambda folder: (folder / "__1_0.distcp").unlink(), "__1_0.distcp is missing"),
    "cut": (cut, r"__1_0.distcp has \d+ bytes of \d+"),
    "changed": (flip, r"__1_0.distcp has SHA-256 \w{16}..., written was"),
    "mixed": (of_other_step, r"__1_0.distcp has (SHA-256|\d+ bytes of)"),
    "manifest of another": (renamed, "is of step 1, which its folder is not"),
}


def two(root: str) -> None:
    run = Run()
    save(run.module, run.optimizer, root, step=1)
    run.train(1)
    save(run.module, run.optimizer, root, step=2)


def passed_over(root: str, said: str) -> None:
    run = Run()
    with pytest.warns(UserWarning, match=f"{said}.*; step 1 is loaded instead"):
        assert load(run.module, run.optimizer, root).step == 1
    before = run.state()
    with pytest.raises(CheckpointError, match=said):
        load(run.module, run.optimizer, root, step=2)
    assert all(torch.equal(value, before[name]) for name, value in run.state().items())
    with pytest.warns(UserWarning, match="."):
        load(run.module, run.optimizer, root)
    run.train(1)
    save(run.module, run.optimizer, root, step=2)
    assert load(run.module, run.optimizer, root).step == 2


@pytest.mark.parametrize("how", TORN)
def test_a_torn_or_changed_checkpoint_is_passed_over(how: str, tmp_path: Path) -> None:
    ranks(2).run(two, str(tmp_path))
    TORN[how][0](tmp_path / "step-00000002")
    ranks(2).run(passed_over, str(tmp_path), TORN[how][1])


class Boom:
    """What a pickle executes when it is read."""

    def __init__(self, file: Path) -> None:
        self.file = file

    def __reduce__(self) -> Any:
        return Path.touch, (self.file,)


def refused(root: str, place: str) -> None:
    run = Run()
    if place == ".metadata":
        load(run.module, run.optimizer, root, **run.kept)
    else:
        with pytest.raises(CheckpointError, match=r"(?i)weights.only"):
            load(run.module, run.optimizer, root, **run.kept)


def one(root: str) -> None:
    run = Run()
    run.train(1)
    save(run.module, run.optimizer, root, step=1, **run.kept)


def poison(folder: Path, place: str, boom: bytes) -> None:
    """Put that pickle where a value or tensor of torch's files is, or in place of a file."""
    if place not in ("value", "tensor"):
        (folder / place).write_bytes(boom)
        return
    index = json.loads((folder / "tensors.json").read_text())
    name = next(name for name in index["values"] if name.endswith(".lr"))
    piece = index["values"][name] if place == "value" else index["tensors"]["model.frozen"]["pieces"][0]
    at = piece.get("at", piece)
    data = (folder / at["file"]).read_bytes()
    at |= {"start": len(data), "nbytes": len(boom)}
    (folder / at["file"]).write_bytes(data + boom)
    (folder / "tensors.json").write_text(json.dumps(index))


@pytest.mark.parametrize("place", [".metadata", "run.pt", "random-00000.pt", "data-00000.pt", "value", "tensor"])
def test_nothing_in_a_checkpoint_is_executed(place: str, tmp_path: Path) -> None:
    """Written by somebody who makes the manifest right, too."""
    root, done, written = tmp_path / "root", tmp_path / "done", io.BytesIO()
    ranks(2).run(one, str(root))
    torch.save(Boom(done), written)
    poison(root / "step-00000001", place, pickle.dumps(Boom(done)) if place == ".metadata" else written.getvalue())
    reseal(root / "step-00000001")
    ranks(2).run(refused, str(root), place)
    assert not done.exists()
    torch.load(io.BytesIO(written.getvalue()), weights_only=False)
    assert done.exists(), "what would have been executed"
