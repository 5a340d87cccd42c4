"""`min cost where epoch < 2h and fits = yes`: which point of a sweep to take.

    goal      := ("min" | "max") column ["where" condition {"and" condition}]
    condition := column ("<" | "<=" | ">" | ">=" | "=" | "!=") value
    value     := number [unit] | word | "text"

Columns are those of the table, or the short names of `SHORT`. Units must be of the column's dimension. Points that failed are
never taken; those that do not fit only if the goal names `status` or `fit_probability`.
"""

from __future__ import annotations

import operator
import re
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from parsim.app.sweep.executing import COLUMNS, DOES_NOT_FIT, FAILED
from parsim.app.sweep.points import TUNE, Axis, problem_of_axes
from parsim.errors import ConfigError, MissingDependencyError, near_matches
from parsim.search.tree import is_tie
from parsim.units import format_percent

SHORT: Mapping[str, tuple[str, ...]] = {
    "step": ("step_s",),
    "time": ("run_s", "epoch_s", "step_s"),
    "epoch": ("epoch_s",),
    "run": ("run_s",),
    "throughput": ("throughput_samples_per_s",),
    "cost": ("run_usd", "usd_per_epoch", "usd_per_million_samples"),
    "price": ("run_usd", "usd_per_epoch", "usd_per_million_samples"),
    "energy": ("run_kwh", "kwh_per_epoch", "kwh_per_million_samples"),
    "memory": ("peak_memory_bytes",),
    "nodes": ("cluster.nodes",),
    "batch": ("global_batch",),
}
"""A short name -> the columns that it may mean; the first that the sweep has."""

UNITS: Mapping[str, Mapping[str, float]] = {
    "time": {
        "ns": 1e-9, "us": 1e-6, "ms": 1e-3, "s": 1.0, "min": 60.0, "m": 60.0, "h": 3600.0, "d": 86400.0, "days": 86400.0
    },
    "bytes": {
        "B": 1, "KB": 1e3, "MB": 1e6, "GB": 1e9, "TB": 1e12, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40
    },
    "price": {"usd": 1.0, "USD": 1.0, "$": 1.0},
    "energy": {"J": 1 / 3.6e6, "Wh": 1e-3, "kWh": 1.0, "MWh": 1e3},
    "share": {"%": 0.01},
    "count": {"k": 1e3, "M": 1e6, "G": 1e9},
}  # fmt: skip
"""Per dimension: a unit -> what it is in the unit of the column."""

MISSING = {
    "epoch_s": "the samples of an epoch are not known; give --samples-per-epoch N (samples_per_epoch=)",
    "usd_per_million_samples": "the price of the devices is not known; set cluster.usd_per_hour",
    "run_s": "how long the run is, is not known; set training.tokens of a language model",
    "kwh_per_million_samples": "the power of the devices is not known; set cluster.busy_power_w",
}
"""Why a column may have no value, and what gives it one."""
SAME_REASON = {
    "usd_per_epoch": "epoch_s",
    "kwh_per_epoch": "epoch_s",
    "run_usd": "run_s",
    "run_kwh": "run_s",
}

_COMPARE: Mapping[str, Callable[[Any, Any], bool]] = {
    "<": operator.lt,
    "<=": operator.le,
    ">": operator.gt,
    ">=": operator.ge,
    "=": operator.eq,
    "==": operator.eq,
    "!=": operator.ne,
}
_TOKEN = re.compile(r"\s*(?:(?P<text>\"[^\"]*\"|'[^']*')|(?P<sign><=|>=|!=|==|=|<|>)|(?P<word>[^\s<>=!\"']+))")
_NUMBER = re.compile(r"([-+]?\d[\d_]*\.?\d*(?:[eE][-+]?\d+)?)\s*([A-Za-z%$]*)")
EXAMPLE = '"min cost where epoch < 2h and memory < 30GiB"'
LONGEST = 1000


@dataclass(frozen=True, slots=True, kw_only=True)
class Condition:
    """`column sign value`; value in the column's own unit."""

    column: str
    sign: str
    value: Any

    def holds(self, row: Mapping[str, Any]) -> bool:
        """Whether a point, a row of the table, meets it; a point without a value does not."""
        value = row.get(self.column)
        if value is None or value != value:
            return False
        if isinstance(self.value, str):
            return _COMPARE[self.sign](str(value), self.value)
        return isinstance(value, int | float) and _COMPARE[self.sign](value, self.value)


