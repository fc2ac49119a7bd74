"""The event simulation: equal to a naive simulator, bounded by critical path and busiest stream, drawn as a trace."""

from itertools import pairwise

import numpy as np
import pytest

from autopar.cost_models.timeline import TaskList, Tasks, busy_seconds, critical_path_seconds, simulate
from autopar.cost_models.trace import chrome_trace
from autopar.errors import ArgumentError


def naive(tasks: Tasks) -> tuple[np.ndarray, np.ndarray]:
    """The rule of the module's text, moment by moment, every task looked at every time."""
    count = len(tasks)
    needs = [set(tasks.before[tasks.after == k].tolist()) for k in range(count)]
    start, finish = np.full(count, np.nan), np.full(count, np.nan)
    windows = tasks.windows or (0.0,) * tasks.num_streams
    queues: list[list[int]] = [[] for _ in range(tasks.num_streams)]
    ended: set[int] = set()
    since: dict[int, float] = {}
    now = 0.0
    while len(ended) < count:
        for k in range(count):
            if k not in since and needs[k] <= ended:
                since[k] = now
        for s in range(tasks.num_streams):
            while not queues[s] or sum(tasks.seconds[k] for k in queues[s]) < windows[s]:
                waiting = [k for k in since if tasks.stream[k] == s and np.isnan(start[k])]
                if not waiting:
                    break
                chosen = min(waiting, key=lambda k: (tasks.priority[k], since[k], k))
                start[chosen] = finish[queues[s][-1]] if queues[s] else now
                finish[chosen] = start[chosen] + tasks.seconds[chosen]
                queues[s].append(chosen)
        running = [queue[0] for queue in queues if queue]
        now = min(finish[k] for k in running)
        for queue in queues:
            while queue and finish[queue[0]] == now:
                ended.add(queue.pop(0))
    return start, finish


def random_tasks(rng: np.random.Generator, count: int, *, whole: bool = True, windows: bool = False) -> Tasks:
    """Whole seconds make many moments coincide and some tasks take no time."""
    pairs = np.array([(a, b) for b in range(count) for a in range(b)], dtype=np.int64).reshape(-1, 2)
    edges = pairs[rng.random(len(pairs)) < rng.choice([0.05, 0.2])]
    shuffled = rng.permutation(count)
    streams = int(rng.integers(1, 5))
    return Tasks(
        num_streams=streams,
        stream=rng.integers(0, streams, count),
        seconds=rng.integers(0, 4, count).astype(np.float64) if whole else rng.random(count),
        priority=rng.integers(0, 3, count).astype(np.float64),
        before=shuffled[edges[:, 0]],
        after=shuffled[edges[:, 1]],
        windows=tuple(rng.integers(0, 6, streams).tolist()) if windows else (),
    )


@pytest.mark.parametrize("windows", [False, True])
@pytest.mark.parametrize("seed", range(60))
def test_it_equals_the_naive_simulator(seed: int, windows: bool) -> None:
    tasks = random_tasks(np.random.default_rng(seed), 1 + seed % 30, whole=seed % 2 == 0, windows=windows)
    timeline = simulate(tasks)
    start, finish = naive(tasks)
    np.testing.assert_array_equal(timeline.start, start)
    np.testing.assert_array_equal(timeline.finish, finish)


@pytest.mark.parametrize("seed", range(20))
def test_no_step_is_shorter_than_its_critical_path_or_its_busiest_stream(seed: int) -> None:
    tasks = random_tasks(np.random.default_rng(1000 + seed), 80, whole=False)
    timeline = simulate(tasks)
    longest, busiest = critical_path_seconds(tasks), busy_seconds(tasks).max()
    assert timeline.makespan >= longest - 1e-12
    assert timeline.makespan >= busiest - 1e-12
    assert timeline.makespan <= tasks.seconds.sum() + 1e-12, "some stream always runs"
    alone = Tasks(
        num_streams=len(tasks),
        stream=np.arange(len(tasks)),
        seconds=tasks.seconds,
        priority=tasks.priority,
        before=tasks.before,
        after=tasks.after,
    )
    assert simulate(alone).makespan == pytest.approx(longest)
    for s in range(tasks.num_streams):
        mine = np.flatnonzero(tasks.stream == s)
        mine = mine[np.argsort(timeline.start[mine], kind="stable")]
        assert (timeline.start[mine][1:] >= timeline.finish[mine][:-1]).all()
    assert (timeline.start[tasks.after] >= timeline.finish[tasks.before]).all()


