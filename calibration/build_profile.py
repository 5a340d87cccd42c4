"""From raw measurements to a profile: medians, spreads, drift, fits. Pure: no clock, no files, no torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from calibration.fit_collectives import fit_regimes
from calibration.fit_composition import fit_compositions, measured_parts
from calibration.fit_surfaces import fit_surfaces
from calibration.request import CalibrationRequest
from parsim.costs.surfaces import SurfaceModel
from parsim.graph.taskgraph import parse_work
from parsim.hardware.profile import (
    CollectivePoint,
    Communication,
    ComponentPoint,
    Compute,
    DeviceEntry,
    DeviceTypeEntry,
    HostOverhead,
    Noise,
    OperatorPoint,
    OptimizerPoint,
    Overlap,
    Profile,
    Provenance,
    Sourced,
    SourceEntry,
)
from parsim.model.model import Model
from parsim.model.narrow import narrow
from parsim.units import KIB
from parsim.work import Compute as ComputeWork
from parsim.work import OptimizerStep

FloatArray = NDArray[np.float64]
MIN_DRIFT_SIGMA = 0.08
"""A calibration of a minute cannot see how the machine drifts from one minute to the next. Assumed until a history of
validations says better: on a 2-core virtual machine, means of 60 steps of one and the same program, launched again some ten
seconds later, lay between 34.5 and 42.5 ms and between 47.8 and 53.7 ms (2026-11-21), relative deviations of about 8%."""

SOURCES: Mapping[str, tuple[str, str]] = {
    "steps": (
        "measurement",
        "whole training steps of the executor over the one-rank plan, rounds interleaved over models, batches and numbers of "
        "active ranks; medians over repeats and ranks, spread of one repeat after the drift of its step is taken out",
    ),
    "shards": (
        "measurement",
        "one shard of a component, forward and backward, beside the whole component in the same rounds; its share of the "
        "whole, median over rounds and ranks, times what the whole took inside training steps",
    ),
    "operators": (
        "measurement",
        "single calls of operators, weights and saved arrays out of the caches, with every rank busy, rounds interleaved over "
        "all shapes; medians over repeats and ranks",
    ),
    "operator_fit": (
        "derived",
        "sums of costs that grow with the sizes, through the points of `operators`; sigma is cross-validated",
    ),
    "composition": (
        "derived",
        "what the components of `steps` take beside the sum of their operators; sigma is that of models left out of the fit",
    ),
    "optimizer_steps": (
        "measurement",
        "optimizer step and zeroing of the flat gradients, over halves and the whole of a model, right after training steps; "
        "scaled by what the whole took inside training steps over what it took here",
    ),
    "collectives": (
        "measurement",
        "blocking calls on the executor's communication stream after a computation, all_reduce three in a row; from the last "
        "rank's readiness to the last rank's end",
    ),
    "collective_fit": ("derived", "piecewise alpha-beta through the points of `collectives`"),
    "overlap": ("measurement", "training steps beside all_reduces, over the same alone; median over models and sizes"),
    "drift": (
        "derived",
        "drift: spread of the rounds' total times, over all cases, but no less than an assumed 8%, since a short calibration "
        "cannot see slow drifts; ranks: spread of one rank's step against the others' in the same step",
    ),
    "host": ("measurement", "gaps between the tasks of a step, and what else a step takes; medians"),
    "matmul": ("measurement", "square matrix product with every rank busy, best of a few"),
    "copy": ("measurement", "copy between two 64 MiB arrays with every rank busy, bytes read plus written, best of a few"),
    "memory": ("measurement", "physical memory (or the control group's limit) divided by the ranks of this machine"),
    "memory_gpu": ("measurement", "total memory as the driver reports it"),
    "context": ("measurement", "memory in use after importing torch and joining the process group, before the first model"),
}


def build_profile(
    raw: Mapping[str, Any], request: CalibrationRequest, models: Sequence[Model], *, created: str, command: str, name: str
) -> Profile:
    """The profile of the machine `raw` was measured on (see `calibration.__main__` for its keys)."""
    facts = raw["ranks"][0]["device"]
    kind, device_type = request.device, "cpu-core" if request.device == "cpu" else facts["name"]
    environment = raw["environment"]
    memory_source = "memory" if kind == "cpu" else "memory_gpu"
    entry = DeviceTypeEntry(
        kind="cpu" if kind == "cpu" else "cuda",
        memory_bytes=Sourced(value=facts["memory_bytes"], source=memory_source),
        memory_bandwidth_bytes_per_s=Sourced(value=_over_ranks(raw, "copy_bytes_per_s"), source="copy"),
        context_bytes=Sourced(value=_over_ranks(raw, "context_bytes"), source="context"),
        peak_flop_per_s={request.precision: Sourced(value=_over_ranks(raw, "peak_flop_per_s"), source="matmul")},
    )
    points = collective_points(raw["collectives"])
    components = component_points(raw, request, models, device_type)
    operators = operator_points(raw, request, device_type)
    surfaces = fit_surfaces(operators, source="operator_fit")
    measured = measured_parts(components, models, SurfaceModel(tuple(surfaces), tuple(operators))) if surfaces else []
    return Profile(
        schema_version=1,
        name=name,
        description=f"{environment['processor']}, {environment['cores']} cores, measured with {request.nproc} ranks",
        provenance=Provenance(
            created=created,
            command=command,
            machine=f"{environment['processor']}, {environment['cores']} cores, {environment['system']}",
            versions=environment["versions"],
        ),
        sources={key: SourceEntry(kind=kind, text=text) for key, (kind, text) in SOURCES.items()},  # type: ignore[arg-type]
        device_types={device_type: entry},
        devices=[DeviceEntry(index=rank, type=device_type) for rank in range(request.nproc)],
        communication=Communication(
            backend="gloo" if kind == "cpu" else "nccl",
            uses_cores=kind == "cpu",
            points=points,
            fits=fit_regimes(points, source="collective_fit") if points else [],
        ),
        compute=Compute(
            components=[*components, *shard_points(raw, models, components)],
            optimizers=optimizer_points(raw, request, device_type),
            operator_points=operators,
            operator_surfaces=surfaces,
            compositions=fit_compositions(measured, device_type, request.precision, source="composition"),
        ),
        overlap=overlap_factors(raw["overlap"]),
        noise=Noise(drift_sigma=drift_sigma(raw), rank_sigma=rank_sigma(raw), source="drift"),
        host=host_overhead(raw),
    )


def _over_ranks(raw: Mapping[str, Any], key: str) -> float:
    return float(np.median([rank["device"][key] for rank in raw["ranks"]]))


# --- statistics -------------------------------------------------------------------------------------------------------


def robust_sigma(values: Sequence[float] | FloatArray) -> float:
    """Relative standard deviation by the median absolute deviation (1.4826 MAD / median); 0 for fewer than 3 values."""
    array = np.asarray(values, dtype=np.float64)
    centre = float(np.median(array))
    if len(array) < 3 or centre <= 0:
        return 0.0
    return float(1.4826 * np.median(np.abs(array - centre)) / centre)


# --- components -------------------------------------------------------------------------------------------------------


def _tables(raw: Mapping[str, Any]) -> dict[tuple[int, int, int], FloatArray]:
    """Seconds [repeat, task] of every (model, samples, ranks active), over all rounds and ranks."""
    rows: dict[tuple[int, int, int], list[list[float]]] = {}
    for rank in raw["ranks"]:
        for sweep in rank["sweeps"]:
            rows.setdefault((sweep["model"], sweep["samples"], sweep["ranks_active"]), []).append(sweep["seconds"])
    return {key: np.array(table, dtype=np.float64) for key, table in rows.items()}


def typical_step(table: FloatArray) -> tuple[FloatArray, FloatArray]:
    """Typical seconds of each task, and its relative spread in a single repeat.

    Args:
        table: seconds [repeat, task] of one step program.

    Each task's median is scaled by a common factor, so that the tasks add up to the *mean* step, tails included: the mean of
    many steps is what a prediction is for, and a slow step is slower than a fast one is fast. The spread is taken after
    dividing out how slow its repeat was as a whole, which is drift, not noise of the task.
    """
    medians = np.median(table, axis=0)
    totals = table.sum(axis=1)
    scale = float(totals.mean() / medians.sum())
    steady = table * (np.median(totals) / totals)[:, None]
    spread = np.array([robust_sigma(column) for column in steady.T])
    return medians * scale, spread


def component_points(
    raw: Mapping[str, Any], request: CalibrationRequest, models: Sequence[Model], device_type: str
) -> list[ComponentPoint]:
    """One point per component instance, phase, samples and number of active ranks."""
    works = {(case["model"], case["samples"]): [parse_work(text) for text in case["tasks"]] for case in raw["cases"]}
    points = []
    for (number, samples, active), table in sorted(_tables(raw).items()):
        model = models[number]
        seconds, spread = typical_step(table)
        for place, work in enumerate(works[number, samples]):
            if isinstance(work, ComputeWork) and seconds[place] > 0:
                points.append(
                    ComponentPoint(
                        fingerprint=model.component(work.component).fingerprint,
                        model=model.name,
                        component=work.component,
                        phase=work.phase.value,  # type: ignore[arg-type]
                        samples=samples,
                        device_type=device_type,
                        precision=request.precision,
                        ranks_active=active,
                        seconds=float(seconds[place]),
                        spread=float(spread[place]),
                        repeats=len(table),
                        source="steps",
                    )
                )
    return points


def shard_points(raw: Mapping[str, Any], models: Sequence[Model], components: Sequence[ComponentPoint]) -> list[ComponentPoint]:
    """One point per shard, phase and samples: the part of the whole's time it took beside it, of the whole's in `components`.

    So a shard and its whole are compared in one state of the machine, and the whole is as long as in a training step.
    """
    wholes = {(p.fingerprint, str(p.phase), p.samples, p.ranks_active): p for p in components}
    shares: dict[tuple[int, int, int, str, str, int, str], list[float]] = {}
    for rank in raw["ranks"]:
        for entry in rank["shards"]:
            for component, rule, ways, phase, seconds, whole_s in entry["parts"]:
                place = (entry["model"], entry["samples"], entry["ranks_active"], component, rule, ways, phase)
                shares.setdefault(place, []).append(seconds / whole_s)
    points = []
    for (number, samples, active, name, rule, ways, phase), values in sorted(shares.items()):
        component = models[number].component(name)
        base = wholes[component.fingerprint, phase, samples, active]
        points.append(
            base.model_copy(
                update={
                    "fingerprint": narrow(component, rule, ways).fingerprint,
                    "model": models[number].name,
                    "component": f"{name} shard:{rule}/{ways}",
                    "seconds": base.seconds * float(np.median(values)),
                    "spread": max(base.spread, robust_sigma(values)),
                    "repeats": len(values),
                    "source": "shards",
                }
            )
        )
    return points


def operator_points(raw: Mapping[str, Any], request: CalibrationRequest, device_type: str) -> list[OperatorPoint]:
    """One point per measured launch: the median over calls and ranks."""
    by_rank = [rank.get("operators", []) for rank in raw["ranks"]]
    points = []
    for entries in zip(*by_rank, strict=True):
        first = entries[0]
        seconds = [value for entry in entries for value in entry["seconds"]]
        points.append(
            OperatorPoint(
                kind=first["kind"],
                function=first["function"],
                phase=first["phase"],
                shape=first["sizes"],
                samples=1,
                device_type=device_type,
                precision=request.precision,
                ranks_active=request.nproc,
                seconds=float(np.median(seconds)),
                spread=robust_sigma(seconds),
                repeats=len(seconds),
                source="operators",
            )
        )
    return points


def optimizer_points(raw: Mapping[str, Any], request: CalibrationRequest, device_type: str) -> list[OptimizerPoint]:
    """Every optimizer over the whole and over parts of each model, as long as it takes inside a training step.

    The request's first optimizer ran inside the measured steps, over whole models. All else was timed apart, with other
    arrays in the caches, and is scaled by what the same whole step took inside over what it took apart.
    """
    inside = _optimizer_inside(raw)
    apart: dict[tuple[int, int], dict[tuple[str, int, int], list[float]]] = {}
    for rank in raw["ranks"]:
        for step in rank["optimizers"]:
            place, what = (step["model"], step["ranks_active"]), (step["optimizer"], step["elements"], step["tensors"])
            apart.setdefault(place, {}).setdefault(what, []).append(step["seconds"])
    found: dict[tuple[str, int, int, int], tuple[list[float], str]] = {}
    for (number, active), (elements, tensors, seconds) in inside.items():
        whole = (request.optimizers[0], elements, tensors)
        separate = apart.get((number, active), {})
        scale = float(np.median(seconds) / np.median(separate[whole])) if whole in separate else 1.0
        for what, values in separate.items():
            found.setdefault((*what, active), ([], "optimizer_steps"))[0].extend(scale * value for value in values)
        found[(*whole, active)] = (seconds, "steps")
    return [
        OptimizerPoint(
            optimizer=optimizer,
            elements=elements,
            tensors=tensors,
            device_type=device_type,
            ranks_active=active,
            seconds=float(np.median(seconds)),
            spread=robust_sigma(seconds),
            repeats=len(seconds),
            source=source,
        )
        for (optimizer, elements, tensors, active), (seconds, source) in sorted(found.items())
    ]


def _optimizer_inside(raw: Mapping[str, Any]) -> dict[tuple[int, int], tuple[int, int, list[float]]]:
    """By (model, ranks active): elements, tensors, and the seconds of the optimizer's task in all measured steps."""
    works = {(case["model"], case["samples"]): [parse_work(text) for text in case["tasks"]] for case in raw["cases"]}
    found: dict[tuple[int, int], tuple[int, int, list[float]]] = {}
    for (number, samples, active), table in _tables(raw).items():
        for place, work in enumerate(works[number, samples]):
            if isinstance(work, OptimizerStep):
                entry = found.setdefault((number, active), (work.elements, work.tensors, []))
                entry[2].extend(table[:, place].tolist())
    return found


