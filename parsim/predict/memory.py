"""Peak memory of one rank, line by line, from the Model alone (no torch, no Plan).

The model counts the peak of a synchronous training step. It is one of three moments: the end of the last forward in
flight, the worst moment of the backward that follows, or the optimizer step. Gradients are views into flat buckets, so
they are counted once. A value between components lives as long as autograd keeps it for a backward. If the Model does not
name who keeps it, a value that crosses to another rank, or is among no saved activations, counts as kept: an upper bound.

A recomputed component holds its inputs while a microbatch is in flight. The activations of its second forward live only
until the end of its backward.

The line `allocator`, an interval, holds the memory of the allocator and of libraries. A rank fits if it does with every line
at its median, or at the probability that is asked for (`verdict`).
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, partial
from math import ceil
from operator import itemgetter
from statistics import NormalDist
from typing import Literal

from parsim.errors import CostError
from parsim.hardware.cluster import Cluster
from parsim.hardware.devices import DeviceType
from parsim.model.component import Component, Parameter, Value
from parsim.model.formats import Numerics, number_format
from parsim.model.optimizers import update_steps
from parsim.plans.layouts import ValueLayout, conversion
from parsim.plans.pipeline import PIPELINE_ORDERS, in_flight, pipeline_actions
from parsim.program.buckets import Bucket
from parsim.program.lifetimes import (
    NO_TRAFFIC,
    Again,
    AlikeOnRank,
    Chunks,
    ComponentMoments,
    CountedKinds,
    HeldMoment,
    KeptActivations,
    Moment,
    Traffic,
    Wait,
    Waiting,
    between_chunks,
    bytes_here,
    converted_for_others,
    fullest,
    gradient_bytes,
    handed_bytes,
    held_moments,
    links_of,
    local_bytes,
    made_before,
    messages_by_link,
    next_step_bytes,
    pipeline_of,
    rank_traffic,
    storage_of,
    unsharded_bytes,
    waiting_bytes,
    waiting_gradients,
    waiting_values,
)
from parsim.program.passes.gradients import updates_of
from parsim.program.passes.offload import ComponentUses, groups_of
from parsim.program.passes.rounds import most_neighbours, outer_arrays
from parsim.program.passes.unsharded import uses_of
from parsim.program.placed import PlanIndex, Reading
from parsim.units import MIB, format_bytes
from parsim.work import OptimizerStep, Phase

# Whether memory fits, as a probability: P(peak <= capacity) from the intervals of the lines that cannot be counted exactly.
#
# All uncertain lines of all ranks are taken at the same quantile q. So the peak at quantile q is the sum of its lines at q,
# and
# the probability that it fits is the q at which the sum reaches the capacity. Between and beyond the known quantiles the
# spread
# is that of a normal distribution, with one width below the median and another one above.
#
# A plan fits unless it is more likely than not to run out of memory (`FIT_PROBABILITY`), or with the probability that is
# asked
# for (`[plan] fit_probability`). It is called safe from `SAFE_PROBABILITY` on; in between, every answer says the probability.
#
# Leaves out: lines that vary independently, whose sum would have a narrower interval.


FIT_PROBABILITY = 0.5
"""A plan fits if its peak stays within the capacity with at least this probability: the same as its median within the capacity.

So a plan 5% below its limit is not refused, and one 5% above it is, however wide the interval of a profile from datasheets is.
"""

SAFE_PROBABILITY = 0.95
"""From this probability on a plan that fits is called safe; below it the answer says so."""

P95 = 0.95
"""The upper quantile that intervals are given at."""

DOUBTFUL = (0.01, 0.99)
"""Between these probabilities a table shows the probability beside the verdict."""


def fit_probability(low_bytes: int, median_bytes: int, high_bytes: int, limit_bytes: int) -> float:
    """P(peak <= limit).

    Args:
        low_bytes, median_bytes, high_bytes: the peak at p05, at the median and at p95, ascending; a side without a spread is
            exact.
        limit_bytes: the capacity.

    Returns:
        0 to 1; at least 0.5 exactly if `median_bytes` <= `limit_bytes`, and at least 0.95 exactly if `high_bytes` is.
    """
    above = limit_bytes >= median_bytes
    width = high_bytes - median_bytes if above else median_bytes - low_bytes
    if width <= 0:
        return 1.0 if above else 0.0
    if limit_bytes == high_bytes:
        return P95
    return NormalDist().cdf(_deviation(P95) * (limit_bytes - median_bytes) / width)


def bytes_at(low_bytes: int, median_bytes: int, high_bytes: int, probability: float) -> int:
    """What a device must have for a peak to fit with a probability: the inverse of `fit_probability`.

    Args:
        low_bytes, median_bytes, high_bytes: as above. probability: above 0 and below 1.
    """
    known = {0.5: median_bytes, P95: high_bytes}
    if probability in known:
        return known[probability]
    above = probability > 0.5
    width = high_bytes - median_bytes if above else median_bytes - low_bytes
    return median_bytes + ceil(width * _deviation(probability) / _deviation(P95))


@cache
def _deviation(probability: float) -> float:
    """In standard deviations."""
    return NormalDist().inv_cdf(probability)


def verdict_text(fits: bool, probability: float) -> str:
    """ "yes" or "NO", with the probability where it is neither almost 0 nor almost 1.

    Args:
        fits: the verdict. probability: that the peak stays within the capacity.
    """
    word = "yes" if fits else "NO"
    return f"{word} ({probability:.0%})" if DOUBTFUL[0] < probability < DOUBTFUL[1] else word


# What a rank holds, runs and exchanges, as its memory is counted; and the outcome, line by line.


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
        """P(peak <= limit), all uncertain lines at the same quantile (`parsim.predict.memory`)."""
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
class RankStep:
    """What a rank runs in one training step, and what it keeps meanwhile.

    Attributes:
        components: those the rank runs, in execution order, as they are under the precision (`parsim.model.formats`) and the
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


