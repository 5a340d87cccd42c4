"""Every Hugging Face architecture that parsim names: default inputs, published sizes, flop, copies and refused configs."""

from __future__ import annotations

import json
from functools import lru_cache
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch", reason="needs the torch extra")
pytest.importorskip("transformers", reason="needs the hf extra")

import torch
import transformers
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

import parsim as ps
from experiments.common.shards import values_of
from parsim.app.launch import check_loss
from parsim.app.question import loss_note
from parsim.errors import ModelError, PlanError
from parsim.model import record
from parsim.model.build import build_fake, build_module, example_batch, interface_of
from parsim.model.component import PARTIAL, Component, Parameter, Sharding
from parsim.model.load import load_model
from parsim.model.model import COUPLED, Model
from parsim.model.runnable import CallProgram, Runnable
from parsim.model.shard.propagate import variants
from parsim.model.spec import ModelSpec
from parsim.model.total_loss import total_loss
from parsim.private import FakeTensor
from tests.architectures import ARCHITECTURES, batch_of, small_module
from tests.execute.bitwise import bytes_kept
from tests.hugging_face_configs import FULL, SMALL, keys_of
from tests.quick import some_quick

pytestmark = pytest.mark.hf
SOME = ("gpt2", "mixtral")
"""Fast ones: learned positions and dropout, experts."""


def written(folder: Path, config: dict[str, Any], **args: Any) -> ModelSpec:
    path = folder / "config.json"
    path.write_text(json.dumps(config))
    return ModelSpec(name=str(path), args=tuple(args.items()))


def small(folder: Path, name: str) -> ModelSpec:
    return written(folder, SMALL[name], **({"seq": 12} if name in ("t5", "mamba") else {}))


def _given_a_gradient(spec: ModelSpec, module: torch.nn.Module) -> set[str]:
    """Names of the parameters that a plain backward reaches."""
    kind = interface_of(spec)
    inputs, target = example_batch(spec, 2)
    args, kwargs = kind.arguments(inputs)
    total_loss(kind.objective, module(*args, **kwargs), target, 2).backward()
    return {name for name, parameter in module.named_parameters() if parameter.grad is not None}


@pytest.mark.slow
@pytest.mark.parametrize("name", SMALL)
def test_the_traced_parameters_are_those_of_the_module(name: str, tmp_path: Path) -> None:
    spec = small(tmp_path, name)
    model = load_model(spec, granularity="sublayer")
    module = build_module(spec)
    assert model.parameter_count == sum(parameter.numel() for parameter in module.parameters())
    trained = {entry.name for component in model.components for entry in component.trainable_parameters}
    assert trained == _given_a_gradient(spec, module)  # not whisper's positions, and not CLIP's norm beside its head


@pytest.mark.parametrize("name", some_quick([name for name in SMALL if name != "mamba"], *SOME))
def test_flop_equals_the_counter(name: str, tmp_path: Path) -> None:
    """Of the real module on a real batch, attention unfused: the counter does not know the CPU's fused one.

    Nor does it know the grouped products of experts, and causal halves.
    """
    spec = small(tmp_path, name)
    model = load_model(spec)
    batch = 3
    counted = sum(
        operator.forward_flop * operator.count / (batch if operator.batch == "none" else 1)  # rotary angles, in some versions
        for component in model.components
        for operator in component.operators
        if operator.kind in ("matmul", "convolution", "attention")
    )
    torch.manual_seed(0)
    inputs, _ = example_batch(spec, batch)
    args, kwargs = interface_of(spec).arguments(inputs)
    with FlopCounterMode(display=False) as counter, torch.no_grad(), sdpa_kernel(SDPBackend.MATH):
        build_module(spec)(*args, **kwargs)
    experts = 0
    if "moe" in name or name == "mixtral":
        config = SMALL[name]
        width = config.get("moe_intermediate_size", config["intermediate_size"])
        tokens = config["num_experts_per_tok"] * config["max_position_embeddings"]
        experts = config["num_hidden_layers"] * 6 * tokens * config["hidden_size"] * width
    assert counted == pytest.approx(counter.get_total_flops() / batch + experts, rel=1e-9)


@pytest.mark.parametrize("name", some_quick(FULL, "llama-3-8b", "gpt2", "t5-base", "vit-base"))
def test_published_number_of_parameters(name: str, tmp_path: Path) -> None:
    config, expected = FULL[name]
    assert sum(parameter.numel() for parameter in build_fake(written(tmp_path, config)).parameters()) == expected


