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
from parsim.report.trace import IDLE, LEAST_SHARE, LETTERS, PIECES, sketch
from parsim.timeline import Span, Timeline
from parsim.work import Collective, Compute, LoadBatch, OptimizerStep, Phase


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


WORKS = {
    "F": Compute(component="a", phase=Phase.FORWARD, samples=1),
    "B": Compute(component="a", phase=Phase.BACKWARD, samples=1),
    "O": OptimizerStep(elements=1, tensors=1),
}
SPANS = st.lists(st.tuples(st.sampled_from("FBO"), st.floats(0, 1), st.floats(0, 1)), max_size=12)


@given(SPANS)
def test_it_equals_the_shares_counted_piece_by_piece(spans: list[tuple[str, float, float]]) -> None:
    """On a step of 1 s, which a load on another rank takes."""
    spans = [(letter, min(a, b), max(a, b)) for letter, a, b in spans]
    works = [(WORKS[letter], [Resource(0, "compute")], []) for letter, _, _ in spans]
    graph = graph_of(2, *works, (LoadBatch(samples=1, size_bytes=8), [Resource(1, "host")], []))
    rows = [Span(number, "r0.compute", a, b) for number, (_, a, b) in enumerate(spans)]
    timeline = Timeline.from_spans([*rows, Span(len(spans), "r1.host", 0.0, 1.0)], "measured")
    lanes = dict(sketch(compile_graph(graph), timeline, [0]))
    assert list(lanes) == (["rank 0 computation"] if spans else [])
    text = unfolded(lanes["rank 0 computation"]) if spans else ""
    assert len(text) == (PIECES if spans else 0)
    for piece, letter in enumerate(text):
        low, high = piece / PIECES, (piece + 1) / PIECES
        shares = dict.fromkeys("FBO", 0.0)
        for kind, a, b in spans:
            shares[kind] += max(0.0, min(b, high) - max(a, low)) * PIECES
        if letter == IDLE:
            assert max(shares.values()) < LEAST_SHARE + 1e-9
        else:
            assert shares[letter] == pytest.approx(max(shares.values()), abs=1e-9)
            assert shares[letter] > LEAST_SHARE - 1e-9
