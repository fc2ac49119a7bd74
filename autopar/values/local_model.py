"""The graph that every rank runs, with the model and the plan it is of."""

from dataclasses import dataclass

from torch import fx

from autopar.values.graph import CapturedModel
from autopar.values.stage_plan import StagePlan


@dataclass(frozen=True, kw_only=True)
class LocalModel:
    """The graph that every rank runs: a captured graph under a plan (`lower.emit`).

    Placeholders have the captured graph's names and order, and local shapes (`meta["val"]`). The output's
    `meta["ends"]` is how many of its values are the captured graph's `ends`. Every other node also carries

        node.meta["layouts"]   tuple of Layout, one a result
        node.meta["global"]    tuple of global shapes, one a result
        node.meta["messages"]  (forward, backward) tuples of `redistribution.Message` that it sends, if any
    """

    captured: CapturedModel
    plan: StagePlan
    graph: fx.Graph
