"""What differs between two answers, and why: the question, the plan, and where the seconds and bytes of a step go.

An answer is a run folder, a JSON document of `plan`, `simulate` or `run`, or a point of a sweep (FOLDER:NUMBER).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from parsim.app.sweep.executing import CATEGORIES, FAILED, SweepFolder
from parsim.app.sweep.sweep import open_sweep
from parsim.errors import ConfigError
from parsim.files import parse_toml, read_json, read_text
from parsim.search.tree import is_tie
from parsim.units import format_bytes, format_seconds

EXAMPLE = "give run folders, JSON files of `parsim plan --json` or `simulate --json`, or points of a sweep (FOLDER:NUMBER)"
NAMES = {
    "compute_s": "computation",
    "exposed_communication_s": "exposed communication",
    "bubble_s": "pipeline bubble",
    "load_s": "loading",
    "host_s": "host",
    "idle_s": "idle",
    "rest_s": "computation and all else",
    "between_s": "overlap of steps in a row",
}
Pair = TypeVar("Pair", tuple[int, int], tuple[float, float])
SMALL = 0.005
"""Parts below this share of the larger step are not listed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Compared:
    """One of two answers.

    Attributes:
        name: as it was given. asked: keys of the question. plan: its summary. step_s: median; batch: samples per step.
        interval: p05 and p95 of the step. parts: seconds by category, mean over ranks, which sum to step_s.
        memory: bytes by line, of the fullest rank. fits: whether it does.
    """

    name: str
    asked: Mapping[str, Any]
    plan: str
    batch: int
    step_s: float
    interval: tuple[float, float]
    parts: Mapping[str, float]
    memory: Mapping[str, int] = field(default_factory=dict)
    fits: bool = True

    @property
    def sample_s(self) -> float:
        """Seconds of a step per sample."""
        return self.step_s / self.batch


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """Attributes: first, second: the answers. Seconds of parts are per step, or per sample where the batches differ."""

    first: Compared
    second: Compared

    @property
    def per_sample(self) -> bool:
        """Whether times are compared per sample: the batches differ."""
        return self.first.batch != self.second.batch

    @property
    def asked(self) -> dict[str, tuple[Any, Any]]:
        """Keys of the questions that differ; None where one does not say it."""
        keys = dict.fromkeys((*self.first.asked, *self.second.asked))
        both = {key: (self.first.asked.get(key), self.second.asked.get(key)) for key in keys}
        return {key: pair for key, pair in both.items() if pair[0] != pair[1]}

    @property
    def parts(self) -> dict[str, tuple[float, float]]:
        """Seconds by category, the largest difference first; they sum to the two steps."""
        scales = (1 / self.first.batch, 1 / self.second.batch) if self.per_sample else (1.0, 1.0)
        first, second = _alike(self.first.parts, self.second.parts)
        names = dict.fromkeys((*first, *second))
        return _largest_first({name: (scales[0] * first.get(name, 0.0), scales[1] * second.get(name, 0.0)) for name in names})

    @property
    def memory(self) -> dict[str, tuple[int, int]]:
        """Bytes by line that differ, the largest difference first; empty unless both are known."""
        if not (self.first.memory and self.second.memory):
            return {}
        names = dict.fromkeys((*self.first.memory, *self.second.memory))
        pairs = {name: (self.first.memory.get(name, 0), self.second.memory.get(name, 0)) for name in names}
        return _largest_first({name: pair for name, pair in pairs.items() if pair[0] != pair[1]})

    @property
    def ratio(self) -> float:
        """Time of the second over that of the first, per sample where the batches differ."""
        return self.second.sample_s / self.first.sample_s if self.per_sample else self.second.step_s / self.first.step_s

    @property
    def certain(self) -> bool:
        """Whether the 90% intervals of the two times lie apart."""
        first, second = ([bound / answer.batch for bound in answer.interval] for answer in (self.first, self.second))
        return first[1] < second[0] or second[1] < first[0]

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON, as `parsim compare --json` prints it."""
        return {
            "first": self.first.name,
            "second": self.second.name,
            "ratio": self.ratio,
            "per_sample": self.per_sample,
            "intervals_apart": self.certain,
            "asked": {key: list(pair) for key, pair in self.asked.items()},
            "plans": [self.first.plan, self.second.plan],
            "step_s": [self.first.step_s, self.second.step_s],
            "parts_s": {name: list(pair) for name, pair in self.parts.items()},
            "memory_bytes": {name: list(pair) for name, pair in self.memory.items()},
            "fits": [self.first.fits, self.second.fits],
        }

    def lines(self) -> list[str]:
        """Sentences for people."""
        answers = (self.first, self.second)
        per = "per sample" if self.per_sample else "per step"
        times = [answer.sample_s if self.per_sample else answer.step_s for answer in answers]
        change = self.ratio - 1
        time, apart = f"{abs(change):.1%} {'more' if change > 0 else 'less'} time", ""
        if abs(change) < 1e-9:
            time = "the same time"
        elif is_tie(max(times), min(times)):
            apart = "; a tie"
        elif not self.certain:
            apart = "; their 90% intervals overlap"
        lines = [
            f"A: {self.first.name}",
            f"B: {self.second.name}",
            f"B takes {time} {per}: {format_seconds(times[1])} against {format_seconds(times[0])}{apart}.",
        ]
        keys = []
        for key, pair in self.asked.items():
            before, after = ("not given" if value is None else str(value) for value in pair)
            keys.append(f"  {key}: {before} -> {after}")
        lines += ["Asked differently:", *keys] if keys else ["The questions are the same."]
        if self.first.plan != self.second.plan:
            lines += ["Plans:", f"  A {self.first.plan}", f"  B {self.second.plan}"]
        lines += self._why(per, times)
        lines += [f"{name} does not fit." for name, answer in zip("AB", answers, strict=True) if not answer.fits]
        if self.memory:
            totals = [sum(answer.memory.values()) for answer in answers]
            lines.append(f"Memory of the fullest rank: {format_bytes(totals[0])} -> {format_bytes(totals[1])}")
            lines += [
                f"  {name}: {format_bytes(first)} -> {format_bytes(second)}"
                for name, (first, second) in self.memory.items()
                if abs(second - first) > SMALL * max(totals)
            ]
        return lines

    def _why(self, per: str, times: list[float]) -> list[str]:
        change, small = times[1] - times[0], SMALL * max(times)
        rows = []
        for name, (first, second) in self.parts.items():
            if abs(second - first) >= small:
                share = f", {(second - first) / change:.0%} of the difference" if abs(change) > small else ""
                rows.append(f"  {NAMES[name]}: {format_seconds(first)} -> {format_seconds(second)}{share}")
        if not rows:
            return [f"No part of the time {per} differs by more than {SMALL:.1%}."]
        return [f"Where the time goes, {per}:", *rows]


def _largest_first(pairs: dict[str, Pair]) -> dict[str, Pair]:
    return dict(sorted(pairs.items(), key=lambda entry: -abs(entry[1][1] - entry[1][0])))


def compare_answers(first: str, second: str) -> Difference:
    """What differs between two answers, each a run folder, a JSON file, or FOLDER:NUMBER of a sweep.

    Raises ConfigError: it is none of these, or a point without an answer.
    """
    return Difference(first=read_answer(first), second=read_answer(second))


def read_answer(name: str) -> Compared:
    """One answer, as `compare_answers` takes it. Raises ConfigError."""
    path = Path(name)
    if path.is_dir() and SweepFolder(path).description.is_file():
        raise ConfigError(f"{name} is a sweep of many points; name one of them: {name}:0")
    folder, colon, number = name.rpartition(":")
    if not path.exists() and colon and SweepFolder(Path(folder)).description.is_file():
        return _of_point(Path(folder), number, name)
    if path.is_dir() and not (path / "result.json").is_file():
        raise ConfigError(f"{name} holds no result.json, so it is not a run folder; {EXAMPLE}")
    if not path.exists():
        raise ConfigError(f"there is no {name}; {EXAMPLE}")
    file, settings = path / "result.json" if path.is_dir() else path, {}
    try:
        document = read_json(file)
        if path.is_dir():
            file = path / "config.toml"
            tables = parse_toml(read_text(file))
            settings = {
                f"{table}.{key}": value
                for table, section in tables.items()
                if isinstance(section, dict)
                for key, value in section.items()
            }
    except (OSError, ValueError) as error:
        raise ConfigError(f"cannot read {file}: {error}; {EXAMPLE}") from error
    return _of_document(document, name, settings)


def _of_point(folder: Path, number: str, name: str) -> Compared:
    sweep = open_sweep(folder)
    if not number.isdigit() or int(number) >= len(sweep.rows):
        raise ConfigError(f"{name}: the sweep has points 0 to {len(sweep.rows) - 1}")
    row, answer = sweep.rows[int(number)], sweep.answers[int(number)]
    if row["status"] == FAILED:
        raise ConfigError(f"{name} has no answer to compare: {row['reason']}")
    return Compared(
        name=name,
        asked=sweep.settings[int(number)],
        plan=str(row["plan"]),
        batch=int(row["global_batch"]),
        step_s=float(row["step_s"]),
        interval=(float(row["step_p05_s"]), float(row["step_p95_s"])),
        parts=_summing({name: float(row[name]) for name in CATEGORIES}, float(row["step_s"])),
        memory=answer.get("memory_lines", {}),
        fits=row["status"] == "ok",
    )


def _of_document(document: Any, name: str, asked: Mapping[str, Any]) -> Compared:
    """The chosen plan of the JSON of a plan, a prediction or a run, or the fastest that does not fit."""
    result = document
    if isinstance(document, dict):
        candidates = document.get("candidates")
        first = candidates[0] if isinstance(candidates, list) and candidates else None
        result = document.get("chosen") or first or document.get("prediction") or document.get("predicted_result") or document
    try:
        step = result["step_s"]
        plan, rate = result["plan"], result["throughput_samples_per_s"]
        batch = round(float(rate["median"]) * float(step["median"]))
        ranks, memory = result.get("breakdown"), result.get("memory")
        step_s = float(step["median"])
        if ranks:
            parts = {part: sum(float(rank[part]) for rank in ranks) / len(ranks) for part in CATEGORIES}
        else:
            bubble_s = float(result["bubble_fraction"]) * step_s
            parts = {"exposed_communication_s": float(result["exposed_communication_s"]), "bubble_s": bubble_s}
            parts["rest_s"] = step_s - sum(parts.values())
        fullest = max(memory, key=lambda rank: sum(rank["lines"].values()))["lines"] if memory else {}
        return Compared(
            name=name,
            asked=asked or {"strategy": result["strategy"], "cluster": result["cluster"], "global_batch": batch},
            plan=str(result.get("plan_summary") or plan),
            batch=batch,
            step_s=step_s,
            interval=(float(step["p05"]), float(step["p95"])),
            parts=_summing(parts, step_s),
            memory={line: int(size) for line, size in fullest.items()},
            fits=bool(result["fits"]),
        )
    except (KeyError, TypeError, ValueError, AttributeError, ZeroDivisionError) as error:
        raise ConfigError(f"{name} holds no answer of parsim ({type(error).__name__}: {error}); {EXAMPLE}") from error


def _summing(parts: dict[str, float], step_s: float) -> dict[str, float]:
    """With what steps in a row save of one step alone (or add to it), so that the parts sum to the mean step."""
    return {**parts, "between_s": step_s - sum(parts.values())}


def _alike(first: Mapping[str, float], second: Mapping[str, float]) -> tuple[Mapping[str, float], Mapping[str, float]]:
    """Both by the categories that both have: where one has no breakdown, the other is summed up as coarsely."""
    if ("rest_s" in first) == ("rest_s" in second):
        return first, second

    def coarse(parts: Mapping[str, float]) -> Mapping[str, float]:
        common = {name: parts.get(name, 0.0) for name in ("exposed_communication_s", "bubble_s")}
        return {**common, "rest_s": sum(parts.values()) - sum(common.values())}

    return coarse(first), coarse(second)
