"""What ordinary code does to a module between two steps: operations that run on the model in one process and on its
distributed module alike, and what came of them."""

import copy
import io
import pickle
import random
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import parametrizations, parametrize
from torch.distributed.tensor import DTensor

import autopar
from autopar.api.model_plan import ModelPlan, model_plan
from autopar.errors import AutoparError
from autopar.search.known.random_plan import random_plan
from autopar.values.plan import one_stage
from autopar.values.mesh import make_mesh

WIDTH, ROWS = 8, 8


class Net(nn.Module):
    """Two linear layers, a norm, a frozen parameter, a buffer; the loss if there are targets."""

    scale: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.a, self.norm, self.b = nn.Linear(WIDTH, 2 * WIDTH), nn.LayerNorm(2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)
        self.frozen = nn.Parameter(torch.ones(WIDTH), requires_grad=False)
        self.register_buffer("scale", torch.full((WIDTH,), 2.0))

    def forward(self, x: Tensor, y: Tensor | None = None) -> Tensor:
        out: Tensor = self.b(self.norm(self.a(x)).tanh()) * self.scale + self.frozen
        return out if y is None else F.mse_loss(out, y)


def net() -> Net:
    with torch.random.fork_rng():
        torch.manual_seed(4)
        return Net().double()


def batch(seed: int = 0, rows: int = ROWS) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    x, y = torch.randn(2, rows, WIDTH, generator=generator, dtype=torch.float64)
    return {"x": x, "y": y}


def outside(output: Tensor, given: dict[str, Tensor]) -> Tensor:
    return F.mse_loss(output, given["y"])


KINDS = {"ddp": 2, "fsdp": 2, "outside": 2, "decorated": 2, "stages": 2, "microbatches": 2, "tensor": 4}
"""How many ranks each kind of plan has."""


@cache
def plan(kind: str) -> ModelPlan:
    own, common = net(), {"cluster": "2xcpu", "mesh": "2", "with_baselines": False, "check": False}
    if kind == "stages":
        return autopar.plan(own, batch(), cluster="2xcpu", baseline="ddp:pp=2,mbs=4", check=False)
    if kind == "microbatches":
        return autopar.plan(own, batch(), baseline="fsdp:zero=3,mbs=2", **{**common, "mesh": None})
    if kind == "outside":
        return autopar.plan(own, batch(), baseline="fsdp", loss_fn=outside, **common)
    if kind == "tensor":
        found = autopar.plan(own, batch(), **{**common, "cluster": "4xcpu", "mesh": "2x2"})
        made = random_plan(found.graph, make_mesh((2, 2)), random.Random(2))
        made = replace(made, config=found.config, cluster=found.cluster)
        return replace(found, stages=(made,))
    return autopar.plan(own, batch(), baseline=kind, **common)


def made(kind: str) -> nn.Module:
    if kind == "decorated":
        own = autopar.auto_parallel(net(), cluster="2xcpu", baseline="fsdp", with_baselines=False, check=False)
        own.distribute(batch())
        return own
    return autopar.distribute(net(), plan(kind))


def whole(value: Any) -> Tensor:
    value = value.full_tensor() if hasattr(value, "full_tensor") else value
    tensor: Tensor = value.detach().clone()
    return tensor


@dataclass
class Run:
    """A model in training, distributed or not."""

    model: Any
    kind: str
    distributed: bool
    optimizer: torch.optim.Optimizer = None  # type: ignore[assignment]
    found: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1, momentum=0.9)

    @property
    def steps(self) -> bool:
        """Whether it is trained by train_step alone."""
        return self.distributed and self.kind in ("stages", "microbatches")

    def loss(self, seed: int = 0, model: Any = None, **changes: Any) -> Tensor:
        model, given = model or self.model, {**batch(seed), **changes}
        if self.kind == "outside":
            return outside(model(given["x"]), given)
        loss: Tensor = model(**given)
        return loss

    def backward(self, seed: int = 0, **changes: Any) -> Tensor:
        if self.steps:
            return self.model.train_step({**batch(seed), **changes})
        loss = self.loss(seed, **changes)
        loss.backward()
        return loss.detach()

    def step(self, seed: int = 0) -> None:
        self.keep("loss", self.backward(seed))
        self.optimizer.step()
        self.optimizer.zero_grad()

    def keep(self, name: str, value: Any) -> None:
        self.found[f"{len(self.found)} {name}"] = None if value is None else whole(value)

    def part(self, name: str) -> Any:
        return self.model.get_submodule(name)

    def parameter(self, name: str) -> Any:
        return dict(self.model.named_parameters()).get(name)

    def state(self, when: str) -> None:
        for name, parameter in sorted(self.model.named_parameters()):
            self.found[f"{when} {name}"] = whole(parameter)
            self.found[f"{when} {name}.grad"] = None if parameter.grad is None else whole(parameter.grad)
        for name, buffer in sorted(self.model.named_buffers()):
            self.found[f"{when} {name}"] = whole(buffer)


