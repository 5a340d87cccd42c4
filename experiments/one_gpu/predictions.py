"""What the profile says of every step, frozen under a hash before the first of them is measured."""

from __future__ import annotations

import base64
import gzip
import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from questions import GRANULARITY, Question

from parsim.costs.observed import task_durations_s
from parsim.hardware.cluster import cluster_from_profile
from parsim.hardware.profile import Profile, Sourced, SourceEntry, parse_profile
from parsim.model.formats import Numerics
from parsim.model.load import load_model
from parsim.predict.evaluate import evaluate
from parsim.predict.problem import PlanningProblem
from parsim.work import kind_of
from tools.gpu.journal import DONE, STATUS, JournalRow

PROFILE_PRECISIONS = {"fp32": "fp32", "tf32": "tf32", "bf16": "amp_bf16", "fp16": "amp_fp16", "fp8": "fp8"}
"""The profile's name of each precision of products."""

PRODUCTS_SOURCE, COPIES_SOURCE = "products", "copies_on_device"


def predict(profile: Profile, question: Question) -> dict[str, Any]:
    """Seconds of the mean step with its 90% interval, by kind of task, the sources of the prices, and memory by line.

    The batch lies on the device, so loading costs nothing here.
    """
    model = load_model(question.spec, granularity=GRANULARITY)
    problem = PlanningProblem(
        model=model,
        cluster=cluster_from_profile(without_loading(profile), 1),
        global_batch=question.batch,
        numerics=Numerics(precision=question.precision, optimizer=question.optimizer),
    )
    plan = question.plan(tuple(component.name for component in model.components))
    evaluation = evaluate(problem, plan, fold=False)
    kinds: dict[str, float] = {}
    for task, seconds in zip(
        evaluation.graph.tasks, task_durations_s(len(evaluation.graph.tasks), evaluation.timeline, complete=True), strict=True
    ):
        kinds[kind_of(task.work)] = kinds.get(kind_of(task.work), 0.0) + float(seconds)
    interval, (memory,) = evaluation.result.step_s, evaluation.memory
    return {
        "question": question.name,
        "model": question.model,
        "precision": question.precision,
        "held_out": question.held_out,
        "step_s": [interval.median, interval.p05, interval.p95],
        "kinds_s": kinds,
        "sources": dict(evaluation.result.cost_sources),
        "memory_lines": dict(memory.lines),
        "memory_tensor_bytes": sum(memory.tensor_lines.values()),
        "memory_bytes": memory.total_bytes,
        "memory_interval_bytes": [memory.low_bytes, memory.high_bytes],
    }


def without_loading(profile: Profile) -> Profile:
    if profile.host is None:
        return profile
    nothing = {"load_s": 0.0, "load_seconds_per_byte": 0.0, "load_part_s": 0.0}
    return profile.model_copy(update={"host": profile.host.model_copy(update=nothing)})


def frozen(predictions: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The predictions with the hash of their canonical JSON, by which anyone can tell that they stayed as they were."""
    return {"sha256": digest(predictions), "predictions": list(predictions)}


def digest(predictions: Sequence[Mapping[str, Any]]) -> str:
    text = json.dumps(list(predictions), sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()


def packed_profile(profile: Profile) -> str:
    """As text for a row, so that rows alone are enough to go on."""
    return base64.b64encode(gzip.compress(profile.model_dump_json().encode(), mtime=0)).decode()


def unpacked_profile(text: str) -> Profile:
    return parse_profile(gzip.decompress(base64.b64decode(text)).decode(), "the row of the calibration")


def with_machine_facts(profile: Profile, rows: Iterable[JournalRow], *, command: str) -> Profile:
    """The calibrated profile with the peaks of the device microbenchmarks: flop per second of the fastest product by
    precision, and bytes per second of the fastest copy from beyond the cache."""
    done = [row for row in rows if row[STATUS] == DONE]
    peaks: dict[str, float] = {}
    for row in done:
        if "flop_per_s" in row:
            name = PROFILE_PRECISIONS[row["precision"]]
            peaks[name] = max(peaks.get(name, 0.0), row["flop_per_s"])
    copies = [row["bytes_per_s"] for row in done if row.get("route") == "on_device" and row["beyond_cache"]]
    ((name, entry),) = profile.device_types.items()
    update: dict[str, Any] = {
        "peak_flop_per_s": {
            **entry.peak_flop_per_s,
            **{precision: Sourced(value=value, source=PRODUCTS_SOURCE) for precision, value in peaks.items()},
        }
    }
    sources = {**profile.sources}
    if peaks:
        sources[PRODUCTS_SOURCE] = SourceEntry(
            kind="measurement",
            text="fastest matrix product of each precision, median: operands rotate beyond the cache, calls queued behind a "
            "sleep kernel and timed by events",
        )
    if copies:
        update["memory_bandwidth_bytes_per_s"] = Sourced(value=max(copies), source=COPIES_SOURCE)
        sources[COPIES_SOURCE] = SourceEntry(
            kind="measurement",
            text="fastest copy on the device beyond its cache, bytes read plus written, timed as products are",
        )
    provenance = profile.provenance.model_copy(update={"command": command})
    return profile.model_copy(
        update={"device_types": {name: entry.model_copy(update=update)}, "sources": sources, "provenance": provenance}
    )


def without_held(profile: Profile, held_bytes: int) -> Profile:
    """The profile with a context that leaves out what the programme's own process held of the GPU while the other measured it:
    a driver tells what is in use by all processes."""
    ((name, entry),) = profile.device_types.items()
    context = entry.context_bytes
    alone = Sourced(value=max(0.0, context.value - held_bytes), source=context.source)
    return profile.model_copy(update={"device_types": {name: entry.model_copy(update={"context_bytes": alone})}})
