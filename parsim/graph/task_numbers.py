"""The numbers that lowering gives to the tasks of copied pieces."""

from __future__ import annotations

import numpy as np

from parsim.arrays import Ints
from parsim.graph.fold import Folding
from parsim.graph.pieces import Pieces
from parsim.graph.plan_index import PlanIndex
from parsim.plans.pipeline import pipeline_actions
from parsim.work import Phase


class TaskNumbers:
    """The numbers of tasks as `lower` gives them: place on the pp axis, replica, then the actions of its ranks.

    Attributes:
        loads: int64 [places, replicas], the first task that loads. count: of tasks.
    """

    def __init__(self, layout: PlanIndex, folding: Folding, pieces: Pieces) -> None:
        plan, count = layout.plan, len(layout.model.components)
        sizes = []
        self._block: dict[Phase, Ints] = {}
        self._inside: dict[Phase, Ints] = {}
        blocks = {pair: number for number, pair in enumerate(pieces.sequences)}
        for pair, sequence in pieces.sequences.items():
            inside = 0
            for phase, component in sequence:
                if phase not in self._block:
                    self._block[phase] = np.full(count, -1, dtype=np.int64)
                    self._inside[phase] = np.zeros(count, dtype=np.int64)
                self._block[phase][component] = blocks[pair]
                self._inside[phase][component] = inside
                inside += len(pieces.of(phase, component).draft)
            sizes.append(inside)
        replicas = np.arange(len(folding.replicas), dtype=np.int64)
        self._starts = np.zeros((len(blocks), len(replicas), plan.microbatches), dtype=np.int64)
        self.loads = np.zeros((plan.mesh.pp, len(replicas)), dtype=np.int64)
        self.count = 0
        for place in range(plan.mesh.pp):
            inside, rows = len(pieces.loads[place]), []
            for action in pipeline_actions(plan.pipeline_order, place, plan.mesh.pp, plan.microbatches, plan.chunks):
                block = blocks[action.stage, action.phase]
                rows.append((block, action.microbatch, inside))
                inside += sizes[block]
            first = self.count + inside * replicas
            self.loads[place] = first
            if rows:
                block_of, microbatch, begin = np.array(rows, dtype=np.int64).T
                self._starts[block_of, :, microbatch] = begin[:, None] + first
            self.count += inside * len(replicas)

    def of(self, phase: Phase, components: Ints) -> Ints:
        """int64 [components, replicas, microbatches]: the first tasks of their pieces."""
        starts: Ints = self._starts[self._block[phase][components]] + self._inside[phase][components][:, None, None]
        return starts

    def by_microbatch(self, phase: Phase, component: int, replica: int) -> tuple[Ints, int]:
        """Where the blocks of one component begin, int64 [microbatches], and how far in them its pieces do.

        Args:
            phase, component: of the pieces. replica: its number among those that are lowered.
        """
        return self._starts[self._block[phase][component], replica], int(self._inside[phase][component])
