"""Points of a sweep: each a question of its own, with a key that covers everything its answer depends on."""

from __future__ import annotations

import hashlib
import importlib.metadata
import itertools
import json
import math
import typing
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any

import hardware_profiles
from parsim.app.config import Question
from parsim.app.config_text import fields_of, parse_value, references, root_of, tables_in
from parsim.app.load import on_this_machine
from parsim.app.question import is_run_file, question_of
from parsim.costs.history import history_path
from parsim.errors import ConfigError, MissingDependencyError, ParsimError, near_matches, require
from parsim.hardware.cluster import Cluster
from parsim.model.model import Model

# Fields that a sweep can vary: every key of a run file, and three factors on the hardware.


SCALES = {
    "scale.compute": "computation and optimizer are this many times as fast",
    "scale.links": "every collective and transfer is this many times as fast",
    "scale.memory": "every device has this many times the memory",
}
"""Factors on the hardware, which no run file has: they answer what matters."""

LARGEST_SCALE = 1e6


def known_fields() -> list[str]:
    """Every field by its dotted name; `model.args.*` stands for any argument of the model."""
    return [*_below(Question, ""), *SCALES]


def check_field(key: str) -> None:
    """Raise ConfigError, with near matches, for a field that no run file has."""
    fields = known_fields()
    if key in fields or any(key.startswith(name[:-1]) and key != name[:-2] for name in fields if name.endswith(".*")):
        return
    near = near_matches(key, fields)
    if near.startswith("; known"):
        near = near_matches(key.rpartition(".")[2], {name.rpartition(".")[2] for name in fields})
        near = near if not near.startswith("; known") else "; keys are those of a run file (docs/run-file.md)"
    raise ConfigError(f"--over {key}: a sweep varies keys of a run file, and {', '.join(SCALES)}; there is no {key}{near}")


def is_whole(key: str) -> bool:
    """Whether the values of a field are whole numbers: samples between two ends are then rounded."""
    if key in SCALES:
        return False
    section: type = Question
    for part in key.split("."):
        fields = fields_of(section)
        if part not in fields:
            return key.startswith("model.args.")
        tables = tables_in(fields[part])
        if not tables:
            return _holds(fields[part], int) and not _holds(fields[part], float)
        section = tables[0]
    return False


def _below(section: type, path: str) -> list[str]:
    names: list[str] = []
    for name, annotation in fields_of(section).items():
        if path:
            names.append(f"{path}{name}")
        if _holds(annotation, dict):
            names.append(f"{path}{name}.*")
        for table in tables_in(annotation):
            names += _below(table, f"{path}{name}.")
    return names


def _holds(annotation: object, kind: type) -> bool:
    """Whether a value of this kind may stand in a field: itself, or a member of a union."""
    if annotation is kind or typing.get_origin(annotation) is kind:
        return True
    origin = typing.get_origin(annotation)
    if origin in (tuple, list, dict, set) or origin is typing.Literal:
        return False
    return any(_holds(member, kind) for member in typing.get_args(annotation))


# What is swept: `cluster.nodes=1,2,4,8`, `training.global_batch=256:4096:x2`, `scale.links=0.5:2:log`, as values.


MOST_VALUES = 100_000
"""Of one axis: more is a slip of the step."""

HOW = "write KEY=1,2,4 (a list), KEY=256:4096:x2 (times 2), KEY=8:64:+8 (plus 8), or KEY=0.5:2 and KEY=0.5:2:log for samples"


