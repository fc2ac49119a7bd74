"""Which way do the parameters of one message take over several axes? The cheapest for all of them together.

A gather or reduction over two axes a and b can go
    one axis after the other    in either order where both are legal; of the second what the first has left
    flattened                   one collective of all ranks of both axes
    in levels                   gradients of whole copies alone: a reduce-scatter over the fast axis, an all-reduce of
                                the part over the slow one, an all-gather over the fast one
so that three start-ups of few ranks stand against one of many, and bytes over slow links against bytes over fast ones.
The search chose for each parameter alone, whose message is small and mostly start-up; a bucket's message is not.
"""

import itertools
from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache

from autopar.lower.redistributions import Redistributed, sent_by
from autopar.search.costs.pricing import Pricer
from autopar.values.mesh import Mesh
from autopar.values.placement import Layout
from autopar.values.redistribution import Step, flattened_step, is_possible, levels_of, single_step
from autopar.values.stage_plan import StagePlan, Way

Word = tuple[tuple[str, str, tuple[int, ...], tuple[int, ...]], ...]
"""What each step of a way does: forward, backward, over which axes, which of them inside."""
Ways = Mapping[Word, Way]


def ways_of(one: Redistributed, plan: StagePlan, *, free: bool) -> Ways:
    """Ways that change each axis once, and the one that the plan takes, first; only this if not `free`."""
    wanted = {layout for _, _, layout in one.wanted if layout != one.source}
    if len(wanted) != 1:
        return {}
    (target,) = wanted
    taken = one.path(target)
    path = (one.source, *(step.target for step in taken))
    found: dict[Word, Way] = {word_of(taken): Way(path=path)}
    if free:
        for word, way in ways_between(one.source, target, one.tensor.shape, plan.mesh).items():
            found.setdefault(word, way)
    return found


@lru_cache(maxsize=4096)
def ways_between(source: Layout, target: Layout, shape: tuple[int, ...], mesh: Mesh) -> Ways:
    """Ways that change each axis once, for a tensor of that shape."""
    found: dict[Word, Way] = {}
    for steps in _walks(source, target, shape, mesh):
        way = Way(path=(source, *(step.target for step in steps)))
        for own in (way, *_in_levels(way, steps, mesh)):
            found.setdefault(word_of(own.steps(mesh)), own)
    return found


def word_of(steps: Sequence[Step]) -> Word:
    return tuple((step.forward, step.backward, step.axes, step.inside) for step in steps)


def _walks(source: Layout, target: Layout, shape: tuple[int, ...], mesh: Mesh) -> Iterator[tuple[Step, ...]]:
    """Sequences of steps that bring one axis, or several alike, to where it ends."""
    if source == target:
        yield ()
    changed = [a for a in range(mesh.num_axes) if source.axes[a] != target.axes[a]]
    for count in range(1, len(changed) + 1):
        for axes in itertools.combinations(changed, count):
            if len({(source.axes[a], target.axes[a]) for a in axes}) > 1:
                continue
            after = target.axes[axes[0]]
            step = single_step(source, axes[0], after) if count == 1 else flattened_step(source, axes, after)
            if step is not None and is_possible(step, shape, mesh):
                for rest in _walks(step.target, target, shape, mesh):
                    yield (step, *rest)


def _in_levels(way: Way, steps: Sequence[Step], mesh: Mesh) -> Iterator[Way]:
    for step in steps:
        for own in levels_of(step, mesh):
            yield Way(path=way.path, inside=tuple(mesh.names[a] for a in own.inside))


def seconds_of(
    word: Word, redistributed: Sequence[Redistributed], plan: StagePlan, pricer: Pricer, *, free: bool = True
) -> float:
    """Seconds of a step that parameters take in one message for each collective of the word."""
    total = 0.0
    ways = [ways_of(one, plan, free=free)[word].steps(plan.mesh) for one in redistributed]
    for alike in zip(*ways, strict=True):
        for backward in (0, 1):
            sent = [
                sent_by(step, j.tensor, plan)[backward]
                for step, j in zip(alike, redistributed, strict=True)
                if not backward or j.in_backward
            ]
            again = plan.lifetimes.get(redistributed[0].tensor.name) == "use" and alike[0].forward == "all_gather"
            for number, parts in enumerate(zip(*sent, strict=True)):
                first, nbytes = parts[0], sum(message.nbytes for message in parts)
                seconds = pricer.message(first.kind, first.axes, nbytes, True)[0]
                seconds += 0.0 if number else pricer.rates.copied_seconds(nbytes)  # into the first of a row, or out
                total += seconds * (2 if again and not backward else 1)
    return total
