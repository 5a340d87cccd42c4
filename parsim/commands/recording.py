"""A validation as a line of the profile's history."""

from __future__ import annotations

import datetime
import hashlib
from typing import TYPE_CHECKING, Any

from parsim.costs.conformal import Record
from parsim.costs.history import append_record, fingerprint, history_path, read_history
from parsim.errors import CostError
from parsim.execute.environment import describe_environment

if TYPE_CHECKING:
    from parsim.commands.workflow import Answer
    from parsim.execute.measurement import Measurement
    from parsim.report.compare import Comparison

VERSIONS = ("python", "torch", "numpy", "parsim")


def record_of(asked: Answer, seen: Measurement, comparison: Comparison, session: str | None = None) -> Record:
    """What was predicted before any correction, and what was measured.

    Args:
        session: of measurements made together; left out: this one stands alone.
    """
    found = asked.evaluation.result.interval_correction
    if found is None:
        raise CostError("a record needs an interval, and this step was predicted without draws; evaluate it with samples > 0")
    environment, plan = describe_environment(), asked.evaluation.result.plan
    measurement = hashlib.sha256(seen.step_s.tobytes()).hexdigest()[:16]
    return Record(
        model=asked.problem.model.name,
        run=session or measurement,
        predicted_s=found.uncorrected.median,
        low_s=found.uncorrected.p05,
        high_s=found.uncorrected.p95,
        measured_s=comparison.step.measured_s,
        when=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        profile=fingerprint(asked.problem.cluster.profile),
        batch=plan.global_batch,
        plan=plan.summary(),
        ranks=plan.world_size,
        steps=seen.steps,
        rounds=len(seen.step_s),
        aa_floor=None if comparison.aa_floor is None else comparison.aa_floor.median,
        machine=f"{environment['processor']}, {environment['cores']} cores",
        measurement=measurement,
        versions={name: environment["versions"][name] for name in VERSIONS if name in environment["versions"]},
    )


def remember(asked: Answer, record: Record) -> dict[str, Any]:
    """Append the record to the history that the run file's profile has; says where, or why not."""
    table, profile = asked.config.cluster, asked.problem.cluster.profile
    path = history_path(table.profile, table.history)
    if path is None:
        text = f"not recorded: {table.profile} is a shipped profile; say where its history lies: --history FILE"
        return {"path": None, "recorded": False, "text": text}
    if any(known.measurement == record.measurement for known in read_history(path, profile).records):
        return {"path": str(path), "recorded": False, "text": f"this measurement is in {path} already"}
    append_record(path, record)
    return {"path": str(path), "recorded": True, "text": f"recorded in {path}"}
