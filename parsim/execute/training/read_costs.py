"""What reading batches costs, from what readers told of their reads: seconds per read and per sample, with their spread."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from parsim.costs.loading import MeasuredLoading
from parsim.errors import DataError
from parsim.execute.processes.pinning import available_cores

BUDGET_S = 1.0
"""Seconds of reading, at most, behind the first sample."""
PATIENCE_S = 20.0
"""Seconds until a dataset has to be made and to have given its first sample."""
ENOUGH, LEAST = 12, 3
"""Reads of a whole batch per reader: after ENOUGH a mean that is known to PRECISION will do; from fewer than LEAST it is known
to FEW_SIGMA at best."""
FEW_SIGMA = 0.25
SIGMA = 0.05
"""Assumed relative difference between reading before a training and in it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Line:
    """Of one reader: seconds beside the samples, of a read right behind another, per sample, per sample that is passed."""

    first_s: float
    again_s: float
    sample_s: float
    passing_s: float
    whole_s: float
    error: float
    spread: float
    core_share: float


def merged(told: Sequence[Sequence[dict[str, Any]]], *, global_batch: int, workers: int) -> MeasuredLoading:
    """The mean over the readers.

    Args:
        told: the entries of each (`load_timing`). global_batch: samples of a step. workers: of each rank.

    Raises:
        DataError: one of them read no batch, or failed.
    """
    for entries in told:
        failed = next((entry["failed"] for entry in entries if "failed" in entry), None)
        if failed is not None:
            raise DataError(failed)
        if not any("prepared_s" in entry for entry in entries):
            raise DataError(f"the dataset was not made within {PATIENCE_S:.0f} s")
        if not any("warm_up_s" in entry for entry in entries):
            raise DataError(f"its first sample was not there within {PATIENCE_S:.0f} s")
        if not any(entry.get("kind") == "whole" for entry in entries):
            raise DataError(f"a second sample was not there {2 * BUDGET_S:.0f} s after the first")
    lines = [_line(entries) for entries in told]
    reads = [entry for entries in told for entry in entries if "samples" in entry]
    handovers = [entry["seconds"] for entries in told for entry in entries if entry.get("kind") == "handover"]
    whole_s = np.array([line.whole_s for line in lines])
    between = float(np.std(whole_s) / whole_s.mean()) if len(lines) > 1 else 0.0
    error = math.sqrt(sum(line.error**2 for line in lines)) / len(lines)
    wholes = sum(entry["kind"] == "whole" for entry in reads)
    few = FEW_SIGMA if wholes < LEAST * len(lines) else 0.0
    batch = max(entry["samples"] for entry in reads if entry["kind"] == "whole")

    def mean(values: Sequence[float]) -> float:
        return float(np.mean(values))

    return MeasuredLoading(
        first_s=mean([line.first_s for line in lines]),
        again_s=mean([line.again_s for line in lines]),
        sample_s=mean([line.sample_s for line in lines]),
        passing_s=mean([line.passing_s for line in lines]),
        handover_s=float(np.median(handovers)) if handovers else 0.0,
        workers=workers,
        cores=len(available_cores()),
        core_share=mean([line.core_share for line in lines]),
        sigma=math.hypot(SIGMA, error, between, few),
        repeat_sigma=mean([line.spread for line in lines]),
        global_batch=global_batch,
        batch=batch,
        batches=wholes,
        samples=sum(entry["samples"] for entry in reads),
        readers=len(lines),
        taken_s=max(sum(entry["seconds"] for entry in entries if "samples" in entry) for entries in told),
        prepared_s=max(entry["prepared_s"] for entries in told for entry in entries if "prepared_s" in entry),
        warm_up_s=max(entry["warm_up_s"] for entries in told for entry in entries if "warm_up_s" in entry),
    )


def _line(entries: Sequence[dict[str, Any]]) -> _Line:
    """Seconds per read and per sample, through the means of whole batches and of parts."""
    by_kind: dict[str, list[dict[str, Any]]] = {}
    for entry in entries:
        if "samples" in entry:
            by_kind.setdefault(entry["kind"], []).append(entry)
    wholes = by_kind["whole"]
    batch, whole_s = wholes[0]["samples"], _mean_s(wholes)
    if "part" in by_kind:
        part = by_kind["part"][0]["samples"]
        sample_s = max(0.0, (whole_s - _mean_s(by_kind["part"])) / (batch - part))
        first_s = max(0.0, whole_s - batch * sample_s)
    else:  # of one sample the two cannot be told apart
        part, sample_s, first_s = batch, whole_s / batch, 0.0
    sample_s = (whole_s - first_s) / batch
    again_s = max(0.0, _mean_s(by_kind["again"]) - part * sample_s) if "again" in by_kind else first_s
    passing_s = 0.0
    if "passed" in by_kind:
        passing_s = (_mean_s(by_kind["passed"]) - first_s - sample_s) / (batch - 1)
        passing_s = min(max(0.0, passing_s), sample_s)
    quiet = _quiet(wholes) or wholes
    seconds = [entry["seconds"] for entry in quiet]
    return _Line(
        first_s=first_s,
        again_s=min(again_s, first_s) if "part" in by_kind else again_s,
        sample_s=sample_s - passing_s,
        passing_s=passing_s,
        whole_s=whole_s,
        error=standard_error(seconds),
        spread=float(np.std(seconds) / np.mean(seconds)),
        core_share=min(1.0, sum(entry["cpu_s"] for entry in quiet) / sum(seconds)),
    )


def _mean_s(entries: Sequence[dict[str, Any]]) -> float:
    """The mean of the reads that nothing interrupted; the median of all where most were interrupted."""
    quiet = [entry["seconds"] for entry in _quiet(entries)]
    return float(np.mean(quiet)) if quiet else float(np.median([entry["seconds"] for entry in entries]))


def _quiet(entries: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The reads that nothing interrupted; none where they are the lesser part."""
    quiet = [entry for entry in entries if not entry["disturbed"]]
    return quiet if 2 * len(quiet) >= len(entries) else []


def standard_error(seconds: Sequence[float]) -> float:
    """Of the mean, relative to it."""
    mean = float(np.mean(seconds))
    return float(np.std(seconds, ddof=1)) / math.sqrt(len(seconds)) / mean if len(seconds) > 1 and mean > 0 else FEW_SIGMA
