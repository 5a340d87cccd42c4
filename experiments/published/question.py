"""From a row to a question that parsim answers: a Model, a Plan, a Cluster, a precision, and everything that was assumed."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace

from machines import chip_of, cluster_of, machine_of
from rows import Row
from rules import WITHOUT, Framework, framework_of, micro_of, recompute_of
from shapes import shape_of_name

from parsim.hardware.cluster import Cluster
from parsim.model.model import Model
from parsim.model.transformer.build import transformer
from parsim.model.transformer.shape import Shape
from parsim.model.transformer.sublayers import SamplePart
from parsim.plans.mesh import Mesh
from parsim.plans.pipeline import rank_of_stage
from parsim.plans.placement import BATCH, Placement
from parsim.plans.plan import Plan, Stage

BERT_SEQ = 512


class CannotExpressError(Exception):
    """A row that parsim has no words for; the message is the reason."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """Attributes:
    model, plan, cluster, precision, optimizer: what is evaluated. samples: of the plan's batch that make one of the row's.
    shape, seq, batch, gpus, recompute: of the run itself. assumed: what the row does not say. lacks: what is left out.
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
    chip: str = ""


def question_of(row: Row, recompute_more: str = "", without: str = "") -> Asked:
    """The question of a row.

    Args:
        row: of a file of published runs.
        recompute_more: "half" of the layers or "full", where the row does not state it and its plan would not fit.
        without: a key of `rules.WITHOUT`, to see what that piece is worth.

    Raises:
        CannotExpressError: with the reason.
    """
    framework = framework_of(row)
    if without:
        framework = WITHOUT[without](framework)
    assumed: list[str] = []
    lacks: list[str] = []
    machine = machine_of(row)
    if machine is None:
        raise CannotExpressError(f"no single kind of GPU that parsim has a part for: {row.hardware!r}")
    shape = _shape(row, assumed)
    seq = row.seq or _assume(assumed, "seq", framework.seq if shape.causal else BERT_SEQ)
    tp, pp, cp = row.tp, row.pp, row.cp or 1
    gpus = row.gpus or (tp or 1) * (pp or 1) * (row.dp or 1) * cp
    if tp is None or pp is None:
        tp, pp = (framework.tp, 1) if framework.tp else _split(shape, gpus, machine.per_node, assumed)
    gpus = max(gpus, tp * pp * cp)
    dp = row.dp or max(1, gpus // (tp * pp * cp))
    if row.gpus is not None and tp * pp * dp * cp != gpus and row.dp is not None:
        if tp * pp * dp != gpus:
            raise CannotExpressError(f"tp {tp} x pp {pp} x dp {dp} x cp {cp} is not {gpus} GPUs")
        cp = 1
    if tp * pp * dp * cp != gpus:
        assumed.append(f"{tp * pp * dp * cp} of {gpus} GPUs take part")
        gpus = tp * pp * dp * cp
    batch = row.global_batch or framework.batch or _batch(row, framework, shape, dp, seq, assumed)
    if batch < dp and row.dp is None:
        raise CannotExpressError(f"batch {batch} does not reach dp {dp}, and the split is not stated")
    if batch % dp:
        rounded = max(1, round(batch / dp)) * dp
        assumed.append(f"batch {batch} rounded to {rounded}, a multiple of dp {dp}")
        batch = rounded
    per_replica = batch // dp
    micro = row.micro_batch or _assume(assumed, "micro-batch", micro_of(framework, per_replica, shape.hidden, pp))
    if per_replica % micro:
        fitting = math.gcd(per_replica, micro)
        rounded = max(1, round(per_replica / micro)) * micro * dp
        assumed.append(f"batch {batch} rounded to {rounded}: microbatches of {micro} (gcd {fitting})")
        batch, per_replica = rounded, rounded // dp
    recompute, stated = recompute_of(row, framework)
    if recompute_more and not stated:
        recompute = recompute_more
    if not stated:
        assumed.append(f"recompute {recompute}")
    sequence = tp > 1 and ("sequence" in row.recompute.lower() or (framework.sequence and framework.recompute != "full"))
    if tp > 1 and not stated and sequence:
        assumed.append("sequence parallelism")
    zero = int(found[0]) if (found := re.findall(r"\d", row.zero)) else framework.zero
    if not row.zero and zero:
        assumed.append(f"ZeRO {zero}")
    if zero == 3 and pp > 1:
        zero = _assume(assumed, "parameters whole for a step under the pipeline, as ZeRO", 1)
    software = replace(framework.software, selective=recompute == "selective")
    expert_ways = 1
    if shape.experts:
        expert_ways = math.gcd(row.ep or 1, shape.experts, dp * cp)
        lacks.append("tokens choose experts at random")
        if expert_ways > 1:
            lacks.append("nothing hides the all_to_all of expert parallelism")
    if seq % cp:
        raise CannotExpressError(f"seq {seq} does not divide over cp {cp}")
    part = SamplePart(tokens=seq, context=seq)
    granularity = "layer" if tp == 1 else "sequence" if sequence else "sublayer"
    if tp > 1 and shape.heads % tp:
        raise CannotExpressError(f"{shape.heads} heads do not divide over tp {tp}")
    precision, how = _precision(row)
    assumed += how
    if precision == "fp8":
        software = replace(software, casts=True)
    model = transformer(shape, software, part, granularity)
    chunks = row.vpp or 1
    if pp > 1 and row.vpp is None and "interleaved" in row.notes.lower():
        chunks = min(framework.depth, -(-shape.layers // pp))
        assumed.append(f"{chunks} chunks per rank")
    if pp == 1:
        chunks = 1
    if chunks > 1 and (per_replica // micro) % pp:
        assumed.append(f"no interleaving: {per_replica // micro} microbatches are no multiple of pp {pp}")
        chunks = 1
    plan = _plan(
        model,
        shape,
        tp=tp,
        pp=pp,
        dp=dp,
        cp=cp,
        ep=expert_ways,
        batch=batch,
        micro=micro,
        chunks=chunks,
        zero=zero,
        recompute=recompute,
        framework=framework,
        row=row,
    )
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
        batch=batch,
        gpus=gpus,
        recompute=recompute,
        assumed=tuple(assumed),
        lacks=tuple(lacks),
        chip=chip_of(machine),
    )


def _assume(assumed: list[str], what: str, value: int) -> int:
    assumed.append(f"{what} {value}")
    return value


def _shape(row: Row, assumed: list[str]) -> Shape:
    named = shape_of_name(row.model)
    if "lora" in row.model.lower() or "sft" in row.model.lower():
        raise CannotExpressError(f"{row.model}: fine-tuning of a part of the parameters is not expressed")
    for word in ("t5", "mamba", "nemotron-h", "nemotron_3", "nemotronh"):
        if word in row.model.lower().replace(" ", "_"):
            raise CannotExpressError(f"{row.model}: no decoder-only transformer")
    if named is None and row.hidden is None:
        raise CannotExpressError(f"the shape of {row.model!r} is not known and the row does not state it")
    if named is None:
        hidden = row.hidden or 1
        heads = row.heads or _assume(assumed, "heads", _usual_heads(hidden))
        layers = row.layers or (_assume(assumed, "layers", max(1, round(row.params / (12 * hidden**2)))) if row.params else 0)
        if not layers:
            raise CannotExpressError(f"the layers of {row.model!r} are not known")
        vocab = 250880 if row.id.startswith("bloom") else 51200
        assumed.append(f"vocabulary {vocab}")
        found = re.search(r"vocab (\d+)", row.notes)
        return Shape(name=row.model, layers=layers, hidden=hidden, heads=heads, vocab=int(found[1]) if found else vocab)
    return replace(named, layers=row.layers or named.layers, hidden=row.hidden or named.hidden, heads=row.heads or named.heads)


def _usual_heads(hidden: int) -> int:
    """A multiple of 8 that divides the hidden size, with about 128 channels each."""
    fitting = [heads for heads in range(8, hidden + 1, 8) if hidden % heads == 0]
    return min(fitting, key=lambda heads: abs(hidden / heads - 128)) if fitting else max(1, hidden // 128)


def _split(shape: Shape, gpus: int, per_node: int, assumed: list[str]) -> tuple[int, int]:
    """tp and pp that are not stated: the fewest GPUs on which 18 bytes per parameter take half of 80 GB."""
    parameters = 12 * shape.layers * shape.hidden**2
    needed = max(1, math.ceil(18 * parameters / 40e9))
    tp = 1
    while tp < min(per_node, 8, needed, gpus):
        tp *= 2
    pp = 1
    while tp * pp < needed and tp * pp * 2 <= gpus and pp * 2 <= shape.layers:
        pp *= 2
    assumed.append(f"tp {tp}, pp {pp}")
    return tp, pp


def _batch(row: Row, framework: Framework, shape: Shape, dp: int, seq: int, assumed: list[str]) -> int:
    count = re.search(r"micro-batch count (\d+)", row.notes)
    tokens = re.search(r"batch ([\d.]+)M tokens", row.notes)
    if count:
        micro = row.micro_batch or 1
        return int(count[1]) * micro * dp
    if tokens:
        return max(dp, round(float(tokens[1]) * 2**20 / seq / dp) * dp)
    wanted = max(dp, 2**22 // seq // dp * dp)
    assumed.append(f"batch {wanted}")
    return wanted


def _precision(row: Row) -> tuple[str, list[str]]:
    text = row.precision.lower()
    if "fp8" in text or "float8" in text or "nvfp4" in text:
        return "fp8", [f"precision {row.precision}: products at the FP8 rate"]
    return "bf16", []


def _plan(
    model: Model,
    shape: Shape,
    *,
    tp: int,
    pp: int,
    dp: int,
    cp: int,
    ep: int,
    batch: int,
    micro: int,
    chunks: int,
    zero: int,
    recompute: str,
    framework: Framework,
    row: Row,
) -> Plan:
    stages = _stages(model, shape, pp, chunks, row)
    mesh = Mesh(pp=pp, dp=dp, tp=tp, cp=cp, ep=ep)
    copies = mesh.copies
    order = "interleaved" if chunks > 1 else "1f1b"
    places = rank_of_stage(order, pp, chunks)
    names = {component.name for component in model.components}
    bucket_bytes = framework.bucket_bytes
    if zero == 3:
        bucket_bytes = max(1, max(sum(p.size_bytes for p in c.parameters) for c in model.components[1:-1]) // max(1, tp) - 1)
    again: tuple[str, ...] = ()
    segments: tuple[tuple[str, ...], ...] = ()
    if recompute == "full" and framework.repeats_sums:
        segments = _segments(stages)
    elif recompute == "full":
        again = tuple(name for name in names if name.startswith("h."))
    elif recompute == "half" or (recompute == "selective" and framework.alternate):
        segments = _segments(stages)[::2]
    elif recompute == "selective":
        again = tuple(name for name in names if name.endswith(".core"))
    return Plan(
        strategy="custom",
        mesh=mesh,
        stages=tuple(
            Stage(
                components=components,
                ranks=mesh.stage_ranks(places[number]),
                placements=tuple(_placement(name, model, tp) for name in components) if tp > 1 else (),
            )
            for number, components in enumerate(stages)
        ),
        global_batch=batch,
        microbatches=batch // dp // micro,
        pipeline_order=order,
        bucket_bytes=bucket_bytes,
        zero_stage=zero if copies > 1 else 0,
        recompute=again,
        segments=segments,
        blocking_transfers=framework.blocking_transfers and pp > 1,
        scatter_gather=framework.scatter_gather and pp > 1 and tp > 1,
        backward_prefetch=framework.backward_prefetch or zero != 3 or copies == 1,
        gather_ahead=framework.gather_ahead and zero == 1 and copies > 1,
    )


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


def _stages(model: Model, shape: Shape, pp: int, chunks: int, row: Row) -> list[tuple[str, ...]]:
    """Stages of equal numbers of layers, embedding and head beside them; or the numbers that the row's notes list.

    Where the layers do not divide, embedding and head count as a layer each, as in models that were sized for that.
    """
    number = pp * chunks
    listed = re.search(r"layers per stage \[([\d, ]+)\]", row.notes)
    if listed and chunks == 1 and len(parts := [int(text) for text in listed[1].split(",")]) == pp:
        counts = list(parts)
        extra = sum(counts) - shape.layers
        counts[0] -= extra - extra // 2
        counts[-1] -= extra // 2
    elif shape.layers % number == 0:
        counts = [shape.layers // number] * number
    else:
        whole = shape.layers + (2 if (shape.layers + 2) % number == 0 or shape.layers % number > number // 2 else 0)
        counts = [whole // number + (1 if place < whole % number else 0) for place in range(number)]
        if whole != shape.layers:
            counts[0] -= 1
            counts[-1] -= 1
    if min(counts) < 0 or sum(counts) != shape.layers or (min(counts) == 0 and number > 2 and 0 in counts[1:-1]):
        raise CannotExpressError(f"{shape.layers} layers do not divide over {number} stages: {counts}")
    stages: list[list[str]] = [[] for _ in range(number)]
    for component in model.components:
        name = component.name
        layer = re.match(r"h\.(\d+)", name)
        if name == "embed":
            stages[0].append(name)
        elif layer is None:
            stages[-1].append(name)
        else:
            stages[_place_of(int(layer[1]), counts)].append(name)
    return [tuple(stage) for stage in stages]


def _place_of(layer: int, counts: list[int]) -> int:
    for place, count in enumerate(counts):
        if layer < count:
            return place
        layer -= count
    raise CannotExpressError(f"layer {layer} beyond {sum(counts)}")
