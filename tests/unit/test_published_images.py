"""Rows of convolutional networks: what is read of them, what is assumed, and what is refused for which reason."""

from __future__ import annotations

import pytest

from experiments.published.predict import predict
from experiments.published.rows import row_of

IMAGES = {
    "id": "x-0001",
    "hardware": "A100-SXM4-80GB, 8/node",
    "gpus": "8",
    "model": "ResNet-50",
    "global_batch": "2048",
    "micro_batch": "256",
    "precision": "fp16 amp",
    "unit": "images/s",
}


def predicted(**values: str) -> tuple[float | None, str]:
    found = predict(row_of({**IMAGES, **values}), raw=True)
    return found.value, found.why


def test_the_framework_is_part_of_the_question() -> None:
    """MXNet fuses norms, PyTorch does not; arrays in the order of matrix units need no conversion."""
    plain, why = predicted()
    assert plain is not None
    assert "assumed PyTorch" in why
    last = predicted(notes="PyTorch, channels_last")[0]
    fused = predicted(notes="MXNet, NHWC, fused batch norm; MLPerf v3.0", id="mlperf-resnet-1")[0]
    assert last is not None
    assert fused is not None
    assert plain < last < fused


@pytest.mark.parametrize(
    ("values", "published", "within"),
    [
        ({"id": "dle-1", "hardware": "A100-SXM4-80GB", "gpus": "1", "global_batch": "256", "precision": "tf32"}, 938, 0.08),
        ({"id": "dle-1", "hardware": "V100-SXM2-16GB, DGX-1"}, 8322, 0.08),
        ({"id": "mlperf-1", "notes": "MXNet", "global_batch": "3264", "micro_batch": "408"}, 27188.7, 0.08),
    ],
)
def test_published_resnets(values: dict[str, str], published: float, within: float) -> None:
    """NVIDIA/DeepLearningExamples (PyTorch: TF32 in NCHW, AMP in NHWC) and MLPerf v2.1 (MXNet)."""
    value, _ = predicted(**({"notes": "DLE PyTorch, NHWC"} | values))
    assert value == pytest.approx(published, rel=within)


@pytest.mark.parametrize(
    ("values", "reason"),
    [
        ({"global_batch": "", "micro_batch": ""}, "states no batch"),
        ({"precision": "fp8"}, "no library has convolutions in 8 bits"),
        ({"tp": "2"}, "only data parallelism"),
        ({"unit": "TFLOP/s/GPU"}, "counts the FLOP of a transformer"),
        ({"micro_batch": "100"}, "does not divide"),
        ({"hardware": "TPU v4"}, "no single kind of GPU"),
    ],
)
def test_refusals_say_why(values: dict[str, str], reason: str) -> None:
    value, why = predicted(**values)
    assert value is None
    assert reason in why
