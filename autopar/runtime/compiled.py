"""How does a module's graph run compiled? Under torch.compile(fullgraph=True), whole or in pieces.

Pieces (`autopar.runtime.pieces`) of one kind share a compiled function, so that what is compiled grows with kinds of
blocks and not with layers. Losses, gradients and collectives are those of the eager graph, and so is what is kept
between forward and backward (`autopar.runtime.partition`).
"""

import warnings
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import fx

from autopar.errors import ArgumentError
from autopar.ops import attention
from autopar.ops.drawn import drawn
from autopar.ops.groups import Groups, bound
from autopar.ops.random import Draws
from autopar.ops.regather import regathering
from autopar.runtime.backends import backend_of
from autopar.runtime.pieces import Piece, pieces
from autopar.values.graph import operands
from autopar.values.local_model import LocalModel

Run = Callable[..., Any]
OF_TRACING = (
    ".*autograd.function.Function.*should not be instantiated",
    "The .grad attribute of a Tensor that is not a",
)
"""Warnings that torch's tracer raises about what it does itself."""


class Compiler:
    """Compiled forms of a module's graphs, each made at its first call. `num_compiled`: how many a backend made.

    Raises:
        ArgumentError: for an unknown backend, or a graph that no tracer can follow.
    """

    def __init__(self, local: LocalModel, backend: str, *, by_block: bool, exact_random: bool) -> None:
        inner = backend_of(backend)
        _check(local.graph, exact_random)
        self.local, self.by_block, self.num_compiled = local, by_block, 0
        self._runs: dict[fx.GraphModule, Run] = {}
        self._pieces: dict[fx.GraphModule, InPieces] = {}

        def counted(graph: fx.GraphModule, inputs: Sequence[Any]) -> Any:
            self.num_compiled += 1
            return inner(graph, inputs)

        self._backend = counted

    def run(self, graph: fx.GraphModule, arguments: Sequence[Any], groups: Groups, draws: Draws, remakes: bool) -> Any:
        """`graph(*arguments)`; `remakes`: something of it is not kept for backward."""

        def call(part: fx.GraphModule, values: Sequence[Any], sites: tuple[tuple[int, int], ...]) -> Any:
            draw = torch.tensor([draws.seed, draws.step, *(number for pair in sites for number in pair)])
            with bound(groups, draw, draws.exact):
                if part in self._runs:
                    return self._runs[part](*values)
                # Not the module: fx's report of a call that failed would be traced, and refused.
                self._runs[part] = torch.compile(part.forward, fullgraph=True, dynamic=False, backend=self._backend)
                with warnings.catch_warnings():
                    for message in OF_TRACING:
                        warnings.filterwarnings("ignore", message)
                    return self._runs[part](*values)

        if not self.by_block:
            return call(graph, arguments, ())
        if graph not in self._pieces:
            self._pieces[graph] = InPieces(self.local, graph)
        hooks: AbstractContextManager[None] = regathering() if remakes else nullcontext()
        with hooks:
            return self._pieces[graph].run(arguments, call)


class InPieces:
    """A graph run piece by piece; a value is let go after its last reader."""

    def __init__(self, local: LocalModel, graph: fx.GraphModule) -> None:
        self.order = pieces(local, graph.graph)
        nodes = list(graph.graph.nodes)
        self.placeholders = [node for node in nodes if node.op == "placeholder"]
        self.output = nodes[-1]
        last = {source: i for i, item in enumerate(self.order) for source in _read(item)}
        kept = set(operands(self.output))
        self.done = [[s for s in _read(item) if last[s] == i and s not in kept] for i, item in enumerate(self.order)]

    def run(self, arguments: Sequence[Any], call: Run) -> Any:
        values: dict[fx.Node, Any] = dict(zip(self.placeholders, arguments, strict=True))
        for item, done in zip(self.order, self.done, strict=True):
            if isinstance(item, Piece):
                results = call(item.graph, [values[source] for source in item.operands], item.sites)
                values.update(zip(item.results, results, strict=True))
            else:
                args, kwargs = fx.node.map_arg((item.args, item.kwargs), values.__getitem__)
                values[item] = item.target(*args, **kwargs)  # type: ignore[operator]
            for source in done:
                del values[source]
        return fx.node.map_arg(self.output.args[0], values.__getitem__)


def _read(item: Piece | fx.Node) -> Sequence[fx.Node]:
    return item.operands if isinstance(item, Piece) else list(dict.fromkeys(operands(item)))


def _check(graph: fx.Graph, exact_random: bool) -> None:
    """Raises ArgumentError for what draws inside a kernel, from a generator of its own."""
    for node in graph.nodes:
        if node.target is drawn:
            raise ArgumentError(
                f"{node.name} draws random numbers inside a kernel ({node.args[0]}), which no tracer can seed; train "
                "this model eagerly: leave compile() out"
            )
        if node.target is attention.attention and node.kwargs["dropout_p"] and not exact_random:
            raise ArgumentError(
                f"{node.name} drops attention weights inside a kernel, which no tracer can seed; train this model "
                "eagerly, or set its attention dropout to 0"
            )
