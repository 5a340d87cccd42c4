"""What a calibration of a GPU keeps apart: the device's time from the host's, their paces, its arithmetic, its memory."""

from __future__ import annotations

import json
from functools import partial
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("torch")

import pytest
import torch

from calibration.measure.allocator import GpuMemory
from calibration.measure.components import GpuStep, StepTimes, gpu_sweep_record, make_case, pausing_streams
from calibration.measure.delayed_streams import Pausing
from calibration.measure.device import DTYPES, OPERATOR_DTYPES, arithmetic_settings, autocast, set_arithmetic
from calibration.rounds.pace import HOST_PACE, PACE, Pace, at_one_pace, usual_pace
from calibration.rounds.refresh import looks
from calibration.rounds.request import PRECISIONS, CalibrationRequest
from parsim.errors import ConfigError
from parsim.execute.cuda.driver import FIRST_HOLD_S, MOST_HOLD_S, Group, timed_groups, warm_up
from parsim.execute.processes.speed_probe import CORE_SIZE, SpeedProbe
from parsim.execute.streams import Operation, TaskTime
from parsim.model.load import load_model
from parsim.model.spec import ModelSpec
from parsim.program.taskgraph import COMPUTE
from parsim.units import MIB
from tests.virtual_cuda import VirtualDriver, VirtualEvent

MLP = ModelSpec(name="mlp", args=(("width", 64),), input_shape=(1, 8, 8))


class EventStreams:
    """Streams of the virtual device: computation is timed by its events, as those of a GPU are."""

    def __init__(self, device: VirtualDriver) -> None:
        self._device = device
        self._marks: list[tuple[int, str, VirtualEvent, VirtualEvent]] = []

    def submit(self, task: int, stream: str, dependencies: object, operation: Operation) -> None:
        self.compute(task, stream, dependencies, operation)

    def compute(self, task: int, stream: str, dependencies: object, operation: Operation) -> None:
        start = self._device.mark()
        if not self._marks:
            self._device.synchronize()
        operation()
        self._marks.append((task, stream, start, self._device.mark()))

    def finish(self) -> list[TaskTime]:
        self._device.synchronize()
        found, self._marks = self._marks, []
        at_s = partial(self._device.elapsed_s, found[0][2])
        return [TaskTime(task, stream, at_s(start), at_s(end)) for task, stream, start, end in found]

    def close(self) -> None:
        """Nothing is open."""


def run(streams: Pausing, kernels: list[list[float]], device: VirtualDriver, *, holding: bool) -> dict[int, float]:
    """Seconds of every computation, each of so many kernels."""

    def queue(seconds: list[float]) -> None:
        for each in seconds:
            device.launch(each)

    streams.holding = holding
    for number, seconds in enumerate(kernels):
        streams.compute(number, COMPUTE, [], partial(queue, seconds))
    return {entry.task: entry.end_s - entry.ready_s for entry in streams.finish()}


@given(
    kernels=st.lists(st.lists(st.floats(1e-6, 1e-4), min_size=1, max_size=6), min_size=1, max_size=5),
    launch_s=st.floats(1e-6, FIRST_HOLD_S / 10),
)
def test_held_computation_takes_the_devices_seconds_however_slow_the_host(kernels: list[list[float]], launch_s: float) -> None:
    device = VirtualDriver(launch_s=launch_s)
    streams = Pausing(EventStreams(device), device)  # type: ignore[arg-type]
    held = run(streams, kernels, device, holding=True)
    assert held == {number: pytest.approx(sum(seconds)) for number, seconds in enumerate(kernels)}
    assert streams.hidden
    as_in_training = run(streams, kernels, device, holding=False)
    assert all(as_in_training[number] >= held[number] - 1e-12 for number in held)


