"""Large models by name: parameters as published, the work of the modules that transformers builds, arguments, wrong names."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest

import parsim
from parsim.errors import ModelError
from parsim.model.catalogue.names import ALIASES, NAMED, config_path, described, named, normalised
from parsim.model.catalogue.sublayers import COMPILED, SamplePart, Shape
from parsim.model.catalogue.transformer import recorded
from parsim.model.catalogue.zoo import ZOO
from parsim.model.load import load_model
from parsim.model.model import Model
from parsim.model.spec import ModelSpec, resolve
from tests.commands import Told
from tests.models import llama

TRANSFORMERS = [name for name, row in NAMED.items() if row.shape is not None]


def by_name(name: str, granularity: str = "block", weights: str = "bfloat16", **args: object) -> Model:
    spec = ModelSpec(name=name, args=tuple(sorted(args.items())))  # type: ignore[arg-type]
    return load_model(spec, granularity=granularity, weights=weights)


def flop(model: Model, *kinds: str) -> float:
    """Forward flop per sample of all operators of these kinds."""
    operators = [operator for component in model.components for operator in component.operators]
    return sum(operator.forward_flop * operator.count for operator in operators if operator.kind in kinds)


@pytest.mark.parametrize("name", [name for name in TRANSFORMERS if NAMED[name].parameters])
def test_parameters_are_those_that_were_published(name: str) -> None:
    named = NAMED[name]
    assert by_name(name).parameter_count == named.parameters
    assert named.shape is None or named.shape.weights == pytest.approx(named.parameters, rel=0.02)


@pytest.mark.parametrize(
    ("name", "billions"),
    [("gpt3-175b", 175), ("gpt-22b", 22), ("gpt-530b", 530), ("gpt-1t", 1008), ("nemotron-15b", 15.6), ("nemotron-340b", 341)],
)
def test_round_counts_in_names(name: str, billions: float) -> None:
    assert by_name(name).parameter_count / 1e9 == pytest.approx(billions, rel=0.005)


def test_narayanan_counts_gpt_alike() -> None:
    """Equation 2 of Narayanan et al. (2021): P = 12 l h^2 (1 + 13 / 12h + (V + s) / 12lh), with a norm of 2h at the end."""
    for name in ("gpt-22b", "gpt-175b", "gpt-530b", "gpt-1t"):
        row = NAMED[name]
        assert row.shape is not None
        layers, hidden, vocab = row.shape.layers, row.shape.hidden, row.shape.vocab
        formula = 12 * layers * hidden**2 * (1 + 13 / (12 * hidden) + (vocab + row.seq) / (12 * layers * hidden))
        assert by_name(name).parameter_count == pytest.approx(formula + 2 * hidden, rel=1e-12)


@pytest.mark.parametrize("granularity", ["block", "sublayer", "layer"])
@pytest.mark.parametrize("weights", ["float32", "bfloat16"])
def test_granularity_and_weights_change_no_count(granularity: str, weights: str) -> None:
    model = by_name("mixtral-8x7b", granularity, weights, layers=3)
    whole = by_name("mixtral-8x7b", layers=3)
    assert model.parameter_count == whole.parameter_count
    assert model.forward_flop == pytest.approx(whole.forward_flop, rel=1e-12)
    assert {parameter.element_bytes for parameter in model.parameters} == {4 if weights == "float32" else 2}


def test_autocast_halves_activations_and_keeps_gradients() -> None:
    full, half = by_name("llama3-8b", weights="float32", layers=2), by_name("llama3-8b", layers=2)
    layer, narrow = full.component("h.0"), half.component("h.0")
    assert layer.half is not None
    assert layer.half.saved_activation_bytes == narrow.saved_activation_bytes < layer.saved_activation_bytes
    assert layer.half.cast_bytes == 2 * sum(parameter.elements for parameter in layer.parameters)
    assert layer.half.backward_peaks[0][1] == layer.backward_peaks[0][1]


def test_names_are_read_generously() -> None:
    for text in ("Llama-3.1-70B", "llama3_70b", "meta-llama-3-70b", "Llama 3 70B"):
        assert normalised(text) == "llama3-70b"
    assert normalised("Qwen2.5-7B-Instruct") == "qwen2-7b"
    assert normalised("GPT-3 175B") == "gpt3-175b"
    assert normalised("DeepSeekV3 (w/o MTP)") == "deepseek-v3"
    assert normalised("vit-h/14") == "vit-h-14"
    assert normalised("Llama 2 (7B)") == "llama2-7b"
    assert [normalised(text) for text in ("GPT-2", "GPT-2 124M", "GPT-2 (1.5B)", "GPT2 medium", "GPT-20B")] == [
        *("gpt2", "gpt2", "gpt2-xl", "gpt2-medium"),
        normalised("gpt-20b"),
    ]
    assert all(target in NAMED for target in ALIASES.values())
    assert named("resnet50") is None
    assert not set(ZOO) & {*NAMED, *ALIASES}
    with pytest.raises(ModelError, match=r"unknown model 'llama3-71b'; did you mean llama3-70b"):
        by_name("llama3-71b")


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ({"layer": 3}, "no argument 'layer'; did you mean layers"),
        ({"layers": "3"}, "argument layers of llama3-8b must be like 32, got '3'"),
        ({"heads": 33}, r"heads \(33\) must divide the hidden size \(4096\); the nearest that do: 32 or 64"),
        ({"kv_heads": 5}, r"kv_heads \(5\) must divide the heads \(32\); the nearest that do: 4 or 8"),
        ({"seq": 0.5}, "seq of llama3-8b must be a whole number"),
        ({"seq": -1}, "seq of llama3-8b must be a whole number"),
        ({"seq": 0}, "seq of llama3-8b must be a whole number >= 1 and <= 8589934592, got 0"),
        ({"seq": 10**12}, "seq of llama3-8b must be a whole number >= 1 and <= 8589934592, got 1000000000000"),
        ({"seq": 4096, "document_tokens": 1000}, r"document_tokens .*\(1000\) must divide .*\(4096\); .*: 512 or 1024"),
        ({"loss": "small"}, "loss of llama3-8b must be fused or chunked, got 'small'"),
        ({"seq": 4096, "loss_tokens": 4097}, "loss_tokens of llama3-8b must be a whole number of the 4096 tokens"),
        ({"recompute_modules": "core_attn moe"}, "recompute_modules of llama3-8b names some of core_attn layernorm"),
        ({"seq": 4096, "document_tokens": 0}, "document_tokens of llama3-8b must be a whole number >= 1, got 0"),
        ({"seq": 4096, "document_tokens": True}, "document_tokens of llama3-8b must be a whole number >= 1, got True"),
        ({"seq": 4096, "document_tokens": 512, "kernels": "unfused-attention"}, "computes masked scores too; drop it"),
        ({"kernels": "fusd"}, "did you mean fused"),
        ({"sequence_parallel": 1}, "sequence_parallel of llama3-8b must be true or false"),
    ],
)
def test_arguments_that_cannot_be(args: dict[str, object], message: str) -> None:
    with pytest.raises(ModelError, match=message):
        by_name("llama3-8b", **args)


def test_sequence_length_is_an_argument() -> None:
    assert resolve(ModelSpec(name="llama3-8b")).input_shape == (8192,)
    assert resolve(ModelSpec(name="llama3-8b", input_shape=(512,))).input_shape == (512,)
    short, long = by_name("llama3-8b", seq=1024), by_name("llama3-8b", seq=2048)
    assert long.forward_flop > 2 * short.forward_flop
    assert long.parameter_count == short.parameter_count


def test_the_model_is_at_hand_at_once() -> None:
    recorded.cache_clear()
    start = time.process_time()
    by_name("llama3-405b", "sublayer")
    assert time.process_time() - start < 5


def test_a_named_model_plans_like_any_other() -> None:
    answer = parsim.plan(
        "llama3-8b", cluster="8xh100-sxm", global_batch=16, strategy="dp", args={"layers": 2},
        settings={"plan.zero_stage": 3, "plan.microbatches": 2},
    )  # fmt: skip
    assert answer.fits
    assert answer.assumed["training.precision"] == "bf16"
    assert answer.assumed["training.optimizer"] == "adamw_fused"
    assert answer.assumed["model.args.seq"] == 8192
    with pytest.raises(ModelError, match="holds no module of it to train"):
        parsim.run(answer)


def test_sequence_parallel_is_a_key_of_the_plan() -> None:
    """With it norms are components of their own, and what a rank keeps of them is divided."""
    held = {}
    for parallel in (True, False):
        answer = parsim.plan(
            "llama3-8b", cluster="8xh100-sxm", global_batch=8, args={"layers": 2, "seq": 1024}, strategy="mp",
            settings={"plan.sequence_parallel": parallel, "plan.mesh": {"tp": 8}, "plan.microbatches": 1, "plan.zero_stage": 0},
        )  # fmt: skip
        assert ("shard:sequence/8" in answer.chosen.plan.summary()) == parallel
        held[parallel] = int(answer.chosen.memory().query("line == 'activations'").size_bytes.max())
    assert held[True] < 0.7 * held[False]
    with pytest.raises(parsim.ParsimError, match="contradict each other"):
        parsim.plan(
            "llama3-8b", cluster="8xh100-sxm", global_batch=8, args={"sequence_parallel": True},
            settings={"plan.sequence_parallel": False},
        )  # fmt: skip


def test_documents_divide_the_scores_and_nothing_else() -> None:
    """Attention within D documents of a sample costs 1 / D of the scores; products, memory and parameters stay."""
    whole, cut = by_name("llama3-8b", seq=8192), by_name("llama3-8b", seq=8192, document_tokens=1024)

    assert flop(whole, "attention") == 8 * flop(cut, "attention") > 0
    assert flop(whole, "matmul") == flop(cut, "matmul")
    assert [c.saved_activation_bytes for c in whole.components] == [c.saved_activation_bytes for c in cut.components]
    assert by_name("llama3-8b", seq=8192, document_tokens=8192) == whole
    assert cut.assumptions == ("documents of 1024 tokens: attention computes no scores between them, and MFU counts none",)
    sharded = by_name("llama3-8b", "sublayer", seq=8192, document_tokens=1024)
    assert flop(sharded, "attention") == flop(cut, "attention")


def test_documents_make_a_step_faster_and_the_answer_says_so() -> None:
    settings: dict[str, object] = {"plan.zero_stage": 3, "plan.microbatches": 1, "plan.recompute": "full"}
    args: dict[str, object] = {"layers": 2, "seq": 32768}
    step = {}
    for documents in (32768, 2048):
        answer = parsim.plan(
            "llama3-8b", cluster="8xh100-sxm", global_batch=8, strategy="dp", args=args | {"document_tokens": documents},
            settings=settings,
        )  # fmt: skip
        step[documents] = answer.chosen.step_s.median
        assert ("documents of 2048 tokens" in str(answer)) == (documents == 2048)
    assert step[2048] < 0.8 * step[32768]


def test_a_v100_takes_fp16() -> None:
    settings = {"plan.zero_stage": 1, "plan.microbatches": 1, "plan.recompute": "none"}
    answer = parsim.plan(
        "gpt3-125m", cluster="8xv100", global_batch=8, strategy="dp", args={"layers": 1, "seq": 128}, settings=settings
    )
    assert answer.question.training.precision == "amp_fp16"


PAIRS = {
    "llama": (llama("s", 2, 64, 4, 2, 96, 128), "LlamaForCausalLM", {}),
    "qwen2": (llama("s", 2, 64, 4, 2, 96, 128, qkv_bias=True), "Qwen2ForCausalLM", {}),
    "qwen3": (llama("s", 2, 64, 4, 2, 96, 128, qk_norm=True, head_dim=32), "Qwen3ForCausalLM", {"head_dim": 32}),
    "nemotron": (
        Shape(name="s", layers=2, hidden=64, heads=4, kv_heads=2, vocab=128, ffn=96, bias=False, rotary=True, tied=False),
        "NemotronForCausalLM",
        {},
    ),
    "mixtral": (
        llama("s", 2, 64, 4, 2, 96, 128, experts=4, active=2, expert_ffn=96),
        "MixtralForCausalLM",
        {"num_local_experts": 4, "num_experts_per_tok": 2},
    ),
}
"""By model_type of transformers: the shape, the architecture, and keys of the config beside the usual ones."""


@pytest.mark.hf
@pytest.mark.slow
@pytest.mark.parametrize("kind", PAIRS)
def test_sizes_give_the_model_that_transformers_builds(kind: str, tmp_path: Path) -> None:
    """Parameters and the flop of products equal those of the traced module."""
    pytest.importorskip("transformers")
    shape, architecture, more = PAIRS[kind]
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4}
    sizes |= {"num_key_value_heads": 2, "vocab_size": 128, "tie_word_embeddings": False}
    path = tmp_path / "config.json"
    path.write_text(json.dumps({"model_type": kind, "architectures": [architecture], **sizes, **more}))
    traced = load_model(ModelSpec(name=str(path), args=(("seq", 32),)))
    made = recorded(shape, COMPILED, SamplePart(tokens=32, context=32), "layer", "float32")
    assert made.parameter_count == traced.parameter_count
    kinds = ("matmul", "attention")
    assert flop(made, *kinds) == pytest.approx(flop(traced, *kinds), rel=1e-6)


@pytest.mark.hf
@pytest.mark.slow
def test_a_type_of_remote_code_over_an_architecture_of_transformers_is_that_architecture(tmp_path: Path) -> None:
    """Kimi K2's configs name DeepseekV3ForCausalLM and a model_type that transformers has not."""
    pytest.importorskip("transformers")
    sizes = {"hidden_size": 64, "intermediate_size": 96, "moe_intermediate_size": 32, "num_hidden_layers": 2}
    sizes |= {"num_attention_heads": 4, "num_key_value_heads": 4, "n_routed_experts": 8, "num_experts_per_tok": 2, "n_group": 1}
    sizes |= {"topk_group": 1, "first_k_dense_replace": 1, "q_lora_rank": 24, "kv_lora_rank": 16, "qk_rope_head_dim": 8}
    sizes |= {"qk_nope_head_dim": 16, "v_head_dim": 16, "vocab_size": 128}
    counts = []
    for kind in ("kimi_k2", "deepseek_v3"):
        path = tmp_path / f"{kind}.json"
        code = {"auto_map": {"AutoConfig": "configuration_deepseek.DeepseekV3Config"}} if kind == "kimi_k2" else {}
        path.write_text(json.dumps({"model_type": kind, "architectures": ["DeepseekV3ForCausalLM"], **code, **sizes}))
        counts.append(load_model(ModelSpec(name=str(path), args=(("seq", 32),))).parameter_count)
    assert counts[0] == counts[1] > 0