NCCL_COMMUNICATOR_BYTES = 256 * MIB
"""Assumed per communicator: about a dozen channels, each with send and receive buffers of 4 MiB (the default
NCCL_BUFFSIZE) for one protocol. The low-latency protocols and scratch are taken to need as much again; rounded up."""


def rank_memory(
    rank: int,
    step: RankStep,
    device: DeviceType,
    *,
    optimizer: str,
    precision: str,
    master_weights: bool = True,
    ema: bool = False,
    traffic: Traffic = NO_TRAFFIC,
) -> RankMemory:
    """Peak memory of a rank on a device.

    Args:
        rank: global number. step: what it runs and keeps. device: its limit and allocator.
        optimizer: a key of `OPTIMIZERS`. traffic: communicators and buffers of the rank.
        precision: decides which copies of the weights are kept.
        master_weights: with weights stored in half precision, the optimizer updates copies in fp32.
        ema: moving averages of the weights are kept, in the line optimizer_state.

    Returns:
        Lines, bytes: parameters, casts (half-precision copies under autocast), gradients, unsharded (buckets while whole),
        optimizer_state, buffers, activations, boundary_values, receive_buffers, inputs, communication, context, workspace,
        allocator. A value is counted with the component that is the first to save it, and under boundary_values elsewhere.

    Raises:
        ConfigError: unknown optimizer. CostError: samples or in_flight < 1, or samples by component without their boundary.
    """
    components = step.components
    samples = _samples_of(components, step.microbatch_samples)
    if min(samples.values(), default=1) < 1 or step.in_flight < 1:
        raise CostError(f"memory needs microbatch_samples >= 1 and in_flight >= 1, got {dict(samples)} and {step.in_flight}")
    boundary = step.boundary or _uniform_boundary(components, step.values, step.microbatch_samples, step.gradients)
    weights = step.weights or all_weights(components)
    saved = [c.saved_activation_bytes * samples[c.name] + c.saved_fixed_bytes for c in components]
    copies = {component.name: component.cast_bytes for component in components}
    again = {name: replace(entry, saved_bytes=entry.saved_bytes + copies[name]) for name, entry in step.recomputed.items()}
    ends = [
        own + (0 if c.name in step.recomputed else copies[c.name]) + boundary.held_of.get(c.name, 0.0)
        for c, own in zip(components, saved, strict=True)
    ]
    parts = _moments(step, samples, ends, boundary, again, weights)
    alive, waiting = dict.fromkeys(samples, step.in_flight), 0.0
    arriving, leaving = traffic.posted_bytes, 0.0
    loaded = step.in_flight if step.loaded_microbatches is None else step.loaded_microbatches
    inputs = loaded * boundary.loaded_bytes - min(step.in_flight, loaded) * boundary.loaded_saved_bytes
    if step.pipeline is None:
        peak = _fullest(parts, traffic.posted_bytes)
    else:
        of_moment = partial(_loaded_bytes, boundary, step.pipeline)
        base, waiting, peak = fullest(parts, step.pipeline, number_format(precision).element_bytes, of_moment)
        inputs = of_moment(base)
        alive = {name: base.alive[step.pipeline.chunk_of[name]] for name in samples}
        arriving, leaving = step.pipeline.arriving(base), step.pipeline.leaving(base)
    most = max(alive.values(), default=1)
    activations = sum(alive[c.name] * own for c, own in zip(components, saved, strict=True)) + waiting
    casts = sum(alive[name] * size for name, size in copies.items() if name not in step.recomputed)
    held = most * boundary.held_bytes
    if step.pipeline is not None:
        held = sum(alive[name] * size for name, size in boundary.held_of.items()) + leaving
    beside_update = activations + casts + held + inputs + arriving  # all of it is gone by then
    state, temporary = 0, 0
    numerics = Numerics(precision=precision, optimizer=optimizer, master_weights=master_weights, ema=ema)
    for update in weights.updates:  # one after the other
        row = numerics.optimizer_bytes(update.optimizer)
        state, temporary = state + row[0] * update.elements, max(temporary, row[1] * update.elements)
    updating = temporary - beside_update
    unsharded = min(peak.whole_bytes, peak.size_bytes) if peak.size_bytes >= updating else 0.0
    workspace = max(peak.size_bytes, updating) - unsharded
    beside = device.allocator.bytes_beside(activations + casts + held + unsharded + workspace)
    lines = {
        "parameters": weights.parameter_bytes,
        "casts": casts,
        "gradients": weights.gradient_bytes,
        "unsharded": unsharded,
        "optimizer_state": state,
        "buffers": sum(component.buffer_bytes for component in components),
        "activations": activations,
        "boundary_values": held,
        "receive_buffers": arriving,
        "inputs": inputs,
        "communication": _communication_bytes(traffic),
        "context": device.context_bytes,
        "workspace": workspace,
        "allocator": beside.median,
    }
    return _rounded(rank, device, lines, {"allocator": (beside.p05, beside.p95)})


def _loaded_bytes(boundary: Boundary, chunks: Chunks, moment: HeldMoment) -> float:
    """Of microbatches not yet read, and of those in flight what is not a saved activation."""
    total = 0.0
    for name, (loaded, saved) in boundary.loaded_of.items():
        chunk = chunks.chunk_of[name]
        total += moment.unread[chunk] * loaded + moment.alive[chunk] * (loaded - saved)
    return total


def _rounded(
    rank: int, device: DeviceType, lines: Mapping[str, float], spreads: Mapping[str, tuple[float, float]]
) -> RankMemory:
    """Whole bytes; a line whose p05 is its p95 has no spread."""
    return RankMemory(
        rank=rank,
        lines=tuple((name, round(size)) for name, size in lines.items()),
        limit_bytes=device.memory_bytes,
        spreads=tuple((name, round(low), round(high)) for name, (low, high) in spreads.items() if low < high),
    )


