"""Random plans of the hand-made sharded model: every mesh, placement, pipeline order and chunk count that small ranks allow."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import strategies as st

from experiments.common.mixed import choices
from parsim.hardware.cluster import Cluster
from parsim.model.formats import Numerics
from parsim.plans.mesh import Mesh
from parsim.plans.pipeline import PIPELINE_ORDERS, rank_of_stage
from parsim.plans.plan import Plan, Stage
from parsim.predict.memory import RankMemory, of_every_rank, unlike_memory
from parsim.program.placed import PlanIndex
from parsim.units import divisors
from tests.models import sharded_model

MODEL = sharded_model()
NAMES = tuple(component.name for component in MODEL.components)


@st.composite
def plans(draw: st.DrawFn, *, replicas: tuple[int, ...] = (1, 2), placed: bool = True) -> Plan:
    mesh = Mesh(pp=draw(st.integers(1, 3)), dp=draw(st.sampled_from(replicas)), tp=draw(st.sampled_from([1, 2, 4])))
    order = draw(st.sampled_from([name for name, row in sorted(PIPELINE_ORDERS.items()) if mesh.pp == 2 or row.takes(1)]))
    several = mesh.pp == 2 and PIPELINE_ORDERS[order].takes(2)
    chunks = 2 if several and (not PIPELINE_ORDERS[order].takes(1) or draw(st.booleans())) else 1
    count = mesh.pp * chunks
    cuts = sorted(draw(st.sets(st.integers(1, len(NAMES) - 1), min_size=count - 1, max_size=count - 1)))
    bounds = list(zip([0, *cuts], [*cuts, len(NAMES)], strict=True))
    places = rank_of_stage(order, mesh.pp, chunks)
    stages = tuple(
        Stage(
            components=NAMES[first:last],
            ranks=mesh.stage_ranks(places[number]),
            placements=tuple(draw(st.sampled_from(choices(MODEL, name, mesh.tp, placed=placed))) for name in NAMES[first:last]),
        )
        for number, (first, last) in enumerate(bounds)
    )
    return Plan(
        strategy="custom",
        mesh=mesh,
        stages=stages,
        global_batch=16 * max(replicas),
        microbatches=draw(st.sampled_from([1, 2, 4])),
        pipeline_order=order,
        bucket_bytes=draw(st.sampled_from([1, 3000, 10**6])),
        zero_stage=draw(st.integers(0, 3)),
        recompute=draw(st.one_of(st.sampled_from(["none", "full"]), st.lists(st.sampled_from(NAMES)).map(tuple))),
    )


@st.composite
def grouped_plans(draw: st.DrawFn, *, replicas: tuple[int, ...] = (4, 8), placed: bool = True) -> Plan:
    """The same with ZeRO within sharding groups."""
    plan = draw(plans(replicas=replicas, placed=placed))
    sizes = [size for size in divisors(plan.mesh.dp) if 1 < size < plan.mesh.dp]
    mesh = replace(plan.mesh, dp_shard=draw(st.sampled_from(sizes)))
    return replace(plan, mesh=mesh, zero_stage=draw(st.integers(1, 3)))


def plan_memory(layout: PlanIndex, cluster: Cluster, numerics: Numerics) -> tuple[RankMemory, ...]:
    """Peak memory of every rank, in rank order."""
    return of_every_rank(layout, cluster, unlike_memory(layout, cluster, numerics))