@pytest.mark.hf
@pytest.mark.slow
def test_a_model_of_images_and_text_is_its_text_model_where_no_image_is_given(tmp_path: Path) -> None:
    """Arithmetic is that of the text model alone; the weights of the vision tower are there, and nothing trains them."""
    pytest.importorskip("transformers")
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4}
    sizes |= {"num_key_value_heads": 2, "vocab_size": 128}
    vision = {"depth": 2, "embed_dim": 32, "hidden_size": 64, "num_heads": 2, "model_type": "qwen2_vl"}
    seen = {
        "qwen2_vl": {
            "architectures": ["Qwen2VLForConditionalGeneration"],
            "vision_config": vision,
            "rope_scaling": {"type": "mrope", "mrope_section": [2, 3, 3]},
        },
        "qwen2": {"architectures": ["Qwen2ForCausalLM"], "tie_word_embeddings": False},
    }
    models = []
    for kind, more in seen.items():
        (tmp_path / f"{kind}.json").write_text(json.dumps({"model_type": kind, **sizes, **more}))
        models.append(load_model(ModelSpec(name=str(tmp_path / f"{kind}.json"), args=(("seq", 32),))))
    kinds = ("matmul", "attention")
    assert flop(models[0], *kinds) == pytest.approx(flop(models[1], *kinds), rel=0.01)
    assert any("visual" in note and "not trained" in note for note in models[0].assumptions)


