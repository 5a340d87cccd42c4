"""The numbers of a training, and components and values under a precision: as recorded in fp32 or under autocast.

For memory, and for the bytes that are sent. Computation is priced by the precision of the measurement or the fit; here is said
only which product of a recorded Model is left out of 8 and 4 bits.
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields, replace
from functools import cache, lru_cache
from typing import Any, TypeVar

from parsim.errors import CostError, ExecutionError
from parsim.model.component import (
    FULL_BYTES,
    HALF_BYTES,
    NOT_LOW,
    Bytes,
    Component,
    DividedSize,
    Footprint,
    Sharding,
    Size,
    Value,
    ValueFootprint,
)
from parsim.model.model import Model
from parsim.model.optimizers import OPTIMIZERS
from parsim.registry import Registry

# The precisions of training: the types of storage and of computation, and the devices that support them.
#
# A new one is one row. Its name, which may be "package.module:ROW", is the one under which profiles keep peaks and fits.
#
# fp32, fp64    everything in that type; fp32 is IEEE's: no TF32 in matmuls and convolutions.
# tf32          as fp32, but matmuls and convolutions of a GPU round their operands to 10 bits of mantissa.
# amp_fp16      weights, gradients and optimizer state in fp32; PyTorch's autocast computes what it can in half precision;
# amp_bf16      fp16 scales the loss, so that small gradients do not vanish (`parsim.execute.numerics`).
# bf16          weights, gradients and activations in bf16; with master weights the optimizer updates copies in fp32.
# fp16          the same in fp16, with a scaled loss: Megatron-LM's and DeepSpeed's fp16. Priced, not run.
# fp8           products with a weight in fp8, all else in bf16. Priced, not run.
# nvfp4         the same in 4 bits: NVIDIA's, with a scale of 8 bits for every 16 elements. Kept activations count a whole byte
#               each. Leaves out the rotation of operands (random Hadamard transform) and layers that a recipe keeps in bf16.


RECORDED_WEIGHTS = {2: "bfloat16", 4: "float32"}
"""By bytes per element, the type in which Models are recorded, as torch names it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NumberFormat:
    """One precision.

    Attributes:
        element_bytes: of an activation, and of an operand of a matmul.
        weight_bytes: of a parameter and of its gradient.
        autocast: the type autocast computes in, as torch names it; "" without autocast.
        scales_loss: the loss is multiplied before the backward, and the gradients divided after it.
        devices: the kinds that can run it; none: it is priced only.
        beside: the precision of whatever is not a product (convolutions, norms, attention, additions); "": the same.
    """

    element_bytes: int
    weight_bytes: int
    autocast: str = ""
    scales_loss: bool = False
    devices: tuple[str, ...] = ("cpu", "cuda")
    beside: str = ""

    def __post_init__(self) -> None:
        if min(self.element_bytes, self.weight_bytes) < 1:
            raise CostError(f"a precision needs bytes >= 1, got {self.element_bytes} and {self.weight_bytes}")
        if self.element_bytes < self.weight_bytes and self.weight_bytes == 4 and not self.autocast:
            raise CostError(
                f"activations of {self.element_bytes} bytes beside weights of {self.weight_bytes} come from autocast; say to "
                'which type, e.g. autocast = "bfloat16"'
            )


FORMATS: Registry[NumberFormat] = Registry(
    "precision",
    NumberFormat,
    {
        "fp32": NumberFormat(element_bytes=4, weight_bytes=4),
        "fp64": NumberFormat(element_bytes=8, weight_bytes=8),
        "tf32": NumberFormat(element_bytes=4, weight_bytes=4, devices=("cuda",)),
        "amp_fp16": NumberFormat(element_bytes=2, weight_bytes=4, autocast="float16", scales_loss=True),
        "amp_bf16": NumberFormat(element_bytes=2, weight_bytes=4, autocast="bfloat16"),
        "bf16": NumberFormat(element_bytes=2, weight_bytes=2),
        "fp16": NumberFormat(element_bytes=2, weight_bytes=2, scales_loss=True, devices=()),
        "fp8": NumberFormat(element_bytes=1, weight_bytes=2, devices=(), beside="bf16"),
        "nvfp4": NumberFormat(element_bytes=1, weight_bytes=2, devices=(), beside="bf16"),
    },
    error=CostError,
)


@cache
def number_format(precision: str) -> NumberFormat:
    """What a precision means. Raises CostError for an unknown one."""
    return FORMATS[precision]


