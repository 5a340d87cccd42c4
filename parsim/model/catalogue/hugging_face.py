"""Modules from a Hugging Face config.json alone: without network, with random weights.

The attention is transformers' default (sdpa where the model has it), the experts' grouped products, and the cache is off.
"""

from __future__ import annotations

import contextlib
import io
import logging
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache, lru_cache, wraps
from pathlib import Path
from typing import TYPE_CHECKING, Any

from parsim.errors import MissingDependencyError, ModelError, near_matches
from parsim.files import parse_json, read_text, reading
from parsim.model.inputs import ModelInput
from parsim.model.objective import CROSS_ENTROPY, OWN
from parsim.model.spec import MOST_LAYERS, ModelSpec

if TYPE_CHECKING:
    from torch import Tensor, nn


# What a Hugging Face architecture takes and trains by: default inputs and loss, by transformers' own lists of Auto classes.
#
# A kind lists the Auto classes whose models it describes. An architecture belongs to the first kind with one that names it.


DEFAULT_SEQ = 2048
"""Tokens per sample where nobody says and the model allows as many. Configs of today allow up to a million."""

_USUAL_SEQ = dict.fromkeys(("t5", "mt5", "umt5"), 512)
_LENGTHS = ("max_position_embeddings", "n_positions", "max_target_positions", "max_sequence_length", "seq_length")


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadKind:
    """One kind of model.
    `name`: for messages. `lists`: of transformers' MODEL_FOR_..._MAPPING_NAMES the middle part. `inputs`: (config, tokens per
    sample) -> what it takes. `loss`: a row of `parsim.model.objective`. `targets`: what these are, for a person."""

    name: str
    lists: tuple[str, ...]
    inputs: Callable[[Any, int], tuple[ModelInput, ...]]
    loss: str = CROSS_ENTROPY
    targets: str


def _ids(name: str, config: Any, seq: int) -> ModelInput:
    return ModelInput(name, (seq,), dtype="int64", high=int(_text(config).vocab_size))


def _tokens(config: Any, seq: int) -> tuple[ModelInput, ...]:
    return (_ids("input_ids", config, seq),)


def _image(config: Any, seq: int) -> tuple[ModelInput, ...]:
    config = getattr(config, "vision_config", None) or config
    size = getattr(config, "image_size", None) or 224
    height, width = (size, size) if isinstance(size, int) else size
    return (ModelInput("pixel_values", (int(getattr(config, "num_channels", 3)), int(height), int(width))),)


def _speech_and_text(config: Any, seq: int) -> tuple[ModelInput, ...]:
    bins, frames = getattr(config, "num_mel_bins", None), getattr(config, "max_source_positions", None)
    if bins is None or frames is None:
        raise ModelError(f"{config.model_type}: the shape of its speech input is unknown; give [model] inputs")
    return ModelInput("input_features", (int(bins), 2 * int(frames))), _ids("decoder_input_ids", config, seq)


NEXT_OF_DECODER = "the next token of every position of the decoder"
KINDS = (
    HeadKind(name="causal language model", lists=("CAUSAL_LM",), inputs=_tokens, targets="the next token of every position"),
    HeadKind(
        name="image and text to text",
        lists=("IMAGE_TEXT_TO_TEXT", "MULTIMODAL_LM"),
        inputs=_tokens,
        targets="the next token of every position of a text without images",
    ),
    HeadKind(name="masked language model", lists=("MASKED_LM",), inputs=_tokens, targets="a token for every position"),
    HeadKind(name="speech to text", lists=("SPEECH_SEQ_2_SEQ",), inputs=_speech_and_text, targets=NEXT_OF_DECODER),
    HeadKind(
        name="sequence to sequence",
        lists=("SEQ_TO_SEQ_CAUSAL_LM",),
        inputs=lambda config, seq: (*_tokens(config, seq), _ids("decoder_input_ids", config, seq)),
        targets=NEXT_OF_DECODER,
    ),
    HeadKind(
        name="text classification",
        lists=("SEQUENCE_CLASSIFICATION", "TOKEN_CLASSIFICATION"),
        inputs=_tokens,
        targets="classes",
    ),
    HeadKind(name="image classification", lists=("IMAGE_CLASSIFICATION",), inputs=_image, targets="classes"),
    HeadKind(
        name="image and text by contrast",
        lists=("ZERO_SHOT_IMAGE_CLASSIFICATION",),
        inputs=lambda config, seq: (*_tokens(config, seq), *_image(config, seq)),
        loss=OWN,
        targets="",
    ),
)


