"""Seconds and bytes of runs of components as stages of a pipeline, and where a model may be cut into stages."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from parsim.arrays import Floats
from parsim.costs.costs import Costs
from parsim.model.model import Model
from parsim.plans.concurrent import concurrent_with
from parsim.plans.mesh import Mesh
from parsim.plans.pipeline import PIPELINE_ORDERS, moments, rank_of_stage, stages_by_rank
from parsim.plans.placement import BATCH, Placement
from parsim.plans.plan import DEFAULT_BUCKET_BYTES
from parsim.predict.planning_problem import PlanningProblem
from parsim.schedule.cuts import Bounds
from parsim.schedule.options import Prices
from parsim.schedule.partition import INFINITE, sums_between
from parsim.schedule.space import is_chain
from parsim.work import Phase, SendRecv

MOST_PLACES = 1024
"""Components beyond which stages are cut between repeated blocks alone."""

LONGEST_BLOCK, MOSTLY = 64, 0.9
"""Components of a repeated block at most, and the share of a model that blocks must be."""


@dataclass
class _KnownStages:
    """Of one problem, by mesh and samples: seconds of all runs of components (by placements too), and of transfers."""

    seconds: dict[tuple[Mesh, int, tuple[tuple[str, Placement], ...], int], dict[str, Floats]] = field(default_factory=dict)
    up_to_s: dict[tuple[Mesh, int, tuple[tuple[str, Placement], ...]], dict[str, Floats]] = field(default_factory=dict)
    places: tuple[int, ...] = ()
    cuts_s: dict[tuple[Mesh, int], list[float]] = field(default_factory=dict)


@dataclass(frozen=True)
class StageCosts:
    """Time and memory of a run of components on the devices of one stage."""

    problem: PlanningProblem
    mesh: Mesh
    samples: int
    microbatches: int
    order: str
    chunks: int
    placements: Mapping[str, Placement]
    zero_stage: int

    @cached_property
    def _costs(self) -> Costs:
        return self.problem.costs(self.mesh.size)

    @cached_property
    def _known(self) -> _KnownStages:
        return self.problem.remembered(_KnownStages)

    @cached_property
    def _up_to_s(self) -> dict[str, Floats]:
        """Per device kind: forward and backward of one microbatch of the first i components."""
        known, key = self._known.up_to_s, (self.mesh, self.samples, tuple(self.placements.items()))
        if key not in known:
            known[key] = self._found_up_to_s()
        return known[key]

    def _found_up_to_s(self) -> dict[str, Floats]:
        prices = self._prices(in_flight=1)
        chosen = [(component, self.placements.get(component.name, BATCH)) for component in self.problem.model.components]
        found: dict[str, Floats] = {}
        for rank in range(self.mesh.size):
            kind = self._costs.device_kind(rank)
            if kind in found:
                continue
            own = []
            for component, placement in chosen:
                seconds = prices.compute_on_s(component, placement, Phase.FORWARD, rank)
                if component.name in prices.differentiable:
                    seconds += prices.compute_on_s(component, placement, Phase.BACKWARD, rank)
                own.append(seconds)
            found[kind] = _running(own)
        return found

    @cached_property
    def _seconds(self) -> dict[str, Floats]:
        """Per device kind: forward and backward of one microbatch of components first..last-1, at [last, first]."""
        known, key = self._known.seconds, (self.mesh, self.samples, tuple(self.placements.items()), len(self.places))
        if key not in known:
            places = list(self.places)
            known[key] = {
                kind: np.where(_some_components(len(places) - 1), sums_between(running[places]), INFINITE)
                for kind, running in self._up_to_s.items()
            }
        return known[key]

    def runs_s(self, cut: Bounds) -> list[float]:
        """By stage the seconds of one microbatch on the slowest device of the stage.

        Args:
            cut: by stage its first component and one past its last.
        """
        return [
            max(float(self._up_to_s[kind][last] - self._up_to_s[kind][first]) for kind in kinds)
            for (first, last), kinds in zip(cut, self._kinds, strict=True)
        ]

    @property
    def places(self) -> tuple[int, ...]:
        """Where stages may begin and end, ascending, 0 and the number of components included."""
        if not self._known.places:
            self._known.places = cut_places(self.problem.model)
        enough = len(self._known.places) > self.mesh.pp * self.chunks
        return self._known.places if enough else tuple(range(len(self.problem.model.components) + 1))

    @cached_property
    def _kinds(self) -> list[set[str]]:
        """Per stage its kinds of devices."""
        return [
            {self._costs.device_kind(rank) for rank in self._costs.unlike_ranks(self.mesh.stage_range(place))}
            for place in rank_of_stage(self.order, self.mesh.pp, self.chunks)
        ]

    def seconds(self, stage: int) -> Floats:
        """At [last, first]: forward and backward of one microbatch on the slowest device of the stage; infinite where empty."""
        slowest: Floats = np.max([self._seconds[kind] for kind in self._kinds[stage]], axis=0)
        return slowest

    @cached_property
    def before_s(self) -> Floats:
        """By first component of a stage, what a microbatch takes before it and, going back, behind it at least.

        Each component on the fastest kind of device; nothing where stages do not wait for one another, or for halves alone.
        """
        alone = PIPELINE_ORDERS[self.order].halves or not is_chain(self.problem)
        least: Floats = np.min([np.diff(of_kind) for of_kind in self._up_to_s.values()], axis=0)
        return _running([0.0] * len(least) if alone else least.tolist())

    def _prices(self, *, in_flight: int) -> Prices:
        return Prices(
            problem=self.problem,
            mesh=self.mesh,
            samples=self.samples,
            bucket_bytes=DEFAULT_BUCKET_BYTES,
            in_flight=in_flight,
            zero_stage=self.zero_stage,
        )

    @cached_property
    def _up_to_bytes(self) -> tuple[Floats, Floats]:
        """Bytes of the first i components: a fixed part, and a part per microbatch in flight."""
        running = []
        for alive in (0, 1):
            prices = self._prices(in_flight=alive)
            running.append(
                _running(
                    [
                        prices.memory_bytes(component, self.placements.get(component.name, BATCH), 0)
                        for component in self.problem.model.components
                    ]
                )
            )
        return running[0], running[1] - running[0]

    def limits_bytes(self) -> list[float]:
        """Per stage what its smallest device has for components of one chunk."""
        devices = self.problem.cluster.devices
        return [
            float(
                min(devices[rank].type.memory_bytes - devices[rank].type.context_bytes for rank in self.mesh.stage_ranks(place))
            )
            / self.chunks
            for place in rank_of_stage(self.order, self.mesh.pp, self.chunks)
        ]

    def fitting_s(self, limits_bytes: Sequence[float], stage: int, kept_bytes: Floats | None = None) -> Floats:
        """As `seconds`, infinite where the stage would hold more than its limit.

        Args:
            limits_bytes: by stage. kept_bytes: float64 [n], of one microbatch, where components are recomputed.
        """
        held = sums_between(self._held_up_to(stage, kept_bytes)[list(self.places)])
        return np.where(held <= limits_bytes[stage], self.seconds(stage), INFINITE)

    def held_bytes(self, stage: int, run: tuple[int, int], kept_bytes: Floats) -> float:
        """What a run of components (first, one past the last) is taken to hold as a stage; the other arguments as above."""
        up_to = self._held_up_to(stage, kept_bytes)
        return float(up_to[run[1]] - up_to[run[0]])

    def _held_up_to(self, stage: int, kept_bytes: Floats | None) -> Floats:
        """By number of components what the first so many hold as a part of the stage."""
        fixed, alone = self._up_to_bytes
        of_one = alone if kept_bytes is None else _running(kept_bytes.tolist())
        pp = self.mesh.pp
        place = rank_of_stage(self.order, pp, self.chunks)[stage]
        chunk = stages_by_rank(self.order, pp, self.chunks)[place].index(stage)
        alive = max(moment[chunk] for moment in moments(self.order, place, pp, self.microbatches, self.chunks))
        held: Floats = fixed + alive * of_one
        return held

    def cuts_s(self) -> list[float]:
        """Per place the transfer of everything that crosses the cut before it, forward, between the first two stages."""
        key = self.mesh, self.samples
        if key not in self._known.cuts_s:
            self._known.cuts_s[key] = self._found_cuts_s()
        return self._known.cuts_s[key]

    def _found_cuts_s(self) -> list[float]:
        known: dict[int, float] = {}
        found = []
        for size_bytes in crossing_bytes(self.problem, self.samples):
            if size_bytes not in known:
                work = SendRecv(source=0, destination=self.mesh.copies * self.mesh.tp, size_bytes=size_bytes)
                beside = concurrent_with(self.mesh, work) if self._costs.shares_links else ()
                known[size_bytes] = self._costs.estimate(work, 0, beside).median_s
            found.append(known[size_bytes])
        return found


def is_long(model: Model) -> bool:
    """Whether a model has so many components that its repeated blocks are planned alike.

    Args:
        model: traced or from sizes.
    """
    return len(model.components) > MOST_PLACES


def cut_places(model: Model) -> tuple[int, ...]:
    """Where stages may begin and end, ascending: anywhere, but in models of many components between repeated blocks alone.

    Args:
        model: whose repeated blocks are found by what their components do.
    """
    prints = [component.fingerprint for component in model.components]
    count = len(prints)
    if not is_long(model):
        return tuple(range(count + 1))
    for period in range(1, LONGEST_BLOCK + 1):
        alike = [one == two for one, two in zip(prints, prints[period:], strict=False)]
        if sum(alike) >= MOSTLY * count:
            first = alike.index(True)
            last = count - alike[::-1].index(True)
            return tuple(sorted({*range(first), *range(first, last, period), *range(last, count + 1)}))
    return tuple(range(count + 1))


def _some_components(count: int) -> NDArray[np.bool_]:
    """bool [n + 1, n + 1]: at [last, first] whether first < last."""
    return np.tri(count + 1, k=-1, dtype=bool)


def _running(values: Sequence[float]) -> Floats:
    return np.concatenate([[0.0], np.cumsum(np.array(values, dtype=np.float64))])


def crossing_bytes(problem: PlanningProblem, samples: int) -> list[int]:
    """Per place the bytes of one microbatch that cross the cut before it: every value once, however many read it."""
    model = problem.model
    place = model.component_index
    last_reader: dict[str, int] = {}
    for number, component in enumerate(model.components):
        for value in component.inputs:
            last_reader[value] = number
    crossing = np.zeros(len(model.components) + 1, dtype=np.int64)
    for value, reader in last_reader.items():
        producer = model.value[value].producer
        if producer is not None:
            crossing[place[producer] + 1] += model.value[value].size_bytes(samples)
            crossing[reader + 1] -= model.value[value].size_bytes(samples)
    return [int(size) for size in np.cumsum(crossing)[: len(model.components)]]
