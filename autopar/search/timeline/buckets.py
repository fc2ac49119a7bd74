"""Which parameters are gathered, and their gradients reduced, in one message? Borders chosen in the cost model.

Parameters are taken in the order of their first use. Neighbours share a bucket only if they can take the same ways: the
same collectives over the same axes (`search.bucket_ways`), one dtype, both trained or both frozen, one lifetime. Which
of these a bucket takes is decided for all of its bytes. Parameters that share some of their ways share buckets too
where all take fewer seconds together on one of these than each kind on its own: starts are saved.

    kept copies     the merge of MG-WFBP (`cost_models.gradient_exchange.merged_gradients`): gradients are ready when
                    the backward passes of all later ops are over, and a message costs what the cost model says of so
                    many bytes. Each message delays what is computed by its latency, which nothing hides
    gathered for use (ZeRO-3)   those of one block that are used one after the other: a larger bucket would hold more
                    gathered copies at once, which such a parameter is there to avoid

What is gathered for use after the last block, and so needed again at once, is kept until then, as torch's fully_shard
keeps what is in no block; not where the plan would not fit the memory limit then. Where it would not with buckets of
what is gathered for use there are none of these, and where it would not with any there are none.

Gathers in buckets begin one bucket early (`lower.prefetch`) where that takes less time and still fits.

While a bucket of gradients is sent, those it was copied from are held too. Where that raises the plan's peak its
largest buckets are halved, some times, as long as the step takes no longer than `SLACK` for it.
"""

import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from autopar.cost_models.gradient_exchange.merged_gradients import Floats, merge_with_starts
from autopar.lower.lowered_step import lower
from autopar.lower.prefetch import prefetched_buckets
from autopar.lower.program import Program, Tensor, make_program
from autopar.lower.redistributions import Redistributed, redistribute, sent_by
from autopar.search.costs.bucket_ways import Word, seconds_of, ways_of
from autopar.search.costs.evaluate import evaluate_program, evaluate_step, peak_nbytes
from autopar.search.costs.pricing import Pricer, make_pricer
from autopar.search.known.baselines import memory_limit
from autopar.values.blocks import block_of
from autopar.values.cluster import Cluster
from autopar.values.graph import CapturedModel
from autopar.values.lifetimes import ONCE_A_STEP
from autopar.values.placement import is_even
from autopar.values.redistribution import Message
from autopar.values.stage_plan import StagePlan, Way

Buckets = tuple[tuple[str, ...], ...]
HALVINGS, SLACK = 4, 5e-3
"""How often large buckets are halved where they raise the peak, and by which part the step may take longer."""
SIZES = 33
"""How many sizes of a message are priced; any other by a line between two."""


def with_buckets(plan: StagePlan, captured: CapturedModel, cluster: Cluster, *, flatten: bool = True) -> StagePlan:
    """The plan with buckets, priced again. flatten: a bucket may take other ways than the plan's."""
    pricer = make_pricer(mesh=plan.mesh, cluster=cluster, config=plan.config)
    return bucketed(plan, make_program(captured), pricer, flatten=flatten)


def bucketed(
    plan: StagePlan, program: Program, pricer: Pricer, *, flatten: bool = True, peak: float | None = None
) -> StagePlan:
    """`with_buckets` for a program and prices at hand; peak: the plan's without buckets, in bytes, if it is known."""
    limit = memory_limit(pricer.cluster, plan.config)
    kept = {**plan.lifetimes, **dict.fromkeys(used_last(plan, program), "microbatch")}
    plan = replace(plan, buckets=(), ways={}, prefetch=False)
    free = (True, False) if flatten and plan.mesh.size > 1 else (False,)
    every = [*itertools.product(free, (kept, plan.lifetimes) if kept != plan.lifetimes else (kept,), (True,))]
    if "use" in plan.lifetimes.values():
        every += [(own, plan.lifetimes, False) for own in free]
    for own, lifetimes, for_use in every:
        known = peak if lifetimes == plan.lifetimes else None
        found = _smaller(replace(plan, lifetimes=lifetimes), program, pricer, own, limit, for_use, known)
        if found.estimate.peak_nbytes <= limit:
            return _prefetching(found, program, pricer, limit)
    return plan.with_estimate(evaluate_program(plan, program, pricer))


