"""Collectives of published logs, and the lines per protocol that explain them (`parsim.costs.communication.algorithms`).

seconds = min over protocols of  base_s + hops * hop_s + traffic / (efficiency * rate) * S

One rate and one set of protocols serve all_reduce, all_gather and reduce_scatter over any number of devices of a switch.
An all_reduce may also run on the switch itself (NVLS). The library's own choice is not known for these generations: it is taken
to be the fastest. Only switches are fitted; other links take their protocols from here.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from parsim.costs.communication.algorithms import nvls_traffic
from parsim.costs.communication.closed_forms import ring_steps, ring_traffic
from parsim.costs.compute.formula import Array
from tools.parts.robust import Errors, Prior, RowTable, errors, fit, leave_sources_out, named, source_weights

if TYPE_CHECKING:
    import pandas as pd

OPERATIONS = ("all_reduce", "all_gather", "reduce_scatter")
RING_NAMES = (
    "rate",
    "ll_base",
    "ll_hop",
    "ll_efficiency",
    "ll128_base",
    "ll128_hop",
    "ll128_efficiency",
    "simple_base",
    "simple_hop",
)
NVLS_NAMES = ("nvls_base", "nvls_efficiency", "nvls_slow_base", "nvls_slow_efficiency")

LEAST_BYTES: Mapping[str, float] = {"azure-": 2**20, "vidur-": 2**16}
"""One process that drives all GPUs, or the time of the host's launch, hides what smaller messages take."""


@dataclass(frozen=True, slots=True)
class Timings(RowTable):
    """Rows of one link, as arrays."""

    operation: tuple[str, ...]
    ranks: NDArray[np.int64]
    size_bytes: Array
    seconds: Array
    source: tuple[str, ...]


def read_collectives(folder: Path) -> pd.DataFrame:
    """collectives_more.csv."""
    import pandas as pd

    return pd.read_csv(folder / "collectives_more.csv")


def timings_of(table: pd.DataFrame, sources: Sequence[str]) -> Timings:
    """The rows inside one node of some sources."""
    chosen = table[(table.nodes == 1) & table.source.isin(list(sources)) & table.collective.isin(OPERATIONS)]
    for mark, least in LEAST_BYTES.items():
        chosen = chosen[~(chosen.source.str.startswith(mark) & (chosen.size_bytes < least))]
    return Timings(
        tuple(chosen.collective),
        chosen.gpus.to_numpy(dtype=np.int64),
        chosen.size_bytes.to_numpy(dtype=np.float64),
        chosen.seconds.to_numpy(dtype=np.float64),
        tuple(chosen.source),
    )


def prior_of(rate: float, *, nvls: bool) -> Prior:
    """What is expected of a link whose devices move `rate` bytes/s by their datasheet."""
    mean = [0.78 * rate, 4e-6, 9e-7, 0.25, 6e-6, 1.2e-6, 0.7, 1.5e-5, 2e-6]
    sigma = [0.15, 0.7, 0.7, 0.7, 0.7, 0.7, 0.25, 0.7, 0.7]
    if nvls:
        mean += [2.5e-5, 0.9, 1.8e-5, 0.5]
        sigma += [0.5, 0.15, 0.5, 0.4]
    names = (*RING_NAMES, *NVLS_NAMES) if nvls else RING_NAMES
    return Prior(names, np.log(mean), np.array(sigma))


def predicted(rows: Timings, parameters: Mapping[str, float]) -> Array:
    """Seconds of the rows."""
    n = rows.ranks
    steps = np.array([ring_steps(name, int(size)) for name, size in zip(rows.operation, n, strict=True)])
    traffic = np.array([ring_traffic(name, int(size)) for name, size in zip(rows.operation, n, strict=True)])
    rate = parameters["rate"]
    lines = [
        parameters[f"{name}_base"]
        + steps * parameters[f"{name}_hop"]
        + traffic * rows.size_bytes / (rate * parameters.get(f"{name}_efficiency", 1.0))
        for name in ("ll", "ll128", "simple")
    ]
    if "nvls_base" in parameters:
        reduces = np.array([name == "all_reduce" for name in rows.operation])
        share = np.array([nvls_traffic(int(size)) for size in n])
        for name in ("nvls", "nvls_slow"):
            line = parameters[f"{name}_base"] + share * rows.size_bytes / (rate * parameters[f"{name}_efficiency"])
            lines.append(np.where(reduces, line, np.inf))
    least: Array = np.min(np.stack(lines), axis=0)
    return least


def fit_collectives(rows: Timings, prior: Prior) -> Array:
    """Logarithms of the parameters."""
    if not len(rows):
        return prior.mean
    return fit(lambda parameters: predicted(rows, parameters), rows.seconds, source_weights(rows.source), prior)


def errors_without_sources(rows: Timings, prior: Prior, least: int = 6) -> dict[str, Errors]:
    """Per source of at least `least` rows: its errors under the fit to all other sources (to none: the prior)."""
    return leave_sources_out(
        rows,
        lambda others, own: errors(predicted(own, named(prior.names, fit_collectives(others, prior))), own.seconds),
        least,
    )