def kind_of(architecture: str) -> HeadKind | None:
    """The kind of an architecture such as LlamaForCausalLM; None where no list names it."""
    from transformers.models.auto import modeling_auto

    for kind in KINDS:
        for name in kind.lists:
            for names in getattr(modeling_auto, f"MODEL_FOR_{name}_MAPPING_NAMES", {}).values():
                if architecture in ((names,) if isinstance(names, str) else names):
                    return kind
    return None


def _text(config: Any) -> Any:
    """The part of a config that describes the text model."""
    inner = getattr(config, "text_config", None)
    return config if inner is None else inner


def longest(config: Any) -> int | None:
    """Tokens per sample that the positions of a model allow; None where nothing limits them."""
    text = _text(config)
    if text.model_type in ("t5", "mt5", "umt5"):  # relative positions: n_positions is what it was trained with
        return None
    return next((int(value) for name in _LENGTHS if isinstance(value := getattr(text, name, None), int) and value > 0), None)


def sequence_length(config: Any, given: int | None, where: str) -> int:
    """Tokens per sample: as given, or DEFAULT_SEQ where the model allows as many.
    Raises ModelError: more than the model has positions for."""
    most, kind = longest(config), _text(config).model_type
    if given is None:
        usual = _USUAL_SEQ.get(kind, DEFAULT_SEQ)
        return usual if most is None else min(usual, most)
    if most is not None and given > most:
        name = next(name for name in _LENGTHS if getattr(_text(config), name, None) == most)
        raise ModelError(f"{where}: seq {given} exceeds {name} {most} of the config; shorten it, or raise {name} in args")
    return given


# Experts of a mixture as grouped products over tokens sorted by expert, in every precision and on every device.
#
# transformers takes torch's grouped_mm for them, whose shapes torch knows for bfloat16 alone. Its own operator for other
# cases, `transformers::grouped_mm_fallback`, multiplies the same matrices one expert at a time. So every token is multiplied
# with the experts it chose, whichever they are: the work does not depend on how tokens are routed. What an uneven routing
# does to the time of a device that holds some of the experts is left out.


@contextlib.contextmanager
def _replaced(module: Any, name: str, function: Callable[..., Any]) -> Iterator[None]:
    """Inside, a module has another function of this name."""
    original = getattr(module, name)
    setattr(module, name, function)
    try:
        yield
    finally:
        setattr(module, name, original)


NAME = "parsim_grouped_mm"
"""Of the implementation, as `config._experts_implementation` has it."""


def implementation() -> str | None:
    """The name of the implementation, registered with transformers; None where transformers has no such table."""

    def grouped_experts(self: Any, *args: Any, **kwargs: Any) -> Any:
        with _replaced(moe, "_can_use_grouped_mm", lambda *_, **__: False):
            return moe.grouped_mm_experts_forward(self, *args, **kwargs)

    try:
        from transformers.integrations import moe

        moe.ALL_EXPERTS_FUNCTIONS.register(NAME, grouped_experts)
    except (ImportError, AttributeError):
        return None
    _set_backward()
    return NAME


