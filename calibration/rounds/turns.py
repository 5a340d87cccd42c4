"""A calibration as turns: every section (components, shards, collectives, ...) measures one round at a time, and each finished
turn is kept on disk.

The section that has used the least share of its time comes next. So all sections run through the whole calibration, and a
drift of the machine affects, and shows in, all of them. A calibration stopped at any moment loses the turn it was in, no
more.

The turns lie in a folder next to the profile, from which a later call resumes. It belongs to one request on one device under
one version of torch: times taken under different ones are never mixed.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypeVar

import torch
import torch.distributed as dist

from calibration.rounds.pace import HOST_PACE, PACE, PacedEntry
from calibration.rounds.request import CalibrationRequest
from parsim.errors import ConfigError, ExecutionError
from parsim.execute.processes.exchange import gather_values
from parsim.execute.processes.group import ProcessPlace
from parsim.execute.processes.machine import describe_environment, gpu_names
from parsim.execute.processes.speed_probe import SpeedProbe
from parsim.files import lock, read_json, reading, write_text_atomically

WARM_UP = -1
"""The round number of the first call of a section in a process, whose measurements are not kept."""

START = "start.json"
TURNS = "turn-*.json"
TOLD = ("section", "round", "time_s", "seconds")

Entries = dict[str, list[Any]]
A = TypeVar("A")
B = TypeVar("B")


@dataclass(frozen=True, slots=True, kw_only=True)
class CalibrationSection:
    """Attributes:
    budget_s: rounds stop once this much time is spent, but not before `min_rounds`, and at `max_rounds` in any case.
    measure: called by every rank with the number of the round; returns what this rank measured: lists of JSON by key."""

    name: str
    budget_s: float
    min_rounds: int
    max_rounds: int
    measure: Callable[[int], Entries]


class SectionProgress(NamedTuple):
    """Rounds a section has finished and the seconds they took."""

    rounds: int = 0
    seconds: float = 0.0


def in_turn(pairs: int, one: Callable[[], A], other: Callable[[], B]) -> list[tuple[A, B]]:
    """What both gave, called one right after the other again and again, each as often first as second: what the machine does
    meanwhile falls on both."""
    found = []
    for number in range(pairs):
        if number % 2 == 0:
            first = one()
            found.append((first, other()))
        else:
            second = other()
            found.append((one(), second))
    return found


def next_section(sections: Sequence[CalibrationSection], progress: Mapping[str, SectionProgress]) -> int | None:
    """The place of the section that has used the least part of its budget among those not done; None when all are.

    A section is done once its next round would probably end after its budget.
    """
    open_sections = []
    for number, section in enumerate(sections):
        rounds, seconds = progress.get(section.name, SectionProgress())
        next_ends_s = seconds * (rounds + 1) / max(1, rounds)
        if rounds < section.min_rounds or (rounds < section.max_rounds and next_ends_s <= section.budget_s):
            open_sections.append((seconds / section.budget_s, number))
    return min(open_sections)[1] if open_sections else None


def take_turns(sections: Sequence[CalibrationSection], folder: Path, place: ProcessPlace, say: Callable[[str], None]) -> None:
    """Warm up, then turn after turn until every section is done, going on after the turns that lie in `folder`.

    Called by every rank; rank 0 decides and writes. Each turn is one file: section, round, time_s (since 1970), seconds, and
    per rank what it measured.
    """
    progress = read_progress(folder) if place.rank == 0 else {}
    if place.rank == 0 and progress:
        say("going on after " + ", ".join(f"{done.rounds} rounds of {name}" for name, done in progress.items()))
    if place.rank == 0 and next_section(sections, progress) is None:
        say("nothing is left to measure")
    warm: set[str] = set()
    while (turn := _agreed_turn(sections, progress, place)) is not None:
        section, number = sections[turn[0]], turn[1]
        if section.name not in warm:
            section.measure(WARM_UP)
            warm.add(section.name)
        dist.barrier()
        time_s, begin_s = time.time(), time.perf_counter()
        own = section.measure(number)
        gathered = gather_values(own)
        if place.rank == 0:
            seconds = time.perf_counter() - begin_s
            turn_entry = {"section": section.name, "round": number, "time_s": time_s, "seconds": seconds}
            document = {**turn_entry, "ranks": gathered}
            count = sum(done.rounds for done in progress.values())
            write_text_atomically(folder / f"turn-{count:05d}.json", json.dumps(document))
            done = progress.get(section.name, SectionProgress())
            progress = {**progress, section.name: SectionProgress(done.rounds + 1, done.seconds + seconds)}
            spent_s = progress[section.name].seconds
            say(f"{section.name}: round {number + 1}, {spent_s:.1f} of about {section.budget_s:.0f} s")


def _agreed_turn(
    sections: Sequence[CalibrationSection], progress: Mapping[str, SectionProgress], place: ProcessPlace
) -> tuple[int, int] | None:
    """(place of the section, number of its round) as rank 0 decides for all; None at the end."""
    chosen = next_section(sections, progress) if place.rank == 0 else None
    rounds = 0 if chosen is None else progress.get(sections[chosen].name, SectionProgress()).rounds
    turn = torch.tensor([WARM_UP if chosen is None else chosen, rounds], device=place.device)
    dist.broadcast(turn, src=0)
    section, number = (int(value) for value in turn.tolist())
    return None if section == WARM_UP else (section, number)


# --- what lies on disk ------------------------------------------------------------------------------------------------


def read_turns(folder: Path) -> list[dict[str, Any]]:
    """The finished turns, in order. Raises ExecutionError for a file that was tampered with."""
    turns = []
    for path in sorted(folder.glob(TURNS)):
        with reading(f"cannot read {path}", ExecutionError, f"delete the folder {folder} and calibrate again"):
            document = read_json(path)
            float(document["seconds"]), str(document["section"]), list(document["ranks"])
        turns.append(document)
    return turns


def read_progress(folder: Path) -> dict[str, SectionProgress]:
    progress: dict[str, SectionProgress] = {}
    for turn in read_turns(folder):
        done = progress.get(turn["section"], SectionProgress())
        progress[turn["section"]] = SectionProgress(done.rounds + 1, done.seconds + turn["seconds"])
    return progress


def gather_raw(folder: Path) -> dict[str, Any]:
    """All turns as one document: what START holds, `turns` without their entries, and `ranks`: per rank the entries of all
    turns by key, each with its round. Of a turn stay its section, round, time_s, seconds.

    Raises: ExecutionError if the ranks ended before they began to measure.
    """
    start, turns = folder / START, read_turns(folder)
    if not start.is_file() or not turns:
        raise ExecutionError("the measuring ranks ended without a result; run again, or with --nproc 1")
    raw: dict[str, Any] = json.loads(start.read_text())
    for turn in turns:
        for rank, entries in zip(raw["ranks"], turn["ranks"], strict=True):
            for key, records in entries.items():
                rank.setdefault(key, []).extend({**record, "round": turn["round"]} for record in records)
    raw["turns"] = [{key: turn[key] for key in TOLD} for turn in turns]
    return raw


Leftover = Literal["use", "require", "discard"]
"""What to do with a stopped calibration: go on with it if there is one, insist on one, or throw it away."""

SCHEMA_VERSION = 1
WORDS = {
    "schema_version": "way of keeping turns",
    "request": "request (models, batches, ranks, ...)",
    "processor": "processor",
    "cores": "number of cores",
    "gpus": "GPUs",
    "torch": "version of torch",
}


@dataclass(frozen=True, slots=True)
class WorkFolder:
    """`mine.calibration/` beside `mine.json`: JOB (the request), the models, START and turns of the ranks, STATES."""

    path: Path

    @classmethod
    def of(cls, out: Path) -> WorkFolder:
        return cls(out.with_name(f"{out.stem}.calibration").absolute())

    @property
    def job(self) -> Path:
        return self.path / "job.json"

    @property
    def has_turns(self) -> bool:
        return any(self.path.glob(TURNS))

    def remove(self) -> None:
        shutil.rmtree(self.path)

    def save_states(self, before: Mapping[str, Any], after: Mapping[str, Any] | None) -> None:
        """The machine's state before (and after) what is now measured, for every time the calibration was started."""
        number = len(list(self.path.glob("state-*.json"))) - (after is not None)
        write_text_atomically(self.path / f"state-{number:03d}.json", json.dumps([before, after]))

    def states(self) -> list[list[dict[str, Any]]]:
        """States of the machine at every start that came to its end: before and after."""
        found = [json.loads(path.read_text()) for path in sorted(self.path.glob("state-*.json"))]
        return [states for states in found if states[1] is not None]


