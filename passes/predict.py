"""What will a step send? Calls and payload bytes per (collective, axes), counted before anything runs.

Redistributions and bodies carry their messages, sent for every micro-batch, those of parameters that are prepared once
a step only once. A parameter of lifetime `use` is gathered again once for every consumer that saves it for backward,
views in between included, and for every call replayed in backward that reads it.
"""

from collections.abc import Iterable

from torch import fx

from autopar.graph import LocalModel, operands, requires_grad
from autopar.passes.hoist_parameters import hoist_parameters, hoisted_nodes
from autopar.passes.recompute import backward_nodes, is_replayed
from autopar.redistribution import Message
from autopar.rules.registry import rule_of

Sent = dict[tuple[str, tuple[str, ...]], tuple[int, int]]
"""(collective, axis names) -> (calls, payload bytes) of one step on one rank."""


def predicted_messages(local: LocalModel, *, splits: bool = False) -> Sent:
    """Everything that one step, forward and backward of all its micro-batches, sends on each rank.

    splits: backward in two parts, both of which read what some calls keep.
    """
    sent: Sent = {}
    twice = heads(local) if splits else frozenset[str]()
    names = local.plan.mesh.names
    once = hoisted_nodes(local.graph, local.plan.lifetimes)
    for node in local.graph.nodes:
        forward, backward = node.meta.get("messages", ((), ()))
        times = 1 if node in once else local.plan.microbatches
        replay = (*forward, *_gathered_for(node)) if is_replayed(node) else ()
        again = (*_gathered_again(node),) * (2 if node.name in twice else 1)
        for message in (*forward, *backward, *again, *replay):
            key = (message.kind, tuple(names[a] for a in message.axes))
            calls, nbytes = sent.get(key, (0, 0))
            sent[key] = (calls + times, nbytes + times * message.nbytes)
    return sent


def heads(local: LocalModel) -> frozenset[str]:
    """Calls whose backward pass runs twice if it is split: for what was received, and for weights it alone leads to.

    As `runtime.split_backward` finds them in autograd's graph.
    """
    body = hoist_parameters(local.graph, local.plan.lifetimes).body
    received = set(local.captured.received)
    reached = backward_nodes(body.nodes)
    way: set[fx.Node] = set()
    branch: dict[fx.Node, fx.Node] = {}

    def of(node: fx.Node) -> fx.Node:
        while branch.setdefault(node, node) is not node:
            node = branch[node]
        return node

    leading: list[tuple[str, fx.Node]] = []
    for node in body.nodes:
        if node.op == "output":
            leading += [("", end) for end in operands(node)[: node.meta["ends"]] if end in reached and end not in way]
        if node not in reached:
            continue
        sources = [s for s in operands(node) if s in reached]
        if node.name in received or way.intersection(sources):
            way.add(node)
            leading += [(node.name, s) for s in sources if s not in way]
        else:
            branch.update({of(s): of(node) for s in sources})
    found: dict[fx.Node, set[str]] = {}
    for name, node in leading:
        found.setdefault(of(node), set()).add(name)
    return frozenset(name for names in found.values() if len(names) == 1 for name in names)


def _gathered_again(consumer: fx.Node) -> Iterable[Message]:
    """Gathers in the backward pass of `consumer`, for the operands that autograd saves as a recipe."""
    origin = consumer.meta.get("origin")
    if consumer.op != "call_function" or "step" in consumer.meta or origin is None or not requires_grad(consumer):
        return
    saves = rule_of(origin).saves
    for index, operand in enumerate(operands(consumer)):
        if index in saves:
            yield from regather_chain(operand)


def _gathered_for(node: fx.Node) -> Iterable[Message]:
    """Gathers of what a replay of `node` reads."""
    for operand in operands(node):
        yield from regather_chain(operand)


def regather_chain(node: fx.Node) -> Iterable[Message]:
    """The gathers that remake `node`, back to what is kept; nothing if it is kept itself."""
    while node.op == "call_function":
        if node.kwargs.get("regather"):
            yield from node.meta["messages"][0]
        elif "step" in node.meta:
            if node.meta["step"].forward:
                return
        else:
            origin: fx.Node = node.meta["origin"]
            if node.name != origin.name or (alias := rule_of(origin).alias) is None:
                return
            node = operands(node)[alias]
            continue
        node = operands(node)[0]
