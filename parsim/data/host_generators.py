"""The generators of the process (Python's, numpy's, and torch's for the CPU), which one thread uses at a time.

On a GPU a thread reads the next samples beside the step, and datasets of the user's own draw from them. So does a component
that draws its numbers on the host. Whoever needs the generators holds them (`alone`) and leaves them as they were.
"""

from __future__ import annotations

import os
import threading
from contextlib import AbstractContextManager

_held: list[AbstractContextManager[bool]] = [threading.RLock()]


def alone() -> AbstractContextManager[bool]:
    """Inside, no other thread that asks uses the generators."""
    return _held[0]


def _begin_anew() -> None:
    """In a fork: whichever thread held them is not there."""
    _held[0] = threading.RLock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_begin_anew)
