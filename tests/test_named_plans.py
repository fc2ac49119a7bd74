"""The best plan and baselines, of every family every other one: each computes what one process computes.

And the search's promise: in its own cost model no baseline is cheaper than the plan it returns.
"""

import contextlib

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from autopar.capture import capture
from autopar.errors import InfeasibleError
from autopar.search.known.baselines import BASELINES, make_baseline
from autopar.search.planner import make_plan
from autopar.search.search_options import SearchOptions
from autopar.values.cluster import load_cluster
from autopar.values.mesh import make_mesh
from autopar.values.stage_plan import StagePlan
from autopar.values.train_config import TrainConfig
from tests.plans_in_threads import errors_of, one_process
from tests.search_cases import exact_of
from tests.zoo import FAMILIES, zoo

APPLY = {
    "gpt2": BASELINES,
    "llama": BASELINES,
    "mixtral": BASELINES,
    "bert": BASELINES,
    "vit": BASELINES,
    "resnet": ("ddp", "fsdp"),
    "t5": BASELINES,
    "whisper": BASELINES,
}
"""Baselines that apply on a mesh whose last axis has two ranks."""


@pytest.mark.parametrize("family", FAMILIES)
def test_named_plans_equal_one_process(family: str) -> None:
    model, kwargs = zoo(family, dtype=torch.float64)
    captured = exact_of(family)
    reference = one_process(captured, model, kwargs)
    mesh = make_mesh((2, 2))
    cluster = load_cluster(f"{mesh.size}xcpu")
    config = TrainConfig(precision="fp64")
    best = make_plan(captured, cluster, mesh, config, SearchOptions(with_baselines=False))
    plans: dict[str, StagePlan] = {"best": best}
    for name in BASELINES:
        if name in APPLY[family]:
            plans[name] = make_baseline(name, captured, cluster, mesh, config)
        else:
            with pytest.raises(InfeasibleError, match=f"{name} does not apply"):
                make_baseline(name, captured, cluster, mesh, config)
    assert all(best.estimate.step_seconds <= plan.estimate.step_seconds * (1 + 1e-9) for plan in plans.values())
    every_other = list(plans)[1 + FAMILIES.index(family) % 2 :: 2]
    for name in ("best", *every_other):
        loss_error, gradient_error, parameter = errors_of(reference, plans[name])
        assert loss_error <= 1e-10, f"{name}: loss off by {loss_error}"
        assert gradient_error <= 1e-8, f"{name}: gradient of {parameter} off by {gradient_error}"
    if "megatron" in plans:
        sharded = {choice for choices in plans["megatron"].choices.values() for choice in choices}
        assert {"columns", "heads"} <= sharded


class Rearranged(nn.Module):
    """Rows of the input change places before the first layer, so that no way of a parameter serves data parallelism."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        first, second = x.chunk(2)
        return F.mse_loss(self.linear(torch.cat([second, first])), y)


@pytest.mark.parametrize("name", BASELINES)
def test_a_baseline_that_serves_no_reader_does_not_apply(name: str) -> None:
    captured = capture(Rearranged(), (), {"x": torch.zeros(8, 8), "y": torch.zeros(8, 8)})
    with contextlib.suppress(InfeasibleError):
        make_baseline(name, captured, load_cluster("4xcpu"), make_mesh((2, 2)), TrainConfig())
