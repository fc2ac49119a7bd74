"""What does a simulated step look like? A trace for chrome://tracing or ui.perfetto.dev.

The JSON object form of the Trace Event Format: a complete event ("ph": "X") a task, `ts` and `dur` in microseconds,
`pid` the rank or stage, `tid` the stream. Tasks that take no time are left out, and
streams that have none.
"""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from autopar.cost_models.timeline import Tasks, Timeline
from autopar.errors import ArgumentError
from autopar.values.whole_file import write_whole


def chrome_trace(
    tasks: Tasks, timeline: Timeline, *, names: Sequence[str], streams: Sequence[tuple[str, str]]
) -> dict[str, Any]:
    """The trace: `names` a task, `streams` a pair (process, thread) a stream, e.g. ("stage 0", "compute").

    Raises:
        ArgumentError: if a task or a stream has no name.
    """
    if len(names) != len(tasks) or len(streams) != tasks.num_streams:
        raise ArgumentError(
            f"a trace needs a name a task and a stream: got {len(names)} names for {len(tasks)} tasks and "
            f"{len(streams)} for {tasks.num_streams} streams"
        )
    processes = {process: pid for pid, process in enumerate(dict.fromkeys(process for process, _ in streams))}
    events: list[dict[str, Any]] = [
        {"ph": "M", "name": "process_name", "pid": pid, "args": {"name": process}} for process, pid in processes.items()
    ]
    used = set(tasks.stream[timeline.finish > timeline.start].tolist())
    for tid, (process, thread) in enumerate(streams):
        if tid not in used:
            continue
        events.append(
            {"ph": "M", "name": "thread_name", "pid": processes[process], "tid": tid, "args": {"name": thread}}
        )
    for k, (stream, start, finish) in enumerate(
        zip(tasks.stream.tolist(), timeline.start.tolist(), timeline.finish.tolist(), strict=True)
    ):
        if finish > start:
            pid = processes[streams[stream][0]]
            event = {"ph": "X", "name": names[k], "pid": pid, "tid": stream}
            events.append(event | {"ts": start * 1e6, "dur": (finish - start) * 1e6})
    return {"traceEvents": events, "displayTimeUnit": "ms"}


def write_trace(trace: Mapping[str, Any], path: str | Path) -> None:
    """Raises ArgumentError if the file cannot be written."""
    try:
        write_whole(path, json.dumps(trace))
    except OSError as error:
        raise ArgumentError(
            f"the trace {path} cannot be written: {error.strerror}; name a file in a folder that exists"
        ) from error
