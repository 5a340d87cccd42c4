"""Scripts that start the training programs of images: torchvision's references, timm's train.py and PyTorch's ImageNet example.

Key names and defaults are those of references/classification/train.py (pytorch/vision), train.py (huggingface/
pytorch-image-models) and imagenet/main.py (pytorch/examples).
"""

from __future__ import annotations

import re
from typing import Any

from parsim.formats.megatron import note_hanging, option_values
from parsim.formats.recipe import SCRIPTS, FileKeys, Recipe
from parsim.formats.source import FileFormat, SourceFile
from parsim.model.catalogue.names import NAMED, normalised
from parsim.model.catalogue.zoo import IMAGENET
from parsim.units import printable

TORCHVISION, TIMM, EXAMPLE = "torchvision", "timm", "PyTorch ImageNet example"
FAMILIES = (
    r"(resnet|resnext|wide_resnet|vgg|vit|deit|beit|eva|swin|convnext|efficientnet|tf_efficientnet|regnet|densenet|mobilenet|"
    r"inception|alexnet|squeezenet|shufflenet|googlenet|mnasnet|maxvit|mixer|coatnet|levit|cait|nfnet|seresnet|ecaresnet|dla|"
    r"hrnet|xception|cspresnet|cspdarknet|rexnet|ghostnet|resmlp|poolformer|edgenext|mobilevit|davit|hiera|fastvit)"
)
MARK = re.compile(rf"\b(train|main)\.py\b[^|;&]*(--model|--arch|-a)[ =]+[\"']?{FAMILIES}", re.DOTALL)
SHORT = {"b": "batch_size", "a": "arch", "j": "workers"}
"""One-letter options of these programs."""
HANGING = {"batch_size": "training.global_batch"}
BUILT = {"resnet50": "resnet50", "vit_b_16": "vit_b_16", "vit_base_patch16_224": "vit_b_16", "vgg16": "vgg16"}
"""Names of both programs: modules of parsim's own."""
SIZED = [name for name, row in NAMED.items() if row.config and not row.seq]
"""Image models that transformers builds."""
SAME_TIME = re.compile(
    r"(lr|sched|epochs|start_epoch|wd$|warmup|cooldown|decay|auto_augment|aa$|random_erase|reprob|remode|recount|mixup|cutmix|smoothing|"
    r"label_smoothing|weight_decay|norm_weight|bias_weight|transformer_embedding|momentum|nesterov|drop|val_|resize|ra_|"
    r"color_jitter|hflip|scale|ratio|interpolation|mean|std|crop_pct|data|dataset|train_split|workers|print_freq|log|output|"
    r"experiment|resume|checkpoint|eval|seed|dist|world_size|rank|nproc|nnodes|node|master|rdzv|standalone|multiprocessing|"
    r"gpu|pretrained|weights|cache_dataset|test_only|use_deterministic|opt_|clip|num_classes$|pin_mem|no_prefetcher|"
    r"prefetcher|fuser|train_interpolation|backend|save|hub|cooldown|patience|tta|model_ema_(decay|steps|warmup)|jsd|"
    r"bce|use_multi|worker|local|nodes|gpus|ntasks|amp_(dtype|impl)|master_(addr|port))"
)
LEFT_OUT = {
    "model_ema": "no moving average of the weights is kept",
    "sync_bn": "BatchNorm takes the statistics of each replica",
    "sync_batchnorm": "BatchNorm takes the statistics of each replica",
    "grad_checkpointing": "all activations are kept",
    "aug_splits": "every sample is trained once",
    "split_bn": "BatchNorm takes the statistics of each replica",
    "ra_sampler": "every sample is another one",
}


def read_images(source: SourceFile) -> Recipe:
    """A script. Raises ConfigError for a count that is none; `missing` notes a model that does not ship."""
    options = option_values(source.text, SHORT, HANGING)
    example = "arch" in options
    tool = EXAMPLE if example else TIMM if _is_timm(options) else TORCHVISION
    keys = FileKeys(tool, options)
    recipe = Recipe(framework=tool, software={"framework": "ddp"})
    note_hanging(keys, recipe, HANGING)
    name = keys.text("arch", "model", default="resnet18")
    stem = name.split(".")[0]
    sized = normalised(stem) in SIZED
    recipe.model = normalised(stem) if sized else BUILT.get(stem, "")
    if not recipe.model:
        shipped = ", ".join(sorted({*BUILT.values(), *SIZED}))
        recipe.missing["model.name"] = (
            f"{printable(name)!r} is none of the image models that ship ({shipped}); give your module as MODULE:FACTORY"
        )
    batch = keys.number("batch_size", default={TORCHVISION: 32, TIMM: 128, EXAMPLE: 256}[tool])
    if recipe.missing.keys() & HANGING.values():
        recipe.micro_batch = 0
    elif example:  # all GPUs of a node share the batch
        recipe.training["global_batch"] = batch * keys.number("world_size", default=1)
        recipe.micro_batch = 0
    else:
        recipe.micro_batch = batch
        recipe.local_batch = batch * keys.number("grad_accum_steps", default=1)
    recipe.training["precision"] = _precision(keys)
    optimizer = keys.text("opt", default="sgd").lower()
    recipe.training["optimizer"] = "sgd_momentum" if "sgd" in optimizer or optimizer == "momentum" else "adamw"
    if "sgd" not in optimizer and "adam" not in optimizer and optimizer != "momentum":
        recipe.left_out["opt"] = f"{printable(optimizer)} is not modelled: time and state are those of AdamW"
    side = keys.number("train_crop_size", "img_size", default=IMAGENET[1])
    if side != IMAGENET[1] and sized:
        recipe.args["image_size"] = side
    elif side != IMAGENET[1]:
        recipe.input_shape = (IMAGENET[0], side, side)
    if keys.flag("channels_last"):
        recipe.software["channels_last"] = True
    if keys.flag("torchcompile", "compile"):
        recipe.software["compiled"] = True
    recipe.processes = keys.number("nproc_per_node", default=0) * keys.number("nnodes", default=1)
    keys.sort(recipe, left_out=LEFT_OUT, ignored=SAME_TIME)
    return recipe


def _precision(keys: FileKeys) -> str:
    if not keys.flag("amp"):
        return "fp32"
    return "amp_bf16" if "bf" in keys.text("amp_dtype", default="float16") else "amp_fp16"


def _is_timm(options: dict[str, Any]) -> bool:
    return (
        bool({"sched", "aa", "drop_path", "img_size", "amp_dtype", "reprob", "smoothing"} & options.keys())
        or re.search(r"_patch\d|_in\d+k|\.", str(options.get("model", ""))) is not None
    )


FORMATS = {
    "images": FileFormat(
        layouts="scripts that start torchvision's references, timm's train.py or PyTorch's ImageNet example",
        refuses="a model that does not ship, until --set model.name",
        what="a script that starts a training program of images",
        tool=TORCHVISION,
        reads="recipe",
        sniff=lambda source: source.path.suffix in SCRIPTS and bool(MARK.search(source.text)),
        read=read_images,
    )
}
