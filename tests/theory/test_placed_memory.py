"""Memory of ranks whose components are placed each in its own way: by hand, against the uniform path, and in general."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import pytest

from parsim.hardware.cluster import Cluster, cluster_from_profile
from parsim.hardware.compose import load_profile
from parsim.model.formats import Numerics
from parsim.model.model import Model
from parsim.plans.layouts import parse_placement
from parsim.plans.mesh import Mesh
from parsim.plans.plan import Plan, Stage
from parsim.predict.memory import RankMemory, plan_memory
from parsim.program.placed import PlanIndex
from tests.models import chain_model, sharded_model

MODEL = sharded_model()
BATCH = 64
VALUE = BATCH * 256
"""Bytes of any value between the components of MODEL, of the whole batch."""
WEIGHT, BIAS = 1024, 16


@cache
def cluster() -> Cluster:
    return cluster_from_profile(load_profile("dgx1-v100-32gb"))


def plan(*placements: str, mesh: Mesh | None = None, model: Model = MODEL, zero_stage: int = 0, **more: object) -> Plan:
    mesh = mesh or Mesh(tp=4)
    names = tuple(component.name for component in model.components)
    cuts = [round(number * len(names) / mesh.pp) for number in range(mesh.pp + 1)]
    parsed = tuple(parse_placement(text) for text in placements)
    stages = tuple(
        Stage(components=names[cuts[n] : cuts[n + 1]], ranks=mesh.stage_ranks(n), placements=parsed[cuts[n] : cuts[n + 1]])
        for n in range(mesh.pp)
    )
    document = {"strategy": "custom", "mesh": mesh, "stages": stages, "global_batch": BATCH, "zero_stage": zero_stage, **more}
    return Plan(**document)  # type: ignore[arg-type]


def memory(of: Plan, model: Model = MODEL, optimizer: str = "adam") -> tuple[RankMemory, ...]:
    return plan_memory(PlanIndex(of, model), cluster(), Numerics(optimizer=optimizer))


SHARDED = ("shard:column/4", "shard:row/4", "shard:column/4", "shard:row/4", "batch")


def test_shards_hold_their_piece_and_see_the_whole_batch() -> None:
    for found in memory(plan(*SHARDED)):
        assert found.line("parameters") == found.line("gradients") == 4 * 4 * (WEIGHT // 4 + BIAS)
        assert found.line("optimizer_state") == 8 * 4 * (WEIGHT // 4 + BIAS)
        assert found.line("activations") == 2 * VALUE + 2 * VALUE // 4, "what the row-wise ones save is cut with their input"
        assert found.line("inputs") == 8 * BATCH, "the targets, all loaded as a reads all; a saves its input"


def test_partial_sums_are_kept_by_nobody_and_batch_shards_hand_on_what_they_made() -> None:
    assert memory(plan(*SHARDED))[0].line("boundary_values") == 4, "the loss alone"
    assert memory(plan(*["batch"] * 5))[0].line("boundary_values") == 4


def test_a_converted_copy_is_counted_beside_the_value() -> None:
    """a makes pieces of the batch (a quarter, saved); b reads a piece of the features of all samples: another quarter."""
    one = memory(plan("batch", "shard:row/4", "batch", "batch", "batch"))[0]
    assert one.line("boundary_values") == 4 + VALUE // 4


def test_a_piece_of_the_batch_is_a_view_that_keeps_the_whole_alive() -> None:
    """a makes the whole on every rank, b reads a quarter of it: the other three quarters live as long."""
    one = memory(plan("replicate", "batch", "batch", "batch", "batch"))[0]
    assert one.line("boundary_values") == 4 + VALUE - VALUE // 4


def test_placed_components_leave_the_other_ranks_empty() -> None:
    found = memory(plan("place:0", "place:0", "place:1", "place:1", "place:1"))
    assert [entry.line("parameters") for entry in found] == [2 * 4 * (WEIGHT + BIAS)] * 2 + [0, 0]
    assert [entry.line("activations") for entry in found] == [2 * VALUE, 2 * VALUE, 0, 0]
    assert [entry.line("boundary_values") for entry in found] == [0, VALUE + 4, 0, 0], "b:0 arrives on rank 1"
    assert [entry.line("inputs") for entry in found] == [0, 8 * BATCH, 0, 0]


def test_replicas_of_the_tp_axis_hold_everything() -> None:
    alone = memory(plan(mesh=Mesh(), zero_stage=0))[0]
    everywhere = memory(plan(*["replicate"] * 5))
    for line in ("parameters", "gradients", "optimizer_state", "activations", "boundary_values", "inputs"):
        assert {entry.line(line) for entry in everywhere} == {alone.line(line)}


@pytest.mark.parametrize("ranks", [2, 3, 8])
def test_zero_divides_the_optimizer_state_and_pads_the_buckets(ranks: int) -> None:
    model = chain_model(elements=1001)
    mesh = Mesh(dp=ranks)
    of = plan(mesh=mesh, model=model, zero_stage=1, global_batch=24, bucket_bytes=1)
    found = memory(of, model)
    part = -(-1001 // ranks)
    for entry in found:
        assert entry.line("optimizer_state") == 8 * 4 * part
        assert entry.line("parameters") == entry.line("gradients") == 4 * 4 * part * ranks
    without = memory(replace(of, zero_stage=0), model)
    assert without[0].line("optimizer_state") == 8 * 4 * 1001
    assert without[0].line("parameters") == 4 * 4 * 1001


def test_zero_divides_only_what_several_ranks_hold_alike() -> None:
    """Pieces of weights are on one rank each; the whole biases on all four."""
    found = memory(plan(*SHARDED, zero_stage=1))[0]
    assert found.line("optimizer_state") == 8 * 4 * (WEIGHT // 4 + BIAS // 4)


def test_ranks_of_every_replica_are_alike() -> None:
    mesh = Mesh(dp=2, tp=2)
    found = memory(plan("place:0", "place:1", "batch", "batch", "batch", mesh=mesh))
    assert [entry.rank for entry in found] == [0, 1, 2, 3]
    assert [entry.lines for entry in found[:2]] == [entry.lines for entry in found[2:]]
    assert found[0].lines != found[1].lines
