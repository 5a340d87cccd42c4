"""A certificate for the placements that a search chose: its exact solver and a MILP solver, on the same problem.

The two share no algorithm (labels over frontiers, `exact`; branch and cut in HiGHS, `milp`), so equal optima vouch for both.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from parsim.errors import ScheduleError, require
from parsim.model.component import Component
from parsim.numeric import Floats
from parsim.plans.layouts import BATCH, PIECES, Placement, input_ends, output_ends
from parsim.plans.mesh import Mesh
from parsim.predict.problem import PlanningProblem
from parsim.search.placement.exact import solve_exactly
from parsim.search.placement.problem import PlacementProblem, Solution, fits, no_choice, step_s, why_infeasible
from parsim.search.prices import Prices, placements_of
from parsim.search.search import Search
from parsim.search.tensor import posed_placement
from parsim.units import format_percent, format_seconds

# The placement problem as a mixed-integer linear programme, solved by HiGHS through cvxpy: the certified answer.
#
#     x[i, k]        component i takes option k (binary; one option each)
#     z[i, k, j, l]  both ends of an edge (continuous; its sums over either end are the other's x, so it is binary as well)
#     e              what of the gradient synchronisation outlasts the backward: at least
#                    sum of sync over components <= i  -  sum of backward over components < i, for every i
#
# Every choice returned is evaluated again by `parsim.search.placement.problem`. A status of the solver
# that is not "optimal" is passed on unchanged.


AGREEMENT = 1e-6
"""The solver's objective and the choice's own step may differ by this share before the answer counts as inaccurate."""


def solve_milp(placing: PlacementProblem, *, time_limit_s: float = 60.0) -> Solution:
    """Find the fitting choice with the shortest step by branch and cut (HiGHS through cvxpy).

    Returns:
        A Solution; its status tells whether optimality is proven. Leaves out what `PlacementProblem` leaves out.

    Raises:
        ScheduleError: cvxpy has no HiGHS.
    """
    require("cvxpy", "proving a placement by a solver")
    import cvxpy as cp
    from scipy import sparse

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
        return no_choice("inaccurate", f"HiGHS: {error}")
    if problem.status in ("infeasible", "infeasible_or_unbounded"):
        return no_choice("infeasible", why_infeasible(placing))
    if x.value is None:
        return no_choice("inaccurate", f"HiGHS: {problem.status}")
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
        from scipy import sparse

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
        from scipy import sparse

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


MOST_LABELS = 20_000
"""Of the exact solver; beyond, its answer is "feasible" with a bound."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SolverRun:
    """The answer of one solver, and the seconds it took."""

    solution: Solution
    taken_s: float

    def to_dict(self) -> dict[str, Any]:
        return {**self.solution.to_dict(), "taken_s": self.taken_s}


@dataclass(frozen=True, slots=True, kw_only=True)
class Certificate:
    """Both answers to one placement problem.

    Attributes:
        microbatches: of the problem. components, choices: how many it has; `choices` counts every component's options.
    """

    microbatches: int
    components: int
    choices: int
    exact: SolverRun
    milp: SolverRun

    @property
    def relative_difference(self) -> float | None:
        """|exact - MILP| over the larger one; None unless both found a choice."""
        one, other = self.exact.solution, self.milp.solution
        if not one.choice or not other.choice:
            return None
        larger = max(one.seconds, other.seconds)
        return abs(one.seconds - other.seconds) / larger if larger else 0.0

    @property
    def verdict(self) -> str:
        """One of agree (both proved the same optimum, or that there is none), disagree (different answers) and unproven."""
        statuses = {self.exact.solution.status, self.milp.solution.status}
        if not statuses <= {"optimal", "infeasible"}:
            return "unproven"
        difference = self.relative_difference
        return "agree" if (len(statuses) == 1 if difference is None else difference <= AGREEMENT) else "disagree"

    def to_dict(self) -> dict[str, Any]:
        return {
            "verdict": self.verdict,
            "microbatches": self.microbatches,
            "components": self.components,
            "choices": self.choices,
            "exact": self.exact.to_dict(),
            "milp": self.milp.to_dict(),
            "relative_difference": self.relative_difference,
        }


