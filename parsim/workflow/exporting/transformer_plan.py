"""A plan of a transformer by its sizes, as Megatron-LM and torchtitan describe one: sizes, mesh, and what is recomputed."""

from __future__ import annotations

import re
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from parsim.errors import ConfigError, first_few
from parsim.model.catalogue.names import CASTS, DOCUMENT, OWN, is_transformer, sequence_of, shape_of
from parsim.model.catalogue.sublayers import Shape
from parsim.model.formats import number_format
from parsim.plans.plan import Plan
from parsim.workflow.exporting.expressible import (
    FrameworkMesh,
    check_synchronous,
    framework_mesh,
    left_out_of_plan,
    left_out_of_training,
)
from parsim.workflow.exporting.request import ExportRequest
from parsim.workflow.frameworks.recipe import Recipe

Recomputed = Literal["none", "full", "selective", "alternate"]
_LAYER = re.compile(r"h\.(\d+)(?:\.|$)")


@dataclass(kw_only=True)
class TransformerPlan:
    """Attributes:
    shape: sizes with every default filled in. seq: tokens of a sample. own: the other arguments of the model.
    recompute: of all layers; every: of "alternate", which layers.
    """

    request: ExportRequest
    shape: Shape
    seq: int
    own: dict[str, Any]
    mesh: FrameworkMesh
    recompute: Recomputed
    every: int
    left_out: dict[str, str] = field(default_factory=dict)

    @property
    def plan(self) -> Plan:
        return self.request.plan


def transformer_plan(request: ExportRequest, format: str) -> TransformerPlan:
    """The plan of a folder.

    Args:
        request: the export. format: for messages.

    Raises:
        ConfigError: the model is not a transformer by its sizes, a placement is none that the frameworks have, or what is
            recomputed differs from layer to layer.
    """
    model, plan = request.config.model, request.plan
    if not is_transformer(model.name):
        raise ConfigError(
            f"{format} describes a transformer by its sizes, and model.name = {model.name!r} is none by name; "
            "export it as deepspeed or state_dict, or plan a model of parsim/model/catalogue/names.py"
        )
    check_synchronous(plan, format)
    args = dict(request.config.model_spec.args)  # with plan.sequence_parallel
    mesh = framework_mesh(plan, format)
    left_out = left_out_of_training(request) | left_out_of_plan(plan)
    if DOCUMENT in args:
        left_out[f"model.args.{DOCUMENT}"] = "the mask of documents is set where your data and attention are"
    _check_placements(plan, mesh, format, left_out)
    recompute, every = _recomputed(plan, format)
    if plan.mesh.pp > 1:
        left_out["plan.stages"] = f"{format} cuts stages itself; the plan has {_layers_of_stages(plan)} layers"
    return TransformerPlan(
        request=request,
        shape=whole(shape_of(model.name, args), sequence_of(model.name, args)),
        seq=sequence_of(model.name, args),
        own={key: args.get(key, value) for key, value in OWN.items()},
        mesh=mesh,
        recompute=recompute,
        every=every,
        left_out=left_out,
    )


def whole(shape: Shape, seq: int) -> Shape:
    """The sizes without a name, and with every default written out, so that two spellings of one model are equal."""
    return replace(
        shape,
        name="",
        ffn=shape.inner,
        kv_heads=shape.keys,
        head_dim=shape.dim,
        positions=(shape.positions or seq) if shape.learned_positions else 0,
    )


def _check_placements(plan: Plan, mesh: FrameworkMesh, format: str, left_out: dict[str, str]) -> None:
    """Under tensor parallelism every layer is cut in tp ways; what lies otherwise beside the layers is named."""
    if mesh.tp == 1:
        return
    other: list[str] = []
    for name, placement in (entry for stage in plan.stages for entry in stage.placed()):
        if placement.kind == "shard" and placement.ways == mesh.tp:
            continue
        if _LAYER.match(name) and placement.kind in ("shard", "place"):
            raise ConfigError(
                f"{format} cuts every layer in tp = {mesh.tp} ways, and the plan has {name} {placement}; plan with "
                f"--set plan.strategy=hp and a mesh, which cuts all layers alike"
            )
        other.append(f"{name} {placement}")
    if other:
        few = first_few(other)
        left_out["plan.placements"] = f"{format} cuts in its own way what the plan does not cut in {mesh.tp}: {few}"


