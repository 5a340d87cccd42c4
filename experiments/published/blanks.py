"""What a row of published runs states, with its blanks filled by the rule of its framework; no Model, no Plan."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, field, replace

from rows import Row
from rules import Framework, micro_of, recompute_of
from shapes import shape_of_name

from parsim.model.transformer.shape import Shape

BERT_SEQ = 512


class CannotExpressError(Exception):
    """A row that parsim has no words for; the message is the reason."""


LARGEST = {
    "gpus": 2**17,
    "layers": 1000,
    "hidden": 2**17,
    "heads": 2**12,
    "seq": 2**24,
    "global_batch": 2**20,
    "micro_batch": 2**14,
    "tp": 2**9,
    "pp": 2**9,
    "dp": 2**17,
    "cp": 2**12,
    "ep": 2**12,
    "vpp": 2**9,
}
"""Of a published run, with room to spare. What is larger is taken for a slip: its plan would fill the memory."""


def check_sizes(row: Row) -> None:
    """Raise CannotExpressError for a size that no run has."""
    for name, largest in LARGEST.items():
        if (getattr(row, name) or 0) > largest:
            raise CannotExpressError(f"{name} is {getattr(row, name)}, and no run has more than {largest}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Split:
    """Ways of each axis. gpus: tp * pp * dp * cp, those that take part."""

    tp: int
    pp: int
    dp: int
    cp: int
    gpus: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """In samples. size: of a step, a multiple of dp * micro. per_replica: of a step and replica. micro: of a microbatch."""

    size: int
    per_replica: int
    micro: int


@dataclass(frozen=True, slots=True, kw_only=True)
class States:
    """recompute: "full", "selective", "half" or "none". sequence: sequence parallelism. zero: stage of divided states."""

    recompute: str
    sequence: bool
    zero: int


@dataclass(slots=True)
class Notes:
    """assumed: what the row does not say, in the order it was filled. lacks: what is left out."""

    assumed: list[str] = field(default_factory=list)
    lacks: list[str] = field(default_factory=list)

    def assume(self, what: str, value: int) -> int:
        """The value, noted."""
        self.assumed.append(f"{what} {value}")
        return value


def shape_of(row: Row, framework: Framework, notes: Notes) -> Shape:
    """The shape that the row names or states.

    Raises:
        CannotExpressError: if it does neither, or is no decoder-only transformer.
    """
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
        usual = framework.heads if framework.heads and hidden % framework.heads == 0 else _usual_heads(hidden)
        heads = row.heads or notes.assume("heads", usual)
        layers = row.layers or (notes.assume("layers", max(1, round(row.params / (12 * hidden**2)))) if row.params else 0)
        if not layers:
            raise CannotExpressError(f"the layers of {row.model!r} are not known")
        vocab = 250880 if row.id.startswith("bloom") else 51200
        notes.assumed.append(f"vocabulary {vocab}")
        found = re.search(r"vocab (\d+)", row.notes)
        return Shape(name=row.model, layers=layers, hidden=hidden, heads=heads, vocab=int(found[1]) if found else vocab)
    return replace(named, layers=row.layers or named.layers, hidden=row.hidden or named.hidden, heads=row.heads or named.heads)


def _usual_heads(hidden: int) -> int:
    """A multiple of 8 that divides the hidden size, with about 128 channels each."""
    fitting = [heads for heads in range(8, hidden + 1, 8) if hidden % heads == 0]
    return min(fitting, key=lambda heads: abs(hidden / heads - 128)) if fitting else max(1, hidden // 128)


def split_of(row: Row, framework: Framework, shape: Shape, per_node: int, notes: Notes) -> Split:
    """The axes of a row.

    Raises:
        CannotExpressError: if the stated axes do not multiply to the stated GPUs.
    """
    tp, pp, cp = row.tp, row.pp, row.cp or 1
    gpus = row.gpus or (tp or 1) * (pp or 1) * (row.dp or 1) * cp
    if tp is None or pp is None:
        tp, pp = (framework.tp, 1) if framework.tp else _split_by_size(shape, gpus, per_node, notes)
    gpus = max(gpus, tp * pp * cp)
    if gpus > LARGEST["gpus"]:
        raise CannotExpressError(f"tp {tp} x pp {pp} x cp {cp} is {gpus} GPUs, and no run has more than {LARGEST['gpus']}")
    dp = row.dp or max(1, gpus // (tp * pp * cp))
    if row.gpus is not None and tp * pp * dp * cp != gpus and row.dp is not None:
        if tp * pp * dp != gpus:
            raise CannotExpressError(f"tp {tp} x pp {pp} x dp {dp} x cp {cp} is not {gpus} GPUs")
        cp = 1
    if tp * pp * dp * cp != gpus:
        notes.assumed.append(f"{tp * pp * dp * cp} of {gpus} GPUs take part")
        gpus = tp * pp * dp * cp
    return Split(tp=tp, pp=pp, dp=dp, cp=cp, gpus=gpus)


def _split_by_size(shape: Shape, gpus: int, per_node: int, notes: Notes) -> tuple[int, int]:
    """tp and pp that are not stated: the fewest GPUs on which 18 bytes per parameter take half of 80 GB."""
    parameters = 12 * shape.layers * shape.hidden**2
    needed = max(1, math.ceil(18 * parameters / 40e9))
    tp = 1
    while tp < min(per_node, 8, needed, gpus):
        tp *= 2
    pp = 1
    while tp * pp < needed and tp * pp * 2 <= gpus and pp * 2 <= shape.layers:
        pp *= 2
    notes.assumed.append(f"tp {tp}, pp {pp}")
    return tp, pp


def batch_of(row: Row, framework: Framework, shape: Shape, split: Split, seq: int, notes: Notes) -> Batch:
    """The batch of a row, rounded to what its replicas and microbatches divide.

    Raises:
        CannotExpressError: if it is smaller than the replicas and the split is not stated.
    """
    dp = split.dp
    batch = row.global_batch or framework.batch or _batch_by_rule(row, dp, seq, notes)
    if batch < dp and row.dp is None:
        raise CannotExpressError(f"batch {batch} does not reach dp {dp}, and the split is not stated")
    if batch % dp:
        rounded = max(1, round(batch / dp)) * dp
        notes.assumed.append(f"batch {batch} rounded to {rounded}, a multiple of dp {dp}")
        batch = rounded
    per_replica = batch // dp
    micro = row.micro_batch or notes.assume("micro-batch", micro_of(framework, per_replica, shape.hidden, split.pp))
    if per_replica % micro:
        fitting = math.gcd(per_replica, micro)
        rounded = max(1, round(per_replica / micro)) * micro * dp
        notes.assumed.append(f"batch {batch} rounded to {rounded}: microbatches of {micro} (gcd {fitting})")
        batch, per_replica = rounded, rounded // dp
    return Batch(size=batch, per_replica=per_replica, micro=micro)


def _batch_by_rule(row: Row, dp: int, seq: int, notes: Notes) -> int:
    count = re.search(r"micro-batch count (\d+)", row.notes)
    tokens = re.search(r"batch ([\d.]+)M tokens", row.notes)
    if count:
        micro = row.micro_batch or 1
        return int(count[1]) * micro * dp
    if tokens:
        return max(dp, round(float(tokens[1]) * 2**20 / seq / dp) * dp)
    wanted = max(dp, 2**22 // seq // dp * dp)
    notes.assumed.append(f"batch {wanted}")
    return wanted


def states_of(row: Row, framework: Framework, split: Split, recompute_more: str, notes: Notes) -> States:
    """Recomputation, sequence parallelism and ZeRO. recompute_more: taken instead of a recomputation that is not stated."""
    recompute, stated = recompute_of(row, framework)
    if recompute_more and not stated:
        recompute = recompute_more
    if not stated:
        notes.assumed.append(f"recompute {recompute}")
    sequence = split.tp > 1 and ("sequence" in row.recompute.lower() or (framework.sequence and framework.recompute != "full"))
    if split.tp > 1 and not stated and sequence:
        notes.assumed.append("sequence parallelism")
    zero = int(found[0]) if (found := re.findall(r"\d", row.zero)) else framework.zero
    if not row.zero and zero:
        notes.assumed.append(f"ZeRO {zero}")
    if zero == 3 and split.pp > 1:
        zero = notes.assume("parameters whole for a step under the pipeline, as ZeRO", 1)
    return States(recompute=recompute, sequence=sequence, zero=zero)


def expert_ways_of(row: Row, shape: Shape, split: Split, notes: Notes) -> int:
    """The ways of expert parallelism: the stated ones, as far as experts and ranks divide by them."""
    if not shape.experts:
        return 1
    ways = math.gcd(row.ep or 1, shape.experts, split.dp * split.cp)
    notes.lacks.append("tokens choose experts at random")
    if ways > 1:
        notes.lacks.append("nothing hides the all_to_all of expert parallelism")
    return ways


def chunks_of(row: Row, framework: Framework, shape: Shape, split: Split, batch: Batch, notes: Notes) -> int:
    """Chunks per rank of an interleaved order; 1 without one."""
    pp, microbatches = split.pp, batch.per_replica // batch.micro
    if pp == 1:
        return 1
    chunks = row.vpp or 1
    if row.vpp is None and "interleaved" in row.notes.lower():
        chunks = usual_chunks(framework.depth, shape.layers, pp)
        notes.assumed.append(f"{chunks} chunks per rank")
    if chunks > 1 and microbatches % pp:
        notes.assumed.append(f"no interleaving: {microbatches} microbatches are no multiple of pp {pp}")
        return 1
    return chunks


def usual_chunks(depth: int, layers: int, pp: int) -> int:
    """The chunks per rank of an interleaved order that a row does not state: the least number from `depth` on that cuts evenly.

    Megatron-LM refuses chunks of unequal numbers of layers. So 105 layers on 35 ranks have three chunks of a layer, not two.

    Args:
        depth: of the framework's rule. layers: of the model. pp: ranks of the pipeline.
    """
    most = -(-layers // pp)
    even = (chunks for chunks in range(min(depth, most), most + 1) if layers % (pp * chunks) == 0)
    return next(even, min(depth, most))


def precision_of(row: Row, framework: Framework, notes: Notes) -> str:
    """ "nvfp4", "fp8", "bf16" or "tf32"; the framework's where the row states none, or with a question mark."""
    text = row.precision.lower()
    if "nvfp4" in text:
        return "nvfp4"
    if "fp8" in text or "float8" in text:
        notes.assumed.append(f"precision {row.precision}: products at the FP8 rate")
        return "fp8"
    if not text or text.endswith("?"):
        notes.assumed.append(f"precision {framework.precision}")
        return framework.precision
    return "bf16"
