"""How are the calls written that a local graph runs again in its backward pass?

A plan names ops whose results and internals are not kept (`recompute`), and layouts of tensors that travel again
instead of being kept (`remade`). Everything else that backward needs is kept, so any set is legal: what a replay
reads is kept, or replayed before it, down to parameters and inputs, which are always there. What needs no gradient
(masks, positions, labels) is kept whatever the plan says.

What runs again in a plan is found by `lower.recomputation`; its calls carry `meta["again"]`, and so do views of their
results, which may be copies.
"""

import operator
from collections.abc import Callable
from functools import lru_cache
from typing import Any

from torch import fx

from autopar.errors import PlanMismatchError
from autopar.ops.recompute import again
from autopar.values.graph import CapturedModel
from autopar.values.stage_plan import StagePlan


def check_recompute(captured: CapturedModel, plan: StagePlan) -> None:
    """Raises PlanMismatchError if the plan recomputes what is no op of the model, or remakes what no op made."""
    ops = {n.name for n in captured.graph.nodes if n.op == "call_function" and n.target is not operator.getitem}
    made = {n.name for n in captured.graph.nodes if n.op == "call_function"}
    for kind, names, known in (("recomputes", plan.recompute, ops), ("remakes copies of", plan.remade, made)):
        if unknown := sorted(set(names) - known):
            raise PlanMismatchError(
                f"the plan {kind} {', '.join(unknown[:3])}, which {captured.name} does not compute; plan again"
            )


PURE_VIEWS = frozenset({"view", "permute", "transpose", "t", "unsqueeze", "squeeze", "expand", "slice", "select",
                        "split", "split_with_sizes", "chunk", "unbind", "detach", "alias"})  # fmt: skip
"""Views that never copy; a reshape may."""


def is_pure_view(node: fx.Node) -> bool:
    return str(node.target).removeprefix("aten.").split(".")[0] in PURE_VIEWS


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
