"""WHEN it was done: the one type that the simulator and the executor both return.

A Timeline says nothing about what a task is: that is in the TaskGraph with the same task numbers. So a prediction and
a measurement of the same graph are compared row by row.
"""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from parsim.errors import GraphError
from parsim.files import parse_json, read_regular, reading, unpacked, version_problem, write_atomically

SCHEMA_VERSION = 1
"""The version of a timeline's file."""


class Span(NamedTuple):
    """One task on one resource; a collective over n ranks has n spans."""

    task: int
    resource: str
    start_s: float
    end_s: float

    @property
    def duration_s(self) -> float:
        return self.end_s - self.start_s


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Timeline:
    """Spans as arrays of one length; `resource[i]` indexes `resources` (texts such as "r0.compute").
    `source`: "simulated" or "measured". `task`, `resource`: int64 [n]. `start_s`, `end_s`: float64 [n], seconds from the start
    of the step."""

    source: str
    resources: tuple[str, ...]
    task: NDArray[np.int64]
    resource: NDArray[np.int64]
    start_s: NDArray[np.float64]
    end_s: NDArray[np.float64]

    def __post_init__(self) -> None:
        lengths = {len(self.task), len(self.resource), len(self.start_s), len(self.end_s)}
        if len(lengths) != 1:
            raise GraphError(f"a timeline's arrays must have one length, got {sorted(lengths)}")
        if len(self.task) and not bool(np.all(self.end_s >= self.start_s)):
            raise GraphError("a span ends before it starts")

    def __len__(self) -> int:
        return len(self.task)

    def __iter__(self) -> Iterator[Span]:
        for task, resource, start, end in zip(
            self.task.tolist(), self.resource.tolist(), self.start_s.tolist(), self.end_s.tolist(), strict=True
        ):
            yield Span(task, self.resources[resource], start, end)

    @property
    def makespan_s(self) -> float:
        """From time 0 to the end of the last span."""
        return float(self.end_s.max()) if len(self.task) else 0.0

    @classmethod
    def from_spans(cls, spans: Sequence[Span], source: str) -> Timeline:
        names = tuple(dict.fromkeys(span.resource for span in spans))
        index = {name: number for number, name in enumerate(names)}
        return cls(
            source=source,
            resources=names,
            task=np.array([span.task for span in spans], dtype=np.int64),
            resource=np.array([index[span.resource] for span in spans], dtype=np.int64),
            start_s=np.array([span.start_s for span in spans], dtype=np.float64),
            end_s=np.array([span.end_s for span in spans], dtype=np.float64),
        )

    def save(self, path: Path) -> None:
        """Write gzipped JSON (one list per column)."""
        document = {
            "schema_version": SCHEMA_VERSION,
            "source": self.source,
            "resources": list(self.resources),
            "task": self.task.tolist(),
            "resource": self.resource.tolist(),
            "start_s": self.start_s.tolist(),
            "end_s": self.end_s.tolist(),
        }
        write_atomically(path, lambda file: file.write(gzip.compress(json.dumps(document).encode(), mtime=0)))

    @classmethod
    def load(cls, path: Path) -> Timeline:
        with reading(f"{path} is not a timeline", GraphError, "simulate or run again"):
            document = parse_json(unpacked(read_regular(path)))
            if problem := version_problem(document, SCHEMA_VERSION):
                raise GraphError(f"timeline {path}: {problem}; or simulate again")
            return cls(
                source=str(document["source"]),
                resources=tuple(map(str, document["resources"])),
                task=np.array(document["task"], dtype=np.int64),
                resource=np.array(document["resource"], dtype=np.int64),
                start_s=np.array(document["start_s"], dtype=np.float64),
                end_s=np.array(document["end_s"], dtype=np.float64),
            )
