"""What is swept: `cluster.nodes=1,2,4,8`, `training.global_batch=256:4096:x2`, `scale.links=0.5:2:log`, as values."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from parsim.errors import ConfigError
from parsim.workflow.sweeps.fields import LARGEST_SCALE, SCALES, check_field, is_whole
from parsim.workflow.toml_text import parse_value

MOST_VALUES = 100_000
"""Of one axis: more is a slip of the step."""

HOW = "write KEY=1,2,4 (a list), KEY=256:4096:x2 (times 2), KEY=8:64:+8 (plus 8), or KEY=0.5:2 and KEY=0.5:2:log for samples"


@dataclass(frozen=True, slots=True, kw_only=True)
class Axis:
    """One field and its values, or the two ends between which it is sampled.

    Attributes:
        key: of a run file, or of `SCALES`. values: in order; empty with `ends`.
        ends: low and high. log: samples are uniform in the logarithm. whole: samples are rounded to whole numbers.
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

    Raises:
        ConfigError: an unknown field (with near matches), an empty range, a step that never arrives, no values.
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

    Raises:
        ConfigError: as `parse_axis`; none at all; one field twice.
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
