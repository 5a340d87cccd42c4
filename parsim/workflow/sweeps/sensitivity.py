"""Which of the swept fields matters: Sobol indices of a column, by SALib, from the rows of a Saltelli design."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from parsim.errors import ConfigError, MissingDependencyError
from parsim.units import format_percent
from parsim.workflow.sweeps.axes import Axis
from parsim.workflow.sweeps.designs import TUNE, problem_of_axes
from parsim.workflow.sweeps.rows import FAILED

FEWEST_BLOCKS = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class FieldShare:
    """What one field does to a column.

    Attributes:
        first: the share of the column's variance that the field explains by itself. total: with all that it does together with
            others. first_error, total_error: half of the 95% interval of the estimate.
    """

    key: str
    first: float
    total: float
    first_error: float
    total_error: float

    def to_dict(self) -> dict[str, Any]:
        return {
            "key": self.key,
            "first": self.first,
            "first_error": self.first_error,
            "total": self.total,
            "total_error": self.total_error,
        }


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
        return {
            "column": self.column,
            "shares": [share.to_dict() for share in self.shares],
            "points": self.points,
            "left_out": self.left_out,
            "spread": self.spread,
        }

    def lines(self) -> list[str]:
        """The same for people."""
        if not self.shares:
            return [f"{self.column} is the same at all {self.points} points: nothing that was swept matters to it."]
        head = f"What {self.column} depends on (total Sobol index; its spread over the sweep is {format_percent(self.spread)}):"
        rows = [
            f"  {share.key}: {share.total:.2f} ± {share.total_error:.2f}, alone {share.first:.2f} ± {share.first_error:.2f}"
            for share in self.shares
        ]
        note = f"  {self.left_out} points were left out, because one of their block failed." if self.left_out else ""
        return [head, *rows, *([note] if note else [])]


def sensitivity(axes: Sequence[Axis], rows: Sequence[Mapping[str, Any]], column: str, seed: int) -> Sensitivity:
    """Sobol indices of a column.

    Args:
        axes: of the sweep. rows: of `parsim.workflow.sweeps.designs.saltelli`, in its order; points that do not fit count, as
            their time is known. column: of numbers. seed: of the intervals' resampling.

    Raises:
        ConfigError: too many points failed. MissingDependencyError: without SALib.
    """
    try:
        from SALib.analyze import sobol
    except ImportError as error:
        raise MissingDependencyError(TUNE) from error
    size = len(axes) + 2
    values = np.array([np.nan if row["status"] == FAILED else _number(row.get(column)) for row in rows], dtype=float)
    blocks = values.reshape(-1, size)
    whole = np.isfinite(blocks).all(axis=1)
    left_out = int((~whole).sum()) * size
    if whole.sum() < FEWEST_BLOCKS:
        raise ConfigError(
            f"sensitivity of {column}: only {int(whole.sum())} of {len(blocks)} blocks of {size} points have a value at every "
            f"point, and indices need {FEWEST_BLOCKS}; take a larger --sensitivity, or narrower ranges"
        )
    used = blocks[whole].ravel()
    spread = float(used.std() / abs(used.mean())) if used.mean() else 0.0
    if np.ptp(used) <= 1e-12 * abs(used).max():
        return Sensitivity(column=column, shares=(), points=len(used), left_out=left_out, spread=0.0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of SALib's own use of pandas
        found = sobol.analyze(
            problem_of_axes(axes), used, calc_second_order=False, conf_level=0.95, seed=seed, print_to_console=False
        )
    shares = [
        FieldShare(
            key=axis.key,
            first=float(found["S1"][number]),
            total=float(found["ST"][number]),
            first_error=float(found["S1_conf"][number]),
            total_error=float(found["ST_conf"][number]),
        )
        for number, axis in enumerate(axes)
    ]
    order = tuple(sorted(shares, key=lambda share: -share.total))
    return Sensitivity(column=column, shares=order, points=len(used), left_out=left_out, spread=spread)


def _number(value: Any) -> float:
    return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else float("nan")
