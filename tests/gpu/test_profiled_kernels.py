"""Kernels of a profiled step: what is kept of them, and that their process ends in time with what it has written."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

KERNEL = st.tuples(
    st.sampled_from(["void gemm<128>(float)", "add", "copy, of halves"]), st.integers(0, 900), st.integers(1, 50)
)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(ran=st.lists(KERNEL, max_size=30))
def test_busy_is_the_union_and_every_kernel_counts_once(own: Any, ran: list[tuple[str, int, int]]) -> None:
    kernels = own("kernels")
    found = kernels.summary([kernels.Ran(name, float(start), float(start + length)) for name, start, length in ran])
    covered = {moment for _, start, length in ran for moment in range(start, start + length)}
    assert found["kernels"] == len(ran)
    assert found["busy_s"] == pytest.approx(1e-6 * len(covered))
    assert found["span_s"] == pytest.approx(1e-6 * (max(covered) + 1 - min(covered)) if ran else 0.0)
    rows = [line.split(",", 2) for line in found["csv"].splitlines()[1:]]
    assert sum(int(count) for count, *_ in rows) == len(ran)
    assert sum(float(total) for _, total, _ in rows) == pytest.approx(sum(length for *_, length in ran))
    totals = [float(total) for _, total, _ in rows]
    assert totals == sorted(totals, reverse=True)
    assert {name for *_, name in rows} <= {"gemm<128>(float)", "add", "copy, of halves"}


def test_a_step_of_many_kernels_stays_small(own: Any) -> None:
    kernels = own("kernels")
    found = kernels.summary([kernels.Ran(f"kernel {number} " + "x" * 500, number, number + 1.0) for number in range(5000)])
    lines = found["csv"].splitlines()
    assert len(lines) == kernels.NAMES_KEPT + 2
    assert lines[-1] == f"{5000 - kernels.NAMES_KEPT},{5000 - kernels.NAMES_KEPT:.1f},{5000 - kernels.NAMES_KEPT} other names"
    assert len(found["csv"]) < 10_000


@pytest.mark.parametrize(("then", "why"), [("exec sleep 60", "ended after 2 s"), ("exit 3", "its process ended with 3: ")])
def test_what_was_profiled_outlives_its_process(
    own: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, then: str, why: str
) -> None:
    """A profiler may hang or crash. The line that it was about to write does not count."""
    kernels = own("kernels")
    script = tmp_path / "python"
    script.write_text(
        "#!/bin/sh\n"
        'while [ $# -gt 0 ]; do [ "$1" = --out ] && out=$2; shift; done\n'
        """echo '{"question": "a", "kernels": 2}' >> "$out"\n"""
        """printf '{"question": "b", "ker' >> "$out"\n"""
        f"{then}\n"
    )
    script.chmod(0o755)
    monkeypatch.setattr(kernels.sys, "executable", str(script))
    out = tmp_path / "lines.jsonl"
    out.write_text("of an earlier call\n")
    found = kernels.in_a_process("fp32", "cpu", quick=True, out=out, timeout_s=2)
    assert found["steps"] == [{"question": "a", "kernels": 2}]
    assert found["ended"].startswith(why)


def test_a_step_of_the_executor_is_profiled(own: Any) -> None:
    question = own("questions").REHEARSED.held_out[0]
    found = own("kernels").profiled(question, "cpu")
    assert found["kernels"] > 100
    assert 0 < found["busy_s"] <= found["span_s"]
    assert "aten::addmm" in found["csv"]
