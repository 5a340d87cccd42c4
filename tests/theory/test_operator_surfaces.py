"""Surfaces and composition against devices whose times are known: recovered, monotone, honest about what lies outside."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from itertools import combinations, pairwise, product
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from calibration.fit.composition import MIN_COMPONENTS, MeasuredComponent, fit_compositions, without_model
from calibration.fit.surfaces import LESS_TIME, consistent_operators, fit_surfaces, most_consistent
from calibration.measure.operator_shapes import CPU_REACH, operator_launches
from parsim.costs.compute.launches import Launch, component_launches
from parsim.costs.compute.surfaces import (
    KINDS,
    TERMS,
    Parts,
    SurfaceModel,
    component_parts,
    composed_terms,
    distances,
    log_sizes,
    surface_seconds,
)
from parsim.costs.estimate import folded_s
from parsim.errors import CostError, ProfileError
from parsim.hardware.records import OperatorPoint, OperatorSurface
from parsim.model.component import Component, Operator, Parameter
from parsim.work import Phase

pytest.importorskip("torch")

import torch

from calibration.measure.operator_shapes import GPU_MAX_FLOP, Reach, gpu_reach
from calibration.measure.operators import CHAINED, KEPT_CALLS, VISITS, Pool, _visit, by_events
from calibration.operand_pool import ALIGNMENT_BYTES
from parsim.model.load import load_model
from parsim.model.spec import ModelSpec
from tests.virtual_cuda import VirtualDriver

LAUNCHES = operator_launches(quick=False)
SQUARES = [
    Launch(
        kind="matmul",
        function="linear",
        phase="forward",
        sizes=(("problems", 1.0), *((name, 2.0**k) for name in ("rows", "columns", "depth"))),
    )
    for k in range(14)
]
Device = Callable[[str, Mapping[str, float]], float]


def product_s(kind: str, s: Mapping[str, float]) -> float:
    """A device of 50 Gflop/s and 10 GB/s that takes 8 us to launch."""
    p, r, c, d = s["problems"], s["rows"], s["columns"], s["depth"]
    return 8e-6 + 2 * p * r * c * d / 50e9 + 4 * p * (r * c + r * d + c * d) / 10e9


def linear_points(device: Device = product_s, noise: float = 0.0) -> list[OperatorPoint]:
    rng = np.random.default_rng(0)
    chosen = [launch for launch in LAUNCHES if (launch.function, launch.phase) == ("linear", "forward")]
    return [point(launch, device("matmul", dict(launch.sizes)) * float(np.exp(noise * rng.normal()))) for launch in chosen]


def point(launch: Launch, seconds: float, *, device_type: str = "toy", precision: str = "fp32") -> OperatorPoint:
    return OperatorPoint(
        kind=launch.kind,
        function=launch.function,
        phase=launch.phase,  # type: ignore[arg-type]
        shape={name: int(size) for name, size in launch.sizes},
        samples=1,
        device_type=device_type,
        precision=precision,
        seconds=seconds,
        source="s",
    )


# --- surfaces ---------------------------------------------------------------------------------------------------------


def test_a_device_that_is_a_sum_of_terms_is_recovered_far_outside_its_points() -> None:
    (surface,) = fit_surfaces(linear_points(), "s")
    for rows, columns, depth in ((1, 8, 8), (128, 512, 512), (20_000, 4096, 4096)):
        sizes = {"problems": 1.0, "rows": float(rows), "columns": float(columns), "depth": float(depth)}
        assert surface_seconds(surface, sizes) == pytest.approx(product_s("matmul", sizes), rel=1e-3)
    assert surface.relative_sigma < 1e-3


@pytest.mark.parametrize("noise", [0.05, 0.2])
def test_the_held_out_sigma_is_the_noise_of_the_points(noise: float) -> None:
    (surface,) = fit_surfaces(linear_points(noise=noise), "s")
    assert 0.7 * noise < surface.relative_sigma < 1.6 * noise
    errors = [np.log(surface_seconds(surface, entry.shape) / entry.seconds) for entry in linear_points(noise=noise)]
    assert 0.8 < np.mean(np.abs(errors) <= 1.645 * surface.relative_sigma) <= 1.0


@settings(max_examples=200, deadline=None)
@given(st.sampled_from(LAUNCHES), st.data())
def test_no_time_falls_when_a_size_grows(launch: Launch, data: st.DataObject) -> None:
    """Whatever the coefficients: a normalisation's rows keep their width, so its elements grow by whole rows."""
    sizes = dict(launch.sizes)
    names = list(TERMS[launch.kind](sizes))
    seconds = data.draw(st.lists(st.floats(0, 1), min_size=len(names), max_size=len(names)))
    surface = OperatorSurface(
        kind=launch.kind,
        function=launch.function,
        phase=launch.phase,
        precision="fp32",
        device_type="toy",
        seconds_per_term=dict(zip(names, seconds, strict=True)),
        relative_sigma=0.1,
        reach_doublings=1.0,
        sigma_per_doubling=0.1,
        points=9,
        source="s",
    )
    name = data.draw(st.sampled_from([name for name in sizes if name != "width" or launch.kind != "memory_bound"]))
    larger = sizes | {name: sizes[name] * data.draw(st.integers(1, 1000))}
    assert surface_seconds(surface, larger) >= surface_seconds(surface, sizes)


