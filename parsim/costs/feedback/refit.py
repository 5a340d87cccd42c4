"""Errors of a profile that one run shows, without the run's noise: factors of ranks, phases and classes of communication.

`parsim.costs.feedback.run_corrections.learn` takes a window at its word, as a controller that averages many must. Here
only one run exists, so a factor must pass two tests against noise. It lies more than two standard errors of its mean over
the steps from the previous factor. It also explains more of the step than the difference between halves of the
measurement (the A/A floor). A learnt factor is shrunk by its own standard error. A factor that held before stays until a
run contradicts it as clearly (hysteresis), and goes when it no longer explains more than the floor.

Factors are absolute: on the profile as it was calibrated, whatever held before. So updates do not compound, and one learnt
after the cause is gone undoes the one before.

Leaves out: errors that tasks do not show (time between tasks; see `parsim.schedule.live.updating`), loading, and that a
factor may depend on sizes.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

import numpy as np

from parsim.arrays import Floats
from parsim.costs.feedback.run_corrections import ClassSeconds, CommunicationClass, ComputeClass, RunCorrections, WorkClass
from parsim.errors import CostError
from parsim.work import Phase

ALTERNATIONS = 50
"""Of the fit of ranks and phases; it converges geometrically."""

CLEAR = 2.0
"""Standard errors."""

ClassKey = TypeVar("ClassKey")


@dataclass(frozen=True, kw_only=True)
class Evidence:
    """One run against the profile as it was calibrated.

    Attributes:
        observed: seconds by class, one mapping per step. expected: per step under the profile without updates.
        step_s: mean measured step. floor: relative; what explains less of the step is noise.

    Raises:
        CostError: no step, or a step time or floor that is not a number.
    """

    observed: Sequence[ClassSeconds]
    expected: ClassSeconds
    step_s: float
    floor: float

    def __post_init__(self) -> None:
        if not self.observed:
            raise CostError("nothing was observed to learn from; measure at least one step")
        if not (math.isfinite(self.step_s) and self.step_s > 0 and math.isfinite(self.floor) and self.floor >= 0):
            raise CostError(f"a run needs a step time above 0 and a floor >= 0, got {self.step_s} and {self.floor}")

    def shared(self) -> list[WorkClass]:
        """Classes that were seen and that the profile does not hold for free."""
        return [key for key, seconds in self.expected.items() if seconds > 0 and self.mean_s(key) > 0]

    def mean_s(self, key: WorkClass) -> float:
        """Of a class, over the steps."""
        return float(np.mean([step.get(key, 0.0) for step in self.observed]))


def refit(evidence: Evidence, before: RunCorrections) -> RunCorrections:
    """The factors that hold after the run.

    Args:
        evidence: the run against the profile as calibrated.
        before: the previous factors; those of classes that the run did not show stay.
    """
    shared = evidence.shared()
    compute = [key for key in shared if isinstance(key, ComputeClass)]
    communication = [key for key in shared if not isinstance(key, ComputeClass)]
    phases = {**dict(before.phases), **_phases(evidence, compute, before)}
    ranks = {**dict(before.ranks), **_ranks(evidence, compute, before, phases)}
    links = {**dict(before.communication), **_links(evidence, communication, before)}
    return RunCorrections(ranks=_telling(ranks), phases=_telling(phases), communication=_telling(links))


def _telling(factors: Mapping[ClassKey, float]) -> tuple[tuple[ClassKey, float], ...]:
    """All factors, or none if none differs from 1: beside one that does, that another was seen to be right says something of
    those that were not seen."""
    return tuple(factors.items()) if any(factor != 1.0 for factor in factors.values()) else ()


def _phases(evidence: Evidence, compute: Sequence[ComputeClass], before: RunCorrections) -> dict[Phase, float]:
    """How much slower each phase is than the rank it runs on.

    An alternating fit of seconds[rank, phase] = rank * phase * expected. The factors' mean, weighted by expected seconds,
    is 1: what slows every phase is the ranks' to explain.
    """
    ranks = sorted({key.rank for key in compute})
    phases = list(dict.fromkeys(key.phase for key in compute))
    if len(phases) < 2:
        return {}
    place = [(ranks.index(key.rank), phases.index(key.phase)) for key in compute]
    expected, seen = np.zeros((len(ranks), len(phases))), np.zeros((len(evidence.observed), len(ranks), len(phases)))
    for (row, column), key in zip(place, compute, strict=True):
        expected[row, column] += evidence.expected[key]
        seen[:, row, column] += [step.get(key, 0.0) for step in evidence.observed]
    factors = _phase_factors(seen.mean(axis=0), expected)
    single = np.array([_phase_factors(step, expected) for step in seen])
    longest = expected.max(axis=0)
    known = dict(before.phases)
    return {
        phase: _kept(evidence, factors[number], single[:, number], longest[number], known.get(phase, 1.0))
        for number, phase in enumerate(phases)
    }


def _phase_factors(seen: Floats, expected: Floats) -> Floats:
    """float64 [phases] from seconds [ranks, phases]."""
    phases = np.ones(expected.shape[1])
    for _ in range(ALTERNATIONS):
        ranks = seen.sum(axis=1) / (expected * phases).sum(axis=1)
        phases = seen.sum(axis=0) / (expected * ranks[:, None]).sum(axis=0)
        phases /= (expected * phases).sum() / expected.sum()
    return phases


def _ranks(
    evidence: Evidence, compute: Sequence[ComputeClass], before: RunCorrections, phases: Mapping[Phase, float]
) -> dict[int, float]:
    """How much slower each rank is at everything, given what is kept of the phases."""
    factors = {}
    for rank in sorted({key.rank for key in compute}):
        own = [key for key in compute if key.rank == rank]
        expected_s = sum(evidence.expected[key] * phases.get(key.phase, 1.0) for key in own)
        single = np.array([sum(step.get(key, 0.0) for key in own) for step in evidence.observed]) / expected_s
        factors[rank] = _kept(evidence, float(single.mean()), single, expected_s, dict(before.ranks).get(rank, 1.0))
    return factors


def _links(
    evidence: Evidence, communication: Sequence[CommunicationClass], before: RunCorrections
) -> dict[CommunicationClass, float]:
    """How much slower each class of communication is."""
    known = dict(before.communication)
    factors = {}
    for key in communication:
        expected_s = evidence.expected[key]
        single = np.array([step.get(key, 0.0) for step in evidence.observed]) / expected_s
        factors[key] = _kept(evidence, float(single.mean()), single, expected_s, known.get(key, 1.0))
    return factors


def _kept(evidence: Evidence, factor: float, single: Floats, expected_s: float, before: float) -> float:
    """The factor to go on with.

    Args:
        factor: of the mean step; single: of each step. expected_s: what it multiplies, per step. before: what held until now.
    """
    error = float(single.std(ddof=1)) / math.sqrt(len(single)) / factor if len(single) > 1 else 0.0
    if abs(math.log(factor / before)) <= CLEAR * error or not _explains(evidence, factor - before, expected_s):
        return before
    distance = math.log(factor)
    shrunk = math.exp(distance * max(0.0, 1 - (error / distance) ** 2)) if distance else 1.0
    return shrunk if _explains(evidence, shrunk - 1, expected_s) else 1.0


def _explains(evidence: Evidence, change: float, expected_s: float) -> bool:
    """Whether it moves the step by more than the noise floor."""
    return abs(change) * expected_s > evidence.floor * evidence.step_s
