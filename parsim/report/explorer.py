"""What the explorer's page reads: the points of a sweep column by column, rounded to what a figure can show."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from parsim.files import finite, write_text_atomically
from parsim.report.legend import (
    CATEGORY_COLOURS,
    GREY,
    LETTER_COLOURS,
    MEMORY_COLOURS,
    METRICS,
    SCALES,
    SERIES,
    axis_name,
    value_name,
)
from parsim.report.page import asset, standalone_page
from parsim.report.tables import CATEGORIES, line_name
from parsim.report.trace import LETTERS, PIECES

DIGITS = 5
"""Significant, of every number of the page."""
MOST_STEPS = 40
"""Different values of a field that a slider steps through; of a field with more, it steps through eighths of the points."""

TEXTS = ("status", "reason", "strategy", "division", "plan", "plan_in_words")
LEFT_OUT = ("memory_limit_bytes",)


@dataclass(frozen=True, slots=True, kw_only=True)
class ExplorerData:
    """What the page shows.

    Attributes:
        title, summary: texts. axes: swept fields, in order. rows: per point, the columns of a sweep's table.
        answer: what the goal picks, in a sentence.
        picked: number of the row that the goal picks. command: asks one point again, without its settings. notes: for people.
    """

    title: str
    summary: Sequence[str]
    axes: Sequence[str]
    rows: Sequence[Mapping[str, Any]]
    answer: str = ""
    picked: int | None = None
    command: str = ""
    notes: Sequence[str] = ()


def document_of(data: ExplorerData, every: int = 1, sketched: int = 1) -> dict[str, Any]:
    """Plain JSON of the sweep: each so many-th point and the picked one, with the timeline of each so many-th (0: of none)."""
    kept = [number for number in range(len(data.rows)) if number % every == 0 or number == data.picked]
    rows = [data.rows[number] for number in kept]
    note = [f"The page shows {len(rows):,} of {len(data.rows):,} points; points.csv has all."] if every > 1 else []
    lanes = _lanes(data, kept, sketched)
    known, with_lanes = sum(bool(row.get("timeline")) for row in rows), sum(map(bool, lanes["at"]))
    if with_lanes < known:
        note.append(f"The page has the timelines of {with_lanes:,} of {known:,} points; `parsim simulate --out DIR` draws any.")
    lines = dict.fromkeys(
        name[len("memory_") : -len("_bytes")]
        for row in rows
        for name in row
        if name.startswith("memory_") and name.endswith("_bytes") and name not in LEFT_OUT
    )

    def column(name: str) -> list[float | int | None]:
        return [_rounded(row.get(name)) for row in rows]

    metrics: list[dict[str, Any]] = []
    for metric in METRICS:
        key = metric.column
        if any(row.get(key) is not None for row in rows):
            shown = {"key": key, "name": metric.name, "kind": metric.kind, "better": metric.best, "median": column(key)}
            ends = metric.ends()
            metrics.append(shown if ends is None else shown | dict(zip(("low", "high"), map(column, ends), strict=True)))
    texts = {}
    for name in TEXTS:  # words that repeat, once, and per point which of them it has
        values = [str(row.get(name) or "") for row in rows]
        words = {word: number for number, word in enumerate(dict.fromkeys(values))}
        texts[name] = {"words": list(words), "codes": [words[value] for value in values]}
    return {
        "title": data.title,
        "answer": data.answer,
        "summary": list(data.summary),
        "notes": [*data.notes, *note],
        "command": data.command,
        "count": len(rows),
        "numbers": [row.get("point", number) for number, row in zip(kept, rows, strict=True)],
        "picked": kept.index(data.picked) if data.picked in kept else None,
        "axes": [_axis(key, [row.get(key) for row in rows]) for key in data.axes],
        "metrics": metrics,
        "texts": texts,
        "categories": [
            {"name": shown, "colour": CATEGORY_COLOURS[name], "values": column(name)}
            for name, shown in CATEGORIES.items()
            if any(row.get(name) for row in rows)
        ],
        "memory": [
            {"name": line_name(name), "colour": MEMORY_COLOURS.get(name, GREY), "values": column(f"memory_{name}_bytes")}
            for name in lines
        ],
        "timeline": lanes,
        "colours": SERIES,
        "scales": SCALES,
        "limit": column("memory_limit_bytes"),
    }


def _lanes(data: ExplorerData, kept: Sequence[int], sketched: int) -> dict[str, Any]:
    """Timelines: letters and lane names once, and per point its lanes as (name, text); none for a point that is left out."""
    names: dict[str, int] = {}
    lanes = []
    for place, number in enumerate(kept):
        is_drawn = bool(sketched) and (place % sketched == 0 or number == data.picked)
        pairs = data.rows[number].get("timeline") or [] if is_drawn else []
        lanes.append([[names.setdefault(str(name), len(names)), str(text)] for name, text in pairs])
    return {
        "letters": {letter: {"name": name, "colour": LETTER_COLOURS[letter]} for letter, name in LETTERS.items()},
        "pieces": PIECES,
        "names": list(names),
        "at": lanes,
        "seconds": [_rounded(data.rows[number].get("one_step_s")) for number in kept],
    }


def _axis(key: str, values: Sequence[Any]) -> dict[str, Any]:
    """One swept field: its different values in order, and per point which of them it has."""
    numeric = all(isinstance(value, int | float) and not isinstance(value, bool) for value in values)
    texts = [json.dumps(value, sort_keys=True) for value in values]
    different = dict(zip(texts, values, strict=True))
    order = sorted(different, key=lambda text: different[text]) if numeric else list(different)
    place = {text: number for number, text in enumerate(order)}
    settings = []
    for value in (different[text] for text in order):
        if isinstance(value, Mapping):  # `pp=2, dp=4`, and as `--set` takes it
            settings.append("{" + ", ".join(f"{name} = {json.dumps(entry)}" for name, entry in value.items()) + "}")
        else:
            settings.append(value if isinstance(value, str) else json.dumps(value))
    return {
        "key": key,
        "name": axis_name(key),
        "numeric": numeric,
        "continuous": numeric and len(order) > MOST_STEPS,
        "values": [_rounded(different[text]) for text in order] if numeric else [value_name(different[text]) for text in order],
        "settings": settings,
        "at": [place[text] for text in texts],
    }


def _rounded(value: Any) -> float | int | None:
    if value is None or isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        return None
    if isinstance(value, int) and abs(value) < 10**7:
        return value
    short = float(f"{value:.{DIGITS - 1}e}")
    return int(short) if short.is_integer() and abs(short) < 2**53 else short


# explorer.html: a sweep as one self-contained page, with plotly.js inside and a policy that forbids every request.
#
# All texts of the user are data: the script sets them as text, and escapes them where plotly would read markup.


LARGEST_BYTES = 6_000_000
"""Of the page; plotly.js alone has 4.8 MB."""


def write_explorer_page(data: ExplorerData, path: Path) -> Path:
    """Write the page, atomically. Returns its path."""
    path.parent.mkdir(parents=True, exist_ok=True)
    write_text_atomically(path, explorer_html(data))
    return path


def explorer_html(data: ExplorerData) -> str:
    """The whole page, at most `LARGEST_BYTES`, and it says what it leaves out.

    With too many points it has the timelines of every second, third, ... or of none; then it shows every second, third, ...
    """
    every, sketched = 1, 1
    while True:
        page = _page(data.title, document_of(data, every, sketched))
        if len(page.encode()) <= LARGEST_BYTES:
            return page
        if sketched:
            sketched = 2 * sketched if sketched < min(64, len(data.rows)) else 0
        else:
            every += max(1, every // 2)


def _page(title: str, document: Mapping[str, Any]) -> str:
    text = json.dumps(finite(document), separators=(",", ":"), allow_nan=False, ensure_ascii=False)
    text = text.replace("<", "\\u003c").replace("\u2028", "\\u2028").replace("\u2029", "\\u2029")
    return standalone_page(
        title,
        body=asset("explorer.html"),
        data=("sweep", text),
        script="explorer.js",
    )