@cache
def _set_backward() -> None:
    """Make the backward of the fallback one operator, where transformers walks over the experts in it (5.17 does).
    Fake tensors have no numbers of tokens to walk over."""
    import torch

    if not hasattr(torch.ops.transformers, "grouped_mm_fallback") or hasattr(
        torch.ops.transformers, "grouped_mm_fallback_backward"
    ):
        return
    define_backward()

    def setup(ctx: Any, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        ctx.save_for_backward(*inputs)

    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor, None]:
        return *torch.ops.parsim.grouped_mm_backward(*ctx.saved_tensors, gradient), None

    torch.library.register_autograd("transformers::grouped_mm_fallback", backward, setup_context=setup)


@cache
def define_backward() -> None:
    """`torch.ops.parsim.grouped_mm_backward`: gradients of tokens [s, k] sorted by expert and of weights [experts, k, n].
    `ends` has the number of tokens of the experts up to each."""
    import torch

    def backward(tokens: Tensor, weights: Tensor, ends: Tensor, gradient: Tensor) -> tuple[Tensor, Tensor]:
        of_tokens, of_weights = torch.zeros_like(tokens), torch.zeros_like(weights)
        start = 0
        for expert, end in enumerate(ends.tolist()):
            of_tokens[start:end] = gradient[start:end] @ weights[expert].T
            of_weights[expert] = tokens[start:end].T @ gradient[start:end]
            start = end
        return of_tokens, of_weights

    name = "parsim::grouped_mm_backward"
    schema = "(Tensor tokens, Tensor weights, Tensor ends, Tensor gradient) -> (Tensor, Tensor)"
    torch.library.custom_op(name, backward, mutates_args=(), schema=schema)
    torch.library.register_fake(
        name, lambda tokens, weights, ends, gradient: (torch.empty_like(tokens), torch.empty_like(weights))
    )


# The selective scan of Mamba (Jamba, Falcon Mamba, Zamba) as one operator, as the kernel of mamba_ssm is one.
#
# Without mamba_ssm transformers walks over the tokens in Python. A GPU trains with the kernel, so the operator is priced as the
# kernel is: one pass over its arrays, and its states are made again in the backward. It runs here by its definition.
#
# Source: Gu and Dao, "Mamba: Linear-Time Sequence Modeling with Selective State Spaces" (2023), equations 1 to 4, algorithm 2.


SCAN = "mamba_selective_scan"
"""Of transformers' modules that have such a scan."""
_OPERANDS = "Tensor x, Tensor dt, Tensor a, Tensor b, Tensor c, Tensor? d, Tensor? z, Tensor? bias"


def selective_scan(
    x: Tensor,
    dt: Tensor,
    a: Tensor,
    b: Tensor,
    c: Tensor,
    d: Tensor | None,
    z: Tensor | None,
    bias: Tensor | None,
    softplus: bool,
) -> Tensor:
    """h[t] = exp(dt[t] a) h[t-1] + dt[t] b[t] x[t], y[t] = c[t] h[t], then (y + d x) silu(z); in float32 at least.
    x, dt, z [batch, features, length]; a [features, states]; b, c [batch, states, length]; d, bias of dt [features]."""
    import torch
    from torch.nn import functional

    outer, wide = x.dtype, torch.promote_types(x.dtype, torch.float32)
    x, dt, a, b, c = (each.to(wide) for each in (x, dt, a, b, c))
    states = _states(x, _steps(dt, bias, softplus), a, b)
    out = torch.einsum("lbfs,bsl->bfl", states[1:], c)
    out = out if d is None else out + x * d.to(wide)[:, None]
    return (out if z is None else out * functional.silu(z.to(wide))).to(outer)


def _steps(dt: Tensor, bias: Tensor | None, softplus: bool) -> Tensor:
    from torch.nn.functional import softplus as rectified

    dt = dt if bias is None else dt + bias.to(dt.dtype)[:, None]
    return rectified(dt) if softplus else dt


def _states(x: Tensor, steps: Tensor, a: Tensor, b: Tensor) -> Tensor:
    """h of every token behind a first one of zeros: [length + 1, batch, features, states]."""
    import torch

    states = [x.new_zeros(*x.shape[:2], a.shape[1])]
    for token in range(x.shape[2]):
        step = steps[:, :, token, None]
        states.append(torch.exp(step * a) * states[-1] + step * x[:, :, token, None] * b[:, None, :, token])
    return torch.stack(states)


