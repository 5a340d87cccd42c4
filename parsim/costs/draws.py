"""From estimates to samples of durations: one draw per cost *parameter*, shared by every task that depends on it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from parsim.costs.estimate import Estimate

STEPS_AVERAGED = 20


def medians_s(estimates: Sequence[Estimate]) -> NDArray[np.float64]:
    """Medians of estimates: float64 [n] seconds."""
    return np.array([estimate.median_s for estimate in estimates], dtype=np.float64)


def sample_durations_s(
    estimates: Sequence[Estimate],
    samples: int,
    seed: int,
    *,
    steps_averaged: int = STEPS_AVERAGED,
    unit: NDArray[np.int64] | None = None,
) -> NDArray[np.float64]:
    """Draw durations: median * product of exp(sigma * z) over the estimate's parameters.

    Args:
        estimates: of the units. samples: rows. seed: of the draws.
        steps_averaged: steps in the mean that the interval is for.
        unit: int64 [n], which estimate each task has (None: task i has estimate i).

    Returns:
        float64 [samples, n] seconds. The z of a parameter is standard normal, one per sample and parameter. Repeat noise is
        drawn per task and divided by sqrt(steps_averaged). Leaves out correlation between parameters, and that a maximum over
        noisy ranks exceeds the maximum of their means (see `rank_noise`).
    """
    exponents = _exponents(estimates, samples, seed, steps_averaged, unit, None, samples)
    durations: NDArray[np.float64] = np.concatenate(list(exponents))
    return _durations(estimates, durations, unit)


RepeatNoise = Callable[[NDArray[np.float64]], NDArray[np.float64]]
"""From independent standard normal draws float64 [rows, n] to log(duration / median) of the tasks' own noise."""


def sampled_durations_by_rows(
    estimates: Sequence[Estimate],
    samples: int,
    seed: int,
    *,
    unit: NDArray[np.int64],
    rows: int,
    repeat: RepeatNoise | None = None,
    steps_averaged: int = STEPS_AVERAGED,
) -> Iterator[NDArray[np.float64]]:
    """Yield the draws of `sample_durations_s`, number for number, in pieces of bounded memory.

    Args:
        rows: samples in one piece, at most.
        repeat: makes the repeat noise of the draws if tasks do not draw it independently (`parsim.engines.noise`).
    """
    for exponent in _exponents(estimates, samples, seed, steps_averaged, unit, repeat, rows):
        yield _durations(estimates, exponent, unit)


def repeat_sigmas(
    estimates: Sequence[Estimate], unit: NDArray[np.int64], steps_averaged: int = STEPS_AVERAGED
) -> NDArray[np.float64]:
    """Relative spread of each task's own noise in the mean of several steps: float64 [n]. `unit`: int64 [n], that of each
    task."""
    sigmas: NDArray[np.float64] = np.array([estimate.repeat_sigma for estimate in estimates])[unit] / np.sqrt(steps_averaged)
    return sigmas


def _durations(
    estimates: Sequence[Estimate], exponent: NDArray[np.float64], unit: NDArray[np.int64] | None
) -> NDArray[np.float64]:
    medians = medians_s(estimates)
    durations: NDArray[np.float64] = (medians if unit is None else medians[unit]) * np.exp(exponent)
    return durations


def _exponents(
    estimates: Sequence[Estimate],
    samples: int,
    seed: int,
    steps_averaged: int,
    unit: NDArray[np.int64] | None,
    repeat: RepeatNoise | None,
    rows: int,
) -> Iterator[NDArray[np.float64]]:
    """log(duration / median), float64 [at most rows, n], for all samples."""
    rng = np.random.default_rng(seed)
    names = sorted({name for estimate in estimates for name, _ in estimate.parameters})
    column = {name: number for number, name in enumerate(names)}
    loadings = np.zeros((len(names), len(estimates)))
    for number, estimate in enumerate(estimates):
        for name, sigma in estimate.parameters:
            loadings[column[name], number] += sigma
    unit = np.arange(len(estimates)) if unit is None else unit
    shared = rng.standard_normal((samples, len(names))) @ loadings
    sigmas = repeat_sigmas(estimates, unit, steps_averaged)
    for begin in range(0, samples, rows):
        exponent = shared[begin : begin + rows][:, unit]
        if sigmas.any():
            draws = rng.standard_normal(exponent.shape)
            exponent += draws * sigmas if repeat is None else repeat(draws)
        yield exponent


def rank_noise(ranks: NDArray[np.int64], sigma: float, draws: int, seed: int) -> NDArray[np.float64]:
    """Draw how slow ranks are in single steps: one log-normal factor per draw and rank, with mean 1.

    Args:
        ranks: int64 [n], of each task; of ranks that share a core, the core; -1 (communication) keeps factor 1.
        sigma: relative spread of a rank's step against the others'.
        draws: rows. seed: of the draws.

    Returns:
        float64 [draws, n].
    """
    world = 1 + int(ranks.max(initial=-1))
    shocks = np.random.default_rng(seed).standard_normal((draws, world))
    by_rank = np.exp(sigma * shocks - sigma**2 / 2)
    steady = np.ones((draws, 1))
    factors: NDArray[np.float64] = np.concatenate([by_rank, steady], axis=1)[:, np.where(ranks < 0, world, ranks)]
    return factors
