"""`parsim coverage`: how often the intervals of a profile held, by model and by run, and how new ones are corrected."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from parsim.commands.output import JsonFlag, print_json, print_tables
from parsim.errors import ConfigError

if TYPE_CHECKING:
    from parsim.costs.feedback.history import History


def coverage(
    profile: Annotated[str, typer.Argument(metavar="PROFILE", help="A shipped profile by name, or the path of one.")],
    history: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Its validations. Default: PROFILE.history.jsonl beside the profile.")
    ] = None,
    out: Annotated[Path | None, typer.Option(metavar="REPORT.html", help="Write tables and figures to this HTML page.")] = None,
    as_json: JsonFlag = False,
) -> None:
    """Count how often a profile's prediction intervals held in its validations, and show how new ones are corrected."""
    from parsim.costs.feedback.history import history_path, read_history
    from parsim.hardware.profile import load_profile
    from parsim.report.coverage import coverage_figures, coverage_tables
    from parsim.report.html import ReportData, write_report
    from parsim.workflow.folders.write_report import report_facts

    loaded = load_profile(profile)
    path = history_path(profile, None if history is None else str(history))
    if path is None:
        raise ConfigError(f"{profile} is a shipped profile and has no history of its own; name one: --history FILE")
    known = read_history(path, loaded)
    tables = coverage_tables(known.records)
    if out is not None:
        title = f"Coverage of {loaded.name}"
        figures = coverage_figures(known.records)
        summary = (known.correction.describe(), *known.notes)
        write_report(
            ReportData(title=title, facts=report_facts(), summary=summary, extra_tables=tables, extra_figures=figures), out
        )
    if as_json:
        print_json(coverage_document(known) | {"profile": loaded.name})
        return
    print_tables(tables)
    for note in known.notes:
        print(f"warning: {note}")
    if not known.records:
        print(f"No validation of {loaded.name} in {path}: run `parsim validate` on a RUN.toml of this profile first")
    if out is not None:
        print(f"Report: {out}")


def coverage_document(known: History) -> dict[str, Any]:
    """A History as JSON: how new intervals are corrected, and coverage in all, by model and by run (None without records)."""
    from parsim.costs.uncertainty.conformal import coverage_by, coverage_of, judged_split

    rows = judged_split(known.records)
    return {
        "history": None if known.path is None else str(known.path),
        "records": len(known.records),
        "interval_correction": known.correction.to_dict(),
        "coverage": coverage_of(rows).to_dict() if rows else None,
        "models": {name: entry.to_dict() for name, entry in coverage_by(rows, lambda record: record.model).items()},
        "runs": {name: entry.to_dict() for name, entry in coverage_by(rows, lambda record: record.run).items()},
        "left_out": list(known.left_out),
        "warnings": list(known.notes),
    }
