"""In which order does each rank of a pipeline run its actions? An order is a value: ours below, or one from elsewhere.

An action is a micro-batch's pass through a stage: forward `F`, whole backward `B`, or backward in two parts, `I` of the
input and `W` of the weights, of which only `I` makes the stage before wait. Stages are counted along the model, `v` a
rank: stage s is on rank s mod p ("loop") or, for ZBV, back and forth ("v").

    gpipe                        all forwards, then all backwards: Huang et al. 2019, "GPipe"
    1f1b                         one forward, one backward: Narayanan et al. 2019, "PipeDream"; 2021, SC, section 2.2
    interleaved-1f1b             v stages a rank: SC 2021, section 2.2.2
    zb-h1, zb-h2                 backward in two: Qi et al. 2023, "Zero Bubble Pipeline Parallelism", sections 2.1, 2.2
    interleaved-zero-bubble      zb-h1 with v stages a rank
    zbv                          two stages a rank, V-shaped: Qi et al. 2024, "Pipeline Parallelism with Controllable
                                 Memory", section 4

`parse_order` reads the text of torch.distributed.pipelining: a line a rank, actions `2F0` separated by commas.
"""

import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from functools import lru_cache
from operator import itemgetter
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from autopar.errors import ArgumentError
from autopar.values.choices import check_choice

Ints = NDArray[np.int64]
KINDS = ("F", "B", "I", "W")
NUMBERS = {kind: number for number, kind in enumerate(KINDS)}
_ACTION = re.compile(r"(\d+)([FBIW])(\d+)")


class Action(NamedTuple):
    """Micro-batch `microbatch` passes stage `stage`; `kind` is one of `KINDS`."""

    stage: int
    kind: str
    microbatch: int

    def __str__(self) -> str:
        return f"{self.stage}{self.kind}{self.microbatch}"


def _kind(action: Action) -> int:
    return NUMBERS.get(action.kind, -1)


class ActionTable(NamedTuple):
    """All actions of an order, rank after rank: [action]; `kind` is a number of `KINDS`."""

    rank: Ints
    stage: Ints
    kind: Ints
    microbatch: Ints


@dataclass(frozen=True, slots=True, kw_only=True)
class PipelineOrder:
    """The actions of each rank in the order in which it runs them, also as a `table`."""

    ranks: tuple[tuple[Action, ...], ...]
    num_stages: int
    num_microbatches: int
    table: ActionTable = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        """Each micro-batch passes each stage once forward and once backward, all of a stage on one rank."""
        sizes = [len(actions) for actions in self.ranks]
        numbers = (
            np.fromiter((number(action) for actions in self.ranks for action in actions), np.int64, sum(sizes))
            for number in (itemgetter(0), _kind, itemgetter(2))
        )
        object.__setattr__(self, "table", ActionTable(np.repeat(np.arange(len(sizes)), sizes), *numbers))
        if not self._is_complete():
            self._say_what_is_wrong()

    def _is_complete(self) -> bool:
        rank, stage, kind, microbatch = self.table
        shape = (len(KINDS), self.num_stages, self.num_microbatches)
        if len(stage) < 2 * self.num_stages * self.num_microbatches or min(shape) < 1:
            return not len(stage) and min(shape) == 0
        for numbers, count in zip((kind, stage, microbatch), shape, strict=True):
            if numbers.min() < 0 or numbers.max() >= count:
                return False
        seen = np.zeros(shape, dtype=np.bool_)
        seen[kind, stage, microbatch] = True
        owner = np.zeros(self.num_stages, dtype=np.int64)
        owner[stage] = rank
        forward, whole, inputs, weights = seen
        once = int(seen.sum()) == len(stage) and bool((owner[stage] == rank).all())
        return once and bool((forward & (whole ^ inputs) & (inputs == weights)).all())

    def _say_what_is_wrong(self) -> None:
        owner: dict[int, int] = {}
        seen: set[Action] = set()
        for rank, actions in enumerate(self.ranks):
            for action in actions:
                if action in seen:
                    raise ArgumentError(f"pipeline order: action {action} appears twice; it must appear once")
                if owner.setdefault(action.stage, rank) != rank:
                    raise ArgumentError(
                        f"pipeline order: stage {action.stage} is on ranks {owner[action.stage]} and {rank}; "
                        "a stage must be on one rank"
                    )
                seen.add(action)
        passes = [(s, m) for s in range(self.num_stages) for m in range(self.num_microbatches)]
        for stage, microbatch in passes:
            kinds = "".join(kind for kind in KINDS if Action(stage, kind, microbatch) in seen)
            if kinds not in ("FB", "FIW"):
                raise ArgumentError(
                    f"pipeline order: micro-batch {microbatch} passes stage {stage} by {kinds or 'no action'}; "
                    "it must pass by F and B, or by F, I and W"
                )
        if extra := seen - {Action(s, kind, m) for s, m in passes for kind in KINDS}:
            raise ArgumentError(
                f"pipeline order: action {min(extra)} is outside {self.num_stages} stages and "
                f"{self.num_microbatches} micro-batches"
            )


