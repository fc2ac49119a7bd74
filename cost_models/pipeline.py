"""How long does a step of a pipeline take? Its order of actions as tasks of the timeline.

One rank a stage stands for all that do the same (data and tensor parallel ranks are alike), so a step on thousands of
ranks is as many tasks as its stages have. An action is a chain of segments, each on one of the rank's lanes: compute,
or a link level on which a collective holds the computation up. Beside the lanes each rank has two links to its
neighbours, one for activations and one for their gradients. Work that overlaps backward or forward of one micro-batch
(gradients reduced, parameters gathered) waits for one segment, or is waited for by one.

    makespan of uniform stages, f + b seconds a micro-batch and rank (backward b = i + w), no time on links:
    gpipe, 1f1b            (m + p - 1) (f + b)
    interleaved-1f1b       (m + (p - 1) / v) (f + b)                       m a multiple of p
    zb-h1                  m (f + b) + (p - 1) (f + i - w)                 w <= i, f;  m >= p
    zb-h2                  m (f + b) + (p - 1) (f + i - 2w)                of each rank, from its first action on;
                                                                           f = i = w, m >= 2p - 1: no bubble
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from autopar.cost_models.schedules import KINDS, Action, PipelineOrder
from autopar.cost_models.timeline import Tasks, Timeline
from autopar.errors import ArgumentError

COMPUTE = 0
SEND_FORWARD, SEND_BACKWARD = "send activations", "send gradients"

Ints = npt.NDArray[np.int64]


class Segment(NamedTuple):
    """A part of an action: `seconds` of lane `lane`; lane `COMPUTE` is the device itself. `name`: for a trace."""

    lane: int
    seconds: float
    name: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Woven:
    """Segments of an action that do not simply follow each other: of an edge (a, b) b waits for a.

    The first segment is where the action begins, the last where it ends and the rank's next action may begin. `early`
    are segments that wait not for that but for segment `release` of the rank's action before.
    """

    segments: tuple[Segment, ...]
    edges: tuple[tuple[int, int], ...]
    early: tuple[int, ...] = ()
    release: int = 0


Passage = tuple[Segment, ...] | Woven
"""What an action is made of; a tuple is a chain."""


class Beside(NamedTuple):
    """Work of a stage on `lane`, once a step, beside the actions.

    It waits for segment `segment` of the stage's last backward or, if `gather`, the stage's first forward waits with
    that segment for it.
    """

    segment: int
    lane: int
    seconds: float
    gather: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class StageWork:
    """What one stage does: a passage for each kind of action that the order has; what runs beside; an end.

    `first`, `last`: of the stage's first forward and of its last whole backward or part of the weights, where these are
    others. `after`: a chain once a step, when all actions and all that runs beside them have ended: the optimizer.
    """

    actions: Mapping[str, Passage]
    send_forward: float = 0.0
    send_backward: float = 0.0
    beside: tuple[Beside, ...] = ()
    after: tuple[Segment, ...] = ()
    first: Passage | None = None
    last: Passage | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Pipeline:
    """The tasks of a step, the rank of each, and the number of its action, counted through the ranks' orders, or -1."""

    tasks: Tasks
    order: PipelineOrder
    lanes: tuple[str, ...]
    rank_of_task: Ints
    action_of_task: Ints
    describe: Callable[[], list[str]]

    def streams(self) -> list[tuple[str, str]]:
        """(process, thread) of each stream, for a trace."""
        return [(f"rank {rank}", lane) for rank in range(len(self.order.ranks)) for lane in self.lanes]

    def longest_span(self, timeline: Timeline) -> float:
        """The longest time that a rank takes from its first to its last task: what a step adds when steps follow each
        other without a barrier."""
        spans = []
        for rank in range(len(self.order.ranks)):
            mine = self.rank_of_task == rank
            spans.append(timeline.finish[mine].max() - timeline.start[mine].min())
        return float(max(spans))


def uniform_work(order: PipelineOrder, seconds: Mapping[str, float], send: float = 0.0) -> list[StageWork]:
    """Every stage takes `seconds[kind]` an action and `send` a message."""
    actions = {kind: (Segment(COMPUTE, value),) for kind, value in seconds.items()}
    return [StageWork(actions=actions, send_forward=send, send_backward=send) for _ in range(order.num_stages)]


def make_pipeline(
    order: PipelineOrder, stages: Sequence[StageWork], lanes: tuple[str, ...] = ("compute",), *, barrier: bool = False
) -> Pipeline:
    """A step as tasks; `lanes` names those of a rank, the device first. barrier: what comes after waits for all ranks.

    Raises:
        ArgumentError: if a stage's work is missing or names a lane that does not exist.
    """
    _check(order, stages, lanes)
    return _Builder(order, stages, (*lanes, SEND_FORWARD, SEND_BACKWARD)).build(barrier)


