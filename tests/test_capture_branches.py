"""What a branch depends on is known: constants are evaluated, checks run with the step, buffers guard the graph.

The oracle is the eager module: loss and gradients where forward asks only what holds at every step, an error from the
captured graph where the module raises one, and a refusal with the user's line where the answer depends on the data.
"""

import os
import random
from collections.abc import Iterator
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributions import Distribution

from autopar.capture import capture
from autopar.capture.one_process import as_one_process
from autopar.errors import CaptureError, DataCheckError, PlanMismatchError
from autopar.oracle.reference import buffers_of, parameters_of, run_captured
from autopar.passes.accumulate_gradients import accumulate_gradients
from autopar.search.known.random_plan import random_plan
from autopar.values.graph import CapturedModel, target_name
from autopar.values.guards import BufferGuard
from autopar.values.inputs import bind_inputs
from autopar.values.mesh import make_mesh
from autopar.values.serialize import dump, load
from tests import branching_models
from tests.branching_models import CHECKS, KNOWN, REFUSED, Asking, Body
from tests.plans_in_threads import errors_of, one_process


@pytest.fixture(autouse=True)
def validated() -> Iterator[None]:
    """Distributions check what they are given, as they do by default; torch.compile turns that off for good."""
    before = Distribution._validate_args
    Distribution.set_default_validate_args(True)
    yield
    Distribution.set_default_validate_args(before)


def case(body: Body, rows: int = 8) -> tuple[Asking, dict[str, Tensor]]:
    torch.manual_seed(0)
    return Asking(body).double(), {"x": torch.randn(rows, 8).double(), "y": torch.randn(rows, 8).double()}


def line_of(mark: str) -> str:
    file = Path(branching_models.__file__)
    lines = file.read_text().splitlines()
    return f"{file}:{next(i for i, text in enumerate(lines, 1) if text.endswith(f'# {mark}'))}:"