@pytest.mark.hf
@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name, row in NAMED.items() if row.config])
def test_configs_give_the_published_parameters(name: str) -> None:
    torch, transformers = pytest.importorskip("torch"), pytest.importorskip("transformers")
    row = NAMED[name]
    document = json.loads(Path(config_path(row)).read_text())
    config = transformers.AutoConfig.for_model(**document)
    with torch.device("meta"):
        module = getattr(transformers, document["architectures"][0])._from_config(config)
    assert sum(parameter.numel() for parameter in module.parameters()) == row.parameters


def saved(model: Model, name: str) -> int:
    """Bytes of one sample."""
    return model.component(name).saved_activation_bytes


def test_a_loss_keeps_its_bytes_of_every_logit_that_counts() -> None:
    """Half precision: logits of 2 bytes and a copy in fp32; one array of 2; nothing, for a part at a time."""
    sizes = {"seq": 4096, "layers": 1}
    logits = 4096 * 128256
    by_form = {form: saved(by_name("llama3-8b", loss=form, **sizes), "head") for form in ("", "fused", "chunked")}
    assert by_form[""] - by_form["fused"] == 4 * logits
    assert by_form["fused"] - by_form["chunked"] == 2 * logits
    some = by_name("llama3-8b", loss_tokens=1024, **sizes)
    assert by_form[""] - saved(some, "head") == 6 * (logits - 1024 * 128256)
    products = [flop(model, "matmul") for model in (by_name("llama3-8b", **sizes), some)]
    assert products[0] - products[1] == 2.0 * 3072 * 128256 * 4096
    assert by_name("llama3-8b", loss_tokens=4096, **sizes).fingerprints == by_name("llama3-8b", **sizes).fingerprints


