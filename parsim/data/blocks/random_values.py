"""Random numbers by position: element i of an array of random numbers depends on the seed and i alone.

So blocks are drawn where they lie, and neither the grid nor the number of processes changes a value.

Source: SplitMix64 of Steele, Lea and Flood, "Fast splittable pseudorandom number generators" (2014): output i of its stream is
mix(state + (i + 1) * gamma), which can be computed without the outputs before.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from parsim.arrays import Floats

GAMMA = np.uint64(0x9E3779B97F4A7C15)


def splitmix64(state: int, positions: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Outputs `positions` (counted from 0) of SplitMix64 begun at `state`; uint64, of the shape of positions."""
    with np.errstate(over="ignore"):
        z = np.uint64(state) + (positions + np.uint64(1)) * GAMMA
        z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        return np.asarray(z ^ (z >> np.uint64(31)))


def uniform_at(seed: int, positions: NDArray[np.uint64]) -> Floats:
    """Uniform in [0, 1), multiples of 2^-53."""
    return np.asarray((splitmix64(_state(seed), positions) >> np.uint64(11)) * 2.0**-53, dtype=np.float64)


def normal_at(seed: int, positions: NDArray[np.uint64]) -> Floats:
    """Standard normal, by Box and Muller from outputs 2i and 2i + 1."""
    first = uniform_at(seed, positions * np.uint64(2))
    second = uniform_at(seed, positions * np.uint64(2) + np.uint64(1))
    return np.asarray(np.sqrt(-2.0 * np.log1p(-first)) * np.cos(2.0 * np.pi * second), dtype=np.float64)


def _state(seed: int) -> int:
    """Seeds that are near one another begin at places of the stream that are not."""
    return int(np.random.SeedSequence(seed).generate_state(1, np.uint64)[0])
