"""The history of a profile: one line of JSON per validation, in a file next to the profile, from which intervals are
corrected.

`PROFILE.json` has `PROFILE.history.jsonl`. A shipped profile has no place to write, so `cluster.history` names the file.
Lines are only ever appended, each in one write under a lock, so that two writers do not mix and a killed one leaves at
most its own line broken. A broken line, one of another version of the profile or of another machine, or one that was measured
far off its prediction, is not used; it is listed and stays in the file.

Leaves out: old predictions are not recomputed. After the profile has changed, its history starts anew.
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Collection
from dataclasses import asdict, dataclass, fields
from functools import cached_property
from pathlib import Path
from typing import Any

from parsim.costs.conformal import TARGET, ConformalCorrection, Coverage, ValidationRecord, correction, coverage_split
from parsim.errors import CostError, ProfileError
from parsim.files import lock, parse_json, version_problem, write_text_atomically
from parsim.hardware.profile import Profile
from parsim.plans.synchronisation import KINDS
from parsim.units import format_percent, format_seconds

SUFFIX = ".history.jsonl"
SCHEMA_VERSION = 2
"""Of a line. Version 1 timed the steps of a training from the first rank's begin to the last one's end: under a relaxed plan
they contain the distance between ranks again and again."""
MOST_RATIO = 100.0
"""Between measured and predicted, either way. The worst honest prediction of an untested model was off by 20 times; seconds
taken for milliseconds are off by 1,000, and a few of them would make every interval say nothing."""
WIDE = 10.0
"""Factor from which an answer tells it: an interval of +-20% becomes one of a factor of 6 either way, which says little."""
WORDS = frozenset({"schema_version", "name", "description", "provenance", "sources"})
"""Keys of a profile that no price rests on."""


@dataclass(frozen=True)
class History:
    """Attributes:
    path: of the file; None where there is no place for one. records: that belong to the profile, in order.
    left_out: why other lines do not count.
    """

    path: Path | None = None
    records: tuple[ValidationRecord, ...] = ()
    left_out: tuple[str, ...] = ()

    @cached_property
    def correction(self) -> ConformalCorrection:
        """The correction of the profile's intervals."""
        return correction(self.records)

    @cached_property
    def coverage(self) -> Coverage | None:
        """Judged by runs and models that a correction was not learnt from; None without records."""
        return coverage_split(self.records) if self.records else None

    @property
    def notes(self) -> tuple[str, ...]:
        """What everyone who uses the profile should know: that it is stale, that lines are left out."""
        notes = []
        if self.coverage is not None and self.coverage.stale:
            notes.append(
                f"the profile is stale: of its 90% intervals {self.coverage.describe()} held, which lies wholly outside "
                f"{format_percent(TARGET[0])} to {format_percent(TARGET[1])} ({self.path}); calibrate again, or "
                "`parsim validate --update`"
            )
        if (factor := self.correction.factor) is not None and factor > WIDE:
            notes.append(
                f"{self.path} makes intervals {factor:.0f} times as wide, on the log scale, as the profile alone does: look "
                "for records of another unit or machine by `parsim history`, or calibrate again"
            )
        if self.left_out:
            lines = "1 line is" if len(self.left_out) == 1 else f"{len(self.left_out)} lines are"
            kinds = Counter(text.split(": ", 1)[1].split(" (")[0] for text in self.left_out)
            reasons = "; ".join(f"{why} ({count})" for why, count in kinds.items())
            notes.append(f"{lines} left out of {self.path}: {reasons}; first {self.left_out[0]}")
        return tuple(notes)

    def save(self, path: Path) -> None:
        """The records alone, as a file of their own."""
        write_text_atomically(path, "".join(_line(record) for record in self.records))


NO_HISTORY = History()


def fingerprint(profile: Profile) -> str:
    """16 hexadecimal digits over every number of a profile on which a price depends; names, texts and sources do not count."""
    numbers = profile.model_dump(mode="json", exclude_defaults=True, exclude={*WORDS, "updates"})
    if profile.updates:  # the latest holds; one without factors is as none
        factors = profile.updates[-1].model_dump(mode="json", include={"devices", "phases", "communication"})
        numbers |= {f"updated_{name}": entries for name, entries in factors.items() if entries}
    return hashlib.sha256(json.dumps(numbers, sort_keys=True).encode()).hexdigest()[:16]


def history_path(profile: str, history: str | None = None) -> Path | None:
    """The path of a profile's history: as the user gave it, else next to the profile (a path or a shipped name), else None."""
    if history is not None:
        return Path(history)
    path = Path(profile)
    return path.with_name(path.name.removesuffix(".json") + SUFFIX) if path.suffix == ".json" else None


def read_history(path: Path | None, profile: Profile) -> History:
    """The records of this version of the profile on its machine; none if there is no file.

    Raises ProfileError if the file cannot be read.
    """
    if path is None or not path.exists():
        return History(path=path)
    read = history_lines(path, profile)
    return History(
        path=path,
        records=tuple(line.record for line in read if line.record is not None and not line.why),
        left_out=tuple(f"line {line.number}: {line.why}" for line in read if line.why),
    )


