"""Rare garbage collections while something large is worked out, and none of what stays.

A search keeps layouts, prices and memories; a trace keeps operators and tensors. Python's collector walks through all of that
again and again, and finds next to no cycles. It took a fifth of a search over 64 GPUs, and an eighth of a trace.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
from numpy.typing import NDArray

NEW_OBJECTS = 2**18
"""New objects after which the youngest are collected; Python's default is 700."""


@contextmanager
def rare_collections() -> Iterator[None]:
    """Collect garbage rarely, and as before afterwards. Leaves a collector alone that is switched off."""
    before = gc.get_threshold()
    if before[0]:
        gc.set_threshold(max(NEW_OBJECTS, before[0]), *before[1:])
    try:
        yield
    finally:
        gc.set_threshold(*before)


def keep_what_is_there() -> None:
    """Collect garbage once, and leave all that is left out of later collections: modules, models and plans stay to the end.
    Else a step in which the collector walks through them all takes twice as long."""
    gc.collect()
    gc.freeze()


def keep_nothing() -> None:
    """All objects take part in collections again: some of what was there may have become garbage, with the arrays it holds."""
    gc.unfreeze()


# Types of the arrays that pass between functions; shapes stand in docstrings.


Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
Bools = NDArray[np.bool_]
