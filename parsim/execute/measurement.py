"""The results of a launch, read back by its parent: timelines per step, step times per round, losses, memory."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
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
"""Version of what a rank leaves."""


MOST_RECORDED = 10**6
"""Steps whose task times a file may claim to hold."""


@dataclass(kw_only=True)
class RankRecord:
    """What one rank measured of one run, as it goes on; the worker writes it at the end.

    Attributes:
        rounds: per round (start_s, end_s, steps). steps: task times of each recorded step. cpu_s: of this process per round.
        losses: mean loss per training step, already divided by the global batch; None where other ranks count it.
        pace_s: how fast this rank's core was beside each round (`parsim.execute.processes.speed_probe`); empty: nobody looked.
        peak_bytes: live tensors of one step. memory_lines: the same by line, of a CPU rank alone. memory: what was counted.
    """

    rank: int
    rounds: list[tuple[float, float, int]] = field(default_factory=list)
    steps: list[list[TaskTime]] = field(default_factory=list)
    losses: list[float | None] = field(default_factory=list)
    cpu_s: list[float] = field(default_factory=list)
    peak_bytes: int = 0
    pace_s: list[float] = field(default_factory=list)
    memory_lines: Mapping[str, int] = field(default_factory=dict)
    memory: MemoryUse | None = None

    def on_clock(self, seconds: Callable[[float], float]) -> RankRecord:
        """With the times of another clock, to which `seconds` takes those of this one: that of rank 0 on another machine."""
        steps = [
            [time._replace(ready_s=seconds(time.ready_s), end_s=seconds(time.end_s)) for time in times] for times in self.steps
        ]
        rounds = [(seconds(start_s), seconds(end_s), count) for start_s, end_s, count in self.rounds]
        return replace(self, rounds=rounds, steps=steps)

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
            record = cls(
                rank=rank,
                rounds=[(start, end, int(count)) for start, end, count in facts["rounds"]],
                steps=steps,
                losses=[None if value is None else float(value) for value in facts["losses"]],
                cpu_s=facts["cpu_s"],
                peak_bytes=int(facts["peak_bytes"]),
                pace_s=facts["pace_s"],
                memory_lines=facts["memory_lines"],
                memory=MemoryUse(**facts["memory"]) if facts["memory"] else None,
            )
            check_types(record, "record")
            return record


@dataclass(frozen=True, kw_only=True)
class Measurement:
    """One run over all its ranks, each with its record. left_out: of its first rounds, so many are no part of `step_s`.
    together: rounds that make one entry of it."""

    ranks: tuple[RankRecord, ...]
    left_out: int = 0
    together: int = 1

    @cached_property
    def step_s(self) -> NDArray[np.float64]:
        """float64 [rounds / together]: the mean step of each, by the clock of the rank that takes longest for all of them.
        Nothing holds ranks together between two exchanges: from the first rank's begin to the last one's end every step would
        contain their distance (`skew_s`) again."""
        spans = np.array(self._rounds[self.left_out :], dtype=np.float64).reshape(-1, self.together, len(self.ranks), 3)
        own_s = (spans[..., 1] - spans[..., 0]).sum(1)
        steps = spans[..., 0, 2].sum(1)
        seconds: NDArray[np.float64] = own_s[:, own_s.sum(0).argmax()] / steps
        return seconds

    @property
    def skew_s(self) -> float:
        """Seconds between the first and the last rank's begin of a round, on average."""
        begins = np.array([[start for start, _, _ in spans] for spans in self._rounds[self.left_out :]])
        return float((begins.max(1) - begins.min(1)).mean()) if len(begins) else 0.0

    @property
    def _rounds(self) -> list[tuple[tuple[float, float, int], ...]]:
        return list(zip(*(record.rounds for record in self.ranks), strict=False))

    @property
    def steps(self) -> int:
        return sum(spans[0][2] for spans in self._rounds)

    @cached_property
    def timelines(self) -> tuple[Timeline, ...]:
        return tuple(merge_times(times) for times in zip(*(record.steps for record in self.ranks), strict=False))

    @cached_property
    def losses(self) -> tuple[float, ...]:
        """Mean loss of every training step, added up over the ranks that count it. A loss that is not finite stays so. Steps
        without a loss are left out: the first of decoupled stages, before a batch has come through all of them."""
        by_step = zip(*(record.losses for record in self.ranks), strict=True)
        steps = ([loss for loss in losses if loss is not None] for losses in by_step)
        return tuple(float(sum(losses)) for losses in steps if losses)

    @property
    def cpu_s(self) -> tuple[float, ...]:
        return tuple(float(np.sum(record.cpu_s)) for record in self.ranks)

    @property
    def pace_s(self) -> NDArray[np.float64]:
        """float64 [ranks that looked, moments], how fast their cores were: the first ranks, one per core. The moments of a
        measurement are its rounds; of a training on cores its begin and its end."""
        looked = [record.pace_s for record in self.ranks if record.pace_s]
        moments = min(map(len, looked), default=0)
        return np.array([seconds[:moments] for seconds in looked], dtype=np.float64).reshape(len(looked), moments)

    @property
    def peak_bytes(self) -> tuple[int, ...]:
        return tuple(record.peak_bytes for record in self.ranks)

    @property
    def memory_uses(self) -> tuple[MemoryUse | None, ...]:
        """What was counted, per rank; a rank whose counters were not read has its live tensors alone."""
        return tuple(
            record.memory or (MemoryUse(live_bytes=record.peak_bytes) if record.peak_bytes else None) for record in self.ranks
        )

    @property
    def mean_step_s(self) -> float:
        return float(self.step_s.mean())


def load_measurement(folder: Path, graph: TaskGraph) -> Measurement:
    """The records of all ranks of a run. Raises ExecutionError if one is missing."""
    return Measurement(ranks=tuple(RankRecord.load(folder, rank) for rank in range(graph.world_size)))


_HEADER = re.compile(
    rb"\x93NUMPY\x01\x00..\{'descr': '<f8', 'fortran_order': False, 'shape': \((\d{1,12}), 5\), \} *\n", re.DOTALL
)


def _table(content: bytes) -> NDArray[np.float64]:
    """The task times of a .npy file, of the one form in which they are written. Raises ValueError for any other."""
    header = _HEADER.match(content)
    if header is None or len(content) != header.end() + int(header[1]) * 5 * 8:
        raise ValueError("its table of task times is none, or was cut short")
    table = np.frombuffer(content, dtype="<f8", offset=header.end()).reshape(-1, 5)
    if not np.isfinite(table).all():
        raise ValueError("its table of task times holds numbers that are not finite")
    return table


def merge_times(per_rank: Sequence[Sequence[TaskTime]]) -> Timeline:
    """The measured Timeline of one step, seconds from its first start. A task that spans ranks starts when its last rank is
    ready; what a rank spent before that is wait, not work."""
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