@contextlib.contextmanager
def alone(out: Path) -> Iterator[None]:
    """Nobody else calibrates into `out` meanwhile; a process that dies lets go of it. Raises ConfigError if somebody does."""
    path = out.with_name(f"{out.stem}.calibration.lock").absolute()
    with path.open("w") as file:
        try:
            ours = lock(file.fileno()) and os.path.samestat(os.fstat(file.fileno()), path.stat())
        except OSError:  # just let go of and gone
            ours = False
        if not ours:
            raise ConfigError(f"another calibration is writing {out}; wait until it has ended, or choose another --out")
        try:
            yield
        finally:
            path.unlink(missing_ok=True)


def open_folder(request: CalibrationRequest, out: Path, leftover: Leftover, say: Callable[[str], None]) -> WorkFolder:
    """A folder ready for this request: a new one, or one with the turns of the same request's stopped calibration.

    Raises: ConfigError for an unfinished folder of something else, or if one is required and there is none.
    """
    folder, identity = WorkFolder.of(out), identity_of(request)
    kept = folder.path / "identity.json"
    if folder.path.exists() and (leftover == "discard" or not (kept.is_file() and folder.has_turns)):
        folder.remove()
    if not folder.path.exists():
        if leftover == "require":
            raise ConfigError(f"there is nothing to resume: {folder.path.name} beside {out} holds no turn; drop --resume")
        folder.path.mkdir()
        write_text_atomically(kept, json.dumps(identity, indent=1))
        write_text_atomically(folder.job, request.to_json())
        return folder
    with reading(f"cannot read {kept}", ConfigError, "throw it away with --restart"):
        found = dict(read_json(kept))
    other = [word for key, word in WORDS.items() if found.get(key) != identity[key]]
    if other:
        raise ConfigError(
            f"{folder.path.name} beside {out} is what a stopped calibration left, but of another {' and another '.join(other)}"
            f"{_values(found, identity)}; throw it away with --restart, or choose another --out"
        )
    rounds = sum(done.rounds for done in read_progress(folder.path).values())
    say(f"going on with the calibration that was stopped after {rounds} rounds")
    return folder