@lru_cache(maxsize=2)  # a long one is a million actions
def make_order(name: str, num_ranks: int, num_microbatches: int, stages_per_rank: int = 1) -> PipelineOrder:
    """The order of the named schedule.

    Raises:
        ArgumentError: if there is no such schedule, or it does not run with these numbers.
    """
    check_choice("pipeline schedule", name, SCHEDULES)
    if min(num_ranks, num_microbatches, stages_per_rank) < 1:
        raise ArgumentError(
            f"schedule {name}: {num_ranks} ranks, {num_microbatches} micro-batches and {stages_per_rank} stages a "
            "rank must each be at least 1"
        )
    schedule = SCHEDULES[name]
    if schedule.stages_per_rank not in (None, stages_per_rank):
        raise ArgumentError(
            f"schedule {name} has {schedule.stages_per_rank} stages a rank, not {stages_per_rank}; change that number, "
            "or choose interleaved-1f1b"
        )
    ranks = [tuple(schedule.actions(rank, num_ranks, num_microbatches, stages_per_rank)) for rank in range(num_ranks)]
    return PipelineOrder(ranks=tuple(ranks), num_stages=num_ranks * stages_per_rank, num_microbatches=num_microbatches)


def parse_order(lines: Iterable[str]) -> PipelineOrder:
    """The order that torch.distributed.pipelining wrote: a line a rank; empty fields, when a rank idles, left out.

    Raises:
        ArgumentError: if an action is none of `F`, `B`, `I`, `W`, or the order is not complete.
    """
    ranks = []
    for rank, line in enumerate(lines):
        actions = []
        for text in filter(None, (text.strip() for text in line.split(","))):
            match = _ACTION.fullmatch(text)
            if match is None:
                raise ArgumentError(
                    f"pipeline order, rank {rank}: {text!r} is no action; write stage, kind (F, B, I or W) and "
                    "micro-batch, as in 2F0"
                )
            actions.append(Action(int(match[1]), match[2], int(match[3])))
        ranks.append(tuple(actions))
    every = [action for actions in ranks for action in actions]
    return PipelineOrder(
        ranks=tuple(ranks),
        num_stages=max((a.stage for a in every), default=-1) + 1,
        num_microbatches=max((a.microbatch for a in every), default=-1) + 1,
    )


class _Schedule(NamedTuple):
    actions: Callable[[int, int, int, int], Iterator[Action]]
    stages_per_rank: int | None


def _gpipe(rank: int, p: int, m: int, v: int) -> Iterator[Action]:
    yield from (Action(rank, "F", k) for k in range(m))
    yield from (Action(rank, "B", k) for k in range(m))


