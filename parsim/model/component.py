"""The work and memory of a piece of a network per sample, independent of any device."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Hashable, Iterable
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Generic, NamedTuple, TypeVar

from parsim.errors import ModelError
from parsim.units import divisors

GRADIENTS = ("", "input", "weight", "none")
"""What a backward computes: gradients of inputs and weights; of inputs alone (the weight is frozen); of weights alone; nothing
(no operand requires a gradient)."""
OPERATOR_KINDS = ("matmul", "convolution", "attention", "embedding", "memory_bound")
LOSS = "loss"
FULL_BYTES, HALF_BYTES = 4, 2
"""Of an element in fp32, in which Models count, and in half precision."""
PAGE_BYTES = 4096
"""On which some kernels begin their arrays."""

# Values of `Operator.function`.
GRADIENT_SUM = "sum of gradients"
"""It adds the gradients of a microbatch to those before it: its forward does nothing."""
BIAS = "bias"
"""It adds a bias to what a product made. Its backward sums the gradient of the bias."""
BIAS_GRADIENT = "gradient of a bias"
"""Another kernel adds the bias: the forward does nothing, the backward sums the gradient of the bias."""
PARTS = "parts of an array"
"""It hands on views of an array. Its backward copies their gradients together."""
UNALIGNED = "unaligned"
"""A product whose rows are no whole multiple of 16 bytes, in a library that then uses no tensor cores."""
NOT_LOW = "not in low precision"
"""A product with a weight that training in 8 or 4 bits leaves in 16."""
DEQUANTISE = "unpack a weight"
"""Makes a weight in 16 bits from one in 4 or 8, in the forward and again in the backward."""
BY_EXPERT = "by expert"
"""A product over several experts, which the host launches one expert after the other."""
CHANNELS_LAST = "channels last"
"""A convolution over arrays whose channels lie side by side (NHWC), as tensor cores read them."""
NORM_RELU, NORM_ADD_RELU = "batch norm and relu", "batch norm, sum and relu"
"""One kernel: a batch norm, the sum with a residual, and ReLU."""
NORM_RELU_OF_SUMS = "batch norm and relu of known sums"
"""The convolution before it made the sums that the norm would read its input for."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Operator:
    """One kernel-sized operation of a component's forward pass, for one sample.

    Attributes:
        kind: one of OPERATOR_KINDS.
        shape: named sizes *for one sample*, e.g. matmul (m, n, k) with m the rows one sample contributes;
            convolution (c, h, w, k, r, s, stride_h, stride_w, groups, out_h, out_w); attention (heads, q, kv, d);
            embedding (rows, width); memory_bound: (elements,) of its output.
        batch: how the kernel grows with the samples: "rows" (m is multiplied), "batch" (one more independent problem per
            sample, as in convolution, attention and batched matmul), "none" (work on parameters alone).
        forward_flop: per sample, multiply and add counted as two; with batch "none" once, whatever the samples.
        activation_bytes: activations read and written, per sample.
        parameter_bytes: parameters read, whatever the samples.
        count: how often it occurs.
        function: "" where unknown. Of a memory-bound one its name in aten, such as "gelu", or one of `GRADIENT_SUM`, `BIAS`,
            `BIAS_GRADIENT`, `DEQUANTISE`, `PARTS`, `NORM_RELU`, `NORM_ADD_RELU`,
            `NORM_RELU_OF_SUMS`. "unlisted:NAME" has no row in the operator table. Of an
            attention "causal" or nothing. Of a product `UNALIGNED`, `NOT_LOW` or `BY_EXPERT`. Of a convolution
            `CHANNELS_LAST` or nothing.
        gradients: one of GRADIENTS, what its backward computes.
    """

    kind: str
    shape: tuple[tuple[str, int], ...]
    batch: str
    forward_flop: float
    activation_bytes: int
    parameter_bytes: int
    count: int = 1
    function: str = ""
    gradients: str = ""

    def __post_init__(self) -> None:
        if self.gradients not in GRADIENTS:
            raise ModelError(f"operator gradients must be one of {', '.join(map(repr, GRADIENTS))}, got {self.gradients!r}")
        if self.kind not in OPERATOR_KINDS:
            raise ModelError(f"unknown operator kind {self.kind!r}; known: {', '.join(OPERATOR_KINDS)}")
        if self.batch not in ("rows", "batch", "none"):
            raise ModelError(f"operator batch must be rows, batch or none, got {self.batch!r}")

    @property
    def low(self) -> bool:
        """Whether it runs in 8 or 4 bits where products do: those with a weight, since frameworks convert layers."""
        return self.parameter_bytes > 0 and self.function not in (NOT_LOW, UNALIGNED)

    def __hash__(self) -> int:
        """Hash few fields: hashing all takes most of the time of a look-up, and equal operators have equal hashes still."""
        return hash((self.kind, self.function, self.forward_flop, self.activation_bytes, self.count))


