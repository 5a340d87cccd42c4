"""What a run shows a profile to be wrong by: from spans to seconds by class of work, and from these to factors.

    spans of tasks -> `task_durations_s` -> `class_seconds` -> `observed_over_expected` -> `RunCorrections`

Three rules extend what the run's own plan shows to the work of other plans. (1) A slow rank is slow at everything. (2) A
collective runs at the speed of its slowest link: at least as slow as any group it contains, at most as slow as any group that
contains it. (3) Classes without data get the median factor, so an untried plan on a wrong profile does not look good.

A controller that averages many windows takes each at its word (`learn`). A validation has one run (`refit`), so there a factor
must lie more than two standard errors of its mean from the previous one, and explain more of the step than the difference
between halves of the measurement (the A/A floor). It is shrunk by its own standard error. One that held before stays until a
run contradicts it as clearly (hysteresis), and goes when it no longer explains more than the floor. Factors are absolute, on
the profile as it was calibrated: updates do not compound.

A profile keeps them by device: rank r runs on `cluster.devices[r]`. Leaves out several nodes, where only factors of phases
hold; that a factor may depend on sizes; loading, and time between tasks (see `parsim.search.adapt.observed`).
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple, TypeVar

import numpy as np

from parsim.errors import CostError, GraphError, ProfileError, near_matches
from parsim.hardware.cluster import Cluster
from parsim.hardware.profile import CommunicationFactor, DeviceFactor, PhaseFactor, Profile, Update
from parsim.numeric import Floats
from parsim.timeline import Timeline
from parsim.work import (
    ClipGradients,
    Collective,
    Compute,
    HostCopy,
    HostUpdate,
    LoadBatch,
    Mix,
    OptimizerStep,
    Phase,
    SendRecv,
    Work,
)

CLEAR = 2.0
"""Standard errors beyond which a difference is no noise."""
ALTERNATIONS = 50
"""Of the fit of ranks and phases; it converges geometrically."""

ClassKey = TypeVar("ClassKey")


class ComputeClass(NamedTuple):
    """One phase of a component on one rank; the optimizer's step has the component ""."""

    rank: int
    component: str
    phase: Phase

    def __str__(self) -> str:
        return " ".join(filter(None, (self.phase.value, self.component, f"on rank {self.rank}")))


class CommunicationClass(NamedTuple):
    """A collective over a group (ranks ascending) or a transfer (source, destination)."""

    operation: str
    ranks: tuple[int, ...]

    def __str__(self) -> str:
        if self.operation == "send_recv":
            return f"send_recv {'>'.join(map(str, self.ranks))}"
        return f"{self.operation} over {','.join(map(str, self.ranks))}"


WorkClass = ComputeClass | CommunicationClass
ClassSeconds = Mapping[WorkClass, float]
"""Seconds per step of all the work of each class."""


def communication_class(operation: str, ranks: Sequence[int]) -> CommunicationClass:
    """The class of a collective over ranks, or of a transfer from the first to the second."""
    return CommunicationClass(operation, tuple(ranks if operation == "send_recv" else sorted(ranks)))


def class_of(work: Work, rank: int) -> WorkClass | None:
    """The class whose seconds the work adds to; None for loading and work of the host, which neither ranks nor links
    explain."""
    match work:
        case Compute():
            return ComputeClass(rank, work.component, work.phase)
        case OptimizerStep() | ClipGradients() | Mix():
            return ComputeClass(rank, "", Phase.OPTIMIZER)
        case Collective():
            return communication_class(work.operation, work.group)
        case SendRecv():
            return communication_class("send_recv", (work.source, work.destination))
        case LoadBatch() | HostCopy() | HostUpdate():
            return None


