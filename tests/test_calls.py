"""What a distributed module returns is what the model returns: modes, outputs, sizes and arguments of calls."""

import random
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn import functional as F

import autopar
from autopar.api.again import Again
from autopar.api.model_plan import plan_from_text
from autopar.capture import capture
from autopar.errors import ArgumentError, CaptureError, RankError
from autopar.lower.emit import emit
from autopar.oracle.reference import buffers_of, parameters_of
from autopar.passes.split_stages import split_stages
from autopar.runtime import DistributedModule, PipelinedModule
from autopar.runtime.pipeline import staged_model
from autopar.search.known.random_plan import random_cuts, random_plan, random_staged_plan
from autopar.values.binding import constant_key
from autopar.values.calls import Call
from autopar.values.graph import CapturedModel
from autopar.values.mesh import make_mesh
from autopar.values.precision import PRECISIONS
from autopar.values.stage_plan import StagePlan
from autopar.values.train_config import TrainConfig
from tests.process_group import ranks
from tests.runtime_cases import whole

WORDS, WIDTH, ROWS, LENGTH = 11, 8, 8, 4


@dataclass
class Answer:
    """A model's output that torch does not know."""

    loss: Tensor | None
    logits: Tensor
    name: str = "answer"


class Modes(nn.Module):
    """Another loss, noise, statistics and outputs in training than in evaluation."""

    mean: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(WORDS, WIDTH)
        self.norm = nn.BatchNorm1d(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 12), nn.Linear(12, WIDTH)
        self.head = nn.Linear(WIDTH, WORDS)
        self.auxiliary = nn.Linear(WIDTH, WORDS)
        self.register_buffer("mean", torch.zeros(WIDTH))

    def forward(self, ids: Tensor, labels: Tensor | None = None, *, scale: float = 1.0, wide: bool = False) -> Answer:
        x = self.embedding(ids)
        x = x + self.down(F.gelu(self.up(x)))
        if self.training:
            with torch.no_grad():
                self.mean.mul_(0.9).add_(x.mean((0, 1)), alpha=0.1)
            x = x - x.mean((0, 1))
        else:
            x = x - self.mean
        x = self.norm(x.transpose(1, 2)).transpose(1, 2)
        logits = self.head(x) * scale
        if wide:
            logits = torch.cat([logits, logits], -1)
        if labels is None:
            return Answer(None, logits)
        loss = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=0)
        if self.training:
            loss = loss + 0.3 * F.cross_entropy(self.auxiliary(x).flatten(0, 1), labels.flatten())
        return Answer(loss, logits)


def model() -> Modes:
    with torch.random.fork_rng():
        torch.manual_seed(5)
        return Modes().double()


def batch(seed: int, rows: int = ROWS, length: int = LENGTH) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(0, WORDS, (2, rows, length), generator=generator)
    return {"ids": ids[0], "labels": ids[1]}


def planned(seed: int, mesh: tuple[int, ...] = (2, 2)) -> tuple[CapturedModel, StagePlan]:
    captured = capture(model(), (), batch(0))
    plan = random_plan(captured, make_mesh(mesh), random.Random(seed))
    return captured, replace(plan, config=TrainConfig(precision="fp64"))


def distributed(captured: CapturedModel, plan: StagePlan, **keywords: Any) -> DistributedModule:
    own = model()
    values = {**parameters_of(captured, own), **buffers_of(captured, own)}
    captor = Again(model=own, plans=[plan], planned=[captured], precision="fp64", call=Call(kwargs=batch(0)))
    return DistributedModule(emit(captured, plan), values, captor=captor, **keywords)


def same(found: Any, wanted: Any) -> None:
    """Values, wherever the ranks have them."""
    if isinstance(wanted, Tensor):
        torch.testing.assert_close(whole(found), wanted.detach(), rtol=1e-10, atol=1e-12)
    elif isinstance(wanted, Answer):
        assert type(found) is Answer and found.name == wanted.name
        same(found.loss, wanted.loss)
        same(found.logits, wanted.logits)
    else:
        assert found == wanted


def evaluate_and_train(seed: int) -> None:
    module, eager = distributed(*planned(seed)), model()
    own, theirs = (torch.optim.SGD(m.parameters(), lr=0.1) for m in (module, eager))
    for step in range(3):
        module.eval(), eager.eval()
        with torch.no_grad():
            for rows, length in ((ROWS, LENGTH), (1, LENGTH), (5, 3)):
                data = batch(10 + step, rows, length)
                same(module(**data), eager(**data))
                same(module(data["ids"], scale=0.5), eager(data["ids"], scale=0.5))
        with torch.inference_mode():
            same(module(ids=batch(0)["ids"], wide=True), eager(batch(0)["ids"], wide=True))
        module.train(), eager.train()
        data = batch(step)
        if step == 1:  # a short last batch
            data = batch(step, 6)
        found, wanted = module(**data), eager(**data)
        same(found, wanted)
        (found.loss + 0.1 * whole_with_gradient(found.logits).square().mean()).backward()
        (wanted.loss + 0.1 * wanted.logits.square().mean()).backward()
        for name, parameter in eager.named_parameters():
            torch.testing.assert_close(whole(module.get_parameter(name).grad), parameter.grad, rtol=1e-8, atol=1e-12)
        for name, buffer in eager.named_buffers():
            torch.testing.assert_close(module.get_buffer(name), buffer)
        own.step(), own.zero_grad(), theirs.step(), theirs.zero_grad()


