"""Costs as measured now: factors by which the machine at hand is slower (or faster) than its profile, learnt from a run.

A run shows the seconds of the work its own plan does. Three rules extend them to the work of other plans. (1) A slow rank
is slow at everything. (2) A collective runs at the speed of its slowest link. So it is at least as slow as any group it
contains, and at most as slow as any group that contains it. (3) Classes without data get the median factor. So a profile
that is wrong everywhere does not make untried plans look good.

Leaves out: that a factor may differ between small and large messages, and between kinds of computation.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from parsim.errors import CostError
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


def class_of(work: Work, rank: int) -> WorkClass | None:
    """The class whose seconds the work adds to; None for loading and work of the host, which neither ranks nor links explain.

    Args:
        work: one piece of work. rank: that runs it.
    """
    match work:
        case Compute():
            return ComputeClass(rank, work.component, work.phase)
        case OptimizerStep() | ClipGradients() | Mix():
            return ComputeClass(rank, "", Phase.OPTIMIZER)
        case Collective():
            return CommunicationClass(work.operation, tuple(sorted(work.group)))
        case SendRecv():
            return CommunicationClass("send_recv", (work.source, work.destination))
        case LoadBatch() | HostCopy() | HostUpdate():
            return None


def class_seconds(work_seconds: Iterable[tuple[Work, int, float]]) -> dict[WorkClass, float]:
    """Sum seconds by class.

    Args:
        work_seconds: (work, rank, seconds) of every task of one step; for communication any rank of it will do.
    """
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
        """Of a rank's computation: the observed one, else the median of those observed, else 1."""
        observed = self._by_rank
        return observed[rank] if rank in observed else _median(observed.values())

    def communication_factor(self, key: CommunicationClass) -> float:
        """The factor of a class of communication, by the first rule of this module that has data:

        as observed; the slowest observed class among some of its ranks; the fastest observed class among its ranks and
        others; the median of all observed; 1.
        """
        if key not in self._known:
            self._known[key] = self._inferred(key)
        return self._known[key]

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
    def _known(self) -> dict[CommunicationClass, float]:
        return dict(self.communication)

    def _inferred(self, key: CommunicationClass) -> float:
        ranks = set(key.ranks)
        inside = [factor for seen, factor in self.communication if ranks >= set(seen.ranks)]
        if inside:
            return max(inside)
        around = [factor for seen, factor in self.communication if ranks <= set(seen.ranks)]
        return min(around) if around else _median(factor for _, factor in self.communication)


NO_RUN_CORRECTIONS = RunCorrections()


def learn(observed: ClassSeconds, expected: ClassSeconds) -> RunCorrections:
    """The factors that explain observed seconds, given the profile's seconds.

    A rank's factor is the sum over its classes of computation, so long classes weigh most. Classes that only one of the two
    mappings names, or that the profile prices at 0, teach nothing.

    Args:
        observed, expected: seconds by class.

    Returns:
        The factors. Leaves out that a factor may depend on sizes.
    """
    shared = [(key, seconds) for key, seconds in observed.items() if seconds > 0 and expected.get(key, 0.0) > 0]
    seen: dict[int, float] = {}
    profile: dict[int, float] = {}
    communication: list[tuple[CommunicationClass, float]] = []
    for key, seconds in shared:
        if isinstance(key, CommunicationClass):
            communication.append((key, seconds / expected[key]))
        else:
            seen[key.rank] = seen.get(key.rank, 0.0) + seconds
            profile[key.rank] = profile.get(key.rank, 0.0) + expected[key]
    return RunCorrections(
        ranks=tuple((rank, seen[rank] / profile[rank]) for rank in seen),
        communication=tuple(communication),
    )


def _median(factors: Iterable[float]) -> float:
    known = list(factors)
    return statistics.median(known) if known else 1.0
