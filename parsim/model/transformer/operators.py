"""Operators of a transformer layer, and how tensor parallelism divides them. Sizes are of one sample.

As in traced Models, operators count four bytes per element; the precision decides what is moved.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from parsim.model.component import (
    BIAS,
    BIAS_GRADIENT,
    GRADIENT_SUM,
    NOT_LOW,
    PARTS,
    Operator,
    OperatorShard,
    Parameter,
    ParameterShard,
)

FULL_BYTES = 4
CAST_ARRAYS = 2.0
"""Of 2 bytes per element: read, and written in 8 bits in both orders."""


@dataclass
class Layer:
    """What a component under construction does.

    Attributes:
        weight_bytes: of one parameter as stored. casts: inputs of products are cast to 8 bits.
        gradient_arrays, early_stop, bias_kernels: as in Software.
        saved, saved_divided: bytes kept for the backward, and the part of them that a shard has its share of.
        given, given_divided: of it what lies in the storage of the component's input.
        again, again_divided: of it what runs again where the component is recomputed by operator; by the operators `repeated`.
        peak, peak_fixed: bytes of gradients at the fullest moment of the backward, per sample and whatever the samples;
            with `_divided` the part of them that is shared likewise.
    """

    prefix: str
    weight_bytes: int = 2
    casts: bool = False
    gradient_arrays: float = 0.0
    early_stop: bool = False
    bias_kernels: bool = False
    operators: list[Operator] = field(default_factory=list)
    cut: list[OperatorShard] = field(default_factory=list)
    parameters: list[Parameter] = field(default_factory=list)
    cut_parameters: list[ParameterShard] = field(default_factory=list)
    saved: int = 0
    saved_divided: int = 0
    given: int = 0
    given_divided: int = 0
    again: int = 0
    again_divided: int = 0
    repeated: list[int] = field(default_factory=list)
    peak: int = 0
    peak_divided: int = 0
    peak_fixed: int = 0
    peak_fixed_divided: int = 0

    def add(self, operator: Operator, dim: str = "", divided_bytes: int = 0) -> None:
        """One more operator; `dim` is what a shard has a part of, `divided_bytes` the activations it divides."""
        if dim:
            self.cut.append(OperatorShard(number=len(self.operators), dim=dim, activation_bytes=divided_bytes))
        self.operators.append(operator)

    def weight(self, name: str, elements: int, dim: int | None = None) -> None:
        """A parameter, cut along `dim` (None: whole on every shard)."""
        full = f"{self.prefix}.{name}"
        self.parameters.append(Parameter(name=full, elements=elements, element_bytes=self.weight_bytes))
        if dim is not None:
            self.cut_parameters.append(ParameterShard(name=full, dim=dim))

    def keep(self, size: int, *, divided: bool) -> None:
        """Bytes per sample that the backward needs."""
        self.saved += size
        self.saved_divided += size if divided else 0

    def reads(self, size: int, *, divided: bool) -> None:
        """Bytes per sample of what is kept that are the component's input."""
        self.given += size
        self.given_divided += size if divided else 0

    def repeat(self, begin: int, size: int = 0, *, divided: bool) -> None:
        """By operator, all operators from number `begin` on run again, and so many bytes of what is kept are made by them."""
        self.repeated += range(begin, len(self.operators))
        self.again += size
        self.again_divided += size if divided else 0

    def stop_early(self) -> None:
        """Everything up to the last product runs again, and makes all that is kept beside the component's input.

        Leaves out: nothing of the memory. The last product saves its input before it runs, and its result is not kept.
        """
        last = max(number for number, operator in enumerate(self.operators) if operator.kind == "matmul")
        self.repeated = list(range(last))
        self.again, self.again_divided = self.saved - self.given, self.saved_divided - self.given_divided

    def linear(
        self,
        name: str,
        rows: int,
        outputs: int,
        inputs: int,
        *,
        split: str,
        bias: bool = False,
        problems: int = 1,
        added: str = BIAS_GRADIENT,
        low: bool = True,
    ) -> None:
        """A product with a weight: split "column" (its outputs), "row" (its inputs) or "" (whole on every shard).

        `problems`: of so many experts, each with its own weight and `rows` rows. `added`: as `bias_kernel` has it; with "row"
        the residual's kernel adds the bias. `low`: training in 8 or 4 bits multiplies in them.
        """
        whole = problems * rows
        shape = (("m", rows), ("n", outputs), ("k", inputs))
        operator = Operator(
            kind="matmul",
            shape=shape if problems == 1 else (*shape, ("problems", problems)),
            batch="rows",
            forward_flop=2.0 * whole * outputs * inputs,
            activation_bytes=FULL_BYTES * whole * (outputs + inputs),
            parameter_bytes=FULL_BYTES * problems * outputs * inputs,
            function="" if low else NOT_LOW,
        )
        if self.casts and low:
            self.moved(whole * inputs, CAST_ARRAYS, divided=split == "row")
        part = {"column": ("n", outputs), "row": ("k", inputs)}.get(split)
        self.add(operator, *((part[0], FULL_BYTES * whole * part[1]) if part else ()))
        self.weight(f"{name}.weight", problems * outputs * inputs, {"column": 0, "row": 1}.get(split))
        gradient = self.weight_bytes * problems * outputs * inputs
        if split:
            self.peak_fixed_divided = max(self.peak_fixed_divided, gradient)
        else:
            self.peak_fixed = max(self.peak_fixed, gradient)
        if bias:
            self.weight(f"{name}.bias", problems * outputs, 0 if split == "column" else None)
            if split == "column":
                self.bias_kernel(whole * outputs, added, divided=True)

    def qkv(self, tokens: int, queries: int, keys: int, hidden: int, *, bias: bool) -> None:
        """The product that makes queries, keys and values; its bias has no other kernel that could add it.

        The gradients of the three, which are views of one array, are copied together before the product's backward.
        """
        self.linear("qkv", tokens, queries + 2 * keys, hidden, split="column", bias=bias, added=BIAS)
        if self.bias_kernels:
            self.moved(tokens * (queries + 2 * keys), 0.0, divided=True, function=PARTS)

    def bias_kernel(self, elements: int, function: str, *, divided: bool) -> None:
        """What a bias costs beside fused kernels, `BIAS` or `BIAS_GRADIENT`, where the product's kernel does not do it."""
        if self.bias_kernels:
            self.moved(elements, 2.0 if function == BIAS else 0.0, divided=divided, function=function)

    def moved(
        self,
        elements: int,
        arrays: float,
        *,
        divided: bool,
        parameters: int = 0,
        function: str = "",
        batch: str = "batch",
    ) -> None:
        """A fused pointwise kernel over `elements` that moves so many arrays in its forward; `batch`: as of Operator."""
        size = round(FULL_BYTES * elements * arrays)
        operator = Operator(
            kind="memory_bound",
            shape=(("elements", elements),),
            batch=batch,
            forward_flop=0.0,
            activation_bytes=size,
            parameter_bytes=FULL_BYTES * parameters,
            function=function,
        )
        self.add(operator, *(("elements", size) if divided else ()))

    def sum_gradients(self) -> None:
        """The last operator: every microbatch adds its gradients of the parameters to those before it.

        Leaves out: experts, whose share of a rank depends on the plan.
        """
        if not self.gradient_arrays:
            return
        cut = {part.name for part in self.cut_parameters}
        for divided in (True, False):
            elements = sum(
                entry.elements for entry in self.parameters if (entry.name in cut) == divided and ".experts." not in entry.name
            )
            if elements:
                self.moved(elements, self.gradient_arrays, divided=divided, function=GRADIENT_SUM, batch="none")

    def norm(self, name: str, tokens: int, hidden: int, *, divided: bool, kind: str = "layer", arrays: float = 2.0) -> None:
        """A normalisation; a fused one is read and written once."""
        elements = 2 * hidden if kind == "layer" else hidden
        self.moved(tokens * hidden, arrays, divided=divided, parameters=elements)
        self.weight(f"{name}.weight", hidden)
        if kind == "layer":
            self.weight(f"{name}.bias", hidden)
