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


FULL: dict[str, tuple[dict[str, Any], int]] = {
    name: (_config(kind, head, sizes), parameters)
    for name, kind, head, parameters, sizes in (
        ("gpt2", "gpt2", "GPT2LMHeadModel", 124_439_808, ""),
        ("bert-base", "bert", "BertForMaskedLM", 109_514_298, ""),
        (
            *("llama-3-8b", "llama", "LlamaForCausalLM", 8_030_261_248),
            "num_key_value_heads=8 max_position_embeddings=8192 rope_theta=500000.0 rms_norm_eps=1e-05 "
            "hidden_size=4096 intermediate_size=14336 num_hidden_layers=32 num_attention_heads=32 vocab_size=128256",
        ),
        (
            *("llama-3-70b", "llama", "LlamaForCausalLM", 70_553_706_496),
            "num_key_value_heads=8 max_position_embeddings=8192 rope_theta=500000.0 rms_norm_eps=1e-05 "
            "hidden_size=8192 intermediate_size=28672 num_hidden_layers=80 num_attention_heads=64 vocab_size=128256",
        ),
        (
            *("mistral-7b", "mistral", "MistralForCausalLM", 7_241_732_096),
            "num_key_value_heads=8 max_position_embeddings=32768 sliding_window=4096 hidden_size=4096 "
            "intermediate_size=14336 num_hidden_layers=32 num_attention_heads=32 vocab_size=32000",
        ),
        (
            *("mixtral-8x7b", "mixtral", "MixtralForCausalLM", 46_702_792_704),
            "num_key_value_heads=8 max_position_embeddings=32768 num_local_experts=8 num_experts_per_tok=2 "
            "hidden_size=4096 intermediate_size=14336 num_hidden_layers=32 num_attention_heads=32 vocab_size=32000",
        ),
        (
            *("qwen2.5-7b", "qwen2", "Qwen2ForCausalLM", 7_615_616_512),
            "num_key_value_heads=4 max_position_embeddings=131072 tie_word_embeddings=false hidden_size=3584 "
            "intermediate_size=18944 num_hidden_layers=28 num_attention_heads=28 vocab_size=152064",
        ),
        (
            *("qwen3-8b", "qwen3", "Qwen3ForCausalLM", 8_190_735_360),
            "num_key_value_heads=8 head_dim=128 max_position_embeddings=40960 tie_word_embeddings=false "
            "hidden_size=4096 intermediate_size=12288 num_hidden_layers=36 num_attention_heads=32 vocab_size=151936",
        ),
        (
            *("qwen3-30b-a3b", "qwen3_moe", "Qwen3MoeForCausalLM", 30_532_122_624),
            "moe_intermediate_size=768 num_key_value_heads=4 head_dim=128 num_experts=128 num_experts_per_tok=8 "
            "max_position_embeddings=40960 tie_word_embeddings=false hidden_size=2048 intermediate_size=6144 "
            "num_hidden_layers=48 num_attention_heads=32 vocab_size=151936",
        ),
        (
            *("gemma-2b", "gemma", "GemmaForCausalLM", 2_506_172_416),
            "num_key_value_heads=1 head_dim=256 max_position_embeddings=8192 hidden_size=2048 intermediate_size=16384 "
            "num_hidden_layers=18 num_attention_heads=8 vocab_size=256000",
        ),
        (
            *("gemma-2-9b", "gemma2", "Gemma2ForCausalLM", 9_241_705_984),
            "num_key_value_heads=8 head_dim=256 max_position_embeddings=8192 sliding_window=4096 hidden_size=3584 "
            "intermediate_size=14336 num_hidden_layers=42 num_attention_heads=16 vocab_size=256000",
        ),
        (
            *("gemma-3-1b", "gemma3_text", "Gemma3ForCausalLM", 999_885_952),
            "num_key_value_heads=1 head_dim=256 max_position_embeddings=32768 sliding_window=512 hidden_size=1152 "
            "intermediate_size=6912 num_hidden_layers=26 num_attention_heads=4 vocab_size=262144",
        ),
        (
            *("phi-2", "phi", "PhiForCausalLM", 2_779_683_840),
            "max_position_embeddings=2048 partial_rotary_factor=0.4 hidden_size=2560 intermediate_size=10240 "
            "num_hidden_layers=32 num_attention_heads=32 vocab_size=51200",
        ),
        (
            *("phi-3-mini", "phi3", "Phi3ForCausalLM", 3_821_079_552),
            "num_key_value_heads=32 max_position_embeddings=4096 hidden_size=3072 intermediate_size=8192 "
            "num_hidden_layers=32 num_attention_heads=32 vocab_size=32064",
        ),
        (
            *("t5-base", "t5", "T5ForConditionalGeneration", 222_903_552),
            "d_model=768 d_ff=3072 d_kv=64 num_heads=12 num_layers=12 vocab_size=32128 decoder_start_token_id=0",
        ),
        (
            *("whisper-small", "whisper", "WhisperForConditionalGeneration", 241_734_912),
            "d_model=768 encoder_layers=12 decoder_layers=12 encoder_attention_heads=12 decoder_attention_heads=12 "
            "encoder_ffn_dim=3072 decoder_ffn_dim=3072 vocab_size=51865",
        ),
        ("vit-base", "vit", "ViTForImageClassification", 86_567_656, "num_labels=1000"),
        ("clip-vit-base-32", "clip", "CLIPForImageClassification", 88_225_000, "num_labels=1000"),
        (
            *("mamba-130m", "mamba", "MambaForCausalLM", 129_135_360),
            "hidden_size=768 num_hidden_layers=24 state_size=16 vocab_size=50280",
        ),
    )
}
"""Public shapes, with the number of parameters as published (CLIP's: of its image tower with a head of 1000 classes)."""
