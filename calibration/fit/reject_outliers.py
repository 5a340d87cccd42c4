"""Find implausible timings and points that contradict the others. They are discarded and listed, not averaged in."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

from calibration.fit.drift import MEDIAN_ERROR
from calibration.rounds.pace import PACE
from calibration.rounds.request import entries_of
from parsim.errors import ProfileError
from parsim.hardware.profile import CollectivePoint
from parsim.hardware.records import ComponentPoint
from parsim.model.model import Model
from parsim.units import format_bytes, format_seconds

MIN_REPEATS = 3
TOLERANCE, STANDARD_ERRORS = 0.2, 4.0
"""Less work may take longer by this share, or by so many standard errors of the two medians if that is more."""
SUPERLINEAR = 2.0
"""Work k times as large takes at most about k times this as long, cache effects included."""

RawEntry = Mapping[str, Any]
Point = TypeVar("Point", ComponentPoint, CollectivePoint)


# --- single timings ---------------------------------------------------------------------------------------------------


def screened(raw: Mapping[str, Any], models: Sequence[Model]) -> tuple[dict[str, Any], list[str]]:
    """The raw points without timings that cannot be (zero, negative, infinite, not a number), and what was left out.

    A step of which one task cannot be is left out whole. Steps of a case of which fewer than MIN_REPEATS are left go too.
    """
    bad: Counter[str] = Counter()
    total: Counter[str] = Counter()
    zeros: dict[Hashable, list[list[bool]]] = {}  # tasks that took no time in most steps of a case did not run
    for _, sweep in entries_of(raw, "sweeps"):
        zeros.setdefault((sweep["model"], sweep["samples"]), []).append([value == 0 for value in sweep["seconds"]])
    idle = {case: [sum(column) > len(rows) / 2 for column in zip(*rows, strict=True)] for case, rows in zeros.items()}

    def kept(entry: RawEntry, key: str) -> RawEntry | None:
        what = _what(entry, key, models)
        if key in LISTS:
            place, can_be = LISTS[key]
            values = list(filter(can_be, entry[place]))
            held, left = len(entry[place]), len(values)
            entry = {**entry, place: values}
        else:
            usual = idle[entry["model"], entry["samples"]] if key == "sweeps" else ()
            held, left = 1, int(WHOLE[key](entry, usual))
        left = left if all(map(_is_time, entry.get(PACE, ()))) else 0
        total[what] += held
        bad[what] += held - left
        return entry if left else None

    ranks = [
        {
            key: [found for entry in value if (found := kept(entry, key)) is not None]
            if key in LISTS or key in WHOLE
            else value
            for key, value in rank.items()
        }
        for rank in raw["ranks"]
    ]
    warnings = [
        f"left out {count} of {total[what]} timings of {what}: not positive, finite numbers"
        for what, count in bad.items()
        if count
    ]
    refused = {  # operators that a GPU, or a library of it, did not run have no timings
        _what(entry, "operators", ()): entry["refused"] for _, entry in entries_of(raw, "operators") if "refused" in entry
    }
    return _with_enough(
        {**raw, "ranks": ranks},
        models,
        [*warnings, *(f"left out {what}: the device refused it ({said})" for what, said in refused.items())],
    )


def _is_time(value: object) -> bool:
    return isinstance(value, int | float) and math.isfinite(value) and value > 0


def _what(entry: RawEntry, key: str, models: Sequence[Model]) -> str:
    if key == "collectives":
        return collective_text(entry["operation"], entry["group"], entry["size_bytes"])
    if key == "operators":
        return launch_text(entry["kind"], entry["function"], entry["phase"], entry["sizes"])
    name = f"{models[entry['model']].name} at {entry['samples']} samples"
    return (
        f"{name} beside {entry['operation']} of {format_bytes(entry['size_bytes'])}" if key == "overlap" else f"{name} ({key})"
    )


def collective_text(operation: str, group: Sequence[int], size_bytes: int) -> str:
    over = f"from rank {group[0]} to {group[1]}" if operation.startswith("send_recv") else f"over {len(group)} ranks"
    return f"{operation} of {format_bytes(size_bytes)} {over}"


def launch_text(kind: str, function: str, phase: str, sizes: Mapping[str, int]) -> str:
    return f"{kind} {function} {phase} ({' '.join(f'{name}={size}' for name, size in sizes.items())})"


def _sweep_can_be(entry: RawEntry, idle: Sequence[bool]) -> bool:
    ran = all(_is_time(value) or (value == 0 and zero) for value, zero in zip(entry["seconds"], idle, strict=True))
    beside = all(_is_time(entry[key]) or entry[key] == 0 for key in ("gap_s", "rest_s", "cpu_s")) and _is_time(entry["wall_s"])
    return ran and beside


def _overlap_can_be(entry: RawEntry, _: object) -> bool:
    """A factor that is None was not found, which is valid."""
    factors = [factor for factor in entry["computation"] if factor is not None]
    return all(map(_is_time, [*factors, *entry["communication_s"]]))


LISTS: Mapping[str, tuple[str, Callable[[Any], bool]]] = {
    "shards": ("parts", lambda part: _is_time(part[-1]) and _is_time(part[-2])),
    "collectives": ("seconds", lambda repeat: all(map(_is_time, repeat))),
    "operators": ("seconds", _is_time),
}
"""By kind of entry, the list of which some timings may be left out, and which are kept."""

WHOLE: Mapping[str, Callable[[RawEntry, Sequence[bool]], bool]] = {
    "sweeps": _sweep_can_be,
    "optimizers": lambda entry, _: _is_time(entry["seconds"]),
    "overlap": _overlap_can_be,
    "resume": lambda entry, _: math.isfinite(entry["seconds"]),  # a difference, which noise may make negative
    "crowding": lambda entry, _: _is_time(entry["ratio"]),
}
"""By kind of entry, whether one that is kept or left out whole can be. Entries of other kinds pass as they are."""


def _with_enough(raw: dict[str, Any], models: Sequence[Model], warnings: list[str]) -> tuple[dict[str, Any], list[str]]:
    """Without the cases of which too few steps are left. Raises ProfileError for a model that has no case left."""

    def case_of(entry: RawEntry) -> tuple[int, int, int]:
        return entry["model"], entry["samples"], entry["ranks_active"]

    steps = Counter(case_of(sweep) for _, sweep in entries_of(raw, "sweeps"))
    few = {case for case, count in steps.items() if count < MIN_REPEATS}
    for number, samples, active in sorted(few):
        warnings.append(
            f"left out {models[number].name} at {samples} samples with {active} active ranks: "
            f"{steps[number, samples, active]} steps are too few, at least {MIN_REPEATS} are needed"
        )
    for number, model in enumerate(models):
        if not any(case[0] == number for case in steps if case not in few):
            raise ProfileError(
                f"no case of {model.name} has the {MIN_REPEATS} good steps that a median needs ({'; '.join(warnings)}); "
                "calibrate again, with more rounds or on a quieter machine"
            )
    ranks = [{**rank, "sweeps": [sweep for sweep in rank["sweeps"] if case_of(sweep) not in few]} for rank in raw["ranks"]]
    return {**raw, "ranks": ranks}, warnings


# --- points that contradict one another -------------------------------------------------------------------------------


class Timed(NamedTuple):
    """Median seconds of some amount of work, and their relative standard error."""

    work: int
    seconds: float
    error: float


def contradicted(points: Sequence[Timed]) -> list[int]:
    """Places of the fewest points to leave out so that no more work takes less time, noise aside; `points` ascend in work.

    Among choices that discard equally many points, the one with the least superlinear growth between neighbours is taken. Of
    several, the one that discards the slowest points is, because disturbances make a measurement longer.
    """

    def slower_with_less(less: Timed, more: Timed) -> bool:
        margin = max(TOLERANCE, STANDARD_ERRORS * math.hypot(less.error, more.error))
        return more.work > less.work and less.seconds > more.seconds * (1 + margin)

    def superlinear(less: Timed, more: Timed) -> float:
        return max(0.0, math.log(more.seconds / less.seconds) - math.log(SUPERLINEAR * more.work / less.work))

    best: list[tuple[tuple[int, float, float], list[int]]] = []
    for place, point in enumerate(points):
        options = [
            ((score[0], score[1] - superlinear(points[chain[-1]], point), score[2]), chain)
            for score, chain in best
            if not slower_with_less(points[chain[-1]], point)
        ]
        score, chain = max(options, default=((0, 0.0, 0.0), []), key=lambda option: option[0])
        best.append(((score[0] + 1, score[1], score[2] - point.seconds), [*chain, place]))
    kept = max(best, key=lambda option: option[0])[1] if best else []
    return [place for place in range(len(points)) if place not in kept]


def consistent(
    points: Sequence[Point],
    *,
    series: Callable[[Point], Hashable],
    work: Callable[[Point], int],
    text: Callable[[Point], str],
) -> tuple[list[Point], list[str]]:
    """The points that do not contradict others of their series, and one warning for each that does."""
    groups: dict[Hashable, list[Point]] = {}
    for point in points:
        groups.setdefault(series(point), []).append(point)
    left_out: dict[int, str] = {}
    for group in groups.values():
        ordered = sorted(group, key=work)
        timed = [Timed(work(p), p.seconds, MEDIAN_ERROR * (p.spread or 0.0) / math.sqrt(p.repeats)) for p in ordered]
        for place in contradicted(timed):
            point = ordered[place]
            left_out[id(point)] = f"left out {text(point)}: {format_seconds(point.seconds)}, contradicted by less or more work"
    return [point for point in points if id(point) not in left_out], list(left_out.values())


def consistent_components(points: Sequence[ComponentPoint]) -> tuple[list[ComponentPoint], list[str]]:
    """Without those that are slower with fewer samples."""
    return consistent(
        points,
        series=lambda point: (point.model, point.component, point.fingerprint, point.phase, point.ranks_active),
        work=lambda point: point.samples,
        text=lambda point: f"{point.phase} of {point.component} of {point.model} at {point.samples} samples",
    )


def consistent_collectives(points: Sequence[CollectivePoint]) -> tuple[list[CollectivePoint], list[str]]:
    """Without those that are slower with fewer bytes.

    Raises: ProfileError where fewer than two sizes of an operation are left, of which no line can be fitted.
    """
    kept, warnings = consistent(
        points,
        series=lambda point: (point.operation, tuple(point.group)),
        work=lambda point: point.size_bytes,
        text=lambda point: collective_text(point.operation, point.group, point.size_bytes),
    )
    sizes = Counter((point.operation, len(point.group)) for point in kept)
    for (operation, group_size), count in sizes.items():
        if count < 2:
            raise ProfileError(
                f"only {count} size of {operation} over {group_size} ranks is left, and a fit needs 2 "
                f"({'; '.join(warnings) or 'no more was measured'}); calibrate again, with more sizes or on a quieter machine"
            )
    return kept, warnings