def scan_gradients(gradient: Tensor, operands: list[Any], softplus: bool) -> list[Tensor]:
    """Of every operand of `selective_scan` that is given. g[t], the gradient of h[t], follows from that of the token behind:
    g[t] = c[t] dy[t] + exp(dt[t+1] a) g[t+1]."""
    import torch
    from torch.nn import functional

    wide = torch.promote_types(gradient.dtype, torch.float32)
    widened: list[Any] = [None if each is None else each.to(wide) for each in operands]
    x, dt, a, b, c, d, z, bias = widened
    steps = _steps(dt, bias, softplus)
    states = _states(x, steps, a, b)
    of_y, of_z, of_d = gradient.to(wide), None, None
    if z is not None:
        made = torch.einsum("lbfs,bsl->bfl", states[1:], c) + (0 if d is None else x * d[:, None])
        share = torch.sigmoid(z)
        of_z = of_y * made * share * (1 + z * (1 - share))
        of_y = of_y * functional.silu(z)
    if d is not None:
        of_d = (of_y * x).sum((0, 2))
    of_states, gradients = torch.zeros_like(states[0]), []
    for token in reversed(range(x.shape[2])):
        of_states = of_states + of_y[:, :, token, None] * c[:, None, :, token]
        gradients.append(of_states)
        of_states = of_states * torch.exp(steps[:, :, token, None] * a)
    of_h = torch.stack(gradients[::-1])
    grown = of_h * states[:-1] * torch.exp(torch.einsum("bfl,fs->lbfs", steps, a))
    fed = torch.einsum("lbfs,bsl->bfl", of_h, b)
    of_steps = torch.einsum("lbfs,fs->bfl", grown, a) + fed * x
    if softplus:
        of_steps = of_steps * torch.sigmoid(dt if bias is None else dt + bias[:, None])
    of_all = (
        fed * steps + (0 if d is None else of_y * d[:, None]),
        of_steps,
        torch.einsum("lbfs,bfl->fs", grown, steps),
        torch.einsum("lbfs,bfl->bsl", of_h, steps * x),
        torch.einsum("lbfs,bfl->bsl", states[1:], of_y),
        of_d,
        of_z,
        of_steps.sum((0, 2)),
    )
    pairs = zip(of_all, operands, strict=True)
    return [made.to(operand.dtype) for made, operand in pairs if made is not None and operand is not None]