def test_weights_of_a_truncated_normal_distribution_take_no_memory() -> None:
    """Its draws are rejected by their values, for which such models were built with memory several times."""
    spec = ModelSpec(name="tests.execute.traced_modules:truncated", input_shape=(8,))
    assert all(isinstance(weight, FakeTensor) for weight in build_fake(spec).parameters())
    assert float(build_module(spec).get_parameter("weight").detach().abs().max()) > 0.0


def test_inputs_and_lengths(tmp_path: Path) -> None:
    expected = {
        "llama-3-8b": {"input_ids": (2048,)},
        "gpt2": {"input_ids": (1024,)},
        "t5-base": {"input_ids": (512,), "decoder_input_ids": (512,)},
        "whisper-small": {"input_features": (80, 3000), "decoder_input_ids": (448,)},
        "vit-base": {"pixel_values": (3, 224, 224)},
    }
    for name, shapes in expected.items():
        kind = interface_of(written(_folder(tmp_path, name), FULL[name][0]))
        assert ({each.name: each.shape for each in kind.inputs}, kind.loss) == (shapes, "cross_entropy")


def _folder(parent: Path, name: str) -> Path:
    (parent / name).mkdir()
    return parent / name


def test_seq_is_an_argument(tmp_path: Path) -> None:
    spec = written(tmp_path, SMALL["llama"], seq=8)
    assert interface_of(spec).inputs[0].shape == (8,)
    with pytest.raises(ModelError, match="seq 17 exceeds max_position_embeddings 16"):
        interface_of(written(tmp_path, SMALL["llama"], seq=17))
    with pytest.raises(ModelError, match="seq must be a whole number"):
        interface_of(written(tmp_path, SMALL["llama"], seq=0))


def _contrastive(folder: Path) -> ModelSpec:
    return written(folder, {**SMALL["clip"], "architectures": ["CLIPModel"]})


def test_divisions_of_a_16_bit_trace_are_those_that_fp32_prices(tmp_path: Path) -> None:
    """Mamba layers of Jamba divide by column and row in bfloat16, and by column alone in fp32."""
    config = tmp_path / "jamba.json"
    sizes = "hidden_size=32 intermediate_size=64 num_hidden_layers=4 num_attention_heads=4 num_key_value_heads=2 vocab_size=64"
    mamba = "mamba_d_state=16 mamba_d_conv=4 mamba_expand=2 mamba_dt_rank=8 use_mamba_kernels=false"
    experts = "num_experts=4 num_experts_per_tok=2 expert_layer_period=2 expert_layer_offset=1"
    pattern = "attn_layer_period=4 attn_layer_offset=2"
    keys = keys_of(f"{sizes} {mamba} {experts} {pattern}", model_type="jamba", architectures=["JambaForCausalLM"])
    config.write_text(json.dumps(keys))
    spec = ModelSpec(name=str(config))
    half, full = (load_model(spec, granularity="sublayer", weights=weights) for weights in ("bfloat16", "float32"))
    for component in half.components:
        priced = {entry.rule for entry in full.component(component.name).shardings}
        assert {entry.rule for entry in component.shardings} <= priced


def test_a_contrastive_loss_is_that_of_transformers(tmp_path: Path) -> None:
    spec = _contrastive(tmp_path)
    module = build_module(spec).double()
    own = transformers.CLIPModel(module.config).double()
    own.load_state_dict(module.state_dict())
    inputs, target = example_batch(spec, 4, dtype=torch.float64)
    assert target is None
    expected = own(**inputs, return_loss=True).loss
    loss = module(**inputs)["loss"]
    assert float(loss.detach()) == pytest.approx(float(expected.detach()), rel=1e-12)
    expected.backward()
    loss.backward()
    for name, parameter in own.named_parameters():
        torch.testing.assert_close(module.get_parameter(name).grad, parameter.grad, rtol=1e-9, atol=1e-12)


@pytest.mark.slow
def test_a_contrastive_loss_is_planned_as_coupled(tmp_path: Path) -> None:
    """And run refuses to divide its batch."""
    name = _contrastive(tmp_path).name
    answer = ps.plan(name, cluster="dgx1-v100-16gb", global_batch=64, strategy="dp", devices=2)
    model = answer.problem.model
    assert model.loss == "own"
    assert model.loss_form == COUPLED
    assert "not a sum over samples" in loss_note(model)
    assert any("contrastive" in text for text in model.assumptions)
    assert Model.from_json(model.to_json()) == model
    plan = answer.evaluation.result.plan
    with pytest.raises(PlanError, match="is not a sum over samples"):
        check_loss(model, plan, allowed=False)
    loss = model.components[-1]
    assert loss.pair_bytes[0] > 0
    at = [loss.at_samples(samples) for samples in (8, 16)]
    saved = [one.saved_activation_bytes * samples + one.saved_fixed_bytes for one, samples in zip(at, (8, 16), strict=True)]
    assert saved[1] - 2 * saved[0] == loss.pair_bytes[0] * (256 - 128) - loss.saved_fixed_bytes