def all_weights(components: Sequence[Component]) -> Weights:
    """All parameters of the components; gradients of those that train, all updated here.

    Args:
        components: of one rank.
    """
    parameters = held_parameters(components)
    trained = [parameter for parameter in parameters if parameter.trainable]
    return Weights(
        parameter_bytes=sum(parameter.size_bytes for parameter in parameters),
        gradient_bytes=sum(parameter.size_bytes for parameter in trained),
        updates=update_steps(trained),
    )


def _samples_of(components: Sequence[Component], samples: int | Mapping[str, int]) -> Mapping[str, int]:
    if isinstance(samples, int):
        return dict.fromkeys((component.name for component in components), samples)
    missing = [component.name for component in components if component.name not in samples]
    if missing:
        raise CostError(f"memory needs the samples of every component; {missing[0]!r} has none")
    return samples


def held_parameters(components: Sequence[Component]) -> tuple[Parameter, ...]:
    """Every parameter of the components once: a parameter tied within the rank has one copy.

    Args:
        components: of one rank.
    """
    return tuple({p.name: p for component in components for p in component.parameters}.values())


def _uniform_boundary(
    components: Sequence[Component],
    values: Mapping[str, Value],
    samples: int | Mapping[str, int],
    gradients: Mapping[str, Sequence[Wait]] | None,
) -> Boundary:
    """Values between components that no saved activation accounts for, inputs of the model, and gradients."""
    if not isinstance(samples, int):
        raise CostError("components that see different samples convert values between them; give their boundary too")
    here = {component.name for component in components}
    made = {name for component in components for name in component.outputs}
    read = {name for component in components for name in component.inputs}
    loaded: dict[str, tuple[float, float]] = {}
    held: dict[str, float] = {}
    for name in sorted(made | read):
        value = values[name]
        size = value.size_bytes(samples)
        if value.producer is None:
            reader = next(c.name for c in components if name in c.inputs)
            more = size if value.savers == () or _counted(value, here) else 0
            before = loaded.get(reader, (0.0, 0.0))
            loaded[reader] = before[0] + size, before[1] + more
        elif value.savers == ():
            continue  # let go once it is read, or sent
        elif value.savers:
            keeper = next((saver for saver in value.savers if saver in here), None)
            if keeper is not None and not _counted(value, here):
                held[keeper] = held.get(keeper, 0.0) + size
        elif value.producer not in here or name not in read or not value.saved:
            user = value.producer if value.producer in here else next(c.name for c in components if name in c.inputs)
            held[user] = held.get(user, 0.0) + size
    return Boundary(
        held_bytes=sum(held.values()),
        held_of=held,
        loaded_bytes=sum(size for size, _ in loaded.values()),
        loaded_saved_bytes=sum(size for _, size in loaded.values()),
        loaded_of=loaded,
        gradient_bytes={
            component.name: sum(values[name].size_bytes(samples) for name in component.outputs if values[name].differentiable)
            for component in components
        },
        waiting=waiting_bytes(components, values, lambda value: value.size_bytes(samples), gradients),
        handed_bytes={
            component.name: sum(
                values[name].size_bytes(samples)
                for name in dict.fromkeys(component.inputs)
                if values[name].differentiable and values[name].producer is not None
            )
            for component in components
        },
    )


def _counted(value: Value, here: Collection[str]) -> bool:
    """Whether the value is among the saved activations of the components `here`: the first that saves it counts it."""
    return value.saved if value.savers is None else bool(value.savers) and value.savers[0] in here


def _moments(
    step: RankStep,
    samples: Mapping[str, int],
    saved: Sequence[float],
    boundary: Boundary,
    again: Mapping[str, Again],
    weights: Weights,
) -> list[ComponentMoments]:
    """What is there while each component runs. A recomputed one runs forward before its backward, beside the gradients of
    what it puts out, which have been converted by then.
    """
    found = []
    whole: dict[str, dict[tuple[Phase, int], float]] = {}
    for (phase, name, microbatch), size in weights.unsharded.items():
        key = phase, microbatch if step.pipeline else 0  # without a pipeline one microbatch is held at a time
        whole.setdefault(name, {})[key] = max(size, whole.get(name, {}).get(key, 0.0))
    made_before = {} if step.pipeline is None else step.pipeline.made_before
    for component, own in zip(step.components, saved, strict=True):
        name, number = component.name, samples[component.name]
        made, made_back = made_before.get(name, (0.0, 0.0))
        forward = 0.0
        if name not in again:
            forward = boundary.waiting.values.get(name, 0.0) + _fullest_bytes(component.forward_peaks, number)
        elif again[name].first_bytes:
            forward = boundary.waiting.values.get(name, 0.0) + again[name].first_bytes
        gradients = boundary.gradient_bytes[name]
        runs_backward = gradients or not component.forward_peaks
        alive = max(_alive_bytes(component, number), gradients) if runs_backward else 0.0
        wanted, second = boundary.wanted_bytes.get(name, gradients), 0.0
        beside = boundary.waiting.gradients.get(name, 0.0) + made_back
        split = component.split_backward
        first_half = None if split is None else max(_fullest_bytes(split.peaks, number), gradients) + beside
        if name in again:
            entry = again[name]
            first = entry.fullest_bytes
            if first is None:
                first = _fullest_bytes(component.forward_peaks, number)
            alive += entry.saved_bytes - entry.released_bytes
            if first_half is not None:
                first_half += entry.saved_bytes - entry.released_bytes
            second = first + wanted + beside
        found.append(
            ComponentMoments(
                component=component,
                samples=number,
                kept=own,
                again=again[name].saved_bytes if name in again else 0.0,
                forward=forward + made,
                second=second,
                alive=max(alive + beside, boundary.converted_bytes.get(name, 0.0)),
                gradients=wanted,
                handed=boundary.handed_bytes.get(name, 0.0) + beside,
                whole=whole.get(name, {}),
                first_half=first_half,
                waits=0.0 if split is None else _fullest_bytes([split.waiting], number),
            )
        )
    return found


