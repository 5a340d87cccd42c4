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
    estimates: Sequence[Estimate],
    samples: int,
    seed: int,
    *,
    steps_averaged: int = STEPS_AVERAGED,
    unit: NDArray[np.int64] | None = None,
) -> NDArray[np.float64]:
    """float64 [samples, n]: median * product of exp(sigma * z) over the estimate's parameters.

    Args:
        unit: int64 [n], which estimate each task has (None: task i has estimate i).

    The z of a parameter is standard normal, one per sample and parameter. Repeat noise is drawn per task and divided by
    sqrt(steps_averaged), as the interval is for the mean of that many steps.

    Leaves out correlation between parameters, and that a maximum over noisy ranks exceeds the maximum of their means:
    that is what `rank_noise` is for.
    """
    rng = np.random.default_rng(seed)
    names = sorted({name for estimate in estimates for name, _ in estimate.parameters})
    column = {name: number for number, name in enumerate(names)}
    loadings = np.zeros((len(names), len(estimates)))
    for number, estimate in enumerate(estimates):
        for name, sigma in estimate.parameters:
            loadings[column[name], number] += sigma
    unit = np.arange(len(estimates)) if unit is None else unit
    exponent = (rng.standard_normal((samples, len(names))) @ loadings)[:, unit]
    repeat = np.array([estimate.repeat_sigma for estimate in estimates])[unit] / np.sqrt(steps_averaged)
    if repeat.any():
        exponent += rng.standard_normal((samples, len(unit))) * repeat
    durations: NDArray[np.float64] = medians_s(estimates)[unit] * np.exp(exponent)
    return durations


def rank_noise(ranks: NDArray[np.int64], sigma: float, draws: int, seed: int) -> NDArray[np.float64]:
    """Factors float64 [draws, n] of one step each: how slow the task's rank happened to be, with mean 1.

    One log-normal factor per draw and rank; tasks of rank -1 (communication) keep 1.

    Args:
        ranks: int64 [n]; of ranks that share a core, which is slow or fast for all of them, the core.
        sigma: relative spread of a rank's step against the others'.
    """
    world = 1 + int(ranks.max(initial=-1))
    shocks = np.random.default_rng(seed).standard_normal((draws, world))
    by_rank = np.exp(sigma * shocks - sigma**2 / 2)
    steady = np.ones((draws, 1))
    factors: NDArray[np.float64] = np.concatenate([by_rank, steady], axis=1)[:, np.where(ranks < 0, world, ranks)]
    return factors