def test_distance_grows_outside_the_points_and_widens_the_price() -> None:
    points = linear_points(noise=0.05)
    model = SurfaceModel(tuple(fit_surfaces(points, "s")), tuple(points))
    launch = next(launch for launch in LAUNCHES if launch.function == "linear" and launch.phase == "forward")
    assert model.price(launch).widening == 0
    last = 0.0
    for doublings in (4, 6, 8, 10):
        sizes = tuple(
            (name, 4096.0 * (2**doublings if name == "rows" else 1)) for name, _ in launch.sizes if name != "problems"
        )
        far = model.price(launch._replace(sizes=(("problems", 1.0), *sizes)))
        assert far.widening > last
        last = far.widening
    with pytest.raises(CostError, match="no fit for matmul unheard forward: calibrate again"):
        model.price(launch._replace(function="unheard"))


def test_distance_is_the_worst_size_to_the_nearest_point() -> None:
    known = np.array([log_sizes({"a": 8, "b": 8}), log_sizes({"a": 64, "b": 1})])
    wanted = np.array([log_sizes({"a": 8, "b": 8}), log_sizes({"a": 32, "b": 16}), log_sizes({"a": 64, "b": 2})])
    assert distances(wanted, known).tolist() == [0.0, 2.0, 1.0]


# --- bad points -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seconds", [float("nan"), 0.0, float("inf"), -1.0])
def test_a_time_that_is_none_is_refused(seconds: float) -> None:
    points = linear_points()
    points[3] = points[3].model_copy(update={"seconds": seconds})
    with pytest.raises(ProfileError, match="a time is a positive number: calibrate again"):
        fit_surfaces(points, "s")


def test_times_that_fall_with_the_work_are_refused() -> None:
    with pytest.raises(ProfileError, match=r"\d+ of \d+ launches of matmul linear forward contradict .*calibrate again"):
        consistent_operators(linear_points(lambda kind, sizes: 1 / product_s(kind, sizes)))


def test_launches_that_something_held_up_are_left_out_and_said() -> None:
    """One that took a hundred times as long contradicts every larger one that did not, and goes instead of all of those."""
    points = linear_points(noise=0.2)
    assert consistent_operators(points) == (points, [])
    small = min(range(len(points)), key=lambda number: product_s("matmul", points[number].shape))
    held_up = [*points]
    held_up[small] = points[small].model_copy(update={"seconds": 100 * points[small].seconds})
    kept, (warning,) = consistent_operators(held_up)
    assert kept == [entry for number, entry in enumerate(points) if number != small]
    sizes = " ".join(f"{name}={size}" for name, size in points[small].shape.items())
    assert warning.startswith(f"left out matmul linear forward ({sizes}): ")
    assert warning.endswith("of one of no less work")
    other = [entry.model_copy(update={"phase": "backward", "seconds": entry.seconds / 20}) for entry in points]
    assert consistent_operators([*points, *other]) == ([*points, *other], []), "of one kind and phase only"


