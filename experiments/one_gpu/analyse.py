"""From rows to results: predicted against measured beside the A/A floor, the executor against eager torch, memory by line.

Nothing here is known beforehand: a table whose rows are not there is left out, and what failed or was skipped is listed.
"""

from __future__ import annotations

import statistics
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from predictions import digest

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from experiments.common.accuracy import accuracy
from experiments.common.markdown import row_table
from parsim.predict.compare import aa_floor
from parsim.program.taskgraph import parse_work
from parsim.units import format_bytes, format_seconds
from parsim.work import kind_of
from tools.gpu.journal import DONE, FAILED, SKIPPED, STATUS, JournalRow

DRAWS = 4000
AGAIN = " again"
RATIO = "{ratio:.3f} ({low:.3f} to {high:.3f})"
LINES: Mapping[str, tuple[str, ...]] = {
    "parameters": ("parameters",),
    "gradients": ("gradients",),
    "optimizer state": ("optimizer_state",),
    "buffers": ("buffers",),
    "activations and boundary values": ("activations", "boundary_values", "casts", "inputs", "receive_buffers"),
    "workspace": ("workspace", "unsharded"),
}
"""By the name in the table: lines of the prediction and of the count that mean the same."""

SAME_LOSS = 1e-2
"""Relative difference of losses, from which on programs are said not to have trained the same."""

ROOFLINE_SLACK = 1.1
"""A rate so much above the roofline of the measured peaks is implausible."""


def analyse(all_rows: Sequence[JournalRow]) -> tuple[dict[str, Any], str]:
    """Results as plain JSON, and the same for people, in Markdown. Of several rows of one case the last counts."""
    rows = {row["case"]: row for row in all_rows}
    done = {name: row for name, row in rows.items() if row[STATUS] == DONE}
    frozen = {row["precision"]: row for name, row in done.items() if name.startswith("predictions ")}
    predictions = {entry["question"]: entry for row in frozen.values() for entry in row["predictions"]}
    steps = [step_of(row, predictions) for name, row in done.items() if name.startswith("step ")]
    results: dict[str, Any] = {
        "machine": {key: value for key, value in done.get("machine", {}).items() if key not in ("case", "status", "headline")},
        "costs": {
            name: {key: row[key] for key in row if key.endswith("_s") and key not in ("sustained_s", "mean_s", "best_s")}
            for name, row in done.items()
            if name.startswith("cost of ")
        },
        "products": products_of(done.values()),
        "copies": [
            {key: row[key] for key in ("route", "size_bytes", "bytes_per_s", "beyond_cache", "sets", "sustained_s")}
            for row in done.values()
            if "route" in row
        ],
        "predictions": {
            precision: {
                "sha256": row["sha256"],
                "unchanged": digest(row["predictions"]) == row["sha256"],
                "unpriced": row["unpriced"],
            }
            for precision, row in frozen.items()
        },
        "steps": steps,
        "accuracy": accuracy_of(steps),
        "memory": [memory_of(row, predictions) for name, row in done.items() if name.startswith("memory ")],
        "kinds": [kinds_of(row, predictions) for name, row in done.items() if name.startswith("memory ") and "tasks_s" in row],
        "kernels": [  # without their names, which stay in the rows
            {key: value for key, value in step.items() if key != "csv"}
            for name, row in done.items()
            if name.startswith("kernels ")
            for step in row["steps"]
            if "csv" in step
        ],
        "compile": [compiled_of(row) for name, row in done.items() if name.startswith("compile ")],
        "failed": [
            {key: row[key] for key in ("case", "error", "message", "out_of_memory")}
            for row in rows.values()
            if row[STATUS] == FAILED
        ],
        "skipped": [{key: row[key] for key in ("case", "reason")} for row in rows.values() if row[STATUS] == SKIPPED],
        "cases": len(rows),
        "seconds": sum(row["seconds"] for row in rows.values()),
    }
    return results, text_of(results)


