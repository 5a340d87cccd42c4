"""A Plan: which component runs on which ranks, in how many microbatches, in which order, with which synchronisation.

Frozen, saved as JSON, without measured numbers. `check_plan` compares it with a model and a batch.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from itertools import groupby
from operator import itemgetter
from pathlib import Path
from typing import Any, Literal

from parsim.errors import ModelError, PlanError, near_matches
from parsim.files import (
    NO_CONTROL,
    control_character_in,
    parse_json,
    read_text,
    reading,
    version_problem,
    write_text_atomically,
)
from parsim.model.component import Component, check_ways
from parsim.model.model import Model
from parsim.plans.layouts import BATCH, Placement, parse_placement
from parsim.plans.mesh import Mesh
from parsim.plans.pipeline import PIPELINE_ORDERS, check_chunks, rank_of_stage, stages_by_rank
from parsim.plans.synchronisation import ALL_REDUCE, Synchronisation
from parsim.records import check_types
from parsim.registry import is_reference
from parsim.units import format_bytes

# Which components of a plan are recomputed: they keep only their inputs, and run their forward again before their backward.
#
# "none", "full" (all that have a backward), "selective" (all by operator) or a list. An entry of a list is a component's
# name, or
# "selective:NAME" for a component by operator. A component keeps its inputs as it reads them, so that recomputing repeats
# computation alone and no communication. By operator it also keeps the outputs that are dear to compute, and runs the rest
# again (`parsim.model.autograd.recompute`). A component that would keep no less so stays as it is. A segment (a run of
# components, such as a transformer layer) keeps only what enters it, as it lies there: a piece of the sequence where norms are
# divided along it. Its conversions between tensor shards are sent again, as Megatron's full recomputation does. A question that
# names all components of a layer means such a segment (`parsim.search.stages.recomputing_layers`).
#
# Sources: Chen et al., "Training Deep Nets with Sublinear Memory Cost" (2016); Korthikanti et al., "Reducing Activation
# Recomputation in Large Transformer Models" (2022), section 5.


Recompute = str | tuple[str, ...]

NONE = "none"
FULL = "full"
SELECTIVE = "selective"
BY_OPERATOR = f"{SELECTIVE}:"
"""Begins an entry of a list that means a component by operator."""
AUTO: Literal["auto"] = "auto"
"""Of a search, not of a plan: as little as makes a plan fit, and none where it fits without."""


def normalised(recompute: Recompute | Sequence[str], components: Sequence[str]) -> Recompute:
    """The one way to write the choice: names in execution order, a word where it means all or none of them. Raises PlanError
    for another word, a name that is not a component of the plan, or one that is recomputed in both ways."""
    if isinstance(recompute, str):
        if recompute not in WORDS:
            raise PlanError(
                f"recompute = {recompute!r}{near_matches(recompute, WORDS)}: it is {', '.join(map(repr, WORDS))} or a list of "
                f'component names ("{BY_OPERATOR}NAME" for one by operator)'
            )
        return recompute
    entries = set(recompute)
    for entry in entries:
        name = entry.removeprefix(BY_OPERATOR)
        if name not in components:
            raise PlanError(f"recompute names {name!r}, which is not a component of the plan{near_matches(name, components)}")
        if entry != name and name in entries:
            raise PlanError(f"recompute names {name!r} and {entry!r}: a component is recomputed in one way; drop one of them")
    chosen = tuple(entry for name in components for entry in (name, BY_OPERATOR + name) if entry in entries)
    if len(chosen) == len(components):
        for word, begins in ((FULL, False), (SELECTIVE, True)):
            if all(entry.startswith(BY_OPERATOR) == begins for entry in chosen):
                return word
    return chosen or NONE


WORDS = (NONE, SELECTIVE, FULL)


def named(recompute: Recompute, components: Sequence[str]) -> tuple[frozenset[str], frozenset[str]]:
    """The components that a normalised choice names whole, and those that it names by operator."""
    if isinstance(recompute, str):
        return frozenset(components if recompute == FULL else ()), frozenset(components if recompute == SELECTIVE else ())
    whole = frozenset(entry for entry in recompute if not entry.startswith(BY_OPERATOR))
    return whole, frozenset(entry.removeprefix(BY_OPERATOR) for entry in recompute if entry.startswith(BY_OPERATOR))


def check_segments(segments: Sequence[Sequence[str]], recompute: Recompute, stages: Sequence[Sequence[str]]) -> None:
    """Raise PlanError unless every segment is a run of consecutive components of one stage, and no component is recomputed
    twice."""
    if not segments:
        return
    place = {name: (number, index) for number, stage in enumerate(stages) for index, name in enumerate(stage)}
    whole, some = named(recompute, tuple(place))
    seen = set(whole if recompute == SELECTIVE else whole | some)  # "selective" leaves out what segments recompute
    for segment in segments:
        for name in segment:
            if name not in place:
                raise PlanError(
                    f"segments name {name!r}, which is not a component of the plan{near_matches(name, list(place))}"
                )
            if name in seen:
                raise PlanError(f"{name} would be recomputed twice: it is in two segments, or in recompute as well")
            seen.add(name)
        stage, first = place[segment[0]] if segment else (0, 0)
        if not segment or [place[name] for name in segment] != [(stage, first + offset) for offset in range(len(segment))]:
            raise PlanError(
                f"a segment is a run of consecutive components of one stage, and {', '.join(segment) or 'an empty one'} is not"
            )


# What of a plan lies in the host's memory: the optimizer's state, and activations that are saved for the backward.
#
# Optimizer: state and master weights. Once a bucket's gradients are complete on a rank, those that the rank updates with
# (whole, or its part under ZeRO) are copied to the host. When all have come, the host updates bucket by bucket, and the new
# parameters are copied back. So gradients are accumulated, summed and clipped on the device.
#
# Activations: what a component saves is copied behind its forward, and fetched before its backward. A rank begins a
# computation only when what the computation before the last one saved has left. It fetches one computation ahead. So a device
# holds what is saved of two or three components at once. A component that is recomputed keeps its inputs, which are copied
# likewise. A value that several components save is copied with the last of them. It stays on the device if one of them is not
# offloaded. So do samples of the batch, and values that came from another stage.


ActivationOffload = bool | tuple[str, ...]


def normalised_offload(offload: ActivationOffload, components: Sequence[str]) -> ActivationOffload:
    """The one way to write the choice: names in execution order, True for all of them, False for none. Raises PlanError for a
    name that is no component of the plan."""
    if isinstance(offload, bool):
        return offload
    for name in offload:
        if name not in components:
            raise PlanError(
                f"activation_offload names {name!r}, which is no component of the plan{near_matches(name, components)}"
            )
    chosen = tuple(name for name in components if name in set(offload))
    return len(chosen) == len(components) or (chosen or False)


MOST_MICROBATCHES = 10**4
"""Each is simulated: ten times as many took a search of a small model 9 GB and more than 97 CPU seconds."""
MOST_SAMPLES = 2**40
SCHEMA_VERSION = 2
STRATEGIES = ("single", "dp", "mp", "hp", "adaptive", "custom")
DEFAULT_BUCKET_BYTES = 25 * 1024 * 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class SoftwareSwitch:
    """What software does whatever the plan. Where it means nothing it changes nothing.

    axes: of the mesh, all longer than 1 where it means something. zero_stage: that it belongs to; None: to any. usual: as
    PyTorch has it. executed: the executor knows both ways.
    """

    axes: tuple[str, ...] = ()
    zero_stage: int | None = None
    usual: bool = False
    executed: bool = False


SWITCHES: Mapping[str, SoftwareSwitch] = {
    "tensor_overlap": SoftwareSwitch(axes=("tp",)),
    "tensor_backward_overlap": SoftwareSwitch(axes=("tp",)),
    "gather_ahead": SoftwareSwitch(zero_stage=1),
    "blocking_transfers": SoftwareSwitch(axes=("pp",)),
    "scatter_gather": SoftwareSwitch(axes=("pp", "tp")),
    "backward_prefetch": SoftwareSwitch(zero_stage=3, usual=True, executed=True),
}
SIMULATED_ONLY = ("segments", "optimizer_offload", "activation_offload")
"""Keys of a plan, beside switches, that the executor does not know; empty or False where unused."""


UNSAID = (*SIMULATED_ONLY, *SWITCHES, "recompute", "context_exchange", "clip_gradients", "synchronisation")
"""Keys that the file of a plan leaves out where they have their defaults."""
CONTEXT_EXCHANGES = ("ring", "all_gather")
ZERO_STAGES = (0, 1, 2, 3)
ZERO_STAGES_TEXT = "it is 0, 1 (optimizer state divided), 2 (gradients too) or 3 (parameters too)"


@dataclass(frozen=True, slots=True, kw_only=True)
class Stage:
    """Consecutive components on a `dp x tp` grid of ranks (replica-major), and the placement of each on the tp axis; none: all
    batch-sharded."""

    components: tuple[str, ...]
    ranks: tuple[int, ...]
    placements: tuple[Placement, ...] = ()

    def __post_init__(self) -> None:
        if self.placements and len(self.placements) != len(self.components):
            raise PlanError(
                f"a stage of {len(self.components)} components lists {len(self.placements)} placements; give one for each"
            )
        if all(placement == BATCH for placement in self.placements):
            object.__setattr__(self, "placements", ())

    def placed(self) -> tuple[tuple[str, Placement], ...]:
        return tuple(zip(self.components, self.placements or (BATCH,) * len(self.components), strict=True))


MOST_RUNS = 8
"""Of equal placements that a summary lists one by one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """One way of training one model on `mesh.size` ranks.

    Attributes:
        strategy: the family it was chosen from.
        global_batch: samples per step over all replicas. microbatches: per replica.
        stages: in the order of the model; `chunks` times as many as the mesh has pp, each at the place on the pp axis that the
            pipeline order gives it.
        pipeline_order: a key of `parsim.plans.pipeline.PIPELINE_ORDERS`.
        bucket_bytes: a gradient bucket is closed once it holds this much.
        zero_stage: arrays sharded over the ranks that hold the same parameters, or over those of their sharding group
            (`Mesh.dp_shard`). 1: the optimizer state and its step. 2: the gradients too, summed after the backward of every
            microbatch. 3: the parameters too, gathered where they are used.
        recompute: the components whose forward runs again: "none", "full", "selective" (all by operator), or their names,
            "selective:NAME" for one by operator. segments: runs of components of a stage that are recomputed as a whole.
        gather_ahead: with zero_stage 1, parameters are gathered at the beginning of a step, bucket by bucket before their first
            use, and not at its end.
        blocking_transfers: a rank computes nothing while it sends a value or gradient to another stage, as Megatron-LM before
            2023 and DeepSpeed do.
        scatter_gather: of a value or gradient that all tp ranks have whole, each sends its part to the next stage, whose ranks
            gather it.
        tensor_overlap: all_gathers and reduce_scatters on the tp axis run in pieces beside the products that read or make them.
        tensor_backward_overlap: in the backward, gradients of values are summed over the tp axis beside the gradient of the
            weight that read the value, as Megatron-LM of 2022 does.
        context_exchange: with mesh.cp above 1, how attention gets the keys and values of the other parts of the sequence.
            "ring": step by step from neighbour to neighbour, overlapped with the computation. "all_gather": all of them
            beforehand, and a reduce_scatter of their gradients.
        backward_prefetch: with zero_stage 3, parameters are gathered during the preceding backward. False: after it and its
            reduce_scatter, as FSDP's BACKWARD_POST does.
        optimizer_offload: state and master weights lie in the host's memory, and the host updates. activation_offload: so do
            the saved activations of all components (True), none (False) or those that are named.
        clip_gradients: before every update all ranks get the norm of all gradients, and scale their gradients by it.
        synchronisation: how and when replicas synchronise (`parsim.plans.synchronisation`).
    """

    strategy: str
    mesh: Mesh
    stages: tuple[Stage, ...]
    global_batch: int
    microbatches: int = 1
    pipeline_order: str = "1f1b"
    bucket_bytes: int = DEFAULT_BUCKET_BYTES
    zero_stage: int = 0
    recompute: Recompute = NONE
    segments: tuple[tuple[str, ...], ...] = ()
    gather_ahead: bool = False
    blocking_transfers: bool = False
    scatter_gather: bool = False
    tensor_overlap: bool = False
    tensor_backward_overlap: bool = False
    optimizer_offload: bool = False
    activation_offload: ActivationOffload = False
    backward_prefetch: bool = True
    context_exchange: str = "ring"
    clip_gradients: bool = False
    synchronisation: Synchronisation = ALL_REDUCE

    def __repr__(self) -> str:
        """`Plan(dp pp=1 dp=8 tp=1 mb=1x128)`."""
        return f"Plan({self.summary()})"

    def __post_init__(self) -> None:
        if self.strategy not in STRATEGIES and not is_reference(self.strategy):
            raise PlanError(f"unknown strategy {self.strategy!r}{near_matches(self.strategy, STRATEGIES)}")
        row = PIPELINE_ORDERS[self.pipeline_order]
        chunked = row.most_chunks != 1
        if not self.stages or len(self.stages) % self.mesh.pp or (len(self.stages) != self.mesh.pp and not chunked):
            multiple = " or a multiple of it" if chunked else ""
            raise PlanError(
                f"mesh has pp={self.mesh.pp}, but the plan lists {len(self.stages)} stages; {self.pipeline_order} takes as "
                f"many as pp{multiple}"
            )
        if self.mesh.pp == 1 and len(self.stages) > 1:
            raise PlanError(f"chunks = {len(self.stages)} with pp = 1: there is no pipeline to interleave; use one stage")
        check_chunks(self.pipeline_order, self.chunks)
        for number, (stage, place) in enumerate(zip(self.stages, self.stage_places, strict=True)):
            if not stage.components:
                raise PlanError(f"stage {number} holds no component; use fewer stages")
            if len(stage.ranks) != self.mesh.copies * self.mesh.tp:
                pieces = f" * cp ({self.mesh.cp})" if self.mesh.cp > 1 else ""
                raise PlanError(
                    f"stage {number} lists {len(stage.ranks)} ranks, and dp ({self.mesh.dp}) * tp ({self.mesh.tp}){pieces} = "
                    f"{self.mesh.copies * self.mesh.tp}"
                )
            if stage.ranks != self.mesh.stage_ranks(place):
                raise PlanError(f"stage {number} must run on ranks {self.mesh.stage_ranks(place)}, got {stage.ranks}")
            for name, placement in stage.placed():
                _check_axis(name, placement, self.mesh.tp)
        if self.zero_stage not in ZERO_STAGES:
            raise PlanError(f"zero_stage = {self.zero_stage}: {ZERO_STAGES_TEXT}")
        if self.mesh.dp_shard and not self.zero_stage:
            raise PlanError(
                f"dp_shard = {self.mesh.dp_shard} says over how many of dp = {self.mesh.dp} replicas states are divided, and "
                "zero_stage = 0 divides none; set zero_stage = 1, 2 or 3, or drop dp_shard"
            )
        if self.microbatches > MOST_MICROBATCHES or self.global_batch > MOST_SAMPLES:
            raise PlanError(
                f"microbatches ({self.microbatches}) must be <= {MOST_MICROBATCHES} and global_batch ({self.global_batch}) <= "
                f"{MOST_SAMPLES}; a larger step cannot be simulated"
            )
        if self.microbatches < 1 or self.bucket_bytes < 1:
            raise PlanError(f"microbatches ({self.microbatches}) and bucket_bytes ({self.bucket_bytes}) must be >= 1")
        object.__setattr__(self, "recompute", normalised(self.recompute, self.components))
        check_segments(self.segments, self.recompute, [stage.components for stage in self.stages])
        if self.tensor_backward_overlap and self.tensor_overlap:
            raise PlanError("tensor_overlap and tensor_backward_overlap are two ways to hide the same; drop one of them")
        if self.context_exchange not in CONTEXT_EXCHANGES:
            raise PlanError(
                f"unknown context_exchange {self.context_exchange!r}{near_matches(self.context_exchange, CONTEXT_EXCHANGES)}"
            )
        if self.context_exchange != "ring" and self.mesh.cp == 1:
            raise PlanError(f"context_exchange = {self.context_exchange!r} belongs to mesh.cp > 1, and cp is 1; drop it")
        object.__setattr__(self, "activation_offload", normalised_offload(self.activation_offload, self.components))
        self._check_offload()
        self.synchronisation.check(self.mesh, zero_stage=self.zero_stage)
        if self.clip_gradients and self.synchronisation.is_relaxed:
            raise PlanError(
                f"gradients are clipped by the norm of all replicas' gradients, and synchronisation "
                f'"{self.synchronisation.kind}" shares none; drop training.clip_norm'
            )
        if self.synchronisation.is_stale:
            self._check_stale()
        check_batch(self.global_batch, self.mesh, self.microbatches)

    def _check_offload(self) -> None:
        if self.offloads and self.synchronisation.is_relaxed:
            key = "optimizer_offload" if self.optimizer_offload else "activation_offload"
            raise PlanError(
                f"{key} belongs to synchronous training, and the plan's synchronisation is another; drop one of them"
            )
        if self.activation_offload and PIPELINE_ORDERS[self.pipeline_order].halves:
            raise PlanError(
                "activation_offload fetches what one whole backward needs, and the pipeline order runs backwards in halves; "
                "use 1f1b, gpipe or interleaved, or drop activation_offload"
            )
        if self.activation_offload and self.segments:
            raise PlanError(
                "activation_offload copies what single components keep, and segments keep what enters several; list components "
                "in recompute instead of segments, or drop activation_offload"
            )

    def _check_stale(self) -> None:
        """In every step each stage works on one batch, and keeps those of which the backward is still to come."""
        if self.microbatches != 1 or self.chunks != 1:
            raise PlanError(
                f'synchronisation "stale" runs every stage on one batch per step, and the plan has {self.microbatches} '
                f"microbatches and {self.chunks} chunks; set both to 1"
            )
        if self.recompute != NONE or self.segments:
            raise PlanError(
                'synchronisation "stale" keeps activations until they are used; set recompute = "none", and '
                'synchronisation.backward = "replay" to keep the inputs of stages instead'
            )

    @property
    def program(self) -> Plan:
        """What is run, whatever the family it was chosen from is called."""
        return replace(self, strategy="custom")

    def without_zero(self) -> Plan:
        """The custom plan that computes the same with whole states in buckets of the default size."""
        return replace(
            self,
            strategy="custom",
            mesh=self.mesh.undivided(),
            zero_stage=0,
            bucket_bytes=DEFAULT_BUCKET_BYTES,
            gather_ahead=False,
            backward_prefetch=True,
        )

    @property
    def components(self) -> tuple[str, ...]:
        return tuple(name for stage in self.stages for name in stage.components)

    @property
    def mixes_placements(self) -> bool:
        """Whether some components are cut by features and others by samples, or one runs on a single rank."""
        kinds = {placement.kind for stage in self.stages for _, placement in stage.placed()}
        return "place" in kinds or {"batch", "shard"} <= kinds

    @property
    def recomputed(self) -> frozenset[str]:
        """The components whose whole forward runs again before their backward, if they have one."""
        whole = named(self.recompute, self.components)[0]
        return whole.union(*self.repeated) if self.repeated else whole

    @property
    def repeated(self) -> tuple[tuple[str, ...], ...]:
        """Runs of components whose forwards run again together: segments, or stages that replay batches that have waited."""
        rule, stages = self.synchronisation, len(self.stages)
        if not rule.replays:
            return self.segments
        return tuple(stage.components for number, stage in enumerate(self.stages) if rule.delay_of(number, stages))

    @property
    def recomputes(self) -> bool:
        return self.recompute != NONE or bool(self.repeated)

    @property
    def recomputed_by_operator(self) -> frozenset[str]:
        """The components of whose forward some operators run again, where that keeps less."""
        return named(self.recompute, self.components)[1] - self.recomputed

    @property
    def offloaded(self) -> frozenset[str]:
        """The components whose saved activations wait in the host's memory."""
        offload = self.activation_offload
        return frozenset(self.components if offload is True else offload or ())

    @property
    def offloads(self) -> bool:
        return self.optimizer_offload or bool(self.activation_offload)

    @property
    def executable(self) -> bool:
        return not self.not_executable

    @property
    def not_executable(self) -> str:
        """The key that only the simulator supports; "" if there is none."""
        axes = [f"mesh.{axis}" for axis in ("cp", "ep") if getattr(self.mesh, axis) > 1]
        switched = [key for key in self.switched if not SWITCHES[key].executed]
        return next(iter([*axes, *(key for key in SIMULATED_ONLY if getattr(self, key)), *switched]), "")

    @property
    def gathers_ahead(self) -> bool:
        """Whether ZeRO 1 gathers parameters at the beginning of a step."""
        return self.gather_ahead and self.zero_stage == 1

    @property
    def switched(self) -> tuple[str, ...]:
        """The switches that are not as PyTorch has them and that mean something in this plan."""
        return tuple(
            key
            for key, switch in SWITCHES.items()
            if getattr(self, key) != switch.usual
            and switch.zero_stage in (None, self.zero_stage)
            and all(getattr(self.mesh, axis) > 1 for axis in switch.axes)
        )

    @property
    def world_size(self) -> int:
        return self.mesh.size

    @property
    def microbatch_samples(self) -> int:
        """Samples of one microbatch on one replica; its tp ranks share them according to their placements."""
        return self.global_batch // (self.mesh.dp * self.microbatches)

    @property
    def chunks(self) -> int:
        return len(self.stages) // self.mesh.pp

    @property
    def stage_places(self) -> tuple[int, ...]:
        return rank_of_stage(self.pipeline_order, self.mesh.pp, self.chunks)

    def place_stages(self, place: int) -> tuple[int, ...]:
        """The stages that run at one place on the pp axis, in execution order."""
        return stages_by_rank(self.pipeline_order, self.mesh.pp, self.chunks)[place]

    def stage_of_rank(self, rank: int) -> int:
        """Place on the pp axis: the number of its (first) stage."""
        return rank // (self.mesh.copies * self.mesh.tp)

    def replica_of_rank(self, rank: int) -> int:
        """The number of the copy: replica * cp + context."""
        return rank // self.mesh.tp % self.mesh.copies

    def shard_of_rank(self, rank: int) -> int:
        return rank % self.mesh.tp

    @property
    def is_mixed(self) -> bool:
        return any(stage.placements for stage in self.stages)

    def summary(self) -> str:
        """`hp pp=2 dp=4 tp=1 mb=8x16 1f1b zero3 buckets=4MiB recompute=3 of 12`; with chunks `interleavedx2`. Buckets are named
        where they are not those of PyTorch's DDP."""
        words = [self.strategy, str(self.mesh), f"mb={self.microbatches}x{self.microbatch_samples}"]
        if self.mesh.pp > 1:
            words.append(f"{self.pipeline_order}{f'x{self.chunks}' if self.chunks > 1 else ''}")
        offload = self.activation_offload
        some = "" if offload is True else f"={len(self.offloaded)} of {len(self.components)}"
        again = self.recompute if isinstance(self.recompute, str) else f"{len(self.recompute)} of {len(self.components)}"
        again = FULL if len(self.recomputed) == len(self.components) else again
        switched = self.switched
        many = self.mesh.copies * self.mesh.tp > 1 and self.bucket_bytes != DEFAULT_BUCKET_BYTES
        unusual = (
            (self.zero_stage, f"zero{self.zero_stage}"),
            ("gather_ahead" in switched, "ahead"),
            ("backward_prefetch" in switched, "post"),
            ("tensor_overlap" in switched, "overlapped"),
            ("tensor_backward_overlap" in switched, "backward-overlapped"),
            (self.context_exchange != "ring", self.context_exchange),
            (self.clip_gradients, "clip"),
            (self.optimizer_offload, "optimizer-offload"),
            (offload, f"activation-offload{some}"),
            (self.synchronisation.is_relaxed, str(self.synchronisation)),
            (many, f"buckets={format_bytes(self.bucket_bytes).replace(' ', '')}"),
            (self.recompute != NONE or again == FULL, f"recompute={again}"),
            (self.segments, f"segments={len(self.segments)}"),
        )
        return " ".join([*words, *(word for holds, word in unusual if holds)]) + self._placed()

    def _placed(self) -> str:
        """` [embed shard:vocabulary/4 | layer0..layer3 batch]`, or nothing where all are batch-sharded. Many runs that repeat
        from layer to layer are named once, with every number as a star: `h.*.norm1 shard:sequence/4`."""
        if not self.is_mixed:
            return ""
        placed = [entry for stage in self.stages for entry in stage.placed()]
        parts = []
        for placement, run in groupby(placed, key=itemgetter(1)):
            names = [name for name, _ in run]
            parts.append(f"{names[0]}{f'..{names[-1]}' if len(names) > 1 else ''} {placement}")
        if len(parts) > MOST_RUNS:
            patterns = dict.fromkeys((re.sub(r"\d+", "*", name), placement) for name, placement in placed)
            if len(patterns) == len({pattern for pattern, _ in patterns}):  # equal patterns lie alike
                parts = [f"{pattern} {placement}" for pattern, placement in patterns]
        return f" [{' | '.join(parts)}]"

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values; keys of `UNSAID` are left out where they have their defaults."""
        document = {**asdict(self), "mesh": self.mesh.to_dict(), "synchronisation": self.synchronisation.to_dict()}
        for entry, stage in zip(document["stages"], self.stages, strict=True):
            entry["placements"] = [str(placement) for placement in stage.placements]
        for key in fields(self):
            if key.name in UNSAID and getattr(self, key.name) == key.default:
                del document[key.name]
        if not self.executable:
            document["executable"] = False
        return {"schema_version": SCHEMA_VERSION, **document}

    def to_json(self) -> str:
        return json.dumps(self.to_dict(), indent=1)

    def save(self, path: Path) -> None:
        write_text_atomically(path, self.to_json())

    @classmethod
    def from_json(cls, text: str, where: str = "plan JSON") -> Plan:
        """Raises PlanError with the place that is wrong."""
        with reading(f"{where} is not a plan", PlanError, "write it with `parsim plan` or Plan.save"):
            document = parse_json(text)
            if problem := version_problem(document, SCHEMA_VERSION):
                raise PlanError(f"{where}: {problem}; or plan again")
            if found := control_character_in(document):
                raise PlanError(f"{where}: {found}: {NO_CONTROL}")
            del document["schema_version"]
            document.pop("executable", None)
            document["mesh"] = Mesh(**document["mesh"])
            check_types(document["mesh"], "mesh")
            document["synchronisation"] = Synchronisation.from_dict(document.get("synchronisation", {}))
            document["segments"] = tuple(tuple(names) for names in document.get("segments", ()))
            document["stages"] = tuple(
                Stage(
                    components=tuple(stage["components"]),
                    ranks=tuple(stage["ranks"]),
                    placements=tuple(parse_placement(text) for text in stage["placements"]),
                )
                for stage in document["stages"]
            )
            found_plan = cls(**document)
            check_types(found_plan, "plan")
            return found_plan

    @classmethod
    def load(cls, path: Path) -> Plan:
        if not path.is_file():
            raise PlanError(f"no plan file {path}; write one with `parsim plan RUN.toml`")
        with reading(f"{path} is not a plan", PlanError, "write it with `parsim plan` or Plan.save"):
            return cls.from_json(read_text(path), str(path))


def check_batch(global_batch: int, mesh: Mesh, microbatches: int) -> None:
    """Raise PlanError unless a batch divides over the replicas, and theirs into microbatches."""
    parts = mesh.dp * microbatches
    if global_batch < 1 or global_batch % parts:
        raise PlanError(
            f"global_batch ({global_batch}) must be divisible by dp ({mesh.dp}) * microbatches ({microbatches}) = {parts}; "
            f"the nearest that is: {max(1, round(global_batch / parts)) * parts}"
        )


def _check_axis(name: str, placement: Placement, tp: int) -> None:
    if placement.kind == "shard" and (placement.ways < 2 or tp % placement.ways):
        raise PlanError(f"{name} {placement}: ways must be at least 2 and divide tp ({tp})")
    if placement.kind == "place" and not 0 <= placement.shard < tp:
        raise PlanError(f"{name} {placement}: tp rank {placement.shard} does not exist; tp is {tp}")
    if placement.kind == "replicate" and tp == 1:
        raise PlanError(f"{name} replicate: tp = 1 has no ranks to replicate over; write batch")


def check_plan(plan: Plan, model: Model) -> None:
    """Raise PlanError unless the stages hold exactly the model's components, in its order, each with a valid placement."""
    planned = list(plan.components)
    expected = [component.name for component in model.components]
    if planned != expected:
        unknown = [name for name in planned if name not in model.component_index]
        if unknown:
            raise PlanError(
                f"the plan names component {unknown[0]!r}, which {model.name} has not{near_matches(unknown[0], expected)}"
            )
        missing = [name for name in expected if name not in planned]
        if missing:
            raise PlanError(f"the plan leaves out component {missing[0]!r} of {model.name}; every component needs a stage")
        raise PlanError(f"the plan's stages must keep the order of {model.name}'s components: {', '.join(expected)}")
    placements = dict(entry for stage in plan.stages for entry in stage.placed())
    for name, placement in placements.items():
        _check_placement(plan, model, name, placement)
    for name, least in model.least_samples.items():
        samples = plan.microbatch_samples * placements[name].batch_ways(plan.mesh.tp) // plan.mesh.tp
        if samples < least:
            raise PlanError(
                f"{name} would see {samples} sample at once and needs {least}: its batch norm has one value per channel and "
                f"sample. Use fewer microbatches or replicas, a global_batch of {least * plan.global_batch}, or larger inputs"
            )
    if (apart := tied_apart(model, placements)) is not None:
        first, second, parameter = apart
        raise PlanError(
            f"{first} ({placements[first]}) and {second} ({placements[second]}) share the parameter {parameter} "
            "and would hold it differently; place them alike"
        )


