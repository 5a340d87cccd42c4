"""The table: one row per model, with the source of its sizes. A name that is not here may be an alias (`names.ALIASES`).

Sources, each read: `nemo:` NVIDIA/NeMo nemo/collections/llm/gpt/model/FILE; `titan:` pytorch/torchtitan torchtitan/models/NAME;
`hf:` a class of transformers 5.23 and its defaults; `calculon:` calculon-ai/calculon models/FILE; `foundry:`
mosaicml/llm-foundry scripts/train/yamls/pretrain/FILE; `bigscience:` bigscience-workshop/bigscience train/FILE; `rows:` the
shapes that published measurements state; `count:` sizes that were not read but hold, since their arrays add up to the
published count (of Llama 4 those of the text model; Maverick has its dense layers first here, which alternate with the others).
`parameters` counts every array once, as transformers builds the model.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from importlib.resources import files
from typing import TYPE_CHECKING, Any

from parsim.errors import ModelError, near_matches
from parsim.model.catalogue.frameworks import KERNELS
from parsim.model.catalogue.sublayers import (
    COMPILED,
    LOSSES,
    MODULES,
    UNFUSED_PERMUTATION,
    SamplePart,
    Shape,
    Software,
    gpt,
    llama,
    mpt,
)
from parsim.model.catalogue.transformer import recorded
from parsim.model.tuning import Tuning, tuned
from parsim.units import nearest_divisors

if TYPE_CHECKING:
    from parsim.model.model import Model


@dataclass(frozen=True, slots=True, kw_only=True)
class NamedModel:
    """Attributes:
    seq: tokens of a sample where the question does not say. source: of the sizes.
    shape: of a transformer that parsim writes itself. config: instead of it, a file of this package for transformers.
    parameters: as published; 0: no count was found, or the published one is of another vocabulary.
    """

    seq: int
    source: str
    shape: Shape | None = None
    config: str = ""
    parameters: int = 0


def _row(shape: Shape, seq: int, source: str, parameters: int = 0) -> NamedModel:
    return NamedModel(shape=shape, seq=seq, source=source, parameters=parameters)


def _megatron(name: str, layers: int, hidden: int, heads: int, source: str, vocab: int = 51200) -> NamedModel:
    return _row(gpt(name, layers, hidden, heads, vocab), 2048, source)


def _counted(name: str, sizes: tuple[int, ...], parameters: int, **rest: Any) -> NamedModel:
    return _row(llama(name, *sizes, **rest), 4096, "count: its own config.json", parameters)


def _qwen(name: str, *sizes: int, **rest: Any) -> Shape:
    return llama(name, *sizes, qkv_bias=True, **rest)


def _qwen3(name: str, *sizes: int, **rest: Any) -> Shape:
    return llama(name, *sizes, qk_norm=True, head_dim=128, **rest)


def _gemma(name: str, *sizes: int, head_dim: int = 256, vocab: int = 256000) -> Shape:
    """Leaves out: norms behind attention and MLP, and that every second or sixth layer alone attends to all keys."""
    return llama(name, *(*sizes, vocab), head_dim=head_dim, tied=True)


def _nemotron(name: str, layers: int, hidden: int, heads: int, ffn: int, kv_heads: int = 0, head_dim: int = 0) -> Shape:
    return Shape(
        name=name,
        layers=layers,
        hidden=hidden,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        vocab=256000,
        ffn=ffn,
        bias=False,
        rotary=True,
        tied=False,
    )


def _bert(name: str, layers: int, hidden: int, heads: int, vocab: int = 30522) -> Shape:
    """Leaves out the dense layer and the biases of the head: 0.3% to 0.9% of what transformers counts."""
    return Shape(name=name, layers=layers, hidden=hidden, heads=heads, vocab=vocab, causal=False)


def _opt(name: str, layers: int, hidden: int, heads: int, parameters: int) -> NamedModel:
    return _row(gpt(name, layers, hidden, heads, 50272, positions=2050), 2048, "arXiv 2205.01068, Table 1", parameters)


def _bloom(name: str, layers: int, hidden: int, heads: int, parameters: int) -> NamedModel:
    shape = gpt(name, layers, hidden, heads, 250880, alibi=True, embedding_norm=True)
    return _row(shape, 2048, "arXiv 2211.05100, Table 3", parameters)


def _neox(name: str, layers: int, hidden: int, heads: int, vocab: int) -> Shape:
    """Leaves out that attention and MLP read the same values, and sum once under tensor parallelism.

    GPT-J and Phi-2 have one norm a layer instead of two and a bias at the head, GPT-J no biases in attention: 0.01% of each.
    """
    return Shape(name=name, layers=layers, hidden=hidden, heads=heads, vocab=vocab, rotary=True, tied=False)


def _neox_row(name: str, layers: int, hidden: int, heads: int, parameters: int, vocab: int = 50304) -> NamedModel:
    return _row(_neox(name, layers, hidden, heads, vocab), 2048, "arXiv 2304.01373, Table 1", parameters)


def _oss(name: str, layers: int, experts: int) -> Shape:
    biases = {"qkv_bias": True, "bias": True, "expert_bias": True, "sinks": True}
    return llama(name, layers, 2880, 64, 8, 2880, 201088, experts=experts, active=4, expert_ffn=2880, head_dim=64, **biases)


def _latent(name: str, *sizes: int, query_rank: int = 1536, **rest: Any) -> Shape:
    return llama(name, *sizes, head_dim=128, key_rank=512, rope_dim=64, query_rank=query_rank, **rest)


def _experts(experts: int, active: int, expert_ffn: int) -> dict[str, int]:
    return {"experts": experts, "active": active, "expert_ffn": expert_ffn}


def _hf(config: str, seq: int, source: str, parameters: int) -> NamedModel:
    return NamedModel(config=config, seq=seq, source=source, parameters=parameters)


T5 = "hf:T5Config; arXiv 1910.10683, section 3.7"
VIT = "hf:ViTConfig; arXiv 2010.11929, Table 1"
FLASH_760M = "Dao-AILab/flash-attention training/configs/experiment/pile/gpt3l-flash.yaml"
BERT_100B = "NVIDIA/NeMo-Framework-Launcher launcher_scripts/conf/training/bert/100b.yaml"
KIMI_K2 = "NVIDIA-NeMo/Megatron-Bridge src/megatron/bridge/models/kimi/kimi_provider.py"

NAMED: dict[str, NamedModel] = {
    "transformer": _row(gpt("Transformer", 12, 768, 12, 50304), 1024, "sizes by arguments; without any, GPT-3 125M"),
    "gpt3-125m": _megatron("GPT-3 125M", 12, 768, 12, "rows: NeMo-Framework-Launcher", 50304),
    "gpt3-355m": _megatron("GPT-3 355M", 24, 1024, 16, "rows: NeMo-Framework-Launcher", 50304),
    "gpt3-760m": _megatron("GPT-3 760M", 24, 1536, 16, FLASH_760M, 50304),
    "gpt3-1.3b": _megatron("GPT-3 1.3B", 24, 2048, 16, "rows: FlashAttention", 50304),
    "gpt3-2.7b": _megatron("GPT-3 2.7B", 32, 2560, 20, "rows: FlashAttention", 50304),
    "gpt3-5b": _megatron("GPT 5B", 24, 4096, 32, "nemo:base.py", 50304),
    "gpt3-20b": _megatron("GPT 20B", 44, 6144, 48, "nemo:base.py", 50304),
    "gpt3-40b": _megatron("GPT 40B", 48, 8192, 64, "nemo:base.py", 50304),
    "gpt3-175b": _megatron("GPT-3 175B", 96, 12288, 96, "calculon:gpt3-175B.json", 50304),
    "gpt-5b": _megatron("GPT 5B", 24, 4096, 32, "nemo:base.py"),
    "gpt-20b": _megatron("GPT 20B", 44, 6144, 48, "nemo:base.py"),
    "gpt-22b": _megatron("GPT 22B", 48, 6144, 64, "calculon:megatron-22B.json"),
    "gpt-40b": _megatron("GPT 40B", 48, 8192, 64, "nemo:base.py"),
    "gpt-175b": _megatron("GPT-3 175B", 96, 12288, 96, "calculon:gpt3-175B.json"),
    "gpt-530b": _megatron("GPT 530B", 105, 20480, 128, "calculon:turing-530B.json"),
    "gpt-1t": _megatron("GPT 1T", 128, 25600, 160, "calculon:megatron-1T.json"),
    "gpt2": _row(gpt("GPT-2", 12, 768, 12, 50257, positions=1024), 1024, "hf:GPT2Config", 124_439_808),
    "gpt2-medium": _row(gpt("GPT-2 Medium", 24, 1024, 16, 50257, positions=1024), 1024, "hf:GPT2Config, widened", 354_823_168),
    "gpt2-large": _row(gpt("GPT-2 Large", 36, 1280, 20, 50257, positions=1024), 1024, "hf:GPT2Config, widened", 774_030_080),
    "gpt2-xl": _row(gpt("GPT-2 XL", 48, 1600, 25, 50257, positions=1024), 1024, "hf:GPT2Config, widened", 1_557_611_200),
    "gpt-neo-2.7b": _row(gpt("GPT-Neo 2.7B", 32, 2560, 20, 50304), 2048, "hf:GPTNeoConfig, vocabulary padded to 50304"),
    "gpt-j-6b": _row(_neox("GPT-J 6B", 28, 4096, 16, 50400), 2048, "hf:GPTJConfig"),
    "gpt-neox-20b": _neox_row("GPT-NeoX 20B", 44, 6144, 64, 20_554_567_680, vocab=50432),
    "pythia-70m": _neox_row("Pythia 70M", 6, 512, 8, 70_426_624),
    "pythia-160m": _neox_row("Pythia 160M", 12, 768, 12, 162_322_944),
    "pythia-410m": _neox_row("Pythia 410M", 24, 1024, 16, 405_334_016),
    "pythia-1b": _neox_row("Pythia 1B", 16, 2048, 8, 1_011_781_632),
    "pythia-1.4b": _neox_row("Pythia 1.4B", 24, 2048, 16, 1_414_647_808),
    "pythia-2.8b": _neox_row("Pythia 2.8B", 32, 2560, 32, 2_775_208_960),
    "pythia-6.9b": _neox_row("Pythia 6.9B", 32, 4096, 32, 6_857_302_016, vocab=50432),
    "pythia-12b": _neox_row("Pythia 12B", 36, 5120, 40, 11_846_072_320, vocab=50688),
    "phi-2": _row(_neox("Phi-2", 32, 2560, 32, 51200), 2048, "hf:PhiConfig, widened"),
    "falcon-7b": _row(  # it has one norm a layer, not two: 0.004% fewer parameters
        Shape(
            name="Falcon 7B",
            layers=32,
            hidden=4544,
            heads=71,
            kv_heads=1,
            vocab=65024,
            bias=False,
            rotary=True,
        ),
        2048,
        "hf:FalconConfig",
    ),
    "starcoder2-3b": _row(
        Shape(
            name="StarCoder2 3B",
            layers=30,
            hidden=3072,
            heads=24,
            kv_heads=2,
            vocab=49152,
            rotary=True,
        ),
        4096,
        "hf:Starcoder2Config",
        3_030_371_328,
    ),
    "opt-125m": _opt("OPT 125M", 12, 768, 12, 125_239_296),
    "opt-350m": _row(  # its embedding is 512 wide and projected; here 1,024 wide: 7% more parameters
        gpt("OPT-350M", 24, 1024, 16, 50272), 2048, "rows: Sailor"
    ),
    "opt-1.3b": _opt("OPT 1.3B", 24, 2048, 32, 1_315_758_080),
    "opt-2.7b": _opt("OPT 2.7B", 32, 2560, 32, 2_651_596_800),
    "opt-6.7b": _opt("OPT 6.7B", 32, 4096, 32, 6_658_473_984),
    "opt-13b": _opt("OPT 13B", 40, 5120, 40, 12_853_473_280),
    "opt-30b": _opt("OPT 30B", 48, 7168, 56, 29_974_540_288),
    "opt-66b": _opt("OPT 66B", 64, 9216, 72, 0),
    "bloom-560m": _bloom("BLOOM 560M", 24, 1024, 16, 559_214_592),
    "bloom-1b1": _bloom("BLOOM 1.1B", 24, 1536, 16, 1_065_314_304),
    "bloom-1b7": _bloom("BLOOM 1.7B", 24, 2048, 16, 1_722_408_960),
    "bloom-3b": _bloom("BLOOM 3B", 30, 2560, 32, 3_002_557_440),
    "bloom-7b1": _bloom("BLOOM 7.1B", 30, 4096, 32, 7_069_016_064),
    "bloom-176b": _row(
        gpt("BLOOM 176B", 70, 14336, 112, 250880, alibi=True, embedding_norm=True),
        2048,
        "bigscience:tr11-176B-ml/README.md",
        176_247_271_424,
    ),
    "mpt-125m": _row(mpt("MPT-125m", 12, 768, 12), 2048, "foundry:mpt-125m.yaml"),
    "mpt-350m": _row(mpt("MPT-350m", 24, 1024, 16), 2048, "foundry:mpt-350m.yaml"),
    "mpt-760m": _row(mpt("MPT-760m", 24, 1536, 12), 2048, "foundry:mpt-760m.yaml"),
    "mpt-1b": _row(mpt("MPT-1b", 24, 2048, 16), 2048, "foundry:mpt-1b.yaml"),
    "mpt-3b": _row(mpt("MPT-3b", 32, 2560, 20), 2048, "foundry:mpt-3b.yaml"),
    "mpt-7b": _row(mpt("MPT-7b", 32, 4096, 32), 2048, "foundry:mpt-7b.yaml"),
    "mpt-13b": _row(mpt("MPT-13b", 40, 5120, 40), 2048, "foundry:mpt-13b.yaml"),
    "mpt-30b": _row(mpt("MPT-30b", 48, 7168, 56), 2048, "foundry:mpt-30b.yaml"),
    "mpt-70b": _row(mpt("MPT-70b", 80, 8192, 64), 2048, "foundry:mpt-70b.yaml"),
    "internlm-7b": _row(llama("InternLM 7B", 32, 4096, 32, 32, 10944, 103168, bias=True), 2048, "rows: InternEvo"),
    "llama-7b": _row(llama("LLaMA 7B", 32, 4096, 32, 32, 11008, 32000), 2048, "hf:LlamaConfig", 6_738_415_616),
    "llama-13b": _row(llama("LLaMA 13B", 40, 5120, 40, 40, 13824, 32000), 2048, "arXiv 2302.13971, Table 2", 13_015_864_320),
    "llama-30b": _row(llama("LLaMA 30B", 60, 6656, 52, 52, 17920, 32000), 2048, "arXiv 2302.13971, Table 2", 32_528_943_616),
    "llama-65b": _row(llama("LLaMA 65B", 80, 8192, 64, 64, 22016, 32000), 2048, "arXiv 2302.13971, Table 2", 65_285_660_672),
    "llama2-7b": _row(llama("Llama 2 7B", 32, 4096, 32, 32, 11008, 32000), 4096, "nemo:llama.py", 6_738_415_616),
    "llama2-13b": _row(llama("Llama 2 13B", 40, 5120, 40, 40, 13824, 32000), 4096, "nemo:llama.py", 13_015_864_320),
    "llama2-70b": _row(llama("Llama 2 70B", 80, 8192, 64, 8, 28672, 32000), 4096, "nemo:llama.py", 68_976_648_192),
    "codellama-7b": _row(llama("Code Llama 7B", 32, 4096, 32, 32, 11008, 32016), 16384, "nemo:llama.py", 6_738_546_688),
    "codellama-13b": _row(llama("Code Llama 13B", 40, 5120, 40, 40, 13824, 32016), 16384, "nemo:llama.py", 13_016_028_160),
    "codellama-34b": _row(llama("Code Llama 34B", 48, 8192, 64, 8, 22016, 32000), 16384, "nemo:llama.py", 33_743_970_304),
    "llama3-8b": _row(llama("Llama 3 8B", 32, 4096, 32, 8, 14336, 128256), 8192, "titan:llama3", 8_030_261_248),
    "llama3-70b": _row(llama("Llama 3 70B", 80, 8192, 64, 8, 28672, 128256), 8192, "titan:llama3", 70_553_706_496),
    "llama3-405b": _row(llama("Llama 3 405B", 126, 16384, 128, 8, 53248, 128256), 8192, "titan:llama3", 405_853_388_800),
    "llama3.2-1b": _row(llama("Llama 3.2 1B", 16, 2048, 32, 8, 8192, 128256, tied=True), 8192, "nemo:llama.py", 1_235_814_400),
    "llama3.2-3b": _row(llama("Llama 3.2 3B", 28, 3072, 24, 8, 8192, 128256, tied=True), 8192, "nemo:llama.py", 3_212_749_824),
    "mistral-7b": _row(llama("Mistral 7B", 32, 4096, 32, 8, 14336, 32000), 8192, "hf:MistralConfig", 7_241_732_096),
    "mistral-nemo-12b": _row(
        llama("Mistral NeMo 12B", 40, 5120, 32, 8, 14336, 131072, head_dim=128),
        8192,
        "hf:mistralai/Mistral-Nemo-Base-2407 config.json",
        12_247_782_400,
    ),
    "mistral-small-24b": _row(
        llama("Mistral Small 24B", 40, 5120, 32, 8, 32768, 131072, head_dim=128),
        8192,
        "hf:mistralai/Mistral-Small-24B-Base-2501 config.json",
        23_572_403_200,
    ),
    "tinyllama-1.1b": _row(
        llama("TinyLlama 1.1B", 22, 2048, 32, 4, 5632, 32000), 2048, "jzhang38/TinyLlama README", 1_100_048_384
    ),
    "smollm2-1.7b": _row(
        llama("SmolLM2 1.7B", 24, 2048, 32, 32, 8192, 49152, tied=True),
        2048,
        "hf:HuggingFaceTB/SmolLM2-1.7B config.json",
        1_711_376_384,
    ),
    "yi-34b": _row(llama("Yi 34B", 60, 7168, 56, 8, 20480, 64000), 4096, "hf:01-ai/Yi-34B config.json", 34_388_917_248),
    "phi3-mini": _row(
        llama("Phi-3 Mini", 32, 3072, 32, 32, 8192, 32064),
        4096,
        "hf:microsoft/Phi-3-mini-4k-instruct config.json",
        3_821_079_552,
    ),
    "mixtral-8x7b": _row(
        llama("Mixtral 8x7B", 32, 4096, 32, 8, 14336, 32000, **_experts(8, 2, 14336)),
        8192,
        "hf:MixtralConfig",
        46_702_792_704,
    ),
    "mixtral-8x22b": _row(
        llama("Mixtral 8x22B", 56, 6144, 48, 8, 16384, 32768, **_experts(8, 2, 16384)),
        8192,
        "nemo:mixtral.py",
        140_630_071_296,
    ),
    "nemotron-4b": _row(_nemotron("Nemotron 4B", 32, 3072, 24, 9216, 8, 128), 4096, "nemo:nemotron.py"),
    "nemotron-8b": _row(_nemotron("Nemotron 8B", 32, 4096, 32, 16384), 4096, "nemo:nemotron.py"),
    "nemotron-15b": _row(_nemotron("Nemotron 15B", 32, 6144, 48, 24576, 8), 4096, "nemo:nemotron.py"),
    "nemotron-22b": _row(_nemotron("Nemotron 22B", 40, 6144, 48, 24576), 4096, "nemo:nemotron.py"),
    "nemotron-340b": _row(_nemotron("Nemotron 340B", 96, 18432, 96, 73728, 8), 4096, "nemo:nemotron.py"),
    "qwen2-0.5b": _row(_qwen("Qwen2 0.5B", 24, 896, 14, 2, 4864, 151936, tied=True), 4096, "nemo:qwen2.py", 494_032_768),
    "qwen2-1.5b": _row(_qwen("Qwen2 1.5B", 28, 1536, 12, 2, 8960, 151936, tied=True), 4096, "nemo:qwen2.py", 1_543_714_304),
    "qwen2-3b": _row(
        _qwen("Qwen2.5 3B", 36, 2048, 16, 2, 11008, 151936, tied=True), 4096, "hf:Qwen/Qwen2.5-3B config.json", 3_085_938_688
    ),
    "qwen2-7b": _row(_qwen("Qwen2 7B", 28, 3584, 28, 4, 18944, 152064), 4096, "nemo:qwen2.py", 7_615_616_512),
    "qwen-1.8b": _row(_qwen("Qwen 1.8B", 24, 2048, 16, 16, 5504, 151936), 2048, "hf:Qwen/Qwen-1_8B config.json"),
    "qwen-7b": _row(_qwen("Qwen 7B", 32, 4096, 32, 32, 11008, 151936), 2048, "hf:Qwen/Qwen-7B config.json"),
    "qwen-14b": _row(_qwen("Qwen 14B", 40, 5120, 40, 40, 13696, 152064), 2048, "hf:Qwen/Qwen-14B config.json"),
    "qwen-72b": _row(_qwen("Qwen 72B", 80, 8192, 64, 64, 24576, 152064), 2048, "hf:Qwen/Qwen-72B config.json"),
    "gemma-2b": _row(_gemma("Gemma 2B", 18, 2048, 8, 1, 16384), 8192, "hf:GemmaConfig", 2_506_172_416),
    "gemma-7b": _row(_gemma("Gemma 7B", 28, 3072, 16, 16, 24576), 8192, "hf:GemmaConfig", 8_537_680_896),
    "gemma2-2b": _row(_gemma("Gemma 2 2B", 26, 2304, 8, 4, 9216), 8192, "hf:Gemma2Config"),
    "gemma2-9b": _row(_gemma("Gemma 2 9B", 42, 3584, 16, 8, 14336), 8192, "hf:Gemma2Config"),
    "gemma2-27b": _row(_gemma("Gemma 2 27B", 46, 4608, 32, 16, 36864, head_dim=128), 8192, "hf:Gemma2Config"),
    "gemma3-1b": _row(_gemma("Gemma 3 1B", 26, 1152, 4, 1, 6912, vocab=262144), 8192, "hf:Gemma3Config"),
    "gemma3-4b": _row(_gemma("Gemma 3 4B", 34, 2560, 8, 4, 10240, vocab=262144), 8192, "hf:Gemma3Config"),
    "gemma3-12b": _row(_gemma("Gemma 3 12B", 48, 3840, 16, 8, 15360, vocab=262144), 8192, "hf:Gemma3Config"),
    "gemma3-27b": _row(_gemma("Gemma 3 27B", 62, 5376, 32, 16, 21504, head_dim=128, vocab=262144), 8192, "hf:Gemma3Config"),
    "qwen2-14b": _row(_qwen("Qwen2 14B", 48, 5120, 40, 8, 13824, 152064), 4096, "nemo:qwen2.py", 14_770_033_664),
    "qwen2-32b": _row(_qwen("Qwen2 32B", 64, 5120, 40, 8, 27648, 152064), 4096, "nemo:qwen2.py", 32_763_876_352),
    "qwen2-72b": _row(_qwen("Qwen2 72B", 80, 8192, 64, 8, 29568, 152064), 4096, "nemo:qwen2.py", 72_706_203_648),
    "qwen3-0.6b": _row(_qwen3("Qwen3 0.6B", 28, 1024, 16, 8, 3072, 151936, tied=True), 4096, "titan:qwen3", 596_049_920),
    "qwen3-1.7b": _row(_qwen3("Qwen3 1.7B", 28, 2048, 16, 8, 6144, 151936, tied=True), 4096, "titan:qwen3", 1_720_574_976),
    "qwen3-4b": _row(_qwen3("Qwen3 4B", 36, 2560, 32, 8, 9728, 151936, tied=True), 4096, "titan:qwen3", 4_022_468_096),
    "qwen3-8b": _row(_qwen3("Qwen3 8B", 36, 4096, 32, 8, 12288, 151936), 4096, "titan:qwen3", 8_190_735_360),
    "qwen3-14b": _row(_qwen3("Qwen3 14B", 40, 5120, 40, 8, 17408, 151936), 4096, "titan:qwen3", 14_768_307_200),
    "qwen3-32b": _row(_qwen3("Qwen3 32B", 64, 5120, 64, 8, 25600, 151936), 4096, "titan:qwen3", 32_762_123_264),
    "qwen3-30b-a3b": _row(
        _qwen3("Qwen3 30B A3B", 48, 2048, 32, 4, 6144, 151936, **_experts(128, 8, 768)),
        4096,
        "titan:qwen3",
        30_532_122_624,
    ),
    "qwen3-235b-a22b": _row(
        _qwen3("Qwen3 235B A22B", 94, 4096, 64, 4, 12288, 151936, **_experts(128, 8, 1536)),
        4096,
        "titan:qwen3",
        235_093_634_560,
    ),
    "gpt-oss-20b": _row(_oss("gpt-oss 20B", 24, 32), 4096, "hf:GptOssConfig, fewer layers and experts", 20_914_757_184),
    "gpt-oss-120b": _row(_oss("gpt-oss 120B", 36, 128), 4096, "hf:GptOssConfig", 116_829_156_672),
    "deepseek-v2-lite": _row(
        _latent(
            "DeepSeek V2 Lite",
            27,
            2048,
            16,
            16,
            10944,
            102400,
            query_rank=0,
            dense_layers=1,
            shared_ffn=2816,
            **_experts(64, 6, 1408),
        ),
        4096,
        "titan:deepseek_v3",
        15_706_484_224,
    ),
    "deepseek-v2": _row(
        _latent("DeepSeek V2", 60, 5120, 128, 128, 12288, 102400, dense_layers=1, shared_ffn=3072, **_experts(160, 6, 1536)),
        4096,
        "titan:deepseek_v3",
        235_741_434_880,
    ),
    "deepseek-v3": _row(
        _latent("DeepSeek V3", 61, 7168, 128, 128, 18432, 129280, dense_layers=3, shared_ffn=2048, **_experts(256, 8, 2048)),
        4096,
        "hf:DeepseekV3Config",
        671_026_404_352,
    ),
    "kimi-k2": _row(
        _latent("Kimi K2", 61, 7168, 64, 64, 18432, 163840, dense_layers=1, shared_ffn=2048, **_experts(384, 8, 2048)),
        4096,
        KIMI_K2,
        1_026_408_209_408,  # 23,040 fewer than published: the corrections of its router are no parameters
    ),
    "ministral-8b": _counted("Ministral 8B", (36, 4096, 32, 8, 12288, 131072), 8_019_808_256),
    "mistral-large-123b": _counted("Mistral Large 123B", (88, 12288, 96, 8, 28672, 32768), 122_610_069_504),
    "codestral-22b": _counted("Codestral 22B", (56, 6144, 48, 8, 16384, 32768), 22_247_282_688),
    "smollm2-135m": _counted("SmolLM2 135M", (30, 576, 9, 3, 1536, 49152), 134_515_008, tied=True),
    "smollm2-360m": _counted("SmolLM2 360M", (32, 960, 15, 5, 2560, 49152), 361_821_120, tied=True),
    "smollm3-3b": _counted("SmolLM3 3B", (36, 2048, 16, 4, 11008, 128256), 3_075_098_624, tied=True),
    "phi4": _counted("Phi-4", (40, 5120, 40, 10, 17920, 100352), 14_659_507_200),
    "phi4-mini": _counted("Phi-4 Mini", (32, 3072, 24, 8, 8192, 200064), 3_836_021_760, tied=True),
    "falcon3-1b": _counted("Falcon3 1B", (18, 2048, 8, 4, 8192, 131072), 1_669_408_768, head_dim=256),
    "falcon3-3b": _counted("Falcon3 3B", (22, 3072, 12, 4, 9216, 131072), 3_227_655_168, head_dim=256),
    "falcon3-7b": _counted("Falcon3 7B", (28, 3072, 12, 4, 23040, 131072), 7_455_550_464, head_dim=256),
    "falcon3-10b": _counted("Falcon3 10B", (40, 3072, 12, 4, 23040, 131072), 10_305_653_760, head_dim=256),
    "granite3.1-2b": _counted("Granite 3.1 2B", (40, 2048, 32, 8, 8192, 49155), 2_533_531_648, tied=True),
    "granite3.1-8b": _counted("Granite 3.1 8B", (40, 4096, 32, 8, 12800, 49155), 8_170_848_256, tied=True),
    "internlm2.5-7b": _counted("InternLM2.5 7B", (32, 4096, 32, 8, 14336, 92544), 7_737_708_544),
    "internlm2.5-20b": _counted("InternLM2.5 20B", (48, 6144, 48, 8, 16384, 92544), 19_861_149_696),
    "exaone3.5-7.8b": _counted("EXAONE 3.5 7.8B", (32, 4096, 32, 8, 14336, 102400), 7_818_448_896),
    "exaone3.5-32b": _counted("EXAONE 3.5 32B", (64, 5120, 40, 8, 27392, 102400), 32_003_200_000),
    "yi1.5-6b": _counted("Yi 1.5 6B", (32, 4096, 32, 4, 11008, 64000), 6_061_035_520),
    "yi1.5-9b": _counted("Yi 1.5 9B", (48, 4096, 32, 4, 11008, 64000), 8_829_407_232),
    "deepseek-llm-7b": _counted("DeepSeek LLM 7B", (30, 4096, 32, 32, 11008, 102400), 6_910_365_696),
    "deepseek-coder-33b": _counted("DeepSeek Coder 33B", (62, 7168, 56, 8, 19200, 32256), 33_342_991_360),
    "seed-oss-36b": _counted("Seed-OSS 36B", (64, 5120, 80, 8, 27648, 155136), 36_151_104_512, qkv_bias=True, head_dim=128),
    "qwen3-coder-480b-a35b": _counted(
        "Qwen3 Coder 480B A35B",
        (62, 6144, 96, 8, 8192, 151936),
        480_154_875_392,
        qk_norm=True,
        head_dim=128,
        **_experts(160, 8, 2560),
    ),
    "glm4.5-air": _counted(
        "GLM-4.5 Air",
        (46, 4096, 96, 8, 10944, 151552),
        106_852_245_504,
        qkv_bias=True,
        head_dim=128,
        dense_layers=1,
        shared_ffn=1408,
        **_experts(128, 8, 1408),
    ),
    "dots.llm1": _counted(
        "dots.llm1",
        (62, 4096, 32, 32, 10944, 152064),
        142_774_373_888,
        qk_norm=True,
        head_dim=128,
        dense_layers=1,
        shared_ffn=2816,
        **_experts(128, 6, 1408),
    ),
    "llama4-scout": _counted(
        "Llama 4 Scout",
        (48, 5120, 40, 8, 16384, 202048),
        107_769_861_120,
        head_dim=128,
        shared_ffn=8192,
        **_experts(16, 1, 8192),
    ),
    "llama4-maverick": _counted(
        "Llama 4 Maverick",
        (48, 5120, 40, 8, 16384, 202048),
        0,
        head_dim=128,
        dense_layers=24,
        shared_ffn=8192,
        **_experts(128, 1, 8192),
    ),
    "bert-110m": _row(_bert("BERT 110M", 12, 768, 12), 512, "hf:BertConfig"),
    "distilbert": _row(_bert("DistilBERT", 6, 768, 12), 512, "hf:DistilBertConfig"),
    "bert-large": _row(_bert("BERT Large", 24, 1024, 16), 512, "hf:BertConfig, widened"),
    "roberta-110m": _row(_bert("RoBERTa Base", 12, 768, 12, 50265), 512, "hf:RobertaConfig"),
    "roberta-large": _row(_bert("RoBERTa Large", 24, 1024, 16, 50265), 512, "hf:RobertaConfig, widened"),
    "bert-4b": _row(_bert("BERT 4B", 48, 2560, 40), 512, "rows: NeMo-Framework-Launcher"),
    "bert-20b": _row(_bert("BERT 20B", 48, 6144, 96), 512, "rows: NeMo-Framework-Launcher"),
    "bert-100b": _row(_bert("BERT 100B", 96, 9216, 96), 512, BERT_100B),
    "t5-large": _hf("t5-large", 512, T5, 737_668_096),
    "t5-3b": _hf("t5-3b", 512, T5, 2_851_598_336),
    "t5-11b": _hf("t5-11b", 512, T5, 11_307_321_344),
    "vit-l-16": _hf("vit-l-16", 0, VIT, 304_326_632),
    "vit-h-14": _hf("vit-h-14", 0, VIT, 632_045_800),
}
"""By a normalised name (`parsim.model.catalogue.names.normalised`)."""


# A model by name: the row it stands for, its arguments, and its Model.
#
# `Llama-3.1-70B`, `llama3_70b` and `llama3-70b` are one name. Arguments of a transformer are the fields of its `Shape`
# (layers = 4) and the keys of `OWN`; `seq` is the length of a sample.


ALIASES: dict[str, str] = {
    "22b": "gpt-22b",
    "175b": "gpt-175b",
    "530b": "gpt-530b",
    "1t": "gpt-1t",
    "megatron-22b": "gpt-22b",
    "turing-530b": "gpt-530b",
    "mt-nlg-530b": "gpt-530b",
    "megatron-1t": "gpt-1t",
    "bloom": "bloom-176b",
    "opt-350": "opt-350m",
    "nemotron4-15b": "nemotron-15b",
    "nemotron4-340b": "nemotron-340b",
    "nemotron3-22b": "nemotron-22b",
    "nemotron3-8b": "nemotron-8b",
    "nemotron3-4b": "nemotron-4b",
    "llama2-34b": "codellama-34b",
    "code-llama-34b": "codellama-34b",
    "deepseek-v3-671b": "deepseek-v3",
    "deepseek-v2-236b": "deepseek-v2",
    "deepseek-v2-16b": "deepseek-v2-lite",
    "deepseek-r1": "deepseek-v3",
    "deepseek-r1-distill-llama-8b": "llama3-8b",
    "deepseek-r1-distill-llama-70b": "llama3-70b",
    "deepseek-r1-distill-qwen-7b": "qwen2-7b",
    "deepseek-r1-distill-qwen-14b": "qwen2-14b",
    "deepseek-r1-distill-qwen-32b": "qwen2-32b",
    "qwen2-coder-7b": "qwen2-7b",
    "qwen2-coder-32b": "qwen2-32b",
    "qwen2-math-7b": "qwen2-7b",
    "roberta": "roberta-110m",
    "distilbert-base": "distilbert",
    "llama-33b": "llama-30b",
    "smollm-135m": "smollm2-135m",
    "smollm-360m": "smollm2-360m",
    "smollm-1.7b": "smollm2-1.7b",
    "zephyr-7b-beta": "mistral-7b",
    "vit-large-patch16-224": "vit-l-16",
    "vit-huge-patch14-224": "vit-h-14",
    "mistral-nemo": "mistral-nemo-12b",
    "mistral-small-24b-2501": "mistral-small-24b",
    "phi-3-mini-4k": "phi3-mini",
    "phi-3-mini": "phi3-mini",
    "yi-6b": "yi1.5-6b",
    "yi-9b": "yi1.5-9b",
    "llama4-scout-17b-16e": "llama4-scout",
    "llama4-maverick-17b-128e": "llama4-maverick",
    "mistral-large": "mistral-large-123b",
    "internlm2-5-7b": "internlm2.5-7b",
    "internlm2-5-20b": "internlm2.5-20b",
    "phi-4": "phi4",
    "phi-4-mini": "phi4-mini",
    "devstral-small-2505": "mistral-small-24b",
    "tiny-llama-1.1b": "tinyllama-1.1b",
    "vicuna-7b": "llama2-7b",
    "vicuna-13b": "llama2-13b",
    "vit-l/16": "vit-l-16",
    "vit-h/14": "vit-h-14",
}
"""Other names of the same row."""

SEQ, KERNEL, SEQUENCE_PARALLEL, CASTS, SELECTIVE = "seq", "kernels", "sequence_parallel", "fp8_casts", "selective"
DOCUMENT, ATTENTION, EARLY_STOP, FUSED_PERMUTATION = "document_tokens", "attention", "early_stop", "fused_permutation"
MODULES_AGAIN, LOSS, LOSS_TOKENS = "recompute_modules", "loss", "loss_tokens"
OWN: dict[str, Any] = {
    SEQ: 0,
    DOCUMENT: 0,
    KERNEL: "fused",
    ATTENTION: "",
    EARLY_STOP: False,
    FUSED_PERMUTATION: "",
    SEQUENCE_PARALLEL: True,
    CASTS: False,
    SELECTIVE: False,
    MODULES_AGAIN: "",
    LOSS: "",
    LOSS_TOKENS: 0,
}
"""Arguments beside the sizes, with their defaults.