def certify(placing: PlacementProblem, microbatches: int, *, hints: Sequence[Sequence[int]] = ()) -> Certificate:
    """Solve the problem twice. A solver that fails is a result: its status is "inaccurate", with the reason.

    Args:
        hints: choices from which the exact solver may begin.
    """
    return Certificate(
        microbatches=microbatches,
        components=len(placing.components),
        choices=sum(len(options) for options in placing.options),
        exact=_timed(lambda: solve_exactly(placing, hints=hints, most_labels=MOST_LABELS)),
        milp=_timed(lambda: solve_milp(placing)),
    )


def _timed(solve: Callable[[], Solution]) -> SolverRun:
    begin_s = time.perf_counter()
    try:
        solution = solve()
    except ScheduleError as error:
        solution = no_choice("inaccurate", str(error))
    return SolverRun(solution=solution, taken_s=time.perf_counter() - begin_s)


def certificate_text(certificate: dict[str, Any]) -> str:
    """`Certificate.to_dict()` as text for people, or the reason why there is none; the paper's certificate below it."""
    if "exact" in certificate:
        lines = _lines("the placement problem", certificate)
    else:
        lines = [f"Certificate: none. {certificate['reason']}"]
    if certificate.get("paper") is not None:
        lines += _lines("the paper's formulation", certificate["paper"])
    return "\n".join(lines)


def _lines(what: str, certificate: dict[str, Any]) -> list[str]:
    lines = [
        f"Certificate of {what} ({certificate['components']} components, {certificate['choices']} choices, "
        f"{certificate['microbatches']} microbatches): {_VERDICTS[certificate['verdict']]}"
    ]
    for name, title in (("exact", "exact solver"), ("milp", "MILP (HiGHS)")):
        run = certificate[name]
        answer = (
            "no choice" if run["seconds"] is None else f"{format_seconds(run['seconds'])}, gap {format_percent(run['gap'])}"
        )
        why = f" ({run['reason']})" if run["reason"] else ""
        lines.append(f"  {title}: {run['status']}, {answer}; took {format_seconds(run['taken_s'])}{why}")
    if certificate["relative_difference"] is not None:
        lines.append(f"  relative difference of the two: {certificate['relative_difference']:.1e}")
    return lines


_VERDICTS = {
    "agree": "both solvers prove the same answer.",
    "disagree": "THE SOLVERS DISAGREE; please report this problem.",
    "unproven": "at least one solver does not prove its answer.",
}


# The certificate of a search: the placement problem of the user's own model and cluster, solved by two solvers.


def certificate_of(problem: PlanningProblem, found: Search | None, strategy: str) -> dict[str, Any]:
    """The certificate for the number of microbatches with the best placement that the search found.

    Args:
        found: the search; None for a plan that was given.

    Returns:
        `Certificate.to_dict()`, or {"reason"} where there is no placement problem.
    """
    if found is None or strategy != "adaptive":
        what = "the plan is given by hand" if found is None else f'strategy "{strategy}" places all components by one rule'
        return {"reason": f'{what}, so no placement is chosen; plan with strategy = "adaptive"'}
    if not found.placements:
        return {"reason": f"no placement problem was posed: {dict(found.skipped).get('adaptive', 'no number of microbatches')}"}
    posed = [entry for entry in found.placements if entry.mesh.pp == 1] or found.placements
    best = min(posed, key=lambda entry: entry.solution.seconds)
    placing, hints = posed_placement(problem, best.microbatches, best.mesh)
    return certify(placing, best.microbatches, hints=hints).to_dict()


# The scheduling problem as the paper prints it ("reading R"), for comparison with the one parsim solves.
#
#     min over strategies  sum_i  max over devices j of D(s_i) [ t_comp(i, s_i, j) + t_comm(i, s_i, j) ]
#     s.t.                 sum_i mem(i, s_i, j) <= M_j   for every device j
#
# It is a multiple-choice knapsack: a `PlacementProblem` without conversions, without sums of gradients beside the backward, and
# without components that must agree. Where t_comp does not depend on the strategy it degenerates to the least t_comm of every
# component.
#
# One stage over all devices. A component's strategies are the placements it can have. Data parallel: the batch is cut over all
# devices. Model parallel: one device alone, or a shard of it per device. Hybrid: shards over some devices, with replicas over
# the rest.
#
#     t_comp   forward, backward and the optimizer's step on device j, of the whole batch
#     t_comm   the sum of the gradients over the ranks that hold them alike; of a component that is not batch-sharded, also
#              what it takes to bring its inputs from batch shards to where it reads them, and its outputs back, both ways
#     mem      weights, gradients, optimizer state and saved activations of the component on device j
#
# Leaves out, as the formulation does: that neighbours with the same placement need no conversion between them, overlap,
# pipelines, and that components with a common parameter must hold it alike.
#
# Source: arXiv 2503.23186, the optimisation of its section on the adaptive scheduling algorithm. It is read with one set of
# devices D(s) per strategy: its formula has device(c_i) = j, which data parallelism contradicts.


