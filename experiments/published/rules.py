"""Which framework a row is of, and what is assumed where a row leaves more blank than any framework decides.

What a framework does is a row of `parsim.model.catalogue.frameworks`. A row of published runs names it by its prefix, else in
its notes, its source or its zero_stage; else it is unknown. README.md shows the prefixes.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any

from experiments.published.rows import Row
from parsim.hardware.parts import load_gpu
from parsim.model.catalogue.frameworks import KERNELS, Framework, framework_of, plausible_frameworks
from parsim.model.catalogue.sublayers import LOSSES, Shape, Software

INTERLEAVED_CHUNKS = 2
"""Where a row says that the schedule is interleaved and not how deeply. Llama 3: a layer per chunk."""
LAYER_PER_CHUNK = 1000
"""As deep as it goes: NeMo's rows that state their chunks have one layer each (GPT-3 175B, Llama 2 70B, Nemotron 340B)."""

STOPS_EARLY = "mp_mode=default"
"""In the notes of Composer's rows: of the later tables. Their second forward stops early (torch 2.1), that of the tables with
mp_mode=PURE does not. Only the rows say so: recomputed ones of the later A100 table are 6 to 9% faster than those of the
earlier one, while rows without recomputation are alike."""

UNKNOWN = "unknown"


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule(Framework):
    """A framework with what is assumed of its rows.

    Attributes:
        software: that it runs. year: of the version; 0: the current one.
        precision: where the row says nothing, or doubts what it says: "bf16" (or fp16), "tf32" (fp32).
        micro: samples of a microbatch; 0: `micro_of`. seq: tokens of a sample.
        batch, tp, pp, heads: of a row that does not state them; 0: by size, or by its notes. pp counts with tp.
        depth: chunks per rank of an interleaved schedule. adapters: keys of training.tune of rows that train adapters. context:
            samples are cut where there are more GPUs than samples, and frozen weights are in 8 bits.
    """

    software: Software
    year: int = 0
    precision: str = "bf16"
    micro: int = 0
    seq: int = 2048
    batch: int = 0
    tp: int = 0
    pp: int = 1
    heads: int = 0
    depth: int = INTERLEAVED_CHUNKS
    adapters: Mapping[str, Any] = field(default_factory=dict)
    context: bool = False


ADAPTERS: dict[str, dict[str, Any]] = {
    "nemo": {"r": 32, "targets": ("qkv",)},
    "torchtune": {"r": 8, "targets": ("q_proj", "v_proj", "output_proj", "mlp")},
}
"""Keys of training.tune that a framework's recipes have: NeMo's megatron_gpt_finetuning_config.yaml (attention_qkv with
adapter_dim 32) and torchtune's recipes/configs/llama3_1/8B_lora_single_device.yaml."""


def rule(name: str, year: int = 0, *, compiled: bool = True, kernels: str = "", **values: Any) -> Rule:
    """The rule of a framework in the version of a year; `kernels`: others than its own, `values`: other fields."""
    row = NO_FRAMEWORK if name == UNKNOWN else framework_of(name, year or None)
    software = KERNELS[kernels or row.kernels_of(compiled)]
    own = {entry.name: getattr(row, entry.name) for entry in fields(row)} | {"year": year, "adapters": ADAPTERS.get(name, {})}
    own |= values
    return Rule(**own, software=replace(software, early_stop=bool(own["early_stop"])))


LOW_BITS = re.compile(r"fp8|float8|fp4|e[45]m[32]", re.IGNORECASE)
WHOLE_PRECISION = re.compile(r"tf32|(?:fp|float)32", re.IGNORECASE)
PART_TUNED = re.compile(r"(?<![a-z])(?:q?lora|peft)(?![a-z])", re.IGNORECASE)


