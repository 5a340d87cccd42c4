"""From a row to a question that parsim answers: a Model, a Plan, a Cluster, a precision, and everything that was assumed."""

from __future__ import annotations

from dataclasses import dataclass, replace

from experiments.published.blanks import (
    BERT_SEQ,
    CannotExpressError,
    Notes,
    batch_of,
    check_sizes,
    chunks_of,
    expert_ways_of,
    half_of,
    precision_of,
    shape_of,
    split_of,
    states_of,
)
from experiments.published.machines import chip_of, cluster_of, machine_of
from experiments.published.row_plan import Given, plan_of
from experiments.published.rows import Row
from experiments.published.rules import WITHOUT, Framework, framework_of
from parsim.hardware.cluster import Cluster
from parsim.hardware.parts import load_gpu
from parsim.model.catalogue.sublayers import TORCH_SOFTMAX_ARRAYS, SamplePart, Shape, softmax_is_fused
from parsim.model.catalogue.transformer import transformer
from parsim.model.formats import number_format
from parsim.model.model import Model
from parsim.plans.plan import Plan


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """Attributes:
    model, plan, cluster, precision, optimizer: what is evaluated. samples: of the plan's batch that make one of the row's.
    scaled: 16 bits are fp16, with a scaled loss. precision is "bf16" then too: products of both take the same time.
    shape, seq, batch, gpus, recompute: of the run itself. assumed: what the row does not say. lacks: what is left out.
    peak_flop_per_s: of one GPU in that precision, dense.
    """

    row: Row
    framework: Framework
    shape: Shape
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
    scaled: bool = False
    chip: str = ""
    per_node: int = 8
    peak_flop_per_s: float = 0.0


def question_of(row: Row, recompute_more: str = "", without: str = "") -> Asked:
    """The question of a row.

    Args:
        row: of a file of published runs.
        recompute_more: "half" of the layers or "full", where the row does not state it and its plan would not fit.
        without: a key of `rules.WITHOUT`, to see what that piece is worth.

    Raises:
        CannotExpressError: with the reason.
    """
    check_sizes(row)
    framework = framework_of(row)
    if without:
        framework = WITHOUT[without](framework)
    notes = Notes()
    notes.assumed += [f"{column} is no whole number above 0 and counts as blank" for column in row.unread]
    machine = machine_of(row)
    if machine is not None and not framework.host:
        machine = replace(machine, launch_s=0.0)
    if machine is None:
        raise CannotExpressError(f"no single kind of GPU that parsim has a part for: {row.hardware!r}")
    shape = shape_of(row, framework, notes)
    seq = row.seq or notes.assume("seq", framework.seq if shape.causal else BERT_SEQ)
    split = split_of(row, framework, shape, machine, notes)
    if machine.guessed and split.gpus > machine.per_node:
        notes.assumed.append(f"network of {machine.cards} x {machine.gbit:g} Gb/s per node")
    batch = batch_of(row, framework, shape, split, seq, notes)
    states = states_of(row, framework, split, recompute_more, notes)
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
    part = SamplePart(tokens=seq, context=seq, element_bytes=4 if precision in ("tf32", "fp32") else 2)
    model = transformer(shape, software, part, granularity)
    chunks = chunks_of(row, framework, shape, split, batch, notes)
    given = Given(
        row=row, framework=framework, shape=shape, split=split, batch=batch, states=states, ep=expert_ways, chunks=chunks
    )
    plan = plan_of(model, given)
    return Asked(
        row=row,
        framework=framework,
        shape=shape,
        model=model,
        plan=plan,
        cluster=cluster_of(machine, plan.world_size),
        precision=precision,
        optimizer=framework.optimizer,
        seq=seq,
        batch=batch.size,
        gpus=split.gpus,
        recompute=states.recompute,
        scaled=framework.scales_fp16 and precision == "bf16" and half_of(row.precision) == "fp16",
        assumed=tuple(notes.assumed),
        lacks=tuple(notes.lacks),
        chip=chip_of(machine),
        per_node=machine.per_node,
        peak_flop_per_s=peaks.get(precision, peaks["amp_fp16"]).value,
    )
