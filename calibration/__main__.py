"""One measuring rank: `python -m calibration JOB.json`, started by `launch` or torchrun.

JOB.json is a CalibrationRequest; the models lie in the same folder as `model-N.json`. Rank 0 writes what does not change
(START), and one file for every turn (see `calibration.rounds.turns`).
"""

from __future__ import annotations

import json
import socket
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import torch

from calibration.measure.allocator import measure_allocator, reading_bytes
from calibration.measure.collectives import affordable_sizes, collective_section, make_bench
from calibration.measure.communication_points import all_reduce_sizes
from calibration.measure.components import Case, component_section, make_case
from calibration.measure.device import DTYPES, OPERATOR_DTYPES, arithmetic_settings, measure_device, set_arithmetic
from calibration.measure.operators import operator_section
from calibration.measure.overlap import overlap_section
from calibration.measure.shards import shard_section
from calibration.rounds.environment import core_count
from calibration.rounds.request import CalibrationRequest, active_levels
from calibration.rounds.turns import START, take_turns
from parsim.execute.cuda.gpu import prepare_cuda
from parsim.execute.processes.exchange import gather_values
from parsim.execute.processes.group import ProcessPlace, close_group, init_group, make_groups, read_place, worker_main
from parsim.execute.processes.machine import describe_environment
from parsim.execute.processes.output import write_progress
from parsim.execute.processes.setup import Pinning, prepare_rank
from parsim.execute.processes.speed_probe import SpeedProbe
from parsim.files import write_text_atomically
from parsim.model.model import Model
from parsim.numeric import keep_what_is_there
from parsim.program.taskgraph import work_text
from parsim.units import format_bytes


def main(job_path: Path) -> None:
    """Measure everything the request asks for."""
    request = CalibrationRequest.from_json(job_path.read_text())
    place = read_place()
    if request.device == "cuda":
        prepare_cuda(place.rank)  # before the environment: to name the GPUs, CUDA begins
    environment = describe_environment()  # before pinning: with all cores this process may use
    pinning = prepare_rank(place.local_rank, place.local_world_size, device=request.device)
    place = init_group(request.device)
    set_arithmetic(request.precision)
    device, dtype, operands = torch.device(place.device), DTYPES[request.precision], OPERATOR_DTYPES[request.precision]
    pinnings = _pinnings(pinning, place)
    cores = core_count(pinnings)
    facts = measure_device(device, operands, name=environment["processor"])
    asked = request.measured_models
    models = [Model.load(job_path.parent / f"model-{number}.json") for number in range(len(asked))]
    trials = [
        partial(make_case, number, spec, models[number], samples, request, device)
        for number, (spec, batches) in enumerate(request.models)  # at the first granularity
        for samples in sorted({min(batches), max(batches)})
    ]
    read_bytes = reading_bytes((spec for spec, _ in request.models), request.seed)
    if device.type == "cuda":
        read_bytes = 0  # libraries that read samples take memory of the host
    beside = [{**entry, "reading_bytes": read_bytes} for entry in measure_allocator(trials, facts.context_bytes)]
    cases = [
        make_case(number, spec, model, samples, request, device)
        for number, ((spec, batches, _), model) in enumerate(zip(asked, models, strict=True))
        for samples in batches
    ]
    set_arithmetic(request.precision)  # again: modules of users that were imported meanwhile may have set it
    _say(place, f"{len(cases)} cases of {len(models)} models ready on {place.world_size} ranks")
    levels = active_levels(place.world_size, cores)
    groups = make_groups([(f"level {active}", tuple(range(active))) for active in levels])
    own = {active: groups.get((f"level {active}", tuple(range(active)))) for active in levels}
    wanted = all_reduce_sizes(models, request.collective_sizes_bytes, dtype.itemsize) if place.world_size > 1 else ()
    sizes = affordable_sizes(wanted, place.world_size, device)
    if len(sizes) < len(wanted):
        most = f"above {format_bytes(max(sizes))} " if sizes else ""
        _say(place, f"note: collectives {most}are left out, their arrays take too much memory")
    bench = make_bench(device, dtype, cores, max(sizes, default=0))
    probe = SpeedProbe(device) if pinning.first else None
    host = SpeedProbe(torch.device("cpu")) if device.type == "cuda" else None
    sections = (
        component_section(cases, own, request, device, probe, host),
        shard_section(cases, max(levels), own[max(levels)], request, device),
        operator_section(own[max(levels)], request, operands, device, probe),
        collective_section(bench, sizes, request, probe),
        overlap_section(cases, bench, request, probe),
    )
    mine = {"device": facts.to_dict(), "pinning": pinnings[place.rank], "allocator": beside}
    gathered = gather_values(mine)
    if place.rank == 0:
        known = {**environment, "arithmetic": arithmetic_settings()}
        start = {"ranks": gathered, "cases": [_case_entry(case) for case in cases], "environment": known}
        write_text_atomically(job_path.parent / START, json.dumps(start))
    there = [section for section in sections if section is not None]
    keep_what_is_there()  # as training does, whose steps no collection of garbage lengthens
    take_turns(there, job_path.parent, place, lambda line: _say(place, line))
    close_group(place)


def _pinnings(own: Pinning, place: ProcessPlace) -> list[dict[str, Any]]:
    """How every rank is pinned, and on which host: hosts are numbered, so their names stay private."""
    found = gather_values((socket.gethostname(), asdict(own)))
    hosts = list(dict.fromkeys(host for host, _ in found))
    return [{**pinning, "host": hosts.index(host)} for host, pinning in found]


def _case_entry(case: Case) -> dict[str, Any]:
    """Which work each task of the case's graph is, in the text form of graphs."""
    return {"model": case.number, "samples": case.samples, "tasks": [work_text(task.work) for task in case.graph.tasks]}


def _say(place: ProcessPlace, line: str) -> None:
    if place.rank == 0:
        write_progress(line)


if __name__ == "__main__":
    worker_main(main)
