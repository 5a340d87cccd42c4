"""The peak by line: what the prediction and the measurement mean by one, and the table of errors by line."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

LINES: Mapping[str, tuple[str, ...]] = {
    "parameters": ("parameters",),
    "gradients": ("gradients",),
    "optimizer state": ("optimizer_state",),
    "buffers": ("buffers",),
    "activations and boundary values": ("activations", "boundary_values", "casts"),
    "receive buffers": ("receive_buffers",),
    "inputs not yet read": ("inputs",),
    "workspace": ("workspace", "unsharded"),
}
"""By the name in the table. One value can be saved by its maker and kept by its reader: of storages these are not two."""


def by_line(lines: Mapping[str, int]) -> dict[str, int]:
    """Bytes of lines of tensors by the names of the table. Raises KeyError for a line that belongs to none."""
    place = {line: name for name, lines_of in LINES.items() for line in lines_of}
    found = dict.fromkeys(LINES, 0)
    for line, size in lines.items():
        found[place[line]] += size
    return found


def table(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """Markdown: over all cases the share of every line in the measured peaks, and its error in percent of the measured peak."""
    text = ["| line | share of the peak | mean error | lowest | highest |", "|---|---|---|---|---|"]
    counted = [row for row in rows if row[f"measured {next(iter(LINES))}"] != ""]
    for name in LINES:
        shares = [100 * row[f"measured {name}"] / row["measured_bytes"] for row in counted]
        errors = [100 * (row[f"predicted {name}"] - row[f"measured {name}"]) / row["measured_bytes"] for row in counted]
        mean = statistics.mean(map(abs, errors))
        text.append(f"| {name} | {statistics.mean(shares):.1f}% | {mean:.2f}% | {min(errors):+.2f}% | {max(errors):+.2f}% |")
    return text
