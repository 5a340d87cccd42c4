"""The time of a matrix product from how a GPU runs it: output tiles on multiprocessors, wave after wave.

A product of `problems` independent (m x k) by (k x n) is cut into output tiles of a x b, and each tile's depth into s pieces
(split-K). With S multiprocessors and the rate R = utilisation * peak_flop_per_s,

    tiles = problems * ceil(m / a) * ceil(n / b) * s           x = tiles / S
    waves = max(1, x + quantisation * (ceil(x) - x))           a last wave that is not full takes a part of a full one
    tile  = 2 (k / s + depth_overhead) * (a b + operand_overhead (a + b)) * S / R
    c     = waves * tile                                       arithmetic
    m     = bytes / (bandwidth_fraction * memory bandwidth)    every operand and the result once
    r     = split_cost * s * 8 bytes * outputs / bandwidth     partial sums of split-K; 0 for s = 1
    t     = floor_s + min over (a, b, s) of  (c^p + m^p)^(1/p) + r

`depth_overhead` is what a tile costs beside its depth (prologue, epilogue), in units of depth; `operand_overhead` what its
edges cost, so that small tiles are slower per output. The library is taken to choose the best tile. Each term grows with each
size, so t does; a last wave that is not full shows as steps.

`utilisation` is that of a GPU which computes without a pause, at the clock that its power limit leaves. A short run after a
pause is faster: the fit knows that (`burst_gain`), the price does not use it.

Leaves out: the cache (operands are counted once), operands whose rows are not aligned, and the library's wrong choices.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]

TILES: Array = np.array(
    [(256, 128), (128, 256), (128, 128), (256, 64), (64, 256), (128, 64), (64, 128), (64, 64)], dtype=np.float64
)
SPLITS: Array = np.array([1, 2, 4, 8, 16], dtype=np.float64)
PARTIAL_SUM_BYTES = 8.0
"""Of an output and a piece of depth: four bytes written and read."""

COEFFICIENTS = (
    "utilisation",
    "operand_overhead",
    "depth_overhead",
    "quantisation",
    "floor_s",
    "bandwidth_fraction",
    "split_cost",
    "sharpness",
)


def tile_seconds(
    rows: Array,
    columns: Array,
    depth: Array,
    problems: Array,
    size_bytes: Array,
    coefficients: Mapping[str, float],
) -> Array:
    """Seconds of products by the formula of this module, for several shapes at once.

    Args:
        rows, columns, depth, problems: m, n, k and the number of independent products; float64 [shapes].
        size_bytes: operands and result, float64 [shapes].
        coefficients: `COEFFICIENTS`, and `multiprocessors`, `peak_flop_per_s`, `memory_bandwidth_bytes_per_s`.

    Returns:
        Seconds, float64 [shapes]. Leaves out the cache and unaligned operands.
    """
    compute, memory, partial_sums = tile_parts(rows, columns, depth, problems, size_bytes, coefficients)
    p = coefficients["sharpness"]
    larger = np.maximum(compute, memory)
    seconds = larger * (1.0 + (np.minimum(compute, memory) / larger) ** p) ** (1.0 / p) + partial_sums
    best: Array = coefficients["floor_s"] + seconds.min(axis=0)
    return best


def tile_parts(
    rows: Array, columns: Array, depth: Array, problems: Array, size_bytes: Array, coefficients: Mapping[str, float]
) -> tuple[Array, Array, Array]:
    """c (of the best tile), m and r of the formula, each float64 [splits, shapes] or broadcast to it.

    m and r do not depend on the tile, so the tile with the least c is the best for every split.

    Args:
        rows, columns, depth, problems, size_bytes, coefficients: as for `tile_seconds`.
    """
    a, b, s = TILES[:, 0, None, None], TILES[:, 1, None, None], SPLITS[None, :, None]
    tiles = problems * np.ceil(rows / a) * np.ceil(columns / b) * s
    bandwidth = coefficients["memory_bandwidth_bytes_per_s"]
    x = tiles / coefficients["multiprocessors"]
    waves = np.maximum(1.0, x + coefficients["quantisation"] * (np.ceil(x) - x))
    rate = coefficients["peak_flop_per_s"] * coefficients["utilisation"] / coefficients["multiprocessors"]
    tile = 2.0 * (depth / s + coefficients["depth_overhead"]) * (a * b + coefficients["operand_overhead"] * (a + b)) / rate
    memory = size_bytes / (bandwidth * coefficients["bandwidth_fraction"])
    outputs = problems * rows * columns
    pieces = SPLITS[:, None]
    partial_sums = np.where(pieces > 1, coefficients["split_cost"] * pieces * PARTIAL_SUM_BYTES * outputs / bandwidth, 0.0)
    return (waves * tile).min(axis=0), memory, partial_sums
