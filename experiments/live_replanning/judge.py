"""Claims of live re-planning, from results.json."""

from __future__ import annotations

from pathlib import Path
from statistics import median
from typing import Any

from experiments.common.claims import Claim, Row, claim
from experiments.common.markdown import table
from parsim.files import read_json

SIMULATED = Path(__file__).resolve().parents[1] / "adaptive_tuning" / "results.json"
WAYS = ("adaptive", "start", "other")
PAIRS = 10
SOONER = 8
"""Pairs of PAIRS in which the adaptive run has to end first."""
TOLERANCE = 1e-10


KINDS = {"link": "the link is shaped", "throttled": "a rank is throttled"}


def claims(document: dict[str, Any]) -> list[Claim]:
    """The races, the rest of the undisturbed, and the equality of what is trained.

    Args:
        document: results.json; an empty one compares nothing.
    """
    pairs = by_pair(document.get("rows", []))
    quiet = [pair["adaptive"] for name, pair in pairs.items() if name.startswith("quiet") and "adaptive" in pair]
    rest = f"In {PAIRS} undisturbed runs the plan is never changed"
    switched = sum(bool(row["switches"]) for row in quiet)
    return [
        *(race(pairs, kind, document.get("no_link", "") if kind == "link" else "") for kind in KINDS),
        claim(rest, None, too_few(quiet))
        if len(quiet) < PAIRS
        else claim(rest, switched == 0, f"{switched} of {len(quiet)} changed plan"),
        equality(pairs.get("float64", {}), document.get("weights_differ_by")),
    ]


def race(pairs: dict[str, dict[str, Row]], kind: str, skipped: str) -> Claim:
    """Whether the adaptive runs end first under one kind of disturbance.

    Args:
        pairs: rows by name of the pair and way. kind: of KINDS. skipped: why there was no such race; "": there was.
    """
    text = f"A run that may change plan ends before the best fixed plan in {SOONER} of {PAIRS} pairs in which {KINDS[kind]}"
    races = [pair for name, pair in pairs.items() if name.startswith(kind) and {"adaptive", "start", "other"} <= pair.keys()]
    if len(races) < PAIRS:
        return claim(text, None, f"skipped: {skipped}" if skipped else too_few(races))
    gains = [1 - pair["adaptive"]["seconds"] / min(pair[way]["seconds"] for way in ("start", "other")) for pair in races]
    sooner = sum(gain > 0 for gain in gains)
    return claim(text, sooner >= SOONER, f"{sooner} of {len(races)}; the median ends {100 * median(gains):.1f}% sooner")


def equality(pair: dict[str, Row], weights: float | None) -> Claim:
    """Whether a training that changed plan in float64 lost the same at every step, and ended with the same weights.

    Args:
        pair: its rows by way. weights: the largest difference of any at the end; None: not compared.
    """
    text = f"Losses and weights of a run that changed plan equal those of one that did not to {TOLERANCE:g} in float64"
    if not {"adaptive", "start"} <= pair.keys():
        return claim(text, None, "the pair was not trained")
    changed, straight = pair["adaptive"], pair["start"]
    if not changed["switches"]:
        return claim(text, None, "the plan was not changed")
    largest = max(abs(one - other) for one, other in zip(changed["losses"], straight["losses"], strict=True))
    step = changed["switches"][0]["step"]
    if weights is None:
        return claim(text, None, "the weights were not compared")
    said = f"losses {largest:.1e} over {changed['steps']} steps, weights {weights:.1e}, changed at step {step}"
    return claim(text, max(largest, weights) <= TOLERANCE, said)


def by_pair(rows: list[Row]) -> dict[str, dict[str, Row]]:
    """Rows by name of the pair and way."""
    found: dict[str, dict[str, Row]] = {}
    for row in rows:
        found.setdefault(row["pair"], {})[row["way"]] = row
    return found


def too_few(rows: list[Any]) -> str:
    return f"{len(rows)} of {PAIRS} were run"


def tables(document: dict[str, Any]) -> str:
    """Markdown: seconds of every pair, switches as predicted and as measured, and beside them the simulator's regrets."""
    head = ("pair", *WAYS, "disturbed after", "changed after", "planning", "switch predicted", "switch measured")
    lines = []
    for name, pair in by_pair(document["rows"]).items():
        own = pair.get("adaptive", {})
        changes = own.get("switches", [])
        told = [
            str(own.get("disturbed_after") or ""),
            ", ".join(str(entry["step"]) for entry in changes),
            ", ".join(f"{1e3 * seconds:.0f} ms" for seconds in [sum(own.get("plannings_s", []))] if seconds),
            ", ".join(f"{1e3 * entry['predicted_switch_s']:.0f} ms" for entry in changes),
            ", ".join(f"{1e3 * entry['switch_s']:.0f} ms" for entry in changes),
        ]
        lines.append([name, *(f"{pair[way]['seconds']:.1f} s" if way in pair else "" for way in WAYS), *told])
    plans = [[name, plan] for name, plan in document["plans"].items()]
    return "\n\n".join((table(("fixed plan", "what it is"), plans), table(head, lines), regrets(read_json(SIMULATED))))


def regrets(simulated: dict[str, Any]) -> str:
    """Of the same controller in simulated training: time over the oracle's, minus 1. Args: simulated: its results.json."""
    head = ("simulated on 8 GPUs, held out", "stay", "best static", "default controller")
    keys = ("stay", "best static", "default")
    return table(head, [[row["scenario"], *(f"{100 * row[key]:.2f}%" for key in keys)] for row in simulated["by_scenario"]])