@given(st.dictionaries(st.integers(0, 13), st.floats(-3, 3), max_size=2))
@example({4: -1.75, 2: -2.0})
def test_none_of_what_is_left_contradicts_another(hit: dict[int, float]) -> None:
    points = [point(launch, 1e-5 * 2**k * 10 ** hit.get(k, 0.0)) for k, launch in enumerate(SQUARES)]
    kept, warnings = consistent_operators(points)
    assert len(kept) + len(warnings) == len(points)
    assert len(warnings) <= len(hit)
    assert consistent_operators(kept) == (kept, [])
    assert all(later.seconds >= 0.2 * earlier.seconds for earlier, later in combinations(kept, 2))


def test_too_few_points_are_refused() -> None:
    with pytest.raises(ProfileError, match=r"7 points for matmul linear forward .* at least 8"):
        fit_surfaces(linear_points()[:7], "s")


# --- what is measured -------------------------------------------------------------------------------------------------


def test_the_shapes_are_the_same_every_time_and_affordable() -> None:
    assert operator_launches(quick=False) == LAUNCHES
    assert len(set(LAUNCHES)) == len(LAUNCHES)
    assert len(operator_launches(quick=True)) < len(LAUNCHES) / 2
    for launch in LAUNCHES:
        sizes = dict(launch.sizes)
        if launch.kind == "matmul":
            assert 2 * np.prod(list(sizes.values())) <= CPU_REACH.max_flop
        if launch.kind == "memory_bound":
            assert sizes["elements"] <= CPU_REACH.max_elements


def test_every_kind_is_measured_in_all_its_phases() -> None:
    phases = {kind: {launch.phase for launch in LAUNCHES if launch.kind == kind} for kind in TERMS}
    assert phases["matmul"] == phases["convolution"] == {"forward", "backward_input", "backward_weight"}
    assert phases["attention"] == phases["embedding"] == phases["memory_bound"] == {"forward", "backward"}


# --- launches of a component ------------------------------------------------------------------------------------------

LINEAR = Operator(
    kind="matmul",
    shape=(("m", 4), ("n", 16), ("k", 8)),
    batch="rows",
    forward_flop=1024.0,
    activation_bytes=384,
    parameter_bytes=4 * (16 * 8 + 16),
)
RELU = Operator(
    kind="memory_bound",
    shape=(("elements", 64),),
    batch="batch",
    forward_flop=0.0,
    activation_bytes=512,
    parameter_bytes=0,
    function="relu",
)
LAYER = Component(
    name="layer",
    inputs=("x",),
    outputs=("y",),
    parameters=(Parameter(name="w", elements=128), Parameter(name="b", elements=16)),
    operators=(LINEAR, RELU),
)


def test_launches_of_a_linear_layer_and_its_halves() -> None:
    forward = component_launches(LAYER, Phase.FORWARD, 2)
    assert [(launch.function, dict(launch.sizes)) for launch in forward] == [
        ("linear", {"problems": 1, "rows": 8, "columns": 16, "depth": 8}),
        ("relu", {"elements": 128, "width": 1}),
    ]
    backward = component_launches(LAYER, Phase.BACKWARD, 2)
    assert [launch.phase for launch in backward if launch.function == "linear"] == ["backward_input", "backward_weight"]
    assert [dict(launch.sizes)["elements"] for launch in backward if launch.function == "accumulate"] == [128, 16]
    assert sum(launch.function == "bias_gradient" for launch in backward) == 1
    halves = [component_launches(LAYER, phase, 2) for phase in (Phase.BACKWARD_INPUT, Phase.BACKWARD_WEIGHT)]
    assert sorted(map(repr, (*halves[0], *halves[1]))) == sorted(map(repr, backward))
    first = component_launches(LAYER, Phase.BACKWARD, 2, input_gradient=False)
    assert {launch.phase for launch in backward} - {launch.phase for launch in first} == {"backward_input"}


