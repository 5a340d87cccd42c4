"""Which points are swept: a grid, a Sobol sample, or a Saltelli design, from which Sobol indices are computed."""

from __future__ import annotations

import itertools
import math
import warnings
from collections.abc import Sequence
from typing import Any

from parsim.errors import ConfigError, MissingDependencyError
from parsim.workflow.sweeps.axes import Axis

MOST_POINTS = 10**6
TUNE = "Sobol indices need SALib; install parsim[tune]"

SweptSettings = dict[str, Any]
"""Key of a run file (or of SCALES) -> value."""


def grid(axes: Sequence[Axis]) -> list[SweptSettings]:
    """Every combination, the last axis fastest.

    Raises:
        ConfigError: an axis of two ends alone, which only samples can use; too many points.
    """
    for axis in axes:
        if axis.ends is not None:
            low, high = axis.ends
            raise ConfigError(
                f"--over {axis.key}={low:g}:{high:g} has no step: add one (:x2, :+8), or take samples with --sample N"
            )
    _check_count(math.prod(len(axis.values) for axis in axes))
    keys = [axis.key for axis in axes]
    return [dict(zip(keys, values, strict=True)) for values in itertools.product(*(axis.values for axis in axes))]


def sobol_sample(axes: Sequence[Axis], count: int, seed: int) -> list[SweptSettings]:
    """So many points of a scrambled Sobol sequence (scipy), which fills the space evenly.

    Args:
        axes: lists are drawn from evenly. count: best a power of two. seed: of the scrambling.

    Raises:
        ConfigError: no points, or too many.
    """
    from scipy.stats import qmc

    if count < 1:
        raise ConfigError(f"--sample {count}: give at least one point")
    _check_count(count)
    sampler = qmc.Sobol(d=len(axes), scramble=True, rng=seed)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # balance holds for powers of two; any other count is the user's choice
        shares = sampler.random(count)
    return [_at(axes, row) for row in shares.tolist()]


def saltelli(axes: Sequence[Axis], base: int, seed: int) -> list[SweptSettings]:
    """base * (axes + 2) points, from which `parsim.workflow.sweeps.sensitivity` computes indices.

    Args:
        axes: at least two. base: a power of two. seed: of the scrambling.

    Raises:
        ConfigError: one axis, or a base that is not a power of two. MissingDependencyError: without SALib.
    """
    if len(axes) < 2:
        raise ConfigError(f"--sensitivity compares fields, and only {axes[0].key} is swept; give a second --over")
    if base < 2 or base & (base - 1):
        near = 2 ** max(1, round(math.log2(max(base, 2))))
        raise ConfigError(f"--sensitivity {base}: the base of a Saltelli design is a power of two; use {near}")
    _check_count(base * (len(axes) + 2))
    try:
        from SALib.sample import sobol
    except ImportError as error:
        raise MissingDependencyError(TUNE) from error
    shares = sobol.sample(problem_of_axes(axes), base, calc_second_order=False, seed=seed)
    return [_at(axes, row) for row in shares.tolist()]


def problem_of_axes(axes: Sequence[Axis]) -> dict[str, Any]:
    """The axes as SALib takes them: shares from 0 to 1."""
    return {"num_vars": len(axes), "names": [axis.key for axis in axes], "bounds": [[0.0, 1.0]] * len(axes)}


def _at(axes: Sequence[Axis], shares: Sequence[float]) -> SweptSettings:
    return {axis.key: axis.at(share) for axis, share in zip(axes, shares, strict=True)}


def _check_count(count: int) -> None:
    if count > MOST_POINTS:
        raise ConfigError(f"{count:,} points are more than the {MOST_POINTS:,} of one sweep; use fewer values, or --sample N")
