"""Which corrections earn their place: errors with and without each, on records that nothing was fitted to."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from parsim.hardware.profile import Profile

DRAWS, SEED = 10_000, 0
MEASURED_SPEED = "the measured speed of the cores"


def without_overlap(profile: Profile) -> Profile:
    """Computation and communication do not slow one another."""
    return profile.model_copy(update={"overlap": None})


def without_host(**neutral: float) -> Callable[[Profile], Profile]:
    """A profile whose host overhead has these values instead; one without host overhead stays as it is."""

    def made(profile: Profile) -> Profile:
        host = None if profile.host is None else profile.host.model_copy(update=neutral)
        return profile.model_copy(update={"host": host})

    return made


WITHOUT: Mapping[str, Callable[[Profile], Profile]] = {
    "computation and communication slow one another": without_overlap,
    "gaps between tasks": without_host(task_s=0.0),
    "time of a step beside its tasks": without_host(step_s=0.0),
    "computation after a wait": without_host(post_wait_s=0.0),
    "cores shared by all ranks": without_host(core_sharing=1.0),
}
"""By the name of a correction, the profile that lacks it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Compared:
    """One run. Attributes: case: runs of one case are drawn together. with_s, without_s: predicted. measured_s: of it."""

    case: str
    with_s: float
    without_s: float
    measured_s: float

    @property
    def gain(self) -> float:
        """By how much the absolute error grows without the correction."""
        return abs(self.without_s / self.measured_s - 1) - abs(self.with_s / self.measured_s - 1)


def ablated(runs: Sequence[Compared]) -> dict[str, Any]:
    """What one correction does to the error: medians of its size with and without, the mean gain, and its 95% interval by a
    paired bootstrap over cases.

    `changed` counts the runs whose prediction the correction changes; one that changes none was not tried. `helps` says that
    the whole interval lies above 0. Leaves out that cases of one launch share its spell of the machine.
    """
    names = list(dict.fromkeys(run.case for run in runs))
    sums = np.array([sum(run.gain for run in runs if run.case == name) for name in names])
    counts = np.array([sum(run.case == name for run in runs) for name in names])
    drawn = np.random.default_rng(SEED).integers(len(names), size=(DRAWS, len(names)))
    low, high = np.quantile(sums[drawn].sum(axis=1) / counts[drawn].sum(axis=1), (0.025, 0.975))
    return {
        "runs": len(runs),
        "changed": sum(run.with_s != run.without_s for run in runs),
        "median_with": statistics.median(abs(run.with_s / run.measured_s - 1) for run in runs),
        "median_without": statistics.median(abs(run.without_s / run.measured_s - 1) for run in runs),
        "gain": float(sums.sum() / counts.sum()),
        "gain_low": float(low),
        "gain_high": float(high),
        "helps": bool(low > 0),
    }
