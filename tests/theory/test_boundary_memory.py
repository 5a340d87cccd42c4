"""What lies on a rank of values and gradients between its components, in every layout: by hand on small models."""

from __future__ import annotations

from dataclasses import replace

import pytest

from parsim.model.component import Component, Parameter, Value
from parsim.model.model import Model
from parsim.plans.layouts import BATCH, REPLICATE, Placement, ValueLayout, conversion
from parsim.plans.mesh import Mesh
from parsim.plans.plan import Plan, Stage
from parsim.program.lifetimes import KeptActivations, Lifetime, RankValues, storage_of
from parsim.program.placed import PlanIndex

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
    layout = placed(model, FIRST, FIRST, FIRST, BATCH)
    assert here(layout, 0).gradients_of("c")[:2] == (2 * WHOLE, 4 * WHOLE)


def test_a_copy_for_another_layout_waits_for_its_reader() -> None:
    """a's output is read on rank 1 by b, which keeps it, and later by c on all ranks: that copy waits while b runs."""
    model = branched()
    layout = placed(model, BATCH, SECOND, REPLICATE, REPLICATE)
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