Operation = Callable[[Run], None]
OPERATIONS: dict[str, Operation] = {}


def operation(function: Operation) -> Operation:
    OPERATIONS[function.__name__] = function
    return function


NEEDS_GRAPH: set[str] = set()


def on_a_loss(function: Operation) -> Operation:
    """Of a loss with a graph."""
    NEEDS_GRAPH.add(function.__name__)
    return operation(function)


@operation
def nothing(run: Run) -> None:
    run.step()


@operation
def freeze_a_parameter(run: Run) -> None:
    run.step()
    if (own := run.parameter("a.weight")) is not None:
        own.requires_grad_(False)
    run.step(1)


@operation
def freeze_a_part_and_thaw(run: Run) -> None:
    run.part("a").requires_grad_(False) if run.parameter("a.weight") is not None else None
    run.step()
    run.part("a").requires_grad_(True) if run.parameter("a.weight") is not None else None
    run.step(1)


@operation
def freeze_all_but_one(run: Run) -> None:
    run.model.requires_grad_(False)
    for name in ("a.weight", "b.weight"):
        if (own := run.parameter(name)) is not None:
            own.requires_grad_(True)
    run.step()


@operation
def freeze_all(run: Run) -> None:
    run.model.requires_grad_(False)
    with torch.no_grad():
        run.keep("loss", run.loss())
    for name, own in run.model.named_parameters():
        own.requires_grad_(name != "frozen")


@operation
def thaw_what_was_frozen(run: Run) -> None:
    run.step()
    if (own := run.parameter("frozen")) is not None:
        own.requires_grad = True
    run.step(1)


@operation
def assign_data(run: Run) -> None:
    run.step()
    for own in run.model.parameters():
        own.data = own.data * 0.5
    run.step(1)


@operation
def write_data(run: Run) -> None:
    for own in run.model.parameters():
        own.data.mul_(0.5)
        own.data.copy_(own.data + 0.25)
    run.step(1)


@operation
def write_without_gradients(run: Run) -> None:
    with torch.no_grad():
        for own in run.model.parameters():
            own.mul_(0.5)
            own.copy_(own * 2 + 0.25)
    run.step(1)


@operation
def write_a_whole_tensor(run: Run) -> None:
    with torch.no_grad():
        for own in run.model.parameters():
            own.copy_(torch.linspace(-1, 1, own.numel(), dtype=own.dtype).view(own.shape))
    run.step(1)


@operation
def initialise(run: Run) -> None:
    for name in ("a.weight", "b.weight"):
        if (own := run.parameter(name)) is not None:
            nn.init.constant_(own, 0.125)
    run.step(1)


@operation
def initialise_at_random(run: Run) -> None:
    torch.manual_seed(1)
    for name in ("a.weight", "b.weight"):
        if (own := run.parameter(name)) is not None:
            nn.init.normal_(own)
    run.step(1)


@operation
def write_buffers(run: Run) -> None:
    if "scale" in dict(run.model.named_buffers()):
        run.model.scale.mul_(0.5)
    run.step()
    if "scale" in dict(run.model.named_buffers()):
        run.model.scale = run.model.scale * 3
    run.step()


