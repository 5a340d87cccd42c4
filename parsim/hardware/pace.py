"""The pace of a machine's cores, as the probe (`parsim.execute.processes.speed_probe`) found it: while it was calibrated, and
since."""

from __future__ import annotations

from parsim.hardware.cluster import cluster_from_profile
from parsim.hardware.profile import ProbePace, ProbeSeconds, Profile
from parsim.units import format_percent


def pace_s(profile: Profile, active: int | None = None) -> float | None:
    """Seconds of the probe at which everything takes what the profile says, with so many cores computing at once (None: all);
    None where it was never asked. That of the last `parsim calibrate --refresh` holds."""
    known = _calibrated(profile)
    if known is None:
        return None
    return _between(profile.today or known, _share(profile, active))


def slowness_today(profile: Profile, active: int | None = None) -> float:
    """How many times as long everything takes as while the profile was measured, by its last refreshing; 1 without one."""
    known = _calibrated(profile)
    if known is None or profile.today is None:
        return 1.0
    share = _share(profile, active)
    return _between(profile.today, share) / _between(known, share)


def longer_text(factor: float) -> str:
    """That something takes so many times as long, for people: "12% longer", "8% less"."""
    return f"{format_percent(abs(factor - 1))} {'longer' if factor > 1 else 'less'}"


def _calibrated(profile: Profile) -> ProbeSeconds | None:
    return None if profile.noise is None else profile.noise.probe


def _share(profile: Profile, active: int | None) -> float:
    """0 with one core, 1 with all."""
    cores = len(set(cluster_from_profile(profile).core_of_rank(len(profile.devices))))
    return 0.0 if cores <= 1 else 1.0 if active is None else min(1.0, (active - 1) / (cores - 1))


def _between(known: ProbePace, share: float) -> float:
    return known.alone + share * (known.together - known.alone)