def paper_problem_of(problem: PlanningProblem, *, microbatches: int = 1, zero_stage: int = 0) -> PlacementProblem:
    """Price every strategy of every component by the problem's costs.

    Args:
        zero_stage: of the memory and the sums.

    Returns:
        The paper's problem: `forward_s` holds the seconds of a step on the slowest device of each strategy.
    """
    mesh = Mesh(tp=problem.cluster.size)
    samples = problem.global_batch // microbatches
    prices = Prices(problem, mesh, samples, zero_stage=zero_stage)
    components = problem.model.components
    options = tuple(placements_of(each, mesh, samples, places=range(mesh.tp)) for each in components)
    rows = [_strategy_figures(prices, each, choices, microbatches) for each, choices in zip(components, options, strict=True)]
    nothing = tuple(np.zeros(len(choices)) for choices in options)
    devices = problem.cluster.devices
    return PlacementProblem(
        components=tuple(component.name for component in components),
        options=options,
        forward_s=tuple(seconds for seconds, _ in rows),
        backward_s=nothing,
        synchronisation_s=nothing,
        conversion_s={},
        memory_bytes=tuple(memory for _, memory in rows),
        limit_bytes=np.array([float(device.type.room_bytes) for device in devices]),
        allowed={},
    )


def _strategy_figures(
    prices: Prices, component: Component, choices: Sequence[Placement], microbatches: int
) -> tuple[Floats, Floats]:
    """float64 [strategy]: seconds on the slowest device; float64 [strategy, device]: bytes (0 off D(s))."""
    seconds, memory = np.zeros(len(choices)), np.zeros((len(choices), prices.mesh.tp))
    for row, choice in enumerate(choices):
        moved = microbatches * _moved_s(prices, component, choice) + prices.synchronisation_s(component, choice)
        update = prices.update_s(component, choice)
        for device in range(prices.mesh.tp):
            if choice.runs_on(device):
                once = sum(prices.compute_on_s(component, choice, phase, device) for phase in prices.phases(component))
                seconds[row] = max(seconds[row], microbatches * once + update + moved)
                memory[row, device] = prices.memory_bytes(component, choice, device)
    return seconds, memory


def _moved_s(prices: Prices, component: Component, choice: Placement) -> float:
    """One microbatch: inputs from batch shards, outputs back to batch shards, and their gradients the other way."""
    if choice == BATCH:
        return 0.0
    values, tp, total = prices.problem.model.value, prices.mesh.tp, 0.0
    backwards = component.name in prices.differentiable
    for number, name in enumerate(component.inputs):
        value, ends = values[name], input_ends(component, choice, tp, number)
        if value.producer is not None:
            total += prices.conversion_s(value, PIECES, ends.value)
            if value.differentiable and backwards:
                total += prices.conversion_s(value, ends.gradient, PIECES)
    for number, name in enumerate(component.outputs):
        value, ends = values[name], output_ends(component, choice, tp, number)
        if any(name in reader.inputs for reader in prices.problem.model.components):
            total += prices.conversion_s(value, ends.value, PIECES)
            if value.differentiable and backwards:
                total += prices.conversion_s(value, PIECES, ends.gradient)
    return total


def paper_certificate(problem: PlanningProblem, *, microbatches: int = 1) -> dict[str, Any]:
    """The paper's problem of this model and cluster, solved by both solvers.

    Returns:
        Plain JSON with the keys of `Certificate.to_dict`, and `placements`, the strategy of every component (none if nothing
        fits).
    """
    paper = paper_problem_of(problem, microbatches=microbatches)
    certificate = certify(paper, microbatches)
    chosen = certificate.exact.solution.choice or certificate.milp.solution.choice
    placed = zip(paper.components, paper.options, chosen, strict=True) if chosen else ()
    return {**certificate.to_dict(), "placements": {name: str(options[number]) for name, options, number in placed}}
