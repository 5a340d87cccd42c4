"""What frameworks publish as a configuration that runs is predicted to fit, and the same made eight times as large is not."""

from __future__ import annotations

import pytest

import parsim
from parsim.model.catalogue.names import NAMED, normalised
from tests.published.presets import Preset, fullest, name_of, presets
from tests.quick import some_quick

ROWS = {name_of(row): row for row in presets()}
H100_70B = "nemo llama3-70b 64xh100-sxm bf16 tp4 pp4 cp2 b128"
TITAN_405B = "torchtitan llama3-405b 128xh100-sxm bf16 tp8 b16"
H100_8B = "megatron-bridge llama3-8b 8xh100-sxm fp8 b128"


def test_there_are_many_and_each_names_its_file_and_commit() -> None:
    assert len(ROWS) >= 80
    assert len(ROWS) == len(presets())
    assert {row["framework"] for row in ROWS.values()} == {"nemo", "megatron-bridge", "megatron-lm", "torchtitan"}
    for row in ROWS.values():
        repository, path = row["source"].split(" ")
        assert repository.count("/") == 1
        assert path
        assert len(row["commit"]) == 40


@pytest.mark.parametrize("name", some_quick(ROWS, H100_70B, TITAN_405B, H100_8B))
def test_what_runs_in_public_fits(name: str) -> None:
    memory = fullest(ROWS[name])
    assert memory.fits, memory.describe()


def larger(preset: Preset) -> Preset:
    """Eight times the samples at once."""
    return {**preset, **{key: str(8 * int(preset[key])) for key in ("micro_batch", "global_batch")}}


def least_bytes(preset: Preset) -> float:
    """Less than any training keeps without recomputation: where a pipeline holds as many microbatches as it has stages, of
    every layer ten bytes per element of the stream (queries, what attention makes, both norms, an array of the MLP's inside).
    """
    row = NAMED[normalised(preset["model"])]
    assert row.shape is not None
    shards = int(preset["tp"]) * int(preset["cp"])
    return 10 * row.shape.layers * int(preset["seq"]) * int(preset["micro_batch"]) * row.shape.hidden / shards


TOO_LARGE = {
    name: larger(row) for name, row in ROWS.items() if row["recompute"] == "none" and row["zero"] == "1" and row["ep"] == "1"
}


def test_thirty_are_made_too_large() -> None:
    assert len(TOO_LARGE) >= 30


@pytest.mark.parametrize("name", some_quick(TOO_LARGE, H100_70B))
def test_eight_times_as_large_is_refused(name: str) -> None:
    memory = fullest(TOO_LARGE[name])
    assert memory.tensor_lines["activations"] > least_bytes(TOO_LARGE[name])
    assert not memory.fits, memory.describe()


def test_a_plan_for_a_preset_says_that_it_fits_and_for_a_larger_one_that_it_does_not() -> None:
    """The preset of torchtitan for Llama 3 405B on 128 H100, as a question."""
    asked = {
        "plan.strategy": "hp",
        "plan.mesh": {"dp": 16, "tp": 8},
        "plan.zero_stage": 3,
        "plan.microbatches": 1,
        "plan.recompute": ["h.*"],
        "cluster.network": "infiniband-400g",
    }
    answer = parsim.plan("llama3-405b", cluster="128xh100-sxm", global_batch=16, settings=asked)
    assert answer.fits
    assert len(answer.chosen.plan.segments) == 126


MEASURED = {
    "llama3-70b 12 layers tp8": ("llama3-70b", 12, 4096, 8, 1, 1, 28.29),
    "llama3-70b 12 layers pp2 dp4": ("llama3-70b", 12, 4096, 1, 2, 1, 66.55),
    "llama3-405b 4 layers tp4 dp2": ("llama3-405b", 4, 4096, 4, 1, 1, 52.89),
    "llama3-70b 12 layers tp2 cp4": ("llama3-70b", 12, 32768, 2, 1, 4, 68.43),
    "llama3-405b 4 layers tp2 cp4": ("llama3-405b", 4, 32768, 2, 1, 4, 87.03),
    "llama3-405b 4 layers cp8": ("llama3-405b", 4, 32768, 1, 1, 8, 139.22),
    "llama3-70b 12 layers cp8": ("llama3-70b", 12, 131072, 1, 1, 8, 147.99),
    "llama3-405b 4 layers tp2 cp4 128k": ("llama3-405b", 4, 131072, 2, 1, 4, 118.13),
}
"""Model, layers, tokens, tp, pp, cp, and the peak of Megatron-Core's allocations on eight B200, GiB: MooreThreads/SimuMax
docs/b200/b200_release_v1.2_summary.json @4dcaae513ba7. One sample at a time, a distributed optimizer, no recomputation."""


@pytest.mark.parametrize("name", some_quick(MEASURED, "llama3-70b 12 layers tp8", "llama3-405b 4 layers cp8"))
def test_measured_peaks_of_megatron_core(name: str) -> None:
    model, layers, seq, tp, pp, cp, measured_gib = MEASURED[name]
    dp = 8 // (tp * pp * cp)
    preset = {
        "framework": "megatron-lm",
        "model": model,
        "gpu": "b200",
        "gpus": "8",
        "seq": str(seq),
        "tp": str(tp),
        "pp": str(pp),
        "cp": str(cp),
        "ep": "1",
        "chunks": "1",
        "micro_batch": "1",
        "layers": str(layers),
        "global_batch": str(8 * dp),
        "precision": "bf16",
        "zero": "1",
        "recompute": "none",
        "offloaded_layers": "0",
    }
    tensors = sum(fullest(preset).tensor_lines.values()) / 2**30
    assert tensors == pytest.approx(measured_gib, rel=0.08)
