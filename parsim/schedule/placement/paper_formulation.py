"""The scheduling problem as the paper prints it ("reading R"), for comparison with the one parsim solves.

    min over strategies  sum_i  max over devices j of D(s_i) [ t_comp(i, s_i, j) + t_comm(i, s_i, j) ]
    s.t.                 sum_i mem(i, s_i, j) <= M_j   for every device j

It is a multiple-choice knapsack. It leaves out what `parsim.schedule.placement.placement_problem` adds: conversions between
neighbours, overlap of
gradient synchronisation, pipelining. Where t_comp does not depend on the strategy it degenerates to the least t_comm of every
component.

Source: arXiv 2503.23186, the optimisation of its section on the adaptive scheduling algorithm, read with one set of devices
D(s) per strategy, as its formula has device(c_i) = j, which data parallelism contradicts.
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


def solve_paper_dynamic(problem: PaperProblem) -> Solution:
    """Solve exactly by dynamic programming over components: labels (seconds, memory per device), dominated ones dropped.

    Args:
        problem: as the paper prints it.
    """
    labels: list[tuple[float, Floats, tuple[int, ...]]] = [(0.0, np.zeros_like(problem.limit_bytes), ())]
    limit = problem.limit_bytes * (1 + 1e-12)
    for number, memory in enumerate(problem.memory_bytes):
        seconds = problem.seconds(number)
        grown = [
            (total + float(seconds[strategy]), used + memory[strategy], (*choice, strategy))
            for total, used, choice in labels
            for strategy in range(len(memory))
            if np.all(used + memory[strategy] <= limit)
        ]
        labels = []
        for label in sorted(grown, key=lambda entry: entry[0]):
            if not any(np.all(kept[1] <= label[1]) for kept in labels):
                labels.append(label)
    return _infeasible() if not labels else _optimal(problem, labels[0][2])


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
    scale = np.maximum(problem.limit_bytes, 1e-30)
    seconds = np.concatenate([problem.seconds(number) for number in range(len(sizes))])
    question = cvxpy.Problem(
        cvxpy.Minimize(seconds @ x), [one_each @ x == 1, (memory / scale[:, None]) @ x <= problem.limit_bytes / scale]
    )
    question.solve(solver="HIGHS", highs_options={"mip_rel_gap": 1e-9})
    if question.status in ("infeasible", "infeasible_or_unbounded"):
        return _infeasible()
    values = np.asarray(x.value)
    choice = tuple(int(values[start:end].argmax()) for start, end in itertools.pairwise(first))
    if question.status != "optimal" or not paper_fits(problem, choice):
        return Solution(
            choice=choice, seconds=paper_step_s(problem, choice), lower_bound_s=0.0, status="inaccurate", reason=question.status
        )
    return _optimal(problem, choice)
