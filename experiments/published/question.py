"""From a row to a question that parsim answers: a Model, a Plan, a Cluster, a precision, and everything that was assumed."""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import accumulate

from experiments.published.blanks import (
    AS_USUAL,
    Batch,
    CannotExpressError,
    Kept,
    Notes,
    Split,
    States,
    batch_of,
    check_sizes,
    chunks_of,
    context_of,
    expert_ways_of,
    half_of,
    kept_of,
    precision_of,
    seq_of,
    shape_of,
    split_of,
    states_of,
    tuning_of,
)
from experiments.published.machines import chip_of, cluster_of, machine_of
from experiments.published.rows import Row
from experiments.published.rules import UNKNOWN, WITHOUT, Rule, plausible_rules, rule_of, rule_without_framework
from parsim.hardware.cluster import Cluster
from parsim.hardware.parts import load_gpu
from parsim.model.catalogue.frameworks import hosted
from parsim.model.catalogue.sublayers import TORCH_SOFTMAX_ARRAYS, SamplePart, Shape, softmax_is_fused
from parsim.model.catalogue.transformer import transformer
from parsim.model.formats import number_format
from parsim.model.model import Model
from parsim.model.tuning import tuned
from parsim.plans.layouts import BATCH, Placement
from parsim.plans.mesh import Mesh
from parsim.plans.plan import BY_OPERATOR, Plan
from parsim.plans.stages import stages_of, with_ends
from parsim.search.by_hand import framework_switches


@dataclass(frozen=True, slots=True, kw_only=True)
class Given:
    """A row with its blanks filled. ep: ways of expert parallelism. chunks: of an interleaved order, per rank."""

    row: Row
    framework: Rule
    shape: Shape
    split: Split
    batch: Batch
    states: States
    ep: int
    chunks: int