def test_what_the_host_could_not_queue_in_time_is_noticed_and_held_longer_next_time(monkeypatch: pytest.MonkeyPatch) -> None:
    device = VirtualDriver(launch_s=0.5 * FIRST_HOLD_S)
    monkeypatch.setattr("calibration.measure.delayed_streams.time.perf_counter", device.host_s)
    streams = Pausing(EventStreams(device), device)  # type: ignore[arg-type]
    kernels = [[1e-6] * 8]
    found = run(streams, kernels, device, holding=True)
    assert not streams.hidden
    assert found[0] > 8e-6
    assert streams.issue_s[0] == pytest.approx(4 * FIRST_HOLD_S)
    assert run(streams, kernels, device, holding=True)[0] == pytest.approx(8e-6)
    assert streams.hidden


def test_a_task_that_waits_for_the_device_is_not_held_before_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """As an update in fp16 does, once it has looked for an overflow. It would wait for every hold, the longer the hold."""
    device = VirtualDriver(launch_s=10e-6)
    monkeypatch.setattr("calibration.measure.delayed_streams.time.perf_counter", device.host_s)
    streams = Pausing(EventStreams(device), device)  # type: ignore[arg-type]

    def waits() -> None:
        device.launch(2e-3)
        device.synchronize()
        device.launch(1e-3)

    for _ in range(30):
        streams.holding = True
        streams.compute(0, COMPUTE, [], device.kernel(1e-4))
        streams.compute(1, COMPUTE, [], waits)
        streams.compute(2, COMPUTE, [], device.kernel(1e-4))
        found = {entry.task: entry.end_s - entry.ready_s for entry in streams.finish()}
    assert streams.issue_s[1] == pytest.approx(2e-3 + 2 * 10e-6)
    assert found[1] == pytest.approx(3e-3, rel=0.02)
    assert (found[0], found[2]) == (pytest.approx(1e-4), pytest.approx(1e-4)), "the others are held as before"
    assert streams.hidden
    assert sum(device.holds_s) < 0.5


def test_a_host_that_stalls_now_and_then_does_not_make_a_task_one_that_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    device = VirtualDriver(launch_s=10e-6)
    monkeypatch.setattr("calibration.measure.delayed_streams.time.perf_counter", device.host_s)
    streams = Pausing(EventStreams(device), device)  # type: ignore[arg-type]

    def queue(stall_s: float) -> None:
        device.host_takes(stall_s)
        device.launch(1e-4)

    for number in range(40):
        streams.holding = True
        streams.compute(0, COMPUTE, [], partial(queue, 0.1 if number % 3 else 0.0))
        streams.finish()
    holds = len(device.holds_s)
    streams.compute(0, COMPUTE, [], partial(queue, 0.0))
    streams.finish()
    assert len(device.holds_s) == holds + 1


@given(
    kernels=st.lists(st.lists(st.floats(1e-6, 1e-3), min_size=1, max_size=6), min_size=2, max_size=6),
    launch_s=st.floats(1e-6, 1e-4),
)
def test_what_is_queued_ahead_takes_the_devices_seconds_without_a_hold(kernels: list[list[float]], launch_s: float) -> None:
    """The first never is, since the device waits for it."""
    device = VirtualDriver(launch_s=launch_s)
    streams = Pausing(EventStreams(device), device)  # type: ignore[arg-type]
    streams.watching = True
    found = run(streams, kernels, device, holding=False)
    assert not device.holds_s
    assert 0 not in streams.ahead
    for task in streams.ahead:
        assert found[task] == pytest.approx(sum(kernels[task]))
    host_bound = [task for task in found if found[task] > 1.001 * sum(kernels[task])]
    assert not streams.ahead & set(host_bound)
    if max(map(sum, kernels[1:])) < launch_s and sum(kernels[0]) < launch_s:
        assert not streams.ahead, "the host is slower than the device all along"
    streams.watching = False
    run(streams, kernels, device, holding=False)
    assert not streams.ahead


def test_a_long_task_lets_the_host_get_ahead_of_those_behind_it() -> None:
    device = VirtualDriver(launch_s=10e-6)
    streams = Pausing(EventStreams(device), device)  # type: ignore[arg-type]
    streams.watching = True
    found = run(streams, [[1e-6] * 9, [5e-3], [1e-6] * 50, [1e-6] * 50], device, holding=False)
    assert streams.ahead == {2, 3}
    assert [found[2], found[3]] == pytest.approx([50e-6] * 2), "ten times as long by the host"


