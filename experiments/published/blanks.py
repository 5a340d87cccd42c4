"""What a row of published runs states, with its blanks filled by the rule of its framework; no Model, no Plan."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, field, replace
from typing import Any

from experiments.published.machines import Machine
from experiments.published.rows import Row
from experiments.published.rules import PART_TUNED, UNKNOWN, Rule, micro_of, recompute_of, stage_of
from parsim.hardware.parts import load_gpu
from parsim.model.catalogue.names import LLAMA, NAMED
from parsim.model.catalogue.names import named as model_named
from parsim.model.catalogue.sublayers import Shape
from parsim.model.tuning import Tuning

BERT_SEQ = 512
BINNED = re.compile(r"binned lengths", re.IGNORECASE)
BINNED_SHARE = 288 / 512
"""Of the longest sequence, where batches of like lengths are padded to a multiple of 64: MLPerf's BERT sees 255 tokens of 512
on average of the same corpus, and half a bin is padding."""


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
    """recompute: "full", "selective", "half" or "none". sequence: sequence parallelism. zero: stage of divided states.

    group: replicas over which they are divided (hybrid sharding); 0: all.
    """

    recompute: str
    sequence: bool
    zero: int
    group: int = 0


@dataclass(slots=True)
class Notes:
    """assumed: what the row does not say, in the order it was filled. lacks: what is left out."""

    assumed: list[str] = field(default_factory=list)
    lacks: list[str] = field(default_factory=list)

    def assume(self, what: str, value: int) -> int:
        """The value, noted."""
        self.assumed.append(f"{what} {value}")
        return value


def seq_of(row: Row, framework: Rule, causal: bool, notes: Notes) -> int:
    """Tokens of a sample."""
    seq = row.seq or notes.assume("seq", framework.seq if causal else BERT_SEQ)
    if BINNED.search(row.notes):
        return notes.assume("padded tokens of a sample, of batches of like lengths,", round(seq * BINNED_SHARE))
    return seq


TUNED = re.compile(r"\b(?:sft|lora|peft|fine-?tun\w*)\b", re.IGNORECASE)
PACKED_TOKENS, SQUAD_TOKENS = 4096, 256
"""Of a sample into which NeMo's and Megatron-Bridge's recipes for fine-tuning pack texts of SQuAD, and of such a text, about
(nemo/collections/llm/recipes: SquadDataModule, `seq_length = 4096 if packed_sequence else 2048`)."""


def context_of(row: Row, framework: Rule, seq: int, notes: Notes) -> int:
    """Keys that a token may attend to: of its sample, or of its text where texts are packed."""
    tuned = TUNED.search(f"{row.model} {row.notes}")
    if not tuned or seq != PACKED_TOKENS or framework.name not in ("nemo", "megatron-bridge"):
        return seq
    return notes.assume("packed texts of so many tokens,", SQUAD_TOKENS)


OTHER_MODELS: tuple[tuple[re.Pattern[str], str], ...] = tuple(
    (re.compile(pattern, re.IGNORECASE), kind)
    for pattern, kind in (
        (r"(?<![a-z])(?:(?:by|[mb])?t5|ul2|whisper|bart|nllb)", "an encoder with a decoder"),
        (r"(?<![a-z])(?:mamba|nemotron[-_ ]?h(?![a-z])|nemotron[-_ ]3[-_ ](?!\d+b))", "a state space model"),
        (r"diffusion|(?<![a-z])(?:sdxl|flux|dit|imagen)(?![a-z])|u-?net", "a diffusion or segmentation network"),
        (r"(?<![a-z])(?:dlrm|dcn|ncf|wide ?(?:and|&) ?deep)", "a recommender of embedding tables"),
        (
            r"(?<![a-z])(?:rnn|gnmt|e?lstm|jasper|tacotron|waveglow|fastpitch|hi-?fi-?gan|wav2vec)",
            "a recurrent or speech network",
        ),
        (r"(?<![a-z])(?:r-?gat|gnn|graph)", "a network of graphs"),
        (
            r"(?<![a-z])(?:vit|clip|ssd)(?![a-z])|(?<![a-z])(?:swin|vgg|efficientnet|efficientdet|mobilenet|densenet|yolo)",
            "a network of images",
        ),
    )
)
"""Models that are no transformer of tokens alone, by name. Nemotron 3 8B of 2023 is one, Nemotron 3 Nano of 2025 is none."""
TOKENS = re.compile(r"tok|seq|flop|mfu|hfu", re.IGNORECASE)
"""In a unit that only a transformer of tokens has."""
MIXTURES = re.compile(r"(?<![a-z])moe(?![a-z])|experts|mixtral|\d+x\d+(?:\.\d+)?b|[-_ ]a\d+(?:\.\d+)?b", re.IGNORECASE)


def shape_of_name(name: str) -> Shape | None:
    """The shape of a model by its name, reduced to so many layers where the name says so; None: not known."""
    reduced = re.search(r"reduced to (\d+) layers", name)
    model = model_named(re.sub(r"\s*reduced to.*", "", name))
    if model is None or model.shape is None or reduced is None:
        return None if model is None else model.shape
    return replace(model.shape, layers=int(reduced[1]), dense_layers=min(model.shape.dense_layers, 1))


def shape_of(row: Row, framework: Rule, notes: Notes) -> Shape:
    """The shape that the row names or states. Raises CannotExpressError: it does neither, or is no decoder-only transformer."""
    named = shape_of_name(row.model)
    other = next((kind for pattern, kind in OTHER_MODELS if pattern.search(row.model)), "")
    if other and (named is None or not named.causal):
        raise CannotExpressError(f"{row.model} is {other}, no decoder-only transformer; parsim has no shape of it")
    stated = re.search(r"vocab(?:ulary)?(?: size)?[ =:]*(\d[\d,]*)", row.notes, re.IGNORECASE)
    vocab = int(stated[1].replace(",", "")) if stated else 0
    if named is None:
        if MIXTURES.search(row.model) or (row.ep or 1) > 1:
            raise CannotExpressError(
                f"{row.model}: a mixture of experts, of which the row does not state how many and how wide"
            )
        return _by_sizes(row, framework, vocab, notes) if row.hidden else _by_parameters(row, vocab, notes)
    if "sft" in row.model.lower() or "sft performance" in row.notes.lower():
        notes.lacks.append("fine-tuning as pre-training: attention sees all of a sample")
    if re.search(r"w/ ?mtp|with mtp", row.model, re.IGNORECASE):
        notes.lacks.append("multi-token prediction")
    if "kimi" in row.model.lower():
        notes.lacks.append("Muon, priced as Adam")
    found = _widened(replace(named, layers=row.layers or named.layers, vocab=vocab or named.vocab), row, notes)
    table = found.vocab * found.hidden
    counts = (found.weights, found.weights - table, found.weights - 2 * table)
    if row.params and min(abs(math.log(max(1, count) / row.params)) for count in counts) > ALIKE:
        notes.assumed.append(
            f"the shape of {found.name}, {found.weights / 1e9:.3g}B parameters where {row.params / 1e9:.3g}B are stated"
        )
    return found


ENCODER = re.compile(r"(?:megatron[-_ ])?(?:ro|de)?bert", re.IGNORECASE)
GATED = re.compile(r"llama|gemma|qwen|mistral|yi-|vicuna|alpaca|internlm|olmo|smol|deepseek|baichuan|danube", re.IGNORECASE)
ALIKE = 0.1
"""By which a shape's parameters may differ from the stated ones: names round them, and count embeddings or not."""


