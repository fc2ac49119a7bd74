"""Does `pip install autopar` work with each torch and transformers? Fresh environments, from a built wheel and sdist.

    python -m benchmarks.install_matrix --torch 2.13.0,2.14.1 --transformers 5.0.0,5.24.0 --out docs/results/install.md
    python -m benchmarks.install_matrix --torch 2.14.1 --transformers 5.0.0 --sources wheel --out ...    # one row

For each torch a fresh environment, removed before the next: torch as pip finds it (its CPU build where there is one),
then for each transformers autopar from the wheel, `autopar --version`, `autopar plan --baseline fsdp` of a small `hf:`
model for two CPU processes, and `autopar verify` of that plan on two processes. With the last transformers the same
from the sdist. What does not install is a row that says so. Rows that `--out` has of other combinations stay. torch
from PyPI brings up to 6 GB of CUDA libraries.
"""

import argparse
import json
import os
import platform
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
CPU_WHEELS = "https://download.pytorch.org/whl/cpu"
"""The index of torch's CPU builds, as in the Makefile."""
CONFIG = {
    "model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_size": 32, "intermediate_size": 64,
    "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 96, "bos_token_id": 1,
    "eos_token_id": 2,
}  # fmt: skip
LIMIT_SECONDS = 1800.0
BUILD = "import setuptools.build_meta as b; b.build_wheel({0!r}); b.build_sdist({0!r})"


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """One combination: what was asked for, what was installed, and how it went."""

    torch: str
    transformers: str
    source: str
    installed: str = ""
    plan: str = ""
    verify: str = ""


class StepError(Exception):
    """A command that failed; its last line."""


class Environment:
    """A fresh virtual environment in `folder`, and an empty working directory of it."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.work = folder / "venv", folder / "work"
        self.work.mkdir()
        (self.work / "config.json").write_text(json.dumps(CONFIG))
        self._run([sys.executable, "-m", "venv", str(self.folder)])

    def pip(self, *words: str) -> None:
        self._run([str(self.folder / "bin" / "python"), "-m", "pip", "install", "--quiet", *words])

    def autopar(self, *words: str) -> str:
        return self._run([str(self.folder / "bin" / "autopar"), *words])

    def _run(self, command: Sequence[str]) -> str:
        clean = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "PYTHONHOME")}
        try:
            done = subprocess.run(
                command, cwd=self.work, env=clean, capture_output=True, text=True, timeout=LIMIT_SECONDS
            )
        except subprocess.TimeoutExpired as error:
            raise StepError(f"took longer than {LIMIT_SECONDS:.0f} s") from error
        if done.returncode:
            said = [line for line in (done.stdout + done.stderr).splitlines() if line.strip()]
            raise StepError(" ".join(said[-3:])[:300] or f"exit code {done.returncode}")
        return done.stdout


def build(folder: Path) -> dict[str, Path]:
    """The wheel and the sdist of a copy of what git knows of this checkout."""
    copy, dist = folder / "source", folder / "dist"
    subprocess.run(["git", "clone", "--quiet", str(ROOT), str(copy)], check=True)
    subprocess.run([sys.executable, "-c", BUILD.format(str(dist))], cwd=copy, check=True, capture_output=True)
    [wheel], [sdist] = dist.glob("*.whl"), dist.glob("*.tar.gz")
    return {"wheel": wheel, "sdist": sdist}


def cells(built: dict[str, Path], torch: str, others: Sequence[str], sources: Sequence[str]) -> Iterator[Cell]:
    """Of one torch: every transformers from the wheel, the last from the sdist, of `sources`."""
    with tempfile.TemporaryDirectory(prefix="autopar-matrix-") as name:
        environment = Environment(Path(name))
        try:
            install_torch(environment, torch)
        except StepError as error:
            yield Cell(torch=torch, transformers="", source="", installed=f"torch: {error}")
            return
        rows = [(other, "wheel") for other in others] + [(others[-1], "sdist")]
        for other, source in rows:
            if source in sources:
                cell = measured(environment, built[source], torch, other)
                yield Cell(torch=torch, transformers=other, source=source, **cell)


def install_torch(environment: Environment, torch: str) -> None:
    """The CPU build where its index is reachable, else what pip's own index has."""
    wanted = f"torch=={torch}"
    try:
        environment.pip("--retries", "0", "--timeout", "15", "--no-deps", "--index-url", CPU_WHEELS, wanted)
    except StepError:
        environment.pip(wanted)


