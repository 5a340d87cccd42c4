"""Matrix products of published tables, and fits of `parsim.costs.compute.formula` to them.

Rows of short bursts, whose clock is higher than that of a training step, and rows that ran long enough to be limited by power
are fitted together. A burst computes at `burst_gain` times the sustained rate while it is short:

    rate = sustained rate * (1 + (burst_gain - 1) / (1 + c / burst_s))        c: arithmetic at the sustained rate

Prices use the sustained rate. How much faster a burst is can be told where a GPU has large products of both kinds. Elsewhere
it is held at what the GPUs of its family show (`untold`): by itself, a fit to bursts alone takes them for sustained. The gain
falls with the limit of power: 1.27 and 1.39 (16 and 8 bits) on the B200 of 1,000 W, 1.22 and 1.17 on the GB200 of 1,200 W.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from parsim.costs.compute.formula import TILE_COEFFICIENTS, Array, tile_parts, tile_seconds
from tools.parts.robust import Errors, Prior, RowTable, errors, fit, leave_sources_out, named, source_weights

if TYPE_CHECKING:
    import pandas as pd

NAMES = (*TILE_COEFFICIENTS, "burst_gain", "burst_s")
BASE = Prior(
    NAMES,
    np.log([0.78, 5.0, 90.0, 0.4, 3e-6, 0.8, 1.0, 3.0, 1.08, 3e-3]),
    np.array([0.15, 1.0, 0.6, 0.6, 0.5, 0.15, 1.0, 0.3, 0.05, 1.0]),
)
"""Where nothing is known of any device: a third of these are round numbers, the rest what the first fits gave."""

HALF, FP8, FP4, FP32 = "half", "fp8", "nvfp4", "fp32"
OPERAND_BYTES = {HALF: 2.0, FP8: 1.0, FP4: 0.5625, FP32: 4.0}
"""nvfp4: four bits, and eight more for every 16 elements."""
RESULT_BYTES = {HALF: 2.0, FP8: 2.0, FP4: 2.0, FP32: 4.0}
DTYPES = {"bf16": HALF, "fp16": HALF, "fp8": FP8, "nvfp4": FP4, "fp32": FP32}
CAST_BYTES = {FP8: 3.0, FP4: 2.5625}
"""Of an element of the left operand where the row includes its cast: two bytes read, the operand's written (the forward of a
quantised layer is timed: ai-dynamo/aiconfigurator collector/trtllm/collect_gemm.py)."""

SUSTAINED = ("-pow", "azure-", "simumax-", "tracelens-", "deepbench", "neusight")
TRACES = "tracelens-"
"""In place, but of runs too short to reach a limit of power: on the H100 they are as fast as bursts (731 to 773 TFLOP/s)."""
LARGE_FLOP, LEAST_LARGE = 1e11, 5
"""Products of so many FLOP, so many of each kind, tell how much faster a burst is."""
LEFT_OUT = ("stas-mamf",)
"""The best shape of a sweep is not a sample of shapes."""
OLDER_FOUR_BITS = ("aic-gemm-b200-pow",)
"""Their products in 4 bits, by TensorRT-LLM 1.3.0rc15, are left out: 0.6 of the rate by rc20 on the same GPU, and of rc17 on
GB200 where they ran for as long. They drew two thirds of the limit of power, so it is the kernels that are slower."""

UNPOWERED_FLOP, POWERED_SHARE = 1e12, 0.9
"""A sustained row above so many FLOP that drew less than this share of the table's highest power was not limited by it: its
operands may have been zeros (README of the tables)."""

MOST_ROWS = 200
"""Of a source, drawn with a fixed seed."""


@dataclass(frozen=True, slots=True)
class Chip:
    """What the model needs of a device: multiprocessors, peak of the precision, memory bandwidth."""

    multiprocessors: float
    peak_flop_per_s: float
    memory_bandwidth_bytes_per_s: float

    def is_within(self, other: Chip) -> bool:
        """Whether it has no more of peak and bandwidth."""
        return (
            self.peak_flop_per_s <= other.peak_flop_per_s
            and self.memory_bandwidth_bytes_per_s <= other.memory_bandwidth_bytes_per_s
        )

    def coefficients(self) -> dict[str, float]:
        return {
            "multiprocessors": self.multiprocessors,
            "peak_flop_per_s": self.peak_flop_per_s,
            "memory_bandwidth_bytes_per_s": self.memory_bandwidth_bytes_per_s,
        }


@dataclass(frozen=True, slots=True)
class Products(RowTable):
    """Rows of one device and precision, as arrays."""

    rows: Array
    columns: Array
    depth: Array
    problems: Array
    size_bytes: Array
    seconds: Array
    sustained: Array
    source: tuple[str, ...]

    @property
    def flop(self) -> Array:
        return 2.0 * self.problems * self.rows * self.columns * self.depth


def read_products(folder: Path) -> pd.DataFrame:
    """gemm.csv without the rows that cannot be used."""
    import pandas as pd

    table = pd.read_csv(folder / "gemm.csv")
    table = table[table.dtype.isin(DTYPES) & ~table.source.isin(LEFT_OUT) & (table.layout != "NT+acc")]
    table = table[(table.dtype != FP4) | ~table.source.isin(OLDER_FOUR_BITS)]
    flop = 2.0 * table.batch * table.m * table.n * table.k
    highest = table.groupby("source").power_w.transform("max")
    unpowered = (flop > UNPOWERED_FLOP) & (table.power_w < POWERED_SHARE * highest)
    return table[(flop >= 1e8) & ~unpowered].assign(kind=table.dtype.map(DTYPES))


def products_of(table: pd.DataFrame, gpus: Sequence[str], kind: str, seed: int = 0) -> Products:
    """The rows of a device (by its names in the table) in one precision; at most `MOST_ROWS` per source."""
    chosen = table[table.gpu.isin(list(gpus)) & (table.kind == kind)]
    pieces = [piece.sample(min(len(piece), MOST_ROWS), random_state=seed) for _, piece in chosen.groupby("source", sort=True)]
    if not pieces:
        empty: Array = np.zeros(0)
        return Products(empty, empty, empty, empty, empty, empty, empty, ())
    import pandas as pd

    found = pd.concat(pieces)
    m, n, k, b = (found[name].to_numpy(dtype=np.float64) for name in ("m", "n", "k", "batch"))
    size = b * (OPERAND_BYTES[kind] * (m * k + k * n) + RESULT_BYTES[kind] * m * n)
    casts = found.source.str.startswith("aic").to_numpy()
    size = size + np.where(casts, CAST_BYTES.get(kind, 0.0) * b * m * k, 0.0)
    sources = tuple(found.source)
    sustained = np.array([any(mark in source for mark in SUSTAINED) for source in sources], dtype=np.float64)
    return Products(m, n, k, b, size, found.seconds.to_numpy(dtype=np.float64), sustained, sources)


def predicted(rows: Products, chip: Chip, parameters: Mapping[str, float]) -> Array:
    """Seconds of the rows as they were measured: bursts at the burst's rate."""
    coefficients = {**parameters, **chip.coefficients(), "quantisation": min(1.0, parameters["quantisation"])}
    arrays = (rows.rows, rows.columns, rows.depth, rows.problems, rows.size_bytes)
    compute, memory, partial_sums = tile_parts(*arrays, coefficients)
    gain = max(parameters["burst_gain"], 1.0) - 1.0
    faster = 1.0 + np.where(rows.sustained > 0, 0.0, gain / (1.0 + compute / parameters["burst_s"]))
    p = parameters["sharpness"]
    larger = np.maximum(compute / faster, memory)
    smaller = np.minimum(compute / faster, memory)
    seconds = larger * (1.0 + (smaller / larger) ** p) ** (1.0 / p) + partial_sums
    answer: Array = parameters["floor_s"] + seconds.min(axis=0)
    return answer


