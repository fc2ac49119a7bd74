"""Where do a plan's seconds and bytes go? The sums of `evaluate`, item by item, equal blocks on one line.

Seconds are of a step; bytes are those that a rank holds at the peak, the first moment that has most of them.
"""

from collections.abc import Iterable, Mapping
from functools import cache, partial

import numpy as np

from autopar.lower.calls import LoweredCall
from autopar.lower.live import Live
from autopar.lower.lowered_step import lower
from autopar.lower.program import Program
from autopar.search.costs.evaluate import charges_of
from autopar.search.costs.folding import pattern
from autopar.search.costs.pricing import Pricer
from autopar.values.explanation import Item, Ledger
from autopar.values.graph import target_name
from autopar.values.placement import Layout
from autopar.values.stage_plan import StagePlan


def ledger(plan: StagePlan, program: Program, pricer: Pricer, sent: Mapping[str, Layout] | None = None) -> Ledger:
    """The items of a plan; `sent`: of a stage, the layouts in which the next takes what it sends."""
    step = lower(plan, program, pricer.target, sent or {})
    charges, live = charges_of(step, pricer), Live(step)
    peak = int(np.argmax(np.sum(list(live.bytes.values()), axis=0)))
    names, words = plan.mesh.names, cache(partial(describe, step.program))
    seconds = _items((c.kind, words(c.name), c.name, c.seconds, tuple(names[a] for a in c.axes)) for c in charges)
    at_peak = (h for h in live.holdings if h.first <= peak <= h.last)
    nbytes = _items((h.kind, words(h.name), h.name, h.nbytes, ()) for h in at_peak)
    levels: dict[str, float] = {level.name: 0.0 for level in pricer.cluster.levels}
    for charge in charges:
        if charge.seconds and charge.axes:
            levels[pricer.slowest_level(charge.axes)] += charge.seconds
    return Ledger(seconds=seconds, nbytes=nbytes, peak=moment_text(live, peak), levels=levels)


def describe(program: Program, name: str) -> str:
    """An op, or the tensor that it made, as `model.layers.*.mlp.up_proj: linear`; a parameter by its own name."""
    tensor = program.tensors.get(name)
    if tensor is not None and tensor.producer is None:
        own = next((p.names[0] for p in program.captured.parameters if p.placeholder == name), name)
        return pattern(own)
    if tensor is not None:
        assert tensor.producer is not None
        op = program.ops[tensor.producer]
    else:
        op = next(op for op in program.ops if op.name == name)
    called = target_name(op.node.target).removeprefix("aten.").split(".")[0]
    return f"{pattern(op.module)}: {called}" if op.module else called


def _items(rows: Iterable[tuple[str, str, str, float, tuple[str, ...]]]) -> tuple[Item, ...]:
    amounts: dict[tuple[str, str, tuple[str, ...]], float] = {}
    members: dict[tuple[str, str, tuple[str, ...]], set[str]] = {}
    for kind, what, name, amount, over in rows:
        if amount:
            key = (kind, what, over)
            amounts[key] = amounts.get(key, 0.0) + amount
            members.setdefault(key, set()).add(name)
    items = [
        Item(kind=kind, what=what, count=len(members[kind, what, over]), amount=amount, over=over)
        for (kind, what, over), amount in amounts.items()
    ]
    return tuple(sorted(items, key=lambda item: -item.amount))


def moment_text(live: Live, number: int) -> str:
    word, call = _pass(live, number)
    if call is None:
        return "the optimizer's step"
    if call.op is None:
        return f"the {word} of redistributing {call.operands[0][0]}"
    called = target_name(call.op.node.target).removeprefix("aten.").split(".")[0]
    return f"the {word} of {called} in {call.op.module or 'no module'}"


def _pass(live: Live, number: int) -> tuple[str, LoweredCall | None]:
    """`forward`, `backward` or `replay` and its call; None for the optimizer's step."""
    if number < len(live.calls):
        return "forward", live.calls[number]
    for word, moments in (("backward", live.backward), ("replay", live.replay)):
        for call, moment in moments.items():
            if moment == number:
                return word, live.calls[call]
    return "optimizer", None