Tokens of a sample (left out: the row's); of a document, which attention does not leave (left out: the sample is one); a row
of `KERNELS`; attention in one kernel ("flash") or in several ("unfused"; left out: as the kernels have it); `early_stop` of
`Software`; norms divided along the sequence under tensor parallelism; inputs of products cast to 8 bits; the inside of
attention as a component of its own. `recompute_modules`: of `MODULES`, with spaces between, what plan.recompute = "selective"
runs again (left out: what torch's policies do). `loss`: a row of `LOSSES`. `loss_tokens`: of a sample, those that count (left
out: all)."""
UNFUSED_ATTENTION = "unfused"
MOST_TOKENS = 2**33
"""Of a sample, as of the numbers of any input."""
SIZES = {field.name: field.type for field in fields(Shape) if field.name != "name"}


SUFFIXES = r"q?lora|sft|base|instruct|chat|it|pt|hf|(un)?cased|deduped|intermediate-step.*|pretrain.*|v[01]\.\d|\d{4}"
"""Ends of names on Hugging Face that change no size, behind a dash."""


def normalised(name: str) -> str:
    """`Llama 3.1 70B` -> `llama3-70b`; `GPT-3 175B` -> `gpt3-175b`; `Qwen3_30B_a3B` -> `qwen3-30b-a3b`."""
    text = re.sub(r"^[\w-]+/(?=[a-z])", "", re.sub(r"\s*\(.*\)$", "", name.lower()))  # the organisation on Hugging Face
    text = re.sub(r"-+", "-", text.replace("_", "-").replace(" ", "-"))
    text = re.sub(r"^(meta-)?llama-?(\d)", r"llama\2", text)
    text = re.sub(r"^llama3\.[13]-(?=8b|70b|405b)", "llama3-", text)
    text = re.sub(r"^llama-?1?-?(?=7b|13b|30b|33b|65b)", "llama-", text)
    text = re.sub(r"^gpt-?3-?(?=\d)", "gpt3-", text)
    text = re.sub(r"^qwen-?2\.5-", "qwen2-", text)
    text = re.sub(r"^qwen-(?=\d)", "qwen", text)
    text = re.sub(r"^qwen(?:1\.5-|-)?(?=(?:1\.8|7|14|72)b)", "qwen-", text)
    text = re.sub(r"^gemma-?([23])-", r"gemma\1-", text)
    text = re.sub(r"^nemotron-?([34])-", r"nemotron\1-", text)
    text = re.sub(r"^deepseek-?v", "deepseek-v", text)
    text = re.sub(r"^bert-base", "bert-110m", text)
    text = re.sub(r"^(granite|yi|exaone|glm)-(?=\d\.\d)", r"\1", text)
    text = re.sub(rf"(-({SUFFIXES}))+$", "", text)
    return ALIASES.get(text, text)


def named(name: str) -> NamedModel | None:
    """The row of a name or of an alias; None: not in the table."""
    return NAMED.get(normalised(name))


def is_transformer(name: str) -> bool:
    """Whether a name is of a model that is written from its sizes, which plans and simulates but cannot be trained."""
    row = named(name)
    return row is not None and row.shape is not None


def known_names() -> list[str]:
    """Every name and alias, for near matches."""
    return [*NAMED, *ALIASES]


def described() -> dict[str, dict[str, Any]]:
    """Every name with its size: parameters (0: not counted), tokens of a sample, other names, and where the sizes are from."""
    rows: dict[str, dict[str, Any]] = {}
    for name, row in NAMED.items():
        shape = row.shape
        counted = row.parameters
        if shape is not None and not counted:
            counted = named_model(name, {}, granularity="block", weights="bfloat16").parameter_count
        rows[name] = {
            "parameters": counted,
            "layers": 0 if shape is None else shape.layers,
            "hidden": 0 if shape is None else shape.hidden,
            "tokens": row.seq,
            "other_names": [alias for alias, own in ALIASES.items() if own == name],
            "source": row.source,
        }
    return rows


def config_path(row: NamedModel) -> str:
    """The config of a row that transformers builds."""
    return str(files("parsim.model.catalogue").joinpath("configs", f"{row.config}.json"))


def shape_of(name: str, args: dict[str, Any]) -> Shape:
    """The sizes of a named transformer, with those that the arguments change.

    Raises:
        ModelError: an unknown argument, or sizes that do not go together.
    """
    row = NAMED[normalised(name)]
    assert row.shape is not None
    changed: dict[str, Any] = {}
    for key, value in args.items():
        if key in OWN:
            continue
        if key not in SIZES:
            raise ModelError(f"{name} has no argument {key!r}{near_matches(key, [*OWN, *SIZES])}")
        default = getattr(row.shape, key)
        if type(value) is not type(default):
            raise ModelError(f"argument {key} of {name} must be like {default!r}, got {value!r}")
        changed[key] = value
    shape = replace(row.shape, **changed)
    shape.check()
    return shape


def sequence_of(name: str, args: dict[str, Any]) -> int:
    """Tokens of a sample. Raises ModelError for a number that cannot be."""
    row = NAMED[normalised(name)]
    seq = args.get(SEQ, row.seq)
    if isinstance(seq, bool) or not isinstance(seq, int) or not 1 <= seq <= MOST_TOKENS:
        raise ModelError(f"argument seq of {name} must be a whole number >= 1 and <= {MOST_TOKENS}, got {seq!r}")
    return seq


def document_of(name: str, args: dict[str, Any]) -> int:
    """Tokens of a document; without the argument, those of a sample.

    Raises:
        ModelError: a number that does not divide the sample, or attention that computes the scores under a mask.
    """
    seq = sequence_of(name, args)
    if DOCUMENT not in args:
        return seq
    tokens = args[DOCUMENT]
    if isinstance(tokens, bool) or not isinstance(tokens, int) or tokens < 1:
        raise ModelError(f"argument {DOCUMENT} of {name} must be a whole number >= 1, got {tokens!r}")
    if seq % tokens:
        raise ModelError(
            f"argument {DOCUMENT} of {name} ({tokens}) must divide the tokens of a sample ({seq}); the nearest that do: "
            f"{nearest_divisors(seq, tokens)}"
        )
    if tokens < seq and not software_of(args).flash:
        raise ModelError(
            f"argument {DOCUMENT} of {name} changes nothing with kernels = {args.get(KERNEL, UNFUSED_ATTENTION)!r}: unfused "
            'attention computes masked scores too; drop it, or set kernels = "fused"'
        )
    return tokens


def check_own(name: str, args: dict[str, Any]) -> None:
    """Raise ModelError for an argument beside the sizes that is of the wrong kind."""
    for key in (SEQUENCE_PARALLEL, CASTS, SELECTIVE, EARLY_STOP, FUSED_PERMUTATION):
        if not isinstance(args.get(key, False), bool):
            raise ModelError(f"argument {key} of {name} must be true or false, got {args[key]!r}")
    modules, counted = args.get(MODULES_AGAIN, ""), args.get(LOSS_TOKENS, 0)
    if not isinstance(modules, str) or not set(modules.split()) <= set(MODULES):
        raise ModelError(
            f"argument {MODULES_AGAIN} of {name} names some of {' '.join(MODULES)}, with spaces between, got {modules!r}"
        )
    if args.get(LOSS, "") not in LOSSES:
        raise ModelError(f"argument {LOSS} of {name} must be {' or '.join(filter(None, LOSSES))}, got {args[LOSS]!r}")
    if isinstance(counted, bool) or not isinstance(counted, int) or not 0 <= counted <= sequence_of(name, args):
        raise ModelError(
            f"argument {LOSS_TOKENS} of {name} must be a whole number of the {sequence_of(name, args)} tokens of a sample, got "
            f"{counted!r}"
        )
    if args.get(ATTENTION, "") not in ("", "flash", UNFUSED_ATTENTION):
        raise ModelError(f'argument {ATTENTION} of {name} must be "flash" or "{UNFUSED_ATTENTION}", got {args[ATTENTION]!r}')
    if KERNEL in args:
        _ = KERNELS[str(args[KERNEL])]


def software_of(args: Mapping[str, Any]) -> Software:
    """The kernels that arguments beside the sizes choose. Raises ModelError for kernels that are unknown."""
    own = OWN | dict(args)
    row = KERNELS[str(own[KERNEL])]
    flash = row.flash if not own[ATTENTION] else own[ATTENTION] == "flash"
    return replace(
        row,
        flash=flash,
        casts=own[CASTS],
        selective=own[SELECTIVE],
        early_stop=own[EARLY_STOP] or row.early_stop,
        modules=tuple(own[MODULES_AGAIN].split()),
        **LOSSES[own[LOSS]],
        permutation_arrays=row.permutation_arrays
        if own[FUSED_PERMUTATION] == ""
        else (COMPILED.permutation_arrays if own[FUSED_PERMUTATION] else UNFUSED_PERMUTATION),
    )


def named_model(name: str, args: dict[str, Any], *, granularity: str, weights: str, tuning: Tuning | None = None) -> Model:
    """The Model of a named transformer, without torch.

    Args:
        granularity: "block" for one component per layer; else such as tensor parallelism can cut. weights: torch's name.
        tuning: what is trained of it; None: everything.

    Raises:
        ModelError: an unknown argument or target of adapters, or sizes that do not go together.
    """
    check_own(name, args)
    seq = sequence_of(name, args)
    own = OWN | args
    software = software_of(args)
    part = SamplePart(tokens=seq, context=document_of(name, args), loss_tokens=own[LOSS_TOKENS])
    cut = "layer" if granularity == "block" else "sequence" if own[SEQUENCE_PARALLEL] else "sublayer"
    model = tuned(recorded(shape_of(name, args), software, part, cut, weights, tuning), tuning)
    return replace(model, granularity=granularity)
