"""Record what a module does: one forward on fake tensors, every torch-level call written down.

Fake tensors have shapes and no data, so nothing is computed, no buffer changes and no random number is drawn. A module
whose Python code looks at the *values* of tensors cannot be recorded: what it decided would be wrong for other data.
Left out: state that a module keeps in plain attributes from one forward to the next (registered buffers are kept).
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch._guards import detect_fake_mode
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import TreeSpec, tree_flatten

from parsim.errors import TraceError
from parsim.model.losses import loss_sum
from parsim.model.runnable import PLAIN, Context, Nested, Ref, StateKey


@dataclass(frozen=True, slots=True)
class Call:
    """One call of one module: `number` counts the calls of that module, from 1; `parent` is the call it happened in."""

    module: str
    number: int
    parent: int | None


@dataclass(slots=True)
class RecordedOp:
    """One torch-level call; Refs hold value numbers of the whole recording."""

    function: Callable[..., Any]
    arguments: tuple[Any, ...]
    keywords: tuple[tuple[str, Any], ...]
    outputs: tuple[tuple[tuple[Any, ...], int], ...]
    context: Context
    call: int | None
    reads: tuple[int, ...]
    mutated: tuple[int, ...]


@dataclass(slots=True)
class Recording:
    """All of one forward (and of the loss, from op `loss_start` on).

    Attributes:
        tensors: the fake tensor of every value number. inputs: (name, value number). state, constants: by value number.
        output_leaves: a value number, or a constant, per leaf of `output_spec`.
        buffer_writes: buffers assigned anew in the forward -> value number.
    """

    ops: list[RecordedOp] = field(default_factory=list)
    calls: list[Call] = field(default_factory=list)
    tensors: list[Tensor] = field(default_factory=list)
    inputs: list[tuple[str, int]] = field(default_factory=list)
    state: dict[int, StateKey] = field(default_factory=dict)
    constants: dict[int, Tensor] = field(default_factory=dict)
    differentiable: dict[int, bool] = field(default_factory=dict)
    buffer_writes: dict[str, int] = field(default_factory=dict)
    output_leaves: tuple[Any, ...] = ()
    output_spec: TreeSpec | None = None
    loss_start: int | None = None
    loss_value: int | None = None
    logits_value: int | None = None


def storage_key(tensor: Tensor) -> int:
    """Equal for tensors that share memory (while the storages live)."""
    return int(tensor.untyped_storage()._cdata)


def tensors_in(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[tuple[Any, ...], Tensor]]:
    """Tensors in nested tuples, lists, dicts and slices, with the way to each."""
    if isinstance(value, Tensor):
        yield path, value
    elif isinstance(value, tuple | list):
        for number, item in enumerate(value):
            yield from tensors_in(item, (*path, number))
    elif isinstance(value, dict):
        for key, item in value.items():
            yield from tensors_in(item, (*path, key))
    elif isinstance(value, slice):
        yield from tensors_in((value.start, value.stop, value.step), path)


def _rebuild_of(value: Any) -> tuple[Callable[[list[Any]], Any], list[Any]]:
    if isinstance(value, dict):
        keys = list(value)
        return (lambda items: dict(zip(keys, items, strict=True))), list(value.values())
    if isinstance(value, slice):
        return (lambda items: slice(*items)), [value.start, value.stop, value.step]
    if isinstance(value, list):
        return list, value
    kind = type(value)
    if hasattr(kind, "_fields"):
        return (lambda items: kind(*items)), list(value)
    return tuple, list(value)


class Recorder(TorchFunctionMode):
    """Sees every torch-level call of a forward, in order."""

    def __init__(self, module: nn.Module, fakes: FakeTensorMode) -> None:
        super().__init__()
        self.recording = Recording()
        self.module = module
        self.fakes = fakes
        self.stack: list[int] = []
        self._number: dict[int, int] = {}
        self._suspended = False
        self._calls_of: dict[str, int] = {}
        self._autocast = _autocast_state()

    @property
    def current(self) -> int:
        """The number the next recorded op will have."""
        return len(self.recording.ops)

    @property
    def where(self) -> str:
        """The innermost module running now, for messages."""
        if not self.stack:
            return type(self.module).__name__
        name = self.recording.calls[self.stack[-1]].module
        return f"{name or 'the root module'} ({type(self.module.get_submodule(name)).__name__})"

    def enter(self, name: str) -> None:
        """A module starts."""
        self._calls_of[name] = self._calls_of.get(name, 0) + 1
        parent = self.stack[-1] if self.stack else None
        self.stack.append(len(self.recording.calls))
        self.recording.calls.append(Call(name, self._calls_of[name], parent))

    def leave(self, name: str) -> None:
        """The module has ended, and with it those in it that ended by an exception it caught."""
        while self.recording.calls[self.stack.pop()].module != name:
            pass

    def add(self, tensor: Tensor) -> int:
        """Give a tensor a value number; it is kept alive, so its identity stays its own."""
        number = len(self.recording.tensors)
        self.recording.tensors.append(tensor)
        self._number[id(tensor)] = number
        return number

    def alias(self, tensor: Tensor, number: int) -> None:
        """Another object that stands for the same value (the real parameter behind a fake one)."""
        self._number[id(tensor)] = number

    def number_of(self, tensor: Tensor) -> int:
        """The value number of a tensor used in a call or returned; unknown ones become constants.

        Raises TraceError for a tensor that was made out of sight or that requires a gradient without being a parameter.
        """
        known = self._number.get(id(tensor))
        if known is not None:
            return known
        if isinstance(tensor, FakeTensor):
            raise TraceError(
                f"{self.where} uses a tensor of shape {tuple(tensor.shape)} that no recorded torch call made (it came from "
                f"C++ or from a function transform such as vmap); compute it with ordinary torch functions"
            )
        if tensor.requires_grad:
            raise TraceError(
                f"{self.where} uses a tensor of shape {tuple(tensor.shape)} that requires a gradient but is not a registered "
                f"parameter; register it with nn.Parameter on a module"
            )
        number = self.add(tensor)
        self.recording.constants[number] = tensor
        return number

    def template(self, value: Any) -> Any:
        """Arguments with every tensor replaced by a Ref."""
        if isinstance(value, Tensor):
            return Ref(self.number_of(value))
        if isinstance(value, tuple | list | dict | slice) and next(tensors_in(value), None) is not None:
            rebuild, items = _rebuild_of(value)
            return Nested(rebuild, tuple(self.template(item) for item in items))
        return value

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if self._suspended:
            return func(*args, **kwargs)
        if func is Tensor.__iter__:
            return iter(self.call(torch.unbind, (args[0],), {}))
        return self.call(func, args, kwargs)

    def call(self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run `function` on fakes; write it down if it makes or changes a tensor."""
        given = [tensor for _, tensor in tensors_in((args, kwargs))]
        versions = [tensor._version for tensor in given]
        suspended, self._suspended = self._suspended, True
        try:
            result = function(*args, **kwargs)
        finally:
            self._suspended = suspended
        changed = [tensor for tensor, version in zip(given, versions, strict=True) if tensor._version != version]
        made = list(tensors_in(result))
        setter = getattr(function, "__name__", "") == "__set__"
        if not made and not changed and not setter:
            return result
        arguments = tuple(self.template(item) for item in args)
        keywords = tuple((name, self.template(item)) for name, item in kwargs.items())
        outputs = []
        for path, tensor in made:
            known = self._number.get(id(tensor))
            outputs.append((path, self.add(tensor) if known is None else known))
        reads = tuple(dict.fromkeys(self.number_of(tensor) for tensor in given))
        mutated = tuple(dict.fromkeys(self.number_of(tensor) for tensor in changed))
        for number in (*(number for _, number in outputs), *mutated):
            self.recording.differentiable[number] = self.recording.tensors[number].requires_grad
        self.recording.ops.append(
            RecordedOp(
                function=function,
                arguments=arguments,
                keywords=keywords,
                outputs=tuple(outputs),
                context=self._context(),
                call=self.stack[-1] if self.stack else None,
                reads=reads,
                mutated=mutated,
            )
        )
        return result

    def _context(self) -> Context:
        state = _autocast_state()
        changed = [new for new, old in zip(state, self._autocast, strict=True) if new != old]
        if torch.is_grad_enabled() and not changed:
            return PLAIN
        return Context(no_grad=not torch.is_grad_enabled(), autocast=changed[0] if changed else None)