# --- the machine ------------------------------------------------------------------------------------------------------


def products_of(rows: Iterable[JournalRow]) -> dict[str, Any]:
    """By precision: the peak, and every shape with its share of the roofline of that peak and the fastest copy."""
    everything = list(rows)
    products = [row for row in everything if "flop_per_s" in row]
    copies = [row["bytes_per_s"] for row in everything if row.get("route") == "on_device" and row["beyond_cache"]]
    bandwidth = max(copies, default=None)
    found: dict[str, Any] = {}
    for precision in dict.fromkeys(row["precision"] for row in products):
        own = [row for row in products if row["precision"] == precision]
        peak = max(row["flop_per_s"] for row in own)
        found[precision] = {"peak_flop_per_s": peak, "shapes": [shape_of(row, peak, bandwidth) for row in own]}
    return found


def shape_of(row: JournalRow, peak: float, bandwidth: float | None) -> dict[str, Any]:
    roof = peak if bandwidth is None else min(peak, bandwidth * row["flop"] / row["bytes"])
    power = row.get("board", {}).get("power_w", {})
    return {
        "shape": f"{row['rows']}x{row['columns']}x{row['depth']}",
        "origin": row["origin"],
        "flop_per_s": row["flop_per_s"],
        "spread": (row["p95_s"] - row["p05_s"]) / row["median_s"],
        "sustained_s": row["sustained_s"],
        "queued": row["queued"],
        "of_roofline": row["flop_per_s"] / roof,
        "implausible": row["flop_per_s"] > ROOFLINE_SLACK * roof,
        "power_w": power.get("most"),
    }


# --- steps ------------------------------------------------------------------------------------------------------------


