"""`autopar simulate`: what it prints and writes, and that bad input is one message that names the row."""

import csv
import json
from pathlib import Path
from typing import Any

import pytest

from autopar.cli.main import main
from autopar.cli.simulate import simulate_row
from autopar.cost_models.efficiency import load_efficiency
from autopar.cost_models.named_shapes import named_shape
from autopar.cost_models.step_memory import step_memory
from autopar.cost_models.step_time import simulate_step
from autopar.cost_models.training_config import TrainingConfig
from autopar.errors import ClusterError
from autopar.values.cluster import load_cluster

HEADER = "model,cluster,tp,pp,dp,microbatch,global_batch,seq,recompute"
ROW = "llama-3-8b,8xh100,2,1,4,1,16,4096,full"


def run(capsys: pytest.CaptureFixture[str], *arguments: object) -> tuple[int, str, str]:
    with pytest.raises(SystemExit) as exit_:
        main([str(a) for a in arguments])
    captured = capsys.readouterr()
    return int(exit_.value.code or 0), captured.out, captured.err


def table(tmp_path: Path, *lines: str) -> Path:
    path = tmp_path / "rows.csv"
    path.write_text("\n".join(lines) + "\n")
    return path


def expected() -> dict[str, float]:
    config = TrainingConfig(tp=2, dp=4, micro_batch=1, global_batch=16, seq=4096, recompute="full")
    shape, cluster = named_shape("llama-3-8b"), load_cluster("8xh100")
    time = simulate_step(shape, config, cluster, load_efficiency("h100"))
    memory = step_memory(shape, config)
    return {
        "step_seconds": time.seconds,
        "mfu": time.mfu,
        "tokens_per_second": time.tokens_per_second,
        "allocated_gb": memory.allocated_nbytes / 1e9,
    }


