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
from ortools.math_opt import (
    model_parameters_pb2,
    model_pb2,
    result_pb2,
    solution_pb2,
    sparse_containers_pb2,
)
from ortools.math_opt.core.python import solver as core
from ortools.math_opt.python import mathopt
from ortools.math_opt.solvers import highs_pb2
from pybind11_abseil.status import StatusNotOk

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


UNDECIDED = "HighsModelStatus was Unknown"
"""HiGHS gave up on a program, for the sake of its numbers; MathOpt calls that an internal error."""
NOTHING = Answer(values=None, reduced_costs=None, objective=np.inf, bound=-np.inf, optimal=False, infeasible=False)


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
        cutoff: float | None = None,
        on_message: Callable[[Sequence[str]], None] | None = None,
        solver: mathopt.SolverType = mathopt.SolverType.HIGHS,
        perturbs: bool = True,
    ) -> Answer:
        """Solve the linear relaxation (with reduced costs) or the mixed program.

        A program with no solution at most at the `cutoff` is infeasible (MathOpt's own cutoff is refused for HiGHS).
        HiGHS is by far the quickest on costs but may overrun its time limit; its presolve can hang and stays off.
        perturbs: costs in the dual simplex, which frees most programs that stall, and makes some wander.
        """
        limit = None if seconds is None else datetime.timedelta(seconds=max(seconds, 0.01))
        options = {} if cutoff is None else {"objective_bound": cutoff}
        if not perturbs:
            options["dual_simplex_cost_perturbation_multiplier"] = 0.0
        parameters = mathopt.SolveParameters(
            time_limit=limit,
            relative_gap_tolerance=None if relaxed else relative_gap,
            absolute_gap_tolerance=None if relaxed else 0.0,
            presolve=mathopt.Emphasis.OFF if solver == mathopt.SolverType.HIGHS else None,
            highs=highs_pb2.HighsOptionsProto(double_options=options),
        )
        wanted = model_parameters_pb2.ModelSolveParametersProto()
        wanted.variable_values_filter.skip_zero_values = True
        wanted.reduced_costs_filter.skip_zero_values = True
        try:
            result = _solve(self.proto(relaxed=relaxed), solver, parameters, wanted, on_message)
        except StatusNotOk as error:
            if UNDECIDED not in str(error):
                raise
            return NOTHING
        best = result.solutions[0] if result.solutions else None
        reason = result.termination.reason
        found = best is not None and best.primal_solution.feasibility_status == solution_pb2.SOLUTION_STATUS_FEASIBLE
        reduced = None
        if (
            relaxed
            and best is not None
            and best.dual_solution.feasibility_status == solution_pb2.SOLUTION_STATUS_FEASIBLE
        ):
            reduced = self._dense(best.dual_solution.reduced_costs)
        return Answer(
            values=self._dense(best.primal_solution.variable_values) if best is not None and found else None,
            reduced_costs=reduced,
            objective=best.primal_solution.objective_value if best is not None and found else np.inf,
            bound=result.termination.objective_bounds.dual_bound,
            optimal=reason == result_pb2.TERMINATION_REASON_OPTIMAL,
            infeasible=reason
            in (result_pb2.TERMINATION_REASON_INFEASIBLE, result_pb2.TERMINATION_REASON_INFEASIBLE_OR_UNBOUNDED),
        )

    def _dense(self, values: sparse_containers_pb2.SparseDoubleVectorProto) -> Floats:
        dense = np.zeros(self.num_columns)
        dense[np.array(values.ids, np.int64)] = values.values
        return dense


def _solve(
    model: model_pb2.ModelProto,
    solver: mathopt.SolverType,
    parameters: mathopt.SolveParameters,
    wanted: model_parameters_pb2.ModelSolveParametersProto,
    on_message: Callable[[Sequence[str]], None] | None,
) -> result_pb2.SolveResultProto:
    """What `mathopt.solve` calls, proto in and proto out: its Python objects, a basis status a variable too, take
    longer to make than the smaller programs to solve."""
    arguments = mathopt.StreamableSolverInitArguments().to_proto()
    callbacks = mathopt.CallbackRegistration().to_proto()
    return core.solve(model, solver.value, arguments, parameters.to_proto(), wanted, on_message, callbacks, None, None)
