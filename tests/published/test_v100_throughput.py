"""A V100's training throughput from operators alone, against published whole-model rows that no fit has seen.

The fits come from kernel benchmarks (DeepBench, NeuSight). Published rows: NVIDIA DeepLearningExamples
(PyTorch/Classification/ConvNets/resnet50v1.5, @729963dd47e7) and DLPerf (reports/dlperf_benchmark_test_report_v1.md,
@c89430bac64f), PyTorch only, as listed in the handed-over throughput.csv under the ids given here. Data loading, and the
launch overhead of Python between kernels, are left out of the prediction.
"""

from __future__ import annotations

import os
from pathlib import Path
from statistics import median

import numpy as np
import pytest

from calibration.fit.operators import kernel_of, read_operator_points
from parsim.costs.compute.compute import ComputeCosts
from parsim.costs.compute.formula import saturation_s
from parsim.errors import DataError
from parsim.hardware.cluster import cluster_from_profile
from parsim.hardware.compose import load_profile
from parsim.hardware.profile import Profile
from parsim.hardware.records import OperatorPoint
from parsim.model.catalogue.frameworks import run_by
from parsim.model.formats import Numerics
from parsim.model.load import load_model
from parsim.model.model import Model
from parsim.model.spec import ModelSpec
from parsim.work import Compute, OptimizerStep, Phase
from tests.published.v100_rows import products
from tools.published.v100 import refit
from tools.published.v100_throughput import program_of, without_efficiency

PROFILE = "dgx1-v100-32gb"
PCIE_PEAK_FLOP_PER_S = 14.03e12  # NeuSight's own device table: V100-PCIE-32GB

# precision, batch, published samples/s, allowed relative error
RESNET50 = [
    ("fp32", 112, (367.0,), 0.15),  # thr-dle-0371
    ("fp32", 128, (356.0, 367.29, 348.62), 0.15),  # thr-dle-0383, thr-dlperf-0004, thr-dlperf-0007
    ("amp_fp16", 256, (1200.0, 1156.0), 0.08),  # thr-dle-0372, thr-dle-0384; 802.9 (thr-dlperf-0037) is loader-bound
]
# Sequence length 128: the zoo's BERT, with torch's fused projection and foreach AdamW.
BERT_BASE = [
    ("fp32", 32, (119.6,), 0.15),  # thr-dlperf-0067
    ("fp32", 48, (121.94,), 0.15),  # thr-dlperf-0091
    ("amp_fp16", 64, (444.51, 426.53), 0.15),  # thr-dlperf-0251, thr-dlperf-0256
    ("amp_fp16", 96, (462.35, 465.23), 0.15),  # thr-dlperf-0259, thr-dlperf-0264
]


def data_dir() -> Path:
    return Path(os.environ.get("PARSIM_V100_DATA") or Path(__file__).parents[3] / "shared/data/v100")


@pytest.fixture(scope="module")
def profile() -> Profile:
    """Without what was learnt from whole models."""
    return without_efficiency(load_profile(PROFILE))


@pytest.fixture(scope="module")
def bert() -> Model:
    pytest.importorskip("torch", reason="BERT at sequence length 128 has no preset: it is traced")
    return load_model(ModelSpec(name="bert", args=(("dropout", 0.1), ("seq", 128))))


def throughput(model: Model, profile: Profile, precision: str, batch: int, optimizer: str) -> float:
    """Samples per second of one device: forward and backward of every component, then the optimizer."""
    device = cluster_from_profile(profile, 1).devices[0]
    costs = ComputeCosts(profile, Numerics(precision=precision, optimizer=optimizer))
    seconds = 0.0
    for number, component in enumerate(model.components):
        for phase in (Phase.FORWARD, Phase.BACKWARD):
            work = Compute(component=component.name, phase=phase, samples=batch)
            estimate = costs.estimate(work, component, device, input_gradient=number > 0)
            assert estimate.source == "fitted"
            seconds += estimate.median_s
    step = OptimizerStep(elements=model.parameter_count, tensors=len(model.parameters))
    return batch / (seconds + costs.optimizer(step, device).median_s)