def run(captured: CapturedModel, model: nn.Module, inputs: dict[str, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
    parameters = {name: p.detach().clone().requires_grad_() for name, p in parameters_of(captured, model).items()}
    buffers = {name: buffer.clone() for name, buffer in buffers_of(captured, model).items()}
    loss, _ = run_captured(captured, parameters, buffers, bind_inputs(captured.inputs, (), inputs))
    loss.backward()  # type: ignore[no-untyped-call]
    return loss, {name: p.grad for name, p in parameters.items() if p.grad is not None}


@pytest.mark.parametrize("body", [*KNOWN.values(), *CHECKS.values()], ids=lambda body: body.__name__)
def test_captured_is_eager(body: Body) -> None:
    model, inputs = case(body)
    captured = load(dump(capture(model, (), inputs)))
    loss, gradients = run(captured, model, inputs)
    expected = model(**inputs)
    expected.backward()
    torch.testing.assert_close(loss, expected)
    for spec in captured.parameters:
        torch.testing.assert_close(gradients[spec.placeholder], model.get_parameter(spec.names[0]).grad)


@pytest.mark.parametrize("body", CHECKS.values(), ids=CHECKS)
def test_a_check_runs_with_the_step(body: Body) -> None:
    model, inputs = case(body)
    captured = capture(model, (), inputs)
    inputs["x"][5, 3] = float("nan")
    with pytest.raises((ValueError, AssertionError)):
        model(**inputs)
    with pytest.raises(DataCheckError, match=r"branching_models\.py:\d+: "):
        run(captured, model, inputs)


@pytest.mark.parametrize("name", ["raises", "joins", "normal"])
def test_checks_split_as_the_values_are(name: str) -> None:
    """Under any plan, micro-batches too, loss, gradients and bytes are as without; the rank that sees NaN says so."""
    model, inputs = case(CHECKS[name])
    captured = capture(model, (), inputs)
    half = capture(model, (), {key: value[:4] for key, value in inputs.items()})
    micro = accumulate_gradients(half, 2, lambda: captured)
    rng = random.Random(name)
    reference = one_process(captured, model, inputs)
    for shape in ((4,), (2, 2), (2,), (2,)):
        plan = random_plan(captured, make_mesh(shape), rng)
        loss_error, gradient_error, _ = errors_of(reference, plan)
        assert max(loss_error, gradient_error) < 1e-10
    loss_error, gradient_error, _ = errors_of(reference, random_plan(micro, make_mesh((2,)), rng), micro)
    assert max(loss_error, gradient_error) < 1e-10
    for value in reference.inputs.values():
        value[6] = float("nan")
    with pytest.raises(DataCheckError, match="branching_models"):
        errors_of(reference, random_plan(captured, make_mesh((2,)), rng))


def test_counts_of_failures_stay_where_they_are() -> None:
    """Split along the batch, a check sends nothing: its counts are summands, and each is looked at as it is."""
    captured = capture(*_positional(CHECKS["raises"]))
    checked = next(node for node in captured.graph.nodes if target_name(node.target) == "checked")
    from autopar.rules.registry import rule_of
    from autopar.rules.rule import choices
    from autopar.values.placement import INVARIANT, PARTIAL

    offered = {choice.operands for choice in choices(rule_of(checked))}
    assert {(INVARIANT, PARTIAL), (PARTIAL, PARTIAL)} <= offered
    assert target_name(checked.args[1].target) == "aten.sum.default"
    (count,) = [choice for choice in choices(rule_of(checked.args[1])) if choice.name == "dim0"]
    assert count.results == (PARTIAL,)


def _positional(body: Body) -> tuple[nn.Module, tuple[Tensor, ...]]:
    model, inputs = case(body)
    return model, tuple(inputs.values())


@pytest.mark.parametrize("name", REFUSED)
def test_what_depends_on_the_data_is_refused_with_its_line(name: str) -> None:
    model, inputs = case(REFUSED[name])
    with pytest.raises(CaptureError) as error:
        capture(model, (), inputs)
    assert str(error.value).startswith(line_of(name))


def test_a_buffer_that_decides_guards_the_graph() -> None:
    model, inputs = case(KNOWN["a_buffer_that_stays"])
    (guard,) = load(dump(capture(model, (), inputs))).guards
    assert guard == BufferGuard.of("threshold", model.threshold)
    guard.check(model.threshold.clone())
    with pytest.raises(PlanMismatchError, match="buffer threshold"):
        guard.check(model.threshold + 1)
    assert not capture(*case(KNOWN["a_counter_as_a_tensor"])[:1], (), inputs).guards


def test_a_buffer_without_a_value_is_named() -> None:
    model, inputs = case(KNOWN["a_buffer_that_stays"])
    with pytest.raises(CaptureError, match="buffer threshold, from which they follow, has no value"):
        capture(model.to("meta"), (), inputs)


class Stack(nn.Module):
    """Layers with a flag each, of which one is set."""

    def __init__(self, which: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Asking(_by_threshold) for _ in range(12))
        self.layers[which].threshold.fill_(0.1)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x, x)
        return x.square().mean()


def _by_threshold(model: Asking, _: Tensor, h: Tensor, __: Tensor) -> Tensor:
    return h * 2 if model.threshold > 0.5 else h * 3


@pytest.mark.parametrize("which", [1, 7])
def test_layers_are_not_alike_whose_flags_differ(which: int) -> None:
    torch.manual_seed(0)
    model, inputs = Stack(which).double(), {"x": torch.randn(4, 8).double()}
    captured = capture(model, (), inputs)
    assert len(captured.guards) == len(model.layers)
    torch.testing.assert_close(run(captured, model, inputs)[0], model(**inputs))


def test_a_group_of_processes_looks_like_one_process() -> None:
    from torch.distributed import get_rank, get_world_size, is_initialized

    told = {"WORLD_SIZE": "4", "RANK": "3"}
    with mock.patch.dict(os.environ, told), as_one_process():
        assert (os.environ["WORLD_SIZE"], os.environ["RANK"]) == ("1", "0")
        assert (is_initialized(), get_world_size(), get_rank(), dist.get_world_size()) == (False, 1, 0, 1)
    with pytest.raises(ValueError, match="not been initialized"):
        get_world_size()
