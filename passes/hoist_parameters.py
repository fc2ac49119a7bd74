"""What of a micro-batch's graph runs once a step? Redistributions of parameters whose copy in use lives for the step.

The local graph falls into a prologue (padding and redistribution of parameters of lifetime `step` or `always`) and a
body, which reads the prologue's results as if they were parameters. A step runs the prologue once, the body for every
micro-batch, and then the prologue backward on the sums of gradients, so that what the prologue sends is sent once.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from torch import fx

from autopar.ops import collectives
from autopar.values.graph import operands
from autopar.values.lifetimes import ONCE_A_STEP


@dataclass(frozen=True, kw_only=True, eq=False)
class Hoisted:
    """prologue: from the parameters in `reads` to the values in `makes`, in order; body: the rest, with these values as
    placeholders of their own. `roots[value]`: the parameter that a value was made of."""

    prologue: fx.Graph
    body: fx.Graph
    reads: tuple[str, ...]
    makes: tuple[str, ...]
    roots: Mapping[str, str]


def hoisted_nodes(graph: fx.Graph, lifetimes: Mapping[str, str]) -> dict[fx.Node, str]:
    """Calls that only bring a parameter that is prepared once a step to its uses, and that parameter."""
    found: dict[fx.Node, str] = {}
    for node in graph.nodes:
        if node.op != "call_function" or getattr(node.target, "__module__", "") != collectives.__name__:
            continue
        (source,) = operands(node)
        if source in found:
            found[node] = found[source]
        elif source.op == "placeholder" and lifetimes.get(source.name) in ONCE_A_STEP:
            found[node] = source.name
    return found


def hoist_parameters(graph: fx.Graph, lifetimes: Mapping[str, str]) -> Hoisted:
    """The graph in two; `graph` itself stays as it is."""
    inside = hoisted_nodes(graph, lifetimes)
    results = [node for node in inside if any(user not in inside for user in node.users)]
    reads = tuple(dict.fromkeys(inside.values()))
    return Hoisted(
        prologue=_prologue(graph, inside, results),
        body=_body(graph, inside, results),
        reads=reads,
        makes=tuple(node.name for node in results),
        roots={node.name: inside[node] for node in results},
    )


def _prologue(graph: fx.Graph, inside: Mapping[fx.Node, str], results: list[fx.Node]) -> fx.Graph:
    prologue, env = fx.Graph(), dict[fx.Node, fx.Node]()
    placeholders = {node.name: node for node in graph.nodes if node.op == "placeholder"}
    for name in dict.fromkeys(inside.values()):
        env[placeholders[name]] = prologue.node_copy(placeholders[name])
    for node in inside:
        env[node] = prologue.node_copy(node, env.__getitem__)
    prologue.output(tuple(env[node] for node in results))
    return prologue


def _body(graph: fx.Graph, inside: Mapping[fx.Node, str], results: list[fx.Node]) -> fx.Graph:
    body, env = fx.Graph(), dict[fx.Node, fx.Node]()
    for node in graph.nodes:
        if node.op == "placeholder":
            env[node] = body.node_copy(node)
    for node in results:
        env[node] = body.placeholder(node.name)
        env[node].meta = dict(node.meta)
    for node in graph.nodes:
        if node.op != "placeholder" and node not in inside:
            env[node] = body.node_copy(node, env.__getitem__)
    return body