@cache
def operator_precision(precision: str, kind: str, *, low: bool = True) -> str:
    """The precision in which an operator of that kind runs: under fp8 and nvfp4 only products are in them.
    PyTorch has no convolution in 8 or 4 bits that trains, and Transformer Engine and torchao convert linear layers alone.
    `precision`: of the training. `kind`: of the operator (`parsim.model.component.OPERATOR_KINDS`). `low`: False for a product
    that is left out of that (`parsim.model.component.NOT_LOW`)."""
    return precision if kind == "matmul" and low else number_format(precision).beside or precision


def check_planned(precision: str) -> None:
    """Raise CostError for a precision in whose weights no Model is recorded."""
    weight_bytes = number_format(precision).weight_bytes
    if weight_bytes not in RECORDED_WEIGHTS:
        planned = ", ".join(name for name, row in FORMATS.items() if row.weight_bytes in RECORDED_WEIGHTS)
        raise CostError(
            f"precision {precision!r} stores weights in {weight_bytes} bytes per element, and models are recorded with "
            f"{' or '.join(map(str, RECORDED_WEIGHTS))}; use one of {planned}"
        )


def check_executable(precision: str, dtype: str, device_kind: str) -> None:
    """Raise ExecutionError unless a device of that kind can train in `precision`, with weights of `dtype` where fp32 is asked.
    `dtype`: "float32" or "float64" (training.dtype). `device_kind`: "cpu" or "cuda"."""
    devices = number_format(precision).devices
    if not devices:
        raise ExecutionError(
            f"training.precision = {precision!r} can be priced, not run: PyTorch has no training in it that parsim drives; set "
            'precision = "bf16" or "amp_bf16" to train'
        )
    if device_kind not in devices:
        raise ExecutionError(
            f"training.precision = {precision!r} needs a device of kind {' or '.join(devices)}, and the ranks compute on "
            f'{device_kind}; set precision = "fp32", "amp_bf16", "amp_fp16" or "bf16"'
        )
    if dtype != "float32" and precision != "fp32":
        raise ExecutionError(
            f'training.dtype = {dtype!r} and training.precision = {precision!r} contradict each other; set dtype = "float32", '
            'or precision = "fp32"'
        )


def recorded_weights(precision: str) -> str:
    """The type, as torch names it, in which a Model of this precision is recorded. Raises CostError as `check_planned`."""
    check_planned(precision)
    return RECORDED_WEIGHTS[number_format(precision).weight_bytes]


