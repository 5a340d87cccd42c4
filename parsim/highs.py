"""Linear programmes, with whole numbers or without, solved by HiGHS (the package highspy)."""

from __future__ import annotations

from typing import Any

import numpy as np

from parsim.numeric import Floats


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
