"""A profiler trace into a measured timeline, with the ledger of its mean step."""

from __future__ import annotations

import gzip
import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from parsim.errors import ImportedFileError
from parsim.hardware.compose import load_profile
from parsim.hardware.profile import Profile
from parsim.importers.gpu_names import gpu_named
from parsim.importers.kineto import KINDS, NUMBER_TYPES, KinetoTrace, read_kineto
from parsim.importers.ledger import TraceLedger, ledger_of
from parsim.importers.nsys_sqlite import read_nsys
from parsim.importers.source_file import SourceFile
from parsim.report.tables import Column, ReportTable
from parsim.timeline import SCHEMA_VERSION, Timeline
from parsim.units import format_percent, format_seconds
from parsim.workflow.importing.imported import Imported

if TYPE_CHECKING:
    from parsim.app.prediction import Prediction


def import_trace(
    source: SourceFile,
    into: Path | None,
    cluster: str | None,
    precision: str | None,
    steps: int | None,
    against: Path | None,
    *,
    device: int | None = None,
    kind: str = "kineto",
) -> Imported:
    """A trace as a timeline, its ledger, and what a prediction says beside it."""
    trace = read_kineto(source, steps=steps) if kind == "kineto" else read_nsys(source, steps=steps, device=device)
    warnings = list(trace.notes)
    peak, peak_text = _peak(trace, cluster, precision, warnings)
    ledger = ledger_of(trace, peak)
    if kind == "nsys":
        warnings.append("Nsight Systems records no shapes, so kernels are not divided by their arithmetic")
    elif not trace.shapes:
        warnings.append("shapes were not recorded, so kernels are not divided by their arithmetic: profile(record_shapes=True)")
    if ledger.utilisation is not None and ledger.slow_kernels_s is not None and ledger.slow_kernels_s < 0:
        warnings.append(f"kernels are faster than the peak of {peak_text}: the precision is another one; give --precision")
    if into is not None:
        _save(timeline_of(trace), trace, ledger, into)
    tables = [_ledger_table(ledger, peak_text), _kernel_table(ledger)]
    document: dict[str, Any] = {
        "rank": trace.rank,
        "world_size": trace.world_size,
        "device": trace.device,
        "steps": trace.steps,
        "activities": len(trace.activities.start_s),
        "ledger": ledger.to_dict(),
        "predicted": None,
    }
    if against is not None:
        predicted = _predicted(against, trace, warnings)
        document["predicted"] = predicted
        tables.append(_against_table(ledger, predicted))
    return Imported(
        kind=kind,
        source=source.path,
        into=into,
        summary=_sentence(trace, ledger),
        found=document,
        skipped=trace.skipped,
        warnings=tuple(warnings),
        tables=tuple(tables),
    )


def timeline_of(trace: KinetoTrace) -> Timeline:
    """The activities of all recorded steps as a measured Timeline; task i is row i. Resources are "r0.stream7"."""
    rows = trace.activities
    return Timeline(
        source="measured",
        resources=tuple(f"r{trace.rank}.{name.replace(' ', '')}" for name in rows.streams),
        task=np.arange(len(rows.start_s)),
        resource=rows.stream,
        start_s=rows.start_s,
        end_s=rows.end_s,
    )


def _save(timeline: Timeline, trace: KinetoTrace, ledger: TraceLedger, into: Path) -> None:
    """`Timeline.load` reads the file; beside the spans it holds what each task was, and the ledger."""
    document = {
        "schema_version": SCHEMA_VERSION,
        "source": timeline.source,
        "resources": list(timeline.resources),
        "task": timeline.task.tolist(),
        "resource": timeline.resource.tolist(),
        "start_s": timeline.start_s.tolist(),
        "end_s": timeline.end_s.tolist(),
        "tasks": {
            "names": list(trace.activities.names),
            "name": trace.activities.name.tolist(),
            "kinds": list(KINDS),
            "kind": trace.activities.kind.tolist(),
            "flop": trace.activities.flop.tolist(),
        },
        "steps": trace.steps,
        "ledger": ledger.to_dict(),
    }
    partial = into.with_name(into.name + ".partial")
    with gzip.GzipFile(partial, "wb", mtime=0) as file:
        file.write(json.dumps(document, allow_nan=False).encode())
    partial.replace(into)