@dataclass(frozen=True)
class HistoryLine:
    """Attributes: number: from 1. record: None where it is none. why: it is not used; "": it is."""

    number: int
    record: ValidationRecord | None
    why: str = ""


def history_lines(path: Path, profile: Profile) -> list[HistoryLine]:
    """Every line of a history that is not blank. Raises ProfileError if the file cannot be read."""
    try:
        texts = path.read_bytes().decode("utf-8", errors="replace").splitlines()
    except OSError as error:
        raise ProfileError(f"cannot read history {path}: {error.strerror}; give a file of `parsim validate`") from error
    read: list[HistoryLine] = []
    for number, text in enumerate(texts, start=1):
        try:
            if text.strip():
                read.append(HistoryLine(number, _record(text)))
        except CostError as error:
            read.append(HistoryLine(number, None, str(error)))
    records = [line.record for line in read if line.record is not None]
    version = fingerprint(profile) if records else ""
    machine = _machine([record for record in records if record.profile == version], profile)
    return [
        line if line.record is None else HistoryLine(line.number, line.record, _unfit(line.record, version, machine))
        for line in read
    ]


def _unfit(record: ValidationRecord, version: str, machine: str) -> str:
    """Why a record does not count for this version of the profile on this machine; "": it does."""
    if record.profile != version:
        return f"of another profile or version ({record.profile or 'none named'}, not {version})"
    if record.machine != machine:
        return f"of other hardware ({record.machine})"
    ratio = record.measured_s / record.predicted_s
    if not 1 / MOST_RATIO <= ratio <= MOST_RATIO:
        return (
            f"measured more than {MOST_RATIO:g} times off its prediction ({format_seconds(record.measured_s)}, not "
            f"{format_seconds(record.predicted_s)}: another unit, or another machine)"
        )
    return ""


def append_record(path: Path, record: ValidationRecord) -> None:
    """Append one line, in one write under a lock, and make the folder. A half line of a killed writer is ended first."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a+b") as file:
        lock(file.fileno(), waits=True)
        size = file.seek(0, 2)
        broken = False
        if size:
            file.seek(size - 1)
            broken = file.read(1) != b"\n"
        file.write(("\n" if broken else "").encode() + _line(record).encode())
        file.flush()


def remove_lines(path: Path, numbers: Collection[int]) -> None:
    """Remove lines by their numbers, under the lock of `append_record`. Raises ProfileError for a number that no line has."""
    with path.open("r+b") as file:
        lock(file.fileno(), waits=True)
        lines = file.read().splitlines(keepends=True)
        if unknown := sorted(number for number in numbers if not 1 <= number <= len(lines)):
            raise ProfileError(f"{path} has no line {unknown[0]}: it has {len(lines)}")
        kept = [line for number, line in enumerate(lines, start=1) if number not in numbers]
        file.seek(0)
        file.writelines(kept)
        file.truncate()


def _line(record: ValidationRecord) -> str:
    return json.dumps({**asdict(record), "schema_version": SCHEMA_VERSION}, allow_nan=False) + "\n"


def _record(line: str) -> ValidationRecord:
    """Raises CostError for what is not a record."""
    try:
        document: Any = parse_json(line)
    except ValueError as error:
        raise CostError("not JSON") from error
    if not isinstance(document, dict):
        raise CostError("not an object")
    version = document.get("schema_version")
    if problem := version_problem(document, 1 if version == 1 else SCHEMA_VERSION):
        raise CostError(problem)
    for name in ("model", "run", "predicted_s", "low_s", "high_s", "measured_s"):
        kind = str if name in ("model", "run") else (int, float)
        if isinstance(document.get(name), bool) or not isinstance(document.get(name), kind):
            raise CostError(f"no {name}")
    for name in ("profile", "machine", "measurement"):
        if not isinstance(document.get(name, ""), str):
            raise CostError(f"{name} is not a string")
    try:
        names = {field.name for field in fields(ValidationRecord)}
        record = ValidationRecord(**{name: value for name, value in document.items() if name in names})
    except OverflowError as error:
        raise CostError("a number that no float can hold") from error
    if version == 1 and _counts_skew(record):
        raise CostError("its steps contain the distance between ranks (`parsim validate FOLDER` measures the run again)")
    return record


def _counts_skew(record: ValidationRecord) -> bool:
    """Whether a record of version 1 is of a training, step by step, under a relaxed plan."""
    return 2 * record.rounds > record.steps and any(word.split("/")[0] in KINDS[1:] for word in str(record.plan).split())


def _machine(records: list[ValidationRecord], profile: Profile) -> str:
    """The machine whose records count: the profile's own where one is, else that of the latest record."""
    here = [record.machine for record in records if record.machine and record.machine in profile.provenance.machine]
    return here[-1] if here else records[-1].machine if records else ""
