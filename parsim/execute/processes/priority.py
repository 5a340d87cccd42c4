"""Communication first: its threads run as soon as they wake, where the system lets them.

With gloo a rank's computation and communication share a core. A thread that a message wakes up waits there until the
computing thread has used its time slice. That takes some milliseconds, in which the peer waits too. Threads under
real-time round-robin scheduling (Linux, SCHED_RR) do not wait; they sleep but for the moments in which there is something
to send or to add. On a 2-core virtual machine steps of two ranks got 17 to 54% shorter
(`experiments/this_machine/priority.py`).

All of them have one priority. Gloo's loop over its sockets and the threads that use them wait for one another by polling,
and a thread with higher priority would poll forever. What the computation holds none of them may wait for: see
`parsim.execute.processes.pinning.keep_freed_memory`. A call in a thousand still takes 50 to 100 ms, when one looks for a
whole time slice.

It takes root, CAP_SYS_NICE or a limit `rtprio` of 1 (`ulimit -r`). Elsewhere everything works as usual, more slowly.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator

SWITCH = "PARSIM_PRIORITY"
"""Environment variable: 0 leaves all threads alike."""

LOWEST = 1
"""Of the real-time priorities: above everything usual, below whatever else the system runs so."""


def take_priority() -> bool:
    """Put the calling thread before usual ones; False where the system does not let it, or SWITCH says no."""
    if not hasattr(os, "sched_setscheduler") or os.environ.get(SWITCH) == "0":
        return False
    try:
        os.sched_setscheduler(0, os.SCHED_RR, os.sched_param(LOWEST))
    except OSError:
        return False
    return True


def is_granted() -> bool:
    """Whether threads of this process may have it."""
    with threads_with_priority() as taken:
        return taken


@contextlib.contextmanager
def threads_with_priority() -> Iterator[bool]:
    """Threads begun inside have priority, as they inherit it; the calling one only has it inside. Yields whether they do."""
    if not hasattr(os, "sched_getscheduler"):
        yield False
        return
    policy, parameters = os.sched_getscheduler(0), os.sched_getparam(0)
    taken = take_priority()
    try:
        yield taken
    finally:
        if taken:
            os.sched_setscheduler(0, policy, parameters)
