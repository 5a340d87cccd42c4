"""What every rank is doing and since when, in a small file that all ranks of a launch share with the launcher.

A rank writes its entry through mapped memory whenever it moves on to the next task, so a beat costs a microsecond and no
system call. The launcher reads the entries, and from /proc whether a process is stopped and how much it computes. From both
it tells a rank that hangs from one that waits for another, and from one that computes for long (`RankWatch`).

Leaves out: what a rank's GPU does. A rank that waits for its GPU waits; if all ranks do, for too long, that is a hang.
"""

from __future__ import annotations

import contextlib
import enum
import mmap
import os
import struct
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from parsim.units import format_seconds

BEATS_VARIABLE = "PARSIM_BEATS"
_ENTRY = struct.Struct("<dqqB39s")
_PROC = Path("/proc")
_IDLE_SHARE = 0.05
"""Share of a core: what uses less computes nothing."""
PATIENCE, LEAST_PATIENCE_S = 20, 600.0
"""Times the limit, and at least so long: for a rank that computes without a sign of progress, or prepares its work. On a
machine that others use, imports alone may take a minute."""
TOGETHER = 4
"""Times the limit: for ranks that all wait for one another, which a long transfer looks like, too."""
_LONGEST_POLL_S = 1.0


class Doing(enum.IntEnum):
    """What a rank is at. A rank that has never reported (NOTHING) is watched for being stopped only."""

    NOTHING = 0
    PREPARING = 1
    WORKING = 2
    WAITING = 3


_DOINGS = frozenset(Doing)


@dataclass(frozen=True, slots=True, kw_only=True)
class Beat:
    """One rank's entry: `count` beats so far, the step it is in, and what it does in words."""

    doing: Doing
    count: int
    step: int
    text: str
    time_s: float = 0.0

    def describe(self) -> str:
        """`step 7 (scoring)`."""
        doing = f" ({self.text})" if self.text else ""
        return f"in step {self.step}{doing}" if self.step else self.text or "before its first step"


class Pulse:
    """A rank's own entry. Without a launcher that watches, nothing is written."""

    def __init__(self, path: Path | None = None, rank: int = 0) -> None:
        self._map: mmap.mmap | None = None
        self._at = rank * _ENTRY.size
        self._count = self._step = 0
        self._doing, self._text = Doing.NOTHING, b""
        if path is not None:
            with path.open("r+b") as file:
                self._map = mmap.mmap(file.fileno(), 0)

    @property
    def doing(self) -> str:
        return self._text.decode(errors="replace")

    def beat(self) -> None:
        if self._map is not None:
            self._count += 1
            _ENTRY.pack_into(self._map, self._at, time.monotonic(), self._count, self._step, self._doing, self._text)

    def begin(self, doing: Doing, text: str = "", step: int | None = None) -> None:
        """From now on it does that; `step`: from 1, left out: the same as before."""
        self._doing, self._text = doing, text.encode()[:39]
        self._step = self._step if step is None else step
        self.beat()

    @contextlib.contextmanager
    def waiting(self) -> Iterator[None]:
        """Inside, the rank waits for another one."""
        before, self._doing = self._doing, Doing.WAITING
        self.beat()
        try:
            yield
        finally:
            self._doing = before
            self.beat()


_pulses: list[Pulse] = []


def pulse(environment: Mapping[str, str] = os.environ) -> Pulse:
    if not _pulses:
        path = environment.get(BEATS_VARIABLE)
        _pulses.append(Pulse(Path(path), int(environment.get("RANK", 0))) if path else Pulse())
    return _pulses[0]


def create_beats(path: Path, nproc: int) -> None:
    path.write_bytes(bytes(nproc * _ENTRY.size))


def read_beats(path: Path, nproc: int) -> list[Beat]:
    beats = []
    for time_s, count, step, number, text in _ENTRY.iter_unpack(path.read_bytes()[: nproc * _ENTRY.size]):
        doing = Doing(number) if number in _DOINGS else Doing.NOTHING
        words = text.rstrip(b"\0").decode(errors="replace")
        beats.append(Beat(doing=doing, count=count, step=step, text=words, time_s=time_s))
    return beats


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessState:
    """From /proc: `letter` as ps prints it (T: stopped), processor seconds so far."""

    letter: str
    cpu_s: float


