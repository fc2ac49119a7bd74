"""What will a step send? Calls and payload bytes per (collective, axes), counted before anything runs.

Redistributions and bodies carry their messages, sent for every micro-batch, those of parameters that are prepared once
a step only once. A parameter of lifetime `use` is gathered again once for every consumer that saves it for backward,
views in between included, and for every call replayed in backward that reads it; in a bucket, with it and once.
"""

from collections.abc import Container, Iterable
from dataclasses import replace

from torch import fx

from autopar.graph import LocalModel, operands, requires_grad
from autopar.passes.fuse_collectives import Group, fused_groups
from autopar.passes.graph_tools import is_own
from autopar.passes.hoist_parameters import hoist_parameters, hoisted_nodes
from autopar.passes.recompute import backward_nodes, is_replayed
from autopar.passes.weave_copies import weave_copies
from autopar.redistribution import Message
from autopar.rules.registry import rule_of

Sent = dict[tuple[str, tuple[str, ...]], tuple[int, int]]
"""(collective, axis names) -> (calls, payload bytes) of one step on one rank."""


def predicted_messages(local: LocalModel, *, splits: bool = False) -> Sent:
    """Everything that one step, forward and backward of all its micro-batches, sends on each rank.

    splits: backward in two parts, both of which read what some calls keep.
    """
    return _Count(weave_copies(local) if local.plan.copies > 1 else local, splits).sent


class _Count:
    """Adds up. once: calls that run once a step; group: the calls that go with each in one message."""

    def __init__(self, local: LocalModel, splits: bool) -> None:
        self.sent: Sent = {}
        self.mesh, self.parts = local.plan.mesh, local.plan.microbatches
        self.once = hoisted_nodes(local.graph, local.plan.lifetimes)
        groups = fused_groups(local.graph, local.captured.parameters, local.plan)
        groups = [group for group in groups if not splits or group[0] in self.once]
        self.group = {node: group for group in groups for node in group}
        self.waited: set[fx.Node] = set()
        for group in groups:
            for direction in (0, 1):
                self._together(group, direction)
        twice = heads(local) if splits else frozenset[str]()
        for node in local.graph.nodes:
            forward, backward = node.meta.get("messages", ((), ()))
            times = 1 if node in self.once else self.parts
            for message in () if node in self.group else (*forward, *backward):
                self._add(message, times)
            for gather in _gathered_again(node, self.group):
                self._again(gather, times * (2 if node.name in twice else 1))
            if is_replayed(node):
                for message in forward:
                    self._add(message, times)
                for operand in operands(node):
                    for gather in regather_chain(operand, self.group):
                        self._again(gather, times)

    def _add(self, message: Message, times: int) -> None:
        key = (message.kind, tuple(self.mesh.names[a] for a in message.axes))
        calls, nbytes = self.sent.get(key, (0, 0))
        self.sent[key] = (calls + times, nbytes + times * message.nbytes)

    def _together(self, group: Group, direction: int) -> None:
        """What each call of a group would send, together, forward (0) or backward (1)."""
        found = [sent for node in group if (sent := node.meta["messages"][direction])]
        for alike in zip(*found, strict=True):
            whole = replace(alike[0], nbytes=sum(message.nbytes for message in alike))
            self._add(whole, 1 if group[0] in self.once else self.parts)

    def _again(self, gather: fx.Node, times: int) -> None:
        """A gather in backward: alone for each that waits for it, or once with its group, and what that reads."""
        group = self.group.get(gather)
        if group is None:
            for message in gather.meta["messages"][0]:
                self._add(message, times)
        elif group[0] not in self.waited:
            self.waited.add(group[0])
            self._together(group, 0)
            for node in group:
                for source in regather_chain(operands(node)[0], self.group):
                    self._again(source, self.parts)


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


def _gathered_again(consumer: fx.Node, alone: Container[fx.Node]) -> Iterable[fx.Node]:
    """Gathers in the backward pass of `consumer`, for the operands that autograd saves as a recipe."""
    origin = consumer.meta.get("origin")
    if consumer.op != "call_function" or "step" in consumer.meta or origin is None or not requires_grad(consumer):
        return
    saves = rule_of(origin).saves
    for index, operand in enumerate(operands(consumer)):
        if index in saves:
            yield from regather_chain(operand, alone)


def regather_chain(node: fx.Node, alone: Container[fx.Node] = ()) -> Iterable[fx.Node]:
    """The gathers that remake `node`, back to what is kept or one of `alone`; nothing if it is kept itself."""
    while node.op == "call_function":
        if node.kwargs.get("regather"):
            yield node
            if node in alone:
                return
        elif "step" in node.meta:
            if node.meta["step"].forward:
                return
        else:
            origin: fx.Node = node.meta["origin"]
            if not is_own(node) or (alias := rule_of(origin).alias) is None:
                return
            node = operands(node)[alias]
            continue
        node = operands(node)[0]
