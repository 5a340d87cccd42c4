"""What numbers need: rare garbage collections while something large is worked out, types of arrays, linear programmes.

A search keeps layouts, prices and memories; a trace keeps operators and tensors. Python's collector walks through all of that
again and again, and finds next to no cycles. It took a fifth of a search over 64 GPUs, and an eighth of a trace.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

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


# Linear programmes, with whole numbers or without, solved by HiGHS (the package highspy).


def solve(
    gain: Floats, rows: Floats, low: Floats, high: Floats, *, most: float = float("inf"), whole: bool = False
) -> tuple[Floats | None, str]:
    """The x in [0, most]^n that maximises gain @ x with low <= rows @ x <= high.

    Args:
        gain: n. rows: m x n. low, high: m, infinite where there is no bound. most: of each x. whole: x are whole numbers.

    Returns:
        x, or None, and what HiGHS says of it: "Optimal", "Infeasible", or why it stopped.
    """
    import highspy  # 0.05 s: imported where it is used

    solver: Any = highspy.Highs()  # type: ignore[no-untyped-call]
    solver.silent()
    programme = highspy.HighsLp()
    programme.num_row_, programme.num_col_ = rows.shape
    programme.sense_ = highspy.ObjSense.kMaximize
    programme.col_cost_ = gain
    programme.col_lower_, programme.col_upper_ = np.zeros(len(gain)), np.full(len(gain), most)
    programme.row_lower_, programme.row_upper_ = low, high
    columns, places = np.nonzero(rows.T)
    programme.a_matrix_.format_ = highspy.MatrixFormat.kColwise
    programme.a_matrix_.start_ = np.concatenate([[0], np.cumsum(np.bincount(columns, minlength=len(gain)))]).astype(np.int32)
    programme.a_matrix_.index_ = places.astype(np.int32)
    programme.a_matrix_.value_ = rows.T[columns, places]
    if whole:
        programme.integrality_ = [highspy.HighsVarType.kInteger] * len(gain)
        solver.setOptionValue("mip_rel_gap", 0.0)
    solver.passModel(programme)
    solver.run()
    status = solver.getModelStatus()
    found = np.array(solver.getSolution().col_value) if status == highspy.HighsModelStatus.kOptimal else None
    return found, str(solver.modelStatusToString(status))