def whole_with_gradient(value: Tensor) -> Tensor:
    return value.full_tensor() if hasattr(value, "full_tensor") else value


@pytest.mark.parametrize("seed", [3])
def test_a_call_returns_what_the_model_returns(seed: int) -> None:
    ranks(4).run(evaluate_and_train, seed)


def evaluate_in_stages(seed: int, mesh: tuple[int, ...], num_stages: int) -> None:
    captured, eager, rng = capture(model(), (), batch(0)), model(), random.Random(seed)
    cuts = random_cuts(captured, num_stages, rng)
    plan = random_staged_plan(captured, make_mesh(mesh), "gpipe", num_stages, cuts, rng)
    plan = replace(plan, config=TrainConfig(precision="fp64"))
    parts, own = split_stages(captured, plan.cuts), model()
    values = {**parameters_of(captured, own), **buffers_of(captured, own)}
    captor = Again(model=own, plans=plan.stages, planned=parts, precision="fp64", call=Call(kwargs=batch(0)))
    module = PipelinedModule(staged_model(captured, plan), values, captor=captor)
    with pytest.raises(ArgumentError, match="in its mode and with its arguments"):
        module.train_step({**batch(0), "scale": 2.0})
    for step in range(2):
        loss = module.train_step(batch(step))
        same(loss, eager(**batch(step)).loss)
        module.eval(), eager.eval()
        with pytest.raises(ArgumentError, match="in its mode and with its arguments"):
            module.train_step(batch(step))
        with torch.no_grad():
            for rows, length in ((1, LENGTH), (5, 3)):
                data = batch(10 + step, rows, length)
                same(module(**data), eager(**data))
                same(module(data["ids"], scale=0.5), eager(data["ids"], scale=0.5))
        module.train(), eager.train()


@pytest.mark.parametrize(("seed", "mesh", "num_stages"), [(0, (2,), 2), (1, (1,), 4)])
def test_stages_return_what_the_model_returns(seed: int, mesh: tuple[int, ...], num_stages: int) -> None:
    ranks(4).run(evaluate_in_stages, seed, mesh, num_stages)


class Initialised(nn.Module):
    """A scale that the first batch sets, behind a flag that is a buffer (ActNorm); counts its calls if asked."""

    done: Tensor
    calls: Tensor

    def __init__(self, counts: bool = False) -> None:
        super().__init__()
        self.linear, self.counts = nn.Linear(WIDTH, WIDTH), counts
        self.scale = nn.Parameter(torch.ones(WIDTH))
        self.register_buffer("done", torch.tensor(False))
        self.register_buffer("calls", torch.tensor(0))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        z = self.linear(x)
        if not self.done:
            with torch.no_grad():
                self.scale.copy_(1 / (z.std(0) + 1e-3))
                self.done.fill_(True)
        if self.counts:
            self.calls.add_(1)
            if self.calls > 3:
                z = 2 * z
        return F.mse_loss(z * self.scale, y)


def initialised(counts: bool = False) -> tuple[Initialised, dict[str, Tensor]]:
    with torch.random.fork_rng():
        torch.manual_seed(7)
        return Initialised(counts).double(), {n: torch.randn(ROWS, WIDTH).double() for n in "xy"}


def train_initialised(text: str) -> None:
    own, data = initialised()
    eager, _ = initialised()
    module = autopar.distribute(own, plan_from_text(text))
    for step in range(3):
        given = {name: value * (step + 1) for name, value in data.items()}
        loss = module.train_step(given)  # type: ignore[operator]
        expected = eager(**given)
        expected.backward()
        same(loss, expected)
        for name, parameter in eager.named_parameters():
            torch.testing.assert_close(whole(module.get_parameter(name).grad), parameter.grad)
            torch.testing.assert_close(whole(module.get_parameter(name)), parameter.detach())
        module.zero_grad()
        eager.zero_grad()
    assert module.get_buffer("done")


@pytest.mark.parametrize("baseline", [None, "fsdp"])
def test_a_flag_that_the_first_batch_turns_is_captured_twice(baseline: str | None) -> None:
    plan = autopar.plan(*initialised(), cluster="2xcpu", baseline=baseline, with_baselines=False)
    assert "compared with the module" in plan.checked
    ranks(2).run(train_initialised, plan.to_json())


def test_a_branch_on_a_buffer_that_every_step_changes_is_refused() -> None:
    with pytest.raises(CaptureError, match=r"test_calls.py.*calls|every step changes"):
        autopar.plan(*initialised(counts=True), cluster="2xcpu", with_baselines=False)
    with pytest.raises(CaptureError, match=r"test_calls.py.*decides on buffer done"):
        autopar.plan(*initialised(), cluster="2xcpu", with_baselines=False, check=False)


