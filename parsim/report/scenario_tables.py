"""The tables of a plan in a scenario: the step under every state of the machine, the whole run, the checkpoint interval."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from parsim.report.tables import NOTHING, Column, ReportTable, interval_texts
from parsim.units import format_percent, format_seconds

MOST_STATES = 24


def states_table(states: Sequence[Mapping[str, Any]]) -> ReportTable:
    """One row per state of the machine, in order of time."""
    rows = [
        (
            format_seconds(state["from_s"]),
            NOTHING if state["until_s"] is None else format_seconds(state["until_s"]),
            format_seconds(state["step_s"]),
            f"{state['slowdown']:.3f}",
        )
        for state in states[:MOST_STATES]
    ]
    more = len(states) - MOST_STATES
    return ReportTable(
        title="The step in every state of the machine",
        columns=tuple(Column(name=name, numeric=True) for name in ("from", "until", "step", "times the quiet one")),
        rows=tuple(rows),
        notes=(f"{more} more states",) if more > 0 else (),
    )


def run_table(run: Mapping[str, Any]) -> ReportTable:
    """A whole run: each figure with its median and 90% interval."""
    names = {
        "total_s": "time",
        "training_s": "of it training",
        "lost_s": "of that undone by failures",
        "checkpoint_s": "checkpoints",
        "evaluation_s": "evaluation",
        "epoch_start_s": "starts of epochs",
        "down_s": "starting and restarting",
    }
    rows = [(title, *interval_texts(run[key])) for key, title in names.items()]
    rows.append(("failures", *_texts(run["failures"], lambda value: f"{value:.3g}")))
    rows.append(("useful share of the time", *_texts(run["useful_fraction"], format_percent)))
    if run["price"]["median"]:
        rows.append((f"price, {run['currency']}", *_texts(run["price"], lambda value: f"{value:,.2f}")))
    if run["energy_j"]["median"]:
        rows.append(("energy, kWh", *_texts(run["energy_j"], lambda value: f"{value / 3.6e6:,.4g}")))
    return ReportTable(
        title=f"The whole run: {run['epochs']} epochs, {run['steps']} steps, {run['draws']} draws",
        columns=(Column(name="figure", wraps=True), Column(name="median", numeric=True), Column(name="90%", numeric=True)),
        rows=tuple(rows),
    )


def interval_table(choice: Mapping[str, Any]) -> ReportTable:
    """The mean run under every checkpoint interval, the best one marked, beside the formulas."""
    best = min(row["mean_s"] for row in choice["rows"])
    rows = [
        (format_seconds(row["interval_s"]), format_seconds(row["mean_s"]), f"+{100 * (row['mean_s'] / best - 1):.2f}%")
        for row in choice["rows"]
    ]
    return ReportTable(
        title="Checkpoint interval",
        columns=tuple(Column(name=name, numeric=True) for name in ("interval", "mean time", "longer than the best")),
        rows=tuple(rows),
        emphasised=tuple(number for number, row in enumerate(choice["rows"]) if row["mean_s"] == best),
        notes=(
            f"simulated optimum {format_seconds(choice['simulated_s'])}; Young {format_seconds(choice['young_s'])}, Daly "
            f"{format_seconds(choice['daly_s'])} (a failure every {format_seconds(choice['mtbf_s'])}, "
            f"{format_seconds(choice['write_s'])} to write)",
        ),
    )


def _texts(interval: Mapping[str, float], text: Any) -> tuple[str, str]:
    return text(interval["median"]), f"{text(interval['p05'])}–{text(interval['p95'])}"
