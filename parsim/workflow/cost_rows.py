"""Prices of a collective, or of every component of a model: rows as `parsim cost` prints them."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from parsim.errors import ConfigError

if TYPE_CHECKING:
    from parsim.costs.costs import Costs
    from parsim.costs.estimate import Estimate
    from parsim.hardware.cluster import Cluster

QUANTILE_95 = 1.6448536269514722
"""Of the standard normal distribution: medians times exp(+-q sigma) are the 5% and 95% quantiles."""


def collective_row(cluster: Cluster, operation: str, size_bytes: int, group: tuple[int, ...]) -> dict[str, Any]:
    from parsim.costs.adjustments import adjusted, price_context
    from parsim.costs.communication.collectives import busbw_bytes_per_s, estimate_collective, estimate_send_recv
    from parsim.work import Collective, SendRecv

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
    from parsim.model.optimizers import update_steps

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
    from parsim.work import Compute, Phase

    rows = []
    for phase in (Phase.FORWARD, Phase.BACKWARD):
        work = Compute(component=component, phase=phase, samples=samples, rule=rule, ways=ways)
        shard = {"rule": rule, "ways": ways} if rule else {}
        rows.append(
            {"component": component, "phase": phase.value, "samples": samples, **shard, **_priced(costs.estimate(work, 0))}
        )
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