@dataclass(frozen=True, slots=True, kw_only=True)
class Axis:
    """One field and its values, or the two ends between which it is sampled.

    Attributes: key: of a run file, or of `SCALES`. values: in order; empty with `ends`. ends: low and high. log: samples are
        uniform in the logarithm. whole: samples are rounded to whole numbers.
    """

    key: str
    values: tuple[Any, ...] = ()
    ends: tuple[float, float] | None = None
    log: bool = False
    whole: bool = False

    def at(self, share: float) -> Any:
        """The value at a share of the axis, 0 <= share < 1: a sample."""
        if self.ends is None:
            return self.values[min(int(share * len(self.values)), len(self.values) - 1)]
        low, high = self.ends
        if self.whole:  # every whole number has the same part of the axis
            low, high = (low - 0.5, high + 0.5) if not self.log else (low, high)
        value = low * (high / low) ** share if self.log else low + (high - low) * share
        return min(max(round(value), int(self.ends[0])), int(self.ends[1])) if self.whole else value

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON."""
        return {"key": self.key, "values": list(self.values), "ends": self.ends and list(self.ends), "log": self.log}


def parse_axis(text: str) -> Axis:
    """One `--over KEY=VALUES`.

    Raises: ConfigError: an unknown field (with near matches), an empty range, a step that never arrives, no values.
    """
    key, equals, spec = text.partition("=")
    key, spec = key.strip(), spec.strip()
    if not equals or not key or not spec:
        raise ConfigError(f"--over {text!r}: {HOW}")
    check_field(key)
    parts = _split(spec, ",")
    if len(parts) == 1 and len(pieces := _split(spec, ":")) in (2, 3) and _number(pieces[0]) is not None:
        return _range(key, spec, pieces)
    if any(not part.strip() for part in parts):
        raise ConfigError(f"--over {text!r}: a value between two commas is missing; {HOW}")
    return axis_of(key, [parse_value(part.strip()) for part in parts])


def axis_of(key: str, values: Sequence[Any] | tuple[float, float, str]) -> Axis:
    """An axis of listed values. Raises ConfigError for none, for one twice, and for values that cannot be."""
    check_field(key)
    if isinstance(values, str):
        return parse_axis(f"{key}={values}")
    listed = tuple(_plain(value) for value in values)
    if not listed:
        raise ConfigError(f"over {key}: the list of values is empty; give at least one")
    if len(listed) > MOST_VALUES:
        raise ConfigError(f"over {key}: {len(listed):,} values are more than the {MOST_VALUES:,} of one axis")
    texts = [json.dumps(value, sort_keys=True, default=str) for value in listed]
    if twice := [text for text in texts if texts.count(text) > 1] if len(texts) < 1000 else []:
        raise ConfigError(f"over {key}: {twice[0]} appears twice; list every value once")
    for value in listed:
        _check_scale(key, value)
    return Axis(key=key, values=listed, whole=is_whole(key))


def axes_of(over: Mapping[str, Any] | Sequence[str | Axis]) -> tuple[Axis, ...]:
    """The axes of texts as `--over` takes them, or of a mapping from key to values (or to such a text).

    Raises: ConfigError: as `parse_axis`; none at all; one field twice.
    """
    if isinstance(over, Mapping):
        axes = tuple(axis_of(str(key), values) for key, values in over.items())
    else:
        axes = tuple(entry if isinstance(entry, Axis) else parse_axis(entry) for entry in over)
    if not axes:
        raise ConfigError(f"a sweep needs a key to vary; give --over (over=): {HOW}")
    keys = [axis.key for axis in axes]
    if twice := [key for key in keys if keys.count(key) > 1]:
        raise ConfigError(f"--over {twice[0]} was given twice; list all its values in one")
    return axes


def _range(key: str, spec: str, pieces: Sequence[str]) -> Axis:
    low, high = _number(pieces[0]), _number(pieces[1])
    if low is None or high is None:
        raise ConfigError(f"--over {key}={spec}: both ends of a range are numbers; {HOW}")
    if low > high:
        raise ConfigError(f"--over {key}={spec}: the range is empty, since {low:g} > {high:g}; write the smaller end first")
    _check_scale(key, low)
    _check_scale(key, high)
    step = pieces[2].strip() if len(pieces) == 3 else ""
    if step in ("", "log"):
        if step and low <= 0:
            raise ConfigError(f"--over {key}={spec}: log needs ends above 0, and the first is {low:g}")
        return Axis(key=key, ends=(float(low), float(high)), log=bool(step), whole=is_whole(key))
    by = _number(step[1:]) if step[0] in "x*+" else _number(step)
    if by is None:
        raise ConfigError(f"--over {key}={spec}: the step {step!r} is neither x2, +8 nor log; {HOW}")
    times = step[0] in "x*"
    if (times and (by <= 1 or low <= 0)) or (not times and by <= 0):
        raise ConfigError(
            f"--over {key}={spec}: steps of {step} from {low:g} never arrive at {high:g}; use x2 or +8, from above 0"
        )
    count = (math.log(high / low) / math.log(by) if times else (high - low) / by) + 1
    if count > MOST_VALUES:
        raise ConfigError(f"--over {key}={spec}: {count:,.0f} values are more than the {MOST_VALUES:,} of one axis")
    values: list[float] = []
    for number in range(int(count + 1e-9)):
        value = low * by**number if times else low + by * number
        values.append(round(value) if is_whole(key) and float(value).is_integer() else value)
    return axis_of(key, values)


def _number(text: str) -> int | float | None:
    value = parse_value(text.strip())
    return value if isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value) else None


def _check_scale(key: str, value: object) -> None:
    if key in SCALES and not (
        isinstance(value, int | float) and not isinstance(value, bool) and 1 / LARGEST_SCALE <= value <= LARGEST_SCALE
    ):
        raise ConfigError(f"{key} = {value!r}: a factor from {1 / LARGEST_SCALE:g} to {LARGEST_SCALE:g}; 2 means twice as much")


def _plain(value: Any) -> Any:
    """A number of numpy as Python's, a tuple as a list."""
    if hasattr(value, "item") and not isinstance(value, str | bytes):
        value = value.item()
    return list(value) if isinstance(value, tuple) else value