def _prefetching(plan: StagePlan, program: Program, pricer: Pricer, limit: float) -> StagePlan:
    """The plan, its gathers begun early if that is faster and fits."""
    early = replace(plan, prefetch=True)
    step = lower(early, program, pricer.target)
    if len(prefetched_buckets(step)) < 2:
        return plan
    early = early.with_estimate(evaluate_step(step, pricer))
    is_better = early.estimate.step_seconds < plan.estimate.step_seconds and early.estimate.peak_nbytes <= limit
    return early if is_better else plan


def _smaller(
    plan: StagePlan,
    program: Program,
    pricer: Pricer,
    flatten: bool,
    limit: float,
    for_use: bool,
    alone: float | None = None,
) -> StagePlan:
    """The plan with buckets, the large ones halved where they raise its peak, `alone` without any, and that costs no
    time."""
    groups = _groups(plan, program, pricer, flatten, for_use)

    def made(most: float) -> StagePlan:
        found = _in_groups(groups, plan, pricer, flatten, most)
        return found.with_estimate(evaluate_program(found, program, pricer))

    found = [made(math.inf)]
    merged = [names for names in found[0].buckets if len(names) > 1 and plan.lifetimes.get(names[0]) != "use"]
    largest = max((sum(_nbytes(program.tensors[name]) for name in names) for names in merged), default=0.0)
    if alone is None:
        alone = peak_nbytes(plan, program, pricer.target) if merged else math.inf
    for halvings in range(1, HALVINGS + 1) if merged else ():
        if found[-1].estimate.peak_nbytes <= alone:
            break
        found.append(made(largest / 2**halvings))
    fits = [p.estimate for p in found if p.estimate.peak_nbytes <= limit]
    slowest = (1 + SLACK) * min((e.step_seconds for e in fits), default=0.0)
    free = [p for p in found if p.estimate.peak_nbytes <= limit and p.estimate.step_seconds <= slowest]
    return min(free or found, key=lambda p: p.estimate.peak_nbytes)


def used_last(plan: StagePlan, program: Program) -> list[str]:
    """Parameters gathered for use that forward reads after the last block alone: backward asks for these first."""
    last = max((op.position for op in program.ops if block_of(op.module)), default=len(program.ops))
    return [
        name
        for name, lifetime in plan.lifetimes.items()
        if lifetime == "use" and all(position > last for position, _ in program.readers[name])
    ]


def choose_buckets(
    plan: StagePlan,
    program: Program,
    pricer: Pricer,
    *,
    flatten: bool = True,
    most: float = math.inf,
    for_use: bool = True,
) -> StagePlan:
    """The plan, not priced, with buckets, and with the ways of all parameters that take another than its own.

    One of its own keeps a gradient from being waited for where it is sent; of what is gathered for use it does nothing.
    most: bytes of whole tensors in one bucket of gradients, if it is of several. for_use: of what is gathered for use
    too.
    """
    groups = _groups(plan, program, pricer, flatten, for_use)
    return _in_groups(groups, plan, pricer, flatten, most)


def _groups(
    plan: StagePlan, program: Program, pricer: Pricer, flatten: bool, for_use: bool
) -> list[list[Redistributed]]:
    """Parameters that travel together, however large."""
    groups: list[list[Redistributed]] = []
    for redistributed in _united([*_runs(plan, program, pricer, flatten)], plan, pricer, flatten):
        if not _is_used(redistributed, plan):
            groups += _merged(redistributed, plan, program, pricer, flatten)
        elif for_use:
            groups.append(redistributed)
    return groups


def _is_used(group: Sequence[Redistributed], plan: StagePlan) -> bool:
    """Whether they are gathered for use."""
    return plan.lifetimes.get(group[0].tensor.name) == "use"