def _check_placement(plan: Plan, model: Model, name: str, placement: Placement) -> None:
    if placement.kind == "shard":
        try:
            check_ways(name, model.component(name).sharding(placement.rule), placement.ways)
        except ModelError as error:
            raise PlanError(f"{error}; or place it as batch, replicate or place:J") from error
    check_pieces(name, placement, plan.mesh, plan.global_batch, plan.microbatches)


def check_pieces(name: str, placement: Placement, mesh: Mesh, global_batch: int, microbatches: int) -> None:
    """Raise PlanError unless the tp axis has the placement, and microbatches divide over ranks of different samples."""
    _check_axis(name, placement, mesh.tp)
    samples, pieces = global_batch // (mesh.dp * microbatches), mesh.tp // placement.batch_ways(mesh.tp)
    if samples % pieces:
        raise PlanError(
            f"{name} {placement} cuts each microbatch of {samples} samples into {pieces} pieces, which does not divide; use "
            f"fewer microbatches or a global_batch that is a multiple of {mesh.dp * microbatches * pieces}"
        )


def tied_apart(model: Model, placements: Mapping[str, Placement]) -> tuple[str, str, str] | None:
    """Two of the placed components that share a parameter and hold it differently, so that its gradients cannot be summed, and
    the parameter."""
    held: dict[str, tuple[str, object]] = {}
    for component in model.components:
        if component.name in placements:
            for parameter in component.parameters:
                how = holding(component, placements[component.name], parameter.name)
                first, other = held.setdefault(parameter.name, (component.name, how))
                if other != how:
                    return first, component.name, parameter.name
    return None