def test_a_launch_without_a_surface_is_named() -> None:
    points = linear_points()
    with pytest.raises(CostError, match="no fit for memory_bound relu forward: calibrate again"):
        component_parts(LAYER, Phase.FORWARD, 2, SurfaceModel(tuple(fit_surfaces(points, "s")), tuple(points)))


# --- composition ------------------------------------------------------------------------------------------------------


def parts(rng: np.random.Generator) -> Parts:
    seconds = {kind: float(np.exp(rng.normal(-7, 1.5))) for kind in KINDS if rng.random() < 0.7}
    return Parts(
        components=1.0,
        launches=int(rng.integers(1, 20)),
        parameter_bytes=float(rng.integers(0, 10**6)),
        activation_bytes=float(rng.integers(0, 10**7)),
        seconds=seconds,
        sigma=dict.fromkeys(seconds, 0.1),
        widening=dict.fromkeys(seconds, 0.0),
        outside_s=0.0,
    )


def measured(true: Callable[[Parts], float], models: int = 4, each: int = 15) -> list[MeasuredComponent]:
    rng = np.random.default_rng(1)
    found = []
    for model in range(models):
        for number in range(each):
            for phase in ("forward", "backward"):
                drawn = parts(rng)
                name = f"m{model}"
                found.append(
                    MeasuredComponent(
                        model=name,
                        fingerprint=f"{name}.{number}",
                        phase=phase,
                        samples=1 + number % 2,
                        seconds=true(drawn),
                        parts=drawn,
                    )
                )
    return found


def test_what_components_add_is_learned_and_models_left_out_say_how_well() -> None:
    def true(of: Parts) -> float:
        return 1e-4 + 1e-5 * of.launches + 1.2 * sum(of.seconds.values())

    forward, backward = fit_compositions(measured(true), "toy", "fp32", "s")
    rng = np.random.default_rng(2)
    errors = [folded_s(composed_terms(drawn, forward)) / true(drawn) - 1 for drawn in (parts(rng) for _ in range(100))]
    assert np.median(np.abs(errors)) < 0.03
    assert forward.step_sigma == backward.step_sigma < 0.05
    assert forward.models == 4


def test_models_that_differ_show_in_the_sigma_of_steps() -> None:
    slow = {"m0": 0.7, "m1": 0.9, "m2": 1.1, "m3": 1.4}
    entries = [
        dataclasses.replace(entry, seconds=slow[entry.model] * entry.seconds)
        for entry in measured(lambda of: of.total_s + 1e-4)
    ]
    forward, _ = fit_compositions(entries, "toy", "fp32", "s")
    assert 0.15 < forward.step_sigma < 0.6


def test_a_model_left_out_leaves_nothing_of_its_work() -> None:
    entries = measured(lambda of: of.total_s + 1e-4, models=2)
    shared = dataclasses.replace(entries[-1], fingerprint=entries[0].fingerprint)
    assert {entry.model for entry in without_model([*entries, shared], "m0")} == {"m1"}
    assert shared not in without_model([*entries, shared], "m0")
    assert fit_compositions(entries[: MIN_COMPONENTS - 1], "toy", "fp32", "s") == []


@given(st.lists(st.tuples(st.integers(0, 4), st.integers(0, 4), st.floats(0, 2)), min_size=1, max_size=8))
def test_no_larger_set_of_launches_is_free_of_contradictions(drawn: list[tuple[int, int, float]]) -> None:
    """Against all subsets."""
    work = np.array([[rows, columns] for rows, columns, _ in drawn])
    seconds = 10 ** np.array([exponent for _, _, exponent in drawn])
    against = (work[:, None] >= work[None]).all(axis=2) & (seconds[:, None] < LESS_TIME * seconds[None])

    def consistent(chosen: np.ndarray) -> bool:
        return not against[np.ix_(chosen, chosen)].any()

    kept = most_consistent(against, seconds)
    assert consistent(kept)
    assert kept.sum() == max(sum(c) for c in product((False, True), repeat=len(drawn)) if consistent(np.array(c)))


# Which operators are measured on which device: those of real models lie among the shapes of a GPU, and all fit its memory.

