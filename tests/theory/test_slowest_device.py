"""A synchronous step waits for its slowest GPU: the expected maximum of as many draws, once, whatever the mesh."""

import math
from typing import Any

import numpy as np
import pytest

import parsim as ps
from parsim.costs.adjustments import PUBLISHED_GPUS, SLOWEST, expected_maximum
from parsim.work import Compute


@pytest.mark.parametrize("draws", [1, 2, 8, 64, 512, 4096])
def test_the_expected_maximum_of_normals(draws: int) -> None:
    """Against the integral of x d(N(x)^n)."""
    x = np.linspace(-9, 9, 200_001)
    below = np.array([0.5 * math.erfc(-value / math.sqrt(2)) for value in x]) ** draws
    exact = float(np.sum((x[1:] + x[:-1]) / 2 * np.diff(below)))
    assert expected_maximum(draws) == pytest.approx(exact, rel=0.05, abs=1e-6)


def simulated(gpus: int, mesh: dict[str, int], layers: int) -> ps.Prediction:
    keys: dict[str, Any] = {
        "plan.strategy": "custom",
        "plan.mesh": mesh,
        "model.args": {"layers": layers},
        "plan.microbatches": 1,
    }
    if gpus > 8:
        keys["cluster.network"] = "infiniband-400g"
    return ps.simulate("gpt3-1.3b", cluster=f"{gpus}xh100-sxm", global_batch=8 * gpus, settings=keys)


def slowest(gpus: int) -> float:
    """Relative to that of the runs by which prices of transformers are corrected."""
    return (1 + 0.015 * expected_maximum(gpus)) / (1 + 0.015 * expected_maximum(PUBLISHED_GPUS))


def computing_s(chosen: ps.Prediction) -> list[float]:
    units = zip(chosen.evaluation.compiled.columns.units, chosen.evaluation.estimates, strict=True)
    return [estimate.median_s for unit, estimate in units if isinstance(unit.work, Compute)]


def test_efficiency_falls_with_the_gpus_and_the_price_says_why() -> None:
    """The same samples per GPU: computation takes longer by the slowest of more GPUs, and is less certain by as much."""
    alone = simulated(1, {"dp": 1}, layers=2)
    for gpus in (8, 128):
        chosen = simulated(gpus, {"dp": gpus}, layers=2)
        factor = slowest(gpus)
        spread = {sigma for estimate in chosen.evaluation.estimates for name, sigma in estimate.parameters if name == SLOWEST}
        assert spread == {abs(factor - 1) / 2}
        assert SLOWEST in str(chosen.explain())
        assert max(computing_s(chosen)) == pytest.approx(max(computing_s(alone)) * factor / slowest(1))


def test_a_mesh_sees_it_once() -> None:
    """Tensor and pipeline ranks wait for the same GPU as replicas do."""
    for mesh in ({"tp": 8}, {"pp": 8}, {"dp": 8}, {"pp": 2, "dp": 2, "tp": 2}):
        terms = [term for estimate in simulated(8, mesh, layers=8).evaluation.estimates for term in estimate.terms]
        assert {term.value for term in terms if term.name == SLOWEST} == {slowest(8)}


def test_other_models_have_all_of_it() -> None:
    """Published runs correct no convolution of the user's: one GPU waits for no other."""
    for gpus in (1, 8):
        keys = {"plan.strategy": "dp" if gpus > 1 else "single"}
        chosen = ps.plan("resnet_small", cluster=f"{gpus}xh100-sxm", global_batch=64, settings=keys).chosen
        terms = [term for estimate in chosen.evaluation.estimates for term in estimate.terms]
        factors = {term.value for term in terms if term.name == SLOWEST}
        assert factors == ({1 + 0.015 * expected_maximum(8)} if gpus > 1 else set())
