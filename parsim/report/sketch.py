"""A timeline in a few hundred letters: what a rank's computation and communication do in each of many equal pieces of the step.

A piece has the letter of the kind that takes most of it, if that kind takes at least a quarter of it; else it is idle. Letters
that repeat are counted: `F12B24.3O` is 12 pieces of forward, 24 of backward, 3 idle, 1 of the optimizer. Short tasks between
long ones are not in it; the whole timeline is in trace.json.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from parsim.engines.static import CompiledGraph
from parsim.numeric import Floats, Ints
from parsim.program.taskgraph import COMPUTE, FROM_HOST, HOST, HOST_CORES, TO_HOST, parse_resource
from parsim.timeline import Timeline
from parsim.work import ClipGradients, Collective, Compute, HostCopy, HostUpdate, LoadBatch, Mix, OptimizerStep, SendRecv, Work

PIECES = 300
LEAST_SHARE = 0.25
IDLE = "."
LETTERS = {
    "F": "forward",
    "B": "backward",
    "I": "backward of inputs",
    "W": "backward of weights",
    "R": "recomputation",
    "O": "optimizer",
    "K": "clipping",
    "M": "mixing",
    "C": "collective",
    "S": "transfer",
    "L": "loading",
    "H": "copies to and from the host",
    "U": "updates on the host",
}
"""By letter, what it stands for."""
LANES = {COMPUTE: "computation", HOST: "loading", TO_HOST: "host", FROM_HOST: "host", HOST_CORES: "host"}
"""By stream, the lane that it is drawn in; all others communicate."""


class SketchRow(NamedTuple):
    """One row of a sketch. name: `rank 0 computation`. text: pieces from the start of the step to its end."""

    name: str
    text: str


def sketch(compiled: CompiledGraph, timeline: Timeline, ranks: Sequence[int]) -> tuple[SketchRow, ...]:
    """Up to four lanes per rank: computation, communication, loading and host; a lane in which nothing runs is left out."""
    step_s = timeline.makespan_s
    if not step_s > 0:
        return ()
    letters = np.array([_letter(unit.work) for unit in compiled.columns.units])[compiled.columns.unit[timeline.task]]
    places = [parse_resource(text) for text in timeline.resources]
    sketched = []
    for rank in ranks:
        for name in ("computation", "communication", "loading", "host"):
            lane = [
                number
                for number, place in enumerate(places)
                if place.rank == rank and LANES.get(place.stream, "communication") == name
            ]
            rows = np.flatnonzero(np.isin(timeline.resource, lane))
            if not len(rows):
                continue
            start, end = timeline.start_s[rows] / step_s, timeline.end_s[rows] / step_s
            kinds = sorted(set(letters[rows].tolist()))
            covered = np.array([_covered(start[letters[rows] == kind], end[letters[rows] == kind]) for kind in kinds])
            most, shares = covered.argmax(axis=0), covered.max(axis=0)
            pieces = [kinds[kind] if share >= LEAST_SHARE else IDLE for kind, share in zip(most, shares, strict=True)]
            runs = [(letter, len(list(same))) for letter, same in itertools.groupby(pieces)]
            text = "".join(f"{letter}{count if count > 1 else ''}" for letter, count in runs)
            sketched.append(SketchRow(f"rank {rank} {name}", text))
    return tuple(sketched)


_OTHER_LETTERS: dict[type[Work], str] = {
    OptimizerStep: "O",
    ClipGradients: "K",
    Mix: "M",
    Collective: "C",
    SendRecv: "S",
    LoadBatch: "L",
    HostCopy: "H",
    HostUpdate: "U",
}


def _letter(work: Work) -> str:
    return work.phase.short if isinstance(work, Compute) else _OTHER_LETTERS[type(work)]


def _covered(start: Floats, end: Floats) -> Floats:
    """Share of each piece that spans from `start` to `end` (0 to 1) cover; several at once count several times."""
    edges = np.arange(PIECES + 1) / PIECES
    share: Floats = np.diff(_before(start, edges) - _before(end, edges)) * PIECES
    return share


def _before(times: Floats, edges: Floats) -> Floats:
    """Per edge the sum of (edge - time) over the times before it."""
    ordered = np.sort(times)
    count: Ints = np.searchsorted(ordered, edges)
    sums = np.concatenate([[0.0], np.cumsum(ordered)])
    total: Floats = count * edges - sums[count]
    return total
