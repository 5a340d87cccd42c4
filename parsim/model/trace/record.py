"""Record a module: one forward on fake tensors, with every torch-level call.

Fake tensors have shapes and no data, so nothing is computed, no buffer changes and no random number is drawn. A module
whose Python code looks at the *values* of tensors cannot be recorded: what it decided would be wrong for other data.
State that a module keeps in plain attributes from one forward to the next is undone, and noted (registered buffers are kept).
"""

from __future__ import annotations

import contextlib
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, is_dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from parsim.errors import ModelError, TraceError, first_few
from parsim.model.inputs import ModelInput
from parsim.model.objective import TARGET, parse_objective, settle
from parsim.model.runnable import Ref, StateKey
from parsim.model.total_loss import entries, output_kinds, total_and_form
from parsim.model.trace.checks import (
    Generators,
    at_line,
    changed_attributes,
    check_supported,
    draw_message,
    eager,
    hint,
    qualified,
    value_message,
    without_log,
)
from parsim.model.trace.fakes import QuickFakeMode
from parsim.model.trace.operators import Watch
from parsim.model.trace.recorder import SET_DATA, RecordedOp, Recorder, Recording, storage_key, tensors_in
from parsim.private import FakeTensor, TreeSpec, detect_fake_mode, register_dataclass, tree_flatten

# What a forward hands on to the next one: buffers, frozen parameters and attributes that it writes and that its loss reads.
#
# A step divides its batch among replicas and microbatches, and each part is one forward. So state that is computed from
# samples differs between replicas, and state that is computed from weights alone moves once per microbatch. BatchNorm's
# running statistics do not count: training does not read them. Tensors that share memory count as one.


_NORMS = ("batch_norm", "instance_norm")
_OVERWRITING = ("copy_", "zero_", "fill_")
"""Nothing of what was there before is left."""


@dataclass(frozen=True, kw_only=True)
class CarriedState:
    """Names of parameters and buffers that a forward writes and its loss reads, by what they are computed from.
    `from_samples`: from the samples of a batch. `from_weights`: from weights and state alone."""

    from_samples: tuple[str, ...] = ()
    from_weights: tuple[str, ...] = ()

    @property
    def notes(self) -> tuple[str, ...]:
        """What the answer says."""
        notes = []
        if self.from_samples:
            notes.append(
                f"computed from the samples of a step and used in later ones: {first_few(self.from_samples)}. Each replica and "
                "microbatch takes its own samples for that"
            )
        if self.from_weights:
            notes.append(
                f"the forward itself updates {first_few(self.from_weights)}: once per microbatch, so their number changes what "
                "is trained"
            )
        return tuple(notes)


class _Flow:
    """Memory that holds something of a sample, and the state whose first value a piece of memory holds something of.
    written: by the name of a state that has been written, whether something of a sample was."""

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
        names = self._carried.get(self._key[number], frozenset())
        return names | {self._named[number]} if number in self._named else names

    def follow(self, op: RecordedOp) -> None:
        """Follow one call."""
        sets_data = op.function == SET_DATA
        changed, read = (op.reads[:1], op.reads[1:]) if sets_data else (op.mutated, op.reads)
        if op.name in _NORMS:
            read, changed = tuple(number for number in read if number not in changed), ()
        overwritten = changed[:1] if op.name in _OVERWRITING or sets_data else ()
        read = tuple(number for number in read if number not in overwritten)
        sampled = any(self.is_sampled(number) for number in read)
        held = frozenset[str]().union(*map(self.held, read))
        for number in overwritten:
            if number in self._named:
                del self._named[number]
                key = self._key[number]
                if all(key != self._key[other] for other in read):  # after `tensor.data = other` both have one storage
                    self._carried.pop(key, None)
                    self._samples.discard(key)
        for number in (*(number for _, number in op.outputs), *changed):
            key = self._key[number]
            if sampled:
                self._samples.add(key)
            if held:
                self._carried[key] = self._carried.get(key, frozenset()) | held
        for number in changed:
            if (state := self._states.get(self._key[number])) is not None:
                self.written[state] = self.written.get(state, False) or sampled


def carried(recording: Recording) -> CarriedState:
    """What a recording with its loss hands on."""
    writes = any(op.mutated or op.function == SET_DATA for op in recording.ops)
    if not (writes or recording.buffer_writes) or recording.loss_value is None:
        return CarriedState()
    named = {number: key.name for number, key in recording.state.items()}
    flow = _Flow(recording, named, (number for _, number in recording.inputs))
    for op in recording.ops:
        flow.follow(op)
    for name, number in recording.buffer_writes.items():
        flow.written[name] = flow.is_sampled(number)
    read = flow.held(recording.loss_value)
    return CarriedState(
        from_samples=tuple(name for name, sampled in flow.written.items() if sampled and name in read),
        from_weights=tuple(name for name, sampled in flow.written.items() if not sampled and name in read),
    )


