"""Step seconds in the unit that a source quotes, with FLOP counted as the source counts them."""

from __future__ import annotations

import re

from experiments.published.question import Asked


def parameters_used(asked: Asked) -> float:
    """Weights that a token's products use, embedding left out and output matrix counted."""
    shape = asked.transformer
    width = shape.dim
    attention = shape.hidden * width * (shape.heads + 2 * shape.keys) + shape.heads * width * shape.hidden
    if shape.key_rank:
        attention = (
            shape.hidden * (shape.query_rank + shape.key_rank + shape.rope_dim)
            + shape.query_rank * shape.heads * (width + shape.rope_dim)
            + shape.key_rank * 2 * shape.heads * width
            + shape.heads * width * shape.hidden
        )
    arms = 3 if shape.gated else 2
    dense = arms * shape.hidden * shape.inner
    mixture = arms * shape.hidden * (shape.active * shape.expert_ffn + shape.shared_ffn) + shape.hidden * shape.experts
    layers, plain = shape.layers, shape.dense_layers if shape.experts else shape.layers
    return layers * attention + plain * dense + (layers - plain) * mixture + shape.hidden * shape.vocab


def model_flop(asked: Asked, *, causal: bool) -> float:
    """Of a step, forward and backward once: 6 per weight and token, and attention's scores (half of them where causal)."""
    shape, tokens = asked.transformer, asked.batch * asked.seq
    scores = 12 * shape.layers * shape.heads * (shape.dim + shape.rope_dim / 2) * asked.seq
    return tokens * (6 * parameters_used(asked) + scores * (0.5 if causal else 1.0))


def hardware_flop(asked: Asked) -> float:
    """Megatron's count: the forward of recomputed layers twice (Narayanan et al. 2021, equation 3, of full recomputation)."""
    shape, tokens = asked.transformer, asked.batch * asked.seq
    head = 6 * shape.hidden * shape.vocab * tokens
    layers = model_flop(asked, causal=False) - head
    return head + layers * (1 + {"full": 1 / 3, "half": 1 / 6}.get(asked.recompute, 0.0))


def selective_flop(asked: Asked) -> float:
    """As Korthikanti et al. (2022) count a step with selective recomputation: 72 B L s h^2 (1 + s / 3h + V / 12 L h).

    That is the scores' forward and backward once more, where the step computes their forward once more. Their HFU and MFU
    say so: 43.7 and 41.5% of 22B are 1.053 apart, and s / 3h against s / 6h is 1.052.
    """
    shape, tokens = asked.transformer, asked.batch * asked.seq
    return model_flop(asked, causal=False) + 12 * shape.layers * shape.heads * shape.dim * asked.seq * tokens


_EACH = r"(?:$| ?(?:/|per) ?(?:steps?|iterations?|iters?|it|batch|update)\b| ?\()"
_A_SECOND = r" ?(?:/|per) ?s(?:ec(?:ond)?s?)?\b"
SECONDS = re.compile(rf"(?:s|secs?|seconds?){_EACH}")
MILLISECONDS = re.compile(rf"(?:ms|msecs?|milliseconds?){_EACH}")
STEPS = re.compile(rf"(?:steps?|iterations?|iters?|it){_A_SECOND}")
SAMPLES = re.compile(rf"(?:samples?|images?|imgs?|sequences?|seqs?|sentences?|examples?){_A_SECOND}")
TOKENS = re.compile(rf"(?:tokens?|toks?){_A_SECOND}")
FLOP = re.compile(r"(?:model |hardware |achieved )?([tp])flops?\b")
UTILISATION = re.compile(r"mfu|hfu|utili[sz]ation|of peak")
ONE = re.compile(r"gpu|device|accelerator|chip\b")
WHOLE = re.compile(r"total|aggregate|all gpus|cluster")


def unit_of(asked: Asked) -> str:
    """The unit in small letters, without spaces around its slashes."""
    return re.sub(r"\s*/\s*", "/", asked.row.unit.lower().strip())


def in_unit(asked: Asked, step_s: float) -> float:
    """Step seconds in the row's unit. Rates are of all GPUs unless they say of one, TFLOP/s of one unless they say of all; MFU
    and HFU are shares of the peak in the row's precision, as in llm-foundry's tables of FP8. Raises ValueError: the unit is not
    known."""
    unit = unit_of(asked)
    per_gpu = bool(ONE.search(unit)) and not WHOLE.search(unit)
    each = asked.gpus if per_gpu else 1
    if re.search(r"(?:/|per )(?:node|host)", unit):
        raise ValueError(f"unit {asked.row.unit!r} is not known")
    if MILLISECONDS.match(unit):
        return step_s * 1e3
    if SECONDS.match(unit):
        return step_s
    if STEPS.match(unit):
        return 1 / step_s
    if SAMPLES.match(unit):
        return asked.batch / step_s / each
    if TOKENS.match(unit):
        return asked.batch * asked.seq / step_s / each
    if UTILISATION.search(unit):
        share = _flop(asked, unit) / step_s / asked.gpus / asked.peak_flop_per_s
        return 100 * share if "percent" in unit or "%" in unit else share
    if found := FLOP.match(unit):
        whole = WHOLE.search(unit) or (found[1] == "p" and not per_gpu)
        return _flop(asked, unit) / step_s / (1 if whole else asked.gpus) / (1e15 if found[1] == "p" else 1e12)
    raise ValueError(f"unit {asked.row.unit!r} is not known")


