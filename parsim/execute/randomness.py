"""Random numbers of components on many ranks: ranks with the same samples draw the same ones, all others independent ones.

At the beginning of a step every rank draws one number from its CPU generator. Its state is the same everywhere, because the
module was built from one seed on all of them. Before each forward of a component that draws, the generator of its device is
seeded. The seed comes from this number, the component, the microbatch and the group of samples that the rank works on. So
replicas draw different masks, and the shards of a component begin in one state (`parsim.model.shard.randomness` goes on from
there). A step
leaves the CPU generator one number further on every rank, whatever was drawn: a checkpoint keeps that state, and ranks never
drift apart.

A dataset of the user's own draws from the same CPU generator, in a thread where a rank loads ahead. So such a rank draws its
number before that thread begins to read (`draw_ahead`).
"""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Iterator, Mapping

import torch
from torch import Tensor

from parsim.graph.plan_index import PlanIndex
from parsim.model.runnable import CallProgram
from parsim.model.shard.randomness import generator_of
from parsim.model.shard.unlisted import draws


class ComponentRandomness:
    """The seeds of one rank.

    Args:
        programs: of the components it runs, whole.
    """

    def __init__(self, layout: PlanIndex, rank: int, device: torch.device, programs: Mapping[str, CallProgram]) -> None:
        plan = layout.plan
        self._device = device
        self._samples = {
            name: (plan.replica_of_rank(rank), plan.shard_of_rank(rank) // layout.placement[name].batch_ways(plan.mesh.tp))
            for name in layout.rank_components(rank)
            if draws(programs[name])
        }
        self._step = 0
        self._ahead: tuple[int, Tensor | None] | None = None

    @property
    def draw(self) -> int:
        """The number that the step at hand has drawn."""
        return self._step

    def draw_ahead(self) -> None:
        """Draw the number of the next step now."""
        self._ahead = int(torch.randint(2**62, ())), self._generator_state()

    def _generator_state(self) -> Tensor | None:
        """Of the CPU's generator, where a step may draw from it."""
        return torch.get_rng_state() if self._samples else None

    @contextlib.contextmanager
    def step(self, draw: int | None = None) -> Iterator[None]:
        """Around a step of training.

        Args:
            draw: of an earlier step, whose random numbers are wanted again; None: another one is drawn, or was ahead.
        """
        if draw is None and self._ahead is None:
            self.draw_ahead()
        if draw is None:
            assert self._ahead is not None
            (self._step, state), self._ahead = self._ahead, None
        else:
            self._step, state = draw, self._generator_state()
        try:
            yield
        finally:
            if state is not None:
                torch.set_rng_state(state)

    def draws(self, component: str) -> bool:
        """Whether a forward of the component draws random numbers."""
        return component in self._samples

    def begin(self, component: str, microbatch: int) -> None:
        """Before the first forward of a component for a microbatch."""
        if component in self._samples:
            key = repr((self._step, component, microbatch, *self._samples[component]))
            seed = hashlib.blake2b(key.encode(), digest_size=7).digest()
            generator_of(self._device).manual_seed(int.from_bytes(seed, "big"))