STATE_BYTES = {"fp32": 4, "bf16": 2, "fp16": 2, "fp8": 1, "int8": 1}
"""Of an element of an optimizer's state, by the type that it is kept in. Leaves out the scales of fp8 and int8: 4 bytes for
every 256 elements in bitsandbytes' Adam8bit and torchao's AdamW8bit.

Sources: exp_avg_dtype and exp_avg_sq_dtype of Megatron-Core's precision-aware optimizer (fp32, fp16, bf16, fp8);
bitsandbytes/functional.py and torchao/optim/subclass_8bit.py."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Numerics:
    """The numbers that a training computes in, and what it keeps of every weight.

    Attributes:
        precision: a row of FORMATS. optimizer: a row of OPTIMIZERS, for weights in no update group with another.
        master_weights: of weights stored in half precision the optimizer updates copies in fp32.
        ema: it keeps a moving average of the weights.
        state_dtype: of the optimizer's state, a row of STATE_BYTES; "": as wide as the weights that it updates.
        gradient_dtype: "fp32" where gradients of weights in half precision are added up in fp32; "bf16", "": as wide as the
            weights.
        weight_dtype: "fp8" where products in fp8 keep their weights in it alone, and no copy in 16 bits.

    Raises:
        CostError: an unknown precision. ConfigError: an unknown optimizer.
    """

    precision: str = "fp32"
    optimizer: str = "sgd_momentum"
    master_weights: bool = True
    ema: bool = False
    state_dtype: str = ""
    gradient_dtype: str = ""
    weight_dtype: str = ""

    def __post_init__(self) -> None:
        _ = self.format, OPTIMIZERS[self.optimizer]

    @property
    def format(self) -> NumberFormat:
        return number_format(self.precision)

    @property
    def is_half(self) -> bool:
        """Whether weights are stored in half precision."""
        return self.format.weight_bytes < FULL_BYTES

    def optimizer_bytes(self, optimizer: str = "") -> tuple[int, int]:
        """Bytes per parameter of an optimizer, the usual one if none is named: those that stay, those an update takes.
        With weights in half precision the state is as wide as the weights, or as wide as fp32 with master weights, unless it
        has a type of its own. Master weights add a copy of the weights that stays, and one of the gradients during the update
        where these are not in fp32."""
        row, width = OPTIMIZERS[optimizer or self.optimizer], self.format.weight_bytes
        is_full = not self.is_half or self.master_weights
        state, temporary = row.state_bytes_per_element, row.temporary_bytes_per_element
        averages = FULL_BYTES if self.ema else 0
        if not is_full:
            state, temporary, averages = (size * width // FULL_BYTES for size in (state, temporary, averages))
        if self.state_dtype:
            state = len(row.states) * STATE_BYTES[self.state_dtype]
        if not is_full or not self.is_half:
            return state + averages, temporary
        return state + averages + FULL_BYTES, temporary + (0 if self.gradient_dtype == "fp32" else FULL_BYTES)

    def gradient_bytes(self, weight_bytes: float) -> float:
        """Of the gradients of weights that take so much."""
        return weight_bytes * (FULL_BYTES / self.format.weight_bytes if self.gradient_dtype == "fp32" else 1)


DEFAULT_NUMERICS = Numerics()

HalfSizes = TypeVar("HalfSizes")


@lru_cache(maxsize=65536)
def component_in(component: Component, precision: str) -> Component:
    """A component with its memory under `precision`, and that of its shards; its work is unchanged.
    A Model may not have been recorded under autocast, or only at other than 2 bytes per element. Then all its bytes are assumed
    to shrink in proportion, with a cast of every weight under autocast."""
    size = _reduced_bytes(precision)
    if size is None:
        return component
    half = _recorded(component.half, size)
    if half is None:
        casts = size * sum(parameter.elements for parameter in component.parameters)
        half = replace(_shrunk(component, size), cast_bytes=casts)
    half = replace(half, selective=component.selective and (half.selective or component.selective))
    shardings = tuple(_sharding_in(sharding, component, half, size) for sharding in component.shardings)
    return replace(component, shardings=shardings, half=half, **_sizes_of(half))


def _sharding_in(sharding: Sharding, component: Component, component_half: Footprint[Size], element_bytes: int) -> Sharding:
    """A sharding with its memory under autocast; what is not recorded is divided in proportion, as without autocast."""
    half = _recorded(sharding.half, element_bytes)
    if half is None:

        def share(half_bytes: int, part: int, whole: int) -> int:
            return half_bytes * part // whole if whole else 0

        cut = {part.name for part in sharding.parameters}
        elements = sum(parameter.elements for parameter in component.parameters)
        cut_elements = sum(parameter.elements for parameter in component.parameters if parameter.name in cut)
        half = replace(
            _shrunk(sharding, element_bytes),
            saved_activation_bytes=share(
                component_half.saved_activation_bytes, sharding.saved_activation_bytes, component.saved_activation_bytes
            ),
            saved_fixed_bytes=share(component_half.saved_fixed_bytes, sharding.saved_fixed_bytes, component.saved_fixed_bytes),
            cast_bytes=share(component_half.cast_bytes, cut_elements, elements),
        )
    half = replace(half, selective=sharding.selective and (half.selective or sharding.selective))
    return replace(sharding, half=half, **_sizes_of(half))


def _sizes_of(footprint: Footprint[Bytes]) -> dict[str, Any]:
    return {field.name: getattr(footprint, field.name) for field in fields(Footprint)}


def _shrunk(footprint: Footprint[Bytes], element_bytes: int) -> Footprint[Bytes]:
    """Memory with activations in so many bytes per element instead of 4, in proportion. Leaves out halves of a backward."""

    def shrunk(size: Bytes) -> Bytes:
        if isinstance(size, DividedSize):
            return size._replace(
                bytes_per_sample=size.bytes_per_sample * element_bytes // FULL_BYTES,
                divided_bytes_per_sample=size.divided_bytes_per_sample * element_bytes // FULL_BYTES,
            )
        return size[0] * element_bytes // FULL_BYTES, size[1]

    return Footprint(
        saved_activation_bytes=footprint.saved_activation_bytes * element_bytes // FULL_BYTES,
        saved_fixed_bytes=footprint.saved_fixed_bytes * element_bytes // FULL_BYTES,
        forward_peaks=tuple(map(shrunk, footprint.forward_peaks)),
        backward_peaks=tuple(map(shrunk, footprint.backward_peaks)),
        selective=footprint.selective and footprint.selective.resized(shrunk),
    )


def value_in(value: Value, precision: str) -> Value:
    """Its size and its keepers under `precision`; if not recorded under autocast, it shrinks where a gradient flows."""
    size = _reduced_bytes(precision)
    if size is None:
        return value
    half = _recorded(value.half, size)
    if half is None:
        element_bytes = size if value.differentiable else FULL_BYTES
        half = ValueFootprint(
            bytes_per_sample=value.bytes_per_sample * element_bytes // FULL_BYTES,
            fixed_bytes=value.fixed_bytes * element_bytes // FULL_BYTES,
            saved=value.saved,
            savers=value.savers,
        )
    return replace(
        value,
        bytes_per_sample=half.bytes_per_sample,
        storage_bytes_per_sample=value.storage_bytes_per_sample * half.bytes_per_sample // max(1, value.bytes_per_sample),
        fixed_bytes=half.fixed_bytes,
        saved=half.saved,
        savers=half.savers,
        half=half,
    )


@dataclass
class _InPrecision:
    """What was made of a model: with a head in 16 bits, and as it is sent, by bytes of an activation's element."""

    wide_head: Model | None = None
    sent: dict[int, Model] = field(default_factory=dict)


