"""The updates of a profile as factors on the work of a cluster's ranks, and back.

A profile speaks of devices, a plan of ranks: rank r runs on `cluster.devices[r]`. Leaves out several nodes: a profile describes
one, and what was seen of its devices says nothing of other machines; only factors of phases hold there.
"""

from __future__ import annotations

from typing import Any

from parsim.costs.feedback.run_corrections import NO_RUN_CORRECTIONS, CommunicationClass, RunCorrections
from parsim.errors import ProfileError, near_matches
from parsim.hardware.cluster import Cluster
from parsim.hardware.profile import CommunicationFactor, DeviceFactor, PhaseFactor, Profile, Update
from parsim.work import Phase


def updates_of(cluster: Cluster) -> RunCorrections:
    """The factors of the latest update of the cluster's profile, by rank.

    Args:
        cluster: the machine; on several nodes only the factors of phases hold.

    Raises:
        ProfileError: an unknown phase.
    """
    if not cluster.profile.updates:
        return NO_RUN_CORRECTIONS
    latest = cluster.profile.updates[-1]
    phases = tuple((_phase(entry.phase), entry.factor) for entry in latest.phases)
    if cluster.network is not None:
        return RunCorrections(phases=phases)
    rank_of = {device.index: rank for rank, device in enumerate(cluster.devices)}
    return RunCorrections(
        ranks=tuple((rank_of[entry.device], entry.factor) for entry in latest.devices if entry.device in rank_of),
        phases=phases,
        communication=tuple(
            (_class(entry.operation, [rank_of[device] for device in entry.devices]), entry.factor)
            for entry in latest.communication
            if all(device in rank_of for device in entry.devices)
        ),
    )


def without_updates(profile: Profile) -> Profile:
    """The profile as it was calibrated.

    Args:
        profile: as loaded.
    """
    return profile.model_copy(update={"updates": []})


def with_update(profile: Profile, found: RunCorrections, cluster: Cluster, provenance: dict[str, Any]) -> Profile:
    """The profile with one more update, that of `found` on the cluster's ranks.

    What an earlier update says of devices that the cluster has not is kept.

    Args:
        provenance: the other keys of `parsim.hardware.profile.Update`.
    """
    device = [entry.index for entry in cluster.devices]
    before = profile.updates[-1] if profile.updates else None
    elsewhere = [entry for entry in before.devices if entry.device not in device] if before is not None else []
    far = [entry for entry in before.communication if not set(entry.devices) <= set(device)] if before is not None else []
    update = Update(
        **provenance,
        devices=[*elsewhere, *(DeviceFactor(device=device[rank], factor=factor) for rank, factor in found.ranks)],
        phases=[PhaseFactor(phase=phase.value, factor=factor) for phase, factor in found.phases],
        communication=[
            *far,
            *(
                CommunicationFactor(operation=key.operation, devices=[device[rank] for rank in key.ranks], factor=factor)
                for key, factor in found.communication
            ),
        ],
    )
    return profile.model_copy(update={"updates": [*profile.updates, update]})


def _class(operation: str, ranks: list[int]) -> CommunicationClass:
    return CommunicationClass(operation, tuple(ranks if operation == "send_recv" else sorted(ranks)))


def _phase(name: str) -> Phase:
    known = {phase.value: phase for phase in Phase}
    if name not in known:
        raise ProfileError(f"an update of the profile names phase {name!r}{near_matches(name, known)}; fix or delete it")
    return known[name]
