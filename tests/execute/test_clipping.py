"""Clipping by the global norm as tasks of the graph, and its price. `test_equality` trains with it."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from experiments.common.equality import Case
from experiments.common.mixed import MODELS, random_case
from parsim.hardware.cluster import cluster_from_profile
from parsim.hardware.compose import load_profile
from parsim.plans.mesh import Mesh
from parsim.plans.plan import Plan
from parsim.predict.evaluate import evaluate
from parsim.predict.problem import PlanningProblem
from parsim.program.lower import lower
from parsim.program.passes.gradients import counted_by, sums_norm
from parsim.program.placed import PlanIndex
from parsim.program.taskgraph import from_text, to_text
from parsim.search.search import search
from parsim.work import ClipGradients, Collective
from tests.execute.small_plans import GPT, MLP, case
from tests.quick import some_quick


@pytest.mark.parametrize("seed", some_quick(range(2, 5), 2))
def test_every_gradient_is_counted_once(seed: int) -> None:
    item = random_case(random.Random(seed).choice(list(MODELS)), 4, random.Random(seed))
    layout = PlanIndex(item.plan, item.model)
    counted: dict[tuple[object, ...], list[tuple[int, int]]] = {}
    for rank in range(item.plan.world_size):
        for part in counted_by(layout, rank):
            name = tuple((held.name, held.shard if held.part else 0, held.ways) for held in part.bucket.parameters)
            if part.elements:
                counted.setdefault(name, []).append((part.start, min(part.stop, part.bucket.elements)))
    total = 0
    for parts in counted.values():
        end = 0
        for start, stop in sorted(parts):
            assert start == end
            end = stop
        total += end
    assert total == sum(parameter.elements for parameter in item.model.parameters if parameter.trainable)


def with_clipping(item: Case) -> Plan:
    return replace(item.plan, clip_gradients=True)


@pytest.mark.parametrize("stage", range(4))
def test_clipping_stands_in_the_graph(stage: int) -> None:
    """Two computations per rank and one all_reduce of 8 bytes between them."""
    item = case(MLP, Mesh(pp=2, dp=2), zero_stage=stage, microbatches=2)
    graph, plain = lower(with_clipping(item), item.model), lower(item.plan, item.model)
    norms = [task for task in graph.tasks if sums_norm(task)]
    assert len(graph.tasks) == len(plain.tasks) + 2 * 4 + 1
    assert [task.work for task in norms] == [Collective(operation="all_reduce", group=(0, 1, 2, 3), size_bytes=8)]
    clips = [task for task in graph.tasks if isinstance(task.work, ClipGradients)]
    assert {(task.ranks[0], task.work.part) for task in clips if isinstance(task.work, ClipGradients)} == {
        (rank, part) for rank in range(4) for part in ("norm", "scale")
    }
    assert from_text(to_text(graph)) == graph
    assert Plan.from_json(with_clipping(item).to_json()) == with_clipping(item)


def problem(clip: bool) -> PlanningProblem:
    cluster = cluster_from_profile(load_profile("dgx1-v100-32gb"), 4)
    return PlanningProblem(model=case(GPT, Mesh()).model, cluster=cluster, global_batch=16, clip_gradients=clip)


def test_clipping_is_priced_folded_or_not() -> None:
    """Every plan of a search clips, and its step is longer for it; folding changes nothing."""
    plain, asked = problem(False), problem(True)
    for item in (case(GPT, Mesh(dp=4), batch=16), case(GPT, Mesh(pp=2, dp=2), batch=16, microbatches=2, zero_stage=1)):
        plan = with_clipping(item)
        with_it = evaluate(asked, plan, fold=False).result.step_s.median
        assert with_it > evaluate(plain, item.plan, fold=False).result.step_s.median
        assert evaluate(asked, plan).result.step_s.median == pytest.approx(with_it, rel=1e-9)
    found = search(asked, ("dp",))
    assert found.chosen is not None
    assert found.chosen.result.plan.clip_gradients