def holding(component: Component, placement: Placement, parameter: str) -> tuple[object, ...]:
    """A key of the part of a parameter that a tp rank holds, and of the ranks over which its gradient is summed."""
    match placement.kind:
        case "shard":
            for part in component.sharding(placement.rule).parameters:
                if part.name == parameter:
                    return ("shard", placement.ways, part.dim, part.blocks, part.runs)
            return ("batch",)
        case "place":
            return ("place", placement.shard)
    return (placement.kind,)


# A plan in words, as people call it; `Plan.summary` is its exact short form.


def family_name(plan: Plan) -> str:
    """What the field calls plans of this kind: DDP, ZeRO 1, FSDP, HSDP, `Megatron tp 2, pp 4, dp 8`; "" for other plans."""
    mesh = plan.mesh
    if plan.synchronisation.is_relaxed or plan.mixes_placements or mesh.size == 1:
        return ""
    kinds = {placement.kind for stage in plan.stages for _, placement in stage.placed()}
    if mesh.pp == mesh.cp == mesh.ep == 1 and (mesh.tp == 1 or kinds == {"batch"}):
        if mesh.dp_shard:
            return "HSDP"
        return ("DDP", "ZeRO 1", "ZeRO 2", "FSDP")[plan.zero_stage]
    axes = [f"{axis} {size}" for axis in ("tp", "cp", "ep", "pp", "dp") if (size := getattr(mesh, axis)) > 1]
    return f"{'Megatron ' if mesh.pp * mesh.tp > 1 else ''}{', '.join(axes)}"