def _split(text: str, mark: str) -> list[str]:
    """At marks outside brackets and quotes: `{pp=1, dp=8}, {pp=2, dp=4}` is two values."""
    parts, depth, quote = [""], 0, ""
    for letter in text:
        if quote:
            quote = "" if letter == quote else quote
        elif letter in "\"'":
            quote = letter
        else:
            depth += (letter in "[{(") - (letter in ")}]")
        if letter == mark and not depth and not quote:
            parts.append("")
        else:
            parts[-1] += letter
    return parts


# Which points are swept: a grid, a Sobol sample, or a Saltelli design, from which Sobol indices are computed.


MOST_POINTS = 10**6
TUNE = "Sobol indices need SALib; install parsim[tune]"

SweptSettings = dict[str, Any]
"""Key of a run file (or of SCALES) -> value."""


def grid(axes: Sequence[Axis]) -> list[SweptSettings]:
    """Every combination, the last axis fastest.

    Raises: ConfigError: an axis of two ends alone, which only samples can use; too many points.
    """
    for axis in axes:
        if axis.ends is not None:
            low, high = axis.ends
            raise ConfigError(
                f"--over {axis.key}={low:g}:{high:g} has no step: add one (:x2, :+8), or take samples with --sample N"
            )
    _check_count(math.prod(len(axis.values) for axis in axes))
    keys = [axis.key for axis in axes]
    return [dict(zip(keys, values, strict=True)) for values in itertools.product(*(axis.values for axis in axes))]


def sobol_sample(axes: Sequence[Axis], count: int, seed: int) -> list[SweptSettings]:
    """So many points (best a power of two) of a scrambled Sobol sequence (scipy), which fills the space evenly.

    Raises ConfigError: no points, or too many.
    """
    require("scipy", "--sample")
    from scipy.stats import qmc

    if count < 1:
        raise ConfigError(f"--sample {count}: give at least one point")
    _check_count(count)
    sampler = qmc.Sobol(d=len(axes), scramble=True, rng=seed)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # balance holds for powers of two; any other count is the user's choice
        shares = sampler.random(count)
    return [_at(axes, row) for row in shares.tolist()]


def saltelli(axes: Sequence[Axis], base: int, seed: int) -> list[SweptSettings]:
    """base * (axes + 2) points, from which `parsim.app.sweep.goal` computes indices.

    Raises ConfigError: one axis, or a base that is not a power of two; MissingDependencyError: without SALib.
    """
    if len(axes) < 2:
        raise ConfigError(f"--sensitivity compares fields, and only {axes[0].key} is swept; give a second --over")
    if base < 2 or base & (base - 1):
        near = 2 ** max(1, round(math.log2(max(base, 2))))
        raise ConfigError(f"--sensitivity {base}: the base of a Saltelli design is a power of two; use {near}")
    _check_count(base * (len(axes) + 2))
    try:
        from SALib.sample import sobol
    except ImportError as error:
        raise MissingDependencyError(TUNE) from error
    shares = sobol.sample(problem_of_axes(axes), base, calc_second_order=False, seed=seed)
    return [_at(axes, row) for row in shares.tolist()]


def problem_of_axes(axes: Sequence[Axis]) -> dict[str, Any]:
    """The axes as SALib takes them: shares from 0 to 1."""
    return {"num_vars": len(axes), "names": [axis.key for axis in axes], "bounds": [[0.0, 1.0]] * len(axes)}


def _at(axes: Sequence[Axis], shares: Sequence[float]) -> SweptSettings:
    return {axis.key: axis.at(share) for axis, share in zip(axes, shares, strict=True)}


def _check_count(count: int) -> None:
    if count > MOST_POINTS:
        raise ConfigError(f"{count:,} points are more than the {MOST_POINTS:,} of one sweep; use fewer values, or --sample N")


KEY_LETTERS = 32
IN_PLACE = {"cluster.profile": "cluster", "training.global_batch": "global_batch"}
"""Fields that a question without a run file takes as arguments."""


@dataclass(frozen=True, kw_only=True)
class BaseQuestion:
    """What every point asks, apart from what is swept.

    Attributes: model, cluster, global_batch, settings, overrides, example_inputs: as `parsim.plan` takes them.
        samples_per_epoch: for the time and the price of an epoch; None: not known.
    """

    model: Any
    cluster: Any = None
    global_batch: int | None = None
    settings: Mapping[str, Any] = field(default_factory=dict)
    overrides: Sequence[str] = ()
    example_inputs: Any = None
    samples_per_epoch: int | None = None

    def at(self, settings: SweptSettings) -> Question:
        """The question of one point. Raises ParsimError."""
        changes = {key: value for key, value in settings.items() if key not in SCALES}
        arguments: dict[str, Any] = {"cluster": self.cluster, "global_batch": self.global_batch}
        if not (isinstance(self.model, str | Path) and is_run_file(self.model)):
            arguments |= {IN_PLACE[key]: changes.pop(key) for key in IN_PLACE if key in changes}
        others = {key: value for key, value in self.settings.items() if key not in changes}
        overrides = [text for text in self.overrides if text.partition("=")[0].strip() not in changes]
        arguments |= {"settings": others | changes, "overrides": overrides, "example_inputs": self.example_inputs}
        return on_this_machine(question_of(self.model, **arguments))


