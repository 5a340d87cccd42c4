"""Every case of the programme, in order of value; see README.md for why this order."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from kernels import in_a_process
from predictions import (
    PROFILE_PRECISIONS,
    digest,
    frozen,
    packed_profile,
    predict,
    unpacked_profile,
    with_machine_facts,
    without_held,
)
from programs import EagerStep, ExecutorStep, Program, build_all, compiled, graphed, interleaved, let_go
from questions import GRANULARITY, Question, Scope
from supervise import scratch_folder

from calibration.rounds.calibrate import CalibrationRequest, calibrate, stopped_points, unfitted_path
from calibration.rounds.request import raw_path, save_raw
from parsim.errors import ExecutionError
from parsim.execute.processes.launch import launch
from parsim.execute.processes.machine import describe_environment
from parsim.execute.rank_run import FILLING
from parsim.files import write_text_atomically
from parsim.hardware.profile import save_profile
from parsim.numeric import keep_nothing, keep_what_is_there
from parsim.units import format_bytes, format_seconds
from tools.gpu.board import BoardWatch, find_reader
from tools.gpu.copies import Route, measure_copy
from tools.gpu.device import MeasuredDevice, SpoiledProcessError
from tools.gpu.journal import AGAIN, JournalRow
from tools.gpu.launches import event_cost, graph_cost, launch_cost, synchronisation_cost
from tools.gpu.products import PRECISIONS, Product, measure_product
from tools.gpu.programme import FAILURE_KEYS, BenchmarkCase, failure

CALIBRATION, PREDICTIONS = "calibration ", "predictions "
"""Before the precision."""

PREDICTIONS_FILE = "predictions.json"
COMMAND = "python experiments/one_gpu/run.py"
HOST_ROUTES: tuple[Route, ...] = ("to_device", "to_host", "to_device_pageable", "to_host_pageable")
BY_VALUE = ("bf16", "fp8", "tf32", "fp16", "fp32")
"""Precisions of products: those that published tables of this GPU have least of, first."""

LARGE_FLOP = 2 * 2048**3
"""Products from here on are sustained for more than a second."""

CALIBRATION_OVERHEAD_S = 75.0
"""Of a calibration beside its budgets: the start of the rank, building the models, what sections warm up, the fits."""

KERNELS_MARGIN_S = 10.0
"""Of the budget, behind the profiled steps."""

Rows = Mapping[str, JournalRow]


class Programme:
    """The cases of one scope on one device, writing into one folder."""

    def __init__(self, device: MeasuredDevice, scope: Scope, out: Path, *, seed: int, say: Callable[[str], None]) -> None:
        self.device, self.scope, self.out, self.seed, self.say = device, scope, out, seed, say

    def cases(self) -> list[BenchmarkCase]:
        """In order of value: what a prediction needs, predictions and steps, their memory, operators, variants, all else."""
        scope = self.scope
        first = scope.precisions[0]
        device_sizes, host_sizes = scope.copy_sizes[::-1], scope.host_sizes[::-1]
        peaks = [name for name in PRECISIONS if PROFILE_PRECISIONS[name] in scope.precisions]
        return [
            self._case("machine", 10, self._machine),
            self._case("cost of a launch", 8, lambda *_: launch_cost(self.device)),
            self._case("cost of an event", 8, lambda *_: event_cost(self.device.clock)),
            self._case("cost of waiting", 2, lambda *_: synchronisation_cost(self.device)),
            self._case("cost of a graph replay", 8, lambda *_: graph_cost(self.device)),
            *(self._product(scope.products[0], name) for name in peaks),
            self._copy("on_device", device_sizes[0]),
            *self._predicted(first),
            *(self._rounds(question) for question in scope.steps_in(first)[: scope.fewer]),
            *(self._memory(question) for question in scope.steps_in(first)[: scope.fewer]),
            *(self._product(product, name) for product in scope.products[1:] for name in BY_VALUE),
            *(self._copy(route, size) for route in HOST_ROUTES[:2] for size in host_sizes),
            *(self._copy("on_device", size) for size in device_sizes[1:]),
            *(self._product(scope.products[0], name) for name in BY_VALUE if name not in peaks),
            *(case for precision in scope.precisions for case in self._steps(precision)),
            *(self._copy(route, size) for route in HOST_ROUTES[2:] for size in host_sizes),
            *(self._compiled(question) for question in scope.steps_in(first) if question.compiled),
        ]

    def _predicted(self, precision: str) -> Iterator[BenchmarkCase]:
        calibration_s = sum(self.scope.calibration_s) + CALIBRATION_OVERHEAD_S
        yield self._case(calibration_name(precision), calibration_s, partial(self._calibration, precision))
        needs = (calibration_name(precision),)
        yield self._case(predictions_name(precision), 45, partial(self._predictions, precision), needs=needs)

    def _steps(self, precision: str) -> Iterator[BenchmarkCase]:
        """What is left of a precision: its predictions and steps; then memory, recomputation and microbatches."""
        scope = self.scope
        steps, variants = scope.steps_in(precision), scope.variants_in(precision)
        if precision == scope.precisions[0]:
            steps = steps[scope.fewer :]  # the first have run before all operators
        else:
            yield from self._predicted(precision)
        yield from (self._rounds(question) for question in steps)
        yield from (self._variant(question) for question in variants)
        yield from (self._memory(question) for question in (*steps, *variants))
        yield self._kernels(precision)

    def _case(
        self,
        name: str,
        estimate_s: float,
        measure: Callable[[Rows, float], dict[str, Any]],
        *,
        needs: tuple[str, ...] = (),
        after: tuple[str, ...] = (),
    ) -> BenchmarkCase:
        def tidied(rows: Rows, remaining_s: float) -> dict[str, Any]:
            let_go(self.device.device)
            return measure(rows, remaining_s)

        return BenchmarkCase(name=name, estimate_s=self.scope.patience * estimate_s, measure=tidied, needs=needs, after=after)

    # --- the machine ------------------------------------------------------------------------------------------------------

    def _machine(self, _: Rows, __: float) -> dict[str, Any]:
        reader, source = find_reader(self.device.uuid)
        facts: dict[str, Any] = {
            "device": self.device.name,
            "cache_bytes": self.device.cache_bytes,
            "memory_bytes": self.device.memory_bytes,
            "environment": describe_environment(),
            "board_now": reader() if reader is not None else {"absent": source},
        }
        if self.device.device.type == "cuda":
            properties = torch.cuda.get_device_properties(self.device.device)
            facts |= {
                "multiprocessors": properties.multi_processor_count,
                "compute_capability": [properties.major, properties.minor],
                "free_bytes": torch.cuda.mem_get_info(self.device.device)[0],
            }
        return {**facts, "headline": f"{self.device.name}, {format_bytes(self.device.memory_bytes)}"}

    def _product(self, product: Product, precision: str) -> BenchmarkCase:
        large = product.flop >= LARGE_FLOP
        least_s = self.scope.sustained_s if large else self.scope.short_s
        measure = partial(measure_product, self.device, product, PRECISIONS[precision], least_s=least_s, seed=self.seed)
        return self._case(f"product {precision} {product}", 4 if large else 2, lambda *_: measure())

    def _copy(self, route: Route, size_bytes: int) -> BenchmarkCase:
        measure = partial(measure_copy, self.device, route, size_bytes, least_s=self.scope.short_s)
        return self._case(f"copy {route} {format_bytes(size_bytes)}", 3, lambda *_: measure())

    # --- calibration and predictions --------------------------------------------------------------------------------------

    def _calibration(self, precision: str, rows: Rows, remaining_s: float) -> dict[str, Any]:
        """Components and operators by the calibration that every machine gets, in a process of its own."""
        scope, path = self.scope, profile_path(self.out, self.scope, precision)
        components_s, operators_s = scope.calibration_s
        request = CalibrationRequest(
            models=scope.calibrated,
            device=self.device.device.type,
            nproc=1,
            optimizers=("sgd_momentum", "adamw"),
            precision=precision,
            granularities=(GRANULARITY,),
            quick=scope.quick_calibration,
            shard_ways=(),
            compute_budget_s=components_s,
            operator_budget_s=operators_s,
            seed=self.seed,
        )
        work = scratch_folder(self.out)
        calibrated = work / path.name

        def launcher(
            job_path: Path,
            nproc: int,
            *,
            module: str = "calibration",
            timeout_s: float | None = None,
            on_line: Callable[[str], None] | None = None,
        ) -> None:
            within_s = remaining_s if timeout_s is None else min(timeout_s, remaining_s)
            launch(job_path, nproc, module=module, timeout_s=within_s, on_line=on_line)

        held_bytes = used_bytes(self.device)
        try:
            profile = without_held(calibrate(request, calibrated, on_line=self.say, launcher=launcher), held_bytes)
        except Exception:  # whatever it was, what was measured may never be measured again
            stopped = stopped_points(request, calibrated)
            if stopped is not None:
                save_raw(stopped, unfitted_path(path))
            elif unfitted_path(calibrated).is_file():
                unfitted_path(path).write_bytes(unfitted_path(calibrated).read_bytes())
            raise
        unfitted_path(path).unlink(missing_ok=True)  # of an earlier call that the budget ended
        raw_path(path).write_bytes(raw_path(calibrated).read_bytes())
        profile = with_machine_facts(profile, rows.values(), command=COMMAND)
        save_profile(profile, path)
        compute = profile.compute
        return {
            "precision": precision,
            "profile": packed_profile(profile),
            "components": len(compute.components),
            "operators": len(compute.operator_points),
            "surfaces": len(compute.operator_surfaces),
            "held_bytes": held_bytes,
            "warnings": list(profile.provenance.warnings),
            "headline": f"{len(compute.components)} component and {len(compute.operator_points)} operator points",
        }

    def _predictions(self, precision: str, rows: Rows, _: float) -> dict[str, Any]:
        """Every step of this precision that nobody has measured yet; for one that was, a prediction comes too late."""
        everything = self.scope.questions_in(precision)
        questions = [question for question in everything if rounds_name(question) not in rows]
        if not questions:
            raise ExecutionError("predictions come before measurements, but every step has a row; start in a new folder")
        profile = unpacked_profile(rows[calibration_name(precision)]["profile"])
        said, unpriced = [], {}
        for question in questions:
            try:
                said.append(predict(profile, question))
            except Exception as error:  # one model without a price must not take the others' predictions
                unpriced[question.name] = f"{type(error).__name__}: {error}"
        document = frozen(said)
        write_predictions(self.out, {**rows, predictions_name(precision): document})
        return {
            "precision": precision,
            **document,
            "unpriced": unpriced,
            "too_late": [question.name for question in everything if question not in questions],
            "headline": f"{len(said)} steps, sha256 {document['sha256'][:12]}",
        }

    # --- steps ------------------------------------------------------------------------------------------------------------

    def _rounds(self, question: Question) -> BenchmarkCase:
        """The executor, eager torch and a CUDA graph. They wait for the predictions, whatever came of them.

        Where the graph could not be captured in an earlier process, the other two.
        """

        def measure(rows: Rows, remaining_s: float) -> dict[str, Any]:
            device = self.device.device
            builders = [
                ("executor", lambda: ExecutorStep(question, device).as_program()),
                ("eager", lambda: EagerStep(question, device).as_program()),
                ("cuda graph", lambda: graphed(question, device)),
            ]
            earlier = rows.get(rounds_name(question), {})
            if earlier.get(AGAIN, False) and earlier["error"] == SpoiledProcessError.__name__:
                told = {"cuda graph": {key: earlier[key] for key in FAILURE_KEYS}}
                found = self._interleaved(question, builders[:2], rows, remaining_s)
                return {**found, "not_built": {**found["not_built"], **told}}
            return self._interleaved(question, builders, rows, remaining_s)

        estimate_s = 2 * self.scope.round_budget_s + 15
        name, after = rounds_name(question), (predictions_name(question.precision),)
        return replace(self._case(name, estimate_s, measure, after=after), again=True)

    def _variant(self, question: Question) -> BenchmarkCase:
        """The executor alone, against itself: nobody else recomputes or cuts the batch by the same plan."""

        def measure(rows: Rows, remaining_s: float) -> dict[str, Any]:
            builders = [("executor", lambda: ExecutorStep(question, self.device.device).as_program())]
            return self._interleaved(question, builders, rows, remaining_s)

        return self._case(
            rounds_name(question), self.scope.round_budget_s + 15, measure, after=(predictions_name(question.precision),)
        )

    def _compiled(self, question: Question) -> BenchmarkCase:
        """torch.compile against eager torch."""

        def measure(rows: Rows, remaining_s: float) -> dict[str, Any]:
            device = self.device.device
            builders = [
                ("eager", lambda: EagerStep(question, device).as_program()),
                ("torch.compile", lambda: compiled(question, device)),
            ]
            return self._interleaved(question, builders, rows, remaining_s)

        return self._case(f"compile {question.name}", 2 * self.scope.round_budget_s + 80, measure)

    def _interleaved(self, question: Question, builders: list[Any], rows: Rows, remaining_s: float) -> dict[str, Any]:
        programs, failed = build_all(builders)
        keep_what_is_there()  # as training does: a collection of garbage would lengthen the step that it falls on
        reader, source = find_reader(self.device.uuid) if self.device.device.type == "cuda" else (None, "a CPU has no board")
        watch = BoardWatch(reader, source)
        try:
            with watch.open():
                found = interleaved(self.device.clock, programs, self.scope, seed=self.seed, remaining_s=remaining_s)
        finally:
            keep_nothing()
            close_all(programs)
        first = found["rounds_s"][programs[0].name]
        mean_s = sum(first) / len(first)
        told = {"question": question.name, "held_out": question.held_out, "predicted": frozen_hash(rows, question.precision)}
        found |= {"not_built": failed, "board_of_rounds": watch.summary()}
        return {**told, **found, "headline": f"{programs[0].name} {format_seconds(mean_s)}"}

    def _memory(self, question: Question) -> BenchmarkCase:
        """The peak of one step of the executor alone in memory, by line and as the allocator saw it; and the seconds of its
        tasks."""

        def measure(rows: Rows, _: float) -> dict[str, Any]:
            device = self.device.device
            before = torch.cuda.memory_allocated(device) if device.type == "cuda" else 0
            executor = ExecutorStep(question, device)
            try:
                executor.step()
                found: dict[str, Any] = {"question": question.name, "held_out": question.held_out}
                if device.type == "cuda":
                    self.device.clock.synchronize()
                    torch.cuda.empty_cache()  # what cases before have left there
                    torch.cuda.reset_peak_memory_stats(device)
                    for _ in range(FILLING):
                        executor.step()
                    self.device.clock.synchronize()
                    found |= {
                        "allocated_bytes": torch.cuda.max_memory_allocated(device) - before,
                        "reserved_bytes": torch.cuda.max_memory_reserved(device),
                        "used_bytes": used_bytes(self.device),
                    }
                found["tasks_s"] = executor.task_seconds()
                lines, counting = counted_lines(executor)
            finally:
                executor.streams.close()
            total = sum(lines.values())
            headline = f"counted {format_bytes(total)}" if lines else f"not counted: {counting['error']}"
            return {**found, "lines": lines, "counted_bytes": total, "counting": counting, "headline": headline}

        return self._case(f"memory {question.name}", 10, measure, after=(predictions_name(question.precision),))

    def _kernels(self, precision: str) -> BenchmarkCase:
        """Of one step of every model, behind its measurements: what explains an error of a prediction."""
        scope, kind = self.scope, self.device.device.type

        def measure(_: Rows, remaining_s: float) -> dict[str, Any]:
            path = scratch_folder(self.out) / f"kernels-{precision}.jsonl"
            within_s = max(1.0, remaining_s - KERNELS_MARGIN_S)
            found = in_a_process(precision, kind, quick=scope.quick_calibration, out=path, timeout_s=within_s)
            if not found["steps"]:
                raise ExecutionError(f"nothing was profiled: {found['ended']}")
            return {"precision": precision, **found, "headline": f"{len(found['steps'])} steps profiled"}

        needs = len(scope.steps_in(precision))
        return self._case(f"kernels {precision}", 20 + 6 * needs, measure, after=(predictions_name(precision),))


def close_all(programs: list[Program]) -> None:
    for program in programs:
        program.close()


def counted_lines(executor: ExecutorStep) -> tuple[dict[str, int], dict[str, Any]]:
    """Bytes by line; where counting fails none, and why: what the allocator saw is worth keeping without them."""
    try:
        return executor.memory_lines(), {}
    except Exception as error:
        return {}, failure(error)


def rounds_name(question: Question) -> str:
    return f"step {question.name}"


def used_bytes(device: MeasuredDevice) -> int:
    """Of the GPU, by all processes, as its driver tells it; 0 for a CPU, whose processes are counted one by one."""
    if device.device.type != "cuda":
        return 0
    free, total = torch.cuda.mem_get_info(device.device)
    return total - free


def calibration_name(precision: str) -> str:
    return CALIBRATION + precision


def predictions_name(precision: str) -> str:
    return PREDICTIONS + precision


def profile_path(out: Path, scope: Scope, precision: str) -> Path:
    return out / f"{scope.profile_name}-{precision}.json"


def write_predictions(out: Path, rows: Rows) -> None:
    """All that were frozen so far, by precision, each with its hash."""
    document = {
        name.removeprefix(PREDICTIONS): {key: row[key] for key in ("sha256", "predictions")}
        for name, row in rows.items()
        if name.startswith(PREDICTIONS) and "sha256" in row
    }
    if document:
        write_text_atomically(out / PREDICTIONS_FILE, json.dumps(document, indent=1))


def frozen_hash(rows: Rows, precision: str) -> str | None:
    """Of the predictions there were when a step was measured; None: there were none. Raises if they were changed since."""
    row = rows.get(predictions_name(precision), {})
    if "sha256" not in row:
        return None
    if digest(row["predictions"]) != row["sha256"]:
        raise ExecutionError("the predictions in the journal are not those that were frozen; start in a new folder")
    return str(row["sha256"])
