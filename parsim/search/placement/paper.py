"""The scheduling problem as the paper prints it ("reading R"), for comparison with the one parsim solves.

    min over strategies  sum_i  max over devices j of D(s_i) [ t_comp(i, s_i, j) + t_comm(i, s_i, j) ]
    s.t.                 sum_i mem(i, s_i, j) <= M_j   for every device j

It is a multiple-choice knapsack. It leaves out what `parsim.search.placement.problem` adds: conversions between
neighbours, overlap of
gradient synchronisation, pipelining. Where t_comp does not depend on the strategy it degenerates to the least t_comm of every
component.

Source: arXiv 2503.23186, the optimisation of its section on the adaptive scheduling algorithm. It is read with one set of
devices D(s) per strategy: its formula has device(c_i) = j, which data parallelism contradicts.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from parsim.model.component import Component
from parsim.numeric import Floats
from parsim.plans.layouts import BATCH, Placement, ValueLayout, input_ends, output_ends
from parsim.plans.mesh import Mesh
from parsim.predict.problem import PlanningProblem
from parsim.search.placement.certificate import relative_difference, timed, verdict_of
from parsim.search.placement.problem import Solution
from parsim.search.prices import Prices, placements_of
from parsim.work import Phase


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
    """Seconds of the objective for one choice."""
    return float(sum(problem.seconds(number)[strategy] for number, strategy in enumerate(choice)))


def paper_fits(problem: PaperProblem, choice: tuple[int, ...]) -> bool:
    """Whether a choice fits every device."""
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
    """Solve as a mixed-integer linear programme, by HiGHS through cvxpy."""
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


# The paper's problem (reading R) of a real model on a real cluster, and its certificate.
#
# One stage over all devices, as in `parsim.search.placement.problem`. A component's strategies are the placements it
# can have. Data parallel: the batch is cut over all devices. Model parallel: one device alone, or a shard of it per device.
# Hybrid: shards over some devices, with replicas over the rest.
#
#     t_comp   forward, backward and the optimizer's step on device j, of the whole batch
#     t_comm   the sum of the gradients over the ranks that hold them alike; and for a component that is not batch-sharded,
#     what
#              it takes to bring its inputs from batch shards to where it reads them, and its outputs back, forward and
#              backward
#     mem      weights, gradients, optimizer state and saved activations of the component on device j
#
# Leaves out, as the formulation does: that neighbours with the same placement need no conversion between them, overlap,
# pipelines, and that components with a common parameter must hold it alike.


MOST_LABELS = 4_000
"""Of the dynamic programme; a second or two."""

BATCH_SHARDS = ValueLayout("full", 1)
"""Every rank holds its own part of the batch, whole."""


def paper_problem_of(
    problem: PlanningProblem, *, microbatches: int = 1, zero_stage: int = 0
) -> tuple[PaperProblem, tuple[tuple[Placement, ...], ...]]:
    """Price every strategy of every component by the problem's costs.

    Args:
        zero_stage: of the memory and the sums.

    Returns:
        The paper's problem, and per component the placements that its strategies stand for. Seconds of one step, bytes per
        device.
    """
    mesh = Mesh(tp=problem.cluster.size)
    samples = problem.global_batch // microbatches
    prices = Prices(problem=problem, mesh=mesh, samples=samples, zero_stage=zero_stage)
    components = problem.model.components
    strategies = tuple(placements_of(each, mesh, samples, places=tuple(range(mesh.tp))) for each in components)
    figures = [_figures(prices, each, choices, microbatches) for each, choices in zip(components, strategies, strict=True)]
    compute, communication, memory = zip(*figures, strict=True)
    devices = problem.cluster.devices
    limits = np.array([device.type.memory_bytes - device.type.context_bytes for device in devices], dtype=np.float64)
    paper = PaperProblem(compute_s=compute, communication_s=communication, memory_bytes=memory, limit_bytes=limits)
    return paper, strategies


def _figures(
    prices: Prices, component: Component, choices: Sequence[Placement], microbatches: int
) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    """float64 [strategy, device]: seconds of computation and of communication (NaN off D(s)), bytes (0 off D(s))."""
    devices = prices.mesh.tp
    compute = np.full((len(choices), devices), np.nan)
    communication, memory = compute.copy(), np.zeros_like(compute)
    phases = (Phase.FORWARD, Phase.BACKWARD) if component.name in prices.differentiable else (Phase.FORWARD,)
    for row, choice in enumerate(choices):
        moved = microbatches * _moved_s(prices, component, choice) + prices.synchronisation_s(component, choice)
        update = prices.update_s(component, choice)
        for device in range(devices):
            if choice.runs_on(device):
                once = sum(prices.compute_on_s(component, choice, phase, device) for phase in phases)
                compute[row, device] = microbatches * once + update
                communication[row, device] = moved
                memory[row, device] = prices.memory_bytes(component, choice, device)
    return compute, communication, memory


def _moved_s(prices: Prices, component: Component, choice: Placement) -> float:
    """One microbatch: inputs from batch shards, outputs back to batch shards, and their gradients the other way."""
    if choice == BATCH:
        return 0.0
    values, tp, total = prices.problem.model.value, prices.mesh.tp, 0.0
    backwards = component.name in prices.differentiable
    for number, name in enumerate(component.inputs):
        value, ends = values[name], input_ends(component, choice, tp, number)
        if value.producer is not None:
            total += prices.conversion_s(value, BATCH_SHARDS, ends.value)
            if value.differentiable and backwards:
                total += prices.conversion_s(value, ends.gradient, BATCH_SHARDS)
    for number, name in enumerate(component.outputs):
        value, ends = values[name], output_ends(component, choice, tp, number)
        if any(name in reader.inputs for reader in prices.problem.model.components):
            total += prices.conversion_s(value, ends.value, BATCH_SHARDS)
            if value.differentiable and backwards:
                total += prices.conversion_s(value, BATCH_SHARDS, ends.gradient)
    return total


def paper_certificate(problem: PlanningProblem, *, microbatches: int = 1) -> dict[str, Any]:
    """The paper's problem of this model and cluster, solved by the dynamic programme and by the MILP.

    Returns:
        Plain JSON with the keys of `Certificate.to_dict`, and `placements`, the strategy of every component (none if nothing
        fits).
    """
    paper, strategies = paper_problem_of(problem, microbatches=microbatches)
    exact = timed(lambda: solve_paper_dynamic(paper, most_labels=MOST_LABELS))
    milp = timed(lambda: solve_paper_milp(paper))
    chosen = exact.solution.choice or milp.solution.choice
    names = [component.name for component in problem.model.components]
    return {
        "relative_difference": relative_difference(exact.solution, milp.solution),
        "verdict": verdict_of(exact.solution, milp.solution),
        "microbatches": microbatches,
        "components": len(names),
        "choices": sum(map(len, strategies)),
        "exact": exact.to_dict(),
        "milp": milp.to_dict(),
        "placements": {name: str(options[number]) for name, options, number in zip(names, strategies, chosen, strict=True)}
        if chosen
        else {},
    }