# --- the machine ------------------------------------------------------------------------------------------------------


def drift_sigma(raw: Mapping[str, Any]) -> float:
    """Relative spread of a round: the mean over cases of (its median step in the round / its median step over all rounds).

    No less than MIN_DRIFT_SIGMA, which stands for the drifts slower than the calibration itself.
    """
    totals: dict[tuple[int, int, int], dict[int, list[float]]] = {}
    for rank in raw["ranks"]:
        for sweep in rank["sweeps"]:
            case = (sweep["model"], sweep["samples"], sweep["ranks_active"])
            totals.setdefault(case, {}).setdefault(sweep["round"], []).append(sum(sweep["seconds"]))
    relative: dict[int, list[float]] = {}
    for rounds in totals.values():
        medians = {number: float(np.median(values)) for number, values in rounds.items()}
        usual = float(np.median(list(medians.values())))
        for number, value in medians.items():
            relative.setdefault(number, []).append(value / usual)
    means = [float(np.mean(values)) for values in relative.values()]
    spread = float(np.std(means, ddof=1)) if len(means) > 1 else 0.0
    return max(MIN_DRIFT_SIGMA, robust_sigma(means), spread)


def rank_sigma(raw: Mapping[str, Any]) -> float:
    """Relative spread of a rank's step against the other ranks' in the same step; 0 with one rank.

    Standard deviation over ranks of the logarithm of the step, pooled over all steps that ranks made side by side. Not a
    robust one: the rare slow step is what the others wait for. Leaves out which core is the slower one for long.
    """
    steps: dict[tuple[int, int, int, int], dict[int, list[float]]] = {}
    for number, rank in enumerate(raw["ranks"]):
        for sweep in rank["sweeps"]:
            if sweep["ranks_active"] > 1:
                place = (sweep["model"], sweep["samples"], sweep["ranks_active"], sweep["round"])
                steps.setdefault(place, {}).setdefault(number, []).append(sum(sweep["seconds"]))
    deviations: list[float] = []
    for by_rank in steps.values():
        logs = np.log(np.array(list(zip(*by_rank.values(), strict=False))))
        if logs.ndim == 2 and logs.shape[1] > 1:
            deviations.extend(np.var(logs, axis=1, ddof=1).tolist())
    return float(np.sqrt(np.mean(deviations))) if deviations else 0.0