def _autocast_state() -> tuple[tuple[str, torch.dtype, bool], ...]:
    return tuple((device, torch.get_autocast_dtype(device), torch.is_autocast_enabled(device)) for device in ("cpu", "cuda"))


@contextlib.contextmanager
def _fake_state(recorder: Recorder) -> Iterator[None]:
    """Put fake parameters and buffers in the module's place; afterwards everything the forward set is undone."""
    module = recorder.module
    kept = [(m, dict(m.__dict__), dict(m._parameters), dict(m._buffers)) for m in module.modules()]
    known: dict[int, Tensor] = {}
    try:
        for path, owner in module.named_modules():
            for kind, holder in (("parameter", owner._parameters), ("buffer", owner._buffers)):
                entries: dict[str, Tensor | None] = holder
                for key, real in entries.items():
                    if real is None:
                        continue
                    if id(real) not in known:
                        fake = real if isinstance(real, FakeTensor) else recorder.fakes.from_tensor(real)
                        known[id(real)] = fake
                        number = recorder.add(fake)
                        recorder.alias(real, number)
                        recorder.recording.state[number] = StateKey(kind, f"{path}.{key}" if path else key)
                    entries[key] = known[id(real)]
        yield
        _note_buffer_writes(recorder, kept)
    finally:
        for owner, attributes, parameters, buffers in kept:
            owner.__dict__.clear()
            owner.__dict__.update(attributes)
            owner._parameters.clear()
            owner._parameters.update(parameters)
            owner._buffers.clear()
            owner._buffers.update(buffers)