def test_priority_overtakes_in_the_queue_and_not_on_the_link() -> None:
    build = TaskList(num_streams=2)
    running = build.add(1, 4.0)
    fast = build.add(0, 1.0)
    queued = build.add(1, 3.0, after=[fast], priority=1.0)
    urgent = build.add(1, 2.0, after=[build.add(0, 1.0, after=[fast])], priority=0.0)
    timeline = simulate(build.tasks())
    assert timeline.finish[running] == 4.0, "what runs is never stopped"
    assert timeline.start[urgent] == 4.0
    assert timeline.start[queued] == 6.0


def test_partitions_let_an_urgent_message_through() -> None:
    def urgent_end(parts: int) -> float:
        build = TaskList(num_streams=2)
        before: list[int] = []
        for _ in range(parts):
            before = [build.add(1, 8.0 / parts, after=before, priority=1.0)]
        urgent = build.add(1, 1.0, after=[build.add(0, 0.5)], priority=0.0)
        return float(simulate(build.tasks()).finish[urgent])

    assert [urgent_end(parts) for parts in (1, 2, 4, 8, 16)] == [9.0, 5.0, 3.0, 2.0, 1.5]


def test_a_window_binds_a_stream_before_more_urgent_work_arrives() -> None:
    def urgent_start(window: float) -> float:
        build = TaskList(num_streams=2)
        for _ in range(4):
            build.add(1, 2.0, priority=1.0)
        urgent = build.add(1, 1.0, after=[build.add(0, 1.0)], priority=0.0)
        return float(simulate(build.tasks((0.0, window))).start[urgent])

    assert [urgent_start(window) for window in (0.0, 2.0, 2.5, 4.5, 100.0)] == [2.0, 2.0, 4.0, 6.0, 8.0]


@pytest.mark.parametrize("seed", range(10))
def test_a_trace_shows_every_task_once_without_overlap_up_to_the_makespan(seed: int) -> None:
    tasks = random_tasks(np.random.default_rng(seed), 40)
    timeline = simulate(tasks)
    streams = [(f"stage {s % 2}", f"link {s}") for s in range(tasks.num_streams)]
    trace = chrome_trace(tasks, timeline, names=[f"task {k}" for k in range(len(tasks))], streams=streams)
    events = [event for event in trace["traceEvents"] if event["ph"] == "X"]
    assert len(events) == int((tasks.seconds > 0).sum())
    assert max(e["ts"] + e["dur"] for e in events) == pytest.approx(timeline.makespan * 1e6)
    names = {e["tid"]: e["args"]["name"] for e in trace["traceEvents"] if e["name"] == "thread_name"}
    assert names == {s: f"link {s}" for s in range(tasks.num_streams)}
    for tid in names:
        mine = sorted((e["ts"], e["ts"] + e["dur"]) for e in events if e["tid"] == tid)
        assert all(end <= start + 1e-6 for (_, end), (start, _) in pairwise(mine))
        assert sum(end - start for start, end in mine) == pytest.approx(busy_seconds(tasks)[tid] * 1e6)


def test_what_cannot_run_is_said() -> None:
    def tasks(**changes: object) -> Tasks:
        zeros, ones = np.zeros(2, dtype=np.int64), np.ones(2)
        none = np.zeros(0, dtype=np.int64)
        fields: dict[str, object] = {"num_streams": 1, "stream": zeros, "seconds": ones, "priority": ones}
        return Tasks(**(fields | {"before": none, "after": none} | changes))  # type: ignore[arg-type]

    circle = tasks(before=np.array([0, 1]), after=np.array([1, 0]))
    for run in (simulate, critical_path_seconds):
        with pytest.raises(ArgumentError, match="2 of 2 tasks wait for each other"):
            run(circle)
    with pytest.raises(ArgumentError, match="task 1 takes -1"):
        tasks(seconds=np.array([1.0, -1.0]))
    with pytest.raises(ArgumentError, match="task 0 takes nan"):
        tasks(seconds=np.array([np.nan, 1.0]))
    with pytest.raises(ArgumentError, match="stream 3 does not exist"):
        tasks(stream=np.array([0, 3]))
    with pytest.raises(ArgumentError, match="dependency 2 does not exist"):
        tasks(before=np.array([0]), after=np.array([2]))
    with pytest.raises(ArgumentError, match="2 streams, 1 durations"):
        tasks(seconds=np.ones(1))
    with pytest.raises(ArgumentError, match="windows"):
        tasks(windows=(1.0, 2.0))
    with pytest.raises(ArgumentError, match="pairs"):
        tasks(before=np.array([0]))
    with pytest.raises(ArgumentError, match="got 1 names for 2 tasks"):
        chrome_trace(tasks(), simulate(tasks()), names=["a"], streams=[("p", "t")])


def test_nothing_takes_no_time() -> None:
    empty = TaskList(num_streams=1).tasks()
    assert simulate(empty).makespan == 0.0
    assert critical_path_seconds(empty) == 0.0
