"""Configs of Hugging Face models: small ones with every feature of their architecture, and the public shapes of full size."""

from __future__ import annotations

from typing import Any

_TOKENS: dict[str, Any] = {"bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 0}


def _decoder(model_type: str, architecture: str, **more: Any) -> dict[str, Any]:
    """A small decoder in the manner of Llama, with four layers: the last two are copied."""
    return {
        "model_type": model_type,
        "architectures": [architecture],
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 16,
        "vocab_size": 50,
        **_TOKENS,
        **more,
    }


SMALL: dict[str, dict[str, Any]] = {
    "gpt2": {
        "model_type": "gpt2",
        "architectures": ["GPT2LMHeadModel"],
        "n_embd": 32,
        "n_layer": 4,
        "n_head": 4,
        "n_positions": 16,
        "vocab_size": 50,
        "bos_token_id": 0,
        "eos_token_id": 0,
    },
    "bert": _decoder("bert", "BertForMaskedLM") | {"num_key_value_heads": None},
    "llama": _decoder("llama", "LlamaForCausalLM"),
    "mistral": _decoder("mistral", "MistralForCausalLM", sliding_window=8),
    "mixtral": _decoder("mixtral", "MixtralForCausalLM", num_local_experts=4, num_experts_per_tok=2),
    "qwen2": _decoder("qwen2", "Qwen2ForCausalLM"),
    "qwen3": _decoder("qwen3", "Qwen3ForCausalLM", head_dim=8),
    "qwen3_moe": _decoder(
        "qwen3_moe",
        "Qwen3MoeForCausalLM",
        head_dim=8,
        num_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=24,
    ),
    "gemma": _decoder("gemma", "GemmaForCausalLM", head_dim=8),
    "gemma2": _decoder("gemma2", "Gemma2ForCausalLM", head_dim=8, sliding_window=8, num_hidden_layers=6),
    "gemma3": _decoder("gemma3_text", "Gemma3ForCausalLM", head_dim=8, sliding_window=8, num_hidden_layers=12),
    "phi": _decoder("phi", "PhiForCausalLM"),
    "phi3": _decoder("phi3", "Phi3ForCausalLM"),
    "t5": {
        "model_type": "t5",
        "architectures": ["T5ForConditionalGeneration"],
        "d_model": 32,
        "d_kv": 8,
        "d_ff": 64,
        "num_layers": 4,
        "num_decoder_layers": 4,
        "num_heads": 4,
        "vocab_size": 50,
        "decoder_start_token_id": 0,
        "eos_token_id": 1,
        "pad_token_id": 0,
    },
    "whisper": {
        "model_type": "whisper",
        "architectures": ["WhisperForConditionalGeneration"],
        "d_model": 32,
        "encoder_layers": 4,
        "decoder_layers": 4,
        "encoder_attention_heads": 4,
        "decoder_attention_heads": 4,
        "encoder_ffn_dim": 64,
        "decoder_ffn_dim": 64,
        "num_mel_bins": 8,
        "max_source_positions": 12,
        "max_target_positions": 16,
        "vocab_size": 50,
        "decoder_start_token_id": 0,
        **_TOKENS,
    },
    "vit": {
        "model_type": "vit",
        "architectures": ["ViTForImageClassification"],
        "hidden_size": 32,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "intermediate_size": 64,
        "image_size": 16,
        "patch_size": 4,
        "num_channels": 3,
        "num_labels": 7,
    },
    "clip": {
        "model_type": "clip",
        "architectures": ["CLIPForImageClassification"],
        "projection_dim": 16,
        "num_labels": 7,
        "vision_config": {
            "hidden_size": 32,
            "intermediate_size": 64,
            "num_hidden_layers": 4,
            "num_attention_heads": 4,
            "image_size": 16,
            "patch_size": 4,
        },
        "text_config": {
            "hidden_size": 32,
            "intermediate_size": 64,
            "num_hidden_layers": 4,
            "num_attention_heads": 4,
            "vocab_size": 50,
            "max_position_embeddings": 16,
            **_TOKENS,
        },
    },
    "mamba": {
        "model_type": "mamba",
        "architectures": ["MambaForCausalLM"],
        "hidden_size": 32,
        "state_size": 4,
        "num_hidden_layers": 4,
        "vocab_size": 50,
        **_TOKENS,
    },
}