@dataclass(frozen=True, kw_only=True)
class SweepPoint:
    """One point.

    Attributes: number: its place in the sweep. settings: what was swept. key: of its content; equal keys have equal answers.
        question: None where `problem` says why there is none.
    """

    number: int
    settings: SweptSettings
    key: str
    question: Question | None = None
    problem: str = ""
    samples_per_epoch: int | None = None

    @property
    def scale(self) -> SweptSettings:
        return {key: value for key, value in self.settings.items() if key in SCALES}


def points_of(base: BaseQuestion, designed: Sequence[SweptSettings]) -> list[SweepPoint]:
    """Every point with its question; a point that asks for what cannot be says why, and the others are asked."""
    value = _value_digest(base)
    points: list[SweepPoint] = []
    for number, settings in enumerate(designed):
        try:
            question = base.at(settings)
            content: dict[str, Any] = {"config": question.to_dict(), "files": _files(question)}
            answerable: dict[str, Any] = {"question": question}
        except ParsimError as error:
            content = {"settings": settings, "problem": str(error)}
            answerable = {"problem": str(error)}
        epoch = base.samples_per_epoch
        scale = {key: factor for key, factor in settings.items() if key in SCALES and factor != 1}
        content |= {"scale": scale, "epoch": epoch, "values": value, "code": code_digest()}
        key = hashlib.sha256(json.dumps(content, sort_keys=True, default=str).encode()).hexdigest()[:KEY_LETTERS]
        points.append(SweepPoint(number=number, settings=settings, key=key, samples_per_epoch=epoch, **answerable))
    return points


@lru_cache(maxsize=1)
def code_digest() -> str:
    """A digest of parsim's own source, the shipped profiles, and the packages that trace models."""
    digest = hashlib.sha256()
    roots = {Path(__file__).parents[2]: "*.py", Path(str(hardware_profiles.__file__)).parent: "*.json"}
    for root, pattern in roots.items():
        for path in sorted(root.rglob(pattern)):
            digest.update(str(path.relative_to(root)).encode())
            digest.update(path.read_bytes())
    for name in ("torch", "transformers", "numpy"):
        try:
            digest.update(f"{name} {importlib.metadata.version(name)}".encode())
        except importlib.metadata.PackageNotFoundError:
            digest.update(f"{name} absent".encode())
    return digest.hexdigest()


def _value_digest(base: BaseQuestion) -> str:
    """A digest of a model (a traced one: `parsim.app.sweep.sweep`) or a cluster that was given as a value and not by name."""
    digest = hashlib.sha256()
    if isinstance(base.model, Model):
        digest.update(base.model.to_json().encode())
    if isinstance(cluster := base.cluster, Cluster):
        network = "" if cluster.network is None else cluster.network.model_dump_json()
        indices = [device.index for device in cluster.devices]
        digest.update(f"{cluster.name} {indices} {cluster.profile.model_dump_json()} {network}".encode())
    return digest.hexdigest()


def _files(question: Question) -> dict[str, str]:
    cluster, plan = question.cluster, question.plan
    named = [question.model.name, cluster.profile, cluster.network, cluster.gpu, cluster.link, plan.strategy]
    paths = [Path(text) for text in named if text is not None and text.endswith((".json", ".toml"))]
    if (history := history_path(cluster.profile or "", cluster.history)) is not None:
        paths.append(history)
    if question.model.import_folder is not None:
        for name in references(question.to_dict()).values():
            root = Path(question.model.import_folder) / root_of(name)
            paths += sorted(root.rglob("*.py")) if root.is_dir() else [root.with_suffix(".py")]
    return {str(path): _digest_at(path, file_stamp(path)) for path in paths}


def file_stamp(path: str | Path) -> tuple[int, int, int] | None:
    """Changes with the content of a file; None where there is none."""
    try:
        stat = Path(path).stat()
    except OSError:
        return None
    return stat.st_mtime_ns, stat.st_size, stat.st_ino


@lru_cache(maxsize=4096)
def _digest_at(path: Path, stamp: tuple[int, int, int] | None) -> str:
    try:
        return "absent" if stamp is None else hashlib.sha256(path.read_bytes()).hexdigest()
    except OSError:
        return f"unreadable {stamp}"
