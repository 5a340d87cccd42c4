"""Communication first: what its threads get, what the one that computes keeps, and that nothing breaks where it is refused."""

from __future__ import annotations

import os
import threading
from typing import Any

import pytest

from parsim.execute.processes import setup as priority
from parsim.execute.processes.setup import SWITCH, is_granted, take_priority, threads_with_priority

pytestmark = pytest.mark.skipif(not hasattr(os, "sched_getscheduler"), reason="this system has no scheduling policies")


def policy_of_a_thread(act: Any = None) -> int:
    found: list[int] = []

    def run() -> None:
        if act is not None:
            act()
        found.append(os.sched_getscheduler(0))

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    return found[0]


def test_threads_begun_inside_have_it_and_the_caller_only_inside() -> None:
    before = os.sched_getscheduler(0)
    if not is_granted():
        pytest.skip("this user may not have real-time threads")
    with threads_with_priority() as taken:
        assert taken
        assert os.sched_getscheduler(0) == os.SCHED_RR
        assert policy_of_a_thread() == os.SCHED_RR
    assert os.sched_getscheduler(0) == before
    assert policy_of_a_thread() == before
    assert policy_of_a_thread(take_priority) == os.SCHED_RR
    with pytest.raises(ZeroDivisionError), threads_with_priority():
        raise ZeroDivisionError
    assert os.sched_getscheduler(0) == before


def test_the_switch_turns_it_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(SWITCH, "0")
    assert not take_priority()
    assert not is_granted()


def test_where_it_is_refused_everything_stays_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(priority.os, "sched_setscheduler", refuse)
    before = os.sched_getscheduler(0)
    assert not take_priority()
    assert not is_granted()
    with threads_with_priority() as taken:
        assert not taken
    assert os.sched_getscheduler(0) == before