def identity_of(request: CalibrationRequest) -> dict[str, Any]:
    """What must be the same for turns to belong together."""
    environment = describe_environment()
    return {
        "schema_version": SCHEMA_VERSION,
        "request": json.loads(request.to_json()),
        "processor": environment["processor"],
        "cores": environment["cores"],
        "gpus": gpu_names() if request.device == "cuda" else [],
        "torch": environment["versions"].get("torch", ""),
    }


def _values(found: Mapping[str, Any], identity: Mapping[str, Any]) -> str:
    short = [key for key in ("processor", "cores", "gpus", "torch") if found.get(key) != identity[key]]
    return f" ({'; '.join(f'{key} {found.get(key)} then, {identity[key]} now' for key in short)})" if short else ""


def paced(
    blocks: Iterable[Callable[[], list[PacedEntry]]], probe: SpeedProbe | None, host: SpeedProbe | None = None
) -> Iterator[PacedEntry]:
    """What this rank measured in one block after the other, each with its own core's pace, or its GPU's and its host's."""
    before = _seconds(probe), _seconds(host)
    for measure in blocks:
        found = measure()
        after = _seconds(probe), _seconds(host)
        marked = _marked(found, before[0], after[0], PACE)
        yield from _marked(marked, before[1], after[1], HOST_PACE)
        before = after


def paced_together(blocks: Iterable[Callable[[], list[PacedEntry]]], probe: SpeedProbe | None) -> list[PacedEntry]:
    """What all ranks measure together, block after block, with the mean pace over the cores; called by every rank."""
    dist.barrier()
    own, found = [_seconds(probe)], []
    for measure in blocks:
        found.append(measure())
        dist.barrier()
        own.append(_seconds(probe))
    gathered = gather_values(own)
    looks = [[value for value in moment if value is not None] for moment in zip(*gathered, strict=True)]
    means = [statistics.mean(values) if values else None for values in looks]
    return [
        entry
        for entries, (before_s, after_s) in zip(found, pairwise(means), strict=True)
        for entry in _marked(entries, before_s, after_s, PACE)
    ]


def _seconds(probe: SpeedProbe | None) -> float | None:
    return None if probe is None else probe.seconds()


def _marked(entries: Iterable[PacedEntry], before_s: float | None, after_s: float | None, key: str) -> list[PacedEntry]:
    if before_s is None or after_s is None:
        return list(entries)
    return [{**entry, key: [before_s, after_s]} for entry in entries]
