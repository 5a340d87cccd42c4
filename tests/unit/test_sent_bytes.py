"""Under autocast values and gradients are sent as wide as they arrive: 2 bytes where autocast made them."""

from __future__ import annotations

from dataclasses import replace

import pytest

from parsim.model.component import Component, Value, ValueFootprint
from parsim.model.formats import model_as_sent, value_in
from parsim.model.model import Model

KEPT = ValueFootprint(bytes_per_sample=400, fixed_bytes=0, saved=True, savers=("b",))
"""A stream that autocast leaves in fp32."""


def model(half: ValueFootprint | None = None) -> Model:
    return Model(
        name="two",
        granularity="block",
        components=(Component(name="a", inputs=("x",), outputs=("y",)), Component(name="b", inputs=("y",), outputs=("z",))),
        values=(
            Value(name="x", producer=None, bytes_per_sample=80, differentiable=False),
            Value(name="y", producer="a", bytes_per_sample=400, storage_bytes_per_sample=800, half=half),
            Value(name="z", producer="b", bytes_per_sample=4),
        ),
        inputs=("x",),
        outputs=("z",),
    )


@pytest.mark.parametrize("precision", ["fp32", "tf32", "bf16", "fp8"])
def test_without_autocast_the_model_is_the_same(precision: str) -> None:
    whole = model()
    assert model_as_sent(whole, precision) is whole


@pytest.mark.parametrize("precision", ["amp_bf16", "amp_fp16"])
def test_what_was_not_recorded_shrinks_to_two_bytes_and_token_ids_do_not(precision: str) -> None:
    sent = model_as_sent(model(), precision)
    assert [value.bytes_per_sample for value in sent.values] == [80, 200, 2]


def test_what_was_recorded_decides() -> None:
    assert model_as_sent(model(KEPT), "amp_bf16").value["y"].bytes_per_sample == 400
    assert model_as_sent(model(replace(KEPT, bytes_per_sample=200)), "amp_bf16").value["y"].bytes_per_sample == 200


@pytest.mark.parametrize("half", [None, KEPT, replace(KEPT, bytes_per_sample=200, savers=())])
def test_memory_counts_the_same_values_afterwards(half: ValueFootprint | None) -> None:
    whole = model(half)
    sent = model_as_sent(whole, "amp_bf16")
    assert model_as_sent(sent, "amp_bf16") is sent
    for before, after in zip(whole.values, sent.values, strict=True):
        expected, found = value_in(before, "amp_bf16"), value_in(after, "amp_bf16")
        assert replace(expected, half=None) == replace(found, half=None)
