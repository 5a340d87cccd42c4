"""Rows of convolutional networks as questions: the network, what the framework does with it, and data parallelism.

A network is traced: one of parsim's zoo, or of `networks` beside this file. The framework is read from the row: its beginning,
its notes and its source.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from functools import lru_cache

from experiments.published import rules
from experiments.published.blanks import CannotExpressError, Notes, half_of, precision_of
from experiments.published.machines import Machine, cluster_of, machine_of
from experiments.published.question import Asked
from experiments.published.rows import Row
from parsim.hardware.parts import load_gpu
from parsim.model.catalogue import frameworks
from parsim.model.catalogue.frameworks import ConvolutionSoftware, Framework, run_by
from parsim.model.formats import recorded_weights
from parsim.model.load import load_model
from parsim.model.model import Model
from parsim.model.spec import ModelSpec
from parsim.plans.mesh import Mesh
from parsim.plans.plan import Plan, Stage

TEXTS: tuple[tuple[str, str, int | None], ...] = (
    (r"mlperf.*mxnet|mxnet.*mlperf", "mxnet", None),
    (r"mxnet", "mxnet", 2020),
    (r"deeplearningexamples|\bdle\b", "deeplearningexamples", None),
    (r"pytorch|torch", "ddp", None),
)
"""What id, notes and source say, the framework (`parsim.model.catalogue.frameworks`) and its year; first match wins."""

KEEPS_HALF_WEIGHTS = ("mxnet",)
"""multi_precision: weights in fp16 beside those of the optimizer. Others cast them in every forward (autocast)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ImageNetwork:
    """A network of the zoo or of `experiments.published.networks`, at its input shape (empty: the zoo's).

    lacks: what its recorded form leaves out.
    """

    pattern: str
    name: str
    input_shape: tuple[int, ...] = ()
    lacks: str = ""


OWN = "experiments.published.networks"
BOXES = "matching and suppression of boxes and their losses"
LACKS_SIGMA = 0.2
"""Assumed of a network of which a part is left out: the two detectors that were seen are 8 and 45% too fast."""
IMAGENET = (3, 224, 224)
NETWORKS: tuple[ImageNetwork, ...] = (
    ImageNetwork(pattern=r"^resnet[-_ ]?50", name="resnet50"),
    ImageNetwork(pattern=r"^resnext[-_ ]?50(?:[-_ ]?32x4d)?$", name=f"{OWN}:resnext50_32x4d", input_shape=IMAGENET),
    ImageNetwork(pattern=r"^resnext[-_ ]?101(?:[-_ ]?32x4d)?$", name=f"{OWN}:resnext101_32x4d", input_shape=IMAGENET),
    ImageNetwork(
        pattern=r"^(?:retinanet|ssd)\b.*resnext", name=f"{OWN}:retinanet_resnext50", input_shape=(3, 800, 800), lacks=BOXES
    ),
    ImageNetwork(
        pattern=r"^mask[-_ ]?r-?cnn",
        name=f"{OWN}:mask_rcnn",
        input_shape=(3, 800, 1344),
        lacks=f"{BOXES}, RoIAlign, images of other sizes than 800 x 1344",
    ),
)
"""By the beginning of a model's name; first match wins."""


def network_of(row: Row) -> ImageNetwork | None:
    """The network that a row names; None: it is no convolutional network that the zoo has."""
    return next((network for network in NETWORKS if re.search(network.pattern, row.model, re.IGNORECASE)), None)


def framework_of(row: Row, notes: Notes) -> Framework:
    """By the row's texts; the order of arrays counts beside the framework's own, where no configuration says it better.

    Who names no framework has channels last under AMP: NVIDIA's examples do, as PyTorch's tuning guide says.
    """
    text = f"{row.id} {row.notes} {row.source}".lower()
    found = next((frameworks.framework_of(name, year) for pattern, name, year in TEXTS if re.search(pattern, text)), None)
    last = re.search(r"nhwc|channels[-_ ]last", text) is not None
    if found is None and "mlperf" in text:
        notes.assumed.append("PyTorch, channels last, fused norms and CUDA graphs, as in NVIDIA's implementations of MLPerf")
        ways = ConvolutionSoftware(channels_last=True, in_full=True, fused_norms=True)
        return replace(frameworks.framework_of("ddp"), convolution=ways)
    if found is None:
        notes.assumed.append("NVIDIA's examples of PyTorch: channels last under AMP alone, no fused norms")
        found = frameworks.framework_of("ddp" if last else "deeplearningexamples")
    if last and found.name == "deeplearningexamples":
        notes.assumed.append("NHWC under AMP alone, as its configs.yml")
    elif last and found.convolution is not None:
        found = replace(found, convolution=replace(found.convolution, channels_last=True, in_full=True))
    return found


