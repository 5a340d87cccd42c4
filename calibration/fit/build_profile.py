"""From raw measurements to a profile: medians, spreads, drift, fits. Pure: no clock, no files, no torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from calibration.fit.composition import SLOW_BYTES_S, fit_compositions, measured_parts
from calibration.fit.drift import Drift, computation_drift, noise_of, robust_sigma
from calibration.fit.reject_outliers import consistent_collectives, consistent_components, screened
from calibration.fit.surfaces import consistent_operators, fit_surfaces
from calibration.measure.communication_points import collective_points, overlap_factors
from calibration.rounds.environment import core_count, doubts, provenance_environment
from calibration.rounds.pace import HOST_PACE, at_one_pace, usual_pace
from calibration.rounds.request import CalibrationRequest, RawPoints, entries_of
from parsim.costs.communication.measured import fit_linear, fit_regimes
from parsim.costs.compute.surfaces import SurfaceModel
from parsim.hardware.devices import DEVICE_KINDS, Allocator, Spread
from parsim.hardware.profile import (
    Communication,
    DeviceEntry,
    DeviceTypeEntry,
    HostOverhead,
    Profile,
    Provenance,
    Sourced,
    SourceEntry,
)
from parsim.hardware.records import ComponentPoint, ComputeRecords, OperatorPoint, OptimizerPoint
from parsim.model.component import narrow
from parsim.model.model import Model
from parsim.numeric import Floats
from parsim.program.taskgraph import parse_work
from parsim.units import MIB
from parsim.work import Compute, LoadBatch, OptimizerStep, Work

LIBRARY_MARGIN_BYTES = 16 * MIB
"""By which models that were not calibrated may lie beyond those that were. Assumed."""

SOURCES: Mapping[str, tuple[str, str]] = {
    "steps": (
        "measurement",
        "whole training steps of the executor over the one-rank plan, rounds interleaved over models, batches and numbers of "
        "active ranks; divided by the pace of the core beside them (as all that follows is), and by the common factor of each "
        "round; medians over repeats and ranks, spread of one repeat after the drift of its step is taken out",
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
        "optimizer step and zeroing of the flat gradients, over parts and the whole of a model, right after training steps; "
        "plus, in proportion to the elements, what the whole took longer inside training steps than here",
    ),
    "collectives": (
        "measurement",
        "blocking calls on the executor's communication stream between two computations; from the last rank's readiness to "
        "where the last rank computes on; means after the common factor of each round is divided out, the longest 2% cut",
    ),
    "collective_fit": ("derived", "piecewise alpha-beta through the points of `collectives`"),
    "overlap": (
        "measurement",
        "by operation and size: training steps beside collectives over the same alone, medians over models, rounds and ranks; "
        "collectives beside training steps over those between computations, means; the pair without a size: medians of "
        "all_reduce over its sizes",
    ),
    "drift": (
        "derived",
        "measured drift: spread of the common factors of the rounds, less what noise makes of them; drift: that, but no less "
        "than an assumed 8%, since a calibration of minutes cannot see slower drifts; ranks: spread of one rank's step against "
        "the others' in the same step; the pace (seconds of a small step that never changes): mean over the calibration, and "
        "the spread of ranks that is left at one pace",
    ),
    "host": (
        "measurement",
        "gaps between the tasks of a step, and what else a step takes, medians; loading a batch: a line through the medians of "
        "all cases over their bytes, and of further parts the median of loads right after one another; what computation costs "
        "more after a wait and where all ranks share the cores: medians of processor seconds",
    ),
    "matmul": ("measurement", "square matrix product with every rank busy, best of a few"),
    "copy": (
        "measurement",
        "copy between two arrays with every rank busy, bytes read plus written, best of a few: of 64 MiB, of a GPU 2 GiB, or a "
        "tenth of its memory if that is less",
    ),
    "memory": ("measurement", "physical memory (or the control group's limit) divided by the ranks of this machine"),
    "memory_gpu": ("measurement", "total memory as the driver reports it"),
    "allocator": (
        "measurement",
        "peak of the process (of the GPU) in training steps, less its live tensors and the context: the least, median and most "
        "of the smallest and the largest batch of every model (the least without what reading samples loads), 16 MiB wider; "
        "the share lost between blocks is assumed",
    ),
    "context": ("measurement", "memory in use after importing torch and joining the process group, before the first model"),
}


def build_profile(given: RawPoints) -> Profile:
    """The profile of the machine the points were measured on; what contradicts itself is left out, with a warning.

    Raises: ProfileError where too little is left.
    """
    request, models = given.request, given.models
    seen, warnings = screened(given.raw, models)
    usual, host = usual_pace(seen), usual_pace(seen, HOST_PACE)
    raw = at_one_pace(seen, usual, host, on_gpu=request.device == "cuda")
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
        allocator=allocator_entry([entry for _, entry in entries_of(raw, "allocator")], DEVICE_KINDS[kind].allocator),
    )
    drift = computation_drift(raw)
    points, odd_collectives = consistent_collectives(collective_points(raw))
    fits = fit_regimes(points, source="collective_fit") if points else []
    components, odd_components = consistent_components(component_points(raw, request, models, device_type, drift))
    on_gpu = kind == "cuda"
    operators, odd_operators = consistent_operators(operator_points(raw, request, device_type), on_gpu=on_gpu)
    surfaces = fit_surfaces(operators, source="operator_fit", on_gpu=on_gpu)
    known = SurfaceModel(tuple(surfaces), tuple(operators))
    gpu_precision = request.precision if on_gpu else ""
    measured = measured_parts(components, models, known, gpu_precision=gpu_precision) if surfaces else []
    byte_s = 1 / entry.memory_bandwidth_bytes_per_s.value if on_gpu else SLOW_BYTES_S
    return Profile(
        schema_version=1,
        name=given.name,
        description=f"{environment['processor']}, {environment['cores']} cores, measured with {request.nproc} ranks",
        provenance=Provenance(
            created=given.created,
            command=given.command,
            machine=f"{environment['processor']}, {environment['cores']} cores, {environment['system']}",
            versions=environment["versions"],
            environment=provenance_environment(seen),
            warnings=[*warnings, *odd_components, *odd_operators, *odd_collectives, *doubts(seen, request)],
        ),
        sources={key: SourceEntry(kind=kind, text=text) for key, (kind, text) in SOURCES.items()},  # type: ignore[arg-type]
        device_types={device_type: entry},
        devices=device_entries([rank.get("pinning", {}) for rank in raw["ranks"]], device_type),
        communication=Communication(
            backend="gloo" if kind == "cpu" else "nccl",
            uses_cores=DEVICE_KINDS[kind].on_cores,
            points=points,
            fits=fits,
        ),
        compute=ComputeRecords(
            components=[*components, *shard_points(raw, models, components)],
            optimizers=optimizer_points(raw, request, device_type, drift),
            operator_points=operators,
            operator_surfaces=surfaces,
            compositions=fit_compositions(measured, device_type, request.precision, source="composition", byte_s=byte_s),
        ),
        overlap=overlap_factors([entry for _, entry in entries_of(raw, "overlap")], fits),
        noise=noise_of(seen, usual, raw),
        host=host_overhead(raw, drift),
    )


def device_entries(pinnings: Sequence[Mapping[str, Any]], device_type: str) -> list[DeviceEntry]:
    """One device per rank; where ranks share the cores they are pinned to, each names its own."""
    shared = core_count(pinnings) < len(pinnings)
    return [
        DeviceEntry(index=rank, type=device_type, core=pinning.get("core") if shared else None)
        for rank, pinning in enumerate(pinnings)
    ]


def allocator_entry(seen: Sequence[Mapping[str, Any]], assumed: Allocator) -> Allocator | None:
    """Memory beyond tensors: the lost share is assumed, because small models do not show it; the rest is measured. From
    the least of them, had their samples come without libraries that read them, to the most, and somewhat beyond both, as
    other models may. None where none was seen."""
    if not seen:
        return None
    lost = assumed.lost_share
    libraries = [entry["beside_bytes"] - lost.median * entry["dynamic_bytes"] for entry in seen]
    unread = [library - entry["reading_bytes"] for library, entry in zip(libraries, seen, strict=True)]
    low, high = min(unread) - LIBRARY_MARGIN_BYTES, max(libraries) + LIBRARY_MARGIN_BYTES
    library = Spread(max(0.0, low), max(0.0, float(np.median(libraries))), max(0.0, high))
    return Allocator(library_bytes=library, lost_share=lost, source="allocator")


def _over_ranks(raw: Mapping[str, Any], key: str) -> float:
    return float(np.median([rank["device"][key] for rank in raw["ranks"]]))


# --- components -------------------------------------------------------------------------------------------------------


def _works(raw: Mapping[str, Any]) -> dict[tuple[int, int], list[Work]]:
    """By (model, samples): what each task of its graph does."""
    return {(case["model"], case["samples"]): [parse_work(text) for text in case["tasks"]] for case in raw["cases"]}


def _tables(raw: Mapping[str, Any], drift: Drift) -> dict[tuple[int, int, int], Floats]:
    """Seconds [repeat, task] of every (model, samples, ranks active), over all rounds and ranks, less the drift. Optimizers
    took turns, and their task is left out (0): `optimizer_points` tells them apart."""
    rows: dict[tuple[int, int, int], list[list[float]]] = {}
    updates = _optimizer_tasks(raw)
    for _, sweep in entries_of(raw, "sweeps"):
        left_out = updates[sweep["model"], sweep["samples"]]
        seconds = [
            0.0 if place in left_out else drift.steady(value, sweep["round"]) for place, value in enumerate(sweep["seconds"])
        ]
        rows.setdefault((sweep["model"], sweep["samples"], sweep["ranks_active"]), []).append(seconds)
    return {key: np.array(table, dtype=np.float64) for key, table in rows.items()}


def typical_step(table: Floats) -> tuple[Floats, Floats]:
    """Typical seconds of each task of a step program [repeat, task], and its relative spread in a single repeat.

    Each task's median is scaled by a common factor, so the tasks add up to the *mean* step, tails included. A prediction is for
    the mean of many steps, and slow steps deviate more than fast ones. The spread is taken after dividing out how slow its
    repeat was as a whole, which is drift, not noise of the task.
    """
    medians = np.median(table, axis=0)
    totals = table.sum(axis=1)
    scale = float(totals.mean() / medians.sum())
    steady = table * (np.median(totals) / totals)[:, None]
    spread = np.array([robust_sigma(column) for column in steady.T])
    return medians * scale, spread


def queueing_s(raw: Mapping[str, Any]) -> dict[tuple[int, int, int], Floats]:
    """Seconds [task] that the host takes to queue each task of every (model, samples, ranks active) on a GPU, medians; nothing
    where they were not measured apart."""
    rows: dict[tuple[int, int, int], list[list[float]]] = {}
    for _, sweep in entries_of(raw, "sweeps"):
        if "issue_s" in sweep:
            rows.setdefault((sweep["model"], sweep["samples"], sweep["ranks_active"]), []).append(sweep["issue_s"])
    return {key: np.median(np.array(table, dtype=np.float64), axis=0) for key, table in rows.items()}


def component_points(
    raw: Mapping[str, Any], request: CalibrationRequest, models: Sequence[Model], device_type: str, drift: Drift
) -> list[ComponentPoint]:
    """One point per component instance, phase, samples and number of active ranks."""
    works, queueing = _works(raw), queueing_s(raw)
    points = []
    for (number, samples, active), table in sorted(_tables(raw, drift).items()):
        model, issue_s = models[number], queueing.get((number, samples, active))
        seconds, spread = typical_step(table)
        for place, work in enumerate(works[number, samples]):
            if isinstance(work, Compute) and seconds[place] > 0:
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
                        issue_s=None if issue_s is None else float(issue_s[place]),
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
    for _, entry in entries_of(raw, "shards"):
        for component, rule, ways, phase, seconds, whole_s in entry["parts"]:
            place = (entry["model"], entry["samples"], entry["ranks_active"], component, rule, ways, phase)
            shares.setdefault(place, []).append(seconds / whole_s)
    points = []
    for (number, samples, active, name, rule, ways, phase), values in sorted(shares.items()):
        component = models[number].component(name)
        base = wholes.get((component.fingerprint, phase, samples, active))
        if base is None:
            continue
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
    """One point per measured launch: the median over rounds, calls and ranks."""
    found: dict[tuple[str, str, str, tuple[tuple[str, int], ...]], list[float]] = {}
    for _, entry in entries_of(raw, "operators"):
        key = (entry["kind"], entry["function"], entry["phase"], tuple(entry["sizes"].items()))
        found.setdefault(key, []).extend(entry["seconds"])
    return [
        OperatorPoint(
            kind=kind,
            function=function,
            phase=phase,  # type: ignore[arg-type]
            shape=dict(sizes),
            samples=1,
            device_type=device_type,
            precision=request.precision,
            ranks_active=request.nproc,
            seconds=float(np.median(seconds)),
            spread=robust_sigma(seconds),
            repeats=len(seconds),
            source="operators",
        )
        for (kind, function, phase, sizes), seconds in found.items()
    ]


def optimizer_points(
    raw: Mapping[str, Any], request: CalibrationRequest, device_type: str, drift: Drift
) -> list[OptimizerPoint]:
    """Every optimizer over the whole and over parts of each model, as long as it takes inside a training step.

    The optimizers took turns inside the measured steps, over whole models. Parts were timed apart, with other arrays in the
    caches: what the whole took longer inside than apart is added, in proportion to the elements; where it took less, parts
    take as much less. An optimizer that had no turn is treated as the first that had.
    """
    inside, issues = _optimizer_inside(raw, drift), _optimizer_issues(raw)
    apart: dict[tuple[int, int], dict[tuple[str, int, int], list[float]]] = {}
    for _, step in entries_of(raw, "optimizers"):
        place, what = (step["model"], step["ranks_active"]), (step["optimizer"], step["elements"], step["tensors"])
        apart.setdefault(place, {}).setdefault(what, []).append(drift.steady(step["seconds"], step["round"]))
    found: dict[tuple[str, int, int, int], tuple[list[float], str]] = {}
    for place in dict.fromkeys((number, active) for number, active, _ in inside):
        separate = apart.get(place, {})
        turns = {name: inside[*place, name] for name in request.optimizers if (*place, name) in inside}
        for what, values in separate.items():
            name = what[0] if what[0] in turns else next(iter(turns))
            elements, tensors, seconds = turns[name]
            alone_s = float(np.median(separate.get((name, elements, tensors), seconds)))
            longer_s, ratio = float(np.median(seconds)) - alone_s, min(1.0, float(np.median(seconds)) / alone_s)
            more_s = max(0.0, longer_s) * what[1] / elements
            own = found.setdefault((*what, place[1]), ([], "optimizer_steps"))[0]
            own.extend(ratio * value + more_s for value in values)
        for name, (elements, tensors, seconds) in turns.items():
            found[name, elements, tensors, place[1]] = (seconds, "steps")
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
            issue_s=issues.get((optimizer, elements, tensors, active)),
            source=source,
        )
        for (optimizer, elements, tensors, active), (seconds, source) in sorted(found.items())
    ]


def _optimizer_issues(raw: Mapping[str, Any]) -> dict[tuple[str, int, int, int], float]:
    """By (optimizer, elements, tensors, ranks active): what the host takes to queue the step on a GPU, median."""
    found: dict[tuple[str, int, int, int], list[float]] = {}
    for _, step in entries_of(raw, "optimizers"):
        if "issue_s" in step:
            key = (step["optimizer"], step["elements"], step["tensors"], step["ranks_active"])
            found.setdefault(key, []).append(step["issue_s"])
    tasks = _optimizer_tasks(raw)
    for _, sweep in entries_of(raw, "sweeps"):
        for place, work in tasks[sweep["model"], sweep["samples"]].items():
            if "issue_s" in sweep:
                key = (sweep["optimizer"], work.elements, work.tensors, sweep["ranks_active"])
                found.setdefault(key, []).append(sweep["issue_s"][place])
    return {key: float(np.median(values)) for key, values in found.items()}


def _optimizer_tasks(raw: Mapping[str, Any]) -> dict[tuple[int, int], dict[int, OptimizerStep]]:
    """By (model, samples): the places of the optimizer's task."""
    return {
        case: {place: work for place, work in enumerate(works) if isinstance(work, OptimizerStep)}
        for case, works in _works(raw).items()
    }