def _in_groups(
    groups: Iterable[list[Redistributed]], plan: StagePlan, pricer: Pricer, flatten: bool, most: float
) -> StagePlan:
    """The plan with a bucket of each group, or of each part that it is cut into, on the way that suits it best."""
    buckets: list[tuple[str, ...]] = []
    ways: dict[str, Way] = {}
    lifetimes = dict(plan.lifetimes)
    for group in (part for together in groups for part in _cut(together, plan, most)):
        if len(group) > 1 or not _is_used(group, plan):
            buckets.append(tuple(one.tensor.name for one in group))
        word = _best_word(group, plan, pricer, flatten)
        for one in group if word else ():
            own = ways_of(one, plan, free=flatten)
            if word != next(iter(own)):
                ways[one.tensor.name] = own[word]
        if len({lifetimes.get(one.tensor.name) for one in group}) > 1:
            lifetimes.update(dict.fromkeys((one.tensor.name for one in group), "always"))
    return replace(plan, buckets=tuple(buckets), ways=ways, lifetimes=lifetimes)


def _best_word(group: Sequence[Redistributed], plan: StagePlan, pricer: Pricer, flatten: bool) -> Word:
    """What takes the fewest seconds for all of a group, () if they have no choice; the plan's way wins ties."""
    if all(len(ways_of(one, plan, free=flatten)) < 2 for one in group):
        return ()
    return min(_common(group, plan, flatten), key=lambda word: seconds_of(word, group, plan, pricer))


def _common(group: Sequence[Redistributed], plan: StagePlan, flatten: bool) -> list[Word]:
    """Ways that all of a group can take."""
    kinds = {frozenset(ways_of(one, plan, free=flatten)) for one in group}
    lifetimes = {plan.lifetimes.get(one.tensor.name) for one in group}
    words = [word for word in ways_of(group[0], plan, free=flatten) if all(word in kind for kind in kinds)]
    return words if len(lifetimes) == 1 else [word for word in words if all(not forward for forward, *_ in word)]


def _united(
    runs: list[list[Redistributed]], plan: StagePlan, pricer: Pricer, flatten: bool
) -> list[list[Redistributed]]:
    """Runs, together where one way for both takes fewer seconds than the best of each; what saves most first.

    Of lifetimes that differ in nothing but when a copy is gathered, on a way that gathers none. It is counted in turn.
    """
    known: dict[tuple[str, ...], float] = {}

    def least(run: list[Redistributed], heads: list[Redistributed]) -> float:
        """heads: one of each kind, for those of a kind can take the same ways."""
        key = tuple(head.tensor.name for head in heads)
        if key not in known:
            words = _common(heads, plan, flatten)
            known[key] = min((seconds_of(word, run, plan, pricer) for word in words), default=math.inf)
        return known[key]

    def class_of(one: Redistributed) -> object:
        tensor = one.tensor
        lifetime = plan.lifetimes.get(tensor.name, "")
        kept = lifetime != "use" and (plan.microbatches == 1 or lifetime in ONCE_A_STEP)
        even = is_even(tensor.shape, one.source, plan.mesh)
        return (even, tensor.element_size, tensor.requires_grad) if kept else tensor.name

    classes: dict[object, list[tuple[list[Redistributed], list[Redistributed]]]] = {}
    for run in runs:
        classes.setdefault(class_of(run[0]), []).append((run, [run[0]]))
    for made in classes.values():
        best = 1.0
        while best:
            best, pair = 0.0, (0, 0)
            for a, b in itertools.combinations(range(len(made)), 2):
                (run, heads), (other, others) = made[a], made[b]
                if _common([*heads, *others], plan, flatten):
                    saved = least(run, heads) + least(other, others) - least([*run, *other], [*heads, *others])
                    best, pair = max((best, pair), (saved, (a, b)))
            if best:
                (run, heads), (other, others) = made[pair[0]], made.pop(pair[1])
                made[pair[0]] = sorted([*run, *other], key=_first_use), [*heads, *others]
    return [run for made in classes.values() for run, _ in made]


def _runs(plan: StagePlan, program: Program, pricer: Pricer, flatten: bool) -> Iterator[list[Redistributed]]:
    """Parameters that may share a bucket, in the order of their first use."""
    open_runs: dict[object, list[Redistributed]] = {}
    last_block: str | None = None
    moving = [j for j in redistribute(program, plan, pricer.target).values() if j.tensor.kind == "parameter" and j.made]
    for one in sorted(moving, key=_first_use):
        block = block_of(program.ops[max(_first_use(one), 0)].module)
        if block != last_block:
            for key in [key for key in open_runs if "use" in key]:  # type: ignore[operator]
                yield open_runs.pop(key)
        last_block = block
        open_runs.setdefault(_alike(one, plan, flatten), []).append(one)
    yield from open_runs.values()