def _peak(trace: KinetoTrace, cluster: str | None, precision: str | None, warnings: list[str]) -> tuple[float | None, str]:
    """Peak FLOP/s of the device in the precision of the run, and what it is the peak of."""
    if cluster is not None:
        profile: Profile = load_profile(cluster)
        kinds = {entry.type for entry in profile.devices}
        on_cpu = all(profile.device_types[kind].kind == "cpu" for kind in kinds)
        if on_cpu == trace.on_gpu:
            seen, machine = ("a GPU", "CPUs") if trace.on_gpu else ("a CPU", "GPUs")
            raise ImportedFileError(
                f"the trace is of {seen}, and profile {profile.name} of {machine}; give the machine of the trace"
            )
        (kind,) = sorted(kinds)[:1]
        name, peaks = kind, {key: number.value for key, number in profile.device_types[kind].peak_flop_per_s.items()}
        if len(kinds) > 1:
            warnings.append(f"{profile.name} has several kinds of devices; peaks are those of {kind}")
    elif (part := gpu_named(trace.device)) is not None:
        name, peaks = part.name, {key: number.value for key, number in part.peak_flop_per_s.items()}
    else:
        known = f"the device {trace.device!r} is not known" if trace.device else "the trace names no GPU"
        warnings.append(f"{known}: kernels are not set against a peak; give --on PROFILE and --precision")
        return None, ""
    wanted = [precision] if precision is not None else list(NUMBER_TYPES.get(trace.number_type, ()))
    found = next((key for key in wanted if key in peaks), None)
    if found is None:
        if precision is not None:
            raise ImportedFileError(f"precision = {precision!r}: {name} has peaks in {', '.join(sorted(peaks))}")
        warnings.append(f"the trace does not tell the precision; give --precision, one of {', '.join(sorted(peaks))}")
        return None, ""
    return peaks[found], f"{name} in {found}"


def _sentence(trace: KinetoTrace, ledger: TraceLedger) -> str:
    step = f"{trace.steps} step(s) of {format_seconds(ledger.step_s)} on rank {trace.rank}"
    rest = max(ledger.entries()[1:] if ledger.utilisation is not None else ledger.entries(), key=lambda entry: entry[1])
    share = format_percent(rest[1] / ledger.step_s if ledger.step_s else 0.0)
    if ledger.utilisation is None:
        return f"{step}; most of it is {rest[0]} ({share})"
    return f"{step} reach {format_percent(ledger.utilisation)} of the peak; most of the rest is {rest[0]} ({share} of the step)"


def _ledger_table(ledger: TraceLedger, peak_text: str) -> ReportTable:
    rows = [
        (name, format_seconds(seconds), format_percent(seconds / ledger.step_s if ledger.step_s else 0.0))
        for name, seconds in ledger.entries()
    ]
    peak = f"The peak is that of {peak_text}. " if peak_text else ""
    return ReportTable(
        title="Where the step goes",
        columns=(Column(name="part", wraps=True), Column(name="per step", numeric=True), Column(name="share", numeric=True)),
        rows=(*rows, ("measured step", format_seconds(ledger.step_s), format_percent(1.0))),
        notes=(
            f"{peak}Communication runs for {format_seconds(ledger.communication_busy_s)} per step, hidden or not.",
            *_what_helps(ledger),
        ),
    )