def _read_again(recording: Recording, first_ops: int, first_tensors: int) -> set[int]:
    """Value numbers of a first forward that the forward after it, in the same recording, reads and that depend on its data.
    `first_ops`, `first_tensors`: how many calls and values the first forward has."""
    inputs = {number for _, number in recording.inputs}
    weights = (number for number in recording.state if recording.tensors[number].requires_grad)
    flow = _Flow(recording, {}, (*inputs, *weights))
    for op in recording.ops[:first_ops]:
        flow.follow(op)
    read = {number for op in recording.ops[first_ops:] for number in op.reads if number < first_tensors}
    made = read - inputs - set(recording.state) - set(recording.constants)
    return {number for number in made if flow.is_sampled(number)}


def kept_note(names: Sequence[str]) -> str:
    """What the answer says of attributes whose tensors the next forward reads."""
    return (
        f"the forward keeps a tensor that it computes from its data in {first_few(names)}, and the next one reads it. "
        "Every step is taken as the first one, also in training; keep it in a buffer"
    )


@contextlib.contextmanager
def _fake_state(recorder: Recorder) -> Iterator[None]:
    """Put fake parameters and buffers in the module's place; afterwards everything the forward set is undone."""
    before = [
        (path, owner, dict(owner.__dict__), dict(owner._parameters), dict(owner._buffers))
        for path, owner in recorder.module.named_modules()
    ]
    recording = recorder.recording
    fakes: dict[int, Tensor] = {}
    try:
        for path, owner, *_ in before:
            for kind, holder in (("parameter", owner._parameters), ("buffer", owner._buffers)):
                tensors: dict[str, Tensor | None] = holder
                for key, real in tensors.items():
                    if real is None:
                        continue
                    if id(real) not in fakes:
                        fakes[id(real)] = real if isinstance(real, FakeTensor) else _fake_of(recorder, real)
                        number = recorder.add(fakes[id(real)])
                        recorder.numbers[id(real)] = number
                        recorder.real_state[number] = real
                        recording.state[number] = StateKey(kind, qualified(path, key))
                    tensors[key] = fakes[id(real)]
        yield
        for path, owner, _, _, buffers in before:
            for key, real in buffers.items():
                now = owner._buffers.get(key)
                if real is not None and now is not None and (number := recorder.number_of(now)) not in recording.state:
                    recording.buffer_writes[qualified(path, key)] = number
        recording.changed_attributes = changed_attributes((path, owner, attributes) for path, owner, attributes, *_ in before)
        recording.kept_tensors = _kept_tensors(recorder)
    finally:
        for _, owner, *contents in before:
            for live, old in zip((owner.__dict__, owner._parameters, owner._buffers), contents, strict=True):
                live.clear()
                live.update(old)


def _fake_of(recorder: Recorder, real: Tensor) -> Tensor:
    """The fake of a tensor; that of one without data (`parsim.model.build.move_hollow`) is as if it had some."""
    fake = recorder.fakes.from_tensor(real)
    is_plain = type(real) in (Tensor, nn.Parameter) and real.layout is torch.strided
    if is_plain and real.numel() and not real.untyped_storage().nbytes():
        last = sum((size - 1) * stride for size, stride in zip(real.shape, real.stride(), strict=True))
        fake.untyped_storage().resize_(int((real.storage_offset() + last + 1) * real.element_size()))
    return fake


def _kept_tensors(recorder: Recorder) -> dict[int, str]:
    """Attributes of modules, other than parameters and buffers, that hold a tensor which a recorded call made."""
    made = {number for op in recorder.recording.ops for _, number in op.outputs}
    return {
        number: qualified(path, name)
        for path, owner in recorder.module.named_modules()
        for name, value in owner.__dict__.items()
        if name not in ("_parameters", "_buffers", "_modules")
        for _, tensor in tensors_in(value)
        if (number := recorder.numbers.get(id(tensor))) in made and number is not None
    }


