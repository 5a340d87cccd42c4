"""Claims about predictions on the machine at hand, from results.json."""

from __future__ import annotations

from typing import Any

from experiments.common.claims import Claim, Judge, claim, of_every
from experiments.common.markdown import row_table, table

AT_SPEED = "at the pace beside them"
MEDIAN, COVERAGE = 0.05, 0.85


def claims(document: dict[str, Any]) -> list[Claim]:
    """The error at the measured speed, the intervals, and whether every correction is needed."""
    row = document.get(AT_SPEED, {}).get("all")
    return [
        claim(
            "Corrected by the machine's measured speed, the median error is at most 5%, or at most the A/A floor",
            None if row is None else row["median"] <= max(MEDIAN, row["aa_median"]),
            "" if row is None else f"{_percent(row['median'])}; A/A floor {_percent(row['aa_median'])}",
        ),
        claim(
            "Intervals of 90% at the measured speed hold at least 85% of the steps",
            None if row is None else row["covered_as_drawn"] >= COVERAGE,
            "" if row is None else _percent(row["covered_as_drawn"]),
        ),
        of_every(
            "Without any one correction the error is larger: the 95% interval of a paired bootstrap lies above 0",
            [entry for entry in document.get("corrections", {}).items() if entry[1]["changed"]],
            lambda entry: entry[1]["helps"],
            lambda entry: entry[0],
        ),
    ]


def finding(document: dict[str, Any]) -> str:
    """The opening of the README: two sentences."""
    forecast, corrected = document["errors"]["all"], document[AT_SPEED]["all"]
    return (
        f"{forecast['cases']} real runs of {document['cases']} cases were predicted with a median error of "
        f"{_percent(forecast['median'])} beforehand, and of {_percent(corrected['median'])} (p95 {_percent(corrected['p95'])}) "
        f"at the speed that the cores had beside the run. Two measurements of one program differ by "
        f"{_percent(corrected['aa_median'])} there (p95 {_percent(corrected['aa_p95'])})."
    )


AFTER = "| what | forecast | at measured speed | where |"
"""Head of the table of docs/accuracy.md that the row of these results stands in."""


def page_rows(document: dict[str, Any]) -> dict[str, dict[str, str]]:
    """Rows of README.md and docs/accuracy.md that quote these results: by page, by how the row begins."""
    forecast, corrected = document["errors"]["all"], document[AT_SPEED]["all"]
    refreshed = document["refreshed before the launch"]["all"]
    choice = list(document["choice"].values())[-1]
    plans = " to ".join(dict.fromkeys(str(choice[key]) for key in ("plans_fewest", "plans_most")))
    steps, choosing = "| real steps on two shared CPU cores: ", "| choosing among "
    record, chosen = "| step time, the committed record", "| choosing, the committed record: "
    medians = f"median {_percent(forecast['median'])} and {_percent(corrected['median'])}"
    link = "[this_machine](experiments/this_machine/README.md)"
    forecast_text = f"median {_percent(forecast['median'])}, bias {_signed(forecast['bias'])}"
    corrected_text = (
        f"median {_percent(corrected['median'])}, p95 {_percent(corrected['p95'])}, bias {_signed(corrected['bias'])}"
    )
    return {
        "README.md": {
            steps: f"{steps}forecast, and corrected by the machine's measured speed | {medians} | {link} |",
            choosing: f"{choosing}{plans} plans by such predictions | {_percent(choice['regret_mean'])} slower than the best, "
            "on average | the same |",
        },
        "docs/accuracy.md": {
            record: f"{record}: {document['machine']}, {document['date']}, {forecast['cases']} runs | {forecast_text}; "
            f"{_percent(refreshed['median'])} after `calibrate --refresh` | {corrected_text} | {link.replace('(', '(../')} |",
            chosen: f"{chosen}among {plans} plans | the choice is {_percent(choice['regret_mean'])} slower than the best, on "
            f"average; rank correlation {choice['rank_correlation_median']:.2f} | | the same |",
        },
    }


def tables(document: dict[str, Any]) -> dict[str, str]:
    """Errors by group, forecast first, and what every correction is worth."""
    head = ("steps of", "n", "forecast, median error", "p95", "at the measured speed", "p95", "A/A median", "inside 90%")
    lines = []
    for name, forecast in document["errors"].items():
        corrected = document[AT_SPEED][name]
        if forecast is not None:
            cells = [forecast["median"], forecast["p95"], *(corrected[key] for key in ("median", "p95", "aa_median"))]
            cells.append(corrected["covered_as_drawn"])
            lines.append((name, str(forecast["cases"]), *map(_percent, cells)))
    columns = (
        ("correction", "{name}"),
        ("runs", "{runs}"),
        ("median error with it", "{median_with:.1%}"),
        ("without it", "{median_without:.1%}"),
        (
            "mean gain in points of error (95%)",
            lambda row: f"{100 * row['gain']:+.2f} ({100 * row['gain_low']:+.2f} to {100 * row['gain_high']:+.2f})",
        ),
        (
            "helps",
            lambda row: ("yes" if row["helps"] else "**no**") if row["changed"] else "not tried: changes no prediction here",
        ),
    )
    corrections = [{"name": name, **row} for name, row in document["corrections"].items()]
    return {"this_machine": f"{table(head, lines, words=1)}\n\n{row_table(corrections, columns, words=1)}"}


def _percent(value: float) -> str:
    return f"{100 * value:.1f}%"


def _signed(value: float) -> str:
    return f"{100 * value:+.1f}%"


JUDGES = {"this_machine": Judge(claims=claims, tables=tables, finding=finding, page_rows=page_rows, after=AFTER)}
