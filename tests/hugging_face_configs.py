"""Configs of Hugging Face models: small ones with every feature of their architecture, and the public shapes of full size."""

from __future__ import annotations

import json
from typing import Any

_TOKENS: dict[str, Any] = {"bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 0}


def keys_of(text: str, **more: Any) -> dict[str, Any]:
    """`{"hidden_size": 32, "tied": False}` of "hidden_size=32 tied=false"."""
    pairs = (word.partition("=") for word in text.split())
    return {key: json.loads(value) for key, _, value in pairs} | more


def _config(model_type: str, architecture: str, text: str = "", **more: Any) -> dict[str, Any]:
    return {"model_type": model_type, "architectures": [architecture]} | keys_of(text, **more)


def _decoder(model_type: str, architecture: str, text: str = "") -> dict[str, Any]:
    """A small decoder in the manner of Llama, with four layers: the last two are copied."""
    sizes = "hidden_size=32 intermediate_size=48 num_hidden_layers=4 num_attention_heads=4 num_key_value_heads=2"
    return _config(model_type, architecture, f"{sizes} max_position_embeddings=16 vocab_size=50", **_TOKENS) | keys_of(text)


SMALL: dict[str, dict[str, Any]] = {
    "gpt2": _config(
        "gpt2", "GPT2LMHeadModel", "n_embd=32 n_layer=4 n_head=4 n_positions=16 vocab_size=50 bos_token_id=0 eos_token_id=0"
    ),
    "bert": _decoder("bert", "BertForMaskedLM", "num_key_value_heads=null"),
    "llama": _decoder("llama", "LlamaForCausalLM"),
    "mistral": _decoder("mistral", "MistralForCausalLM", "sliding_window=8"),
    "mixtral": _decoder("mixtral", "MixtralForCausalLM", "num_local_experts=4 num_experts_per_tok=2"),
    "qwen2": _decoder("qwen2", "Qwen2ForCausalLM"),
    "qwen3": _decoder("qwen3", "Qwen3ForCausalLM", "head_dim=8"),
    "qwen3_moe": _decoder(
        "qwen3_moe", "Qwen3MoeForCausalLM", "head_dim=8 num_experts=4 num_experts_per_tok=2 moe_intermediate_size=24"
    ),
    "gemma": _decoder("gemma", "GemmaForCausalLM", "head_dim=8"),
    "gemma2": _decoder("gemma2", "Gemma2ForCausalLM", "num_hidden_layers=6 head_dim=8 sliding_window=8"),
    "gemma3": _decoder("gemma3_text", "Gemma3ForCausalLM", "num_hidden_layers=12 head_dim=8 sliding_window=8"),
    "phi": _decoder("phi", "PhiForCausalLM"),
    "phi3": _decoder("phi3", "Phi3ForCausalLM"),
    "t5": _config(
        "t5",
        "T5ForConditionalGeneration",
        "d_model=32 d_kv=8 d_ff=64 num_layers=4 num_decoder_layers=4 num_heads=4 vocab_size=50 "
        "decoder_start_token_id=0 eos_token_id=1 pad_token_id=0",
    ),
    "whisper": _config(
        "whisper",
        "WhisperForConditionalGeneration",
        "d_model=32 encoder_layers=4 decoder_layers=4 encoder_attention_heads=4 decoder_attention_heads=4 "
        "encoder_ffn_dim=64 decoder_ffn_dim=64 num_mel_bins=8 max_source_positions=12 max_target_positions=16 "
        "vocab_size=50 decoder_start_token_id=0",
        **_TOKENS,
    ),
    "vit": _config(
        "vit",
        "ViTForImageClassification",
        "hidden_size=32 num_hidden_layers=4 num_attention_heads=4 intermediate_size=64 image_size=16 patch_size=4 "
        "num_channels=3 num_labels=7",
    ),
    "clip": _config(
        "clip",
        "CLIPForImageClassification",
        "projection_dim=16 num_labels=7",
        vision_config=keys_of(
            "hidden_size=32 intermediate_size=64 num_hidden_layers=4 num_attention_heads=4 image_size=16 patch_size=4"
        ),
        text_config=keys_of(
            "hidden_size=32 intermediate_size=64 num_hidden_layers=4 num_attention_heads=4 vocab_size=50 "
            "max_position_embeddings=16",
            **_TOKENS,
        ),
    ),
    "mamba": _config("mamba", "MambaForCausalLM", "hidden_size=32 state_size=4 num_hidden_layers=4 vocab_size=50", **_TOKENS),
}


def _full(model_type: str, architecture: str, sizes: tuple[int, int, int, int, int], text: str = "") -> dict[str, Any]:
    """Sizes: hidden, intermediate, layers, heads, vocabulary."""
    names = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "vocab_size")
    return _config(model_type, architecture, text, **dict(zip(names, sizes, strict=True)))


