"""Random plans that place every component by itself, for real runs against single-process training."""

from __future__ import annotations

import itertools
import random

from experiments.common.equality import Case
from parsim.errors import PlanError
from parsim.model.model import Model
from parsim.model.spec import ModelSpec
from parsim.plans.layouts import BATCH, REPLICATE, Placement
from parsim.plans.mesh import Mesh
from parsim.plans.plan import Plan, Stage
from parsim.program.placed import PlanIndex

MODELS: dict[str, ModelSpec] = {
    "mlp": ModelSpec(name="mlp", args=(("width", 24),)),
    "resnet_small": ModelSpec(name="resnet_small", args=(("width", 4),)),
    "vit_small": ModelSpec(name="vit_small", args=(("heads", 2), ("hidden", 16), ("layers", 2))),
    "gpt_small": ModelSpec(name="gpt_small", args=(("heads", 2), ("hidden", 16), ("layers", 3), ("seq", 16), ("vocab", 32))),
    "vgg_small": ModelSpec(name="vgg_small"),
}
MESHES = {2: (Mesh(tp=2),), 4: (Mesh(tp=4), Mesh(dp=2, tp=2), Mesh(pp=2, tp=2))}


def random_case(name: str, processes: int, rng: random.Random) -> Case:
    """One model under one plan in which nothing is left as it usually is; shards are drawn as often as everything else."""
    spec = MODELS[name]
    case_options = {"granularity": rng.choice(["layer", "sublayer"])}
    model = Case(spec=spec, plan=_any_plan(spec), **case_options).model
    names = [component.name for component in model.components]
    while True:
        mesh = rng.choice(MESHES[processes])
        cuts = [0, *sorted(rng.sample(range(1, len(names)), mesh.pp - 1)), len(names)]
        stages = []
        for number, (first, last) in enumerate(itertools.pairwise(cuts)):
            placements = []
            for component in names[first:last]:
                options = choices(model, component, mesh.tp)
                shards = [option for option in options if option.kind == "shard"]
                placements.append(rng.choice(shards if shards and rng.random() < 0.5 else options))
            stages.append(
                Stage(components=tuple(names[first:last]), ranks=mesh.stage_ranks(number), placements=tuple(placements))
            )
        plan = Plan(
            strategy="custom",
            mesh=mesh,
            stages=tuple(stages),
            global_batch=32 if name == "resnet_small" else 16,
            microbatches=rng.choice([1, 2]),
            pipeline_order=rng.choice(["gpipe", "1f1b"]),
            bucket_bytes=rng.choice([2**10, 2**14, 2**24]),
            zero_stage=rng.choice([0, 1, 2, 3]),
            recompute=rng.choice(["none", "full", tuple(name for name in names if rng.random() < 0.5)]),
        )
        try:
            PlanIndex(plan, model)
        except PlanError:  # tied parameters held differently: draw again
            continue
        optimizer, rate = rng.choice([("sgd_momentum", 2e-3), ("adam", 1e-3), ("adamw", 1e-3)])
        return Case(
            spec=spec,
            plan=plan,
            dataset="synthetic" if name == "gpt_small" else "digits",
            optimizer=optimizer,
            learning_rate=rate,
            **case_options,
        )


def _any_plan(spec: ModelSpec) -> Plan:
    from experiments.common.equality import even_plan

    return even_plan(spec, Mesh(), strategy="single", batch=16)


def choices(model: Model, name: str, tp: int, *, placed: bool = True) -> list[Placement]:
    """Every placement a component can have; `placed`: on one tp rank alone, too."""
    found = [BATCH]
    if tp > 1:
        found.append(REPLICATE)
        if placed:
            found += [Placement("place", shard=shard) for shard in range(tp)]
    for sharding in model.component(name).shardings:
        found += [
            Placement("shard", rule=sharding.rule, ways=ways)
            for ways in range(2, tp + 1)
            if tp % ways == 0 and sharding.limit % ways == 0
        ]
    return found
