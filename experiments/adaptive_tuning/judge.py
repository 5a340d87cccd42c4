"""Claims of the tuned controller, from results.json."""

from __future__ import annotations

from typing import Any

from experiments.common.claims import UNRESOLVED, Claim, Row, claim
from experiments.common.markdown import table

SHORT = "link slow for 4 windows"
POLICIES = {
    "first values": "rule as first written",
    "tuned": "tuned",
    "default": "default",
    "no probes": "default, never probing other plans' links",
    "probes at epoch ends too": "default, probing at every epoch's end too",
}


def claims(document: dict[str, Any]) -> list[Claim]:
    """Regret on held-out courses, and rest where nothing happens.

    Args:
        document: results.json; an empty one compares nothing.
    """
    gap = document.get("tuned_minus_first")
    text = "On held-out courses of events the tuned parameters leave less regret than the rule as first written"
    if gap is None:
        first = claim(text, None)
    else:
        told = f"{100 * gap['mean']:+.2f}% of the oracle's time (95%: {100 * gap['low']:+.2f}% to {100 * gap['high']:+.2f}%)"
        open_ = gap["low"] < 0 < gap["high"]
        first = Claim(text=text, verdict=UNRESOLVED, found=told) if open_ else claim(text, gap["high"] <= 0, told)
    quiet = document.get("switches_when_nothing_happens", {}).get("tuned")
    told = "" if quiet is None else f"{quiet:.3f} switches per run"
    return [
        first,
        claim("The tuned controller does not switch when nothing happens", None if quiet is None else quiet == 0, told),
        short(document.get("by_scenario", [])),
    ]


def short(rows: list[Row]) -> Claim:
    """The belief about durations where it is meant to help.

    Args:
        rows: regret by scenario and policy.
    """
    text = f"The default controller loses less than half of what the tuned one does where a {SHORT}"
    found = next((row for row in rows if row["scenario"] == SHORT), None)
    if found is None:
        return claim(text, None)
    told = f"{100 * found['default']:.1f}% beside {100 * found['tuned']:.1f}%"
    return claim(text, found["default"] < found["tuned"] / 2, told)


def tables(document: dict[str, Any]) -> str:
    """Policies over all held-out cases, and regret by scenario, as Markdown.

    Args:
        document: results.json.
    """
    whole, rows = document["held_out"], document["by_scenario"]
    policies = [
        ["stay with the first plan", f"{100 * rows[-1]['stay']:.2f}%", "0", "0"],
        ["best single plan, known afterwards", f"{100 * rows[-1]['best static']:.2f}%", "0", "0"],
    ]
    for name, text in POLICIES.items():
        row = whole[name]
        policies.append([text, f"{100 * row['regret']:.2f}%", f"{row['switches']:.2f}", f"{row['plannings']:.2f}"])
    shown = ("stay", "best static", "first values", "tuned", "default")
    scenarios = [[row["scenario"], *(f"{100 * row[name]:.2f}%" for name in shown)] for row in rows]
    first = table(("policy, held out", "regret", "switches", "plannings"), policies, words=1)
    return f"{first}\n\n{table(('scenario, held out', *shown), scenarios, words=1)}"