def _fullest(parts: Sequence[ComponentMoments], posted: float) -> Moment:
    """By how much the worst moment of the last microbatch's forward, or of its backward, exceeds the end of that forward.

    While a component runs backward, what the later ones saved is free.
    """
    before = 0.0
    moments = [Moment(0.0, 0.0)]
    for part in parts:
        moments.append(part.moment(before + part.forward, 0, Phase.FORWARD))
        before += part.kept
        moments.append(part.backward(before - posted, 0))
    peak = max(moments, key=itemgetter(0))
    return Moment(max(0.0, peak.size_bytes - before), peak.whole_bytes)


def _fullest_bytes(peaks: Sequence[tuple[int, int]], samples: int) -> int:
    return max((rate * samples + fixed for rate, fixed in peaks), default=0)


def _alive_bytes(component: Component, samples: int) -> float:
    """Bytes beyond the saved activations at the fullest moment of the component's backward. They were counted when it was
    traced. Otherwise they are the gradients of the input, the output and the parameters of its largest operator, before
    these are added to their bucket.
    """
    if component.backward_peaks:
        return _fullest_bytes(component.backward_peaks, samples)
    return _fullest_bytes([(op.activation_bytes, op.parameter_bytes) for op in component.operators], samples)


def _communication_bytes(traffic: Traffic) -> int:
    if traffic.communicators <= 0:
        return 0
    return NCCL_COMMUNICATOR_BYTES * traffic.communicators if traffic.backend == "nccl" else traffic.largest_message_bytes


# Bytes that a plan keeps in the host's memory, and what stays of them on a device for a while.
#
# Of what a component is counted to save, values that another component needs too are copied with the last one that does
# (`parsim.plans.plan`). While one component computes, a device holds what that one saves, what the one before it saved
# and is still being copied away, and what is being fetched for the next.


BUFFERS = "offload_buffers"
"""The line of activations that are on a device while they are copied, or while a component uses them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Offloaded:
    """Bytes of one microbatch on a rank that runs the components.

    Attributes:
        copied: by component, what is copied behind its forward and fetched before its backward.
        away: by component, how much of what it is counted to save lies in the host's memory.
        spans: (first, last, bytes) of values that the components from `first` to `last` save: fetched for the last one's
            backward, they stay until the first one's has ended.
    """

    copied: Mapping[str, int]
    away: Mapping[str, int]
    spans: tuple[tuple[str, str, int], ...] = ()


NOTHING = Offloaded(copied={}, away={})


def offloaded_by(kept: KeptActivations) -> Offloaded:
    """What the plan of an index copies to the host.

    Args:
        kept: its activations, under the precision.
    """
    layout, chosen = kept.layout, kept.layout.plan.offloaded & kept.layout.differentiable
    order = layout.model.component_index
    copied, away, spans = dict[str, int](), dict[str, int](), list[tuple[str, str, int]]()
    for name in sorted(chosen, key=order.__getitem__):
        left, later = saved_bytes(kept, name), list[tuple[str, int]]()
        for value, size in kept.counted_values(name):
            together = [other for other in kept.values[value].savers or () if layout.chunk_of[other] == layout.chunk_of[name]]
            last = max(together, key=order.__getitem__)
            if kept.values[value].producer is None or not chosen.issuperset(together):
                left -= size
            elif last != name:
                later.append((last, size))
        away[name] = max(0, left)
        for last, size in later:  # values that share storage are no more than what the component saves
            moved = max(0, min(size, left))
            left -= moved
            copied[last] = copied.get(last, 0) + moved
            spans.append((name, last, moved))
        copied[name] = copied.get(name, 0) + max(0, left)
    return Offloaded(copied=copied, away=away, spans=tuple(spans))


def saved_bytes(kept: KeptActivations, name: str) -> int:
    """What a component is counted to save of one microbatch."""
    own = kept.component(name)
    return own.saved_activation_bytes * kept.layout.local_samples(name) + own.saved_fixed_bytes


def with_offloaded(layout: PlanIndex, precision: str) -> PlanIndex:
    """The index that says how much each component copies to the host; the same one where nothing does.

    Args:
        layout: of a plan. precision: that decides how wide activations are.
    """
    if not layout.plan.activation_offload:
        return layout
    return replace(layout, offloaded=offloaded_by(KeptActivations(layout, precision)).copied)


def on_device(component: Component, samples: int, away: int) -> Component:
    """The component without what lies in the host's memory.

    Args:
        component: of one rank. samples: that it sees. away: bytes of one microbatch.
    """
    if not away:
        return component
    saved = component.saved_activation_bytes * samples + component.saved_fixed_bytes
    return replace(component, saved_activation_bytes=0, saved_fixed_bytes=max(0, saved - away))


def with_offload_lines(
    memory: RankMemory, kept: KeptActivations, found: Offloaded, *, optimizer: str, master_weights: bool, ema: bool
) -> RankMemory:
    """The memory of a rank with the line of what is in flight, and with its lines in the host's memory.

    Args:
        memory: of the rank, without what is offloaded. kept: activations under the plan. found: what of them is offloaded.
        optimizer, master_weights, ema: as `plan_memory` takes them.
    """
    layout, plan = kept.layout, kept.layout.plan
    lines, host = memory.lines, list[tuple[str, int]]()
    if plan.optimizer_offload:
        numerics = Numerics(precision=kept.precision, optimizer=optimizer, master_weights=master_weights, ema=ema)
        state = sum(numerics.optimizer_bytes(step.optimizer)[0] * step.elements for step in updates_of(layout, memory.rank))
        buckets = layout.rank_buckets(memory.rank)
        copies = sum(layout.updated_bytes(bucket.family, len(bucket.group)) for bucket in buckets)
        host += [("optimizer_state", state), ("gradients", copies), ("parameters", copies)]
    if plan.activation_offload:
        shard = plan.shard_of_rank(memory.rank)
        blocks = _blocks(layout, plan.stage_of_rank(memory.rank), shard)
        lines = (*lines, (BUFFERS, _most_in_flight(blocks, found, layout.model.component_index)))
        host.append(("activations", _most_away(blocks, found.copied)))
    return replace(memory, lines=lines, host_lines=tuple(host))


def _blocks(layout: PlanIndex, place: int, shard: int) -> list[tuple[ComponentUses, ...]]:
    """The computation of a tp rank of a place, action by action, those without any left out. Actions of one stage and phase
    share one tuple, which has the microbatch of the first."""
    plan, known = layout.plan, dict[tuple[int, Phase], tuple[ComponentUses, ...]]()
    actions = pipeline_actions(plan.pipeline_order, place, plan.mesh.pp, plan.microbatches, plan.chunks)
    for action in actions:
        if (action.stage, action.phase) not in known:
            uses = (use for use in uses_of(layout, place, [action]) if layout.placement[use.component].runs_on(shard))
            known[action.stage, action.phase] = tuple(groups_of(list(uses)))
    return [groups for action in actions if (groups := known[action.stage, action.phase])]


def _most_in_flight(blocks: Sequence[tuple[ComponentUses, ...]], found: Offloaded, order: Mapping[str, int]) -> int:
    """Bytes on the device while some component computes: its own, those that are leaving, and those that are being fetched.

    Only what computes right before and after a component counts, so every sequence of three blocks is looked at once.
    """
    beside = {
        name: sum(size for first, last, size in found.spans if order[first] <= number < order[last])
        for name, number in order.items()
    }
    most = 0
    unlike = {tuple(map(id, three)): three for three in zip(((), *blocks), blocks, (*blocks[1:], ()), strict=False)}
    for before, block, after in unlike.values():
        groups = (*before[-1:], *block, *after[:1])
        sizes = [found.copied.get(group.component, 0) for group in groups]
        for number in range(len(before[-1:]), len(before[-1:]) + len(block)):
            here = sizes[number] + beside[groups[number].component]
            if number and groups[number - 1].forward:
                here += sizes[number - 1]
            if number + 1 < len(groups) and not groups[number + 1].forward:
                here += sizes[number + 1]
            most = max(most, here)
    return most


def _most_away(blocks: Sequence[tuple[ComponentUses, ...]], copied: Mapping[str, int]) -> int:
    """Bytes in the host's memory from the forward to the backward, when most are."""
    changes = {id(block): _change(block, copied) for block in {id(block): block for block in blocks}.values()}
    most = now = 0
    for block in blocks:
        within, after = changes[id(block)]
        most = max(most, now + within)
        now += after
    return most