def test_between_computations_the_host_takes_what_the_interpreter_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the device does meanwhile: by its events a device that is busy shows no gap at all."""
    for kernel_s in (1e-6, 5e-3):
        device = VirtualDriver(launch_s=10e-6)
        monkeypatch.setattr("calibration.measure.delayed_streams.time.perf_counter", device.host_s)
        streams = Pausing(EventStreams(device), device)  # type: ignore[arg-type]
        for number in range(4):
            streams.compute(number, COMPUTE, [], device.kernel(kernel_s))
            device.host_takes(30e-6)
        assert streams.between_s == pytest.approx([30e-6] * 3)
        streams.finish()


def tasks_of(seconds: list[float]) -> list[TaskTime]:
    return [TaskTime(number, COMPUTE, float(number), number + value) for number, value in enumerate(seconds)]


def test_of_a_step_a_task_takes_the_larger_of_host_and_device() -> None:
    """By the device, what it took in training where the host was ahead, else what it took when it was held. What is left of the
    wall time of the plain step is neither."""
    case = make_case(0, MLP, load_model(MLP), 4, CalibrationRequest(models=((MLP, (4,)),)), torch.device("cpu"))
    count = len(case.graph.tasks)
    assert count > 3
    issue_s = {1: 2.0, 2: 0.1, **dict.fromkeys(range(3, count), 0.01)}
    plain = StepTimes(tasks_of([0.9] * count), wall_s=10.0 * count, cpu_s=0.1, between_s=[0.5] * (count - 2))
    watched = StepTimes(tasks_of([0.75] * count), 9.0, 0.1, ahead=frozenset({2, 3}))
    held = StepTimes(tasks_of([0.25] * count), 9.0, 0.1, issue_s, hidden=True)
    record = gpu_sweep_record(case, GpuStep(plain, watched, held))
    assert record["seconds"] == [0.25, 0.25, 0.75, 0.75] + [0.25] * (count - 4)
    assert record["issue_s"] == [issue_s.get(task, 0.0) for task in range(count)]
    assert record["gap_s"] == 0.5
    taken = [2.5, 0.75, 0.75] + [0.51] * (count - 4)
    assert record["rest_s"] == pytest.approx(10.0 * count - sum(taken)), "the batch of the plain step is on the device"
    assert record["hidden"]
    assert record["ahead"] == [2, 3]


def test_on_a_cpu_nothing_is_held() -> None:
    streams = pausing_streams(torch.device("cpu"))
    assert not streams.holds
    streams.holding = True
    streams.compute(0, COMPUTE, [], lambda: None)
    assert [entry.task for entry in streams.finish()] == [0]
    streams.close()


# --- the pace ---------------------------------------------------------------------------------------------------------

DEVICE_S, HOST_S = 4e-3, 1e-3


def beside_a_gpu(device: float, host: float) -> dict[str, Any]:
    """One step with so slow a GPU and host: task 0 loads, task 1 computes."""
    looks = {PACE: [device * DEVICE_S] * 2, HOST_PACE: [host * HOST_S] * 2}
    steps = {"rest_s": host, "wall_s": host, "cpu_s": host, "load_again_s": host, "gap_s": host}
    sweep = {"model": 0, "samples": 4, "ranks_active": 1, "seconds": [host, device], "issue_s": [0.0, host], **steps, **looks}
    return {
        "ranks": [
            {
                "sweeps": [sweep],
                "optimizers": [{"ranks_active": 1, "seconds": device, "issue_s": host, **looks}],
                "collectives": [{"seconds": [[1.0]], PACE: looks[PACE]}],
                "overlap": [{"communication_s": [1.0], PACE: looks[PACE]}],
            }
        ],
        "cases": [{"model": 0, "samples": 4, "tasks": ["load x4 64 B", "forward block.0 x4"]}],
    }


@given(device=st.floats(0.5, 2.0), host=st.floats(0.5, 2.0))
def test_a_host_scales_host_times_and_a_gpu_its_own(device: float, host: float) -> None:
    usual, hosts = Pace(DEVICE_S, DEVICE_S), Pace(HOST_S, HOST_S)
    (rank,) = at_one_pace(beside_a_gpu(device, host), usual, hosts, on_gpu=True)["ranks"]
    (sweep,), (update,) = rank["sweeps"], rank["optimizers"]
    assert [*sweep["seconds"], sweep["issue_s"][1], sweep["gap_s"]] == pytest.approx([1.0] * 4)
    assert [sweep[key] for key in ("rest_s", "wall_s", "cpu_s", "load_again_s")] == pytest.approx([1.0] * 4)
    assert [update["seconds"], update["issue_s"]] == pytest.approx([1.0, 1.0])
    assert rank["collectives"][0]["seconds"] == [[1.0]]
    assert rank["overlap"][0]["communication_s"] == [1.0]


def test_the_usual_pace_of_the_host_is_its_own() -> None:
    raw = beside_a_gpu(1.5, 0.5)
    assert usual_pace(raw) == Pace(1.5 * DEVICE_S, 1.5 * DEVICE_S)
    assert usual_pace(raw, HOST_PACE) == Pace(0.5 * HOST_S, 0.5 * HOST_S)


def test_the_probe_of_a_gpu_is_timed_by_its_events() -> None:
    """The virtual device's clock stands still while torch computes, so what is found is what the kernels were made to take."""
    device = VirtualDriver(launch_s=10e-6)
    probe = SpeedProbe(torch.device("cpu"), driver=device, size=CORE_SIZE)
    step = probe._step

    def launching() -> None:
        step()
        device.launch(7e-3, "step")

    probe._step = launching  # type: ignore[method-assign]
    assert probe.seconds() == pytest.approx(7e-3)
    assert device.asked[-1] == "synchronize"
    assert device.asked.index("hold") < len(device.asked) - 1 - device.asked[::-1].index("step")


