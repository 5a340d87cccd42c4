"""Generated samples of any inputs and targets, for models that no bundled dataset fits.

Numbers are standard normal, integers and booleans uniform. A target follows from its own sample, so that a model can learn it:
the mean of a few numbers of the sample, chosen once, with noise. Class and binary targets are cut from that number.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from parsim.data.dataset import NamedDataset
from parsim.errors import DataError
from parsim.model.inputs import DEFAULT_DTYPE, IGNORED, IGNORED_SHARE, ModelInput

MOST_BYTES = 256 * 2**20
"""Of all rows that are kept; further samples repeat them."""
MIXED = 4
NOISE = 0.1


@dataclass(frozen=True, slots=True)
class TargetValues:
    """The targets of a sample. binary: numbers that are 0 or 1."""

    described: ModelInput
    binary: bool = False


def load_values(
    inputs: tuple[ModelInput, ...], targets: TargetValues | None, split: str, *, seed: int, samples: int
) -> NamedDataset:
    """`samples` samples, the same for the same (inputs, targets, split, seed).

    Raises:
        DataError: no samples, a seed below 0, or no input with a batch.
    """
    batched = [entry for entry in inputs if not entry.constant]
    if samples < 1 or seed < 0 or not batched:
        raise DataError(f"synthetic data needs samples >= 1, seed >= 0 and an input, got {samples}, {seed} and {len(batched)}")
    described = [*batched, *([] if targets is None else [targets.described])]
    row_bytes = sum(8 * math.prod(entry.shape) for entry in described)
    rows = max(1, min(samples, MOST_BYTES // row_bytes))
    rng = np.random.default_rng([seed, 0 if split == "train" else 1])
    arrays = {entry.name: _drawn(entry, (rows, *entry.shape), rng) for entry in batched}
    fixed = np.random.default_rng([seed, 2])
    constants = {entry.name: _drawn(entry, entry.shape, fixed) for entry in inputs if entry.constant}
    order = [*batched, *(entry for entry in inputs if entry.constant)]
    types = {f"input:{place}": entry.dtype for place, entry in enumerate(order) if entry.dtype != DEFAULT_DTYPE}
    values = None
    if targets is not None:
        features = np.concatenate([_features(entry, arrays[entry.name]) for entry in batched], axis=1)
        values = _targets(targets, features, np.random.default_rng([seed, 3]), rng)
        if targets.described.dtype != DEFAULT_DTYPE:
            types["target"] = targets.described.dtype
    return NamedDataset(
        name="synthetic",
        source=f"generated from seed {seed}: {rows} different samples, targets are means of {MIXED} numbers of a sample",
        split=split,
        samples=samples,
        inputs=arrays,
        targets=values,
        constants=constants,
        types=types,
    )


def _drawn(entry: ModelInput, shape: tuple[int, ...], rng: np.random.Generator) -> NDArray[Any]:
    if entry.dtype == "bool":
        return rng.integers(0, 2, shape).astype(bool)
    if entry.is_integer:
        if entry.high is None:
            raise DataError(
                f"input {entry.name} holds integers, and their range is unknown; give high, their exclusive upper bound"
            )
        drawn = rng.integers(entry.least_drawn, entry.high, shape)
        if entry.has_ignored:
            drawn[rng.random(shape) < IGNORED_SHARE] = IGNORED
        return drawn.astype(entry.dtype)
    if entry.dtype.startswith("complex"):
        return (rng.standard_normal(shape) + 1j * rng.standard_normal(shape)) / math.sqrt(2)
    return rng.standard_normal(shape, dtype=np.float32)


def _features(entry: ModelInput, array: NDArray[Any]) -> NDArray[np.float64]:
    """[rows, numbers] of about unit deviation."""
    flat = array.reshape(len(array), -1)
    if entry.is_integer and entry.high is not None:
        return (flat - (entry.low + entry.high - 1) / 2) / max(1.0, (entry.high - entry.low) / math.sqrt(12))
    return np.asarray(flat.real, dtype=np.float64)


def _targets(
    targets: TargetValues, features: NDArray[np.float64], fixed: np.random.Generator, rng: np.random.Generator
) -> NDArray[Any]:
    entry, rows = targets.described, len(features)
    size = math.prod(entry.shape)
    chosen = fixed.integers(0, features.shape[1], (MIXED, size))
    values = sum(features[:, places] for places in chosen) / math.sqrt(MIXED)
    values = (values + NOISE * rng.standard_normal((rows, size))).reshape(rows, *entry.shape)
    if targets.binary:
        return (values > 0).astype(np.float32)
    if entry.dtype == "bool":
        return np.asarray(values > 0)
    if not entry.is_integer:
        return values.astype(np.complex128 if entry.dtype.startswith("complex") else np.float32)
    if entry.high is None:
        raise DataError("targets hold integers, and their range is unknown; give target.high, their exclusive upper bound")
    share = 1 / (1 + np.exp(-1.702 * values))  # close to the normal distribution's own: classes are about equally frequent
    low = entry.least_drawn
    classes = low + (share * (entry.high - low)).astype(np.int64)
    return np.clip(classes, low, entry.high - 1).astype(entry.dtype)
