"""Which copies that are gathered again, each for one backward pass, are there at once? All, unless it reads in turn."""

from collections.abc import Callable, Iterator, Mapping, Sequence

from autopar.lower.calls import LoweredCall
from autopar.lower.recomputation import Value
from autopar.values.placement import Layout


def in_turn(
    calls: Sequence[LoweredCall],
    backward: Mapping[int, int],
    gathered: Mapping[int, list[Value]],
    root: Callable[[str, Layout], Value],
    nbytes: Callable[[Value], int],
    kept: Mapping[str, int],
) -> Iterator[tuple[int, Value, int]]:
    """Moments, copies and their bytes. Of a call that reads in turn (`Rule.in_turn`) it is the largest alone; what
    comes when all that the call keeps is gone counts as so much smaller. Replays read all at once.

    calls: of the forward pass. backward: moments of their backward passes, by number. gathered: copies by moment.
    root: the value whose storage an operand is. nbytes: of a copy. kept: bytes that autograd keeps inside ops.
    """
    at = {backward[number]: call for number, call in enumerate(calls)}
    for moment, values in gathered.items():
        call = at.get(moment)
        if call is None or call.op is None or not call.op.rule.in_turn:
            yield from ((moment, value, nbytes(value)) for value in values)
            continue
        later = kept[call.op.name]
        first = {root(*operand) for i, operand in enumerate(call.operands) if i in call.op.rule.in_turn}
        held = {value: nbytes(value) - (0 if value in first else later) for value in values}
        largest = max(held, key=held.__getitem__)
        yield moment, largest, max(held[largest], 0)
