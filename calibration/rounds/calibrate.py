"""Measure this machine and write its profile: starts the measuring ranks, builds the profile from their files."""

from __future__ import annotations

import datetime
import importlib.util
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Protocol

from calibration.fit.build_profile import build_profile
from calibration.rounds.environment import check_gpus, check_room, closing_line, look_apart, machine_state, opening_line
from calibration.rounds.request import CalibrationRequest, RawPoints, load_raw, raw_path, save_raw
from calibration.rounds.turns import Leftover, WorkFolder, alone, gather_raw, open_folder
from parsim.app.doctor import Found
from parsim.errors import ConfigError, ExecutionError, MissingDependencyError, ProfileError
from parsim.execute.processes.launch import launch
from parsim.execute.processes.machine import describe_environment
from parsim.execute.processes.output import relayed
from parsim.execute.processes.setup import available_cores
from parsim.files import reading
from parsim.hardware.profile import Profile, save_profile
from parsim.model.formats import RECORDED_WEIGHTS, number_format
from parsim.model.load import load_model
from parsim.model.model import Model

__all__ = [
    "CalibrationRequest",
    "Launcher",
    "calibrate",
    "models_of",
    "refit",
    "stopped_points",
    "unfitted_path",
    "warning_lines",
]

RANKS_PER_CORE = 4
TIMEOUT_S = 1800.0
DISCARDED = "left out "
"""How the warning of a discarded timing begins."""
DISCARDED_SHOWN = 3


class Launcher(Protocol):
    """Starts ranks and waits for them as `parsim.execute.processes.launch.launch` does."""

    def __call__(
        self,
        job_path: Path,
        nproc: int,
        *,
        module: str = ...,
        timeout_s: float | None = ...,
        on_line: Callable[[str], None] | None = ...,
    ) -> None: ...


def calibrate(
    request: CalibrationRequest,
    out: Path,
    *,
    on_line: Callable[[str], None] | None = None,
    leftover: Leftover = "use",
    launcher: Launcher = launch,
) -> Profile:
    """Measure on `request.nproc` ranks of this machine; save the profile at `out` and the raw points in the same folder.

    Every finished turn is kept in a folder next to `out` until the profile is written, whole or not at all. A calibration
    that was stopped at any moment goes on from there when it is called again with the same request.

    Args:
        on_line: receives progress, one line at a time.
        leftover: what to do with the unfinished folder of a stopped calibration. launcher: starts the ranks, elsewhere than
            usual.

    Raises:
        MissingDependencyError: torch is not installed.
        ConfigError: an unknown optimizer, a folder of `out` that does not exist, an unfinished folder of another calibration,
            or one that is writing `out` at this moment; GPUs that are missing, too few, too old for the precision or too small.
        ProfileError: too much of what was measured contradicts itself.
        ExecutionError: a rank failed.
    """
    say = on_line or _silent
    _check(request, out, say)
    request = _measurable(request)
    gpus = look_apart() if request.device == "cuda" else None
    if gpus is not None:
        check_gpus(request, gpus)
    with alone(out):
        return _calibrate(request, out, say, open_folder(request, out, leftover, say), launcher, gpus)


def _calibrate(
    request: CalibrationRequest,
    out: Path,
    say: Callable[[str], None],
    folder: WorkFolder,
    launcher: Launcher,
    gpus: Found | None,
) -> Profile:
    environment, before = describe_environment(), machine_state()
    say(opening_line(environment, before, request))
    models = []
    for number, (model, (_, batches, granularity)) in enumerate(zip(models_of(request), request.measured_models, strict=True)):
        models.append(model)
        model.save(folder.path / f"model-{number}.json")
        components = f"{len(model.components)} components ({granularity})"
        say(f"{model.name}: {components} at {', '.join(map(str, batches))} samples")
    if gpus is not None:
        check_room(models, request, gpus)
    folder.save_states(before, None)
    try:
        launcher(folder.job, request.nproc, module="calibration", timeout_s=TIMEOUT_S, on_line=relayed(say))
    except ExecutionError as error:
        if not folder.has_turns:
            folder.remove()
            raise
        raise ExecutionError(f"{error}; what was measured is kept, call again to continue") from error
    after = machine_state()
    folder.save_states(before, after)
    say(closing_line(before, after))
    points = _raw_points(request, out, folder, models)
    try:
        profile = build_profile(points)
    except Exception as error:
        save_raw(points, unfitted_path(out))
        if not isinstance(error, ProfileError):
            raise
        folder.remove()  # going on with these turns would end here again
        raise ProfileError(f"{error}; the raw points are kept in {unfitted_path(out).name}") from error
    save_raw(points, raw_path(out))
    save_profile(profile, out)
    folder.remove()
    for line in warning_lines(profile.provenance.warnings):
        say(line)
    return profile