class _Builder:
    def __init__(self, order: PipelineOrder, stages: Sequence[StageWork], lanes: tuple[str, ...]) -> None:
        self.order, self.stages, self.lanes = order, stages, lanes
        self.rank, self.stage, self.kind, self.microbatch = order.table
        self.stream: list[npt.NDArray[np.int64]] = []
        self.seconds: list[npt.NDArray[np.float64]] = []
        self.edges: list[tuple[Ints, Ints]] = []
        self.size = 0
        self.extra: list[tuple[int, str]] = []  # names of the tasks after those of actions
        self.passages = [_woven(s.actions.get(kind, ())) for s in stages for kind in KINDS]
        self.passage = self.stage * len(KINDS) + self.kind  # of each action
        for number, work in enumerate(stages):
            for passage, kinds, which in ((work.first, "F", 0), (work.last, "BW", -1)):
                if passage is not None:
                    wanted = [KINDS.index(kind) for kind in kinds]
                    mine = np.flatnonzero((self.stage == number) & np.isin(self.kind, wanted))
                    self.passage[mine[which]] = len(self.passages)
                    self.passages.append(_woven(passage))

    def build(self, barrier: bool) -> Pipeline:
        self._actions()
        self._neighbours()
        self._beside()
        self._after(barrier)
        stream = np.concatenate(self.stream) if self.stream else np.zeros(0, dtype=np.int64)
        actions = np.repeat(np.arange(len(self.count)), self.count)
        tasks = Tasks(
            num_streams=len(self.order.ranks) * len(self.lanes),
            stream=stream,
            seconds=np.concatenate(self.seconds) if self.seconds else np.zeros(0),
            priority=np.zeros(len(stream)),
            before=np.concatenate([before for before, _ in self.edges]),
            after=np.concatenate([after for _, after in self.edges]),
        )
        return Pipeline(
            tasks=tasks,
            order=self.order,
            lanes=self.lanes,
            rank_of_task=stream // len(self.lanes),
            action_of_task=np.append(actions, np.full(len(stream) - len(actions), -1, dtype=np.int64)),
            describe=self._names,
        )

    def _add(self, rank: Ints, lane: Ints, seconds: npt.NDArray[np.float64]) -> Ints:
        self.stream.append(rank * len(self.lanes) + lane)
        self.seconds.append(seconds)
        self.size += len(seconds)
        return np.arange(self.size - len(seconds), self.size)

    def _actions(self) -> None:
        """The tasks of each action, and the chain of a rank's actions in its order."""
        length = np.array([len(p.segments) for p in self.passages], dtype=np.int64)
        segments = [segment for p in self.passages for segment in p.segments]
        lane = np.array([segment.lane for segment in segments], dtype=np.int64)
        seconds = np.array([segment.seconds for segment in segments], dtype=np.float64)
        self.count = count = length[self.passage]
        self.first = np.cumsum(count) - count
        self.last = self.first + count - 1
        source = _ranges((np.cumsum(length) - length)[self.passage], count)
        self._add(np.repeat(self.rank, count), lane[source], seconds[source])
        self._within([p.edges for p in self.passages], np.arange(len(self.passage)), self.first, self.first)
        same = np.flatnonzero(self.rank[1:] == self.rank[:-1])
        self.edges.append((self.last[same], self.first[same + 1]))
        early = [tuple((0, k) for k in p.early) for p in self.passages]
        release = np.array([p.release for p in self.passages], dtype=np.int64)
        self._within(early, same + 1, self.first[same] + release[self.passage[same]], self.first[same + 1])
        shape = (len(KINDS), self.order.num_stages, self.order.num_microbatches)
        self.at = np.full(shape, -1, dtype=np.int64)  # position of each action
        self.at[self.kind, self.stage, self.microbatch] = np.arange(len(self.stage))

    def _within(self, edges: list[tuple[tuple[int, int], ...]], actions: Ints, before: Ints, after: Ints) -> None:
        """The edges of each action's passage, counted from task `before` and task `after` of the action."""
        flat = np.array([edge for own in edges for edge in own], dtype=np.int64).reshape(-1, 2)
        length = np.array([len(own) for own in edges], dtype=np.int64)
        count = length[self.passage[actions]]
        source = _ranges((np.cumsum(length) - length)[self.passage[actions]], count)
        self.edges.append((np.repeat(before, count) + flat[source, 0], np.repeat(after, count) + flat[source, 1]))

    def _neighbours(self) -> None:
        """Forward waits for the stage before, backward for the stage after and its own forward, `W` for `I`."""
        forward, whole, inputs, weights = self.at
        backward = np.where(whole >= 0, whole, inputs)
        split = weights >= 0
        self.edges.append((self.last[inputs[split]], self.first[weights[split]]))
        self.edges.append((self.last[forward.ravel()], self.first[backward.ravel()]))
        owner = np.zeros(self.order.num_stages, dtype=np.int64)
        owner[self.stage] = self.rank
        for s in range(self.order.num_stages - 1):
            self._send(forward[s], forward[s + 1], owner[s], owner[s + 1], self.stages[s].send_forward, -2)
            self._send(backward[s + 1], backward[s], owner[s + 1], owner[s], self.stages[s + 1].send_backward, -1)

    def _send(self, sent: Ints, received: Ints, source: int, target: int, seconds: float, lane: int) -> None:
        """Messages of one stage to the next, a micro-batch each; none within a rank, or where they take no time."""
        if source == target or seconds == 0:
            self.edges.append((self.last[sent], self.first[received]))
            return
        size = len(sent)
        message = self._add(np.full(size, source), np.full(size, len(self.lanes) + lane), np.full(size, seconds))
        self.extra += [(int(task), f"send {k}") for k, task in enumerate(message)]
        self.edges.append((self.last[sent], message))
        self.edges.append((message, self.first[received]))

    def _beside(self) -> None:
        for stage, work in enumerate(self.stages):
            mine = np.flatnonzero(self.stage == stage)
            rank = int(self.rank[mine[0]])
            finals = [position for position in mine if self.kind[position] in (KINDS.index("B"), KINDS.index("W"))]
            for beside in work.beside:
                task = self._one(rank, beside.lane, beside.seconds, "gather" if beside.gather else "reduce")
                if beside.gather:
                    self._edge(task, int(self.first[mine[0]]) + beside.segment)
                else:
                    self._edge(int(self.first[finals[-1]]) + beside.segment, task)

    def _after(self, barrier: bool) -> None:
        """When a rank's last action and all that nothing waits for have ended; with a barrier, those of all ranks."""
        waited = np.zeros(self.size, dtype=np.bool_)
        for before, _ in self.edges:
            waited[before] = True
        loose = np.flatnonzero(~waited)
        rank_of = np.concatenate(self.stream)[loose] // len(self.lanes)
        ends = [
            np.append(loose[rank_of == rank], self.last[np.flatnonzero(self.rank == rank)[-1]])
            for rank in range(len(self.order.ranks))
        ]
        for rank, own in enumerate(ends):
            befores = np.concatenate(ends) if barrier else own
            for segment in (k for s in np.unique(self.stage[self.rank == rank]) for k in self.stages[s].after):
                task = self._one(rank, segment.lane, segment.seconds, segment.name or "update")
                self.edges.append((befores, np.full(len(befores), task)))
                befores = np.array([task], dtype=np.int64)

    def _one(self, rank: int, lane: int, seconds: float, name: str) -> int:
        task = int(self._add(np.array([rank]), np.array([lane]), np.array([seconds]))[0])
        self.extra.append((task, name))
        return task

    def _edge(self, before: int, after: int) -> None:
        self.edges.append((np.array([before], dtype=np.int64), np.array([after], dtype=np.int64)))

    def _names(self) -> list[str]:
        actions: Iterator[Action] = (action for actions in self.order.ranks for action in actions)
        parts = [[segment.name and f" {segment.name}" for segment in passage.segments] for passage in self.passages]
        names = [f"{a}{part}" for a, passage in zip(actions, self.passage, strict=True) for part in parts[passage]]
        return names + [name for _, name in sorted(self.extra)]


