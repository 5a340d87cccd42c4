"""The placement problem as a mixed-integer linear programme, solved by HiGHS through cvxpy: the certified answer.

    x[i, k]        component i takes option k (binary; one option each)
    z[i, k, j, l]  both ends of an edge (continuous; its sums over either end are the other's x, so it is binary as well)
    e              what of the gradient synchronisation outlasts the backward: at least
                   sum of sync over components <= i  -  sum of backward over components < i, for every i

Every choice returned is evaluated again by `parsim.schedule.placement.objective`. A status of the solver
that is not "optimal" is passed on unchanged.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy import sparse

from parsim.errors import ScheduleError
from parsim.schedule.placement.objective import Solution, fits, step_s, why_infeasible
from parsim.schedule.placement.placement_problem import PlacementProblem

AGREEMENT = 1e-6
"""The solver's objective and the choice's own step may differ by this share before the answer counts as inaccurate."""


def solve_milp(placing: PlacementProblem, *, time_limit_s: float = 60.0) -> Solution:
    """Find the fitting choice with the shortest step by branch and cut (HiGHS through cvxpy).

    Args:
        placing: the problem. time_limit_s: of the solver.

    Returns:
        A Solution; its status tells whether optimality is proven. Leaves out what `PlacementProblem` leaves out.

    Raises:
        ScheduleError: cvxpy has no HiGHS.
    """
    import cvxpy as cp

    cvxpy: Any = cp  # it types neither its operators nor its functions

    if "HIGHS" not in cvxpy.installed_solvers():
        raise ScheduleError("cvxpy finds no HiGHS solver; install the package highspy")
    unit_s = _unit_s(placing)
    model: Any = _Columns(placing.in_units(unit_s))
    x = cvxpy.Variable(model.choices, boolean=True)
    constraints = [model.one_each @ x == 1]
    late = cvxpy.Variable(nonneg=True)
    ahead, back = model.forward @ x, model.backward_of @ x
    if model.pairs:
        z = cvxpy.Variable(model.pairs, nonneg=True)
        constraints += [model.sums_z @ z == model.sums_x @ x]
        if model.forbidden.size:
            constraints += [z[model.forbidden] == 0]
        ahead = ahead + model.pair_forward @ z
        back = back + model.pair_backward_of @ z
    scale = np.maximum(placing.limit_bytes, 1.0)
    constraints += [sparse.diags(1 / scale) @ model.memory @ x <= placing.limit_bytes / scale]
    before = model.earlier  # strictly lower triangular: sums over earlier components
    constraints += [late >= (before + sparse.eye(model.components)) @ (model.synchronisation_of @ x) - before @ back]
    objective = ahead + cvxpy.sum(back) + late
    problem = cvxpy.Problem(cvxpy.Minimize(objective), constraints)
    try:
        problem.solve(solver="HIGHS", highs_options={"time_limit": time_limit_s, "mip_rel_gap": 1e-9, "mip_abs_gap": 1e-12})
    except cvxpy.SolverError as error:
        return Solution(choice=(), seconds=np.inf, lower_bound_s=0.0, status="inaccurate", reason=f"HiGHS: {error}")
    if problem.status in ("infeasible", "infeasible_or_unbounded"):
        return Solution(choice=(), seconds=np.inf, lower_bound_s=np.inf, status="infeasible", reason=why_infeasible(placing))
    if x.value is None:
        return Solution(choice=(), seconds=np.inf, lower_bound_s=0.0, status="inaccurate", reason=f"HiGHS: {problem.status}")
    choice = model.choice(np.asarray(x.value))
    seconds = step_s(placing, choice)
    optimum_s = unit_s * float(problem.value)
    agrees = abs(seconds - optimum_s) <= AGREEMENT * max(seconds, 1e-12) and fits(placing, choice)
    if problem.status != "optimal" or not agrees:
        return Solution(
            choice=choice, seconds=seconds, lower_bound_s=0.0, status="inaccurate", reason=f"HiGHS: {problem.status}"
        )
    return Solution(choice=choice, seconds=seconds, lower_bound_s=min(seconds, optimum_s), status="optimal")


def _unit_s(placing: PlacementProblem) -> float:
    """The mean seconds of a component: HiGHS' tolerances are absolute, made for coefficients around 1."""
    seconds = [float((ahead + back).mean()) for ahead, back in zip(placing.forward_s, placing.backward_s, strict=True)]
    return float(np.mean(seconds)) or 1.0


class _Columns:
    """The programme's coefficients as sparse matrices over the columns x and z."""

    def __init__(self, placing: PlacementProblem) -> None:
        sizes = [len(options) for options in placing.options]
        self._first = np.concatenate([[0], np.cumsum(sizes)]).astype(int)
        self.components = len(sizes)
        self.choices = int(self._first[-1])
        owner = np.repeat(np.arange(self.components), sizes)
        columns = np.arange(self.choices)

        def by_component(values: NDArray[np.float64]) -> Any:
            return sparse.csr_array((values, (owner, columns)), shape=(self.components, self.choices))

        self.one_each = by_component(np.ones(self.choices))
        self.forward = np.concatenate(placing.forward_s)
        self.backward_of = by_component(np.concatenate(placing.backward_s))
        self.synchronisation_of = by_component(np.concatenate(placing.synchronisation_s))
        self.memory = sparse.csr_array(np.concatenate(placing.memory_bytes, axis=0).T)
        self.earlier = sparse.csr_array(np.tri(self.components, k=-1))
        self._pairs(placing)

    def _pairs(self, placing: PlacementProblem) -> None:
        edges = list(dict.fromkeys([*placing.conversion_s, *placing.allowed]))
        forward, backward, makers, forbidden = [], [], [], []
        rows_z, columns_z, rows_x, columns_x = [], [], [], []
        row = start = 0
        for one, two in edges:
            many, few = len(placing.options[one]), len(placing.options[two])
            zero = np.zeros((many, few))
            ahead, back = placing.conversion_s.get((one, two), (zero, zero))
            allowed = placing.allowed.get((one, two), np.ones((many, few), dtype=bool))
            number = start + np.arange(many * few).reshape(many, few)
            for side, count, component in ((number, many, one), (number.T, few, two)):
                for option in range(count):
                    rows_z += [row] * side.shape[1]
                    columns_z += side[option].tolist()
                    rows_x.append(row)
                    columns_x.append(int(self._first[component]) + option)
                    row += 1
            forward.append(ahead.ravel())
            backward.append(back.ravel())
            makers.append(np.full(many * few, one))
            forbidden.append(number[~allowed].ravel())
            start += many * few
        self.pairs = start
        if not start:
            return
        self.pair_forward = np.concatenate(forward)
        self.pair_backward_of = sparse.csr_array(
            (np.concatenate(backward), (np.concatenate(makers), np.arange(start))), shape=(self.components, start)
        )
        self.forbidden = np.concatenate(forbidden).astype(int)
        self.sums_z = sparse.csr_array((np.ones(len(rows_z)), (rows_z, columns_z)), shape=(row, start))
        self.sums_x = sparse.csr_array((np.ones(len(rows_x)), (rows_x, columns_x)), shape=(row, self.choices))

    def choice(self, x: NDArray[np.float64]) -> tuple[int, ...]:
        """The option of each component with the largest x."""
        return tuple(int(x[first:last].argmax()) for first, last in zip(self._first[:-1], self._first[1:], strict=True))
