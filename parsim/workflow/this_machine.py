"""cluster = "this-machine": the calibrated profile of this machine, found in the cache or made quickly.

Profiles lie in `$PARSIM_HOME/profiles`, or without that variable in `$XDG_CACHE_HOME/parsim/profiles` or
`~/.cache/parsim/profiles`. A profile serves a question under two conditions. It was measured on this processor (or these
GPUs), with as many cores, this version of torch and the same priority for communication. And it holds the question's
model at its local batches, and its optimizer. The newest that serves is taken. Otherwise the question's model is
calibrated quickly, in about a minute.
"""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from parsim.errors import ConfigError, MissingDependencyError, ProfileError
from parsim.files import cache_folder
from parsim.workflow.calibration import calibration_request, device_here, local_batches, measure_machine
from parsim.workflow.config import RunConfig
from parsim.workflow.progress import warn

if TYPE_CHECKING:
    from parsim.hardware.profile import Profile
    from parsim.model.model import Model

THIS_MACHINE = "this-machine"


def profiles_folder() -> Path:
    """Where profiles of this machine are kept."""
    return cache_folder("profiles")


def on_this_machine(config: RunConfig, model: Model | None = None) -> RunConfig:
    """The config with `cluster.profile = "this-machine"` replaced by the path of the profile; another profile stays.

    Args:
        model: where it was given as a value.

    Raises:
        ConfigError: nodes > 1, or a Model given as a value that no kept profile has measured. MissingDependencyError: without
            torch. ProfileError, ExecutionError: the calibration failed.
    """
    if config.cluster.profile != THIS_MACHINE:
        return config
    if config.cluster.nodes > 1:
        raise ConfigError(f"cluster.nodes = {config.cluster.nodes}: {THIS_MACHINE} is one machine; set cluster.nodes = 1")
    path = _found(config, model) or _made(config, model)
    print(f"{THIS_MACHINE}: {path}", file=sys.stderr, flush=True)
    return config.model_copy(update={"cluster": config.cluster.model_copy(update={"profile": str(path)})})


def cache_path(config: RunConfig) -> Path:
    """Where a calibration for this question is kept: the name stands for the machine, torch, the model, batch and optimizer."""
    from parsim.execute.processes.environment import describe_environment
    from parsim.execute.processes.same_machine import gpu_names

    environment, device = describe_environment(), device_here()
    key = (
        environment["processor"],
        environment["cores"],
        environment["communication_priority"],
        environment["versions"].get("torch"),
        gpu_names() if device == "cuda" else device,
        config.model_spec.to_dict(),
        config.model.granularity,
        config.training.global_batch,
        *config.training.optimizers,
        config.training.precision if device == "cuda" else "fp32",
        config.cluster.devices,
    )
    return profiles_folder() / f"{THIS_MACHINE}-{hashlib.sha256(repr(key).encode()).hexdigest()[:8]}.json"


def _found(config: RunConfig, model: Model | None) -> Path | None:
    """The newest profile in the cache that serves the question."""
    from parsim.execute.processes.same_machine import differences_from_here
    from parsim.workflow.load import model_of

    asked: Model | None = None
    own = cache_path(config) if model is None else None
    for path, profile in _kept_profiles():
        if profile.device_types[profile.devices[0].type].kind != device_here() or differences_from_here(profile):
            continue
        asked = asked or model or model_of(config)
        if path == own or serves(profile, config, asked):
            return path
    return None


def _kept_profiles() -> Iterator[tuple[Path, Profile]]:
    """The readable profiles in the cache, the newest first; one that is broken is named on stderr."""
    from parsim.hardware.profile import load_profile

    folder = profiles_folder()
    if not folder.is_dir():
        return
    for path in sorted(folder.glob("*.json"), key=lambda path: path.stat().st_mtime, reverse=True):
        try:
            yield path, load_profile(str(path))
        except ProfileError as error:
            warn(error)


def serves(profile: Profile, config: RunConfig, model: Model) -> bool:
    """Whether the profile has measured what the question's plans compute, on as many devices as it asks for."""
    devices = config.devices
    wanted = len(devices) if isinstance(devices, list) else devices or 0
    if len(profile.devices) < wanted:
        return False
    if not {point.optimizer for point in profile.compute.optimizers}.issuperset(config.training.optimizers):
        return False
    samples: dict[str, set[int]] = {}
    computed = config.training.precision if device_here() == "cuda" else "fp32"
    for point in profile.compute.components:
        if point.precision != computed:
            continue
        samples.setdefault(point.fingerprint, set()).add(point.samples)
    batches = local_batches(config.training.global_batch)
    low, high = min(batches), max(batches)
    return all(
        (seen := samples.get(component.fingerprint)) is not None and min(seen) <= low and max(seen) >= high
        for component in model.components
    )


def _made(config: RunConfig, model: Model | None) -> Path:
    """Calibrate quickly for this question."""
    import importlib.util

    if importlib.util.find_spec("torch") is None:
        raise MissingDependencyError(
            f"{THIS_MACHINE} needs a calibration, and that needs torch, which is not installed; pip install 'parsim[torch]', "
            "or name a shipped profile"
        )
    path = cache_path(config)
    if model is not None:
        raise ConfigError(
            f"{config.model.name} was given as a value, and no profile in {path.parent} has measured it. A calibration builds "
            'the model in every process; give "package.module:function" as the model, or the path of a profile as the cluster'
        )
    path.parent.mkdir(parents=True, exist_ok=True)
    measure_machine(calibration_request([config], device=device_here(), quick=True), path)
    return path