def task_durations_s(tasks: int, timeline: Timeline, *, complete: bool = False) -> Floats:
    """float64 [tasks]: the latest end minus the latest start over each task's spans; 0 for a task without a span.

    A task on several ranks has one span per rank. Before the latest start the early ranks only wait.

    `complete`: every task must have a span. Raises GraphError: the timeline names a task that the graph has not, or lacks one
    that it must have.
    """
    foreign = timeline.task[(timeline.task < 0) | (timeline.task >= tasks)]
    if len(foreign):
        raise GraphError(
            f"a {timeline.source} timeline names task {int(foreign[0])}, but the graph has tasks 0..{tasks - 1}; "
            "compare timelines of the same plan"
        )
    start, end = np.full(tasks, -np.inf), np.full(tasks, -np.inf)
    np.maximum.at(start, timeline.task, timeline.start_s)
    np.maximum.at(end, timeline.task, timeline.end_s)
    missing = np.flatnonzero(np.isinf(end))
    if complete and len(missing):
        raise GraphError(
            f"a {timeline.source} timeline lacks {len(missing)} of the graph's {tasks} tasks, the first is task "
            f"{int(missing[0])}; compare complete timelines of the same plan"
        )
    start[missing] = end[missing] = 0.0
    durations: Floats = end - start
    return durations


def class_seconds(work_seconds: Iterable[tuple[Work, int, float]]) -> dict[WorkClass, float]:
    """Sum seconds by class over (work, rank, seconds) of every task of one step; for communication any rank of it will do."""
    totals: dict[WorkClass, float] = {}
    for work, rank, seconds in work_seconds:
        key = class_of(work, rank)
        if key is not None:
            totals[key] = totals.get(key, 0.0) + seconds
    return totals


@dataclass(frozen=True, kw_only=True)
class RunCorrections:
    """Factors on the profile's seconds; equal ones are equal values. None learnt: everything costs what the profile says.

    Attributes:
        ranks: (rank, factor) for all computation of a rank, ascending. phases: (phase, factor) on top of it, on every rank.
        communication: (class, factor), ascending.

    Raises:
        CostError: a factor that is not a finite number above 0.
    """

    ranks: tuple[tuple[int, float], ...] = ()
    communication: tuple[tuple[CommunicationClass, float], ...] = ()
    phases: tuple[tuple[Phase, float], ...] = ()

    def __post_init__(self) -> None:
        for what, factor in (*self.factors().items(), *self.phases):
            if not (math.isfinite(factor) and factor > 0):
                name = f"rank {what}" if isinstance(what, int) else str(what)
                raise CostError(f"the correction of {name} is {factor}; give a finite factor above 0")
        object.__setattr__(self, "ranks", tuple(sorted(self.ranks)))
        object.__setattr__(self, "communication", tuple(sorted(self.communication)))

    def __bool__(self) -> bool:
        return bool(self.ranks or self.phases or self.communication)

    def rank_factor(self, rank: int) -> float:
        """The factor of a rank's computation: the observed one, else the median of those observed, else 1."""
        observed = self._by_rank
        return observed[rank] if rank in observed else _median(observed.values())

    def communication_factor(self, key: CommunicationClass) -> float:
        """The factor of a class of communication, by the first rule of this module that has data: as observed; the slowest
        observed class among some of its ranks; the fastest observed class among its ranks and others; the median of all
        observed; 1."""
        factors = self._by_communication
        if key not in factors:
            ranks = set(key.ranks)
            inside = [factor for seen, factor in self.communication if ranks >= set(seen.ranks)]
            around = [factor for seen, factor in self.communication if ranks <= set(seen.ranks)]
            every = (factor for _, factor in self.communication)
            factors[key] = max(inside) if inside else min(around) if around else _median(every)
        return factors[key]

    def factor(self, work: Work, rank: int) -> float:
        """The factor on the profile's seconds of a piece of work; 1 for loading."""
        match class_of(work, rank):
            case ComputeClass() as key:
                return self.rank_factor(rank) * self._by_phase.get(key.phase, 1.0)
            case CommunicationClass() as key:
                return self.communication_factor(key)
            case None:
                return 1.0

    def factors(self) -> dict[int | CommunicationClass, float]:
        """Everything observed of ranks and classes of communication."""
        return {**dict(self.ranks), **dict(self.communication)}

    @cached_property
    def _by_rank(self) -> dict[int, float]:
        return dict(self.ranks)

    @cached_property
    def _by_phase(self) -> dict[Phase, float]:
        return dict(self.phases)

    @cached_property
    def _by_communication(self) -> dict[CommunicationClass, float]:
        """The factors observed, and those inferred so far."""
        return dict(self.communication)