def _recomputed(plan: Plan, format: str) -> tuple[Recomputed, int]:
    layers: dict[int, set[str]] = {}
    again, by_operator = plan.recomputed, plan.recomputed_by_operator
    for name in plan.components:
        if (found := _LAYER.match(name)) is not None:
            kind = "full" if name in again else "selective" if name in by_operator else "none"
            layers.setdefault(int(found[1]), set()).add(kind)
    kinds = [next(iter(kind)) if len(kind) == 1 else "mixed" for _, kind in sorted(layers.items())]
    for word in ("none", "full", "selective"):
        if all(kind == word for kind in kinds):
            return word, 0
    first = next((place for place, kind in enumerate(kinds) if kind == "full"), 0)
    if kinds == ["full" if place % (first + 1) == first else "none" for place in range(len(kinds))]:
        return "alternate", first + 1
    counts = ", ".join(f"{kinds.count(kind)} {kind}" for kind in dict.fromkeys(kinds))
    raise ConfigError(
        f"{format} recomputes all layers in one way, and the plan has {counts}; plan with --set plan.recompute=none or full"
    )


def _layers_of_stages(plan: Plan) -> str:
    counts = []
    for stage in plan.stages:
        counts.append(len({found[1] for name in stage.components if (found := _LAYER.match(name))}))
    return " + ".join(map(str, counts))


def read_back(wanted: TransformerPlan, recipe: Recipe) -> dict[str, str]:
    """What parsim's own reader of the file understands otherwise than the plan has it; {} if nothing.

    Args:
        wanted: what was written. recipe: the file, read.

    Raises:
        ConfigError: the reader finds other sizes of the model: the format cannot express the model.
    """
    read = whole(shape_of(recipe.model, recipe.args), sequence_of(recipe.model, recipe.args))
    differ = [key for key in Shape.__dataclass_fields__ if getattr(read, key) != getattr(wanted.shape, key)]
    only_vocabulary = differ == ["vocab"]
    if differ and not only_vocabulary:
        texts = ", ".join(f"{key} = {getattr(wanted.shape, key)!r}" for key in differ)
        raise ConfigError(f"{recipe.framework} cannot express this model: {texts} would be read as {_values(read, differ)}")
    found: dict[str, str] = {}
    if only_vocabulary:
        found["model.args.vocab"] = f"{recipe.framework} pads the vocabulary of {wanted.shape.vocab} to {read.vocab}"
    settings = recipe.settings(wanted.plan.world_size)
    for key, value in _expected(wanted).items():
        if settings.get(key) != value:
            found[key] = f"the file says {settings.get(key)!r}, the plan {value!r}"
    return found


def _values(shape: Shape, keys: list[str]) -> str:
    return ", ".join(f"{getattr(shape, key)!r}" for key in keys)


def _expected(wanted: TransformerPlan) -> dict[str, object]:
    plan, mesh, training = wanted.plan, wanted.mesh, wanted.request.config.training
    axes = {"pp": mesh.pp, "dp": mesh.dp, "tp": mesh.tp}
    axes |= {axis: getattr(mesh, axis) for axis in ("cp", "ep") if getattr(mesh, axis) > 1}
    found: dict[str, object] = {
        "plan.mesh": axes,
        "plan.zero_stage": plan.zero_stage,
        "plan.microbatches": plan.microbatches,
        "training.global_batch": plan.global_batch,
        "training.precision": training.precision,
        "training.optimizer": training.optimizer,
    }
    if plan.zero_stage and mesh.dp > 1:
        found["plan.dp_shard"] = mesh.dp_shard
    if mesh.pp > 1:
        found |= {"plan.pipeline_order": plan.pipeline_order, "plan.chunks": plan.chunks}
    return found


def check_fp8_casts(wanted: TransformerPlan) -> None:
    """Note it where the model casts to 8 bits and the training does not, or the other way round."""
    low = bool(number_format(wanted.request.config.training.precision).beside)
    if bool(wanted.own[CASTS]) != low:
        wanted.left_out[f"model.args.{CASTS}"] = "the framework casts inputs of products exactly if it trains in fp8 or nvfp4"
