"""What is the graph of another batch size? Two others, every size and number in them moved along the line.

A size or an integer that is x at a samples and y at b samples is x + (y - x) (n - a) / (b - a) at n. Where that is no
integer, or constants of the graphs differ, or their nodes do, there is no such line.

Nothing here captures: a process beside a search makes graphs of all sizes from two without loading what traces.
"""

from collections.abc import Callable
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from typing import Any

import torch
from torch import fx

from autopar.passes.accumulate_gradients import accumulate_gradients
from autopar.values.graph import CapturedModel, target_name


class NotLinearError(Exception):
    """Two graphs differ in more than sizes."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class BatchLine:
    """Graphs at the ends of a line, alike but for numbers, at `sizes` samples, the second of them the whole batch."""

    small: CapturedModel
    large: CapturedModel
    sizes: tuple[int, int]

    def at(self, size: int) -> CapturedModel:
        """The graph of `size` samples; between the ends a new one.

        Raises:
            NotLinearError: if the ends are not alike in all but numbers.
        """
        for end, graph in zip(self.sizes, (self.small, self.large), strict=True):
            if size == end:
                return graph
        return rebatched(self.small, self.large, self.sizes, size)

    def microbatch(self, count: int) -> CapturedModel:
        """The graph of one of `count` micro-batches."""
        graph = self.at(self.sizes[1] // count)
        is_kept = graph is self.small or graph is self.large
        return accumulate_gradients(graph, count, lambda: self.large, in_place=not is_kept)


def rebatched(a: CapturedModel, b: CapturedModel, sizes: tuple[int, int], size: int) -> CapturedModel:
    """The graph at `size` samples from those at `sizes`.

    Raises:
        NotLinearError: if they are not alike in all but numbers.
    """
    line = Between(sizes[0], sizes[1], size)
    check_alike(a, b)
    graph, env = fx.Graph(), dict[fx.Node, fx.Node]()
    for one, other in zip(a.graph.nodes, b.graph.nodes, strict=True):
        moved = line.between((one.args, dict(one.kwargs)), (other.args, dict(other.kwargs)))
        args, kwargs = fx.node.map_arg(moved, env.__getitem__)
        copy = graph.create_node(one.op, one.target, args, kwargs, one.name, one.type)
        copy.meta = dict(one.meta)
        if "val" in one.meta:
            copy.meta["val"] = line.value(one.meta["val"], other.meta["val"])
        env[one] = copy
    return replace(a, graph=graph, **line.specs(a, b))


def check_alike(a: CapturedModel, b: CapturedModel) -> None:
    """Raises NotLinearError if constants, or nodes' names and targets, differ."""
    if len(a.graph.nodes) != len(b.graph.nodes) or set(a.constants) != set(b.constants):
        raise NotLinearError(a.name)
    if not all(torch.equal(value, b.constants[name]) for name, value in a.constants.items()):
        raise NotLinearError(a.name)
    for one, other in zip(a.graph.nodes, b.graph.nodes, strict=True):
        if (one.op, one.name, target_name(one.target)) != (other.op, other.name, target_name(other.target)):
            raise NotLinearError(f"{one.name} and {other.name}")


class DeferredGraph(CapturedModel):
    """A captured model whose graph is made when it is first looked at."""

    make: Callable[[], CapturedModel]

    @classmethod
    def like(cls, model: CapturedModel, make: Callable[[], CapturedModel], **changes: Any) -> "DeferredGraph":
        """All but the graph a model's, with `changes`; `make` gives the graph."""
        own = {f.name: getattr(model, f.name) for f in fields(CapturedModel) if f.name != "graph"}
        made = object.__new__(cls)
        vars(made).update({**own, **changes, "make": make})
        return made

    @cached_property
    def graph(self) -> fx.Graph:
        """Made once."""
        return self.make().graph


@dataclass(frozen=True, slots=True)
class Between:
    """The point at `n` samples of a line from `a` to `b`. made: tensors without values, by those at the ends."""

    a: int
    b: int
    n: int
    made: dict[object, torch.Tensor] = field(default_factory=dict)

    def between(self, x: Any, y: Any) -> Any:
        """`x` with every integer moved; both have the same structure."""
        if type(x) is not type(y):
            raise NotLinearError(f"{x} and {y}")
        if type(x) is int:
            moved, rest = divmod((y - x) * (self.n - self.a), self.b - self.a)
            if rest:
                raise NotLinearError(f"{x} and {y}")
            return x + moved
        if isinstance(x, (tuple, list)):
            if len(x) != len(y):
                raise NotLinearError(f"{x} and {y}")
            return type(x)(self.between(p, q) for p, q in zip(x, y, strict=True))
        if isinstance(x, dict):
            return {key: self.between(value, y[key]) for key, value in x.items()}
        if isinstance(x, fx.Node):
            if x.name != y.name:
                raise NotLinearError(f"{x} and {y}")
            return x
        if x != y:
            raise NotLinearError(f"{x} and {y}")
        return x

    def specs(self, a: CapturedModel, b: CapturedModel) -> dict[str, Any]:
        """What is said of the model's parameters, buffers and inputs."""
        kinds = ("parameters", "buffers", "inputs")
        pairs = {kind: zip(getattr(a, kind), getattr(b, kind), strict=True) for kind in kinds}
        return {
            kind: tuple(replace(p, shape=self.between(p.shape, q.shape)) for p, q in both)
            for kind, both in pairs.items()
        }

    def value(self, x: Any, y: Any) -> Any:
        """The meta tensor between two; one for all that are alike."""
        if not isinstance(x, torch.Tensor):
            return type(x)(self.value(p, q) for p, q in zip(x, y, strict=True))
        known = (x.shape, x.stride(), x.dtype, y.shape, y.stride())
        if known not in self.made:
            shape = self.between(tuple(x.shape), tuple(y.shape))
            order = torch.empty(tuple(x.shape), dtype=x.dtype, device="meta").stride() == x.stride()
            made = torch.empty(shape, dtype=x.dtype, device="meta")
            strides = () if order else self.between(tuple(x.stride()), tuple(y.stride()))
            self.made[known] = made if order else made.as_strided(shape, strides)
        return self.made[known]
