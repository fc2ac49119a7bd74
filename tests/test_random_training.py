"""Training that draws random numbers: replicas stay equal whatever their generators hold, a resumed run goes on."""

import importlib.util
import os
import random
import sys
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import tests.runtime_cases as cases
from autopar.capture import capture
from autopar.export.folder import export_folder
from autopar.lower.emit import emit
from autopar.oracle.reference import parameters_of
from autopar.passes.accumulate_gradients import accumulate_gradients
from autopar.passes.split_stages import split_stages
from autopar.runtime import distributed_module, load, load_exported, save
from autopar.search.known.random_plan import random_cuts, random_plan, random_recompute, random_staged_plan
from autopar.values.graph import CapturedModel
from autopar.values.mesh import make_mesh
from autopar.values.plan import Plan, one_stage
from tests.process_group import ranks
from tests.shared_graphs import shared_graph

ROWS, WIDTH, STEPS, KILLED = 4, 4, 8, 4
Kind = tuple[str, int, int, int]
"""Of a plan: a schedule or "", micro-batches, how many run at once, a seed."""

SCHEDULES = ("gpipe", "1f1b", "1f1b", "interleaved-1f1b", "zbv", "zbv")

PLANS: tuple[Kind, ...] = (
    *(("", 1, 1, seed) for seed in range(6)),
    *(("", 2, 1, seed) for seed in range(4)),
    *(("", 2, 2, seed) for seed in range(4)),
    *((schedule, 4, 1, seed) for seed, schedule in enumerate(SCHEDULES)),
)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        h = F.dropout(self.linear(x).relu(), 0.2, self.training)
        if self.training:  # drop path
            h = h * h.new_empty(h.shape[0], 1).bernoulli_(0.75).div_(0.75)
        return x + h + 0.1 * torch.randn_like(x) * torch.rand(WIDTH, dtype=x.dtype)


class Deep(nn.Module):
    """Noise, dropout and drop path in each of three blocks, and permuted columns."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.Sequential(*(Block() for _ in range(3)))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return F.mse_loss(self.blocks(x)[:, torch.randperm(WIDTH)], y)


def deep() -> Deep:
    with torch.random.fork_rng():
        torch.manual_seed(3)
        return Deep().double()


def batch(step: int, rows: int) -> dict[str, Tensor]:
    x, y = torch.randn(2, rows, WIDTH, generator=torch.Generator().manual_seed(step), dtype=torch.float64)
    return {"x": x, "y": y}


@cache
def graph_of(microbatches: int) -> CapturedModel:
    """Of a micro-batch."""
    graph = shared_graph("deep", lambda: capture(deep(), (), batch(0, ROWS)))
    return accumulate_gradients(graph, microbatches, lambda: graph_of(1))


def plan_of(kind: Kind) -> Plan:
    schedule, microbatches, at_once, seed = kind
    rng, captured = random.Random(f"{kind}"), graph_of(microbatches)
    if schedule:
        num_stages = 2 * {"zbv": 2, "interleaved-1f1b": 2}.get(schedule, 1)
        mesh = make_mesh((1,) if seed else (2,))
        while True:  # all ranks train some
            cuts = random_cuts(captured, num_stages, rng)
            plan = random_staged_plan(captured, mesh, schedule, 2, cuts, rng)
            owners = {plan.stage_rank(s) for s, part in enumerate(split_stages(captured, cuts)) if part.parameters}
            if len(owners) == 2:
                return plan
    plan = random_plan(captured, make_mesh((2,) if seed else (2, 2)), rng)
    again = random_recompute(plan, captured, rng, share=0.5) if at_once == 1 and seed > 1 else plan
    return one_stage(replace(again, copies=at_once))


def module_of(plan: Plan) -> Any:
    captured = graph_of(plan.microbatches)
    return distributed_module(captured, plan, parameters_of(captured, deep()))


def train(module: Any, optimizer: torch.optim.Optimizer, steps: range) -> list[float]:
    """The losses; each rank's generator is used in between, by each in another way."""
    losses = []
    for step in steps:
        torch.rand(1 + int(os.environ["RANK"]))
        losses.append(float(module.train_step(batch(step, ROWS * module.plan.microbatches))))
        optimizer.step()
        optimizer.zero_grad()
    return losses


