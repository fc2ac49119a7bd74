"""Every number that a user may give has a domain: outside it an ArgumentError, exit code 2, before any work.

The tables are complete: a number that is new in a command or a public function fails here until it has its domain.
"""

import inspect
import json
import math
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from typer.models import OptionInfo

import autopar
from autopar.api.arguments import NUMBERS
from autopar.api.model_plan import ModelPlan
from autopar.cli.main import app, main
from autopar.cli.options import OPTIONS
from autopar.errors import ArgumentError, AutoparError, ClusterError, MeshError
from autopar.runtime.launch import init
from autopar.values.cluster import load_cluster
from autopar.values.domains import MOST_DEVICES

NO_NUMBER = ("x", True, [2], 1j, math.nan, math.inf, -math.inf)
NO_COUNT = (*NO_NUMBER, 0, -1, 2.5, 1e300, 10**30, 10**400)
NO_AMOUNT = (*NO_NUMBER, 0, -1, 1e300, 10**400)
NO_GAP = (*NO_NUMBER, -0.1, 1, 1e300)
OUTSIDE = {
    "pipeline": NO_COUNT, "global_batch": NO_COUNT, "microbatches": NO_COUNT,
    "memory_gb": NO_AMOUNT, "seconds": NO_AMOUNT, "relative_gap": NO_GAP,
}  # fmt: skip


class Unread(nn.Module):
    """Fails as soon as anything is done with it."""

    def __getattr__(self, name: str) -> Any:
        raise AssertionError(f"{name} was read before arguments were checked")


def says_number(annotation: object) -> bool:
    return any(word in str(annotation).replace("Literal", "") for word in ("int", "float")) and "Mesh" not in str(
        annotation
    )


def test_every_number_of_a_plan_has_its_domain() -> None:
    numbers = {n for n, p in inspect.signature(autopar.plan).parameters.items() if says_number(p.annotation)}
    assert numbers == NUMBERS.keys() == OUTSIDE.keys()


@pytest.mark.parametrize("name", OUTSIDE)
def test_a_number_outside_its_domain_is_refused_before_any_work(name: str) -> None:
    for value in OUTSIDE[name]:
        given: dict[str, Any] = {"cluster": "2xcpu", name: value}
        with pytest.raises(ArgumentError, match=f"^{name} .* is not a "):
            autopar.plan(Unread.__new__(Unread), torch.zeros(2), **given)
        with pytest.raises(ArgumentError, match=f"^{name} "):
            autopar.auto_parallel(**given)


@pytest.mark.parametrize("name", ["optimizer", "precision", "schedule", "solver"])
@pytest.mark.parametrize("value", [3, True, [], "none"])
def test_a_word_that_is_none_is_refused(name: str, value: Any) -> None:
    given: dict[str, Any] = {"cluster": "2xcpu", name: value}
    with pytest.raises(ArgumentError, match=f"unknown {name}"):
        autopar.plan(Unread.__new__(Unread), torch.zeros(2), **given)


def test_other_public_numbers() -> None:
    plan = object.__new__(ModelPlan)
    for value in NO_AMOUNT:
        with pytest.raises(ArgumentError, match=r"^seconds "):
            plan.explain(seconds=value)
        with pytest.raises(ArgumentError, match=r"^seconds "):
            plan.alternatives(3, seconds=value)
        with pytest.raises(ArgumentError, match=r"^timeout_seconds "):
            init(timeout_seconds=value)
    for count in (*NO_NUMBER, -1, 2.5, 10**400):
        with pytest.raises(ArgumentError, match=r"^count "):
            plan.alternatives(count)  # type: ignore[arg-type]
        with pytest.raises(ArgumentError, match=r"^ahead "):
            autopar.Overlap(ahead=count)  # type: ignore[arg-type]
    for nbytes in (*NO_NUMBER, -1, 10**400):
        with pytest.raises(ArgumentError, match=r"^bucket_nbytes "):
            autopar.Overlap(bucket_nbytes=nbytes)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "mesh", ["", "x", "0x2", "-2", "2.0", "9" * 5000, "a=1,a=2", (0,), (2.0,), (True, 2), ("2",), (), 2]
)
def test_meshes_that_are_none(mesh: Any) -> None:
    from autopar.search.asked_mesh import asked_mesh

    with pytest.raises(MeshError):
        asked_mesh(load_cluster("2xcpu"), mesh)


@pytest.mark.parametrize(
    "name",
    [
        "99999999999999xcpu",
        "1000000x8xh100",
        "9" * 18 + "x" + "9" * 18 + "xh100",
        "9" * 5000 + "xcpu",
        "0xcpu",
        "x" * 5000,
    ],
)
def test_clusters_that_are_none(name: str) -> None:
    with pytest.raises(ClusterError):
        load_cluster(name)


