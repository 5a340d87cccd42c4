"""Memory of ranks whose components are placed each in its own way: values, gradients, chunks and halves, by hand."""

from __future__ import annotations

import itertools
from dataclasses import replace
from functools import cache

import pytest
from hypothesis import given
from hypothesis import strategies as st

from parsim.hardware.cluster import Cluster, cluster_from_profile
from parsim.hardware.compose import load_profile
from parsim.hardware.devices import NO_ALLOCATOR
from parsim.model.component import Component, Parameter, Value
from parsim.model.formats import Numerics
from parsim.model.model import Model
from parsim.plans.layouts import BATCH as BATCH_SHARDED
from parsim.plans.layouts import REPLICATE, Placement, ValueLayout, conversion, parse_placement
from parsim.plans.mesh import Mesh
from parsim.plans.pipeline import in_flight, pipeline_actions, rank_of_stage
from parsim.plans.plan import Plan, Stage
from parsim.predict.memory import RankMemory
from parsim.program.lifetimes import (
    KeptActivations,
    Lifetime,
    Pipeline,
    RankValues,
    StageLink,
    alive_bytes,
    held_moments,
    storage_of,
)
from parsim.program.placed import PlanIndex
from parsim.work import Phase
from tests.models import chain_model, residual_model, sharded_model
from tests.plans import plan_memory

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


# What lies on a rank of values and gradients between its components, in every layout: by hand on small models.

SAMPLES, RATE = 8, 100
WHOLE = SAMPLES * RATE
FIRST, SECOND = Placement("place", shard=0), Placement("place", shard=1)


def branched(*, views: bool = False) -> Model:
    """a -> b -> c -> loss, and c reads what a makes too; c concatenates, so its gradients may be parts of one."""
    parameter = (Parameter(name="w", elements=4),)
    made = [
        Component(name="a", inputs=("input:0",), outputs=("a:0",), parameters=parameter),
        Component(name="b", inputs=("a:0",), outputs=("b:0",), parameters=(replace(parameter[0], name="v"),)),
        Component(
            name="c", inputs=("a:0", "b:0"), outputs=("c:0",), gradient_views=(("a:0", "c:0"), ("b:0", "c:0")) if views else ()
        ),
        Component(name="loss", inputs=("c:0", "target"), outputs=("loss:0",)),
    ]
    values = [
        Value(name="input:0", producer=None, bytes_per_sample=10, differentiable=False, savers=()),
        Value(name="target", producer=None, bytes_per_sample=10, differentiable=False, savers=()),
        Value(name="a:0", producer="a", bytes_per_sample=RATE, savers=("b",)),
        Value(name="b:0", producer="b", bytes_per_sample=RATE, savers=("b", "c")),
        Value(name="c:0", producer="c", bytes_per_sample=2 * RATE, savers=()),
        Value(name="loss:0", producer="loss", bytes_per_sample=0, fixed_bytes=4, savers=()),
    ]
    return Model(
        name="branched",
        granularity="layer",
        components=tuple(made),
        values=tuple(values),
        inputs=("input:0", "target"),
        outputs=("loss:0",),
    )


def placed(model: Model, *placements: Placement) -> PlanIndex:
    mesh = Mesh(tp=2)
    names = tuple(component.name for component in model.components)
    stage = Stage(components=names, ranks=mesh.stage_ranks(0), placements=placements)
    return PlanIndex(Plan(strategy="custom", mesh=mesh, stages=(stage,), global_batch=SAMPLES), model)


def here(layout: PlanIndex, rank: int) -> RankValues:
    return RankValues(KeptActivations(layout, "fp32"), rank)


def of(value: str, lifetimes: list[Lifetime]) -> list[tuple[int, int, float]]:
    """Where a value is: first and last component, and bytes."""
    return [(life.born, life.freed, life.size_bytes) for life in lifetimes if life.value == value and life.born <= life.freed]


