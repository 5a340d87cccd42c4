"""Templates of computation: what a component does in one phase of a microbatch, lowered once for every kind of component.

A *piece* is the tasks of a component in one phase of one microbatch of a replica, with the communication behind them. Pieces of
components of one kind differ by names and ranks alone (`parsim.graph.component_kinds`). So the passes write the piece of the
first component of a kind. What its tasks wait for is kept as a place in another piece. That is the piece of a component so many
further on in the model, or, behind a value with many readers, of this very component.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from parsim.errors import GraphError
from parsim.graph.graph_builder import Draft, TaskKey
from parsim.graph.passes.compute import add_component, add_loads, computations, phases_of
from parsim.graph.plan_index import PlanIndex
from parsim.work import Phase


class Awaited(NamedTuple):
    """A piece that tasks of another one wait for.

    Attributes:
        phase: of the piece; None: the loads of the same place on the pp axis.
        component: its number in the model (`by_number`), or how many components after that of the waiting piece.
    """

    phase: Phase | None
    component: int = 0
    by_number: bool = False


@dataclass(slots=True)
class LoweredPiece:
    """The piece of replica 0 and microbatch 0 of the first component of a kind.

    Attributes:
        component: its number in the model. waits: per piece that its tasks wait for, their places in this one and what each
            waits for in that one.
    """

    component: int
    draft: Draft
    waits: dict[Awaited, tuple[list[int], list[int]]] = field(default_factory=dict)


class _Place(NamedTuple):
    """Where a task is: in which piece that was lowered, and at what place of it."""

    phase: Phase
    component: int
    offset: int


class Pieces:
    """The pieces of a plan: which kinds there are, and what each waits for.

    Args:
        layout: the plan and its model. kept: the ranks that are lowered; None: all.

    Attributes:
        loads: per place on the pp axis the tasks that load a batch.
        sequences: per stage of the plan and phase of a microbatch the (phase, component) of its pieces, in order.
    """

    def __init__(self, layout: PlanIndex, kept: frozenset[int] | None) -> None:
        self._layout = layout
        self._kept = kept
        self._number = layout.model.component_index
        self.loads = {place: self._draft() for place in range(layout.plan.mesh.pp)}
        for place, draft in self.loads.items():
            add_loads(draft, layout, place, 0)
        self._kinds = layout.kinds
        self.sequences = {
            (stage, phase): [(own, self._number[name]) for own, name in computations(layout, stage, phase)]
            for stage in range(len(layout.plan.stages))
            for phase in phases_of(layout.plan)
        }
        self._lowered: dict[tuple[Phase, int], Draft] = {}
        self._where: dict[TaskKey, _Place] = {}
        self._pieces: dict[tuple[Phase, int], LoweredPiece] = {}
        self._phases: dict[int, list[Phase]] = {}
        self._offsets: dict[TaskKey, int | None] = {}
        for pair in (pair for sequence in self.sequences.values() for pair in sequence):
            own, number = pair
            self._phases.setdefault(number, []).append(own)
            kind = own, self._kinds.of[number]
            if kind not in self._pieces:
                self._pieces[kind] = LoweredPiece(number, self._lower(own, number))
        for (own, _), piece in list(self._pieces.items()):
            self._resolve(own, piece)

    def of(self, phase: Phase, component: int) -> LoweredPiece:
        """The piece that stands for that of a component (by number in the model)."""
        return self._pieces[phase, self._kinds.of[component]]

    def offset(self, phase: Phase, rank: int, name: str, part: Sequence[Hashable] = ()) -> int | None:
        """The place in its piece of a computation; None: it is not lowered.

        Args:
            phase, name: of the computation. rank: of replica 0. part: of a component that runs in parts, which.
        """
        number = self._number[name]
        piece = self.of(phase, number)
        place = phase, piece.component, rank + self._ranks_between(number, piece.component), *part
        if place not in self._offsets:
            first = self._layout.model.components[piece.component].name
            key = (phase, place[2], first, 0, *part)
            self._offsets[place] = piece.draft.number(key) if key in piece.draft else None
        return self._offsets[place]

    def _draft(self) -> Draft:
        return Draft(world_size=self._layout.plan.world_size, ranks=self._kept)

    def _ranks_between(self, first: int, second: int) -> int:
        """From the ranks of one component to those of another."""
        places, components = self._layout.stage_of, self._layout.model.components
        mesh = self._layout.plan.mesh
        return (places[components[second].name] - places[components[first].name]) * mesh.copies * mesh.tp

    def _lower(self, phase: Phase, number: int) -> Draft:
        if (phase, number) not in self._lowered:
            self._lowered[phase, number] = draft = self._draft()
            add_component(draft, self._layout, 0, phase, self._layout.model.components[number].name, 0)
            for offset, key in enumerate(draft.keys()):
                self._where[key] = _Place(phase, number, offset)
        return self._lowered[phase, number]

    def _resolve(self, phase: Phase, piece: LoweredPiece) -> None:
        far = self._kinds.known_by_number(piece.component)
        for offset, (_, _, after) in enumerate(piece.draft.entries()):
            for key in after:
                found = self._awaited(key, piece.component, far)
                if found is None:
                    if self._kept is None:
                        raise GraphError(f"task {offset} of {phase} of a component depends on {key}, which no pass added")
                    continue  # of a rank that another stands for: what that one does comes before, too
                offsets, earlier = piece.waits.setdefault(found[0], ([], []))
                offsets.append(offset)
                earlier.append(found[1])

    def _awaited(self, key: TaskKey, waiting: int, far: frozenset[int]) -> tuple[Awaited, int] | None:
        if key[0] == "load":
            draft = self.loads[self._layout.stage_of[self._layout.model.components[waiting].name]]
            return (Awaited(None), draft.number(key)) if key in draft else None
        if isinstance(key[0], Phase):
            phase, rank, name, _, *part = key
            assert isinstance(phase, Phase)
            assert isinstance(rank, int)
            assert isinstance(name, str)
            number, offset = self._number[name], self.offset(phase, rank, name, part)
            return None if offset is None else (_awaited(phase, number, waiting, far), offset)
        for number in self._may_send(key) if key not in self._where else ():
            for phase in self._phases[number]:
                self._lower(phase, number)
        if key not in self._where:
            return None
        place = self._where[key]
        return _awaited(place.phase, place.component, waiting, far), place.offset

    def _may_send(self, key: TaskKey) -> Iterator[int]:
        """Components whose pieces may have the task of a key, which no piece has that was lowered: those at its value's ends.

        First readers of a value with many are kinds of their own, so their pieces were lowered.
        """
        value = self._layout.model.value.get(str(key[1]))
        if value is None or value.producer is None:
            return
        yield self._number[value.producer]
        if not self._kinds.is_far(value.name):
            yield from (self._number[reader] for reader in self._layout.consumers[value.name])


def _awaited(phase: Phase, number: int, waiting: int, far: Iterable[int]) -> Awaited:
    return Awaited(phase, number, by_number=True) if number in far else Awaited(phase, number - waiting)
