"""Which answers will be needed next? Those are asked of other processes, while this one is at its own.

`foresee` says what comes next, as things stand; `of` takes what a worker has found, works here while it is still at the
one that is needed, and finds the rest here. Where a worker fails this process answers, and raises what is to be raised.
"""

import logging
from collections.abc import Callable, Hashable, Iterable
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

from autopar.passes.batch_line import BatchLine
from autopar.search.joint.questions import Found, JointProblem
from autopar.search.joint.workers import Told, Workers
from autopar.values.graph import CapturedModel
from autopar.values.serialize import dump

logger = logging.getLogger(__name__)

QUEUED = 12
"""How many may wait for each worker; they are put in a new order whenever more is known."""


@dataclass(slots=True, kw_only=True, eq=False)
class Prefetch:
    """The answers of one search, found in this process and in workers beside it.

    here: answers a question in this process.
    fresh: a question as it is asked with all that is known by now.
    graph: of one of so many micro-batches.
    needs: the numbers of micro-batches whose graphs a question is about, which are sent with it.
    setup: what a worker is told first.
    line: of which workers make the graphs themselves, if there is one; line_at_hand: if nothing has to be captured for
        it.
    workers: None to answer all here.
    """

    here: Callable[[Any], Any]
    fresh: Callable[[Any], Any]
    graph: Callable[[int], CapturedModel]
    needs: Callable[[Any], set[int]]
    setup: object
    line: Callable[[], BatchLine | None] = lambda: None
    line_at_hand: Callable[[], BatchLine | None] = lambda: None
    workers: Workers | None = None
    _found: dict[Hashable, Any] = field(default_factory=dict)
    _asked: dict[Hashable, Future[Any]] = field(default_factory=dict)
    _graphs: dict[int, CapturedModel] = field(default_factory=dict)
    _sent: set[int] = field(default_factory=set)
    _ends: tuple[bytes, bytes, tuple[int, int]] | None = None

    def of(self, question: JointProblem[Found]) -> Found:
        """The answer."""
        if question not in self._found:
            future = self._asked.pop(question, None)
            if future is None or future.cancel():
                self._found[question] = self.here(question)
            else:
                while not future.done() and (waiting := self._next()) is not None:
                    self._found[waiting] = self.here(self.fresh(waiting))
                found = _result(future)
                self._found[question] = self.here(question) if found is None else found
        answer: Found = self._found[question]
        return answer

    def knows(self, question: Hashable) -> bool:
        """Whether there is an answer without waiting."""
        future = self._asked.get(question)
        return question in self._found or (future is not None and future.done())

    def _next(self) -> Hashable | None:
        """What waits for a worker longest, which then need not answer it."""
        waiting = next((one for one, future in self._asked.items() if future.cancel()), None)
        self._asked.pop(waiting, None)
        return waiting

    def foresee(self, questions: Iterable[Hashable]) -> None:
        """These will probably be asked, in this order, and none before them. A worker begins with those whose graphs
        it has, for to read one and make its program takes seconds."""
        if self.workers is None:
            return
        while self._next() is not None:
            pass
        room = QUEUED * len(self.workers.processes)
        left, later = room, dict[Hashable, None]()
        fresh = dict.fromkeys(one for one in questions if one not in self._found and one not in self._asked)
        for one in sorted(fresh, key=lambda one: not self.needs(one) <= self._sent):
            if not left:
                return
            if self.line_at_hand() is not None or self.needs(one) <= self._graphs.keys():
                self._asked[one] = self._ask(one)
                left -= 1
            else:
                later[one] = None
        for one in list(later)[:room] if left == room else ():  # as nothing waits: a graph may have to be captured
            if self.line() is None:
                self._graphs.update({count: self.graph(count) for count in self.needs(one) - self._graphs.keys()})
            self._asked[one] = self._ask(one)

    def _ask(self, question: Hashable) -> Future[Any]:
        assert self.workers is not None

        def request(told: Told) -> Any:
            is_new = told.get("search") is not self
            if is_new:
                told.update(search=self, graphs=set(), has_line=False)
            needed, line, ends, new = self.needs(question), self.line_at_hand(), None, dict[int, bytes]()
            if line is not None and not told["has_line"]:
                self._ends = ends = self._ends or (dump(line.small), dump(line.large), line.sizes)
                told["has_line"] = True
            if not told["has_line"]:
                new = {count: dump(self._graphs[count]) for count in needed - told["graphs"]}
                told["graphs"].update(new)
            self._sent.update(needed)
            return (self.setup if is_new else None), ends, new, self.fresh(question)

        return self.workers.ask(request)


def _result(future: Future[Any]) -> Any:
    """What a worker found, None where it failed."""
    try:
        return future.result()
    except Exception as error:
        logger.info("a worker of the search failed: %s: %s", type(error).__name__, error)
        return None