def rule_without_framework(row: Row) -> Rule:
    """The rule of a row before its framework is guessed.

    Adapters have small states, which no axis divides. Who trains them in 8 bits cuts samples and adapts attention alone, as
    MLPerf's submissions do.
    """
    if not PART_TUNED.search(f"{row.model} {row.notes}"):
        return rule(UNKNOWN)
    low = LOW_BITS.search(row.precision) is not None
    return rule(UNKNOWN, tp=1, context=low, adapters=MLPERF_ADAPTERS if low else {})


NO_FRAMEWORK = Framework(name=UNKNOWN, source="what parsim assumes without [software]", sequence=True)

MLPERF_ADAPTERS = {"r": 16, "alpha": 32.0, "dropout": 0.1, "targets": ("qkv", "o")}
"""mlcommons/training llama2_70b_lora: lora_target_modules "qkv_proj,o_proj". NVIDIA's configurations for it set FP8_ACT=1:
the inputs of activation functions are kept in 8 bits (activation_func_fp8_input_store), and nothing runs again."""
CORE: dict[str, Any] = {"micro": 1, "seq": 4096, "depth": LAYER_PER_CHUNK}
PREFIXES: dict[str, Callable[[], Rule]] = {
    "vtrain-multi": lambda: rule("megatron", 2021),
    "korthikanti": lambda: rule("megatron", 2022),
    "megatron-mfu2022": lambda: rule("megatron", 2022),
    "megatron-sep2020": lambda: rule("megatron", 2020, seq=1024),
    "megatron-sc21": lambda: rule("megatron", 2021),
    "megatron-jan2021": lambda: rule("megatron", 2021),
    "megatron-readme175b": lambda: rule("megatron", 2021),
    "megatron-h100": lambda: rule("megatron", **CORE),
    "megatron": lambda: rule("megatron", **CORE),
    "mtnlg": lambda: rule("megatron-deepspeed"),
    "bloom": lambda: rule("megatron-deepspeed", zero=1, heads=96),
    "megds": lambda: rule("megatron-deepspeed"),
    "mosaic": lambda: rule("composer", 2023),
    "titan": lambda: rule("torchtitan", micro=2, seq=8192),
    "internevo": lambda: rule("internevo"),
    "llama1": lambda: rule("composer", 2023, micro=2),
    "llama3": lambda: rule("megatron", 2024, kernels="llama3", tensor_overlap=False, **CORE | {"seq": 8192}),
    "nemo": lambda: rule("nemo", **CORE),
    "nemo-bridge": lambda: rule("megatron-bridge", **CORE),
    "nemo-launcher": lambda: rule("nemo", 2023, **CORE | {"seq": 2048}),
    "sailor": lambda: rule(
        "megatron-deepspeed", softmax_limits=False, recompute="none", precision="tf32", kernels="megatron-fp32", micro=1
    ),
    "simumax": lambda: rule("megatron", tensor_overlap=False, **CORE),
    "flashattn": lambda: rule("ddp", compiled=False, micro=8),
    "mlperf-bert": lambda: rule("mlperf"),
    "mlperf-lora": lambda: rule("nemo", seq=8192, micro=1, context=True, adapters=MLPERF_ADAPTERS, spares_layers=True),
    "dle-pt": lambda: rule("deeplearningexamples"),
    "dle-tf": lambda: rule("tensorflow"),
}
"""By the longest beginning of a row's id that stands here. Heads of BLOOM: those of GPT-3, from whose shape its authors began,
where they divide the hidden size. Sailor's rows do not state their precision, and their stated memory peaks do: the predicted
ones are 0.7 to 1.0 of them in fp32 without attention dropout (0.9 to 1.0 with 8 samples), and half of them in 16 bits."""

