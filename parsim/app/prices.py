"""Prices of a collective, or of every component of a model: the rows and the table of `parsim cost`."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from parsim.app.config import Granularity
from parsim.app.functions import AskedCluster, load_cluster
from parsim.app.sections import MOST_SAMPLES
from parsim.costs.adjustments import adjusted, price_context
from parsim.costs.communication.closed_forms import busbw_bytes_per_s
from parsim.costs.communication.collectives import estimate_collective, estimate_send_recv
from parsim.costs.costs import Costs
from parsim.costs.estimate import Estimate
from parsim.errors import ConfigError
from parsim.hardware.cluster import Cluster
from parsim.model.formats import Numerics, model_in, recorded_weights
from parsim.model.load import load_model
from parsim.model.model import Model
from parsim.model.optimizers import update_steps
from parsim.model.spec import ModelSpec
from parsim.report.tables import cost_table, frame, table_html, to_text
from parsim.work import Collective, Compute, Phase, SendRecv

if TYPE_CHECKING:
    import pandas as pd


QUANTILE_95 = 1.6448536269514722
"""Of the standard normal distribution: medians times exp(+-q sigma) are the 5% and 95% quantiles."""


def collective_row(cluster: Cluster, operation: str, size_bytes: int, group: tuple[int, ...]) -> dict[str, Any]:
    work: Collective | SendRecv
    if size_bytes < 0:
        raise ConfigError(f"--size-bytes {size_bytes}: must be >= 0")
    if operation == "send_recv":
        if len(group) != 2:
            raise ConfigError(f"--ranks {','.join(map(str, group))}: send_recv takes two ranks, e.g. --ranks 0,1")
        work = SendRecv(source=group[0], destination=group[1], size_bytes=size_bytes)
        estimate = estimate_send_recv(work, cluster)
    else:
        work = Collective(operation=operation, group=group, size_bytes=size_bytes)
        estimate = estimate_collective(work, cluster)
    algorithm = estimate.detail.split(" ")[0].rstrip(",")
    estimate = adjusted(estimate, work, group[0], price_context(cluster))
    return {
        "operation": operation,
        "cluster": cluster.name,
        "size_bytes": size_bytes,
        "ranks": list(group),
        **_priced(estimate),
        "busbw_bytes_per_s": busbw_bytes_per_s(operation, size_bytes, len(group), estimate.median_s),
        "algorithm": algorithm,
    }


def component_rows(costs: Costs, samples: int, ways: int | None) -> list[dict[str, Any]]:
    """Forward and backward of every component, whole and as one of `ways` shards, on the first device; then the optimizer."""
    if samples < 1:
        raise ConfigError(f"--batch {samples}: must be >= 1")
    model = costs.model
    rows: list[dict[str, Any]] = []
    for component in model.components:
        rows += _phase_rows(costs, component.name, samples)
        for sharding in component.shardings:
            if ways is not None and ways > 1 and sharding.allows(ways):
                rows += _phase_rows(costs, component.name, samples, sharding.rule, ways)
    if ways is not None and not any("ways" in row for row in rows):
        limits = sorted({sharding.limit for component in model.components for sharding in component.shardings})
        divide = f"it must be at least 2 and divide one of {', '.join(map(str, limits))}"
        raise ConfigError(
            f"--ways {ways}: no component of {model.name} at granularity {model.granularity} can be cut into that many shards: "
            f"{divide if limits else 'none has a sharding rule'}; choose others, another --granularity, or leave --ways out"
        )
    for step in update_steps(model.trainable_parameters):
        whose = f"parameters of {step.update_group}" if step.update_group else "all parameters"
        rows.append({"component": whose, "phase": "optimizer", "samples": samples, **_priced(costs.estimate(step, 0))})
    return rows


def _phase_rows(costs: Costs, component: str, samples: int, rule: str = "", ways: int = 1) -> list[dict[str, Any]]:
    rows = []
    for phase in (Phase.FORWARD, Phase.BACKWARD):
        work = Compute(component=component, phase=phase, samples=samples, rule=rule, ways=ways)
        row = {"component": component, "phase": phase.value, "samples": samples}
        rows.append(row | ({"rule": rule, "ways": ways} if rule else {}) | _priced(costs.estimate(work, 0)))
    return rows


def _priced(estimate: Estimate) -> dict[str, Any]:
    """`seconds` with the 90% interval of one repetition, and where the number comes from."""
    sigmas: dict[str, float] = {}
    for name, sigma in estimate.parameters:
        sigmas[name] = sigmas.get(name, 0.0) + sigma
    spread = math.sqrt(sum(sigma**2 for sigma in sigmas.values()) + estimate.repeat_sigma**2)
    return {
        "seconds": {
            "median": estimate.median_s,
            "p05": estimate.median_s * math.exp(-QUANTILE_95 * spread),
            "p95": estimate.median_s * math.exp(QUANTILE_95 * spread),
        },
        "source": estimate.source,
        "detail": estimate.detail,
        "extrapolated": estimate.extrapolated,
        "terms": estimate.term_rows(),
    }


LINES_SHOWN = 15


@dataclass(frozen=True, slots=True, kw_only=True)
class CostTable:
    """Attributes: title: what was priced where. rows: one price each, as in `document`, the JSON of `parsim cost`."""

    title: str
    rows: tuple[Mapping[str, Any], ...]
    document: Mapping[str, Any]

    def table(self) -> pd.DataFrame:
        """One row per price.

        Columns: what is priced (operation, size_bytes, ranks; or component, phase, samples, rule, ways); seconds, and the 90%
        interval of one repetition, seconds_p05 and seconds_p95; busbw_bytes_per_s and algorithm of a collective; source,
        detail, extrapolated (outside the measured range).
        """
        rows = []
        for row in self.rows:
            plain = {key: value for key, value in row.items() if key not in ("seconds", "terms")}
            interval = row["seconds"]
            rows.append(plain | {"seconds": interval["median"], "seconds_p05": interval["p05"], "seconds_p95": interval["p95"]})
        last = ("seconds", "seconds_p05", "seconds_p95")
        names = list(dict.fromkeys(key for row in rows for key in row if key not in last))
        names = [name for name in names if name not in ("source", "detail", "extrapolated")]
        return frame(rows, [*names, *last, "source", "detail", "extrapolated"])

    def explain(self) -> pd.DataFrame:
        """How every price is made, one row per term in the order in which they apply.

        Columns: price (number of the row of `table()`), term, operation, value, unit, running_total_s (seconds after the term;
        the last is the price), origin, detail.
        """
        rows = [{"price": number, **term} for number, row in enumerate(self.rows) for term in row["terms"]]
        return frame(rows, list(dict.fromkeys(key for row in rows for key in row)))

    def to_dict(self) -> dict[str, Any]:
        return dict(self.document)

    def __str__(self) -> str:
        return to_text(cost_table(self.rows, title=self.title)).rstrip()

    def __repr__(self) -> str:
        lines = str(self).splitlines()
        if len(lines) > LINES_SHOWN:
            more = len(lines) - LINES_SHOWN + 1
            lines[LINES_SHOWN - 1 :] = [f"... {more} more lines: print it, or table()"]
        return "\n".join(lines)

    def _repr_html_(self) -> str:
        return table_html(cost_table(self.rows, title=self.title))


def cost(
    cluster: AskedCluster,
    *,
    collective: str | None = None,
    size_bytes: int | None = None,
    ranks: Sequence[int] | None = None,
    nodes: int = 1,
    network: str | None = None,
    model: str | Model | None = None,
    batch: int | None = None,
    args: Mapping[str, Any] | None = None,
    input_shape: Sequence[int] | None = None,
    granularity: Granularity = "block",
    ways: int | None = None,
    precision: str = "fp32",
    optimizer: str = "sgd_momentum",
) -> CostTable:
    """Price a collective, or every component of a model, and name the source of each price.

    Args:
        cluster: a shipped profile by name, the path of one, a Cluster or a Calibration; nodes and network as for `plan`.
        collective: "all_reduce", "all_gather", "reduce_scatter", ..., or "send_recv". size_bytes: S, the whole array, as
            nccl-tests counts it. ranks: of the group; default: all.
        model: price every component instead, at `batch` local samples, with args, input_shape, granularity, precision and
            optimizer. ways: also price one of that many tensor-parallel shards of every component that has them.

    Raises:
        ParsimError: ConfigError for arguments that do not go together; ModelError, ProfileError, CostError.

    >>> price = cost("dgx1-v100-32gb", collective="all_reduce", size_bytes=100_000_000).to_dict()
    >>> price["algorithm"], 0.001 < price["seconds"]["median"] < 0.01
    ('ring', True)
    """
    if (collective is None) == (model is None):
        raise ConfigError("give either collective with size_bytes, or model with batch")
    if not isinstance(cluster, Cluster):
        cluster = load_cluster(cluster, nodes=nodes, network=network)
    elif nodes != 1 or network is not None:
        raise ConfigError("nodes and network are those of the Cluster that was given; drop them, or give a profile")
    title = f"Costs on {cluster.name}"
    if collective is not None:
        if size_bytes is None:
            raise ConfigError(f"collective = {collective!r} needs size_bytes, the size of the whole array")
        group = tuple(range(cluster.size)) if ranks is None else tuple(ranks)
        document = collective_row(cluster, collective, size_bytes, group)
        return CostTable(title=title, rows=(document,), document=document)
    if batch is None:
        raise ConfigError("a model's costs need batch, the local samples that every component sees")
    if batch > MOST_SAMPLES:
        raise ConfigError(f"batch = {batch}: must be <= {MOST_SAMPLES}; give the samples that one device sees in a step")
    if isinstance(model, Model):
        priced = model
    else:
        shape = None if input_shape is None else tuple(input_shape)
        spec = ModelSpec(name=str(model), args=tuple(sorted((args or {}).items())), input_shape=shape)
        priced = load_model(spec, granularity=granularity, weights=recorded_weights(precision))
    numerics = Numerics(precision=precision, optimizer=optimizer)
    costs = Costs(model=model_in(priced, precision), cluster=cluster, numerics=numerics)
    rows = tuple(component_rows(costs, batch, ways))
    name = priced.name if isinstance(model, Model) else model
    document = {"model": name, "granularity": granularity, "samples": batch, "precision": precision, "rows": list(rows)}
    return CostTable(title=title, rows=rows, document=document)