NO_RUN_CORRECTIONS = RunCorrections()


def observed_over_expected(steps: Sequence[ClassSeconds], expected: ClassSeconds, keys: Sequence[WorkClass]) -> Floats:
    """float64 [steps]: seconds of some classes together over those expected of them, step by step.

    A sum over classes is compared with a sum, so long classes weigh most. They are expected to take more than 0 seconds in all.
    """
    expected_s = sum(expected[key] for key in keys)
    return np.array([sum(step.get(key, 0.0) for key in keys) / expected_s for step in steps], dtype=np.float64)


def by_subject(keys: Iterable[WorkClass]) -> dict[int | CommunicationClass, list[WorkClass]]:
    """What a factor is of: a rank with all its classes of computation, or a class of communication."""
    subjects: dict[int | CommunicationClass, list[WorkClass]] = {}
    for key in keys:
        subjects.setdefault(key.rank if isinstance(key, ComputeClass) else key, []).append(key)
    return subjects


def learn(observed: ClassSeconds, expected: ClassSeconds) -> RunCorrections:
    """The factors that explain observed seconds by class, given the profile's seconds.

    Classes that only one of the two mappings names, or that the profile prices at 0, teach nothing.
    """
    shared = [key for key, seconds in observed.items() if seconds > 0 and expected.get(key, 0.0) > 0]
    return _corrections(
        {subject: float(observed_over_expected([observed], expected, keys)[0]) for subject, keys in by_subject(shared).items()}
    )


def _corrections(
    factors: Mapping[int | CommunicationClass, float], phases: Mapping[Phase, float] | None = None
) -> RunCorrections:
    return RunCorrections(
        ranks=tuple((key, factor) for key, factor in factors.items() if isinstance(key, int)),
        communication=tuple((key, factor) for key, factor in factors.items() if not isinstance(key, int)),
        phases=tuple((phases or {}).items()),
    )


def _median(factors: Iterable[float]) -> float:
    values = list(factors)
    return statistics.median(values) if values else 1.0


