"""What a rank holds, runs and exchanges, as its memory is counted; and the outcome, line by line."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from parsim.costs.memory.chunks import Chunks
from parsim.costs.memory.verdict import DOUBTFUL, FIT_PROBABILITY, SAFE_PROBABILITY, bytes_at, fit_probability
from parsim.costs.memory.waiting import Wait, Waiting
from parsim.model.component import Component, Value
from parsim.units import format_bytes
from parsim.work import OptimizerStep, Phase

NOT_TENSORS = ("context", "communication", "allocator")
"""Lines of the framework, of libraries and of what is lost between blocks."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RankMemory:
    """Attributes: lines: (name, bytes), every line once. limit_bytes: what the device has.
    spreads: (name, p05, p95) of the lines that cannot be counted exactly, bytes.
    wanted_probability: with which it must fit.
    host_lines: (name, bytes) of what the plan keeps in the host's memory for this rank.
    host_limit_bytes: what the rank may hold there beside the other ranks of its node; None: the host's memory is not known.
    """

    rank: int
    lines: tuple[tuple[str, int], ...]
    limit_bytes: int
    spreads: tuple[tuple[str, int, int], ...] = ()
    wanted_probability: float = FIT_PROBABILITY
    host_lines: tuple[tuple[str, int], ...] = ()
    host_limit_bytes: int | None = None

    def of_rank(self, rank: int) -> RankMemory:
        """The same of another rank, which holds as much.

        Args:
            rank: its number.
        """
        if rank == self.rank:
            return self
        return RankMemory(
            rank=rank,
            lines=self.lines,
            limit_bytes=self.limit_bytes,
            spreads=self.spreads,
            wanted_probability=self.wanted_probability,
            host_lines=self.host_lines,
            host_limit_bytes=self.host_limit_bytes,
        )

    @property
    def host_bytes(self) -> int:
        """In the host's memory."""
        return sum(size for _, size in self.host_lines)

    @property
    def host_excess_bytes(self) -> int:
        """By how much the ranks of the node hold more than the host's memory; 0 where they do not, or nobody knows."""
        return 0 if self.host_limit_bytes is None else max(0, self.host_bytes - self.host_limit_bytes)

    @property
    def total_bytes(self) -> int:
        return sum(size for _, size in self.lines)

    @property
    def tensor_lines(self) -> dict[str, int]:
        """What an allocator of tensors sees, by line."""
        return {name: size for name, size in self.lines if name not in NOT_TENSORS}

    @property
    def low_bytes(self) -> int:
        """All lines at their p05."""
        return self.total_bytes - sum(self.line(name) - low for name, low, _ in self.spreads)

    @property
    def high_bytes(self) -> int:
        """All lines at their p95."""
        return self.total_bytes + sum(high - self.line(name) for name, _, high in self.spreads)

    @property
    def fit_probability(self) -> float:
        """P(peak <= limit), all uncertain lines at the same quantile (`parsim.costs.memory.verdict`)."""
        if self.host_excess_bytes:
            return 0.0
        return fit_probability(self.low_bytes, self.total_bytes, self.high_bytes, self.limit_bytes)

    @property
    def needed_bytes(self) -> int:
        """What has to fit: every line at the probability that is wanted, so by default at its median."""
        return bytes_at(self.low_bytes, self.total_bytes, self.high_bytes, self.wanted_probability)

    @property
    def fits(self) -> bool:
        """Whether it does with the probability that is wanted."""
        return self.needed_bytes <= self.limit_bytes and not self.host_excess_bytes

    @property
    def is_safe(self) -> bool:
        """Whether it fits with `SAFE_PROBABILITY`: the same as with every line at its p95."""
        return self.fit_probability >= SAFE_PROBABILITY

    @property
    def worst(self) -> tuple[str, int]:
        """The largest line."""
        return max(self.lines, key=lambda line: line[1])

    @property
    def excess_bytes(self) -> int:
        """By how much it does not fit, on the device or in the host's memory; 0 where it fits."""
        return max(0, self.needed_bytes - self.limit_bytes, self.host_excess_bytes)

    def line(self, name: str) -> int:
        return dict(self.lines)[name]

    def describe(self) -> str:
        """`rank 3 needs 34.1 GiB, at p95 34.3 GiB, of 32 GiB (2.3 GiB too much); its largest line is activations, 30 GiB`."""
        name, size = self.worst
        if self.host_excess_bytes:
            return (
                f"the ranks of the node of rank {self.rank} hold {format_bytes(self.host_excess_bytes)} more than its host has "
                f"memory; rank {self.rank} {format_bytes(self.host_bytes)}, mostly "
                f"{max(self.host_lines, key=lambda line: line[1])[0]}"
            )
        upto = f", at p95 {format_bytes(self.high_bytes)}," if self.spreads else ""
        chance = f"; it fits with a probability of {self.fit_probability:.0%}" if self.fit_probability > DOUBTFUL[0] else ""
        over = "" if self.fits else f" ({format_bytes(self.excess_bytes)} too much{chance})"
        if self.fits and not self.is_safe:
            over = f" (it fits with a probability of only {self.fit_probability:.0%})"
        return (
            f"rank {self.rank} needs {format_bytes(self.total_bytes)}{upto} of {format_bytes(self.limit_bytes)}{over}; "
            f"its largest line is {name}, {format_bytes(size)}"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Weights:
    """What a rank holds of parameters, where that is not simply all of its components'.

    Attributes:
        parameter_bytes, gradient_bytes: as held all the time, padding included (ZeRO 2 and 3: its parts of the buckets).
        updates: by group of parameters what this rank updates and has the optimizer state of (ZeRO 1: its parts of buckets).
        unsharded: bytes of the buckets that lie whole here while a component runs, by phase, component and microbatch.
    """

    parameter_bytes: int
    gradient_bytes: int
    updates: tuple[OptimizerStep, ...]
    unsharded: Mapping[tuple[Phase, str, int], float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Boundary:
    """What a rank holds of the values at its components' boundaries, bytes of one microbatch.

    Attributes:
        held_bytes: of values in flight, in all layouts, beyond the saved activations.
        loaded_bytes: of the batch as loaded. loaded_saved_bytes: that part of it which is counted among the saved activations
            while the microbatch is in flight, or let go once it is read.
        gradient_bytes: by component, of its outputs' gradients at the fullest moment before its backward, while they are
            converted.
        waiting: values and gradients that are there for other components.
        wanted_bytes: the same as the component wants them, after conversions; by default they are the same.
        held_of: `held_bytes` by the first component here that keeps the value, or makes or reads it.
        loaded_of: `loaded_bytes` and `loaded_saved_bytes` by the first component here that reads the value.
        converted_bytes: by component, right before its backward, of gradients that are converted for a maker elsewhere, and
            what waits beside them.
        handed_bytes: by component, of the gradients of its inputs as it makes them.
    """

    held_bytes: float
    loaded_bytes: float
    loaded_saved_bytes: float
    gradient_bytes: Mapping[str, float]
    waiting: Waiting = field(default_factory=Waiting)
    held_of: Mapping[str, float] = field(default_factory=dict)
    wanted_bytes: Mapping[str, float] = field(default_factory=dict)
    loaded_of: Mapping[str, tuple[float, float]] = field(default_factory=dict)
    handed_bytes: Mapping[str, float] = field(default_factory=dict)
    converted_bytes: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Again:
    """The changes of memory by the second forward of a recomputed component, bytes of one microbatch.

    Attributes:
        saved_bytes: saved for the backward. released_bytes: of its inputs, released at that moment.
        first_bytes, fullest_bytes: where only some operators run again, the fullest moment of the first forward, and that of
            the second beyond all that is kept. None: that of the whole forward.
    """

    saved_bytes: int
    released_bytes: int = 0
    first_bytes: int = 0
    fullest_bytes: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class RankStep:
    """What a rank runs in one training step, and what it keeps meanwhile.

    Attributes:
        components: those the rank runs, in execution order, as they are under the precision (`parsim.model.precision`) and the
            plan: of a tensor-sharded one the shard (`parsim.model.shard.narrow`), of a recomputed one what it keeps.
        values: all Values of the model by name (`Model.value`), likewise.
        microbatch_samples: samples of one microbatch on this rank; by component where they differ.
        in_flight: microbatches whose forward has run and whose backward has not, at the worst moment (gpipe: M; 1f1b:
            min(M, S - s); one stage: 1).
        pipeline: what is held at every action of a pipeline; it goes before `in_flight`.
        gradients: that wait here for their makers, as `waiting_bytes` takes them.
        loaded_microbatches: how many microbatches of model inputs are on the device at once (None: those in flight).
        boundary: None where every component sees the same samples and values are handed on as they were made.
        weights: None where the rank holds, and updates, all parameters of its components.
        recomputed: by component that runs its forward twice, what changes then.
    """

    components: Sequence[Component]
    values: Mapping[str, Value]
    microbatch_samples: int | Mapping[str, int]
    in_flight: int = 1
    pipeline: Chunks | None = None
    gradients: Mapping[str, Sequence[Wait]] | None = None
    loaded_microbatches: int | None = None
    boundary: Boundary | None = None
    weights: Weights | None = None
    recomputed: Mapping[str, Again] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Traffic:
    """What a rank exchanges with others.

    Attributes:
        communicators: process groups with collectives or transfers this rank takes part in; 0 for one rank alone.
        largest_message_bytes: the largest bucket or transfer; gloo keeps a scratch copy of it.
        posted_bytes: room for gradients that is there from the beginning of the step, and read by the first backwards, where
            `RankStep.pipeline` does not say.
    """

    backend: str = "nccl"
    communicators: int = 0
    largest_message_bytes: int = 0
    posted_bytes: float = 0.0


ALONE = Traffic()
"""A rank that communicates with nobody."""