WORDS: tuple[tuple[str, str], ...] = (
    (r"megatron[-_ ]bridge", "megatron-bridge"),
    (r"\bnemo\b", "nemo"),
    (r"megatron[-_ ]deepspeed", "megatron-deepspeed"),
    (r"torchtitan", "torchtitan"),
    (r"llm-foundry|composer|mosaic", "composer"),
    (r"primus|megatron", "megatron"),
    (r"torchtune", "torchtune"),
    (r"dualpipe|hai[-_ ]llm", "hai-llm"),
    (r"llm\.c\b", "llm.c"),
    (r"maxtext", "maxtext"),
    (r"\bjax\b|\bflax\b|\bpax(?:ml)?\b|levanter|t5x|easylm|mesh.?transformer", "jax"),
    (r"internevo|internlm", "internevo"),
    (r"hugging ?face|hf trainer|transformers\b|accelerate|\btrl\b|axolotl|llama[-_ ]?factory|fastchat|\bqwen-ft", "hf-trainer"),
    (r"deepspeed", "deepspeed"),
    (r"mlperf", "mlperf"),
    (r"\bdle\b|deeplearningexamples|\bapex\b", "deeplearningexamples"),
    (r"tensorflow", "tensorflow"),
    (r"fsdp|full[-_ ]shard|litgpt|lit-gpt|lightning|fairscale", "fsdp"),
    (r"nanogpt|\bddp\b", "ddp"),
)
"""In the notes, the id, the source and the zero_stage of a row; the first match counts."""

EAGER = re.compile(
    r"\beager\b|not compiled|without compil|no compil|compile[^,;]* not stated|compile ?[=:] ?(?:false|off)", re.I
)
COMPILES = re.compile(r"compile|\bxla\b|inductor|nanogpt|fused (?:kernels|rms|layer|swiglu)|liger", re.IGNORECASE)
"""nanoGPT's train.py compiles unless it is told not to; kernels by hand fuse the same passes."""


def is_compiled(row: Row) -> bool:
    """Whether the notes say that a compiler fuses what lies between products."""
    return COMPILES.search(row.notes) is not None and not EAGER.search(row.notes)


RECIPES: tuple[tuple[str, dict[str, Any]], ...] = (
    (r"^GPT 5B", {"tp": 1, "micro": 4, "batch": 2048}),
    (r"^GPT 20B", {"tp": 4, "micro": 4, "batch": 2048}),
    (r"^GPT 40B", {"tp": 8, "micro": 4, "batch": 2048}),
    (r"^BERT 110m", {"tp": 1, "micro": 4, "batch": 256}),
    (r"^BERT 4B", {"tp": 1, "micro": 8, "batch": 2048}),
    (r"^BERT 20B", {"tp": 4, "micro": 4, "batch": 4096}),
    (r"^BERT 100B", {"tp": 4, "pp": 16, "micro": 8, "batch": 4096}),
)
"""Of NeMo's launcher by model (launcher_scripts/conf/training/gpt3 and bert). GPT 175B is left to the rule of size: its recipe
of that version is not known."""

SELECTIVE_RUNS: tuple[tuple[str, dict[str, Any]], ...] = ((r"^22B", {"tp": 8, "batch": 4}),)
"""Of Megatron-LM's table of MFU and HFU, whose rows name a size alone: what other rows of the same run of 22B state.
Other sizes are left to the rule of size."""