@cache
def define_scan() -> None:
    """`torch.ops.parsim.selective_scan`, and the gradients of its operands by another operator."""
    import torch

    library, operators = torch.library, torch.ops.parsim
    name = "parsim::selective_scan"
    library.custom_op(name, selective_scan, mutates_args=(), schema=f"({_OPERANDS}, bool softplus) -> Tensor")
    library.register_fake(name, lambda x, *_: torch.empty_like(x, memory_format=torch.contiguous_format))
    schema = "(Tensor gradient, Tensor?[] operands, bool softplus) -> Tensor[]"
    library.custom_op(f"{name}_backward", scan_gradients, mutates_args=(), schema=schema)
    library.register_fake(
        f"{name}_backward", lambda gradient, operands, _: [torch.empty_like(each) for each in operands if each is not None]
    )

    def setup(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        ctx.save_for_backward(*inputs[:-1])
        ctx.softplus = inputs[-1]

    def gradients(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        made = iter(operators.selective_scan_backward(gradient, list(ctx.saved_tensors), ctx.softplus))
        return *(None if each is None else next(made) for each in ctx.saved_tensors), None

    library.register_autograd(name, gradients, setup_context=setup)


def has_scan(kind: type) -> bool:
    """Whether modules of a class walk over the tokens in Python."""
    return hasattr(sys.modules[kind.__module__], SCAN)


@lru_cache(maxsize=8)
def with_scan(kind: Any) -> Any:
    """A class of the same name and parameters whose forward takes its selective scans as one operator each."""
    define_scan()
    module = sys.modules[kind.__module__]

    def scan(
        x: Tensor,
        dt: Tensor,
        a: Tensor,
        b: Tensor,
        c: Tensor,
        D: Tensor | None = None,
        z: Tensor | None = None,
        delta_bias: Tensor | None = None,
        delta_softplus: bool = False,
        **_: Any,
    ) -> Tensor:
        import torch

        made: Tensor = torch.ops.parsim.selective_scan(x, dt, a, b, c, D, z, delta_bias, delta_softplus)
        return made

    @wraps(kind.forward)
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        with _replaced(module, SCAN, scan):
            return kind.forward(self, *args, **kwargs)

    return type(kind.__name__, (kind,), {"forward": forward, "__module__": kind.__module__})


# CLIPModel as it trains: its forward returns the contrastive loss, taken in an order that keeps pairs of samples in the loss.
#
# transformers' own forward multiplies texts by images before it scales the product. Here images are scaled first. Parameters,
# their names and the loss are the same, up to rounding.


CONTRASTIVE = ("CLIPModel",)
"""Architectures that can be built so."""


@lru_cache(maxsize=8)
def with_its_loss(kind: Any) -> Any:
    """A class of the same name and parameters whose forward returns {"loss", "image_embeds", "text_embeds"}.
    The loss is the mean of two cross-entropies, as transformers' own `image_text_contrastive_loss` takes it. It is a scalar.
    `kind`: a class of transformers among CONTRASTIVE."""
    from torch import arange
    from torch.nn.functional import cross_entropy, normalize

    def forward(self: Any, input_ids: Any, pixel_values: Any) -> dict[str, Any]:
        images = normalize(self.get_image_features(pixel_values).pooler_output) * self.logit_scale.exp()
        texts = normalize(self.get_text_features(input_ids).pooler_output)
        scores = texts @ images.t()
        pairs = arange(len(scores), device=scores.device)
        loss = (cross_entropy(scores, pairs) + cross_entropy(scores.t(), pairs)) / 2
        return {"loss": loss, "image_embeds": images, "text_embeds": texts}

    return type(kind.__name__, (kind,), {"forward": forward, "__module__": kind.__module__})


SEQ = "seq"
"""The argument that is not of the config: tokens per sample."""

_COUNTS = frozenset(
    """
    hidden_size d_model n_embd intermediate_size n_inner d_ff d_kv head_dim num_hidden_layers n_layer num_layers
    encoder_layers decoder_layers num_decoder_layers num_attention_heads n_head num_heads encoder_attention_heads
    decoder_attention_heads num_key_value_heads vocab_size max_position_embeddings n_positions image_size patch_size
    num_channels num_local_experts num_experts num_experts_per_tok state_size moe_intermediate_size
    """.split()  # noqa: SIM905
)


_LAYERS = frozenset(name for name in _COUNTS if name.endswith("layers") or name == "n_layer")

_ABOUT_THE_FILE = frozenset(
    """
    architectures auto_map model_type torch_dtype dtype transformers_version use_cache bos_token_id eos_token_id pad_token_id
    decoder_start_token_id sep_token_id pretraining_tp initializer_range id2label label2id finetuning_task
    task_specific_params gradient_checkpointing quantization_config tie_word_embeddings rope_theta rope_scaling num_labels
    problem_type is_decoder is_encoder_decoder output_attentions output_hidden_states return_dict torchscript
    """.split()  # noqa: SIM905
)
"""Keys of any config.json that change neither the time nor the memory of a step, or are read elsewhere here."""


def read_config(spec: ModelSpec) -> dict[str, Any]:
    """The document of a config.json, with the arguments of the spec in place of its own values.
    Raises ModelError: no file, no JSON, no model_type or architectures, or sizes that cannot be."""
    with reading(f"{spec.name} is not a Hugging Face config that can be built", ModelError, "correct its values"):
        return _read(Path(spec.name), spec)


def _read(path: Path, spec: ModelSpec) -> dict[str, Any]:
    if not path.is_file():
        raise ModelError(f"no Hugging Face config at {path}; give the path of a config.json")
    try:
        document = _with_floats(parse_json(read_text(path), allow_nan=True))
    except ValueError as error:
        raise ModelError(f"{path} is not JSON: {error}; give a Hugging Face config.json") from error
    if not isinstance(document, dict):
        raise ModelError(f"{path} is not a Hugging Face config with model_type and architectures: it holds no table")
    args = {key: value for key, value in spec.args if key != SEQ}
    if added := [key for key in args if key not in document]:
        keys = _class_keys(path, document)
        for name in added if keys else ():
            if name not in keys:
                raise ModelError(f"{path} has no argument {name!r}{near_matches(name, [*keys, SEQ])}")
    document = {**document, **args}
    names = document.get("architectures")
    if not isinstance(document.get("model_type"), str) or not isinstance(names, list) or not names:
        missing = "architectures" if isinstance(document.get("model_type"), str) else "model_type and architectures"
        raise ModelError(
            f"{path} is not a Hugging Face config with model_type and architectures: it lacks {missing}; add for example "
            f'"model_type": "llama", "architectures": ["LlamaForCausalLM"]'
        )
    _check_sizes(path, document)
    return document


def _with_floats(value: Any) -> Any:
    """A document in which transformers 5 has written infinity as {"__float__": "Infinity"}, which JSON itself lacks."""
    if isinstance(value, dict):
        if list(value) == ["__float__"]:
            return float(value["__float__"])
        return {key: _with_floats(item) for key, item in value.items()}
    return [_with_floats(item) for item in value] if isinstance(value, list) else value


def _class_keys(path: Path, document: Mapping[str, Any]) -> list[str]:
    """Keys that the class of a config has; none where transformers has no such class."""
    try:
        default = _transformers(path).AutoConfig.for_model(str(document.get("model_type")))
    except (ValueError, KeyError):
        return []
    return [*default.to_dict(), *type(default).attribute_map]


def _check_sizes(path: Path, document: dict[str, Any]) -> None:
    for name in _COUNTS:
        value = document.get(name)
        numbers = value if isinstance(value, list) else [value]
        for number in numbers:
            if number is not None and (isinstance(number, bool) or not isinstance(number, int) or number < 1):
                raise ModelError(f"{path}: {name} must be a whole number >= 1, got {value!r}")
            if number is not None and name in _LAYERS and number > MOST_LAYERS:
                raise ModelError(f"{path}: {name} must be <= {MOST_LAYERS}, got {number}")
    hidden = next((document[name] for name in ("hidden_size", "n_embd") if document.get(name)), None)
    heads = next((document[name] for name in ("num_attention_heads", "n_head") if document.get(name)), None)
    if hidden and heads and not document.get("head_dim") and hidden % heads:
        raise ModelError(f"{path}: the heads ({heads}) must divide the hidden size ({hidden}); change one of them")
    shared = document.get("num_key_value_heads")
    if shared and heads and heads % shared:
        raise ModelError(f"{path}: num_key_value_heads ({shared}) must divide the heads ({heads}); change one of them")
    experts = document.get("num_local_experts") or document.get("num_experts")
    chosen = document.get("num_experts_per_tok")
    if experts and chosen and chosen > experts:
        raise ModelError(f"{path}: num_experts_per_tok ({chosen}) exceeds the number of experts ({experts})")
    size, patch = document.get("image_size"), document.get("patch_size")
    if isinstance(size, int) and isinstance(patch, int) and size < patch:
        raise ModelError(f"{path}: patch_size ({patch}) exceeds image_size ({size})")


def _transformers(path: Path) -> Any:
    try:
        import transformers
    except ImportError as error:
        raise MissingDependencyError(f"transformers is needed to build {path}; install parsim[hf]") from error
    return transformers


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Without transformers' notes on kernels that are not installed."""
    logger = logging.getLogger("transformers")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        with contextlib.redirect_stderr(io.StringIO()):
            yield
    finally:
        logger.setLevel(level)


def module_from_config(spec: ModelSpec) -> nn.Module:
    """From the config alone, without network; randomly initialised.
    Raises ModelError: what `read_config` raises, an unknown model_type or architecture, or a config that its class refuses.
    MissingDependencyError: transformers is not installed."""
    document = read_config(spec)
    path, architecture = spec.name, str(document["architectures"][0])
    transformers = _transformers(Path(path))
    is_remote = document.get("auto_map") and document["model_type"] not in transformers.CONFIG_MAPPING
    stands_for = getattr(transformers, architecture, None) if is_remote and architecture.isidentifier() else None
    try:
        if stands_for is not None:  # a model_type of remote code, over an architecture that transformers has
            document = {**document, "model_type": stands_for.config_class.model_type}
        config = transformers.AutoConfig.for_model(**document)
    except Exception as error:
        if isinstance(error, ValueError | KeyError) and document["model_type"] not in transformers.CONFIG_MAPPING:
            raise ModelError(
                f"{path}: transformers {transformers.__version__} has no model_type {document['model_type']!r}; correct it, or "
                "install a transformers that has it"
            ) from error
        raise ModelError(f"{path}: transformers refuses the config: {_one_line(error)}") from error
    kind: Any = getattr(transformers, architecture, None) if architecture.isidentifier() else None
    if not isinstance(kind, type) or not hasattr(kind, "config_class") or not hasattr(kind, "_from_config"):
        raise ModelError(
            f"{path}: architecture {architecture!r} is not in transformers {transformers.__version__}; give the name of one of "
            "its models, for example LlamaForCausalLM"
        )
    if not isinstance(config, kind.config_class):
        raise ModelError(
            f"{path}: {architecture} is not an architecture of model_type {document['model_type']!r}, but of "
            f"{kind.config_class.model_type!r}; correct one of them"
        )
    if architecture in CONTRASTIVE and spec.loss in (None, OWN):
        kind = with_its_loss(kind)
    if has_scan(kind):
        kind = with_scan(kind)
    parts: tuple[Any, ...] = (config, getattr(config, "text_config", None))
    for part in parts:
        if hasattr(part, "use_cache"):
            part.use_cache = False
    if hasattr(getattr(config, "text_config", config), "num_experts_per_tok") and (experts := implementation()):
        config._experts_implementation = experts
    try:
        with _quiet():
            module: nn.Module = kind._from_config(config)
    except RuntimeError:
        raise  # without memory for weights: it is built again, with them
    except Exception as error:
        raise ModelError(f"{path}: {architecture} cannot be built: {_one_line(error)}; correct the sizes") from error
    return module


def _one_line(error: Exception) -> str:
    text = " ".join(str(error).split()) or type(error).__name__
    return f"{type(error).__name__}: {text[:300]}"


def default_inputs(spec: ModelSpec, module: nn.Module) -> tuple[ModelInput, ...]:
    """What a model takes where [model] inputs does not say.
    `spec`: of a config; `seq` in its arguments, or an input_shape of one size, is the tokens per sample. `module`: built of it.
    Raises ModelError: more tokens than the model has positions for, or a shape that does not suit its input."""
    config: Any = module.config
    kind = _kind(spec, module)
    shape, seq = spec.input_shape, dict(spec.args).get(SEQ)
    if seq is not None and (isinstance(seq, bool) or not isinstance(seq, int) or seq < 1):
        raise ModelError(f"{spec.name}: seq must be a whole number >= 1, got {seq!r}")
    if shape is not None and len(shape) == 1:
        if seq is not None and seq != shape[0]:
            raise ModelError(f"{spec.name}: seq is {seq} and input_shape {list(shape)}; give one of them")
        seq = shape[0]
    inputs = kind.inputs(config, 1)
    if any(each.is_integer for each in inputs):
        inputs = kind.inputs(config, sequence_length(config, seq, spec.name))
    if shape is None or shape == inputs[0].shape:
        return inputs
    if len(inputs) > 1 or len(shape) != len(inputs[0].shape):
        listing = ", ".join(f"{each.name} {list(each.shape)}" for each in inputs)
        raise ModelError(f"{spec.name} takes {listing}, got input_shape {list(shape)}; give seq in args, or [model] inputs")
    return (ModelInput(inputs[0].name, shape),) if not inputs[0].is_integer else inputs


def default_loss(spec: ModelSpec, module: nn.Module) -> str:
    """The loss that the architecture trains by where [model] loss does not say.
    Raises ModelError: its own loss compares samples in a way that is not known."""
    kind, name = _kind(spec, module), type(module).__name__
    if kind.loss == OWN and name not in CONTRASTIVE:
        raise ModelError(
            f"{name} trains by comparing all samples of a batch with one another, which is not a sum over samples. Of such "
            f"models only the loss of {', '.join(CONTRASTIVE)} is known. Plan one tower with inputs and a loss of your own, "
            'or give a module that returns its loss (loss = "own")'
        )
    labels = getattr(module.config, "num_labels", None)
    if kind.name == "text classification" and labels == 1:
        return "mse"
    return kind.loss


def _kind(spec: ModelSpec, module: nn.Module) -> HeadKind:
    kind = kind_of(type(module).__name__)
    if kind is None:
        kinds = ", ".join(kind.name for kind in KINDS)
        raise ModelError(
            f"{spec.name}: what {type(module).__name__} takes and trains by is unknown; give [model] inputs and loss, or an "
            f"architecture of one of these kinds: {kinds}"
        )
    return kind


def assumptions(spec: ModelSpec, module: nn.Module) -> str:
    """What was chosen for a config and the module built of it, in a few words for the source of its Model."""
    config: Any = module.config
    attention = getattr(config, "_attn_implementation", None)
    chosen = [f"{attention} attention", "no cache"] if attention else ["no cache"]
    if getattr(config, "_experts_implementation", None) == NAME:
        chosen.append("experts as grouped products, whatever the routing")
    takes_tokens = spec.inputs is None and any(entry.is_integer for entry in default_inputs(spec, module))
    if takes_tokens and spec.input_shape is None and SEQ not in dict(spec.args):
        chosen.append("length assumed (give seq)")
    kind = kind_of(type(module).__name__)
    if spec.loss is None and kind is not None and kind.targets:
        chosen.append(f"targets: {kind.targets}")
    return "; ".join(chosen)


def left_out(spec: ModelSpec, module: nn.Module) -> tuple[str, ...]:
    """What a config asks for and a plan of its training does not follow, for the warnings of every answer."""
    path, document = Path(spec.name), read_config(spec)
    notes = []
    if has_scan(type(module)):
        notes.append(
            "its selective scan is priced as the one kernel of mamba_ssm; token by token, as here, it takes far longer"
        )
    if document.get("quantization_config"):
        notes.append("quantization_config is left out: weights are as training.precision says, and all of them train")
    if (dtype := str(document.get("dtype") or document.get("torch_dtype"))) in ("bfloat16", "float16"):
        notes.append(f"torch_dtype = {dtype} is left out: weights are as training.precision says")
    # a config may have code of its own beside it (auto_map), whose keys nobody knows
    if not document.get("auto_map") and (keys := _class_keys(path, document)):
        known = {*keys, *_ABOUT_THE_FILE, *_COUNTS}
        unknown = [key for key, value in document.items() if value is not None and key not in known and key[:1] != "_"]
        if unknown:
            names = ", ".join(sorted(unknown))
            notes.append(f"keys of {path.name} that its class does not list, and which may matter: {names}")
    return tuple(notes)