def other_share(raw: Mapping[str, Any]) -> float:
    """Share of the measured steps' wall time in which the rank did not have its core; 0 on an idle machine."""
    sweeps = [sweep for rank in raw["ranks"] for sweep in rank["sweeps"]]
    return max(0.0, 1.0 - float(sum(sweep["cpu_s"] for sweep in sweeps)) / float(sum(sweep["wall_s"] for sweep in sweeps)))


def host_overhead(raw: Mapping[str, Any]) -> HostOverhead:
    sweeps = [sweep for rank in raw["ranks"] for sweep in rank["sweeps"]]
    return HostOverhead(
        task_s=float(np.median([sweep["gap_s"] for sweep in sweeps])),
        step_s=float(np.median([sweep["rest_s"] for sweep in sweeps])),
        source="host",
    )


def overlap_factors(entries: Sequence[Mapping[str, Any]]) -> Overlap | None:
    """Medians over models, sizes and ranks, at least 1; None if nothing ran side by side (one rank)."""
    computing = [factor for entry in entries for factor in entry["computation"] if factor is not None]
    communicating = [entry["communication"] for entry in entries if entry["communication"] is not None]
    if not computing and not communicating:
        return None
    return Overlap(
        compute_factor=max(1.0, float(np.median(computing))) if computing else 1.0,
        communication_factor=max(1.0, float(np.median(communicating))) if communicating else 1.0,
        source="overlap",
    )


def collective_points(entries: Sequence[Mapping[str, Any]]) -> list[CollectivePoint]:
    """Median over repeats and places in the chain, by operation, group and size; sorted."""
    points = []
    for entry in sorted(entries, key=lambda entry: (entry["operation"], entry["group"], entry["size_bytes"])):
        seconds = [value for repeat in entry["seconds"] for value in repeat]
        points.append(
            CollectivePoint(
                operation=entry["operation"],
                group=entry["group"],
                size_bytes=entry["size_bytes"],
                seconds=max(float(np.median(seconds)), 1e-9),
                spread=robust_sigma(seconds),
                repeats=len(seconds),
                source="collectives",
            )
        )
    return points


def all_reduce_sizes(models: Sequence[Model], sizes_bytes: Sequence[int], element_bytes: int) -> tuple[int, ...]:
    """The sizes asked for, and the gradients of each model as one bucket where they lie within or a little above them."""
    whole = {model.parameter_count * element_bytes for model in models}
    return tuple(sorted({*sizes_bytes, *(size for size in whole if KIB <= size <= 2 * max(sizes_bytes))}))