WITHOUT: dict[str, Callable[[Rule], Rule]] = {
    "repeated sums": lambda rule: replace(rule, repeats_sums=False),
    "scatter-gather": lambda rule: replace(rule, scatter_gather=False),
    "blocking transfers": lambda rule: replace(rule, blocking_transfers=False),
    "late gathering": lambda rule: replace(rule, backward_prefetch=True),
    "gathering ahead": lambda rule: replace(rule, gather_ahead=False),
    "fused Adam": lambda rule: replace(rule, optimizer="adam"),
    "fused attention": lambda rule: replace(rule, software=replace(rule.software, flash=False)),
    "age of the attention kernel": lambda rule: replace(rule, software=replace(rule.software, attention_work=1.0)),
    "sums of gradients": lambda rule: replace(rule, software=replace(rule.software, gradient_arrays=0.0)),
    "unaligned heads": lambda rule: replace(rule, software=replace(rule.software, aligned=0)),
    "casts in the kernels before": lambda rule: replace(rule, software=replace(rule.software, cast_arrays=2.0)),
    "biases of experts": lambda rule: replace(rule, software=replace(rule.software, expert_bias_arrays=0.0)),
    "experts before fused products": lambda rule: replace(rule, graphs=("",)),
    "metrics of Composer": lambda rule: replace(rule, software=replace(rule.software, loss_arrays=2.0)),
    "unfused AdamW of Composer": lambda rule: replace(rule, optimizer="adam_fused", one_array=False),
    "overlap of tensor parallelism": lambda rule: replace(rule, tensor_overlap=False),
    "tensor parallelism of NeMo 2023 alone": lambda rule: replace(rule, tensor_overlap=True),
    "sums beside weight gradients": lambda rule: replace(rule, tensor_backward_overlap=False),
    "layers spared by recipes": lambda rule: replace(rule, spares_layers=False),
    "early stop, A100": lambda rule: replace(rule, software=replace(rule.software, early_stop=False)),
    "early stop, H100": lambda rule: replace(rule, software=replace(rule.software, early_stop=False)),
    "sequence parallelism": lambda rule: replace(rule, sequence=False),
    "host launch rate": lambda rule: replace(rule, launches=0.0),
    "gradients of bf16 in fp32": lambda rule: replace(rule, bf16_gradients=0.0),
    "limits of the fused softmax": lambda rule: replace(rule, softmax_limits=False),
    "loss scaling": lambda rule: replace(rule, scales_fp16=False),
    "clipping": lambda rule: replace(rule, clip=False),
    "kernels of biases": lambda rule: replace(rule, software=replace(rule.software, bias_kernels=False)),
    "passes of the loss": lambda rule: replace(rule, software=replace(rule.software, loss_arrays=8.0)),
    "fp32 of Sailor": lambda rule: replace(rule, precision="bf16", software=KERNELS["megatron-2021"]),
}
"""A piece of the model, and the rule without it: what it is worth."""


ASYNC_TP = re.compile(r"async[-_ ]?(?:tp|tensor)", re.IGNORECASE)
"""In the notes of torchtitan's rows: pieces of the collectives run beside the products."""


STAGES = (
    (r"fsdp|full[-_ ]?shard|hybrid", 3),
    (r"shard[-_ ]?grad|gradients", 2),
    (r"optimizer", 1),
    (r"none|\bno\b|off|ddp|false", 0),
)


def stage_of(text: str) -> int | None:
    """The stage of ZeRO that a text names: `3 (Megatron-FSDP)`, `ZeRO-1`, `full_shard`; None: none of these."""
    lowered = re.sub(r"fsdp2", "fsdp", text.lower())
    if digit := re.search(r"\d", lowered):
        return int(digit[0]) if int(digit[0]) <= 3 else None
    return next((stage for pattern, stage in STAGES if re.search(pattern, lowered)), None)


def usual_blanks(name: str, until: int = 0) -> dict[str, Any]:
    """What rows of a framework leave out, where it is not as elsewhere. until: the last year of its version; 0: the current."""
    return CORE if not until and name in ("megatron", "nemo", "megatron-bridge", "hai-llm") else {}


def plausible_rules(row: Row, shape: Shape, gpu: str, devices: int, *, divided: str) -> list[Rule]:
    """Of frameworks that nothing but the row's other columns speaks for, the most likely first.

    Nothing is recomputed where the row does not say so and its plan fits, other than on V100: Megatron's scripts of 2020
    recompute all layers, and later ones what they must.
    """
    low, whole = LOW_BITS.search(row.precision) is not None, WHOLE_PRECISION.search(row.precision) is not None
    guess = plausible_frameworks(
        shape,
        gpu,
        devices=devices,
        memory_bytes=load_gpu(gpu).memory_bytes.value,
        divided=divided,
        zero=stage_of(row.zero),
        selective=recompute_of(row, NO_FRAMEWORK)[0] == "selective",
        low=low,
        keys=row.seq or 0,
    )
    return [
        rule(
            found.name,
            found.until,
            compiled=is_compiled(row) or low,
            kernels="megatron-fp32" if whole and found.name.startswith("megatron") else "",
            recompute=found.recompute if found.until == 2020 else "none",
            **usual_blanks(found.name, found.until),
        )
        for found in guess.frameworks
    ]


