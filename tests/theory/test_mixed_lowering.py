"""Plans that place every component by itself: what their task graphs must have in common, whatever is placed how."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings

from parsim.engines.static import compile_graph, simulate
from parsim.errors import PlanError
from parsim.plans.layouts import BATCH, ValueLayout, conversion, parse_hop, parse_layout, parse_placement
from parsim.plans.mesh import Mesh
from parsim.plans.plan import Plan, Stage
from parsim.program.lower import lower
from parsim.program.placed import PlanIndex
from parsim.program.taskgraph import COMPUTE, from_text, to_text
from parsim.work import Collective, Compute, OptimizerStep, Phase, SendRecv
from tests.plans import MODEL, NAMES, plans


@settings(max_examples=150, deadline=None)
@given(plans())
def test_every_mixed_plan_becomes_a_graph_that_runs_to_its_end(plan: Plan) -> None:
    graph = lower(plan, MODEL)
    assert from_text(to_text(graph)) == graph
    assert Plan.from_json(plan.to_json()) == plan
    compiled = compile_graph(graph)
    timeline = simulate(compiled, np.ones(len(graph.tasks)))
    assert timeline.makespan_s > 0
    _check_work(plan, PlanIndex(plan, MODEL))


def _check_work(plan: Plan, layout: PlanIndex) -> None:
    """All samples pass through every component, every gradient is summed, every parameter updated, once."""
    graph = lower(plan, MODEL)
    samples: Counter[tuple[str, Phase]] = Counter()
    updated = 0
    for task in graph.tasks:
        match task.work:
            case Compute() as work:
                samples[work.component, work.phase] += work.samples
                assert task.resources[0].stream == COMPUTE
            case OptimizerStep() as work:
                updated += work.elements
            case SendRecv() as work:
                assert work.size_bytes > 0
            case Collective() as work:
                assert len(work.group) > 1
    for name in NAMES:
        placement = layout.placement[name]
        copies = placement.batch_ways(plan.mesh.tp) if placement.kind in ("shard", "replicate") else 1
        assert samples[name, Phase.FORWARD] == plan.global_batch * copies
    held = [parameter for rank in range(plan.world_size) for parameter in layout.rank_parameters(rank)]
    if plan.zero_stage == 0:
        assert updated == sum(parameter.elements for parameter in held)
    for rank in range(plan.world_size):
        in_buckets = [parameter for bucket in layout.rank_buckets(rank) for parameter in bucket.parameters]
        assert sorted(in_buckets) == sorted(layout.rank_parameters(rank))


@pytest.mark.parametrize("tp", [2, 3, 4, 6, 8, 12])
def test_the_way_to_a_layout_on_the_way_is_the_beginning_of_the_way(tp: int) -> None:
    divisors = [ways for ways in range(1, tp + 1) if tp % ways == 0]
    targets = [ValueLayout("full", ways) for ways in divisors]
    targets += [ValueLayout("shard", ways, dim=dim) for ways in divisors if ways > 1 for dim in (1, 2)]
    targets += [ValueLayout("placed", tp, rank=rank) for rank in (0, tp - 1)]
    sources = targets + [ValueLayout("partial", ways) for ways in divisors if ways > 1]
    for source in sources:
        assert parse_layout(str(source)) == source
        for target in targets:
            hops = conversion(source, target, tp)
            assert (hops[-1].target if hops else source) == target
            for number, hop in enumerate(hops):
                assert parse_hop(str(hop)) == hop
                assert conversion(source, hop.target, tp) == hops[: number + 1]


MIXED = """\
world_size 2
0 r0.host | load x8 2112 B | - | stage=0 replica=0
1 r1.host | load x8 2112 B | - | stage=0 replica=0
2 r0.compute | forward a column/2 x8 | 0 | stage=0 replica=0 component=a microbatch=0
3 r1.compute | forward a column/2 x8 | 1 | stage=0 replica=0 component=a microbatch=0
4 r0.compute | forward b row/2 x8 | 2 | stage=0 replica=0 component=b microbatch=0
5 r1.compute | forward b row/2 x8 | 3 | stage=0 replica=0 component=b microbatch=0
"""


def test_neighbours_cut_by_column_and_row_need_nothing_between_them() -> None:
    mesh = Mesh(tp=2)
    placements = ("shard:column/2", "shard:row/2", "batch", "place:1", "batch")
    stage = Stage(components=NAMES, ranks=mesh.stage_ranks(0), placements=tuple(parse_placement(text) for text in placements))
    text = to_text(lower(Plan(strategy="custom", mesh=mesh, stages=(stage,), global_batch=8), MODEL))
    assert text.startswith(MIXED)
    rest = text[len(MIXED) :].splitlines()
    assert "reduce_scatter 2048 B over 0,1 | 4,5" in rest[0]  # b's partial sums, for c which reads pieces of the batch
    assert "all_reduce 2048 B over 0,1 | 4,5" in rest[1]  # and for d, which reads all of it on rank 1


@pytest.mark.parametrize(
    ("placement", "words"),
    [
        ("shard:column/3", ("ways must be at least 2 and divide tp (2)",)),
        ("shard:row/2", ("a has no sharding rule 'row'", "column")),
        ("place:5", ("tp rank 5 does not exist",)),
        ("shard:column", ("cannot read placement",)),
    ],
)
def test_what_cannot_be_placed_is_said(placement: str, words: tuple[str, ...]) -> None:
    with pytest.raises(PlanError) as caught:
        _layout_with_first(placement)
    for word in words:
        assert word in str(caught.value)


def _layout_with_first(placement: str) -> PlanIndex:
    mesh = Mesh(tp=2)
    placements = (parse_placement(placement), *(BATCH,) * (len(NAMES) - 1))
    stage = Stage(components=NAMES, ranks=mesh.stage_ranks(0), placements=placements)
    return PlanIndex(Plan(strategy="custom", mesh=mesh, stages=(stage,), global_batch=8), MODEL)