def _raw_points(request: CalibrationRequest, out: Path, folder: WorkFolder, models: Sequence[Model]) -> RawPoints:
    return RawPoints(
        raw={**gather_raw(folder.path), "states": folder.states()},
        request=request,
        models=models,
        created=datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d %H:%M UTC"),
        command=f"parsim calibrate --device {request.device} --nproc {request.nproc}",
        name=out.stem,
    )


def stopped_points(request: CalibrationRequest, out: Path) -> RawPoints | None:
    """What a calibration of `out` had measured when it was stopped; None: nothing, or it has ended. It can be called again all
    the same."""
    folder = WorkFolder.of(out)
    if not folder.has_turns:
        return None
    return _raw_points(request, out, folder, list(models_of(request)))


def _measurable(request: CalibrationRequest) -> CalibrationRequest:
    """The request with local batches that every component can see (`Component.least_samples`); those plans use no others.

    Raises ConfigError where no batch of a model is left.
    """
    models = list(zip(request.models, models_of(request), strict=False))  # at the first granularity
    least = [max(model.least_samples.values(), default=1) for _, model in models]
    kept = [
        (spec, tuple(samples for samples in batches if samples >= fewest))
        for ((spec, batches), _), fewest in zip(models, least, strict=True)
    ]
    for (spec, batches), fewest in zip(kept, least, strict=True):
        if not batches:
            raise ConfigError(
                f"{spec.name} needs {fewest} samples at once: a batch norm of it has one value per channel and sample; give "
                "local batches from there on, or larger inputs"
            )
    return replace(request, models=tuple(kept))


def models_of(request: CalibrationRequest) -> Iterator[Model]:
    """The Models of `request.measured_models`, with the weights of its precision, as plans in it have them (fp64 has none)."""
    weights = RECORDED_WEIGHTS.get(number_format(request.precision).weight_bytes, "float32")
    for spec, _, granularity in request.measured_models:
        yield load_model(spec, granularity=granularity, weights=weights)


def unfitted_path(profile: Path) -> Path:
    """Path of the raw points of a calibration without a profile: a machine may be there once, and a fit can be mended."""
    return raw_path(profile.with_name(f"{profile.stem}.unfitted.json"))


def warning_lines(warnings: Sequence[str]) -> list[str]:
    """The warnings of a profile, which keeps all of them, as they are printed: of discarded timings the first few, and how many
    more there are."""
    discarded = [warning for warning in warnings if warning.startswith(DISCARDED)]
    more = discarded[DISCARDED_SHOWN:]
    shown = [f"warning: {warning}" for warning in warnings if warning not in more]
    counted = f"warning: {len(more)} more implausible timings were left out; the profile lists them under provenance.warnings"
    return [*shown, counted] if more else shown


def refit(profile_path: Path, *, on_line: Callable[[str], None] | None = None) -> Profile:
    """Fit the profile again from its raw points, and save it. The code that wrote it gives the same numbers.

    Raises: ProfileError without raw points, or if too much of them contradicts itself.
    """
    say = on_line or _silent
    path = raw_path(profile_path)
    given = load_raw(path)
    with reading(f"the raw points {path} are not those of one calibration", ProfileError, "calibrate again"):
        profile = build_profile(given)
    save_profile(profile, profile_path)
    for line in warning_lines(profile.provenance.warnings):
        say(line)
    return profile


def _silent(_: str) -> None:
    """No progress wanted."""


def _check(request: CalibrationRequest, out: Path, say: Callable[[str], None]) -> None:
    if importlib.util.find_spec("torch") is None:
        raise MissingDependencyError("calibration needs torch, which is not installed; pip install 'parsim[torch]'")
    from parsim.execute.optimizer import check_states

    for name in request.optimizers:
        check_states(name)
    if not out.absolute().parent.is_dir():
        raise ConfigError(f"cannot write {out}: there is no folder {out.absolute().parent}; make it first")
    if not os.access(out.absolute().parent, os.W_OK):
        raise ConfigError(f"cannot write {out}: the folder is not writable; choose another --out")
    cores = len(available_cores())
    if request.device == "cpu" and request.nproc > cores:
        say(f"note: {request.nproc} ranks share {cores} cores, so each measures a part of a core")
    if request.device == "cpu" and request.nproc > RANKS_PER_CORE * cores:
        say(f"warning: more than {RANKS_PER_CORE} ranks per core; times will be mostly waiting, use --nproc {cores}")
