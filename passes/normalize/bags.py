"""Which ids are in a bag? Rows of a matrix are, where offsets only count them; other bags keep their offsets.

Of `embedding_bag`'s four results a model reads the first.
"""

from typing import Any

from autopar.ops.bags import MODES, bags
from autopar.passes.graph_tools import aten, calls, insert, results, substitute
from autopar.values.graph import CapturedModel, shape_of

ARGUMENTS = (
    *("table", "ids", "offsets", "scale_grad_by_freq", "mode", "sparse", "weights", "include_last_offset"),
    "padding_idx",
)
DEFAULTS = (None, None, None, False, 0, False, None, False, -1)


def normalize_bags(captured: CapturedModel) -> CapturedModel:
    """Calls of which only the bags are read, and whose gradient does not count ids, as calls of `ops.bags`."""
    for node in calls(captured.graph, aten.embedding_bag.padding_idx, aten.embedding_bag.default):
        given: dict[str, Any] = dict(zip(ARGUMENTS, (*node.args, *DEFAULTS[len(node.args) :]), strict=True))
        found = results(node)
        if set(found) != {0} or set(node.users) != {found[0]} or given["scale_grad_by_freq"] or given["sparse"]:
            continue
        ids, offsets, weights = given["ids"], given["offsets"], given["weights"]
        num_bags = shape_of(found[0])[0]
        each = _size(ids, offsets, num_bags)
        if each is not None:
            ids, offsets = insert(node, aten.reshape.default, (ids, [num_bags, each])), None
            if weights is not None:
                weights = insert(node, aten.reshape.default, (weights, [num_bags, each]))
        padding = given["padding_idx"]
        options = {
            "mode": MODES[given["mode"]],
            "padding_idx": -1 if padding is None else padding % shape_of(given["table"])[0],
            "include_last_offset": offsets is not None and bool(given["include_last_offset"]),
        }
        substitute(found[0], insert(found[0], bags, (given["table"], ids, offsets, weights), options))
    return captured


def _size(ids: Any, offsets: Any, num_bags: int) -> int | None:
    """Of how many ids every bag is, if the offsets say that all are of one size."""
    count = shape_of(ids)[0]
    if not num_bags or not count or count % num_bags:
        return None
    return count // num_bags if _counts(offsets, count, count // num_bags) else None


def _counts(offsets: Any, count: int, step: int) -> bool:
    """Whether these are `arange(0, count, step)`."""
    return offsets.target is aten.arange.start_step and tuple(offsets.args) == (0, count, step)
