"""What the record says: errors beside the A/A floor, coverage, order, regret; from one row per case and record."""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from experiments.common.accuracy import accuracy, rank_correlation, regret
from experiments.this_machine.ablation import MEASURED_SPEED, Compared, ablated
from parsim.costs.history import ValidationRecord, coverage_split

KINDS = ("forward", "backward", "optimizer", "all_reduce", "all_gather", "reduce_scatter", "all_to_all", "send_recv", "load")


@dataclass(frozen=True, kw_only=True)
class CaseRow:
    """One case in one record.

    Attributes:
        calibrated: the model's components were measured. launch: by the ranks it had; "four" shares cores.
        low_s, high_s: the predicted 90% interval of the mean step, as drawn.
        slowness: how many times as long the probe beside its rounds took as while calibrating, mean over ranks and rounds.
            at_speed_s: predicted at that pace, round by round and rank by rank.
        refreshed_s: predicted at the pace of 20 seconds right before the launch (`parsim calibrate --refresh`).
        aa_median, aa_p95: the case against itself. aa_at_speed: both of its rounds over the slowness beside them.
        compute_s, cpu_s: predicted computation, measured processor time of all ranks, per step.
        kinds: by kind of task, predicted (times the slowness) and measured seconds per step summed over its tasks.
        without: as `at_speed_s`, by the name of the correction that is left out. rounds_s: measured step of each round.
        probes_s: seconds of the probe beside each round, as it was measured.
    """

    record: str
    launch: str
    model: str
    label: str
    ranks: int
    calibrated: bool
    predicted_s: float
    low_s: float
    high_s: float
    slowness: float
    at_speed_s: float
    refreshed_s: float
    measured_s: float
    aa_median: float
    aa_p95: float
    aa_at_speed: tuple[float, float]
    compute_s: float
    cpu_s: float
    kinds: dict[str, tuple[float, float]]
    without: dict[str, float] = field(default_factory=dict)
    rounds_s: list[float] = field(default_factory=list)
    probes_s: list[Any] = field(default_factory=list)

    @property
    def error(self) -> float:
        return self.predicted_s / self.measured_s - 1.0

    @property
    def at_its_speed(self) -> CaseRow:
        """The row with what is said at the pace beside it; the interval goes with it."""
        median, p95 = self.aa_at_speed
        return replace(self.times(self.at_speed_s / self.predicted_s), aa_median=median, aa_p95=p95)

    @property
    def as_refreshed(self) -> CaseRow:
        """The row with what was said right before its launch; the interval goes with it."""
        return self.times(self.refreshed_s / self.predicted_s)

    def times(self, factor: float) -> CaseRow:
        """The row with so many times the prediction and its interval."""
        low_s, high_s = self.low_s * factor, self.high_s * factor
        return replace(self, predicted_s=self.predicted_s * factor, low_s=low_s, high_s=high_s)

    def to_dict(self) -> dict[str, Any]:
        """One line of the table."""
        line = asdict(self)
        kinds = line.pop("kinds")
        for nested in ("without", "rounds_s", "probes_s"):
            line.pop(nested)
        line["aa_at_speed_median"], line["aa_at_speed_p95"] = line.pop("aa_at_speed")
        line["error_percent"] = round(100 * self.error, 2)
        for kind in KINDS:
            line[f"{kind}_predicted_s"], line[f"{kind}_measured_s"] = kinds.get(kind, (0.0, 0.0))
        return line


Groups = dict[str, Callable[[CaseRow], bool]]
"""By name, which rows belong to it."""


