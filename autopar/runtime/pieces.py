"""How does a graph fall into pieces that compile alone? The regions of the export, and what stands between them.

Equal regions (`autopar.lower.regions`) share the graph of the first; the numbers that label call sites are told apart
by the draws that a piece is called with. What brings a parameter that no block owns to its uses stays outside, so that
what is not kept of it for backward is as without pieces.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import fx, nn

from autopar.errors import ArgumentError
from autopar.lower.regions import Region, sections, state_names
from autopar.ops import collectives
from autopar.values.graph import operands
from autopar.values.local_model import LocalModel


@dataclass(frozen=True, kw_only=True, eq=False)
class Piece:
    """Nodes that run together. `graph` computes `results` from `operands`; it is that of the first piece of its kind.

    sites: pairs of a label in `graph` and the label here.
    """

    operands: tuple[fx.Node, ...]
    results: tuple[fx.Node, ...]
    graph: fx.GraphModule
    sites: tuple[tuple[int, int], ...] = ()


def pieces(local: LocalModel, graph: fx.Graph) -> list[Piece | fx.Node]:
    """`graph`, one that `local` runs, in an order that can run: pieces, and single calls that stay outside.

    Raises:
        ArgumentError: if backward makes a value again that one piece hands to another.
    """
    found = sections(replace(local, graph=graph))
    outside = set(_parameters_between(local, found.order))
    out: list[Piece | fx.Node] = []
    first: dict[str, tuple[fx.GraphModule, Region]] = {}
    run: list[fx.Node] = []

    def end_run() -> None:
        if run:
            nodes = tuple(run)
            out.append(Piece(operands=_reads(nodes), results=_results(nodes), graph=_module(nodes)))
            run.clear()

    for item in found.order:
        if isinstance(item, fx.Node) and item not in outside:
            run.append(item)
            continue
        if isinstance(item, fx.Node):
            out.append(item)
            continue
        end_run()
        module, like = first.setdefault(item.key, (_module(item.nodes), item))
        sites = tuple(zip(like.labels.values(), item.labels.values(), strict=True))
        out.append(Piece(operands=_reads(item.nodes), results=_results(item.nodes), graph=module, sites=sites))
    end_run()
    remade = [n.name for piece in out if isinstance(piece, Piece) for n in piece.results if n.meta.get("again")]
    if remade:
        raise ArgumentError(
            f"the plan does not keep {', '.join(remade[:3])}{', ...' if len(remade) > 3 else ''} for backward, which "
            "pass from block to block: compile the whole graph (by_block=False)"
        )
    return out


def _parameters_between(local: LocalModel, order: Iterable[fx.Node | Region]) -> Iterator[fx.Node]:
    """Single calls that only redistribute a parameter."""
    state, chain = state_names(local), set[fx.Node]()
    for item in order:
        if isinstance(item, fx.Node) and getattr(item.target, "__module__", "") == collectives.__name__:
            (source,) = operands(item)
            if source.name in state or source in chain:
                chain.add(item)
                yield item


def _reads(nodes: Sequence[fx.Node]) -> tuple[fx.Node, ...]:
    inside = set(nodes)
    return tuple(dict.fromkeys(source for node in nodes for source in operands(node) if source not in inside))


def _results(nodes: Sequence[fx.Node]) -> tuple[fx.Node, ...]:
    inside = set(nodes)
    return tuple(node for node in nodes if any(user not in inside for user in node.users))


def _module(nodes: Sequence[fx.Node]) -> fx.GraphModule:
    graph, env = fx.Graph(), dict[fx.Node, Any]()
    for source in _reads(nodes):
        env[source] = graph.placeholder(source.name)
    for node in nodes:
        env[node] = graph.node_copy(node, env.__getitem__)
    graph.output(tuple(env[node] for node in _results(nodes)))
    return fx.GraphModule(nn.Module(), graph)
