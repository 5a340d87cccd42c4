"""The harness on a virtual device, where the right answer is known exactly."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from functools import partial

import pytest
from hypothesis import given
from hypothesis import strategies as st

from parsim.errors import ExecutionError
from parsim.execute.cuda.driver import steady_cycles_per_s
from tests.virtual_cuda import VirtualDriver
from tools.gpu.device import WallClock, cpu_device
from tools.gpu.launches import event_cost, launch_cost, synchronisation_cost
from tools.gpu.timing import QUEUE_CALLS, time_calls


def virtual(*, launch_s: float = 10e-6) -> VirtualDriver:
    return VirtualDriver(launch_s=launch_s, record_s=1e-6)


@given(kernel_s=st.floats(1e-7, 1e-2), launch_s=st.floats(1e-6, 3e-5))
def test_a_call_takes_what_the_device_takes_however_slow_the_host_is(kernel_s: float, launch_s: float) -> None:
    device = virtual(launch_s=launch_s)
    timing = time_calls(device, [device.kernel(kernel_s)], least_s=0.01, warm_s=0.001)
    assert timing.median_s == pytest.approx(kernel_s, rel=1e-6)
    assert timing.p95_s == pytest.approx(kernel_s, rel=1e-6)
    assert timing.queued
    assert timing.sustained_s >= 0.01


def test_a_burst_that_the_device_began_too_early_is_repeated_behind_a_longer_hold() -> None:
    """The host becomes eight times slower after warming up, so that the first hold is too short."""
    device = virtual()
    kernel = device.kernel(2e-6)

    def slower_once_measuring() -> None:
        device.launch_s = 80e-6 if device.holds_s else 10e-6
        kernel()

    timing = time_calls(device, [slower_once_measuring], least_s=0.005, warm_s=0.001)
    assert timing.repeated_bursts > 0
    assert timing.median_s == pytest.approx(2e-6, rel=1e-6)
    assert device.holds_s == sorted(device.holds_s)


def test_a_host_that_no_hold_outlasts_is_an_error() -> None:
    device = virtual()
    kernel = device.kernel(2e-6)

    def hopeless() -> None:
        device.launch_s = 1.0 if device.holds_s else 10e-6
        kernel()

    with pytest.raises(ExecutionError, match="the host is too busy"):
        time_calls(device, [hopeless], least_s=0.005, warm_s=0.001)


def test_calls_take_turns_and_the_queue_never_overflows() -> None:
    device, count = virtual(), Counter[int]()

    def call(number: int, kernel: Callable[[], None]) -> None:
        count[number] += 1
        kernel()

    calls = [partial(call, number, device.kernel(3e-6)) for number in range(7)]
    time_calls(device, calls, least_s=0.02, warm_s=0.001)
    assert max(count.values()) - min(count.values()) <= 1
    assert device.largest_queue <= QUEUE_CALLS + 1  # the calls and the hold


@pytest.mark.parametrize("kernel_s", [1e-6, 1e-3, 0.4])
def test_timed_calls_are_sustained(kernel_s: float) -> None:
    device = virtual()
    timing = time_calls(device, [device.kernel(kernel_s)], least_s=1.0, warm_s=0.01)
    assert timing.sustained_s >= 1.0
    assert timing.sustained_s == pytest.approx(timing.calls * kernel_s, rel=1e-6)


@pytest.mark.parametrize("rise", [1.0, 1.05, 1.3])
def test_the_sleep_kernel_is_measured_once_the_clock_has_risen(rise: float) -> None:
    """An idle GPU begins at a sixth of its clock. Measured by its second kernel, a hold would take a fraction of its time."""
    device, steady_hz = VirtualDriver(launch_s=1e-6, record_s=1e-7), 1.98e9
    clock_hz = steady_hz / 6 if rise > 1 else steady_hz

    def sleep(cycles: int) -> None:
        nonlocal clock_hz
        device.launch(cycles / clock_hz)
        clock_hz = min(steady_hz, clock_hz * rise)

    assert steady_cycles_per_s(device, sleep) == pytest.approx(steady_hz, rel=0.03)


def test_nothing_to_time_is_an_error() -> None:
    with pytest.raises(ExecutionError, match="nothing to time"):
        time_calls(virtual(), [])


def test_the_wall_clock_driver_times_what_a_call_takes() -> None:
    driver, spent = WallClock(), []

    def busy() -> None:
        begin_s = driver.host_s()
        while driver.host_s() - begin_s < 1e-3:
            pass
        spent.append(1)

    timing = time_calls(driver, [busy], least_s=0.02, warm_s=0.002)
    assert not timing.queued
    assert 0.9e-3 <= timing.best_s <= timing.median_s
    assert timing.calls <= len(spent)


def test_launches_and_events_cost_the_host_what_they_cost_it() -> None:
    """On the virtual device torch's own operators are free, so the launch costs nothing and the event its record."""
    device = virtual()
    assert event_cost(device)["host_s"] == pytest.approx(1e-6, rel=1e-3)
    assert event_cost(device)["between_s"] == pytest.approx(0.0, abs=1e-12)  # both events lie behind the hold
    wall = cpu_device()
    assert launch_cost(wall, least_s=0.002)["host_s"] > 0
    assert synchronisation_cost(wall)["round_trip_s"] > 0
