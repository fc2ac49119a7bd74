"""A loop that traces, and owns loss, backward pass and optimizer, trains a placed module as it trains the model."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn import functional as F

import autopar
from autopar.errors import ArgumentError, BatchError, MeshError
from autopar.integrations.placed import PlacedModule
from autopar.integrations.torchtitan import parallelize_fn, pipelining_fn
from autopar.ops import collectives
from autopar.ops.groups import use_functional, use_groups
from autopar.runtime.groups import build_groups
from autopar.values.mesh import make_mesh
from examples.integrations import tiny as cases
from tests.process_group import ranks

ROWS: tuple[tuple[str, dict[str, Any]], ...] = (
    ("all_gather", {"dim": 0}),
    ("all_gather", {"dim": 1, "size": 11}),
    ("all_gather", {"dim": 1, "backward": "slice"}),
    ("all_gather", {"dim": 0, "bits": 64}),
    ("reduce_scatter", {"dim": 1}),
    ("all_reduce", {}),
    ("all_reduce", {"backward": "all_reduce"}),
    ("all_reduce_gradient", {}),
    ("divide_gradient", {}),
    ("all_to_all", {"split_dim": 1, "concat_dim": 0}),
    ("local_slice", {"dim": 1}),
    ("local_slice", {"dim": 0, "backward": "all_gather"}),
    ("place_slice", {"dim": 1, "size": 11}),
    ("divide", {}),
    ("divide", {"backward": "divide"}),
)


def dims(data: int = 1, tensor: int = 1, pipeline: int = 1, **more: int) -> Any:
    return SimpleNamespace(
        **{"dp_replicate": 1, "dp_shard": data, "tp": tensor, "pp": pipeline, "cp": 1, "ep": 1} | more
    )


class Initialized(cases.Tiny):
    def init_weights(self) -> None:
        self.load_state_dict({name: value + dist.get_rank() for name, value in cases.tiny().state_dict().items()})


def whole() -> tuple[list[float], dict[str, Tensor]]:
    """Losses of two steps of the whole model, and its parameters then."""
    model, (tokens, labels) = cases.tiny(), batch()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    losses = []
    for _ in range(2):
        loss = outside(model(tokens), labels)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    return losses, {name: value.detach() for name, value in model.named_parameters()}


def batch() -> tuple[Tensor, Tensor]:
    rows = [cases.Words(1)[index] for index in range(cases.GLOBAL_BATCH)]
    tokens, labels = (torch.stack(column) for column in zip(*rows, strict=True))
    return tokens, labels


def outside(logits: Tensor, labels: Tensor) -> Tensor:
    """What a rank adds to the loss: a sum over its rows, of all words of the batch."""
    total = cases.GLOBAL_BATCH * cases.SEQUENCE
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum") / total


def traced_steps(plan: str, data: int, tensor: int) -> tuple[list[float], dict[str, Tensor], set[str], list[bool]]:
    """What torchtitan's graph trainer does: forward, loss and gradients traced once, with parameters as inputs."""
    place = parallelize_fn(autopar.load_plan(Path(plan)), loss_fn=cases.loss_fn)
    with torch.device("meta"):
        model = Initialized()
    module = place(model, parallel_dims=dims(data, tensor))
    module.init_weights()  # as rank 0 draws them
    rows = cases.GLOBAL_BATCH // data
    first = dist.get_rank() // tensor * rows
    tokens, labels = (value[first : first + rows] for value in batch())
    names = [name for name, _ in module.named_parameters()]

    def step(local: list[Tensor], tokens: Tensor, labels: Tensor) -> list[Tensor]:
        held = dict(module.named_parameters())
        own = {
            name: DTensor.from_local(
                value, held[name].device_mesh, held[name].placements, run_check=False, shape=held[name].shape,
                stride=held[name].stride(),
            )
            for name, value in zip(names, local, strict=True)
        }  # fmt: skip
        loss = outside(torch.func.functional_call(module, own, (tokens,)), labels)
        return [loss, *torch.autograd.grad(loss, local)]

    def local() -> list[Tensor]:
        return [value.to_local().detach().requires_grad_() for value in module.parameters()]

    graph = make_fx(step)(local(), tokens, labels)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.5)
    losses = []
    for _ in range(2):
        with torch.no_grad():
            loss, *gradients = graph(local(), tokens, labels)
        for value, gradient in zip(module.parameters(), gradients, strict=True):
            value.grad = DTensor.from_local(
                gradient, value.device_mesh, value.placements, run_check=False, shape=value.shape, stride=value.stride()
            )
        optimizer.step()
        dist.all_reduce(loss)
        losses.append(float(loss) / tensor)
    traced = {str(node.target) for node in graph.graph.nodes if "c10d" in str(node.target)}
    tied = [isinstance(value, DTensor) for value in module.parameters()]
    return losses, {name: value.full_tensor().detach() for name, value in module.named_parameters()}, traced, tied