def _note_buffer_writes(recorder: Recorder, kept: list[Any]) -> None:
    names = {id(owner): path for path, owner in recorder.module.named_modules()}
    state = recorder.recording.state
    for owner, _, _, buffers in kept:
        for key, real in buffers.items():
            now = owner._buffers.get(key)
            if real is None or now is None:
                continue
            number = recorder.number_of(now)
            if number not in state:
                path = names[id(owner)]
                recorder.recording.buffer_writes[f"{path}.{key}" if path else key] = number


def _enter(recorder: Recorder, name: str, *_: Any) -> None:
    recorder.enter(name)


def _leave(recorder: Recorder, name: str, *_: Any) -> None:
    recorder.leave(name)


@contextlib.contextmanager
def _module_hooks(recorder: Recorder) -> Iterator[None]:
    handles = []
    try:
        for name, module in recorder.module.named_modules():
            handles.append(module.register_forward_pre_hook(partial(_enter, recorder, name), prepend=True))
            handles.append(module.register_forward_hook(partial(_leave, recorder, name)))
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
        return bound(*args, **kwargs) if recorder._suspended else recorder.call(bound, args, kwargs)

    torch.autograd.Function.apply = classmethod(apply)  # type: ignore[assignment]
    try:
        yield
    finally:
        torch.autograd.Function.apply = original  # type: ignore[method-assign]


