"""A plan's file is read, or is refused with what is wrong: never with an untyped error."""

import json
from dataclasses import asdict
from functools import cache
from typing import Any

import pytest

from autopar.errors import PlanFileError
from autopar.search.known.baselines import make_baseline
from autopar.search.timeline.buckets import with_buckets
from autopar.values.mesh import make_mesh
from autopar.values.plan import one_stage
from autopar.values.plan_file import plan_from_json
from autopar.values.train_config import TrainConfig
from tests.search_cases import captured_of, machine


@cache
def saved() -> str:
    plan = make_baseline("fsdp", captured_of("llama"), machine(2), make_mesh((2,)), TrainConfig())
    return one_stage(with_buckets(plan, captured_of("llama"), machine(2))).to_json()


@pytest.mark.parametrize("inside", [False, True])
def test_what_is_missing_or_unknown_is_said(inside: bool) -> None:
    def refused(body: dict[str, Any], message: str) -> None:
        with pytest.raises(PlanFileError, match=message):
            plan_from_json(json.dumps(body))

    whole = json.loads(saved())
    for key in whole["stages"][0] if inside else whole:
        body = json.loads(saved())
        table = body["stages"][0] if inside else body
        value = table.pop(key)
        refused(body, "schema" if key == "schema" else rf"{key}: missing")
        table |= {key: value, f"{key}_": value}
        refused(body, rf"{key}_: unknown key")
    refused(whole | {"config": {}}, "config.optimizer: missing")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"mesh": {"shape": "x", "names": []}}, r"mesh.shape: expected a valid array, found 'x'"),
        ({"microbatches": True}, r"microbatches: expected a valid integer, found True"),
        ({"microbatches": 0}, r"microbatches: expected greater than or equal to 1, found 0"),
        ({"cuts": [1]}, r"cuts\[0\]: expected a valid string, found 1"),
        ({"mesh": {"shape": [1 << 30], "names": ["data"]}}, r"mesh.shape: 1073741824 ranks are more than"),
        ({"config": asdict(TrainConfig()) | {"precision": "x"}}, "config.prec"),
    ],
    ids=lambda value: str(value)[:20],
)
def test_what_is_wrong_is_said_with_its_place(change: dict[str, Any], message: str) -> None:
    with pytest.raises(PlanFileError, match=message):
        plan_from_json(json.dumps(json.loads(saved()) | change))
