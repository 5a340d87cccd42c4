"""Operator fits of a device from published kernel timings: read the rows, fit the formula "saturation" of
`parsim.costs.compute.formula`.

Data: DeepBench's training results on a V100-SXM2 (matmul, convolution forward, backward-input, backward-weight; fp32 and
"fp16 in, mixed math"), timed back to back without the framework; and NeuSight's kernels on a V100-PCIe-32GB (elementwise,
softmax, layer norm; fp32, forward), which has the same HBM2 at 900 GB/s. Only memory-bound rows come from the second.

A fit depends on the points alone and on nothing random: refitting the points kept in a profile gives its coefficients bit for
bit (on one machine and scipy version).
"""

from __future__ import annotations

import csv
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import least_squares

from parsim.costs.communication.measured import rounded
from parsim.costs.compute.formula import FAMILIES, family_of, saturation_s
from parsim.costs.compute.launches import Launch, backward_launches, forward_launches
from parsim.errors import DataError, ProfileError
from parsim.hardware.profile import SourceEntry
from parsim.hardware.records import OperatorFit, OperatorPoint
from parsim.model.component import Operator

DEEPBENCH = "deepbench-v100-sxm2"
NEUSIGHT = "neusight-v100-pcie"
PRECISIONS = {"fp32": "fp32", "fp16 in, mixed math": "amp_fp16"}
CONVOLUTION_PHASES = {"conv_fwd": "forward", "conv_bwd_data": "backward_input", "conv_bwd_weight": "backward_weight"}

ARRAYS = {
    "add_fwd": 3,
    "mul_fwd": 3,
    "div_fwd": 3,
    "pow_fwd": 3,
    "gelu_fwd": 2,
    "relu_fwd": 2,
    "tanh_fwd": 2,
    "softmax_fwd": 3,
    "ln_fwd": 3,
}
"""Arrays read and written by a memory-bound kernel; softmax and layer norm read theirs twice, and `pow` takes as long as the
two-operand kernels of its size."""

MIN_MEMORY_BOUND_BYTES = 16e6
"""Below this NeuSight's kernels all take the 32-60 us of a launch between two events: nothing about the memory."""

MEMORY_BOUND_STRIDE = 2
"""Every second memory-bound row is kept, to keep the profile small."""

PARAMETERS = (
    "floor_s",
    "efficiency_dense",
    "efficiency_3x3",
    "efficiency_other",
    "half_rows",
    "half_columns",
    "half_depth",
    "wave_outputs",
    "bandwidth_fraction",
    "strided_factor",
)
START = np.log([5e-6, 0.8, 0.8, 0.8, 10.0, 10.0, 10.0, 1e4, 0.8, 1.2])
LOWER = np.log([1e-6, 0.1, 0.1, 0.1, 1e-2, 1e-2, 1e-2, 1.0, 0.2, 1.0])
UPPER = np.log([5e-5, 0.95, 3.0, 2.0, 3e3, 3e3, 3e3, 1e7, 1.0, 5.0])
"""No dense kernel exceeds 95% of the peak (the best DeepBench matmul reaches 94%); Winograd and FFT kernels save up to two
thirds of the multiplications."""

FOLDS = 10
MIN_POINTS = 8

NORMAL_MAD = 1.4826
"""Standard deviation of a normal over its median absolute deviation. The sigma of a fit is the robust one of its
cross-validated residuals, because it is drawn once for all kernels of a network. Single outliers do not shift these together: a
bad choice of algorithm for one shape takes up to ten times as long."""


def read_operator_points(data_dir: Path) -> tuple[list[OperatorPoint], dict[str, SourceEntry]]:
    """The rows of `operators.csv` that the fits use, and their sources. Raises DataError: it is missing, or a row is not of the
    unit and form expected."""
    path = data_dir / "operators.csv"
    if not path.is_file():
        raise DataError(f"no {path}; give the folder that holds operators.csv")
    points: list[OperatorPoint] = []
    memory_bound = 0
    with path.open(newline="") as file:
        for row in csv.DictReader(file):
            point = _point(row)
            if point is None:
                continue
            if point.kind == "memory_bound":
                memory_bound += 1
                if memory_bound % MEMORY_BOUND_STRIDE:
                    continue
            points.append(point)
    return points, {
        DEEPBENCH: SourceEntry(
            kind="measurement",
            text="github baidu-research/DeepBench results/train/DeepBench_NV_V100.xlsx @da81ba782073: V100-SXM2 in a DGX-1, "
            "gemm and convolution, fp32 and fp16 input with mixed math",
        ),
        NEUSIGHT: SourceEntry(
            kind="measurement",
            text="github sitar-lab/NeuSight scripts/asplos/data/dataset/train/collect @6945927d9afc: V100-PCIE-32GB, "
            "torch 2.1.0, fp32 forward of elementwise, softmax and layer norm kernels of at least 16 MB, every second row",
        ),
    }


