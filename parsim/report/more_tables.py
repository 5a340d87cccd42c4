"""More tables as values: a profile's contents, runs under scenarios, measured memory, and how prices were computed."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any

from parsim.execute.cuda.gpu import MemoryUse
from parsim.hardware.profile import Profile
from parsim.hardware.records import OperatorFit, OperatorSurface
from parsim.hardware.speed_factor import speed_since
from parsim.predict.memory import RankMemory
from parsim.report.tables import NOTHING, ReportTable, columns_of, interval_texts
from parsim.units import format_bytes, format_count, format_energy, format_money, format_percent, format_seconds


def models_table(rows: Mapping[str, Mapping[str, Any]]) -> ReportTable:
    """Models by name, as `parsim.model.catalogue.names.described` has them."""
    return ReportTable(
        title="Models by name",
        columns=columns_of("model", "parameters", "layers", "hidden", "tokens", "also", words=("model",), wraps="also"),
        rows=tuple(
            (
                name,
                format_count(row["parameters"]),
                *(f"{row[key]:,}" if row[key] else "" for key in ("layers", "hidden", "tokens")),
                ", ".join(row["other_names"]),
            )
            for name, row in rows.items()
        ),
        notes=("An id of Hugging Face is the name of its shape: meta-llama/Llama-3.1-8B is llama3-8b.",),
    )


def instance_table(rented: Mapping[str, Mapping[str, Any]]) -> ReportTable:
    """Instance types of clouds by name, as `CloudInstance.to_dict` has them."""
    rows = [
        (
            name,
            row["cloud"],
            row["machine"],
            row["network_text"],
            "" if row["usd_per_hour"] is None else f"{row['usd_per_hour']:g}",
            row["price_source"].partition(", ")[2],
        )
        for name, row in rented.items()
    ]
    return ReportTable(
        title="Instance types",
        columns=columns_of(
            "instance",
            "cloud",
            "machine",
            "network",
            "USD per hour",
            "price of",
            words=("instance", "cloud", "machine", "price of"),
            wraps="network",
        ),
        rows=tuple(rows),
        notes=("Give one as --on, or several as --on 2xp5.48xlarge. A price that is empty is that of the GPU's part.",),
    )


def calibration_table(profile: Profile, *, title: str | None = None) -> ReportTable:
    """What a profile holds: measured points with their range and spread, and the fits made of them."""
    compute, collectives = profile.compute, profile.communication.points
    rows: list[tuple[str, str, str, str]] = []
    for phase in ("forward", "backward"):
        points = [point for point in compute.components if point.phase == phase]
        if points:
            names = len({(point.model, point.component) for point in points})
            samples = ", ".join(map(str, sorted({point.samples for point in points})))
            what = f"{names} components at {samples} samples"
            rows.append((phase, str(len(points)), what, _spread([point.spread for point in points])))
    if compute.optimizers:
        optimizers = ", ".join(sorted({point.optimizer for point in compute.optimizers}))
        what = f"{optimizers}: {_range([point.elements for point in compute.optimizers], format_count)} elements"
        rows.append(("optimizer", str(len(compute.optimizers)), what, _spread([point.spread for point in compute.optimizers])))
    if compute.operator_points or compute.operator_fits:
        fits: list[OperatorFit | OperatorSurface] = [*compute.operator_fits, *compute.operator_surfaces]
        kinds = ", ".join(dict.fromkeys(f"{fit.kind} {fit.phase}" for fit in fits))
        what = f"fitted: {kinds}; the spread is about the fit" if fits else "not fitted"
        rows.append(("operators", str(len(compute.operator_points)), what, _spread([fit.relative_sigma for fit in fits])))
    for operation, group_size in dict.fromkeys((point.operation, len(point.group)) for point in collectives):
        of_group = [point for point in collectives if point.operation == operation and len(point.group) == group_size]
        what = f"{_range([point.size_bytes for point in of_group], format_bytes)} over {group_size} ranks"
        spread = _spread([point.spread for point in of_group if point.spread is not None])
        rows.append((operation, str(len(of_group)), what, spread))
    if profile.noise is not None:
        rows.append(("drift", NOTHING, "of the whole machine from run to run", f"±{format_percent(profile.noise.drift_sigma)}"))
        if profile.noise.rank_sigma:
            spread = f"±{format_percent(profile.noise.rank_sigma)}"
            rows.append(("ranks", NOTHING, "of one rank's step against the others'", spread))
    if profile.overlap is not None:
        compute_factor, communication_factor = profile.overlap.compute_factor, profile.overlap.communication_factor
        what = f"compute x{compute_factor:.3g}, communication x{communication_factor:.3g} while both run"
        rows.append(("overlap", NOTHING, what, NOTHING))
    if profile.host is not None:
        host = f"{format_seconds(profile.host.task_s)} per task, {format_seconds(profile.host.step_s)} per step"
        if profile.host.post_wait_s:
            host += f", {format_seconds(profile.host.post_wait_s)} after a wait"
        if profile.host.launch_s:
            host += f", {format_seconds(profile.host.launch_s)} per launch"
        if profile.host.core_sharing > 1:
            host += f"; computing x{profile.host.core_sharing:.3g} where ranks share a core"
        rows.append(("host", NOTHING, host, NOTHING))
    if profile.today is not None:
        what = f"{speed_since(profile).text} for the same work, as of {profile.today.created}"
        rows.append(("today", NOTHING, what, NOTHING))
    return ReportTable(
        title=title or f"Calibration {profile.name}",
        columns=columns_of("kind", "points", "what", "spread", words=("kind",), wraps="what"),
        rows=tuple(rows),
        notes=(f"{profile.provenance.machine}; {profile.provenance.created}; {profile.provenance.command}",),
    )


def _spread(values: Sequence[float]) -> str:
    return f"±{format_percent(median(values))}" if values else NOTHING


def _range(values: Sequence[float], text: Any) -> str:
    low, high = min(values), max(values)
    return str(text(low)) if low == high else f"{text(low)} to {text(high)}"


# The tables of a plan in a scenario: the step under every state of the machine, the whole run, the checkpoint interval.


MOST_STATES = 24


def states_table(states: Sequence[Mapping[str, Any]]) -> ReportTable:
    """One row per state of the machine, in order of time."""
    rows = []
    for state in states[:MOST_STATES]:
        until = NOTHING if state["until_s"] is None else format_seconds(state["until_s"])
        step, slowdown = "stands still", NOTHING
        if not math.isinf(state["step_s"]):
            step, slowdown = format_seconds(state["step_s"]), f"{state['slowdown']:.3f}"
        rows.append((format_seconds(state["from_s"]), until, step, slowdown))
    more = len(states) - MOST_STATES
    return ReportTable(
        title="The step in every state of the machine",
        columns=columns_of("from", "until", "step", "times the quiet one"),
        rows=tuple(rows),
        notes=(f"{more} more states",) if more > 0 else (),
    )


def run_table(run: Mapping[str, Any]) -> ReportTable:
    """A whole run: each figure with its median and 90% interval."""
    names = {
        "total_s": "time",
        "training_s": "of it training",
        "lost_s": "of that undone by failures",
        "checkpoint_s": "checkpoints",
        "evaluation_s": "evaluation",
        "epoch_start_s": "starts of epochs",
        "down_s": "starting and restarting",
    }
    rows = [(title, *interval_texts(run[key])) for key, title in names.items()]
    rows.append(("failures", *_texts(run["failures"], lambda value: f"{value:.3g}")))
    rows.append(("useful share of the time", *_texts(run["useful_fraction"], format_percent)))
    if run["price"]["median"]:
        rows.append(("price", *_texts(run["price"], lambda value: format_money(value, run["currency"]))))
    if run["energy_j"]["median"]:
        rows.append(("energy", *_texts(run["energy_j"], lambda value: format_energy(value / 3.6e6))))
    return ReportTable(
        title=f"The whole run: {run['epochs']} epochs, {run['steps']} steps, {run['draws']} draws",
        columns=columns_of("figure", "median", "90%", wraps="figure"),
        rows=tuple(rows),
    )


def interval_table(choice: Mapping[str, Any]) -> ReportTable:
    """The mean run under every checkpoint interval, the best one marked, beside the formulas."""
    best = min(row["mean_s"] for row in choice["rows"])
    rows = [
        (format_seconds(row["interval_s"]), format_seconds(row["mean_s"]), f"+{100 * (row['mean_s'] / best - 1):.2f}%")
        for row in choice["rows"]
    ]
    return ReportTable(
        title="Checkpoint interval",
        columns=columns_of("interval", "mean time", "longer than the best"),
        rows=tuple(rows),
        emphasised=tuple(number for number, row in enumerate(choice["rows"]) if row["mean_s"] == best),
        notes=(
            f"simulated optimum {format_seconds(choice['simulated_s'])}; Young {format_seconds(choice['young_s'])}, Daly "
            f"{format_seconds(choice['daly_s'])} (a failure every {format_seconds(choice['mtbf_s'])}, "
            f"{format_seconds(choice['write_s'])} to write)",
        ),
    )


def _texts(interval: Mapping[str, float], text: Any) -> tuple[str, str]:
    return text(interval["median"]), f"{text(interval['p05'])}–{text(interval['p95'])}"


# Predicted and measured memory of every rank, like with like: each counter beside the lines of the prediction that it sees.


@dataclass(frozen=True, slots=True)
class MemoryLevel:
    """Attributes: level: "live", "allocated", "reserved" or "driver". relative_error: (predicted - measured) / measured."""

    rank: int
    level: str
    predicted_bytes: int
    measured_bytes: int
    relative_error: float

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def memory_levels(predicted: Sequence[RankMemory], measured: Sequence[MemoryUse | None]) -> tuple[MemoryLevel, ...]:
    """Up to four rows per rank; none for a counter that was not there.

    Live and allocated are held against the lines of tensors, reserved against these and the line `allocator`, what the driver
    no longer has against all lines.
    """
    rows = []
    for memory, use in zip(predicted, measured, strict=True):
        if use is None:
            continue
        tensors = sum(memory.tensor_lines.values())
        for level, foreseen, seen in (
            ("live", tensors, use.live_bytes),
            ("allocated", tensors, use.allocated_bytes),
            ("reserved", tensors + memory.line("allocator"), use.reserved_bytes),
            ("driver", memory.total_bytes, use.driver_bytes),
        ):
            if seen:
                rows.append(MemoryLevel(memory.rank, level, foreseen, seen, (foreseen - seen) / seen))
    return tuple(rows)


# Tables of how prices were computed: `parsim cost --explain`.


def price_tables(rows: Sequence[Mapping[str, Any]]) -> list[ReportTable]:
    """One table per row of `parsim cost`: the terms in the order in which they make the price, and where each is from.

    Args:
        rows: with the key "terms", as `parsim.costs.estimate.Estimate.term_rows` gives them.
    """
    columns = columns_of("term", "operation", "value", "running total", "from", words=("term", "operation"), wraps="from")
    tables = []
    for row in rows:
        shard = f" (1/{row['ways']} by {row['rule']})" if "ways" in row else ""
        what = f"{row['component']} {row['phase']}{shard}" if "component" in row else str(row["operation"])
        terms = tuple(
            (
                str(term["term"]),
                str(term["operation"]),
                format_seconds(term["value"]) if term["unit"] == "s" else f"{term['value']:.4g}",
                format_seconds(term["running_total_s"]),
                ": ".join(text for text in (str(term["origin"]), str(term["detail"])) if text),
            )
            for term in row["terms"]
        )
        tables.append(ReportTable(title=f"How {what} is priced", columns=columns, rows=terms))
    return tables