def fit_products(rows: Products, chip: Chip, prior: Prior) -> Array:
    """Logarithms of `NAMES` for one device and precision; the prior's mean without rows."""
    if not len(rows):
        return prior.mean
    return fit(lambda parameters: predicted(rows, chip, parameters), rows.seconds, source_weights(rows.source), prior)


def errors_without_sources(rows: Products, chip: Chip, prior: Prior, least: int = 15) -> dict[str, Errors]:
    """Per source of at least `least` rows: its errors under the fit to all other sources (to none: the prior)."""
    return leave_sources_out(rows, lambda others, own: judge(own, chip, named(NAMES, fit_products(others, chip, prior))), least)


def leave_shapes_out(rows: Products, chip: Chip, prior: Prior, parts: int = 3) -> Errors:
    """Errors for depths that the fit has not seen, over all sources."""
    depths = np.unique(rows.depth)
    told: list[Array] = []
    true: list[Array] = []
    for part in range(parts):
        unseen = np.isin(rows.depth, depths[part::parts])
        theta = fit_products(rows.where(~unseen), chip, prior)
        own = rows.where(unseen)
        told.append(predicted(own, chip, named(NAMES, theta)))
        true.append(own.seconds)
    return errors(np.concatenate(told), np.concatenate(true))


def untold(rows: Products) -> tuple[int, ...]:
    """The numbers of what these rows cannot tell: the gain of a burst and its length, without large products of both kinds."""
    large = rows.flop > LARGE_FLOP
    limited = (rows.sustained > 0) & np.array([not source.startswith(TRACES) for source in rows.source], dtype=bool)
    both = min(int((large & limited).sum()), int((large & (rows.sustained == 0)).sum())) >= LEAST_LARGE
    return () if both else (NAMES.index("burst_gain"), NAMES.index("burst_s"))


def large_s(chip: Chip, parameters: Mapping[str, float]) -> float:
    """Seconds of a product of two matrices of 8,192 rows and columns, of which memory takes little."""
    side = np.array([8192.0])
    seconds = tile_seconds(side, side, side, np.ones(1), np.zeros(1), {**parameters, **chip.coefficients()})
    return float(seconds[0])


def judge(rows: Products, chip: Chip, parameters: Mapping[str, float]) -> Errors:
    """Errors of one set of parameters."""
    return errors(predicted(rows, chip, parameters), rows.seconds)
