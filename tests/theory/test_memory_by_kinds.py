"""What waits on a rank is counted once for values that are alike: the bytes are those of counting every value by itself."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import given, settings
from hypothesis import strategies as st

from parsim.model.component import Value
from parsim.plans.mesh import Mesh
from parsim.plans.plan import Plan, Stage
from parsim.program.lifetimes import KeptActivations, RankValues
from parsim.program.placed import PlanIndex
from tests.models import deep_model
from tests.theory.test_lowering_by_kinds import planned


def keeping(layout: PlanIndex, values: dict[str, Value], *, by_kinds: bool = True) -> KeptActivations:
    """What is kept, of values with keepers of their own choice; `by_kinds`: what is alike is counted once."""
    kept = KeptActivations(layout, "fp32")
    kept.__dict__["values"] = values
    if not by_kinds:
        kept.__dict__["kinds"] = {}
    return kept


def counted(here: RankValues) -> tuple[object, ...]:
    return (
        here.waiting_values(),
        here.waiting_gradients(),
        here.held_bytes(),
        here.loaded_bytes(),
        [here.gradients_of(name) for name in here.names],
    )


def kept_values(draw: st.DataObject, layout: PlanIndex) -> dict[str, Value]:
    """Values of a block are mostly kept by the same components, and some by as many others."""
    names = sorted(value.name for value in layout.model.values if value.producer is not None)
    odd = draw.draw(st.sets(st.sampled_from(names), max_size=4))
    usual: dict[tuple[str, int], set[int] | None] = {}
    found = {}
    for value in layout.model.values:
        users = (*(() if value.producer is None else (value.producer,)), *layout.consumers[value.name])
        kind = (value.producer or "").split(".")[-1], len(users)
        if kind not in usual:
            usual[kind] = draw.draw(st.none() | st.sets(st.integers(0, len(users) - 1)))
        places = usual[kind]
        if places is not None and value.name in odd:
            places = {(place + 1) % len(users) for place in places}
        savers = None if places is None else tuple(users[place] for place in sorted(places))
        found[value.name] = replace(value, savers=savers)
    return found


@settings(max_examples=40)
@given(st.data())
def test_a_rank_keeps_what_it_keeps_when_every_value_is_counted(draw: st.DataObject) -> None:
    layout = planned(draw, placed=draw.draw(st.booleans()))
    values = kept_values(draw, layout)
    shared, anew = keeping(layout, values), keeping(layout, values, by_kinds=False)
    for rank in range(layout.plan.world_size):
        if layout.rank_components(rank) and (layout.shards_alike or rank % layout.plan.mesh.tp == 0):
            assert counted(RankValues(shared, rank)) == counted(RankValues(anew, rank))


def test_what_is_counted_does_not_grow_with_the_blocks() -> None:
    """Of a chain in two stages, whatever its length."""

    def count(layers: int) -> int:
        model = deep_model(layers)
        names = tuple(component.name for component in model.components)
        mesh, half = Mesh(pp=2, tp=2), len(names) // 2
        stages = tuple(
            Stage(components=part, ranks=mesh.stage_ranks(place)) for place, part in enumerate((names[:half], names[half:]))
        )
        plan = Plan(strategy="custom", mesh=mesh, stages=stages, global_batch=32, microbatches=4)
        layout = PlanIndex(plan, model)
        kept = KeptActivations(layout, "fp32")
        for rank in (0, 2):
            counted(RankValues(kept, rank))
        return len(kept.counted)

    assert count(24) == count(48)