FROM_THE_STEP = ("throughput", "usd", "kwh", "run")
"""How columns begin that grow or shrink with the step; those in seconds do too."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Goal:
    """Attributes: text: as it was given. least: min or max. column: what is least or most. conditions: that all hold."""

    text: str
    least: bool
    column: str
    conditions: tuple[Condition, ...] = ()

    def best(self, rows: Sequence[Mapping[str, Any]]) -> int | None:
        """The number of the row to take, the first of equals; None where no point meets the conditions."""
        eligible = self._eligible(rows)
        if not eligible:
            return None
        return min(eligible)[1] if self.least else max(eligible, key=lambda pair: (pair[0], -pair[1]))[1]

    def ties(self, rows: Sequence[Mapping[str, Any]]) -> list[int]:
        """Other rows that meet the conditions and are as good as a measurement can tell (`parsim.search.search`)."""
        best = self.best(rows)
        if best is None or not (self.column.endswith("_s") or self.column.startswith(FROM_THE_STEP)):
            return []
        taken = rows[best][self.column]
        others = [(value, number) for value, number in self._eligible(rows) if number != best]
        return [number for value, number in others if is_tie(*((value, taken) if self.least else (taken, value)))]

    def _eligible(self, rows: Sequence[Mapping[str, Any]]) -> list[tuple[float, int]]:
        named = {self.column, *(condition.column for condition in self.conditions)}
        refused = {FAILED} if named & {"status", "fit_probability"} else {FAILED, DOES_NOT_FIT}
        return [
            (row[self.column], number)
            for number, row in enumerate(rows)
            if row["status"] not in refused
            and isinstance(row.get(self.column), int | float)
            and row[self.column] == row[self.column]
            and all(condition.holds(row) for condition in self.conditions)
        ]


def parse_goal(text: str, rows: Sequence[Mapping[str, Any]], columns: Sequence[str]) -> Goal:
    """A goal over the columns of a table.

    Args: text: of the grammar above. rows: of the table: a column that none has a value of cannot be asked for. columns: known.
    Raises: ConfigError: what is not of the grammar, an unknown column, a unit of another dimension; with an example.
    """
    tokens = _tokens(text)
    if len(tokens) < 2 or tokens[0] not in ("min", "max", "minimize", "maximize"):
        raise ConfigError(f"--goal {text!r} must begin with min or max and a column, for example {EXAMPLE}")
    column = _column(tokens[1], rows, columns)
    rest = tokens[2:]
    if rest and rest[0] != "where":
        raise ConfigError(f"--goal {text!r}: after the column comes `where`, not {rest[0]!r}; for example {EXAMPLE}")
    conditions: list[Condition] = []
    rest = rest[1:]
    if tokens[2:] and not rest:
        raise ConfigError(f"--goal {text!r}: nothing follows `where`; for example {EXAMPLE}")
    while rest:
        until = rest.index("and") if "and" in rest else len(rest)
        conditions.append(_condition(text, rest[:until], rows, columns))
        if until == len(rest) - 1:
            raise ConfigError(f"--goal {text!r}: nothing follows the last `and`")
        rest = rest[until + 1 :]
    return Goal(text=text, least=tokens[0].startswith("min"), column=column, conditions=tuple(conditions))


def _tokens(text: str) -> list[str]:
    if len(text) > LONGEST:
        raise ConfigError(f"--goal has {len(text):,} characters; write at most {LONGEST}")
    tokens, place = [], 0
    while text[place:].strip():
        match = _TOKEN.match(text, place)
        if match is None:
            raise ConfigError(f"--goal {text!r}: cannot read {text[place:].strip()[:20]!r}; for example {EXAMPLE}")
        tokens.append(match["text"] or match["sign"] or match["word"])
        place = match.end()
    return tokens


def _condition(text: str, tokens: Sequence[str], rows: Sequence[Mapping[str, Any]], columns: Sequence[str]) -> Condition:
    if len(tokens) < 3 or tokens[1] not in _COMPARE:
        raise ConfigError(
            f"--goal {text!r}: {' '.join(tokens)!r} is not a condition; write COLUMN < VALUE, with one of "
            f"{', '.join(_COMPARE)}; for example {EXAMPLE}"
        )
    column = _column(tokens[0], rows, columns)
    written = " ".join(tokens[2:])
    match = _NUMBER.fullmatch(written)
    values = [row[column] for row in rows if row.get(column) is not None]
    is_text = all(isinstance(value, str | bool | list | dict) for value in values)
    if is_text and (values or match is None):
        if tokens[1] not in ("=", "==", "!="):
            raise ConfigError(f"--goal {text!r}: {column} is a text, which {tokens[1]} does not compare; use = or !=")
        return Condition(column=column, sign=tokens[1], value=written.strip("\"'"))
    units = UNITS[dimension(column)]
    takes = f"a number, or one with {', '.join(units)}"
    if match is None:
        raise ConfigError(f"--goal {text!r}: {written!r} is not a number with a unit; {column} takes {takes}")
    factors = {"": 1.0, **UNITS["count"], **units}
    if match[2] not in factors:
        raise ConfigError(f"--goal {text!r}: {match[2]!r} is not a unit of {column}, which takes {takes}")
    return Condition(column=column, sign=tokens[1], value=float(match[1].replace("_", "")) * factors[match[2]])


def dimension(column: str) -> str:
    """The dimension of a column's unit, by its name: time, bytes, price, energy, share or count."""
    if column.endswith("_bytes"):
        return "bytes"
    if "per_s" not in column and column.endswith("_s"):
        return "time"
    if "usd" in column:
        return "price"
    if "kwh" in column:
        return "energy"
    if column.endswith(("_fraction", "_probability")) or column == "mfu":
        return "share"
    return "count"


