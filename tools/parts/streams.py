"""Kernels that only move memory: seconds = floor_s + bytes / (bandwidth_fraction * memory bandwidth)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from parsim.costs.compute.formula import Array
from tools.parts.products import Chip
from tools.parts.robust import Errors, Prior, RowTable, errors, fit, leave_sources_out, named, source_weights

if TYPE_CHECKING:
    import pandas as pd

NAMES = ("floor_s", "bandwidth_fraction")
BASE = Prior(NAMES, np.log([3e-6, 0.86]), np.array([0.4, 0.06]))

ARRAYS: Mapping[str, float] = {
    **dict.fromkeys(("add", "mul", "div", "pow"), 3.0),
    **dict.fromkeys(("addu", "mulu", "divu", "powu", "tanh", "relu", "gelu"), 2.0),
}
WIDTH = {"fp32": 4.0, "fp16": 2.0, "bf16": 2.0}
IMPLEMENTATIONS = ("pytorch 2.1", "vllm kernels")
STREAMS = ("stream_add", "stream_copy", "stream_triad", "stream_scale", "stream_mul")

LEAST_BYTES = 2.0**27
"""Smaller arrays stay in the cache between runs."""

ROWS: Mapping[str, tuple[str, ...]] = {
    "a100-sxm-40gb": ("A100-40GB (form not stated)",),
    "a100-sxm-80gb": ("A100-SXM4-80GB", "A100-80GB (form not stated)"),
    "h100-pcie": ("H100-PCIe-80GB",),
    "a100-pcie-80gb": ("A100-PCIe-80GB",),
}
"""Names in the table of GPUs that have other names there than in the table of products. gpu-benches' H200 is left out: its read
and write rates lie 30% apart."""


@dataclass(frozen=True, slots=True)
class StreamRows(RowTable):
    """Rows of one device, as arrays."""

    size_bytes: Array
    seconds: Array
    source: tuple[str, ...]


def read_streams(folder: Path) -> pd.DataFrame:
    """elementwise.csv: pointwise forwards, and streaming benchmarks as seconds per GiB."""
    import pandas as pd

    table = pd.read_csv(folder / "elementwise.csv")
    pointwise = table[
        table.op.isin(ARRAYS)
        & table.dtype.isin(WIDTH)
        & table.implementation.isin(IMPLEMENTATIONS)
        & (table.direction == "fwd")
    ]
    moved = pointwise.rows * pointwise.cols * pointwise.dtype.map(WIDTH) * pointwise.op.map(ARRAYS)
    stream = table[table.op.isin(STREAMS) & table.rows.isna() & (table.source != "gpubench-h200")]
    both = pd.concat([pointwise.assign(size_bytes=moved), stream.assign(size_bytes=2.0**30)])
    return both[both.size_bytes >= LEAST_BYTES]


def streams_of(table: pd.DataFrame, gpus: Sequence[str]) -> StreamRows:
    """The rows of a device."""
    own = table[table.gpu.isin(list(gpus))]
    return StreamRows(own.size_bytes.to_numpy(dtype=np.float64), own.seconds.to_numpy(dtype=np.float64), tuple(own.source))


def predicted(rows: StreamRows, chip: Chip, parameters: Mapping[str, float]) -> Array:
    """Seconds of the rows."""
    rate = chip.memory_bandwidth_bytes_per_s * parameters["bandwidth_fraction"]
    return parameters["floor_s"] + rows.size_bytes / rate


def judge(rows: StreamRows, chip: Chip, parameters: Mapping[str, float]) -> Errors:
    """Errors of one set of parameters."""
    return errors(predicted(rows, chip, parameters), rows.seconds)


def fit_streams(rows: StreamRows, chip: Chip, prior: Prior) -> Array:
    """Logarithms of `NAMES`."""
    if not len(rows):
        return prior.mean
    return fit(lambda parameters: predicted(rows, chip, parameters), rows.seconds, source_weights(rows.source), prior)


def errors_without_sources(rows: StreamRows, chip: Chip, prior: Prior) -> dict[str, Errors]:
    """Per source: its errors under the fit to all other sources (to none: the prior)."""
    return leave_sources_out(rows, lambda others, own: judge(own, chip, named(NAMES, fit_streams(others, chip, prior))))
