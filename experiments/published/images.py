"""Rows of convolutional networks as questions: the network, what the framework does with it, and data parallelism.

A network is one of parsim's zoo, traced. The framework is read from the row: its beginning, its notes and its source.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from functools import lru_cache

from experiments.published.blanks import CannotExpressError, Notes, half_of, precision_of
from experiments.published.convolution import ConvolutionSoftware, run_by
from experiments.published.machines import Machine, chip_of, cluster_of, machine_of
from experiments.published.question import Asked
from experiments.published.rows import Row
from experiments.published.rules import Framework
from parsim.hardware.parts import load_gpu
from parsim.model.formats import recorded_weights
from parsim.model.load import load_model
from parsim.model.model import Model
from parsim.model.spec import ModelSpec
from parsim.plans.mesh import Mesh
from parsim.plans.plan import DEFAULT_BUCKET_BYTES, Plan, Stage
from parsim.units import MIB


@dataclass(frozen=True, slots=True, kw_only=True)
class ImageFramework:
    """What a framework does with a convolutional network.

    Attributes:
        precision: of a row in 16 bits: "amp_fp16" casts every weight again, "fp16" keeps them beside the optimizer's.
        half, full: in 16 bits and else. graphs: kernels are launched by CUDA graphs, so the host costs nothing.
        bucket_bytes: of gradients that are summed together.
    """

    name: str
    precision: str
    half: ConvolutionSoftware
    full: ConvolutionSoftware
    graphs: bool = False
    bucket_bytes: int = DEFAULT_BUCKET_BYTES


PLAIN = ConvolutionSoftware()
NHWC = ConvolutionSoftware(channels_last=True)
PYTORCH = ImageFramework(name="PyTorch images", precision="amp_fp16", half=PLAIN, full=PLAIN)
"""What PyTorch does unless a program asks for more."""
EXAMPLES = replace(PYTORCH, name="DeepLearningExamples images", half=NHWC)
"""NVIDIA/DeepLearningExamples PyTorch/Classification/ConvNets/configs.yml @097c7ff917b7: memory_format nhwc under AMP, and not
under TF32 or FP32."""
MXNET = ImageFramework(
    name="MXNet images",
    precision="fp16",
    half=replace(NHWC, fused_norms=True),
    full=replace(PLAIN, fused_norms=True),
    bucket_bytes=64 * MIB,
)
"""BatchNormAddRelu, and weights in fp16 beside those of the optimizer (multi_precision). Horovod fuses gradients as NVIDIA's
configs say (HOROVOD_FUSION_THRESHOLD)."""
MLPERF = replace(
    MXNET, name="MXNet images of MLPerf", graphs=True, half=replace(NHWC, fused_norms=True, summed=True), full=MXNET.full
)
"""NETWORK resnet-v1b-stats-fl: convolutions make the sums of the norms behind them (mlcommons/training_results_v2.0
NVIDIA/benchmarks/resnet/implementations/mxnet/config_DGXA100.sh @a6ae3e16d97b, symbols/resnet-v1b-normconv-fl.py)."""

FRAMEWORKS: tuple[tuple[str, ImageFramework], ...] = (
    (r"mlperf.*mxnet|mxnet.*mlperf", MLPERF),
    (r"mxnet", MXNET),
    (r"deeplearningexamples|\bdle\b", EXAMPLES),
    (r"pytorch|torch", PYTORCH),
)
"""By what id, notes and source say; first match wins."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ImageNetwork:
    """A network of the zoo. lacks: what its recorded form leaves out."""

    pattern: str
    name: str
    lacks: str = ""


NETWORKS: tuple[ImageNetwork, ...] = (ImageNetwork(pattern=r"^resnet[-_ ]?50", name="resnet50"),)
"""By the beginning of a model's name; first match wins."""


def network_of(row: Row) -> ImageNetwork | None:
    """The network that a row names; None: it is no convolutional network that the zoo has."""
    return next((network for network in NETWORKS if re.search(network.pattern, row.model, re.IGNORECASE)), None)


def framework_of(row: Row, notes: Notes) -> ImageFramework:
    """By the row's texts, as far as they say it: graphs and the order of arrays count beside the framework's own."""
    text = f"{row.id} {row.notes} {row.source}".lower()
    found = next((framework for pattern, framework in FRAMEWORKS if re.search(pattern, text)), None)
    if found is None:
        notes.assumed.append("PyTorch, arrays as (samples, channels, height, width), no fused norms")
        found = PYTORCH
    if re.search(r"cuda graph", text):
        found = replace(found, graphs=True)
    if found is EXAMPLES:
        return found
    if re.search(r"nhwc|channels[-_ ]last", text):
        half, full = (replace(software, channels_last=True) for software in (found.half, found.full))
        found = replace(found, half=half, full=full)
    return found


