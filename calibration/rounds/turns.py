"""A calibration as turns: every section (components, shards, collectives, ...) measures one round at a time, and each finished
turn is kept on disk.

The section that has used the least share of its time comes next. So all sections run through the whole calibration, and a
drift of the machine affects, and shows in, all of them. A calibration stopped at any moment loses the turn it was in, no
more.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import torch
import torch.distributed as dist

from parsim.errors import ExecutionError
from parsim.execute.processes.exchange import gather_values
from parsim.execute.processes.group import ProcessPlace
from parsim.files import read_json, reading, write_text_atomically

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
    measure: called by every rank with the number of the round; returns what this rank measured: lists of JSON by key.
    """

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
