"""Is the captured graph of every op and module that torch tests what eager computes, values and gradients?

    python -m benchmarks.op_db [--ops add,nn.functional.pad] [--tables op,module] [--samples 6] [--processes 2]
                               [--write docs/results/op-db.md]

torch's own samples (`op_db` and `module_db` of torch.testing._internal; needs `expecttest`) are captured, normalised
and run, as they are and called natively (`passes.call_natively`). Samples run in processes of their own: one that dies,
or takes longer than `--seconds`, is a sample that failed. Exit code 1 if any is wrong or failed.
"""

import argparse
import multiprocessing
import os
import sys
import time
import warnings
from collections import Counter, defaultdict
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkProcess
from pathlib import Path

import torch

from benchmarks.op_db_samples import Key, Outcome, outcomes, samples_of, tables

FORK = multiprocessing.get_context("fork")
"""torch's tables take ten seconds to load, which happens once."""

Row = tuple[Key, Outcome]


def work(connection: Connection, name: str, most: int, done: int | None) -> None:
    """In a process of its own, an op's samples: all, or one by one without the first `done`, each key sent before."""
    table, op = name.split(":", 1)
    sys.stdout = sys.stderr = Path(os.devnull).open("w")  # noqa: SIM115  # ops of torch's tests print
    warnings.simplefilter("ignore")
    try:
        found = samples_of(table, op, most)
    except Exception as error:
        reason = f"torch makes no samples: {str(error).splitlines()[0]}"
        connection.send((Key(table=table, op=op, dtype="", index=0), Outcome(kind="skipped", reason=reason)))
        return
    if done is None:
        for sample, outcome in outcomes(found):
            connection.send((sample.key, outcome))
        return
    for sample in found[done:]:
        connection.send((sample.key, None))
        [(_, outcome)] = outcomes([sample])
        connection.send((sample.key, outcome))


@dataclass(slots=True, eq=False)
class Job:
    """An op whose samples run in a process; one by one once a process has died of them.

    begun: the sample that runs, if they do so one by one.
    """

    name: str
    most: int
    rows: list[Row] = field(default_factory=list)
    alone: bool = False
    begun: Key | None = None
    since: float = 0.0
    connection: Connection = field(init=False)
    process: ForkProcess = field(init=False)

    def start(self) -> None:
        done = len(self.rows) if self.alone else None
        self.connection, theirs = FORK.Pipe(duplex=False)
        self.process = FORK.Process(target=work, args=(theirs, self.name, self.most, done))
        self.process.start()
        theirs.close()
        self.since = time.monotonic()

    def read(self) -> bool:
        """Take one message. False once all samples have run; a process that died is followed by another."""
        try:
            key, outcome = self.connection.recv()
        except EOFError:
            self.process.join()
            if self.process.exitcode == 0:
                return False
            if not self.alone:
                self.rows, self.alone = [], True
            else:
                key = self.begun or Key(table=self.name.split(":")[0], op=self.name.split(":")[1], dtype="", index=0)
                reason = f"the process ended with {self.process.exitcode}"
                self.rows.append((key, Outcome(kind="failed", reason=reason)))
                if self.begun is None:
                    return False
                self.begun = None
            self.start()
            return True
        self.since = time.monotonic()
        self.begun = key if outcome is None else None
        if outcome is not None:
            self.rows.append((key, outcome))
        return True


def run_all(names: Sequence[str], most: int, processes: int, seconds: float) -> list[Row]:
    """The rows of all ops in order, `processes` ops at a time."""
    jobs = [Job(name=name, most=most) for name in names]
    waiting, running = list(reversed(jobs)), list[Job]()
    with suppress(KeyboardInterrupt):  # the page then is of what was run
        _run(waiting, running, processes, seconds)
    for job in running:
        job.process.kill()
    return [row for job in jobs if job not in running for row in job.rows]


def _run(waiting: list[Job], running: list[Job], processes: int, seconds: float) -> None:
    while waiting or running:
        while waiting and len(running) < processes:
            running.append(waiting.pop())
            running[-1].start()
        ready = wait([job.connection for job in running], timeout=1.0)
        for job in list(running):
            if job.connection in ready and not job.read():
                running.remove(job)
                for key, outcome in job.rows:
                    if outcome.kind in ("wrong", "failed"):
                        drawn = " random" if outcome.random else ""
                        print(f"{outcome.kind} {key}{drawn}: {outcome.reason}", flush=True)
            elif time.monotonic() - job.since > seconds:
                job.process.kill()


def table_of(rows: Sequence[Row], command: str) -> str:
    """The page: counts, what is wrong or failed by name, which ops are refused and why."""
    lines = [
        "# torch's own samples, captured and run",
        "",
        f"Written by `{command}` with torch {torch.__version__}.",
        "",
        "Samples of `op_db` and `module_db` are captured, normalised and run on one process; loss, every gradient and "
        "every buffer are compared with eager in float64 (1e-7), as the graph is and called natively. Ops that draw "
        "random numbers are counted apart.",
        "",
        "| | ops | samples | equal | wrong | failed | refused |",
        "|---|---|---|---|---|---|---|",
    ]
    groups: dict[str, list[Row]] = defaultdict(list)
    for row in rows:
        if row[1].kind != "skipped":
            groups["random" if row[1].random else row[0].table].append(row)
    for group in ("op", "module", "random"):
        found = groups[group]
        kinds = Counter(outcome.kind for _, outcome in found)
        title = {"op": "op_db", "module": "module_db", "random": "of these, random"}[group]
        ops = len({(key.table, key.op) for key, _ in found})
        counts = " | ".join(str(kinds[k]) for k in ("equal", "wrong", "failed", "refused"))
        lines.append(f"| {title} | {ops} | {len(found)} | {counts} |")
    for kind, title in (("wrong", "Wrong"), ("failed", "Failed"), ("refused", "Refused")):
        by_op: dict[tuple[str, str], list[str]] = defaultdict(list)
        for key, outcome in rows:
            if outcome.kind == kind:
                by_op[key.op, outcome.reason].append(str(key))
        lines += ["", f"## {title}", "", *([] if by_op else ["None."])]
        for (op, reason), samples in sorted(by_op.items()):
            lines.append(f"- `{op}` ({len(samples)}, as {samples[0].removeprefix(op).strip()}): {reason}")
    return "\n".join(lines) + "\n"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ops", default="")
    parser.add_argument("--tables", default="op,module")
    parser.add_argument("--samples", type=int, default=6)
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--seconds", type=float, default=60.0, help="longest that one sample may take")
    parser.add_argument("--write", type=Path)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    list(outcomes(samples_of("op", "mul", 1)))  # what torch.export imports at its first call, once for all processes
    wanted = set(arguments.ops.split(",")) if arguments.ops else None
    names = [
        f"{table}:{op}"
        for table in arguments.tables.split(",")
        for op in tables()[table]
        if wanted is None or op in wanted or tables()[table][op].name in wanted
    ]
    rows = run_all(names, arguments.samples, arguments.processes, arguments.seconds)
    page = table_of(rows, "python -m benchmarks.op_db " + " ".join(sys.argv[1:]))
    if (run := len({(key.table, key.op) for key, _ in rows})) < len(names):
        page += f"\nIt was ended early: {run} of {len(names)} ops and modules have samples here.\n"
    print(page)
    if arguments.write:
        arguments.write.parent.mkdir(parents=True, exist_ok=True)
        arguments.write.write_text(page)
    bad = [outcome for _, outcome in rows if outcome.kind in ("wrong", "failed") and not outcome.random]
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
