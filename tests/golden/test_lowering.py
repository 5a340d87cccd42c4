"""Lowering, as text: what a plan becomes, task by task."""

from __future__ import annotations

from parsim.plans.mesh import Mesh
from parsim.plans.plan import Plan, Stage
from parsim.program.lower import lower
from parsim.program.taskgraph import from_text, to_text
from tests.models import chain_model, residual_model

DP = """\
world_size 2
0 r0.host | load x4 1056 B | - | stage=0 replica=0
1 r0.compute | forward c0 x4 | 0 | stage=0 replica=0 component=c0 microbatch=0
2 r0.compute | forward c1 x4 | 1 | stage=0 replica=0 component=c1 microbatch=0
3 r0.compute | forward loss x4 | 0,2 | stage=0 replica=0 component=loss microbatch=0
4 r0.compute | backward loss x4 | 3 | stage=0 replica=0 component=loss microbatch=0
5 r0.compute | backward c1 x4 | 2,4 | stage=0 replica=0 component=c1 microbatch=0
6 r0.compute | backward c0 x4 | 1,5 | stage=0 replica=0 component=c0 microbatch=0
7 r1.host | load x4 1056 B | - | stage=0 replica=1
8 r1.compute | forward c0 x4 | 7 | stage=0 replica=1 component=c0 microbatch=0
9 r1.compute | forward c1 x4 | 8 | stage=0 replica=1 component=c1 microbatch=0
10 r1.compute | forward loss x4 | 7,9 | stage=0 replica=1 component=loss microbatch=0
11 r1.compute | backward loss x4 | 10 | stage=0 replica=1 component=loss microbatch=0
12 r1.compute | backward c1 x4 | 9,11 | stage=0 replica=1 component=c1 microbatch=0
13 r1.compute | backward c0 x4 | 8,12 | stage=0 replica=1 component=c0 microbatch=0
14 r0.dp r1.dp | all_reduce 4000 B over 0,1 | 5,12 | stage=0 bucket=0
15 r0.dp r1.dp | all_reduce 4000 B over 0,1 | 6,13 | stage=0 bucket=1
16 r0.compute | optimizer 2000 elements in 2 | 6,14,15 | stage=0 replica=0
17 r1.compute | optimizer 2000 elements in 2 | 13,14,15 | stage=0 replica=1
"""

