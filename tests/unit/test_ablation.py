"""What a correction is worth: the paired bootstrap of experiments/this_machine."""

from __future__ import annotations

import numpy as np
import pytest

from experiments.this_machine import ablation
from parsim.hardware.compose import load_profile
from parsim.hardware.profile import HostOverhead, Overlap


def test_a_correction_that_halves_the_error_helps_and_noise_does_not() -> None:
    noise = np.random.default_rng(1).normal(0, 0.02, size=(200, 2))
    runs = {
        factor: [
            ablation.Compared(case=f"c{number % 40}", with_s=1.05 + with_it, without_s=1 + factor + without, measured_s=1.0)
            for number, (with_it, without) in enumerate(noise)
        ]
        for factor in (0.1, 0.05)
    }
    halved, noisy = ablation.ablated(runs[0.1]), ablation.ablated(runs[0.05])
    assert halved["helps"]
    assert halved["gain"] == pytest.approx(0.05, abs=0.01)
    assert halved["gain_low"] < halved["gain"] < halved["gain_high"]
    assert not noisy["helps"]
    assert (noisy["runs"], noisy["median_with"]) == (200, pytest.approx(0.05, abs=0.005))


def test_runs_of_one_case_are_no_evidence_of_many() -> None:
    """One case in two gains; a hundred runs of each are still two cases."""
    runs = [
        ablation.Compared(case=case, with_s=1.0, without_s=without_s, measured_s=1.0 if case == "a" else without_s)
        for case, without_s in (("a", 1.1), ("b", 1.05))
        for _ in range(100)
    ]
    assert not ablation.ablated(runs)["helps"]


def test_every_correction_can_be_left_out_of_a_profile() -> None:
    some = load_profile("dgx1-v100-32gb")
    source = next(iter(some.sources))
    host = HostOverhead(task_s=1e-5, step_s=1e-3, post_wait_s=1e-4, core_sharing=1.1, source=source)
    full = some.model_copy(
        update={"host": host, "overlap": Overlap(compute_factor=1.2, communication_factor=1.3, source=source)}
    )
    made = [less(full) for less in ablation.WITHOUT.values()]
    assert all(profile != full for profile in made)
    assert len({profile.model_dump_json() for profile in made}) == len(made), "each leaves out another one"
