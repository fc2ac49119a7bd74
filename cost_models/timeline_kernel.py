"""The loops of the event simulation, compiled. What they compute: `autopar.cost_models.timeline`."""

import numba
import numpy as np
import numpy.typing as npt

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]


@numba.njit(cache=True)
def successors(count: int, before: Ints, after: Ints) -> tuple[Ints, Ints, Ints]:
    """Dependencies by the task waited for: (first position of each task, waiting tasks), and what each waits for."""
    first = np.zeros(count + 1, dtype=np.int64)
    waits = np.zeros(count, dtype=np.int64)
    for e in range(len(before)):
        first[before[e] + 1] += 1
        waits[after[e]] += 1
    for k in range(count):
        first[k + 1] += first[k]
    fill = first[:-1].copy()
    waiting = np.empty(len(before), dtype=np.int64)
    for e in range(len(before)):
        waiting[fill[before[e]]] = after[e]
        fill[before[e]] += 1
    return first, waiting, waits


@numba.njit(cache=True)
def longest_paths(seconds: Floats, before: Ints, after: Ints) -> tuple[Floats, int]:
    """End of the longest chain up to each task, and how many tasks are in no circle nor behind one."""
    count = len(seconds)
    first, waiting, waits = successors(count, before, after)
    begin = np.zeros(count)
    queue = np.empty(count, dtype=np.int64)
    done, end = 0, 0
    for k in range(count):
        if waits[k] == 0:
            queue[end] = k
            end += 1
    while done < end:
        task = queue[done]
        done += 1
        for e in range(first[task], first[task + 1]):
            other = waiting[e]
            begin[other] = max(begin[other], begin[task] + seconds[task])
            waits[other] -= 1
            if waits[other] == 0:
                queue[end] = other
                end += 1
    return begin + seconds, done


@numba.njit(cache=True)
def _sooner(a: int, b: int, urgency: Floats, since: Floats) -> bool:
    if urgency[a] != urgency[b]:
        return bool(urgency[a] < urgency[b])
    if since[a] != since[b]:
        return bool(since[a] < since[b])
    return a < b


@numba.njit(cache=True)
def _push(heap: Ints, offset: int, size: int, item: int, urgency: Floats, since: Floats) -> None:
    """Add `item` to the binary heap of `size` items at heap[offset:]."""
    k = size
    while k > 0:
        parent = (k - 1) // 2
        if not _sooner(item, heap[offset + parent], urgency, since):
            break
        heap[offset + k] = heap[offset + parent]
        k = parent
    heap[offset + k] = item


@numba.njit(cache=True)
def _pop(heap: Ints, offset: int, size: int, urgency: Floats, since: Floats) -> int:
    """Take the first item out of the binary heap of `size` items at heap[offset:]."""
    top = heap[offset]
    item = heap[offset + size - 1]
    last = size - 1
    k = 0
    while True:
        child = 2 * k + 1
        if child >= last:
            break
        if child + 1 < last and _sooner(heap[offset + child + 1], heap[offset + child], urgency, since):
            child += 1
        if not _sooner(heap[offset + child], item, urgency, since):
            break
        heap[offset + k] = heap[offset + child]
        k = child
    heap[offset + k] = item
    return int(top)


@numba.njit(cache=True)
def run_events(
    window: Floats, stream: Ints, seconds: Floats, priority: Floats, before: Ints, after: Ints
) -> tuple[Floats, Floats, int]:
    """Start and end of each task, and how many tasks could run."""
    count, num_streams = len(stream), len(window)
    first, waiting, waits = successors(count, before, after)
    offset = np.zeros(num_streams + 1, dtype=np.int64)
    for k in range(count):
        offset[stream[k] + 1] += 1
    for s in range(num_streams):
        offset[s + 1] += offset[s]

    start, finish, since = np.zeros(count), np.zeros(count), np.zeros(count)
    ready = np.empty(count, dtype=np.int64)  # a heap a stream, at its offset
    num_ready = np.zeros(num_streams, dtype=np.int64)
    # tasks that each stream is bound to run, in a chain: the one that runs, the last, the seconds of all
    running = np.full(num_streams, -1, dtype=np.int64)
    last = np.full(num_streams, -1, dtype=np.int64)
    behind = np.full(count, -1, dtype=np.int64)
    bound = np.zeros(num_streams)
    # events: streams with a running task, by its end
    events = np.empty(num_streams, dtype=np.int64)
    event_time, no_time = np.zeros(num_streams), np.zeros(num_streams)
    num_events = 0
    touched = np.empty(num_streams, dtype=np.int64)
    is_touched = np.zeros(num_streams, dtype=np.bool_)
    num_touched = 0
    for k in range(count):
        if waits[k] == 0:
            s = stream[k]
            _push(ready, offset[s], num_ready[s], k, priority, since)
            num_ready[s] += 1
            if not is_touched[s]:
                is_touched[s] = True
                touched[num_touched] = s
                num_touched += 1

    now, done = 0.0, 0
    while True:
        for t in range(num_touched):
            s = touched[t]
            is_touched[s] = False
            while num_ready[s] > 0 and (running[s] < 0 or bound[s] < window[s]):
                task = _pop(ready, offset[s], num_ready[s], priority, since)
                num_ready[s] -= 1
                bound[s] += seconds[task]
                if running[s] < 0:
                    start[task] = now
                    running[s] = task
                    event_time[s] = now + seconds[task]
                    _push(events, 0, num_events, s, event_time, no_time)
                    num_events += 1
                else:
                    start[task] = finish[last[s]]
                    behind[last[s]] = task
                finish[task] = start[task] + seconds[task]
                last[s] = task
        num_touched = 0
        if num_events == 0:
            break
        now = event_time[events[0]]
        while num_events > 0 and event_time[events[0]] == now:
            s = _pop(events, 0, num_events, event_time, no_time)
            num_events -= 1
            task = running[s]
            running[s] = behind[task]
            bound[s] -= seconds[task]
            if running[s] >= 0:
                event_time[s] = finish[running[s]]
                _push(events, 0, num_events, s, event_time, no_time)
                num_events += 1
            else:
                bound[s] = 0.0
            done += 1
            if not is_touched[s]:
                is_touched[s] = True
                touched[num_touched] = s
                num_touched += 1
            for e in range(first[task], first[task + 1]):
                other = waiting[e]
                waits[other] -= 1
                if waits[other] == 0:
                    since[other] = now
                    q = stream[other]
                    _push(ready, offset[q], num_ready[q], other, priority, since)
                    num_ready[q] += 1
                    if not is_touched[q]:
                        is_touched[q] = True
                        touched[num_touched] = q
                        num_touched += 1
    return start, finish, done
