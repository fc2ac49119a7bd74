"""Which gradients does a backward pass hold, and when? A walk over its calls, as autograd makes, adds and lets go.

A gradient lives from the backward of a value's last reader to that of its producer. Sums hand theirs on, so that one
storage may be the gradient of several values.
"""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from autopar.lower.calls import LoweredCall
from autopar.lower.holding import Holding
from autopar.lower.program import Op
from autopar.lower.recomputation import Value
from autopar.lower.redistributions import Redistributed
from autopar.rules.spare import short_name
from autopar.rules.views import PERMUTING, RESHAPING, expanded_gradient, is_view, permuted_gradient
from autopar.values.placement import Layout, Partial, Shard
from autopar.values.redistribution import Step

Wanted = Callable[[Value], bool]
"""Which values a pass gives gradients to."""

Noted = Collection[int] | None
"""Calls for which the first of two parts notes what comes to them; None of a pass in one."""


@dataclass(slots=True, eq=False)
class HeldGradient:
    """A gradient's storage: since when, and how many values' gradients it is. copied: it is a leaf's own copy of one
    that lies or is held elsewhere, which only a first gradient is: another is added to what the leaf has. width: how
    many times as wide it was summed, and is, as it was made."""

    name: str
    nbytes: int
    since: int
    last: int
    owners: int = 1
    copied: bool = False
    width: int = 1


OUTSIDE = 2
"""Owners of a gradient that comes from outside, where somebody holds it."""


ATTENTION = "scaled_dot_product_attention"
"""Gives queries, keys and values gradients that lie with the dims of heads and positions swapped."""


class Released(NamedTuple):
    """A gradient that was let go, live from moment `first` to moment `last`."""

    name: str
    nbytes: int
    first: int
    last: int


@dataclass(frozen=True, slots=True, kw_only=True)
class BackwardPass:
    """What of a step runs backward, and of which sizes.

    moments: of each call's backward pass, by its number. begins: calls that gradients come to from outside. nbytes: of
    a value. received: bytes of the gradient that a step gives. skipped: tensors whose redistributions have no part in
    the pass. wanted: values that get gradients. buckets: of a call that travels in one the number of the first, whose
    backward comes last: until then what arrived for them waits. outside: leaves that get a gradient from outside before
    all else. copies: leaves copy one from outside that is all they get, and one that others hold too, as `grad` does,
    or are handed both. A permuted one is copied too, as it comes. noted: of the first of two parts, which gives all
    back when it ends, the calls for which it notes what comes to them; nothing is added to that in place. width: how
    many times as wide a parameter's gradients are summed in buckets as they are made.
    """

    calls: Sequence[LoweredCall]
    moments: Mapping[int, int]
    begins: frozenset[int]
    nbytes: Callable[[Value], int]
    received: Callable[[Step, str], int]
    skipped: Callable[[str], bool]
    wanted: Wanted
    buckets: Mapping[int, int]
    outside: Sequence[Value]
    copies: bool
    noted: Noted
    width: Callable[[str], int]


