"""Seconds of one launch by its fit, whatever form the fit has."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from parsim.costs.compute.attention_model import attention_seconds
from parsim.costs.compute.operators import Kernel, kernel_seconds
from parsim.costs.compute.tile_model import tile_seconds
from parsim.errors import CostError
from parsim.hardware.compute_records import OperatorFit


def fitted_kernel_seconds(kernel: Kernel, fit: OperatorFit) -> float:
    """Seconds of one launch.

    Args:
        kernel: sizes, flop and bytes. fit: of its kind and phase.

    Raises:
        CostError: a coefficient is missing.
    """
    try:
        match fit.form:
            case "tiles":
                return _product(kernel, fit.coefficients)
            case "fused_attention":
                return _attention(kernel, fit.coefficients)
            case "saturation":
                return kernel_seconds(kernel, fit.coefficients)
    except KeyError as error:
        raise CostError(f"the {fit.form} fit for {fit.kind} {fit.phase} has no coefficient {error}; fit it again") from error


def _product(kernel: Kernel, coefficients: Mapping[str, float]) -> float:
    rows, columns, depth, problems, size_bytes = (
        np.array([value], dtype=np.float64)
        for value in (kernel.rows, kernel.columns, kernel.depth, kernel.problems, kernel.size_bytes)
    )
    return float(tile_seconds(rows, columns, depth, problems, size_bytes, coefficients)[0])


def _attention(kernel: Kernel, coefficients: Mapping[str, float]) -> float:
    queries, keys, depth, problems, causal, size_bytes = (
        np.array([value], dtype=np.float64)
        for value in (kernel.rows, kernel.columns, kernel.depth, kernel.problems, kernel.causal, kernel.size_bytes)
    )
    backward = kernel.phase == "backward"
    seconds = attention_seconds(queries, keys, depth, depth, problems, causal, size_bytes, coefficients, backward=backward)
    return float(seconds[0])
