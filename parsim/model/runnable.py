"""A runnable component: the torch calls of one interval of a module's forward, replayed on given input tensors."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from parsim.errors import TraceError


class Ref(NamedTuple):
    """Stands in recorded arguments where a tensor was; `slot` indexes the environment of the component."""

    slot: int


class Nested(NamedTuple):
    """A recorded list, tuple, dict or slice with at least one Ref inside."""

    rebuild: Callable[[list[Any]], Any]
    items: tuple[Any, ...]


class StateKey(NamedTuple):
    """Where a parameter or buffer lives: `kind` is "parameter" or "buffer", `name` its qualified name.
    Kind "module" is a whole module, which is called with its own code (`parsim.model.trace.data_dependent`)."""

    kind: str
    name: str


class Context(NamedTuple):
    """What surrounded a call: gradients off, or an autocast state that differs from the one around the module."""

    no_grad: bool = False
    autocast: tuple[str, torch.dtype, bool] | None = None


PLAIN = Context()


@dataclass(frozen=True, slots=True)
class Op:
    """One torch-level call.
    `arguments`, `keywords`: constants, Ref and Nested. `outputs`: (path into the result, slot): () is the result itself.
    `drop`: slots nobody reads after this call."""

    function: Callable[..., Any]
    arguments: tuple[Any, ...]
    keywords: tuple[tuple[str, Any], ...]
    outputs: tuple[tuple[tuple[Any, ...], int], ...]
    context: Context
    drop: tuple[int, ...] = ()

    @property
    def name(self) -> str:
        """What the function is called."""
        return str(getattr(self.function, "__name__", self.function))

    def argument(self, name: str, place: int, default: Any = None) -> Any:
        """The argument called `name`, or at `place`."""
        for keyword, value in self.keywords:
            if keyword == name:
                return value
        return self.arguments[place] if place < len(self.arguments) else default


Environment = list[Any] | dict[int, Any]


def _fill(template: Any, environment: Environment) -> Any:
    if type(template) is Ref:
        return environment[template.slot]
    if type(template) is Nested:
        return template.rebuild([_fill(item, environment) for item in template.items])
    return template


@contextlib.contextmanager
def _entered(context: Context) -> Any:
    with contextlib.ExitStack() as stack:
        if context.no_grad:
            stack.enter_context(torch.no_grad())
        if context.autocast is not None:
            device, dtype, enabled = context.autocast
            stack.enter_context(torch.autocast(device, dtype=dtype, enabled=enabled))
        yield


def run_op(op: Op, environment: Environment) -> None:
    """One call: reads and fills `environment`, a tensor (or None) per slot."""
    arguments = [_fill(item, environment) for item in op.arguments]
    keywords = {name: _fill(item, environment) for name, item in op.keywords}
    if op.context is PLAIN:
        result = op.function(*arguments, **keywords)
    else:
        with _entered(op.context):
            result = op.function(*arguments, **keywords)
    for path, slot in op.outputs:
        value = result
        for step in path:
            value = value[step]
        environment[slot] = value
    for slot in op.drop:
        environment[slot] = None


class TensorKind(NamedTuple):
    """What a recorded tensor was: enough to make another like it. Strides count elements."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    differentiable: bool


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class CallProgram:
    """The torch calls of one component, without the module whose parameters and buffers they read.
    `inputs`, `outputs`: (value name, slot, whether a gradient flows). `state`: parameters and buffers with their slots.
    `buffer_writes`: buffers assigned anew, by slot. `tensors`: of every slot, as recorded. `slots`: at least as many."""

    name: str
    ops: tuple[Op, ...]
    slots: int
    inputs: tuple[tuple[str, int, bool], ...]
    outputs: tuple[tuple[str, int, bool], ...]
    state: tuple[tuple[StateKey, int], ...]
    constants: tuple[tuple[Tensor, int], ...]
    buffer_writes: tuple[tuple[str, int], ...]
    tensors: tuple[TensorKind, ...]


def environment_of(program: CallProgram, inputs: Iterable[Tensor], state: Iterable[tuple[int, Tensor]]) -> list[Any]:
    """A tensor (or None) per slot: what the calls of a program start from. `state`: parameters and buffers by slot."""
    environment: list[Any] = [None] * program.slots
    for (_, slot, _), value in zip(program.inputs, inputs, strict=True):
        environment[slot] = value
    for slot, value in state:
        environment[slot] = value
    for constant, slot in program.constants:
        environment[slot] = constant
    return environment


