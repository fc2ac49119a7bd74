"""Is the graph that is planned the user's model, for models that nobody here wrote? Hundreds from many packages.

    python -m benchmarks.foreign_models [--packages timm,diffusers] [--only 'timm/res*'] [--jobs 2] [--seconds 120]
                                        [--again wrong,crashed] [--results FILE] [--table FILE]

Each model in a process of its own (`benchmarks.foreign_check`: against the unmodified module over three steps, then
random plans on four ranks). Packages are the extras of this benchmark (benchmarks/foreign_requirements.txt); nothing
is loaded from a network. Verdicts are appended to a file outside the repository, one JSON object a line; a model that
is in it is not run again unless its verdict is named with --again. The table goes to docs/results/foreign-models.md.
Exit code 1 if any model is wrong or crashes.
"""

import argparse
import fnmatch
import importlib
import json
import multiprocessing as mp
import os
import resource
import signal
import sys
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from importlib.metadata import version
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

import torch

from benchmarks.foreign_check import VERDICTS, Foreign, Outcome, check
from benchmarks.foreign_reasons import reason
from benchmarks.foreign_torchvision import declare_kernels

Make = Callable[[], Foreign]
MANY = "small packages"
PACKAGES = {
    MANY: "benchmarks.foreign_more:models",
    "torch-geometric": "benchmarks.foreign_graphs:models",
    "vit-pytorch": "benchmarks.foreign_vit:models",
    "diffusers": "benchmarks.foreign_diffusion:models",
    "timm": "benchmarks.foreign_vision:timm_models",
    "torchvision": "benchmarks.foreign_vision:torchvision_models",
    "segmentation-models-pytorch": "benchmarks.foreign_vision:segmentation_models",
    "open-clip-torch": "benchmarks.foreign_vision:open_clip_models",
    "transformers": "benchmarks.foreign_text:models",
}
"""Where a package's models are: a function that gives what makes each, by name."""
RESULTS = Path("/tmp/autopar-foreign-models.jsonl")
TABLE = Path(__file__).parent.parent / "docs" / "results" / "foreign-models.md"
SHARED = 5
"""How much longer than its own time a process may take on a machine that it shares."""
SAID = """Each model against its unmodified module over three training steps with different inputs: loss, gradients and
buffers; then random plans on four ranks against the graph. Left out: what its own package cannot build or run at
the size tried, in float64 or float32, and what gives no finite loss. Slow: not done in the time or memory of a process.
"""
MEMORY_NBYTES = 8 * 2**30
ADDRESSES_NBYTES = 24 * 2**30


def models_of(package: str) -> dict[str, Make]:
    """What makes each model of a package, by name."""
    module, function = PACKAGES[package].split(":")
    found: dict[str, Make] = getattr(importlib.import_module(module), function)()
    return found


def run(
    chosen: Sequence[tuple[str, str, Make]], jobs: int, seconds: float, check: Callable[[Make], Outcome]
) -> Iterator[dict[str, Any]]:
    """A row for each model as it is checked, `jobs` processes at a time, each ended after `seconds` of a processor."""
    waiting, running = list(reversed(chosen)), {}
    while waiting or running:
        while waiting and len(running) < jobs:
            package, name, make = waiting.pop()
            ours, theirs = mp.Pipe(duplex=False)
            process = mp.get_context("fork").Process(target=_work, args=(make, theirs, seconds, check), daemon=True)
            process.start()
            theirs.close()
            running[ours] = package, name, process, time.monotonic()
        wait(list(running), timeout=1.0)
        for pipe, (package, name, process, began) in list(running.items()):
            late = time.monotonic() - began > SHARED * seconds
            if not (pipe.poll() or late or not process.is_alive()):
                continue
            outcome = _received(pipe, process, late, seconds)
            process.kill()
            process.join()
            del running[pipe]
            row = {"package": package, "model": name, "verdict": outcome.verdict, "said": outcome.said}
            yield row | {"calls": outcome.calls, "seconds": round(time.monotonic() - began, 1)}


def _received(pipe: Any, process: Any, late: bool, seconds: float) -> Outcome:
    try:
        if pipe.poll():
            received: Outcome = pipe.recv()
            return received
    except EOFError:
        pass
    process.join(None if not late else 0)
    if late or process.exitcode == -signal.SIGXCPU:
        return Outcome(verdict="slow", said=f"not done in {seconds:.0f} s")
    return Outcome(verdict="crashed", said=f"the process died with exit code {process.exitcode}")