def _optimizer_inside(raw: Mapping[str, Any], drift: Drift) -> dict[tuple[int, int, str], tuple[int, int, list[float]]]:
    """By (model, ranks active, optimizer): elements, tensors, and the seconds of the optimizer's task in measured steps."""
    tasks = _optimizer_tasks(raw)
    found: dict[tuple[int, int, str], tuple[int, int, list[float]]] = {}
    for _, sweep in entries_of(raw, "sweeps"):
        for place, work in tasks[sweep["model"], sweep["samples"]].items():
            key = (sweep["model"], sweep["ranks_active"], sweep["optimizer"])
            found.setdefault(key, (work.elements, work.tensors, []))[2].append(
                drift.steady(sweep["seconds"][place], sweep["round"])
            )
    return found


# --- the host ---------------------------------------------------------------------------------------------------------


def host_overhead(raw: Mapping[str, Any], drift: Drift) -> HostOverhead:
    sweeps = [sweep for _, sweep in entries_of(raw, "sweeps")]
    latency_s, seconds_per_byte, part_s = loading(raw, drift)
    return HostOverhead(
        task_s=float(np.median([sweep["gap_s"] for sweep in sweeps])),
        step_s=float(np.median([sweep["rest_s"] for sweep in sweeps])),
        post_wait_s=resuming_s(raw),
        core_sharing=core_sharing(raw),
        load_s=latency_s,
        load_seconds_per_byte=seconds_per_byte,
        load_part_s=part_s,
        source="host",
    )