HELPS = {
    "compute": "faster kernels (larger batches, tensor cores, torch.compile), or more devices",
    "slow kernels": "larger batches, tensor cores (a lower precision, sizes that 64 divides)",
    "other kernels": "fusion (torch.compile), a fused optimizer",
    "exposed communication": "overlap with computation, larger buckets, faster links, fewer messages",
    "exposed copies": "pinned memory, prefetching",
    "data loading": "more workers of the loader",
    "launch gaps": "CUDA graphs, torch.compile, larger batches, fewer .item() calls",
    "idle": "a look at the timeline: nothing was launched, or no launch was recorded",
}
"""What shortens a part of the step, by how its name begins; docs/import.md has the same table."""
WORTH_TELLING = 0.05
"""Share of the step below which a part is left out of `HELPS`."""


def _what_helps(ledger: TraceLedger) -> list[str]:
    """For the three largest parts beyond the ideal."""
    parts = [(seconds, name.partition(":")[0]) for name, seconds in ledger.entries() if not name.startswith("ideal")]
    large = sorted((part for part in parts if part[0] > WORTH_TELLING * ledger.step_s), reverse=True)[:3]
    return [f"Against {name}: {HELPS[name]}." for _, name in large]


def _kernel_table(ledger: TraceLedger) -> ReportTable:
    rows = [
        (
            row.name,
            format_seconds(row.seconds),
            f"{row.calls:.3g}",
            "–" if row.share_of_peak is None else format_percent(row.share_of_peak),
        )
        for row in ledger.top
    ]
    return ReportTable(
        title="What takes longest",
        columns=(
            Column(name="kernel or operator", wraps=True),
            Column(name="per step", numeric=True),
            Column(name="calls", numeric=True),
            Column(name="of the peak", numeric=True),
        ),
        rows=tuple(rows),
    )


CATEGORIES: Sequence[tuple[str, str]] = (
    ("compute", "compute_s"),
    ("exposed communication", "exposed_communication_s"),
    ("load and copies", "load_s"),
    ("host", "host_s"),
    ("bubble and idle", "idle_s"),
)


def _predicted(against: Path, trace: KinetoTrace, warnings: list[str]) -> dict[str, float]:
    """Seconds of the predicted step by category, means over ranks. Raises ImportedFileError for devices of another kind."""
    from parsim.app.functions import simulate

    prediction: Prediction = simulate(against)
    device = prediction.problem.cluster.devices[0].type
    if (device.kind == "cpu") == trace.on_gpu:
        seen, asked = ("a GPU", "CPUs") if trace.on_gpu else ("a CPU", "GPUs")
        raise ImportedFileError(
            f"the trace is of {seen}, and {against} asks about {asked} ({device.name}); name the same machine"
        )
    part = gpu_named(trace.device)
    if part is not None and part.name != device.name:
        warnings.append(f"the trace is of {part.name}, and the prediction beside it is for {device.name}")
    ranks = prediction.breakdown()
    seconds = {key: float(ranks[key].mean()) for _, key in CATEGORIES}
    seconds["idle_s"] += float(ranks["bubble_s"].mean())
    return {**seconds, "step_s": prediction.step_s.median}


def _against_table(ledger: TraceLedger, predicted: dict[str, float]) -> ReportTable:
    measured = {
        "compute_s": ledger.compute_s,
        "exposed_communication_s": ledger.exposed_communication_s,
        "load_s": ledger.loading_s + ledger.exposed_copies_s,
        "host_s": ledger.launch_gaps_s,
        "idle_s": ledger.idle_s,
        "step_s": ledger.step_s,
    }
    rows = [
        (name, format_seconds(measured[key]), format_seconds(predicted[key]), format_seconds(measured[key] - predicted[key]))
        for name, key in (*CATEGORIES, ("step", "step_s"))
    ]
    return ReportTable(
        title="Beside the prediction",
        columns=(
            Column(name="part"),
            Column(name="measured", numeric=True),
            Column(name="predicted", numeric=True),
            Column(name="difference", numeric=True),
        ),
        rows=tuple(rows),
        notes=("The trace is of one rank; predicted parts are means over ranks.",),
    )