def test_options_rows_and_formulas_agree(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(
        capsys, "simulate", "llama-3-8b", "--cluster", "8xh100", "--tp", 2, "--dp", 4, "--global-batch", 16, "--seq",
        4096, "--recompute", "full", "--json",
    )  # fmt: skip
    by_options = json.loads(out)
    result = tmp_path / "out.csv"
    csv_code, csv_out, _ = run(capsys, "simulate", "--csv", table(tmp_path, HEADER, ROW), "--out", result, "--json")
    [by_row] = json.loads(csv_out)["rows"]
    assert code == csv_code == 0
    assert by_options == by_row
    for key, value in expected().items():
        assert by_options[key] == pytest.approx(value)
    [written] = list(csv.DictReader(result.read_text().splitlines()))
    assert written["model"] == "llama-3-8b" and written["recompute"] == "full", "the row is kept"
    assert float(written["predicted_step_seconds"]) == pytest.approx(expected()["step_seconds"])
    assert sum(by_row["memory_gb"].values()) == pytest.approx(by_row["allocated_gb"])


def test_a_person_reads_time_and_memory(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(capsys, "simulate", "gpt-22b", "--cluster", "8xa100", "--tp", 4, "--dp", 2, "--global-batch", 4)
    assert code == 0
    for word in ("s a step", "MFU", "tokens/s", "optimizer state", "allocated at the peak", "does NOT fit in 80 GB"):
        assert word in out
    code, out, _ = run(capsys, "simulate", "--csv", table(tmp_path, HEADER, ROW, ROW))
    assert code == 0 and out.count("llama-3-8b") == 2


def test_a_config_json_is_a_shape(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config: dict[str, Any] = {
        "model_type": "llama", "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32,
        "num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 128256,
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(config))
    common = ("--cluster", "8xh100", "--tp", 2, "--dp", 4, "--global-batch", 16, "--seq", 4096, "--recompute", "full")
    code, out, _ = run(capsys, "simulate", f"hf:{tmp_path}", *common, "--json")
    assert code == 0
    assert json.loads(out)["step_seconds"] == pytest.approx(expected()["step_seconds"])
    sizes = "layers,hidden,heads,kv_heads,ffn,vocab,gated"
    rows = table(tmp_path, f"{sizes},cluster,tp,dp,micro_batch,global_batch,seq,recompute",
                 "32,4096,32,8,14336,128256,1,8xh100,2,4,1,16,4096,full")  # fmt: skip
    code, out, _ = run(capsys, "simulate", "--csv", rows, "--json")
    assert code == 0
    assert json.loads(out)["rows"][0]["step_seconds"] == pytest.approx(expected()["step_seconds"])


def test_a_slower_network_was_measured(capsys: pytest.CaptureFixture[str]) -> None:
    seconds = []
    for bandwidth in ("1e11", "1e10", "1e9"):
        _, out, _ = run(
            capsys, "simulate", "gpt-22b", "--cluster", "4x8xa100", "--tp", 8, "--dp", 4, "--global-batch", 16,
            "--network-bandwidth", bandwidth, "--json",
        )  # fmt: skip
        seconds.append(json.loads(out)["step_seconds"])
    assert seconds == sorted(seconds) and seconds[0] < seconds[-1]


def test_a_machine_is_named_by_device_and_number(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    header = HEADER.replace("cluster", "device,gpus,gpus_per_node")
    rows = [ROW.replace("8xh100", cells) for cells in ("h100,8,", "h100,8,4")]
    code, out, _ = run(capsys, "simulate", "--csv", table(tmp_path, header, *rows), "--json")
    assert code == 0
    assert [row["cluster"] for row in json.loads(out)["rows"]] == ["8xh100", "2x4xh100"]
    for cells, message in (
        ("h100,12,8", "line 2: gpus 12 are no whole number of nodes of 8"),
        ("g100,8,8", "line 2: cluster '8xg100' is neither a preset"),
        (",8,8", "line 2: cluster is empty, and so is device"),
    ):
        bad = table(tmp_path, header, ROW.replace("8xh100", cells))
        code, out, _ = run(capsys, "simulate", "--csv", bad, "--json")
        assert code == 2 and message in json.loads(out)["error"]


BAD = [
    (ROW.replace("8xh100", "8xh1000"), "ClusterError", "line 3: cluster '8xh1000' is neither a preset nor"),
    (ROW.replace("8xh100", "8xcpu"), "ClusterError", "line 3: no training constants are known for device 'cpu'"),
    (
        ROW.replace(",2,1,4,", ",2,2,4,"),
        "MeshError",
        "line 3: tp 2 x pp 2 x dp 4 x cp 1 = 16 ranks, but cluster 8xh100 has 8",
    ),
    (
        ROW.replace(",16,4096", ",18,4096"),
        "BatchError",
        "line 3: global batch 18 is not divisible by 4 data-parallel ranks",
    ),
    (ROW.replace("full", "most"), "ArgumentError", "line 3: recompute 'most' is not one of none, selective, full"),
    (ROW.replace(",2,1,4", ",two,1,4"), "ArgumentError", "line 3: tp 'two' is not a whole number"),
    (ROW.replace(",2,1,4", ",-2,1,4"), "ArgumentError", "line 3: tp -2 is not a whole number from 1"),
    (ROW.replace("llama-3-8b", "llama-9"), "ArgumentError", "line 3: model 'llama-9' is not one of gpt2"),
    (
        ROW.replace("llama-3-8b", "hf:none.json"),
        "ArgumentError",
        "line 3: none.json is no config.json that can be read",
    ),
    (ROW.replace("4096", ""), "ArgumentError", "line 3: seq is empty"),
    (ROW + ",surplus", "ArgumentError", "line 3: 9 columns in the header, but not in this row"),
]


@pytest.mark.parametrize(("row", "kind", "message"), BAD, ids=lambda value: str(value)[:40])
def test_a_bad_row_is_named(
    row: str, kind: str, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, out, _ = run(capsys, "simulate", "--csv", table(tmp_path, HEADER, ROW, row), "--json")
    answer = json.loads(out)
    assert code == 2
    assert answer["kind"] == kind
    assert message in answer["error"]


def test_negative_bandwidth_is_refused_in_a_row_and_in_a_cluster_file(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = table(tmp_path, HEADER + ",network_bandwidth", ROW + ",1e10", ROW + ",-1e10")
    code, out, _ = run(capsys, "simulate", "--csv", rows, "--json")
    assert (
        code == 2
        and "line 3: network_bandwidth" in json.loads(out)["error"]
        and "bandwidth" in json.loads(out)["error"]
    )
    (tmp_path / "c.toml").write_text(
        'name = "c"\ndevice = "h100"\n[[levels]]\nname = "l"\nsize = 8\nalpha = 1e-6\nbandwidth = -1.0\n'
    )
    rows = table(tmp_path, HEADER, ROW.replace("8xh100", str(tmp_path / "c.toml")))
    code, out, _ = run(capsys, "simulate", "--csv", rows, "--json")
    assert code == 2 and json.loads(out)["kind"] == "ClusterError" and "line 2" in json.loads(out)["error"]


@pytest.mark.parametrize("column", ["cluster", "global_batch", "microbatch", "seq", "model"])
def test_a_missing_column_is_named(column: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    names, cells = HEADER.split(","), ROW.split(",")
    k = names.index(column)
    rows = table(tmp_path, ",".join(names[:k] + names[k + 1 :]), ",".join(cells[:k] + cells[k + 1 :]))
    code, out, _ = run(capsys, "simulate", "--csv", rows, "--json")
    assert code == 2
    expected_name = {"microbatch": "micro_batch", "model": "layers, hidden, heads, vocab"}.get(column, column)
    assert f"has no column {expected_name};" in json.loads(out)["error"]


def test_options_that_contradict_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for arguments, message in (
        (("simulate",), "simulate needs MODEL"),
        (("simulate", "gpt2", "--cluster", "8xa100"), "simulate needs --global-batch"),
        (("simulate", "gpt2", "--csv", table(tmp_path, HEADER, ROW)), "leave MODEL and --cluster out"),
        (("simulate", "--csv", tmp_path / "absent.csv"), "cannot be read"),
        (("simulate", "--csv", table(tmp_path, HEADER)), "has a header and no rows"),
        (("simulate", "gpt2", "--cluster", "8xa100", "--global-batch", 8, "--out", "x"), "--out belongs to --csv"),
    ):
        code, _, err = run(capsys, *arguments)
        assert code == 2 and message in err


def test_figures_that_were_reached_are_not_taken_for_nominal_ones() -> None:
    """A calibrated device's, and the preset of one: constants of training steps are parts of nominal figures."""
    row = {"model": "llama-3-8b", "micro_batch": "1", "global_batch": "1", "seq": "4096", "precision": "bf16"}
    assert simulate_row({**row, "cluster": "1xh200"}, "row")["step_seconds"] > 0
    with pytest.raises(ClusterError, match="figures of this h200 are what it reached when it was calibrated"):
        simulate_row({**row, "cluster": "1xh200-eager"}, "row")