@dataclass(frozen=True, slots=True, kw_only=True)
class Parameter:
    """A parameter array by its qualified name in the module; a tied one carries one name in all its components.

    `element_bytes`: no whole number for weights in 4 bits, with their scales.
    `trainable`: False for a frozen one (requires_grad False): no gradient, no optimizer state, and only ZeRO 3 sends it.
    `group`: the update group that it belongs to, and the row of OPTIMIZERS that updates this group; "" for the usual one.
    `expert_ways`: its experts are divided over so many neighbouring copies of the stage, and these elements are one part.
    """

    name: str
    elements: int
    element_bytes: float = 4
    trainable: bool = True
    expert_ways: int = 1
    group: str = ""
    optimizer: str = ""

    @property
    def size_bytes(self) -> int:
        return round(self.elements * self.element_bytes)


@dataclass(frozen=True, slots=True, kw_only=True)
class ParameterShard:
    """How one parameter or buffer is divided: dim `dim` consists of `blocks` equal runs, each cut into `ways` equal pieces.

    Shard s holds piece s of every run. A fused query-key-value matrix has 3 runs, with a gate 2; everything else has one.
    `runs`: the sizes of runs that are not equal (fewer heads of keys than of queries); `blocks` is 1 then.
    `size`: of a dim that `ways` need not divide (a vocabulary): the last piece ends in zeros. 0: every dim must divide.
    """

    name: str
    dim: int
    blocks: int = 1
    runs: tuple[int, ...] = ()
    size: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class OperatorShard:
    """An operator that is divided: `number` in the component's operators, cut along `dim` of its shape.
    Flop and parameter bytes of a shard are its share of the whole's (`Share`). Of the activation bytes, only the part
    `activation_bytes` is divided (a column-parallel matmul reads its whole input)."""

    number: int
    dim: str
    activation_bytes: int


class Share(NamedTuple):
    """What one shard has of all that is divided: `own` parts of `whole`. With padding the shares add up to more than one."""

    own: int
    whole: int

    def of(self, size: int) -> int:
        """The shard's part of so many bytes or elements."""
        return size * self.own // self.whole


ALONE = Share(1, 1)
"""Of a component that is not divided."""