@lru_cache(maxsize=16)
def _model(name: str, software: ConvolutionSoftware, precision: str) -> Model:
    return run_by(load_model(ModelSpec(name=name), weights=recorded_weights(precision)), software)


def image_question(row: Row, network: ImageNetwork) -> Asked:
    """The question of a row of a convolutional network.

    Raises:
        CannotExpressError: with the reason.
    """
    notes = Notes(assumed=[f"{column} is no whole number above 0 and counts as blank" for column in row.unread])
    framework = framework_of(row, notes)
    machine = machine_of(row)
    if machine is None:
        raise CannotExpressError(f"no single kind of GPU that parsim has a part for: {row.hardware!r}")
    if (row.tp or 1) * (row.pp or 1) * (row.cp or 1) > 1:
        raise CannotExpressError(f"{row.model} under tp {row.tp}, pp {row.pp}, cp {row.cp}: only data parallelism is expressed")
    if framework.graphs:
        machine = replace(machine, launch_s=0.0)
    gpus = row.gpus or row.dp or notes.assume("GPUs", 1)
    batch = _batch_of(row, gpus, notes)
    precision, software = _numbers(row, framework, machine, notes)
    if network.lacks:
        notes.lacks.append(network.lacks)
    notes.lacks.append("loading and augmenting images hides behind the step")
    if machine.guessed and gpus > machine.per_node:
        notes.assumed.append(f"network of {machine.cards} x {machine.gbit:g} Gb/s per node")
    model = _model(network.name, software, precision)
    names = tuple(component.name for component in model.components)
    replica = batch // gpus
    micro = row.micro_batch or replica
    if replica % micro:
        raise CannotExpressError(f"batch {batch} over {gpus} GPUs is {replica} each, which micro-batch {micro} does not divide")
    plan = Plan(
        strategy="custom",
        mesh=Mesh(dp=gpus),
        stages=(Stage(components=names, ranks=tuple(range(gpus))),),
        global_batch=batch,
        microbatches=replica // micro,
        bucket_bytes=framework.bucket_bytes,
    )
    peaks = load_gpu(machine.gpu).peak_flop_per_s
    return Asked(
        row=row,
        framework=Framework(name=framework.name, recompute="none", clip=False, optimizer="sgd_momentum"),
        shape=None,
        model=model,
        plan=plan,
        cluster=cluster_of(machine, gpus),
        precision=precision,
        optimizer="sgd_momentum",
        seq=1,
        batch=batch,
        gpus=gpus,
        recompute="none",
        assumed=tuple(notes.assumed),
        lacks=tuple(notes.lacks),
        chip=chip_of(machine),
        per_node=machine.per_node,
        peak_flop_per_s=peaks.get(precision, peaks["amp_fp16"]).value,
    )


def _batch_of(row: Row, gpus: int, notes: Notes) -> int:
    """Of a step, in images. Raises CannotExpressError where the row states none."""
    if row.global_batch is None and row.micro_batch is None:
        raise CannotExpressError(f"{row.model}: the row states no batch, on which the images per second of a network depend")
    batch = row.global_batch or (row.micro_batch or 1) * gpus
    if batch % gpus:
        rounded = max(1, round(batch / gpus)) * gpus
        notes.assumed.append(f"batch {batch} rounded to {rounded}, a multiple of {gpus} GPUs")
        batch = rounded
    return batch


def _numbers(row: Row, framework: ImageFramework, machine: Machine, notes: Notes) -> tuple[str, ConvolutionSoftware]:
    """The precision by parsim's name, and the software in it."""
    peaks = load_gpu(machine.gpu).peak_flop_per_s
    stated = precision_of(row, Framework(name=framework.name, precision="fp32"), notes)
    if stated == "tf32" and "tf32" not in peaks:
        stated = "fp32"
        notes.assumed.append("fp32, since the GPU has no TF32")
    if stated in ("fp8", "nvfp4"):
        raise CannotExpressError(f"{row.model} in {stated}: no library has convolutions in 8 bits that train")
    if stated in ("fp32", "tf32"):
        return stated, framework.full
    precision = framework.precision
    if half_of(row.precision) == "bf16":
        precision = "amp_bf16" if precision.startswith("amp") else "bf16"
    return precision, framework.half
