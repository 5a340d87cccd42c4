"""From estimates to samples of durations: one draw per cost *parameter*, shared by every task that rests on it."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from parsim.costs.estimate import Estimate

STEPS_AVERAGED = 20


def medians_s(estimates: Sequence[Estimate]) -> NDArray[np.float64]:
    """float64 [n] seconds."""
    return np.array([estimate.median_s for estimate in estimates], dtype=np.float64)


def sample_durations_s(
    estimates: Sequence[Estimate], samples: int, seed: int, *, steps_averaged: int = STEPS_AVERAGED
) -> NDArray[np.float64]:
    """float64 [samples, n]: median * product of exp(sigma * z) over the estimate's parameters.

    The z of a parameter is standard normal, one per sample and parameter. Repeat noise is drawn per task and divided by
    sqrt(steps_averaged), as the interval is for the mean of that many steps.

    Leaves out correlation between parameters, and that a maximum over noisy ranks exceeds the maximum of their means.
    """
    rng = np.random.default_rng(seed)
    names = sorted({name for estimate in estimates for name, _ in estimate.parameters})
    column = {name: number for number, name in enumerate(names)}
    loadings = np.zeros((len(names), len(estimates)))
    for number, estimate in enumerate(estimates):
        for name, sigma in estimate.parameters:
            loadings[column[name], number] += sigma
    exponent = rng.standard_normal((samples, len(names))) @ loadings
    repeat = np.array([estimate.repeat_sigma for estimate in estimates]) / np.sqrt(steps_averaged)
    exponent += rng.standard_normal((samples, len(estimates))) * repeat
    durations: NDArray[np.float64] = medians_s(estimates) * np.exp(exponent)
    return durations