def _flop(asked: Asked, unit: str) -> float:
    """Of a step, as the source counts them.

    NeMo counted attention in full until its nemo/utils/flops_formulas.py had a causal_self_attn; Megatron-Bridge halves it. So
    711 TFLOP/s are 12,273 tokens/s of Llama 3 8B in its table of 24.07, where half of attention would make them 632.
    Megatron-DeepSpeed, GPT-NeoX and Megatron-LM up to 2022 print what recomputation makes, too (checkpoint_activations_factor).
    """
    name, framework = asked.row.id, asked.framework
    prints_hardware = framework.name == "megatron-deepspeed" or (framework.name == "megatron" and 0 < framework.until < 2023)
    stated = "model" in unit or "mfu" in unit
    if "hardware" in unit or "hfu" in unit or (prints_hardware and not stated):
        return selective_flop(asked) if asked.recompute == "selective" else hardware_flop(asked)
    return model_flop(asked, causal=name.startswith(("nemo-bridge", "llama3", "titan")))


def larger_is_faster(asked: Asked) -> bool:
    """Whether the unit is a rate."""
    unit = unit_of(asked)
    return not (MILLISECONDS.match(unit) or SECONDS.match(unit))


STATED_FLOP = re.compile(
    r"(?<!peak )\bTFLOP/?s(?:/GPU)? +(\d+(?:\.\d+)?)|(?<!peak )(?<!peak of )\b(\d+(?:\.\d+)?) TFLOP", re.IGNORECASE
)
"""In notes: `model TFLOP/s/GPU 1635`, `reported 163 TFLOPs/GPU`, `188 TFLOP/s`; not the peak of the GPU."""
REACHED = 0.9
"""Of a GPU's peak that products of the best shapes come to; whole models come to three quarters of it at most."""
BEYOND_PEAK = "more than a GPU reaches"
COUNTED_ALIKE = 0.1
"""By which two counts of one step's FLOP may differ."""


def beyond_peak(asked: Asked) -> str:
    """That a value needs more FLOP/s than the GPU reaches, if so. Causal attention counts half, a frozen weight 4 of 6."""
    value, unit = asked.row.value, unit_of(asked)
    if not value or asked.shape is None or UTILISATION.search(unit) or FLOP.match(unit):
        return ""
    step_s = in_unit(asked, 1.0) / value if larger_is_faster(asked) else value / in_unit(asked, 1.0)
    frozen = any(not parameter.trainable for component in asked.model.components for parameter in component.parameters)
    passes = 3 - frozen + (asked.recompute == "full")
    made = passes / 3 * model_flop(asked, causal=asked.shape.causal) / step_s / asked.gpus
    if made <= REACHED * asked.peak_flop_per_s:
        return ""
    peak = f"whose peak is {asked.peak_flop_per_s / 1e12:.0f}"
    return f"its {value:g} {asked.row.unit} need {made / 1e12:.0f} TFLOP/s, {BEYOND_PEAK} {peak}"


def contradiction(asked: Asked) -> str:
    """The TFLOP/s per GPU that the row's notes state, where its own tokens or samples per second make another number.

    Its value stays what is compared with a prediction. FLOP may be counted with the second forward of recomputation or without,
    and attention's as if causal or not.
    """
    unit, value, stated = unit_of(asked), asked.row.value, STATED_FLOP.search(asked.row.notes)
    if not value or stated is None or asked.shape is None or not (TOKENS.match(unit) or SAMPLES.match(unit)):
        return ""
    step_s = in_unit(asked, 1.0) / value
    told = float(stated[1] or stated[2])
    again = selective_flop(asked) if asked.recompute == "selective" else hardware_flop(asked)
    counts = [model_flop(asked, causal=True), model_flop(asked, causal=False), again]
    made = [flop / step_s / asked.gpus / 1e12 for flop in counts]
    if min(made) / (1 + COUNTED_ALIKE) <= told <= max(made) * (1 + COUNTED_ALIKE):
        return ""
    return (
        f"the notes state {told:g} TFLOP/s per GPU, and {value:g} {asked.row.unit} of this shape are {min(made):.0f} to "
        f"{max(made):.0f}: the {asked.row.unit} are taken"
    )
