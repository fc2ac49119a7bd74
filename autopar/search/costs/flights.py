"""What does a collective hold beside its operand and its result while it is on its way? Spans of bytes.

`autopar.ops.collectives` starts it at one moment and takes its result at another; between them it holds what the
backend reads, and chunks that are put in order before or after. The result is counted apart, from the start on.

    reduce-scatter   what is sent, in order: a copy, or (along the first dim) the operand itself, for as long
    all-gather       the part that is sent; at the end what came, out of order along a dim but the first
    all-to-all       what is sent, at the end what came, beside the result
"""

from collections.abc import Iterator

from autopar.placement import Shard
from autopar.redistribution import Step

Span = tuple[int, int, int]
"""Bytes, first and last moment."""


def flight(kind: str, step: Step, source: int, target: int, start: int, end: int) -> Iterator[Span]:
    """Spans of a step's collective `kind` from `source` to `target` bytes, between two moments."""
    in_order = [p.dim for p in (step.before, step.after) if isinstance(p, Shard)][:1] == [0]
    if kind == "reduce_scatter":
        yield source, start + in_order, end
    elif kind == "all_gather":
        yield source, start + 1, end
        if not in_order:
            yield target, end, end
    elif kind == "all_to_all":
        yield source, start, end
