"""ZeRO 2 and 3 for real: equal to single-process training, and whole on a rank only what is needed there."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch

from parsim.model.trace.memory import LiveBytes
from parsim.plans.mesh import Mesh
from tests.execute.equality import Case
from tests.execute.rank_states import MLP as SMALL_MLP
from tests.execute.rank_states import even_plan, rank_of
from tests.execute.test_equality import BERT, GPT, MLP, RESNET, TOKENS, VGG, VIT, assert_equal_to_one_process, case

ADAM = {"optimizer": "adam", "learning_rate": 1e-3}
ADAMW = {"optimizer": "adamw", "learning_rate": 1e-3}

QUICK = [
    case(MLP, Mesh(dp=2), zero_stage=2, microbatches=4, bucket_bytes=2**11, **ADAM),
    case(MLP, Mesh(dp=2), zero_stage=3, microbatches=2, bucket_bytes=1, recompute="full", **ADAMW),
    case(GPT, Mesh(dp=2), zero_stage=2, microbatches=2),
    case(GPT, Mesh(dp=2), zero_stage=3, microbatches=2, bucket_bytes=2**12),
    case(VIT, Mesh(dp=2), zero_stage=3, **ADAM),
    case(RESNET, Mesh(dp=2), zero_stage=3, batch=4, microbatches=2, optimizer="sgd"),
]

TWO_RANKS = [
    item
    for spec in (MLP, VIT, RESNET, GPT, BERT, VGG)
    for stage in (2, 3)
    for item in (
        case(spec, Mesh(dp=2), zero_stage=stage, microbatches=2),
        case(spec, Mesh(dp=2), zero_stage=stage, bucket_bytes=2**12, **ADAMW),
    )
]

FOUR_RANKS = {
    spec.name: [
        item
        for stage in (2, 3)
        for item in (
            case(spec, Mesh(dp=4), zero_stage=stage, microbatches=2, bucket_bytes=2**13, **ADAM),
            case(spec, Mesh(pp=2, dp=2), zero_stage=stage, microbatches=4, bucket_bytes=2**12, **ADAMW),
            case(spec, Mesh(pp=2, dp=2), zero_stage=stage, microbatches=2, order="gpipe", optimizer="sgd", recompute="full"),
            case(spec, Mesh(pp=2, dp=2), zero_stage=stage, microbatches=4, order="interleaved", chunks=2),
            case(spec, Mesh(pp=2, dp=2), zero_stage=stage, microbatches=4, order="zero-bubble", bucket_bytes=2**12),
        )
    ]
    for spec in (MLP, VIT, RESNET, GPT, BERT, VGG)
}


@pytest.mark.xdist_group("launch")
@pytest.mark.parametrize("steps", [30, pytest.param(100, marks=pytest.mark.slow)])
def test_plans_on_two_processes_equal_one_process(tmp_path: Path, steps: int) -> None:
    assert_equal_to_one_process(QUICK, tmp_path, steps=steps)


@pytest.mark.slow
@pytest.mark.xdist_group("launch")
def test_every_model_on_two_processes(tmp_path: Path) -> None:
    assert_equal_to_one_process(TWO_RANKS, tmp_path)


@pytest.mark.slow
@pytest.mark.xdist_group("launch")
@pytest.mark.parametrize("name", FOUR_RANKS)
def test_every_model_and_pipeline_on_four_processes(name: str, tmp_path: Path) -> None:
    assert_equal_to_one_process(FOUR_RANKS[name], tmp_path, steps=10)


@pytest.mark.slow
@pytest.mark.xdist_group("launch")
def test_replicas_of_shards_on_four_processes(tmp_path: Path) -> None:
    """dp 2 x tp 2, components sharded, replicated, placed and batch-sharded as they were drawn."""
    cases = [
        Case(
            spec=spec,
            plan=even_plan(spec, Mesh(dp=2, tp=2), zero=stage, placing=random.Random(stage)),
            dataset="synthetic" if spec.name in TOKENS else "digits",
            optimizer="adam",
            learning_rate=1e-3,
        )
        for spec in (MLP, VIT, GPT)
        for stage in (2, 3)
    ]
    assert all("shard" in str(case.plan) for case in cases)
    assert_equal_to_one_process(cases, tmp_path, steps=20)


@pytest.mark.parametrize(("zero", "weights", "gradients"), [(0, 1, 1), (1, 1, 1), (2, 1, 4), (3, 4, 4)])
def test_what_stays_on_a_rank_between_steps(zero: int, weights: int, gradients: int) -> None:
    """Of dp=4: all of the weights and gradients, or a quarter of each bucket, padded."""
    rank = rank_of(SMALL_MLP, even_plan(SMALL_MLP, Mesh(dp=4), zero=zero), 0, optimizer="sgd")
    buckets = rank.layout.rank_buckets(0)
    whole = 8 * sum(bucket.chunk_elements * 4 if zero else bucket.elements for bucket in buckets)
    with LiveBytes() as live:
        for line, tensors in rank.resident_tensors().items():
            for tensor in tensors:
                live.track(tensor, line)
        assert live.current_bytes == whole // weights + whole // gradients


def test_gathered_parameters_come_and_go_in_one_place() -> None:
    """What autograd has saved of a parameter is there again once it is gathered again."""
    ranks = [rank_of(SMALL_MLP, even_plan(SMALL_MLP, Mesh(dp=2), zero=3), rank) for rank in range(2)]
    whole = rank_of(SMALL_MLP, even_plan(SMALL_MLP, Mesh(dp=2)), 0)
    first, *_ = ranks[0].layout.buckets
    divided = [rank.divided[first.number] for rank in ranks]
    parameter = ranks[0].parameters[first.parameters[0].name]
    view = parameter.data.reshape(-1)

    def gather() -> torch.Tensor:
        return divided[0].begin_parameters().copy_(torch.cat([bucket.chunk.data for bucket in divided]))

    flat = gather()
    expected = whole.parameters[first.parameters[0].name]
    assert torch.equal(parameter, expected)
    divided[0].end_parameters()
    assert flat.untyped_storage().nbytes() == 0
    gather()
    assert torch.equal(view, expected.reshape(-1))