def process_state(pid: int) -> ProcessState | None:
    """None where the system does not say."""
    try:
        fields = (_PROC / str(pid) / "stat").read_text().rpartition(")")[2].split()
        return ProcessState(letter=fields[0], cpu_s=(int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK"))
    except (OSError, ValueError, IndexError):
        return None


@dataclass(slots=True, kw_only=True)
class _Seen:
    """A rank: seconds that it has been stopped, or a zombie that cannot be reaped, and since its last beat, number `count`.
    `calm_s`: of these, the last ones in which it has computed nothing yet: since it had `cpu_s` processor seconds. ran: it was
    seen running, or waiting for a core, in them."""

    stopped_s: float = 0.0
    ended_s: float = 0.0
    still_s: float = 0.0
    calm_s: float = 0.0
    count: int = -1
    cpu_s: float = 0.0
    ran: bool = False

    def computes(self, state: ProcessState | None) -> bool:
        """Whether it took a core, or waited for one, since it was last found computing or beat."""
        return self.ran or (state is not None and state.cpu_s - self.cpu_s > _IDLE_SHARE * self.calm_s)


@dataclass(frozen=True, slots=True, kw_only=True)
class Hang:
    """Ranks that do not move, and why that is known, in words that follow their names. together: they all wait for one
    another."""

    ranks: tuple[int, ...]
    text: str
    together: bool = False


@dataclass(slots=True, kw_only=True)
class RankWatch:
    """Looks at all ranks now and then, and says which one hangs. Time counts by looks, each of at most a second: a launcher
    that was stopped itself blames nobody for it.

    limit_s: a rank that is stopped, or does nothing, for longer hangs. sees_all: no rank is watched by somebody else, which
    these may wait for.
    """

    limit_s: float
    nproc: int
    sees_all: bool = True
    _seen: list[_Seen] = field(default_factory=list)
    _looked_s: float | None = None

    def look(self, beats: Sequence[Beat], states: Sequence[ProcessState | None], now_s: float) -> Hang | None:
        """Judge by the entries and processes of all ranks (None: it has ended, or cannot be seen) at `now_s`."""
        if not self._seen:
            self._seen = [_Seen() for _ in range(self.nproc)]
        passed_s = 0.0 if self._looked_s is None else min(now_s - self._looked_s, _LONGEST_POLL_S)
        self._looked_s = now_s
        for seen, beat, state in zip(self._seen, beats, states, strict=True):
            cpu_s = state.cpu_s if state is not None else 0.0
            seen.stopped_s = seen.stopped_s + passed_s if state is not None and state.letter in "Tt" else 0.0
            seen.ended_s = seen.ended_s + passed_s if state is not None and state.letter in "ZX" else 0.0
            if beat.count != seen.count:
                seen.count, seen.still_s, seen.calm_s, seen.cpu_s, seen.ran = beat.count, 0.0, 0.0, cpu_s, False
            else:
                seen.still_s += passed_s
                seen.calm_s += passed_s
            seen.ran = seen.ran or (state is not None and state.letter == "R")
            if seen.calm_s > self.limit_s and seen.computes(state):
                seen.calm_s, seen.cpu_s, seen.ran = 0.0, cpu_s, False
        return self._stopped() or self._ended() or self._hanging(beats, states) or self._deadlocked(beats, states)

    @property
    def _patience_s(self) -> float:
        return max(PATIENCE * self.limit_s, LEAST_PATIENCE_S)

    def _stopped(self) -> Hang | None:
        if all(seen.stopped_s <= self.limit_s for seen in self._seen):
            return None
        # Ranks that were stopped together may be seen so one look apart.
        least_s = max(self.limit_s - _LONGEST_POLL_S, 0.0)
        ranks = tuple(rank for rank, seen in enumerate(self._seen) if seen.stopped_s > least_s)
        have = "has" if len(ranks) == 1 else "have"
        text = f"{have} been stopped for {format_seconds(self.limit_s)} (by a SIGSTOP, a debugger, or job control)"
        return Hang(ranks=ranks, text=text)

    def _ended(self) -> Hang | None:
        ranks = tuple(rank for rank, seen in enumerate(self._seen) if seen.ended_s > self.limit_s)
        have = "has" if len(ranks) == 1 else "have"
        text = f"{have} ended but for a thread that waits in the kernel, as where a GPU does not answer"
        return Hang(ranks=ranks, text=text) if ranks else None

    def _hanging(self, beats: Sequence[Beat], states: Sequence[ProcessState | None]) -> Hang | None:
        for rank, (seen, beat, state) in enumerate(zip(self._seen, beats, states, strict=True)):
            if state is None or beat.doing not in (Doing.WORKING, Doing.PREPARING):
                continue
            computes = seen.computes(state)
            is_calm = seen.calm_s > self.limit_s and beat.doing is Doing.WORKING
            if is_calm or seen.still_s > self._patience_s:
                how = "it computes without end" if computes else "it waits for a disk" if state.letter == "D" else "it hangs"
                return Hang(ranks=(rank,), text=f"has not moved for {format_seconds(seen.still_s)} {beat.describe()}: {how}")
        return None

    def _deadlocked(self, beats: Sequence[Beat], states: Sequence[ProcessState | None]) -> Hang | None:
        alive = [rank for rank, state in enumerate(states) if state is not None]
        wait = [rank for rank in alive if beats[rank].doing is Doing.WAITING]
        if not self.sees_all or not wait or wait != alive:
            return None
        still_s = min(self._seen[rank].still_s for rank in wait)
        calm = all(self._seen[rank].calm_s > self.limit_s for rank in wait)  # waiting for a GPU takes a core
        if still_s <= (TOGETHER * self.limit_s if calm else self._patience_s):
            return None
        first = beats[wait[0]].describe()
        return Hang(
            ranks=tuple(wait),
            text=f"have all waited for one another for {format_seconds(still_s)}, rank {wait[0]} {first}",
            together=True,
        )
