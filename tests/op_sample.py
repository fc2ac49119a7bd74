"""What is a sample? One op call with example inputs, run on tensors or made a node of a graph."""

import operator
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, fx

aten = torch.ops.aten


@dataclass(frozen=True, slots=True)
class X:
    """Tensor input number `index` in a sample's arguments."""

    index: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Input:
    """A tensor input; `kind`: float, positive, bool, ids below `high`, or where parts of a row of `high` start."""

    shape: tuple[int, ...]
    kind: str = "float"
    high: int = 0
    grad: bool = True
    low: int = 0

    @property
    def needs_grad(self) -> bool:
        return self.grad and self.kind in ("float", "positive")


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """A call `target(*args, **kwargs)` on `inputs`; `X(i)` in its arguments stands for input i."""

    name: str
    target: Callable[..., Any]
    args: tuple[Any, ...]
    inputs: tuple[Input, ...]
    kwargs: dict[str, Any] = field(default_factory=dict)
    ignored: int = 0  # so many labels of the last input are -100

    def tensors(self, seed: int = 0, dtype: torch.dtype = torch.float64) -> tuple[Tensor, ...]:
        generator = torch.Generator().manual_seed(seed)
        out = [random_tensor(i, generator, dtype) for i in self.inputs]
        if self.ignored:
            out[-1].view(-1)[: self.ignored] = -100
        return tuple(out)

    def run(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        """The whole op's results."""
        args, kwargs = _filled((self.args, self.kwargs), tensors)
        return as_results(self.target(*args, **kwargs))

    def node(self, dtype: torch.dtype = torch.float64) -> fx.Node:
        """The call as a node of a graph of its own, meta as in a captured graph."""
        graph = fx.Graph()
        tensors = self.tensors(dtype=dtype)
        placeholders = tuple(graph.placeholder(f"x{i}") for i in range(len(tensors)))
        for node, tensor, spec in zip(placeholders, tensors, self.inputs, strict=True):
            node.meta.update(val=tensor.to("meta"), requires_grad=spec.needs_grad)
        args, kwargs = _filled((self.args, self.kwargs), placeholders)
        node = graph.call_function(self.target, args, kwargs)
        meta_args, meta_kwargs = fx.node.map_arg((args, kwargs), lambda n: n.meta["val"])
        value = self.target(*meta_args, **meta_kwargs)
        values = as_results(value)
        node.meta["val"] = value if isinstance(value, Tensor) else values
        node.meta["requires_grad"] = any(i.needs_grad for i in self.inputs) and values[0].dtype.is_floating_point
        node.meta["module"] = ""
        if not isinstance(value, Tensor):
            for i, item in enumerate(values):
                user = graph.call_function(operator.getitem, (node, i))
                user.meta.update(val=item, requires_grad=node.meta["requires_grad"], module="")
        return node


def as_results(value: Any) -> tuple[Tensor, ...]:
    return tuple(value) if isinstance(value, (tuple, list)) else (value,)


def random_tensor(spec: Input, generator: torch.Generator, dtype: torch.dtype) -> Tensor:
    if spec.kind == "ids":
        return torch.randint(spec.low, spec.high, spec.shape, generator=generator)
    if spec.kind == "starts":
        starts = torch.randint(0, spec.high, spec.shape, generator=generator).sort().values
        return starts - starts[0]
    if spec.kind == "bool":
        return torch.rand(spec.shape, generator=generator) > 0.4
    value = torch.randn(spec.shape, generator=generator, dtype=torch.float64)
    return (value.abs() + 0.5 if spec.kind == "positive" else value).to(dtype)


def _filled(structure: Any, values: tuple[Any, ...]) -> Any:
    if isinstance(structure, X):
        return values[structure.index]
    if isinstance(structure, (tuple, list)):
        return type(structure)(_filled(s, values) for s in structure)
    if isinstance(structure, dict):
        return {k: _filled(v, values) for k, v in structure.items()}
    return structure
