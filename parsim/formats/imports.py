"""What files of other tools become: a changed profile, keys of a run file, or a measured timeline with the ledger of its step.

`parsim import` reads a file by its row in `parsim.formats.source`, and hands what was read to `import_machine` or
`import_trace`.
"""

from __future__ import annotations

import gzip
import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Generic, TypeVar

import numpy as np

from parsim.errors import ImportedFileError, ProfileError, near_matches
from parsim.formats.kineto import KINDS, NUMBER_TYPES, Trace
from parsim.formats.ledger import TraceLedger, factor_table, ledger_of, profile_from_trace
from parsim.formats.source import FileFormat, SourceFile, file_formats
from parsim.hardware.compose import load_profile
from parsim.hardware.parts import Network, gpu_named, load_network, save_network
from parsim.hardware.profile import Profile, save_profile
from parsim.registry import is_reference
from parsim.report.tables import ReportTable, columns_of, to_text
from parsim.timeline import SCHEMA_VERSION, Timeline
from parsim.units import format_percent, format_seconds

BECOMES: Mapping[str | None, tuple[str | tuple[str, ...], str, tuple[str, ...]]] = {
    "machine": (".json", "PROFILE.json or NETWORK.json", ("cluster", "network")),
    "run": (".toml", "RUN.toml", ("overrides",)),
    "trace": (
        (".json.gz", ".json"),
        "TIMELINE.json.gz or PROFILE.json",
        ("cluster", "precision", "against"),
    ),
}
"""By what is read: how the target's name ends, an example, and the options that apply to all such files."""
FLAGS = {"cluster": "--on", "overrides": "--set"}
"""Options whose name on the command line is another."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Imported:
    """The result of `parsim.import_file`.

    Attributes:
        kind: of the file. source: its path. into: what was written (None: nothing).
        summary: one sentence. found: what was read, as the JSON of `parsim import` has it.
        skipped: why parts of the file were left out, and how many. warnings: what to know before using the result.
        tables: for people.
    """

    kind: str
    source: Path
    into: Path | None
    summary: str
    found: Mapping[str, Any]
    skipped: Mapping[str, int]
    warnings: tuple[str, ...]
    tables: tuple[ReportTable, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        return {
            "kind": self.kind,
            "source": str(self.source),
            "into": None if self.into is None else str(self.into),
            "summary": self.summary,
            "found": dict(self.found),
            "skipped": dict(self.skipped),
            "warnings": list(self.warnings),
        }

    def __str__(self) -> str:
        return "\n".join([self.summary, *(to_text(table) for table in self.tables), *self.notes()]).rstrip()

    def notes(self) -> list[str]:
        """What was left out, and the warnings, one line each."""
        left = ", ".join(f"{count} {why}" for why, count in self.skipped.items())
        return [*([f"Left out: {left}"] if left else []), *(f"Note: {warning}" for warning in self.warnings)]


def format_of(source: SourceFile, kind: str | None = None) -> tuple[str, FileFormat]:
    """The format of a file that can be imported: as given, or by its content.

    Args: source: the file. kind: a name of a format, or "package.module:ROW" (None: find out).
    Raises: ImportedFileError: an unknown kind, or a file that is none.
    """
    rows = {name: row for name, row in file_formats().items() if row.reads in BECOMES}
    if kind is not None:
        if kind not in rows and not is_reference(kind):
            raise ImportedFileError(f"kind = {kind!r}{near_matches(kind, rows)}; known: {', '.join(rows)}")
        row = file_formats()[kind]
        if row.reads not in BECOMES:
            raise ImportedFileError(f"kind = {kind!r} reads nothing that can be imported; known: {', '.join(rows)}")
        return kind, row
    for name, row in rows.items():
        if row.sniff(source):
            return name, row
    for mark, what, instead in OTHER_OUTPUTS:
        if re.search(mark, source.head, re.MULTILINE):
            raise ImportedFileError(f"{source.path} is {what}; {instead}")
    known = "; ".join(f"{name}: {row.what}" for name, row in rows.items())
    raise ImportedFileError(
        f"{source.path} is of no kind that parsim imports ({known}). Name it with --kind if it is one of them; `parsim check` "
        "and `parsim plan` read config files of frameworks"
    )


OTHER_OUTPUTS = (
    (r"^Machine \(.*\)$|^ +NUMANode L#\d", "the text of lstopo", "write `lstopo --of xml > machine.xml` and give that"),
    (r"^\| +NVIDIA-SMI \d", "the table of nvidia-smi, without links", "write `nvidia-smi topo -m` into a file and give that"),
    (
        r"\b(all_reduce|all_gather|reduce_scatter|alltoall|broadcast|sendrecv|reduce|gather|scatter|hypercube)_perf\b",
        "a script that starts nccl-tests",
        "run it, and give what it prints",
    ),
)
"""Of files that hold no links: a mark, what they are, and what to give instead."""


def check_import(source: SourceFile, row: FileFormat, into: Path | None, options: Mapping[str, object]) -> None:
    """Raise ImportedFileError for a target of another kind, or an option that does not apply to the format.

    Args: options: by name those that were given, of `parsim import`.
    """
    suffix, example, _ = BECOMES[row.reads]
    if into is not None and not into.name.endswith(suffix):
        raise ImportedFileError(f"{source.path} is {row.what}; it goes into {example}, not into {into}")
    if into is not None and into.resolve() == source.path.resolve():
        raise ImportedFileError(f"--into {into} is the file itself; give another name")
    for option in options:
        if option not in _options_of(row):
            takers = ", ".join(name for name, other in file_formats().items() if option in _options_of(other))
            flag = FLAGS.get(option, f"--{option.replace('_', '-')}")
            raise ImportedFileError(f"{flag} does not apply to {row.what}; it belongs to {takers}")


def _options_of(row: FileFormat) -> tuple[str, ...]:
    return () if row.reads not in BECOMES else row.options + BECOMES[row.reads][2]


Made = TypeVar("Made", Profile, Network)


@dataclass(frozen=True, slots=True, kw_only=True)
class MachineUpdate(Generic[Made]):
    """A profile, or a network, with what a file says of it.

    Attributes: made: the changed one. summary, written: a sentence without a target, and one for what was written ("": the
        same). document: JSON. warnings, tables: as in `Imported`.
    """

    made: Made
    summary: str
    document: Mapping[str, Any]
    written: str = ""
    warnings: tuple[str, ...] = ()
    tables: tuple[ReportTable, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class MachineReading:
    """What a file says of a machine.

    Attributes:
        devices: how many it needs (whole: just as many). names: of GPUs, as the driver says. skipped, notes: as in `Imported`.
        fitting: machines in the form of --on that may be meant, where the file does not name one.
        change: makes the change of a profile. Raises ImportedFileError for one of another machine.
        between: instead, the change of a network: from the profile of a node, its name, and the network (None: a new one).
    """

    devices: int
    change: Callable[[Profile], MachineUpdate[Profile]] | None = None
    between: Callable[[Profile, str, Network | None], MachineUpdate[Network]] | None = None
    whole: bool = False
    names: tuple[str, ...] = ()
    fitting: Callable[[], Sequence[str]] = tuple
    skipped: Mapping[str, int] = field(default_factory=dict)
    notes: tuple[str, ...] = ()


def import_machine(
    kind: str,
    source: SourceFile,
    reading: MachineReading,
    *,
    into: Path | None = None,
    cluster: str | None = None,
    network: str | None = None,
) -> Imported:
    """Measured collectives, or links and card slots of a machine, into a profile.

    Args: kind: of the file. into: the profile or network, new or extended. cluster: the machine (None: named by the file).
        network: that a new network starts from (None: the nearest that ships).
    Raises: ImportedFileError: the profile is of another machine, or nobody names the machine. ProfileError: a damaged profile.
    """
    if network is not None and reading.between is None:
        raise ImportedFileError(f"--network {network}: {source.path} is of one host and says nothing of a network")
    change: MachineUpdate[Profile] | MachineUpdate[Network]
    if reading.between is not None:
        profile = _profile(None, cluster, reading)
        change = between = reading.between(profile, cluster or profile.name, _network(into, network))
        found = {"network": between.made.name, "profile": profile.name, **between.document}
        if into is not None:
            save_network(between.made.model_copy(update={"name": into.stem}), into)
    else:
        assert reading.change is not None
        profile = _profile(into, cluster, reading)
        change = inside = reading.change(profile)
        found = {"profile": profile.name, **inside.document}
        if into is not None:
            save_profile(inside.made, into)
    return Imported(
        kind=kind,
        source=source.path,
        into=into,
        summary=change.written or change.summary if into is not None else change.summary,
        found=found,
        skipped=reading.skipped,
        warnings=(*reading.notes, *change.warnings),
        tables=change.tables,
    )


def _network(into: Path | None, start: str | None) -> Network | None:
    """The network that is added to: the target if it is there, else what --network names."""
    if into is None or not into.exists():
        return None if start is None else load_network(start)
    if start is not None:
        raise ImportedFileError(f"{into} exists, and --network {start} names another to start from; drop one of them")
    try:
        return load_network(str(into))
    except ProfileError as error:
        raise ImportedFileError(
            f"the file was measured between hosts and calibrates a network, but {into} is none: {error}; give another name"
        ) from error


def _profile(into: Path | None, cluster: str | None, reading: MachineReading) -> Profile:
    """The profile that is added to: the target if it is there, else what --on names, else the GPUs that the file names."""
    if into is not None and into.exists():
        if cluster is not None:
            raise ImportedFileError(f"{into} exists, and --on {cluster} names a machine; drop one of them")
        return load_profile(str(into))
    if cluster is not None:
        return load_profile(cluster)
    parts = {part.name: part for name in reading.names if (part := gpu_named(name)) is not None}
    if len(parts) == 1:
        (part,) = parts.values()
        count = reading.devices if reading.whole else max(reading.devices, part.gpus_per_node)
        return load_profile(f"{count}x{part.name}")
    named = ", ".join(dict.fromkeys(reading.names))
    why = f"names {named}, of which no part is shipped" if named and not parts else "does not name the machine"
    if len(parts) > 1:
        why = f"names several kinds of GPU ({named})"
    such = " or ".join(f"--on {name}" for name in reading.fitting()) or f"--on {reading.devices}xGPU (`parsim profile list`)"
    notes = "".join(f". {note}" for note in reading.notes)
    raise ImportedFileError(f"the file {why}: name the machine, such as {such}, or give a profile as --into{notes}")


@dataclass(slots=True)
class RunKeys:
    """Keys of a run file that a file holds.

    Attributes:
        where: the file, for messages. keys: such as {"plan.zero_stage": 3}.
        ranks: data-parallel ranks that the three batch keys imply (None: they do not say). needs_ranks: the batch or the
            microbatches follow only with the number of ranks, which was not given.
        warnings: keys that matter and are not priced. used: keys that were read.
        harmless, auto: keys that change nothing, and that the framework fills in.
    """

    where: str
    keys: dict[str, Any] = field(default_factory=dict)
    ranks: int | None = None
    needs_ranks: bool = False
    warnings: list[str] = field(default_factory=list)
    harmless: list[str] = field(default_factory=list)
    auto: list[str] = field(default_factory=list)
    used: set[str] = field(default_factory=set)


CATEGORIES: Sequence[tuple[str, str]] = (
    ("compute", "compute_s"),
    ("exposed communication", "exposed_communication_s"),
    ("load and copies", "load_s"),
    ("host", "host_s"),
    ("bubble and idle", "idle_s"),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class PredictedParts:
    """A predicted step beside which a trace is shown.

    Attributes: question: what was asked. device: name of its first device. on_gpu: whether it is a GPU. seconds: by the keys of
        CATEGORIES, means over ranks; and step_s.
    """

    question: str
    device: str
    on_gpu: bool
    seconds: Mapping[str, float]


def import_trace(
    kind: str,
    source: SourceFile,
    trace: Trace,
    *,
    into: Path | None = None,
    cluster: str | None = None,
    precision: str | None = None,
    predicted: PredictedParts | None = None,
) -> Imported:
    """A trace as a timeline, its ledger, and what a prediction says beside it.

    Args: kind: of the file. into: TIMELINE.json.gz. cluster, precision: of the peak (None: as the trace tells).
    Raises: ImportedFileError: a machine of another kind, or a precision that it has no peak in. ProfileError: an unknown
        machine.
    """
    warnings = list(trace.notes)
    if into is not None and into.suffix == ".json":
        return _calibrated(kind, source, trace, into, cluster, precision)
    peak, peak_text = _peak(trace, cluster, precision, warnings)
    ledger = ledger_of(trace, peak)
    if trace.no_shapes:
        warnings.append(trace.no_shapes)
    if ledger.utilisation is not None and ledger.slow_kernels_s is not None and ledger.slow_kernels_s < 0:
        warnings.append(
            f"kernels are faster than the peak of {peak_text}: the precision is another one (--precision), or a "
            "causal attention counts whole, as the trace does not say that it is causal"
        )
    tables = [_ledger_table(ledger, peak_text), _kernel_table(ledger)]
    if predicted is not None:
        if predicted.on_gpu != trace.on_gpu:
            traced, asked = ("a GPU", "CPUs") if trace.on_gpu else ("a CPU", "GPUs")
            raise ImportedFileError(
                f"the trace is of {traced}, and {predicted.question} asks about {asked} ({predicted.device}); name the same "
                "machine"
            )
        part = gpu_named(trace.device)
        if part is not None and part.name != predicted.device:
            warnings.append(f"the trace is of {part.name}, and the prediction beside it is for {predicted.device}")
        tables.append(_against_table(ledger, predicted.seconds))
    if into is not None:
        _save(trace, ledger, into)
    return Imported(
        kind=kind,
        source=source.path,
        into=into,
        summary=_sentence(trace, ledger),
        found={
            "rank": trace.rank,
            "world_size": trace.world_size,
            "device": trace.device,
            "steps": trace.steps,
            "activities": len(trace.activities.start_s),
            "ledger": ledger.to_dict(),
            "predicted": None if predicted is None else dict(predicted.seconds),
        },
        skipped=trace.skipped,
        warnings=tuple(warnings),
        tables=tuple(tables),
    )


def _calibrated(
    kind: str, source: SourceFile, trace: Trace, into: Path, cluster: str | None, precision: str | None
) -> Imported:
    profile = _profile(into, cluster, MachineReading(devices=1, names=(trace.device,) if trace.device else ()))
    known = NUMBER_TYPES.get(trace.number_type, ())
    fitted = {fit.precision for fit in profile.compute.operator_fits}
    own = precision or next((name for name in known if name in fitted), "")
    if own not in fitted:
        raise ImportedFileError(
            f"the trace does not tell a precision that {profile.name} has fits in; give --precision, one of "
            f"{', '.join(sorted(fitted)) or 'none'}"
        )
    text = f"{source.path.name} {source.digest}, {trace.steps} step(s) of rank {trace.rank}"
    changed, factors = profile_from_trace(trace, profile, own, text)
    save_profile(changed.model_copy(update={"name": into.stem}), into)
    kinds = ", ".join(f"{entry.kind} {entry.phase} x {entry.factor:.3g}" for entry in factors)
    return Imported(
        kind=kind,
        source=source.path,
        into=into,
        summary=f"{into}: {profile.name} in {own} with the kernels of the trace ({kinds})",
        found={"profile": profile.name, "precision": own, "factors": [entry.to_dict() for entry in factors]},
        skipped=trace.skipped,
        warnings=(*trace.notes, "kernels without counted shapes, the optimizer and communication keep their prices"),
        tables=(factor_table(factors),),
    )


def timeline_of(trace: Trace) -> Timeline:
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


def _save(trace: Trace, ledger: TraceLedger, into: Path) -> None:
    """`Timeline.load` reads the file; beside the spans it holds what each task was, and the ledger."""
    timeline = timeline_of(trace)
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


def _peak(trace: Trace, cluster: str | None, precision: str | None, warnings: list[str]) -> tuple[float | None, str]:
    if cluster is not None:
        profile = load_profile(cluster)
        kinds = sorted({entry.type for entry in profile.devices})
        if all(profile.device_types[kind].kind == "cpu" for kind in kinds) == trace.on_gpu:
            traced, machine = ("a GPU", "CPUs") if trace.on_gpu else ("a CPU", "GPUs")
            raise ImportedFileError(
                f"the trace is of {traced}, and profile {profile.name} of {machine}; give the machine of the trace"
            )
        name, peaks = kinds[0], profile.device_types[kinds[0]].peak_flop_per_s
        if len(kinds) > 1:
            warnings.append(f"{profile.name} has several kinds of devices; peaks are those of {name}")
    elif (part := gpu_named(trace.device)) is not None:
        name, peaks = part.name, part.peak_flop_per_s
    else:
        why = f"the device {trace.device!r} is not known" if trace.device else "the trace names no GPU"
        warnings.append(f"{why}: kernels are not set against a peak; give --on PROFILE and --precision")
        return None, ""
    wanted = [precision] if precision is not None else list(NUMBER_TYPES.get(trace.number_type, ()))
    key = next((key for key in wanted if key in peaks), None)
    if key is None:
        if precision is not None:
            raise ImportedFileError(f"precision = {precision!r}: {name} has peaks in {', '.join(sorted(peaks))}")
        warnings.append(f"the trace does not tell the precision; give --precision, one of {', '.join(sorted(peaks))}")
        return None, ""
    return peaks[key].value, f"{name} in {key}"


def _sentence(trace: Trace, ledger: TraceLedger) -> str:
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
        columns=columns_of("part", "per step", "share", wraps="part"),
        rows=(*rows, ("measured step", format_seconds(ledger.step_s), format_percent(1.0))),
        notes=(
            f"{peak}Communication runs for {format_seconds(ledger.communication_busy_s)} per step, hidden or not.",
            *_what_helps(ledger),
        ),
    )


HELPS = {
    "compute": "faster kernels (larger batches, tensor cores, torch.compile), or more devices",
    "slow kernels": "larger batches, tensor cores (a lower precision, sizes that 64 divides)",
    "uncounted products": "a trace with record_shapes=True of the same step in eager mode, which counts them",
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
        columns=columns_of("kernel or operator", "per step", "calls", "of the peak", wraps="kernel or operator"),
        rows=tuple(rows),
    )


def _against_table(ledger: TraceLedger, predicted: Mapping[str, float]) -> ReportTable:
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
        columns=columns_of("part", "measured", "predicted", "difference", words=("part",)),
        rows=tuple(rows),
        notes=("The trace is of one rank; predicted parts are means over ranks.",),
    )
