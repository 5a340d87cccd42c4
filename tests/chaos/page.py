"""docs/faults.md: its tables and its picture, made of what `make chaos` and `make fuzz` have recorded.

    python -m tests.chaos.page

Writes between the markers of docs/faults.md, and docs/pictures/disturbed.svg.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from experiments.common.markdown import replaced
from tests.chaos.outcomes import recorded, table
from tests.fuzz.fuzzing import recorded as recorded_files
from tests.fuzz.fuzzing import table as table_of_files

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
PAGE, PICTURE = ROOT / "docs" / "faults.md", ROOT / "docs" / "pictures" / "disturbed.svg"
TRAININGS, CURVES, FILES = HERE / "results.jsonl", HERE / "curves.json", ROOT / "tests" / "fuzz" / "results.jsonl"
WIDTH, HEIGHT, PAD, COLUMNS = 300, 170, 30, 3
INK, GREY, POINT = "#24292f", "#8c959f", "#0969da"
UNNAMED = "not named: ['parsim: "
"""How the first problem of a training begins whose message named another fault, or none."""


def main() -> None:
    """Write the page and its picture anew."""
    text = PAGE.read_text(encoding="utf-8")
    curves = json.loads(CURVES.read_text())
    for name, made in (("trainings", trainings(curves)), ("files", files())):
        text = replaced(text, f"<!-- begin {name} -->", f"<!-- end {name} -->", made)
    PAGE.write_text(text, encoding="utf-8")
    PICTURE.write_text(picture(curves), encoding="utf-8")


def trainings(curves: dict[str, Any]) -> str:
    """The table of disturbed trainings, how it was taken, and how far curves are apart."""
    found, lines = recorded(TRAININGS), [json.loads(line) for line in TRAININGS.read_text().splitlines()]
    lost = [number for number, outcome in enumerate(found, 1) if outcome.problems]
    loads = [line["load"] for line in lines]
    dates = sorted({line["date"] for line in lines if "date" in line})
    apart = max(_apart(curves["undisturbed"], own["losses"]) for own in curves["disturbed"].values())
    wrong = "".join(f"{told_of(line)}\n\n" for line in lines if line["problems"])
    return (
        f"{len(found)} faults were tried, {len(lost)} of them lost something; "
        f"of the last {len(found) - max(lost, default=0)}, none.\n\n{table(found)}\n\n{wrong}"
        f"Two ranks on a machine with two cores that others used too: load average {min(loads):.0f} to {max(loads):.0f}, "
        f"median {statistics.median(loads):.0f}. Last ones of {dates[-1]}.\n\n"
        f"The largest difference of any loss of the curves below is {apart:.1g}."
    )


def told_of(line: dict[str, Any]) -> str:
    """What was wrong with one disturbed training; `mended`, written into its line by hand, says what was done about it."""
    what = " ".join(str(line["problems"][0]).split())[:160].rstrip(".")
    if what.startswith(UNNAMED):
        what = f"the message did not name the fault. It was: {what.removeprefix(UNNAMED)}"
    return f"Lost: number {line['number']}, {line['fault']}: {what}. {line.get('mended', 'Not mended yet.')}"


def files() -> str:
    """The table of damaged files."""
    found = recorded_files(FILES)
    tried, failed = sum(own.tried for own in found.values()), sum(len(own.failing) for own in found.values())
    return f"{tried:,} damaged files were read, {failed} of them not as they should.\n\n{table_of_files(found)}"


def _apart(one: Sequence[float], two: Sequence[float]) -> float:
    return max(abs(first - second) for first, second in zip(one, two, strict=True))


def picture(curves: dict[str, Any]) -> str:
    """SVG: the losses of the undisturbed training as a line, those of one disturbed training per panel as points."""
    whole = curves["undisturbed"]
    panels = list(curves["disturbed"].items())
    rows = -(-len(panels) // COLUMNS)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH * COLUMNS} {HEIGHT * rows}" '
        'font-family="system-ui, sans-serif" font-size="12">',
        f'<rect width="{WIDTH * COLUMNS}" height="{HEIGHT * rows}" fill="white"/>',
    ]
    for number, (fault, own) in enumerate(panels):
        parts += _panel(fault, own, whole, (number % COLUMNS) * WIDTH, (number // COLUMNS) * HEIGHT)
    return "\n".join([*parts, "</svg>"]) + "\n"


def _panel(fault: str, own: dict[str, Any], whole: Sequence[float], left: int, top: int) -> list[str]:
    """One fault. The dashed line is the step of the last checkpoint before it."""
    highest = 1.05 * max(whole)
    bottom, right = top + HEIGHT - PAD, left + WIDTH - 10

    def x(step: float) -> float:
        return left + PAD + (step - 1) / (len(whole) - 1) * (WIDTH - PAD - 10)

    def y(loss: float) -> float:
        return bottom - loss / highest * (HEIGHT - 2 * PAD)

    line = " ".join(f"{x(step):.1f},{y(loss):.1f}" for step, loss in enumerate(whole, 1))
    points = [
        f'<circle cx="{x(step):.1f}" cy="{y(loss):.1f}" r="1.8" fill="{POINT}"/>' for step, loss in enumerate(own["losses"], 1)
    ]
    at = x(own["step"])
    return [
        f'<text x="{left + PAD}" y="{top + 18}" fill="{INK}">{fault}</text>',
        f'<path d="M{left + PAD},{top + PAD} V{bottom} H{right}" fill="none" stroke="{GREY}"/>',
        f'<text x="{left + 6}" y="{y(max(whole)) + 4:.1f}" fill="{GREY}">{max(whole):.1f}</text>',
        f'<text x="{left + 6}" y="{bottom}" fill="{GREY}">0</text>',
        f'<text x="{right - 46}" y="{bottom + 16}" fill="{GREY}">step {len(whole)}</text>',
        f'<path d="M{at:.1f},{top + PAD} V{bottom}" stroke="{GREY}" stroke-dasharray="3 3"/>',
        f'<polyline points="{line}" fill="none" stroke="{GREY}" stroke-width="3"/>',
        *points,
    ]


if __name__ == "__main__":
    main()
