"""The table of a hardware profile's contents, as a value (see `parsim.report.tables`)."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median
from typing import Any

from parsim.hardware.compute_records import OperatorFit, OperatorSurface
from parsim.hardware.profile import Profile
from parsim.hardware.speed_factor import speed_since
from parsim.report.tables import NOTHING, Column, ReportTable
from parsim.units import format_bytes, format_count, format_percent, format_seconds


def calibration_table(profile: Profile, *, title: str | None = None) -> ReportTable:
    """What a profile holds: measured points with their range and spread, and the fits made of them."""
    rows: list[tuple[str, str, str, str]] = []
    for phase in ("forward", "backward"):
        points = [point for point in profile.compute.components if point.phase == phase]
        if points:
            names = len({(point.model, point.component) for point in points})
            samples = sorted({point.samples for point in points})
            what = f"{names} components at {', '.join(map(str, samples))} samples"
            rows.append((phase, str(len(points)), what, _spread([point.spread for point in points])))
    if profile.compute.optimizers:
        optimizers = profile.compute.optimizers
        names_text = ", ".join(sorted({point.optimizer for point in optimizers}))
        what = f"{names_text}: {_range([point.elements for point in optimizers], format_count)} elements"
        rows.append(("optimizer", str(len(optimizers)), what, _spread([point.spread for point in optimizers])))
    if profile.compute.operator_points or profile.compute.operator_fits:
        fits: list[OperatorFit | OperatorSurface] = [*profile.compute.operator_fits, *profile.compute.operator_surfaces]
        kinds = ", ".join(dict.fromkeys(f"{fit.kind} {fit.phase}" for fit in fits))
        what = f"fitted: {kinds}; the spread is about the fit" if fits else "not fitted"
        spread = _spread([fit.relative_sigma for fit in fits])
        rows.append(("operators", str(len(profile.compute.operator_points)), what, spread))
    collectives = profile.communication.points
    for operation, group_size in dict.fromkeys((point.operation, len(point.group)) for point in collectives):
        points_of = [p for p in collectives if p.operation == operation and len(p.group) == group_size]
        what = f"{_range([point.size_bytes for point in points_of], format_bytes)} over {group_size} ranks"
        spreads = [point.spread for point in points_of if point.spread is not None]
        rows.append((operation, str(len(points_of)), what, _spread(spreads)))
    if profile.noise is not None:
        rows.append(("drift", NOTHING, "of the whole machine from run to run", f"±{format_percent(profile.noise.drift_sigma)}"))
        if profile.noise.rank_sigma:
            rows.append(
                ("ranks", NOTHING, "of one rank's step against the others'", f"±{format_percent(profile.noise.rank_sigma)}")
            )
    if profile.overlap is not None:
        factors = (
            f"compute x{profile.overlap.compute_factor:.3g}, communication x{profile.overlap.communication_factor:.3g} "
            "while both run"
        )
        rows.append(("overlap", NOTHING, factors, NOTHING))
    if profile.host is not None:
        host = f"{format_seconds(profile.host.task_s)} per task, {format_seconds(profile.host.step_s)} per step"
        if profile.host.post_wait_s:
            host += f", {format_seconds(profile.host.post_wait_s)} after a wait"
        if profile.host.launch_s:
            host += f", {format_seconds(profile.host.launch_s)} per launch"
        if profile.host.core_sharing > 1:
            host += f"; computing x{profile.host.core_sharing:.3g} where ranks share a core"
        rows.append(("host", NOTHING, host, NOTHING))
    if profile.today is not None:
        what = f"{speed_since(profile).text} for the same work, as of {profile.today.created}"
        rows.append(("today", NOTHING, what, NOTHING))
    columns = (
        Column(name="kind"),
        Column(name="points", numeric=True),
        Column(name="what", wraps=True),
        Column(name="spread", numeric=True),
    )
    notes = (f"{profile.provenance.machine}; {profile.provenance.created}; {profile.provenance.command}",)
    return ReportTable(title=title or f"Calibration {profile.name}", columns=columns, rows=tuple(rows), notes=notes)


def _spread(values: Sequence[float]) -> str:
    return f"±{format_percent(median(values))}" if values else NOTHING


def _range(values: Sequence[float], text: Any) -> str:
    low, high = min(values), max(values)
    return str(text(low)) if low == high else f"{text(low)} to {text(high)}"