@pytest.mark.parametrize("operation", ["broadcast", "scatter"])
def test_who_sends_copies_or_pieces_keeps_its_own_tensor(operation: str) -> None:
    made = ValueLayout("placed", 2, rank=0)
    wanted = ValueLayout("full", 2 if operation == "broadcast" else 1)
    hops = conversion(made, wanted, 2)
    assert [hop.operation for hop in hops] == [operation]
    assert storage_of(hops, made, 0) == made
    assert storage_of(hops, made, 1) == wanted


def test_a_broadcast_value_is_held_once_by_its_maker() -> None:
    """b makes it on rank 0 and keeps it; c reads it on both ranks and keeps it. Rank 1 has a copy, rank 0 none."""
    model = branched()
    layout = placed(model, FIRST, FIRST, REPLICATE, REPLICATE)
    held = [sum(here(layout, rank).held_bytes().values()) for rank in range(2)]
    assert held == [0.0, WHOLE], "what b saves on rank 0 is its own; c's copy on rank 1 is nobody's"


def test_a_gradient_that_moves_is_on_one_rank_at_a_time() -> None:
    """Of c's output: from loss on rank 1 to c on rank 0. Neither rank ever has it twice."""
    model = branched()
    layout = placed(model, FIRST, FIRST, FIRST, SECOND)
    assert here(layout, 0).gradients_of("c")[:2] == (2 * WHOLE, 2 * WHOLE)


def test_a_rank_that_gathers_has_the_pieces_and_the_whole() -> None:
    model = branched()
    layout = placed(model, FIRST, FIRST, FIRST, BATCH_SHARDED)
    assert here(layout, 0).gradients_of("c")[:2] == (2 * WHOLE, 4 * WHOLE)


def test_a_copy_for_another_layout_waits_for_its_reader() -> None:
    """a's output is read on rank 1 by b, which keeps it, and later by c on all ranks: that copy waits while b runs."""
    model = branched()
    layout = placed(model, BATCH_SHARDED, SECOND, REPLICATE, REPLICATE)
    waits = of("a:0", here(layout, 1).waiting_values())
    assert (1, 1, WHOLE) in waits, "b counts it from its forward on"
    assert (1, 2, WHOLE) in waits, "the whole that c reads"
    assert of("a:0", here(layout, 0).waiting_values()) == [(1, 1, WHOLE)], "rank 0 runs a and c alone"


def test_a_gradient_that_is_a_part_of_another_keeps_all_of_it() -> None:
    """The gradient of a's output from c waits beside b, as large as that of c's output; b's addition makes it anew."""
    model = branched(views=True)
    layout = placed(model, REPLICATE, REPLICATE, REPLICATE, REPLICATE)
    assert of("a:0", here(layout, 0).waiting_gradients()) == [(1, 1, 2 * WHOLE)]
    plain = branched()
    layout = placed(plain, REPLICATE, REPLICATE, REPLICATE, REPLICATE)
    assert of("a:0", here(layout, 0).waiting_gradients()) == [(1, 1, WHOLE)]


def test_gradient_views_are_in_the_file_of_a_model_only_where_there_are_any() -> None:
    assert Model.from_json(branched(views=True).to_json()) == branched(views=True)
    assert "gradient_views" not in branched().to_json()


def test_who_only_receives_has_room_as_soon_as_its_communication_before_has_ended() -> None:
    """b runs on rank 0 alone. Rank 1 waits for its output from the beginning, and for its gradient since the loss."""
    model = branched()
    layout = placed(model, REPLICATE, FIRST, REPLICATE, REPLICATE)  # rank 1: a, c, loss
    assert of("b:0", here(layout, 1).waiting_values()) == [(0, 1, WHOLE)]
    assert (1, 2, WHOLE) in of("a:0", here(layout, 1).waiting_gradients())


# Memory action by action (chunks, halves) against the closed form where both hold, and what waits between two stages.


def machine(devices: int) -> Cluster:
    cluster = cluster_from_profile(load_profile("dgx1-v100-32gb"), devices)
    bare = {"context_bytes": 0, "allocator": NO_ALLOCATOR}
    return replace(cluster, devices=tuple(replace(d, type=replace(d.type, **bare)) for d in cluster.devices))  # type: ignore[arg-type]