PIPELINE = """\
world_size 2
0 r0.host | load x4 1024 B in 2 | - | stage=0 replica=0
1 r0.compute | forward a x2 | 0 | stage=0 replica=0 component=a microbatch=0
2 r0.pp>1 r1.pp<0 | send_recv 256 B 0>1 | 1 | stage=0 replica=0 microbatch=0 value=a:0
3 r0.compute | forward b x2 | 1 | stage=0 replica=0 component=b microbatch=0
4 r0.pp>1 r1.pp<0 | send_recv 256 B 0>1 | 3 | stage=0 replica=0 microbatch=0 value=b:0
5 r0.compute | forward a x2 | 0 | stage=0 replica=0 component=a microbatch=1
6 r0.pp>1 r1.pp<0 | send_recv 256 B 0>1 | 5 | stage=0 replica=0 microbatch=1 value=a:0
7 r0.compute | forward b x2 | 5 | stage=0 replica=0 component=b microbatch=1
8 r0.pp>1 r1.pp<0 | send_recv 256 B 0>1 | 7 | stage=0 replica=0 microbatch=1 value=b:0
9 r0.compute | backward b x2 | 3,24 | stage=0 replica=0 component=b microbatch=0
10 r0.compute | backward a x2 | 1,9,22 | stage=0 replica=0 component=a microbatch=0
11 r0.compute | backward b x2 | 7,29 | stage=0 replica=0 component=b microbatch=1
12 r0.compute | backward a x2 | 5,11,27 | stage=0 replica=0 component=a microbatch=1
13 r1.host | load x4 32 B in 2 | - | stage=1 replica=0
14 r1.compute | forward c x2 | 4 | stage=1 replica=0 component=c microbatch=0
15 r1.compute | forward d x2 | 2,14 | stage=1 replica=0 component=d microbatch=0
16 r1.compute | forward loss x2 | 13,15 | stage=1 replica=0 component=loss microbatch=0
17 r1.compute | forward c x2 | 8 | stage=1 replica=0 component=c microbatch=1
18 r1.compute | forward d x2 | 6,17 | stage=1 replica=0 component=d microbatch=1
19 r1.compute | forward loss x2 | 13,18 | stage=1 replica=0 component=loss microbatch=1
20 r1.compute | backward loss x2 | 16 | stage=1 replica=0 component=loss microbatch=0
21 r1.compute | backward d x2 | 15,20 | stage=1 replica=0 component=d microbatch=0
22 r1.pp>0 r0.pp<1 | send_recv 256 B 1>0 | 21 | stage=1 replica=0 microbatch=0 value=a:0 gradient=True
23 r1.compute | backward c x2 | 14,21 | stage=1 replica=0 component=c microbatch=0
24 r1.pp>0 r0.pp<1 | send_recv 256 B 1>0 | 23 | stage=1 replica=0 microbatch=0 value=b:0 gradient=True
25 r1.compute | backward loss x2 | 19 | stage=1 replica=0 component=loss microbatch=1
26 r1.compute | backward d x2 | 18,25 | stage=1 replica=0 component=d microbatch=1
27 r1.pp>0 r0.pp<1 | send_recv 256 B 1>0 | 26 | stage=1 replica=0 microbatch=1 value=a:0 gradient=True
28 r1.compute | backward c x2 | 17,26 | stage=1 replica=0 component=c microbatch=1
29 r1.pp>0 r0.pp<1 | send_recv 256 B 1>0 | 28 | stage=1 replica=0 microbatch=1 value=b:0 gradient=True
30 r0.compute | optimizer 300 elements in 2 | 12 | stage=0 replica=0
31 r1.compute | optimizer 700 elements in 2 | 28 | stage=1 replica=0
"""


def plan(stages: tuple[tuple[str, ...], ...], mesh: Mesh, **options: object) -> Plan:
    settings: dict[str, object] = {"strategy": "custom", "global_batch": 8, **options}
    entries = tuple(Stage(components=names, ranks=mesh.stage_ranks(number)) for number, names in enumerate(stages))
    return Plan(mesh=mesh, stages=entries, **settings)  # type: ignore[arg-type]


def test_data_parallel_step() -> None:
    graph = lower(plan((("c0", "c1", "loss"),), Mesh(dp=2), bucket_bytes=1), chain_model((1e6, 1e6)))
    assert to_text(graph) == DP
    assert from_text(DP) == graph


def test_pipeline_with_a_skip_sends_every_value_once_per_reading_stage() -> None:
    graph = lower(
        plan((("a", "b"), ("c", "d", "loss")), Mesh(pp=2), global_batch=4, microbatches=2, pipeline_order="gpipe"),
        residual_model(),
    )
    text = to_text(graph)
    assert text == PIPELINE
    sends = [task for task in graph.tasks if task.origin.value is not None]
    assert [(task.origin.value, task.origin.microbatch) for task in sends[:4]] == [
        ("a:0", 0),
        ("b:0", 0),
        ("a:0", 1),
        ("b:0", 1),
    ]
    assert len(sends) == 8


def test_a_parameter_tied_across_stages_is_reduced_over_all_its_holders() -> None:
    graph = lower(plan((("a", "b"), ("c", "d", "loss")), Mesh(pp=2, dp=2)), residual_model(tied=True))
    reductions = [task for task in graph.tasks if task.origin.bucket is not None]
    groups = [task.work.group for task in reductions]  # type: ignore[union-attr]
    sizes = [task.work.size_bytes for task in reductions]  # type: ignore[union-attr]
    assert groups == [(0, 1), (2, 3), (0, 1, 2, 3)]
    assert sizes == [4 * 200, 4 * (300 + 400), 4 * 100]
