"""Fine-tuning: what adapters add, what frozen weights leave out, against closed forms and counts that libraries print."""

from __future__ import annotations

from typing import Any

import pytest

import parsim as ps
from parsim.errors import ConfigError, ModelError, ParsimError
from parsim.model.component import DEQUANTISE
from parsim.model.load import load_model
from parsim.model.model import Model
from parsim.model.spec import ModelSpec
from parsim.predict.breakdown import model_flop

GIB = 2**30
SEQ = 2048
ALONE: dict[str, Any] = {"global_batch": 1, "strategy": "single", "seq": SEQ}
DIRECT = {"software.framework": "torchtune"}
"""Launches take as long as in plain torch."""


def model_of(name: str, tune: str | None, *, granularity: str = "block", weights: str = "bfloat16", **args: object) -> Model:
    spec = ModelSpec.model_validate({"name": name, "args": {"seq": SEQ, **args}, "tune": tune})
    return load_model(spec, granularity=granularity, weights=weights)


def trained(model: Model) -> int:
    return sum(parameter.elements for parameter in model.trainable_parameters)


@pytest.mark.parametrize(
    ("name", "tune", "count"),
    [
        ("llama-7b", "lora:r=8,targets=q_proj+v_proj", 4_194_304),
        ("llama3-8b", "lora:r=8,targets=q_proj+v_proj", 3_407_872),
        ("llama3-8b", "qlora:r=16", 41_943_040),
        ("llama3-8b", "lora:r=64,targets=attention+mlp", 4 * 41_943_040),
    ],
)
def test_the_trained_parameters_are_as_many_as_peft_prints(name: str, tune: str, count: int) -> None:
    """`print_trainable_parameters` of peft for these models and targets."""
    for granularity in ("block", "sublayer"):
        assert trained(model_of(name, tune, granularity=granularity)) == count


def test_tuning_everything_is_training() -> None:
    assert model_of("llama3-8b", "full") == model_of("llama3-8b", None)


@pytest.mark.parametrize(
    ("tune", "bits"),
    [("qlora", 4 + 8 / 64 + 32 / 64 / 256), ("lora:base=nf4,double_quantisation=false", 4.5), ("lora:base=int8", 8.0)],
)
def test_frozen_linear_layers_take_the_bits_of_their_storage(tune: str, bits: float) -> None:
    """Dettmers et al. 2023, section 3: double quantisation takes 0.127 bits per weight instead of 0.5."""
    whole, packed = model_of("llama3-8b", None), model_of("llama3-8b", tune)
    linear = 32 * (2 * 4096 * 4096 + 2 * 4096 * 1024 + 3 * 4096 * 14336)
    adapters = sum(parameter.size_bytes for parameter in packed.trainable_parameters)
    assert packed.parameter_bytes - adapters == pytest.approx(whole.parameter_bytes - linear * (2 - bits / 8), rel=1e-9)


def test_the_backward_of_frozen_products_computes_one_gradient() -> None:
    """A forward and the gradient of the input are 2/3 of training; adapters are trained whole. The first layer's input needs
    none, which is left out here."""
    whole, adapted = model_of("llama3-8b", None), model_of("llama3-8b", "lora:r=16")
    scores = sum(op.forward_flop for c in whole.components for op in c.operators if op.kind == "attention")
    products = model_flop(whole) / 3 - scores
    low_rank = 2 * 41_943_040 * SEQ
    assert model_flop(adapted) == pytest.approx(2 * products + 3 * scores + 3 * low_rank, rel=1e-9)


def test_frozen_products_without_adapters_do_not_keep_their_input() -> None:
    """Per token: the norm before the MLP (hidden) and the MLP's inside (ffn) are read by its products alone."""
    both, attention = (model_of("llama3-8b", f"lora:r=16,targets={targets}") for targets in ("all", "attention"))
    low_rank = 2 * SEQ * 16 * 3  # what the three adapters of the MLP make
    expected = 32 * (2 * SEQ * (4096 + 14336) + low_rank)
    assert both.saved_activation_bytes - attention.saved_activation_bytes == expected


