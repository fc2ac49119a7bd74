"""`autopar report`: a page of what files say, of a named model, of two plans; a file's model is not run unasked."""

import json
from pathlib import Path

import pytest

from tests.test_cli import MODEL_FILE, run

pytestmark = pytest.mark.usefixtures("copied_processes")


@pytest.fixture
def net(tmp_path: Path) -> str:
    (tmp_path / "net.py").write_text(MODEL_FILE)
    return f"{tmp_path / 'net.py'}:net"


def test_a_page_of_a_saved_plan(capsys: pytest.CaptureFixture[str], net: str, tmp_path: Path) -> None:
    saved, page, other = tmp_path / "fsdp.json", tmp_path / "made.html", tmp_path / "ddp.json"
    common = ("--cluster", "2xcpu", "--no-baselines", "--no-check")
    code, out, _ = run(capsys, "plan", net, *common, "--baseline", "fsdp", "--out", saved, "--report", page)
    assert code == 0 and str(page) in out and '"timeline":{' in page.read_text()
    code, out, _ = run(capsys, "report", saved, "--json")
    assert code == 0 and json.loads(out)["out"] == str(tmp_path / "fsdp.html")
    assert '"timeline":null' in (tmp_path / "fsdp.html").read_text()
    run(capsys, "plan", net, *common, "--baseline", "ddp", "--out", other)
    code, out, _ = run(capsys, "report", saved, "--beside", other, "--model", net, "-o", page)
    assert code == 0 and f"written to {page}" in out
    assert '"name":"ddp.json"' in page.read_text() and '"changes":[{' in page.read_text()


def test_a_files_model_is_not_run_unasked(capsys: pytest.CaptureFixture[str], net: str, tmp_path: Path) -> None:
    saved, touched, page = tmp_path / "plan.json", tmp_path / "touched", tmp_path / "r.html"
    run(capsys, "plan", net, "--cluster", "2xcpu", "--baseline", "ddp", "--no-baselines", "--no-check", "--out", saved)
    body = json.loads(saved.read_text())
    source = {**body["source"], "spec": "subprocess:getoutput", "overrides": {"cmd": f"touch {touched}"}}
    saved.write_text(json.dumps({**body, "source": {**source, "batch": None}, "cluster": str(tmp_path / "c.toml")}))
    code, _, _ = run(capsys, "report", saved, "-o", page)
    assert code == 0 and not touched.exists() and "give --cluster with its file" in page.read_text()
    code, out, _ = run(capsys, "report", saved, "--model", net, "-o", page, "--json")
    assert code == 2 and "which is no preset; give --cluster" in json.loads(out)["error"] and not touched.exists()
    code, _, _ = run(capsys, "report", saved, "--model", net, "--cluster", "2xcpu", "-o", page)
    assert code == 0 and not touched.exists()
    code, out, _ = run(capsys, "report", saved, "--set", "width=32", "--json")
    assert code == 2 and "--set is for the plan's model" in json.loads(out)["error"]
    run(capsys, "report", saved, "--trust", "-o", page, "--json")
    assert touched.exists(), "the file is believed when a person says so"
    code, _, err = run(capsys, "report", tmp_path / "none.json")
    assert code == 2 and "none.json" in err
