"""Configurations that frameworks publish, as questions: facts from their files, each with its commit (presets.csv)."""

from __future__ import annotations

import csv
from collections.abc import Mapping
from functools import cache
from pathlib import Path

from parsim.app.load import problem_of
from parsim.app.question import question_of
from parsim.formats.recipe import Recipe
from parsim.predict.memory import RankMemory
from parsim.search.families import FAMILIES

Preset = Mapping[str, str]
NODES = {"gb200": 32, "gb300": 32}
"""GPUs of a node, which decide nothing here; 8 of the other kinds."""
FILE = Path(__file__).with_name("presets.csv")
NETWORK = "infiniband-400g"
"""It decides nothing here: a preset has one mesh, and memory does not depend on the network."""


@cache
def presets() -> tuple[Preset, ...]:
    """The rows of the file. Of `recompute` "block:N" is the first N layers of a stage, and "selective:" begins modules of
    Megatron-Core."""
    with FILE.open() as lines:
        return tuple(csv.DictReader(lines))


def name_of(preset: Preset) -> str:
    """The name of a test."""
    sizes = (f"{axis}{preset[axis]}" for axis in ("tp", "pp", "cp", "ep") if preset[axis] != "1")
    words = (preset["framework"], preset["model"], f"{preset['gpus']}x{preset['gpu']}", preset["precision"], *sizes)
    states = ("fsdp",) if preset["zero"] == "3" and preset["framework"] != "torchtitan" else ()
    return " ".join((*words, *states, f"b{preset['global_batch']}"))


def recipe_of(preset: Preset) -> Recipe:
    """The preset in parsim's words, as its framework's file would be read."""
    number = {key: int(preset[key]) for key in ("tp", "pp", "cp", "ep", "chunks", "micro_batch", "zero", "offloaded_layers")}
    low = preset["precision"] == "fp8"
    args: dict[str, object] = {"seq": int(preset["seq"]), "sequence_parallel": True, "fp8_casts": low}
    if preset.get("layers"):
        args["layers"] = int(preset["layers"])
    if preset["framework"] in FUSED_LOSS:
        args["loss"] = "fused"
    kind, _, modules = preset["recompute"].partition(":")
    if modules and kind == "selective":
        args["recompute_modules"] = modules.replace("+", " ")
    return Recipe(
        framework=preset["framework"],
        model=preset["model"],
        args=args,
        training={
            "global_batch": int(preset["global_batch"]),
            "precision": "bf16" if preset["precision"] == "fp16" else preset["precision"],  # as many bytes
            "optimizer": "adamw_fused",
            **({"gradient_dtype": preset["gradients"]} if preset.get("gradients") else {}),
        },
        recompute="first" if kind == "block" else kind,
        every=int(modules) if kind == "block" else 2,
        **number,
    )


KERNELS_OF = {"nemo": "nemo", "megatron-bridge": "megatron-bridge", "megatron-lm": "megatron"}
FUSED_LOSS = ("nemo", "megatron-bridge")
"""Their recipes turn cross_entropy_loss_fusion on, with Transformer Engine's kernel: NVIDIA/NeMo
nemo/collections/llm/recipes/llama3_8b.py and NVIDIA-NeMo/Megatron-Bridge scripts/performance."""


def fullest(preset: Preset) -> RankMemory:
    """The rank with the largest share of its device in use."""
    gpus = int(preset["gpus"])
    settings = recipe_of(preset).settings(gpus)
    if preset["framework"] in KERNELS_OF:
        settings["software.framework"] = KERNELS_OF[preset["framework"]]
    batch = int(str(settings.pop("training.global_batch")))
    if gpus > 8:
        settings["cluster.network"] = NETWORK
    if gpus % NODES.get(preset["gpu"], 8) == 0 and gpus > 8:
        settings["cluster.gpus_per_node"] = NODES.get(preset["gpu"], 8)
    question = question_of(preset["model"], cluster=f"{gpus}x{preset['gpu']}", global_batch=batch, settings=settings)
    problem = problem_of(question)
    plan = next(FAMILIES[question.plan.strategy](problem))
    return max(problem.unlike_memory(plan), key=lambda memory: memory.needed_bytes - memory.limit_bytes)
