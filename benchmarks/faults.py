"""What survives when ranks die, stop, or cannot write? Faults on real processes, at points of a step and of a save.

    python -m benchmarks.faults [--only TEXT] [--write docs/results/faults.md]

Each run trains a small model on Gloo ranks that no launcher watches, saves, and is struck. Then new processes load the
newest whole checkpoint and train to the end. A run survives if every other rank ended by itself, with a typed error,
within the timeout of collectives and 10 s, and if what was loaded and every step after it equals, bit for bit, a run
without faults: parameters, buffers, optimizer state, learning rates, random streams. No checkpoint whose save had
returned may be lost. Full disks and read-only folders are mounts of their own (tmpfs), which takes root; without it
those runs fail. Exit code 1 if a run does not survive.
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from benchmarks import fault_saves
from benchmarks.fault_cases import ALIKE, KINDS, POINTS, STAGES, Fault, Job, make_cases
from benchmarks.fault_ranks import Ended, Ranks
from benchmarks.fault_training import STEPS
from tests.shared_graphs import SHARED

GRACE_SECONDS = 10.0
TRIES = 3
"""How often a run is begun in which the fault was not reached, for processes did not come together in time."""
TYPED = ("RankError", "CheckpointError")


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """A fault to be tried. disk: room for checkpoints in bytes, 0 for a plain folder."""

    saving: str
    fault: Fault
    slow: bool = False
    room: float = 0.0

    @property
    def group(self) -> tuple[str, str, str, str]:
        """The row of the table it is counted in."""
        how = self.fault.how if not self.room else "disk full"
        return self.fault.kind, self.saving, how, self.fault.point

    @property
    def label(self) -> str:
        return "; ".join(self.group) + f"; rank {self.fault.rank}" + (f"; room {self.room}" if self.room else "")


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What was found. seconds: from the fault to the end of the last other rank. loaded: step."""

    run: Run
    problems: tuple[str, ...]
    errors: tuple[str, ...]
    seconds: float
    loaded: int