@pytest.mark.parametrize("on_gpu", [True, False])
def test_a_pace_is_looked_at_again_beside_the_steps_that_it_was_beside(on_gpu: bool) -> None:
    """Beside a few steps a GPU has other clocks than beside steps in a row, and would seem to have become faster."""
    made: list[str] = []

    class Visited:
        def step(self) -> None:
            made.append("step")

        def steps_in_a_row(self, kept: int) -> None:
            made.append(f"{kept} in a row")

        def seconds(self) -> float:
            made.append("look")
            return 1.0

    visited: Any = Visited()
    visited.on_gpu = on_gpu
    assert looks(visited, visited, 2) == [1.0, 1.0]
    assert made == ["look", *(["2 in a row"] if on_gpu else ["step"] * 3), "look"]


# --- arithmetic -------------------------------------------------------------------------------------------------------


def test_fp32_is_ieee_and_tf32_is_not_and_both_are_recorded() -> None:
    before = torch.get_float32_matmul_precision(), torch.backends.cudnn.allow_tf32
    try:
        for precision, on in (("tf32", True), ("fp32", False), ("amp_bf16", False)):
            set_arithmetic(precision)
            found = json.loads(json.dumps(arithmetic_settings()))
            assert (found["matmul_allow_tf32"], found["cudnn_allow_tf32"]) == (on, on)
            assert found["float32_matmul_precision"] == ("high" if on else "highest")
            assert {"cudnn_benchmark", "cudnn_version", "cuda_version", "cudnn_deterministic"} <= found.keys()
    finally:
        torch.set_float32_matmul_precision(before[0])
        torch.backends.cudnn.allow_tf32 = before[1]


def test_every_precision_of_a_gpu_has_its_arithmetic_and_others_are_refused() -> None:
    for precision in PRECISIONS["cuda"]:
        request = CalibrationRequest(models=((MLP, (4,)),), device="cuda", precision=precision)
        assert CalibrationRequest.from_json(request.to_json()) == request
        assert precision in DTYPES
        assert precision in OPERATOR_DTYPES
    with pytest.raises(ConfigError, match="fp8"):
        CalibrationRequest(models=((MLP, (4,)),), device="cuda", precision="fp8")
    with pytest.raises(ConfigError, match="tf32"):
        CalibrationRequest(models=((MLP, (4,)),), device="cpu", precision="tf32")