FULL: dict[str, tuple[dict[str, Any], int]] = {
    "gpt2": (_config("gpt2", "GPT2LMHeadModel"), 124_439_808),
    "bert-base": (_config("bert", "BertForMaskedLM"), 109_514_298),
    "llama-3-8b": (
        _full(
            "llama",
            "LlamaForCausalLM",
            (4096, 14336, 32, 32, 128256),
            "num_key_value_heads=8 max_position_embeddings=8192 rope_theta=500000.0 rms_norm_eps=1e-05",
        ),
        8_030_261_248,
    ),
    "llama-3-70b": (
        _full(
            "llama",
            "LlamaForCausalLM",
            (8192, 28672, 80, 64, 128256),
            "num_key_value_heads=8 max_position_embeddings=8192 rope_theta=500000.0 rms_norm_eps=1e-05",
        ),
        70_553_706_496,
    ),
    "mistral-7b": (
        _full(
            "mistral",
            "MistralForCausalLM",
            (4096, 14336, 32, 32, 32000),
            "num_key_value_heads=8 max_position_embeddings=32768 sliding_window=4096",
        ),
        7_241_732_096,
    ),
    "mixtral-8x7b": (
        _full(
            "mixtral",
            "MixtralForCausalLM",
            (4096, 14336, 32, 32, 32000),
            "num_key_value_heads=8 max_position_embeddings=32768 num_local_experts=8 num_experts_per_tok=2",
        ),
        46_702_792_704,
    ),
    "qwen2.5-7b": (
        _full(
            "qwen2",
            "Qwen2ForCausalLM",
            (3584, 18944, 28, 28, 152064),
            "num_key_value_heads=4 max_position_embeddings=131072 tie_word_embeddings=false",
        ),
        7_615_616_512,
    ),
    "qwen3-8b": (
        _full(
            "qwen3",
            "Qwen3ForCausalLM",
            (4096, 12288, 36, 32, 151936),
            "num_key_value_heads=8 head_dim=128 max_position_embeddings=40960 tie_word_embeddings=false",
        ),
        8_190_735_360,
    ),
    "qwen3-30b-a3b": (
        _full(
            "qwen3_moe",
            "Qwen3MoeForCausalLM",
            (2048, 6144, 48, 32, 151936),
            "moe_intermediate_size=768 num_key_value_heads=4 head_dim=128 num_experts=128 num_experts_per_tok=8 "
            "max_position_embeddings=40960 tie_word_embeddings=false",
        ),
        30_532_122_624,
    ),
    "gemma-2b": (
        _full(
            "gemma",
            "GemmaForCausalLM",
            (2048, 16384, 18, 8, 256000),
            "num_key_value_heads=1 head_dim=256 max_position_embeddings=8192",
        ),
        2_506_172_416,
    ),
    "gemma-2-9b": (
        _full(
            "gemma2",
            "Gemma2ForCausalLM",
            (3584, 14336, 42, 16, 256000),
            "num_key_value_heads=8 head_dim=256 max_position_embeddings=8192 sliding_window=4096",
        ),
        9_241_705_984,
    ),
    "gemma-3-1b": (
        _full(
            "gemma3_text",
            "Gemma3ForCausalLM",
            (1152, 6912, 26, 4, 262144),
            "num_key_value_heads=1 head_dim=256 max_position_embeddings=32768 sliding_window=512",
        ),
        999_885_952,
    ),
    "phi-2": (
        _full("phi", "PhiForCausalLM", (2560, 10240, 32, 32, 51200), "max_position_embeddings=2048 partial_rotary_factor=0.4"),
        2_779_683_840,
    ),
    "phi-3-mini": (
        _full("phi3", "Phi3ForCausalLM", (3072, 8192, 32, 32, 32064), "num_key_value_heads=32 max_position_embeddings=4096"),
        3_821_079_552,
    ),
    "t5-base": (
        _config(
            "t5",
            "T5ForConditionalGeneration",
            "d_model=768 d_ff=3072 d_kv=64 num_heads=12 num_layers=12 vocab_size=32128 decoder_start_token_id=0",
        ),
        222_903_552,
    ),
    "whisper-small": (
        _config(
            "whisper",
            "WhisperForConditionalGeneration",
            "d_model=768 encoder_layers=12 decoder_layers=12 encoder_attention_heads=12 decoder_attention_heads=12 "
            "encoder_ffn_dim=3072 decoder_ffn_dim=3072 vocab_size=51865",
        ),
        241_734_912,
    ),
    "vit-base": (_config("vit", "ViTForImageClassification", "num_labels=1000"), 86_567_656),
    "clip-vit-base-32": (_config("clip", "CLIPForImageClassification", "num_labels=1000"), 88_225_000),
    "mamba-130m": (
        _config("mamba", "MambaForCausalLM", "hidden_size=768 num_hidden_layers=24 state_size=16 vocab_size=50280"),
        129_135_360,
    ),
}
"""Public shapes, with the number of parameters as published (CLIP's: of its image tower with a head of 1000 classes)."""
