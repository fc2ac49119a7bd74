"""What will a step send? Calls and payload bytes per (collective, axes), counted before anything runs.

Redistributions and bodies carry their messages, sent for every micro-batch, those of parameters that are prepared once
a step only once. A parameter of lifetime `use` is gathered again once for every consumer that saves it for backward,
views in between included, and for every call replayed in backward that reads it.
"""

from collections.abc import Iterable

from torch import fx

from autopar.graph import LocalModel, operands, requires_grad
from autopar.passes.hoist_parameters import hoisted_nodes
from autopar.passes.recompute import is_replayed
from autopar.redistribution import Message
from autopar.rules.registry import rule_of

Sent = dict[tuple[str, tuple[str, ...]], tuple[int, int]]
"""(collective, axis names) -> (calls, payload bytes) of one step on one rank."""


def predicted_messages(local: LocalModel) -> Sent:
    """Everything that one step, forward and backward of all its micro-batches, sends on each rank."""
    sent: Sent = {}
    names = local.plan.mesh.names
    once = hoisted_nodes(local.graph, local.plan.lifetimes)
    for node in local.graph.nodes:
        forward, backward = node.meta.get("messages", ((), ()))
        times = 1 if node in once else local.plan.microbatches
        twice = (*forward, *_gathered_for(node)) if is_replayed(node) else ()
        for message in (*forward, *backward, *_gathered_again(node), *twice):
            key = (message.kind, tuple(names[a] for a in message.axes))
            calls, nbytes = sent.get(key, (0, 0))
            sent[key] = (calls + times, nbytes + times * message.nbytes)
    return sent


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
