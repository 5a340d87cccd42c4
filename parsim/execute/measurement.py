"""The results of a launch, read back by its parent: timelines per step, step times per round, losses, memory."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from parsim.errors import ExecutionError
from parsim.execute.cuda.gpu import MemoryUse
from parsim.execute.streams import TaskTime
from parsim.files import parse_json, read_regular, reading, version_problem, write_atomically, write_json_atomically
from parsim.program.taskgraph import TaskGraph
from parsim.records import check_types
from parsim.timeline import Span, Timeline

SCHEMA_VERSION = 2
"""Of what a rank leaves. Version 1, which files without the key have too, writes NaN where another rank counts the loss."""


MOST_RECORDED = 10**6
"""Steps whose task times a file may claim to hold."""


@dataclass(frozen=True, kw_only=True)
class RankRecord:
    """One rank of one run, as written by the worker.

    Attributes:
        rounds: per round (start_s, end_s, steps). steps: task times of each recorded step.
        losses: mean loss per training step, already divided by the global batch; None where other ranks count it.
        cpu_s: CPU seconds of this process per round. peak_bytes: live tensors of one step.
        pace_s: how fast this rank's core was beside each round (`parsim.execute.processes.speed_probe`); empty if nobody
        looked. memory_lines: peak_bytes by line (`execute/records/memory_lines`); of a CPU rank alone.
    """

    rank: int
    rounds: list[tuple[float, float, int]]
    steps: list[list[TaskTime]]
    losses: list[float | None]
    cpu_s: list[float]
    peak_bytes: int
    pace_s: list[float] = field(default_factory=list)
    memory_lines: Mapping[str, int] = field(default_factory=dict)
    memory: MemoryUse | None = None

    def on_clock(self, seconds: Callable[[float], float]) -> RankRecord:
        """The same on another clock, such as that of rank 0, which may be on another machine.

        Args:
            seconds: from seconds on this rank's clock to those on the other.
        """
        return replace(
            self,
            rounds=[(seconds(start_s), seconds(end_s), steps) for start_s, end_s, steps in self.rounds],
            steps=[
                [entry._replace(ready_s=seconds(entry.ready_s), end_s=seconds(entry.end_s)) for entry in times]
                for times in self.steps
            ],
        )

    def save(self, folder: Path) -> None:
        streams = sorted({entry.stream for step in self.steps for entry in step})
        number = {stream: index for index, stream in enumerate(streams)}
        rows = [
            (step, entry.task, number[entry.stream], entry.ready_s, entry.end_s)
            for step, times in enumerate(self.steps)
            for entry in times
        ]
        table = np.array(rows, dtype=np.float64).reshape(-1, 5)
        facts = {
            "schema_version": SCHEMA_VERSION,
            "rank": self.rank,
            "rounds": self.rounds,
            "losses": [value if value is None or math.isfinite(value) else str(value) for value in self.losses],
            "cpu_s": self.cpu_s,
            "peak_bytes": self.peak_bytes,
            "pace_s": self.pace_s,
            "memory_lines": dict(self.memory_lines),
            "memory": None if self.memory is None else asdict(self.memory),
            "streams": streams,
            "recorded": len(self.steps),
        }
        folder.mkdir(parents=True, exist_ok=True)
        write_atomically(folder / f"rank{self.rank}.npy", lambda file: np.save(file, table))
        write_json_atomically(folder / f"rank{self.rank}.json", facts)

    @classmethod
    def load(cls, folder: Path, rank: int) -> RankRecord:
        path = folder / f"rank{rank}.json"
        if not path.is_file():
            raise ExecutionError(f"rank {rank} left no record in {folder}; the run did not finish")
        with reading(f"{path} is not the record of a rank", ExecutionError, "run again"):
            facts: dict[str, Any] = parse_json(read_regular(path), allow_nan=True)
            if problem := version_problem(facts, SCHEMA_VERSION):
                raise ExecutionError(f"{path}: {problem}; or run again")
            table = _table(read_regular(folder / f"rank{rank}.npy"))
            recorded, streams = facts["recorded"], facts["streams"]
            if type(recorded) is not int or not 0 <= recorded <= max(len(table), MOST_RECORDED):
                raise ValueError(f"recorded = {recorded!r}")
            steps: list[list[TaskTime]] = [[] for _ in range(recorded)]
            for step, task, stream, ready, end in table.tolist():
                steps[int(step)].append(TaskTime(int(task), streams[int(stream)], ready, end))
            found = cls(
                rank=rank,
                rounds=[(start, end, int(steps_)) for start, end, steps_ in facts["rounds"]],
                steps=steps,
                losses=[None if value is None else float(value) for value in facts["losses"]],
                cpu_s=facts["cpu_s"],
                peak_bytes=int(facts["peak_bytes"]),
                pace_s=facts["pace_s"],
                memory_lines=facts["memory_lines"],
                memory=MemoryUse(**facts["memory"]) if facts["memory"] else None,
            )
            check_types(found, "record")
            return found


@dataclass(frozen=True, kw_only=True)
class Measurement:
    """One run over all its ranks.

    Attributes:
        step_s: float64 [rounds], the mean step of each round. steps: of all rounds together. timelines: one per recorded step.
        losses: per training step. peak_bytes: live tensors, per rank.
        pace_s: float64 [ranks that looked, moments], how fast their cores were (`parsim.execute.processes.speed_probe`): the
            first ranks, one per core. Of a measurement its rounds; of a training on cores its begin and its end.
    """

    step_s: NDArray[np.float64]
    steps: int
    timelines: tuple[Timeline, ...]
    losses: tuple[float, ...]
    peak_bytes: tuple[int, ...]
    cpu_s: tuple[float, ...]
    pace_s: NDArray[np.float64]
    memory: tuple[MemoryUse | None, ...] = ()

    @property
    def memory_uses(self) -> tuple[MemoryUse | None, ...]:
        """By rank what was counted; a rank whose counters were not read has its live tensors alone."""
        known = self.memory or (None,) * len(self.peak_bytes)
        return tuple(
            use or (MemoryUse(live_bytes=peak) if peak else None) for use, peak in zip(known, self.peak_bytes, strict=True)
        )

    @property
    def mean_step_s(self) -> float:
        return float(self.step_s.mean())


def load_measurement(folder: Path, graph: TaskGraph) -> Measurement:
    """Merge the records of all ranks of a run. Raises ExecutionError if one is missing."""
    records = [RankRecord.load(folder, rank) for rank in range(graph.world_size)]
    count = min(len(record.rounds) for record in records)
    step_s = np.array([_round_step_s(records, number) for number in range(count)])
    timelines = tuple(
        merge_times([record.steps[step] for record in records]) for step in range(min(len(r.steps) for r in records))
    )
    looked = [record.pace_s for record in records if record.pace_s]
    moments = min((len(own) for own in looked), default=0)
    return Measurement(
        step_s=step_s,
        steps=sum(entry[2] for entry in records[0].rounds[:count]),
        timelines=timelines,
        losses=total_losses(records),
        peak_bytes=tuple(record.peak_bytes for record in records),
        cpu_s=tuple(float(np.sum(record.cpu_s)) for record in records),
        memory=tuple(record.memory for record in records),
        pace_s=np.array([own[:moments] for own in looked], dtype=np.float64).reshape(len(looked), moments),
    )


_HEADER = re.compile(
    rb"\x93NUMPY\x01\x00..\{'descr': '<f8', 'fortran_order': False, 'shape': \((\d{1,12}), 5\), \} *\n", re.DOTALL
)


def _table(content: bytes) -> NDArray[np.float64]:
    """The task times of a .npy file, of the one form in which they are written. Raises ValueError for any other."""
    header = _HEADER.match(content)
    if header is None or len(content) != header.end() + int(header[1]) * 5 * 8:
        raise ValueError("its table of task times is none, or was cut short")
    found = np.frombuffer(content, dtype="<f8", offset=header.end()).reshape(-1, 5)
    if not np.isfinite(found).all():
        raise ValueError("its table of task times holds numbers that are not finite")
    return found


def total_losses(records: Sequence[RankRecord]) -> tuple[float, ...]:
    """The mean loss of every training step, added up over the ranks that count it. A loss that is not finite stays so.

    Steps without a loss are left out: the first of decoupled stages, before a batch has come through all of them.
    """
    steps = (
        [value for value in values if value is not None] for values in zip(*(record.losses for record in records), strict=True)
    )
    return tuple(float(sum(values)) for values in steps if values)


def _round_step_s(records: Sequence[RankRecord], number: int) -> float:
    start = min(record.rounds[number][0] for record in records)
    end = max(record.rounds[number][1] for record in records)
    return (end - start) / records[0].rounds[number][2]


def merge_times(per_rank: Sequence[Sequence[TaskTime]]) -> Timeline:
    """The measured Timeline of one step, seconds from its first start.

    A task that spans ranks starts when its last rank is ready; what a rank spent before that is wait, not work.
    """
    ready: dict[int, float] = {}
    for times in per_rank:
        for entry in times:
            ready[entry.task] = max(ready.get(entry.task, entry.ready_s), entry.ready_s)
    origin = min((entry.ready_s for times in per_rank for entry in times), default=0.0)
    spans = [
        Span(entry.task, f"r{rank}.{entry.stream}", min(ready[entry.task], entry.end_s) - origin, entry.end_s - origin)
        for rank, times in enumerate(per_rank)
        for entry in times
    ]
    spans.sort(key=lambda span: (span.start_s, span.task, span.resource))
    return Timeline.from_spans(spans, "measured")
