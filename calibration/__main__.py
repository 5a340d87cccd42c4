"""One measuring rank: `torchrun ... -m calibration JOB.json`. JOB.json is a CalibrationRequest; the models lie beside it as
`model-N.json`; rank 0 leaves `raw.json` there."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from calibration.build_profile import all_reduce_sizes
from calibration.measure_collectives import COLLECTIVES, Bench, make_bench, measure_all
from calibration.measure_components import DTYPES, Case, make_case, measure_rounds
from calibration.measure_device import measure_device
from calibration.measure_operators import measure_operators
from calibration.measure_overlap import measure_overlap
from calibration.measure_shards import measure_shards
from calibration.request import CalibrationRequest, active_levels
from parsim.execute.environment import describe_environment
from parsim.execute.group import Place, close_group, init_group, make_groups, read_place, worker_main
from parsim.execute.pinning import available_cores, prepare_rank
from parsim.files import write_text_atomically
from parsim.graph.taskgraph import work_text
from parsim.model.model import Model
from parsim.units import MIB

OVERLAP_BYTES = (MIB, 4 * MIB)
QUICK_OVERLAP_BYTES = (MIB,)


def main(job_path: Path) -> None:
    """Measure everything the request asks for."""
    request = CalibrationRequest.from_json(job_path.read_text())
    cores = len(available_cores())
    place = read_place()
    prepare_rank(place.local_rank, place.world_size, device=request.device)
    place = init_group(request.device)
    device = torch.device(place.device)
    facts = measure_device(device, DTYPES[request.precision], name=describe_environment()["processor"])
    asked = request.measured_models
    models = [Model.load(job_path.parent / f"model-{number}.json") for number in range(len(asked))]
    cases = [
        make_case(number, spec, model, samples, request, device)
        for number, ((spec, batches, _), model) in enumerate(zip(asked, models, strict=True))
        for samples in batches
    ]
    _say(place, f"{len(cases)} cases of {len(models)} models ready on {place.world_size} ranks")
    levels = active_levels(place.world_size, cores if request.device == "cpu" else place.world_size)
    groups = make_groups([(f"level {active}", tuple(range(active))) for active in levels])
    own = {active: groups.get((f"level {active}", tuple(range(active)))) for active in levels}
    mine: dict[str, Any] = measure_rounds(cases, own, request, device, lambda line: _say(place, line))
    shards = measure_shards(cases, own[place.world_size], request, device, lambda line: _say(place, line))
    operators = measure_operators(
        own[place.world_size], request, DTYPES[request.precision], device, lambda line: _say(place, line)
    )
    bench = make_bench(device, DTYPES[request.precision], cores, 0.1 if request.quick else 0.3)
    overlap = _overlaps(cases, bench, request, place)
    sizes = all_reduce_sizes(models, request.collective_sizes_bytes, bench.dtype.itemsize)
    collectives = measure_all(bench, sizes, tuple(COLLECTIVES), lambda line: _say(place, line))
    gathered: list[Any] = [None] * place.world_size
    dist.gather_object(
        {**mine, "shards": shards, "operators": operators, "device": facts.to_dict()}, gathered if place.rank == 0 else None
    )
    if place.rank == 0:
        raw = {
            "ranks": gathered,
            "cases": [_case_entry(case) for case in cases],
            "collectives": collectives,
            "overlap": overlap,
            "environment": describe_environment(),
        }
        write_text_atomically(job_path.parent / "raw.json", json.dumps(raw))
    close_group(place)


def _overlaps(cases: list[Case], bench: Bench, request: CalibrationRequest, place: Place) -> list[dict[str, Any]]:
    """Each model at its middle batch, beside each size."""
    if place.world_size == 1:
        return []
    _say(place, "overlap of computation and all_reduce")
    chosen = []
    for number in range(len(request.measured_models)):
        own = sorted((case for case in cases if case.number == number), key=lambda case: case.samples)
        chosen.append(own[len(own) // 2])
    sizes = QUICK_OVERLAP_BYTES if request.quick else OVERLAP_BYTES
    results = [measure_overlap(case, bench, size_bytes) for case in chosen for size_bytes in sizes]
    return [result for result in results if result is not None]


def _case_entry(case: Case) -> dict[str, Any]:
    """Which work each task of the case's graph is, in the text form of graphs."""
    return {"model": case.number, "samples": case.samples, "tasks": [work_text(task.work) for task in case.graph.tasks]}


def _say(place: Place, line: str) -> None:
    if place.rank == 0:
        print(line, flush=True)


if __name__ == "__main__":
    worker_main(main)
