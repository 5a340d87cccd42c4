"""What the software that trains does beside the products: one row per framework, with its source.

A question names the framework of its training loop (`[software]` of a run file). The row fills in what the question leaves
open: kernels, switches of a plan by hand, and what its host adds. Without a framework, transformers by name on shipped GPUs
are priced as the most likely one runs them (`plausible_frameworks`), and the answer says which that is.

Leaves out: what a user of a framework turns on beside its defaults.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

from parsim.errors import ModelError
from parsim.hardware.cluster import Cluster
from parsim.model.catalogue.sublayers import COMPILED, EAGER, EAGER_LLAMA, FUSED_SOFTMAX_KEYS, LOSSES, UNFUSED, Shape, Software
from parsim.model.component import CHANNELS_LAST, FULL_BYTES, NORM_ADD_RELU, NORM_RELU, NORM_RELU_OF_SUMS, Operator
from parsim.model.divided import Dispatcher, ExpertRouting
from parsim.model.formats import number_format
from parsim.model.model import Model
from parsim.registry import Registry

# What frameworks do with convolutional networks: the order of their arrays, and what is one kernel with a batch norm.
#
# A Model is recorded as eager PyTorch runs it: batch norm, addition and ReLU are kernels of their own, and arrays lie as
# (samples, channels, height, width). `run_by` rewrites its operators as another library launches them. Pairs are found by their
# sizes, because operators are counted and not linked: each ReLU belongs to a batch norm with as many elements, where there is
# one, and each addition to such a pair.
#
# Leaves out: what is kept for the backward, which hardly differs; norms that keep a part of their input on the chip between
# their two passes; ReLU inside a convolution.


BATCH_NORM = "native_batch_norm"
FUSED = ("relu", "relu_", "add", "add_")


@dataclass(frozen=True, slots=True, kw_only=True)
class ConvolutionSoftware:
    """How a framework runs a convolutional network.

    Attributes:
        channels_last: arrays lie as (samples, height, width, channels) in 16 bits. in_full: in 32 bits, too.
        fused_norms: batch norm, addition of the residual and ReLU are one kernel. summed: a convolution makes the sums of the
            norm and ReLU behind it (cuDNN's fused statistics; not where a residual is added).
    """

    channels_last: bool = False
    in_full: bool = False
    fused_norms: bool = False
    summed: bool = False


def run_by(model: Model, software: ConvolutionSoftware, precision: str) -> Model:
    """The Model with the operators that this software launches in a precision."""
    last = software.in_full if number_format(precision).element_bytes == FULL_BYTES else software.channels_last
    components = (
        replace(component, operators=_operators(component.operators, replace(software, channels_last=last)))
        for component in model.components
    )
    return replace(model, components=tuple(components))


def convolutions(model: Model) -> int:
    """How many of its operators are convolutions."""
    return sum(each.count for component in model.components for each in component.operators if each.kind == "convolution")


def _operators(operators: Sequence[Operator], software: ConvolutionSoftware) -> tuple[Operator, ...]:
    if software.channels_last:
        operators = [replace(each, function=CHANNELS_LAST) if each.kind == "convolution" else each for each in operators]
    if software.fused_norms:
        operators = _fused(operators)
    if software.summed:
        operators = [replace(each, function=NORM_RELU_OF_SUMS) if each.function == NORM_RELU else each for each in operators]
    return tuple(operators)


def _fused(operators: Sequence[Operator]) -> list[Operator]:
    """With one operator for each batch norm and the ReLU, or addition and ReLU, of as many elements; no counts of batches."""
    left = {name: _counts(operators, name) for name in ("relu", "add")}
    found: list[Operator] = []
    for operator in operators:
        size = dict(operator.shape).get("elements", 0)
        if operator.batch == "none" and operator.function in FUSED:
            continue  # the number of batches that a norm has seen
        if operator.function != BATCH_NORM:
            found.append(operator)
            continue
        pairs = min(operator.count, left["relu"].get(size, 0))
        triples = min(pairs, left["add"].get(size, 0))
        for name, count in ((NORM_ADD_RELU, triples), (NORM_RELU, pairs - triples), (BATCH_NORM, operator.count - pairs)):
            if count:
                found.append(replace(operator, function=name, count=count))
        left["relu"][size] = left["relu"].get(size, 0) - pairs
        left["add"][size] = left["add"].get(size, 0) - triples
    return [replace(each, count=count) for each in found if (count := _kept(each, left))]


def _counts(operators: Sequence[Operator], name: str) -> dict[int, int]:
    """How many kernels of that name there are, by their elements."""
    counts: dict[int, int] = {}
    for operator in operators:
        if operator.batch != "none" and operator.function.rstrip("_") == name:
            size = dict(operator.shape).get("elements", 0)
            counts[size] = counts.get(size, 0) + operator.count
    return counts


def _kept(operator: Operator, left: dict[str, dict[int, int]]) -> int:
    """How many of an operator no norm has taken."""
    counts = left.get(operator.function.rstrip("_"))
    if counts is None:
        return operator.count
    size = dict(operator.shape).get("elements", 0)
    kept = min(operator.count, counts.get(size, 0))
    counts[size] = counts.get(size, 0) - kept
    return kept


# Kernels of transformers, and frameworks.


MEGATRON_2021 = replace(UNFUSED, gradient_arrays=3.0, aligned=8)
"""Every microbatch adds its gradients in 16 bits: read twice, written once. Where the channels of a head are no multiple of 8,
the products of unfused attention run at no more than half of the fp32 peak: BLOOM's rows with 108 and 150 channels show it."""

CORE = replace(COMPILED, gradient_arrays=1.3, loss_bytes=4, loss_peak=2, expert_bias_arrays=14.0)
"""Products add weight gradients into fp32: 1.05 times as long (SimuMax's tables of A100 and B200, 61 matched shapes). Of a
logit its softmax is kept in fp32, and becomes the gradient in place, which is copied to 16 bits (NVIDIA/Megatron-LM
megatron/core/tensor_parallel/cross_entropy.py @00611e6eeb0b). The bias of experts times the router's weight is fp32,
added, joined and cast again (megatron-core 0.15.0, TEGroupedMLP._apply_bias)."""

TRITON = replace(EAGER, attention_work=1.65, loss_bytes=2, loss_peak=2, loss_arrays=10.0, gradient_arrays=4.0)
"""A fused loss; two metrics that each pass over all logits in fp32 (Composer evaluates LanguageCrossEntropy and
LanguagePerplexity on every microbatch). FSDP copies gradients together and divides them. The Triton kernel of 2022:
FlashAttention-2 is 1.3 to 2.5 times as fast (Dao 2023, section 4.1)."""

FIRST_FLASH = replace(EAGER, gradient_arrays=3.0, attention_work=2.0, activation_saved=3.0)
"""FlashAttention 1. FlashAttention-2 is 1.7 to 3 times as fast (Dao 2023, section 4.1)."""

LLM_C = replace(COMPILED, gradient_arrays=1.3, **LOSSES["fused"])
"""One kernel reads the logits and leaves their gradient (karpathy/llm.c llmc/fused_classifier.cuh); products add gradients.
Without effects GPT-2 124M to 1558M on 8 A100 and 8 H100 are -7 to +3% off the seconds of scripts/run_gpt2_*.sh, and -5 to +19%
with torch's loss."""

FULL_PRECISION = replace(UNFUSED, dropout=False, score_arrays=5.0, residual_arrays=3.0, gradient_arrays=6.0, loss_arrays=10.0)
"""fp32 with products in TF32, the default of NVIDIA's containers. Megatron's fused softmax takes 16-bit scores alone, so mask
and softmax are torch's own. They pass over the scores 4.5 times forward and 8.2 times backward (NeuSight's timings in training
graphs on A100 and H100: filling 2.3 and 2.3, softmax 2.2 and 5.9), so 5 times and half as much again. Attention has no dropout:
Sailor's megatron/model/gpt_neo_model.py, and the configs of OPT-350M and GPT-Neo."""

KERNELS: Registry[Software] = Registry(
    "kernels",
    Software,
    {
        "fused": COMPILED,
        "eager": EAGER_LLAMA,
        "unfused-attention": UNFUSED,
        "megatron-2021": MEGATRON_2021,
        "megatron-core": CORE,
        "megatron-core-unfused": replace(UNFUSED, gradient_arrays=1.3),
        "megatron-fp32": FULL_PRECISION,
        "composer-triton": TRITON,
        "composer": replace(TRITON, attention_work=1.0),
        "fsdp": replace(EAGER_LLAMA, gradient_arrays=3.0),
        "fsdp-compiled": replace(COMPILED, gradient_arrays=3.0),
        "flash-1": FIRST_FLASH,
        "ddp": replace(EAGER, dropout=True),
        "xla-unfused": replace(UNFUSED, bias_kernels=False, score_arrays=5.0),
        "llama3": replace(CORE, activation_saved=1.0),
        "mlperf": replace(COMPILED, cast_arrays=0.0),
        "llm.c": LLM_C,
    },
    error=ModelError,
)
"""What `args = { kernels = ... }` of a model by name chooses, and what a Framework runs."""

Recomputation = Literal["full", "selective", "none"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Framework:
    """What one framework does by default, or in the configurations that it publishes.

    Attributes:
        name: of the row. source: where it was read or measured. until: the last year of this version; 0: still current.
        earlier: versions before it, the oldest first.
        kernels: a row of `KERNELS`. uncompiled: likewise, without torch.compile; "": the same.
        recompute: by default. alternate: selective recomputation is that of every second layer.
        early_stop: as in `Software`. repeats_sums: full recomputation repeats the sums of tensor parallelism, whole layers at
            once. spares_layers: where a plan would not fit, activations go to the host or into 8 bits, or single modules run
            again, never whole layers.
        zero: stage of divided states. sequence: norms and residuals divided along the sequence where tp > 1.
        bucket_bytes: of gradients. optimizer: one kernel, or a few per array. one_array: it goes from array to array, so it
            holds temporary copies of one at a time. remainders: of master weights only what those in bf16 lack is kept.
        gather_ahead, backward_prefetch, blocking_transfers, scatter_gather, tensor_overlap, tensor_backward_overlap: as in
            `parsim.plans.plan.Plan`. clip: gradients are clipped by the norm of all of them.
        softmax_limits: its fused softmax takes some numbers of heads alone (`sublayers.softmax_is_fused`).
        scales_fp16: in fp16 the loss is scaled, and gradients are divided again and looked through for infinities.
        bf16_gradients: `gradient_arrays` in bf16, where gradients are added up in fp32; 0: as in fp16.
        full_gradients: beside weights in half precision it keeps gradients in fp32.
        dispatcher, expert_overlap, delay_weight_gradients: of experts, as `parsim.model.divided.ExpertRouting` has them.
        graphs: how the names of GPUs begin on which its layers are launched as CUDA graphs; "": of all.
        cut: how it counts out layers into stages, a row of `parsim.plans.stages.CUTS`; "": as the plan has them.
        axes: of a mesh beside dp, which its plans may have. zero_stages, orders: that it has; no orders: any.
        launches: times as long as plain eager torch takes on the host for each kernel; gathering_launches: likewise where
            parameters may be gathered (ZeRO 3); 0: the same. step_s: of a step of several nodes, in which nothing of the plan
            runs.
        convolution: what it does with convolutional networks; None: nobody runs them with it.
    """

    name: str
    source: str
    until: int = 0
    earlier: tuple[Framework, ...] = ()
    kernels: str = "fused"
    uncompiled: str = ""
    recompute: Recomputation = "none"
    alternate: bool = False
    early_stop: bool = False
    repeats_sums: bool = True
    spares_layers: bool = False
    zero: int = 0
    cut: str = ""
    axes: tuple[str, ...] = ("pp", "tp", "cp", "ep")
    zero_stages: tuple[int, ...] = (0, 1, 2, 3)
    orders: tuple[str, ...] = ()
    sequence: bool = False
    bucket_bytes: int = 2**40
    optimizer: str = "adam_fused"
    one_array: bool = False
    remainders: bool = False
    gather_ahead: bool = False
    backward_prefetch: bool = True
    blocking_transfers: bool = False
    scatter_gather: bool = False
    tensor_overlap: bool = False
    tensor_backward_overlap: bool = False
    clip: bool = True
    softmax_limits: bool = False
    scales_fp16: bool = True
    bf16_gradients: float = 0.0
    full_gradients: bool = False
    dispatcher: Dispatcher = "all_to_all"
    expert_overlap: bool = False
    delay_weight_gradients: bool = False
    graphs: tuple[str, ...] = ()
    launches: float = 1.0
    gathering_launches: float = 0.0
    step_s: float = 0.0
    convolution: ConvolutionSoftware | None = None

    @property
    def routing(self) -> ExpertRouting:
        """How its tokens reach experts."""
        return ExpertRouting(dispatcher=self.dispatcher, overlapped=self.expert_overlap, delayed=self.delay_weight_gradients)

    @property
    def version(self) -> str:
        """`megatron`; `megatron of 2021`."""
        return f"{self.name} of {self.until}" if self.until else self.name

    def kernels_of(self, compiled: bool) -> str:
        """The row of `KERNELS` with torch.compile or without."""
        return self.kernels if compiled else self.uncompiled or self.kernels

    def launches_on(self, gpu: str, *, gathers: bool) -> float:
        """`launches` with a GPU; 0 where a graph launches all of a layer. `gathers`: parameters may be gathered."""
        if gpu.startswith(self.graphs):
            return 0.0
        return self.gathering_launches if gathers and self.gathering_launches else self.launches


MEGATRON_2020 = Framework(
    name="megatron",
    source="NVIDIA/Megatron-LM @02bb1f5c86fc; Narayanan et al. 2021",
    until=2020,
    kernels="megatron-2021",
    recompute="full",
    cut="megatron",
    axes=("pp", "tp"),
    zero_stages=(0,),
    orders=("1f1b", "interleaved"),
    blocking_transfers=True,
    scatter_gather=True,
    softmax_limits=True,
)
"""Its distributed optimizer (ZeRO 1) came in 2022: --use-distributed-optimizer, docs/distrib_optimizer.md."""
MEGATRON_OF_2021 = replace(MEGATRON_2020, until=2021, bf16_gradients=5.0, full_gradients=True)
"""In bf16 a microbatch's gradients are added to an array in fp32 (2 bytes read, 4 read, 4 written): Megatron-LM's arguments.py
turns accumulate_allreduce_grads_in_fp32 on, and DeepSpeed has a BF16_Optimizer."""
MEGATRON_2022 = replace(
    MEGATRON_2020,
    source="Korthikanti et al. 2022",
    until=2022,
    zero_stages=(0, 1),
    sequence=True,
    tensor_backward_overlap=True,
)
"""Sums of gradients run beside gradients of weights unless no_async_tensor_model_parallel_allreduce is set
(megatron/mpu/layers.py @02bb1f5c86fc)."""
MEGATRON_CORE = Framework(
    name="megatron",
    source="NVIDIA's recipes, and notes of Megatron-LM's own table of H100 rows: tp_comm_overlap",
    earlier=(MEGATRON_2020, MEGATRON_OF_2021, MEGATRON_2022),
    kernels="megatron-core",
    cut="megatron",
    zero=1,
    orders=("1f1b", "interleaved"),
    sequence=True,
    bucket_bytes=80 * 2**20,
    gather_ahead=True,
    scatter_gather=True,
    tensor_overlap=True,
    full_gradients=True,
    step_s=0.022,
)
"""Per step: Llama 3.1 8B on 64 to 512 Blackwell GPUs (MLPerf v5.1) lacks 10 to 22 ms, on one node nothing.

accumulate_allreduce_grads_in_fp32 is on in bf16 (megatron/training/arguments.py). Of the peaks that SimuMax measured of dense
models, those predicted without fp32 gradients are up to 27% too small, and with them within 5%. ZeRO 2 and 3 are its
--data-parallel-sharding-strategy optim_grads and optim_grads_params (--use-megatron-fsdp)."""
NEMO = replace(
    MEGATRON_CORE,
    name="nemo",
    source="NVIDIA/NeMo megatron_base_model.py, setup_optimization: store_param_remainders in bf16, from 24.07",
    remainders=True,
    full_gradients=False,
    earlier=(
        replace(
            MEGATRON_CORE,
            name="nemo",
            source="NeMo launcher 23.07, gpt3/40b.yaml and bert/4b.yaml: selective recomputation and a fused softmax; "
            "gpt3/175b.yaml @10f909107aa9 and @0c6c960da12a: transformer_engine and ub_tp_comm_overlap are off",
            until=2023,
            earlier=(),
            kernels="megatron-core-unfused",
            recompute="selective",
            tensor_overlap=False,
        ),
    ),
)
BRIDGE_2026 = replace(
    MEGATRON_CORE,
    name="megatron-bridge",
    source="NVIDIA-NeMo/Megatron-Bridge scripts/performance/configs @00919dcf1fe1, @01b2977e518f, @042641823051",
    until=2026,
    earlier=(),
    spares_layers=True,
    full_gradients=False,
    dispatcher="hybridep",
    graphs=("gb",),
)
"""Containers 25.09 to 26.04. Of experts its recipes say moe_flex_dispatcher_backend = "hybridep", but for some of B200 and
B300, and cuda_graph_impl with Grace hosts, seldom with others: none of 235B on H100, B200 and B300 has one (configs/qwen
@01b2977e518f, configs/deepseek @042641823051). Those of Grace launch experts outside of graphs, and are taken for whole.
Its recipes repeat single modules (recompute_modules: mla_up_proj, mlp, moe_act), or keep activations on the host
(cpu_offloading_num_layers, of Llama 3 70B under FSDP), and never run whole layers again. Both are taken to cost nothing. Its
recipes for performance, and NeMo's, set grad_reduce_in_fp32 = False."""
BRIDGE = replace(
    BRIDGE_2026,
    source="NVIDIA-NeMo/Megatron-Bridge release 0.5.1: CUDA graphs of whole steps, and fused grouped products",
    until=0,
    earlier=(BRIDGE_2026,),
    graphs=("",),
)
"""Containers from 26.06 on. What fused products of experts save is an effect of published runs and in no price."""
MEGATRON_DEEPSPEED = replace(
    MEGATRON_OF_2021,
    name="megatron-deepspeed",
    source="bigscience-workshop/Megatron-DeepSpeed @038bddcb6dfb",
    until=0,
    zero_stages=(0, 1),
)
FSDP = Framework(
    name="fsdp",
    source="torch FSDP and FSDP2: parameters of the next layer are gathered while one computes",
    kernels="fsdp-compiled",
    uncompiled="fsdp",
    zero=3,
    axes=("tp", "cp"),
    zero_stages=(0, 2, 3),
    sequence=True,
    early_stop=True,
    gather_ahead=True,
    alternate=True,
)
"""NO_SHARD, SHARD_GRAD_OP and FULL_SHARD; with DTensor's tensor parallelism, and ring attention. Attention is one kernel, which
keeps no scores: recomputing a part is every second layer (fms_fsdp/policies/ac_handler.py; torchtune's ac_option 2)."""
TITAN = replace(
    FSDP,
    name="torchtitan",
    source="pytorch/torchtitan, torchtitan/config: selective recomputation of every second layer",
    recompute="selective",
    cut="torchtitan",
    axes=("pp", "tp", "cp", "ep"),
    orders=("1f1b", "gpipe", "interleaved", "zero-bubble"),
    zero_stages=(0, 1, 2, 3),
)
COMPOSER_2023 = Framework(
    name="composer",
    source="mosaicml/composer: FSDP with backward_prefetch BACKWARD_POST, composer/optim/decoupled_weight_decay.py",
    until=2023,
    kernels="composer-triton",
    zero=3,
    axes=(),
    zero_stages=(0, 2, 3),
    backward_prefetch=False,
    optimizer="adamw",
    one_array=True,
)
"""Its DecoupledAdamW runs operation by operation."""
COMPOSER = replace(COMPOSER_2023, until=0, kernels="composer", early_stop=True, earlier=(COMPOSER_2023,))
"""Its second forward stops early from torch 2.1 on: recomputed rows of the later A100 table are 6 to 9% faster than those of
the earlier one, while rows without recomputation are alike."""
HAI_LLM = replace(
    BRIDGE,
    name="hai-llm",
    source="DeepSeek-V3 report, arXiv 2412.19437 sections 3.2.1 to 3.2.3: DualPipe runs the exchange of experts beside the "
    "products of another microbatch and gradients of weights apart; norms and up-projections alone run again",
    earlier=(),
    tensor_overlap=False,
    orders=("1f1b", "zero-bubble"),
    expert_overlap=True,
    delay_weight_gradients=True,
)
DDP = Framework(
    name="ddp",
    source="torch DistributedDataParallel, eager",
    kernels="fsdp-compiled",
    uncompiled="ddp",
    axes=(),
    zero_stages=(0,),
    bucket_bytes=25 * 2**20,
    convolution=ConvolutionSoftware(),
)
EXAMPLES = replace(
    DDP,
    name="deeplearningexamples",
    source="NVIDIA/DeepLearningExamples PyTorch/Classification/ConvNets/configs.yml @097c7ff917b7: nhwc under AMP alone",
    clip=False,
    convolution=ConvolutionSoftware(channels_last=True),
    kernels="unfused-attention",
    uncompiled="",
)
MXNET_2020 = Framework(
    name="mxnet",
    source="apache/mxnet: BatchNormAddRelu; Horovod's fusion threshold of NVIDIA's configs",
    until=2020,
    axes=(),
    zero_stages=(0,),
    bucket_bytes=64 * 2**20,
    optimizer="sgd_momentum",
    clip=False,
    convolution=ConvolutionSoftware(channels_last=True, in_full=True, fused_norms=True),
)
MXNET = replace(
    MXNET_2020,
    source="mlcommons/training_results_v2.0 NVIDIA/benchmarks/resnet/implementations/mxnet config_DGXA100.sh @a6ae3e16d97b: "
    "NETWORK resnet-v1b-stats-fl, in which convolutions make the sums of norms",
    until=0,
    earlier=(MXNET_2020,),
    convolution=ConvolutionSoftware(channels_last=True, in_full=True, fused_norms=True, summed=True),
)
DEEPSPEED = Framework(
    name="deepspeed", source="DeepSpeed's config: ZeRO stages", kernels="fsdp-compiled", uncompiled="fsdp", zero=2, axes=()
)
TRAINER = replace(
    DEEPSPEED,
    name="hf-trainer",
    source="transformers.Trainer: eager modules, gradient checkpointing by layer; accelerate/utils/dataclasses.py and "
    "parallelism_config.py: tp_size, cp_size beside FSDP",
    axes=("tp", "cp"),
    zero=0,
    launches=4.0,
    gathering_launches=20.0,
)
"""Host: Qwen 1.8B on an A100 takes 1.0 s for 8 recomputed microbatches of 256 and of 512 tokens alike with LoRA, 5 ms per
layer; with all parameters 2.2 s, 11 ms per layer, as its script has ZeRO 3 of DeepSpeed. Source: QwenLM/Qwen README.md."""
TORCHTUNE = replace(FSDP, name="torchtune", source="pytorch/torchtune recipes: full_finetune_distributed", axes=("tp",))
LLM_C_LOOP = Framework(
    name="llm.c",
    source="karpathy/llm.c train_gpt2.cu: kernels of its own, fused with the loss; -z 1 divides the optimizer's states",
    kernels="llm.c",
    zero=1,
    axes=(),
    zero_stages=(0, 1),
)
MAXTEXT = replace(
    FSDP,
    graphs=("",),
    name="maxtext",
    source="AI-Hypercomputer/maxtext: XLA compiles the whole step, fsdp axes of the mesh; configs/base.yml: remat_policy full",
    uncompiled="",
    recompute="full",
    alternate=False,
    cut="megatron",
    axes=("pp", "tp", "cp", "ep"),
    zero_stages=(0, 1, 2, 3),
)
"""XLA removes what nothing reads, as the last product of a second forward (`early_stop`). Other loops in JAX are taken to
recompute as MaxText does by default."""
INTERNEVO = Framework(
    name="internevo",
    source="InternLM/InternEvo with FlashAttention 1",
    kernels="flash-1",
    cut="megatron",
    zero=1,
    axes=("pp", "tp", "cp"),
    bucket_bytes=512 * 2**20,
)

TENSORFLOW = replace(
    DDP,
    name="tensorflow",
    source="NVIDIA/DeepLearningExamples TensorFlow2 BERT: XLA, LAMB, attention not fused",
    kernels="xla-unfused",
    uncompiled="",
)
MLPERF = replace(
    DDP,
    name="mlperf",
    source="mlcommons/training_results, NVIDIA's BERT: fused attention, norms and activations that write 8 bits, CUDA graphs, "
    "distributed LAMB",
    kernels="mlperf",
    uncompiled="",
    zero_stages=(0, 1),
    bucket_bytes=2**40,
    graphs=("",),
)

FRAMEWORKS: Registry[Framework] = Registry(
    "framework",
    Framework,
    {
        row.name: row
        for row in (
            MEGATRON_CORE,
            MEGATRON_DEEPSPEED,
            NEMO,
            BRIDGE,
            HAI_LLM,
            TITAN,
            FSDP,
            COMPOSER,
            DEEPSPEED,
            TRAINER,
            TORCHTUNE,
            DDP,
            LLM_C_LOOP,
            EXAMPLES,
            MXNET,
            MAXTEXT,
            replace(MAXTEXT, name="jax", source="XLA compiles the whole step, as in MaxText"),
            INTERNEVO,
            TENSORFLOW,
            MLPERF,
        )
    },
    error=ModelError,
)
"""What `[software] framework = ...` of a run file names."""


def framework_of(name: str, year: int | None = None) -> Framework:
    """The row of a framework, in the version of a year; without one, the current version.
    Raises ModelError: no such framework."""
    row = FRAMEWORKS[name]
    if year is None:
        return row
    return next((version for version in row.earlier if year <= version.until), row)


SOFTWARE_OF = {"v100": 2020, "p100": 2020, "a100": 2021, "a800": 2021, "a30": 2021}
"""The year of the software on a GPU, by the first word of its name, where the model does not say that it is younger. Without an
entry: the current one. Fused attention came to Megatron-LM and to fine-tuning with the models of 2023 (`is_recent`)."""
ONE_NODE = 8
"""GPUs of a node: before 2023, what trained on several was written for Megatron. Of published transformers with divided states,
48 of 80 rows on up to 8 GPUs are FSDP's, and 36 of 229 on more."""
STATE_BYTES = 18
"""Per parameter, where states are not divided: weights and gradients in 16 bits, and 14 bytes of the optimizer."""


def is_recent(shape: Shape, keys: int = 0) -> bool:
    """Whether a model is of 2023 or later: gated or with experts, as Llama, Qwen, Mixtral and DeepSeek, or with more `keys`
    per query than Megatron's softmax of 2021 takes."""
    return shape.gated or bool(shape.experts) or keys > FUSED_SOFTMAX_KEYS


@dataclass(frozen=True, slots=True, kw_only=True)
class Guess:
    """Attributes:
    frameworks: that may have written a loop, the most likely first. by: what speaks for that one.
    """

    frameworks: tuple[Framework, ...]
    by: str


def plausible_frameworks(
    shape: Shape,
    gpu: str,
    *,
    devices: int,
    memory_bytes: float,
    divided: str,
    zero: int | None,
    selective: bool = False,
    low: bool = False,
    keys: int = 0,
) -> Guess:
    """The frameworks that may have written a loop of which no more than this is known.

    Divided parameters are FSDP's, and torchtitan's where something else is divided too, where recomputation is selective, or
    products are in 8 bits. Otherwise what is divided, experts and 8 bits are Megatron's. Whole states are those of DDP; on one
    GPU recent models are fine-tuned, most often by transformers.Trainer. BERT has MLPerf's kernels on GPUs after A100. `gpu`: a
    part by name, of which so many train. `divided`: what is along tp, pp, cp or ep, in words; "": nothing. `zero`: stage; None:
    not known. `selective`: parts of layers are recomputed. `low`: products are in 8 or 4 bits. `keys`: tokens of a sample.
    """
    year = None if is_recent(shape, keys) else SOFTWARE_OF.get(gpu.split("-")[0])
    whole = states_are_whole(shape, memory_bytes)
    names: tuple[str, ...]
    if zero == 3:
        first = ("torchtitan", "fsdp") if divided or selective or low else ("fsdp", "torchtitan")
        by, names = "ZeRO 3", (*first, "composer", "torchtune", "deepspeed")
    elif shape.experts or (divided and gpu.startswith(("b", "gb"))):
        by, names = "its experts" if shape.experts else divided, ("megatron-bridge", "megatron", "nemo")
    elif divided:
        by, names = divided, ("megatron", "nemo", "megatron-bridge")
    elif not shape.causal and (whole or zero is not None or devices == 1):
        by, names = "attention to both sides", ("mlperf",) if year is None else ("deeplearningexamples", "mlperf")
    elif low or (zero == 1 and not (year and whole and devices <= ONE_NODE)):
        by, names = "ZeRO 1" if zero == 1 else "products in 8 bits or fewer", ("megatron", "nemo", "megatron-bridge")
    elif zero == 2:
        by, names = "ZeRO 2", ("deepspeed", "hf-trainer")
    elif zero is None and devices > 1 and not whole:
        by, names = "states that one GPU cannot hold", ("fsdp", "torchtitan", "composer", "torchtune", "deepspeed")
    elif devices == 1 and is_recent(shape):
        by, names = "one GPU", ("hf-trainer", "torchtune")
    else:
        several = year is not None and devices > ONE_NODE
        by, names = "states that nothing divides", ("megatron", "ddp") if several else ("ddp", "megatron")
    return Guess(frameworks=tuple(framework_of(name, year) for name in names), by=by)


def states_are_whole(shape: Shape, memory_bytes: float) -> bool:
    """Whether weights, gradients and the optimizer's states of a model take at most half of a GPU."""
    return STATE_BYTES * shape.weights <= memory_bytes / 2


def hosted(cluster: Cluster, *, launches: float, step_s: float) -> Cluster:
    """The cluster whose hosts launch kernels, and work between steps, as a framework does (`Framework`); itself if as usual."""
    host, between_s = cluster.profile.host, step_s if cluster.network is not None else 0.0
    if host is None or not host.launch_s or (launches == 1.0 and not between_s):
        return cluster
    changed = host.model_copy(update={"launch_s": launches * host.launch_s, "step_s": host.step_s + between_s})
    return replace(cluster, profile=cluster.profile.model_copy(update={"host": changed}))