def measured(environment: Environment, built: Path, torch: str, transformers: str) -> dict[str, str]:
    """The columns of a cell: what went, or why not."""
    said: dict[str, str] = {}
    step = "installed"
    try:
        environment.pip("--force-reinstall", "--no-deps", str(built))
        environment.pip(f"autopar[hf] @ {built.as_uri()}", f"transformers=={transformers}", f"torch=={torch}")
        said[step] = environment.autopar("--version").strip()
        step = "plan"
        small = ("hf:config.json", "--seq", "16")
        shutil.rmtree(environment.work / "out", ignore_errors=True)
        asked = (*small, "--cluster", "2xcpu", "--baseline", "fsdp", "--out", "out", "--json")
        body = json.loads(environment.autopar("plan", *asked))
        said[step] = f"ok, {len(body['stages'][0]['layouts'])} tensors laid out"
        step = "verify"
        checked = json.loads(environment.autopar("verify", *small, "--plan", "out/plan.json", "--json"))
        calls = sum(sent["calls"] for sent in checked["plans"][0]["sent"].values())
        ok = f"ok, gradients {checked['gradient_error']:.0e}, {calls} collectives a step"
        said[step] = ok if checked["passed"] else "DIFFERS"
    except StepError as error:
        said[step] = f"FAILED: {error}"
    return said


Row = tuple[str, ...]
"""The columns of a cell as texts, the first three of which say which combination it is."""
COLUMNS = ("torch", "transformers", "from", "installed", "plan", "verify")


def row_of(cell: Cell) -> Row:
    texts = (cell.torch, cell.transformers, cell.source, cell.installed, cell.plan, cell.verify)
    return tuple(text.replace("|", "/").replace("\n", " ") for text in texts)


def rows_on(text: str) -> list[Row]:
    """Of the table of a page."""
    lines = [line.strip("| ").split("|") for line in text.splitlines() if line.startswith("|")]
    return [tuple(column.strip() for column in line) for line in lines[2:] if len(line) == len(COLUMNS)]


def page(found: Sequence[Row]) -> str:
    """The table as a page of the manual, in the order of versions."""
    rows = sorted(found, key=lambda row: [*map(_numbers, row[:2]), row[2] == "sdist"])
    asked = [",".join(dict.fromkeys(row[at] for row in rows)) for at in (0, 1)]
    lines = [
        "# Installing with each torch and transformers",
        "",
        f"Written by `python -m benchmarks.install_matrix --torch {asked[0]} --transformers {asked[1]}`",
        f"with Python {platform.python_version()}, one or more rows at a time. For each torch a fresh environment; in",
        "it autopar from the built wheel (or sdist), then `autopar plan --baseline fsdp` of a small Llama for two CPU",
        "processes and `autopar verify` of that plan on two processes, float64, against one process.",
        "",
        f"| {' | '.join(COLUMNS)} |",
        "|---" * len(COLUMNS) + "|",
        *(f"| {' | '.join(row)} |" for row in rows),
    ]
    if any(row[5].startswith("ok") and "collectives" not in row[5] for row in rows):
        lines += ["", "Rows that name no collectives are of the best plan: whole on every rank, it sends nothing."]
    return "\n".join(lines) + "\n"


def _numbers(version: str) -> list[int]:
    return [int(part) for part in version.split(".") if part.isdecimal()]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--torch", default="2.13.0", help="versions, separated by commas")
    parser.add_argument("--transformers", default="5.0.0,5.23.0", help="versions, separated by commas, the newest last")
    parser.add_argument("--sources", default="wheel,sdist", help="of wheel and sdist, separated by a comma")
    parser.add_argument("--out", type=Path, help="write the page here, in which rows of other combinations stay")
    given = parser.parse_args()
    found: list[Cell] = []
    with tempfile.TemporaryDirectory(prefix="autopar-matrix-") as name:
        built = build(Path(name))
        for torch in given.torch.split(","):
            for cell in cells(built, torch, given.transformers.split(","), given.sources.split(",")):
                print(cell, flush=True)
                found.append(cell)
    if given.out is not None:
        kept = rows_on(given.out.read_text()) if given.out.exists() else []
        given.out.write_text(page(list({row[:3]: row for row in (*kept, *map(row_of, found))}.values())))
    return int(any("ok" not in cell.verify for cell in found))


if __name__ == "__main__":
    sys.exit(main())