@operation
def buffer_of_another_shape(run: Run) -> None:
    if "scale" in dict(run.model.named_buffers()):
        run.model.scale = torch.ones(1, dtype=torch.float64)
    run.step()


@operation
def forward_hooks(run: Run) -> None:
    run.model.register_forward_pre_hook(lambda m, args, kwargs: (args, {**kwargs, "x": kwargs["x"] * 2}), with_kwargs=True) if run.kind != "outside" else run.model.register_forward_pre_hook(lambda m, args: (args[0] * 2,))
    run.model.register_forward_hook(lambda m, args, output: output * 3)
    run.step()


@operation
def backward_hook(run: Run) -> None:
    run.model.register_full_backward_hook(lambda m, gi, go: run.keep("gradient", go[0]))
    run.step()


@operation
def backward_pre_hook(run: Run) -> None:
    run.model.register_full_backward_pre_hook(lambda m, go: (go[0] * 2,))
    run.step()


@operation
def hook_on_a_part(run: Run) -> None:
    run.part("norm").register_forward_hook(lambda m, args, output: output * 3)
    run.step()


@operation
def backward_hook_on_a_part(run: Run) -> None:
    run.part("norm").register_full_backward_hook(lambda m, gi, go: tuple(None if g is None else g * 3 for g in gi))
    run.step()


@operation
def hook_on_a_parameter(run: Run) -> None:
    if (own := run.parameter("a.weight")) is not None:
        own.register_hook(lambda g: g * 0.5)
    run.step()


@operation
def late_hook_on_a_parameter(run: Run) -> None:
    if run.steps:
        return
    loss = run.loss()
    run.parameter("a.weight").register_hook(lambda g: g * 0.5)
    loss.backward()


@operation
def hook_after_accumulation(run: Run) -> None:
    def halve(own: Tensor) -> None:
        own.grad.mul_(0.5)  # type: ignore[union-attr]

    if (own := run.parameter("a.weight")) is not None:
        own.register_post_accumulate_grad_hook(halve)
    run.step()


@on_a_loss
def hook_on_a_loss(run: Run) -> None:
    loss = run.loss()
    loss.register_hook(lambda g: g * 0.5)
    loss.backward()


@on_a_loss
def step_before_backward(run: Run) -> None:
    run.backward(1)
    loss = run.loss()
    run.optimizer.step()
    loss.backward()


@on_a_loss
def write_before_backward(run: Run) -> None:
    loss = run.loss()
    with torch.no_grad():
        run.parameter("b.weight").mul_(2)
    loss.backward()


@on_a_loss
def gradients_of_parameters(run: Run) -> None:
    for found in torch.autograd.grad(run.loss(), [run.parameter("a.weight"), run.parameter("b.bias")]):
        run.keep("gradient", found)


@on_a_loss
def gradients_of_parameters_or_none(run: Run) -> None:
    for found in torch.autograd.grad(run.loss(), [run.parameter("a.weight"), run.parameter("b.bias")], allow_unused=True):
        run.keep("gradient", found)


@on_a_loss
def gradients_of_some(run: Run) -> None:
    run.loss().backward(inputs=[run.parameter("a.weight")])


@on_a_loss
def gradients_of_inputs(run: Run) -> None:
    x = batch()["x"].requires_grad_()
    run.loss(x=x).backward()
    run.keep("x.grad", x.grad)


@on_a_loss
def gradients_of_inputs_asked_for(run: Run) -> None:
    x = batch()["x"].requires_grad_()
    (found,) = torch.autograd.grad(run.loss(x=x), x)
    run.keep("x.grad", found)


@on_a_loss
def gradients_of_gradients(run: Run) -> None:
    x = batch()["x"].requires_grad_()
    loss = run.loss(x=x)
    (found,) = torch.autograd.grad(loss, x, create_graph=True)
    (loss + found.square().sum()).backward()


@on_a_loss
def gradients_with_a_graph(run: Run) -> None:
    run.loss().backward(create_graph=True)


@on_a_loss
def penalty_on_parameters(run: Run) -> None:
    loss = run.loss()
    (loss + 0.1 * sum(own.square().sum() for own in run.model.parameters())).backward()


