"""What a forward hands on to the next one: buffers, frozen parameters and attributes that it writes and that its loss reads.

A step divides its batch among replicas and microbatches, and each part is one forward. So state that is computed from samples
differs between replicas, and state that is computed from weights alone moves once per microbatch. BatchNorm's running
statistics do not count: training does not read them. Tensors that share memory count as one.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from parsim.errors import first_few
from parsim.model.tracing.recorder import SET_DATA, RecordedOp, Recording, storage_key

_NORMS = ("batch_norm", "instance_norm")
_OVERWRITING = ("copy_", "zero_", "fill_")
"""Nothing of what was there before is left."""


@dataclass(frozen=True, kw_only=True)
class CarriedState:
    """Names of parameters and buffers that a forward writes and its loss reads, by what they are computed from.

    Attributes:
        from_samples: from the samples of a batch. from_weights: from weights and state alone.
    """

    from_samples: tuple[str, ...] = ()
    from_weights: tuple[str, ...] = ()

    @property
    def notes(self) -> tuple[str, ...]:
        """What the answer says."""
        told = []
        if self.from_samples:
            told.append(
                f"computed from the samples of a step and used in later ones: {first_few(self.from_samples)}. Each replica and "
                "microbatch takes its own samples for that"
            )
        if self.from_weights:
            told.append(
                f"the forward itself updates {first_few(self.from_weights)}: once per microbatch, so their number changes what "
                "is trained"
            )
        return tuple(told)


class _Flow:
    """Memory that holds something of a sample, and the state whose first value a piece of memory holds something of.

    Attributes:
        written: by the name of a state that has been written, whether something of a sample was.
    """

    def __init__(self, recording: Recording, named: Mapping[int, str], samples: Iterable[int]) -> None:
        self._key = {number: storage_key(tensor) for number, tensor in enumerate(recording.tensors)}
        self._named = dict(named)
        self._states = {self._key[number]: name for number, name in named.items()}
        self._carried = {key: frozenset({name}) for key, name in self._states.items()}
        self._samples = {self._key[number] for number in samples}
        self.written: dict[str, bool] = {}

    def is_sampled(self, number: int) -> bool:
        """Whether a value holds something of a sample."""
        return self._key[number] in self._samples

    def held(self, number: int) -> frozenset[str]:
        """The state whose first value a value holds something of."""
        found = self._carried.get(self._key[number], frozenset())
        return found | {self._named[number]} if number in self._named else found

    def follow(self, op: RecordedOp) -> None:
        """One call."""
        name = getattr(op.function, "__name__", "")
        changed, read = (op.reads[:1], op.reads[1:]) if op.function == SET_DATA else (op.mutated, op.reads)
        if name in _NORMS:
            read, changed = tuple(number for number in read if number not in changed), ()
        overwritten = changed[:1] if name in _OVERWRITING or op.function == SET_DATA else ()
        read = tuple(number for number in read if number not in overwritten)
        sampled = any(self.is_sampled(number) for number in read)
        held = frozenset[str]().union(*map(self.held, read))
        for number in overwritten:
            if number in self._named:
                self._forget(number, {self._key[other] for other in read})
        for number in (*(number for _, number in op.outputs), *changed):
            key = self._key[number]
            if sampled:
                self._samples.add(key)
            if held:
                self._carried[key] = self._carried.get(key, frozenset()) | held
        for number in changed:
            if (state := self._states.get(self._key[number])) is not None:
                self.written[state] = self.written.get(state, False) or sampled

    def _forget(self, number: int, sources: set[int]) -> None:
        """A state is overwritten. `sources`: storages of what with; after `tensor.data = other` both have one storage."""
        del self._named[number]
        if self._key[number] not in sources:
            self._carried.pop(self._key[number], None)
            self._samples.discard(self._key[number])


def carried(recording: Recording) -> CarriedState:
    """What a recording with its loss hands on."""
    named = {number: key.name for number, key in recording.state.items()}
    writes = any(op.mutated or op.function == SET_DATA for op in recording.ops)
    if not (writes or recording.buffer_writes) or recording.loss_value is None:
        return CarriedState()
    flow = _Flow(recording, named, (number for _, number in recording.inputs))
    for op in recording.ops:
        flow.follow(op)
    for name, number in recording.buffer_writes.items():
        flow.written[name] = flow.is_sampled(number)
    read = flow.held(recording.loss_value)
    found = {name: sampled for name, sampled in flow.written.items() if name in read}
    return CarriedState(
        from_samples=tuple(name for name, sampled in found.items() if sampled),
        from_weights=tuple(name for name, sampled in found.items() if not sampled),
    )


def read_again(recording: Recording, first_ops: int, first_tensors: int) -> set[int]:
    """Value numbers of a first forward that the forward after it, in the same recording, reads and that depend on its data.

    Args:
        first_ops, first_tensors: calls and values of the first forward.
    """
    tensors = recording.tensors
    weights = (number for number in recording.state if tensors[number].requires_grad)
    flow = _Flow(recording, {}, (*(number for _, number in recording.inputs), *weights))
    for op in recording.ops[:first_ops]:
        flow.follow(op)
    own = {number for _, number in recording.inputs} | set(recording.state) | set(recording.constants)
    read = {number for op in recording.ops[first_ops:] for number in op.reads if number < first_tensors} - own
    return {number for number in read if flow.is_sampled(number)}


def kept_note(names: Iterable[str]) -> str:
    """What the answer says of attributes whose tensors the next forward reads."""
    return (
        f"the forward keeps a tensor that it computes from its data in {first_few(tuple(names))}, and the next one reads it. "
        "Every step is taken as the first one, also in training; keep it in a buffer"
    )
