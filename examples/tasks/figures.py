"""The table and the picture of docs/training.md, from results.json."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from experiments.common.markdown import replaced, table

ROOT = Path(__file__).resolve().parents[2]
PAGE, PICTURE = ROOT / "docs" / "training.md", ROOT / "docs" / "pictures" / "tasks.svg"
BEGIN, END = "<!-- tasks: begin -->", "<!-- tasks: end -->"
WIDTH, HEIGHT, PAD = 300, 190, 34
INK, GREY, POINT = "#24292f", "#8c959f", "#0969da"


def write_page(results: dict[str, Any]) -> None:
    """Write both anew."""
    text = PAGE.read_text(encoding="utf-8")
    PAGE.write_text(replaced(text, BEGIN, END, shown(results)), encoding="utf-8")
    PICTURE.write_text(picture(results["rows"]), encoding="utf-8")


def shown(results: dict[str, Any]) -> str:
    """The table, and what it was measured on."""
    head = (
        "task",
        "plan",
        "steps",
        "validation loss, first and best",
        "metric, first and best",
        "loss of the exported weights",
        "step predicted (90%), ms",
        "measured, ms",
    )
    load = f"{results['load']:.0f}"
    return (
        f"{table(head, [_row(name, row) for name, row in results['rows'].items()])}\n\n"
        f"{results['machine']}, torch {results['torch']}, {results['date']}, load average {load} (two ranks make 2 of it)."
    )


def _row(name: str, row: dict[str, Any]) -> tuple[str, ...]:
    predicted, measured = row["predicted_step_s"], row["measured_step_s"]
    low, middle, high = (1e3 * predicted[key] for key in ("p05", "median", "p95"))
    verdict = "" if low <= 1e3 * measured <= high else ", outside"
    return (
        name,
        f"`{row['plan']}`",
        str(row["steps"]),
        f"{row['validation'][0]['loss']:.3f}, {row['best_loss']:.3f}",
        f"{row['metric'].replace('_', ' ')} {row['first_score']:.3f}, {row['best_score']:.3f}",
        f"{row['loss_of_exported_weights']:.3f}",
        f"{middle:.1f} ({low:.1f} to {high:.1f})",
        f"{1e3 * measured:.1f}{verdict}",
    )


def picture(rows: dict[str, Any]) -> str:
    """SVG, one panel per task: the training loss of every step as a line, validations as points."""
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH * len(rows)} {HEIGHT}" '
        'font-family="system-ui, sans-serif" font-size="12">',
        f'<rect width="{WIDTH * len(rows)}" height="{HEIGHT}" fill="white"/>',
    ]
    for number, (name, row) in enumerate(rows.items()):
        parts += _panel(name, row["losses"], row["validation"], number * WIDTH)
    return "\n".join([*parts, "</svg>"]) + "\n"


def _panel(name: str, losses: Sequence[float], validation: Sequence[dict[str, Any]], left: int) -> list[str]:
    highest = 1.05 * max(*losses, *(entry["loss"] for entry in validation))
    bottom, right = HEIGHT - PAD, left + WIDTH - 12

    def x(step: float) -> float:
        return left + PAD + (step - 1) / (len(losses) - 1) * (right - left - PAD)

    def y(loss: float) -> float:
        return bottom - loss / highest * (bottom - PAD)

    line = " ".join(f"{x(step):.1f},{y(loss):.1f}" for step, loss in enumerate(losses, 1))
    return [
        f'<text x="{left + PAD}" y="20" fill="{INK}">{name}</text>',
        f'<path d="M{left + PAD},{PAD} V{bottom} H{right}" fill="none" stroke="{GREY}"/>',
        f'<text x="{left + 6}" y="{y(highest / 1.05) + 4:.1f}" fill="{GREY}">{highest / 1.05:.1f}</text>',
        f'<text x="{left + 6}" y="{bottom}" fill="{GREY}">0</text>',
        f'<text x="{right - 52}" y="{bottom + 16}" fill="{GREY}">step {len(losses)}</text>',
        f'<polyline points="{line}" fill="none" stroke="{GREY}" stroke-width="1"/>',
        *(f'<circle cx="{x(entry["step"]):.1f}" cy="{y(entry["loss"]):.1f}" r="3" fill="{POINT}"/>' for entry in validation),
    ]