def model_in(model: Model, precision: str) -> Model:
    """The model as `precision` trains it: values as wide as they are sent, the head in 16 bits; the same object if it is so."""
    if number_format(precision).beside:
        remembered = model.remembered(_InPrecision)
        model = remembered.wide_head = remembered.wide_head or _with_wide_head(model)
    return model_as_sent(model, precision)


def _with_wide_head(model: Model) -> Model:
    """The model whose last product with a weight stays in 16 bits where others are in 8 or 4.
    Which layers a training converts is not recorded when a module is traced. Described transformers say it themselves
    (`parsim.model.catalogue.sublayers.head`), and are left as they are."""
    last: tuple[int, int] | None = None
    for place, component in enumerate(model.components):
        for number, operator in enumerate(component.operators):
            if operator.function == NOT_LOW:
                return model
            if operator.kind == "matmul" and operator.parameter_bytes:
                last = place, number
    if last is None:
        return model
    place, number = last
    components = list(model.components)
    operators = list(components[place].operators)
    if operators[number].count > 1 or operators[number].function:  # one of several alike, as in a loop: no layer of its own
        return model
    operators[number] = replace(operators[number], function=NOT_LOW)
    components[place] = replace(components[place], operators=tuple(operators))
    return replace(model, components=tuple(components))


def model_as_sent(model: Model, precision: str) -> Model:
    """The model with its values as wide as they are sent under `precision`; the same object where nothing changes.
    Who keeps a value stays as recorded, for `value_in`, which leaves these sizes as they are."""
    size = _reduced_bytes(precision)
    if size is None:
        return model
    sent = model.remembered(_InPrecision).sent
    if size not in sent:
        values = tuple(replace(value_in(value, precision), saved=value.saved, savers=value.savers) for value in model.values)
        sent[size] = model if values == model.values else replace(model, values=values)
    return sent[size]


def is_half(precision: str) -> bool:
    """Whether it means autocast to fewer bytes. (A Model for bf16 is recorded in bf16.)"""
    return bool(number_format(precision).autocast)


def check_recorded(model: Model, precision: str) -> None:
    """Raise CostError where a Model cannot tell of a precision.
    Its parameters are of another width than the precision stores, or its forward fails under the autocast of the precision."""
    if model.half_refused and is_half(precision):
        raise CostError(
            f"precision {precision!r} runs the forward under autocast, and that of {model.name} fails there: "
            f'{model.half_refused}; cast the operands of that call to one type, or set precision = "fp32"'
        )
    stored = number_format(precision).weight_bytes
    for parameter in model.parameters if stored == HALF_BYTES else ():
        if parameter.trainable and parameter.element_bytes != stored:
            raise CostError(
                f"precision {precision!r} stores weights in {stored} bytes, and {model.name} was recorded with "
                f"{parameter.element_bytes} bytes each ({parameter.name}); name the module, not a saved Model, or set "
                'precision = "amp_bf16"'
            )


def _reduced_bytes(precision: str) -> int | None:
    """Bytes of an activation's element under autocast; None where it is as recorded."""
    kind = number_format(precision)
    return kind.element_bytes if kind.autocast else None


def _recorded(half: HalfSizes | None, element_bytes: int) -> HalfSizes | None:
    """The values recorded under autocast, if they have that many bytes per element."""
    return half if element_bytes == HALF_BYTES else None