def test_megatrons_modules_run_again_by_operator() -> None:
    """DeepSeek V3: the up-projections make queries and keys of 128 heads and 192 channels, and values of 128."""
    kept = {}
    for modules in ("", "mla_up_proj", "core_attn mla_up_proj"):
        selective = by_name("deepseek-v3", seq=4096, layers=4, recompute_modules=modules).component("h.3").selective
        assert selective is not None
        kept[modules] = selective.again[0]
    assert kept["mla_up_proj"] == 2 * 4096 * 128 * (192 + 192 + 128)
    assert kept["core_attn mla_up_proj"] - kept["mla_up_proj"] == 4 * 4096 * 128  # one number per query and head
    assert kept[""] > 0  # torch's policies make norms and activation functions again


def lines_of(**settings: object) -> dict[str, int]:
    """Memory of the fullest rank of Llama 3 8B in fp8 on eight GPUs with ZeRO 1, by line."""
    asked = {"plan.strategy": "dp", "plan.zero_stage": 1, "plan.microbatches": 1, "training.precision": "fp8"}
    answer = parsim.plan("llama3-8b", cluster="8xh200", global_batch=8, settings={**asked, **settings})
    return dict(max(answer.chosen.evaluation.memory, key=lambda rank: rank.total_bytes).lines)