def _first_use(one: Redistributed) -> int:
    return min(position for position, _, _ in one.wanted)


def _alike(one: Redistributed, plan: StagePlan, flatten: bool) -> tuple[object, ...]:
    tensor = one.tensor
    steps = one.made.values()
    taken = frozenset((step.source == one.source, step.forward, step.backward, step.axes) for step in steps)
    return (
        plan.lifetimes.get(tensor.name, ""),
        frozenset(ways_of(one, plan, free=flatten)) or taken,
        is_even(tensor.shape, one.source, plan.mesh),
        tensor.element_size,
        tensor.requires_grad,
    )


def _merged(
    redistributed: list[Redistributed], plan: StagePlan, program: Program, pricer: Pricer, flatten: bool
) -> list[list[Redistributed]]:
    """MG-WFBP's merge of the gradients, which are ready in the reverse order of use."""
    after = np.zeros(len(program.ops) + 1)
    for op in reversed(program.ops):
        after[op.position] = after[op.position + 1] + pricer.op(op, plan.choices[op.name]).backward
    order = redistributed[::-1]
    ready = np.array([after[max(_first_use(one), 0)] for one in order])
    word = _best_word(redistributed, plan, pricer, flatten)
    sent = [_messages(one, plan, word, flatten) for one in order]
    nbytes = np.array([float(sum(m.nbytes for m in found)) for found in sent])
    together: dict[tuple[str, tuple[int, ...]], int] = {}
    for message in (m for found in sent for m in found):
        kind = message.kind, message.axes
        together[kind] = together.get(kind, 0) + message.nbytes
    if not together:
        return [[one] for one in redistributed]
    price = _prices(together, float(nbytes.sum()), pricer)
    groups = merge_with_starts(ready, nbytes, price.seconds, price.start, price.busy)
    return [order[first : last + 1][::-1] for first, last in groups]


class _Prices(NamedTuple):
    """What `merge_with_starts` asks of messages. Of several collectives in a row only the first runs beside compute."""

    seconds: Callable[[Floats], Floats]
    start: float
    busy: float


def _prices(together: Mapping[tuple[str, tuple[int, ...]], int], nbytes: float, pricer: Pricer) -> _Prices:
    """together: bytes of each collective if all went in one message; nbytes: their sum."""

    def seconds(kind: tuple[str, tuple[int, ...]], part: float) -> float:
        return pricer.message(*kind, max(int(together[kind] * part), 1), True)[0] - pricer.waiting(kind[1])

    first, *later = together
    sizes = np.geomspace(1.0, max(nbytes, 2.0), SIZES)
    known = np.array([seconds(first, size / nbytes) for size in sizes])
    copied = pricer.rates.copied_seconds(together[first])
    start, busy = known[0], copied
    for kind in later:
        least = seconds(kind, 0.0)
        start, busy = start + least, busy + seconds(kind, 1.0) - least
    known += copied * sizes / nbytes
    return _Prices(lambda n: np.interp(n, sizes, known), float(start), float(busy) / nbytes)


def _cut(group: list[Redistributed], plan: StagePlan, most: float) -> Iterator[list[Redistributed]]:
    """Neighbours together that have at most so many bytes, from the last on; what is gathered for use stays whole."""
    if _is_used(group, plan):
        yield group
        return
    part: list[Redistributed] = []
    held = 0.0
    for one in reversed(group):
        if part and held + _nbytes(one.tensor) > most:
            yield part[::-1]
            part, held = [], 0.0
        part.append(one)
        held += _nbytes(one.tensor)
    yield part[::-1]


def _nbytes(tensor: Tensor) -> float:
    return float(tensor.element_size * math.prod(tensor.shape))


def _messages(one: Redistributed, plan: StagePlan, word: Word, flatten: bool) -> list[Message]:
    """What the gradient of a parameter sends, or the parameter itself if it has none."""
    tensor = one.tensor
    steps = ways_of(one, plan, free=flatten)[word].steps(plan.mesh) if word else one.made.values()
    sent = [sent_by(step, tensor, plan) for step in steps]
    return [message for pair in sent for message in pair[tensor.requires_grad]]