def fit_operators(
    points: Sequence[OperatorPoint],
    device_type: str,
    peak_flop_per_s: Mapping[str, float],
    memory_bandwidth_bytes_per_s: float,
) -> list[OperatorFit]:
    """One fit per kind, phase and precision that has points and a peak; memory-bound fits serve every precision of the device.
    Raises ProfileError: fewer than 8 points for a fit."""
    fits: list[OperatorFit] = []
    groups: dict[tuple[str, str, str], list[OperatorPoint]] = {}
    for point in points:
        if point.precision in peak_flop_per_s:
            groups.setdefault((point.kind, point.phase, point.precision), []).append(point)
    for (kind, phase, precision), group in sorted(groups.items()):
        if len(group) < MIN_POINTS:
            raise ProfileError(f"{len(group)} points for {kind} {phase} {precision}; a fit needs at least {MIN_POINTS}")
        fit = _fit_group(group, device_type, peak_flop_per_s[precision], memory_bandwidth_bytes_per_s)
        fits.append(fit)
        if kind == "memory_bound":
            others = sorted(set(peak_flop_per_s) - {precision})
            fits.extend(fit.model_copy(update={"precision": other}) for other in others)
    return fits


def kernel_of(point: OperatorPoint) -> Launch:
    """The kernel a point timed, built as for prediction."""
    width = 4
    shape = point.shape
    if point.kind == "memory_bound":
        size_bytes = width * shape["elements"] * shape["arrays"]
        operator = _operator(point, "batch", 0.0, size_bytes)
    elif point.kind == "matmul":
        m, n, k = shape["m"], shape["n"], shape["k"]
        problems = shape.get("problems", 1)
        moved = width * problems * (m * k + m * n + k * n)
        operator = _operator(point, "rows", 2.0 * problems * m * n * k, moved)
    else:
        taps = shape["r"] * shape["s"] * shape["c"] // shape["groups"] * shape["k"]
        pixels = shape["out_h"] * shape["out_w"]
        moved = width * (shape["c"] * shape["h"] * shape["w"] + shape["k"] * pixels)
        operator = _operator(point, "batch", 2.0 * taps * pixels, moved, width * taps)
    if point.phase == "forward":
        return forward_launches(operator, point.samples, point.precision)[0]
    both = sum(backward_launches(operator, point.samples, point.precision), ())
    return next(kernel for kernel in both if kernel.phase == point.phase)


# --- reading ----------------------------------------------------------------------------------------------------------


def _point(row: Mapping[str, str]) -> OperatorPoint | None:
    deepbench = row["id"].startswith("ops-deepbench")
    operation = row["model_or_op"]
    if deepbench and operation == "gemm":
        kind, phase, source = "matmul", "forward", DEEPBENCH
    elif deepbench and operation in CONVOLUTION_PHASES:
        kind, phase, source = "convolution", CONVOLUTION_PHASES[operation], DEEPBENCH
    elif not deepbench and operation in ARRAYS:
        kind, phase, source = "memory_bound", "forward", NEUSIGHT
    else:
        return None
    if row["unit"] != "ms" or row["precision"] not in PRECISIONS:
        raise DataError(
            f"row {row['id']}: expected ms and one of {', '.join(PRECISIONS)}, got {row['unit']}, {row['precision']}"
        )
    try:
        sizes = {name: size for name, _, size in (part.partition("=") for part in row["size_bytes_or_shape"].split())}
        shape, samples = _shape(kind, operation, sizes)
        seconds = float(row["value"]) / 1e3
    except (KeyError, ValueError) as error:
        raise DataError(f"row {row['id']}: cannot read {row['size_bytes_or_shape']!r}, {row['value']!r}: {error}") from error
    if kind == "memory_bound" and 4 * shape["elements"] * shape["arrays"] < MIN_MEMORY_BOUND_BYTES:
        return None
    return OperatorPoint.model_validate(
        {
            "kind": kind,
            "phase": phase,
            "shape": shape,
            "samples": samples,
            "device_type": "V100-SXM2" if deepbench else "V100-PCIE-32GB",
            "precision": PRECISIONS[row["precision"]],
            "seconds": seconds,
            "source": source,
        }
    )