@on_a_loss
def penalty_first(run: Run) -> None:
    penalty = sum(own.square().sum() for own in run.model.parameters())
    loss = penalty * 0.1 + run.loss()
    run.keep("loss", loss)
    loss.backward()


@on_a_loss
def penalty_by_abs_norm(run: Run) -> None:
    loss = run.loss()
    for own in run.model.parameters():
        loss = loss + 0.01 * own.norm() + 0.1 * own.abs().mean()
    run.keep("loss", loss)
    loss.backward()


@operation
def penalty_alone(run: Run) -> None:
    run.backward()
    penalty = 0.1 * sum(own.square().sum() for own in run.model.parameters() if own.requires_grad)
    penalty.backward()


@on_a_loss
def weighted_loss(run: Run) -> None:
    (run.loss() * 0.5 + 1).backward(torch.tensor(3.0, dtype=torch.float64))


@on_a_loss
def two_forwards(run: Run) -> None:
    first, second = run.loss(0), run.loss(1)
    (first + 2 * second).backward()


@on_a_loss
def two_forwards_two_backwards(run: Run) -> None:
    first, second = run.loss(0), run.loss(1)
    second.backward()
    first.backward()


@on_a_loss
def forward_without_backward(run: Run) -> None:
    run.keep("loss", run.loss(1))
    run.backward(2)


@on_a_loss
def backward_twice(run: Run) -> None:
    loss = run.loss()
    loss.backward(retain_graph=True)
    loss.backward()


@on_a_loss
def backward_twice_without_retaining(run: Run) -> None:
    loss = run.loss()
    loss.backward()
    loss.backward()


@operation
def accumulate(run: Run) -> None:
    run.backward(0)
    run.backward(1)


@operation
def zeros_for_gradients(run: Run) -> None:
    run.step()
    run.backward(1)
    run.optimizer.zero_grad(set_to_none=False)
    run.backward(2)
    run.model.zero_grad(set_to_none=False)
    run.backward(3)


@operation
def zeros_of_the_module(run: Run) -> None:
    run.backward(1)
    run.model.zero_grad()
    run.backward(2)


@operation
def scale_gradients(run: Run) -> None:
    run.backward()
    for own in run.model.parameters():
        if own.grad is not None:
            own.grad.mul_(0.5)
            own.grad = own.grad + 1
    run.backward(1)


@operation
def own_gradients(run: Run) -> None:
    for own in run.model.parameters():
        if own.requires_grad:
            own.grad = torch.ones(own.shape, dtype=own.dtype)
    run.backward(1)


@operation
def clip_norm(run: Run) -> None:
    run.backward()
    run.keep("norm", nn.utils.clip_grad_norm_(run.model.parameters(), 0.1))


@operation
def clip_norm_infinite(run: Run) -> None:
    run.backward()
    run.keep("norm", nn.utils.clip_grad_norm_(run.model.parameters(), 0.01, norm_type=float("inf"), error_if_nonfinite=True))


@operation
def clip_value(run: Run) -> None:
    run.backward()
    nn.utils.clip_grad_value_(run.model.parameters(), 0.01)


@operation
def gradient_norm(run: Run) -> None:
    run.backward()
    run.keep("norm", nn.utils.get_total_norm([own.grad for own in run.model.parameters() if own.grad is not None]))


@operation
def deepcopy(run: Run) -> None:
    run.step()
    average = copy.deepcopy(run.model)
    run.step(1)
    run.model.eval(), average.eval()
    with torch.no_grad():
        for kept, own in zip(average.parameters(), run.model.parameters(), strict=True):
            kept.lerp_(own.detach(), 0.5)
        run.keep("loss", run.loss(2, average))
    run.model.train()


@operation
def deepcopy_of_a_frozen(run: Run) -> None:
    run.model.requires_grad_(False)
    twin = copy.deepcopy(run.model)
    run.keep("trained", torch.tensor([own.requires_grad for own in twin.parameters()]))
    with torch.no_grad():
        run.keep("loss", run.loss(2, twin))
    for name, own in run.model.named_parameters():
        own.requires_grad_(name != "frozen")


