"""The history of a profile, and the correction of its intervals by predicted and measured steps (split-conformal).

A profile's draws set the width of an interval *relative* to others; the history gives the factor by which all of them are too
narrow or too wide. On the log scale, each side by its own half-width,

    score = log(measured / median) / log(high / median)    where measured >= median, else
            log(median / measured) / log(median / low)

and the corrected interval is median * exp(+-q * half-width), with q the ceil((n + 1) (1 - alpha))-th smallest of n scores. If
a new score is exchangeable with those of the history, it lies inside with probability >= 1 - alpha, whatever the distribution
(and <= 1 - alpha + 1/(n + 1) without ties). Below n = 9 there is no such score for 1 - alpha = 90%: nothing is corrected.

Leaves out a change of the machine: scores are not exchangeable then, and `Coverage.stale` notices it afterwards. Coverage
holds on average over models and plans, not for each.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import asdict, dataclass, field, fields
from fractions import Fraction
from functools import cached_property
from pathlib import Path
from statistics import NormalDist
from typing import Any, NamedTuple

import numpy as np

from parsim.errors import CostError, ProfileError
from parsim.files import lock, parse_json, version_problem, write_text_atomically
from parsim.hardware.profile import Profile
from parsim.units import format_percent, format_seconds

LEVEL = 0.9
"""Of p05 to p95."""

CONFIDENCE = 0.95
"""Of the interval of a share."""

TARGET = (0.85, 0.95)
"""Coverage of 90% intervals that a profile must not be wholly outside of."""

LEAST_HALF_WIDTH = 0.005
"""On the log scale: no interval is taken for narrower than +-0.5%, because one overconfident record would dominate the
quantile."""

MOST_EXPONENT = 30.0
"""An interval by a factor of exp(30) says nothing; a wider one is cut there, so that its ends stay numbers."""


@dataclass(frozen=True, slots=True)
class ValidationRecord:
    """One prediction, as it was before any correction, and what was then measured.

    Attributes:
        model, run: what a correction must not have seen when it is tested; a run is one session of measuring.
        predicted_s, low_s, high_s: median, p05 and p95 of the mean step. measured_s: the mean measured step.
        when: ISO 8601. profile: its fingerprint. batch: global. plan: its summary. rounds: interleaved rounds of the
            measurement, steps: of all of them. aa_floor: median relative difference of its halves, if it had rounds.
            machine: it was measured on. measurement: digest of the measurement, so that none is counted twice.

    Raises:
        CostError: seconds that are not finite and above 0, or not in order.
    """

    model: str
    run: str
    predicted_s: float
    low_s: float
    high_s: float
    measured_s: float
    when: str = ""
    profile: str = ""
    batch: int = 0
    plan: str = ""
    ranks: int = 0
    steps: int = 0
    rounds: int = 0
    aa_floor: float | None = None
    machine: str = ""
    measurement: str = ""
    versions: dict[str, str] = field(default_factory=dict, hash=False)

    def __post_init__(self) -> None:
        seconds = (self.low_s, self.predicted_s, self.high_s)
        if not all(math.isfinite(value) and value > 0 for value in (*seconds, self.measured_s)):
            raise CostError(f"a record needs finite seconds above 0, got predicted {seconds} and measured {self.measured_s}")
        if not self.low_s <= self.predicted_s <= self.high_s:
            raise CostError(f"a record needs p05 <= median <= p95, got {seconds}")


class HalfWidths(NamedTuple):
    """Half-widths of an interval on the log scale, below and above its median."""

    below: float
    above: float


def half_widths(median_s: float, low_s: float, high_s: float) -> HalfWidths:
    """log(median / low) and log(high / median), neither below `LEAST_HALF_WIDTH`; 0 < low_s <= median_s <= high_s."""
    return HalfWidths(
        max(math.log(median_s / low_s), LEAST_HALF_WIDTH),
        max(math.log(high_s / median_s), LEAST_HALF_WIDTH),
    )


def score(record: ValidationRecord) -> float:
    """Distance of the measured value from the median, in half-widths of the predicted interval, >= 0."""
    below, above = half_widths(record.predicted_s, record.low_s, record.high_s)
    distance = math.log(record.measured_s) - math.log(record.predicted_s)
    return distance / above if distance >= 0 else -distance / below


def conformal_quantile(scores: Sequence[float], level: float = LEVEL) -> float | None:
    """The ceil((n + 1) * level)-th smallest of n scores; None if there is none (n < level / (1 - level)). Raises CostError
    for a level outside (0, 1)."""
    if not 0 < level < 1:
        raise CostError(f"the level of an interval must lie between 0 and 1, got {level}")
    rank = math.ceil((len(scores) + 1) * Fraction(level).limit_denominator(10_000))
    return None if rank > len(scores) else sorted(scores)[rank - 1]


def records_needed() -> int:
    """The smallest history with a correction: 9 for 90% intervals."""
    exact = Fraction(LEVEL).limit_denominator(10_000)
    return math.ceil(exact / (1 - exact))


@dataclass(frozen=True, slots=True, kw_only=True)
class ConformalCorrection:
    """The factor that widens (above 1) or narrows intervals.

    Attributes: factor: q of this module, None with too few records. records: how many it was learnt from.
    """

    factor: float | None = None
    records: int = 0

    def apply(self, median_s: float, low_s: float, high_s: float) -> tuple[float, float]:
        """The corrected p05 and p95; without a factor those given."""
        if self.factor is None:
            return low_s, high_s
        below, above = (min(self.factor * width, MOST_EXPONENT) for width in half_widths(median_s, low_s, high_s))
        return median_s * math.exp(-below), median_s * math.exp(above)

    def describe(self) -> str:
        """Such as "x1.42 from 37 validations"."""
        if self.factor is None:
            return f"not corrected: {self.records} of the {records_needed()} validations needed"
        return f"x{self.factor:.2f} from {self.records} validations"

    def to_dict(self) -> dict[str, Any]:
        return {
            "factor": self.factor,
            "records": self.records,
            "records_needed": records_needed(),
            "text": self.describe(),
        }


def correction(records: Iterable[ValidationRecord]) -> ConformalCorrection:
    """The correction from the records of one profile."""
    scores = [score(record) for record in records]
    return ConformalCorrection(factor=conformal_quantile(scores), records=len(scores))


@dataclass(frozen=True, slots=True, kw_only=True)
class Judged:
    """A record, and the interval by a correction that was learnt without its run and its model."""

    record: ValidationRecord
    correction: ConformalCorrection
    low_s: float
    high_s: float

    @property
    def covered(self) -> bool:
        """By the score where there is a factor: ends that are rounded may lose a tie."""
        if self.correction.factor is not None:
            return score(self.record) <= self.correction.factor
        return self.low_s <= self.record.measured_s <= self.high_s

    @property
    def width(self) -> float:
        """Relative to the median."""
        return (self.high_s - self.low_s) / self.record.predicted_s


@dataclass(frozen=True, slots=True, kw_only=True)
class Coverage:
    """How often measured steps lay in their intervals.

    Attributes:
        low, high: Clopper-Pearson 95% interval of the share. mean_width: of the tested intervals, relative to their medians.
        corrected: how many of them had enough other records for a correction; the others were tested as predicted.
        uncorrected_fraction, uncorrected_mean_width: of the intervals as predicted.
    """

    tested: int
    covered: int
    fraction: float
    low: float
    high: float
    mean_width: float
    corrected: int
    uncorrected_fraction: float
    uncorrected_mean_width: float

    @property
    def stale(self) -> bool:
        """Whether the share's interval is wholly outside `TARGET`."""
        return self.high < TARGET[0] or self.low > TARGET[1]

    def describe(self) -> str:
        """Such as "34 of 40 inside, 85% (70% to 94%)"."""
        return (
            f"{self.covered} of {self.tested} inside, {format_percent(self.fraction)} "
            f"({format_percent(self.low)} to {format_percent(self.high)})"
        )

    def to_dict(self) -> dict[str, Any]:
        return {**asdict(self), "stale": self.stale}


