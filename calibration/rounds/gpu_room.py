"""Check before ranks start that this machine's GPUs can run a calibration; errors name the change to make."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from tempfile import TemporaryDirectory

from calibration.rounds.request import CalibrationRequest
from parsim.app.doctor import CALIBRATE_ON_GPUS, Found, Gpu, commands_of, look
from parsim.errors import ConfigError
from parsim.execute.processes.launch import import_folders
from parsim.execute.processes.machine import describe_environment
from parsim.model.model import Model
from parsim.model.optimizers import OPTIMIZERS
from parsim.units import format_bytes

ELEMENT_BYTES = {"fp64": 8, "bf16": 2}
"""Of a weight; 4 in all other precisions."""

NEWER = (8, 0)
"""Compute capability from which on a GPU has TF32 and bfloat16 (Ampere)."""
NEWER_PRECISIONS = ("tf32", "bf16", "amp_bf16")

ROOM_SHARE = 0.8
"""Of the free memory, for models that are held; the rest is for activations and for what operators work on."""


LOOK = "import sys; from calibration.rounds.gpu_room import keep_look; keep_look(sys.argv[1])"


def look_apart() -> Found:
    """What this machine has, asked in a process that ends: whoever asks a GPU for its memory holds some of it from then on.

    The process does not import the caller's script, as one of `multiprocessing` would. So a script needs no `__main__` guard.

    Raises:
        ConfigError: the process failed.
    """
    with TemporaryDirectory() as folder:
        kept = Path(folder, "found")
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(import_folders())}
        done = subprocess.run(
            [sys.executable, "-c", LOOK, str(kept)],
            env=environment,
            capture_output=True,
            text=True,
            errors="replace",
            check=False,
        )
        if done.returncode or not kept.is_file():
            last = next(iter(done.stderr.strip().splitlines()[-1:]), f"it ended with {done.returncode}")
            raise ConfigError(f"a process that looks at this machine's GPUs failed: {last}; `parsim doctor` looks at them too")
        found = json.loads(kept.read_text(encoding="utf-8"))
    gpus = tuple(Gpu(**{**gpu, "capability": tuple(gpu["capability"])}) for gpu in found["gpus"])
    return Found(**{**found, "gpus": gpus, "backends": tuple(found["backends"])})


def keep_look(path: str) -> None:
    """What `look_apart` asks for, written to a file: imports may print. Args: path: of the file."""
    Path(path).write_text(json.dumps(asdict(look(describe_environment()))), encoding="utf-8")


def check_gpus(request: CalibrationRequest, found: Found) -> None:
    """Raises ConfigError for a machine without GPUs that work, with fewer than ranks, or with GPUs that lack the precision."""
    (able,) = (check for check in commands_of(found) if check.name == CALIBRATE_ON_GPUS)
    if not able.ok:
        raise ConfigError(f"cannot calibrate with --device cuda: {able.found}; {able.fix}")
    if request.nproc > len(found.gpus):
        raise ConfigError(
            f"{request.nproc} ranks need a GPU each, this machine has {len(found.gpus)}; use --nproc {len(found.gpus)} or fewer"
        )
    old = next((gpu for gpu in found.gpus[: request.nproc] if gpu.capability < NEWER), None)
    if request.precision in NEWER_PRECISIONS and old is not None:
        raise ConfigError(
            f"{request.precision} needs compute capability {NEWER[0]}.{NEWER[1]}, a {old.name} has "
            f"{old.capability[0]}.{old.capability[1]}; measure fp32 or amp_fp16"
        )


def held_bytes(models: Sequence[Model], request: CalibrationRequest) -> int:
    """Memory of one rank from the first round to the last. It holds every model once per local batch, with its gradients
    and the states of every optimizer. It also holds the arrays for timing optimizers alone (twice a whole, and a half).

    Args: models: in the order of `request.measured_models`.
    """
    element = ELEMENT_BYTES.get(request.precision, 4)
    state, copy = (element, 0) if element >= 4 else (4, 4)  # half-precision weights have copies in fp32, which have the states
    states = [len(OPTIMIZERS[name].states) for name in request.optimizers]
    total = 0
    for model, (_, batches, _) in zip(models, request.measured_models, strict=True):
        own = model.parameter_count * element
        case = 2 * own + model.parameter_count * (copy + state * sum(states))
        total += case * len(batches) + 5 * own * sum(2 + count for count in states) // 2
    return total


def check_room(models: Sequence[Model], request: CalibrationRequest, found: Found) -> None:
    """Raises ConfigError where the models do not fit side by side."""
    needed, free = held_bytes(models, request), min(gpu.free_bytes for gpu in found.gpus[: request.nproc])
    if needed > ROOM_SHARE * free:
        raise ConfigError(
            f"the models, each at all its local batches, hold {format_bytes(needed)} while they are measured, and a GPU has "
            f"{format_bytes(free)} free; name fewer --batches, optimizers or models at once"
        )
