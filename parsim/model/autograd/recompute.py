"""Which kernel calls of a forward are kept, and which run again, where a component is recomputed by operator.

The outputs of the operators in `KEPT` stay from the first forward on: products with weights, convolutions,
recurrent kernels and fused attention. Everything else (norms, activation functions, dropout, softmax, products of activations
such as attention's scores) runs again. Of both only what the backward needs counts: a product that nothing in the component
needs any more is neither kept nor repeated.

torchtitan's selective checkpointing keeps nearly the same operators (of plain products every second). Megatron-LM's repeats the
core of unfused attention alone, which is among what runs again here.

What runs again is found on the calls below autograd. A storage has versions: every call that writes into it begins a new
one. The versions that autograd saved are needed; so is whatever a call reads that runs again. Calls that write in place on a
kept output (an activation function after a convolution) are part of it.

Leaves out: reads of a tensor by code that no operator shows (`.data_ptr()`, NumPy).
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from parsim.errors import TraceError
from parsim.model.autograd.cut import Forward, Saved, StorageRef, forward_component, tensors_among
from parsim.model.runnable import Runnable
from parsim.model.trace.fakes import CallWatch
from parsim.private import FakeTensor, tree_flatten, tree_unflatten

# Which operators are kept where a component is recomputed by operator, and what their schemas say of them.


KEPT: frozenset[str] = frozenset(
    f"aten.{name}"
    for name in (
        *("mm", "addmm", "addmv", "mv", "linear", "convolution", "_grouped_mm", "_scaled_mm"),
        *("mkldnn_rnn_layer", "_cudnn_rnn", "_thnn_fused_lstm_cell", "_thnn_fused_gru_cell"),
        *("_flash_attention_forward", "_efficient_attention_forward", "_scaled_dot_product_flash_attention"),
        *("_scaled_dot_product_flash_attention_for_cpu", "_scaled_dot_product_efficient_attention"),
        *("_scaled_dot_product_cudnn_attention", "_scaled_dot_product_fused_attention_overrideable"),
    )
)
"""Operators whose outputs are kept: dear to compute for their size. `aten.bmm` is not among them, because the scores of unfused
attention are one."""

_SIZES_FROM_DATA = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape}


@cache
def draws(function: Any) -> bool:
    """Whether an operator takes random numbers."""
    return torch.Tag.nondeterministic_seeded in function.tags


@cache
def _is_kept(function: Any) -> bool:
    return str(function._overloadpacket) in KEPT


@cache
def _written_arguments(function: Any) -> tuple[tuple[int, str], ...]:
    """Places and names of the arguments that an operator's schema says are written."""
    return tuple(
        (place, argument.name)
        for place, argument in enumerate(function._schema.arguments)
        if argument.alias_info is not None and argument.alias_info.is_write
    )


_DETACH = torch.ops.aten.detach.default
"""Autograd calls it more or less often, and it computes nothing."""

_EMPTY = torch.ops.aten.empty_strided.default

Version = tuple[int, int]
"""A storage, counted in the order of their births, and how often it was written since."""


class Repeat(Enum):
    """What the second forward does with a call."""

    RUN = "run"
    KEPT = "take the output that was kept"
    WRITTEN = "nothing: it writes into an output that was kept as it was at the end, or that nobody reads"
    UNREAD = "make room for an output that nobody reads"


