"""Rows of convolutional networks: what is read of them, what is assumed, and what is refused for which reason."""

from __future__ import annotations

import pytest

from experiments.published.predict import predict
from experiments.published.rows import row_of
from parsim.model.load import load_model
from parsim.model.spec import ModelSpec

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
    ("model", "parameters", "multiply_adds"),
    [("resnext50_32x4d", 25.03e6, 4.23e9), ("resnext101_32x4d", 44.18e6, 7.99e9)],
)
def test_networks_beside_the_zoo_are_the_published_ones(model: str, parameters: float, multiply_adds: float) -> None:
    """Xie et al. 2017, table 1: 25.0 M parameters and 4.2 G multiply-adds of ResNeXt-50; torchvision has both."""
    pytest.importorskip("torch")
    loaded = load_model(ModelSpec(name=f"experiments.published.networks:{model}", input_shape=(3, 224, 224)))
    products = [each for part in loaded.components for each in part.operators if each.kind != "memory_bound"]
    assert sum(parameter.elements for parameter in loaded.parameters) == pytest.approx(parameters, rel=1e-3)
    assert sum(each.count * each.forward_flop for each in products) / 2 == pytest.approx(multiply_adds, rel=0.01)


@pytest.mark.slow
def test_a_detector_is_answered_and_says_what_is_left_out() -> None:
    """MLPerf v3.1: 710 images/s on four H100 (Mask R-CNN)."""
    row = {"model": "Mask R-CNN", "hardware": "H100-SXM5-80GB, 4/node", "gpus": "4", "global_batch": "48", "micro_batch": ""}
    found = predict(row_of({**IMAGES, **row, "notes": "MLPerf v3.1"}), raw=True)
    assert found.value == pytest.approx(710, rel=0.15)
    assert "RoIAlign" in found.why
    assert "as in NVIDIA's implementations" in found.why


@pytest.mark.parametrize(
    ("model", "kind"),
    [
        ("Stable Diffusion v2", "a diffusion"),
        ("EfficientNet-B4", "a network of images"),
        ("DLRM", "a recommender"),
        ("RNN-T", "a recurrent"),
        ("Whisper large", "an encoder with a decoder"),
        ("Thinker 2000", "need not be a transformer"),
    ],
)
def test_a_model_of_another_kind_is_no_gpt_of_its_parameters(model: str, kind: str) -> None:
    """Their parameters are stated, and no shape is: a dense GPT of as many would be an answer to another question."""
    value, why = predicted(model=model, params="865e6", unit="samples/s")
    assert value is None
    assert kind in why


def test_a_host_that_decodes_binds_the_gpus() -> None:
    """40 cores of a DGX-1 feed eight V100s no faster than 8,200 images/s, and one V100 as fast as it takes them."""
    row = {"hardware": "V100-SXM2-16GB, DGX-1", "notes": "DLE PyTorch", "id": "dle-1"}
    eight, why = predicted(**row)
    one, alone = predicted(**row, gpus="1", global_batch="256")
    assert eight == pytest.approx(8200)
    assert "decodes 8200 images/s" in why
    assert "decodes" not in alone
    assert one is not None
    assert 8 * one > 8200


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