def _change(block: Sequence[ComponentUses], copied: Mapping[str, int]) -> tuple[int, int]:
    """By how much a block exceeds what was in the host's memory before it at most, and afterwards."""
    most = now = 0
    for group in block:
        size = copied.get(group.component, 0)
        now += size if group.forward else 0
        most = max(most, now)
        now -= 0 if group.forward else size
    return most, now


def with_host_limits(
    first: Sequence[RankMemory], every: Sequence[RankMemory], layout: PlanIndex, cluster: Cluster
) -> list[RankMemory]:
    """The memory of ranks with what each may hold of its node's memory, beside the node's other ranks.

    Args:
        first: of ranks that hold as much as one another the first. every: of all ranks. layout: of the plan.
        cluster: devices by rank, and the host's memory, where it is known.
    """
    host = cluster.profile.host_memory
    if host is None or host.memory_bytes is None or not layout.plan.offloads:
        return list(first)
    held: dict[int, int] = {}
    for memory in every:
        node = cluster.devices[memory.rank].node
        held[node] = held.get(node, 0) + memory.host_bytes
    fullest: dict[int, int] = {}  # by lines that ranks have in common, of the fullest node with such a rank
    for memory in every:
        key = id(memory.lines)
        fullest[key] = max(fullest.get(key, 0), held[cluster.devices[memory.rank].node])
    return [
        replace(memory, host_limit_bytes=max(0, int(host.memory_bytes) - fullest[id(memory.lines)] + memory.host_bytes))
        for memory in first
    ]


# What a rank keeps beside a synchronous step, for relaxed synchronisation and for validation: lines of memory of their own.
#
# outer_state        of average with an outer optimizer: the weights of the last round, and its momentum; of merge: the global
#                    model
# neighbour_buffers  of gossip: what arrives from the neighbours of a round, as far as it exceeds what the step has let go by
# then
# receive_buffers    of stale: also what arrives in a step for the next one
# stashed_weights    of stale: a copy of a stage's weights for every batch that it holds, unless it runs backward in the same
# step
# evaluation         of [training.evaluation]: whole weights and the batch that is scored, as far as that exceeds what is let
# go


LET_GO = ("activations", "casts", "boundary_values", "unsharded", "workspace")
"""Lines of the step whose memory is free when a round begins."""
BETWEEN_STEPS = (*LET_GO, "inputs", "receive_buffers")
"""Those whose memory is free between two steps."""
MOST_SCORED = 64
"""Samples of a batch that is scored, at most (`parsim.execute.evaluation`)."""
Scored = Literal["", "weights", "averages"]
"""What is validated during the training; "": nothing."""


def batches_held(layout: PlanIndex, stage: int) -> int:
    """Batches that a stale stage has run forward and not backward, at the fullest moment.

    Args:
        layout: of a plan with synchronisation stale. stage: its place on the pp axis.
    """
    return 1 + layout.plan.synchronisation.delay_of(stage, layout.plan.mesh.pp)


