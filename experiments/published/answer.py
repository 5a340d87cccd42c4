"""The answer to a question: step seconds and memory by parsim, and the spread that its cost parameters give."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from experiments.published.question import Asked
from parsim.costs.estimate import medians_s
from parsim.costs.published import Learnt
from parsim.engines.program import mean_step_s
from parsim.model.formats import Numerics
from parsim.plans.plan import Plan
from parsim.predict.evaluate import REPEATED_STEPS, Evaluation, evaluate
from parsim.predict.problem import PlanningProblem

REMAINDERS = 2 / 12
"""Of the optimizer state of 12 bytes per parameter, where master weights are kept as what 16 bits lack of them."""

RAW = Learnt(text="prices that effects are fitted on")

FEW = 6
"""Microbatches beyond the depth of the pipeline that are simulated; a step is affine in them once the pipeline is full."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """Attributes:
    step_s: median. sigma: of its logarithm, by the spreads of prices. peak_bytes, high_bytes: of the fullest rank, median and
    p95. limit_bytes: of its device. shares: of the step by kind of cost parameter, as d log step / d log parameter."""

    step_s: float
    sigma: float
    peak_bytes: int
    low_bytes: int
    high_bytes: int
    limit_bytes: int
    shares: tuple[tuple[str, float], ...]
    line: str = ""


def answer(asked: Asked) -> Answer:
    """Evaluate the plan of a question."""
    problem = _problem(asked)
    step_s, sigma, shares = _step(problem, asked.plan)
    return Answer(step_s=step_s, sigma=sigma, shares=shares, **_memory(problem, asked))


def with_memory_of(found: Answer, asked: Asked) -> Answer:
    """The same seconds with the memory of another question."""
    return replace(found, **_memory(_problem(asked), asked))


def _memory(problem: PlanningProblem, asked: Asked) -> dict[str, Any]:
    """The fields of an Answer of the rank that is nearest to its limit, less what its framework spares of master weights.

    DeepSpeed adds a microbatch's gradients in 16 bits to those in fp32 when all of them are there (deepspeed/runtime/
    bf16_optimizer.py, update_hp_grads), so it holds both.
    """
    held = problem
    if asked.framework.one_array:
        held = replace(problem, numerics=replace(problem.numerics, optimizer=f"{asked.optimizer}_fused"))
    fullest = max(held.memory(asked.plan), key=lambda entry: entry.high_bytes - entry.limit_bytes)
    state = dict(fullest.lines).get("optimizer_state", 0)
    spared = round(state * REMAINDERS) if asked.framework.remainders else 0
    if asked.kept.in_backward:
        spared += dict(fullest.lines).get("gradients", 0)
    if asked.full_gradients and asked.framework.name == "megatron-deepspeed":
        spared -= dict(fullest.lines).get("gradients", 0) // 2
    return {
        "peak_bytes": fullest.total_bytes - spared,
        "low_bytes": fullest.low_bytes - spared,
        "high_bytes": fullest.high_bytes - spared,
        "limit_bytes": fullest.limit_bytes,
        "line": fullest.describe(),
    }


def _problem(asked: Asked) -> PlanningProblem:
    return PlanningProblem(
        model=asked.model,
        cluster=asked.cluster,
        global_batch=asked.plan.global_batch,
        numerics=Numerics(
            precision="fp16" if asked.scaled else asked.precision,
            optimizer=asked.optimizer,
            master_weights=asked.kept.master_weights,
            state_dtype=asked.kept.state_dtype,
            weight_dtype=asked.kept.weight_dtype,
            gradient_dtype="fp32" if asked.full_gradients else "",
        ),
        learnt=RAW,
        routing=asked.framework.routing,
    )


def _step(problem: PlanningProblem, plan: Plan) -> tuple[float, float, tuple[tuple[str, float], ...]]:
    """Seconds of a step; of many microbatches by two shorter steps, between which it is affine."""
    few = _fewer(plan)
    if not few:
        return _simulated(problem, plan)
    (first, _, _), (second, sigma, shares) = (_simulated(_of(problem, entry), entry) for entry in few)
    each = (second - first) / (few[1].microbatches - few[0].microbatches)
    return second + each * (plan.microbatches - few[1].microbatches), sigma, shares


def _of(problem: PlanningProblem, plan: Plan) -> PlanningProblem:
    return replace(problem, global_batch=plan.global_batch)


def _fewer(plan: Plan) -> tuple[Plan, Plan] | None:
    """Two plans with fewer microbatches; None where that saves nothing."""
    pp = plan.mesh.pp
    counts = (pp, 2 * pp) if plan.chunks > 1 else (pp + 2, pp + 2 + FEW // 2)
    if plan.microbatches <= sum(counts):
        return None
    first, second = (
        replace(plan, microbatches=count, global_batch=plan.global_batch // plan.microbatches * count) for count in counts
    )
    return first, second


def _simulated(problem: PlanningProblem, plan: Plan) -> tuple[float, float, tuple[tuple[str, float], ...]]:
    """Seconds, and the spread to first order: every cost parameter moved by its sigma, one at a time."""
    found = evaluate(problem, plan, samples=0, fold=True)
    shares = sensitivities(found)
    sigma = math.sqrt(sum((share * spread) ** 2 for _, share, spread in shares))
    return found.result.step_s.median, sigma, tuple((name, share) for name, share, _ in shares)


def sensitivities(found: Evaluation) -> list[tuple[str, float, float]]:
    """(parameter, d log step / d log seconds, its sigma), for every parameter that prices share."""
    spreads: dict[str, float] = {}
    names: dict[str, int] = {}
    for estimate in found.estimates:
        for name, sigma in estimate.parameters:
            names.setdefault(name, len(names))
            spreads[name] = max(spreads.get(name, 0.0), sigma)
    medians = medians_s(found.estimates)
    rows = [medians]
    for name in names:
        held = np.array([dict(estimate.parameters).get(name, 0.0) for estimate in found.estimates])
        rows.append(medians * np.exp(held))
    unit = found.compiled.columns.unit
    times = mean_step_s(found.compiled, np.array(rows), found.overlap, steps=REPEATED_STEPS, unit=unit)
    return [
        (name, float(np.log(times[1 + number] / times[0])) / max(spreads[name], 1e-9), spreads[name])
        for name, number in names.items()
    ]
