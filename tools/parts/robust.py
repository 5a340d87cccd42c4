"""Robust fits in logarithms, drawn towards what is known of other devices.

A parameter is fitted as its logarithm. The residuals are log(predicted / measured) over `ERROR_SIGMA`, under a soft L1 loss, so
that a few odd rows count little. Each parameter adds one residual (theta - prior mean) / prior sigma: with many rows the data
decide, with few the prior does. Rows are weighted so that no source counts for more than `FULL_ROWS` rows.

A RowTable holds the rows as columns of one length.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import least_squares

from parsim.costs.compute.formula import Array

if TYPE_CHECKING:
    from typing import Self


ERROR_SIGMA = 0.08
"""Relative scatter of single rows that no smooth model explains: the library's choice of kernels."""

FULL_ROWS = 200


@dataclass(frozen=True, slots=True)
class Prior:
    """Mean and standard deviation of the logarithm of each parameter."""

    names: tuple[str, ...]
    mean: Array
    sigma: Array

    def values(self) -> dict[str, float]:
        """The parameters at the mean."""
        return named(self.names, self.mean)


@dataclass(frozen=True, slots=True)
class Errors:
    """Of predicted over measured seconds, as |log|: median and 90th percentile; bias is the median of log."""

    rows: int
    median: float
    p90: float
    bias: float

    @property
    def sigma(self) -> float:
        """Standard deviation of a normal distribution with this median."""
        return float(np.hypot(1.4826 * self.median, 0.0))


def named(names: Sequence[str], theta: Array) -> dict[str, float]:
    """The parameters by name from their logarithms."""
    return {name: float(value) for name, value in zip(names, np.exp(theta), strict=True)}


def fit(
    predict: Callable[[Mapping[str, float]], Array], seconds: Array, weights: Array, prior: Prior, *, start: Array | None = None
) -> Array:
    """The logarithms of the parameters (float64) that explain `seconds` best.

    predict: parameters by name -> seconds [rows]. weights [rows] multiply the residuals. start: where to begin (None: the
    prior's mean).
    """
    target = np.log(seconds)

    def residuals(theta: Array) -> Array:
        apart = (np.log(predict(named(prior.names, theta))) - target) * weights / ERROR_SIGMA
        return np.concatenate(
            [np.sign(apart) * np.sqrt(2.0 * (np.sqrt(1.0 + apart**2) - 1.0)), (theta - prior.mean) / prior.sigma]
        )

    begin = prior.mean if start is None else start
    found = least_squares(residuals, begin, x_scale=np.maximum(prior.sigma, 0.05), max_nfev=30)
    answer: Array = np.asarray(found.x, dtype=np.float64)
    return answer


def source_weights(sources: Sequence[str], full_rows: int = FULL_ROWS) -> Array:
    """The square root of how much each row counts: at most `full_rows` rows per source."""
    _, number, counts = np.unique(np.asarray(sources), return_inverse=True, return_counts=True)
    return np.asarray(np.sqrt(np.minimum(1.0, full_rows / counts[number])), dtype=np.float64)


def errors(predicted: Array, measured: Array) -> Errors:
    """Compare predictions with measurements."""
    apart = np.log(predicted / measured)
    size = np.abs(apart)
    return Errors(
        rows=len(size), median=float(np.median(size)), p90=float(np.quantile(size, 0.9)), bias=float(np.median(apart))
    )


def pooled(thetas: Sequence[Array], names: tuple[str, ...], base: Prior, *, least_sigma: float = 0.1) -> Prior:
    """The prior that fits of other devices make: their mean, and their spread with the base's own uncertainty of few fits. The
    base stands where none is known, and for the spread of one."""
    if not thetas:
        return base
    stack = np.stack(thetas)
    weight = len(thetas) / (len(thetas) + 1.0)
    mean = weight * stack.mean(axis=0) + (1.0 - weight) * base.mean if len(thetas) == 1 else stack.mean(axis=0)
    spread = stack.std(axis=0, ddof=1) if len(thetas) > 1 else base.sigma / 2
    return Prior(names, mean, np.maximum(spread, least_sigma))


class RowTable:
    """What every kind of row has. A subclass is a dataclass of arrays and tuples, each with an entry per row."""

    __slots__ = ()
    __dataclass_fields__: ClassVar[dict[str, dataclasses.Field[Any]]]

    seconds: Array
    source: tuple[str, ...]

    def __len__(self) -> int:
        return len(self.seconds)

    def where(self, keep: NDArray[np.bool_]) -> Self:
        """The rows for which `keep` is true."""
        chosen = np.flatnonzero(keep)
        columns = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        kept = {
            name: tuple(column[index] for index in chosen) if isinstance(column, tuple) else column[chosen]
            for name, column in columns.items()
        }
        return dataclasses.replace(self, **kept)


SomeRows = TypeVar("SomeRows", bound=RowTable)


def leave_sources_out(rows: SomeRows, errors_of: Callable[[SomeRows, SomeRows], Errors], least: int = 1) -> dict[str, Errors]:
    """Per source of at least `least` rows: its errors under the fit to all other sources (to none: the prior)."""
    names = np.array(rows.source)
    return {
        str(source): errors_of(rows.where(names != source), rows.where(names == source))
        for source, count in zip(*np.unique(names, return_counts=True), strict=True)
        if count >= least
    }