def _loop(
    rank: int, p: int, m: int, v: int, warmup: int, late_weights: int | None, each: int | None = None
) -> Iterator[Action]:
    """`warmup` forwards, then forward and backward in turn, then the backwards left; v stages in rounds of `each` (p).

    `late_weights`: backwards are split, and the weights' part lags by that many; None: backwards are whole.
    """
    each = p if each is None else each
    if v > 1 and m % each:
        raise ArgumentError(
            f"an interleaved schedule needs micro-batches in rounds of {p} ranks: {m} is no multiple of {p}; use "
            f"{max(m - m % p, p)} or {m - m % p + p} micro-batches"
        )
    warmup = min(warmup, m * v)

    def nth(step: int, *, forward: bool) -> tuple[int, int]:
        """Stage and micro-batch of a rank's `step`-th forward or backward."""
        rounds, place = divmod(step, each)
        chunk = rounds % v if forward else v - 1 - rounds % v
        return chunk * p + rank, rounds // v * each + place

    def backward(step: int) -> Iterator[Action]:
        stage, microbatch = nth(step, forward=False)
        if late_weights is None:
            yield Action(stage, "B", microbatch)
            return
        yield Action(stage, "I", microbatch)
        if step >= late_weights:
            stage, microbatch = nth(step - late_weights, forward=False)
            yield Action(stage, "W", microbatch)

    for step in range(m * v + warmup):
        if step < m * v:
            stage, microbatch = nth(step, forward=True)
            yield Action(stage, "F", microbatch)
        if step >= warmup:
            yield from backward(step - warmup)
    if late_weights is not None:
        for step in range(max(m * v - late_weights, 0), m * v):
            stage, microbatch = nth(step, forward=False)
            yield Action(stage, "W", microbatch)


def _one_forward_one_backward(rank: int, p: int, m: int, v: int) -> Iterator[Action]:
    return _loop(rank, p, m, v, p - 1 - rank, None)


def _interleaved(rank: int, p: int, m: int, v: int) -> Iterator[Action]:
    """As torch runs it: micro-batches in rounds of about p, all equal."""
    each, rest = divmod(m, max(1, m // p))
    if rest:
        low = m // p * p
        raise ArgumentError(
            f"interleaved-1f1b on {p} ranks runs micro-batches in {m // p} equal rounds, which {m} are not; use {low} "
            f"or {low + p} micro-batches"
        )
    return _loop(rank, p, m, v, (v - 1) * each + 2 * (p - 1 - rank), None, each)


def _zero_bubble_h1(rank: int, p: int, m: int, v: int) -> Iterator[Action]:
    return _loop(rank, p, m, v, (v - 1) * p + p - 1 - rank, rank)


def _zero_bubble_h2(rank: int, p: int, m: int, v: int) -> Iterator[Action]:
    return _loop(rank, p, m, v, 2 * (p - 1 - rank), 2 * rank)


def _zbv(rank: int, p: int, m: int, v: int) -> Iterator[Action]:
    """Written for at least 2p - 1 micro-batches; with fewer, those that do not exist are left out."""
    down, up = rank, 2 * p - 1 - rank  # the rank's two stages
    count = dict.fromkeys(((stage, kind) for stage in (down, up) for kind in "FIW"), 0)
    enough = max(2 * p - 1, m)

    def do(stage: int, kinds: str) -> Iterator[Action]:
        for kind in kinds:
            microbatch = count[stage, kind]
            count[stage, kind] += 1
            if microbatch < m:
                yield Action(stage, kind, microbatch)

    for _ in range(2 * (p - rank) - 1):
        yield from do(down, "F")
    for _ in range(rank):
        yield from do(up, "F")
        yield from do(down, "F")
    for _ in range(p - rank):
        yield from do(up, "FIW")
    while count[up, "F"] < count[down, "F"] or count[down, "F"] < enough:
        yield from do(down, "FIW" if count[down, "F"] < enough else "IW")
        yield from do(up, "FIW")
    for _ in range(rank):
        yield from do(down, "I")
        yield from do(up, "I")
    for _ in range(p - rank):
        yield from do(down, "IW")
    for stage in (up, down):
        while count[stage, "W"] < enough:
            yield from do(stage, "W")


SCHEDULES = {
    "gpipe": _Schedule(_gpipe, 1),
    "1f1b": _Schedule(_one_forward_one_backward, 1),
    "interleaved-1f1b": _Schedule(_interleaved, None),
    "zb-h1": _Schedule(_zero_bubble_h1, 1),
    "zb-h2": _Schedule(_zero_bubble_h2, 1),
    "interleaved-zero-bubble": _Schedule(_zero_bubble_h1, None),
    "zbv": _Schedule(_zbv, 2),
}
