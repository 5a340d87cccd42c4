"""Plans drawn at random from all that can be executed: axes, placements, orders, chunks, ZeRO stages, recomputation."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from random import Random

from parsim.errors import PlanError
from parsim.model.model import Model
from parsim.plans.layouts import BATCH, REPLICATE, Placement
from parsim.plans.mesh import Mesh
from parsim.plans.pipeline import PIPELINE_ORDERS
from parsim.plans.plan import Plan
from parsim.plans.stages import stages_of
from parsim.program.placed import PlanIndex

MESHES = {
    2: (Mesh(dp=2), Mesh(pp=2), Mesh(tp=2), Mesh(tp=2)),
    4: (Mesh(dp=2, tp=2), Mesh(pp=2, dp=2), Mesh(pp=2, tp=2), Mesh(tp=4), Mesh(dp=4)),
}
"""By ranks; two of two ranks are shards, since these have most to draw from."""


def drawn(model: Model, ranks: int, count: int, *, batch: int, seed: int) -> Iterator[Plan]:
    """`count` plans that the model allows.

    Args:
        ranks: 2 or 4. batch: global. seed: the same plans for the same seed.
    """
    random = Random(seed)
    while count:
        try:
            plan = _draw(model, ranks, batch, random)
            PlanIndex(plan, model)
        except PlanError:  # such as tied parameters that are held differently
            continue
        count -= 1
        yield plan


def _draw(model: Model, ranks: int, batch: int, random: Random) -> Plan:
    names = [component.name for component in model.components]
    mesh = random.choice(MESHES[ranks])
    order = random.choice(sorted(PIPELINE_ORDERS) if mesh.pp > 1 else ["1f1b"])
    row = PIPELINE_ORDERS[order]
    chunks = random.choice([count for count in (1, 2) if row.takes(count)]) if mesh.pp > 1 else 1
    stages = mesh.pp * chunks
    cuts = [0, *sorted(random.sample(range(1, len(names)), stages - 1)), len(names)]
    recompute = random.choice(["none", "none", "full", tuple(name for name in names if random.random() < 0.5)])
    return Plan(
        strategy="custom",
        mesh=mesh,
        stages=stages_of(
            mesh,
            (names[first:last] for first, last in itertools.pairwise(cuts)),
            lambda name: _placement(model, name, mesh.tp, random),
            order=order,
            chunks=chunks,
        ),
        global_batch=batch,
        microbatches=random.choice([1, 2, 4]),
        pipeline_order=order,
        bucket_bytes=random.choice([2**16, 2**18, 25 * 2**20]),
        zero_stage=random.choice([0, 1, 2, 3]),
        recompute=recompute,
    )


def _placement(model: Model, name: str, tp: int, random: Random) -> Placement:
    """Shards as often as everything else together."""
    if tp == 1:
        return BATCH
    shards = [
        Placement("shard", rule=sharding.rule, ways=ways)
        for sharding in model.component(name).shardings
        for ways in (2, 4)
        if ways <= tp and sharding.limit % ways == 0
    ]
    others = [BATCH, REPLICATE, *(Placement("place", shard=shard) for shard in range(tp))]
    return random.choice(shards if shards and random.random() < 0.5 else others)
