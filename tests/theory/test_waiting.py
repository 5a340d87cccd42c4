"""Values and gradients that wait beside a running component: by hand on three branches whose sum is read at the end."""

from __future__ import annotations

import pytest

from parsim.model.component import Component, Value
from parsim.model.model import Model
from parsim.plans.mesh import Mesh
from parsim.plans.plan import Plan, Stage
from parsim.program.lifetimes import KeptActivations, RankValues, alive_bytes
from parsim.program.placed import PlanIndex

SAMPLES = 3


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
    layout = PlanIndex(Plan(strategy="custom", mesh=mesh, stages=parts, global_batch=SAMPLES), model)
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
