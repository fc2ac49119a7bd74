"""The command line: what it prints, what it returns, and that bad input is one message."""

import json
import os
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from autopar.api.captures import captured_model
from autopar.api.model_plan import model_plan
from autopar.cli import verify as verify_command
from autopar.cli.main import main
from autopar.models import load_model
from autopar.search.known.random_plan import random_staged_plan
from autopar.values.calls import Call
from autopar.values.mesh import make_mesh

pytestmark = pytest.mark.usefixtures("copied_processes")

CONFIG = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 96,
    "bos_token_id": 1,
    "eos_token_id": 2,
}

MODEL_FILE = """
import torch
from torch import nn

class Net(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(width, width) for _ in range(2))

    def forward(self, x):
        for block in self.blocks:
            x = block(x).relu()
        return x.square().mean()

def net(batch=8, width=16):
    return Net(width), {"x": torch.randn(batch, width)}
"""


@pytest.fixture
def llama(tmp_path: Path) -> str:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    return f"hf:{tmp_path / 'config.json'}"


@pytest.fixture
def net(tmp_path: Path) -> str:
    (tmp_path / "net.py").write_text(MODEL_FILE)
    return f"{tmp_path / 'net.py'}:net"


def run(capsys: pytest.CaptureFixture[str], *arguments: object) -> tuple[int, str, str]:
    """Exit code, standard output and standard error of a command."""
    with pytest.raises(SystemExit) as stop:
        main([str(argument) for argument in arguments])
    out, err = capsys.readouterr()
    assert isinstance(stop.value.code, int)
    return stop.value.code, out, err


PLAN = ("--cluster", "4xcpu", "--mesh", "2x2", "--no-baselines")


def test_plan_prints_what_a_person_reads(capsys: pytest.CaptureFixture[str], llama: str) -> None:
    code, out, _ = run(capsys, "plan", llama, *PLAN, "--seq", 16, "--baseline", "fsdp")
    assert code == 0
    assert "LlamaForCausalLM on 4xcpu, mesh 2x2 (data, model), global batch 8, adamw, fp32 [fsdp]" in out
    assert "model.layers." in out and "self_attn.q_proj" in out and "split by batch" in out
    assert max(map(len, out.splitlines())) <= 120
    assert "assumed  precision fp32 (for GPUs: --precision bf16-mixed), global batch 8 (--global-batch)\n" in out
    sized = ("--set", "max_position_embeddings=16", "--precision", "bf16-mixed", "--global-batch", 8)
    code, out, _ = run(capsys, "plan", llama, *PLAN, *sized, "--baseline", "fsdp", "--no-check")
    assert code == 0 and "assumed  sequence length 16 (--seq)\n" in out
    assert "adamw, bf16-mixed [fsdp]" in out


def test_plan_as_json_is_one_object_and_nothing_else(
    capsys: pytest.CaptureFixture[str], llama: str, tmp_path: Path
) -> None:
    code, out, err = run(capsys, "plan", llama, *PLAN, "--seq", 16, "--out", tmp_path / "out", "--json")
    body = json.loads(out)
    assert code == 0 and err == ""
    assert body["mesh"]["shape"] == [2, 2] and body["source"]["spec"] == llama
    assert json.loads((tmp_path / "out" / "plan.json").read_text()) == body


def test_json_is_pure_in_a_process_of_its_own(llama: str) -> None:
    """Whatever libraries print or warn while they load goes elsewhere."""
    command = [sys.executable, "-m", "autopar.cli", "plan", llama, *PLAN, "--seq", "16", "--json"]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, env=environment)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["cluster"] == "4xcpu"


