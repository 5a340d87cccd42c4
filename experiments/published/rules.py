"""What a framework does where a row does not say it. One rule per framework.

A row names its framework by its prefix; a row of an unknown prefix counts as Megatron-Core where it has tensor or pipeline
parallelism, and as FSDP otherwise. README.md shows this table.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from experiments.published.rows import Row
from parsim.model.catalogue.sublayers import COMPILED, EAGER, EAGER_LLAMA, UNFUSED, Software

INTERLEAVED_CHUNKS = 2
"""Where a row says that the schedule is interleaved and not how deeply. Llama 3: a layer per chunk."""

MEGATRON_2021 = replace(UNFUSED, gradient_arrays=3.0, aligned=8)
"""Every microbatch adds its gradients in 16 bits: read twice, written once. Where the channels of a head are no multiple of 8,
the products of unfused attention run at no more than half of the fp32 peak: BLOOM's rows with 108 and 150 channels show it."""

CORE = replace(COMPILED, gradient_arrays=1.3, loss_bytes=4, loss_peak=2)
"""Products add weight gradients into fp32: 1.05 times as long (SimuMax's tables of A100 and B200, 61 matched shapes). Of a
logit its softmax is kept in fp32, and becomes the gradient in place, which is copied to 16 bits (NVIDIA/Megatron-LM
megatron/core/tensor_parallel/cross_entropy.py @00611e6eeb0b)."""

TRITON = replace(EAGER, attention_work=1.65, loss_bytes=2, loss_peak=2, loss_arrays=10.0, gradient_arrays=4.0)
"""A fused loss; two metrics that each pass over all logits in fp32 (Composer evaluates LanguageCrossEntropy and
LanguagePerplexity on every microbatch). FSDP copies gradients together and divides them. The Triton kernel of 2022:
FlashAttention-2 is 1.3 to 2.5 times as fast (Dao 2023, section 4.1)."""

STOPS_EARLY = "mp_mode=default"
"""In the notes of Composer's rows: of the later tables. Their second forward stops early (torch 2.1), that of the tables with
mp_mode=PURE does not. Only the rows say so: recomputed ones of the later A100 table are 6 to 9% faster than those of the
earlier one, while rows without recomputation are alike."""

