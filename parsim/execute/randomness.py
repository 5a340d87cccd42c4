"""Random numbers of components on many ranks: ranks with the same samples draw the same ones, all others independent ones.

At the beginning of a step every rank draws one number from a generator of its own. Its state is the same everywhere, because
the module was built from one seed on all of them. Nobody else draws from it: samples of one's own are read with the
generators of the process, on a GPU in a thread beside the step. Before each forward of a component that draws, the generator
of its device is seeded. The seed comes from this number, the component, the microbatch and the group of samples that the rank
works on. So replicas draw different masks, and the shards of a component begin in one state
(`parsim.model.shard.randomness` goes on from there). A step leaves the rank's generator one number further, whatever was
drawn. A checkpoint keeps its state, and ranks never drift apart.

On a GPU, a component that may draw from the generator of the host has that one seeded as well, and to itself while it runs:
whoever reads samples waits (`parsim.data.host_generators`).
"""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Iterator, Mapping

import torch
from torch import Tensor

from parsim.data.host_generators import alone
from parsim.graph.plan_index import PlanIndex
from parsim.model.runnable import CallProgram
from parsim.model.shard.host_draws import may_draw_on_host
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
        on_gpu = device.type == "cuda"
        self._on_host = frozenset(name for name in self._samples if on_gpu and may_draw_on_host(programs[name]))
        self._step = 0
        self._generator = torch.Generator()
        self._generator.set_state(torch.get_rng_state())

    @property
    def state(self) -> Tensor:
        """Of the generator, for a checkpoint or another plan."""
        return self._generator.get_state()

    def go_on(self, state: Tensor) -> None:
        """From a `state`."""
        self._generator.set_state(state)

    @property
    def draw(self) -> int:
        """The number that the step at hand has drawn."""
        return self._step

    @contextlib.contextmanager
    def step(self, draw: int | None = None) -> Iterator[None]:
        """Around a step of training.

        Args:
            draw: of an earlier step, whose random numbers are wanted again; None: another one is drawn.
        """
        self._step = int(torch.randint(2**62, (), generator=self._generator)) if draw is None else draw
        draws_here = bool(self._samples) and self._device.type == "cpu"
        state = torch.get_rng_state() if draws_here else None
        try:
            yield
        finally:
            if state is not None:
                torch.set_rng_state(state)

    def draws(self, component: str) -> bool:
        """Whether a forward of the component draws random numbers."""
        return component in self._samples

    def draws_on_host(self, component: str) -> bool:
        """Whether a forward of the component may draw from the generator of the host."""
        return self._device.type == "cpu" or component in self._on_host

    @contextlib.contextmanager
    def _host_alone(self) -> Iterator[None]:
        with alone():
            state = torch.get_rng_state()
            try:
                yield
            finally:
                torch.set_rng_state(state)

    def around(self, component: str) -> contextlib.AbstractContextManager[None]:
        """Around every forward of a component: on a GPU it has the generator of the host to itself, if it may draw from that,
        and leaves it as it was."""
        return self._host_alone() if component in self._on_host else _NOTHING

    def begin(self, component: str, microbatch: int) -> None:
        """Before the first forward of a component for a microbatch, inside `around`."""
        if component in self._samples:
            key = repr((self._step, component, microbatch, *self._samples[component]))
            seed = int.from_bytes(hashlib.blake2b(key.encode(), digest_size=7).digest(), "big")
            generator_of(self._device).manual_seed(seed)
            if component in self._on_host:
                torch.default_generator.manual_seed(seed)


_NOTHING: contextlib.AbstractContextManager[None] = contextlib.nullcontext()
