"""The row of a point: what it answers, with the unit in every column's name."""

from __future__ import annotations

from typing import Any

from parsim.app.answer import Answer
from parsim.app.large import HOUR_S, running_costs
from parsim.plans.plan import Plan, plan_in_words
from parsim.predict.result import Interval
from parsim.report.sketch import sketch

OK, DOES_NOT_FIT, FAILED = "ok", "does_not_fit", "failed"
MILLION = 1e6
JOULES_PER_KWH = 3.6e6

CATEGORIES = ("compute_s", "exposed_communication_s", "bubble_s", "load_s", "host_s", "idle_s")
"""Of a step, mean over the ranks; they sum to `one_step_s`."""


def _three(name: str) -> list[str]:
    """The columns of a median and of its 90% interval."""
    return [name.format(part) for part in ("", "_p05", "_p95")]


COLUMNS = (
    *("status", "reason", "strategy", "division", "plan", "plan_in_words", "devices", "global_batch"),
    *_three("step{}_s"),
    *_three("throughput{}_samples_per_s"),
    *_three("epoch{}_s"),
    *_three("usd_per_million_samples{}"),
    *_three("usd_per_epoch{}"),
    *_three("kwh_per_million_samples{}"),
    *_three("kwh_per_epoch{}"),
    *_three("peak_memory{}_bytes"),
    *("memory_limit_bytes", "fit_probability", "communication_fraction", "bubble_fraction", "one_step_s"),
    *CATEGORIES,
    *("tokens_per_s", "mfu"),
    *_three("run{}_s"),
    *_three("run_usd{}"),
    *_three("run_kwh{}"),
    "warnings",
)
"""After the swept fields, in every table; then `memory_LINE_bytes` of the fullest rank. A row also has `timeline`, a sketch."""

SKETCHED_RANKS = 4
"""Of a timeline in the explorer."""
MEMORY_PREFIX, MEMORY_SUFFIX = "memory_", "_bytes"


def failed_row(reason: str) -> dict[str, Any]:
    """The row of a point without an answer. Args: reason: the error's own message."""
    return {"status": FAILED, "reason": reason}


def row_of(answer: Answer, samples_per_epoch: int | None) -> dict[str, Any]:
    """Columns of a point that was answered; what is not known is left out.

    Args:
        answer: to the point's question. samples_per_epoch: of the data; None: not known.
    """
    evaluation, problem = answer.evaluation, answer.problem
    result, cluster = evaluation.result, problem.cluster
    step, batch = result.step_s, problem.global_batch
    fullest = max(evaluation.memory, key=lambda rank: rank.total_bytes)
    least = min(evaluation.memory, key=lambda rank: (rank.fit_probability, -rank.total_bytes))
    risk = "may run out of memory" if least.fits else "does not fit"
    row: dict[str, Any] = {
        "status": OK if result.fits else DOES_NOT_FIT,
        "reason": "" if least.fits and least.is_safe else f"{risk}: {least.describe()}",
        "strategy": result.strategy,
        "division": division(result.plan),
        "plan": result.plan.summary(),
        "plan_in_words": plan_in_words(result.plan),
        "devices": cluster.size,
        "global_batch": batch,
        **_interval("step{}_s", step),
        **_interval("throughput{}_samples_per_s", result.throughput_samples_per_s),
        "peak_memory_bytes": fullest.total_bytes,
        "peak_memory_p05_bytes": fullest.low_bytes,
        "peak_memory_p95_bytes": fullest.high_bytes,
        "memory_limit_bytes": fullest.limit_bytes,
        "fit_probability": result.fit_probability,
        "communication_fraction": result.communication_fraction,
        "bubble_fraction": result.bubble_fraction,
        "warnings": "; ".join(result.warnings),
    }
    ranks = evaluation.breakdown
    row |= {name: sum(getattr(rank, name) for rank in ranks) / len(ranks) for name in CATEGORIES}
    row["one_step_s"] = sum(row[name] for name in CATEGORIES)
    row |= _spent(answer, samples_per_epoch)
    # The sketch shows the first rank of a few stages: the first ones and the last.
    first = {result.plan.stage_of_rank(rank): rank for rank in reversed(evaluation.folding.ranks)}
    stages = sorted(first)
    stages[SKETCHED_RANKS - 1 :] = stages[SKETCHED_RANKS - 1 :][-1:]
    lanes = sketch(evaluation.compiled, evaluation.timeline, [first[stage] for stage in stages])
    row["timeline"] = [list(lane) for lane in lanes]
    row["memory_lines"] = {name: size for name, size in fullest.lines if size}
    return row


def _spent(answer: Answer, samples_per_epoch: int | None) -> dict[str, Any]:
    """Time, price and energy per epoch, per million samples and of the whole run, as far as they are known."""
    problem, result = answer.problem, answer.evaluation.result
    step, batch = result.step_s, problem.global_batch
    operation = running_costs(answer.question, problem)
    usd_per_s = None if operation.usd_per_hour is None else operation.usd_per_hour * problem.cluster.size / HOUR_S
    watts = None if operation.busy_power_w is None else operation.busy_power_w * result.plan.world_size
    spent: dict[str, Any] = {}
    for name, rate in (("usd", usd_per_s), ("kwh", None if watts is None else watts / JOULES_PER_KWH)):
        if rate is None:
            continue
        spent |= _interval(f"{name}_per_million_samples{{}}", step.times(rate * MILLION / batch))
        if samples_per_epoch is not None:
            spent |= _interval(f"{name}_per_epoch{{}}", step.times(rate * -(-samples_per_epoch // batch)))
    if samples_per_epoch is not None:
        spent |= _interval("epoch{}_s", step.times(-(-samples_per_epoch // batch)))
    figures = answer.prediction.quoted
    if figures is not None:
        spent |= {"tokens_per_s": figures.tokens_per_s.median, "mfu": figures.mfu}
        if (run := figures.run) is not None:
            totals = {"run{}_s": run.losses.days * 24 * HOUR_S, "run_usd{}": run.usd, "run_kwh{}": run.energy_kwh}
            for column, value in totals.items():
                spent |= {} if value is None else _interval(column, step.times(value / step.median))
    return spent


def division(plan: Plan) -> str:
    """`pp2 dp4 zero1`: how the work is divided, without microbatches and buckets."""
    parts = [f"{axis}{size}" for axis in ("pp", "dp", "tp", "cp", "ep") if (size := getattr(plan.mesh, axis)) > 1]
    parts += [f"zero{plan.zero_stage}"] if plan.zero_stage else []
    parts += [f"dp_shard{plan.mesh.dp_shard}"] if plan.mesh.dp_shard else []
    return " ".join(parts) or "one device"


def _interval(name: str, interval: Interval) -> dict[str, float]:
    """Median, p05 and p95 under the names of their columns."""
    return dict(zip(_three(name), (interval.median, interval.p05, interval.p95), strict=True))