def resuming_s(raw: Mapping[str, Any]) -> float:
    """By how much computation takes longer after a wait: median over models, rounds and ranks; 0 with one rank."""
    seconds = [entry["seconds"] for _, entry in entries_of(raw, "resume")]
    return max(0.0, float(np.median(seconds))) if seconds else 0.0


def core_sharing(raw: Mapping[str, Any]) -> float:
    """How many times as long computation takes with all ranks as with one on every core: median over models, rounds and ranks;
    1 where no core is shared."""
    ratios = [entry["ratio"] for _, entry in entries_of(raw, "crowding")]
    return max(1.0, float(np.median(ratios))) if ratios else 1.0


def loading(raw: Mapping[str, Any], drift: Drift) -> tuple[float, float, float]:
    """Seconds of loading any batch, per byte of it, and of each further part right after the first, beside its bytes. The first
    two are a line through the cases with every rank active. The last is the median over all cases, or as much as a whole batch
    where it was not measured."""
    works, tables = _works(raw), _tables(raw, drift)
    most = max(active for _, _, active in tables)
    points = [
        (float(work.size_bytes), float(np.median(table[:, place])))
        for (number, samples, active), table in tables.items()
        for place, work in enumerate(works[number, samples])
        if isinstance(work, LoadBatch) and active == most and np.median(table[:, place]) > 0
    ]
    if not points:
        return 0.0, 0.0, 0.0
    sizes, seconds = np.array(points).T
    latency_s, seconds_per_byte = fit_linear(np.column_stack([np.ones(len(sizes)), sizes]), seconds)
    again = [
        drift.steady(sweep["load_again_s"], sweep["round"]) - seconds_per_byte * work.size_bytes
        for _, sweep in entries_of(raw, "sweeps")
        if "load_again_s" in sweep
        for work in works[sweep["model"], sweep["samples"]]
        if isinstance(work, LoadBatch)
    ]
    part_s = max(0.0, float(np.median(again))) if again else latency_s
    return float(latency_s), float(seconds_per_byte), float(part_s)
