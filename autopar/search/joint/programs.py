"""What are the graphs and programs of micro-batches? Of the line once there is one, else made of what is captured."""

from collections.abc import Callable
from dataclasses import dataclass, field

from autopar.errors import BatchError, InfeasibleError
from autopar.lower.program import Program, make_program
from autopar.passes.batch_line import BatchLine, NotLinearError
from autopar.search.costs.program_line import ProgramLine
from autopar.values.graph import CapturedModel


@dataclass(slots=True, kw_only=True)
class Programs:
    """graph: the captured model of one of so many micro-batches. line: what gives those, if any does."""

    graph: Callable[[int], CapturedModel]
    line: Callable[[], BatchLine | None]
    graphs: dict[int, CapturedModel] = field(init=False, default_factory=dict)
    _programs: dict[int, Program] = field(init=False, default_factory=dict)
    _on_line: ProgramLine | None = field(init=False, default=None)

    def captured(self, microbatches: int) -> CapturedModel:
        """The graph of one of so many micro-batches."""
        if microbatches not in self.graphs:
            self.graphs[microbatches] = self.graph(microbatches)
        return self.graphs[microbatches]

    def of(self, microbatches: int) -> Program:
        """The program of one of so many micro-batches.

        Raises InfeasibleError where the loss of the whole batch is no sum over so many parts.
        """
        if microbatches not in self._programs:
            try:
                between = self._between(microbatches) if microbatches > 1 else None
                found = between or make_program(self.captured(microbatches))
            except BatchError as error:
                if microbatches == 1:
                    raise
                raise InfeasibleError(str(error)) from error
            self._programs[microbatches] = found
        return self._programs[microbatches]

    def _between(self, microbatches: int) -> Program | None:
        """That on the line; a graph that is not says so when it is captured."""
        line = self.line()
        if line is None:
            return None
        try:
            if self._on_line is None or self._on_line.line is not line:
                self._on_line = ProgramLine(line=line, whole=self.of(1), graph=self.captured)
            return self._on_line.microbatch(microbatches)
        except NotLinearError:
            return None
