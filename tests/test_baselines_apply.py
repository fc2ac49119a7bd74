"""`ddp` and `fsdp` apply to every model whose batch passes through, whatever becomes of it, and are exact."""

import inspect
import itertools

import pytest
import torch
from torch import Tensor, nn

from autopar.capture import capture
from autopar.errors import InfeasibleError
from autopar.lower.program import make_program
from autopar.passes.split_stages import possible_cuts
from autopar.rules.rule import splits
from autopar.search.costs.pricing import make_pricer
from autopar.search.known.baselines import baseline_plan, make_baseline
from autopar.search.staged.stages import staged
from autopar.values.cluster import load_cluster
from autopar.values.graph import CapturedModel
from autopar.values.mesh import make_mesh
from autopar.values.stage_plan import StagePlan
from autopar.values.train_config import TrainConfig
from tests.plans_in_threads import errors_of, one_process
from tests.sample_models import CASES, sample_model
from tests.stages_in_threads import staged_error_of

MESHES = ((2,), (4,), (2, 2))


def reading(captured: CapturedModel) -> set[str]:
    """The modules of calls that read parameters."""
    return {op.module for op in make_program(captured).ops if op.parameters}


def splitting(captured: CapturedModel, plan: StagePlan) -> set[str]:
    """Of those the ones whose calls are all split on every axis of more than one rank."""
    whole = {
        op.module for op in make_program(captured).ops if op.parameters and not all(map(splits, plan.choices[op.name]))
    }
    return reading(captured) - whole


@pytest.mark.parametrize("case", CASES)
def test_baselines_equal_one_process(case: str) -> None:
    model, inputs = sample_model(case)
    captured = capture(model, (), dict(inputs))
    reference = one_process(captured, model, inputs)
    config = TrainConfig(precision="fp64")
    for shape, name in list(itertools.product(MESHES, ("ddp", "fsdp")))[CASES.index(case) % 3 :: 3]:
        mesh = make_mesh(shape)
        plan = make_baseline(name, captured, load_cluster(f"{mesh.size}xcpu"), mesh, config)
        summed = {"second"} if case == "rows summed before" else set()  # no samples are left to split there
        assert splitting(captured, plan) >= {"first", "second"} & reading(captured) - summed, f"{name} on {shape}"
        loss_error, gradient_error, parameter = errors_of(reference, plan)
        assert loss_error <= 1e-10, f"{name} on {shape}: loss off by {loss_error}"
        assert gradient_error <= 1e-8, f"{name} on {shape}: gradient of {parameter} off by {gradient_error}"


@pytest.mark.parametrize("case", CASES)
def test_two_stages_equal_one_process(case: str) -> None:
    """Cut after a quarter, a half or three quarters of the calls."""
    model, inputs = sample_model(case)
    captured = capture(model, (), dict(inputs))
    reference = one_process(captured, model, inputs)
    program, cluster, mesh = make_program(captured), load_cluster("2xcpu"), make_mesh((2,))
    pricer = make_pricer(mesh=mesh, cluster=cluster, config=TrainConfig(precision="fp64"))
    plan = baseline_plan(("ddp", "fsdp")[CASES.index(case) % 2], program, pricer, None)
    names = [op.name for op in program.ops if op.position <= program.tensors[program.loss].producer][1:]
    names = list(possible_cuts(captured, names))
    cut = names[len(names) * (1 + CASES.index(case) // 2 % 3) // 4]
    made, stages = staged(plan, program, pricer, 2, "gpipe", (cut,))
    error, name = staged_error_of(reference, stages, made)
    assert error <= 1e-8, f"cut before {cut}: {name} off by {error}"


@pytest.mark.parametrize(("case", "batch", "ranks"), [("plain", 7, 4), ("sort", 5, 2), ("rows of all samples", 6, 4)])
def test_batches_that_ranks_do_not_divide_are_padded(case: str, batch: int, ranks: int) -> None:
    model, inputs = sample_model(case, batch)
    captured = capture(model, (), dict(inputs))
    config = TrainConfig(precision="fp64")
    plan = make_baseline("ddp", captured, load_cluster(f"{ranks}xcpu"), make_mesh((ranks,)), config)
    assert "second" in splitting(captured, plan)
    loss_error, gradient_error, parameter = errors_of(one_process(captured, model, inputs), plan)
    assert loss_error <= 1e-10 and gradient_error <= 1e-8, parameter


class Alone(nn.Module):
    """One sample: the input has no batch."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x).square().sum()


@pytest.mark.parametrize(
    ("model", "shapes", "ranks", "said"),
    [
        (
            sample_model("plain")[0],
            ((6, 4), (6, 4)),
            4,
            "global batch 6 is not divisible by 4 data-parallel ranks; use 4 or 8",
        ),
        (sample_model("plain")[0], ((3, 4), (3, 4)), 4, "use 4$"),
        (
            Alone().double(),
            ((4,),),
            2,
            r"the first that mixes them is linear \(aten.linear.default of \(4,\) and \(4, 4\)",
        ),
        (Alone().double(), ((1, 4),), 2, r"no input with several samples along its first dim \(inputs: x \(1, 4\)\)"),
    ],
)
def test_what_is_refused_is_so_for_the_batch(
    model: nn.Module, shapes: tuple[tuple[int, ...], ...], ranks: int, said: str
) -> None:
    names = list(inspect.signature(model.forward).parameters)
    inputs = {name: torch.randn(shape, dtype=torch.float64) for name, shape in zip(names, shapes, strict=True)}
    captured = capture(model, (), inputs)
    for name in ("ddp", "fsdp"):
        with pytest.raises(InfeasibleError, match=f"{name} does not apply: .*{said}"):
            make_baseline(name, captured, load_cluster(f"{ranks}xcpu"), make_mesh((ranks,)), TrainConfig())


class Spelled(nn.Linear):
    """Attention of several heads, as products and a softmax."""

    def forward(self, x: Tensor) -> Tensor:
        heads = super().forward(x).unflatten(-1, (2, 2)).transpose(1, 2)
        return ((heads @ heads.transpose(-1, -2)).softmax(-1) @ heads).square().mean()


def test_attention_that_is_not_recognized_is_said_to_be_so() -> None:
    """Of a model with heads it would be untrue that none could be split."""
    captured = capture(Spelled(4, 4), (torch.randn(4, 3, 4),), {})
    for name in ("megatron", "ulysses"):
        with pytest.raises(InfeasibleError, match="no call of scaled_dot_product_attention was found"):
            make_baseline(name, captured, load_cluster("2xcpu"), make_mesh((2,)), TrainConfig())