HOST_CORES = ((r"DGX-?1\b", 40), (r"DGX-?2\b", 48))
"""Of a node, where its name says it: two processors of 20 (DGX-1) and of 24 cores (DGX-2)."""
LOADER_WORKERS = {"deeplearningexamples": 8}
"""Processes of each GPU that decode on the CPU: data_backend pytorch and workers 8 of configs.yml. MXNet's rows decode on the
GPU, with DALI."""
CORE_IMAGES_PER_S = 205.0
"""That a core decodes, crops and resizes where workers fill a host: 8,322 and 8,056 images/s of two DGX-1 over 40 cores, in
rows of DeepLearningExamples where one GPU alone takes 1,200 and 1,156."""


def loading_s(asked: Asked) -> float:
    """Seconds of a step in which the host cannot decode its images faster; 0 where nobody says with how many cores."""
    cores = next((number for pattern, number in HOST_CORES if re.search(pattern, asked.row.hardware, re.IGNORECASE)), 0)
    workers = LOADER_WORKERS.get(asked.framework.name.split()[0], 0)
    if not cores or not workers:
        return 0.0
    per_node = min(asked.gpus, asked.per_node)
    nodes = -(-asked.gpus // per_node)
    return asked.batch / (nodes * min(cores, workers * per_node) * CORE_IMAGES_PER_S)


@lru_cache(maxsize=16)
def _model(network: ImageNetwork, software: ConvolutionSoftware, precision: str) -> Model:
    spec = ModelSpec(name=network.name, input_shape=network.input_shape or None)
    return run_by(load_model(spec, weights=recorded_weights(precision)), software, precision)


def image_question(row: Row, network: ImageNetwork) -> Asked:
    """The question of a row of a convolutional network. Raises CannotExpressError with the reason."""
    notes = Notes(assumed=[f"{column} is no whole number above 0 and counts as blank" for column in row.unread])
    framework = framework_of(row, notes)
    machine = machine_of(row)
    if machine is None:
        raise CannotExpressError(f"no single kind of GPU that parsim has a part for: {row.hardware!r}")
    if (row.tp or 1) * (row.pp or 1) * (row.cp or 1) > 1:
        raise CannotExpressError(f"{row.model} under tp {row.tp}, pp {row.pp}, cp {row.cp}: only data parallelism is expressed")
    if re.search(r"cuda graph", " ".join((row.notes, *notes.assumed)), re.IGNORECASE):
        machine = replace(machine, launch_s=0.0)
    gpus = row.gpus or row.dp or notes.assume("GPUs", 1)
    batch = _batch_of(row, gpus, notes)
    precision = _precision_of(row, framework, machine, notes)
    if network.lacks:
        notes.lacks.append(network.lacks)
    notes.lacks.append("loading and augmenting images hides behind the step")
    if machine.guessed and gpus > machine.per_node:
        notes.assumed.append(f"network of {machine.cards} x {machine.gbit:g} Gb/s per node")
    model = _model(network, framework.convolution or ConvolutionSoftware(), precision)
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
        framework=replace(rules.rule(rules.UNKNOWN), name=f"{framework.name} images", clip=False, optimizer="sgd_momentum"),
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
        part=machine.gpu,
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


def _precision_of(row: Row, framework: Framework, machine: Machine, notes: Notes) -> str:
    """By parsim's name."""
    peaks = load_gpu(machine.gpu).peak_flop_per_s
    stated = precision_of(row, replace(rules.rule(rules.UNKNOWN), name=framework.name, precision="fp32"), notes)
    if stated == "tf32" and "tf32" not in peaks:
        stated = "fp32"
        notes.assumed.append("fp32, since the GPU has no TF32")
    if stated in ("fp8", "nvfp4"):
        raise CannotExpressError(f"{row.model} in {stated}: no library has convolutions in 8 bits that train")
    if stated in ("fp32", "tf32"):
        return stated
    half = "bf16" if half_of(row.precision) == "bf16" else "fp16"
    return half if framework.name in KEEPS_HALF_WEIGHTS else f"amp_{half}"