class Casting(nn.Module):
    """Norms in float32 and back, a rotary table and a complex one, masks that are bool."""

    inverse: Tensor
    turns: Tensor
    mask: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.q, self.k = nn.Embedding(WORDS, WIDTH), nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.scale, self.head = nn.Parameter(torch.ones(WIDTH)), nn.Linear(WIDTH, WORDS)
        inverse = 1 / 100 ** (torch.arange(0, WIDTH, 2) / WIDTH)
        angles = torch.outer(torch.arange(LENGTH), inverse)
        self.register_buffer("inverse", inverse, persistent=False)
        self.register_buffer("turns", torch.polar(torch.ones_like(angles), angles))
        self.register_buffer("mask", torch.ones(LENGTH, LENGTH).tril().bool())

    def norm(self, x: Tensor) -> Tensor:
        wide = x.float()
        return (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + 1e-6)).type_as(x) * self.scale

    def rotated(self, x: Tensor) -> Tensor:
        pairs = torch.view_as_complex(x.float().unflatten(-1, (-1, 2)))
        return torch.view_as_real(pairs * self.turns.to(torch.complex64)).flatten(-2).type_as(x)

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        x = self.norm(self.embedding(ids))
        angles = torch.outer(torch.arange(LENGTH).float(), self.inverse.float())
        q = self.rotated(self.q(x)) * torch.cat([angles.cos(), angles.sin()], -1).to(x.dtype)
        scores = (q @ self.rotated(self.k(x)).mT).masked_fill(~self.mask, float("-inf"))
        x = x + F.softmax(scores, -1, dtype=torch.float32).to(x.dtype) @ x
        return F.cross_entropy(self.head(x).float().flatten(0, 1), labels.flatten())


def casting() -> Casting:
    with torch.random.fork_rng():
        torch.manual_seed(9)
        return Casting()


def train_casting(text: str, precision: str, autocast: bool) -> None:
    module, eager = autopar.distribute(casting(), plan_from_text(text)), casting()
    dtypes = PRECISIONS[precision]
    for parameter in eager.parameters():
        parameter.data = parameter.data.to(dtypes.compute)
    region = torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast)
    with region:
        found, wanted = module(**batch(3)), eager(**batch(3))
    found.backward()
    wanted.backward()
    narrow = autocast or dtypes.compute == torch.bfloat16
    limit = 4e-2 if narrow else 1e-4
    assert float(found.detach()) == pytest.approx(float(wanted.detach()), rel=limit)
    for name, parameter in eager.named_parameters():
        gradient = module.get_parameter(name).grad
        assert gradient is not None and gradient.dtype == dtypes.storage and parameter.grad is not None
        apart = (whole(gradient).float() - parameter.grad.float()).abs().max() / parameter.grad.float().abs().max()
        assert float(apart) < limit, f"{name} {float(apart):.1e}"


@pytest.mark.parametrize(("precision", "autocast"), [("bf16", False), ("bf16-mixed", False), ("fp32", True)])
def test_what_casts_inside_runs_in_every_precision(precision: str, autocast: bool) -> None:
    plan = autopar.plan(casting(), batch(0), cluster="4xcpu", mesh="2x2", precision=precision, with_baselines=False)
    ranks(4).run(train_casting, plan.to_json(), precision, autocast)


def shared_out(outputs: str) -> None:
    captured, plan = planned(1)
    module, eager = distributed(captured, plan, outputs=outputs), model()
    module.eval(), eager.eval()
    data = batch(4)
    with torch.no_grad():
        found, wanted = module(**data), eager(**data)
    assert isinstance(found.loss, Tensor) and not isinstance(found.loss, DTensor)
    same(found.loss, wanted.loss)
    if outputs == "dtensor":
        assert isinstance(found.logits, DTensor)
        same(found.logits, wanted.logits)
    else:
        assert not isinstance(found.logits, DTensor) and found.logits.shape[-1] <= wanted.logits.shape[-1]
        every: list[Any] = [None] * 4
        torch.distributed.all_gather_object(every, found.logits)
        held = {round(float(v), 9) for part in every for v in part.flatten()}
        assert held == {round(float(v), 9) for v in wanted.logits.flatten()}, "together ranks have all of it"
    with torch.no_grad():  # a rank's own rows, of the planned batch
        same(module(module.local_batch(data)).loss, wanted.loss)
    rank = torch.distributed.get_rank()
    with torch.no_grad(), pytest.raises(RankError, match=r"values of inputs.*LocalBatch"):
        module(ids=batch(20 + rank, 2)["ids"])


@pytest.mark.parametrize("outputs", ["dtensor", "local"])
def test_outputs_stay_shared_out_where_asked(outputs: str) -> None:
    ranks(4).run(shared_out, outputs)


def test_constants_of_a_call_are_compared_whole() -> None:
    import numpy as np

    one = np.zeros(5000)
    other = one.copy()
    other[2500] = 1.0
    assert constant_key(one) == constant_key(one.copy()) != constant_key(other)
    assert constant_key(1) != constant_key(1.0) != constant_key(True)
