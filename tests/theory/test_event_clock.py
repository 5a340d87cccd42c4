"""Timing by events, on a device whose time is computed: what is found is the kernels', however slow the host is."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from parsim.execute.cuda.driver import FIRST_HOLD_S, MOST_HOLD_S, Group, timed_groups, warm_up
from tests.virtual_cuda import VirtualDriver

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


def test_a_clock_without_a_hold_would_measure_the_launches() -> None:
    """What the stand-in is for: the same kernels between two events, without a hold, take what their launches take."""
    device = VirtualDriver(launch_s=50e-6)
    start = device.mark()
    for _ in range(10):
        device.launch(1e-6)
    end = device.mark()
    device.synchronize()
    assert device.elapsed_s(start, end) == pytest.approx(10 * 50e-6 + 1e-6)


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
