"""Does `pip install autopar` work with each torch and transformers? Fresh environments, from a built wheel and sdist.

    python -m benchmarks.install_matrix --torch 2.13.0,2.14.1 --transformers 5.0.0,5.24.0 --out docs/results/install.md

For each torch a fresh environment, removed before the next: torch as pip finds it (its CPU build where there is one),
then for each transformers autopar from the wheel, `autopar --version`, `autopar plan` of a small `hf:` model for two
CPU processes, and `autopar verify` of that plan on two processes. With the last transformers the same from the sdist.
What does not install is a row that says so. torch from PyPI brings up to 6 GB of CUDA libraries.
"""

import argparse
import json
import os
import platform
import shutil
import subprocess
import sys
import tempfile
import time
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
    seconds: float = 0.0


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


def cells(built: dict[str, Path], torch: str, others: Sequence[str]) -> Iterator[Cell]:
    """Of one torch."""
    with tempfile.TemporaryDirectory(prefix="autopar-matrix-") as name:
        environment = Environment(Path(name))
        try:
            install_torch(environment, torch)
        except StepError as error:
            yield Cell(torch=torch, transformers="", source="", installed=f"torch: {error}")
            return
        rows = [(other, "wheel") for other in others] + [(others[-1], "sdist")]
        for other, source in rows:
            began = time.perf_counter()
            cell = measured(environment, built[source], torch, other)
            yield Cell(torch=torch, transformers=other, source=source, seconds=time.perf_counter() - began, **cell)


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
        body = json.loads(environment.autopar("plan", *small, "--cluster", "2xcpu", "--out", "out", "--json"))
        said[step] = f"ok, {len(body['stages'][0]['layouts'])} tensors laid out"
        step = "verify"
        checked = json.loads(environment.autopar("verify", *small, "--plan", "out/plan.json", "--json"))
        said[step] = f"ok, gradients {checked['gradient_error']:.0e}" if checked["passed"] else "DIFFERS"
    except StepError as error:
        said[step] = f"FAILED: {error}"
    return said


def page(found: Sequence[Cell], command: str) -> str:
    """The table as a page of the manual."""
    lines = [
        "# Installing with each torch and transformers",
        "",
        f"Written by `{command}` with Python {platform.python_version()}. For each torch a fresh environment;",
        "in it autopar from the built wheel (or sdist), then `autopar plan` of a small Llama for two CPU processes and",
        "`autopar verify` of that plan on two processes, float64, against one process.",
        "",
        "| torch | transformers | from | installed | plan | verify | seconds |",
        "|---|---|---|---|---|---|---|",
    ]
    for cell in found:
        texts = [cell.torch, cell.transformers, cell.source, cell.installed, cell.plan, cell.verify]
        escaped = [text.replace("|", "\\|").replace("\n", " ") for text in texts]
        lines.append(f"| {' | '.join(escaped)} | {cell.seconds:.0f} |")
    return "\n".join(lines) + "\n"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--torch", default="2.13.0", help="versions, separated by commas")
    parser.add_argument("--transformers", default="5.0.0,5.23.0", help="versions, separated by commas, the newest last")
    parser.add_argument("--out", type=Path, help="write the page here")
    given = parser.parse_args()
    found: list[Cell] = []
    with tempfile.TemporaryDirectory(prefix="autopar-matrix-") as name:
        built = build(Path(name))
        for torch in given.torch.split(","):
            for cell in cells(built, torch, given.transformers.split(",")):
                print(cell, flush=True)
                found.append(cell)
    if given.out is not None:
        given.out.write_text(page(found, f"python -m benchmarks.install_matrix {' '.join(sys.argv[1:])}"))
    return int(any("ok" not in cell.verify for cell in found))


if __name__ == "__main__":
    sys.exit(main())
