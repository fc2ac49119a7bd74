"""How does a pairwise graph read as a mixed program, and memory as rows added when they are needed? (transport form)

    x[i] in {0, 1}: one option a node;      y[r, c] >= 0: how an edge carries node a's options to node b's,
    sum over c of y[r, c] = x[r],   sum over r of y[r, c] = x[c].

Options that an edge tells apart only by a constant share a row (the constant goes to the option). Costs are those that
messages left at options and pairs (`Remainder`): none is below zero, so that simplex starts from the bound, dual
feasible at once, and memory rows at times with a price have a slack that costs the price.
"""

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from autopar.search.exact.array_model import ArrayModel
from autopar.search.exact.formulation import add_transport, separated
from autopar.search.pairwise.bound import Remainder
from autopar.search.pairwise.prices import granted, mean_usage, priced
from autopar.search.pairwise.problem import Floats, Ints, Pairwise

_LARGEST = 1e4  # coefficient of a memory row: rows hold to 1e-6 of their unit
_ROWS_AT_ONCE = 40
_HARDLY = 0.01


@dataclass(slots=True)
class Transport:
    """The program over some options and pairs. `column[option]` is -1 where an option is not open."""

    problem: Pairwise
    remainder: Remainder
    open_option: NDArray[np.bool_]
    open_pair: NDArray[np.bool_]
    unit: float
    """Of the objective, in cost."""
    model: ArrayModel = field(default_factory=ArrayModel)
    column: Ints = field(init=False)
    times: list[int] = field(default_factory=list)
    fixed: float = field(init=False)
    """Of the cost, what every choice has."""
    slack_prices: Floats = field(init=False)

    def __post_init__(self) -> None:
        problem = self.problem
        self.open_option = self.open_option & (self.remainder.option < np.inf)
        self.open_pair = self.open_pair & (self.remainder.pair < np.inf)
        while self._close_stranded():
            pass
        open_ids = np.flatnonzero(self.open_option)
        self.column = np.full(len(problem.cost), -1, np.int64)
        # A price that hardly matters is not worth a row that is always there: it goes back to the options.
        prices = self.remainder.prices
        self.slack_prices = np.where(prices >= _HARDLY * prices.max(initial=0.0), prices, 0.0)
        small = prices - self.slack_prices
        option = np.where(self.open_option, self.remainder.option, 0.0)
        cost = (option - priced(problem, np.zeros(len(option)), small)) / self.unit
        self.fixed = self.remainder.bound - granted(problem, small)[0]
        edges = [self._edge(edge, cost) for edge in range(problem.num_edges)]
        self.column[open_ids] = self.model.add_columns(len(open_ids), cost=cost[open_ids], upper=1.0, integer=True)
        node = np.repeat(np.arange(problem.num_nodes), problem.num_options())
        rows = self.model.add_rows(problem.num_nodes, lower=1.0, upper=1.0)
        self.model.add_entries(rows[node[open_ids]], self.column[open_ids], 1.0)
        for edge in edges:
            if edge is not None:
                here, there, matrix = edge
                add_transport(self.model, self.column[here], self.column[there], matrix)
        self.add_times(np.flatnonzero(self.slack_prices))

    def _close_stranded(self) -> bool:
        """Close options without an open partner on some edge; whether there were any."""
        problem, before = self.problem, int(self.open_option.sum())
        for e in range(problem.num_edges):
            a, b, pair = self._ends(e)
            joined = pair & self.open_option[a][:, None] & self.open_option[b][None, :]
            self.open_option[a] &= joined.any(axis=1)
            self.open_option[b] &= joined.any(axis=0)
        return int(self.open_option.sum()) < before

    def _ends(self, edge: int) -> tuple[slice, slice, NDArray[np.bool_]]:
        first, ends = self.problem.first_option, (self.problem.edge_a[edge], self.problem.edge_b[edge])
        a, b = (slice(int(first[end]), int(first[end + 1])) for end in ends)
        pairs = slice(int(self.problem.first_pair[edge]), int(self.problem.first_pair[edge + 1]))
        return a, b, self.open_pair[pairs].reshape(a.stop - a.start, b.stop - b.start)

    def _edge(self, edge: int, cost: Floats) -> tuple[Ints, Ints, Floats] | None:
        """Open options of both ends and what pairs cost; constants go to `cost`. None where nothing else is left."""
        a, b, _ = self._ends(edge)
        here = a.start + np.flatnonzero(self.open_option[a])
        there = b.start + np.flatnonzero(self.open_option[b])
        if not len(here) or not len(there):
            return None
        at = self.problem.first_pair[edge] + (here - a.start)[:, None] * (b.stop - b.start) + (there - b.start)[None, :]
        open_pairs = np.where(self.open_pair[at], self.remainder.pair[at] / self.unit, np.inf)
        rows, columns, matrix = separated(open_pairs)
        cost[here] += rows
        cost[there] += columns
        return (here, there, matrix) if matrix.any() else None

    def add_times(self, times: Ints) -> None:
        """Rows for the limit at these times."""
        problem, first = self.problem, self.problem.first_option
        for time in sorted({int(time) for time in times} - set(self.times)):
            self.times.append(time)
            taken = np.zeros(len(problem.cost))
            for m in np.flatnonzero((problem.begin <= time) & (time < problem.end)):
                node = problem.member_node[m]
                own = slice(problem.first_usage[m], problem.first_usage[m + 1])
                taken[first[node] : first[node + 1]] += problem.usage[own]
            least = np.minimum.reduceat(np.where(self.open_option, taken, np.inf), first[:-1])
            above = np.where(self.open_option, taken - np.repeat(least, problem.num_options()), 0.0)
            room = problem.limit - problem.base[time] - least.sum()
            unit = float(above.max()) / _LARGEST or 1.0
            price = self.slack_prices[time] * unit / self.unit
            row = self.model.add_rows(1, lower=room / unit if price else -np.inf, upper=room / unit)
            used = np.flatnonzero(above)
            self.model.add_entries(row, self.column[used], above[used] / unit)
            if price:
                self.model.add_entries(row, self.model.add_columns(1, cost=price), 1.0)

    def forbid(self, choice: Ints) -> None:
        """This choice no more."""
        columns = self.column[self.problem.first_option[:-1] + choice]
        self.model.add_entries(self.model.add_rows(1, upper=len(columns) - 1.0), columns, 1.0)

    def choice(self, values: Floats) -> Ints:
        value = np.where(self.column >= 0, values[self.column], -1.0)
        first = self.problem.first_option
        pairs = zip(first[:-1].tolist(), first[1:].tolist(), strict=True)
        return np.array([int(np.argmax(value[a:b])) for a, b in pairs], np.int64)

    def usage_of(self, values: Floats) -> Floats:
        """Bytes at every time, of a fractional choice too."""
        weight = np.where(self.column >= 0, values[self.column], 0.0)
        return mean_usage(self.problem, weight)

    def violated(self, taken: Floats, *, by: float) -> Ints:
        """Of every stretch of times above the limit by such a part of it, the worst; the worst stretches, without those
        that have rows already."""
        if not len(taken):
            return np.zeros(0, np.int64)
        over = taken - self.problem.limit
        over[self.times] = 0.0
        high = np.concatenate([[False], over > by * self.problem.limit, [False]])
        stretches = np.flatnonzero(high[1:] != high[:-1]).reshape(-1, 2)
        worst = [begin + int(np.argmax(over[begin:end])) for begin, end in stretches.tolist()]
        worst.sort(key=lambda time: -over[time])
        return np.array(worst[:_ROWS_AT_ONCE], np.int64)
