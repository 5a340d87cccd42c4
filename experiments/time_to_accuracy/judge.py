"""Claims about predicted and executed winners, from results.json."""

from __future__ import annotations

import math
from itertools import combinations
from typing import Any

from experiments.common.claims import Claim, Judge, claim
from experiments.common.markdown import table

PAIRS = 20
WON = 0.8
APART = 0.05
"""Executed seconds that differ by less are called a tie: two measurements of one plan differ by as much here."""


def pairs(document: dict[str, Any]) -> list[tuple[bool, float]]:
    """Per pair of rules of one case: whether the predicted winner won, and by how much the executed seconds differ.

    A way that was executed and did not reach the target is slower than any that did; two of them are not compared.

    Args:
        document: results.json.
    """
    rows = [row for row in document.get("rows", []) if row["predicted_s"] is not None and row["rounds"]]
    found = []
    for one, other in combinations(rows, 2):
        first, second = _executed_s(one), _executed_s(other)
        if one["case"] != other["case"] or one["predicted_s"] == other["predicted_s"] or math.inf == first == second:
            continue
        won = (one["predicted_s"] < other["predicted_s"]) == (first < second)
        found.append((won, max(first, second) / min(first, second) - 1))
    return found


def _executed_s(row: dict[str, Any]) -> float:
    return math.inf if row["executed_s"] is None else float(row["executed_s"])


def claims(document: dict[str, Any]) -> list[Claim]:
    """How often the predicted winner wins, over all pairs and over those that are apart.

    Args:
        document: results.json; an empty one compares nothing.
    """
    every = pairs(document)
    apart = [won for won, gap in every if gap > APART]
    wins = sum(won for won, _ in every)
    return [
        claim(
            f"At least {PAIRS} pairs of rules were executed",
            len(every) >= PAIRS if every else None,
            f"{len(every)} were" if every else "",
        ),
        claim(
            f"The predicted winner of a pair wins when executed, in at least {100 * WON:.0f}% of the pairs",
            wins >= WON * len(every) if every else None,
            f"{wins} of {len(every)}; {sum(apart)} of {len(apart)} that differ by more than {100 * APART:.0f}%"
            if every
            else "",
        ),
    ]


def tables(document: dict[str, Any]) -> dict[str, str]:
    """Predicted and executed seconds as Markdown.

    Args:
        document: results.json.
    """
    head = ("case", "synchronisation", "predicted s", "steps", "executed s", "steps executed")
    lines = [
        (
            f"{row['case']}, {row['target']:.0%}",
            f"`{row['rule']}`",
            "not reached" if row["predicted_s"] is None else f"{row['predicted_s']:.2f}",
            "" if row["predicted_steps"] is None else f"{row['predicted_steps']:.0f}",
            _said(row["executed_s"], row["rounds"], 2),
            _said(row["executed_steps"], row["rounds"], 0),
        )
        for row in document["rows"]
    ]
    text = table(head, lines, words=2)
    return {"time_to_accuracy": text}


def _said(value: float | None, rounds: int, digits: int) -> str:
    return ("not reached" if rounds else "not run") if value is None else f"{value:.{digits}f}"


JUDGES = {"time_to_accuracy": Judge(claims=claims, tables=tables)}
