"""The peak by line: what the prediction and the measurement mean by one. Needs the standard library alone."""

from __future__ import annotations

from collections.abc import Mapping

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


def by_line(lines: Mapping[str, int]) -> list[int]:
    """Bytes of lines of tensors, in the order of `LINES`. Raises KeyError for a line that belongs to none."""
    place = {line: number for number, lines_of in enumerate(LINES.values()) for line in lines_of}
    found = [0] * len(LINES)
    for line, size in lines.items():
        found[place[line]] += size
    return found