def _by_sizes(row: Row, framework: Rule, vocab: int, notes: Notes) -> Shape:
    """A shape of no known name from its stated sizes; where its parameters are stated too, they decide its MLP."""
    hidden = row.hidden or 1
    usual = framework.heads if framework.heads and hidden % framework.heads == 0 else _usual_heads(hidden)
    heads = row.heads or notes.assume("heads", usual)
    layers = row.layers or (notes.assume("layers", max(1, round(row.params / (12 * hidden**2)))) if row.params else 0)
    if not layers:
        raise CannotExpressError(f"the layers of {row.model!r} are not known")
    encoder = ENCODER.match(row.model) is not None
    if not vocab:
        padded = 250880 if row.id.startswith("bloom") else 30522 if encoder else 51200
        vocab = notes.assume("vocabulary", padded)
    shape = Shape(name=row.model, layers=layers, hidden=hidden, heads=heads, vocab=vocab, causal=not encoder)
    plain = layers * 12 * hidden**2
    counts = (plain + vocab * hidden, plain)
    gated = GATED.search(row.model) is not None
    if not row.params or (not gated and min(abs(math.log(count / row.params)) for count in counts) < ALIKE):
        return shape
    arms = 3 if gated else 2
    tied = not gated or row.params < 2e9  # larger models of this kind keep an output matrix of their own
    left = row.params - (1 if tied else 2) * vocab * hidden - layers * 4 * hidden**2
    ffn = round(left / (layers * arms * hidden) / 128) * 128
    if not 128 <= ffn <= 16 * hidden:
        notes.assumed.append(
            f"a plain GPT of {(plain + vocab * hidden) / 1e9:.3g}B parameters, where {row.params / 1e9:.3g}B are stated"
        )
        return shape
    notes.assumed.append(f"an MLP of {ffn} with {arms} products, by the stated {row.params / 1e9:.3g}B parameters")
    return replace(shape, ffn=ffn, **((LLAMA | {"tied": tied}) if gated else {}))


