"""The result for one plan: the keys that `plan`, `simulate`, `validate` and `demo` share in JSON."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from parsim.costs.history import ConformalCorrection
from parsim.plans.plan import Plan


@dataclass(frozen=True, slots=True, kw_only=True)
class Interval:
    """Median and 90% interval."""

    median: float
    p05: float
    p95: float

    @classmethod
    def of(cls, median: float, samples: NDArray[np.float64]) -> Interval:
        """Quantiles of `samples`, widened where needed so that they hold the median."""
        low, high = (float(value) for value in np.quantile(samples, (0.05, 0.95)))
        return cls(median=median, p05=min(low, median), p95=max(high, median))

    def inverse(self, numerator: float) -> Interval:
        """numerator / value: a time becomes a rate."""
        return Interval(median=numerator / self.median, p05=numerator / self.p95, p95=numerator / self.p05)

    def times(self, factor: float) -> Interval:
        """The interval of a value that is `factor` times as large; factor > 0."""
        return Interval(median=self.median * factor, p05=self.p05 * factor, p95=self.p95 * factor)

    def to_dict(self) -> dict[str, float]:
        return {"median": self.median, "p05": self.p05, "p95": self.p95}


@dataclass(frozen=True, slots=True, kw_only=True)
class IntervalCorrection:
    """How an interval of the step was corrected by the profile's history.

    Attributes: uncorrected: the interval from the draws alone. notes: what is wrong with the history or the profile.
    """

    correction: ConformalCorrection
    uncorrected: Interval
    notes: tuple[str, ...] = ()

    @property
    def corrected(self) -> Interval:
        median = self.uncorrected.median
        low, high = self.correction.apply(median, self.uncorrected.p05, self.uncorrected.p95)
        return Interval(median=median, p05=low, p95=high)

    def to_dict(self) -> dict[str, Any]:
        return {
            **self.correction.to_dict(),
            "uncorrected_step_s": self.uncorrected.to_dict(),
            "warnings": list(self.notes),
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanResult:
    """A priced plan.

    Attributes:
        step_s: the mean step of a run of many steps. peak_memory_bytes: per rank.
        interval_correction: of the interval of step_s; None where that is a median alone.
        fits: whether every rank stays within its memory with the probability that is wanted (`parsim.predict.memory`).
        fit_probability: that every rank does; of the rank least likely to, as all vary together.
        cost_sources: share of all task seconds by source ("measured", "fitted", "published").
        cluster: name of what it runs on. reason: why it was chosen, or why it lost.
        lower_bound_s: work of the busiest resource: no order of this plan's tasks has a shorter mean step.
    """

    strategy: str
    step_s: Interval
    throughput_samples_per_s: Interval
    communication_fraction: float
    communication_busy_fraction: float
    exposed_communication_s: float
    bubble_fraction: float
    peak_memory_bytes: tuple[int, ...]
    fits: bool
    fit_probability: float
    cost_sources: Mapping[str, float]
    plan: Plan
    warnings: tuple[str, ...] = ()
    reason: str = ""
    cluster: str = ""
    lower_bound_s: float = field(default=0.0)
    interval_correction: IntervalCorrection | None = None

    def to_dict(self) -> dict[str, Any]:
        return {
            "strategy": self.strategy,
            "cluster": self.cluster,
            "step_s": self.step_s.to_dict(),
            "throughput_samples_per_s": self.throughput_samples_per_s.to_dict(),
            "communication_fraction": self.communication_fraction,
            "communication_busy_fraction": self.communication_busy_fraction,
            "exposed_communication_s": self.exposed_communication_s,
            "bubble_fraction": self.bubble_fraction,
            "peak_memory_bytes": list(self.peak_memory_bytes),
            "fits": self.fits,
            "fit_probability": self.fit_probability,
            "cost_sources": dict(self.cost_sources),
            "plan": self.plan.to_dict(),
            "plan_summary": self.plan.summary(),
            "warnings": list(self.warnings),
            "reason": self.reason,
            "lower_bound_s": self.lower_bound_s,
            "interval_correction": None if self.interval_correction is None else self.interval_correction.to_dict(),
        }