def recommendation(plan: Plan) -> str:
    """`FSDP (8-way data parallelism with ZeRO 3, 8 microbatches of 1)`: the plan by its usual name, where it has one."""
    name = family_name(plan)
    return f"{name} ({plan_in_words(plan)})" if name else plan_in_words(plan)


def plan_in_words(plan: Plan) -> str:
    """`2 pipeline stages of 4-way data parallelism with ZeRO 3, 8 microbatches of 32`; bucket sizes, pipeline order and single
    placements are left out."""
    mesh = plan.mesh
    kinds = {placement.kind for stage in plan.stages for _, placement in stage.placed()}
    replicas = mesh.dp * (mesh.tp if kinds == {"batch"} else 1)
    axes = [f"{replicas}-way data parallelism"] if replicas > 1 else []
    if mesh.tp > 1 and kinds != {"batch"}:
        axes.append(f"mixed placements on {mesh.tp} ranks" if plan.mixes_placements else f"{mesh.tp}-way tensor parallelism")
    if mesh.cp > 1:
        axes.append(f"{mesh.cp}-way context parallelism")
    if mesh.ep > 1:
        axes.append(f"{mesh.ep}-way expert parallelism")
    words = " x ".join(axes)
    if mesh.pp > 1:
        words = f"{mesh.pp} pipeline stages of {words}" if words else f"{mesh.pp} pipeline stages"
    words = words or "one device"
    if plan.zero_stage:
        words += f" with ZeRO {plan.zero_stage}"
        words += f" within groups of {mesh.dp_shard}" if mesh.dp_shard else ""
    if plan.microbatches > 1:
        words += f", {plan.microbatches} microbatches of {plan.microbatch_samples}"
    if plan.recomputed:
        words += ", recomputing activations"
    elif plan.recomputes:
        words += ", recomputing some activations"
    if plan.optimizer_offload:
        words += ", the optimizer on the host"
    if plan.activation_offload:
        words += f", {'' if plan.activation_offload is True else 'some '}activations in the host's memory"
    if plan.synchronisation.is_relaxed:
        words += f", {_synchronisation_in_words(plan)}"
    return words


