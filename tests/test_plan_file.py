"""A plan's file is read, or is refused with what is wrong: never with an untyped error."""

import json
from contextlib import suppress
from functools import cache
from typing import Any

import pytest

from autopar.errors import AutoparError, PlanMismatchError
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


OPTIONAL = ("microbatches", "copies", "buckets", "prefetch", "ways")


@pytest.mark.parametrize("inside", [False, True])
def test_what_is_missing_is_said(inside: bool) -> None:
    whole = json.loads(saved())
    for key in whole["stages"][0] if inside else whole:
        body = json.loads(saved())
        del (body["stages"][0] if inside else body)[key]
        if key in OPTIONAL:
            plan_from_json(json.dumps(body))
        else:
            with pytest.raises(PlanMismatchError, match="schema" if key == "schema" else key):
                plan_from_json(json.dumps(body))


@pytest.mark.parametrize("wrong", [None, -1, 1.5, "no", [], {}, [None], {"a": []}], ids=repr)
def test_what_has_another_type_is_no_untyped_error(wrong: Any) -> None:
    for inside in (False, True):
        for key in json.loads(saved())["stages"][0] if inside else json.loads(saved()):
            body = json.loads(saved())
            (body["stages"][0] if inside else body)[key] = wrong
            with suppress(AutoparError):
                plan_from_json(json.dumps(body))


def test_prefetch_is_true_or_false() -> None:
    body = json.loads(saved())
    body["stages"][0]["prefetch"] = "no"
    with pytest.raises(PlanMismatchError, match="prefetch"):
        plan_from_json(json.dumps(body))