def judged_split(records: Iterable[ValidationRecord], level: float = LEVEL) -> list[Judged]:
    """Judge every record of a profile by a correction from other runs *and* other models only, in the order given."""
    scored = [(record, score(record)) for record in records]
    learnt: dict[tuple[str, str], ConformalCorrection] = {}
    rows = []
    for record, _ in scored:
        key = (record.run, record.model)
        if key not in learnt:
            scores = [distance for other, distance in scored if other.run != record.run and other.model != record.model]
            learnt[key] = ConformalCorrection(factor=conformal_quantile(scores, level), records=len(scores))
        low_s, high_s = learnt[key].apply(record.predicted_s, record.low_s, record.high_s)
        rows.append(Judged(record=record, correction=learnt[key], low_s=low_s, high_s=high_s))
    return rows


def coverage_of(rows: Sequence[Judged]) -> Coverage:
    """Coverage of judged records. Raises CostError without a record."""
    if not rows:
        raise CostError("coverage needs at least one record of a prediction and its measurement; run `parsim validate` first")
    covered = sum(row.covered for row in rows)
    records = [row.record for row in rows]
    low, high = clopper_pearson(covered, len(rows))
    return Coverage(
        tested=len(rows),
        covered=covered,
        fraction=covered / len(rows),
        low=low,
        high=high,
        mean_width=float(np.mean([row.width for row in rows])),
        corrected=sum(row.correction.factor is not None for row in rows),
        uncorrected_fraction=float(np.mean([record.low_s <= record.measured_s <= record.high_s for record in records])),
        uncorrected_mean_width=float(np.mean([(record.high_s - record.low_s) / record.predicted_s for record in records])),
    )