GIB = 2**30
MODELS = (
    (ModelSpec(name="resnet50", input_shape=(3, 224, 224)), 256),
    (ModelSpec(name="vit_b_16", input_shape=(3, 224, 224)), 256),
    (ModelSpec(name="bert", args=(("hidden", 1024), ("heads", 16), ("layers", 1), ("vocab", 30522), ("seq", 512))), 64),
    (ModelSpec(name="gpt", args=(("hidden", 12288), ("heads", 96), ("layers", 1), ("vocab", 50304), ("seq", 8192))), 1),
)
MOST_DOUBLINGS = 5.0


def furthest(reach: Reach, spec: ModelSpec, samples: int) -> float:
    """Doublings from a launch of the model to the nearest measured one of its surface, the most over all launches."""
    measured: dict[tuple[str, str, str], list[object]] = {}
    for launch in operator_launches(quick=False, reach=reach):
        measured.setdefault((launch.kind, launch.function, launch.phase), []).append(log_sizes(dict(launch.sizes)))
    asked: dict[tuple[str, str, str], list[object]] = {}
    for component in load_model(spec).components:
        for phase in (Phase.FORWARD, Phase.BACKWARD):
            for launch in component_launches(component, phase, samples):
                asked.setdefault((launch.kind, launch.function, launch.phase), []).append(log_sizes(dict(launch.sizes)))
    return max(float(distances(np.array(shapes), np.array(measured[key])).max()) for key, shapes in asked.items())


@pytest.mark.slow
@pytest.mark.parametrize(("spec", "samples"), MODELS, ids=lambda value: getattr(value, "name", str(value)))
def test_launches_of_real_models_lie_among_the_shapes_of_a_gpu(spec: ModelSpec, samples: int) -> None:
    on_gpu = furthest(gpu_reach(75 * GIB, 4), spec, samples)
    assert on_gpu < MOST_DOUBLINGS < furthest(CPU_REACH, spec, samples)


def flop(launch: Launch) -> float:
    s = dict(launch.sizes)
    if launch.kind == "matmul":
        return 2 * s["problems"] * s["rows"] * s["columns"] * s["depth"]
    if launch.kind == "attention":
        return 4 * s["problems"] * s["queries"] * s["keys"] * s["depth"]
    if launch.kind == "convolution":
        return 2 * s["images"] * s["pixels_out"] * s["taps"] * s["groups"] * s["inputs"] * s["outputs"]
    return 0.0


def largest_array(launch: Launch) -> float:
    s = dict(launch.sizes)
    if launch.kind == "matmul":
        sides = (s["rows"], s["columns"], s["depth"])
        return s["problems"] * max(one * other for one, other in (*pairwise(sides), (sides[0], sides[2])))
    if launch.kind == "attention":
        return s["problems"] * s["queries"] * 3 * s["depth"]
    if launch.kind == "convolution":
        return s["images"] * s["groups"] * max(s["inputs"] * s["pixels_in"], s["outputs"] * s["pixels_out"])
    return s["elements"] if "elements" in s else s["rows"] * s["width"]


@pytest.mark.parametrize("free_bytes", [6 * GIB, 40 * GIB, 180 * GIB])
def test_every_launch_fits_the_memory_and_ends_in_a_second(free_bytes: int) -> None:
    reach = gpu_reach(free_bytes, 4)
    launches = operator_launches(quick=False, reach=reach)
    assert max(map(largest_array, launches)) <= reach.max_elements
    assert 12 * 4 * reach.max_elements <= free_bytes
    assert max(map(flop, launches)) <= GPU_MAX_FLOP
    assert {(launch.kind, launch.function, launch.phase) for launch in launches} == {
        (launch.kind, launch.function, launch.phase) for launch in operator_launches(quick=False)
    }


def test_equal_gpus_measure_equal_shapes_and_unfused_attention_keeps_its_scores_small() -> None:
    assert gpu_reach(70 * GIB, 4) == gpu_reach(70 * GIB - 12345, 4)
    reach = gpu_reach(40 * GIB, 8, fused_attention=False)
    for launch in operator_launches(quick=True, reach=reach):
        if launch.kind == "attention":
            s = dict(launch.sizes)
            assert s["problems"] * s["queries"] * s["keys"] <= reach.max_elements


