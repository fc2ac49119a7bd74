"""A file that somebody else wrote is refused by a typed error, or does what the model or the cluster does."""

import json
from pathlib import Path

import pytest

from autopar.errors import AutoparError, PlanFileError
from autopar.values.plan_file import load_saved
from tests.fuzz_files import LIMIT, fuzz
from tests.fuzzed_formats import FORMATS

MUTANTS = {"plan": 100, "staged": 80, "cluster": 400, "specs": 200, "config": 100, "manifest": 200}
MUTANTS |= {"sealed": 200, "index": 200, "pins": 300}
"""Few of many: `python -m tests.fuzz_files all` draws thousands."""

CASES = Path(__file__).parents[2] / "shared/cases"


@pytest.mark.parametrize("name", FORMATS)
def test_mutants_are_refused_or_right(name: str) -> None:
    *_, tally = fuzz(*FORMATS[name](), MUTANTS[name], 7)
    assert tally.faults == [] and tally.slowest < LIMIT
    assert tally.answers["right"] > 0 and len(tally.answers) > 1, "mutants of both kinds"


@pytest.mark.parametrize("name", FORMATS)
def test_the_file_itself_is_right(name: str, tmp_path: Path) -> None:
    body, write, answer = FORMATS[name]()
    (tmp_path / "file").write_text(write(body), encoding="utf-8")
    assert answer(tmp_path / "file") == "right"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "no JSON"),
        ("[" * 100_000, "nested too deep"),
        ('{"schema": NaN}', "NaN is no number"),
        ('{"schema": 5, "schema": 5}', "'schema' stands twice"),
        ('{"schema": 5}', "torch: missing"),
        ('{"schema": "\\u001b[2J"}', "control character"),
        ('{"schema": ' + "9" * 5000 + "}", "no JSON"),
    ],
    ids=lambda text: text[:12],
)
def test_what_is_no_plan_says_so(text: str, message: str, tmp_path: Path) -> None:
    (tmp_path / "plan.json").write_text(text)
    with pytest.raises(PlanFileError, match=message):
        load_saved(tmp_path / "plan.json")


@pytest.mark.parametrize(
    "file", sorted([*CASES.glob("attack/*.json"), *CASES.glob("audit/*.json")]), ids=lambda p: p.name
)
def test_plans_that_an_attack_made_are_refused(file: Path) -> None:
    with pytest.raises(AutoparError):
        load_saved(file)
    body = json.loads(file.read_text())
    assert body["schema"] == 3, "a plan of a schema that was"
