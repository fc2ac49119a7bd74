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
    """A part of an action: `seconds` of lane `lane`; lane `COMPUTE` is the device itself."""

    lane: int
    seconds: float


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
    """What one stage does: a chain of segments an action of each kind that the order has; what runs beside; an end.

    `update` seconds on the device once a step, after all actions and all that runs beside them: the optimizer.
    """

    actions: Mapping[str, tuple[Segment, ...]]
    send_forward: float = 0.0
    send_backward: float = 0.0
    beside: tuple[Beside, ...] = ()
    update: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Pipeline:
    """The tasks of a step, and for each rank its first action's first task and its last task of all."""

    tasks: Tasks
    order: PipelineOrder
    lanes: tuple[str, ...]
    rank_of_task: Ints
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


def make_pipeline(order: PipelineOrder, stages: Sequence[StageWork], lanes: tuple[str, ...] = ("compute",)) -> Pipeline:
    """A step as tasks; `lanes` names those of a rank, the device first.

    Raises:
        ArgumentError: if a stage's work is missing or names a lane that does not exist.
    """
    _check(order, stages, lanes)
    return _Builder(order, stages, (*lanes, SEND_FORWARD, SEND_BACKWARD)).build()


class _Builder:
    def __init__(self, order: PipelineOrder, stages: Sequence[StageWork], lanes: tuple[str, ...]) -> None:
        self.order, self.stages, self.lanes = order, stages, lanes
        actions = [(rank, action) for rank, actions in enumerate(order.ranks) for action in actions]
        self.rank = np.array([rank for rank, _ in actions], dtype=np.int64)
        self.stage = np.array([a.stage for _, a in actions], dtype=np.int64)
        self.kind = np.array([KINDS.index(a.kind) for _, a in actions], dtype=np.int64)
        self.microbatch = np.array([a.microbatch for _, a in actions], dtype=np.int64)
        self.stream: list[npt.NDArray[np.int64]] = []
        self.seconds: list[npt.NDArray[np.float64]] = []
        self.edges: list[tuple[Ints, Ints]] = []
        self.size = 0
        self.extra: list[tuple[int, str]] = []  # names of the tasks after those of actions

    def build(self) -> Pipeline:
        self._actions()
        self._neighbours()
        self._beside()
        stream = np.concatenate(self.stream) if self.stream else np.zeros(0, dtype=np.int64)
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
            describe=self._names,
        )

    def _add(self, rank: Ints, lane: Ints, seconds: npt.NDArray[np.float64]) -> Ints:
        self.stream.append(rank * len(self.lanes) + lane)
        self.seconds.append(seconds)
        self.size += len(seconds)
        return np.arange(self.size - len(seconds), self.size)

    def _actions(self) -> None:
        """A chain of tasks an action, and the chain of a rank's actions in its order."""
        chains = [self.stages[s].actions.get(kind, ()) for s in range(len(self.stages)) for kind in KINDS]
        length = np.array([len(chain) for chain in chains], dtype=np.int64)
        start = np.concatenate([[0], np.cumsum(length)[:-1]])
        lane = np.array([segment.lane for chain in chains for segment in chain], dtype=np.int64)
        seconds = np.array([segment.seconds for chain in chains for segment in chain], dtype=np.float64)
        chain = self.stage * len(KINDS) + self.kind
        count = length[chain]
        self.first = np.cumsum(count) - count
        self.last = self.first + count - 1
        within = np.arange(count.sum()) - np.repeat(self.first, count)
        source = np.repeat(start[chain], count) + within
        self.count = count
        task = self._add(np.repeat(self.rank, count), lane[source], seconds[source])
        inner = task[within > 0]
        self.edges.append((inner - 1, inner))
        same = np.flatnonzero(self.rank[1:] == self.rank[:-1])
        self.edges.append((self.last[same], self.first[same + 1]))
        shape = (len(KINDS), self.order.num_stages, self.order.num_microbatches)
        self.at = np.full(shape, -1, dtype=np.int64)  # position of each action
        self.at[self.kind, self.stage, self.microbatch] = np.arange(len(self.stage))

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
        ends: dict[int, list[int]] = {}
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
                ends.setdefault(rank, []).append(task)
        for rank in range(len(self.order.ranks)):
            update = sum(self.stages[s].update for s in set(self.stage[self.rank == rank].tolist()))
            if update:
                task = self._one(rank, COMPUTE, update, "update")
                for before in [int(self.last[np.flatnonzero(self.rank == rank)[-1]]), *ends.get(rank, [])]:
                    self._edge(before, task)

    def _one(self, rank: int, lane: int, seconds: float, name: str) -> int:
        task = int(self._add(np.array([rank]), np.array([lane]), np.array([seconds]))[0])
        self.extra.append((task, name))
        return task

    def _edge(self, before: int, after: int) -> None:
        self.edges.append((np.array([before], dtype=np.int64), np.array([after], dtype=np.int64)))

    def _names(self) -> list[str]:
        actions: Iterator[Action] = (action for actions in self.order.ranks for action in actions)
        names = [str(action) for action, count in zip(actions, self.count, strict=True) for _ in range(count)]
        return names + [name for _, name in sorted(self.extra)]


def _check(order: PipelineOrder, stages: Sequence[StageWork], lanes: tuple[str, ...]) -> None:
    if len(stages) != order.num_stages:
        raise ArgumentError(f"the order has {order.num_stages} stages, but work is given for {len(stages)}")
    for action in (action for actions in order.ranks for action in actions):
        if not stages[action.stage].actions.get(action.kind):
            raise ArgumentError(f"stage {action.stage}: the order runs {action}, but its work has no {action.kind}")
    for stage, work in enumerate(stages):
        used = [segment.lane for chain in work.actions.values() for segment in chain]
        for lane in [*used, *(beside.lane for beside in work.beside)]:
            if not 0 <= lane < len(lanes):
                raise ArgumentError(f"stage {stage}: lane {lane} does not exist; there are {', '.join(lanes)}")
        finals = [len(work.actions[kind]) for kind in ("B", "W") if kind in work.actions]
        for beside in work.beside:
            limit = len(work.actions["F"]) if beside.gather else max(finals)
            if not 0 <= beside.segment < limit:
                raise ArgumentError(f"stage {stage}: segment {beside.segment} does not exist; there are {limit}")
