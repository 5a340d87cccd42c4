"""How good predictions were over many cases, and how good the choices made by them: pure arithmetic on seconds.

Everywhere relative error = (predicted - measured) / measured: positive means that the prediction was too slow.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from scipy.stats import spearmanr

from parsim.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class Accuracy:
    """Over `cases` relative errors: mean, median, 95th percentile and worst of their sizes; `bias`, their median with signs."""

    cases: int
    mean: float
    median: float
    p95: float
    worst: float
    bias: float


def accuracy(predicted_s: Sequence[float], measured_s: Sequence[float]) -> Accuracy:
    """Summary of the relative errors. Raises ConfigError: no case, unequal lengths, or a measured time that is not above 0."""
    predicted, measured = _checked(predicted_s, measured_s)
    errors = (predicted - measured) / measured
    sizes = np.abs(errors)
    return Accuracy(
        cases=len(errors),
        mean=float(sizes.mean()),
        median=float(np.median(sizes)),
        p95=float(np.quantile(sizes, 0.95)),
        worst=float(sizes.max()),
        bias=float(np.median(errors)),
    )


def rank_correlation(predicted_s: Sequence[float], measured_s: Sequence[float]) -> float:
    """Spearman's: 1 where the predictions put the cases in the measured order. NaN for fewer than two cases or no order."""
    predicted, measured = _checked(predicted_s, measured_s)
    if len(predicted) < 2 or np.ptp(predicted) == 0 or np.ptp(measured) == 0:
        return float("nan")
    return float(spearmanr(predicted, measured).statistic)


def regret(predicted_s: Sequence[float], measured_s: Sequence[float], floor: float = 0.0) -> float:
    """How much longer the alternative that was predicted to be fastest takes than the one that is: (chosen - best) / best. No
    more than `floor`, by which two measurements of one thing differ, is none."""
    predicted, measured = _checked(predicted_s, measured_s)
    lost = float(measured[int(np.argmin(predicted))] / measured.min() - 1.0)
    return lost if lost > floor else 0.0


def _checked(predicted_s: Sequence[float], measured_s: Sequence[float]) -> tuple[np.ndarray, np.ndarray]:
    predicted, measured = np.asarray(predicted_s, dtype=np.float64), np.asarray(measured_s, dtype=np.float64)
    if predicted.shape != measured.shape or predicted.ndim != 1 or not len(predicted):
        raise ConfigError(f"as many predictions as measurements, at least one: got {len(predicted_s)} and {len(measured_s)}")
    if not (np.isfinite(predicted).all() and np.isfinite(measured).all() and bool(np.all(measured > 0))):
        raise ConfigError("times must be finite and the measured ones above 0; leave out cases that were not measured")
    return predicted, measured
