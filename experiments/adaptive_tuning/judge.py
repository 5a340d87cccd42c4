"""Claims of the tuned controller, from results.json."""

from __future__ import annotations

from typing import Any

from experiments.common.claims import UNRESOLVED, Claim, claim


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
    ]