def plan_of(model: Model, given: Given) -> Plan:
    """The plan. Raises CannotExpressError: the layers do not divide over the stages."""
    split, framework, zero = given.split, given.framework, given.states.zero
    stages = _stages(model, given)
    mesh = Mesh(pp=split.pp, dp=split.dp, tp=split.tp, cp=split.cp, ep=given.ep, dp_shard=given.states.group)
    copies = mesh.copies
    order = "interleaved" if given.chunks > 1 else "1f1b"
    names = [component.name for component in model.components]
    again, segments = _recomputed(stages, names, given)
    bucket_bytes = framework.bucket_bytes
    if zero == 3:  # a bucket per layer
        largest = max(sum(p.size_bytes for p in component.parameters) for component in model.components[1:-1])
        bucket_bytes = max(1, largest // max(1, split.tp) - 1)
    return Plan(
        strategy="custom",
        mesh=mesh,
        stages=stages_of(
            mesh,
            stages,
            partial(_placement, model=model, tp=split.tp) if split.tp > 1 else None,
            order=order,
            chunks=given.chunks,
        ),
        global_batch=given.batch.size,
        microbatches=given.batch.per_replica // given.batch.micro,
        pipeline_order=order,
        bucket_bytes=bucket_bytes,
        zero_stage=zero if copies > 1 else 0,
        recompute=again,
        segments=segments,
        **framework_switches(framework) | ({} if given.states.sequence else {"tensor_overlap": False}),
        clip_gradients=framework.clip,
    )


def _recomputed(
    stages: Sequence[Sequence[str]], names: Sequence[str], given: Given
) -> tuple[tuple[str, ...], tuple[tuple[str, ...], ...]]:
    """Components that are recomputed one by one, and segments."""
    recompute, framework = given.states.recompute, given.framework
    every_second = recompute == "half" or (recompute == "selective" and framework.alternate)
    if framework.software.early_stop and given.split.tp == 1 and (recompute == "full" or every_second):
        layers = [name for name in names if name.startswith("h.")]
        return tuple(BY_OPERATOR + name for name in (layers[::2] if every_second else layers)), ()
    if recompute == "full" and framework.repeats_sums:
        return (), _segments(stages)
    if recompute == "full":
        return tuple(name for name in names if name.startswith("h.")), ()
    if every_second:
        return (), _segments(stages)[::2]
    if recompute == "selective":
        cores = tuple(name for name in names if name.endswith(".core"))
        whole = () if framework.software.flash else tuple(BY_OPERATOR + name for name in names if name.startswith("h."))
        return cores or whole, ()
    return (), ()


def _segments(stages: Sequence[Sequence[str]]) -> tuple[tuple[str, ...], ...]:
    """The components of each layer."""
    found: dict[str, list[str]] = {}
    for stage in stages:
        for name in stage:
            if name.startswith("h."):
                found.setdefault(name.rsplit(".", 1)[0] if name.count(".") > 1 else name, []).append(name)
    return tuple(tuple(names) for names in found.values())


def _placement(name: str, model: Model, tp: int) -> Placement:
    rule = model.component(name).shardings[0].rule if model.component(name).shardings else ""
    return Placement("shard", rule=rule, ways=tp) if rule else BATCH


def _stages(model: Model, given: Given) -> list[tuple[str, ...]]:
    """Stages of equal numbers of layers, embedding and head beside them; or the numbers that the row's notes list.

    Where the layers do not divide, embedding and head count as a layer each, as in models that were sized for that.
    """
    shape, row, pp, chunks = given.shape, given.row, given.split.pp, given.chunks
    number = pp * chunks
    listed = re.search(r"layers per stage \[([\d, ]+)\]", row.notes)
    if listed and chunks == 1 and len(parts := [int(text) for text in listed[1].split(",")]) == pp:
        counts = list(parts)
        extra = sum(counts) - shape.layers
        counts[0] -= extra - extra // 2
        counts[-1] -= extra // 2
    else:
        rest = shape.layers % number
        end = int(rest > 0 and ((shape.layers + 2) % number == 0 or rest > number // 2))
        counts = with_ends(shape.layers, number, end, end) or []
    if not counts or min(counts) < 0 or sum(counts) != shape.layers or 0 in counts[1:-1]:
        raise CannotExpressError(f"{shape.layers} layers do not divide over {number} stages: {counts}")
    ends = list(accumulate(counts))
    stages: list[list[str]] = [[] for _ in range(number)]
    for component in model.components:
        name = component.name
        layer = re.match(r"h\.(\d+)", name)
        if name == "embed":
            stages[0].append(name)
        elif layer is None:
            stages[-1].append(name)
        else:
            stages[bisect_right(ends, int(layer[1]))].append(name)
    return [tuple(stage) for stage in stages]


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """Attributes:
    model, plan, cluster, precision, optimizer: what is evaluated. samples: of the plan's batch that make one of the row's.
    scaled: 16 bits are fp16, with a scaled loss. precision is "bf16" then too: products of both take the same time.
    full_gradients: beside weights in bf16 gradients are kept in fp32.
    shape, seq, batch, gpus, recompute: of the run itself; a network of images has no shape, and seq 1.
    assumed: what the row does not say. lacks: what is left out. plausible: frameworks, where none is known; else 0.
    peak_flop_per_s: of one GPU in that precision, dense."""

    row: Row
    framework: Rule
    shape: Shape | None
    model: Model
    plan: Plan
    cluster: Cluster
    precision: str
    optimizer: str
    seq: int
    batch: int
    gpus: int
    recompute: str
    assumed: tuple[str, ...]
    lacks: tuple[str, ...]
    plausible: int = 0
    scaled: bool = False
    kept: Kept = AS_USUAL
    full_gradients: bool = False
    part: str = ""
    per_node: int = 8
    peak_flop_per_s: float = 0.0

    @property
    def name(self) -> str:
        """Of the model."""
        return self.model.name if self.shape is None else self.shape.name

    @property
    def transformer(self) -> Shape:
        """Its shape. Raises ValueError for another model, whose FLOP no source's formula counts."""
        if self.shape is None:
            raise ValueError(f"unit {self.row.unit!r} counts the FLOP of a transformer, and {self.model.name} is none")
        return self.shape


def question_of(row: Row, recompute_more: str = "", without: str = "", *, known: bool = True, place: int = 0) -> Asked:
    """The question of a row. Raises CannotExpressError with the reason.

    recompute_more: "half" of the layers or "full", where the row does not state it and its plan would not fit. without: a key
    of `rules.WITHOUT`. known: of the framework that the row's texts name, else of number `place` of the plausible ones.
    """
    check_sizes(row)
    framework = rule_of(row) if known else rule_without_framework(row)
    notes = Notes()
    notes.assumed += [f"{column} is no whole number above 0 and counts as blank" for column in row.unread]
    machine = machine_of(row)
    if machine is None:
        raise CannotExpressError(f"no single kind of GPU that parsim has a part for: {row.hardware!r}")
    shape = shape_of(row, framework, notes)
    split = split_of(row, framework, shape, machine, notes)
    plausible = 0
    if framework.name == UNKNOWN:
        axes = {"tp": split.tp, "pp": split.pp, "cp": split.cp, "ep": row.ep or 1}
        divided = ", ".join(f"{axis} {ways}" for axis, ways in axes.items() if ways > 1)
        rules = plausible_rules(row, shape, machine.gpu, split.gpus, divided=divided)
        own = framework.adapters or rules[place].adapters
        framework, plausible = replace(rules[place], context=framework.context, adapters=own), len(rules)
        notes.assumed.append(f"framework {framework.name}")
    if without:
        framework = WITHOUT[without](framework)
    seq = seq_of(row, framework, shape.causal, notes)
    if machine.guessed and split.gpus > machine.per_node:
        notes.assumed.append(f"network of {machine.cards} x {machine.gbit:g} Gb/s per node")
    batch = batch_of(row, framework, shape, split, seq, notes)
    states = states_of(row, framework, split, machine.per_node, recompute_more, notes)
    expert_ways = expert_ways_of(row, shape, split, states.zero, notes)
    if seq % split.cp:
        raise CannotExpressError(f"seq {seq} does not divide over cp {split.cp}")
    if split.tp > 1 and shape.heads % split.tp:
        raise CannotExpressError(f"{shape.heads} heads do not divide over tp {split.tp}")
    peaks = load_gpu(machine.gpu).peak_flop_per_s
    precision = precision_of(row, framework, notes)
    if precision == "tf32" and "tf32" not in peaks:
        precision = "fp32"
        notes.assumed.append("fp32, since the GPU has no TF32")
    if precision in ("fp8", "nvfp4") and precision not in peaks:
        raise CannotExpressError(f"{chip_of(machine)} has no products in {precision}")
    software = replace(framework.software, selective=states.recompute == "selective")
    if framework.softmax_limits and not softmax_is_fused(shape.heads // split.tp * batch.micro, seq):
        software = replace(software, score_arrays=max(software.score_arrays, TORCH_SOFTMAX_ARRAYS))
        notes.lacks.append("fused softmax does not take these heads: torch's, in fp32")
    if framework.bf16_gradients and half_of(row.precision) == "bf16":
        software = replace(software, gradient_arrays=framework.bf16_gradients)
    if number_format(precision).beside:
        software = replace(software, casts=True)
    granularity = "layer" if split.tp == 1 else "sequence" if states.sequence else "sublayer"
    context = context_of(row, framework, seq, notes)
    part = SamplePart(tokens=seq, context=context, element_bytes=4 if precision in ("tf32", "fp32") else 2)
    tuning = tuning_of(row, framework, notes)
    model = tuned(transformer(shape, software, part, granularity, tuning), tuning)
    chunks = chunks_of(row, framework, shape, split, batch, notes)
    given = Given(
        row=row, framework=framework, shape=shape, split=split, batch=batch, states=states, ep=expert_ways, chunks=chunks
    )
    plan = plan_of(model, given)
    kept = kept_of(row, framework, precision, notes)
    launches = framework.launches_on(machine.gpu, gathers=tuning is None and (states.zero == 3 or not row.zero))
    return Asked(
        row=row,
        framework=framework,
        shape=shape,
        model=model,
        plan=plan,
        cluster=hosted(cluster_of(machine, plan.world_size), launches=launches, step_s=framework.step_s),
        precision=precision,
        optimizer=framework.optimizer,
        seq=seq,
        batch=batch.size,
        gpus=split.gpus,
        recompute=states.recompute,
        kept=kept,
        full_gradients=precision in ("bf16", "fp8", "nvfp4")
        and half_of(row.precision) == "bf16"
        and (framework.full_gradients or framework.bf16_gradients > 0),
        scaled=framework.scales_fp16 and precision == "bf16" and half_of(row.precision) == "fp16",
        assumed=tuple(notes.assumed),
        lacks=tuple(notes.lacks),
        plausible=plausible,
        part=machine.gpu,
        per_node=machine.per_node,
        peak_flop_per_s=peaks.get(precision, peaks["amp_fp16"]).value,
    )
