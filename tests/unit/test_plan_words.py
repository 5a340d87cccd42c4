"""Plans in words."""

from __future__ import annotations

import pytest

from parsim.plans.layouts import BATCH, Placement
from parsim.plans.mesh import Mesh
from parsim.plans.plan import Plan, Stage, plan_in_words

ROW, COLUMN, REPLICATE = Placement("shard", "row", 2), Placement("shard", "column", 2), Placement("replicate")


def planned(pp: int = 1, dp: int = 1, tp: int = 1, placements: tuple[Placement, ...] = (), **more: object) -> Plan:
    mesh = Mesh(pp=pp, dp=dp, tp=tp)
    names = [("a", "b"), ("c", "d")][:pp] if pp > 1 else [("a", "b")]
    stages = tuple(
        Stage(components=own, ranks=mesh.stage_ranks(number), placements=placements) for number, own in enumerate(names)
    )
    return Plan(strategy="custom", mesh=mesh, stages=stages, global_batch=32, **more)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("plan", "words"),
    [
        (planned(), "one device"),
        (planned(dp=4), "4-way data parallelism"),
        (planned(dp=4, zero_stage=2, microbatches=2), "4-way data parallelism with ZeRO 2, 2 microbatches of 4"),
        (planned(pp=2, microbatches=4, pipeline_order="1f1b"), "2 pipeline stages, 4 microbatches of 8"),
        (
            planned(pp=2, dp=2, microbatches=4, pipeline_order="1f1b"),
            "2 pipeline stages of 2-way data parallelism, 4 microbatches of 4",
        ),
        (planned(tp=2, placements=(COLUMN, ROW)), "2-way tensor parallelism"),
        (planned(tp=2, placements=(COLUMN, REPLICATE)), "2-way tensor parallelism"),
        (planned(tp=2, placements=(BATCH, ROW)), "mixed placements on 2 ranks"),
        (planned(tp=2, dp=2, placements=(COLUMN, ROW)), "2-way data parallelism x 2-way tensor parallelism"),
        (planned(dp=2, recompute=("a",)), "2-way data parallelism, recomputing activations"),
    ],
)
def test_a_plan_in_words(plan: Plan, words: str) -> None:
    assert plan_in_words(plan) == words
