"""Small Hugging Face models of the architectures that people train, for tests of what can be tensor-sharded."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

_DECODER: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 16,
    "vocab_size": 48,
    "bos_token_id": 0,
    "eos_token_id": 0,
    "pad_token_id": 0,
    "use_cache": False,
}
_ENCODER: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "vocab_size": 48,
    "max_position_embeddings": 16,
    "pad_token_id": 0,
}
_IMAGES: dict[str, Any] = {"image_size": 16, "patch_size": 4, "num_channels": 3}


@dataclass(frozen=True, slots=True, kw_only=True)
class Architecture:
    """One small model.

    Attributes:
        kind: of its config. head: the class. inputs: makes a batch of so many samples.
        sums: all_reduces in its layers' forward when attention and MLP are sharded: two per layer, three with cross-attention.
    """

    kind: str
    head: str
    values: dict[str, Any] = field(default_factory=dict)
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


ARCHITECTURES: dict[str, Architecture] = {
    "gpt2": Architecture(
        kind="gpt2",
        head="GPT2LMHeadModel",
        values={"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 16, "vocab_size": 48, "use_cache": False},
        inputs=_tokens,
    ),
    "bert": Architecture(kind="bert", head="BertForMaskedLM", values=_ENCODER, inputs=_tokens),
    "llama": Architecture(kind="llama", head="LlamaForCausalLM", values=_DECODER, inputs=_tokens),
    "mistral": Architecture(
        kind="mistral", head="MistralForCausalLM", values={**_DECODER, "sliding_window": 4}, inputs=_tokens
    ),
    "mixtral": Architecture(
        kind="mixtral",
        head="MixtralForCausalLM",
        values={**_DECODER, "num_local_experts": 4, "num_experts_per_tok": 2},
        inputs=_tokens,
    ),
    "qwen2": Architecture(kind="qwen2", head="Qwen2ForCausalLM", values=_DECODER, inputs=_tokens),
    "qwen3": Architecture(kind="qwen3", head="Qwen3ForCausalLM", values=_DECODER, inputs=_tokens),
    "gemma": Architecture(kind="gemma", head="GemmaForCausalLM", values=_DECODER, inputs=_tokens),
    "gemma2": Architecture(kind="gemma2", head="Gemma2ForCausalLM", values={**_DECODER, "sliding_window": 4}, inputs=_tokens),
    "gemma3": Architecture(
        kind="gemma3_text", head="Gemma3ForCausalLM", values={**_DECODER, "sliding_window": 4}, inputs=_tokens
    ),
    "phi": Architecture(
        kind="phi", head="PhiForCausalLM", values={**_DECODER, "num_key_value_heads": 4}, inputs=_tokens, sums=2
    ),
    "phi3": Architecture(kind="phi3", head="Phi3ForCausalLM", values=_DECODER, inputs=_tokens),
    "t5": Architecture(
        kind="t5",
        head="T5ForConditionalGeneration",
        values={
            "d_model": 32,
            "d_kv": 8,
            "d_ff": 64,
            "num_layers": 2,
            "num_heads": 4,
            "vocab_size": 48,
            "decoder_start_token_id": 0,
            "use_cache": False,
        },
        inputs=_pairs,
        sums=10,
    ),
    "whisper": Architecture(
        kind="whisper",
        head="WhisperForConditionalGeneration",
        values={
            "d_model": 32,
            "encoder_layers": 2,
            "decoder_layers": 2,
            "encoder_attention_heads": 4,
            "decoder_attention_heads": 4,
            "encoder_ffn_dim": 64,
            "decoder_ffn_dim": 64,
            "vocab_size": 48,
            "num_mel_bins": 8,
            "max_source_positions": 16,
            "max_target_positions": 16,
            "decoder_start_token_id": 0,
            "pad_token_id": 0,
            "bos_token_id": 0,
            "eos_token_id": 0,
            "use_cache": False,
        },
        inputs=_speech,
        sums=10,
    ),
    "vit": Architecture(
        kind="vit", head="ViTForImageClassification", values={**_ENCODER, **_IMAGES, "num_labels": 8}, inputs=_pixels
    ),
    "clip": Architecture(
        kind="clip",
        head="CLIPModel",
        values={
            "text_config": {**_ENCODER, "projection_dim": 16},
            "vision_config": {**_ENCODER, **_IMAGES, "projection_dim": 16},
            "projection_dim": 16,
        },
        inputs=_captions,
        sums=8,
    ),
    "mamba": Architecture(
        kind="mamba",
        head="MambaForCausalLM",
        values={
            "hidden_size": 32,
            "state_size": 4,
            "num_hidden_layers": 2,
            "intermediate_size": 64,
            "time_step_rank": 4,
            "vocab_size": 48,
            "use_cache": False,
        },
        inputs=_tokens,
    ),
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
