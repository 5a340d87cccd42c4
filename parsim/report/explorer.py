"""What the explorer's page reads: the points of a sweep column by column, rounded to what a figure can show."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from parsim.files import finite, write_text_atomically
from parsim.report.sketch import LETTERS, PIECES
from parsim.report.standalone import asset, standalone_page

DIGITS = 5
"""Significant, of every number of the page."""
MOST_STEPS = 40
"""Different values of a field that a slider steps through; of a field with more, it steps through eighths of the points."""

METRICS: tuple[tuple[str, str, str, str, str, str], ...] = (
    ("throughput_samples_per_s", "throughput_p05_samples_per_s", "throughput_p95_samples_per_s", "Throughput", "rate", "max"),
    ("step_s", "step_p05_s", "step_p95_s", "Time per step", "time", "min"),
    ("epoch_s", "epoch_p05_s", "epoch_p95_s", "Time per epoch", "time", "min"),
    ("run_s", "run_p05_s", "run_p95_s", "Time of the run", "time", "min"),
    ("usd_per_million_samples", "", "", "Price per million samples", "usd", "min"),
    ("usd_per_epoch", "", "", "Price per epoch", "usd", "min"),
    ("run_usd", "", "", "Price of the run", "usd", "min"),
    ("kwh_per_million_samples", "", "", "Energy per million samples", "energy", "min"),
    ("kwh_per_epoch", "", "", "Energy per epoch", "energy", "min"),
    ("run_kwh", "", "", "Energy of the run", "energy", "min"),
    ("peak_memory_bytes", "peak_memory_p05_bytes", "peak_memory_p95_bytes", "Peak memory", "bytes", "min"),
    ("mfu", "-", "-", "Model FLOP utilisation", "share", "max"),
    ("communication_fraction", "-", "-", "Exposed communication", "share", "min"),
)
"""Column, its p05 and p95 ("": with these suffixes, "-": none), name, how it is written, and which end is better."""

CATEGORY_NAMES = {
    "compute_s": "computation",
    "exposed_communication_s": "exposed communication",
    "bubble_s": "pipeline bubble",
    "load_s": "loading",
    "host_s": "host",
    "idle_s": "idle",
}
TEXTS = ("status", "reason", "strategy", "division", "plan", "plan_in_words")
LEFT_OUT = ("memory_limit_bytes",)


@dataclass(frozen=True, slots=True, kw_only=True)
class ExplorerData:
    """What the page shows.

    Attributes:
        title, summary: texts. axes: swept fields, in order. rows: per point, the columns of a sweep's table.
        picked: number of the row that the goal picks. command: asks one point again, without its settings. notes: for people.
    """

    title: str
    summary: Sequence[str]
    axes: Sequence[str]
    rows: Sequence[Mapping[str, Any]]
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
        name for row in rows for name in row if name.startswith("memory_") and name.endswith("_bytes") and name not in LEFT_OUT
    )

    def column(name: str) -> list[float | int | None]:
        return [_rounded(row.get(name)) for row in rows]

    metrics: list[dict[str, Any]] = []
    for key, low, high, name, kind, better in METRICS:
        if any(row.get(key) is not None for row in rows):
            metrics.append({"key": key, "name": name, "kind": kind, "better": better, "median": column(key)})
            if low != "-":
                metrics[-1] |= {"low": column(low or f"{key}_p05"), "high": column(high or f"{key}_p95")}
    texts = {}
    for name in TEXTS:  # words that repeat, once, and per point which of them it has
        values = [str(row.get(name) or "") for row in rows]
        words = {word: number for number, word in enumerate(dict.fromkeys(values))}
        texts[name] = {"words": list(words), "codes": [words[value] for value in values]}
    return {
        "title": data.title,
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
            {"name": shown, "values": column(name)}
            for name, shown in CATEGORY_NAMES.items()
            if any(row.get(name) for row in rows)
        ],
        "memory": [
            {"name": name.removeprefix("memory_").removesuffix("_bytes").replace("_", " "), "values": column(name)}
            for name in lines
        ],
        "timeline": lanes,
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
        "letters": LETTERS,
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
    labels, settings = [], []
    for value in (different[text] for text in order):
        if isinstance(value, Mapping):  # `pp=2, dp=4`, and as `--set` takes it
            labels.append(", ".join(f"{name}={entry}" for name, entry in value.items()))
            settings.append("{" + ", ".join(f"{name} = {json.dumps(entry)}" for name, entry in value.items()) + "}")
        else:
            labels.append(str(value))
            settings.append(value if isinstance(value, str) else json.dumps(value))
    return {
        "key": key,
        "numeric": numeric,
        "continuous": numeric and len(order) > MOST_STEPS,
        "values": [_rounded(different[text]) for text in order] if numeric else labels,
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
        style="explorer.css",
        body=asset("explorer.html"),
        data=("sweep", text),
        scripts=("figures.js", "explorer.js"),
        colours="light dark",
    )
