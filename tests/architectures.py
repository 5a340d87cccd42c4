"""Small Hugging Face models of the architectures that people train, for tests of what can be tensor-sharded."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from tests.hugging_face_configs import keys_of

_DECODER = keys_of(
    "hidden_size=32 intermediate_size=48 num_hidden_layers=2 num_attention_heads=4 num_key_value_heads=2 head_dim=8 "
    "max_position_embeddings=16 vocab_size=48 bos_token_id=0 eos_token_id=0 pad_token_id=0 use_cache=false"
)
_ENCODER = keys_of(
    "hidden_size=32 intermediate_size=64 num_hidden_layers=2 num_attention_heads=4 vocab_size=48 "
    "max_position_embeddings=16 pad_token_id=0"
)
_IMAGES = keys_of("image_size=16 patch_size=4 num_channels=3")


@dataclass(frozen=True, slots=True)
class Architecture:
    """One small model.

    Attributes:
        kind: of its config. head: the class. values: of the config. inputs: makes a batch of so many samples.
        sums: all_reduces in its layers' forward when attention and MLP are sharded: two per layer, three with cross-attention.
    """

    kind: str
    head: str
    values: dict[str, Any]
    inputs: Callable[[int], dict[str, Tensor]]
    sums: int = 4


def _tokens(samples: int, *, seq: int = 6) -> dict[str, Tensor]:
    return {"input_ids": torch.randint(48, (samples, seq))}


def _pixels(samples: int) -> dict[str, Tensor]:
    return {"pixel_values": torch.randn(samples, 3, 16, 16)}


def _pairs(samples: int) -> dict[str, Tensor]:
    return {**_tokens(samples), "decoder_input_ids": torch.randint(48, (samples, 5))}


def _speech(samples: int) -> dict[str, Tensor]:
    return {"input_features": torch.randn(samples, 8, 32), "decoder_input_ids": torch.randint(48, (samples, 5))}


def _captions(samples: int) -> dict[str, Tensor]:
    return {**_tokens(samples), **_pixels(samples)}


_SLIDING = {**_DECODER, "sliding_window": 4}
_EXPERTS = {**_DECODER, "num_local_experts": 4, "num_experts_per_tok": 2}
_GPT2 = keys_of("n_embd=32 n_layer=2 n_head=4 n_positions=16 vocab_size=48 use_cache=false")
_T5 = keys_of("d_model=32 d_kv=8 d_ff=64 num_layers=2 num_heads=4 vocab_size=48 decoder_start_token_id=0 use_cache=false")
_WHISPER = keys_of(
    "d_model=32 encoder_layers=2 decoder_layers=2 encoder_attention_heads=4 decoder_attention_heads=4 encoder_ffn_dim=64 "
    "decoder_ffn_dim=64 vocab_size=48 num_mel_bins=8 max_source_positions=16 max_target_positions=16 "
    "decoder_start_token_id=0 pad_token_id=0 bos_token_id=0 eos_token_id=0 use_cache=false"
)
_CLIP = {
    "text_config": {**_ENCODER, "projection_dim": 16},
    "vision_config": {**_ENCODER, **_IMAGES, "projection_dim": 16},
    "projection_dim": 16,
}
_MAMBA = keys_of(
    "hidden_size=32 state_size=4 num_hidden_layers=2 intermediate_size=64 time_step_rank=4 vocab_size=48 use_cache=false"
)
ARCHITECTURES: dict[str, Architecture] = {
    "gpt2": Architecture("gpt2", "GPT2LMHeadModel", _GPT2, _tokens),
    "bert": Architecture("bert", "BertForMaskedLM", _ENCODER, _tokens),
    "llama": Architecture("llama", "LlamaForCausalLM", _DECODER, _tokens),
    "mistral": Architecture("mistral", "MistralForCausalLM", _SLIDING, _tokens),
    "mixtral": Architecture("mixtral", "MixtralForCausalLM", _EXPERTS, _tokens),
    "qwen2": Architecture("qwen2", "Qwen2ForCausalLM", _DECODER, _tokens),
    "qwen3": Architecture("qwen3", "Qwen3ForCausalLM", _DECODER, _tokens),
    "gemma": Architecture("gemma", "GemmaForCausalLM", _DECODER, _tokens),
    "gemma2": Architecture("gemma2", "Gemma2ForCausalLM", _SLIDING, _tokens),
    "gemma3": Architecture("gemma3_text", "Gemma3ForCausalLM", _SLIDING, _tokens),
    "phi": Architecture("phi", "PhiForCausalLM", {**_DECODER, "num_key_value_heads": 4}, _tokens, 2),
    "phi3": Architecture("phi3", "Phi3ForCausalLM", _DECODER, _tokens),
    "t5": Architecture("t5", "T5ForConditionalGeneration", _T5, _pairs, 10),
    "whisper": Architecture("whisper", "WhisperForConditionalGeneration", _WHISPER, _speech, 10),
    "vit": Architecture("vit", "ViTForImageClassification", {**_ENCODER, **_IMAGES, "num_labels": 8}, _pixels),
    "clip": Architecture("clip", "CLIPModel", _CLIP, _captions, 8),
    "mamba": Architecture("mamba", "MambaForCausalLM", _MAMBA, _tokens),
}


def small_module(name: str, **changes: Any) -> nn.Module:
    """In training mode, randomly initialised by torch's random state; `changes` replace values of the config."""
    import transformers

    row = ARCHITECTURES[name]
    config = transformers.AutoConfig.for_model(row.kind, **{**row.values, **changes})
    module: nn.Module = getattr(transformers, row.head)(config)
    return module.train()


def batch_of(name: str, samples: int) -> dict[str, Tensor]:
    """Keyword inputs."""
    return ARCHITECTURES[name].inputs(samples)
