"""Clipping by the global norm: torch's clip_grad_norm_ in one process, under every kind of plan; as tasks of the graph."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from experiments.common.reference import largest_difference, train_reference
from parsim.data.datasets import dataset_for
from parsim.execute.job import PLAIN, TrainingRecipe
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
from parsim.program.templates import lower_columns
from parsim.search.search import search
from parsim.work import ClipGradients, Collective
from tests.execute.equality import Case
from tests.execute.mixed import MODELS, random_case
from tests.execute.test_equality import GPT, MLP, VIT, assert_equal_to_one_process, case

CLIP = TrainingRecipe(clip_norm=0.5)


def clipped(item: Case) -> Case:
    return replace(
        item, plan=replace(item.plan, clip_gradients=True), recipe=CLIP, optimizer="sgd_momentum", learning_rate=0.02
    )


QUICK = [
    clipped(case(MLP, Mesh(dp=2), bucket_bytes=2**11)),
    clipped(case(MLP, Mesh(dp=2), zero_stage=1, bucket_bytes=2**11)),
    clipped(case(GPT, Mesh(dp=2), zero_stage=2, microbatches=2)),
    clipped(case(VIT, Mesh(dp=2), zero_stage=3, bucket_bytes=2**12)),
    clipped(case(GPT, Mesh(pp=2), microbatches=2)),
    *[clipped(random_case(name, 2, random.Random(seed))) for seed, name in enumerate(("mlp", "gpt_small"))],
]


@pytest.mark.xdist_group("launch")
def test_plans_clip_as_one_process_does(tmp_path: Path) -> None:
    assert_equal_to_one_process(QUICK, tmp_path, steps=5)


def test_the_norm_that_is_asked_for_changes_the_training() -> None:
    item = QUICK[0]
    data = dataset_for(item.spec, item.dataset, root=None)
    ends = [
        train_reference(
            item.spec, item.plan, data, optimizer="sgd", learning_rate=0.02, dtype=torch.float64, seed=0, steps=5, recipe=recipe
        ).parameters
        for recipe in (CLIP, PLAIN)
    ]
    assert largest_difference(*ends) > 1e-3


@pytest.mark.slow
@pytest.mark.xdist_group("launch")
@pytest.mark.parametrize("processes", [2, 4])
def test_random_plans_clip_as_one_process_does(tmp_path: Path, processes: int) -> None:
    rng = random.Random(processes)
    cases = [clipped(random_case(name, processes, rng)) for name in MODELS if name != "resnet_small" for _ in range(3)]
    cases += [clipped(case(spec, Mesh(pp=2, dp=2), zero_stage=stage)) for spec in (MLP, GPT) for stage in (0, 1, 2, 3)][
        : 8 if processes == 4 else 0
    ]
    assert_equal_to_one_process(cases, tmp_path, steps=30)


@pytest.mark.slow
@pytest.mark.xdist_group("launch")
def test_a_scaled_loss_is_unscaled_before_it_is_clipped(tmp_path: Path) -> None:
    from tests.execute.equality import compare_case, run_cases

    item = replace(clipped(case(MLP, Mesh(dp=2), zero_stage=1, dtype="float32", precision="amp_fp16")), loss_scale=2.0**12)
    (run,) = run_cases([item], tmp_path, steps=10)
    assert compare_case(item, run, tmp_path, steps=10).parameters <= 2e-3


@pytest.mark.parametrize("seed", range(2, 5))
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


@pytest.mark.parametrize("item", [case(MLP, Mesh(pp=2, dp=2), zero_stage=stage, microbatches=2) for stage in range(4)], ids=str)
def test_clipping_stands_in_the_graph(item: Case) -> None:
    """Two computations per rank and one all_reduce of 8 bytes between them; expanded columns are the same program."""
    graph, plain = lower(with_clipping(item), item.model), lower(item.plan, item.model)
    norms = [task for task in graph.tasks if sums_norm(task)]
    assert len(graph.tasks) == len(plain.tasks) + 2 * 4 + 1
    assert [task.work for task in norms] == [Collective(operation="all_reduce", group=(0, 1, 2, 3), size_bytes=8)]
    clips = [task for task in graph.tasks if isinstance(task.work, ClipGradients)]
    assert {(task.ranks[0], task.work.part) for task in clips if isinstance(task.work, ClipGradients)} == {
        (rank, part) for rank in range(4) for part in ("norm", "scale")
    }
    assert from_text(to_text(graph)) == graph
    columns = lower_columns(with_clipping(item), item.model)
    assert columns.size == len(graph.tasks)
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
