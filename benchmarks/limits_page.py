"""The table of docs/scale.md, from what `bench_limits.py` measured: powers between sizes, carried on to a target."""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from experiments.common.markdown import replaced

BEGIN, END = "<!-- limits: begin -->", "<!-- limits: end -->"
LEAST_BYTES = 16 * 2**20
"""Of memory: smaller differences are those of the allocator."""
SEGMENTS = 2
"""The last of them tell how a quantity grows where the measurement ends."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One line of the table. case: of the benchmark. unit: of its size. target: carried on to. memory: whether it grows."""

    case: str
    name: str
    unit: str
    target: int
    memory: bool


ROWS = (
    Row(case="folded", name="one plan, folded", unit="GPUs", target=100_000, memory=True),
    Row(case="unfolded", name="one plan, every rank by itself", unit="GPUs", target=100_000, memory=True),
    Row(case="given", name="sweep of given plans", unit="points", target=10**6, memory=False),
    Row(case="searched", name="sweep of searched points", unit="points", target=10**6, memory=False),
    Row(case="dask", name="scheduler and client of a Dask sweep", unit="points", target=10**6, memory=False),
    Row(case="rows", name="rows of a sweep, read back", unit="points", target=10**6, memory=True),
    Row(case="replicas", name="virtual replicas on a ring", unit="replicas", target=100_000, memory=True),
    Row(case="complete", name="virtual replicas, complete graph", unit="replicas", target=100_000, memory=True),
    Row(case="all_reduces", name="all_reduce of 16 MiB over gloo, all ranks", unit="processes", target=64, memory=False),
    Row(case="small_all_reduces", name="all_reduce of 1 MiB over gloo, all ranks", unit="processes", target=64, memory=False),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Growth:
    """How a quantity grows. low, high: powers, the least and largest of the last segments. size, last: the last measurement."""

    low: float
    high: float
    size: int
    last: float

    def at(self, target: int) -> tuple[float, float]:
        """Between what and what it is at another size."""
        ratio = target / self.size
        ends = [self.last * ratio**power for power in (self.low, self.high)]
        return min(ends), max(ends)

    @property
    def power(self) -> str:
        """`1.10 to 1.15`."""
        return "{} to {}".format(*ends) if len(ends := sorted({f"{self.low:.2f}", f"{self.high:.2f}"})) == 2 else ends[0]


@dataclass(frozen=True, slots=True, kw_only=True)
class Apart:
    """What independent points take together. low, high: of one point, over all measurements. last: of all of the last."""

    low: float
    high: float
    last: float

    def at(self, target: int) -> tuple[float, float]:
        """Between what and what so many points take."""
        return self.low * target, self.high * target


def apart(sizes: Sequence[int], values: Sequence[float]) -> Apart:
    """From measured values. Args: sizes: points of each measurement. values: what they took together."""
    each = [value / size for size, value in zip(sizes, values, strict=True)]
    return Apart(low=min(each), high=max(each), last=values[-1])


def growth_of(sizes: Sequence[int], values: Sequence[float]) -> Growth:
    """From measured values, ascending in size.

    Args:
        sizes: at least two. values: above 0.
    """
    powers = [
        math.log(right / left) / math.log(larger / smaller)
        for (smaller, larger), (left, right) in zip(pairwise(sizes), pairwise(values), strict=True)
    ][-SEGMENTS:]
    return Growth(low=min(powers), high=max(powers), size=sizes[-1], last=values[-1])


def seconds_text(value: float) -> str:
    """Two digits: `34 s`, `2.1 h`, `11 days`."""
    for largest, scale, unit in ((120, 1, "s"), (7200, 60, "min"), (172_800, 3600, "h")):
        if value < largest:
            return f"{_short(value / scale)} {unit}"
    return f"{_short(value / 86_400)} days"


def bytes_text(value: float) -> str:
    for scale, unit in ((2**40, "TiB"), (2**30, "GiB")):
        if value >= scale:
            return f"{_short(value / scale)} {unit}"
    return f"{_short(value / 2**20)} MiB"


def _short(value: float) -> str:
    return f"{float(f'{value:.2g}'):,g}"


def _range(low: str, high: str) -> str:
    """`3 to 5 h`; one of them where both are written alike."""
    if low == high:
        return low
    (number, unit), (_, other) = low.rsplit(" ", 1), high.rsplit(" ", 1)
    return f"{number if unit == other else low} to {high}"


def line_of(row: Row, case: Mapping[str, Any]) -> str:
    """One line of the table. Args: row: which. case: what was measured of it."""
    lines = case["measured"]
    sizes = [line["size"] for line in lines]
    carried = apart if row.unit == "points" else growth_of
    seconds = carried(sizes, [line["cpu_s"] for line in lines])
    measured = f"{sizes[-1]:,} {row.unit}: {seconds_text(seconds.last)}"
    if row.target <= sizes[-1]:
        at = f"{seconds_text(seconds.last)} at {sizes[-1]:,}, measured"
    else:
        at = _range(*(seconds_text(value) for value in seconds.at(row.target)))
    memory = "–"
    if row.memory:
        large = [(line["size"], line["bytes"]) for line in lines if line["bytes"] >= LEAST_BYTES]
        if len(large) < 2:
            memory = f"below {bytes_text(max(LEAST_BYTES, lines[-1]['bytes']))}"
        else:
            used = carried(*zip(*large, strict=True))
            measured += f", {bytes_text(used.last)}"
            beyond = row.target > sizes[-1]
            memory = _range(*(bytes_text(value) for value in used.at(row.target))) if beyond else bytes_text(used.last)
    elif "row_bytes" in lines[-1]:
        memory = f"log: {bytes_text(row.target * lines[-1]['row_bytes'])}"
    power = "1: each point by itself" if isinstance(seconds, Apart) else seconds.power
    return f"| {row.name} | {measured} | {power} | {at} | {memory} |"


def table_of(record: Mapping[str, Any]) -> str:
    """Markdown. Args: record: of `limits.json`, or a part of it."""
    head = ("what", "measured up to (CPU time, memory)", "power", "at 100,000 GPUs or 1,000,000 points", "memory there")
    known = [line_of(row, record["cases"][row.case]) for row in ROWS if row.case in record["cases"]]
    return "\n".join([f"| {' | '.join(head)} |", "|---|---|---|---|---|", *known])


def notes_of(record: Mapping[str, Any]) -> list[str]:
    """What follows from several lines of the table. Args: record: of `limits.json`."""
    cases = {name: case["measured"] for name, case in record["cases"].items()}
    first, last, alone = cases["folded"][0], cases["folded"][-1], cases["unfolded"][-1]
    per_point = {name: cases[name][-1]["cpu_s"] / cases[name][-1]["size"] for name in ("given", "searched", "dask")}
    workers = {name: _short(per_point[name] / per_point["dask"]) for name in ("given", "searched")}
    per_gpu = alone["tasks"] / alone["size"]
    ms = {name: _short(1e3 * spent) for name, spent in per_point.items()}
    return [
        f"- Tasks of the folded plan: {first['tasks']:,} at {first['size']:,} GPUs, {last['tasks']:,} at {last['size']:,}. "
        f"Unfolded, it has {round(per_gpu):,} per GPU, {_short(0.1 * per_gpu)} million at 100,000.",
        f"- The scheduler and the client of a Dask sweep take {ms['dask']} ms per point. A given point of ResNet-50 takes "
        f"{ms['given']} ms and a searched one {ms['searched']} ms. So they keep about {workers['given']} workers busy with "
        f"given points, and {workers['searched']} with searched ones.",
        f"- The clock beside the processor seconds of an all_reduce, on two cores: 16 MiB {clock_of(cases['all_reduces'])}; "
        f"1 MiB {clock_of(cases['small_all_reduces'])}.",
    ]


def clock_of(lines: Sequence[Mapping[str, float]]) -> str:
    """`2 processes 23 ms (25 ms), ...`: by the clock, and of the processors."""
    each = (
        f"{line['size']:g} processes {_short(1e3 * line['wall_s'])} ms ({_short(1e3 * line['cpu_s'])} ms)" for line in lines
    )
    return ", ".join(each)


def page_of(text: str, record: Mapping[str, Any]) -> str:
    """docs/scale.md (`text`) with the table of `limits.json` (`record`), and where and when it was measured."""
    loads = [case["load"] for case in record["cases"].values()]
    dates = sorted({case["date"] for case in record["cases"].values()})
    told = (
        f"{record['machine']}; {' and '.join(dates)}, load {min(loads):g} to {max(loads):g}. "
        "`python benchmarks/bench_limits.py --record` measures, `--page` writes this table."
    )
    notes = "\n".join(notes_of(record))
    return replaced(text, BEGIN, END, f"{table_of(record)}\n\n{told}\n\n{notes}")
