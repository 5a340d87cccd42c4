"""Claims of live re-planning, from results.json."""

from __future__ import annotations

from statistics import median
from typing import Any

from experiments.common.claims import Claim, Row, claim
from experiments.common.markdown import table

PAIRS = 10
SOONER = 8
"""Pairs of PAIRS in which the adaptive run has to end first."""
TOLERANCE = 1e-10


def claims(document: dict[str, Any]) -> list[Claim]:
    """The race, the rest of the undisturbed, and the equality of what is trained.

    Args:
        document: results.json; an empty one compares nothing.
    """
    pairs = by_pair(document.get("rows", []))
    races = [
        pair for name, pair in pairs.items() if name.startswith("throttled") and {"adaptive", "start", "other"} <= pair.keys()
    ]
    quiet = [pair["adaptive"] for name, pair in pairs.items() if name.startswith("quiet") and "adaptive" in pair]
    gains = [1 - pair["adaptive"]["seconds"] / min(pair[way]["seconds"] for way in ("start", "other")) for pair in races]
    sooner = sum(gain > 0 for gain in gains)
    race = (
        f"A run that may change plan ends before the best fixed plan in {SOONER} of {PAIRS} pairs in which a rank is throttled"
    )
    rest = f"In {PAIRS} undisturbed runs the plan is never changed"
    switched = sum(bool(row["switches"]) for row in quiet)
    return [
        claim(race, None, too_few(races))
        if len(races) < PAIRS
        else claim(race, sooner >= SOONER, f"{sooner} of {len(races)}; the median ends {100 * median(gains):.1f}% sooner"),
        claim(rest, None, too_few(quiet))
        if len(quiet) < PAIRS
        else claim(rest, switched == 0, f"{switched} of {len(quiet)} changed plan"),
        equality(pairs.get("float64", {})),
    ]


def equality(pair: dict[str, Row]) -> Claim:
    """Whether a training that changed plan in float64 lost the same at every step. Args: pair: its rows by way."""
    text = f"Losses of a run that changed plan equal those of one that did not to {TOLERANCE:g} in float64, to the end"
    if not {"adaptive", "start"} <= pair.keys():
        return claim(text, None, "the pair was not trained")
    changed, straight = pair["adaptive"], pair["start"]
    if not changed["switches"]:
        return claim(text, None, "the plan was not changed")
    largest = max(abs(one - other) for one, other in zip(changed["losses"], straight["losses"], strict=True))
    step = changed["switches"][0]["step"]
    return claim(text, largest <= TOLERANCE, f"{largest:.1e} over {changed['steps']} steps, changed at step {step}")


def by_pair(rows: list[Row]) -> dict[str, dict[str, Row]]:
    """Rows by name of the pair and way."""
    found: dict[str, dict[str, Row]] = {}
    for row in rows:
        found.setdefault(row["pair"], {})[row["way"]] = row
    return found


def too_few(rows: list[Any]) -> str:
    return f"{len(rows)} of {PAIRS} were run"


def tables(document: dict[str, Any]) -> str:
    """Markdown: seconds of every pair, and switches as predicted and as measured."""
    head = ("pair", "adaptive", "start", "other", "changed after step", "switch predicted", "switch measured")
    lines = []
    for name, pair in by_pair(document["rows"]).items():
        seconds = [f"{pair[way]['seconds']:.1f} s" if way in pair else "" for way in ("adaptive", "start", "other")]
        changes = pair.get("adaptive", {}).get("switches", [])
        told = [
            ", ".join(str(entry["step"]) for entry in changes),
            ", ".join(f"{1e3 * entry['predicted_switch_s']:.0f} ms" for entry in changes),
            ", ".join(f"{1e3 * entry['switch_s']:.0f} ms" for entry in changes),
        ]
        lines.append([name, *seconds, *told])
    return table(head, lines)
