"""The pace of a machine's cores, as the probe (`parsim.execute.probe`) found it: while it was calibrated, and since."""

from __future__ import annotations

from parsim.hardware.profile import ProbeSeconds, Profile


def pace_s(profile: Profile, active: int | None = None) -> float | None:
    """Seconds of the probe at which everything takes what the profile says, with so many cores computing at once (None: all);
    None where it was never asked. That of the last `parsim calibrate --refresh` holds."""
    known = None if profile.noise is None else profile.noise.probe
    if known is None:
        return None
    return _between(known if profile.today is None else profile.today, _share(profile, active))


def slowness_today(profile: Profile, active: int | None = None) -> float:
    """How many times as long everything takes as while the profile was measured, by its last refreshing; 1 without one."""
    known = None if profile.noise is None else profile.noise.probe
    if known is None or profile.today is None:
        return 1.0
    share = _share(profile, active)
    return _between(profile.today, share) / _between(known, share)


def _share(profile: Profile, active: int | None) -> float:
    """0 with one core, 1 with all."""
    cores = len({(entry.core, index if entry.core is None else -1) for index, entry in enumerate(profile.devices)})
    return 0.0 if cores <= 1 else 1.0 if active is None else min(1.0, (active - 1) / (cores - 1))


def _between(known: ProbeSeconds, share: float) -> float:
    return known.alone + share * (known.together - known.alone)