def judged(rows: Sequence[CaseRow]) -> dict[str, Any]:
    """All figures of the record, as plain JSON."""
    groups: Groups = {
        "all": lambda row: True,
        "a core per rank": lambda row: row.launch == "two",
        "ranks share cores": lambda row: row.launch == "four",
        "a link of 1 Gbit/s": lambda row: row.launch == "shaped",
        "calibrated models": lambda row: row.calibrated,
        "models never measured": lambda row: not row.calibrated,
        "calibrated, a core per rank": lambda row: row.calibrated and row.launch == "two",
        "never measured, a core per rank": lambda row: not row.calibrated and row.launch == "two",
    }
    models = dict.fromkeys(row.model for row in rows)
    groups |= {name: (lambda row, name=name: row.model == name) for name in models}
    plans: Groups = {label: (lambda row, label=label: row.label == label) for label in dict.fromkeys(row.label for row in rows)}
    records: Groups = {name: (lambda row, name=name: row.record == name) for name in dict.fromkeys(row.record for row in rows)}
    paced, refreshed = [row.at_its_speed for row in rows], [row.as_refreshed for row in rows]
    return {
        "cases": len({(row.launch, row.model, row.label) for row in rows}),
        "records": len(records),
        "errors": errors_by(rows, groups),
        "by plan": errors_by(rows, plans),
        "by record": errors_by(rows, records),
        "at the pace beside them": errors_by(paced, groups),
        "by plan, at the pace beside them": errors_by(paced, plans),
        "by record, at the pace beside them": errors_by(paced, records),
        "refreshed before the launch": errors_by(refreshed, dict(itertools.islice(groups.items(), 6))),
        "by record, refreshed before the launch": errors_by(refreshed, records),
        "less what all cases of a launch have in common": errors_by(
            without_common_factors(rows), dict(itertools.islice(groups.items(), 4))
        ),
        "slowness": {
            f"{record} {launch}": statistics.mean(row.slowness for row in rows if (row.record, row.launch) == (record, launch))
            for record, launch in dict.fromkeys((row.record, row.launch) for row in rows)
        },
        "by kind": kinds_of(rows),
        "coverage": asdict(coverage_split([record_of(row) for row in rows])),
        "coverage, at the pace beside them": asdict(coverage_split([record_of(row) for row in paced])),
        "coverage, refreshed before the launch": asdict(coverage_split([record_of(row) for row in refreshed])),
        "choice": choice_of(rows),
        "corrections": corrections_of(rows),
        "processor time": processor_time(rows),
    }


def without_common_factors(rows: Sequence[CaseRow]) -> list[CaseRow]:
    """The rows with each prediction times the geometric mean, over its launch in its record, of measured over predicted: what
    is left if it was known how fast the machine was as a whole. No prediction: it has seen what it predicts."""
    logs: dict[tuple[str, str], list[float]] = {}
    for row in rows:
        logs.setdefault((row.record, row.launch), []).append(math.log(row.measured_s / row.predicted_s))
    return [row.times(math.exp(statistics.mean(logs[row.record, row.launch]))) for row in rows]


def record_of(row: CaseRow) -> ValidationRecord:
    """The row as a history keeps it."""
    return ValidationRecord(
        model=row.model,
        run=row.record,
        predicted_s=row.predicted_s,
        low_s=row.low_s,
        high_s=row.high_s,
        measured_s=row.measured_s,
        plan=row.label,
        ranks=row.ranks,
        aa_floor=row.aa_median,
    )


def corrections_of(rows: Sequence[CaseRow]) -> dict[str, Any]:
    """By correction, what it does to the error (`ablation.ablated`). Rows of older records lack most of them."""
    found: dict[str, list[Compared]] = {}
    for row in rows:
        for name, seconds in {MEASURED_SPEED: row.predicted_s, **row.without}.items():
            case = f"{row.launch} {row.model} {row.label}"
            run = Compared(case=case, with_s=row.at_speed_s, without_s=seconds, measured_s=row.measured_s)
            found.setdefault(name, []).append(run)
    return {name: ablated(runs) for name, runs in found.items()}


def errors_by(rows: Sequence[CaseRow], groups: Groups) -> dict[str, dict[str, float] | None]:
    """`errors_of` those rows of each group."""
    return {name: errors_of([row for row in rows if chosen(row)]) for name, chosen in groups.items()}


def errors_of(rows: Sequence[CaseRow]) -> dict[str, float] | None:
    """Of the steps, with the A/A floor of the same cases and the targets that follow from it; None without a row."""
    if not rows:
        return None
    found = asdict(accuracy([row.predicted_s for row in rows], [row.measured_s for row in rows]))
    aa_median = statistics.median(row.aa_median for row in rows)
    aa_p95 = statistics.median(row.aa_p95 for row in rows)
    inside = sum(row.low_s <= row.measured_s <= row.high_s for row in rows)
    return {
        **found,
        "aa_median": aa_median,
        "aa_p95": aa_p95,
        "target_median": max(0.05, aa_median),
        "target_p95": max(0.12, 1.5 * aa_p95),
        "covered_as_drawn": inside / len(rows),
    }


