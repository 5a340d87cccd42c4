"""The precisions of training: the types of storage and of computation, and the devices that support them.

A new one is one row. Its name, which may be "package.module:ROW", is the one under which profiles keep peaks and fits.

fp32, fp64    everything in that type; fp32 is IEEE's: no TF32 in matmuls and convolutions.
tf32          as fp32, but matmuls and convolutions of a GPU round their operands to 10 bits of mantissa.
amp_fp16      weights, gradients and optimizer state in fp32; PyTorch's autocast computes what it can in half precision;
amp_bf16      fp16 scales the loss, so that small gradients do not vanish (`parsim.execute.state.loss_scale`).
bf16          weights, gradients and activations in bf16; with master weights the optimizer updates copies in fp32.
fp16          the same in fp16, with a scaled loss: Megatron-LM's and DeepSpeed's fp16. Priced where a profile knows it; nothing
              here runs it.
fp8           products with a weight in fp8, all else in bf16. Priced where a profile knows it; nothing here runs it.
nvfp4         the same in 4 bits: NVIDIA's, with a scale of 8 bits for every 16 elements. Kept activations count a whole byte
              each. Leaves out the rotation of operands (random Hadamard transform) and layers that a recipe keeps in bf16.
"""

from __future__ import annotations

from dataclasses import dataclass

from parsim.errors import CostError, ExecutionError
from parsim.registry import Registry

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


def number_format(precision: str) -> NumberFormat:
    """What a precision means. Raises CostError for an unknown one."""
    return FORMATS[precision]


def operator_precision(precision: str, kind: str, *, low: bool = True) -> str:
    """The precision in which an operator of that kind runs: under fp8 and nvfp4 only products are in them.

    PyTorch has no convolution in 8 or 4 bits that trains, and Transformer Engine and torchao convert linear layers alone.

    Args:
        precision: of the training. kind: of the operator (`parsim.model.component.OPERATOR_KINDS`).
        low: False for a product that is left out of that (`parsim.model.component.NOT_LOW`).
    """
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

    Args:
        dtype: "float32" or "float64" (training.dtype). device_kind: "cpu" or "cuda".
    """
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
