"""Results as pandas DataFrames: units stand in the column names, and nothing is rounded."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from parsim.predict.breakdown import RankBreakdown
from parsim.predict.memory import RankMemory
from parsim.predict.result import PlanResult
from parsim.program.taskgraph import TaskGraph, parse_resource
from parsim.timeline import Timeline
from parsim.work import kind_of

if TYPE_CHECKING:
    import pandas as pd


BREAKDOWN_COLUMNS = (
    "rank",
    "step_s",
    "compute_s",
    "load_s",
    "host_s",
    "exposed_communication_s",
    "bubble_s",
    "idle_s",
    "communication_busy_s",
)
MEMORY_COLUMNS = ("rank", "line", "size_bytes", "p05_bytes", "p95_bytes")
TIMELINE_COLUMNS = (
    "task",
    "kind",
    "rank",
    "stream",
    "component",
    "stage",
    "replica",
    "microbatch",
    "bucket",
    "value",
    "start_s",
    "end_s",
    "duration_s",
)


def plans_frame(results: Sequence[PlanResult], chosen: int | None) -> pd.DataFrame:
    """One row per plan, in the order given. Args: chosen: the number of the chosen one, or None."""
    rows = [
        {
            "strategy": result.strategy,
            "plan": result.plan.summary(),
            "chosen": number == chosen,
            "step_s": result.step_s.median,
            "step_p05_s": result.step_s.p05,
            "step_p95_s": result.step_s.p95,
            "throughput_samples_per_s": result.throughput_samples_per_s.median,
            "communication_fraction": result.communication_fraction,
            "communication_busy_fraction": result.communication_busy_fraction,
            "exposed_communication_s": result.exposed_communication_s,
            "bubble_fraction": result.bubble_fraction,
            "peak_memory_bytes": max(result.peak_memory_bytes),
            "fits": result.fits,
            "fit_probability": result.fit_probability,
            "reason": result.reason,
        }
        for number, result in enumerate(results)
    ]
    return frame(rows, list(rows[0]))


def breakdown_frame(breakdown: Sequence[RankBreakdown]) -> pd.DataFrame:
    """One row per rank, seconds by category."""
    return frame([asdict(rank) | {"step_s": rank.step_s} for rank in breakdown], BREAKDOWN_COLUMNS)


def memory_frame(memory: Sequence[RankMemory]) -> pd.DataFrame:
    """One row per rank and line, bytes."""
    rows = []
    for rank in memory:
        spreads = {name: (low, high) for name, low, high in rank.spreads}
        for line, size_bytes in rank.lines:
            low, high = spreads.get(line, (size_bytes, size_bytes))
            rows.append({"rank": rank.rank, "line": line, "size_bytes": size_bytes, "p05_bytes": low, "p95_bytes": high})
    return frame(rows, MEMORY_COLUMNS)


def timeline_frame(graph: TaskGraph, timeline: Timeline) -> pd.DataFrame:
    """One row per span in order of start, seconds."""
    resources = [parse_resource(name) for name in timeline.resources]
    rows: list[dict[str, Any]] = []
    for number in timeline.start_s.argsort(kind="stable").tolist():
        task = graph.tasks[int(timeline.task[number])]
        resource = resources[int(timeline.resource[number])]
        start_s, end_s = float(timeline.start_s[number]), float(timeline.end_s[number])
        rows.append(
            {
                "task": task.index,
                "kind": kind_of(task.work),
                "rank": resource.rank,
                "stream": resource.stream,
                "component": task.origin.component,
                "stage": task.origin.stage,
                "replica": task.origin.replica,
                "microbatch": task.origin.microbatch,
                "bucket": task.origin.bucket,
                "value": task.origin.value,
                "start_s": start_s,
                "end_s": end_s,
                "duration_s": end_s - start_s,
            }
        )
    return frame(rows, TIMELINE_COLUMNS).astype(dict.fromkeys(("stage", "replica", "microbatch", "bucket"), "Int64"))


def frame(rows: Sequence[dict[str, Any]], columns: Sequence[str]) -> pd.DataFrame:
    """A DataFrame with these columns in this order, also without rows."""
    import pandas as pd

    return pd.DataFrame(list(rows), columns=list(columns))