@operation
def deepcopy_with_hooks(run: Run) -> None:
    run.model.register_forward_hook(lambda m, args, output: output * 3)
    with torch.no_grad():
        run.keep("loss", run.loss(2, copy.deepcopy(run.model)))


@operation
def averaged(run: Run) -> None:
    from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

    average = AveragedModel(run.model, multi_avg_fn=get_ema_multi_avg_fn(0.5))
    run.step()
    average.update_parameters(run.model)
    run.step(1)
    average.update_parameters(run.model)
    with torch.no_grad():
        run.keep("loss", run.loss(2, average))


@operation
def pickled(run: Run) -> None:
    twin = pickle.loads(pickle.dumps(run.model))
    with torch.no_grad():
        run.keep("loss", run.loss(2, twin))


@operation
def saved_whole(run: Run) -> None:
    file = io.BytesIO()
    torch.save(run.model, file)


@operation
def integer_inputs(run: Run) -> None:
    run.backward(x=torch.ones(ROWS, WIDTH, dtype=torch.int64))


@operation
def float32_inputs(run: Run) -> None:
    run.backward(x=batch()["x"].float())


@operation
def inputs_of_another_shape(run: Run) -> None:
    run.backward(x=torch.ones(ROWS, WIDTH + 1, dtype=torch.float64))


@operation
def fewer_rows(run: Run) -> None:
    run.keep("loss", run.backward(**batch(0, 6)))


@operation
def inputs_without_values(run: Run) -> None:
    run.backward(x=torch.ones(ROWS, WIDTH, dtype=torch.float64, device="meta"))


@operation
def strided_inputs(run: Run) -> None:
    run.backward(x=batch()["x"].t().contiguous().t())


@operation
def half(run: Run) -> None:
    run.model.half()
    run.backward(x=batch()["x"].half(), y=batch()["y"].half())


@operation
def to_float32(run: Run) -> None:
    run.model.to(torch.float32)
    run.backward(x=batch()["x"].float(), y=batch()["y"].float())


@operation
def to_cpu(run: Run) -> None:
    run.model.to("cpu").double()
    run.step()


@operation
def to_meta(run: Run) -> None:
    run.model.to("meta")
    run.backward()


@operation
def cast_and_back(run: Run) -> None:
    run.model.float()
    run.model.double()
    run.step()


@operation
def replace_a_parameter(run: Run) -> None:
    run.part("a").weight = nn.Parameter(torch.full((2 * WIDTH, WIDTH), 0.125, dtype=torch.float64))
    run.step()


@operation
def remove_a_parameter(run: Run) -> None:
    del run.part("a").weight
    run.step()


@operation
def tie_parameters(run: Run) -> None:
    run.model.norm.bias = run.model.a.bias
    run.step()


@operation
def add_a_parameter(run: Run) -> None:
    run.model.extra = nn.Parameter(torch.ones(3, dtype=torch.float64))
    run.step()


@operation
def replace_a_part(run: Run) -> None:
    run.model.norm = nn.Identity()
    run.step()


@operation
def replace_a_part_by_another(run: Run) -> None:
    run.model.norm = nn.LayerNorm(2 * WIDTH, dtype=torch.float64, eps=0.5)
    run.step()


@operation
def set_an_attribute(run: Run) -> None:
    run.model.norm.eps = 0.5
    run.step()


@operation
def change_forward(run: Run) -> None:
    run.part("norm").forward = lambda x: x * 3
    run.step()


@operation
def parametrize_a_part(run: Run) -> None:
    class Double(nn.Module):
        def forward(self, w: Tensor) -> Tensor:
            return 2 * w

    parametrize.register_parametrization(run.part("a"), "weight", Double())
    run.step()


@operation
def weight_norm(run: Run) -> None:
    parametrizations.weight_norm(run.part("a"))
    run.step()


@operation
def old_weight_norm(run: Run) -> None:
    nn.utils.weight_norm(run.part("a"))
    run.step()


@operation
def spectral_norm(run: Run) -> None:
    nn.utils.spectral_norm(run.part("a"))
    run.step()