def adam(module: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(module.parameters(), lr=0.01)


def trained(kinds: list[Kind]) -> list[tuple[list[float], dict[str, Tensor]]]:
    out = []
    for kind in kinds:
        torch.manual_seed(100 + int(os.environ["RANK"]))
        module = module_of(plan_of(kind))
        losses = train(module, adam(module), range(STEPS))
        out.append((losses, {name: value.detach().clone() for name, value in cases.whole_state(module).items()}))
    return out


def by_world(kinds: tuple[Kind, ...]) -> dict[int, list[Kind]]:
    found: dict[int, list[Kind]] = {}
    for kind in kinds:
        plan = plan_of(kind)
        found.setdefault(plan.world, []).append(kind)
    return found


@pytest.mark.parametrize(
    "kinds", [PLANS[:6:2], PLANS[6:10:2], PLANS[10:14:2], PLANS[14::2]], ids=["plain", "in turn", "woven", "stages"]
)
def test_replicas_stay_equal(kinds: tuple[Kind, ...]) -> None:
    """Bit by bit, over some steps under ten random plans, although each rank seeds and uses its generator otherwise."""
    for world, own in by_world(kinds).items():
        for kind, *answers in zip(own, *ranks(world).run(trained, own), strict=True):
            losses, _ = answers[0]
            assert len(set(losses)) == STEPS
            everyone: dict[str, Tensor] = {}
            for own_losses, state in answers:
                assert own_losses == losses, kind
                for name, value in state.items():
                    assert torch.equal(value, everyone.setdefault(name, value)), (kind, name)
            assert set(everyone) == {name for name, _ in deep().named_parameters()}


def resumed(kind: Kind, folder: str) -> tuple[list[float], list[float]]:
    """Losses of a run, and of one killed and resumed in a process that was seeded otherwise."""
    torch.manual_seed(1)
    module = module_of(plan_of(kind))
    optimizer = adam(module)
    losses = train(module, optimizer, range(KILLED))
    save(module, optimizer, folder, step=KILLED)
    losses += train(module, optimizer, range(KILLED, STEPS))
    torch.manual_seed(999)
    module = module_of(plan_of(kind))
    optimizer = adam(module)
    load(module, optimizer, folder)
    return losses[KILLED:], train(module, optimizer, range(KILLED, STEPS))


@pytest.mark.parametrize("kind", [("", 1, 1, 1), ("", 2, 2, 1), ("1f1b", 4, 1, 1)], ids=["plain", "woven", "stages"])
def test_a_resumed_run_draws_what_the_other_would_have(kind: Kind, tmp_path: Path) -> None:
    for losses, again in ranks(2).run(resumed, kind, str(tmp_path)):
        assert again == losses


def evaluated() -> tuple[list[float], list[float]]:
    """Losses of evaluations of one batch, and of a training step before and after."""
    module = module_of(plan_of(("", 1, 1, 1)))
    out: tuple[list[float], list[float]] = ([], [])
    for step in range(2):
        module.eval()
        with torch.no_grad():
            out[0].extend(module(**batch(0, ROWS)).item() for _ in range(2))
        module.train()
        out[1].append(float(module.train_step(batch(step, ROWS))))
    return out


def test_evaluation_draws_numbers_of_its_own() -> None:
    """New ones in each call, and none of those of training."""
    torch.manual_seed(0)
    first, second = ranks(2).run(evaluated)
    assert first == second
    assert len(set(first[0])) == 4


def written(folder: str) -> list[list[float]]:
    """Losses of two steps: of the module, compiled whole and by block, and of its exported code."""
    plan = plan_of(("", 1, 1, 1))
    modules = [module_of(plan) for _ in range(3)]
    modules[1].compile(backend="aot_eager")
    modules[2].compile(backend="aot_eager", by_block=True)
    own = Path(folder) / f"rank{os.environ['RANK']}"
    local, named = emit(graph_of(1), plan.single), dict(deep().named_parameters())
    export_folder(own, local.captured, [local], plan, parameters_of(local.captured, deep()))
    spec = importlib.util.spec_from_file_location("deep_exported", own / "model.py")
    assert spec is not None and spec.loader is not None
    code = sys.modules["deep_exported"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(code)
    modules.append(load_exported(own, [code.forward], lambda name, shape, dtype: named[name].detach()))
    return [[float(module.train_step(batch(step, ROWS))) for step in range(2)] for module in modules]


def test_compiled_and_exported_code_draws_the_same(tmp_path: Path) -> None:
    torch.manual_seed(0)
    for eager, *others in ranks(2).run(written, str(tmp_path)):
        for losses in others:
            assert losses == pytest.approx(eager, rel=1e-12)
