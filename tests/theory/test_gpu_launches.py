"""What a GPU launches for a component that was recorded on a CPU: autocast's casts and fp32, and rows that are not aligned."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from calibration.fit.composition import measured_parts
from calibration.fit.surfaces import consistent_operators, fit_surfaces
from calibration.measure.operator_shapes import CPU_REACH, PRODUCT_PHASES, gpu_reach, operator_launches
from parsim.costs.compute.launches import Launch, component_launches, gpu_launches
from parsim.costs.compute.surfaces import SurfaceModel, surface_seconds, terms_of
from parsim.errors import CostError, ProfileError
from parsim.hardware.records import OperatorPoint
from parsim.model.component import Component
from parsim.model.load import load_model
from parsim.model.model import Model
from parsim.model.spec import ModelSpec
from parsim.work import Phase
from tests.measured_points import component_point
from tests.theory.test_operator_surfaces import point

TOKENS, HIDDEN, VOCAB = 16, 32, 70
BERT = ModelSpec(
    name="bert",
    args=(("heads", 2), ("hidden", HIDDEN), ("layers", 1), ("seq", TOKENS), ("vocab", VOCAB)),
    input_shape=(TOKENS,),
)
SAMPLES = 3
GIB = 2**30


@pytest.fixture(scope="module")
def model() -> Model:
    pytest.importorskip("torch")
    return load_model(BERT)


def elements(launches: tuple[Launch, ...], function: str) -> float:
    return sum(launch.count * dict(launch.sizes)["elements"] for launch in launches if launch.function == function)


def functions(launches: tuple[Launch, ...]) -> Counter[str]:
    found: Counter[str] = Counter()
    for launch in launches:
        found[launch.function] += launch.count
    return found


def named(model: Model, name: str) -> Component:
    return model.component(name)


@pytest.mark.parametrize("phase", list(Phase)[:2])
@pytest.mark.parametrize("precision", ["fp32", "tf32", "bf16"])
def test_without_autocast_a_gpu_launches_what_a_cpu_does(model: Model, precision: str, phase: Phase) -> None:
    for component in model.components:
        own = gpu_launches(component, phase, SAMPLES, precision=precision)
        assert own == component_launches(component, phase, SAMPLES, precision)


def test_a_loss_is_in_fp32_and_its_input_is_cast(model: Model) -> None:
    """Counted in elements of two bytes: the logits are read in half precision and written in fp32 (6 bytes each), and softmax
    has arrays of four bytes. So over a vocabulary it is no third of its bytes too short."""
    loss, logits = named(model, "loss"), SAMPLES * TOKENS * VOCAB
    for phase in (Phase.FORWARD, Phase.BACKWARD):
        there, cpu = (
            gpu_launches(loss, phase, SAMPLES, precision="amp_bf16"),
            component_launches(loss, phase, SAMPLES),
        )
        assert elements(there, "softmax") == 2 * elements(cpu, "softmax")
        assert elements(there, "copy") == logits * 6 / 4


def test_weights_biases_and_norms_are_cast_launch_by_launch(model: Model) -> None:
    """A layer of BERT: four products, each with a weight and a bias to cast, and two norms whose output a product reads."""
    layer = named(model, "layers.0")
    cpu = component_launches(layer, Phase.FORWARD, SAMPLES)
    there = gpu_launches(layer, Phase.FORWARD, SAMPLES, precision="amp_bf16")
    assert functions(there) == functions(cpu) + Counter(copy=4 + 4 + 2)
    weights, biases = 12 * HIDDEN**2, 9 * HIDDEN
    norms = 2 * SAMPLES * TOKENS * HIDDEN
    assert elements(there, "copy") == pytest.approx(6 / 4 * (weights + 2 * biases + norms))
    assert elements(there, "layer_norm") == 2 * elements(cpu, "layer_norm")
    back = gpu_launches(layer, Phase.BACKWARD, SAMPLES, precision="amp_bf16")
    assert functions(back)["copy"] == 4 + 4 + 2, "gradients of weights and biases are widened, those of norms cast"


def test_halves_of_a_backward_add_up_to_it(model: Model) -> None:
    for component in model.components:
        whole, first, second = (
            functions(gpu_launches(component, phase, SAMPLES, precision="amp_fp16"))
            for phase in (Phase.BACKWARD, Phase.BACKWARD_INPUT, Phase.BACKWARD_WEIGHT)
        )
        assert first + second == whole


# --- rows that are not aligned ----------------------------------------------------------------------------------------


@given(rows=st.integers(1, 4096), columns=st.integers(1, 4096), depth=st.integers(1, 4096))
def test_unaligned_arithmetic_is_all_of_it_or_none(rows: int, columns: int, depth: int) -> None:
    """Rows of memory: of the forward y = x W' those of x and W (depth) and of y (columns), however many rows there are. The
    gradient of weights reads what the forward wrote, so its rows are the forward's columns."""
    sizes = {"problems": 1.0, "rows": float(rows), "columns": float(columns), "depth": float(depth)}
    arithmetic = float(rows) * columns * depth
    for phase, lengths in (
        ("forward", (columns, depth)),
        ("backward_input", (columns, depth)),
        ("backward_weight", (rows, columns)),
    ):
        terms = terms_of("matmul", sizes, gpu_phase=phase)
        assert terms["unaligned"] == (0.0 if all(length % 8 == 0 for length in lengths) else arithmetic)
        assert terms["odd"] == (0.0 if all(length % 2 == 0 for length in lengths) else arithmetic)
        assert terms.items() >= terms_of("matmul", sizes).items()