BAD = {
    "no such config": (["plan", "hf:/nowhere", *PLAN], "there is no /nowhere"),
    "cluster": (["plan", "{model}", "--cluster", "8h100"], "a TOML file; did you mean 8xh100? A preset is"),
    "mesh and cluster": (
        ["plan", "{model}", "--cluster", "4xcpu", "--mesh", "2x4"],
        "has 8 ranks, not the 4 devices of 4xcpu",
    ),
    "mesh text": (["plan", "{model}", "--cluster", "4xcpu", "--mesh", "2by2"], "is not of the form 2x2"),
    "precision": (
        ["plan", "{model}", *PLAN, "--precision", "fp16"],
        "unknown precision 'fp16'; choose one of fp32, bf16",
    ),
    "optimizer": (["plan", "{model}", *PLAN, "--optimizer", "adamv"], "did you mean adam, adamw, adam-fused?"),
    "baseline": (["plan", "{model}", *PLAN, "--baseline", "dpp"], "keys as in fsdp:zero=2; did you mean ddp"),
    "baseline's schedule": (
        ["plan", "{model}", *PLAN, "--baseline", "ddp:pp=2,schedule=1fb1"],
        "schedule '1fb1' is none of gpipe, 1f1b, interleaved-1f1b, zbv; did you mean 1f1b",
    ),
    "schedule": (
        ["plan", "{model}", "--cluster", "4xcpu", "--mesh", "auto", "--schedule", "1fb1"],
        "did you mean 1f1b",
    ),
    "launcher": (["launch", "out", "--with", "slrum"], "unknown launcher 'slrum'; choose one of torchrun, slurm"),
    "baseline's key": (
        ["verify", "{model}", "--mesh", "2x2", "--baseline", "ddp:tp=2"],
        "'tp=2' is no key of ddp",
    ),
    "baselines of other micro-batches": (
        ["verify", "{model}", "--mesh", "2x2", "--baseline", "ddp:mbs=1", "--baseline", "ddp:mbs=2"],
        "different numbers of micro-batches: ddp:mbs=1 2, ddp:mbs=2 1",
    ),
    "batch": (
        ["plan", "{model}", *PLAN, "--global-batch", "6", "--baseline", "ddp"],
        "global batch 6 is not divisible by 4 data-parallel ranks; use 4 or 8",
    ),
    "memory": (["plan", "{model}", *PLAN, "--memory-gb", "-1"], "is not a number above 0"),
    "solver": (["plan", "{model}", *PLAN, "--mesh", "auto", "--solver", "double-recursive"], "decides on one mesh"),
    "override": (["plan", "{model}", *PLAN, "--set", "width"], "write it as key=value"),
    "no such option": (["plan", "{model}", *PLAN, "--clutter"], "No such option: --clutter"),
    "no cluster": (["export", "{model}", "--out", "out"], "needs --cluster"),
    "no mesh": (["verify", "{model}"], "verify needs --mesh"),
    "pipeline of a baseline": (
        ["plan", "{model}", "--cluster", "4xcpu", "--baseline", "ddp:pp=2", "--pin", "forbid: pipeline"],
        "pins forbid a pipeline",
    ),
    "pipeline to verify": (["verify", "{model}", "--mesh", "2", "--pin", "demand: pipeline"], "pins demand a pipeline"),
    "folder of a report": (["plan", "{model}", *PLAN, "--report", "/dev/null/r.html"], "its folder cannot be made"),
    "how to make a plan that is made": (
        ["export", "nowhere.json", "--out", "out", "--mesh", "2x2", "--pin", "*: batch"],
        "leave --mesh, --pin out",
    ),
    "no plan file": (["export", "nowhere.json", "--out", "out"], "nowhere.json cannot be read"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_input_is_one_message_and_exit_code_2(capsys: pytest.CaptureFixture[str], net: str, name: str) -> None:
    arguments, message = BAD[name]
    given = [argument.format(model=net) for argument in arguments]
    code, out, err = run(capsys, *given)
    assert code == 2 and out == ""
    assert message in err and "Traceback" not in err and err.startswith("autopar: ")
    code, out, err = run(capsys, *given, "--json")
    assert code == 2 and err == ""
    body = json.loads(out)
    assert set(body) == {"error", "kind"} and message in body["error"]


def test_memory_that_nothing_meets_says_the_least_that_would(capsys: pytest.CaptureFixture[str], net: str) -> None:
    code, out, _ = run(capsys, "plan", net, *PLAN, "--memory-gb", "0.0000001", "--json")
    assert code == 2
    assert json.loads(out)["kind"] == "InfeasibleError"


def test_a_model_that_cannot_be_captured_names_its_own_line(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    source = MODEL_FILE.replace(
        "        return x.square", "        if x.sum() > 0:\n            x = -x\n        return x.square"
    )
    (tmp_path / "bad.py").write_text(source)
    code, _, err = run(capsys, "plan", f"{tmp_path / 'bad.py'}:net", *PLAN)
    line = next(i for i, text in enumerate(source.splitlines(), 1) if "x.sum()" in text)
    assert code == 2 and f"bad.py:{line}" in err


def test_export_of_a_saved_plan_needs_nothing_else(
    capsys: pytest.CaptureFixture[str], net: str, tmp_path: Path
) -> None:
    assert run(capsys, "plan", net, *PLAN, "--set", "width=32", "--out", tmp_path / "a", "--json")[0] == 0
    code, out, _ = run(capsys, "export", tmp_path / "a" / "plan.json", "--out", tmp_path / "b", "--trust", "--json")
    assert code == 0 and set(json.loads(out)["files"]) >= {"plan.json", "model.py", "specs.json", "train.py"}
    for name in ("plan.json", "model.py", "train.py"):
        texts = [(tmp_path / folder / name).read_text() for folder in ("a", "b")]
        one, other = map(json.loads, texts) if name.endswith(".json") else texts
        assert one == other, name


def test_what_a_plans_file_names_is_not_run_unless_a_person_says_so(
    capsys: pytest.CaptureFixture[str], net: str, tmp_path: Path
) -> None:
    """Its model, what the model's function is given, and its cluster's file."""
    saved, touched = tmp_path / "plan.json", tmp_path / "touched"
    assert run(capsys, "plan", net, *PLAN, "--set", "width=32", "--out", saved, "--json")[0] == 0
    body = json.loads(saved.read_text())
    source = {**body["source"], "spec": "subprocess:getoutput", "overrides": {"cmd": f"touch {touched}"}}
    saved.write_text(json.dumps({**body, "source": {**source, "batch": None}, "cluster": str(tmp_path / "c.toml")}))
    commands = (("explain", saved), ("diff", saved, saved), ("export", saved, "--out", tmp_path / "a"))
    for command in commands:
        code, out, _ = run(capsys, *command, "--json")
        assert code == 2 and "give --trust to run it" in json.loads(out)["error"] and not touched.exists()
        code, out, _ = run(capsys, *command, "--model", net, "--set", "width=32", "--json")
        assert not touched.exists() and (code == 0) == (command[0] != "explain"), out
    assert (
        "which is no preset"
        in json.loads(run(capsys, *commands[0], "--model", net, "--set", "width=32", "--json")[1])["error"]
    )
    code, out, _ = run(capsys, "verify", net, "--plan", saved, "--json")
    assert code == 2 and "--set cmd=touch" in json.loads(out)["error"] and not touched.exists()
    run(capsys, *commands[0], "--trust", "--json")
    assert touched.exists(), "the file is believed when a person says so"


def test_a_plan_of_a_model_that_changed_is_refused(
    capsys: pytest.CaptureFixture[str], net: str, tmp_path: Path
) -> None:
    assert run(capsys, "plan", net, *PLAN, "--out", tmp_path / "a", "--json")[0] == 0
    code, out, _ = run(
        capsys, "export", tmp_path / "a/plan.json", "--out", tmp_path / "b", "--trust", "--set", "width=32", "--json"
    )
    assert code == 2 and json.loads(out)["kind"] == "PlanMismatchError"
    assert "plan again for this model" in json.loads(out)["error"]


def test_verify_compares_with_one_process(capsys: pytest.CaptureFixture[str], net: str) -> None:
    code, out, _ = run(capsys, "verify", net, "--mesh", 2, "--random", 2, "--baseline", "ddp:zero=1,mbs=2")
    assert code == 0, out
    rows = [line for line in out.splitlines() if line.startswith(("random", "ddp"))]
    assert len(rows) == 3 and all(line.endswith("ok") for line in rows)
    assert "equal to one process" in out and "predicted" in out


UNREAD = """
import torch
from torch import nn


class Net(nn.Linear):
    def __init__(self):
        super().__init__(64, 64)
        self.unread = nn.Parameter(torch.ones(3))

    def forward(self, x):
        return super().forward(x).square().mean()


def make():
    return Net(), {"x": torch.randn(64, 64)}
"""


def test_verify_in_mixed_precision_and_of_what_nothing_reads(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    (tmp_path / "unread.py").write_text(UNREAD)
    asked = ("verify", f"{tmp_path / 'unread.py'}:make", "--mesh", 2, "--baseline", "ddp", "--precision", "bf16-mixed")
    body = json.loads(run(capsys, *asked, "--json")[1])
    assert body["loss_error"] < 2e-2 and body["gradient_error"] < 1e-1
    assert body["plans"][0]["sent"] == body["plans"][0]["predicted"] != {}


def test_verify_a_saved_plan_as_json(capsys: pytest.CaptureFixture[str], net: str, tmp_path: Path) -> None:
    planned = run(capsys, "plan", net, "--cluster", "2xcpu", "--baseline", "fsdp", "--out", tmp_path / "a", "--json")
    assert planned[0] == 0
    code, out, err = run(capsys, "verify", net, "--plan", tmp_path / "a/plan.json", "--json")
    body: dict[str, Any] = json.loads(out)
    assert code == 0 and err == "" and body["passed"]
    assert body["plans"][0]["sent"] == body["plans"][0]["predicted"] != {}


def test_explain_and_diff_of_saved_plans(capsys: pytest.CaptureFixture[str], net: str, tmp_path: Path) -> None:
    for name in ("fsdp", "ddp:zero=0"):
        out = tmp_path / f"{name[:3]}.json"
        assert run(capsys, "plan", net, "--cluster", "2xcpu", "--baseline", name, "--out", out)[0] == 0
    one, other = tmp_path / "fsd.json", tmp_path / "ddp.json"
    code, out, err = run(capsys, "diff", one, other, "--trust", "--json")
    changes = json.loads(out)["changes"]
    assert code == 0 and err == "" and {"parameter"} <= {change["kind"] for change in changes}
    code, out, _ = run(capsys, "diff", one, one, "--model", net)
    assert code == 0 and "decide and cost the same" in out
    code, out, _ = run(capsys, "explain", one, "--trust")
    assert code == 0 and "memory does not bind" in out and "1 GB more a device" in out
    assert "nothing changed" in out, "fsdp is not the best plan"
    assert f"autopar plan {net} " in out and "what named baselines cost" in out
    body = json.loads(one.read_text())
    other.write_text(json.dumps({**body, "source": None}))
    code, _, err = run(capsys, "explain", other)
    assert code == 2 and "does not say where its model is" in err
    one.write_text(json.dumps({**body, "cluster": "my cluster"}))
    code, _, err = run(capsys, "explain", one, "--model", net)
    assert code == 2 and "which is no preset; give --cluster for" in err


def test_verify_a_saved_plan_with_stages(capsys: pytest.CaptureFixture[str], net: str, tmp_path: Path) -> None:
    source = {"spec": net, "batch": 8, "seq": None, "overrides": {}, "precision": "fp32"}
    loaded = load_model(net, batch=8)
    captured, call = captured_model(loaded.model, Call(kwargs=loaded.kwargs), "fp32", microbatches=2)
    cut = next(n.name for n in captured.graph.nodes if "linear_1" in n.name)
    plan = random_staged_plan(captured, make_mesh((2,)), "1f1b", 2, (cut,), random.Random(1))
    model_plan(plan, captured=captured, call=call, source=source).save(tmp_path / "plan.json")
    code, out, _ = run(capsys, "verify", net, "--plan", tmp_path / "plan.json", "--json")
    body = json.loads(out)
    assert code == 0 and body["passed"] and body["loss_error"] < 1e-10 and body["gradient_error"] < 1e-8
    assert body["plans"][0]["sent"] == body["plans"][0]["predicted"]
    assert body["plans"][0]["sent"]["send pipeline"]["calls"] == 2
    code, out, _ = run(capsys, "export", tmp_path / "plan.json", "--out", tmp_path / "a", "--trust")
    assert code == 0 and "stage_0.py, stage_1.py" in out and "torchrun --nproc-per-node 4 train.py" in out
    saved = tmp_path / "plan.json"
    code, out, _ = run(capsys, "explain", saved, "--model", net, "--cluster", "4xcpu", "--seconds", 2)
    assert code == 0 and "the same stages, gpipe" in out and "fill and drain of the schedule" in out
    code, out, _ = run(capsys, "explain", saved, "--trust", "--cluster", "4xcpu", "--seconds", 0.5, "--json")
    assert code == 0 and len(json.loads(out)["stages"]) == 2 and json.loads(out)["unanswered"]
    code, out, _ = run(capsys, "diff", saved, saved, "--trust")
    assert code == 0 and "decide and cost the same" in out


def test_verify_random_pipelines(capsys: pytest.CaptureFixture[str], net: str) -> None:
    pipeline = ("--mesh", 1, "--pipeline", "zbv:2", "--microbatches", 2)
    code, out, _ = run(capsys, "verify", net, *pipeline, "--random", 3, "--json")
    body = json.loads(out)
    assert code == 0 and len(body["plans"]) == 3 and body["gradient_error"] < 1e-8
    assert all(check["sent"] == check["predicted"] and "send pipeline" in check["sent"] for check in body["plans"])
    for arguments, message in (
        (pipeline, "is for random plans alone"),
        (("--mesh", 1, "--pipeline", "zbv", "--random", 1), "not of the form schedule:ranks"),
        (("--mesh", 1, "--pipeline", "zbv:2:2", "--random", 1), "needs two stages a rank, 4; got 2"),
        (("--mesh", 1, "--pipeline", "1f1b:2", "--random", 1), "as many micro-batches, got 1"),
    ):
        code, _, err = run(capsys, "verify", net, *arguments)
        assert code == 2 and message in err


def test_plan_and_verify_in_micro_batches(capsys: pytest.CaptureFixture[str], net: str, tmp_path: Path) -> None:
    code, out, _ = run(capsys, "plan", net, "--cluster", "2xcpu", "--microbatches", 2, "--out", tmp_path / "a")
    assert code == 0 and "in 2 micro-batches" in out
    assert "train_step" in (tmp_path / "a/train.py").read_text()
    code, out, _ = run(capsys, "verify", net, "--plan", tmp_path / "a/plan.json", "--json")
    assert code == 0 and json.loads(out)["passed"]
    code, out, _ = run(capsys, "verify", net, "--mesh", 2, "--microbatches", 2, "--random", 2, "--json")
    body = json.loads(out)
    assert code == 0 and body["passed"] and body["loss_error"] < 1e-10 and body["gradient_error"] < 1e-8
    assert all(check["sent"] == check["predicted"] for check in body["plans"])


def test_verify_beyond_tolerance_is_exit_code_1(
    capsys: pytest.CaptureFixture[str], net: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(verify_command, "TOLERANCES", {"fp64": (-1.0, -1.0)})
    code, out, _ = run(capsys, "verify", net, "--mesh", 2, "--random", 1, "--json")
    assert code == 1 and not json.loads(out)["passed"]