class Gradients:
    """Gradients of a backward pass, or of the part of it that gives gradients to `wanted` values.

    summed: bytes of sums that were written anew, by moment. came: when a value's gradient did last. released: what the
    pass let go; held: what it leaves, on leaves; arrived: what came to each call; passed: what came to leaves from
    outside; lent: leaves that a call hands one from outside as it is; turned: values whose gradient is permuted.
    """

    def __init__(self, backward: BackwardPass) -> None:
        calls, moments, skipped, copies, noted = (
            backward.calls,
            backward.moments,
            backward.skipped,
            backward.copies,
            backward.noted,
        )
        self.nbytes, self.received, self.copies, self.width = backward.nbytes, backward.received, copies, backward.width
        self.buckets, self.noted = backward.buckets, noted or ()
        self.waiting: dict[int, list[tuple[LoweredCall, list[HeldGradient | None]]]] = {}
        self.permuted: dict[Value | None, Tensor] = {}  # those from outside, as they lie
        self.expanded: dict[Value | None, Tensor] = {}
        self.turned: set[Value | None] = set()
        self.summed: dict[int, int] = {}
        self.came: dict[Value, int] = {}
        self.made = {v for c in calls if c.step is None or not skipped(c.operands[0][0]) for v in c.results}
        self.released: list[Released] = []
        self.held: dict[Value, HeldGradient] = {}
        self.arrived: dict[int, HeldGradient] = {}
        self.lent: set[Value] = set()
        begin = min(moments.values(), default=0)
        given = {value: HeldGradient("", 0, begin, begin, owners=OUTSIDE) for value in backward.outside}
        self.passed = tuple(given.values())
        self.held.update(given)
        for number in reversed(range(len(calls))):
            call = calls[number]
            if call.step is None or not skipped(call.operands[0][0]):
                self._back(number, call, moments[number], number in backward.begins, backward.wanted)
        for value, gradient in given.items():
            if copies and self.held[value] is gradient:
                self.held[value] = HeldGradient(value[0], self.nbytes(value), begin, begin, copied=True)
        end = max(moments.values(), default=0)
        strided = [v for v, g in self.held.items() if (not g.name and self._is_permuted(v)) or v in self.expanded]
        for value in strided:  # what a leaf has lies as the leaf does
            since = self.came.get(value, end) if noted is None else end
            self.held[value] = HeldGradient(value[0], self.nbytes(value), since, end, copied=True)

    def _back(self, number: int, call: LoweredCall, now: int, begins: bool, wanted: Wanted) -> None:
        """What one call makes, hands on, adds up and lets go."""
        given = [self.held.pop(value, None) for value in call.results if value is not None]
        arrived = next((g for g in given if g is not None), None)
        if arrived is None and begins:
            arrived = HeldGradient("", 0, now, now, owners=OUTSIDE)
        if arrived is not None:
            self.arrived[number] = arrived
            arrived.owners += number in self.noted
        if number in self.buckets:
            self._together(self.buckets[number], number, call, given, now)
            return
        if arrived is not None:
            for slot, (value, differentiable) in enumerate(zip(call.operands, call.gradients, strict=True)):
                if differentiable and wanted(value):
                    self._arrive(value, self._given(call, slot, value, arrived, now), now)
        for gradient in given:
            if gradient is not None:
                self._release(gradient, now)

    def _together(self, first: int, number: int, call: LoweredCall, given: list[HeldGradient | None], now: int) -> None:
        """A call of a bucket; with the last of them all are reduced."""
        self.waiting.setdefault(first, []).append((call, given))
        if number != first:
            return
        calls = self.waiting.pop(first)
        for own, arrived in calls:
            if any(own.gradients) and any(gradient is not None for gradient in arrived):
                value, width = own.operands[0], self.width(own.operands[0][0])
                self._arrive(value, HeldGradient(value[0], width * self.nbytes(value), now, now, width=width), now)
        for _, arrived in calls:
            for gradient in arrived:
                if gradient is not None:
                    self._release(gradient, now)

    def _given(self, call: LoweredCall, slot: int, value: Value, arrived: HeldGradient, now: int) -> HeldGradient:
        """The gradient that a call's backward gives one operand; a leaf copies what is not its own, views excepted."""
        if call.op is not None:
            name = short_name(call.op.node)
            (result, *_) = call.results
            if name == "mean" and result is not None and _is_split_sum(value[1], result[1]):
                self.expanded[value] = expanded_gradient(call.op.node)
                return HeldGradient(value[0], self.nbytes(result), now, now)
            is_turned = call.results[0] in self.turned
            if (name in PERMUTING and not is_turned) or (name in RESHAPING and is_turned) or name == ATTENTION:
                self.turned.add(value)
            handed = slot in call.op.handed and not self._is_strided(call, value, arrived)
            handed = handed and not self._is_spread(call.op, call.results[0], value)
            is_lent = value not in self.made and call.op.rule.alias is None and arrived.owners > 1
            is_copied = is_lent and self.copies
            if handed and is_lent and not arrived.name:
                self.lent.add(value)
        else:
            handed, is_copied = call.step is not None and not call.step.backward, False
            if call.results[0] in self.permuted:
                self.permuted[value] = self.permuted[call.results[0]]
            if handed and call.results[0] in self.expanded:
                self.expanded[value] = self.expanded[call.results[0]]
        if handed and not is_copied:
            arrived.owners += 1
            return arrived
        nbytes = self.nbytes(value) if call.step is None else self.received(call.step, value[0])
        return HeldGradient(value[0], nbytes, now, now, copied=handed)

    def _is_strided(self, call: LoweredCall, value: Value, arrived: HeldGradient) -> bool:
        """Whether a reshape copies a gradient: one from outside, which is contiguous, after a permutation."""
        assert call.op is not None
        node, result = call.op.node, call.results[0]
        name = short_name(node)
        if arrived.name:
            return False
        if name in PERMUTING:
            before = self.permuted.get(result, torch.empty(call.op.result_shapes[0], device="meta"))
            self.permuted[value] = permuted_gradient(node, before)
        elif name in RESHAPING and result in self.permuted:
            if not is_view(self.permuted[result], call.op.operand_shapes[0]):
                return True
            self.permuted[value] = self.permuted[result].view(call.op.operand_shapes[0])
        return False

    def _is_permuted(self, value: Value) -> bool:
        return value in self.permuted and not self.permuted[value].is_contiguous()

    def _is_spread(self, op: Op, result: Value | None, value: Value) -> bool:
        """Whether a reshape copies a gradient because its elements are not all stored: that of a sum is expanded."""
        if short_name(op.node) == "sum":
            self.expanded[value] = expanded_gradient(op.node)
        elif result in self.expanded and short_name(op.node) in RESHAPING:
            if not is_view(self.expanded[result], op.operand_shapes[0]):
                return True
            self.expanded[value] = self.expanded[result].view(op.operand_shapes[0])
        return False

    def _arrive(self, value: Value, new: HeldGradient, now: int) -> None:
        """Autograd adds in place where nothing else holds the sum so far, and else writes a new one."""
        old = self.held.get(value)
        self.came[value] = now
        if old is None:
            self.held[value] = new
        elif old.owners == 1 and value not in self.expanded:
            old.last = now
            self._release(new, now)
        else:
            self.held[value] = HeldGradient(value[0], self.nbytes(value), now, now)
            self.expanded.pop(value, None)
            self.summed[now] = self.summed.get(now, 0) + self.nbytes(value)
            self._release(old, now)
            self._release(new, now)

    def _release(self, gradient: HeldGradient, now: int) -> None:
        gradient.owners -= 1
        if not gradient.owners:
            gradient.last = now
            self.released.append(Released(gradient.name, gradient.nbytes, gradient.since, now))


