"""How is a linear or mixed program filled from arrays and solved by HiGHS through OR-Tools MathOpt?

    minimise cost @ x   subject to   row_lower <= A x <= row_upper,  lower <= x <= upper,  some x integer

Columns, rows and entries are appended as NumPy blocks and go into a `ModelProto` at once (135,000 columns: 0.3 s,
through expression objects 3.5 s). HiGHS is only reached through MathOpt: `highspy` carries its own copy, they clash.
Its presolve stays off: strategy graphs are reduced already, so that it gains nothing (relaxation on three axes: 1 s
without it, 4 s with it), and on one in some 2,000 small random graphs it never returned, whatever the time limit.
"""

import datetime
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import ArrayLike, NDArray
from ortools.math_opt import model_pb2
from ortools.math_opt.python import mathopt

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Answer:
    """What HiGHS found. `values` is None when it found nothing; `infeasible` only when that is proved."""

    values: Floats | None
    reduced_costs: Floats | None
    objective: float
    bound: float
    optimal: bool
    infeasible: bool


@dataclass(slots=True)
class ArrayModel:
    """A model under construction; blocks are kept as arrays until `solve`."""

    num_columns: int = 0
    num_rows: int = 0
    _columns: list[tuple[Floats, Floats, Floats, NDArray[np.bool_]]] = field(default_factory=list)
    _rows: list[tuple[Floats, Floats]] = field(default_factory=list)
    _entries: list[tuple[Ints, Ints, Floats]] = field(default_factory=list)

    def add_columns(
        self,
        num: int,
        *,
        cost: ArrayLike = 0.0,
        lower: ArrayLike = 0.0,
        upper: ArrayLike = np.inf,
        integer: bool = False,
    ) -> Ints:
        """Append `num` columns and return their ids."""
        block = [np.broadcast_to(np.asarray(part, np.float64), num) for part in (lower, upper, cost)]
        self._columns.append((block[0], block[1], block[2], np.full(num, integer)))
        self.num_columns += num
        return np.arange(self.num_columns - num, self.num_columns, dtype=np.int64)

    def add_rows(self, num: int, *, lower: ArrayLike = -np.inf, upper: ArrayLike = np.inf) -> Ints:
        """Append `num` rows, still without entries, and return their ids."""
        block = [np.broadcast_to(np.asarray(part, np.float64), num) for part in (lower, upper)]
        self._rows.append((block[0], block[1]))
        self.num_rows += num
        return np.arange(self.num_rows - num, self.num_rows, dtype=np.int64)

    def add_entries(self, rows: ArrayLike, columns: ArrayLike, values: ArrayLike) -> None:
        """Add `values` to the matrix at (rows, columns), all broadcast together; entries at one place are summed."""
        row, column, value = np.broadcast_arrays(rows, columns, np.asarray(values, np.float64))
        self._entries.append((row.ravel().astype(np.int64), column.ravel().astype(np.int64), value.ravel()))

    def proto(self, *, relaxed: bool) -> model_pb2.ModelProto:
        """The model as MathOpt takes it: the matrix row by row, sorted, without zeros and without duplicates."""
        proto = model_pb2.ModelProto()
        lower, upper, cost, integer = (np.concatenate(part) for part in zip(*self._columns, strict=True))
        proto.variables.ids.extend(range(self.num_columns))
        proto.variables.lower_bounds.extend(lower.tolist())
        proto.variables.upper_bounds.extend(upper.tolist())
        proto.variables.integers.extend([False] * self.num_columns if relaxed else integer.tolist())
        nonzero = np.flatnonzero(cost)
        proto.objective.linear_coefficients.ids.extend(nonzero.tolist())
        proto.objective.linear_coefficients.values.extend(cost[nonzero].tolist())
        if self.num_rows:
            row_lower, row_upper = (np.concatenate(part) for part in zip(*self._rows, strict=True))
            proto.linear_constraints.ids.extend(range(self.num_rows))
            proto.linear_constraints.lower_bounds.extend(row_lower.tolist())
            proto.linear_constraints.upper_bounds.extend(row_upper.tolist())
        if self._entries:
            rows, columns, values = (np.concatenate(part) for part in zip(*self._entries, strict=True))
            place, inverse = np.unique(rows * self.num_columns + columns, return_inverse=True)
            values = np.bincount(inverse, weights=values, minlength=len(place))
            kept = values != 0.0
            rows, columns = np.divmod(place[kept], self.num_columns)
            proto.linear_constraint_matrix.row_ids.extend(rows.tolist())
            proto.linear_constraint_matrix.column_ids.extend(columns.tolist())
            proto.linear_constraint_matrix.coefficients.extend(values[kept].tolist())
        return proto

    def solve(
        self,
        *,
        relaxed: bool = False,
        relative_gap: float = 0.0,
        seconds: float | None = None,
        hint: Floats | None = None,
        on_message: Callable[[Sequence[str]], None] | None = None,
        solver: mathopt.SolverType = mathopt.SolverType.HIGHS,
    ) -> Answer:
        """Solve the linear relaxation (with reduced costs) or the mixed program; `hint` is a value for every column.

        HiGHS is by far the quickest on costs but may overrun its time limit; its presolve can hang and stays off.
        """
        model = mathopt.Model.from_model_proto(self.proto(relaxed=relaxed))
        limit = None if seconds is None else datetime.timedelta(seconds=max(seconds, 0.01))
        parameters = mathopt.SolveParameters(
            time_limit=limit,
            relative_gap_tolerance=None if relaxed else relative_gap,
            absolute_gap_tolerance=None if relaxed else 0.0,
            presolve=mathopt.Emphasis.OFF if solver == mathopt.SolverType.HIGHS else None,
        )
        sparse = mathopt.VariableFilter(skip_zero_values=True)
        model_parameters = mathopt.ModelSolveParameters(variable_values_filter=sparse, reduced_costs_filter=sparse)
        if hint is not None:
            values = {model.get_variable(i): float(value) for i, value in enumerate(hint)}
            model_parameters.solution_hints.append(mathopt.SolutionHint(variable_values=values))
        result = mathopt.solve(model, solver, params=parameters, model_params=model_parameters, msg_cb=on_message)
        reason = result.termination.reason
        found = result.has_primal_feasible_solution()
        reduced = None
        if relaxed and result.has_dual_feasible_solution():
            reduced = self._dense(result.reduced_costs())
        return Answer(
            values=self._dense(result.variable_values()) if found else None,
            reduced_costs=reduced,
            objective=result.objective_value() if found else np.inf,
            bound=result.best_objective_bound(),
            optimal=reason == mathopt.TerminationReason.OPTIMAL,
            infeasible=reason
            in (mathopt.TerminationReason.INFEASIBLE, mathopt.TerminationReason.INFEASIBLE_OR_UNBOUNDED),
        )

    def _dense(self, values: dict[mathopt.Variable, float]) -> Floats:
        dense = np.zeros(self.num_columns)
        if values:
            dense[[variable.id for variable in values]] = list(values.values())
        return dense