def with_relaxed_lines(memory: RankMemory, kept: KeptActivations, rank: int) -> RankMemory:
    """The memory of a rank with the lines of its plan's synchronisation; unchanged for synchronous training.

    Args:
        memory: of the step. kept: values under the plan. rank: global number.
    """
    layout = kept.layout
    plan, rule = layout.plan, layout.plan.synchronisation
    if not rule.is_relaxed:
        return memory
    trained = sum(bucket.size_bytes for bucket in layout.rank_buckets(rank))
    if rule.kind == "stale":
        held = batches_held(layout, plan.stage_of_rank(rank))
        line = ("stashed_weights", held * trained if held > 1 else 0)
        arriving = round(next_step_bytes(kept, rank))
        held_lines = [(name, size + arriving if name == "receive_buffers" else size) for name, size in memory.lines]
        return replace(memory, lines=(*held_lines, line))
    lines = [("outer_state", outer_arrays(layout) * trained)] if outer_arrays(layout) else []
    if rule.kind == "gossip":
        replica = plan.replica_of_rank(rank)
        arriving = most_neighbours(rule, plan.mesh.dp)[replica] * trained
        free = sum(memory.line(name) for name in LET_GO)
        lines.append(("neighbour_buffers", max(0, arriving - free)))
    return replace(memory, lines=(*memory.lines, *lines))


def with_evaluation_line(memory: RankMemory, kept: KeptActivations, scored: Scored) -> RankMemory:
    """The memory of a rank with the line `evaluation`; unchanged where nothing is validated.

    A rank builds the module, which then takes the gathered weights in place of its own. Replicas whose weights are whole in
    any case gather none, unless averages are scored, or the mean of replicas that mix in rounds.

    Args:
        memory: of the step. kept: values under the plan. scored: what is validated.

    Returns:
        The line is 0 where the step needs more. Leaves out what the library keeps while it gathers.
    """
    if not scored:
        return memory
    plan, model = kept.layout.plan, kept.layout.model
    whole = model.parameter_bytes
    buffers = sum(component.buffer_bytes for component in model.components)
    is_whole = (
        plan.mesh.dp == plan.world_size and plan.zero_stage < 3 and scored == "weights" and not plan.synchronisation.mixes
    )
    gathered = (0 if is_whole else whole) + buffers
    scoring = _scored_bytes(kept, min(MOST_SCORED, max(1, plan.microbatch_samples)))
    needed = gathered + buffers + max(whole, scoring)
    free = sum(memory.line(name) for name in BETWEEN_STEPS)
    return replace(memory, lines=(*memory.lines, ("evaluation", max(0, needed - free))))


def _scored_bytes(kept: KeptActivations, samples: int) -> int:
    """Of one forward of the whole model, of which nothing is kept: at most what its components have made, and what waits."""
    model = kept.layout.model
    values: Mapping[str, Value] = {value.name: replace(value, savers=()) for value in model.values}
    waits = waiting_bytes(model.components, values, lambda value: value.size_bytes(samples)).values
    batch = sum(value.size_bytes(samples) for value in values.values() if value.producer is None)
    return batch + max(
        round(waits[component.name])
        - sum(values[name].size_bytes(samples) for name in component.inputs if values[name].producer is None)
        + max((rate * samples + fixed for rate, fixed in component.forward_peaks), default=0)
        for component in model.components
    )


# Peak memory of every rank of a plan.
#
# Where components are placed differently, a value lies on a rank in the layout in which it was made there and in those in
# which it is read there. Beyond the saved activations, every copy counts that some component keeps for its backward. The
# copy of the first component that saves a value is the exception: it is among its saved activations. Values that only pass
# through do not count.
#
# Leaves out: conversions of earlier values that are under way while a later component computes.


def plan_memory(
    layout: PlanIndex,
    cluster: Cluster,
    *,
    precision: str,
    optimizer: str,
    master_weights: bool = True,
    ema: bool = False,
    scored: Scored = "",
    fit_probability: float = FIT_PROBABILITY,
) -> tuple[RankMemory, ...]:
    """Peak memory of every rank of a plan.

    Ranks at one place of different replicas differ only by their device. So do tp ranks of a stage if no component is placed
    on one of them.

    Args:
        layout: the plan and its model. cluster: devices by rank.
        precision, optimizer, master_weights: as in RUN.toml. ema: whether averages of the weights are kept.
        scored: what is validated between steps. fit_probability: with which a rank must fit.

    Returns:
        One RankMemory per rank, in rank order, bytes. Leaves out conversions of earlier values while a later component
        computes.

    Raises:
        ConfigError: an unknown optimizer.
    """
    first = unlike_memory(
        layout,
        cluster,
        precision=precision,
        optimizer=optimizer,
        master_weights=master_weights,
        ema=ema,
        scored=scored,
        fit_probability=fit_probability,
    )
    return of_every_rank(layout, cluster, first)


def of_every_rank(layout: PlanIndex, cluster: Cluster, first: Sequence[RankMemory]) -> tuple[RankMemory, ...]:
    """The memory of all ranks of a plan.

    Args:
        layout: the plan and its model. cluster: devices by rank. first: `unlike_memory`.
    """
    mesh, own, known = layout.plan.mesh, {entry.rank: entry for entry in first}, dict[tuple[int, int, str], RankMemory]()
    shards = 1 if layout.shards_alike else mesh.tp
    memories = []
    for place in range(mesh.pp):
        for rank in mesh.stage_range(place):
            kind = place, rank % shards, cluster.devices[rank].type.name
            if rank in own:
                known[kind] = own[rank]
            memories.append(known[kind].of_rank(rank))
    return tuple(memories)


