"""What published rows leave out and their frameworks do: clipping, a scaled loss, the limits of a fused kernel."""

from __future__ import annotations

from typing import Any

import pytest

from experiments.published.answer import _problem, answer
from experiments.published.question import question_of
from experiments.published.quoted import in_unit
from experiments.published.rows import row_of
from tests.published_row import row_with

OWN = {"hidden": "1536", "heads": "24", "tp": "8", "pp": "1", "dp": "1", "precision": "fp16"}


def asked(without: str = "", **values: str) -> Any:
    return question_of(row_of(dict(row_with(**OWN | values))), without=without)


def scores_arrays(question: Any) -> float:
    """Of 2 bytes that a score is moved in, between the two products of attention; dropout left out."""
    scores = question.shape.heads * question.seq**2
    moved = [
        operator.activation_bytes / 4 / scores
        for operator in question.model.component("h.0.attn").operators
        if operator.kind == "memory_bound" and dict(operator.shape)["elements"] == scores
    ]
    return sum(moved) - 2.5


@pytest.mark.parametrize(
    ("name", "micro", "seq", "piece", "arrays"),
    [
        ("megatron-sc21-1", "2", "1024", "", 16.4),  # three heads of two samples
        ("megatron-sc21-1", "2", "1024", "limits of the fused softmax", 2.0),
        ("megatron-sc21-1", "4", "1024", "", 2.0),
        ("megatron-sc21-1", "4", "4096", "", 16.4),
        ("nemo-launcher-1", "2", "1024", "", 2.0),
    ],
)
def test_heads_that_the_fused_softmax_does_not_take_are_masked_and_normalised_in_fp32(
    name: str, micro: str, seq: str, piece: str, arrays: float
) -> None:
    question = asked(piece, id=name, micro_batch=micro, seq=seq, heads="24", recompute="none")
    assert scores_arrays(question) == pytest.approx(arrays, rel=1e-6)
    assert any("fused softmax" in text for text in question.lacks) is (arrays > 2)


@pytest.mark.parametrize(("precision", "piece", "expected"), [("fp16", "", "fp16"), ("bf16", "", "bf16"), ("", "", "bf16")])
def test_rows_in_fp16_scale_their_loss_and_share_the_factor_of_bf16(precision: str, piece: str, expected: str) -> None:
    question = asked(piece, precision=precision)
    assert question.precision == "bf16"
    assert _problem(question).numerics.precision == expected


def test_a_scaled_loss_and_clipping_take_time_and_can_be_left_out() -> None:
    whole, unscaled, unclipped = (answer(asked(piece)).step_s for piece in ("", "loss scaling", "clipping"))
    assert unscaled < whole
    assert unclipped < whole
    assert asked().plan.clip_gradients
    assert not asked("clipping").plan.clip_gradients


def test_flop_of_selective_recomputation_are_those_of_its_authors() -> None:
    """Korthikanti et al. (2022): 72 B L s h^2 (1 + s / 3h + V / 12 L h); without recomputation s / 6h."""
    batch, seq, layers, hidden, vocab = 16, 1024, 4, 1536, 51200
    for unit, divisor in (("percent MFU", 6), ("percent HFU", 3)):
        flop = 72 * batch * layers * seq * hidden**2 * (1 + seq / (divisor * hidden) + vocab / (12 * layers * hidden))
        question = asked(unit=unit, recompute="selective", id="megatron-mfu2022-1")
        assert in_unit(question, 2.0) == pytest.approx(100 * flop / 2 / 8 / 312e12, rel=1e-9)