class Like(NamedTuple):
    """What a tensor was like."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device

    @classmethod
    def of(cls, tensor: Tensor) -> Like:
        device = tensor.fake_device if type(tensor) is FakeTensor else tensor.device  # which would ask an operator
        return cls(tuple(tensor.shape), tensor.stride(), tensor.dtype, device)

    def room(self) -> Tensor:
        """Another tensor like it, of any content."""
        return torch.empty_strided(self.shape, self.stride, dtype=self.dtype, device=self.device)


@dataclass(slots=True, kw_only=True)
class KernelCall:
    """One call below autograd.

    Attributes:
        reads, writes: versions of storages. view: it computes nothing. begins: all its outputs are new storages.
        outputs: what they were like, or themselves where they are no tensors. structure: of the result; None: one tensor.
        returned: the place of the argument that it returns; -1: it returns none.
        held: the outputs of an operator in KEPT. state: of the generator after it, where it draws random numbers.
    """

    function: Any
    reads: tuple[Version, ...] = ()
    writes: tuple[Version, ...] = ()
    view: bool = False
    begins: bool = False
    outputs: tuple[Any, ...] = ()
    structure: Any = None
    returned: int = -1
    held: tuple[Any, ...] | None = None
    state: Tensor | None = None
    repeat: Repeat = Repeat.RUN

    @property
    def draws(self) -> bool:
        """Whether it takes random numbers."""
        return draws(self.function)

    @property
    def decides(self) -> bool:
        """Whether what follows depends on values that it reads: a number, or a shape."""
        return not self.writes or not _SIZES_FROM_DATA.isdisjoint(self.function.tags)


@dataclass(slots=True, kw_only=True)
class KeptCalls:
    """The calls of a first forward, once it has ended.
    `calls`: in order. `inputs`: per input of the component whether the second forward or the backward needs it. `outputs`: per
    output whether its storage is kept. `kept_bytes`: of what is kept, storages of outputs apart."""

    calls: list[KernelCall]
    inputs: tuple[bool, ...]
    outputs: tuple[bool, ...]
    kept_bytes: int


def _forgetting(numbers: dict[int, tuple[int, StorageRef]]) -> Callable[[StorageRef], None]:
    """Drops from `numbers` the storages that die. It holds nothing else, so what was watched can be freed before they do."""

    def forget(ref: StorageRef) -> None:
        if ref.key in numbers and numbers[ref.key][1] is ref:
            del numbers[ref.key]

    return forget


class FirstForward(CallWatch):
    """Watches the calls of a first forward, and holds the outputs of operators in KEPT until it is known which are needed."""

    def __init__(self, given: Iterable[Tensor]) -> None:
        """`given`: what is there before (inputs, parameters, buffers and constants)."""
        super().__init__()
        self.calls: list[KernelCall] = []
        self._number: dict[int, tuple[int, StorageRef]] = {}
        self._forget = _forgetting(self._number)
        self._versions: list[int] = []
        self._needed: set[Version] = set()
        for tensor in given:
            self._storage(tensor)

    def saved(self, tensor: Tensor) -> None:
        """Autograd would save it for the backward: a saved-tensor hook that keeps nothing."""
        number = self._storage(tensor)
        self._needed.add((number, self._versions[number]))

    def _storage(self, tensor: Tensor) -> int:
        known = self._number.get(tensor.untyped_storage()._cdata)
        return self._begin(tensor) if known is None else known[0]

    def _begin(self, tensor: Tensor) -> int:
        """A new storage. Its address may be another one's later."""
        ref, number = StorageRef(tensor.untyped_storage(), self._forget), len(self._versions)
        self._number[ref.key] = number, ref
        self._versions.append(0)
        return number

    def around(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The result of the call, which is noted."""
        if func is _DETACH:
            return func(*args, **kwargs)
        given = tensors_among((*args, *kwargs.values()) if kwargs else args)
        read = tuple(dict.fromkeys([(number, self._versions[number]) for number in map(self._storage, given)]))
        result = func(*args, **kwargs)
        leaves, structure = ([result], None) if isinstance(result, Tensor) else tree_flatten(result)
        made = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
        fresh: dict[int, int] = {}
        keys = [tensor.untyped_storage()._cdata for tensor in made]
        for tensor, key in zip(made, keys, strict=True):
            if key not in self._number:
                fresh[key] = self._begin(tensor)
        written: dict[int, None] = {}
        for place, name in _written_arguments(func):
            value = args[place] if place < len(args) else kwargs.get(name)
            written.update((self._storage(leaf), None) for leaf in tensors_among((value,)))
        for number in written:
            self._versions[number] += 1
        if made and not written and not fresh:
            self.calls.append(KernelCall(function=func, view=True))
            return result
        noted = KernelCall(
            function=func,
            reads=read,
            writes=tuple([(number, self._versions[number]) for number in (*written, *fresh.values())]),
            begins=bool(made) and all(key in fresh for key in keys),
            outputs=tuple([Like.of(leaf) if isinstance(leaf, Tensor) else leaf for leaf in leaves]),
            structure=structure,
            returned=next((place for place, leaf in enumerate(given) if leaf is result), -1),
        )
        if noted.begins and not written and _is_kept(func):
            noted.held = tuple(leaf.detach() if isinstance(leaf, Tensor) else leaf for leaf in leaves)
            noted.state = generator_state(made[0].device) if noted.draws else None
        self.calls.append(noted)
        return result

    def ended(self, inputs: Sequence[Tensor], outputs: Sequence[Tensor], buffers: Sequence[Tensor] = ()) -> KeptCalls:
        """Chooses what is kept; what is held beyond that is let go.
        `inputs`, `outputs`: of the component. `buffers`: given ones of which there are copies from before. Raises TraceError:
        the component writes into an input that has to be read again."""
        wanted = _choose(self.calls, self._needed, self._versions)
        restored = {number for call in self.calls for number, version in call.writes if version == 0}
        restored.update(map(self._storage, buffers))
        if any(number not in restored and self._versions[number] > version for number, version in wanted):
            raise TraceError(
                "a component that is recomputed writes in place into what it is given, so it cannot run twice. Use the "
                'operator that is not in place, or recompute = "none" for it'
            )
        storages = {number for number, _ in wanted}
        kept: dict[int, int] = {}
        for call in self.calls:
            if call.held is None or call.repeat is not Repeat.KEPT:
                call.held = None
                continue
            call.held = tuple(
                Like.of(leaf) if isinstance(leaf, Tensor) and self._storage(leaf) not in storages else leaf
                for leaf in call.held
            )
            for leaf in call.held:
                if isinstance(leaf, Tensor):
                    kept[self._storage(leaf)] = leaf.untyped_storage().nbytes()
        of_inputs, of_outputs = list(map(self._storage, inputs)), list(map(self._storage, outputs))
        stay = kept.keys() | (storages & set(of_inputs))
        return KeptCalls(
            calls=self.calls,
            inputs=tuple(number in storages for number in of_inputs),
            outputs=tuple(number in stay for number in of_outputs),
            kept_bytes=sum(size for number, size in kept.items() if number not in of_outputs),
        )


def _choose(calls: Sequence[KernelCall], needed: Iterable[Version], versions: Sequence[int]) -> set[Version]:
    """Sets what the second forward does with every call.
    `calls`: of the first forward. `needed`: versions that autograd saved. `versions`: of every storage at the end. Returns the
    versions that the backward or a call that runs again reads."""
    refused: set[int] = set()  # storages that are kept at the end, and wanted as they were before that
    while True:
        keepable, wanted, early = _keepable(calls, refused), set(needed), set[int]()
        for call in reversed(calls):
            if call.view:
                continue
            storages = {number for number, _ in call.writes}
            if call.writes and storages <= keepable and (call.begins or call.returned >= 0):
                hit = {version for version in wanted if version[0] in storages}
                early |= {number for number, version in hit if version < versions[number]}
                call.repeat = Repeat.WRITTEN if not call.begins else Repeat.KEPT if hit else Repeat.UNREAD
                continue
            read_again = any(version in wanted for version in call.writes) or call.decides or call.draws
            if read_again or not (call.begins or call.returned >= 0):
                call.repeat = Repeat.RUN
                wanted.update(call.reads)
            else:
                call.repeat = Repeat.UNREAD if call.begins else Repeat.WRITTEN
        if not early:
            return wanted
        refused |= early


def _keepable(calls: Sequence[KernelCall], refused: set[int]) -> set[int]:
    """Storages of outputs that are held, and into which nothing is written later but by calls that can be left out."""
    keepable: set[int] = set()
    for call in calls:
        storages = {number for number, _ in call.writes}
        if call.held is not None and not storages & refused:
            keepable |= storages
        elif storages & keepable and not (storages <= keepable and call.returned >= 0 and not call.draws):
            keepable -= storages
    held = [{number for number, _ in call.writes} for call in calls if call.held is not None]
    for storages in held:  # of an operator with several outputs all can be kept or none
        if not storages <= keepable:
            keepable -= storages
    return keepable & set().union(*held)


class SecondForward(CallWatch):
    """The calls of the first forward again, without those whose output is kept or not read."""

    def __init__(self, kept: KeptCalls) -> None:
        super().__init__()
        self._calls = iter(kept.calls)

    def around(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The result of the call, or what stands for it."""
        if func is _DETACH:
            return func(*args, **kwargs)
        noted = next(self._calls, None)
        if noted is None or noted.function is not func:
            raise TraceError(
                f"a component that is recomputed called {func} where its first forward called "
                f"{'nothing more' if noted is None else noted.function}; what it computes must not change between two calls"
            )
        match noted.repeat:
            case Repeat.RUN:
                return func(*args, **kwargs)
            case Repeat.WRITTEN:
                return tensors_among((*args, *kwargs.values()))[noted.returned]
        leaves = noted.held if noted.held is not None else noted.outputs
        noted.held = None
        if noted.state is not None:
            device = next(output.device for output in noted.outputs if isinstance(output, Like))
            set_generator_state(noted.state, device)
        made = [
            _EMPTY(leaf.shape, leaf.stride, dtype=leaf.dtype, device=leaf.device) if isinstance(leaf, Like) else leaf
            for leaf in leaves
        ]
        return made[0] if noted.structure is None else tree_unflatten(made, noted.structure)


def generator_state(device: torch.device) -> Tensor:
    """State of the generator that kernels on the device draw from."""
    return torch.cuda.get_rng_state(device) if device.type == "cuda" else torch.get_rng_state()


def set_generator_state(state: Tensor, device: torch.device) -> None:
    """Give the generator that kernels on the device draw from another state."""
    if device.type == "cuda":
        torch.cuda.set_rng_state(state, device)
    else:
        torch.set_rng_state(state)


# Forward of a component that keeps only its inputs, and the same forward again when its backward needs saved tensors.
#
# The second run has the same inputs, generator states (so dropout draws the same mask) and buffers as the first. Its changes
# to buffers are discarded, so running statistics are updated once.
#
# By operator, the outputs of some operators are kept too and not computed again. Inputs that nothing reads again are not kept.
#
# Leaves out: whatever else a forward may read that changes between the two runs (a global, a file).


CPU = torch.device("cpu")


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RecomputeInputs:
    """What a second run of a forward needs.

    Attributes:
        inputs: as given, or what those were like that nothing reads again. buffers: copies from before the first run, in the
            order of `Runnable.buffer_names`.
        generators: by device the states of those that it may draw from.
        calls: which calls run again; None: all.
    """

    inputs: tuple[Tensor | Like, ...]
    buffers: tuple[Tensor, ...]
    generators: Mapping[torch.device, Tensor]
    calls: KeptCalls | None = None


def forward_to_recompute(
    runnable: Runnable,
    inputs: Sequence[Tensor],
    device: torch.device,
    *,
    by_operator: bool,
    draws: bool = True,
    on_host: bool = True,
) -> tuple[tuple[Tensor, ...], RecomputeInputs]:
    """Run `runnable` on `inputs` without saving anything for a backward. Returns outputs, and what `recompute` needs.

    `by_operator`: keep outputs of operators that are dear to compute and that something needs again. `draws`: it may draw
    random numbers. If it does not, generators are left alone, which others may use meanwhile. `on_host`: on a GPU, also from
    the generator of the CPU. If it does not, that one is left alone. Raises TraceError if by operator a component writes in
    place into an input that is read again.
    """
    buffers = runnable.buffers()
    places = [*([CPU] if on_host or device.type == "cpu" else []), *([device] if device.type == "cuda" else [])]
    detached = tuple(value.detach() for value in inputs)
    again = RecomputeInputs(
        inputs=detached,
        buffers=tuple(buffer.clone() for buffer in buffers),
        generators={place: generator_state(place) for place in places if draws},
    )
    if not by_operator:
        with torch.no_grad():
            return forward_component(runnable, inputs)[0], again
    given = (*runnable.parameters(), *(constant for constant, _ in runnable.program.constants))
    outputs, calls = first_forward(runnable, inputs, FirstForward((*inputs, *given, *buffers)), buffers)
    kept = tuple(value if read else Like.of(value) for value, read in zip(detached, calls.inputs, strict=True))
    return outputs, replace(again, inputs=kept, calls=calls)


def first_forward(
    forward: Forward, inputs: Sequence[Tensor], watch: FirstForward, buffers: Sequence[Tensor] = ()
) -> tuple[tuple[Tensor, ...], KeptCalls]:
    """A forward that keeps what is dear to compute, and saves nothing else.
    Gradients are on, as in the second forward, because some functions of torch call other operators without them. `forward`: of
    a component. `watch`: new, with all that the forward is given. `buffers`: of which there are copies from before. Raises
    TraceError as `FirstForward.ended` does."""

    def read_too_early(nothing: object) -> Tensor:
        raise AssertionError(f"a first forward saves {nothing}, and no backward runs before the second one")

    with torch.autograd.graph.saved_tensors_hooks(watch.saved, read_too_early), watch:
        outputs, _ = forward_component(forward, inputs)
    return outputs, watch.ended(inputs, outputs, buffers)


def second_forward(forward: Forward, inputs: Sequence[Tensor | Like], calls: KeptCalls) -> Saved:
    """What is not kept once more, saving for the backward. Raises TraceError if it makes other calls than the first time.
    `forward`, `calls`: of `first_forward`. `inputs`: as it had them, or what those were like that nothing reads again."""
    given = [value.room() if isinstance(value, Like) else value for value in inputs]
    with SecondForward(calls):
        return forward_component(forward, given)[1]


def recompute(runnable: Runnable, kept: RecomputeInputs) -> Saved:
    """Run the forward again, saving for its backward. Generators and buffers are afterwards as they were before."""
    if kept.calls is None:
        return forward_again(runnable, kept, [value for value in kept.inputs if isinstance(value, Tensor)])[1]
    with _generators_of(kept), runnable.reading_buffers(kept.buffers):
        return second_forward(runnable, kept.inputs, kept.calls)


def forward_again(runnable: Runnable, kept: RecomputeInputs, inputs: Sequence[Tensor]) -> tuple[tuple[Tensor, ...], Saved]:
    """A second forward on these inputs, with the generators and buffers of the first: outputs, and what its backward needs."""
    with _generators_of(kept), runnable.reading_buffers(kept.buffers):
        return forward_component(runnable, inputs)


@contextlib.contextmanager
def _generators_of(kept: RecomputeInputs) -> Iterator[None]:
    """Inside, generators are in the states of the first run."""
    before = {place: generator_state(place) for place in kept.generators}
    try:
        for place, state in kept.generators.items():
            set_generator_state(state, place)
        yield
    finally:
        for place, state in before.items():
            set_generator_state(state, place)