def test_states_gradients_and_weights_have_the_widths_that_are_asked_for() -> None:
    """8,030,261,248 weights, of which 6.98 G are in products of layers; an eighth of the state on each GPU."""
    weights, low = 8_030_261_248, 32 * (4096 * (2 * 4096 + 2 * 1024) + 3 * 4096 * 14336)
    usual = lines_of(**{"training.gradient_dtype": "bf16"})
    other = lines_of(**{"training.state_dtype": "int8", "training.gradient_dtype": "fp32", "training.weight_dtype": "fp8"})
    assert usual["optimizer_state"] == pytest.approx(12 * weights / 8, rel=1e-6)
    assert other["optimizer_state"] == pytest.approx(6 * weights / 8, rel=1e-6)
    assert other["gradients"] == pytest.approx(2 * usual["gradients"], rel=1e-6)
    assert usual["parameters"] - other["parameters"] == low


@pytest.mark.parametrize(
    ("identifier", "name"),
    [
        ("meta-llama/Llama-3.1-8B-Instruct", "llama3-8b"),
        ("meta-llama/Llama-2-13b-chat-hf", "llama2-13b"),
        ("meta-llama/Llama-3.3-70B-Instruct", "llama3-70b"),
        ("mistralai/Mistral-7B-Instruct-v0.3", "mistral-7b"),
        ("mistralai/Mixtral-8x22B-v0.1", "mixtral-8x22b"),
        ("Qwen/Qwen3-235B-A22B-Instruct-2507", "qwen3-235b-a22b"),
        ("Qwen/Qwen2.5-Coder-7B-Instruct", "qwen2-7b"),
        ("google/gemma-3-27b-it", "gemma3-27b"),
        ("deepseek-ai/DeepSeek-R1", "deepseek-v3"),
        ("deepseek-ai/DeepSeek-V3-Base", "deepseek-v3"),
        ("moonshotai/Kimi-K2-Instruct", "kimi-k2"),
        ("microsoft/Phi-3-mini-4k-instruct", "phi3-mini"),
        ("google/vit-large-patch16-224", "vit-l-16"),
    ],
)
def test_ids_of_hugging_face_are_names_of_shapes_that_ship(identifier: str, name: str) -> None:
    assert normalised(identifier) == name
    assert named(identifier) is not None


def test_all_names_are_listed_with_their_sizes(told: Told) -> None:
    rows = described()
    assert set(rows) == {*NAMED, *ZOO}
    assert all(row["parameters"] > 0 for row in rows.values())
    status, out, _ = told("models", "meta-llama/Llama-3.1-8B", "--json")
    assert not status
    assert json.loads(out)["llama3-8b"]["parameters"] == 8_030_261_248
    status, _, err = told("models", "llama9")
    assert (status, "did you mean" in err) == (1, True)
