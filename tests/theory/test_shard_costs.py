"""Costs of tensor-sharded components: by their own measurement, in ratio to a larger one, from operators; never dearer."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from parsim.costs.compute.compute import SHARD_SIGMA_PER_DOUBLING, ComputeCosts
from parsim.costs.costs import Costs
from parsim.costs.estimate import Estimate
from parsim.errors import ModelError
from parsim.hardware.cluster import cluster_from_profile
from parsim.hardware.compose import load_profile
from parsim.hardware.profile import Profile
from parsim.model.component import Component, OperatorShard, Parameter, ParameterShard, Sharding, narrow
from parsim.work import Compute, Phase
from tests.models import sharded_model
from tests.theory.test_compute_costs import BANDWIDTH, ELEMENTWISE, MATMUL, PEAK, device, fit, measured, profile

CUT = Component(
    name="cut",
    inputs=("input:0",),
    outputs=("cut:0",),
    parameters=(Parameter(name="w", elements=256 * 512),),
    operators=(MATMUL, ELEMENTWISE),
    shardings=(
        Sharding(
            rule="column",
            limit=64,
            inputs=("full",),
            outputs=("shard:1",),
            parameters=(ParameterShard(name="w", dim=0),),
            operators=(OperatorShard(number=0, dim="n", activation_bytes=4 * 128 * 256),),
        ),
    ),
)
FLOP_BOUND = replace(CUT, operators=(MATMUL,))
"""At these peaks the roofline of the product is its flop."""


def work(samples: int, ways: int = 1, phase: Phase = Phase.FORWARD) -> Compute:
    return Compute(component="cut", phase=phase, samples=samples, rule="column" if ways > 1 else "", ways=ways)


def estimate(of: Profile, asked: Compute, component: Component = CUT) -> Estimate:
    return ComputeCosts(of).estimate(asked, component, device(of))


def point(component: Component, samples: int, seconds: float, phase: str = "forward") -> dict[str, Any]:
    return measured(samples, seconds, fingerprint=component.fingerprint, phase=phase)


def test_a_measured_shard_is_priced_by_its_own_measurement() -> None:
    of = profile(components=[point(CUT, 8, 1e-3), point(narrow(CUT, "column", 2), 8, 0.7e-3)])
    found = estimate(of, work(8, 2))
    assert (found.median_s, found.source, found.extrapolated) == (0.7e-3, "measured", False)
    assert estimate(of, work(8)).median_s == 1e-3


def test_an_unmeasured_shard_is_its_part_of_the_measured_whole_with_a_wider_interval() -> None:
    of = profile(source_kind="measurement", components=[point(FLOP_BOUND, 8, 1e-3)])
    whole, half, eighth = (estimate(of, work(8, ways), FLOP_BOUND) for ways in (1, 2, 8))
    assert half.median_s == pytest.approx(0.5e-3)
    assert eighth.median_s == pytest.approx(1e-3 / 8)
    assert (half.source, half.extrapolated) == ("measured", True)
    assert half.parameters == (*whole.parameters, ("shard_scaling", SHARD_SIGMA_PER_DOUBLING))
    assert dict(eighth.parameters)["shard_scaling"] == pytest.approx(3 * SHARD_SIGMA_PER_DOUBLING)
    assert half.detail.startswith("50% of the whole, measured with")


def test_the_largest_measured_part_is_the_base() -> None:
    half = narrow(FLOP_BOUND, "column", 2)
    of = profile(source_kind="measurement", components=[point(FLOP_BOUND, 8, 1e-3), point(half, 8, 0.8e-3)])
    quarter = estimate(of, work(8, 4), FLOP_BOUND)
    assert quarter.median_s == pytest.approx(0.4e-3)
    assert "one of 2 shards" in quarter.detail


def test_what_is_not_divided_stays_whole_in_the_ratio() -> None:
    """Roofline by hand: the product's flop halves, the elementwise operator's bytes do not."""
    of = profile(source_kind="measurement", components=[point(CUT, 8, 1e-3)])
    product_s = MATMUL.forward_flop * 8 / (0.5 * PEAK)
    elementwise_s = ELEMENTWISE.activation_bytes * 8 / (0.75 * BANDWIDTH)
    expected = (product_s / 2 + elementwise_s) / (product_s + elementwise_s)
    assert estimate(of, work(8, 2)).median_s == pytest.approx(1e-3 * expected)


def test_fits_make_the_ratio_where_there_are_any() -> None:
    """A floor per launch does not divide, so the fitted share is larger than the roofline's."""
    rows, fits = [point(CUT, 1, 1e-3)], [fit("matmul", floor_s=1e-3), fit("memory_bound")]
    without, with_fits = profile(components=rows), profile(components=rows, operator_fits=fits)
    assert estimate(with_fits, work(1, 4)).median_s > 0.95e-3 > estimate(without, work(1, 4)).median_s