def step_of(row: JournalRow, predictions: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """The executor's step beside its prediction, its A/A floor, and the other programs."""
    rounds = row["rounds_s"]
    own, again = rounds["executor"], rounds["executor" + AGAIN]
    others = {name: values for name, values in rounds.items() if not name.startswith("executor")}
    measured_s = statistics.mean([*own, *again])
    floor = aa_floor([[one, other] for one, other in zip(own, again, strict=True)])
    found: dict[str, Any] = {
        "question": row["question"],
        "held_out": row["held_out"],
        "rounds": row["rounds"],
        "measured_s": measured_s,
        "aa_floor_median": floor.median,
        "aa_floor_p95": floor.p95,
        "executor_again": ratio_interval(again, own),
        "board": row.get("board_of_rounds", {}),
        "loss_difference": loss_difference(row["losses"]),
        "not_built": not_built(row),
        "others_s": {name: statistics.mean(values) for name, values in others.items()},
        "executor_over": {name: ratio_interval(own, values) for name, values in others.items()},
    }
    said = predictions.get(row["question"])
    if said is not None and row["predicted"] is not None:
        median_s, low_s, high_s = said["step_s"]
        found |= {
            "precision": said["precision"],
            "predicted_s": median_s,
            "interval_s": [low_s, high_s],
            "error": median_s / measured_s - 1,
            "inside": low_s <= measured_s <= high_s,
            "sources": said["sources"],
        }
    return found


def loss_difference(losses: Mapping[str, Sequence[float]]) -> dict[str, float]:
    """By program: how far its first losses are from the executor's, relative, at most. They train the same model on the same
    samples, so more than rounding means that something else was timed."""
    own = losses.get("executor", ())
    return {
        name: max(abs(one - other) / abs(other) for one, other in zip(own, values, strict=True))
        for name, values in losses.items()
        if name != "executor" and own
    }


def ratio_interval(over: Sequence[float], under: Sequence[float], *, seed: int = 0) -> dict[str, float]:
    """Mean over mean of paired rounds, with a 95% percentile bootstrap interval over the rounds."""
    pairs = np.array([over, under], dtype=np.float64)
    count = pairs.shape[1]
    drawn = np.random.default_rng(seed).integers(count, size=(DRAWS, count))
    means = pairs[:, drawn].mean(axis=2)
    low, high = np.quantile(means[0] / means[1], (0.025, 0.975))
    return {"ratio": float(pairs[0].mean() / pairs[1].mean()), "low": float(low), "high": float(high)}


def accuracy_of(steps: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Median, p95, bias and coverage over the predicted steps: all, of held-out models, of calibrated ones at other batches."""
    predicted = [step for step in steps if "predicted_s" in step]
    groups = {
        "all": predicted,
        **{
            precision: [step for step in predicted if step["precision"] == precision]
            for precision in dict.fromkeys(step["precision"] for step in predicted)
        },
        "held-out models": [step for step in predicted if step["held_out"]],
        "calibrated models, other batches": [step for step in predicted if not step["held_out"]],
    }
    return {
        name: {
            **asdict(accuracy([step["predicted_s"] for step in own], [step["measured_s"] for step in own])),
            "coverage": sum(step["inside"] for step in own) / len(own),
            "aa_floor_median": statistics.median(step["aa_floor_median"] for step in own),
            "aa_floor_p95": statistics.median(step["aa_floor_p95"] for step in own),
        }
        for name, own in groups.items()
        if own
    }


def kinds_of(row: JournalRow, predictions: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """Seconds of a step's tasks by kind, measured and predicted: which part of a prediction was wrong."""
    measured: dict[str, float] = {}
    for text, seconds in row["tasks_s"]:
        kind = kind_of(parse_work(text))
        measured[kind] = measured.get(kind, 0.0) + seconds
    said = predictions.get(row["question"], {})
    return {"question": row["question"], "measured_s": measured, "predicted_s": said.get("kinds_s", {})}


def compiled_of(row: JournalRow) -> dict[str, Any]:
    rounds = row["rounds_s"]
    found: dict[str, Any] = {"question": row["question"], "eager_s": statistics.mean(rounds["eager"])}
    if "torch.compile" in rounds:
        found["compiled_s"] = statistics.mean(rounds["torch.compile"])
        found["compiled_over_eager"] = ratio_interval(rounds["torch.compile"], rounds["eager"])
    found["not_built"] = not_built(row)
    return found


def not_built(row: JournalRow) -> dict[str, str]:
    return {name: f"{error['error']}: {error['message']}" for name, error in row["not_built"].items()}


# --- memory -----------------------------------------------------------------------------------------------------------


def memory_of(row: JournalRow, predictions: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    found: dict[str, Any] = {
        "question": row["question"],
        "held_out": row["held_out"],
        "counted_bytes": row["counted_bytes"],
        "lines": by_line(row["lines"]),
        **{key: row[key] for key in ("allocated_bytes", "reserved_bytes", "used_bytes") if key in row},
    }
    said = predictions.get(row["question"])
    if said is not None:
        tensors = said["memory_tensor_bytes"]
        found |= {"predicted_bytes": tensors, "predicted_lines": by_line(said["memory_lines"])}
        if row["lines"]:
            found["error"] = tensors / row["counted_bytes"] - 1
        if "allocated_bytes" in row:
            found["error_of_allocated"] = tensors / row["allocated_bytes"] - 1
        if "used_bytes" in row:
            low, high = said["memory_interval_bytes"]
            found["error_of_used"] = said["memory_bytes"] / row["used_bytes"] - 1
            found["used_inside"] = low <= row["used_bytes"] <= high
    return found


def by_line(lines: Mapping[str, int]) -> dict[str, int]:
    """Lines of no tensors (context, allocator, communication) stand in no row of the table."""
    return {name: sum(lines.get(line, 0) for line in parts) for name, parts in LINES.items()}


# --- for people -------------------------------------------------------------------------------------------------------


def text_of(results: Mapping[str, Any]) -> str:
    """Markdown of every table that has rows."""
    machine = results["machine"]
    lines = ["# Measured on one device", ""]
    if machine:
        environment = machine["environment"]
        versions = ", ".join(f"{name} {version}" for name, version in environment["versions"].items())
        lines += [f"{machine['device']}, {format_bytes(machine['memory_bytes'])}; {environment['system']}; {versions}."]
    lines += [f"{results['cases']} cases, {results['seconds']:.0f} s.", ""]
    lines += [*_steps_text(results), *_kinds_text(results), *_products_text(results), *_costs_text(results)]
    lines += _memory_text(results)
    for entry in results["compile"]:
        if "compiled_s" in entry:
            lines.append(f"torch.compile, {entry['question']}: {RATIO.format_map(entry['compiled_over_eager'])} of eager")
    for what in ("failed", "skipped"):
        if results[what]:
            lines += ["", f"## {what.capitalize()}", ""]
            lines += [
                f"- {row['case']}: {row.get('reason') or row['error'] + ', ' + row['message'][:200]}" for row in results[what]
            ]
    return "\n".join(lines) + "\n"


def _steps_text(results: Mapping[str, Any]) -> list[str]:
    if not results["steps"]:
        return []
    lines = ["## Steps", ""]
    for precision, entry in results["predictions"].items():
        changed = "" if entry["unchanged"] else ", CHANGED since"
        lines += [f"Predictions in {precision} frozen before, sha256 {entry['sha256']}{changed}.", ""]
    columns: list[tuple[str, str | Callable[[Any], str]]] = [
        ("step", "{question}"),
        ("predicted", lambda step: format_seconds(step["predicted_s"]) if "predicted_s" in step else "none"),
        ("90% interval", lambda step: " to ".join(map(format_seconds, step.get("interval_s", ()))) + _missed(step, "inside")),
        ("measured", lambda step: format_seconds(step["measured_s"])),
        ("error", lambda step: _percent(step, "error")),
        ("A/A median", lambda step: f"{100 * step['aa_floor_median']:.1f}%"),
        ("A/A p95", lambda step: f"{100 * step['aa_floor_p95']:.1f}%"),
    ]
    for name in dict.fromkeys(name for step in results["steps"] for name in step["executor_over"]):
        columns.append((f"executor / {name}", partial(_ratio, name)))
    lines.append(row_table(results["steps"], columns, words=1))
    for step in results["steps"]:
        far = {name: off for name, off in step["loss_difference"].items() if off > SAME_LOSS}
        lines += [f"\n- {step['question']}: the loss of {name} differs by {100 * off:.2g}%" for name, off in far.items()]
    if results["accuracy"]:
        shown = {
            "median error": "median",
            "p95": "p95",
            "worst": "worst",
            "bias": "bias",
            "A/A median": "aa_floor_median",
            "A/A p95": "aa_floor_p95",
            "inside 90%": "coverage",
        }
        rows = [
            {"steps of": name, "n": entry["cases"]} | {title: 100 * entry[key] for title, key in shown.items()}
            for name, entry in results["accuracy"].items()
        ]
        figures = [(title, f"{{{title}:.1f}}%") for title in shown]
        lines += ["", row_table(rows, [("steps of", "{steps of}"), ("n", "{n}"), *figures], words=1)]
    return [*lines, ""]


def _kinds_text(results: Mapping[str, Any]) -> list[str]:
    lines: list[str] = []
    kinds = [
        (entry["question"], kind, entry["predicted_s"].get(kind), seconds)
        for entry in results["kinds"]
        for kind, seconds in entry["measured_s"].items()
    ]
    if kinds:
        columns = (
            ("step", lambda row: row[0]),
            ("tasks", lambda row: row[1]),
            ("predicted", lambda row: "none" if row[2] is None else format_seconds(row[2])),
            ("measured", lambda row: format_seconds(row[3])),
            ("error", lambda row: f"{100 * (row[2] / row[3] - 1):+.1f}%" if row[2] else ""),
        )
        lines += ["## Parts of a step", "", row_table(kinds, columns, words=2), ""]
    busy = [step for step in results["kernels"] if step["span_s"]]
    if busy:
        columns = (
            ("step", "{question}"),
            ("kernels", "{kernels}"),
            ("device busy", lambda step: format_seconds(step["busy_s"])),
            ("of the time from the first to the last", lambda step: f"{step['busy_s'] / step['span_s']:.0%}"),
        )
        lines += ["## Kernels of a profiled step", "", row_table(busy, columns, words=1), ""]
    return lines


def _products_text(results: Mapping[str, Any]) -> list[str]:
    lines: list[str] = []
    for precision, entry in results["products"].items():
        lines += [f"## Products, {precision}: at most {1e-12 * entry['peak_flop_per_s']:.4g} TFLOP/s", ""]
        columns = (
            ("shape", "{shape}"),
            ("for", "{origin}"),
            ("TFLOP/s", lambda shape: f"{1e-12 * shape['flop_per_s']:.4g}"),
            ("p05 to p95", lambda shape: f"{100 * shape['spread']:.1f}%"),
            ("of the roofline", lambda shape: f"{100 * shape['of_roofline']:.0f}%{' (implausible)' * shape['implausible']}"),
            ("sustained", lambda shape: format_seconds(shape["sustained_s"])),
            ("power", lambda shape: "not known" if shape["power_w"] is None else f"{shape['power_w']:.0f} W"),
        )
        lines += [row_table(entry["shapes"], columns, words=2), ""]
    return lines


def _costs_text(results: Mapping[str, Any]) -> list[str]:
    lines: list[str] = []
    if results["copies"]:
        columns = (
            ("route", lambda copy: copy["route"].replace("_", " ")),
            ("size", lambda copy: format_bytes(copy["size_bytes"])),
            ("GB/s", lambda copy: f"{1e-9 * copy['bytes_per_s']:.4g}"),
        )
        lines += ["## Copies", "", row_table(results["copies"], columns, words=1), ""]
    for name, costs in results["costs"].items():
        told = ", ".join(f"{key.removesuffix('_s').replace('_', ' ')} {format_seconds(value)}" for key, value in costs.items())
        lines.append(f"- {name}: {told}")
    return [*lines, ""] if lines else []


def _memory_text(results: Mapping[str, Any]) -> list[str]:
    if not results["memory"]:
        return []
    columns = (
        ("step", "{question}"),
        ("predicted", lambda entry: format_bytes(entry["predicted_bytes"]) if "predicted_bytes" in entry else "none"),
        ("counted", lambda entry: format_bytes(entry["counted_bytes"]) if entry["counted_bytes"] else "not counted"),
        ("error", lambda entry: _percent(entry, "error")),
        ("allocator", lambda entry: format_bytes(entry["allocated_bytes"]) if "allocated_bytes" in entry else ""),
        ("its error", lambda entry: _percent(entry, "error_of_allocated")),
        ("with context", lambda entry: _percent(entry, "error_of_used") + _missed(entry, "used_inside")),
        ("largest error of a line", _farthest_line),
    )
    return ["## Memory of tensors", "", row_table(results["memory"], columns, words=1), ""]


def _farthest_line(entry: Mapping[str, Any]) -> str:
    if "error" not in entry:
        return ""
    off = {name: entry["predicted_lines"][name] - size for name, size in entry["lines"].items()}
    line = max(off, key=lambda name: abs(off[name]))
    return f"{line}, {100 * off[line] / entry['counted_bytes']:+.1f}% of the peak"


def _percent(entry: Mapping[str, Any], key: str) -> str:
    return f"{100 * entry[key]:+.1f}%" if key in entry else ""


def _missed(entry: Mapping[str, Any], inside: str) -> str:
    return "" if entry.get(inside, True) else " (missed)"


def _ratio(name: str, step: Mapping[str, Any]) -> str:
    """Of the executor to another program, where that was measured."""
    return RATIO.format_map(step["executor_over"][name]) if name in step["executor_over"] else ""
