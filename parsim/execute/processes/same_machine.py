"""Is this the machine, and the torch, that a profile was measured with? Asked where predictions are held against real runs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from parsim.execute.processes.environment import describe_environment
from parsim.hardware.profile import Profile


def gpu_names() -> list[str]:
    """Of the GPUs that torch sees, in its order."""
    import torch

    return [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]


def is_measured(profile: Profile) -> bool:
    """Whether `parsim calibrate` made it: one from data sheets or papers is of no single machine."""
    return bool(profile.compute.components)


def is_from_here(profile: Profile) -> bool:
    """Whether the profile was measured on a machine with this processor and so many cores, or on these GPUs."""
    if not is_measured(profile):
        return False
    kinds = {profile.device_types[entry.type].kind for entry in profile.devices}
    if "cuda" in kinds:
        return {entry.type for entry in profile.devices} <= set(gpu_names())
    environment = describe_environment()
    return _processor(profile.provenance.machine) == (environment["processor"], environment["cores"])


def profile_differences(profile: Profile, environment: Mapping[str, Any], gpus: Sequence[str] | None = None) -> tuple[str, ...]:
    """What of this machine is not as it was when the profile was measured, one warning each; none for published profiles.

    Args:
        environment: of this machine, see `describe_environment`. gpus: their names (None: not asked).

    Leaves out clocks, memory and other programs: `parsim calibrate` says what they were.
    """
    if not is_measured(profile):
        return ()
    found = []
    then, advice = profile.provenance, "predictions are for another machine, calibrate again"
    kinds = {profile.device_types[entry.type].kind for entry in profile.devices}
    processor, cores = _processor(then.machine)
    if "cpu" in kinds and processor != environment["processor"]:
        found.append(
            f"profile {profile.name} was measured on {processor}, this machine has {environment['processor']}: {advice}"
        )
    elif "cpu" in kinds and cores != environment["cores"]:
        found.append(
            f"profile {profile.name} was measured with {cores} cores, this machine has {environment['cores']}: {advice}"
        )
    priority_then, priority_now = (told.get("communication_priority") for told in (then.environment, environment))
    if "cpu" in kinds and None not in (priority_then, priority_now) and priority_then != priority_now:
        found.append(
            f"profile {profile.name} was measured {'with' if priority_then else 'without'} priority for communication, this "
            f"run has {'it' if priority_now else 'none'}: it needs root, CAP_SYS_NICE or `ulimit -r 1`; communication will be "
            f"{'faster' if priority_now else 'slower'} than predicted"
        )
    if "cuda" in kinds and gpus is not None:
        names = {entry.type for entry in profile.devices}
        if not names <= set(gpus):
            here = ", ".join(sorted(set(gpus))) or "no GPU"
            found.append(
                f"profile {profile.name} was measured on {', '.join(sorted(names))}, this machine has {here}: {advice}"
            )
    torch_then, torch_now = then.versions.get("torch"), environment["versions"].get("torch")
    if torch_then != torch_now:
        found.append(
            f"profile {profile.name} was measured with torch {torch_then or 'unknown'}, here is {torch_now or 'none'}: "
            "times may differ, calibrate again to be sure"
        )
    return tuple(found)


def differences_from_here(profile: Profile) -> tuple[str, ...]:
    """`profile_differences` from the machine this runs on, whose GPUs are asked for if the profile is of GPUs."""
    cuda = profile.device_types[profile.devices[0].type].kind == "cuda"
    gpus = gpu_names() if is_measured(profile) and cuda else None
    return profile_differences(profile, describe_environment(), gpus)


def _processor(machine: str) -> tuple[str, int | None]:
    """Processor and number of cores from `AMD EPYC, 2 cores, Linux 6`."""
    processor, _, rest = machine.partition(" cores,")
    name, _, cores = processor.rpartition(", ")
    return (name, int(cores)) if cores.isdigit() and rest else (machine, None)