def _by_parameters(row: Row, vocab: int, notes: Notes) -> Shape:
    """The known dense shape nearest to the stated parameters, with as many layers more or fewer as they differ by."""
    if not row.params:
        raise CannotExpressError(f"the shape of {row.model!r} is not known, and the row states neither sizes nor parameters")
    if not (row.seq or row.layers or row.heads or TOKENS.search(row.unit)):
        raise CannotExpressError(
            f"{row.model!r} is not known, and nothing but its {row.params / 1e9:.3g}B parameters is stated: neither tokens nor "
            "layers, so it need not be a transformer"
        )
    dense = [
        model.shape for model in NAMED.values() if model.shape is not None and not model.shape.experts and model.shape.causal
    ]
    nearest = min(dense, key=lambda shape: abs(math.log(shape.weights / row.params)))
    embedded = nearest.vocab * nearest.hidden * (1 if nearest.tied else 2)
    layers = max(1, round(nearest.layers * (row.params - embedded) / max(1, nearest.weights - embedded)))
    notes.assumed.append(f"shape of {nearest.name} with {layers} layers, by the stated {row.params / 1e9:.3g}B parameters")
    return replace(nearest, name=row.model, layers=row.layers or layers, vocab=vocab or nearest.vocab)


def _widened(named: Shape, row: Row, notes: Notes) -> Shape:
    """With the hidden size and the heads that the row states; what the name says of other widths grows alike."""
    hidden, heads = row.hidden or named.hidden, row.heads or named.heads
    if (hidden, heads) == (named.hidden, named.heads):
        return named
    if named.experts:
        raise CannotExpressError(f"{row.model} has hidden {named.hidden} and {named.heads} heads, the row {hidden} and {heads}")
    notes.assumed.append(f"shape of {named.name} with hidden {hidden} and {heads} heads")
    keys = named.kv_heads if named.kv_heads and heads % named.kv_heads == 0 else 0
    return replace(
        named, hidden=hidden, heads=heads, kv_heads=keys, head_dim=0, ffn=round(named.ffn * hidden / named.hidden / 128) * 128
    )