def _column(word: str, rows: Sequence[Mapping[str, Any]], columns: Sequence[str]) -> str:
    names = {*columns, *COLUMNS}
    if word not in names and word not in SHORT:
        raise ConfigError(f"--goal: there is no column {word!r}{near_matches(word, [*names, *SHORT])}")
    choices = (word,) if word in names else SHORT[word]
    for choice in choices:
        if any(row.get(choice) is not None for row in rows):
            return choice
    if not any(row["status"] != FAILED for row in rows):
        return choices[-1]
    reason = MISSING.get(SAME_REASON.get(choices[-1], choices[-1]), "")
    raise ConfigError(f"--goal: no point has a value of {word} ({', '.join(choices)}){': ' if reason else ''}{reason}")


# Which of the swept fields matters: Sobol indices of a column, by SALib, from the rows of a Saltelli design.


FEWEST_BLOCKS = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class FieldShare:
    """What one field does to a column.

    Attributes: first: the share of the column's variance that the field explains by itself. total: with all that it does
        together with others. first_error, total_error: half of the 95% interval of the estimate.
    """

    key: str
    first: float
    first_error: float
    total: float
    total_error: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Sensitivity:
    """Attributes:
    column: whose variance is divided. shares: per field, the largest total first. points: that were used.
    left_out: points that were not, because one of their block failed. spread: standard deviation of the column over its mean.
    """

    column: str
    shares: tuple[FieldShare, ...]
    points: int
    left_out: int
    spread: float

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON."""
        return asdict(self)

    def lines(self) -> list[str]:
        """Sentences for people."""
        if not self.shares:
            return [f"{self.column} is the same at all {self.points} points: nothing that was swept matters to it."]
        head = f"What {self.column} depends on (total Sobol index; its spread over the sweep is {format_percent(self.spread)}):"
        rows = [
            f"  {share.key}: {share.total:.2f} ± {share.total_error:.2f}, alone {share.first:.2f} ± {share.first_error:.2f}"
            for share in self.shares
        ]
        if self.left_out:
            rows.append(f"  {self.left_out} points were left out, because one of their block failed.")
        return [head, *rows]


def sensitivity(axes: Sequence[Axis], rows: Sequence[Mapping[str, Any]], column: str, seed: int) -> Sensitivity:
    """Sobol indices of a column.

    Args: axes: of the sweep. rows: of `parsim.app.sweep.points.saltelli`, in its order; points that do not fit count, as their
        time is known. column: of numbers. seed: of the intervals' resampling.
    Raises: ConfigError: too many points failed. MissingDependencyError: without SALib.
    """
    try:
        from SALib.analyze import sobol
    except ImportError as error:
        raise MissingDependencyError(TUNE) from error
    size = len(axes) + 2
    values = [np.nan if row["status"] == FAILED else row.get(column) for row in rows]
    is_number = [isinstance(value, int | float) and not isinstance(value, bool) for value in values]
    blocks = np.array([value if number else np.nan for value, number in zip(values, is_number, strict=True)], dtype=float)
    blocks = blocks.reshape(-1, size)
    complete = np.isfinite(blocks).all(axis=1)
    left_out = int((~complete).sum()) * size
    if complete.sum() < FEWEST_BLOCKS:
        raise ConfigError(
            f"sensitivity of {column}: only {int(complete.sum())} of {len(blocks)} blocks of {size} points have a value at "
            f"every point, and indices need {FEWEST_BLOCKS}; take a larger --sensitivity, or narrower ranges"
        )
    used = blocks[complete].ravel()
    spread = float(used.std() / abs(used.mean())) if used.mean() else 0.0
    if np.ptp(used) <= 1e-12 * abs(used).max():
        return Sensitivity(column=column, shares=(), points=len(used), left_out=left_out, spread=0.0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of SALib's own use of pandas
        indices = sobol.analyze(
            problem_of_axes(axes), used, calc_second_order=False, conf_level=0.95, seed=seed, print_to_console=False
        )
    names = {"first": "S1", "first_error": "S1_conf", "total": "ST", "total_error": "ST_conf"}
    shares = [
        FieldShare(key=axis.key, **{field: float(indices[name][number]) for field, name in names.items()})
        for number, axis in enumerate(axes)
    ]
    order = tuple(sorted(shares, key=lambda share: -share.total))
    return Sensitivity(column=column, shares=order, points=len(used), left_out=left_out, spread=spread)
