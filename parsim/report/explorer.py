"""What the explorer's page reads: the points of a sweep column by column, rounded to what a figure can show."""

from __future__ import annotations

import html
import importlib.resources
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from parsim.files import finite, write_text_atomically
from parsim.report.sketch import LETTERS, PIECES

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
    """Plain JSON.

    Args:
        data: of the sweep. every: show each so many-th point, and the picked one.
        sketched: with the timeline of each so many-th of these; 0: of none.
    """
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
    categories = [name for name in CATEGORY_NAMES if any(row.get(name) for row in rows)]
    return {
        "title": data.title,
        "summary": list(data.summary),
        "notes": [*data.notes, *note],
        "command": data.command,
        "count": len(rows),
        "numbers": [row.get("point", number) for number, row in zip(kept, rows, strict=True)],
        "picked": kept.index(data.picked) if data.picked in kept else None,
        "axes": [_axis(key, [row.get(key) for row in rows]) for key in data.axes],
        "metrics": [entry for metric in METRICS if (entry := _metric(rows, *metric)) is not None],
        "texts": {name: _coded([str(row.get(name) or "") for row in rows]) for name in TEXTS},
        "categories": [
            {"name": CATEGORY_NAMES[name], "values": [_rounded(row.get(name)) for row in rows]} for name in categories
        ],
        "memory": [
            {
                "name": name.removeprefix("memory_").removesuffix("_bytes").replace("_", " "),
                "values": [_rounded(row.get(name)) for row in rows],
            }
            for name in lines
        ],
        "timeline": lanes,
        "limit": [_rounded(row.get("memory_limit_bytes")) for row in rows],
    }


def _lanes(data: ExplorerData, kept: Sequence[int], sketched: int) -> dict[str, Any]:
    """Timelines: letters and lane names once, and per point its lanes as (name, text); none for a point that is left out."""
    names: dict[str, int] = {}
    found = []
    for place, number in enumerate(kept):
        wanted = bool(sketched) and (place % sketched == 0 or number == data.picked)
        lanes = data.rows[number].get("timeline") or [] if wanted else []
        found.append([[names.setdefault(str(name), len(names)), str(text)] for name, text in lanes])
    return {
        "letters": LETTERS,
        "pieces": PIECES,
        "names": list(names),
        "at": found,
        "seconds": [_rounded(data.rows[number].get("one_step_s")) for number in kept],
    }


def _axis(key: str, values: Sequence[Any]) -> dict[str, Any]:
    """One swept field: its different values in order, and per point which of them it has."""
    numeric = all(isinstance(value, int | float) and not isinstance(value, bool) for value in values)
    texts = [json.dumps(value, sort_keys=True) for value in values]
    different = dict(zip(texts, values, strict=True))
    order = sorted(different, key=lambda text: different[text]) if numeric else list(different)
    place = {text: number for number, text in enumerate(order)}
    return {
        "key": key,
        "numeric": numeric,
        "continuous": numeric and len(order) > MOST_STEPS,
        "values": [_rounded(different[text]) if numeric else _label(different[text]) for text in order],
        "settings": [_setting(different[text]) for text in order],
        "at": [place[text] for text in texts],
    }


def _label(value: Any) -> str:
    """A table as `pp=2, dp=4`."""
    if isinstance(value, Mapping):
        return ", ".join(f"{key}={entry}" for key, entry in value.items())
    return str(value)


def _setting(value: Any) -> str:
    """As `--set` takes it."""
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{key} = {json.dumps(entry)}" for key, entry in value.items()) + "}"
    return value if isinstance(value, str) else json.dumps(value)


def _metric(
    rows: Sequence[Mapping[str, Any]], column: str, low: str, high: str, name: str, kind: str, better: str
) -> dict[str, Any] | None:
    if not any(row.get(column) is not None for row in rows):
        return None
    found: dict[str, Any] = {"key": column, "name": name, "kind": kind, "better": better}
    found["median"] = [_rounded(row.get(column)) for row in rows]
    if low != "-":
        found["low"] = [_rounded(row.get(low or f"{column}_p05")) for row in rows]
        found["high"] = [_rounded(row.get(high or f"{column}_p95")) for row in rows]
    return found


def _coded(values: Sequence[str]) -> dict[str, Any]:
    """Texts that repeat, once, and per point which of them it has."""
    words = list(dict.fromkeys(values))
    place = {word: number for number, word in enumerate(words)}
    return {"words": words, "codes": [place[value] for value in values]}


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
    """Write the page, atomically. Returns its path.

    Args:
        data: of the sweep. path: of the page.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    write_text_atomically(path, explorer_html(data))
    return path


def explorer_html(data: ExplorerData) -> str:
    """The whole page, at most `LARGEST_BYTES`, and it says what it leaves out.

    With too many points it has the timelines of every second, third, ... or of none; then it shows every second, third, ...
    """
    from plotly.offline import get_plotlyjs

    script = get_plotlyjs().replace("</script", "<\\/script")
    every, sketched = 1, 1
    while True:
        page = _page(data.title, document_of(data, every, sketched), script)
        if len(page.encode()) <= LARGEST_BYTES:
            return page
        if sketched:
            sketched = 2 * sketched if sketched < min(64, len(data.rows)) else 0
        else:
            every += max(1, every // 2)


def _page(title: str, document: Mapping[str, Any], plotly_js: str) -> str:
    text = json.dumps(finite(document), separators=(",", ":"), allow_nan=False, ensure_ascii=False)
    text = text.replace("<", "\\u003c").replace("\u2028", "\\u2028").replace("\u2029", "\\u2029")
    policy = "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; img-src data: blob:; font-src data:"
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        '<meta name="color-scheme" content="light dark"><link rel="icon" href="data:,">'
        f"<title>{html.escape(title)}</title><style>{_file('explorer.css')}</style></head>\n"
        f"<body>{_file('explorer.html')}"
        f'<script type="application/json" id="sweep">{text}</script>\n'
        f"<script>{plotly_js}</script>\n<script>{_file('figures.js')}</script>\n<script>{_file('explorer.js')}</script>\n"
        "</body></html>\n"
    )


def _file(name: str) -> str:
    return importlib.resources.files("parsim.report").joinpath("assets", name).read_text("utf-8")