CONTAINER = re.compile(r"\b(\d\d\.\d\d)[.\d]* NeMo Container")
FUSED_EXPERTS = "26.06"
"""The first container with release 0.5.1 of Megatron-Bridge."""


def rule_of(row: Row) -> Rule:
    """The rule of the row's own framework; one without a framework where nothing says which it is."""
    prefixes = [prefix for prefix in PREFIXES if row.id.startswith(prefix)]
    if prefixes:
        found = PREFIXES[max(prefixes, key=len)]()
    else:
        text = " ".join((row.notes, row.id, row.source, row.zero)).lower()
        name = next((name for pattern, name in WORDS if re.search(pattern, text)), UNKNOWN)
        if name == UNKNOWN:
            return rule_without_framework(row)
        found = rule(name, **usual_blanks(name))
    recipes = RECIPES if found.name == "nemo" and found.until else SELECTIVE_RUNS if found.until == 2022 else ()
    if recipe := next((recipe for model, recipe in recipes if re.search(model, row.model, re.I)), None):
        found = replace(found, **recipe)
    if found.name == "megatron-bridge" and (container := CONTAINER.search(row.notes)) and container[1] < FUSED_EXPERTS:
        found = rule(found.name, 2026, **CORE)
    if found.uncompiled and not is_compiled(row):
        found = replace(found, software=replace(KERNELS[found.uncompiled], early_stop=found.early_stop))
    if found.name == "torchtune":  # its README: torch.compile, and the loss in parts unless a row lists what it turned on
        chunked = "chunk" in row.notes.lower() or not is_compiled(row)
        found = replace(found, software=replace(KERNELS[found.kernels], **(LOSSES["chunked"] if chunked else {})))
    if found.name == "torchtitan" and ASYNC_TP.search(row.notes):
        found = replace(found, tensor_overlap=True)
    if found.name == "composer" and STOPS_EARLY in row.notes.lower():
        found = replace(found, software=replace(found.software, early_stop=True))
    return found


def micro_of(framework: Rule, per_replica: int, hidden: int, pp: int) -> int:
    """Samples of a microbatch where the row does not say it.

    Megatron: without a pipeline all that a replica has, 16 at most. With one: 4 up to hidden 10240, 1 above.
    """
    if framework.micro:
        wanted = framework.micro
    elif pp == 1:
        wanted = min(16, per_replica)
    else:
        wanted = 4 if hidden <= 10240 else 1
    while per_replica % wanted:
        wanted -= 1
    return wanted


RECOMPUTED = (
    (r"^full", "full"),
    (r"^selective", "selective"),
    (r"^none", "none"),
    (r"not (?:stated|given|known)|unknown|unstated", ""),
    (r"\b(?:no|none|off|false|without|disabled)\b", "none"),
    (r"selective|core[-_ ]?att|attention|per[-_ ]op", "selective"),
    (r"full|uniform|block|every|all|yes|true|\bon\b|checkpoint|recomput|enabled", "full"),
)
"""First match wins."""


def recompute_of(row: Row, framework: Rule) -> tuple[str, bool]:
    """full, selective or none; and whether the row states it, in words that are known."""
    text = row.recompute.lower()
    found = next((name for pattern, name in RECOMPUTED if re.search(pattern, text)), "")
    return (found, True) if found else (framework.recompute, False)