class Faults:
    """Runs faults; keeps what runs without any have noted."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.ranks = folder, Ranks()
        self.references: dict[tuple[str, str, bool], list[dict[int, str]]] = {}
        self.nbytes: dict[str, int] = {}

    def reference(self, run: Run) -> list[dict[int, str]]:
        """Digests by rank and step of a run without faults."""
        key = run.fault.kind, run.saving, run.slow
        if key not in self.references:
            job = self._job(run, "whole", "reference")
            for rank, end in enumerate(self.ranks.run(job)):
                assert end.code == 0, f"rank {rank} of a run without faults: {end.text}"
            self.references[key] = _digests(job)
            newest = max(Path(job.root).iterdir())
            self.nbytes[run.fault.kind] = sum(-(-f.stat().st_size // 4096) * 4096 for f in newest.iterdir())
        return self.references[key]

    def _job(self, run: Run, folder: str, name: str) -> Job:
        own = self.folder / folder
        shutil.rmtree(own, ignore_errors=True)
        (own / "checkpoints").mkdir(parents=True)
        kind, is_beside = run.fault.kind, run.saving == "asynchronous"
        root = str(own / "checkpoints")
        return Job(kind=kind, folder=str(own), root=root, name=name, asynchronous=is_beside, slow=run.slow)

    def try_out(self, run: Run) -> Outcome:
        """One fault, and what comes after it."""
        reference = self.reference(run)
        for _ in range(TRIES):
            job = replace(self._job(run, "run", "struck"), fault=run.fault)
            mounted = run.room or run.fault.how == "read-only"
            if mounted:
                size = int(self.nbytes[run.fault.kind] * run.room) if run.room else 2**26
                _mount("-t", "tmpfs", "-o", f"size={size}", "tmpfs", job.root)
            try:
                ended = self.ranks.run(job)
                if job.noted().exists():
                    if mounted:
                        _mount("-o", "remount,rw,size=64m", job.root)
                    return self._judged(run, job, ended, reference)
            finally:
                if mounted:
                    subprocess.run(["umount", job.root], check=True)
        return Outcome(run=run, problems=("the fault was not reached",), errors=(), seconds=0.0, loaded=-1)

    def _judged(self, run: Run, job: Job, ended: list[Ended], reference: list[dict[int, str]]) -> Outcome:
        struck, problems = float(job.noted().read_text()), []
        is_lost = run.fault.how in ("killed", "stopped")
        others = [end for rank, end in enumerate(ended) if rank != run.fault.rank or not is_lost]
        for rank, end in enumerate(ended):
            if run.fault.how == "killed" and rank == run.fault.rank:
                continue
            if end.hung or end.error.split(":")[0].split(".")[-1] not in TYPED:
                problems.append(
                    f"rank {rank} {'hung' if end.hung else f'ended with {end.code}'}: {end.error or end.text[-300:]}"
                )
        seconds = max(end.at for end in others) - struck
        if seconds > job.timeout_seconds + GRACE_SECONDS:
            problems.append(f"the last rank ended after {seconds:.1f} s")
        before = _digests(job)
        again = replace(job, fault=None, resumes=True, name="resumed", asynchronous=False)
        resumed = self.ranks.run(again)
        problems += [f"resumed rank: {end.text[-600:]}" for end in resumed if end.code]
        after = _digests(again)
        loaded = min(after[0], default=-1)
        if loaded < self._least(run):
            problems.append(f"step {loaded} was loaded, step {self._least(run)} had been saved")
        for rank, own in enumerate(reference):
            wrong = [n for n, digest in (*before[rank].items(), *after[rank].items()) if own[n] != digest]
            if wrong or STEPS not in after[rank]:
                problems.append(f"rank {rank} differs in steps {wrong} of {sorted(after[rank])}")
        errors = tuple(end.error.split(":")[0].split(".")[-1] for end in others)
        return Outcome(run=run, problems=tuple(problems), errors=errors, seconds=seconds, loaded=loaded)

    def _least(self, run: Run) -> int:
        """The newest step whose save had returned when the fault struck."""
        if run.fault.in_save:
            return 2
        return 4 if run.saving == "synchronous" else 2


def _mount(*arguments: str) -> None:
    subprocess.run(["mount", *arguments], check=True)


def _digests(job: Job) -> list[dict[int, str]]:
    files = [job.digests(rank) for rank in range(job.world)]
    return [dict(map(json.loads, f.read_text().splitlines())) if f.exists() else {} for f in files]


def all_runs() -> Iterator[Run]:
    """Every fault of the table."""
    for kind, points in POINTS.items():
        for point in points:
            for rank in range(KINDS[kind][0]):
                yield Run(saving="synchronous", fault=Fault(rank=rank, how="killed", point=point, kind=kind))
    for saving in ("synchronous", "asynchronous"):
        yield from _save_runs("fsdp", saving, fault_saves.EVERY_RANK, fault_saves.FIRST_RANK)
        yield from _save_runs(STAGES, saving, _SOME, dict(list(fault_saves.FIRST_RANK.items())[:2]))
    for rank in range(2):
        beside = list(fault_saves.BESIDE) + [
            "in the middle of forward",
            "in the middle of backward",
            "before the optimizer",
        ]
        for point in beside:
            fault = Fault(rank=rank, how="killed", point=point, kind="fsdp")
            yield Run(saving="asynchronous", fault=fault, slow=True)
    yield from _stopped_runs()
    for saving in ("synchronous", "asynchronous"):
        for room in (1.02, 1.1, 1.2, 1.35, 1.5, 1.65, 1.8, 1.95):
            yield Run(saving=saving, fault=Fault(rank=0, how="noted", point="before copying", kind="fsdp"), room=room)
        for point in _READ_ONLY:
            yield Run(saving=saving, fault=Fault(rank=0, how="read-only", point=point, kind="fsdp"))


_SOME = {name: fault_saves.EVERY_RANK[name] for name in list(fault_saves.EVERY_RANK)[1::4]}
_STOPPED = {
    "ddp": ("in the middle of forward", "at the middle collective of backward", "between steps"),
    "fsdp": ("in the middle of forward", "a collective of backward begun", "before the optimizer"),
    STAGES: ("in the middle of passes forward", "a message to another stage begun", "between steps"),
    ALIKE: ("in the middle of forward", "before the optimizer", "between steps"),
}
_STOPPED_SAVES = (
    "before copying",
    "in the middle of writing tensors",
    "before ranks meet: writing the manifest of step",
    "after ranks meet: naming step",
)
_READ_ONLY = (
    "before ranks meet: copying step",
    "after ranks meet: beginning step",
    "after ranks meet: checking step",
    "after ranks meet: writing the manifest of step",
)


def _save_runs(kind: str, saving: str, each: dict[str, object], first: dict[str, object]) -> Iterator[Run]:
    for point in (*each, *first):
        for rank in range(KINDS[kind][0] if point in each else 1):
            yield Run(saving=saving, fault=Fault(rank=rank, how="killed", point=point, kind=kind))


def _stopped_runs() -> Iterator[Run]:
    for kind, points in _STOPPED.items():
        for point in points:
            for rank in range(KINDS[kind][0]):
                yield Run(saving="synchronous", fault=Fault(rank=rank, how="stopped", point=point, kind=kind))
    for saving in ("synchronous", "asynchronous"):
        for point in _STOPPED_SAVES:
            for rank in range(2):
                yield Run(saving=saving, fault=Fault(rank=rank, how="stopped", point=point, kind="fsdp"))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="runs whose label has this text")
    parser.add_argument("--write", type=Path, help="the page that the table is written to")
    arguments = parser.parse_args()
    runs = [run for run in all_runs() if arguments.only in run.label]
    outcomes = []
    with tempfile.TemporaryDirectory(prefix="autopar-faults-") as folder:
        os.environ[SHARED] = str(Path(folder) / "graphs")
        (Path(folder) / "graphs").mkdir()
        make_cases()
        faults = Faults(Path(folder))
        for run in runs:
            outcome = faults.try_out(run)
            outcomes.append(outcome)
            said = "; ".join(outcome.problems) or "survived"
            print(f"{run.label}: {outcome.seconds:.1f} s, step {outcome.loaded}, {said}", flush=True)
        faults.ranks.close()
    failed = [outcome for outcome in outcomes if outcome.problems]
    print(f"{len(outcomes)} runs, {len(failed)} did not survive")
    if arguments.write:
        arguments.write.write_text(page(outcomes))
    return 1 if failed else 0


def page(outcomes: list[Outcome]) -> str:
    """The table as Markdown."""
    groups: dict[tuple[str, str, str, str], list[Outcome]] = {}
    for outcome in outcomes:
        groups.setdefault(outcome.run.group, []).append(outcome)
    lines = [
        "# Ranks that die, stop, or cannot write",
        "",
        f"Written by `python -m benchmarks.faults --write docs/results/faults.md` with torch {torch.__version__}.",
    ]
    return "\n".join([*lines, ""])


if __name__ == "__main__":
    sys.exit(main())
