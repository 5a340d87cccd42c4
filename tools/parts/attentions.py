"""Fused attention of published tables, and fits of `parsim.costs.compute.formula` to them.

A table is of one library: "flash" (FlashAttention 2, what torch's scaled_dot_product_attention calls), "fa3", "cudnn" or
"trtllm" (which also writes a cache of keys). A device's default is the one that torch takes there, as far as it was measured.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from parsim.costs.compute.formula import ATTENTION_COEFFICIENTS, BACKWARD_PASSES, Array, attention_seconds
from tools.parts.products import Chip
from tools.parts.robust import Errors, Prior, RowTable, errors, fit, leave_sources_out, named, source_weights

if TYPE_CHECKING:
    import pandas as pd

NAMES = ATTENTION_COEFFICIENTS
BASE = Prior(NAMES, np.log([0.65, 60.0, 60.0, 0.4, 6e-6, 0.8]), np.array([0.4, 0.8, 0.8, 0.6, 0.6, 0.15]))

MOST_ROWS = 200
FORWARD_ARRAYS, BACKWARD_ARRAYS = 1.0, 2.0
"""The backward reads queries, keys, values, outputs and a gradient, and writes three: twice what the forward moves."""

LIBRARIES: Mapping[str, tuple[str, ...]] = {
    "flash": (
        "FA2",
        "pytorch flash",
        "pyt_flash_attention",
        "flash_attention",
        "sglang flash_attention",
        "scaled_dot_product_flash_attention",
    ),
    "fa3": ("FA3", "sglang fa3"),
    "cudnn": ("cudnn", "cudnn 1.19.0", "cudnn 1.21.1", "cudnn bf16", "cudnn_fe", "pyt_cudnn"),
    "engine": ("TransformerEngine, qkv one buffer", "TransformerEngine, qkv separate"),
    "trtllm": ("trtllm torch_flow",),
}
LIBRARY_OF = {name: library for library, names in LIBRARIES.items() for name in names}


@dataclass(frozen=True, slots=True)
class Attentions(RowTable):
    """Rows of one device, direction and set of libraries, as arrays."""

    queries: Array
    depth: Array
    value_depth: Array
    problems: Array
    causal: Array
    size_bytes: Array
    seconds: Array
    source: tuple[str, ...]


def read_attentions(folder: Path) -> pd.DataFrame:
    """attention.csv without windows, in 16 bits, with the library of each row."""
    import pandas as pd

    table = pd.read_csv(folder / "attention.csv")
    table = table[table.dtype.isin(("bf16", "fp16")) & table.window.isna() & table.direction.isin(("fwd", "bwd"))]
    return table.assign(library=table.implementation.map(LIBRARY_OF))


def attentions_of(
    table: pd.DataFrame, gpus: Sequence[str], direction: str, libraries: Sequence[str], seed: int = 0
) -> Attentions:
    """The rows of a device (by its names in the table); at most `MOST_ROWS` per source."""
    import pandas as pd

    chosen = table[
        table.gpu.isin(list(gpus)) & (table.direction == direction) & table.library.isin(list(libraries)) & (table.seq >= 256)
    ]
    pieces = [piece.sample(min(len(piece), MOST_ROWS), random_state=seed) for _, piece in chosen.groupby("source", sort=True)]
    if not pieces:
        empty: Array = np.zeros(0)
        return Attentions(empty, empty, empty, empty, empty, empty, empty, ())
    found = pd.concat(pieces)
    b, h, g, d, e, q = (
        found[name].to_numpy(dtype=np.float64) for name in ("batch", "heads", "kv_heads", "head_dim", "head_dim_v", "seq")
    )
    arrays = FORWARD_ARRAYS if direction == "fwd" else BACKWARD_ARRAYS
    size = arrays * 2.0 * b * q * (h + g) * (d + e)
    causal, seconds = found.causal.to_numpy(dtype=np.float64), found.seconds.to_numpy(dtype=np.float64)
    return Attentions(q, d, e, b * h, causal, size, seconds, tuple(found.source))


def predicted(rows: Attentions, chip: Chip, parameters: Mapping[str, float], *, backward: bool) -> Array:
    """Seconds of the rows."""
    coefficients = {**parameters, **chip.coefficients(), "quantisation": min(1.0, parameters["quantisation"])}
    return attention_seconds(
        rows.queries,
        rows.queries,
        rows.depth,
        rows.value_depth,
        rows.problems,
        rows.causal,
        rows.size_bytes,
        coefficients,
        backward=backward,
    )


def fit_attentions(rows: Attentions, chip: Chip, prior: Prior, *, backward: bool) -> Array:
    """Logarithms of `NAMES`; the prior's mean without rows."""
    if not len(rows):
        return prior.mean
    return fit(
        lambda parameters: predicted(rows, chip, parameters, backward=backward),
        rows.seconds,
        source_weights(rows.source),
        prior,
    )


def errors_without_sources(rows: Attentions, chip: Chip, prior: Prior, *, backward: bool, least: int = 4) -> dict[str, Errors]:
    """Per source of at least `least` rows: its errors under the fit to all other sources (to none: the prior)."""

    def errors_of(others: Attentions, own: Attentions) -> Errors:
        told = named(NAMES, fit_attentions(others, chip, prior, backward=backward))
        return judge(own, chip, told, backward=backward)

    return leave_sources_out(rows, errors_of, least)


def judge(rows: Attentions, chip: Chip, parameters: Mapping[str, float], *, backward: bool) -> Errors:
    """Errors of one set of parameters."""
    return errors(predicted(rows, chip, parameters, backward=backward), rows.seconds)


def flop_of(rows: Attentions, *, backward: bool) -> Array:
    """FLOP that the rows compute."""
    factor = BACKWARD_PASSES if backward else 1.0
    return factor * 2.0 * rows.problems * rows.queries**2 * (rows.depth + rows.value_depth) * (1.0 - 0.5 * rows.causal)
