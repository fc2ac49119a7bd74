"""Ops alike are read once: the tables are those of every op read by itself."""

import dataclasses
from typing import Any

import pytest

from autopar.lower import program as programs
from autopar.lower.program import Op, make_program
from tests.search_cases import captured_of
from tests.zoo import FAMILIES


def fields_of(op: Op) -> dict[str, Any]:
    """All fields; of its rule those that can be compared, and of the others whether they are there; of its call what it
    is like."""
    own = {field.name: getattr(op, field.name) for field in dataclasses.fields(op)}
    own["node"] = op.node.target, programs.constant_arguments(op.node), len(op.node.all_input_nodes)
    rule = {field.name: getattr(op.rule, field.name) for field in dataclasses.fields(op.rule)}
    own["rule"] = {name: callable(value) or value for name, value in rule.items()}
    return own


@pytest.mark.parametrize("family", FAMILIES[1::2])
def test_ops_alike_have_what_each_has_by_itself(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    captured = captured_of(family)
    shared = make_program(captured)
    monkeypatch.setattr(programs.OpMaker, "_seen", lambda *_: object())
    alone = make_program(captured)
    assert len({id(op.rule) for op in shared.ops}) < len({id(op.rule) for op in alone.ops}) == len(alone.ops)
    for got, want in zip(shared.ops, alone.ops, strict=True):
        assert fields_of(got) == fields_of(want)


def test_numbers_of_another_type_are_other_arguments() -> None:
    assert len({programs._literals([1]), programs._literals([1.0]), programs._literals([True])}) == 3
    assert programs._literals(slice(1, 2)) != programs._literals(slice(1, 3))