def test_the_largest_cluster_is_arranged() -> None:
    from autopar.search.meshes import arrangements, parts

    machine = load_cluster(f"{MOST_DEVICES}xcpu")
    assert machine.num_devices == MOST_DEVICES and len(arrangements(machine, tuple(parts(machine)))) > 1


def options() -> Iterator[tuple[str, str]]:
    """(command, option) of every option that takes a number, by its type or by a domain of its own."""
    for registered in app.registered_commands:
        assert registered.callback is not None
        for name, parameter in inspect.signature(registered.callback, eval_str=True).parameters.items():
            said = [one for one in getattr(parameter.annotation, "__metadata__", ()) if isinstance(one, OptionInfo)]
            for info in said:
                option = (info.param_decls or (f"--{name.replace('_', '-')}",))[0]
                kind = parameter.annotation.__origin__
                if option in OPTIONS or {int, float} & {kind, *getattr(kind, "__args__", ())}:
                    yield registered.callback.__name__, option


NEEDED = {
    "plan": ["model.py:f", "--cluster", "2xcpu"],
    "export": ["model.py:f", "--cluster", "2xcpu", "--out", "out"],
    "verify": ["model.py:f", "--mesh", "2"],
    "explain": ["plan.json"],
    "simulate": ["llama-3-8b", "--cluster", "8xh100", "--dp", "8", "--global-batch", "8", "--exchange"],
    "calibrate": ["--out", "c.toml", "--processes", "2"],
    "launch": ["out"],
    "advise": [
        *("llama-3-8b", "--cluster", "8xh100", "--for", "fsdp", "--global-batch", "8", "--seq", "2048"),
        *("--gpus", "8", "--tokens", "1e9", "--price", "1"),
    ],
}
ALLOWED = {
    ("simulate", "--zero"),
    ("simulate", "--spare-machines"),
    ("verify", "--random"),
    ("verify", "--seed"),
    ("plan", "--gap"),
    ("launch", "--restarts"),
}
"""Where 0 is in the domain."""


@pytest.mark.parametrize(("command", "option"), [*options()])
def test_an_option_outside_its_domain_is_one_json_object_and_exit_code_2(
    command: str,
    option: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    monkeypatch.chdir(tmp_path)
    for value in ("-1", "0", "nan", "inf", "1e300", "1" + "0" * 30, "1" + "0" * 5000, "True", "two", ""):
        if value == "0" and (command, option) in ALLOWED:
            continue
        with pytest.raises(SystemExit) as ended:
            main([command, *NEEDED[command], option, value, "--json"])
        out = capsys.readouterr().out
        answer = json.loads(out)
        assert ended.value.code == 2 and answer.keys() == {"error", "kind"}, (value, out)
        known = ("ArgumentError", "BatchError", "MeshError", "ClusterError")
        assert answer["kind"] in known and "model.py" not in answer["error"], (value, answer)


def test_usage_errors_are_json_too(capsys: pytest.CaptureFixture[str]) -> None:
    for arguments in (
        ["plan"],
        ["plan", "m"],
        ["plan", "m", "--nope"],
        ["nope"],
        [],
        ["diff", "a.json"],
    ):
        with pytest.raises(SystemExit) as ended:
            main([*arguments, "--json"])
        assert ended.value.code == 2 and json.loads(capsys.readouterr().out)["kind"] == "ArgumentError"


@pytest.mark.parametrize(
    ("raised", "code"),
    [
        (KeyboardInterrupt(), 130),
        (MemoryError(), 3),
        (ValueError("odd"), 3),
        (SystemExit(0), 2),
        (AutoparError("bad"), 2),
    ],
)
def test_however_a_command_ends_there_is_one_answer(
    raised: BaseException, code: int, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def end(**_: Any) -> None:
        raise raised

    monkeypatch.setattr("autopar.cli.main.check_options", end)
    with pytest.raises(SystemExit) as ended:
        main(["plan", "m", "--cluster", "2xcpu", "--json"])
    assert ended.value.code == code and json.loads(capsys.readouterr().out).keys() == {"error", "kind"}


def test_a_closed_pipe_is_no_failed_verification(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    simulated = ["simulate", "llama-3-8b", "--cluster", "8xh100", "--dp", "8", "--global-batch", "8"]
    for asked in (simulated, [*simulated, "--json"], ["plan", "--help"]):
        command = [sys.executable, "-m", "autopar.cli", *asked]
        done = subprocess.run(command, stdout=writer, stderr=subprocess.PIPE, text=True, timeout=200, check=False)
        assert done.returncode == 141 and done.stderr == "", done.stderr
    os.close(writer)