def _synchronisation_in_words(plan: Plan) -> str:
    """`averaging weights every 8 steps with an outer nesterov optimizer`."""
    rule, stages = plan.synchronisation, plan.mesh.pp
    every = "after every step" if rule.period_steps == 1 else f"every {rule.period_steps} steps"
    beside = " beside a step" if rule.combines_first else ""
    words: list[str] = []
    match rule.kind:
        case "average":
            what = "weights" if rule.fragments == 1 else f"each of {rule.fragments} fragments of the weights"
            some = f" over {rule.participation:.0%} of the replicas" if rule.participation < 1 else ""
            outer = f" with an outer {rule.outer_optimizer} optimizer" if rule.outer is not None else ""
            sent = f" and changes sent in {rule.message_format}" if rule.message_format else ""
            words.append(f"averaging {what} {every}{beside}{some}{outer}{sent}")
        case "gossip":
            words.append(f"mixing weights with neighbours ({rule.graph or 'given weights'}) {every}{beside}")
        case "merge":
            words.append(f"merging weights one after another ({rule.merge}) {every}")
    if rule.is_stale:
        waits = rule.forward_lag(stages - 1, stages) < stages - 1
        whom = "some stages waiting for values of others" if waits else "no stage waiting for another"
        words.append(f"with gradients up to {rule.delay_of(0, stages)} steps late and {whom}")
    return ", ".join(words)
