"""The scheduling problem as the paper prints it ("reading R"), for comparison with the one parsim solves.

    min over strategies  sum_i  max over devices j of D(s_i) [ t_comp(i, s_i, j) + t_comm(i, s_i, j) ]
    s.t.                 sum_i mem(i, s_i, j) <= M_j   for every device j

It is a multiple-choice knapsack. It leaves out what `parsim.schedule.placement.placement_problem` adds: conversions between
neighbours, overlap of
gradient synchronisation, pipelining. Where t_comp does not depend on the strategy it degenerates to the least t_comm of every
component.

Source: arXiv 2503.23186, the optimisation of its section on the adaptive scheduling algorithm. It is read with one set of
devices D(s) per strategy: its formula has device(c_i) = j, which data parallelism contradicts.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import Any

import numpy as np

from parsim.arrays import Floats
from parsim.schedule.placement.objective import Solution


@dataclass(frozen=True, kw_only=True, eq=False)
class PaperProblem:
    """Attributes:
    compute_s, communication_s: [component][strategy, device]; NaN where the device is not in D(s) of that component.
    memory_bytes: [component][strategy, device] (0 off D(s)). limit_bytes: [device].
    """

    compute_s: tuple[Floats, ...]
    communication_s: tuple[Floats, ...]
    memory_bytes: tuple[Floats, ...]
    limit_bytes: Floats

    def seconds(self, component: int) -> Floats:
        """float64 [strategies]: the slowest device of each strategy."""
        slowest: Floats = np.nanmax(self.compute_s[component] + self.communication_s[component], axis=1)
        return slowest


def paper_step_s(problem: PaperProblem, choice: tuple[int, ...]) -> float:
    """Seconds of the objective for one choice.

    Args:
        problem: as the paper prints it. choice: per component the number of its strategy.
    """
    return float(sum(problem.seconds(number)[strategy] for number, strategy in enumerate(choice)))


def paper_fits(problem: PaperProblem, choice: tuple[int, ...]) -> bool:
    """Whether a choice fits every device.

    Args:
        problem: as the paper prints it. choice: per component the number of its strategy.
    """
    used = sum(own[strategy] for own, strategy in zip(problem.memory_bytes, choice, strict=True))
    return bool(np.all(used <= problem.limit_bytes * (1 + 1e-12)))


def _infeasible() -> Solution:
    reason = "memory: no choice of strategies fits every device"
    return Solution(choice=(), seconds=np.inf, lower_bound_s=np.inf, status="infeasible", reason=reason)


def _optimal(problem: PaperProblem, choice: tuple[int, ...]) -> Solution:
    seconds = paper_step_s(problem, choice)
    return Solution(choice=choice, seconds=seconds, lower_bound_s=seconds, status="optimal")


def solve_paper_brute_force(problem: PaperProblem) -> Solution:
    """Solve by trying every choice; the oracle of the other solvers.

    Args:
        problem: a small one: the number of choices is the product of all strategies.
    """
    sizes = [range(len(own)) for own in problem.memory_bytes]
    fitting = (choice for choice in itertools.product(*sizes) if paper_fits(problem, choice))
    best = min(((paper_step_s(problem, choice), choice) for choice in fitting), default=None)
    return _infeasible() if best is None else _optimal(problem, best[1])


def solve_paper_dynamic(problem: PaperProblem, *, most_labels: int = 50_000) -> Solution:
    """Solve exactly by dynamic programming over components: labels (seconds, memory per device), dominated ones dropped.

    A label is also dropped if even the fastest strategies of the remaining components make it slower than a choice that fits.
    So is one beside which even the smallest of them do not fit.

    Args:
        problem: as the paper prints it.
        most_labels: of one component; with more, the answer is "inaccurate". Many devices whose memory is just too small for
            the fastest choice make that many.
    """
    known_s = _known_to_fit_s(problem) * (1 + 1e-12)
    seconds = [problem.seconds(number) for number in range(len(problem.memory_bytes))]
    rest_s = np.append(np.cumsum([own.min() for own in seconds[::-1]])[::-1], 0.0)
    least = np.array([own.min(axis=0) for own in problem.memory_bytes])
    rest_bytes = np.vstack([np.cumsum(least[::-1], axis=0)[::-1], np.zeros_like(problem.limit_bytes)])
    labels: list[tuple[float, Floats, tuple[int, ...]]] = [(0.0, np.zeros_like(problem.limit_bytes), ())]
    limit = problem.limit_bytes * (1 + 1e-12)
    for number, memory in enumerate(problem.memory_bytes):
        grown = [
            (total + float(seconds[number][strategy]), used + memory[strategy], (*choice, strategy))
            for total, used, choice in labels
            for strategy in range(len(memory))
            if total + seconds[number][strategy] + rest_s[number + 1] <= known_s
            and np.all(used + memory[strategy] + rest_bytes[number + 1] <= limit)
        ]
        labels = []
        if len(grown) > most_labels:
            reason = f"{len(grown)} labels after {number + 1} of {len(seconds)} components, of {most_labels} at most"
            return Solution(choice=(), seconds=np.inf, lower_bound_s=float(rest_s[0]), status="inaccurate", reason=reason)
        for label in sorted(grown, key=lambda entry: entry[0]):
            if not any(np.all(kept[1] <= label[1]) for kept in labels):
                labels.append(label)
    return _infeasible() if not labels else _optimal(problem, labels[0][2])


def _known_to_fit_s(problem: PaperProblem) -> float:
    """Seconds of a choice that fits: of those that trade seconds for memory at one rate, the fastest; infinite if none fits."""
    scale = np.maximum(problem.limit_bytes, 1e-30)
    seconds = [problem.seconds(number) for number in range(len(problem.memory_bytes))]
    shares = [np.sum(own / scale, axis=1) for own in problem.memory_bytes]
    longest = max((float(own.max()) for own in seconds), default=0.0)
    best = np.inf
    for rate in (0.0, *np.geomspace(1e-6, 1e6, 49) * longest):
        choice = tuple(int(np.argmin(own + rate * share)) for own, share in zip(seconds, shares, strict=True))
        if paper_fits(problem, choice):
            best = min(best, paper_step_s(problem, choice))
    return best


def solve_paper_milp(problem: PaperProblem) -> Solution:
    """Solve as a mixed-integer linear programme, by HiGHS through cvxpy.

    Args:
        problem: as the paper prints it.
    """
    import cvxpy as cp

    cvxpy: Any = cp  # it types neither its operators nor its functions

    sizes = [len(own) for own in problem.memory_bytes]
    x = cvxpy.Variable(sum(sizes), boolean=True)
    first = np.concatenate([[0], np.cumsum(sizes)]).astype(int)
    one_each = np.zeros((len(sizes), sum(sizes)))
    for number, (start, end) in enumerate(itertools.pairwise(first)):
        one_each[number, start:end] = 1.0
    memory = np.concatenate(problem.memory_bytes, axis=0).T
    scale = np.where(problem.limit_bytes > 1.0, problem.limit_bytes, 1.0)  # a limit may be 0, or below where a context fills it
    seconds = np.concatenate([problem.seconds(number) for number in range(len(sizes))])
    unit_s = float(seconds.mean()) or 1.0  # HiGHS' tolerances are absolute, made for coefficients around 1
    room = (memory / scale[:, None]) @ x <= problem.limit_bytes / scale
    question = cvxpy.Problem(cvxpy.Minimize((seconds / unit_s) @ x), [one_each @ x == 1, room])
    try:
        question.solve(solver="HIGHS", highs_options={"mip_rel_gap": 1e-9, "mip_abs_gap": 1e-12})
    except cvxpy.SolverError as error:
        return Solution(choice=(), seconds=np.inf, lower_bound_s=0.0, status="inaccurate", reason=f"HiGHS: {error}")
    if question.status in ("infeasible", "infeasible_or_unbounded"):
        return _infeasible()
    if x.value is None:
        return Solution(choice=(), seconds=np.inf, lower_bound_s=0.0, status="inaccurate", reason=f"HiGHS: {question.status}")
    values = np.asarray(x.value)
    choice = tuple(int(values[start:end].argmax()) for start, end in itertools.pairwise(first))
    if question.status != "optimal" or not paper_fits(problem, choice):
        return Solution(
            choice=choice, seconds=paper_step_s(problem, choice), lower_bound_s=0.0, status="inaccurate", reason=question.status
        )
    return _optimal(problem, choice)
