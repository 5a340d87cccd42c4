"""Which parameters a training updates: all of them, the head alone, or low-rank adapters beside frozen weights (LoRA, QLoRA).

An adapter of a product y = W x adds (alpha / r) B A x, with A [r, inputs] and B [outputs, r]. W stays as it is, in the width of
the precision or in fewer bits. Then the backward computes the gradient of x alone and keeps x for A only. Weights in 4 or 8
bits are unpacked into 16 before each product, in both directions.

Sources: Hu et al. 2021, equation 3; Dettmers et al. 2023, sections 2 and 3; huggingface/peft src/peft/tuners/lora/layer.py;
bitsandbytes/autograd/_functions.py, MatMul4Bit.

Leaves out: variants (DoRA, rsLoRA), adapters of embeddings and convolutions, and the products in 8 bits of LLM.int8().
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, StrictBool, model_validator
from pydantic_core import PydanticCustomError

from parsim.errors import ConfigError, ModelError, near_matches
from parsim.hardware.devices import DeviceType
from parsim.hardware.records import ConfigSection, Count, Name
from parsim.model.component import DEQUANTISE, FULL_BYTES, HALF_BYTES, NOT_LOW, Component, DividedSize, Operator, OperatorShard
from parsim.model.model import Model
from parsim.units import format_count

TuningMethod = Literal["full", "head", "lora", "qlora"]
WeightStorage = Literal["nf4", "int8"]

ALL = "all"
ATTENTION, MLP = ("q", "k", "v", "o"), ("gate", "up", "down")
HEAD = "head"
GROUPS = {"attention": ATTENTION, "mlp": MLP, **dict.fromkeys((ALL, "all-linear"), (*ATTENTION, *MLP))}
"""Words for several products of a transformer by name; of a module they are found by its path (`_is_in`)."""
PARTS: Mapping[str, str] = {
    **{part: part for part in (*ATTENTION, *MLP, HEAD, "qkv", "gate_up")},
    **{f"{part}_proj": part for part in (*ATTENTION, *MLP)},
    "output_proj": "o",
    "w1": "gate",
    "w2": "down",
    "w3": "up",
    "lm_head": HEAD,
    "output": HEAD,
    "linear_qkv": "qkv",
    "linear_proj": "o",
    "linear_fc1": "gate_up",
    "linear_fc2": "down",
    "query_key_value": "qkv",
    "dense_h_to_4h": "gate_up",
    "dense_4h_to_h": "down",
    "c_attn": "qkv",
    "c_fc": "gate_up",
}
"""Names that peft, torchtune and Megatron have for products; those that are fused (also of Falcon, BLOOM, GPT-NeoX and GPT-2)
have one adapter for all of them."""


def _parsed(value: Any) -> Any:
    """`lora:r=16,targets=attention+mlp` as a table; a table as it is."""
    if not isinstance(value, str):
        return value
    method, _, rest = value.partition(":")
    table: dict[str, Any] = {"method": method.strip()}
    for pair in filter(None, (part.strip() for part in rest.split(","))):
        key, equals, text = (part.strip() for part in pair.partition("="))
        if not equals or not text:
            raise _rule(f"{value!r} has {pair!r}, which is no key=value; write lora:r=16,targets=attention+mlp")
        table[key] = _scalar(text) if key != "targets" else text
    return table


def _scalar(text: str) -> bool | int | float | str:
    if text in ("true", "false"):
        return text == "true"
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text


def _rule(text: str) -> PydanticCustomError:
    return PydanticCustomError("described", "{rule}", {"rule": text})


class Tuning(ConfigSection):
    """[training.tune]: what is trained of a model that was trained before."""

    method: TuningMethod
    """"full": every parameter; "head": the last layer alone; "lora": adapters; "qlora": adapters beside weights in nf4."""
    r: Count | None = None
    """The rank of adapters; left out: 16."""
    targets: Annotated[
        tuple[Name, ...] | None, BeforeValidator(lambda value: value.split("+") if isinstance(value, str) else value)
    ] = None
    """Products that have adapters: "attention", "mlp", "all" (left out: every linear layer but the head), or names as peft has
    them ("q_proj"), also one text with + between."""
    alpha: Annotated[float, Field(gt=0, allow_inf_nan=False)] | None = None
    """Adapters count alpha / r times; left out: alpha = 2 r."""
    dropout: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """Of the inputs of adapters."""
    base: WeightStorage | None = None
    """In which frozen linear layers are kept: "nf4" (4 bits), "int8"; left out: nf4 of qlora, else as the precision has it."""
    double_quantisation: StrictBool = True
    """With nf4: the scale of every 64 weights is kept in 8 bits, too."""

    @model_validator(mode="after")
    def _agree(self) -> Tuning:
        adapters = [key for key in ("r", "targets", "alpha", "base") if getattr(self, key) is not None]
        adapters += ["dropout"] * bool(self.dropout)
        if adapters and not self.has_adapters:
            raise _rule(f"{adapters[0]} belongs to adapters, and method = {self.method!r} has none; drop it, or set lora")
        if self.method == "qlora" and self.base == "int8":
            raise _rule('method = "qlora" keeps frozen weights in nf4, and base = "int8"; set method = "lora" for 8 bits')
        if not self.double_quantisation and self.storage != "nf4":
            raise _rule('double_quantisation = false belongs to weights in nf4; drop it, or set method = "qlora"')
        return self

    @property
    def has_adapters(self) -> bool:
        return self.method in ("lora", "qlora")

    @property
    def rank(self) -> int:
        return self.r or 16

    @property
    def scale(self) -> float:
        """What adapters are multiplied by."""
        return (self.alpha or 2.0 * self.rank) / self.rank

    @property
    def storage(self) -> WeightStorage | None:
        """In which frozen linear layers are kept; None: as the precision stores weights."""
        return self.base or ("nf4" if self.method == "qlora" else None)

    @property
    def stored_bytes(self) -> float:
        """Bytes of a weight in `storage`, with its share of the scales.
        nf4: half a byte, and for every 64 weights a scale of 4 bytes, or of 1 and for every 256 of these 4. int8: leaves out 4
        bytes per row."""
        if self.storage == "int8":
            return 1.0
        return 0.5 + (1 / 64 + 4 / (64 * 256) if self.double_quantisation else 4 / 64)

    @property
    def parts(self) -> frozenset[str]:
        """The products of a transformer by name that have adapters.
        Raises ModelError for a target that no such model has."""
        if not self.has_adapters:
            return frozenset()
        found: set[str] = set()
        for target in self.targets or (ALL,):
            if target not in GROUPS and target not in PARTS:
                known = ("attention", "mlp", ALL, *(name for name in PARTS if name.endswith("_proj")), "lm_head")
                raise ModelError(
                    f"training.tune.targets: {target!r} is no linear layer of a transformer by name"
                    f"{near_matches(target, known)}; it has {', '.join(known)}"
                )
            found.update(GROUPS.get(target) or (PARTS[target],))
        return frozenset(found)

    def text(self) -> str:
        """What is trained, for people."""
        if not self.has_adapters:
            return {"full": "every parameter", "head": "the last layer alone"}[self.method]
        nested = " with double quantisation" if self.storage == "nf4" and self.double_quantisation else ""
        beside = "" if self.storage is None else f", frozen linear layers in {self.storage}{nested}"
        rank = f"r = {self.rank}{'' if self.r else ' (assumed)'}"
        where = "+".join(self.targets) if self.targets else "all linear layers but the head (assumed)"
        return f"{self.method} with {rank} on {where}{beside}"


TuningKey = Annotated[Tuning, BeforeValidator(_parsed)]
"""A table, or its text."""


def tuned(model: Model, tuning: Tuning | None) -> Model:
    """The model of which `tuning` trains a part, with its weights stored so, and its assumptions saying so."""
    if tuning is None or tuning.method == "full":
        return model
    trained = sum(parameter.elements for parameter in model.trainable_parameters)
    counts = (
        f"{format_count(trained)} of {format_count(model.parameter_count)} parameters are trained; ZeRO 3 divides the frozen "
        "ones too"
    )
    return replace(stored(model, tuning), assumptions=(*model.assumptions, f"fine-tuning: {tuning.text()}; {counts}"))


NO_INT8 = ("p100", "v100")
"""GPUs before Turing, without the integer products that LLM.int8() needs (bitsandbytes, docs/source/installation.mdx)."""


def check_storage(tuning: Tuning | None, device: DeviceType) -> None:
    """Raise ConfigError where a device cannot keep frozen weights as `tuning` stores them."""
    if tuning is None or tuning.storage is None:
        return
    if device.kind != "cuda":
        raise ConfigError(
            f"training.tune keeps frozen weights in {tuning.storage}, which bitsandbytes unpacks on GPUs, and {device.name} is "
            f'none; set training.tune = "lora:r={tuning.rank}", or name GPUs'
        )
    if tuning.storage == "int8" and device.name.lower().startswith(NO_INT8):
        raise ConfigError(
            f'training.tune.base = "int8" needs products of 8-bit integers (Turing or later), which {device.name} does not '
            f'have; set training.tune = "qlora:r={tuning.rank}", whose nf4 it unpacks, or leave base out'
        )


# Frozen weights in 4 or 8 bits.


def stored(model: Model, tuning: Tuning) -> Model:
    """The model with the weights of its frozen products in `tuning.storage`; the same object where they have no such.
    Every product unpacks its weight into 16 bits first, in the forward and in the backward, one weight at a time. The head and
    embeddings stay as they are, as bitsandbytes leaves them."""
    if tuning.storage is None:
        return model
    kept = any(op.function == NOT_LOW for component in model.components for op in component.operators)
    last = next((op for c in reversed(model.components) for op in reversed(c.operators) if op.kind == "matmul"), None)
    left = frozenset() if kept or last is None else frozenset({last})
    made, components = dict[object, Component](), []
    for component in model.components:
        alike = component.operators, component.parameters, component.shardings
        if alike not in made:
            made[alike] = _packed(component, tuning, left)
        changed = made[alike]
        components.append(
            replace(
                component,
                operators=changed.operators,
                parameters=changed.parameters,
                shardings=changed.shardings,
                half=changed.half,
                forward_peaks=changed.forward_peaks,
                backward_peaks=changed.backward_peaks,
                selective=changed.selective,
            )
        )
    return replace(model, components=tuple(components))


def _packed(component: Component, tuning: Tuning, left: frozenset[Operator]) -> Component:
    """A component whose frozen products read weights in fewer bits."""
    frozen = {
        number: _weights(operator)
        for number, operator in enumerate(component.operators)
        if operator.kind == "matmul"
        and operator.parameter_bytes
        and operator.gradients in ("input", "none")
        and operator.function != NOT_LOW
        and operator not in left
    }
    if not frozen:
        return component
    sizes = set(frozen.values())
    parameters = tuple(
        replace(parameter, element_bytes=tuning.stored_bytes)
        if not parameter.trainable and parameter.elements in sizes
        else parameter
        for parameter in component.parameters
    )
    unpacked = {
        number: Operator(
            kind="memory_bound",
            shape=(("elements", elements),),
            batch="none",
            forward_flop=0.0,
            activation_bytes=round(FULL_BYTES * elements * (tuning.stored_bytes + HALF_BYTES) / HALF_BYTES),
            parameter_bytes=0,
            count=component.operators[number].count,
            function=DEQUANTISE,
            gradients=component.operators[number].gradients,
        )
        for number, elements in frozen.items()
    }
    place = {number: len(component.operators) + offset for offset, number in enumerate(unpacked)}
    largest = HALF_BYTES * max(sizes)

    def beside(footprint: Any, *, whole: int, divided: int) -> Any:
        def more(size: Any) -> Any:
            if isinstance(size, DividedSize):
                return size._replace(
                    fixed_bytes=size.fixed_bytes + whole, divided_fixed_bytes=size.divided_fixed_bytes + divided
                )
            return size[0], size[1] + whole + divided

        selective, half = footprint.selective, getattr(footprint, "half", None)
        if selective is not None:
            selective = replace(
                selective,
                first_peaks=tuple(map(more, selective.first_peaks)),
                second_peaks=tuple(map(more, selective.second_peaks)),
                operators=(*selective.operators, *((place[n], times) for n, times in selective.operators if n in place)),
            )
        return replace(
            footprint,
            forward_peaks=tuple(map(more, footprint.forward_peaks)),
            backward_peaks=tuple(map(more, footprint.backward_peaks)),
            selective=selective,
            split_backward=None,
            **({} if half is None else {"half": beside(half, whole=whole, divided=divided)}),
        )

    def sharded(sharding: Any) -> Any:
        cut = {each.number for each in sharding.operators}
        whole = HALF_BYTES * max((size for number, size in frozen.items() if number not in cut), default=0)
        divided = HALF_BYTES * max((size for number, size in frozen.items() if number in cut), default=0)
        shards = tuple(
            OperatorShard(number=place[number], dim="elements", activation_bytes=unpacked[number].activation_bytes)
            for number in unpacked
            if number in cut
        )
        return replace(beside(sharding, whole=whole, divided=divided), operators=(*sharding.operators, *shards))

    changed: Component = beside(component, whole=largest, divided=0)
    if changed.half is not None:  # what is stored in fewer bits is unpacked, and not cast
        cast = HALF_BYTES * sum(
            before.elements for before, after in zip(component.parameters, parameters, strict=True) if before != after
        )
        changed = replace(changed, half=replace(changed.half, cast_bytes=max(0, changed.half.cast_bytes - cast)))
    return replace(
        changed,
        operators=(*component.operators, *unpacked.values()),
        parameters=parameters,
        shardings=tuple(map(sharded, component.shardings)),
    )


def _weights(operator: Operator) -> int:
    """Elements of a product's weight."""
    shape = dict(operator.shape)
    return shape["n"] * shape["k"] * shape.get("problems", 1)