@pytest.mark.parametrize(("how", "data", "tensor"), [("megatron:tp=2", 2, 2), ("fsdp", 1, 2)])
def test_a_traced_step_of_a_placed_module_is_that_of_the_model(
    how: str, data: int, tensor: int, tmp_path: Path
) -> None:
    """Also where the plan splits rows over ranks that the loop gives the same rows."""
    world = data * tensor
    plan = autopar.plan(
        Initialized(), cases.example_batch(), cluster=f"{world}xcpu", baseline=how, loss_fn=cases.loss_fn
    )
    plan.save(tmp_path / "plan.json")
    losses, values = whole()
    for own, found, traced, tied in ranks(world).run(traced_steps, str(tmp_path / "plan.json"), data, tensor):
        assert own == pytest.approx(losses, abs=1e-6)
        assert set(found) == set(values) and all(tied)
        for name, value in values.items():
            torch.testing.assert_close(found[name], value, rtol=1e-5, atol=1e-6, msg=name)
        assert "_c10d_functional.all_gather_into_tensor.default" in traced


def staged_steps(plan: str) -> tuple[list[float], dict[str, Tensor]]:
    """torchtitan's calls of a pipeline: a schedule, this rank's parts, whether it has the first and the last stage."""
    made = pipelining_fn(autopar.load_plan(Path(plan)), loss_fn=cases.loss_fn)

    def loss_fn(logits: Tensor, labels: Tensor, *, scale: float) -> tuple[Tensor, dict[str, Tensor]]:
        return outside(logits, labels) * scale, {}

    schedule, modules, is_first, is_last = made(
        cases.tiny(), parallel_dims=dims(pipeline=2), loss_fn=loss_fn, device=torch.device("cpu"), parallelize_fn=None
    )
    tokens, labels = batch()
    count = schedule.microbatches
    optimizers = [torch.optim.SGD(module.parameters(), lr=0.5) for module in modules]
    with pytest.raises(ArgumentError, match=r"1 micro-batches were given, .* 4; set training\.local_batch_size"):
        schedule.step(arg_mbs=[(tokens,)] if is_first else None, target_mbs=None if is_first else [labels])
    with pytest.raises(ArgumentError, match="stages of a plan take no keywords and return no outputs"):
        schedule.step(kwarg_mbs=[{"positions": tokens}] * count)
    losses = []
    for _ in range(2):
        told: list[Tensor] = []
        schedule.step(
            arg_mbs=[(part,) for part in tokens.chunk(count)] if is_first else None,
            kwarg_mbs=[{} for _ in range(count)],
            target_mbs=list(labels.chunk(count)) if is_last else None,
            losses=told if is_last else None,
            loss_kwargs={"scale": 1.0},
            return_outputs=False,
        )
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        losses.append(sum(float(one.detach()) for one in told))
    named = {name: value.full_tensor().detach() for module in modules for name, value in module.named_parameters()}
    return losses if is_last else [], named


