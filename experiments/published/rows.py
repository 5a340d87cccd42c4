"""One row of a file of published runs, its numbers read and its blanks kept as None."""

from __future__ import annotations

import csv
import math
import re
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Literal

SUFFIXES = {"k": 1e3, "m": 1e6, "b": 1e9, "t": 1e12}


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """A published run as its source states it; None: not stated."""

    id: str
    hardware: str
    model: str
    unit: str
    precision: str = ""
    recompute: str = ""
    zero: str = ""
    notes: str = ""
    source: str = ""
    source_key: str = ""
    params: float | None = None
    gpus: int | None = None
    layers: int | None = None
    hidden: int | None = None
    heads: int | None = None
    seq: int | None = None
    global_batch: int | None = None
    micro_batch: int | None = None
    tp: int | None = None
    pp: int | None = None
    dp: int | None = None
    cp: int | None = None
    ep: int | None = None
    vpp: int | None = None
    value: float | None = None
    unread: tuple[str, ...] = ()
    """Columns of counts whose text is no whole number above 0, with that text: they count as blank."""

    @property
    def prefix(self) -> str:
        """The group of the row: its id without the number."""
        return re.sub(r"[-_]?\d+[a-z]?$", "", self.id)

    @property
    def assumed(self) -> Literal["", "recomputation", "plan"]:
        """What has to be assumed: of split, batch and precision something; recomputation alone; nothing."""
        precision = self.precision and not self.precision.endswith("?")
        if None in (self.tp, self.pp, self.global_batch, self.micro_batch, self.seq) or not precision:
            return "plan"
        return "" if self.recompute else "recomputation"


WHOLE = {"gpus", "layers", "hidden", "heads", "seq", "global_batch", "micro_batch", "tp", "pp", "dp", "cp", "ep", "vpp"}


KIBI = ("seq", "hidden", "global_batch")
"""Columns in which `8K` is 8,192."""


def number(text: str | None) -> float | None:
    """`39.1e9`, `1.7B`, `2048`; None for nothing, for what is no finite number, and for a computation (`2^11`)."""
    found = re.match(r"^\s*([-+]?\d[\d,]*\.?\d*(?:[eE][-+]?\d+)?)\s*([kKmMbBtT])?\b(?!\s*[\^*/x×+-]\s*\d)", text or "")
    if found is None:
        return None
    value = float(found[1].replace(",", "")) * SUFFIXES.get((found[2] or "").lower(), 1.0)
    return value if math.isfinite(value) else None


def count(name: str, text: str) -> int | None:
    """Of a column of counts; None for what is no whole number above 0, or counts another thing (a batch of `4M tokens`)."""
    value = number(text)
    if value is not None and name in KIBI and re.match(r"\s*[\d.,]+\s*[kK]\b", text):
        value = value / 1000 * 1024
    counts_tokens = name != "seq" and "token" in text.lower()
    return int(value) if value is not None and 1 <= value == int(value) and not counts_tokens else None


def row_of(entry: dict[str, str | None]) -> Row:
    """One entry of a csv file. Columns that are missing count as blank."""
    known = {field.name for field in fields(Row)} - {"unread"}
    values: dict[str, object] = {}
    unread = []
    for name in known:
        text = (entry.get("zero_stage" if name == "zero" else name) or "").strip()
        if name in WHOLE:
            values[name] = count(name, text)
            if text and values[name] is None:
                unread.append(f"{name} {text!r}")
        elif name in ("params", "value"):
            values[name] = number(text)
        else:
            values[name] = text
    return Row(**values, unread=tuple(sorted(unread)))  # type: ignore[arg-type]


def read_rows(path: Path) -> list[Row]:
    """All rows of a file, in its order."""
    with path.open(newline="", encoding="utf-8-sig", errors="replace") as file:
        return [row_of(entry) for entry in csv.DictReader(file)]