def gpu_linear_points(phase: str) -> list[OperatorPoint]:
    """A GPU of 400 Tflop/s that runs unaligned rows at half of that, and odd ones at a quarter."""
    found = []
    for launch in operator_launches(quick=False, reach=gpu_reach(50 * GIB, 2)):
        if (launch.function, launch.phase) == ("linear", phase):
            terms = terms_of("matmul", dict(launch.sizes), gpu_phase=phase)
            flop = 2 * (terms["arithmetic"] + terms["unaligned"] + 2 * terms["odd"])
            moved = 2 * (terms["output"] + terms["left"] + terms["right"])
            seconds = 3e-6 + flop / 4e14 + moved / 3e12
            found.append(point(launch, seconds, device_type="gpu", precision="amp_bf16"))
    return found


def vocabulary(phase: str, outputs: int) -> dict[str, float]:
    rows, hidden = 8192.0, 1024.0
    order = {
        "forward": (rows, outputs, hidden),
        "backward_input": (rows, hidden, outputs),
        "backward_weight": (outputs, hidden, rows),
    }
    return {"problems": 1.0, **dict(zip(("rows", "columns", "depth"), map(float, order[phase]), strict=True))}


@pytest.mark.parametrize("phase", PRODUCT_PHASES)
def test_a_vocabulary_that_is_not_aligned_costs_what_such_rows_cost(phase: str) -> None:
    (surface,) = fit_surfaces(gpu_linear_points(phase), "s", on_gpu=True)
    aligned_s, even_s, odd_s = (surface_seconds(surface, vocabulary(phase, n)) for n in (50304, 50258, 50257))
    least_s = 2 * 8192 * 1024 * 50304 / 4e14
    assert aligned_s == pytest.approx(least_s, rel=0.35)
    assert even_s - aligned_s == pytest.approx(least_s, rel=0.05)
    assert odd_s - aligned_s == pytest.approx(3 * least_s, rel=0.05)
    (blind,) = fit_surfaces(gpu_linear_points(phase), "s")
    blind_s = [surface_seconds(blind, vocabulary(phase, n)) for n in (50304, 50257)]
    assert blind_s[1] < 0.6 * odd_s, "what a CPU's terms say of it"


def test_a_gpu_measures_layers_as_models_have_them() -> None:
    """The rows of a batch may be of any number. Those of memory are aligned, but for a share of layers with other outputs."""
    for phase in PRODUCT_PHASES:
        launches = [
            dict(launch.sizes)
            for launch in operator_launches(quick=False, reach=gpu_reach(50 * GIB, 2))
            if (launch.function, launch.phase) == ("linear", phase)
        ]
        terms = [terms_of("matmul", sizes, gpu_phase=phase) for sizes in launches]
        unaligned = [entry["unaligned"] > 0 for entry in terms]
        assert 0.15 < np.mean(unaligned) < 0.35
        assert 0.05 < np.mean([entry["odd"] > 0 for entry in terms]) < 0.2
    on_cpu = [launch for launch in operator_launches(quick=False) if launch.function == "linear"]
    assert [launch.sizes for launch in on_cpu[::3]] == [launch.sizes for launch in on_cpu[2::3]], "as before"
    assert CPU_REACH.unaligned_every == 0


# --- what a GPU refuses, or takes its time for ------------------------------------------------------------------------


def test_a_surface_of_a_gpu_that_has_too_few_launches_is_left_out_with_a_warning(model: Model) -> None:
    """A machine may be there once: what a library refuses must not cost everything else that was measured."""
    few = gpu_linear_points("forward")[:5]
    others = gpu_linear_points("backward_input")
    kept, (warning,) = consistent_operators([*few, *others], on_gpu=True)
    assert kept == others
    assert warning == "left out matmul linear forward: 5 launches, a fit needs 8"
    surfaces = SurfaceModel(tuple(fit_surfaces(kept, "s", on_gpu=True)), tuple(kept))
    component = model.components[1]
    point = component_point(
        component, 1e-3, model=model.name, samples=SAMPLES, device_type="gpu", precision="amp_bf16", repeats=3
    )
    assert measured_parts([point], [model], surfaces, gpu_precision="amp_bf16") == []
    with pytest.raises(CostError, match="there is no fit for"):
        measured_parts([point], [model], surfaces)


def test_kernels_of_a_gpu_may_contradict_one_another_more_often() -> None:
    """Half of the shapes take a thousand times as long: another kernel. The rest is enough for a fit."""
    points = gpu_linear_points("forward")
    odd = [
        point.model_copy(update={"seconds": 1000 * point.seconds}) if number % 2 else point
        for number, point in enumerate(points)
    ]
    with pytest.raises(ProfileError, match="contradict others"):
        consistent_operators(odd)
    kept, warnings = consistent_operators(odd, on_gpu=True)
    assert len(kept) + len(warnings) == len(points)
    assert len(kept) >= len(points) / 2