def _shape(kind: str, operation: str, sizes: Mapping[str, str]) -> tuple[dict[str, int], int]:
    if kind == "matmul":
        return {"m": int(sizes["M"]), "n": int(sizes["N"]), "k": int(sizes["K"])}, 1
    if kind == "memory_bound":
        return {"elements": int(sizes["B"]) * int(sizes["H"]), "arrays": ARRAYS[operation]}, 1
    names = {
        "c": "C",
        "h": "H",
        "w": "W",
        "k": "K",
        "r": "filt_h",
        "s": "filt_w",
        "stride_h": "stride_h",
        "stride_w": "stride_w",
    }
    shape = {ours: int(sizes[theirs]) for ours, theirs in names.items()}
    shape["groups"] = 1
    shape["out_h"] = (shape["h"] + 2 * int(sizes["pad_h"]) - shape["r"]) // shape["stride_h"] + 1
    shape["out_w"] = (shape["w"] + 2 * int(sizes["pad_w"]) - shape["s"]) // shape["stride_w"] + 1
    return shape, int(sizes["N"])


def _operator(
    point: OperatorPoint, batch: str, forward_flop: float, activation_bytes: int, parameter_bytes: int = 0
) -> Operator:
    return Operator(
        kind=point.kind,
        shape=tuple(point.shape.items()),
        batch=batch,
        forward_flop=forward_flop,
        activation_bytes=activation_bytes,
        parameter_bytes=parameter_bytes,
    )


# --- fitting ----------------------------------------------------------------------------------------------------------


def _fit_group(points: Sequence[OperatorPoint], device_type: str, peak: float, bandwidth: float) -> OperatorFit:
    kernels = [kernel_of(point) for point in points]
    log_seconds = np.log([point.seconds for point in points])
    sources = sorted({point.source for point in points})
    folds = np.arange(len(points)) % FOLDS
    held_out = np.zeros(len(points))
    for fold in range(FOLDS):
        train = [kernel for kernel, number in zip(kernels, folds, strict=True) if number != fold]
        coefficients = _fit_coefficients(train, log_seconds[folds != fold], peak, bandwidth)
        test = [kernel for kernel, number in zip(kernels, folds, strict=True) if number == fold]
        held_out[folds == fold] = _log_seconds(test, coefficients) - log_seconds[folds == fold]
    flop = [kernel.flop for kernel in kernels]
    return OperatorFit(
        kind=points[0].kind,
        phase=points[0].phase,
        precision=points[0].precision,
        device_type=device_type,
        coefficients=_fit_coefficients(kernels, log_seconds, peak, bandwidth),
        relative_sigma=rounded(NORMAL_MAD * float(np.median(np.abs(held_out)))),
        min_flop=min(flop),
        max_flop=max(flop),
        points=len(points),
        source=sources[0],
    )


def _fit_coefficients(
    kernels: Sequence[Launch], log_seconds: NDArray[np.float64], peak: float, bandwidth: float
) -> dict[str, float]:
    """Robust least squares of the log of the time; a coefficient no kernel depends on keeps its starting value."""
    known = {"peak_flop_per_s": peak, "memory_bandwidth_bytes_per_s": bandwidth}
    free = _free(kernels)

    def coefficients(theta: NDArray[np.float64]) -> dict[str, float]:
        return {name: float(value) for name, value in zip(free, np.exp(theta), strict=True)} | known

    def residuals(theta: NDArray[np.float64]) -> NDArray[np.float64]:
        return _log_seconds(kernels, coefficients(theta)) - log_seconds

    index = [PARAMETERS.index(name) for name in free]
    result = least_squares(
        residuals, START[index], bounds=(LOWER[index], UPPER[index]), loss="soft_l1", f_scale=0.2, max_nfev=500
    )
    return {name: rounded(value) for name, value in coefficients(result.x).items()}


def _free(kernels: Sequence[Launch]) -> list[str]:
    """The parameters of the formula that these kernels depend on."""
    if all(kernel.flop == 0 for kernel in kernels):
        return ["floor_s", "bandwidth_fraction"]
    families = {family_of(kernel) for kernel in kernels}
    unused = {f"efficiency_{family}" for family in FAMILIES if family not in families}
    if not any(kernel.strided for kernel in kernels):
        unused.add("strided_factor")
    return [name for name in PARAMETERS if name not in unused]


def _log_seconds(kernels: Sequence[Launch], coefficients: Mapping[str, float]) -> NDArray[np.float64]:
    return np.log([saturation_s(kernel, coefficients) for kernel in kernels])