@contextlib.contextmanager
def _module_hooks(recorder: Recorder) -> Iterator[None]:
    """Inside, the recorder is told where every module starts and ends."""

    def enter(name: str, _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        recorder.enter(name, args, kwargs)

    def leave(name: str, _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        recorder.leave(name, output)

    handles = []
    try:
        for name, module in recorder.module.named_modules():
            handles.append(module.register_forward_pre_hook(partial(enter, name), prepend=True, with_kwargs=True))
            handles.append(module.register_forward_hook(partial(leave, name), with_kwargs=True))
        yield
    finally:
        for handle in handles:
            handle.remove()


@contextlib.contextmanager
def _autograd_functions(recorder: Recorder) -> Iterator[None]:
    """While recording, `SomeFunction.apply(...)` of a custom torch.autograd.Function is one call, with its own backward."""
    original = torch.autograd.Function.__dict__["apply"]

    def apply(cls: Any, *args: Any, **kwargs: Any) -> Any:
        bound = original.__get__(None, cls)
        return bound(*args, **kwargs) if recorder.suspended else recorder.call(bound, args, kwargs)

    torch.autograd.Function.apply = classmethod(apply)  # type: ignore[assignment]
    try:
        yield
    finally:
        torch.autograd.Function.apply = original  # type: ignore[method-assign]


def flatten_inputs(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[list[Any], TreeSpec]:
    """Leaves and structure of a module's arguments."""
    return _flatten((tuple(args), dict(kwargs)))


def _flatten(value: Any) -> tuple[list[Any], TreeSpec]:
    """Leaves and structure. A dataclass is a structure, too: its class is registered with torch when one is met."""
    while True:
        leaves, spec = tree_flatten(value)
        unknown = {type(leaf) for leaf in leaves if is_dataclass(leaf) and not isinstance(leaf, type)}
        if not unknown:
            return leaves, spec
        for kind in unknown:
            register_dataclass(kind)


def run_recorded(
    module: nn.Module,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    *,
    loss: str | None,
    loss_in_parts: bool = False,
    watch: Watch | None = None,
    skew: bool = False,
    example: bool = False,
    answers: Sequence[bool] | None = None,
    twice: bool = False,
) -> Recording:
    """One forward of `module` on fakes of the given inputs, then the loss on its output.

    `watch`: open during the forward, inside the fake mode. `loss_in_parts`: where a loss can be taken in parts
    (`parsim.model.total_loss`), so that shards need not gather. `skew`: take choices of experts that are not balanced, or
    another example, to find what depends on them. `example`: code that depends on data follows the data given. `answers`: to
    its questions, as another recording gave them. `twice`: a second forward follows, to find what it reads of the first
    (`Recording.read_again`). Raises TraceError: if the forward fails, looks at tensor values, draws from generators that are
    not torch's, or returns something a tensor cannot be found in.
    """
    check_supported(module)
    leaves, spec = flatten_inputs(args, kwargs)
    existing = [leaf for leaf in (*module.parameters(), *module.buffers(), *leaves) if isinstance(leaf, Tensor)]

    def recorded() -> Recording:
        fakes = detect_fake_mode(existing) or QuickFakeMode()
        recorder = Recorder(module, fakes, skew=skew, answers=answers)
        rng = torch.get_rng_state()
        try:
            with contextlib.ExitStack() as stack:
                stack.enter_context(without_log())
                stack.enter_context(_fake_state(recorder))
                fake_args, fake_kwargs = spec.unflatten([_fake_input(recorder, leaf) for leaf in leaves])
                if recorder.recording.inputs:
                    first = recorder.recording.tensors[recorder.recording.inputs[0][1]]
                    recorder.recording.samples = first.shape[0] if first.dim() else 1
                if example:
                    recorder.known.follow(_example_values(recorder, leaves, other=skew))
                stack.enter_context(_module_hooks(recorder))
                stack.enter_context(_autograd_functions(recorder))
                stack.enter_context(torch.enable_grad())
                stack.enter_context(eager())
                stack.enter_context(fakes)
                if watch is not None:
                    stack.enter_context(watch.open(recorder))
                stack.enter_context(recorder)
                output = module(*fake_args, **fake_kwargs)
                _note_output(recorder, output)
                if loss is not None:
                    _note_loss(recorder, output, loss, in_parts=loss_in_parts)
                if twice:
                    _note_read_again(recorder, lambda: module(*fake_args, **fake_kwargs))
        except ModelError:  # of parsim itself: a TraceError, or an output that leaves the loss open
            raise
        except (Exception, SystemExit) as error:
            raise TraceError(_explain(recorder, error)) from error
        finally:
            torch.set_rng_state(rng)
        return recorder.recording

    generators = Generators(module)
    recording = recorded()
    if drawn := generators.drawn():
        message = draw_message(type(module).__name__, drawn, recorded)
        generators.put_back()
        raise TraceError(message)
    return recording


def _note_read_again(recorder: Recorder, forward: Callable[[], object]) -> None:
    """Note the attributes whose tensors the next forward reads. One that fails reads what it finds before that."""
    recording = recorder.recording
    names, first = _kept_tensors(recorder), (len(recording.ops), len(recording.tensors))
    with contextlib.suppress(Exception):
        forward()
    read = _read_again(recording, *first)
    recording.read_again = tuple(dict.fromkeys(names[number] for number in read if number in names))


def _example_values(recorder: Recorder, leaves: list[Any], *, other: bool) -> dict[int, Tensor]:
    """Real tensors of inputs, parameters and buffers. `other`: of another example, with all signs changed."""
    tensors = dict.fromkeys(leaf for leaf in leaves if isinstance(leaf, Tensor))
    values = {
        number: -leaf if other and leaf.is_floating_point() else leaf
        for leaf, (_, number) in zip(tensors, recorder.recording.inputs, strict=True)
    }
    values |= recorder.real_state
    if any(isinstance(value, FakeTensor) for value in values.values()):
        raise TraceError(
            f'control_flow="example" runs {type(recorder.module).__name__} on real data, and its weights or the example have '
            "none (fake tensors or the meta device); build the module with memory and give example_inputs with data"
        )
    return values


def _explain(recorder: Recorder, error: BaseException) -> str:
    kind, line = type(error).__name__, at_line(traceback.extract_tb(error.__traceback__))
    if kind in ("DataDependentOutputException", "DynamicOutputShapeException"):
        return value_message(recorder.where, error, line) + hint(recorder.innermost, "")
    under = " under autocast to half precision" if torch.is_autocast_enabled("cpu") else ""
    advice = hint(recorder.innermost, str(error))
    return f"the forward of {recorder.where} failed on the example inputs{under}{line}: {kind}: {error}{advice}"


def _fake_input(recorder: Recorder, leaf: Any) -> Any:
    """The fake of an input, which gets its name where it is met first; what is no tensor stays."""
    if not isinstance(leaf, Tensor):
        return leaf
    fake = leaf
    if not isinstance(leaf, FakeTensor):
        fake = recorder.fakes.from_tensor(leaf.detach().requires_grad_(leaf.requires_grad))
    if id(fake) not in recorder.numbers:
        _add_input(recorder, f"input:{len(recorder.recording.inputs)}", fake, differentiable=fake.requires_grad)
    return fake


def _add_input(recorder: Recorder, name: str, fake: Tensor, *, differentiable: bool) -> None:
    number = recorder.add(fake)
    recorder.recording.inputs.append((name, number))
    recorder.recording.differentiable[number] = differentiable


def _note_output(recorder: Recorder, output: Any) -> None:
    leaves, spec = _flatten(output)
    for leaf in leaves:
        if not (leaf is None or isinstance(leaf, Tensor | bool | int | float | str)):
            raise TraceError(
                f"{type(recorder.module).__name__} returns a {type(leaf).__name__}, which may hide tensors; return tensors in "
                f"tuples or dicts (for a Hugging Face model set config.use_cache = False)"
            )
    recorder.recording.output_leaves = tuple(
        Ref(recorder.number_of(leaf)) if isinstance(leaf, Tensor) else leaf for leaf in leaves
    )
    recorder.recording.output_spec = spec
    recorder.recording.outputs = {name: recorder.number_of(tensor) for name, tensor in entries(output).items()}


def _note_loss(recorder: Recorder, output: Any, loss: str, *, in_parts: bool) -> None:
    """The loss becomes the last component, or several if it is taken in parts.
    Its second input is called "target", unless the module takes its targets itself."""
    recording, name = recorder.recording, type(recorder.module).__name__
    samples = int(recording.tensors[recording.inputs[0][1]].shape[0])
    kinds = output_kinds({entry: recording.tensors[number] for entry, number in recording.outputs.items()})
    try:
        recording.settled = settled = settle(name, kinds, samples, parse_objective(loss), tokens=False)
        target = None if settled.target is None else _fake_target(recorder, settled.target, settled.entry, samples)
        recording.loss_start = recorder.current if settled.target is not None else _end_of_parameters(recording)
        begin = (lambda part: recording.loss_parts.append((part, recorder.current))) if in_parts else None
        value, recording.loss_form = total_and_form(settled.objective, output, target, samples, name, begin=begin)
    except ModelError as error:
        raise TraceError(str(error)) from error
    recording.loss_value = recorder.number_of(value)


def _end_of_parameters(recording: Recording) -> int:
    """The call after the last one that uses a parameter: from there on a module that returns its loss computes it.
    So the values that the loss component reads have samples along dim 0, and a sum over them is its own."""
    parameters = {number for number, key in recording.state.items() if key.kind == "parameter"}
    return max((place + 1 for place, op in enumerate(recording.ops) if not parameters.isdisjoint(op.reads)), default=0)


def _fake_target(recorder: Recorder, target: ModelInput, output: str | None, samples: int) -> Tensor:
    """Targets of the type of the output that the loss reads, where it is a number that follows the weights."""
    recording = recorder.recording
    dtype = torch.get_default_dtype() if output is None else recording.tensors[recording.outputs[output]].dtype
    with recorder.unseen():
        fake = target.zeros(samples, dtype).to(recording.tensors[recording.inputs[0][1]].device)
    _add_input(recorder, TARGET, fake, differentiable=False)
    return fake
