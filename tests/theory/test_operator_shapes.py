"""Which operators are measured on which device: those of real models lie among the shapes of a GPU, and all fit its memory."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch")

import torch

from calibration.measure.operator_shapes import CPU_REACH, GPU_MAX_FLOP, Reach, gpu_reach, operator_launches
from calibration.measure.operators import CHAINED, KEPT_CALLS, VISITS, Pool, _visit, by_events
from calibration.operand_pool import ALIGNMENT_BYTES
from parsim.costs.compute.launches import Launch, component_launches
from parsim.costs.compute.surfaces import distances, log_sizes
from parsim.model.load import load_model
from parsim.model.spec import ModelSpec
from parsim.work import Phase
from tests.virtual_cuda import VirtualDriver

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