def coverage_split(records: Iterable[ValidationRecord]) -> Coverage:
    """Coverage if each record is judged by a correction from other runs and other models. Raises CostError without a record."""
    return coverage_of(judged_split(records))


def coverage_by(rows: Sequence[Judged], key: Callable[[ValidationRecord], str]) -> dict[str, Coverage]:
    """Coverage of groups of judged records, such as by model or by run, in the order they appear."""
    names = dict.fromkeys(key(row.record) for row in rows)
    return {name: coverage_of([row for row in rows if key(row.record) == name]) for name in names}


class ShareAtLevel(NamedTuple):
    """How often intervals of a nominal level hold: as predicted, and corrected by the split (None: too few records)."""

    level: float
    predicted: float
    corrected: float | None


def shares_by_level(records: Sequence[ValidationRecord], levels: Sequence[float]) -> list[ShareAtLevel]:
    """Empirical coverage of at least one record for several nominal levels, each in (0, 1). The predicted interval of a
    level is the 90% one, its half-widths scaled as those of a normal distribution on the log scale."""
    normal = NormalDist()
    shares = []
    for level in levels:
        narrower = normal.inv_cdf((1 + level) / 2) / normal.inv_cdf((1 + LEVEL) / 2)
        predicted = [score(record) <= narrower for record in records]
        corrected = [row.covered for row in judged_split(records, level) if row.correction.factor is not None]
        shares.append(ShareAtLevel(level, float(np.mean(predicted)), float(np.mean(corrected)) if corrected else None))
    return shares


def clopper_pearson(successes: int, trials: int) -> tuple[float, float]:
    """The exact 95% interval of a binomial share. Raises CostError unless 0 <= successes <= trials and trials >= 1."""
    if not 0 <= successes <= trials or trials < 1:
        raise CostError(f"a share needs 0 <= successes <= trials and trials >= 1, got {successes} of {trials}")
    tail = (1 - CONFIDENCE) / 2
    low = 0.0 if successes == 0 else 1.0 - _share_at(trials - successes, trials, tail)
    high = 1.0 if successes == trials else _share_at(successes, trials, tail)
    return low, high


def _share_at(most: int, trials: int, chance: float) -> float:
    """The share of successes of which at most `most` < trials happen with this chance, by bisection to the last bit."""
    ways = [math.log(math.comb(trials, count)) for count in range(most + 1)]
    low, high = 0.0, 1.0
    while low < (middle := (low + high) / 2) < high:
        logs = (way + k * math.log(middle) + (trials - k) * math.log1p(-middle) for k, way in enumerate(ways))
        low, high = (middle, high) if math.fsum(map(math.exp, logs)) > chance else (low, middle)
    return (low + high) / 2


# --- the file of a history --------------------------------------------------------------------------------------------
#
# One line of JSON per validation: `PROFILE.json` has `PROFILE.history.jsonl`. A shipped profile has no place to write, so
# `cluster.history` names the file. Lines are only ever appended, each in one write under a lock, so that two writers do not mix
# and a killed one leaves at most its own line broken. A broken line, one of another version of the profile or of another
# machine, or one that was measured far off its prediction, is not used; it is listed and stays in the file.
#
# Leaves out: old predictions are not recomputed. After the profile has changed, its history starts anew.


SUFFIX = ".history.jsonl"
SCHEMA_VERSION = 2
"""Of a line."""
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
    """The records of this version of the profile on its machine; none if there is no file. Raises ProfileError if it cannot
    be read."""
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
    if problem := version_problem(document, SCHEMA_VERSION):
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
        return ValidationRecord(**{name: value for name, value in document.items() if name in names})
    except OverflowError as error:
        raise CostError("a number that no float can hold") from error


def _machine(records: list[ValidationRecord], profile: Profile) -> str:
    """The machine whose records count: the profile's own where one is, else that of the latest record."""
    here = [record.machine for record in records if record.machine and record.machine in profile.provenance.machine]
    return here[-1] if here else records[-1].machine if records else ""