@pytest.mark.parametrize(("precision", "batch", "published", "tolerance"), RESNET50)
def test_resnet50(profile: Profile, precision: str, batch: int, published: tuple[float, ...], tolerance: float) -> None:
    model = run_by(load_model(ModelSpec(name="resnet50")), program_of("resnet50").convolution, precision)
    predicted = throughput(model, profile, precision, batch, "sgd_momentum")
    print(f"ResNet-50 {precision} {batch}: {predicted:.1f} predicted, {published} published")
    assert predicted == pytest.approx(median(published), rel=tolerance)


@pytest.mark.parametrize(("precision", "batch", "published", "tolerance"), BERT_BASE)
def test_bert_base(
    profile: Profile, bert: Model, precision: str, batch: int, published: tuple[float, ...], tolerance: float
) -> None:
    predicted = throughput(bert, profile, precision, batch, "adamw")
    print(f"BERT-base {precision} {batch}: {predicted:.1f} predicted, {published} published")
    assert predicted == pytest.approx(median(published), rel=tolerance)


@pytest.mark.slow
def test_the_profile_alone_gives_its_fits_again(profile: Profile) -> None:
    again = {(fit.kind, fit.phase, fit.precision): fit for fit in refit(profile).compute.operator_fits}
    shipped = {(fit.kind, fit.phase, fit.precision): fit for fit in profile.compute.operator_fits}
    assert again.keys() == shipped.keys()
    for key, fit in shipped.items():
        assert again[key].coefficients == pytest.approx(fit.coefficients, rel=1e-3), key
        assert again[key].relative_sigma == pytest.approx(fit.relative_sigma, rel=1e-3), key


def test_matmul_kernels_of_another_benchmark_and_board(profile: Profile) -> None:
    """NeuSight's linear and bmm rows (V100-PCIe, lower clock) are in no fit: large ones must come out right."""
    (fit,) = (f for f in profile.compute.operator_fits if (f.kind, f.precision) == ("matmul", "fp32"))
    coefficients = fit.coefficients | {"peak_flop_per_s": PCIE_PEAK_FLOP_PER_S}
    errors: dict[str, list[float]] = {"linear_fwd": [], "bmm_fwd": []}
    for operation, (problems, m, n, k), seconds in products():
        point = OperatorPoint(
            kind="matmul",
            phase="forward",
            shape={"m": m, "n": n, "k": k, "problems": problems},
            samples=1,
            device_type="V100-PCIE-32GB",
            precision="fp32",
            seconds=seconds,
            source="neusight",
        )
        kernel = kernel_of(point)
        assert kernel.flop > 1e10
        errors[operation].append(float(np.log(saturation_s(kernel, coefficients) / point.seconds)))
    assert len(errors["linear_fwd"]) >= 24
    assert np.median(np.abs(errors["linear_fwd"])) < 0.06
    assert np.median(np.abs(errors["bmm_fwd"])) < 0.15


def test_the_published_rows_are_read_once_each_and_in_seconds() -> None:
    if not (data_dir() / "operators.csv").is_file():
        pytest.skip("set PARSIM_V100_DATA to the folder of the published V100 data")
    points, sources = read_operator_points(data_dir())
    assert {point.source for point in points} == set(sources)
    kinds = {(point.kind, point.phase, point.precision) for point in points}
    assert ("convolution", "backward_weight", "amp_fp16") in kinds
    first = next(point for point in points if point.kind == "matmul")
    assert (first.shape, first.seconds) == ({"m": 1760, "n": 16, "k": 1760}, 38e-6)
    rates = [kernel_of(p).flop / p.seconds for p in points if p.kind == "matmul" and p.precision == "fp32"]
    assert max(rates) < 15.7e12, "a unit read wrongly would exceed the peak"


def test_a_folder_without_the_data_or_a_row_in_another_unit_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"operators\.csv"):
        read_operator_points(tmp_path)
    header = "id,source,hardware,gpus,model_or_op,precision,batch_per_gpu,size_bytes_or_shape,value,unit,notes\n"
    row = "ops-deepbench-0001,x,V100-SXM2,1,gemm,fp32,,{shape},{value},{unit},\n"
    for shape, value, unit in (("M=1 N=2 K=3", "0.1", "us"), ("M=1 N=2", "0.1", "ms"), ("M=1 N=2 K=3", "fast", "ms")):
        (tmp_path / "operators.csv").write_text(header + row.format(shape=shape, value=value, unit=unit))
        with pytest.raises(DataError, match="ops-deepbench-0001"):
            read_operator_points(tmp_path)
