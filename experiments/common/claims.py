"""A claim of an experiment and what its committed results say of it. Needs the standard library alone.

Every experiment has a `judge.py` with a Judge for each of its parts: pure functions of what results.json keeps of the part. So
a verdict can be worked out again from what is committed, and a run never judges itself.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

MET, MISSED, UNRESOLVED, NOT_CHECKED = "met", "missed", "unresolved", "not checked"
VERDICTS = (MET, MISSED, UNRESOLVED, NOT_CHECKED)
SEEDS = 5
"""Fixed in advance; more are run for the spread, and change no verdict."""

Row = dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Claim:
    """One sentence that was to hold, its verdict (one of VERDICTS), and the figure behind that or why nothing was compared."""

    text: str
    verdict: str
    found: str = ""

    def __post_init__(self) -> None:
        if self.verdict not in VERDICTS:
            raise ValueError(f"verdict {self.verdict!r} of {self.text!r} is none of {', '.join(VERDICTS)}")
        if self.verdict == NOT_CHECKED and not self.found:
            raise ValueError(f"{self.text!r} is not checked; say why in `found`")


@dataclass(frozen=True, slots=True, kw_only=True)
class Judge:
    """What the pages say of a part of an experiment, each a function of its document in results.json.

    Attributes:
        claims: with their verdicts; of an empty document none is compared. tables: Markdown by the name in the README's marks.
        finding: the opening of the README's section, where it is computed. page_rows: rows of other pages that quote the
            results, by page and by how they begin. after: head of the table that new ones of these rows stand in.
    """

    claims: Callable[[dict[str, Any]], list[Claim]]
    tables: Callable[[dict[str, Any]], dict[str, str]] | None = None
    finding: Callable[[dict[str, Any]], str] | None = None
    page_rows: Callable[[dict[str, Any]], dict[str, dict[str, str]]] | None = None
    after: str = ""


def claim(text: str, holds: bool | None, found: str = "") -> Claim:
    """A claim from a comparison. holds: None where nothing was compared. found: the figure, or the reason."""
    verdict = NOT_CHECKED if holds is None else MET if holds else MISSED
    return Claim(text=text, verdict=verdict, found=found or ("nothing was compared" if holds is None else ""))


def of_every(text: str, rows: Iterable[Any], holds: Callable[[Any], bool], name: Callable[[Any], str] = str) -> Claim:
    """A claim about every row; name: what one is called where it fails. Without a row nothing was compared; `all([])` would
    call it met."""
    compared = list(rows)
    if not compared:
        return claim(text, None, "no row to compare")
    failed = [name(row) for row in compared if not holds(row)]
    told = f"{len(compared) - len(failed)} of {len(compared)}"
    return claim(text, not failed, f"{told}; not {', '.join(failed)}" if failed else told)


def within(text: str, scores: Sequence[float], wanted: float, tolerance: float, seeds: int) -> Claim:
    """A claim that the mean over the `seeds` first scores, which were fixed in advance, lies within `tolerance` of a figure."""
    if len(scores) < seeds:
        return claim(text, None, f"{len(scores)} of {seeds} seeds were run")
    mean = statistics.mean(scores[:seeds])
    return claim(text, abs(mean - wanted) <= tolerance, f"{mean:.4f} over {seeds} seeds, wanted {wanted:g} ± {tolerance:g}")


def mean_of(row: Row, scores: str = "scores") -> float:
    """Over the seeds fixed in advance, of the figures by seed under the key `scores`."""
    return statistics.mean(row[scores][:SEEDS])


def unchecked(claims: Iterable[Claim], why: str) -> list[Claim]:
    """The same claims without their verdicts, and why nothing was compared."""
    return [Claim(text=each.text, verdict=NOT_CHECKED, found=why) for each in claims]


def counts(claims: Iterable[Claim]) -> dict[str, int]:
    """How many claims have each verdict, verdicts without claims left out."""
    found = [each.verdict for each in claims]
    return {verdict: found.count(verdict) for verdict in VERDICTS if verdict in found}
