"""Measure a machine's speed factor again, and nothing else: `python -m calibration.rounds.refresh JOB.json` is one rank of it.

A machine that others share is a quarter faster or slower an hour later, at everything alike. The seconds of the probe
now, over those of the calibration, are that factor (`parsim.hardware.speed_factor`). As in the calibration, the probe
runs before and after training steps of the measured models. Probes in a row find their own data in the caches. They took
12% less on an Intel Xeon with 2 MiB of cache per core (2026-11-22), as if the machine had become faster. A GPU is warm, and has
the power and clocks of steps in a row, as it had then.
"""

from __future__ import annotations

import datetime
import itertools
import json
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from calibration.measure.components import KEPT_STEPS, WARM_STEPS, Case, make_case
from calibration.measure.device import DTYPES, set_arithmetic
from calibration.rounds.request import CalibrationRequest, load_raw, raw_path
from calibration.rounds.turns import alone
from parsim.errors import ConfigError
from parsim.execute.cuda.driver import warm_gpu
from parsim.execute.processes.exchange import gather_values
from parsim.execute.processes.group import close_group, init_group, read_place, worker_main
from parsim.execute.processes.launch import launch
from parsim.execute.processes.machine import differences_from_here
from parsim.execute.processes.setup import prepare_rank
from parsim.execute.processes.speed_probe import SpeedProbe
from parsim.files import write_text_atomically
from parsim.hardware.compose import load_profile
from parsim.hardware.profile import PaceToday, Profile, save_profile
from parsim.hardware.speed_factor import probe_seconds, speed_since
from parsim.model.model import Model
from parsim.units import format_seconds

SECONDS = 20.0
FOUND = "pace.json"


def refresh(path: Path, *, seconds: float = SECONDS) -> Profile:
    """Look at the pace of the cores for so long, and save the profile with it.

    Raises:
        ConfigError: no profile of this machine, or one without a pace. ProfileError: no profile, or no raw points in its
            folder, which list the measurements. ExecutionError: a rank failed.
    """
    if not path.is_file():
        raise ConfigError(f"{path} is not a file; --refresh takes a profile that `parsim calibrate` wrote on this machine")
    with alone(path):
        profile = load_profile(str(path))
        if probe_seconds(profile) is None:
            raise ConfigError(f"{path} does not say how fast the cores were while it was measured; calibrate again")
        if other := differences_from_here(profile):
            raise ConfigError(f"{'; '.join(other)}; refreshing changes the pace alone")
        points = load_raw(raw_path(path))
        with tempfile.TemporaryDirectory() as folder:
            job = Path(folder) / "job.json"
            job.write_text(json.dumps({"seconds": seconds, "request": points.request.to_json()}))
            for number, model in enumerate(points.models):
                model.save(job.parent / f"model-{number}.json")
            launch(job, len(profile.devices), module="calibration.rounds.refresh")
            found = json.loads((job.parent / FOUND).read_text())
        created = datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d %H:%M UTC")
        profile = profile.model_copy(update={"today": PaceToday(created=created, **found)})
        save_profile(profile, path)
    return profile


def refreshed_text(profile: Profile) -> str:
    """What has changed, for people."""
    speed, now_s = speed_since(profile), probe_seconds(profile) or 0.0
    seconds = f"{format_seconds(now_s)} for {format_seconds(now_s / speed.mean)}"
    return f"the same work takes {speed.text} than while it was measured ({seconds})"


def main(job_path: Path) -> None:
    """Look before and after steps of one model after the other: the first rank on every core at once, then rank 0 alone."""
    asked: dict[str, Any] = json.loads(job_path.read_text())
    request = CalibrationRequest.from_json(asked["request"])
    place = read_place()
    pinning = prepare_rank(place.local_rank, place.local_world_size, device=request.device)
    place = init_group(request.device)
    set_arithmetic(request.precision)
    device = torch.device(place.device)
    probe = SpeedProbe(device) if pinning.first else None
    cases = [
        make_case(
            number,
            spec,
            Model.load(job_path.parent / f"model-{number}.json"),
            sorted(batches)[len(batches) // 2],
            request,
            device,
        )
        for number, (spec, batches, _) in enumerate(request.measured_models)
    ]
    warm_gpu(device, DTYPES[request.precision])
    alone_s: list[float] = []
    together_s: list[float] = []
    end_s = time.monotonic() + asked["seconds"]
    going = torch.ones(1, device=device)
    for case in itertools.cycle(cases):
        dist.barrier()
        together_s += looks(case, probe, KEPT_STEPS)
        dist.barrier()
        alone_s += looks(case, probe if place.rank == 0 else None, 1)
        going.fill_(time.monotonic() < end_s)
        dist.broadcast(going, src=0)
        if not going.item():
            break
    gathered = gather_values(together_s)
    if place.rank == 0:
        found = {"alone": statistics.mean(alone_s), "together": statistics.mean(itertools.chain(*gathered))}
        write_text_atomically(job_path.parent / FOUND, json.dumps(found))
    close_group(place)


def looks(case: Case, probe: SpeedProbe | None, kept: int) -> list[float]:
    """Seconds of a look before and of one after the training steps of a visit (`calibration.measure.components`); none on a
    rank that does not look, which waits."""
    if probe is None:
        return []
    before_s = probe.seconds()
    if case.on_gpu:
        case.steps_in_a_row(kept)
    else:
        for _ in range(WARM_STEPS + kept):
            case.step()
    return [before_s, probe.seconds()]


if __name__ == "__main__":
    worker_main(main)