def _is_split_sum(operand: Layout, result: Layout) -> bool:
    """Whether ranks sum parts of what is reduced; a mean then is a sum divided by the whole count (`ops.mean`)."""
    pairs = zip(operand.axes, result.axes, strict=True)
    return any(isinstance(before, Shard) and isinstance(after, Partial) for before, after in pairs)


def gradient_holdings(
    found: Gradients, redistributed: Mapping[str, Redistributed], end: int, received: Sequence[str], several: bool
) -> Iterator[Holding]:
    """What of a pass that ends before moment `end` is live for a while, or is added to what there is.

    several: there are other passes; received: what a stage sends gradients back of.
    """
    for released in found.released:
        yield Holding("working", *released, "gradient")
    shared = set[int]()
    for (name, _), gradient in found.held.items():
        if redistributed[name].tensor.kind != "parameter":
            if id(gradient) not in shared:
                yield Holding("working", name, gradient.nbytes, gradient.since, end - 1, "given")
            shared.add(id(gradient))
        elif several:
            role = "copy" if gradient.copied and not redistributed[name].tensor.is_cast else "leaf"
            yield Holding("working", name, gradient.nbytes, gradient.since, gradient.last, role)
    # what is sent back is made contiguous, one after another, when all else of the pass is gone
    own = [(value, g) for value, g in found.held.items() if value[0] in received and not g.copied]
    turned = [g.nbytes for value, g in own if value in found.turned]
    gone = sum(released.nbytes for released in found.released if released.last == end - 1)
    yield Holding("working", "sent back", max(max(turned, default=0) - gone, 0), end - 1, end - 1, "given")
