"""What a person reads beside answers: progress, faults, ranks that fail, and files that were moved."""

import inspect
import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
from typer.models import OptionInfo

from autopar.cli import progress
from autopar.cli.ending import console_of
from autopar.cli.main import app
from autopar.verification import run as verification
from tests.test_cli import MODEL_FILE, PLAN, net, run

__all__ = ["net"]


def test_a_plan_and_its_model_move_together(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A relative path is one from the plan's file; what is missing is said with the places that were looked at."""
    (project := tmp_path / "project").mkdir()
    (project / "net.py").write_text(MODEL_FILE)
    monkeypatch.chdir(project)
    assert run(capsys, "plan", "net.py:net", *PLAN, "--set", "width=32", "--out", "plans/a.json", "--json")[0] == 0
    assert json.loads((project / "plans/a.json").read_text())["source"]["spec"] == "../net.py:net"
    project.rename(moved := tmp_path / "moved")
    monkeypatch.chdir(tmp_path)
    code, out, _ = run(capsys, "export", "moved/plans/a.json", "--out", moved / "b" / "c", "--trust", "--json")
    assert code == 0, out
    assert json.loads((moved / "b/c/plan.json").read_text())["source"]["spec"] == "../../net.py:net"
    code, out, _ = run(capsys, "diff", "moved/plans/a.json", "moved/b/c/plan.json", "--trust", "--json")
    assert code == 0, out
    (moved / "net.py").unlink()
    code, _, err = run(capsys, "diff", "moved/plans/a.json", "moved/plans/a.json", "--trust")
    assert code == 2 and f"there is no {moved / 'net.py'} and no {tmp_path.parent / 'net.py'}; move" in err


CASTING = """
import torch
from torch import nn

class Casting(nn.Linear):
    def forward(self, x):
        return super().forward(x).float().square().mean()

def casting(batch=8, width=16):
    return Casting(width, width), {"x": torch.randn(batch, width)}
"""


def test_a_plan_whose_graph_another_precision_casts_names_its_own(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """verify compares in fp64 unless told otherwise; planning again would give the same plan. Of another model it is
    not the precision that does not fit."""
    (tmp_path / "net.py").write_text(CASTING)
    model, saved = f"{tmp_path / 'net.py'}:casting", tmp_path / "plan.json"
    planned = run(capsys, "plan", model, *PLAN, "--precision", "bf16-mixed", "--no-check", "--out", saved, "--json")
    assert planned[0] == 0, planned
    code, _, err = run(capsys, "verify", model, "--plan", saved)
    assert code == 2 and "the plan was made in bf16-mixed; in fp64" in err, err
    assert err.endswith("give --precision bf16-mixed\n") and "plan again" not in err
    (tmp_path / "net.py").write_text(CASTING.replace(".square()", ".exp()"))
    code, _, err = run(capsys, "verify", model, "--plan", saved)
    assert code == 2 and "plan again" in err and "--precision" not in err


def test_a_fault_is_one_message_and_debug_the_traceback(
    capsys: pytest.CaptureFixture[str], net: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def broken(*_: object, **__: object) -> None:
        raise TypeError("what torch said\nand said")

    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    (tmp_path / "plan.json").write_text("{}")
    monkeypatch.setattr("autopar.api.model_plan.load_plan", broken)
    code, out, err = run(capsys, "explain", tmp_path / "plan.json")
    [kept] = tmp_path.glob("autopar-fault-*.txt")
    assert code == 3 and out == "" and err.count("\n") == 1 and "Traceback" not in err
    assert err.startswith("autopar: a fault of autopar: TypeError: what torch said; ") and str(kept) in err
    assert "Traceback" in kept.read_text() and "and said" in kept.read_text()
    code, _, err = run(capsys, "explain", tmp_path / "plan.json", "--debug")
    assert code == 3 and "Traceback" in err and err.splitlines()[-1].startswith("autopar: a fault")


def test_version_and_progress_in_files(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    code, out, _ = run(capsys, "--version")
    assert code == 0 and out.startswith("autopar ") and "torch 2." in out
    code, out, err = run(capsys)
    assert code == 2 and "Usage: autopar" in out and err.startswith("autopar: name a command (")
    monkeypatch.setattr(progress, "QUIET_SECONDS", 0.01)
    with progress.ProgressLine(console_of(False)) as tell:
        tell("doing this")
        time.sleep(0.2)
    lines = capsys.readouterr().err.splitlines()
    assert lines and all(line == "autopar: 0 s: doing this" for line in lines) and len(lines) < 15
    with progress.ProgressLine(console_of(False)) as tell:
        tell("doing that")
        tell.note("assumed: this")
        tell._since -= 41
        assert tell.doing == "doing that, for 41 s"
        time.sleep(0.1)
    lines = capsys.readouterr().err.splitlines()
    assert lines[0] == "autopar: assumed: this" and "autopar: 0 s: doing that, for 41 s" in lines[1]
    assert sum("assumed" in line for line in lines) == 1
    assert [progress.elapsed_text(s) for s in (41.6, 185, 7440)] == ["42 s", "3 min 5 s", "2 h 4 min"]


NO_LOSS = MODEL_FILE.replace("return x.square().mean()", "return x")


def test_a_model_without_a_loss_is_answered_with_what_a_shell_has(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    (tmp_path / "bare.py").write_text(NO_LOSS)
    for command in (("plan", *PLAN), ("verify", "--mesh", 2)):
        code, _, err = run(capsys, command[0], f"{tmp_path / 'bare.py'}:net", *command[1:])
        assert code == 2 and "the model returned a tensor (" in err and "loss_fn" not in err
        assert "let the function return a module around it whose forward(self, x, y) returns" in err


@pytest.mark.parametrize(
    ("typed", "at", "found"),
    [
        ("autopar pl", 1, {"plan"}),
        ("autopar plan --me", 2, {"--mesh", "--memory-gb"}),
        ("autopar verify --t", 2, {"--trust"}),
    ],
)
def test_a_shell_completes_commands_and_options(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, typed: str, at: int, found: set[str]
) -> None:
    monkeypatch.setenv("_AUTOPAR_COMPLETE", "complete_bash")
    monkeypatch.setenv("COMP_WORDS", typed)
    monkeypatch.setenv("COMP_CWORD", str(at))
    code, out, err = run(capsys)
    assert code == 0 and err == "" and set(out.split()) == found


def test_completion_is_shown(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("typer.completion._get_shell_name", lambda: "bash")
    code, out, err = run(capsys, "--show-completion")
    assert code == 0 and err == "" and "complete -o default -F _autopar_completion autopar" in out


def test_help_has_its_options_in_groups_and_shows_no_value_of_flags(capsys: pytest.CaptureFixture[str]) -> None:
    for registered in app.registered_commands:
        assert registered.callback is not None
        for name, parameter in inspect.signature(registered.callback, eval_str=True).parameters.items():
            said = [one for one in getattr(parameter.annotation, "__metadata__", ()) if isinstance(one, OptionInfo)]
            assert all(info.rich_help_panel for info in said), (registered.callback.__name__, name)
    code, out, _ = run(capsys, "plan", "--help")
    assert code == 0 and out.count("<bool>") <= 1, "that of --help is typer's"


def test_the_command_line_is_there_before_torch_is() -> None:
    command = "import sys, autopar.cli.main; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", command], timeout=120).returncode == 0


def test_a_rank_that_fails_is_one_message(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What rank 1 raised, without torch's dump; the traceback is a note, for who asks for it."""
    ended = []
    monkeypatch.setattr(verification, "_check_plans", lambda *_: 1 / 0)
    monkeypatch.setattr(os, "_exit", ended.append)
    verification._worker({"RANK": "1"}, str(tmp_path), "cpu")
    error = verification._failure(tmp_path, "ddp", [1], [])
    assert ended == [1] and str(error) == "plan ddp failed on rank 1: ZeroDivisionError: division by zero"
    assert "Traceback" in error.__notes__[0]
