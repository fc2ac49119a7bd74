"""Which answers will be needed next? Those are asked of a second process, while this one is at its own.

`foresee` says what comes next, as things stand; `of` takes what the other process has found, works here while it is
still at the one that is needed, and finds the rest here. Where the other process fails, this one answers, and raises
what there is to raise.
"""

import logging
from collections.abc import Callable, Hashable, Iterable
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

from autopar.graph import CapturedModel
from autopar.search.joint.second_process import SecondProcess
from autopar.serialize import dump

logger = logging.getLogger(__name__)

QUEUED = 12
"""How many may wait for the other process; they are put in a new order whenever more is known."""


@dataclass(slots=True, kw_only=True)
class Ahead:
    """here: answers a question in this process. graph, needs: the graph of so many micro-batches, and the numbers whose
    graphs a question is about, which are sent with it. setup: what the other process is told first."""

    here: Callable[[Any], Any]
    graph: Callable[[int], CapturedModel]
    needs: Callable[[Any], set[int]]
    setup: object
    other: SecondProcess | None = None
    _found: dict[Hashable, Any] = field(default_factory=dict)
    _asked: dict[Hashable, Future[Any]] = field(default_factory=dict)
    _graphs: dict[int, CapturedModel] = field(default_factory=dict)
    _sent: set[int] = field(default_factory=set)

    def of(self, question: Hashable) -> Any:
        """The answer."""
        if question not in self._found:
            future = self._asked.pop(question, None)
            if future is None or future.cancel():
                self._found[question] = self.here(question)
            else:
                while not future.done() and (waiting := self._next()) is not None:
                    self._found[waiting] = self.here(waiting)
                found = _result(future)
                self._found[question] = self.here(question) if found is None else found
        return self._found[question]

    def knows(self, question: Hashable) -> bool:
        """Whether there is an answer without waiting."""
        future = self._asked.get(question)
        return question in self._found or (future is not None and future.done())

    def _next(self) -> Hashable | None:
        """What waits for the other process longest, which then need not answer it."""
        waiting = next((one for one, future in self._asked.items() if future.cancel()), None)
        self._asked.pop(waiting, None)
        return waiting

    def foresee(self, questions: Iterable[Hashable]) -> None:
        """These will probably be asked, in this order, and none before them."""
        if self.other is None:
            return
        while self._next() is not None:
            pass
        left, later = QUEUED, []
        for one in questions:
            if not left:
                return
            if one in self._found or one in self._asked:
                continue
            if self.needs(one) <= self._graphs.keys():
                self._asked[one] = self._ask(one)
                left -= 1
            else:
                later.append(one)
        for one in later[: left if left == QUEUED else 0]:  # a graph may have to be captured: as long as nothing waits
            self._graphs.update({count: self.graph(count) for count in self.needs(one) - self._graphs.keys()})
            self._asked[one] = self._ask(one)

    def _ask(self, question: Hashable) -> Future[Any]:
        assert self.other is not None

        def request() -> Any:
            new = {count: dump(self._graphs[count]) for count in self.needs(question) - self._sent}
            setup = None if self._sent else self.setup
            self._sent.update(new)
            return setup, new, question

        return self.other.ask(request)


def _result(future: Future[Any]) -> Any:
    """What the other process found, None where it failed."""
    try:
        return future.result()
    except Exception as error:
        logger.info("the second process of the search failed: %s: %s", type(error).__name__, error)
        return None
