"""What a calibration runs beside training steps."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from calibration.measure.collectives import COLLECTIVES, make_bench  # noqa: E402
from calibration.measure.components import make_case  # noqa: E402
from calibration.measure.overlap import beside_steps, measure_overlap  # noqa: E402
from calibration.rounds.request import CalibrationRequest  # noqa: E402
from experiments.common.forked import run_ranks  # noqa: E402
from parsim.model.load import load_model  # noqa: E402
from parsim.model.spec import ModelSpec  # noqa: E402
from parsim.work import COLLECTIVES as OPERATIONS  # noqa: E402

MLP = ModelSpec(name="mlp", args=(("width", 24),))
SIZE_BYTES = 2**16


def test_only_collectives_that_can_be_called_run_beside_steps() -> None:
    """Plans of context parallelism send ring shifts, which no calibration calls; a thorough one looked for their call."""
    bench: Any = SimpleNamespace(scratch=torch.empty(2**28, device="meta"), dtype=torch.float32)
    beside = {operation for operation, _ in beside_steps(bench, quick=False)}
    assert beside == set(COLLECTIVES) & set(OPERATIONS)
    assert {"all_reduce", "all_gather", "reduce_scatter"} < beside
    assert {operation for operation, _ in beside_steps(bench, quick=True)} == {"all_reduce"}


def beside_all_reduces(rank: int) -> list[dict[str, Any]]:
    cpu = torch.device("cpu")
    case = make_case(0, MLP, load_model(MLP), 4, CalibrationRequest(models=((MLP, (4,)),)), cpu)
    return measure_overlap(case, make_bench(cpu, torch.float32, 2, SIZE_BYTES), "all_reduce", SIZE_BYTES)


@pytest.mark.xdist_group("launch")
def test_two_ranks_measure_steps_beside_calls(tmp_path: Path) -> None:
    """Rank 0 gathers what both did, as plain values; nothing of a step but its tasks is needed there."""
    (entry,), others = run_ranks(beside_all_reduces, 2, tmp_path)
    assert others == []
    assert (entry["operation"], entry["group_size"], entry["size_bytes"]) == ("all_reduce", 2, SIZE_BYTES)
    assert len(entry["computation"]) == 2
    assert all(factor is None or factor > 0 for factor in entry["computation"])
    assert all(seconds > 0 for seconds in entry["communication_s"])