def _woven(passage: Passage) -> Woven:
    if isinstance(passage, Woven):
        return passage
    return Woven(segments=passage, edges=tuple((k, k + 1) for k in range(len(passage) - 1)))


def _ranges(starts: Ints, counts: Ints) -> Ints:
    """start, start + 1, ... of each, so many as it counts, one after another."""
    return np.repeat(starts - (np.cumsum(counts) - counts), counts) + np.arange(int(counts.sum()))


def _check(order: PipelineOrder, stages: Sequence[StageWork], lanes: tuple[str, ...]) -> None:
    if len(stages) != order.num_stages:
        raise ArgumentError(f"the order has {order.num_stages} stages, but work is given for {len(stages)}")
    for place in np.unique(order.table.stage * len(KINDS) + order.table.kind).tolist():
        stage, kind = divmod(place, len(KINDS))
        if not stages[stage].actions.get(KINDS[kind]):
            raise ArgumentError(f"stage {stage}: the order runs its {KINDS[kind]}, but its work has none")
    for stage, work in enumerate(stages):
        passages = [_woven(p) for p in (*work.actions.values(), work.first, work.last) if p is not None]
        used = [segment.lane for p in passages for segment in p.segments] + [segment.lane for segment in work.after]
        for lane in [*used, *(beside.lane for beside in work.beside)]:
            if not 0 <= lane < len(lanes):
                raise ArgumentError(f"stage {stage}: lane {lane} does not exist; there are {', '.join(lanes)}")
        finals = [len(_woven(work.actions[kind]).segments) for kind in ("B", "W") if kind in work.actions]
        for beside in work.beside:
            limit = len(_woven(work.actions["F"]).segments) if beside.gather else max(finals)
            if not 0 <= beside.segment < limit:
                raise ArgumentError(f"stage {stage}: segment {beside.segment} does not exist; there are {limit}")
