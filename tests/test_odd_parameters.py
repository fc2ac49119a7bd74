"""Models with parameters, buffers and inputs that nothing reads, or of odd sizes: planned, printed, exported; and what
nothing reads is kept, but takes no gradient, no state and no time."""

import ast
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import autopar
from autopar.api.model_plan import ModelPlan
from autopar.errors import BatchError, CaptureError, NoLossError
from autopar.ops.collectives import pad_dim


class Odd(nn.Module):
    """A layer that is read and, by name, what is not; or what a loss is made of instead."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.name, self.used = name, nn.Linear(8, 8)
        if name == "head":
            self.head = nn.Linear(1024, 1023)
        elif name == "prime":
            self.never = nn.Parameter(torch.ones(1021))
        elif name == "empty":
            self.never = nn.Parameter(torch.ones(0, 7))
        elif name == "scalar":
            self.scale = nn.Parameter(torch.ones(()))
        elif name == "buffer":
            self.register_buffer("never", torch.ones(1021))
        elif name == "modules":
            self.never = nn.Sequential(nn.LayerNorm(7), nn.Dropout(0.1), nn.Embedding(11, 3))

    def forward(self, x: Tensor, beside: Tensor | None = None) -> Tensor:
        if self.name == "nothing":
            return x.square().mean()
        if self.name == "bias":
            return self.used.bias[0] if beside is None else self.used.bias.sum()
        loss = self.used(x).square().mean()
        return loss * self.scale if self.name == "scalar" else loss


def planned(name: str, batch: int = 8, **options: Any) -> ModelPlan:
    inputs = {"x": torch.ones(batch, 8)} | ({"beside": torch.ones(3, 5)} if name == "input" else {})
    return autopar.plan(Odd(name), inputs, cluster="3xcpu", mesh="3", **options)


@pytest.mark.parametrize("name", ["head", "prime", "empty", "scalar", "buffer", "modules", "input", "bias"])
def test_what_nothing_reads_is_planned_printed_and_exported(name: str, tmp_path: Path) -> None:
    plan = planned(name)
    assert str(plan)
    plan.export(tmp_path)
    for file in tmp_path.glob("*.py"):
        ast.parse(file.read_text())


@pytest.mark.parametrize("name", ["head", "prime"])
def test_ranks_pad_what_somebody_reads_alone(name: str) -> None:
    """A part of what the ranks do not divide is padded for its readers: a copy, which a plan counts for them."""
    padded = {
        node.args[0].name
        for local in planned(name, baseline="fsdp").locals
        for node in local.graph.nodes
        if node.target is pad_dim
    }
    assert padded == {"p_used_weight", "p_used_bias"}, "of 8 rows on 3 ranks"


@pytest.mark.parametrize("name", ["head", "prime"])
def test_what_nothing_reads_takes_no_state_and_no_time(name: str) -> None:
    plain, odd = planned("plain", check=False).estimate, planned(name, check=False).estimate
    held = sum(p.numel() for p in Odd(name).parameters()) - sum(p.numel() for p in Odd("plain").parameters())
    assert odd.step_seconds == pytest.approx(plain.step_seconds)
    assert plain.peak_nbytes < odd.peak_nbytes <= plain.peak_nbytes + 4 * held + 4 * 3
    assert planned(name, check=False, memory_gb=(odd.peak_nbytes + 8) / 1e9).estimate.peak_nbytes <= odd.peak_nbytes + 8


def test_one_sample_is_planned_and_none_is_refused() -> None:
    assert planned("plain", batch=1).estimate.step_seconds > 0
    with pytest.raises(BatchError, match="have no samples"):
        planned("plain", batch=0)


def test_a_model_whose_loss_reads_no_parameter_has_nothing_to_train() -> None:
    with pytest.raises(NoLossError):
        planned("nothing")


def test_a_model_whose_own_backward_fails_is_said_to() -> None:
    class Short(nn.Module):
        """Adds four of eight rows, of which torch's own backward makes a gradient of four."""

        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            h = self.layer(x)
            return torch.zeros_like(h).scatter_add(0, torch.zeros(4, 4, dtype=torch.long), h).mean()

    with pytest.raises(CaptureError, match="Short itself fails in its backward pass"):
        autopar.plan(Short(), torch.randn(8, 4), cluster="2xcpu")