def unlike_memory(
    layout: PlanIndex,
    cluster: Cluster,
    *,
    precision: str,
    optimizer: str,
    master_weights: bool = True,
    ema: bool = False,
    scored: Scored = "",
    fit_probability: float = FIT_PROBABILITY,
) -> tuple[RankMemory, ...]:
    """Of ranks that hold as much as one another that of the first, as `plan_memory` takes and gives it; in rank order."""
    plan, kept = layout.plan, KeptActivations(layout, precision)
    counted = CountedKinds(layout, kept.values)
    offloaded = offloaded_by(kept) if plan.activation_offload else NOTHING
    found = []
    for rank in (rank for place in range(plan.mesh.pp) for rank in _unlike_ranks(layout, cluster, place)):
        device, names, place = cluster.devices[rank].type, layout.rank_components(rank), plan.stage_of_rank(rank)
        alike = counted.on(rank)
        gradients = waiting_gradients(layout, kept.values, rank, alike)
        weights = rank_weights(layout, rank)
        step = RankStep(
            components=[
                on_device(kept.component(name), layout.local_samples(name), offloaded.away.get(name, 0)) for name in names
            ],
            values=kept.values,
            gradients=gradients,
            microbatch_samples={name: layout.local_samples(name) for name in names}
            if plan.is_mixed
            else plan.microbatch_samples // plan.mesh.tp,
            in_flight=batches_held(layout, place)
            if plan.synchronisation.kind == "stale"
            else in_flight(plan.pipeline_order, place, plan.mesh.pp, plan.microbatches, plan.chunks),
            pipeline=rank_chunks(kept, rank, names),
            loaded_microbatches=plan.microbatches,
            boundary=rank_boundary(layout, kept.values, rank, gradients, alike) if plan.is_mixed else None,
            weights=replace(weights, updates=()) if plan.optimizer_offload else weights,
            recomputed={name: kept.again(name) for name in names if layout.recomputes(name)},
        )
        memory = rank_memory(
            rank,
            step,
            device,
            optimizer=optimizer,
            precision=precision,
            master_weights=master_weights,
            ema=ema,
            traffic=rank_traffic(kept, rank, cluster.profile.communication.backend),
        )
        if plan.offloads:
            memory = with_offload_lines(memory, kept, offloaded, optimizer=optimizer, master_weights=master_weights, ema=ema)
        found.append(replace(memory, wanted_probability=fit_probability))
    if plan.offloads:
        found = with_host_limits(found, of_every_rank(layout, cluster, found), layout, cluster)
    if plan.synchronisation.is_relaxed:
        found = [with_relaxed_lines(own, kept, own.rank) for own in of_every_rank(layout, cluster, found)]
    return tuple(with_evaluation_line(own, kept, scored) for own in found)


def _unlike_ranks(layout: PlanIndex, cluster: Cluster, place: int) -> list[int]:
    """At a place on the pp axis the first rank of each kind of device; of each tp shard, where some components are on one."""
    ranks, tp = layout.plan.mesh.stage_range(place), layout.plan.mesh.tp
    shards = 1 if layout.shards_alike else tp
    return sorted({(rank % shards, cluster.devices[rank].type.name): rank for rank in reversed(ranks)}.values())


def rank_chunks(kept: KeptActivations, rank: int, names: Sequence[str]) -> Chunks | None:
    """What a rank of a pipeline holds at every action; None without a pipeline, and for stages that are not synchronised.

    Args:
        kept: values under the plan. rank: global number. names: components of the rank, in order.
    """
    layout, plan = kept.layout, kept.layout.plan
    if plan.synchronisation.kind == "stale":
        return None
    if plan.mesh.pp == plan.chunks == 1 and not PIPELINE_ORDERS[plan.pipeline_order].halves:
        return None
    place = plan.stage_of_rank(rank)
    chunk_of = {stage: chunk for chunk, stage in enumerate(plan.place_stages(place))}
    pipeline = pipeline_of(layout, plan.shard_of_rank(rank), place)
    inward, outward = links_of(pipeline, place)
    sizes, own = messages_by_link(kept, rank), between_chunks(kept, rank)
    return Chunks(
        chunk_of={name: chunk_of[layout.chunk_of[name]] for name in names},
        moments=held_moments(pipeline, place, apart=plan.zero_stage >= 2, own=tuple(own)),
        halved=frozenset(name for name in names if layout.is_halved(name)),
        for_weights=frozenset(name for name in names if not layout.wants_input_gradient(name)),
        arriving_bytes=[sizes[link] for link in inward],
        leaving_bytes=[sizes[link] for link in outward],
        between_bytes=list(own.values()),
        made_before=made_before(kept, rank, names),
    )


def rank_weights(layout: PlanIndex, rank: int) -> Weights:
    """Bytes of parameters and gradients on a rank.

    With ZeRO they lie in buckets padded to equal parts. This rank updates one part (stage 1), keeps only the gradients of
    that part (stage 2), and only its parameters (stage 3). Frozen parameters are in no bucket: every rank that uses one
    holds it whole, under ZeRO 3 too.

    Args:
        layout: the plan and its model. rank: global number.
    """
    stages = [(bucket, layout.zero_stage_of(bucket)) for bucket in layout.rank_buckets(rank)]
    frozen = 0
    if layout.has_frozen:
        frozen = sum(parameter.size_bytes for parameter in layout.rank_parameters(rank) if not parameter.trainable)
    return Weights(
        parameter_bytes=frozen + sum(_held_of(bucket, whole=stage < 3, padded=stage >= 1) for bucket, stage in stages),
        gradient_bytes=sum(_held_of(bucket, whole=stage < 2, padded=stage >= 1) for bucket, stage in stages),
        updates=updates_of(layout, rank),
        unsharded=unsharded_bytes(layout, rank),
    )


def _held_of(bucket: Bucket, *, whole: bool, padded: bool) -> int:
    if whole:
        return bucket.padded_bytes if padded else bucket.size_bytes
    return bucket.padded_bytes // len(bucket.group)


# --- values -----------------------------------------------------------------------------------------------------------


