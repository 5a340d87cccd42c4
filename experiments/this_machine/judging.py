"""What the record says: errors beside the A/A floor, order, regret; from one row per case and record."""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from typing import Any

from experiments.common.accuracy import accuracy, rank_correlation, regret
from experiments.this_machine.ablation import MEASURED_SPEED, Compared, ablated


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
    without: dict[str, float] = field(default_factory=dict)
    rounds_s: list[float] = field(default_factory=list)
    probes_s: list[Any] = field(default_factory=list)

    @classmethod
    def from_dict(cls, entry: dict[str, Any]) -> CaseRow:
        """A row as it was kept; what else older records kept is left out."""
        known = {each.name: entry[each.name] for each in fields(cls) if each.name in entry}
        return cls(**{**known, "aa_at_speed": tuple(entry["aa_at_speed"])})

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
    return {
        "cases": len({(row.launch, row.model, row.label) for row in rows}),
        "records": len({row.record for row in rows}),
        "errors": errors_by(rows, groups),
        "at the pace beside them": errors_by([row.at_its_speed for row in rows], groups),
        "refreshed before the launch": errors_by([row.as_refreshed for row in rows], dict(itertools.islice(groups.items(), 6))),
        "choice": choice_of(rows),
        "corrections": corrections_of(rows),
    }


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
