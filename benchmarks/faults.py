"""What survives when ranks die, stop, or cannot write? Faults on real processes, at points of a step and of a save.

    python -m benchmarks.faults [--only TEXT] [--jobs 1] [--log FILE] [--write docs/results/faults.md]

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
import queue
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch

from benchmarks.fault_cases import STEPS, STRUCK_SAVE, Job, make_cases
from benchmarks.fault_ranks import Ended, Ranks
from benchmarks.fault_runs import BESIDE, SYNCHRONOUS, Run, all_runs
from tests.shared_graphs import SHARED

GRACE_SECONDS = 10.0
TRIES = 3
"""How often a run is begun in which the fault was not reached, for processes did not come together in time."""
TYPED = ("RankError", "CheckpointError")


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What was found of a run. seconds: from the fault to the end of the last other rank. loaded: step."""

    label: str
    problems: tuple[str, ...]
    errors: tuple[str, ...]
    seconds: float
    loaded: int


class Faults:
    """Runs faults; keeps what runs without any have noted."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.ranks = folder, Ranks()
        self.references: dict[tuple[str, str], list[dict[int, str]]] = {}
        self.nbytes: dict[str, int] = {}

    def reference(self, run: Run) -> list[dict[int, str]]:
        """Digests by rank and step of a run without faults."""
        key = run.fault.kind, run.saving
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
        how = {"asynchronous": run.saving != SYNCHRONOUS, "slow": run.saving == BESIDE}
        return Job(kind=run.fault.kind, folder=str(own), root=str(own / "checkpoints"), name=name, **how)

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
        return Outcome(label=run.label, problems=("the fault was not reached",), errors=(), seconds=0.0, loaded=-1)

    def _judged(self, run: Run, job: Job, ended: list[Ended], reference: list[dict[int, str]]) -> Outcome:
        struck, problems = float(job.noted().read_text()), []
        is_lost = run.fault.how in ("killed", "stopped")
        others = [end for rank, end in enumerate(ended) if rank != run.fault.rank or not is_lost]
        for rank, end in enumerate(ended):
            if run.fault.how == "killed" and rank == run.fault.rank:
                continue
            if end.hung or end.kind not in TYPED:
                how = "hung" if end.hung else f"ended with {end.code}"
                problems.append(f"rank {rank} {how}: {end.error or end.text[-300:]}")
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
        errors = tuple(end.kind for end in others)
        return Outcome(label=run.label, problems=tuple(problems), errors=errors, seconds=seconds, loaded=loaded)

    def _least(self, run: Run) -> int:
        """The newest step whose save had returned when the fault struck."""
        return STRUCK_SAVE if run.saving == SYNCHRONOUS and not run.fault.in_save else STRUCK_SAVE - 1


def _mount(*arguments: str) -> None:
    subprocess.run(["mount", *arguments], check=True)


def _digests(job: Job) -> list[dict[int, str]]:
    files = [job.digests(rank) for rank in range(job.world)]
    return [dict(map(json.loads, f.read_text().splitlines())) if f.exists() else {} for f in files]


def try_all(runs: Sequence[Run], folder: Path, jobs: int, log: Path) -> None:
    """Add outcomes of runs to a file, so many at a time."""
    parts = [Faults(folder / str(number)) for number in range(jobs)]
    free: queue.SimpleQueue[Faults] = queue.SimpleQueue()
    for part in parts:
        free.put(part)

    def try_out(run: Run) -> None:
        part = free.get()
        try:
            outcome = part.try_out(run)
        finally:
            free.put(part)
        said = "; ".join(outcome.problems) or "survived"
        print(f"{run.label}: {outcome.seconds:.1f} s, step {outcome.loaded}, {said}", flush=True)
        with log.open("a") as file:
            file.write(json.dumps(asdict(outcome)) + "\n")

    with ThreadPoolExecutor(jobs) as pool:
        list(pool.map(try_out, runs))
    for part in parts:
        part.ranks.close()


def outcomes_in(log: Path, runs: Sequence[Run]) -> dict[Run, Outcome]:
    """What a file has of runs: the last outcome of each."""
    lines = log.read_text().splitlines() if log.exists() else []
    found = {one["label"]: Outcome(**one) for one in map(json.loads, lines)}
    return {run: found[run.label] for run in runs if run.label in found}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="runs whose label has this text")
    parser.add_argument("--jobs", type=int, default=1, help="how many runs at a time")
    parser.add_argument("--log", type=Path, help="outcomes, one a line; runs that survived in it are not tried again")
    parser.add_argument("--write", type=Path, help="the page that the table is written to")
    arguments = parser.parse_args()
    runs = [run for run in all_runs() if arguments.only in run.label]
    if not runs:
        parser.error(f"no run has {arguments.only!r} in its label, as '{next(all_runs()).label}' has")
    with tempfile.TemporaryDirectory(prefix="autopar-faults-") as folder:
        os.environ[SHARED] = str(Path(folder) / "graphs")
        (Path(folder) / "graphs").mkdir()
        make_cases()
        log = arguments.log or Path(folder) / "log.jsonl"
        survived = {run for run, outcome in outcomes_in(log, runs).items() if not outcome.problems}
        try_all([run for run in runs if run not in survived], Path(folder), arguments.jobs, log)
        outcomes = outcomes_in(log, runs)
    failed = [outcome for outcome in outcomes.values() if outcome.problems]
    print(f"{len(outcomes)} runs, {len(failed)} did not survive")
    if arguments.write:
        arguments.write.write_text(page(outcomes, arguments.jobs))
    return 1 if failed else 0


def page(outcomes: Mapping[Run, Outcome], jobs: int) -> str:
    """The table as Markdown."""
    groups: dict[tuple[str, ...], list[Outcome]] = {}
    for run, outcome in outcomes.items():
        groups.setdefault(run.group, []).append(outcome)
    good = sum(not outcome.problems for outcome in outcomes.values())
    slowest = max(outcome.seconds for outcome in outcomes.values())
    lines = [
        "# Ranks that die, stop, or cannot write",
        "",
        f"Written by `python -m benchmarks.faults --jobs {jobs} --write docs/results/faults.md` with torch "
        f"{torch.__version__} on {os.cpu_count()} cores. "
        f"{len(outcomes)} runs, {good} survived; the last of the other ranks ended {slowest:.1f} s after the fault "
        "at most.",
        "",
        *NOTES.splitlines(),
        "",
        "| plan | saving | what | point | runs | others ended with | after at most | went on from step | lost |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for (kind, saving, how, point), found in groups.items():
        errors = ", ".join(sorted({error for outcome in found for error in outcome.errors}))
        steps = ", ".join(map(str, sorted({outcome.loaded for outcome in found})))
        lost = "; ".join(sorted({problem for outcome in found for problem in outcome.problems})) or "nothing"
        seconds = max(outcome.seconds for outcome in found)
        lines.append(
            f"| {kind} | {saving} | {how} | {point} | {len(found)} | {errors} | {seconds:.1f} s | {steps} | {lost} |"
        )
    return "\n".join([*lines, ""])


NOTES = """\
Small float64 models on Gloo ranks on one machine, timeout of collectives 10 s. Ranks are started plainly: no launcher
ends the others, rank 0 serves the store. *runs*: one for each rank that was struck (of a full disk one for each size
of it; a checkpoint more or less fits). *Others ended with*: the error that each of the other ranks ended with by
itself; after a read-only folder or a full disk, all ranks. *Went on from*: the step that new processes loaded.
Checkpoints are saved after steps 1, 2 and 4; faults strike in step 3, or in the save after step 2. *Lost*: a
difference, bit for bit, of what was loaded or of any later step from a run without faults (parameters, buffers,
optimizer state, learning rates, random streams), a checkpoint whose save had returned, a rank that did not end in
time or ended without a typed error.

*killed*: SIGKILL. *stopped*: SIGSTOP; when the others have ended the stopped rank goes on, and ends with a typed
error too. *disk full*: checkpoints on a tmpfs of 1.02 to 1.9 times the size of one. *read-only*: that tmpfs is
remounted read-only. *asynchronous, slow*: every file takes 0.3 s to be on disk, so that steps and another save come
while one is written. Collectives are not run on NCCL here; several nodes, network file systems and a loss of power
were not tried."""


if __name__ == "__main__":
    sys.exit(main())
