"""What is being done, and since when? A line with elapsed time on a terminal; plain lines now and then in a file."""

import math
import sys
import threading
import time
from types import TracebackType

from rich.console import Console
from rich.progress import Progress, ProgressColumn, SpinnerColumn, Task, TextColumn, TimeElapsedColumn
from rich.text import Text

QUIET_SECONDS = 10.0
"""A command that ends sooner writes no line into a file. Half of it, and short commands' logs have lines that help
nobody; twice, and a reader wonders."""
LOADING = "loading torch"
GROWTH = 1.5
"""Each line of a file comes after a pause longer by this: 20 lines in ten hours."""


class ProgressLine:
    """A context that is told what is being done: `progress("capturing the model")`.

    On a terminal the last that was told stands below what is printed, with a spinner, for how long that has been done
    and the time since the command began, and goes when the command ends. Where standard error is no terminal, what is
    being done is written to it as a line after 10 s, 25 s, 48 s, ...

    Args:
        console: where the command prints; a quiet one shows no progress either.
    """

    def __init__(self, console: Console) -> None:
        self._text, self._began, self._since = "", time.monotonic(), time.monotonic()
        self._notes: list[str] = []
        errors = Console(stderr=True)
        shown = next((c for c in (console, errors) if c.is_terminal), None)
        self._bar: Progress | None = None
        self._ended = threading.Event()
        self._thread: threading.Thread | None = None
        if console.quiet:
            return
        if shown is None:
            self._thread = threading.Thread(target=self._lines, daemon=True)
            return
        columns = (SpinnerColumn(), _WhatColumn(self), TimeElapsedColumn(), TextColumn("in all"))
        self._bar = Progress(*columns, console=shown, transient=True, redirect_stdout=False, redirect_stderr=False)

    def __call__(self, text: str) -> None:
        self._text, self._since = text, time.monotonic()

    def note(self, text: str) -> None:
        """Say something that stays: at once on a terminal, with the next line in a file."""
        if self._bar is not None:
            self._bar.console.print(text, highlight=False, markup=False, soft_wrap=True)
        else:
            self._notes.append(text)

    @property
    def doing(self) -> str:
        """What is being done and, from a second on, for how long."""
        seconds, text = time.monotonic() - self._since, self._text or LOADING
        return text if seconds < 1.0 else f"{text}, for {elapsed_text(math.floor(seconds))}"

    def __enter__(self) -> "ProgressLine":
        if self._bar is not None:
            self._bar.add_task("", total=None)
            self._bar.start()
        if self._thread is not None:
            self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._ended.set()
        if self._bar is not None:
            self._bar.stop()
        if self._thread is not None:
            self._thread.join()

    def _lines(self) -> None:
        pause = QUIET_SECONDS
        while not self._ended.wait(pause):
            seconds = time.monotonic() - self._began
            notes, self._notes = self._notes, []
            for line in (*notes, f"{elapsed_text(seconds)}: {self.doing}"):
                print(f"autopar: {line}", file=sys.stderr, flush=True)
            pause *= GROWTH


class _WhatColumn(ProgressColumn):
    """What a line says is being done, which grows older."""

    def __init__(self, line: ProgressLine) -> None:
        super().__init__()
        self._line = line

    def render(self, task: Task) -> Text:
        return Text(self._line.doing)


def elapsed_text(seconds: float) -> str:
    """`42 s`, `3 min 5 s`, `2 h 4 min`."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60} s"
    return f"{whole // 3600} h {whole % 3600 // 60} min"