def flatten_inputs(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[list[Any], TreeSpec]:
    """Leaves and structure of a module's arguments."""
    return tree_flatten((tuple(args), dict(kwargs)))


def run_recorded(
    module: nn.Module,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    *,
    loss: str | None,
    watch: Callable[[Recorder], contextlib.AbstractContextManager[Any]] | None = None,
) -> Recording:
    """One forward of `module` on fakes of the given inputs, then the loss on its logits.

    Args:
        watch: makes a context that is open during the forward, inside the fake mode (statistics hang there).

    Raises:
        TraceError: if the forward fails, looks at tensor values, or returns something a tensor cannot be found in.
    """
    leaves, spec = flatten_inputs(args, kwargs)
    existing = [leaf for leaf in (*module.parameters(), *module.buffers(), *leaves) if isinstance(leaf, Tensor)]
    fakes = detect_fake_mode(existing) or FakeTensorMode(allow_non_fake_inputs=True)
    recorder = Recorder(module, fakes)
    recording = recorder.recording
    rng = torch.get_rng_state()
    try:
        with contextlib.ExitStack() as stack:
            stack.enter_context(_fake_state(recorder))
            fake_leaves = [_fake_input(recorder, leaf) for leaf in leaves]
            stack.enter_context(_module_hooks(recorder))
            stack.enter_context(_autograd_functions(recorder))
            stack.enter_context(torch.enable_grad())
            stack.enter_context(fakes)
            if watch is not None:
                stack.enter_context(watch(recorder))
            stack.enter_context(recorder)
            fake_args, fake_kwargs = spec.unflatten(fake_leaves)
            output = module(*fake_args, **fake_kwargs)
            _note_output(recorder, output)
            if loss is not None:
                _note_loss(recorder, output, loss)
    except TraceError:
        raise
    except Exception as error:
        raise TraceError(_explain(recorder, error)) from error
    finally:
        torch.set_rng_state(rng)
    return recording


def _explain(recorder: Recorder, error: Exception) -> str:
    kind = type(error).__name__
    if kind in ("DataDependentOutputException", "DynamicOutputShapeException"):
        return (
            f"{recorder.where} looks at the values of a tensor ({error}), so what it does depends on the data and cannot be "
            f"recorded; rewrite that step with torch.where or masks, or keep the value outside the forward"
        )
    return f"the forward of {recorder.where} failed on the example inputs: {kind}: {error}"


def _fake_input(recorder: Recorder, leaf: Any) -> Any:
    if not isinstance(leaf, Tensor):
        return leaf
    fake = (
        leaf if isinstance(leaf, FakeTensor) else recorder.fakes.from_tensor(leaf.detach().requires_grad_(leaf.requires_grad))
    )
    if id(fake) in recorder._number:
        return fake
    number = recorder.add(fake)
    recorder.recording.inputs.append((f"input:{len(recorder.recording.inputs)}", number))
    recorder.recording.differentiable[number] = fake.requires_grad
    return fake


def _note_output(recorder: Recorder, output: Any) -> None:
    leaves, spec = tree_flatten(output)
    noted: list[Any] = []
    for leaf in leaves:
        if isinstance(leaf, Tensor):
            noted.append(Ref(recorder.number_of(leaf)))
        elif leaf is None or isinstance(leaf, bool | int | float | str):
            noted.append(leaf)
        else:
            raise TraceError(
                f"{type(recorder.module).__name__} returns a {type(leaf).__name__}, which may hide tensors; return tensors in "
                f"tuples or dicts (for a Hugging Face model set config.use_cache = False)"
            )
    recorder.recording.output_leaves = tuple(noted)
    recorder.recording.output_spec = spec


def logits_of(output: Any) -> Tensor:
    """What a loss is taken of: `.logits` of a model output, the tensor itself, or the first tensor of a tuple or dict."""
    found = getattr(output, "logits", output)
    if isinstance(found, Tensor):
        return found
    first = next((tensor for _, tensor in tensors_in(found)), None)
    if first is None:
        raise TraceError(f"cannot take a loss of a {type(output).__name__} without a tensor; return a tensor or .logits")
    return first


def _note_loss(recorder: Recorder, output: Any, loss: str) -> None:
    """The loss becomes the last component; its second input is called "target"."""
    logits = logits_of(output)
    target = _fake_target(recorder, logits, integer=loss == "cross_entropy")
    number = recorder.add(target)
    recorder.recording.inputs.append(("target", number))
    recorder.recording.differentiable[number] = False
    recorder.recording.logits_value = recorder.number_of(logits)
    recorder.recording.loss_start = recorder.current
    value = loss_sum(loss, logits, target)
    recorder.recording.loss_value = recorder.number_of(value)


def _fake_target(recorder: Recorder, logits: Tensor, *, integer: bool) -> Tensor:
    suspended, recorder._suspended = recorder._suspended, True
    try:
        if integer:
            return torch.zeros(logits.shape[:-1], dtype=torch.long, device=logits.device)
        return torch.zeros(logits.shape, dtype=logits.dtype, device=logits.device)
    finally:
        recorder._suspended = suspended
