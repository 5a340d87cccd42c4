"""A deep GPT for benchmarks: one block traced, its copies written by name. And the plan that cuts it evenly."""

from __future__ import annotations

import json
from typing import Any

from parsim.model.load import load_model
from parsim.model.model import Model
from parsim.model.spec import ModelSpec
from parsim.plans.layouts import BATCH, REPLICATE, Placement
from parsim.plans.mesh import Mesh
from parsim.plans.plan import Plan
from parsim.plans.stages import even_parts, stages_of


def deep_gpt(layers: int, *, hidden: int = 2048, heads: int = 16, vocab: int = 51200, seq: int = 1024) -> Model:
    """As tracing that many layers would give, without the minutes; layers >= 2. Granularity `sublayer`. Needs torch."""
    args = (("heads", heads), ("hidden", hidden), ("layers", 2), ("seq", seq), ("vocab", vocab))
    two = load_model(ModelSpec(name="gpt", args=args, input_shape=(seq,)), granularity="sublayer")
    document: dict[str, Any] = json.loads(two.to_json())
    last = two.component("h.1.c_fc").outputs[0]
    for key in ("components", "values"):
        entries: list[dict[str, Any]] = document[key]
        block = [entry for entry in entries if entry["name"].startswith("h.1.")]
        first = entries.index(block[0])
        copies = [_renamed(entry, layer) for layer in range(1, layers) for entry in block]
        rest = [_after_the_last(entry, last, layers) for entry in entries if not entry["name"].startswith("h.1.")]
        document[key] = [*rest[:first], *copies, *rest[first:]]
    return Model.from_json(json.dumps(document))


def _renamed(entry: dict[str, Any], layer: int) -> dict[str, Any]:
    text = json.dumps(entry).replace('"h.1.', f'"h.{layer}.').replace('"h.0.', f'"h.{layer - 1}.')
    renamed: dict[str, Any] = json.loads(text)
    return renamed


def _after_the_last(entry: dict[str, Any], last: str, layers: int) -> dict[str, Any]:
    """What reads the last layer's value."""
    read: dict[str, Any] = json.loads(json.dumps(entry).replace(f'"{last}"', f'"{last.replace("h.1.", f"h.{layers - 1}.")}"'))
    return read


def even_plan(model: Model, mesh: Mesh, *, microbatches: int, order: str = "1f1b", chunks: int = 1) -> Plan:
    """As many components per stage; every component cut over all tp ranks where it can be, replicated where not."""
    names = [component.name for component in model.components]
    parts = even_parts(names, mesh.pp * chunks)
    return Plan(
        strategy="custom",
        mesh=mesh,
        stages=stages_of(mesh, parts, lambda name: _placement(model, name, mesh.tp), order=order, chunks=chunks),
        global_batch=mesh.dp * microbatches,
        microbatches=microbatches,
        pipeline_order=order,
    )


def _placement(model: Model, name: str, tp: int) -> Placement:
    if tp == 1:
        return BATCH
    for sharding in model.component(name).shardings:
        if sharding.limit % tp == 0:
            return Placement("shard", rule=sharding.rule, ways=tp)
    return REPLICATE
