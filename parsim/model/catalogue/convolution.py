"""What frameworks do with convolutional networks: the order of their arrays, and what is one kernel with a batch norm.

A Model is recorded as eager PyTorch runs it: batch norm, addition and ReLU are kernels of their own, and arrays lie as
(samples, channels, height, width). `run_by` rewrites its operators as another library launches them. Pairs are found by their
sizes, because operators are counted and not linked: each ReLU belongs to a batch norm with as many elements, where there is
one, and each addition to such a pair.

Leaves out: what is kept for the backward, which hardly differs; norms that keep a part of their input on the chip between their
two passes; ReLU inside a convolution.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from parsim.model.component import CHANNELS_LAST, NORM_ADD_RELU, NORM_RELU, NORM_RELU_OF_SUMS, Operator
from parsim.model.formats import FULL_BYTES, number_format
from parsim.model.model import Model

BATCH_NORM = "native_batch_norm"
FUSED = ("relu", "relu_", "add", "add_")


@dataclass(frozen=True, slots=True, kw_only=True)
class ConvolutionSoftware:
    """How a framework runs a convolutional network.

    Attributes:
        channels_last: arrays lie as (samples, height, width, channels) in 16 bits. in_full: in 32 bits, too.
        fused_norms: batch norm, addition of the residual and ReLU are one kernel. summed: a convolution makes the sums of the
            norm and ReLU behind it (cuDNN's fused statistics; not where a residual is added).
    """

    channels_last: bool = False
    in_full: bool = False
    fused_norms: bool = False
    summed: bool = False


def run_by(model: Model, software: ConvolutionSoftware, precision: str) -> Model:
    """The Model with the operators that this software launches in a precision."""
    last = software.in_full if number_format(precision).element_bytes == FULL_BYTES else software.channels_last
    components = (
        replace(component, operators=_operators(component.operators, replace(software, channels_last=last)))
        for component in model.components
    )
    return replace(model, components=tuple(components))


def convolutions(model: Model) -> int:
    """How many of its operators are convolutions."""
    return sum(each.count for component in model.components for each in component.operators if each.kind == "convolution")


def _operators(operators: Sequence[Operator], software: ConvolutionSoftware) -> tuple[Operator, ...]:
    if software.channels_last:
        operators = [replace(each, function=CHANNELS_LAST) if each.kind == "convolution" else each for each in operators]
    if software.fused_norms:
        operators = _fused(operators)
    if software.summed:
        operators = [replace(each, function=NORM_RELU_OF_SUMS) if each.function == NORM_RELU else each for each in operators]
    return tuple(operators)


def _fused(operators: Sequence[Operator]) -> list[Operator]:
    """With one operator for each batch norm and the ReLU, or addition and ReLU, of as many elements; no counts of batches."""
    left = {name: _counts(operators, name) for name in ("relu", "add")}
    found: list[Operator] = []
    for operator in operators:
        size = dict(operator.shape).get("elements", 0)
        if operator.batch == "none" and operator.function in FUSED:
            continue  # the number of batches that a norm has seen
        if operator.function != BATCH_NORM:
            found.append(operator)
            continue
        pairs = min(operator.count, left["relu"].get(size, 0))
        triples = min(pairs, left["add"].get(size, 0))
        for name, count in ((NORM_ADD_RELU, triples), (NORM_RELU, pairs - triples), (BATCH_NORM, operator.count - pairs)):
            if count:
                found.append(replace(operator, function=name, count=count))
        left["relu"][size] = left["relu"].get(size, 0) - pairs
        left["add"][size] = left["add"].get(size, 0) - triples
    return [replace(each, count=count) for each in found if (count := _kept(each, left))]


def _counts(operators: Sequence[Operator], name: str) -> dict[int, int]:
    """How many kernels of that name there are, by their elements."""
    counts: dict[int, int] = {}
    for operator in operators:
        if operator.batch != "none" and operator.function.rstrip("_") == name:
            size = dict(operator.shape).get("elements", 0)
            counts[size] = counts.get(size, 0) + operator.count
    return counts


def _kept(operator: Operator, left: dict[str, dict[int, int]]) -> int:
    """How many of an operator no norm has taken."""
    counts = left.get(operator.function.rstrip("_"))
    if counts is None:
        return operator.count
    size = dict(operator.shape).get("elements", 0)
    kept = min(operator.count, counts.get(size, 0))
    counts[size] = counts.get(size, 0) - kept
    return kept
