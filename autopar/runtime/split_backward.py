"""How does a stage send its gradients back before it computes those of its weights? Backward in two parts.

The zero-bubble schedules (Qi et al. 2023, section 2) need the gradient of a stage's input at once and those of its
weights whenever there is time. In autograd's graph a node lies *on the way* if an input is below it. What is not on
the way hangs below it in *branches*, each connected in itself, with weights at their ends. Nodes on the way that lead
into a branch, and results of the stage that are part of it, are its *heads*. The first part runs every node on the way;
of a branch with one head it only notes the gradients that the head receives, and the second part runs the head again,
now towards the branch, which is where weights' gradients cost.

A branch with several heads (a weight used twice in the stage) belongs to the first part, since from one head autograd
would run through the next one. No node is run twice but heads, each time for other operands, so no gradient is added
or sent twice. The second part goes the way that the first one came, the same on all ranks, and lets go of what is above
the head that it is at.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, Node, get_gradient_edge

from autopar.runtime.private_torch import NODES_HOLD, gradients_from


def backward_input(
    ends: Sequence[Tensor], gradients: Sequence[Tensor], inputs: Sequence[Tensor], weights: Sequence[Tensor]
) -> tuple[tuple[Tensor | None, ...], Callable[[], None]]:
    """Gradients of `inputs` now; the call that adds those of `weights` to their `grad`, for later.

    ends: results with a gradient, of which `gradients` are given. Inputs and weights are leaves.
    """
    roots = [get_gradient_edge(end).node for end in ends]
    order = _in_order(roots)
    way = _above(order, [get_gradient_edge(x).node for x in inputs])
    heads = _heads(order, way, roots)
    now: list[Tensor] = []
    later: dict[Node, list[Tensor]] = {}
    for weight in weights:
        found = heads.get(get_gradient_edge(weight).node, ())
        if len(found) == 1:
            later.setdefault(found[0], []).append(weight)
        elif found:
            now.append(weight)
    received: dict[Node, tuple[Tensor | None, ...]] = {}
    handles = [node.register_prehook(_noting(received, node)) for node in later if node in way]
    try:
        given = _gradients(ends, [*inputs, *now], gradients, retain_graph=True)
    finally:
        for handle in handles:
            handle.remove()
    for weight, gradient in zip(now, given[len(inputs) :], strict=True):
        _add(weight, gradient)
    for root, end, gradient in zip(roots, ends, gradients, strict=True):
        if root not in way:
            noted = list(received.get(root, ()))
            number = get_gradient_edge(end).output_nr
            noted += [None] * (number + 1 - len(noted))
            noted[number] = gradient if (before := noted[number]) is None else before + gradient
            received[root] = tuple(noted)

    order_met = [*(root for root in reversed(roots) if root not in way), *(node for node in received if node in way)]
    heads_left = [(node, received[node], later[node]) for node in reversed(order_met) if node in later]
    whole = [] if NODES_HOLD else list(ends)

    def backward_weights() -> None:
        while heads_left:
            _back_from(*heads_left.pop())
        whole.clear()

    return given[: len(inputs)], backward_weights


def _back_from(head: Node, noted: Sequence[Tensor | None], weights: Sequence[Tensor]) -> None:
    """Add the gradients of a branch's weights."""
    known = [(GradientEdge(head, i), gradient) for i, gradient in enumerate(noted) if gradient is not None]
    found = _gradients([edge for edge, _ in known], weights, [gradient for _, gradient in known])
    for weight, gradient in zip(weights, found, strict=True):
        _add(weight, gradient)


def _gradients(
    roots: Sequence[Any], targets: Sequence[Tensor], gradients: Sequence[Tensor], *, retain_graph: bool = False
) -> tuple[Tensor | None, ...]:
    if not roots or not targets:
        return (None,) * len(targets)
    return gradients_from(roots, gradients, targets, retain_graph=retain_graph)


def _noting(received: dict[Node, tuple[Tensor | None, ...]], node: Node) -> Callable[[Any], None]:
    def note(gradients: tuple[Tensor | None, ...]) -> None:
        received[node] = tuple(gradients)

    return note


def _add(weight: Tensor, gradient: Tensor | None) -> None:
    """As autograd adds to a leaf: a first gradient that lies otherwise than the leaf is copied."""
    if gradient is not None and weight.grad is None:
        weight.grad = gradient if gradient.stride() == weight.stride() else torch.empty_like(weight).copy_(gradient)
    elif gradient is not None and weight.grad is not None:
        weight.grad.add_(gradient)


def _in_order(roots: Sequence[Node]) -> list[Node]:
    """All nodes below `roots`, each before those below it."""
    seen: set[Node] = set()
    done: list[Node] = []
    stack: list[tuple[Node, bool]] = [(root, False) for root in reversed(roots)]
    while stack:
        node, left = stack.pop()
        if left:
            done.append(node)
        elif node not in seen:
            seen.add(node)
            stack.append((node, True))
            stack += [(below, False) for below, _ in reversed(node.next_functions) if below is not None]
    return done[::-1]


def _above(order: Sequence[Node], leaves: Sequence[Node]) -> set[Node]:
    """Nodes with one of `leaves` below them, these included."""
    found = set(leaves)
    for node in reversed(order):
        if any(below in found for below, _ in node.next_functions):
            found.add(node)
    return found


def _heads(order: Sequence[Node], way: set[Node], roots: Sequence[Node]) -> dict[Node, tuple[Node, ...]]:
    """For each node off the way the heads of its branch, in the order of the graph."""
    branch: dict[Node, Node] = {}

    def of(node: Node) -> Node:
        while branch.setdefault(node, node) is not node:
            branch[node] = node = branch[branch[node]]
        return node

    into: list[tuple[Node, Node]] = [(root, root) for root in roots if root not in way]
    for node in order:
        for below, _ in node.next_functions:
            if below is not None and below not in way:
                if node in way:
                    into.append((node, below))
                else:
                    branch[of(node)] = of(below)
    heads: dict[Node, dict[Node, None]] = {}
    for head, below in into:
        heads.setdefault(of(below), {})[head] = None
    return {node: tuple(heads[of(node)]) for node in branch}