def test_under_autocast_products_are_in_half_precision_and_weights_are_not() -> None:
    linear = torch.nn.Linear(4, 4)
    with autocast("amp_bf16", torch.device("cpu")):
        assert linear(torch.ones(2, 4)).dtype is OPERATOR_DTYPES["amp_bf16"] is torch.bfloat16
    with autocast("tf32", torch.device("cpu")):
        assert linear(torch.ones(2, 4)).dtype is torch.float32
    assert linear.weight.dtype is DTYPES["amp_bf16"] is torch.float32


# --- memory -----------------------------------------------------------------------------------------------------------


def test_memory_of_a_gpu_is_compared_like_with_like() -> None:
    stats = {
        "requested_bytes.all.peak": 90 * MIB,
        "allocated_bytes.all.peak": 92 * MIB,
        "reserved_bytes.all.peak": 128 * MIB,
        "reserved_bytes.all.current": 1,
    }
    found = GpuMemory.read(stats, driver_bytes=300 * MIB)
    assert found == GpuMemory(90 * MIB, 92 * MIB, 128 * MIB, 300 * MIB)
    assert found.in_order(live_bytes=80 * MIB)
    assert not found.in_order(live_bytes=91 * MIB)
    assert not GpuMemory.read(stats, driver_bytes=100 * MIB).in_order(live_bytes=80 * MIB)


SECONDS = st.floats(1e-7, 1e-2)


@given(
    launch_s=st.floats(1e-7, 1e-3),
    groups=st.lists(st.lists(SECONDS, min_size=1, max_size=4), min_size=1, max_size=6),
)
def test_what_is_found_is_the_devices_and_the_hosts_is_beside_it(launch_s: float, groups: list[list[float]]) -> None:
    device = VirtualDriver(launch_s=launch_s)
    found = timed_groups(device, [Group([device.kernel(seconds) for seconds in group]) for group in groups])
    assert found.hidden
    assert found.seconds == pytest.approx([sum(group) for group in groups], rel=1e-9, abs=1e-12)
    assert found.issue_s == pytest.approx([launch_s * len(group) for group in groups], rel=1e-9, abs=1e-12)


def test_everything_is_queued_behind_the_hold_and_read_after_the_device_has_ended() -> None:
    device = VirtualDriver(launch_s=10e-6)
    group = Group([device.kernel(1e-6, "call"), device.kernel(1e-6, "call")], before=device.kernel(1e-6, "rewrite"))
    timed_groups(device, [group, group])
    queued = ["rewrite", "record", "call", "call", "record"]
    assert device.asked == ["synchronize", "hold", "record", *queued, *queued, "synchronize"]


def test_a_hold_that_was_too_short_is_followed_by_a_longer_one() -> None:
    device = VirtualDriver(launch_s=1e-3)
    found = timed_groups(device, [Group([device.kernel(1e-6)] * 20)])
    assert found.hidden
    assert device.holds_s[0] == FIRST_HOLD_S
    assert device.holds_s == sorted(device.holds_s)
    assert found.seconds == [pytest.approx(20e-6)]


def test_a_call_that_waits_for_the_device_is_never_hidden_and_ends() -> None:
    device = VirtualDriver(launch_s=10e-6)

    def waits() -> None:
        device.launch(1e-3)
        device.synchronize()

    found = timed_groups(device, [Group([waits])])
    assert not found.hidden
    assert max(device.holds_s) == MOST_HOLD_S


def test_a_device_is_warm_after_more_than_a_second_of_work_without_a_queue() -> None:
    device = VirtualDriver(launch_s=10e-6)
    warm_up(device, device.kernel(0.03, "work"))
    assert device.host_s() > 1.0
    assert device.asked[:2] == ["work", "synchronize"]
    assert device.free_s <= device.host_s()