def pipeline(model: Model, pp: int, *, order: str = "1f1b", chunks: int = 1, **more: object) -> Plan:
    names = tuple(component.name for component in model.components)
    cuts = [round(number * len(names) / (pp * chunks)) for number in range(pp * chunks + 1)]
    mesh = Mesh(pp=pp)
    stages = tuple(
        Stage(components=names[first:last], ranks=mesh.stage_ranks(place))
        for place, (first, last) in zip(rank_of_stage(order, pp, chunks), itertools.pairwise(cuts), strict=True)
    )
    return Plan(strategy="custom", mesh=mesh, stages=stages, global_batch=8, pipeline_order=order, **more)  # type: ignore[arg-type]


def peaks(plan: Plan, model: Model) -> list[int]:
    found = plan_memory(PlanIndex(plan, model), machine(plan.world_size), Numerics(optimizer="sgd"))
    return [sum(entry.tensor_lines.values()) for entry in found]


@given(
    st.sampled_from(["gpipe", "1f1b", "interleaved", "zero-bubble", "zero-bubble-v"]),
    st.integers(1, 4),
    st.sampled_from([1, 2, 4, 8]),
    st.data(),
)
def test_the_moments_hold_what_the_actions_leave(order: str, ranks: int, microbatches: int, data: st.DataObject) -> None:
    chunks = 2 if order in ("interleaved", "zero-bubble-v") else 1
    if order == "interleaved":
        microbatches *= ranks
    rank = data.draw(st.integers(0, ranks - 1))
    found = held_moments(Pipeline(order=order, ranks=ranks, microbatches=microbatches, chunks=chunks), rank)
    actions = pipeline_actions(order, rank, ranks, microbatches, chunks)
    assert found.alive.sum(axis=1).max() == in_flight(order, rank, ranks, microbatches, chunks)
    assert order != "1f1b" or in_flight(order, rank, ranks, microbatches) == min(microbatches, ranks - rank)
    assert {phase for _, phase, _ in found.kinds} == {action.phase for action in actions}
    assert ((found.waiting >= 0) & (found.waiting <= found.alive)).all()


def test_one_rank_of_a_zero_bubble_pipeline_by_hand() -> None:
    """Rank 1 of 2: F0 I0 W0. The half for weights still has the microbatch, that for inputs does not wait for itself."""
    found = held_moments(Pipeline(order="zero-bubble", ranks=2, microbatches=1), 1)
    assert found.kinds == ((0, Phase.FORWARD, 0), (0, Phase.BACKWARD_INPUT, 0), (0, Phase.BACKWARD_WEIGHT, 0))
    assert found.alive.tolist() == [[1], [1], [1]]
    assert found.waiting.tolist() == [[0], [0], [1]]
    assert found.unread.tolist() == [[0], [0], [0]]


@given(st.integers(1, 9))
def test_what_one_chunk_of_a_v_makes_waits_for_the_other(microbatches: int) -> None:
    """Rank 1 of 2 has stages 1 and 2: a value waits from one forward to the other, a gradient likewise in the backward."""
    shape = Pipeline(order="zero-bubble-v", ranks=2, microbatches=microbatches, chunks=2)
    found = held_moments(shape, 1, inner=(StageLink(1, 2), StageLink(2, 1)))
    values, gradients = set[int](), set[int]()
    seen = set()
    for action in pipeline_actions("zero-bubble-v", 1, 2, microbatches, 2):
        forward, back = action.phase is Phase.FORWARD, action.phase in (Phase.BACKWARD, Phase.BACKWARD_INPUT)
        if forward and action.stage == 2:
            values.remove(action.microbatch)
        if back and action.stage == 1:
            gradients.remove(action.microbatch)
        seen.add((action.stage - 1, action.phase, (len(values), len(gradients))))
        if forward and action.stage == 1:
            values.add(action.microbatch)
        if back and action.stage == 2:
            gradients.add(action.microbatch)
    assert not values
    assert not gradients, "all are read"
    kept = {
        (chunk, phase, tuple(between)) for (chunk, phase, _), between in zip(found.kinds, found.between.tolist(), strict=True)
    }
    assert kept <= seen
    for place in (0, 1):
        assert max(between[place] for *_, between in kept) == max(between[place] for *_, between in seen)
    assert microbatches < 4 or max(between[1] for *_, between in kept) >= 1