def test_stages_of_a_plan_train_by_a_schedule_of_the_loop(tmp_path: Path) -> None:
    plan = autopar.plan(
        cases.tiny(), cases.example_batch(), cluster="2xcpu", baseline="ddp:pp=2,mbs=2", loss_fn=cases.loss_fn
    )
    plan.save(tmp_path / "plan.json")
    losses, values = whole()
    (none, first), (own, last) = ranks(2).run(staged_steps, str(tmp_path / "plan.json"))
    assert none == [] and own == pytest.approx(losses, abs=1e-6)
    assert set(first) | set(last) == set(values) and not set(first) & set(last)
    for name, value in (first | last).items():
        torch.testing.assert_close(value, values[name], rtol=1e-5, atol=1e-6, msg=name)


def both_ways() -> list[str]:
    """Rows whose value or gradient differs between eager and functional collectives."""
    _, groups = build_groups(make_mesh((2,)), "cpu")
    differing = []
    for name, keywords in ROWS:
        found = []
        for functional in (False, True):
            x = (torch.arange(24.0).view(4, 6) * (dist.get_rank() + 1)).requires_grad_()
            with use_groups(groups):
                call = getattr(collectives, name)
                if functional:
                    with use_functional():
                        out = call(x, axis="data", **keywords)
                else:
                    out = call(x, axis="data", **keywords)
            (gradient,) = torch.autograd.grad(out, x, torch.arange(float(out.numel())).view(out.shape))
            found.append((out, gradient))
        if not all(torch.equal(a, b) for a, b in zip(*found, strict=True)):
            differing.append(f"{name} {keywords}")
    return differing


def test_functional_collectives_do_what_eager_ones_do() -> None:
    for differing in ranks(2).run(both_ways):
        assert differing == []


def refusals(plan: str) -> None:
    loaded = autopar.load_plan(Path(plan))
    place = parallelize_fn(loaded, loss_fn=cases.loss_fn)
    with pytest.raises(MeshError, match="data parallel 4, tensor parallel 1; the plan is for pipeline 1 of mesh 2"):
        place(cases.tiny(), parallel_dims=dims(data=4))
    with pytest.raises(ArgumentError, match="set the cp degree to 1"):
        place(cases.tiny(), parallel_dims=dims(data=2, cp=2))
    with pytest.raises(ArgumentError, match="mixed_precision_param is bfloat16, and the plan computes in float32"):
        place(cases.tiny(), parallel_dims=dims(2), training=SimpleNamespace(mixed_precision_param="bfloat16"))
    with pytest.raises(ArgumentError, match="the plan has one stage"):
        pipelining_fn(loaded)(cases.tiny(), parallel_dims=dims(2), loss_fn=None)
    module = place(cases.tiny(), parallel_dims=dims(2))
    assert isinstance(module, PlacedModule)
    with pytest.raises(BatchError, match="input 0 has 8 rows on this rank; the plan is for 8 on 2 ranks; give 4"):
        module(batch()[0])
    with pytest.raises(ArgumentError, match=r"Tiny has no init_weights\(\)"):
        module.init_weights()


def test_what_a_plan_does_not_have_is_refused(tmp_path: Path) -> None:
    plan = autopar.plan(cases.tiny(), cases.example_batch(), cluster="2xcpu", baseline="fsdp", loss_fn=cases.loss_fn)
    plan.save(tmp_path / "plan.json")
    ranks(2).run(refusals, str(tmp_path / "plan.json"))


class Dropping(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return F.dropout(self.a(x), training=self.training)


def placed_dropping(plan: str) -> None:
    def loss_of(out: Tensor, given: Any) -> Tensor:
        return out.square().mean()

    place = parallelize_fn(autopar.load_plan(Path(plan)), loss_fn=loss_of)
    with pytest.raises(ArgumentError, match="draws random numbers, which a traced step cannot"):
        place(Dropping(), parallel_dims=dims(2))


def test_random_numbers_are_refused(tmp_path: Path) -> None:
    plan = autopar.plan(
        Dropping(), torch.zeros(4, 4), cluster="2xcpu", baseline="ddp", loss_fn=lambda out, given: out.square().mean()
    )
    plan.save(tmp_path / "plan.json")
    ranks(2).run(placed_dropping, str(tmp_path / "plan.json"))