# --- how they are timed -----------------------------------------------------------------------------------------------


def test_arrays_of_the_pool_begin_where_an_allocators_do_and_come_round_last() -> None:
    pool = Pool(torch.float32, torch.device("cpu"), 0, size_bytes=64 * 1024)
    base = pool.take(1).data_ptr()
    starts = [pool.take(count).data_ptr() - base for count in (3, 64, 65, 1000, 7)]
    assert all(start % ALIGNMENT_BYTES == 0 for start in starts)
    assert starts == sorted(starts)
    assert pool.take(16 * 1024).data_ptr() == base


@pytest.mark.parametrize("function", ["plain", "causal"])
def test_attention_backward_is_that_of_the_public_function(function: str) -> None:
    """Again and again, with other arrays of the pool rewritten in between."""
    pool = Pool(torch.float64, torch.device("cpu"), 0)
    sizes = {"problems": 8, "queries": 16, "keys": 16, "depth": 8}
    with torch.no_grad():
        backward = VISITS[function](sizes, "backward", pool)
        given = pool.written[-1].transpose(1, 2)
        pool.rewriting()()
        found = backward()
        pool.fresh(1000)
        pool.rewriting()()
        again = backward()
    fresh = Pool(torch.float64, torch.device("cpu"), 0).take(2, 16, 3, 4, 8).permute(2, 0, 3, 1, 4)
    leaves = [part.clone().requires_grad_() for part in fresh]
    attention = torch.nn.functional.scaled_dot_product_attention(*leaves, is_causal=function == "causal")
    expected = torch.autograd.grad(attention, leaves, given)
    for mine, repeated, wanted in zip(found, again, expected, strict=True):  # type: ignore[call-overload]
        assert torch.equal(mine, repeated)
        torch.testing.assert_close(mine, wanted)


@pytest.mark.parametrize(("elements", "chained"), [(1000, CHAINED), (2**21, 1)])
def test_small_calls_are_timed_several_at_once_on_operands_of_their_own(elements: int, chained: int) -> None:
    device = VirtualDriver(launch_s=20e-6)
    pool = Pool(torch.float32, torch.device("cpu"), 0)
    operands = []

    def make() -> object:
        given = pool.fresh(elements)
        operands.append(given.data_ptr())
        return device.kernel(3e-6)

    found = by_events(make, pool, device)  # type: ignore[arg-type]
    assert found["seconds"] == [pytest.approx(3e-6)] * KEPT_CALLS
    assert found["issue_s"] == pytest.approx(20e-6)
    assert found["hidden"]
    assert len(set(operands)) == len(operands) == 1 + KEPT_CALLS * chained


class LostDriver(VirtualDriver):
    """A device that answers no more."""

    def synchronize(self) -> None:
        raise RuntimeError("CUDA error: unspecified launch failure")


def test_a_launch_that_the_device_refuses_costs_itself_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Some thousand shapes are measured. One that a library does not take would end a calibration of minutes."""
    pool = Pool(torch.float32, torch.device("cpu"), 0)

    def refused(sizes: object, phase: str, given: Pool) -> Any:
        given.fresh(16)
        raise RuntimeError("cuDNN error: CUDNN_STATUS_NOT_SUPPORTED\nand more")

    launch = Launch(kind="memory_bound", function="copy", phase="forward", sizes=(("elements", 64.0), ("width", 1.0)))
    monkeypatch.setitem(VISITS, "copy", refused)
    entry = _visit(launch, pool, VirtualDriver())  # type: ignore[arg-type]
    assert (entry["seconds"], entry["refused"]) == ([], "cuDNN error: CUDNN_STATUS_NOT_SUPPORTED")
    assert "hidden" not in entry
    assert pool.written == []
    with pytest.raises(RuntimeError, match="unspecified launch failure"):
        _visit(launch, pool, LostDriver())  # type: ignore[arg-type]