def test_the_gradient_of_a_skip_between_stages_waits_for_its_maker() -> None:
    """a is read by d on the other rank: its gradient arrives before the backward of b, and is read by that of a."""
    model = residual_model()
    layout = PlanIndex(pipeline(model, 2), model)  # a, b | c, d, loss
    names = layout.rank_components(0)
    assert list(names) == ["a", "b"]
    waiting = RankValues(KeptActivations(layout, "fp32"), 0).waiting_gradients()
    size = model.value["a:0"].size_bytes(8)
    there = [(life.value, life.born, life.freed, life.size_bytes) for life in waiting if life.born <= life.freed]
    assert there == [("a:0", 1, 1, size)], "beside b, from the beginning of the backward; b itself reads that of its output"


# Values and gradients that wait beside a running component: by hand on three branches whose sum is read at the end.

WAITING_SAMPLES = 3


def waiting(*, savers: tuple[str, ...] | None = (), stages: tuple[str, ...] = ("abcd",)) -> tuple[dict[str, float], ...]:
    """x enters a, b and c; d reads what each of them makes: 10, 20 and 40 bytes per sample. Values and gradients beside the
    components of the last stage."""
    made = [Component(name=name, inputs=("x",), outputs=(f"{name}:0",)) for name in "abc"]
    made.append(Component(name="d", inputs=("a:0", "b:0", "c:0"), outputs=("d:0",)))
    values = (
        Value(name="x", producer=None, bytes_per_sample=1, differentiable=False, savers=()),
        Value(name="a:0", producer="a", bytes_per_sample=10, savers=savers),
        Value(name="b:0", producer="b", bytes_per_sample=20, savers=()),
        Value(name="c:0", producer="c", bytes_per_sample=40, savers=()),
        Value(name="d:0", producer="d", bytes_per_sample=0, fixed_bytes=4, savers=()),
    )
    model = Model(name="branches", granularity="layer", components=tuple(made), values=values, inputs=("x",), outputs=("d:0",))
    mesh = Mesh(pp=len(stages))
    parts = tuple(Stage(components=tuple(names), ranks=(rank,)) for rank, names in enumerate(stages))
    layout = PlanIndex(Plan(strategy="custom", mesh=mesh, stages=parts, global_batch=WAITING_SAMPLES), model)
    here = RankValues(KeptActivations(layout, "fp32"), len(stages) - 1)
    return tuple(
        dict(zip(here.names, alive_bytes(lifetimes, len(here.names)), strict=True))
        for lifetimes in (here.waiting_values(), here.waiting_gradients())
    )


def test_values_wait_from_their_maker_to_their_last_reader() -> None:
    assert waiting()[0] == {"a": 3, "b": 3 * 11, "c": 3 * 31, "d": 3 * 70}


def test_gradients_wait_from_the_last_reader_to_the_maker() -> None:
    """Right after the backward of d; those of a component's own outputs are counted with its backward."""
    assert waiting()[1] == {"a": 0, "b": 3 * 10, "c": 3 * 30, "d": 0}


@pytest.mark.parametrize(("savers", "at_d"), [(("a",), 60), (("d",), 70), (None, 60)])
def test_a_saved_value_waits_until_it_is_counted(savers: tuple[str, ...] | None, at_d: int) -> None:
    assert waiting(savers=savers)[0]["d"] == 3 * at_d


def test_a_value_from_another_rank_waits_from_the_beginning() -> None:
    values, gradients = waiting(stages=("ab", "cd"))
    assert values == {"c": 3 * 31, "d": 3 * 70}
    assert gradients == {"c": 0, "d": 0}