@operation
def functional_call(run: Run) -> None:
    values = {name: own.detach() * 2 for name, own in run.model.named_parameters()}
    given = batch()
    args = (given["x"],) if run.kind == "outside" else (given["x"], given["y"])
    with torch.no_grad():
        run.keep("out", torch.func.functional_call(run.model, values, args))


@operation
def vector_of_parameters(run: Run) -> None:
    vector = nn.utils.parameters_to_vector(run.model.parameters())
    nn.utils.vector_to_parameters(vector * 0.5, run.model.parameters())
    run.step()


@operation
def load_assigning(run: Run) -> None:
    state = {name: value * 0.5 for name, value in net().state_dict().items()}
    run.model.load_state_dict(state, assign=True)
    run.optimizer = torch.optim.SGD(run.model.parameters(), lr=0.1)
    run.step()


@operation
def load_own_state(run: Run) -> None:
    run.step()
    kept = {name: value.clone() for name, value in run.model.state_dict().items()}
    run.step(1)
    run.model.load_state_dict(kept)
    run.step(2)


@operation
def load_some(run: Run) -> None:
    run.model.load_state_dict({"a.weight": net().state_dict()["a.weight"] * 0.5}, strict=False)
    run.step()


@operation
def load_into_a_part(run: Run) -> None:
    state = {name: value * 0.5 for name, value in net().a.state_dict().items()}
    if run.parameter("a.weight") is not None:
        run.part("a").load_state_dict(state)
    run.step()


@operation
def compiled(run: Run) -> None:
    own = torch.compile(run.model, backend="eager")
    with torch.no_grad():
        run.keep("loss", run.loss(0, own))


@operation
def evaluate(run: Run) -> None:
    run.step()
    run.model.eval()
    with torch.inference_mode():
        run.keep("loss", run.loss(1))
    with torch.no_grad():
        run.keep("loss", run.loss(1))
    run.model.train()
    run.step()


@operation
def call_a_part(run: Run) -> None:
    run.keep("h", run.part("a")(batch()["x"]))


@operation
def iterate_parts(run: Run) -> None:
    run.model.apply(lambda part: [own.data.mul_(0.5) for own in part.parameters(recurse=False)])
    run.step()


@operation
def initialise_by_apply(run: Run) -> None:
    def init(part: nn.Module) -> None:
        if isinstance(part, nn.Linear):
            nn.init.constant_(part.weight, 0.25)
            part.bias.data.fill_(0.5)

    run.model.apply(init)
    run.step()


def outcome(kind: str, name: str) -> tuple[str, str]:
    """What came of an operation: as eager, another result, or an error and its words."""
    runs = []
    for distributed in (False, True):
        run = Run(made(kind) if distributed else net(), kind, distributed)
        error: Exception | None = None
        try:
            OPERATIONS[name](run)
            run.state("after")
            run.backward(5)
            run.optimizer.step()
            run.state("then")
        except Exception as caught:
            error = caught
        runs.append((run.found, error))
    (wanted, expected), (found, error) = runs
    if error is not None:
        word = "refused" if isinstance(error, AutoparError) else "both raise" if expected else "raises"
        return word, f"{type(error).__name__}: {error}"
    if expected is not None:
        return "accepts", f"eager raises {type(expected).__name__}: {expected}"
    for key in wanted:
        if key not in found:
            if kind == "stages":
                continue
            return "differs", f"{key} is missing"
        if (wanted[key] is None) != (found[key] is None):
            return "differs", f"{key}: {wanted[key] is None} and {found[key] is None} (no value)"
        if wanted[key] is not None and not (wanted[key].shape == found[key].shape and torch.allclose(wanted[key].double(), found[key].double(), rtol=1e-8, atol=1e-10)):
            return "differs", f"{key}: {float((wanted[key] - found[key]).abs().max()) if wanted[key].shape == found[key].shape else 'shape'}"
    return "as eager", ""


def outcomes(kind: str, names: list[str]) -> dict[str, tuple[str, str]]:
    import warnings
    found = {}
    for name in names:
        if name in NEEDS_GRAPH and kind in ("stages", "microbatches"):
            continue
        torch.manual_seed(0)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            found[name] = outcome(kind, name)
    return found
