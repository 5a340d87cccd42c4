"""Values and gradients that wait beside a running component: by hand on three branches whose sum is read at the end."""

from __future__ import annotations

import pytest

from parsim.model.component import Component, Value
from parsim.program.lifetimes import Waiting, waiting_bytes


def waiting(*, savers: tuple[str, ...] | None = (), components: str = "abcd", samples: int = 3) -> Waiting:
    """x enters a, b and c; d reads what each of them makes: 10, 20 and 40 bytes per sample."""
    made = {name: Component(name=name, inputs=("x",), outputs=(f"{name}:0",)) for name in "abc"}
    made["d"] = Component(name="d", inputs=("a:0", "b:0", "c:0"), outputs=("d:0",))
    values = {
        "x": Value(name="x", producer=None, bytes_per_sample=1, differentiable=False, savers=()),
        "a:0": Value(name="a:0", producer="a", bytes_per_sample=10, savers=savers),
        "b:0": Value(name="b:0", producer="b", bytes_per_sample=20, savers=()),
        "c:0": Value(name="c:0", producer="c", bytes_per_sample=40, savers=()),
        "d:0": Value(name="d:0", producer="d", bytes_per_sample=0, fixed_bytes=4, savers=()),
    }
    return waiting_bytes([made[name] for name in components], values, lambda value: value.size_bytes(samples))


def test_values_wait_from_their_maker_to_their_last_reader() -> None:
    assert waiting().values == {"a": 3, "b": 3 * 11, "c": 3 * 31, "d": 3 * 70}


def test_gradients_wait_from_the_last_reader_to_the_maker() -> None:
    """Right after the backward of d; those of a component's own outputs are counted with its backward."""
    assert waiting().gradients == {"a": 0, "b": 3 * 10, "c": 3 * 30, "d": 0}


@pytest.mark.parametrize(("savers", "at_d"), [(("a",), 60), (("d",), 70), (None, 60)])
def test_a_saved_value_waits_until_it_is_counted(savers: tuple[str, ...] | None, at_d: int) -> None:
    assert waiting(savers=savers).values["d"] == 3 * at_d


def test_a_value_from_another_rank_waits_from_the_beginning() -> None:
    found = waiting(components="cd")
    assert found.values == {"c": 3 * 31, "d": 3 * 70}
    assert found.gradients == {"c": 0, "d": 0}
