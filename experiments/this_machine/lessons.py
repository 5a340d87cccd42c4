"""What a calibration cannot see, taught by a few real runs of calibrated models: as `parsim validate --update` does.

The lessons have another batch than the cases, and only models that were calibrated. Every lesson updates the profile that the
one before left; what one does not see stays as it was.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from cases import Subject, cases_of, problem_of
from measuring import STEPS, Seen, measure

from calibration.calibrate import Launcher
from parsim.hardware.cluster import cluster_from_profile
from parsim.hardware.profile import Profile
from parsim.report.compare import aa_floor
from parsim.schedule.updating import updated

LESSON_BATCH = 32
ROUNDS = 10


def taught(
    profile: Profile, subjects: Sequence[Subject], labels: Sequence[str], ranks: int, folder: Path, launcher: Launcher
) -> Profile:
    """The profile after real runs of these plans, in this order, of the calibrated subjects in turn."""
    calibrated = [subject for subject in subjects if subject.calibrated]
    cluster = cluster_from_profile(profile, ranks)
    chosen = []
    for number, label in enumerate(labels):
        subject = calibrated[number % len(calibrated)]
        chosen += [case for case in cases_of(subject, problem_of(subject, cluster, LESSON_BATCH)) if case.label == label]
    seen = {entry.case.name: entry for entry in measure(folder, chosen, ranks, ROUNDS, launcher, seed=0)}
    for case in chosen:
        profile = _after(profile, seen[case.name], ranks)
    return profile


def _after(profile: Profile, seen: Seen, ranks: int) -> Profile:
    measurement, case = seen.measurement, seen.case
    return updated(
        problem_of(case.subject, cluster_from_profile(profile, ranks), LESSON_BATCH),
        case.plan,
        seen.graph,
        measurement.timelines,
        step_s=measurement.mean_step_s,
        floor=aa_floor([[float(value)] for value in measurement.step_s]).median,
        run=case.name,
        steps=ROUNDS * STEPS,
    ).profile
