"""Does a branch that the data decide change what is computed? It is traced with either answer, and the graphs compared.

`if loss.item() < self.best: self.best = loss.item()` is a note that nobody reads: both graphs are the same. Every
answer opens further questions, so that all paths are traced, as many as `PATHS`.
"""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

from autopar.errors import CaptureError
from autopar.values.graph import CapturedModel, is_same_graph

PATHS, QUESTIONS = 32, 64
"""Paths that are traced, and questions on one: five branches beside each other, and no loop that never ends. Twice as
many paths are one branch more, for twice the time."""

Path = tuple[bool, ...]


@dataclass(slots=True)
class Branches:
    """Answers to the questions of one run, in their order: those of `path`, and no to what follows.

    asked: a refusal a question, if it turns out to matter. left: what the run of each path left behind in Python.
    """

    path: Path = ()
    asked: list[CaptureError] = field(default_factory=list)
    left: list[tuple[Path, Any]] = field(default_factory=list)

    def answer(self, refusal: CaptureError) -> bool:
        """The answer to the next question."""
        number = len(self.asked)
        self.asked.append(refusal)
        if number >= QUESTIONS:
            raise refusal
        return number < len(self.path) and self.path[number]

    def explore(self, trace: Callable[[], CapturedModel], state: Callable[[], Any]) -> CapturedModel:
        """The graph that `trace` gives on every path. state: what a run left behind.

        Raises:
            CaptureError: the refusal of a question whose answer changes the graph, or raises an error.
        """
        first: CapturedModel | None = None
        paths: list[tuple[Path, CaptureError | None]] = [((), None)]
        self.left = []
        while paths:
            self.path, flipped = path, _ = paths.pop()
            try:
                captured = trace()
            except CaptureError as error:
                raise error if flipped is None else flipped from error
            self.left.append((path, state()))
            for number in range(len(path), len(self.asked)):
                paths.append(((*path, *(False,) * (number - len(path)), True), self.asked[number]))
            first = first or captured
            guards = {guard.name: guard for guard in (*first.guards, *captured.guards)}
            first = replace(first, guards=tuple(guards[name] for name in sorted(guards)))
            if not is_same_graph(first, captured) or len(self.left) > PATHS:
                raise flipped or self.asked[0]
        assert first is not None
        self.path = ()
        return first
