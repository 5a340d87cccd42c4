"""The sketch of a timeline: every piece has the kind that takes most of it."""

from __future__ import annotations

import re

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from strategies import graph_of

from parsim.engines.static import compile_graph, simulate
from parsim.program.task import Resource
from parsim.report import sketch as module
from parsim.report.sketch import IDLE, LEAST_SHARE, LETTERS, PIECES, sketch
from parsim.work import Collective, Compute, LoadBatch, Phase


def unfolded(text: str) -> str:
    return "".join(letter * int(count or 1) for letter, count in re.findall(r"([A-Z.])(\d*)", text))


def test_a_step_is_written_by_its_parts() -> None:
    computes, both = [Resource(0, "compute")], [Resource(0, "dp"), Resource(1, "dp")]
    graph = graph_of(
        2,
        (Compute(component="a", phase=Phase.FORWARD, samples=1), computes, []),
        (Compute(component="a", phase=Phase.BACKWARD, samples=1), computes, [0]),
        (Collective(operation="all_reduce", group=(0, 1), size_bytes=8), both, [1]),
        (LoadBatch(samples=1, size_bytes=8), [Resource(0, "host")], []),
    )
    compiled = compile_graph(graph)
    timeline = simulate(compiled, np.array([1.0, 2.0, 3.0, 3.0]))
    lanes = dict(sketch(compiled, timeline, [0, 1]))
    assert lanes == {
        "rank 0 computation": f"F{PIECES // 6}B{PIECES // 3}.{PIECES // 2}",
        "rank 0 communication": f".{PIECES // 2}C{PIECES // 2}",
        "rank 0 loading": f"L{PIECES // 2}.{PIECES // 2}",
        "rank 1 communication": f".{PIECES // 2}C{PIECES // 2}",
    }
    assert {"F", "B", "C"} <= set(LETTERS)


SPANS = st.lists(st.tuples(st.sampled_from("FBC"), st.floats(0, 1), st.floats(0, 1)), min_size=1, max_size=12)


@given(SPANS)
def test_it_equals_the_shares_counted_piece_by_piece(spans: list[tuple[str, float, float]]) -> None:
    spans = [(letter, min(a, b), max(a, b)) for letter, a, b in spans]
    letters = np.array([letter for letter, _, _ in spans])
    text = unfolded(module._painted(letters, np.array([a for _, a, _ in spans]), np.array([b for _, _, b in spans])))
    assert len(text) == PIECES
    for piece, letter in enumerate(text):
        low, high = piece / PIECES, (piece + 1) / PIECES
        shares = dict.fromkeys("FBC", 0.0)
        for kind, a, b in spans:
            shares[kind] += max(0.0, min(b, high) - max(a, low)) * PIECES
        if letter == IDLE:
            assert max(shares.values()) < LEAST_SHARE + 1e-9
        else:
            assert shares[letter] == pytest.approx(max(shares.values()), abs=1e-9)
            assert shares[letter] > LEAST_SHARE - 1e-9
