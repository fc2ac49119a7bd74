"""Every optimizer of torch.optim either updates distributed parameters as one process does, or is refused.

Parameters that every rank has all of are plain tensors: Adafactor and Rprop take them too.
"""

import contextlib
import inspect
import warnings
from unittest.mock import patch

import pytest
import torch
from torch import Tensor, nn

import tests.runtime_cases as cases
from autopar.errors import OptimizerError
from autopar.runtime import check_optimizer
from autopar.runtime.optimizers import REFUSED
from autopar.values.stage_plan import StagePlan
from tests.process_group import ranks

OPTIMIZERS = sorted(
    name
    for name, kind in vars(torch.optim).items()
    if inspect.isclass(kind) and issubclass(kind, torch.optim.Optimizer) and kind is not torch.optim.Optimizer
)
NEEDS_MATRICES = {"Muon"}
NEVER = {"LBFGS", "SparseAdam"}
"""These want a closure, or sparse gradients, of any model."""
BY_SIGN = {"Adafactor", "Rprop"}
"""These move by the sign of a gradient, however small it is."""
NO_GRADIENT = {"blocks.1.down.bias", "batch_norm.running_mean"}
"""Batch norm takes the bias away again: its gradient is rounding, another of a sum over ranks than of one process."""


def trained(model: nn.Module, name: str) -> dict[str, Tensor]:
    parameters = [p for p in model.parameters() if p.requires_grad and (name not in NEEDS_MATRICES or p.dim() == 2)]
    optimizer = getattr(torch.optim, name)(parameters, lr=0.01)
    for step in range(3):
        output = model(**cases.batch(step))
        (output["loss"] if isinstance(output, dict) else output.loss).backward()
        optimizer.step()
        optimizer.zero_grad()
    return {key: cases.whole(value) for key, value in model.state_dict().items()}


def in_full_precision(name: str) -> contextlib.AbstractContextManager[object]:
    """Muon's Newton-Schulz iteration in bfloat16 amplifies rounding: which sums are taken first would decide."""
    return patch.object(Tensor, "bfloat16", lambda self: self) if name == "Muon" else contextlib.nullcontext()


def all_trained(plan: StagePlan, names: list[str]) -> dict[str, dict[str, Tensor] | str]:
    out: dict[str, dict[str, Tensor] | str] = {}
    for name in names:
        try:
            with in_full_precision(name):
                out[name] = trained(cases.distributed(plan), name)
        except OptimizerError as error:
            out[name] = str(error)
    return out


@pytest.mark.parametrize("stored", ["split", "whole"])
def test_each_optimizer_equals_one_process_or_is_refused(stored: str) -> None:
    refused = {kind.__name__ for kind in REFUSED} if stored == "split" else NEVER
    accepted = [name for name in OPTIMIZERS if name not in refused]
    assert {"Adam", "AdamW", "SGD", "Adagrad", "RMSprop"} <= set(accepted)
    plan = cases.data_parallel((2,), stored)
    expected = {}
    for name in accepted:
        with in_full_precision(name):
            expected[name] = trained(cases.words(), name)
    tried = OPTIMIZERS if stored == "split" else accepted
    for result in ranks(2).run(all_trained, plan, tried, timeout=120):
        for name in tried:
            got = result[name]
            if name in accepted:
                assert isinstance(got, dict), f"{name}: {got}"
                for key, value in expected[name].items():
                    if name in BY_SIGN and key in NO_GRADIENT:
                        continue
                    torch.testing.assert_close(got[key], value, rtol=1e-6, atol=1e-7, msg=f"{name} {key}")
            else:
                assert isinstance(got, str) and name in got and "AdamW" in got


@pytest.mark.parametrize("kind", REFUSED, ids=lambda kind: kind.__name__)
def test_an_optimizer_of_ordinary_parameters_is_left_alone(kind: type[torch.optim.Optimizer]) -> None:
    parameter = nn.Parameter(torch.ones(2, 2))
    optimizer = kind([parameter])  # type: ignore[call-arg]
    check_optimizer(optimizer)
    parameter.grad = torch.ones(2, 2).to_sparse() if kind is torch.optim.SparseAdam else torch.ones(2, 2)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        optimizer.step((lambda: 1.0) if kind is torch.optim.LBFGS else None)  # type: ignore[arg-type]
