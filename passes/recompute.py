"""Which calls does a local graph run again in its backward pass, and how are they written?

A plan names ops whose results and internals are not kept (`Plan.recompute`), and layouts of tensors that travel again
instead of being kept (`Plan.remade`). Everything else that backward needs is kept, so any set is legal: what a replay
reads is kept, or replayed before it, down to parameters and inputs, which are always there. What needs no gradient
(masks, positions, labels) is kept whatever the plan says.

Only what backward needs is replayed: what some op saves, inside or as operand or result, and what such a replay reads.
Nodes that will be replayed are marked with `meta["again"]`, and so are views of their results, which may be copies.
"""

import operator
from collections.abc import Callable, Iterable
from functools import lru_cache
from typing import Any

from torch import fx

from autopar.errors import PlanMismatchError
from autopar.ops.recompute import again
from autopar.passes.graph_tools import is_own
from autopar.rules.registry import rule_of
from autopar.rules.rule import Rule
from autopar.values.graph import CapturedModel, operands, requires_grad
from autopar.values.plan import Plan


def check_recompute(captured: CapturedModel, plan: Plan) -> None:
    """Raises PlanMismatchError if the plan recomputes what is no op of the model, or remakes what no op made."""
    ops = {n.name for n in captured.graph.nodes if n.op == "call_function" and n.target is not operator.getitem}
    made = {n.name for n in captured.graph.nodes if n.op == "call_function"}
    for kind, names, known in (("recomputes", plan.recompute, ops), ("remakes copies of", plan.remade, made)):
        if unknown := sorted(set(names) - known):
            raise PlanMismatchError(
                f"the plan {kind} {', '.join(unknown[:3])}, which {captured.name} does not compute; plan again"
            )


def mark_again(graph: fx.Graph, plan: Plan) -> None:
    """Set `meta["again"]` on the calls of a local graph that the plan has run again and that backward waits for."""
    if not plan.recompute and not plan.remade:
        return
    waited = replayed(graph, plan)
    for node in graph.nodes:
        if node.op == "call_function" and node.target is not operator.getitem:
            made = storage_of(node)
            node.meta["again"] = made in waited and (made is node or "step" in node.meta or not _is_pure_view(node))


PURE_VIEWS = frozenset({"view", "permute", "transpose", "t", "unsqueeze", "squeeze", "expand", "slice", "select",
                        "split", "split_with_sizes", "chunk", "unbind", "detach", "alias"})  # fmt: skip
"""Views that never copy; a reshape may."""


def _is_pure_view(node: fx.Node) -> bool:
    return str(node.target).removeprefix("aten.").split(".")[0] in PURE_VIEWS


def _is_chosen(node: fx.Node, plan: Plan) -> bool:
    origin = node.meta.get("origin")
    if origin is None or node.op != "call_function" or not requires_grad(node):
        return False
    if "step" in node.meta:
        return node.meta["step"].target in plan.remade.get(origin.name, ())
    return node.name in plan.recompute


def again_graph(graph: fx.Graph) -> fx.Graph:
    """A copy in which marked calls are made by `autopar.ops.recompute.again`."""
    copy = fx.Graph()
    nodes: dict[fx.Node, fx.Node] = {}
    copy.output(copy.graph_copy(graph, nodes))
    for old, new in nodes.items():
        if old.meta.get("again"):
            new.target = wrapped(old.target)
    return copy


@lru_cache(maxsize=4096)
def wrapped(function: Callable[..., Any]) -> Callable[..., Any]:
    """`function` called through `again`."""

    def replayed(*args: Any, **kwargs: Any) -> Any:
        return again(function, *args, **kwargs)

    replayed.__name__ = f"again_{getattr(function, '__name__', 'call').replace('.', '_')}"
    return replayed


def replayed(graph: fx.Graph, plan: Plan) -> set[fx.Node]:
    """Nodes chosen by the plan that some backward pass waits for."""
    nodes = list(graph.nodes)
    reached = backward_nodes(nodes)
    needed: set[fx.Node] = set()
    out = set()
    for node in reversed(nodes):
        if node.op != "call_function" or node.target is operator.getitem:
            continue
        chosen = _is_chosen(node, plan)
        if node in reached and (rule := _rule(node)) is not None:
            sources = operands(node)
            needed.update(storage_of(sources[i]) for i in rule.saves)
            if chosen and (rule.saves_results or rule.saves_nbytes):
                needed.add(node)
        if chosen and node in needed and storage_of(node) is node:
            needed.update(storage_of(source) for source in operands(node))
            out.add(node)
    return out


def is_replayed(node: fx.Node) -> bool:
    """Whether a node of a marked graph is run again; views are free and only follow."""
    return bool(node.meta.get("again")) and storage_of(node) is node


def _rule(node: fx.Node) -> Rule | None:
    """The rule of an op of the model, None for what the passes inserted."""
    origin = node.meta.get("origin")
    if origin is None or origin.op != "call_function" or "step" in node.meta or not is_own(node):
        return None
    return rule_of(origin)


def storage_of(node: fx.Node) -> fx.Node:
    """The node whose storage a node's value is part of; tuples are one."""
    while node.op == "call_function":
        if node.target is operator.getitem or ("step" in node.meta and not node.meta["step"].forward):
            node = operands(node)[0]
        elif (rule := _rule(node)) is not None and rule.alias is not None:
            node = operands(node)[rule.alias]
        else:
            break
    return node


def backward_nodes(nodes: Iterable[fx.Node]) -> set[fx.Node]:
    """Nodes that the backward pass from the loss (or from what a stage sends on) runs through."""
    reached: set[fx.Node] = set()
    for node in reversed(list(nodes)):
        if node.op == "output":
            reached.update(operands(node)[: node.meta["ends"]])
        elif node in reached:
            reached.update(s for s in operands(node) if requires_grad(s))
    return {node for node in reached if requires_grad(node)}