def rank_boundary(
    layout: PlanIndex,
    values: Mapping[str, Value],
    rank: int,
    gradients: Mapping[str, Sequence[Wait]] | None = None,
    alike: AlikeOnRank | None = None,
) -> Boundary:
    """Bytes of the values that a rank makes or reads, in all layouts in which it does.

    Args:
        layout: the plan and its model. values: by name, as kept under the plan. rank: global number.
        gradients: `waiting_gradients` of the rank, where they are known already.
        alike: what was counted already on the ranks of this plan; None: nothing.
    """
    alike = alike or CountedKinds(layout, values).on(rank)
    loaded_of: dict[str, tuple[float, float]] = {}
    held: dict[str, float] = {}
    batch = ValueLayout("full", layout.batch_ways(rank))
    for name, layouts in layout.batch_layouts(rank).items():
        value = values[name]
        loaded, saved = local_bytes(layout, value, batch), 0.0
        counted = value.saved if value.savers is None else any(layout.runs_on(rank, first) for first in value.savers[:1])
        if value.savers == ():
            saved = loaded
        elif counted and all(entry.form != "shard" for entry in layouts):  # pieces of a dim are copies
            saved = min(local_bytes(layout, value, entry) for entry in layouts)
        reader = next(user for user in layout.consumers[name] if layout.runs_on(rank, user))
        before = loaded_of.get(reader, (0.0, 0.0))
        loaded_of[reader] = before[0] + loaded, before[1] + saved
    for value in (values[name] for name in layout.values_at[layout.plan.stage_of_rank(rank)]):
        if value.producer is None:
            continue
        if size := alike.of_value("held", value, partial(_held_bytes, layout, rank, value)):
            keeper = _keeper(layout, rank, value)
            held[keeper] = held.get(keeper, 0.0) + size
    waiting = waiting_bytes(
        [layout.model.component(name) for name in layout.rank_components(rank)],
        values,
        lambda value: bytes_here(layout, value, ValueLayout("full", layout.batch_ways(rank)), rank),
        waiting_gradients(layout, values, rank, alike) if gradients is None else gradients,
        waiting_values(layout, values, rank, alike),
    )
    gradients_of = {
        name: alike.of_component("gradients", name, partial(_gradients_of, layout, values, name, rank)) for name in alike.place
    }
    return Boundary(
        held_bytes=sum(held.values()),
        held_of=held,
        loaded_bytes=sum(size for size, _ in loaded_of.values()),
        loaded_saved_bytes=sum(size for _, size in loaded_of.values()),
        loaded_of=loaded_of,
        handed_bytes={name: handed for name, (_, _, handed) in gradients_of.items()},
        gradient_bytes={name: max(wanted, most) for name, (wanted, most, _) in gradients_of.items()},
        converted_bytes=converted_for_others(layout, values, rank, waiting.gradients),
        wanted_bytes={name: wanted for name, (wanted, _, _) in gradients_of.items()},
        waiting=waiting,
    )


def _gradients_of(layout: PlanIndex, values: Mapping[str, Value], name: str, rank: int) -> tuple[float, float, float]:
    """See `gradient_bytes`; and those that the component hands on."""
    return *gradient_bytes(layout, values, name, rank), handed_bytes(layout, values, name)


def _keeper(layout: PlanIndex, rank: int, value: Value) -> str:
    """The component on this rank with which a copy begins that no saved activation stands for."""
    assert value.producer is not None
    savers = [name for name in value.savers or () if layout.runs_on(rank, name)]
    if len(savers) > 1 and savers[:1] == list(value.savers or ())[:1]:
        return savers[1]  # the first one's copy is among its saved activations
    users = (*savers, value.producer, *layout.consumers[value.name])
    return next(name for name in users if layout.runs_on(rank, name))


def _held_bytes(layout: PlanIndex, rank: int, value: Value) -> float:
    """Copies of a value on this rank that are kept for a backward and that no saved activation stands for."""
    if value.savers is None:
        return _held_at_most(layout, rank, value)
    here = value.producer is not None and layout.runs_on(rank, value.producer)
    made = layout.source[value.name].value
    layouts = {name: reading.ends.value for reading in layout.readings[value.name] for name in reading.components}
    if value.producer is not None:
        layouts[value.producer] = made
    keepers = [name for name in value.savers if name in layouts and layout.runs_on(rank, name)]
    kept: dict[ValueLayout, float] = {}
    for name in keepers:
        storage = layouts[name]
        if here:
            storage = storage_of(conversion(made, storage, layout.plan.mesh.tp), made, layout.plan.shard_of_rank(rank))
        kept[storage] = local_bytes(layout, value, storage)
    counted = local_bytes(layout, value, layouts[keepers[0]]) if keepers and keepers[:1] == list(value.savers[:1]) else 0.0
    return sum(kept.values()) - counted


def _held_at_most(layout: PlanIndex, rank: int, value: Value) -> float:
    """The same where the Model does not say who keeps the value: as if every reader did."""
    assert value.producer is not None
    stage = layout.plan.stage_of_rank(rank)
    read = list(dict.fromkeys(reading.ends.value for reading in _readings_here(layout, rank, value)))
    if not layout.runs_on(rank, value.producer):
        return sum(local_bytes(layout, value, entry) for entry in read)
    made = layout.source[value.name].value
    elsewhere = all(reading.stage != stage for reading in layout.readings[value.name])
    total = 0.0 if value.saved and not elsewhere else local_bytes(layout, value, made)
    if made.form == "partial":  # no operator that keeps its output can make summands
        total, read = 0.0, read[1:] if value.saved else read
    for entry in read:
        hops = conversion(made, entry, layout.plan.mesh.tp)
        whole = storage_of(hops, made, layout.plan.shard_of_rank(rank))
        if whole == made:
            total += local_bytes(layout, value, whole) - local_bytes(layout, value, entry)
        else:
            total += local_bytes(layout, value, whole)
    return total


def _readings_here(layout: PlanIndex, rank: int, value: Value) -> Iterator[Reading]:
    for reading in layout.readings[value.name]:
        if any(layout.runs_on(rank, name) for name in reading.components):
            yield reading
