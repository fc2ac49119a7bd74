"""Numbers that the data decide stay in the graph; branches that change nothing are no reason to refuse.

The oracle is the eager module: three steps with other inputs, loss, gradients and buffers. What reaches the outputs
through Python's own numbers, or through what the call before left behind, is refused.
"""

import math

import pytest
import torch
from torch import Tensor

from autopar.capture import capture
from autopar.errors import CaptureError, DataCheckError
from tests import logging_models
from tests.as_eager import assert_as_eager, assert_shards_as_whole
from tests.logging_models import KEPT, REFUSED, Body, Noting


def case(body: Body) -> tuple[Noting, dict[str, Tensor]]:
    torch.manual_seed(0)
    return Noting(body).double(), {"x": torch.randn(8, 8).double(), "y": torch.randn(8, 8).double()}


@pytest.mark.parametrize("name", KEPT)
def test_captured_is_eager(name: str) -> None:
    assert_as_eager(*case(KEPT[name]))


@pytest.mark.parametrize("name", REFUSED)
def test_what_reaches_the_outputs_is_refused(name: str) -> None:
    model, inputs = case(REFUSED[name])
    with pytest.raises(CaptureError, match=r"logging_models|changes from call to call"):
        capture(model, (), inputs)


def test_shards_have_the_same_numbers() -> None:
    model, inputs = case(KEPT["computes_with_numbers"])
    assert_shards_as_whole(capture(model, (), inputs), model, inputs)


def test_names_are_put_back() -> None:
    before = dict(vars(logging_models))
    model, inputs = case(KEPT["computes_with_numbers"])
    capture(model, (), inputs)
    assert vars(logging_models) == before
    assert logging_models.math is math


def test_a_class_beyond_the_last_fails_as_the_step_runs() -> None:
    """bincount has as many entries as minlength says, and a check."""
    model, inputs = case(lambda m, x, h, y: (h * torch.bincount(y[:, 0].long(), minlength=8)).mean())
    inputs["y"] = inputs["y"].abs()
    captured = capture(model, (), inputs)
    from tests.test_capture_branches import run

    run(captured, model, inputs)  # type: ignore[arg-type]
    with pytest.raises(DataCheckError, match="bincount"):
        run(captured, model, {**inputs, "y": inputs["y"] + 8})  # type: ignore[arg-type]
