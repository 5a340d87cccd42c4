"""Writing a file so that a stopped process leaves the old one or the new one, never half of one."""

from __future__ import annotations

from pathlib import Path


def write_text_atomically(path: Path, text: str) -> None:
    """Write UTF-8 beside `path`, as NAME.partial, then rename.

    Holds against a killed process, not against a power cut: nothing is forced to disk.
    """
    partial = path.with_name(path.name + ".partial")
    partial.write_text(text, encoding="utf-8")
    partial.replace(path)