class Runnable:
    """One component of a recorded module.

    Parameters and buffers are read from the live module at every call, so optimizer steps, loaded checkpoints and
    gradient views take effect. Shapes, training mode, dtype and device are those of the recording.

    Attributes:
        name: of the component. input_names, output_names: of its values. parameter_names, buffer_names: qualified.
        input_differentiable, output_differentiable: whether a gradient flows through that value while training
            (False for an input of the model, unless the example input required a gradient).
        program: what it calls.
    """

    def __init__(self, program: CallProgram, module: nn.Module) -> None:
        self.program = program
        self.name = program.name
        self.input_names = tuple(entry[0] for entry in program.inputs)
        self.output_names = tuple(entry[0] for entry in program.outputs)
        self.input_differentiable = tuple(entry[2] for entry in program.inputs)
        self.output_differentiable = tuple(entry[2] for entry in program.outputs)
        self.parameter_names = tuple(key.name for key, _ in program.state if key.kind == "parameter")
        self.buffer_names = tuple(key.name for key, _ in program.state if key.kind == "buffer")
        self._output_slots = tuple(entry[1] for entry in program.outputs)
        self.bind(module)

    def bind(self, module: nn.Module) -> Runnable:
        """Read parameters and buffers from `module` (of the same structure) from now on; returns self."""
        self.module = module
        self._state = tuple((_holder(module, key), key.name.rpartition(".")[2], slot) for key, slot in self.program.state)
        self._buffer_writes = tuple(
            (_holder(module, StateKey("buffer", name)), name.rpartition(".")[2], slot)
            for name, slot in self.program.buffer_writes
        )
        return self

    def parameters(self) -> tuple[Tensor, ...]:
        """The live parameters, in the order of `parameter_names`."""
        return tuple(holder[key] for holder, key in self._places("parameter"))

    def buffers(self) -> tuple[Tensor, ...]:
        """The live buffers, in the order of `buffer_names`."""
        return tuple(holder[key] for holder, key in self._places("buffer"))

    @contextlib.contextmanager
    def reading_buffers(self, buffers: Sequence[Tensor]) -> Iterator[None]:
        """Inside, calls read and write `buffers` (in the order of `buffer_names`); the live ones stay as they are."""
        places = [*self._places("buffer"), *((holder, key) for holder, key, _ in self._buffer_writes)]
        live = [holder[key] for holder, key in places]
        try:
            for (holder, key), buffer in zip(places, buffers, strict=False):  # those written only have no copy
                holder[key] = buffer
            yield
        finally:
            for (holder, key), buffer in zip(places, live, strict=True):
                holder[key] = buffer

    def _places(self, kind: str) -> list[tuple[dict[str, Any], str]]:
        """Where each parameter or buffer lies."""
        places = zip(self._state, self.program.state, strict=True)
        return [(holder, key) for (holder, key, _), (state_key, _) in places if state_key.kind == kind]

    def __call__(self, inputs: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """Run the component on tensors in the order of `input_names`; returns them in the order of `output_names`.
        Raises TraceError if the number of inputs is wrong."""
        if len(inputs) != len(self.input_names):
            raise TraceError(f"{self.name} takes {len(self.input_names)} inputs {self.input_names}, got {len(inputs)}")
        environment = environment_of(self.program, inputs, ((slot, holder[key]) for holder, key, slot in self._state))
        for op in self.program.ops:
            run_op(op, environment)
        for holder, key, slot in self._buffer_writes:
            holder[key] = environment[slot]
        return tuple(environment[slot] for slot in self._output_slots)

    def __repr__(self) -> str:
        names = f"{', '.join(self.input_names)} -> {', '.join(self.output_names)}"
        return f"Runnable({self.name}: {names}; {len(self.program.ops)} calls)"


def _holder(module: nn.Module, key: StateKey) -> dict[str, Any]:
    if key.kind == "module":
        return {key.name.rpartition(".")[2]: module.get_submodule(key.name)}
    path = key.name.rpartition(".")[0]
    try:
        owner = module.get_submodule(path)
    except AttributeError as error:
        raise TraceError(
            f"the module has no {path!r}, which holds {key.kind} {key.name}; bind a module of the same structure"
        ) from error
    holder: Any = owner._parameters if key.kind == "parameter" else owner._buffers
    if key.name.rpartition(".")[2] not in holder:
        raise TraceError(f"the module has no {key.kind} {key.name}; bind a module of the same structure as the recorded one")
    return holder  # type: ignore[no-any-return]


def renumber(template: Any, slot: Mapping[int, int]) -> Any:
    """A recorded argument with other slot numbers."""
    if type(template) is Ref:
        return Ref(slot[template.slot])
    if type(template) is Nested:
        return Nested(template.rebuild, tuple([renumber(item, slot) for item in template.items]))
    return template