FIRST_FLASH = replace(EAGER, gradient_arrays=3.0, attention_work=2.0, activation_saved=3.0)
"""FlashAttention 1. FlashAttention-2 is 1.7 to 3 times as fast (Dao 2023, section 4.1)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Framework:
    """Rules for blanks.

    Attributes:
        name, software: what it is and runs. recompute: "full", "selective" or "none".
        zero: stage of divided states. sequence: norms and residuals divided along the sequence where tp > 1.
        precision: where the row says nothing, or doubts what it says: "bf16" (or fp16), "tf32" (fp32).
        micro: samples of a microbatch; 0: `micro_of`.
        seq: tokens of a sample. chunks: per rank, where interleaving is on and its depth is not stated.
        optimizer: one kernel, or a few per array. gather_ahead: ZeRO 1 gathers parameters while the next forward runs.
        batch, tp, pp, heads: of a row that does not state them; 0: by size, or by its notes. pp counts with tp.
        depth: chunks per rank of an interleaved schedule.
        backward_prefetch, blocking_transfers, scatter_gather, tensor_overlap, tensor_backward_overlap: as in
            `parsim.plans.plan.Plan`.
        alternate: selective recomputation is that of every second layer (torchtitan's default).
        one_array: the optimizer goes from array to array, so it holds temporary copies of one at a time.
        host: its time to launch kernels counts.
        bf16_gradients: `gradient_arrays` of a row that states bf16, where gradients are added up in fp32; 0: as in fp16.
        spares_layers: where a plan would not fit, activations go to the host or single modules run again, never whole layers.
        softmax_limits: its fused softmax takes some numbers of heads alone (`software.softmax_is_fused`).
        scales_fp16: in fp16 the loss is scaled, and gradients are divided again and looked through for infinities.
        clip: gradients are clipped by the norm of all of them: the default, or in the files, of every framework here.
        repeats_sums: full recomputation repeats the sums of tensor parallelism, whole layers at once.
        remainders: of master weights only what the weights in bf16 lack is kept.
    """

    name: str
    software: Software = MEGATRON_2021
    recompute: str = "full"
    precision: str = "bf16"
    bf16_gradients: float = 0.0
    host: bool = True
    zero: int = 0
    sequence: bool = False
    micro: int = 0
    seq: int = 2048
    chunks: int = 1
    bucket_bytes: int = 2**40
    optimizer: str = "adam_fused"
    spares_layers: bool = False
    repeats_sums: bool = True
    remainders: bool = False
    gather_ahead: bool = False
    backward_prefetch: bool = True
    blocking_transfers: bool = False
    scatter_gather: bool = False
    alternate: bool = False
    one_array: bool = False
    tensor_overlap: bool = False
    tensor_backward_overlap: bool = False
    clip: bool = True
    softmax_limits: bool = False
    scales_fp16: bool = True
    batch: int = 0
    tp: int = 0
    pp: int = 1
    heads: int = 0
    depth: int = INTERLEAVED_CHUNKS


MEGATRON_2020 = Framework(
    name="Megatron-LM 2020",
    recompute="full",
    seq=1024,
    blocking_transfers=True,
    scatter_gather=True,
    softmax_limits=True,
)
MEGATRON = Framework(
    name="Megatron-LM 2021 and Megatron-DeepSpeed",
    recompute="full",
    bf16_gradients=5.0,
    blocking_transfers=True,
    scatter_gather=True,
    softmax_limits=True,
)
"""In bf16 both add a microbatch's gradients to an array in fp32 (2 bytes read, 4 read, 4 written): Megatron-LM's arguments.py
turns accumulate_allreduce_grads_in_fp32 on, and DeepSpeed has a BF16_Optimizer."""
MEGATRON_SELECTIVE = Framework(
    name="Megatron-LM 2022",
    recompute="full",
    sequence=True,
    blocking_transfers=True,
    scatter_gather=True,
    softmax_limits=True,
    tensor_backward_overlap=True,
)
"""Sums of gradients run beside gradients of weights unless no_async_tensor_model_parallel_allreduce is set
(megatron/mpu/layers.py @02bb1f5c86fc)."""
MEGATRON_CORE = Framework(
    name="Megatron-Core and NeMo",
    software=CORE,
    recompute="none",
    zero=1,
    sequence=True,
    micro=1,
    seq=4096,
    bucket_bytes=80 * 2**20,
    gather_ahead=True,
    scatter_gather=True,
    tensor_overlap=True,
)
"""NVIDIA's recipes turn tp_comm_overlap on, and rows of megatron-h100 say so."""
NEMO = replace(MEGATRON_CORE, remainders=True)
"""Of 24.07: its distributed Adam has store_param_remainders where weights are bf16 and the optimizer fp32 (NVIDIA/NeMo
nemo/collections/nlp/models/language_modeling/megatron_base_model.py, setup_optimization)."""
BRIDGE = replace(MEGATRON_CORE, spares_layers=True)
"""Its recipes repeat single modules (recompute_modules: mla_up_proj, mlp, moe_act), or keep activations on the host
(cpu_offloading_num_layers, of Llama 3 70B under FSDP), and never run whole layers again (NVIDIA-NeMo/Megatron-Bridge
scripts/performance/configs: llama3, qwen3 and deepseek _workload_base_configs.py @00919dcf1fe1, @01b2977e518f, @042641823051).
Both are taken to cost nothing."""
BLOOM = replace(MEGATRON, name="Megatron-DeepSpeed with ZeRO 1", zero=1, heads=96)
"""Heads: those of GPT-3, from whose shape its authors began, where they divide the hidden size."""
COMPOSER = Framework(
    name="Composer FSDP", optimizer="adamw", one_array=True, software=TRITON, recompute="none", zero=3, backward_prefetch=False
)
"""Its DecoupledAdamW runs operation by operation (composer/optim/decoupled_weight_decay.py)."""
TITAN = Framework(
    name="torchtitan FSDP2",
    software=replace(COMPILED, gradient_arrays=3.0),
    recompute="selective",
    zero=3,
    sequence=True,
    micro=2,
    seq=8192,
    alternate=True,
    gather_ahead=True,
)
INTERNEVO = Framework(name="InternEvo", software=FIRST_FLASH, recompute="none", zero=1, bucket_bytes=512 * 2**20)
FULL_PRECISION = replace(UNFUSED, dropout=False, score_arrays=5.0, residual_arrays=3.0, gradient_arrays=6.0, loss_arrays=10.0)
"""fp32 with products in TF32, the default of NVIDIA's containers. Megatron's fused softmax takes 16-bit scores alone, so mask
and softmax are torch's own. They pass over the scores 4.5 times forward and 8.2 times backward (NeuSight's timings in training
graphs on A100 and H100: filling 2.3 and 2.3, softmax 2.2 and 5.9), so 5 times and half as much again. Attention has no dropout:
Sailor's megatron/model/gpt_neo_model.py, and the configs of OPT-350M and GPT-Neo."""
SAILOR = replace(
    MEGATRON,
    name="Megatron-DeepSpeed, no recomputation",
    softmax_limits=False,
    recompute="none",
    precision="tf32",
    software=FULL_PRECISION,
    micro=1,
)
"""No row states its precision. The stated memory peaks do. The predicted ones are 0.7 to 1.0 of them in fp32 without attention
dropout (0.9 to 1.0 with 8 samples), and half of them in 16 bits."""
SIMUMAX = replace(MEGATRON_CORE, tensor_overlap=False, name="Megatron-Core under SimuMax", seq=4096, zero=1)
EAGER_DDP = Framework(name="PyTorch DDP with FlashAttention", software=replace(EAGER, dropout=True), recompute="none", micro=8)

LAUNCHER = replace(
    MEGATRON_CORE, name="NeMo 23.07", seq=2048, recompute="selective", software=replace(UNFUSED, gradient_arrays=1.3)
)
"""Its recipes state selective recomputation and a fused softmax (gpt3/40b.yaml, bert/4b.yaml), so attention is unfused."""

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

ASYNC_TP = re.compile(r"async[-_ ]?(?:tp|tensor)", re.IGNORECASE)
"""In the notes of torchtitan's rows: pieces of the collectives run beside the products."""

FRAMEWORKS: dict[str, Framework] = {
    "vtrain-multi": MEGATRON,
    "korthikanti": MEGATRON_SELECTIVE,
    "megatron-mfu2022": MEGATRON_SELECTIVE,
    "megatron-sep2020": MEGATRON_2020,
    "megatron-sc21": MEGATRON,
    "megatron-jan2021": MEGATRON,
    "megatron-readme175b": MEGATRON,
    "megatron-h100": MEGATRON_CORE,
    "megatron": MEGATRON_CORE,
    "mtnlg": MEGATRON,
    "bloom": BLOOM,
    "megds": MEGATRON,
    "mosaic": COMPOSER,
    "titan": TITAN,
    "internevo": INTERNEVO,
    "llama1": replace(COMPOSER, name="LLaMA's own, FSDP", micro=2),
    "llama3": replace(
        MEGATRON_CORE,
        name="Llama 3's own",
        tensor_overlap=False,
        software=replace(CORE, activation_saved=1.0),
        zero=1,
        seq=8192,
        depth=8,
    ),
    "nemo": MEGATRON_CORE,
    "nemo2407": NEMO,
    "nemo-bridge": BRIDGE,
    "nemo-launcher": LAUNCHER,
    "sailor": SAILOR,
    "simumax": SIMUMAX,
    "flashattn": EAGER_DDP,
}
"""By the longest beginning of a row's id that stands here."""


WITHOUT: dict[str, Callable[[Framework], Framework]] = {
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
    "metrics of Composer": lambda rule: replace(rule, software=replace(rule.software, loss_arrays=2.0)),
    "unfused AdamW of Composer": lambda rule: replace(rule, optimizer="adam_fused", one_array=False),
    "overlap of tensor parallelism": lambda rule: replace(rule, tensor_overlap=False),
    "sums beside weight gradients": lambda rule: replace(rule, tensor_backward_overlap=False),
    "layers spared by recipes": lambda rule: replace(rule, spares_layers=False),
    "early stop, A100": lambda rule: replace(rule, software=replace(rule.software, early_stop=False)),
    "early stop, H100": lambda rule: replace(rule, software=replace(rule.software, early_stop=False)),
    "sequence parallelism": lambda rule: replace(rule, sequence=False),
    "host launch rate": lambda rule: replace(rule, host=False),
    "gradients of bf16 in fp32": lambda rule: replace(rule, bf16_gradients=0.0),
    "limits of the fused softmax": lambda rule: replace(rule, softmax_limits=False),
    "loss scaling": lambda rule: replace(rule, scales_fp16=False),
    "clipping": lambda rule: replace(rule, clip=False),
    "kernels of biases": lambda rule: replace(rule, software=replace(rule.software, bias_kernels=False)),
    "passes of the loss": lambda rule: replace(rule, software=replace(rule.software, loss_arrays=8.0)),
    "fp32 of Sailor": lambda rule: replace(rule, precision="bf16", software=MEGATRON_2021),
}
"""A piece of the model, and the rule without it: what it is worth."""


def framework_of(row: Row) -> Framework:
    """The rule for a row's blanks."""
    known = [prefix for prefix in FRAMEWORKS if row.id.startswith(prefix)]
    if known:
        found = FRAMEWORKS[max(known, key=len)]
        recipes = RECIPES if found is LAUNCHER else SELECTIVE_RUNS if found is MEGATRON_SELECTIVE else ()
        if recipe := next((recipe for model, recipe in recipes if re.search(model, row.model, re.I)), None):
            found = replace(found, **recipe)
        if found.name.startswith("torchtitan") and "compile" not in row.notes.lower():
            found = replace(found, software=replace(EAGER_LLAMA, gradient_arrays=3.0))
        if found.name.startswith("torchtitan") and ASYNC_TP.search(row.notes):
            found = replace(found, tensor_overlap=True)
        early = found.name.startswith("torchtitan") or (found is COMPOSER and STOPS_EARLY in row.notes.lower())
        return replace(found, software=replace(found.software, early_stop=early))
    return MEGATRON_CORE if max(row.tp or 1, row.pp or 1) > 1 else COMPOSER


def micro_of(framework: Framework, per_replica: int, hidden: int, pp: int) -> int:
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


def recompute_of(row: Row, framework: Framework) -> tuple[str, bool]:
    """full, selective or none; and whether the row states it, in words that are known."""
    text = row.recompute.lower()
    found = next((name for pattern, name in RECOMPUTED if re.search(pattern, text)), "")
    return (found, True) if found else (framework.recompute, False)