def share_of(size: int, ways: int) -> Share:
    """Share of a dim of `size` in equal pieces, the last one padded; size 0: the ways divide."""
    return Share(-(-size // ways), size) if size else Share(1, ways)


Size = tuple[int, int]
"""Bytes per sample, and bytes whatever the samples."""


class DividedSize(NamedTuple):
    """Bytes in a shard: those that every shard has whole, and those it has its part of."""

    bytes_per_sample: int
    fixed_bytes: int
    divided_bytes_per_sample: int
    divided_fixed_bytes: int

    def at(self, share: Share) -> Size:
        """(bytes per sample, fixed bytes) in a shard."""
        (whole, fixed, divided, divided_fixed), (own, ways) = self, share  # as `Share.of`: asked a hundred thousand times
        return whole + divided * own // ways, fixed + divided_fixed * own // ways


Bytes = TypeVar("Bytes", Size, DividedSize)
"""Sizes of a whole component, or of its shards for every number of them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Selective(Generic[Bytes]):
    """What a component keeps, and what runs again, if it is recomputed by operator.

    Attributes:
        values: its inputs and outputs whose storage stays; of shards those of the whole component, left out.
        kept: of the outputs of operators that stay, those in `values` apart.
        again: what the second forward adds to all that is kept and leaves for the backward; below 0 if it frees more.
        first_peaks, second_peaks: the fullest moments of the first forward, as `Footprint.forward_peaks`, and of the second,
            beyond all that is kept.
        operators: (number, how often) of those that run again; of shards left out, as `values`.
    """

    kept: Bytes
    again: Bytes
    first_peaks: tuple[Bytes, ...]
    second_peaks: tuple[Bytes, ...]
    values: tuple[str, ...] = ()
    operators: tuple[tuple[int, int], ...] = ()

    def resized(self, resize: Callable[[Bytes], Bytes], fullest: Callable[[Bytes], Bytes] | None = None) -> Selective[Bytes]:
        """Every size changed; `fullest`: those of the fullest moments of the first forward, if they change otherwise."""
        return replace(
            self,
            kept=resize(self.kept),
            again=resize(self.again),
            first_peaks=tuple(map(fullest or resize, self.first_peaks)),
            second_peaks=tuple(map(resize, self.second_peaks)),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class SplitBackward:
    """The first half of a backward that puts off the gradients of parameters.

    Attributes:
        peaks: its moments that can be the fullest, beyond all saved activations, of which none is let go meanwhile; with the
            gradients of outputs and inputs.
        waiting: what it leaves for the second half beyond the saved activations, without the gradients of inputs: what arrived
            at operators with parameters, less what only operators behind them had saved.
    """

    peaks: tuple[Size, ...]
    waiting: Size


@dataclass(frozen=True, slots=True, kw_only=True)
class Footprint(Generic[Bytes]):
    """Memory of a component, or what its shards have of it, in fp32 or under autocast to half precision.

    Attributes:
        saved_activation_bytes, saved_fixed_bytes: what the forward keeps for the backward, per sample and whatever the samples;
            a storage saved by two components belongs to the first. Of a sharding: the part of the component's that is divided.
        cast_bytes: half-precision copies of weights that are kept for the backward, which saved_fixed_bytes leaves out. Of a
            sharding: the part that is divided. 0 without autocast.
        forward_peaks: the moments of the forward that can be the fullest. They count live tensors it has made so far, saved
            ones included. Empty: not counted.
        backward_peaks: the moments of the backward that can be the fullest. They count live bytes beyond all saved activations,
            with the gradients of outputs, inputs and parameters. Empty: not counted.
        selective: as it is recomputed by operator; None: it cannot be, or that keeps no less.
        split_backward: the backward in halves; None: not counted (as of shards), or it has none (no parameters, or no gradient
            of an input).
    """

    saved_activation_bytes: int = 0
    saved_fixed_bytes: int = 0
    cast_bytes: int = 0
    forward_peaks: tuple[Bytes, ...] = ()
    backward_peaks: tuple[Bytes, ...] = ()
    selective: Selective[Bytes] | None = None
    split_backward: SplitBackward | None = None


FULL = "full"
PARTIAL = "partial"
MAXIMUM = "maximum"


@dataclass(frozen=True, slots=True, kw_only=True)
class Sharding(Footprint[DividedSize]):
    """One way of dividing a component over `ways` ranks with no communication inside it (`parsim.model.component` does it).

    Attributes:
        rule: unique in the component: column, row, heads, vocabulary, channels_out, channels_in, follow, or several
            joined by "+", in the order they apply.
        limit: `ways` must divide it (heads, features, channels, vocabulary rows: the greatest common divisor).
        size: of the vocabulary, if that is all that is cut. Then other `ways` up to MOST_PADDED are possible as well: pieces
            have ceil(size / ways) rows, the last one ends in zeros. 0: `ways` must divide `limit`.
        inputs: per input what a shard needs: "full", or "shard:d" (its piece of dim d of that value, the batch being dim 0).
        outputs: per output what a shard makes: "partial" (the sum over the shards is the value), "maximum" (the largest of
            theirs is it), "shard:d", or "full" for what every shard makes whole (a mask, rotary positions, a sum of
            residuals); shard 0 takes its gradient.
        parameters, buffers: those that are divided; what is not listed, every shard holds whole.
        operators: those that are divided; the others run whole on every shard.
        half: its memory under autocast; None: not recorded.
    """

    rule: str
    limit: int
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    parameters: tuple[ParameterShard, ...] = ()
    buffers: tuple[ParameterShard, ...] = ()
    operators: tuple[OperatorShard, ...] = ()
    half: Footprint[DividedSize] | None = None
    size: int = 0

    def allows(self, ways: int) -> bool:
        """Whether it can be done in so many shards, none of them of padding alone."""
        padded = self.size and ways <= MOST_PADDED and (ways - 1) * share_of(self.size, ways).own < self.size
        return ways >= 1 and (self.limit % ways == 0 or bool(padded))

    def share(self, ways: int) -> Share:
        """What one of so many shards has of all that is divided."""
        return share_of(self.size, ways)


MOST_PADDED = 128
"""Into so many shards at most a vocabulary is cut that they do not divide."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ValueFootprint:
    """Memory of a value, in fp32 or under autocast to half precision.

    Attributes:
        bytes_per_sample, fixed_bytes: size = samples * bytes_per_sample + fixed_bytes.
        saved: its storage is counted in some component's saved activations.
        savers: the components whose backward needs it, in the order in which they run; the first counts it. Empty: none does,
            so that it is let go once it is read. None: unknown.
    """

    bytes_per_sample: int
    fixed_bytes: int = 0
    saved: bool = True
    savers: tuple[str, ...] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Value(ValueFootprint):
    """A tensor that crosses a component boundary, or enters or leaves the model.

    Attributes:
        name: unique in the model, e.g. "input:0", "layer1.0:0".
        producer: the component that makes it; None for an input of the model.
        storage_bytes_per_sample: of the memory it is a view of, which whoever keeps it where it was made keeps too; 0: it is
            all of that memory.
        differentiable: False for token ids, masks, positions.
        batch_first: dim 0 is the samples, so that it can be cut into pieces of the batch and put together again.
        half: its memory under autocast; None: not recorded.
    """

    name: str
    producer: str | None
    differentiable: bool = True
    batch_first: bool = True
    storage_bytes_per_sample: int = 0
    half: ValueFootprint | None = None

    def size_bytes(self, samples: int) -> int:
        return self.bytes_per_sample * samples + self.fixed_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class InnerExchange:
    """What ranks exchange inside a component whose sequence or experts are divided, bytes per sample.

    Attributes:
        context_ways, expert_ways: over how many ranks; 1: not divided.
        context_bytes: keys and values of all pieces of the sequence together.
        expert_bytes: what one rank sends to the experts that its tokens visit, as often as each visits.
        expert_visits: of a token, where it is sent once to each rank and node; 0: where it is sent for each visit.
        overlapped, delayed: as in `parsim.model.divided.ExpertRouting`.
        experts: numbers of the operators that experts run.
    """

    context_ways: int = 1
    context_bytes: int = 0
    expert_ways: int = 1
    expert_bytes: int = 0
    expert_visits: int = 0
    overlapped: bool = False
    delayed: bool = False
    experts: tuple[int, ...] = ()


NORM_ARRAYS = 4
"""Arrays of a batch norm with a number per channel: weight, bias, running mean and variance."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Component(Footprint[Size]):
    """The paper's c_i: a layer or a block that can be run on its own.

    Attributes:
        inputs, outputs: names of Values. parameters: those used, tied ones included.
        buffer_bytes: running statistics and the like.
        paged_bytes: per sample, of arrays among the saved ones that a kernel begins on a page of `PAGE_BYTES` each. The other
            numbers count them without that.
        pair_bytes: of what compares every sample with every other (a contrastive loss), times the square of the samples. Three
            numbers: among the saved bytes, and the most in any moment of the forward and of the backward. No other number
            has it.
        shardings: the ways it can be tensor-sharded; none: it cannot.
        half: its memory under autocast; None: not recorded.
        inside: of a piece of the sequence, or with divided experts (`parsim.model.divided`); None: neither.
        gradient_views: (input, output), where the gradient of the input is a part of the memory of the output's, as behind a
            concatenation.
    """

    name: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    parameters: tuple[Parameter, ...] = ()
    buffer_bytes: int = 0
    operators: tuple[Operator, ...] = ()
    shardings: tuple[Sharding, ...] = ()
    half: Footprint[Size] | None = None
    inside: InnerExchange | None = None
    paged_bytes: tuple[int, ...] = ()
    pair_bytes: tuple[int, int, int] = (0, 0, 0)
    gradient_views: tuple[tuple[str, str], ...] = ()

    def at_samples(self, samples: int) -> Component:
        """The component with what is not linear in its samples as fixed bytes: pairs of samples, and the rest of last pages.
        The fixed bytes hold for this number of samples alone."""
        if not self.paged_bytes and not any(self.pair_bytes):
            return self
        rest = sum(-size * samples % PAGE_BYTES for size in self.paged_bytes)
        saved, forward, backward = (size * samples**2 for size in self.pair_bytes)
        selective = self.selective
        if selective is not None:  # a kernel's kept outputs, with the rest of their last pages
            selective = replace(
                selective,
                kept=(selective.kept[0], selective.kept[1] + rest),
                first_peaks=tuple((rate, fixed + rest) for rate, fixed in selective.first_peaks),
            )
        return replace(
            self,
            saved_fixed_bytes=self.saved_fixed_bytes + rest + saved,
            forward_peaks=tuple((rate, fixed + rest + forward) for rate, fixed in self.forward_peaks),
            backward_peaks=tuple((rate, fixed + backward) for rate, fixed in self.backward_peaks),
            selective=selective,
            split_backward=None if any(self.pair_bytes) else self.split_backward,
            paged_bytes=(),
            pair_bytes=(0, 0, 0),
        )

    def __hash__(self) -> int:
        """Hash few fields, as Operator does."""
        return hash((self.name, len(self.operators), self.saved_activation_bytes))

    def sharding(self, rule: str) -> Sharding:
        """Raises ModelError if the component has no such rule."""
        for sharding in self.shardings:
            if sharding.rule == rule:
                return sharding
        rules = ", ".join(sharding.rule for sharding in self.shardings) or "none: it cannot be sharded"
        raise ModelError(f"component {self.name} has no sharding rule {rule!r}; it has {rules}")

    @property
    def least_samples(self) -> int:
        """Samples that it must see at once in training: 2 where a batch norm has one value per channel and sample.
        Its variance is that of one value otherwise, which torch refuses. Leaves out norms without weight and bias."""
        element = self.parameters[0].element_bytes if self.parameters else 4
        alone = any(
            operator.function == "native_batch_norm"
            and operator.parameter_bytes == NORM_ARRAYS * element * dict(operator.shape).get("elements", 0)
            for operator in self.operators
        )
        return 2 if alone else 1

    @property
    def forward_flop(self) -> float:
        """Per sample; work on parameters alone is none of a sample's."""
        return sum(operator.forward_flop * operator.count for operator in self.operators if operator.batch != "none")

    @property
    def parameter_bytes(self) -> int:
        return sum(parameter.size_bytes for parameter in self.parameters)

    @property
    def update_groups(self) -> tuple[tuple[int, str, str], ...]:
        """The elements, group and optimizer of parameters that are in a group; they change no work of the component."""
        grouped = (parameter for parameter in self.parameters if parameter.group)
        return tuple((parameter.elements, parameter.group, parameter.optimizer) for parameter in grouped)

    @property
    def trainable_parameters(self) -> tuple[Parameter, ...]:
        return tuple(parameter for parameter in self.parameters if parameter.trainable)

    @property
    def divisions(self) -> tuple[Hashable, ...]:
        """What its shardings do to its work: equal for components that differ in the names of their parameters alone."""
        place = {parameter.name: number for number, parameter in enumerate(self.parameters)}
        return tuple(
            (
                *(sharding.rule, sharding.limit, sharding.size, sharding.operators),
                *(sharding.saved_activation_bytes, sharding.saved_fixed_bytes),
                tuple(place.get(part.name, -1) for part in sharding.parameters),
            )
            for sharding in self.shardings
        )

    @property
    def fingerprint(self) -> str:
        """Equal for components that do the same work per sample, whatever their names: a measured cost is kept under it."""
        return _fingerprint(self.operators, self.parameters, self.saved_activation_bytes, len(self.inputs), len(self.outputs))


class _Fingerprinted(NamedTuple):
    """An operator whose text has a key that came later only where it is not the default: fingerprints stay what they were."""

    operator: Operator

    def __repr__(self) -> str:
        text = repr(self.operator)
        return text if self.operator.gradients else text.replace(", gradients='')", ")")


@lru_cache(maxsize=16384)
def _fingerprint(
    operators: tuple[Operator, ...], parameters: tuple[Parameter, ...], saved_bytes: int, inputs: int, outputs: int
) -> str:
    counts: dict[Operator, int] = {}
    for operator in operators:  # alike but for how they shard: one with both counts
        alone = replace(operator, count=1)
        counts[alone] = counts.get(alone, 0) + operator.count
    work = tuple(_Fingerprinted(replace(operator, count=count)) for operator, count in counts.items())
    sizes = sorted((each.elements, each.element_bytes, *(() if each.trainable else ("frozen",))) for each in parameters)
    text = repr((work, sizes, saved_bytes, inputs, outputs))
    return hashlib.sha256(text.encode()).hexdigest()[:16]


# One shard of a component, as a component: the form in which costs, memory and calibration use tensor shards.


@lru_cache(maxsize=65536)
def narrow(component: Component, rule: str, ways: int) -> Component:
    """The component that one of `ways` shards under `rule` runs; the component itself for rule "" or one way.
    Its operators, parameters and saved bytes are those of one shard, so its fingerprint tells it from the whole. Buffers are
    counted whole. Values keep the sizes they have outside. The memory is that of the component's precision: take that first
    (`parsim.model.formats.component_in`). Raises ModelError: no such rule, or `ways` does not divide its limit."""
    if not rule or ways == 1:
        return component
    sharding = component.sharding(rule)
    check_ways(component.name, sharding, ways, component.shardings)
    cut_parameters = {part.name for part in sharding.parameters}
    cuts = {part.number: part for part in sharding.operators}
    share = sharding.share(ways)

    def left(whole: int, divided: int) -> int:
        return whole - divided + share.of(divided)

    def peaks(sizes: tuple[DividedSize, ...]) -> tuple[Size, ...]:
        return tuple(size.at(share) for size in sizes)

    def operator_of_shard(operator: Operator, cut: OperatorShard) -> Operator:
        return replace(
            operator,
            shape=tuple((dim, share.of(size) if dim == cut.dim else size) for dim, size in operator.shape),
            forward_flop=operator.forward_flop * share.own / share.whole,
            activation_bytes=left(operator.activation_bytes, cut.activation_bytes),
            parameter_bytes=share.of(operator.parameter_bytes),
        )

    selective, inside = None, component.inside
    if component.selective is not None and sharding.selective is not None:
        selective = replace(
            component.selective,
            kept=sharding.selective.kept.at(share),
            again=sharding.selective.again.at(share),
            first_peaks=peaks(sharding.selective.first_peaks),
            second_peaks=peaks(sharding.selective.second_peaks),
        )
    if inside is not None:
        inside = replace(inside, context_bytes=share.of(inside.context_bytes), expert_bytes=share.of(inside.expert_bytes))
    return replace(
        component,
        parameters=tuple(
            replace(parameter, elements=share.of(parameter.elements)) if parameter.name in cut_parameters else parameter
            for parameter in component.parameters
        ),
        operators=tuple(
            operator_of_shard(operator, cuts[number]) if number in cuts else operator
            for number, operator in enumerate(component.operators)
        ),
        saved_activation_bytes=left(component.saved_activation_bytes, sharding.saved_activation_bytes),
        saved_fixed_bytes=left(component.saved_fixed_bytes, sharding.saved_fixed_bytes),
        cast_bytes=left(component.cast_bytes, sharding.cast_bytes),
        shardings=(),
        forward_peaks=peaks(sharding.forward_peaks),
        backward_peaks=peaks(sharding.backward_peaks),
        half=None,
        split_backward=None,  # not counted for shards
        selective=selective,
        inside=inside,
    )


_CUT = {
    "heads": "heads of queries, keys and values",
    "queries": "heads of queries",
    "column": "output features",
    "row": "input features",
    "vocabulary": "rows of the table",
    "channels_out": "output channels",
    "channels_in": "input channels",
    "follow": "features or channels",
}
"""What each part of a rule's name cuts."""


def check_ways(component: str, sharding: Sharding, ways: int, others: Iterable[Sharding] = ()) -> None:
    """Whether a component, which has a name, can be cut into that many shards. `others`: its shardings, for the message.
    Raises ModelError: what is cut, the nearest ways that divide it, and the rules that allow these ways."""
    if sharding.allows(ways):
        return
    cut = ", ".join(dict.fromkeys(_CUT.get(name, name) for name in sharding.rule.split("+")))
    possible = ways_of(sharding)
    nearest = [*[number for number in possible if number < ways][-1:], *[number for number in possible if number > ways][:1]]
    rules = [other.rule for other in others if other.allows(ways)]
    padded = f"or be at most {MOST_PADDED} and leave no shard empty " if sharding.size else ""
    instead = f"; rule {' or '.join(rules)} allows {ways}" if rules else ""
    raise ModelError(
        f"component {component} cannot be cut into {ways} shards by rule {sharding.rule}: {ways} must divide {sharding.limit} "
        f"{padded}(what its {cut} have in common); nearest: {' or '.join(map(str, nearest)) or 'none but 1'}{instead}"
    )


def ways_of(sharding: Sharding) -> list[int]:
    """All ways but one that it allows, ascending."""
    possible = {*divisors(sharding.limit), *range(2, min(sharding.size, MOST_PADDED) + 1)}
    return sorted(ways for ways in possible if ways > 1 and sharding.allows(ways))