def test_the_head_alone_keeps_nothing_of_the_layers() -> None:
    model = model_of("llama3-8b", "head")
    assert {parameter.name for parameter in model.trainable_parameters} == {"lm_head.weight"}
    assert all(component.saved_activation_bytes == 0 for component in model.components[:-1])
    assert model.differentiable_components == {"head"}


def test_each_frozen_product_unpacks_its_weight_both_ways() -> None:
    model = model_of("llama3-8b", "qlora:r=16")
    layer = model.components[1]
    unpacked = [operator for operator in layer.operators if operator.function == DEQUANTISE]
    assert sum(dict(operator.shape)["elements"] for operator in unpacked) == 218_103_808
    assert model.components[-1].operators[0].function != DEQUANTISE  # the head stays in 16 bits
    plain, packed = (
        ps.simulate("llama3-8b", cluster="1xa100-sxm-80gb", tune=tune, recompute="none", **ALONE, settings=DIRECT)
        for tune in ("lora:r=16", "qlora:r=16")
    )
    least_s = 2 * 32 * 218_103_808 * (2 + 0.516) / 2.04e12  # bytes of forward and backward at the whole bandwidth
    assert least_s < packed.step_s.median - plain.step_s.median < 1.6 * least_s


def test_memory_holds_gradients_and_states_of_adapters_alone() -> None:
    found = ps.simulate("llama3-8b", cluster="1xrtx-4090", tune="qlora:r=16", recompute="full", **ALONE)
    lines = found.to_dict()["memory"][0]["lines"]
    assert lines["gradients"] == pytest.approx(2 * 41_943_040)
    assert lines["optimizer_state"] == pytest.approx((8 + 4) * 41_943_040)
    assert lines["parameters"] == pytest.approx(5.39 * GIB, rel=0.01)


def test_the_answer_says_what_was_assumed() -> None:
    answer = ps.plan("llama3-8b", cluster="1xrtx-4090", global_batch=1, tune="qlora", seq=SEQ)
    assert answer.chosen is not None
    text = " ".join(answer.problem.model.assumptions)
    assert "qlora with r = 16 (assumed) on all linear layers but the head (assumed)" in text
    assert "nf4 with double quantisation" in text


@pytest.mark.parametrize(
    ("tune", "words"),
    [
        ("lora:targets=conv9", ("conv9", "q_proj")),
        ("lora:r=0", ("r",)),
        ("lora:rank=8", ("rank",)),
        ("dora", ("full", "lora")),
        ("head:r=8", ("r belongs to adapters",)),
        ("qlora:base=int8", ("nf4",)),
        ("lora:double_quantisation=false", ("nf4",)),
        ("lora:r", ("key=value",)),
        ("lora:dropout=1.5", ("dropout",)),
    ],
)
def test_wrong_tunings_are_refused(tune: str, words: tuple[str, ...]) -> None:
    with pytest.raises(ParsimError) as raised:
        ps.plan("llama3-8b", cluster="1xrtx-4090", global_batch=1, tune=tune, seq=SEQ)
    assert all(word in str(raised.value) for word in words)


def test_a_storage_that_the_gpu_lacks_is_refused() -> None:
    with pytest.raises(ConfigError, match="Turing"):
        ps.plan("llama3-8b", cluster="1xv100-sxm-32gb", global_batch=1, tune="lora:base=int8", seq=SEQ)


def test_a_tied_head_is_not_trained_alone() -> None:
    with pytest.raises(ModelError, match="embedding"):
        model_of("gpt3-175b", "head")


def test_a_finished_model_is_not_tuned() -> None:
    with pytest.raises(ConfigError, match="finished Model"):
        ps.plan(model_of("llama3-8b", None, layers=2), cluster="1xrtx-4090", global_batch=1, tune="lora")
