"""Compute costs against closed forms: measured curves, the kernel formula, rooflines, and what must raise."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from calibration.fit.operators import fit_operators
from parsim.costs.compute.compute import ComputeCosts, interpolation_terms
from parsim.costs.compute.formula import (
    ROOFLINE_BANDWIDTH_EFFICIENCY,
    ROOFLINE_COMPUTE_EFFICIENCY,
    component_kernels,
    family_of,
    product_of,
    saturation_s,
    tile_parts,
)
from parsim.costs.compute.launches import (
    ComputeRequest,
    Launch,
    backward_launches,
    forward_launches,
    unfused_attention,
    unfused_attention_backward,
)
from parsim.costs.estimate import Estimate
from parsim.errors import ConfigError, CostError, ProfileError
from parsim.hardware.cluster import cluster_from_profile
from parsim.hardware.compose import load_profile
from parsim.hardware.devices import Device
from parsim.hardware.profile import Profile
from parsim.hardware.records import OperatorFit, OperatorPoint
from parsim.model.component import Component, Operator, Parameter
from parsim.model.formats import Numerics
from parsim.model.optimizers import OPTIMIZERS
from parsim.work import Compute, OptimizerStep, Phase
from tests.measured_points import toy_profile

PEAK = 10e12
BANDWIDTH = 500e9
IDEAL = {
    "peak_flop_per_s": PEAK,
    "memory_bandwidth_bytes_per_s": BANDWIDTH,
    "floor_s": 5e-6,
    "efficiency_dense": 0.8,
    "efficiency_3x3": 1.6,
    "efficiency_other": 0.7,
    "half_rows": 20.0,
    "half_columns": 10.0,
    "half_depth": 30.0,
    "wave_outputs": 5e4,
    "bandwidth_fraction": 0.9,
    "strided_factor": 1.5,
}
MATMUL = Operator(
    kind="matmul",
    shape=(("m", 128), ("n", 256), ("k", 512)),
    batch="rows",
    forward_flop=2.0 * 128 * 256 * 512,
    activation_bytes=4 * 128 * (256 + 512),
    parameter_bytes=4 * 256 * 512,
)
ELEMENTWISE = Operator(
    kind="memory_bound",
    shape=(("elements", 1000),),
    batch="batch",
    forward_flop=0.0,
    activation_bytes=8000,
    parameter_bytes=0,
)
BLOCK = Component(
    name="block",
    inputs=("input:0",),
    outputs=("block:0",),
    parameters=(Parameter(name="w", elements=256 * 512),),
    operators=(MATMUL, ELEMENTWISE),
)
LOSS = Component(name="loss", inputs=("block:0", "target"), outputs=("loss:0",), operators=(ELEMENTWISE,))


def profile(*, source_kind: str = "datasheet", **compute: list[dict[str, Any]]) -> Profile:
    numbers = {"memory_bytes": 16e9, "memory_bandwidth_bytes_per_s": BANDWIDTH, "context_bytes": 5e8}
    toy = {name: {"value": value, "source": "s"} for name, value in numbers.items()}
    types = {"toy": {"kind": "cuda", **toy, "peak_flop_per_s": {"fp32": {"value": PEAK, "source": "s"}}}}
    noise = {"drift_sigma": 0.07, "source": "s"}
    return toy_profile(source=source_kind, device_types=types, compute=compute, noise=noise)


def device(of: Profile) -> Device:
    return cluster_from_profile(of).devices[0]


def measured(samples: int, seconds: float, **more: Any) -> dict[str, Any]:
    return {
        "fingerprint": BLOCK.fingerprint,
        "model": "toy",
        "component": "block",
        "phase": "forward",
        "samples": samples,
        "device_type": "toy",
        "precision": "fp32",
        "seconds": seconds,
        "spread": 0.05,
        "repeats": 25,
        "source": "s",
        **more,
    }


def fit(kind: str, phase: str = "forward", sigma: float = 0.2, **coefficients: float) -> dict[str, Any]:
    return {
        "kind": kind,
        "phase": phase,
        "precision": "fp32",
        "device_type": "toy",
        "coefficients": {**IDEAL, **coefficients},
        "relative_sigma": sigma,
        "min_flop": 0.0,
        "max_flop": 1e15,
        "points": 10,
        "source": "s",
    }


def forward(samples: int, component: Component = BLOCK) -> Compute:
    return Compute(component=component.name, phase=Phase.FORWARD, samples=samples)


def backward(samples: int, component: Component = BLOCK) -> Compute:
    return Compute(component=component.name, phase=Phase.BACKWARD, samples=samples)


# --- measured ---------------------------------------------------------------------------------------------------------


def test_a_measured_count_is_returned_as_it_was_measured() -> None:
    of = profile(components=[measured(8, 0.010), measured(16, 0.018)])
    estimate = ComputeCosts(of).estimate(forward(16), BLOCK, device(of))
    assert estimate.median_s == 0.018
    assert estimate.source == "measured"
    assert estimate.repeat_sigma == 0.05
    assert not estimate.extrapolated
    assert dict(estimate.parameters)["drift"] == 0.07
    assert f"compute:{BLOCK.fingerprint}" in dict(estimate.parameters)
    between = ComputeCosts(of).estimate(forward(10), BLOCK, device(of))
    assert between.median_s == pytest.approx(0.012, rel=1e-12)
    assert (between.source, between.extrapolated) == ("measured", False)
    assert "interpolated between 8 and 16" in between.detail


def test_outside_the_range_the_interval_widens_with_the_distance() -> None:
    of = profile(components=[measured(8, 0.010), measured(16, 0.018)])
    key = f"compute:{BLOCK.fingerprint}"
    sigmas = []
    for samples in (16, 32, 64):
        estimate = ComputeCosts(of).estimate(forward(samples), BLOCK, device(of))
        assert estimate.extrapolated == (samples > 16)
        assert estimate.median_s == pytest.approx(0.018 * samples / 16)
        sigmas.append(dict(estimate.parameters)[key])
    assert sigmas == sorted(set(sigmas))


def test_one_count_is_scaled_in_proportion() -> None:
    of = profile(components=[measured(8, 0.010)])
    for samples, seconds in ((2, 0.0025), (32, 0.040)):
        estimate = ComputeCosts(of).estimate(forward(samples), BLOCK, device(of))
        assert estimate.median_s == pytest.approx(seconds)
        assert estimate.extrapolated


def test_the_load_asked_for_is_preferred_else_the_heaviest() -> None:
    of = profile(
        components=[
            measured(8, 0.010, ranks_active=1),
            measured(8, 0.013, ranks_active=2),
            measured(8, 0.024, ranks_active=4),
            measured(16, 0.026, ranks_active=2),
        ]
    )
    on = device(of)
    assert ComputeCosts(of, ranks_active=2).estimate(forward(8), BLOCK, on).median_s == 0.013
    assert ComputeCosts(of, ranks_active=1).estimate(forward(8), BLOCK, on).median_s == 0.010
    assert ComputeCosts(of).estimate(forward(8), BLOCK, on).median_s == 0.024
    assert ComputeCosts(of, ranks_active=3).estimate(forward(8), BLOCK, on).median_s == 0.024
    within = ComputeCosts(of, ranks_active=4).estimate(forward(12), BLOCK, on)
    assert within.median_s == pytest.approx(0.0195), "only the measurements with two active ranks enclose 12 samples"
    assert "2 ranks active" in within.detail


def test_a_measurement_of_another_phase_or_precision_is_not_used() -> None:
    of = profile(source_kind="measurement", components=[measured(8, 0.010)])
    for work, precision in ((backward(8), "fp32"), (forward(8), "amp_fp16")):
        with pytest.raises(CostError, match=r"component 'block'.*calibrate"):
            ComputeCosts(of, Numerics(precision=precision)).estimate(work, BLOCK, device(of))


@given(
    counts=st.lists(st.integers(1, 512), min_size=1, max_size=6, unique=True).map(sorted),
    seed=st.integers(0, 10_000),
    wanted=st.integers(1, 2048),
)
def test_interpolation_stays_between_its_neighbours_and_grows_with_the_samples(
    counts: list[int], seed: int, wanted: int
) -> None:
    steps = np.random.default_rng(seed).uniform(0.1, 1.0, len(counts))
    seconds = np.cumsum(steps).tolist()
    curve = interpolation_terms(counts, seconds, wanted)
    value, doublings = curve.seconds, curve.doublings
    more = interpolation_terms(counts, seconds, wanted + 1).seconds
    assert 0 < value <= more * (1 + 1e-12)
    assert (doublings > 0) == (wanted < counts[0] or wanted > counts[-1])
    if counts[0] <= wanted <= counts[-1]:
        assert value == pytest.approx(float(np.interp(wanted, counts, seconds)), rel=1e-14)
    elif wanted > counts[-1]:
        assert value == seconds[-1] * wanted / counts[-1]


# --- the kernel formula -----------------------------------------------------------------------------------------------


def test_kernel_formula_by_hand() -> None:
    kernel = Launch(
        kind="convolution",
        function="grouped",
        phase="forward",
        sizes=(
            ("images", 4),
            ("inputs", 70),
            ("outputs", 50),
            ("groups", 3),
            ("taps", 9),
            ("pixels_in", 100),
            ("pixels_out", 25),
        ),
        flop=1.0,
        size_bytes=9e6,
        strided=True,
    )
    compute = 2 * 9 * (70 + 30) * (3 * 120 * 60 + 5e4) / (PEAK * IDEAL["efficiency_other"]) * 1.5
    memory = 9e6 / (BANDWIDTH * 0.9)
    assert saturation_s(kernel, IDEAL) == pytest.approx(5e-6 + (compute**4 + memory**4) ** 0.25, rel=1e-12)


def test_a_large_matmul_reaches_the_fitted_efficiency_and_no_more() -> None:
    n = 16384
    big = Operator(
        kind="matmul",
        shape=(("m", n), ("n", n), ("k", n)),
        batch="rows",
        forward_flop=2.0 * n**3,
        activation_bytes=8 * n * n,
        parameter_bytes=4 * n * n,
    )
    (kernel,) = forward_launches(big, 1, "fp32")
    ideal = 2.0 * n**3 / (PEAK * 0.8)
    assert ideal < saturation_s(kernel, IDEAL) < 1.01 * ideal


sizes = st.integers(1, 4096)


@settings(max_examples=300)
@given(m=sizes, n=sizes, k=sizes, samples=st.integers(1, 256), which=st.sampled_from(["m", "n", "k", "samples"]))
def test_kernel_time_grows_with_every_size(m: int, n: int, k: int, samples: int, which: str) -> None:
    def seconds(grown: str | None) -> list[float]:
        shape = {"m": m, "n": n, "k": k, "samples": samples}
        if grown:
            shape[grown] += 1
        operator = Operator(
            kind="matmul",
            shape=(("m", shape["m"]), ("n", shape["n"]), ("k", shape["k"])),
            batch="rows",
            forward_flop=2.0 * shape["m"] * shape["n"] * shape["k"],
            activation_bytes=4 * shape["m"] * (shape["n"] + shape["k"]),
            parameter_bytes=4 * shape["n"] * shape["k"],
        )
        kernels = forward_launches(operator, shape["samples"], "fp32") + sum(
            backward_launches(operator, shape["samples"], "fp32"), ()
        )
        return [saturation_s(kernel, IDEAL) for kernel in kernels]

    for before, after in zip(seconds(None), seconds(which), strict=True):
        assert IDEAL["floor_s"] < before <= after * (1 + 1e-12)


def test_backward_of_a_matmul_is_its_two_products() -> None:
    (into_input,), (into_weight,) = backward_launches(MATMUL, 4, "fp32")
    assert product_of(into_input) == (1, 4 * 128, 512, 256, 1)
    assert product_of(into_weight) == (1, 512, 256, 4 * 128, 1)
    assert into_input.flop == into_weight.flop == 4 * MATMUL.forward_flop
    assert backward_launches(MATMUL, 4, "fp32", input_gradient=False) == ((), (into_weight,))


def test_backward_of_a_convolution_is_input_and_weight_gradient() -> None:
    operator = Operator(
        kind="convolution",
        shape=(
            *(("c", 16), ("h", 8), ("w", 8), ("k", 32), ("r", 3), ("s", 3)),
            *(("stride_h", 2), ("stride_w", 2), ("groups", 2), ("out_h", 4), ("out_w", 4)),
        ),
        batch="batch",
        forward_flop=2.0 * 8 * 32 * 9 * 16,
        activation_bytes=4 * (16 * 64 + 32 * 16),
        parameter_bytes=4 * 8 * 32 * 9,
    )
    (kernel,) = forward_launches(operator, 5, "fp32")
    assert product_of(kernel) == (2, 80, 16, 8, 9)
    assert family_of(kernel) == "other"
    assert kernel.strided
    assert 2 * math.prod(product_of(kernel)) == kernel.flop
    (into_input,), (into_weight,) = backward_launches(operator, 5, "fp32")
    assert (into_input.phase, product_of(into_input)) == ("backward_input", (2, 80, 8, 16, 9))
    assert (into_weight.phase, product_of(into_weight)) == ("backward_weight", (2, 16, 8, 80, 9))


def test_attention_counts_its_two_products() -> None:
    operator = Operator(
        kind="attention",
        shape=(("heads", 12), ("q", 197), ("kv", 197), ("d", 64)),
        batch="batch",
        forward_flop=4.0 * 12 * 197 * 197 * 64,
        activation_bytes=4 * 4 * 197 * 768,
        parameter_bytes=0,
    )
    kernels, (fused,) = unfused_attention(operator, 8, "fp32"), forward_launches(operator, 8, "fp32")
    assert sum(kernel.flop for kernel in kernels) == fused.flop == 8 * operator.forward_flop
    backward, _ = unfused_attention_backward(operator, 8, "fp32", input_gradient=True)
    assert sum(kernel.flop for kernel in backward) == 2 * 8 * operator.forward_flop


def test_half_precision_moves_half_the_bytes() -> None:
    (full,) = forward_launches(ELEMENTWISE, 10, "fp32")
    (half,) = forward_launches(ELEMENTWISE, 10, "amp_fp16")
    assert half.size_bytes == full.size_bytes / 2 == 40_000


def test_an_operator_without_its_sizes_is_named() -> None:
    broken = Operator(kind="matmul", shape=(("m", 1),), batch="rows", forward_flop=2.0, activation_bytes=4, parameter_bytes=4)
    with pytest.raises(CostError, match="matmul operator has no size 'n'"):
        forward_launches(broken, 1, "fp32")
    with pytest.raises(CostError, match="no coefficient 'half_rows'"):
        saturation_s(
            forward_launches(MATMUL, 1, "fp32")[0], {name: value for name, value in IDEAL.items() if name != "half_rows"}
        )


# --- fitted and published ---------------------------------------------------------------------------------------------


def test_a_fitted_component_is_the_sum_of_its_kernels() -> None:
    of = profile(operator_fits=[fit("matmul"), fit("memory_bound", sigma=0.1)])
    for work in (forward(32), backward(32)):
        estimate = ComputeCosts(of).estimate(work, BLOCK, device(of))
        kernels = component_kernels(ComputeRequest(component=BLOCK, phase=work.phase, samples=32), "fp32")
        seconds = {kind: sum(saturation_s(k, IDEAL) for k in kernels if k.kind == kind) for kind in ("matmul", "memory_bound")}
        total = sum(seconds.values())
        assert estimate.median_s == pytest.approx(total, rel=1e-12)
        assert estimate.source == "fitted"
        parameters = dict(estimate.parameters)
        assert parameters["operator:matmul"] == pytest.approx(0.2 * seconds["matmul"] / total)
        assert parameters["operator:memory_bound"] == pytest.approx(0.1 * seconds["memory_bound"] / total)
    first = ComputeCosts(of).estimate(backward(32), BLOCK, device(of), input_gradient=False)
    assert first.median_s < ComputeCosts(of).estimate(backward(32), BLOCK, device(of)).median_s


def test_a_loss_without_parameters_is_priced_forward_and_backward() -> None:
    of = profile(operator_fits=[fit("matmul"), fit("memory_bound")])
    there = ComputeCosts(of).estimate(forward(32, LOSS), LOSS, device(of))
    back = ComputeCosts(of).estimate(backward(32, LOSS), LOSS, device(of))
    assert there.median_s == pytest.approx(5e-6 + 32 * 8000 / (0.9 * BANDWIDTH))
    assert back.median_s == pytest.approx(5e-6 + 1.5 * 32 * 8000 / (0.9 * BANDWIDTH))


def test_a_component_without_kernels_costs_nothing_where_costs_are_known() -> None:
    nothing = Component(name="reshape", inputs=("a",), outputs=("b",))
    of = profile()
    assert ComputeCosts(of).estimate(forward(4, nothing), nothing, device(of)).median_s == 0
    calibrated = profile(source_kind="measurement")
    with pytest.raises(CostError, match="calibrate"):
        ComputeCosts(calibrated).estimate(forward(4, nothing), nothing, device(calibrated))


def test_published_peaks_give_a_roofline_and_say_so() -> None:
    of = profile()
    estimate = ComputeCosts(of).estimate(forward(32), BLOCK, device(of))
    expected = sum(
        max(kernel.flop / (PEAK * ROOFLINE_COMPUTE_EFFICIENCY), kernel.size_bytes / (BANDWIDTH * ROOFLINE_BANDWIDTH_EFFICIENCY))
        for kernel in component_kernels(ComputeRequest(component=BLOCK, phase=Phase.FORWARD, samples=32), "fp32")
    )
    assert estimate.median_s == pytest.approx(expected)
    assert estimate.source == "published"
    assert sum(sigma for name, sigma in estimate.parameters if name.startswith("operator:")) == pytest.approx(0.4)


def test_kernels_far_outside_the_fitted_sizes_are_called_extrapolated() -> None:
    of = profile(operator_fits=[fit("matmul") | {"max_flop": 1e6}, fit("memory_bound")])
    estimate = ComputeCosts(of).estimate(forward(256), BLOCK, device(of))
    assert estimate.extrapolated
    inside = profile(operator_fits=[fit("matmul"), fit("memory_bound")])
    assert sum(s for _, s in estimate.parameters) > sum(
        s for _, s in ComputeCosts(inside).estimate(forward(256), BLOCK, device(inside)).parameters
    )


def test_what_no_cost_is_known_for_names_component_samples_device_and_precision() -> None:
    of = profile()
    with pytest.raises(CostError, match=r"'block' \(forward, 8 samples\) on toy in fp64.*calibrate"):
        ComputeCosts(of, Numerics(precision="fp64")).estimate(forward(8), BLOCK, device(of))
    with pytest.raises(CostError, match=">= 1 sample"):
        ComputeCosts(of).estimate(forward(0), BLOCK, device(of))
    with pytest.raises(CostError, match="an optimizer step is priced by"):
        ComputeCosts(of).estimate(Compute(component="block", phase=Phase.OPTIMIZER, samples=1), BLOCK, device(of))


# --- optimizer --------------------------------------------------------------------------------------------------------


def step(elements: int, tensors: int, seconds: float, **more: Any) -> dict[str, Any]:
    point = {"optimizer": "adam", "elements": elements, "tensors": tensors, "device_type": "toy", "seconds": seconds}
    return {**point, "spread": 0.03, "repeats": 20, "source": "s", **more}


def stepped(of: Profile, work: OptimizerStep, optimizer: str = "adam", *, ranks: int | None = None, calls: int = 1) -> Estimate:
    """The price of an optimizer step by a profile."""
    return ComputeCosts(of, Numerics(optimizer=optimizer), ranks).optimizer(work, device(of), calls=calls)


@given(
    per_element=st.floats(1e-11, 1e-8),
    per_tensor=st.floats(1e-7, 1e-4),
    elements=st.integers(10_000, 10_000_000),
    tensors=st.integers(1, 300),
)
def test_measured_steps_are_affine_in_elements_and_tensors(
    per_element: float, per_tensor: float, elements: int, tensors: int
) -> None:
    counts = [(10_000, 2), (1_000_000, 20), (10_000_000, 50)]
    of = profile(optimizers=[step(e, t, per_element * e + per_tensor * t) for e, t in counts])
    estimate = stepped(of, OptimizerStep(elements=elements, tensors=tensors))
    assert estimate.median_s == pytest.approx(per_element * elements + per_tensor * tensors, rel=1e-6)
    assert (estimate.source, estimate.extrapolated) == ("measured", False)


@given(
    per_step=st.floats(1e-5, 1e-3),
    per_element=st.floats(1e-10, 1e-8),
    per_tensor=st.floats(1e-6, 1e-4),
    elements=st.integers(1000, 10_000_000),
    tensors=st.integers(1, 300),
)
def test_four_measured_steps_tell_what_every_step_takes(
    per_step: float, per_element: float, per_tensor: float, elements: int, tensors: int
) -> None:
    counts = [(10_000, 2), (200_000, 60), (1_000_000, 20), (10_000_000, 50)]
    of = profile(optimizers=[step(e, t, per_step + per_element * e + per_tensor * t) for e, t in counts])
    estimate = stepped(of, OptimizerStep(elements=elements, tensors=tensors))
    assert estimate.median_s == pytest.approx(per_step + per_element * elements + per_tensor * tensors, rel=1e-6)


def test_a_second_call_takes_what_every_step_takes() -> None:
    """Parameters without weight decay are updated by a call of their own: 1 ms of a step is spent twice, and so is 0.4 ms of
    the host. Where too few steps were measured to tell, nothing is added."""
    counts = [(10_000, 2), (200_000, 60), (1_000_000, 20), (10_000_000, 50)]
    points = [step(e, t, 1e-3 + 1e-9 * e + 1e-5 * t, issue_s=4e-4 + 1e-6 * t) for e, t in counts]
    for elements, tensors in ((200_000, 60), (300_000, 7)):
        work = OptimizerStep(elements=elements, tensors=tensors)
        of = profile(optimizers=points)
        one, two = (stepped(of, work, calls=calls) for calls in (1, 2))
        assert two.median_s - one.median_s == pytest.approx(1e-3, rel=1e-6)
        assert two.issue_s - one.issue_s == pytest.approx(4e-4, rel=1e-6)
        few = profile(optimizers=points[:3])
        assert stepped(few, work, calls=2).median_s == stepped(few, work).median_s


def test_one_measured_step_is_scaled_by_elements_under_the_load_asked_for() -> None:
    of = profile(optimizers=[step(1000, 2, 1e-3), step(1000, 2, 2e-3, ranks_active=2)])
    work = OptimizerStep(elements=4000, tensors=3)
    assert stepped(of, work).median_s == pytest.approx(8e-3)
    one = stepped(of, work, ranks=1)
    assert one.median_s == pytest.approx(4e-3)
    assert one.extrapolated


@pytest.mark.parametrize("optimizer", tuple(OPTIMIZERS))
def test_an_unmeasured_step_is_bound_by_the_bandwidth(optimizer: str) -> None:
    of = profile(operator_fits=[fit("memory_bound")])
    elements = 25_000_000
    estimate = stepped(of, OptimizerStep(elements=elements, tensors=161), optimizer)
    assert stepped(of, OptimizerStep(elements=0, tensors=0), optimizer).median_s == 0
    bytes_moved = 4 * OPTIMIZERS[optimizer].accesses_per_element * elements
    assert estimate.median_s == pytest.approx(5e-6 + bytes_moved / (0.9 * BANDWIDTH))
    assert estimate.source == "fitted"


@pytest.mark.parametrize(
    ("measured_in", "precision", "way"),
    [
        ("fp32", "bf16", "amp_bf16"),
        ("fp64", "bf16", "amp_bf16"),
        ("bf16", "fp32", "calibrate in fp32"),
        ("bf16", "bf16", ""),
        ("fp32", "amp_bf16", ""),
    ],
)
def test_updates_of_weights_of_another_width_are_refused(measured_in: str, precision: str, way: str) -> None:
    of = profile(components=[measured(1, 1e-3, precision=measured_in)], optimizers=[step(1000, 2, 1e-4)])
    costs, work = ComputeCosts(of, Numerics(precision=precision, optimizer="adam")), OptimizerStep(elements=1000, tensors=2)
    if not way:
        assert costs.optimizer(work, device(of)).source == "measured"
        return
    with pytest.raises(CostError, match=rf"weights of \d bytes, and precision '{precision}' has \d; .*{way}"):
        costs.optimizer(work, device(of))


def test_unknown_optimizers_and_unmeasured_machines_are_errors() -> None:
    work = OptimizerStep(elements=10, tensors=1)
    of = profile(source_kind="measurement")
    with pytest.raises(ConfigError, match="did you mean adam"):
        stepped(of, work, "adm")
    with pytest.raises(CostError, match="calibrate with that optimizer"):
        stepped(of, work)


# --- fitting ----------------------------------------------------------------------------------------------------------


def synthetic_points(seed: int, noise: float) -> list[OperatorPoint]:
    rng = np.random.default_rng(seed)
    points = []
    for _ in range(120):
        m, n, k = (int(2 ** rng.uniform(4, 13)) for _ in range(3))
        operator = Operator(
            kind="matmul",
            shape=(("m", m), ("n", n), ("k", k)),
            batch="rows",
            forward_flop=2.0 * m * n * k,
            activation_bytes=4 * m * (n + k),
            parameter_bytes=4 * n * k,
        )
        seconds = saturation_s(forward_launches(operator, 1, "fp32")[0], IDEAL) * math.exp(noise * rng.standard_normal())
        points.append(
            OperatorPoint(
                kind="matmul",
                phase="forward",
                shape={"m": m, "n": n, "k": k},
                samples=1,
                device_type="toy",
                precision="fp32",
                seconds=seconds,
                source="s",
            )
        )
    return points


def fitted(points: list[OperatorPoint]) -> OperatorFit:
    (result,) = fit_operators(points, "toy", {"fp32": PEAK}, BANDWIDTH)
    return result


def test_fitting_recovers_the_times_of_a_machine_that_follows_the_formula() -> None:
    exact = fitted(synthetic_points(0, 0.0))
    assert exact.relative_sigma < 0.01
    assert exact.coefficients["efficiency_dense"] == pytest.approx(0.8, rel=0.02)
    noisy = fitted(synthetic_points(0, 0.1))
    assert 0.08 < noisy.relative_sigma < 0.14, "cross-validated residuals are the noise that was put in"


def test_refitting_the_same_points_gives_the_same_bits() -> None:
    points = synthetic_points(1, 0.1)
    again = [OperatorPoint.model_validate_json(point.model_dump_json()) for point in points]
    assert fitted(points) == fitted(again)


def test_too_few_points_are_refused() -> None:
    with pytest.raises(ProfileError, match="at least 8"):
        fit_operators(synthetic_points(0, 0.0)[:7], "toy", {"fp32": PEAK}, BANDWIDTH)


@pytest.mark.parametrize("optimizer", ["sgd_momentum", "adam"])
def test_averages_of_weights_take_their_share_of_the_accesses(optimizer: str) -> None:
    """A read of the weight, and a read and a write of its average, beside the accesses of the optimizer."""
    device = cluster_from_profile(load_profile("dgx1-v100-32gb"), 1).devices[0]
    work = OptimizerStep(elements=10**8, tensors=1)
    plain, averaged = (
        ComputeCosts(load_profile("dgx1-v100-32gb"), Numerics(optimizer=optimizer, ema=ema)).optimizer(work, device).median_s
        for ema in (False, True)
    )
    accesses = OPTIMIZERS[optimizer].accesses_per_element
    assert averaged / plain == pytest.approx((accesses + 3) / accesses, rel=1e-12)


def test_fewer_tiles_than_multiprocessors_take_as_long_as_one() -> None:
    """And a wave that is not full takes its part: half of it in the middle of two waves with a quantisation of 0."""
    coefficients = {
        "utilisation": 1.0,
        "operand_overhead": 0.0,
        "depth_overhead": 0.0,
        "quantisation": 0.0,
        "floor_s": 0.0,
        "bandwidth_fraction": 1.0,
        "split_cost": 1e9,
        "sharpness": 8.0,
        "multiprocessors": 100.0,
        "peak_flop_per_s": 1e12,
        "memory_bandwidth_bytes_per_s": 1e12,
    }
    problems = np.array([1.0, 50.0, 100.0, 150.0])
    size = np.full(4, 64.0)
    compute, _, _ = tile_parts(size, size, size, problems, np.zeros(4), coefficients)
    assert compute[0] / compute[0][0] == pytest.approx([1.0, 1.0, 1.0, 1.5], rel=1e-12)