# --- one run against noise --------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Evidence:
    """One run against the profile as it was calibrated.

    Attributes:
        observed: seconds by class, one mapping per step. expected: per step under the profile without updates.
        step_s: mean measured step. floor: relative; what explains less of the step is noise.

    Raises CostError: no step, or a step time or floor that is not a number.
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


def refit(evidence: Evidence, before: RunCorrections) -> RunCorrections:
    """The factors that hold after the run; those `before` of classes that the run did not show stay."""
    steps = evidence.observed
    shared = [
        key
        for key, seconds in evidence.expected.items()
        if seconds > 0 and float(np.mean([step.get(key, 0.0) for step in steps])) > 0
    ]
    phases = {**dict(before.phases), **_phases(evidence, [key for key in shared if isinstance(key, ComputeClass)], before)}
    expected = {
        key: evidence.expected[key] * (phases.get(key.phase, 1.0) if isinstance(key, ComputeClass) else 1.0) for key in shared
    }
    held = before.factors()
    factors = dict(held)
    for subject, keys in by_subject(shared).items():
        single, expected_s = observed_over_expected(steps, expected, keys), sum(expected[key] for key in keys)
        factors[subject] = _kept(evidence, float(single.mean()), single, expected_s, held.get(subject, 1.0))
    corrections = _corrections(factors, phases)
    return RunCorrections(
        ranks=_telling(corrections.ranks),
        phases=_telling(corrections.phases),
        communication=_telling(corrections.communication),
    )


def _telling(factors: tuple[tuple[ClassKey, float], ...]) -> tuple[tuple[ClassKey, float], ...]:
    """All factors, or none if none differs from 1: beside one that does, that another was seen to be right says something of
    those that were not seen."""
    return factors if any(factor != 1.0 for _, factor in factors) else ()


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
    held = dict(before.phases)
    return {
        phase: _kept(evidence, factors[number], single[:, number], longest[number], held.get(phase, 1.0))
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


def _kept(evidence: Evidence, factor: float, single: Floats, expected_s: float, before: float) -> float:
    """The factor to go on with, from that of the mean step, those of each, the seconds it multiplies and what held until
    now."""
    error = float(single.std(ddof=1)) / math.sqrt(len(single)) / factor if len(single) > 1 else 0.0
    if abs(math.log(factor / before)) <= CLEAR * error or not _explains(evidence, factor - before, expected_s):
        return before
    distance = math.log(factor)
    shrunk = math.exp(distance * max(0.0, 1 - (error / distance) ** 2)) if distance else 1.0
    return shrunk if _explains(evidence, shrunk - 1, expected_s) else 1.0


def _explains(evidence: Evidence, change: float, expected_s: float) -> bool:
    """Whether it moves the step by more than the noise floor."""
    return abs(change) * expected_s > evidence.floor * evidence.step_s


# --- updates of a profile ---------------------------------------------------------------------------------------------


def updates_of(cluster: Cluster) -> RunCorrections:
    """The factors of the latest update of the cluster's profile, by rank; on several nodes only the factors of phases hold.

    Raises ProfileError for an unknown phase.
    """
    if not cluster.profile.updates:
        return NO_RUN_CORRECTIONS
    latest = cluster.profile.updates[-1]
    names = {phase.value: phase for phase in Phase}
    for entry in latest.phases:
        if entry.phase not in names:
            hint = near_matches(entry.phase, names)
            raise ProfileError(f"an update of the profile names phase {entry.phase!r}{hint}; fix or delete it")
    phases = tuple((names[entry.phase], entry.factor) for entry in latest.phases)
    if cluster.network is not None:
        return RunCorrections(phases=phases)
    rank_of = {device.index: rank for rank, device in enumerate(cluster.devices)}
    return RunCorrections(
        ranks=tuple((rank_of[entry.device], entry.factor) for entry in latest.devices if entry.device in rank_of),
        phases=phases,
        communication=tuple(
            (communication_class(entry.operation, [rank_of[device] for device in entry.devices]), entry.factor)
            for entry in latest.communication
            if all(device in rank_of for device in entry.devices)
        ),
    )


def without_updates(profile: Profile) -> Profile:
    return profile.model_copy(update={"updates": []})


def with_update(profile: Profile, corrections: RunCorrections, cluster: Cluster, provenance: dict[str, Any]) -> Profile:
    """The profile with one more update, that of `corrections` on the cluster's ranks. What an earlier update says of devices
    that the cluster has not is kept. `provenance`: the other keys of `Update`."""
    device = [entry.index for entry in cluster.devices]
    before = profile.updates[-1:]
    elsewhere = [entry for update in before for entry in update.devices if entry.device not in device]
    far = [entry for update in before for entry in update.communication if not set(entry.devices) <= set(device)]
    update = Update(
        **provenance,
        devices=[*elsewhere, *(DeviceFactor(device=device[rank], factor=factor) for rank, factor in corrections.ranks)],
        phases=[PhaseFactor(phase=phase.value, factor=factor) for phase, factor in corrections.phases],
        communication=[
            *far,
            *(
                CommunicationFactor(operation=key.operation, devices=[device[rank] for rank in key.ranks], factor=factor)
                for key, factor in corrections.communication
            ),
        ],
    )
    return profile.model_copy(update={"updates": [*profile.updates, update]})
