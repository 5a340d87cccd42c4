"""Measure this machine and write its profile: starts the measuring ranks, builds the profile from what they leave."""

from __future__ import annotations

import datetime
import importlib.util
import json
import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from calibration.build_profile import build_profile, other_share
from calibration.request import CalibrationRequest
from parsim.errors import ConfigError, ExecutionError, MissingDependencyError, near_matches
from parsim.execute.launch import launch
from parsim.execute.pinning import available_cores
from parsim.hardware.profile import Profile, save_profile
from parsim.model.spec import load_model
from parsim.units import format_percent

__all__ = ["CalibrationRequest", "calibrate"]

RANKS_PER_CORE = 4
BUSY_SHARE = 0.05
TIMEOUT_S = 1800.0


def calibrate(request: CalibrationRequest, out: Path, *, on_line: Callable[[str], None] | None = None) -> Profile:
    """Measure on `request.nproc` ranks of this machine and save the profile at `out`, whole or not at all.

    Args:
        on_line: receives progress, one line at a time.

    Raises:
        MissingDependencyError: torch is not installed.
        ConfigError: an unknown optimizer, or a folder of `out` that does not exist.
        ExecutionError: a rank failed.
    """
    say = on_line or _silent
    _check(request, out, say)
    models = []
    for spec, batches, granularity in request.measured_models:
        models.append(load_model(spec, granularity=granularity))
        components = f"{len(models[-1].components)} components ({granularity})"
        say(f"{models[-1].name}: {components} at {', '.join(map(str, batches))} samples")
    with tempfile.TemporaryDirectory(prefix="parsim-calibrate-") as folder:
        job = Path(folder) / "job.json"
        job.write_text(request.to_json())
        for number, model in enumerate(models):
            model.save(job.parent / f"model-{number}.json")
        launch(job, request.nproc, module="calibration", timeout_s=TIMEOUT_S, on_line=say)
        raw = _read_raw(job.parent / "raw.json")
    share = other_share(raw)
    if request.device == "cpu" and request.nproc <= len(available_cores()) and share > BUSY_SHARE:
        say(f"warning: other programs had {format_percent(share)} of the cores meanwhile; for a quiet machine, calibrate again")
    profile = build_profile(
        raw,
        request,
        models,
        created=datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d %H:%M UTC"),
        command=f"parsim calibrate --device {request.device} --nproc {request.nproc}",
        name=out.stem,
    )
    save_profile(profile, out)
    return profile


def _silent(_: str) -> None:
    """No progress wanted."""


def _check(request: CalibrationRequest, out: Path, say: Callable[[str], None]) -> None:
    if importlib.util.find_spec("torch") is None:
        raise MissingDependencyError("calibration needs torch, which is not installed; pip install 'parsim[torch]'")
    from parsim.execute.optimizer import OPTIMIZERS

    for name in request.optimizers:
        if name not in OPTIMIZERS:
            raise ConfigError(f"unknown optimizer {name!r}{near_matches(name, OPTIMIZERS)}")
    if not out.absolute().parent.is_dir():
        raise ConfigError(f"cannot write {out}: there is no folder {out.absolute().parent}; make it first")
    if not os.access(out.absolute().parent, os.W_OK):
        raise ConfigError(f"cannot write {out}: the folder is not writable; choose another --out")
    cores = len(available_cores())
    if request.device == "cpu" and request.nproc > cores:
        say(f"note: {request.nproc} ranks share {cores} cores, so each measures a part of a core")
    if request.device == "cpu" and request.nproc > RANKS_PER_CORE * cores:
        say(f"warning: more than {RANKS_PER_CORE} ranks per core; times will be mostly waiting, use --nproc {cores}")


def _read_raw(path: Path) -> dict[str, Any]:
    if not path.is_file():
        raise ExecutionError("the measuring ranks ended without a result; run again, or with --nproc 1")
    document: dict[str, Any] = json.loads(path.read_text())
    return document