def _usual_heads(hidden: int) -> int:
    """A multiple of 8 that divides the hidden size, with about 128 channels each."""
    fitting = [heads for heads in range(8, hidden + 1, 8) if hidden % heads == 0]
    return min(fitting, key=lambda heads: abs(hidden / heads - 128)) if fitting else max(1, hidden // 128)


def split_of(row: Row, framework: Rule, shape: Shape, machine: Machine, notes: Notes) -> Split:
    """The axes of a row. Raises CannotExpressError: the stated ones do not multiply to the stated GPUs or a part of them."""
    cp = row.cp or _context_ways(row, framework, machine, notes)
    if row.tp is not None and row.pp is not None:
        tp, pp = row.tp, row.pp
    else:
        tp, pp = _ways_of(row, framework, shape, machine, notes)
    ways = tp * pp * cp
    if row.gpus is not None and row.gpus < ways:
        notes.assumed.append(f"{ways} GPUs instead of {row.gpus}, by tp {tp} x pp {pp} x cp {cp}")
    gpus = max(row.gpus or ways * (row.dp or 1), ways)
    if gpus > LARGEST["gpus"]:
        raise CannotExpressError(f"tp {tp} x pp {pp} x cp {cp} is {gpus} GPUs, and no run has more than {LARGEST['gpus']}")
    dp = row.dp or max(1, gpus // ways)
    if row.gpus is not None and row.dp is not None and ways * dp != gpus:
        if tp * pp * dp == gpus:
            cp = 1
        elif gpus % (ways * dp):
            raise CannotExpressError(f"tp {tp} x pp {pp} x dp {dp} x cp {cp} is not {gpus} GPUs")
    if tp * pp * dp * cp != gpus:
        notes.assumed.append(f"{tp * pp * dp * cp} of {gpus} GPUs take part")
        gpus = tp * pp * dp * cp
    return Split(tp=tp, pp=pp, dp=dp, cp=cp, gpus=gpus)


def _context_ways(row: Row, framework: Rule, machine: Machine, notes: Notes) -> int:
    """Pieces of a sample that are not stated: as many as there are GPUs for each sample, where the framework divides so."""
    if not framework.context or not (row.gpus and row.global_batch):
        return 1
    tp, memory = row.tp or _tensor_ways_of_adapters(machine), load_gpu(machine.gpu).memory_bytes.value
    each = max(row.gpus // (tp * row.global_batch), 2 if tp == 1 and memory < ROOMY_BYTES else 1)
    return 1 if each == 1 else notes.assume("cp", each)


ROOMY_BYTES = 160e9
"""Of a GPU that holds Llama 2 70B in 8 bits and all that a sample of 8,192 tokens keeps. With less, the sample is cut in two;
with less than three quarters of it, the weights are cut in four. So do NVIDIA's configs DGXB200_1x8x1xtp1pp1cp1,
DGXH200_1x8x2xtp1pp1cp2 and DGXH100_1x8x4xtp4pp1cp1 of MLPerf's llama2_70b_lora."""


def _tensor_ways_of_adapters(machine: Machine) -> int:
    return 1 if load_gpu(machine.gpu).memory_bytes.value > ROOMY_BYTES * 0.75 else 4


MOST_TENSOR_WAYS = 8


def _ways_of(row: Row, framework: Rule, shape: Shape, machine: Machine, notes: Notes) -> tuple[int, int]:
    """tp and pp, one or both of which are not stated: what the stated axes leave, else the framework's recipe, else by size."""
    if row.gpus is not None and row.dp is not None:
        left = max(1, row.gpus // (row.dp * (row.cp or 1)))
        tp = row.tp or (max(1, left // row.pp) if row.pp else 1)
        while not (row.tp or row.pp) and _may_double(tp, shape, machine.per_node) and left % (2 * tp) == 0:
            tp *= 2
        pp = row.pp or max(1, left // tp)
    elif stage_of(row.zero) == 3:  # parameters are divided already
        tp, pp = row.tp or 1, row.pp or 1
    elif framework.context:
        tp, pp = row.tp or _tensor_ways_of_adapters(machine), row.pp or 1
    elif framework.tp and row.tp is None and row.pp is None:
        tp, pp = framework.tp, framework.pp
    elif framework.name == UNKNOWN and _states_divide(row, shape, machine):
        tp, pp = 1, 1
    else:
        most = LARGEST["gpus"] if row.gpus is None else max(1, row.gpus // (row.cp or 1))
        tp, pp = _split_by_size(row, shape, most, machine)
    notes.assumed.append(", ".join(f"{axis} {ways}" for axis, ways in (("tp", tp), ("pp", pp)) if getattr(row, axis) is None))
    return tp, pp


def _may_double(tp: int, shape: Shape, per_node: int) -> bool:
    return 2 * tp <= min(MOST_TENSOR_WAYS, per_node) and shape.heads % (2 * tp) == 0


def _states_divide(row: Row, shape: Shape, machine: Machine) -> bool:
    """Whether nothing but states needs to be divided, as FSDP and DeepSpeed do: over a node, with a sample for each GPU."""
    samples = row.global_batch is None or row.gpus is None or row.global_batch >= row.gpus
    return row.tp is None and row.pp is None and samples and _needed(row, shape, machine) <= MOST_TENSOR_WAYS


def _needed(row: Row, shape: Shape, machine: Machine) -> int:
    """The fewest GPUs on which 18 bytes per parameter take half of 80 GB, or of the GPU's."""
    parameters = 12 * shape.layers * shape.hidden**2
    if shape.experts:
        arms = 3 if shape.gated else 2
        held = shape.experts // math.gcd(row.ep or MOST_TENSOR_WAYS, shape.experts)
        parameters += (shape.layers - shape.dense_layers) * held * arms * shape.hidden * shape.expert_ffn
    half = min(80e9, load_gpu(machine.gpu).memory_bytes.value) / 2
    return max(1, math.ceil(18 * parameters / half))


def _split_by_size(row: Row, shape: Shape, gpus: int, machine: Machine) -> tuple[int, int]:
    """tp and pp that are not stated: tensor parallelism in a node, then a pipeline, until states fit (`_needed`)."""
    needed = _needed(row, shape, machine)
    tp, pp = row.tp or 1, row.pp or 1
    while row.tp is None and tp * pp < needed and tp * pp * 2 <= gpus and _may_double(tp, shape, machine.per_node):
        tp *= 2
    while row.pp is None and tp * pp < needed and tp * pp * 2 <= gpus and pp * 2 <= shape.layers:
        pp *= 2
    return tp, pp


def batch_of(row: Row, framework: Rule, shape: Shape, split: Split, seq: int, notes: Notes) -> Batch:
    """The batch, rounded to what replicas and microbatches divide. Raises CannotExpressError: it is smaller than the replicas,
    and the split is not stated."""
    dp = split.dp
    batch = row.global_batch or framework.batch or _batch_by_rule(row, dp, seq, notes)
    if framework.name == "torchtune" and row.micro_batch == batch and dp > 1:
        batch = notes.assume("batch_size of each GPU, together", batch * dp)
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


INTERLEAVED = re.compile(r"(?<!non-)(?<!not )(?<!no )(?<!without )(?<!before the )interleaved", re.IGNORECASE)


HYBRID = re.compile(r"hybrid|hsdp", re.IGNORECASE)
OFFLOADED = re.compile(r"(?<!no )(?<!without )offload", re.IGNORECASE)
PURE_HALF = re.compile(r"pure bf16|no fp32 master|without (?:fp32 )?master|optimi[sz]er (?:states? )?in bf16", re.IGNORECASE)
EIGHT_BIT = re.compile(r"8[- ]?bit(?: paged)?[- ](?:adam|optimi[sz]er|states?)|adam\w*8bit", re.IGNORECASE)
WEIGHTS_IN_8_BITS = re.compile(r"llama3\.1_405b.*\bmlperf\b", re.IGNORECASE | re.DOTALL)
"""In model and notes: FP8_PARAM_GATHER=True of NVIDIA's configurations for MLPerf (training_results_v5.0, llama31_405b)."""
IN_BACKWARD = re.compile(r"(?:optimi[sz]er|step|update)s? in (?:the )?backward", re.IGNORECASE)


def tuning_of(row: Row, framework: Rule, notes: Notes) -> Tuning | None:
    """What a row trains whose model or notes name LoRA; targets and dropout are the framework's, and a rank it does not say."""
    text = f"{row.model} {row.notes}"
    if not PART_TUNED.search(text):
        return None
    rank = re.search(r"\b(?:rank|r)\s*[= ]\s*(\d+)", row.notes)
    method = "qlora" if re.search(r"qlora|4[- ]bit base|nf4", text, re.IGNORECASE) else "lora"
    values: dict[str, Any] = {"method": method} | framework.adapters
    if rank is not None:
        values["r"] = int(rank[1])
    tuning = Tuning.model_validate(values)
    notes.assumed.append(f"adapters: {tuning.text()}")
    return tuning


@dataclass(frozen=True, slots=True, kw_only=True)
class Kept:
    """What a run keeps of its weights. master_weights, state_dtype, weight_dtype: as in `parsim.model.formats.Numerics`.

    in_backward: weights are updated as soon as their gradients are there, so no gradients are kept.
    """

    master_weights: bool = True
    state_dtype: str = ""
    weight_dtype: str = ""
    in_backward: bool = False


AS_USUAL = Kept()


def kept_of(row: Row, framework: Rule, precision: str, notes: Notes) -> Kept:
    """What the row's notes say that its optimizer keeps; offload is noted, and not expressed."""
    if OFFLOADED.search(row.notes) or OFFLOADED.search(row.zero):
        notes.lacks.append("offload to the host: neither its time nor what it spares")
    in_8_bits = framework.name == "nemo" and WEIGHTS_IN_8_BITS.search(f"{row.model} {row.notes}")
    return Kept(
        master_weights=not (precision == "bf16" and PURE_HALF.search(row.notes)),
        state_dtype="int8" if EIGHT_BIT.search(row.notes) else "",
        weight_dtype="fp8" if precision == "fp8" and (framework.context or in_8_bits) else "",
        in_backward=IN_BACKWARD.search(row.notes) is not None,
    )


def _group_of(row: Row, split: Split, per_node: int, notes: Notes) -> int:
    """Replicas over which hybrid sharding divides states: those of a node; 0 where all do."""
    if not (HYBRID.search(row.zero) or HYBRID.search(row.notes)):
        return 0
    group = math.gcd(split.dp, max(1, per_node // split.tp))
    if group in (1, split.dp):
        return 0
    return notes.assume("states divided over the replicas of a node,", group)


def states_of(row: Row, framework: Rule, split: Split, per_node: int, recompute_more: str, notes: Notes) -> States:
    """Recomputation, sequence parallelism and ZeRO. recompute_more: taken instead of a recomputation that is not stated."""
    recompute, stated = recompute_of(row, framework)
    if recompute_more and not stated:
        recompute = recompute_more
    if not stated:
        notes.assumed.append(f"recompute {recompute}")
    sequence = split.tp > 1 and ("sequence" in row.recompute.lower() or (framework.sequence and framework.recompute != "full"))
    if split.tp > 1 and not stated and sequence:
        notes.assumed.append("sequence parallelism")
    stage = stage_of(row.zero)
    zero = framework.zero if stage is None else stage
    if stage is None and zero:
        notes.assumed.append(f"ZeRO {zero}")
    if zero == 1 and (group := re.search(r"zero1 group=(\d+)", row.notes)):
        notes.lacks.append(f"ZeRO 1 over all replicas, not over {group[1]}")
    if zero == 3 and split.pp > 1:
        zero = notes.assume("parameters whole for a step under the pipeline, as ZeRO", 1)
    return States(
        recompute=recompute, sequence=sequence, zero=zero, group=_group_of(row, split, per_node, notes) if zero else 0
    )


def expert_ways_of(row: Row, shape: Shape, split: Split, zero: int, notes: Notes) -> int:
    """The ways of expert parallelism: the stated ones, else 8 unless ZeRO 3 divides experts anyway, as far as all divides."""
    if not shape.experts:
        return 1
    wanted = row.ep or (1 if zero == 3 else MOST_TENSOR_WAYS)
    ways = math.gcd(wanted, shape.experts, split.dp * split.cp)
    if ways != row.ep and (row.ep or ways > 1):
        notes.assumed.append(f"ep {ways}" + (f" instead of {row.ep}" if row.ep else ""))
    notes.lacks.append("tokens choose experts at random")
    if ways > 1:
        notes.lacks.append("nothing hides the all_to_all of expert parallelism")
    return ways


def chunks_of(row: Row, framework: Rule, shape: Shape, split: Split, batch: Batch, notes: Notes) -> int:
    """Chunks per rank of an interleaved order; 1 without one."""
    pp, microbatches = split.pp, batch.per_replica // batch.micro
    if pp == 1:
        return 1
    chunks = row.vpp or 1
    if row.vpp is None and INTERLEAVED.search(row.notes):
        chunks = usual_chunks(framework.depth, shape.layers, pp)
        if chunks > 1:
            notes.assumed.append(f"{chunks} chunks per rank")
    if chunks > 1 and microbatches % pp:
        notes.assumed.append(f"no interleaving: {microbatches} microbatches are no multiple of pp {pp}")
        return 1
    return chunks


def usual_chunks(depth: int, layers: int, pp: int) -> int:
    """The chunks per rank of an interleaved order that a row does not state: the least number from `depth` on that cuts evenly.
    Megatron-LM refuses chunks of unequal numbers of layers: 105 layers on 35 ranks have three chunks of a layer, not two."""
    most = -(-layers // pp)
    even = (chunks for chunks in range(min(depth, most), most + 1) if layers % (pp * chunks) == 0)
    return next(even, min(depth, most))


def precision_of(row: Row, framework: Rule, notes: Notes) -> str:
    """ "nvfp4", "fp8", "bf16", "tf32" or "fp32"; the framework's where the row states none, or with a question mark."""
    text = row.precision.lower()
    if "nvfp4" in text:
        return "nvfp4"
    if "fp4" in text:
        notes.assumed.append(f"precision {row.precision}: products at the NVFP4 rate")
        return "nvfp4"
    if re.search(r"fp8|float8|e[45]m[32]", text):
        notes.assumed.append(f"precision {row.precision}: products at the FP8 rate")
        return "fp8"
    if not text or text.endswith("?"):
        notes.assumed.append(f"precision {framework.precision}")
        return framework.precision
    if half_of(text) or "amp" in text or "mixed" in text:
        return "bf16"
    whole = re.search(r"tf32|fp32|float32", text)
    if whole is None:
        notes.assumed.append(f"precision {row.precision!r} is not known and counts as bf16")
        return "bf16"
    return "tf32" if "tf32" in text else "fp32"


def half_of(text: str) -> str:
    """ "bf16" or "fp16" where the text of a precision names it, else ""."""
    found = re.search(r"bf16|bfloat16|fp16|float16|half", text.lower())
    return "" if found is None else "bf16" if found[0].startswith("b") else "fp16"
