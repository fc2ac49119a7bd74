"""What comes of what ordinary code does to a module between two steps? The same code runs on the model in one process
and on its distributed module, on plans of every kind."""

import random
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import autopar
from autopar.api.model_plan import ModelPlan
from autopar.errors import AutoparError
from autopar.search.known.random_plan import random_plan
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
    """Of every kind of plan."""
    OPERATIONS[function.__name__] = function
    return function


NEEDS_GRAPH: set[str] = set()


def on_a_loss(function: Operation) -> Operation:
    """Of a loss with a graph."""
    NEEDS_GRAPH.add(function.__name__)
    return operation(function)


def outcome(kind: str, name: str) -> tuple[str, str]:
    """On a rank, of an operation and the step after it: as eager, another result, or an error and its words."""
    import tests.ordinary_copies
    import tests.ordinary_gradients
    import tests.ordinary_parameters  # noqa: F401

    torch.manual_seed(0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return _compared(kind, name)


def _compared(kind: str, name: str) -> tuple[str, str]:
    eager, wanted = _outcome(Run(net(), kind, distributed=False), name)
    module, found = _outcome(Run(made(kind), kind, distributed=True), name)
    if found is not None:
        word = "refused" if isinstance(found, AutoparError) else "both raise" if wanted else "raises"
        return word, f"{type(found).__name__}: {found}"
    if wanted is not None:
        return "accepts", f"eager raises {type(wanted).__name__}: {wanted}"
    for key, value in eager.found.items():
        if key not in module.found:
            if kind != "stages":
                return "differs", f"{key} is missing"
        elif not _alike(value, module.found[key]):
            return "differs", f"{key}: {value} and {module.found[key]}"
    return "as eager", ""


def _outcome(run: Run, name: str) -> tuple[Run, Exception | None]:
    try:
        OPERATIONS[name](run)
        run.state("after")
        run.backward(5)
        run.optimizer.step()
        run.state("then")
    except Exception as error:
        return run, error
    return run, None


def _alike(one: Tensor | None, other: Tensor | None) -> bool:
    if one is None or other is None:
        return one is other
    return one.shape == other.shape and torch.allclose(one.double(), other.double(), rtol=1e-8, atol=1e-10)