def test_the_backward_scales_by_its_own_kernels() -> None:
    of = profile(source_kind="measurement", components=[point(CUT, 8, 3e-3, "backward")])
    half = estimate(of, work(8, 2, Phase.BACKWARD))
    assert 1.5e-3 < half.median_s < 3e-3


@given(
    samples=st.integers(1, 64),
    phase=st.sampled_from([Phase.FORWARD, Phase.BACKWARD]),
    source=st.sampled_from(["whole", "half", "fits", "peaks"]),
)
def test_more_shards_are_never_slower(samples: int, phase: Phase, source: str) -> None:
    measured_parts = {"whole": [CUT], "half": [CUT, narrow(CUT, "column", 2)]}.get(source, [])
    of = profile(
        components=[point(part, 8, 1e-3 / (1 + n), phase.value) for n, part in enumerate(measured_parts)],
        operator_fits=[fit("matmul"), fit("memory_bound")] if source == "fits" else [],
    )
    seconds = [estimate(of, work(samples, ways, phase)).median_s for ways in (1, 2, 4, 8, 16)]
    assert seconds == sorted(seconds, reverse=True)
    assert seconds[-1] < seconds[0]


def test_costs_price_shards_of_a_model_and_refuse_what_cannot_be_cut() -> None:
    costs = Costs(model=sharded_model(), cluster=cluster_from_profile(load_profile("dgx1-v100-32gb")))

    def asked(ways: int, rule: str = "column") -> Compute:
        return Compute(component="a", phase=Phase.FORWARD, samples=64, rule=rule, ways=ways)

    whole = costs.estimate(replace(asked(1), rule=""), 0).median_s
    times = [costs.estimate(asked(ways), 0).median_s for ways in (2, 4, 8)]
    assert times == sorted(times, reverse=True)
    assert times[0] < whole
    with pytest.raises(ModelError, match=r"3 must divide 16 \(what its output features have in common\); nearest: 2 or 4$"):
        costs.estimate(asked(3), 0)
    with pytest.raises(ModelError, match="no sharding rule 'row'; it has column"):
        costs.estimate(asked(2, "row"), 0)


def test_a_shard_of_a_free_operator_costs_nothing() -> None:
    """A component whose kernels all cost nothing has no ratio: its shards are priced as the whole."""
    free = replace(CUT, operators=(replace(ELEMENTWISE, activation_bytes=0, batch="none"),), shardings=(_whole_rule(),))
    of = profile(source_kind="measurement", components=[point(free, 8, 1e-4)])
    assert estimate(of, Compute(component="cut", phase=Phase.FORWARD, samples=8, rule="follow", ways=2), free).median_s == 1e-4
    assert math.isfinite(estimate(of, work(8), free).median_s)


def _whole_rule() -> Sharding:
    return Sharding(
        rule="follow",
        limit=8,
        inputs=("shard:1",),
        outputs=("shard:1",),
        parameters=(ParameterShard(name="w", dim=0),),
    )


def test_operator_of_the_toy_is_flop_bound() -> None:
    """What the tests above lean on."""
    assert MATMUL.forward_flop / (0.5 * PEAK) > (MATMUL.activation_bytes + MATMUL.parameter_bytes) / (0.75 * BANDWIDTH)