def kinds_of(rows: Sequence[CaseRow]) -> dict[str, dict[str, float]]:
    """By kind of task: its share of the measured task seconds, and the bias of its sum over cases."""
    totals = {kind: [row.kinds[kind] for row in rows if row.kinds.get(kind, (0.0, 0.0))[1] > 0] for kind in KINDS}
    everything = sum(measured for pairs in totals.values() for _, measured in pairs)
    return {
        kind: {
            "share": sum(measured for _, measured in pairs) / everything,
            "median_error": statistics.median(abs(predicted / measured - 1) for predicted, measured in pairs),
            "bias": statistics.median(predicted / measured - 1 for predicted, measured in pairs),
        }
        for kind, pairs in totals.items()
        if pairs
    }


def choice_of(rows: Sequence[CaseRow]) -> dict[str, dict[str, float]]:
    """Per model, over the records: order of its plans as predicted and measured, and what the predicted choice loses."""
    found = {}
    for name, launches in (("a core per rank", ("two",)), ("all plans on this machine", ("two", "four"))):
        orders, losses, sizes = [], [], []
        for _, group in itertools.groupby(sorted(rows, key=_by_question), key=_by_question):
            plans = [row for row in group if row.launch in launches]
            if len(plans) < 2:
                continue
            sizes.append(len(plans))
            predicted, measured = [row.predicted_s for row in plans], [row.measured_s for row in plans]
            orders.append(rank_correlation(predicted, measured))
            losses.append(regret(predicted, measured, floor=statistics.median(row.aa_median for row in plans)))
        if orders:
            found[name] = {
                "questions": len(orders),
                "plans_fewest": min(sizes),
                "plans_most": max(sizes),
                "rank_correlation_median": statistics.median(orders),
                "rank_correlation_worst": min(orders),
                "regret_mean": statistics.mean(losses),
                "regret_worst": max(losses),
            }
    return found


def _by_question(row: CaseRow) -> tuple[str, str]:
    return row.record, row.model


def processor_time(rows: Sequence[CaseRow]) -> dict[str, float]:
    """One-rank cases: the error against the processor's seconds, which leave out what other programs took."""
    alone = [row for row in rows if row.ranks == 1]
    if not alone:
        return {}
    return asdict(accuracy([row.predicted_s for row in alone], [row.cpu_s for row in alone]))


def printed(document: dict[str, Any]) -> str:
    """The tables for people."""
    lines = [f"{document['machine']}, {document['date']}: {document['cases']} cases, {document['records']} records", ""]
    lines.append("| steps of | n | median | p95 | worst | bias | A/A median | A/A p95 | covered as drawn |")
    lines.append("|---|---|---|---|---|---|---|---|---|")
    speed, before = "at the pace beside them", "refreshed before the launch"
    common = "less what all cases of a launch have in common"
    parts = ("errors", before, speed, common, "by plan", f"by plan, {speed}")
    parts += ("by record", f"by record, {before}", f"by record, {speed}")
    for part in parts:
        lines.append(f"| *{part}* |")
        for name, row in document[part].items():
            if row is not None:
                cells = [row[key] for key in ("median", "p95", "worst", "bias", "aa_median", "aa_p95", "covered_as_drawn")]
                lines.append(f"| {name} | {row['cases']} | " + " | ".join(f"{100 * cell:.1f}%" for cell in cells) + " |")
    lines += ["", "| tasks | share of task time | median error | bias |", "|---|---|---|---|"]
    lines += [
        f"| {kind} | {100 * row['share']:.0f}% | {100 * row['median_error']:.1f}% | {100 * row['bias']:.1f}% |"
        for kind, row in document["by kind"].items()
    ]
    lines.append("")
    for name, row in document["choice"].items():
        order = f"rank correlation {row['rank_correlation_median']:.3f} (worst {row['rank_correlation_worst']:.3f})"
        lost = f"regret mean {100 * row['regret_mean']:.2f}%, worst {100 * row['regret_worst']:.2f}%"
        lines.append(f"choice, {name}: {order}, {lost}, {row['questions']} questions")
    if document["processor time"]:
        row = document["processor time"]
        lines.append(
            f"one rank, against processor seconds: median error {100 * row['median']:.1f}%, bias {100 * row['bias']:.1f}%"
        )
    lines.append("by the probe, times as long as while calibrating, on average:")
    lines.append("; ".join(f"{name} {factor:.3f}" for name, factor in document["slowness"].items()))
    lines += [f"{name}: {document[name]}" for name in ("coverage", f"coverage, {before}", f"coverage, {speed}")]
    return "\n".join(lines)