@pytest.mark.slow
def test_what_a_contrastive_loss_saves_equals_a_real_forward(tmp_path: Path) -> None:
    spec = _contrastive(tmp_path)
    model, module = load_model(spec), build_module(spec)
    for samples in (5, 9):
        inputs = example_batch(spec, samples)[0]
        kept = bytes_kept(lambda inputs=inputs: module(**inputs)["loss"] * 1, (*module.parameters(), *module.buffers()))  # type: ignore[misc]
        whole = [entry.at_samples(samples) for entry in model.components]
        assert kept == sum(entry.saved_activation_bytes * samples + entry.saved_fixed_bytes for entry in whole)


def test_another_loss_over_pairs_is_refused(tmp_path: Path) -> None:
    tower = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 4}
    config = {
        "model_type": "siglip",
        "architectures": ["SiglipModel"],
        "text_config": {**tower, "vocab_size": 50, "max_position_embeddings": 16, "projection_size": 32},
        "vision_config": {**tower, "image_size": 16, "patch_size": 4},
    }
    with pytest.raises(ModelError, match="not a sum over samples"):
        interface_of(written(tmp_path, config))


BAD: dict[str, tuple[Any, str]] = {
    "no table": ([1], "holds no table"),
    "no architectures": ({"model_type": "llama"}, "lacks architectures"),
    "no model_type": ({"architectures": ["LlamaForCausalLM"]}, "lacks model_type"),
    "unknown model_type": ({**SMALL["llama"], "model_type": "lama"}, "no model_type 'lama'"),
    "unknown architecture": ({**SMALL["llama"], "architectures": ["LamaForCausalLM"]}, "not in transformers"),
    "another model's": ({**SMALL["llama"], "architectures": ["GPT2LMHeadModel"]}, "not an architecture of model_type 'llama'"),
    "no head": ({**SMALL["llama"], "architectures": ["LlamaModel"]}, "give \\[model\\] inputs and loss"),
    "heads": ({**SMALL["llama"], "num_attention_heads": 5}, "must divide the hidden size"),
    "shared heads": ({**SMALL["llama"], "num_key_value_heads": 3}, "must divide the heads"),
    "layers without end": ({**SMALL["llama"], "num_hidden_layers": 2**31}, "num_hidden_layers must be <= 4096, got 2147483648"),
    "negative layers": ({**SMALL["llama"], "num_hidden_layers": -1}, "num_hidden_layers must be a whole number >= 1, got -1"),
    "text": ({**SMALL["llama"], "hidden_size": "32"}, "hidden_size must be a whole number"),
    "too many experts": ({**SMALL["mixtral"], "num_experts_per_tok": 9}, "exceeds the number of experts"),
    "patch": ({**SMALL["vit"], "patch_size": 32}, "exceeds image_size"),
    "unknown activation": ({**SMALL["llama"], "hidden_act": "sulu"}, "sulu"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_configs(name: str, tmp_path: Path) -> None:
    config, message = BAD[name]
    with pytest.raises(ModelError, match=message) as caught:
        interface_of(written(tmp_path, config))
    assert "config.json" in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_config_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="no Hugging Face config at"):
        build_module(ModelSpec(name=str(tmp_path / "config.json")))


@pytest.mark.slow
def test_a_changed_file_is_another_model(tmp_path: Path) -> None:
    """The same path in one process."""
    assert len(load_model(written(tmp_path, SMALL["gpt2"])).components) == 7
    assert len(load_model(written(tmp_path, {**SMALL["gpt2"], "n_layer": 2})).components) == 5


def test_models_are_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from parsim.model import load

    monkeypatch.setenv("PARSIM_MODEL_CACHE", str(tmp_path / "kept"))
    first = load_model(written(_folder(tmp_path, "a"), SMALL["gpt2"]))
    monkeypatch.setattr(load, "trace_spec", lambda *args, **kwargs: pytest.fail("traced again"))
    again = load_model(written(_folder(tmp_path, "b"), SMALL["gpt2"]))
    assert again.components == first.components
    assert "/b/config.json" in again.source
    with pytest.raises(pytest.fail.Exception):
        load_model(written(_folder(tmp_path, "c"), {**SMALL["gpt2"], "n_inner": 72}))


# What of the architectures that people train can be tensor-sharded: attention and MLP of every layer, and exactly.

SAMPLES = 2
"""Norms and rotations of most are computed in float32, whatever the weights are."""
TORN = ("mamba",)
"""Their mixers are no attention and no MLP; state matrices and filters stay whole in every shard (`test_shard_rules`)."""
UNTRACED = ("mixtral",)
"""grouped_mm cannot be recorded in float64; with parsim's products for experts, `test_shard_rules` has it."""
"""The others run with the slow tests."""


@lru_cache(maxsize=1)
def recorded(name: str) -> tuple[list[tuple[Runnable, Component]], dict[str, Tensor]]:
    """By sublayer in float64 with weights that are all in use: components with shardings, not measured, and every value."""
    torch.manual_seed(0)
    module = small_module(name).double()
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.add_(0.05 * torch.randn_like(parameter))
    inputs = {key: value.double() if value.is_floating_point() else value for key, value in batch_of(name, SAMPLES).items()}
    runnables = record(module, inputs, granularity="sublayer")
    given = dict(zip([f"input:{number}" for number in range(len(inputs))], inputs.values(), strict=True))
    return [(runnable, component(runnable.program)) for runnable in runnables], values_of(runnables, given)


def component(program: CallProgram) -> Component:
    """With its shardings, as tracing has them, but nothing measured."""

    def is_batch(slot: int) -> bool:
        return program.tensors[slot].shape[:1] == (SAMPLES,)

    found = []
    for variant in variants(program, [is_batch(slot) for _, slot, _ in program.inputs]):
        if all(
            is_batch(slot) or made != PARTIAL
            for (_, slot, _), made in zip(program.outputs, variant.result.outputs, strict=True)
        ):
            texts = tuple(f"shard:{content.dim}" if content.form == "shard" else content.form for content in variant.inputs)
            parts = variant.result.parts
            kinds = {key.name: key.kind for key, _ in program.state}
            found.append(
                Sharding(
                    rule=variant.result.rule,
                    limit=variant.result.limit,
                    inputs=texts,
                    outputs=variant.result.outputs,
                    parameters=tuple(part for part in parts.values() if kinds[part.name] == "parameter"),
                    buffers=tuple(part for part in parts.values() if kinds[part.name] == "buffer"),
                )
            )
    return Component(
        name=program.name,
        inputs=tuple(name for name, _, _ in program.inputs),
        outputs=tuple(name for name, _, _ in program.outputs),
        parameters=tuple(
            Parameter(name=key.name, elements=torch.Size(program.tensors[slot].shape).numel())
            for key, slot in program.state
            if key.kind == "parameter"
        ),
        shardings=tuple(found),
    )


def best_cut(component: Component, ways: int) -> Sharding | None:
    """The rule that divides the most parameters."""
    sizes = {parameter.name: parameter.elements for parameter in component.parameters}
    possible = [sharding for sharding in component.shardings if sharding.limit % ways == 0]
    return max(possible, key=lambda sharding: sum(sizes[part.name] for part in sharding.parameters), default=None)


@pytest.mark.parametrize("name", [name for name in ARCHITECTURES if name not in (*TORN, *UNTRACED)])
def test_attention_and_mlp_are_sharded(name: str) -> None:
    """Every matrix of a layer, over two ranks, and with embeddings and head about half of all parameters."""
    kept: dict[str, float] = {}
    sizes: dict[str, int] = {}
    partial = 0
    for _, component in recorded(name)[0]:
        sharding = best_cut(component, 2)
        divided = set() if sharding is None else {part.name for part in sharding.parameters}
        whole = [p.name for p in component.parameters if p.elements > 64 and p.name not in divided and "norm" not in p.name]
        assert not [entry for entry in whole if any(part.isdigit() for part in entry.split("."))], component.name
        for parameter in component.parameters:
            sizes[parameter.name] = parameter.elements
            kept.setdefault(parameter.name, parameter.elements / (2 if parameter.name in divided else 1))
        layered = any(part.isdigit() for part in component.name.split("."))
        partial += layered and sharding is not None and PARTIAL in sharding.outputs
    assert sum(kept.values()) < 0.56 * sum(sizes.values())
    assert partial == ARCHITECTURES[name].sums