def _work(make: Make, pipe: Any, seconds: float, check: Callable[[Make], Outcome]) -> None:
    """In a process of its own: one thread, bounded memory and time."""
    torch.set_num_threads(1)
    resource.setrlimit(resource.RLIMIT_CPU, (int(seconds), int(seconds) + 5))
    resource.setrlimit(resource.RLIMIT_AS, (ADDRESSES_NBYTES, ADDRESSES_NBYTES))
    resource.setrlimit(resource.RLIMIT_DATA, (MEMORY_NBYTES, MEMORY_NBYTES))
    warnings.simplefilter("ignore")
    quiet = os.open(os.devnull, os.O_WRONLY)
    if not os.environ.get("FOREIGN_LOUD"):
        os.dup2(quiet, 1)
        os.dup2(quiet, 2)
    try:
        outcome = check(make)
    except BaseException as error:
        frames = traceback.extract_tb(error.__traceback__)
        own = [f for f in frames if "/autopar/" in f.filename or "/passes/" in f.filename] or frames
        where = f"{'/'.join(Path(own[-1].filename).parts[-2:])}:{own[-1].lineno}"
        first = (str(error).strip().split("\n") or [""])[0][:300]
        outcome = Outcome(verdict="crashed", said=f"{type(error).__name__} at {where}: {first}")
        if isinstance(error, MemoryError) or "allocate memory" in str(error):
            outcome = Outcome(verdict="slow", said="more memory than a process has")
        if os.environ.get("FOREIGN_LOUD"):
            traceback.print_exc()
    pipe.send(outcome)
    pipe.close()


def _warm_up() -> None:
    """Import what capture imports, once for all processes."""
    check(lambda: Foreign(model=torch.nn.Linear(2, 2), inputs=lambda: (torch.ones(4, 2),), loss_fn=torch.mean))


def read(file: Path) -> dict[tuple[str, str], dict[str, Any]]:
    """The last row of each model."""
    rows = [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []
    return {(row["package"], row["model"]): row for row in rows}


def table(rows: Sequence[dict[str, Any]], command: str) -> str:
    """The results as Markdown."""
    packages = list(dict.fromkeys(row["package"] for row in rows))
    distributions = ", ".join(f"{name} {version(name)}" for name in packages if name != MANY)
    lines = ["# Foreign models: is the graph the module?", ""]
    lines += [f"`{command}`, torch {torch.__version__}, {distributions}.", "", SAID, ""]
    lines += [
        f"| package | models | {' | '.join(VERDICTS)} |",
        f"|---|{'---:|' * (1 + len(VERDICTS))}",
    ]
    for package in (*packages, "all"):
        counts = Counter(row["verdict"] for row in rows if package in (row["package"], "all"))
        numbers = " | ".join(str(counts[verdict]) for verdict in VERDICTS)
        lines.append(f"| {package} | {counts.total()} | {numbers} |")
    for verdict in VERDICTS[1:]:
        lines += _listed(verdict, [row for row in rows if row["verdict"] == verdict])
    return "\n".join(lines) + "\n"


def _listed(verdict: str, rows: Sequence[dict[str, Any]]) -> list[str]:
    """The models of a verdict, by reason, the most frequent first."""
    groups: dict[str, list[str]] = {}
    for row in rows:
        groups.setdefault(reason(row["said"]), []).append(f"{row['package']}/{row['model']}")
    lines = ["", f"## {verdict.capitalize()}", ""] if groups else []
    for said, names in sorted(groups.items(), key=lambda item: -len(item[1])):
        lines.append(f"- {len(names)}: {said} ({', '.join(names)})")
    return lines


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--packages", default=",".join(PACKAGES))
    parser.add_argument("--only", default="*", help="a pattern of package/model")
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--seconds", type=float, default=120.0, help="of a processor, for one model")
    parser.add_argument("--plans", type=int, default=2, help="random plans for each model")
    parser.add_argument("--again", default="", help="verdicts whose models are run again, or `all`")
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument("--table", type=Path, default=TABLE)
    arguments = parser.parse_args()
    declare_kernels()
    _warm_up()
    known, again = read(arguments.results), arguments.again.split(",")
    chosen, every = [], set()
    for package in arguments.packages.split(","):
        for name, make in models_of(package).items():
            if fnmatch.fnmatch(f"{package}/{name}", arguments.only):
                every.add((package, name))
                before = known.get((package, name))
                if before is None or "all" in again or before["verdict"] in again:
                    chosen.append((package, name, make))
    for row in run(chosen, arguments.jobs, arguments.seconds, partial(check, plans=arguments.plans)):
        known[row["package"], row["model"]] = row
        with arguments.results.open("a") as file:
            file.write(json.dumps(row) + "\n")
        print(f"{row['package']}/{row['model']} {row['verdict']}: {row['said']}, {row['seconds']} s", flush=True)
    rows = [row for key, row in known.items() if key in every]
    if arguments.only == "*":
        arguments.table.parent.mkdir(parents=True, exist_ok=True)
        command = f"python -m benchmarks.foreign_models --plans {arguments.plans}"
        arguments.table.write_text(table(rows, command))
    counts = Counter(row["verdict"] for row in rows)
    print(f"{len(rows)} models: {', '.join(f'{counts[verdict]} {verdict}' for verdict in VERDICTS)}")
    return 1 if counts["wrong"] or counts["crashed"] else 0


if __name__ == "__main__":
    sys.exit(main())
