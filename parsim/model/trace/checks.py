"""Parts of modules that cannot be recorded, each with the way round it."""

from __future__ import annotations

import contextlib
import inspect
import logging
import random
import re
import sys
import traceback
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping
from typing import Any

import numpy as np
import torch
import torch.utils.checkpoint
from torch import nn
from torch.distributions import Distribution

from parsim.errors import TraceError, first_few
from parsim.model.trace.messages import at_line

_SYNCED = (
    "normalises over all ranks by collectives of its own, which no plan knows; use BatchNorm, which normalises over the "
    "samples of a rank, or GroupNorm"
)
_SCRIPTED = "is compiled by torch.jit, which hides its calls; give the Python module it was made of"
_SCRIPTED_FUNCTION = "is compiled by torch.jit, which hides its calls; give the Python function it was made of"
_SPARSE = "makes sparse gradients, which no bucket can hold; set sparse=False"
_QUANTISED = (
    "holds weights that torch has packed as integers, which cannot be trained; give the module before it is quantised, or one "
    "prepared for quantisation-aware training (torch.ao.quantization.prepare_qat)"
)
_HOOKED = (
    "has a hook on its backward (register_full_backward_hook), which a recorded forward does not run; change gradients in a "
    "torch.autograd.Function, or drop the hook"
)
_LAZY = "has parameters without a shape; call the module once on a batch before it is traced"


def check_supported(module: nn.Module) -> None:
    """Refuse a module with a part that cannot be recorded or run.

    Args:
        module: with all its parts.

    Raises:
        TraceError: names the part, its kind and the way round.
    """
    for name, part in module.named_modules():
        reason = _reason(part)
        if reason is not None:
            raise TraceError(f"{name or 'the root module'} ({type(part).__name__}) {reason}")


def _reason(part: nn.Module) -> str | None:
    if isinstance(part, torch.jit.ScriptModule):
        return _SCRIPTED
    if isinstance(part, nn.SyncBatchNorm):
        return _SYNCED
    if isinstance(part, nn.Embedding | nn.EmbeddingBag) and part.sparse:
        return _SPARSE
    if type(part).__module__.startswith("torch.ao.nn.quantized"):
        return _QUANTISED
    if part._backward_hooks or part._backward_pre_hooks:
        return _HOOKED
    if any(isinstance(entry, nn.parameter.UninitializedParameter) for entry in part._parameters.values()):
        return _LAZY
    return None


def hint(module: nn.Module, message: str) -> str:
    """What to do about an error of a kind of module; "" where nothing special is known.

    Args:
        module: the innermost one that ran. message: of the error.
    """
    if "_nested_tensor" in message:
        return "; nested tensors cannot be recorded: give a padded batch and a mask"
    if f"{type(module).__name__}.forward() got an unexpected keyword argument" in message:
        return f"; it takes {', '.join(inspect.signature(module.forward).parameters)}"
    if "missing" in message and "required positional argument" in message:
        return "; give every input by name: [model] inputs = { x = { shape = [...] }, ... }, or example_inputs"
    if "FakeTensorDeviceMismatch" in message or "meta!" in message:
        return "; put the example inputs on the device of the weights, such as x.to('meta')"
    if "FlexAttention" in message:
        return (
            "; flex_attention has no backward on a CPU, where modules are recorded: write it as scaled_dot_product_attention "
            "with attn_mask, which is priced alike"
        )
    if re.search(r"dtype|scalar type|type \(torch", message) and not torch.is_autocast_enabled("cpu"):
        return (
            '; if an input has the wrong type, give it another one in [model] inputs (dtype = "float32" for numbers, dtype = '
            '"int64" with high for indices), or cast it in forward'
        )
    if isinstance(module, nn.modules.batchnorm._BatchNorm) and module.momentum is None:
        return "; with momentum=None its running average depends on how many batches it has seen: give it a momentum"
    return ""


@contextlib.contextmanager
def eager() -> Iterator[None]:
    """torch.compile'd parts and scripted functions run their Python code, attention modules do not take the fused path of
    evaluation, and torch.utils.checkpoint runs its function in sight: what a step computes again is a plan's choice.
    Distributions do not check their arguments, which would look at values; torch.compile switches that off, too.
    """
    fast = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    checks = Distribution._validate_args
    Distribution.set_default_validate_args(False)
    scripted = torch.jit.ScriptFunction.__call__
    torch.jit.ScriptFunction.__call__ = _in_python  # type: ignore[method-assign, assignment]
    with_reentry = torch.utils.checkpoint.CheckpointFunction
    torch.utils.checkpoint.CheckpointFunction = _InSight  # type: ignore[misc, assignment]
    try:
        with torch.compiler.set_stance("force_eager"):
            yield
    finally:
        torch.jit.ScriptFunction.__call__ = scripted  # type: ignore[method-assign]
        Distribution.set_default_validate_args(checks)
        torch.utils.checkpoint.CheckpointFunction = with_reentry  # type: ignore[misc]
        torch.backends.mha.set_fastpath_enabled(fast)


def _in_python(scripted: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """In place of a call of what `@torch.jit.script` made of a function: a call of the function itself."""
    function = getattr(scripted, "_torchdynamo_inline", None)
    if function is None:
        raise TraceError(f"a function{at_line(traceback.extract_stack())} {_SCRIPTED_FUNCTION}")
    return function(*args, **kwargs)


class _InSight:
    """In place of torch's CheckpointFunction (use_reentrant=True), which runs the function out of sight, without gradients."""

    @staticmethod
    def apply(function: Callable[..., Any], _preserve_rng_state: bool, *args: Any) -> Any:
        """Nothing in it gets a gradient unless one of its arguments does, as in torch."""
        wanted = any(isinstance(value, torch.Tensor) and value.requires_grad for value in args)
        with torch.set_grad_enabled(torch.is_grad_enabled() and wanted):
            return function(*args)


@contextlib.contextmanager
def without_log() -> Iterator[None]:
    """Without what torch logs of a call that fails on fake tensors, with a traceback: the error says it, too."""
    log = logging.getLogger("torch._subclasses.fake_tensor")
    level = log.level
    log.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        log.setLevel(level)


# What a forward takes from elsewhere than its tensors: numbers drawn by Python or numpy, and attributes that it changes.
#
# A recording is one forward, which every rank repeats in every step. torch's own generators are recorded as calls, and
# buffers as writes. Leaves out: global variables, files, clocks, and generators hidden inside other objects than modules.


_NUMBERS = (bool, int, float, str)
_PYTHON, _NUMPY = "Python's random", "numpy.random"
_Generator = random.Random | np.random.RandomState | np.random.Generator


class Generators:
    """The generators of Python, of numpy and in the attributes of a module's parts, as they were when this was made."""

    def __init__(self, module: nn.Module) -> None:
        self._own: dict[str, _Generator] = {
            f"{path}.{name}" if path else name: value
            for path, part in module.named_modules()
            for name, value in part.__dict__.items()
            if isinstance(value, _Generator)
        }
        self._states = self._now()
        self._python, self._numpy = random.getstate(), np.random.get_state()  # noqa: NPY002 - of users' code

    def drawn(self) -> str:
        """Names of those that have been drawn from since; "" if none has."""
        return ", ".join(name for name, state in self._now().items() if state != self._states[name])

    def put_back(self) -> None:
        """The two global ones."""
        random.setstate(self._python)
        np.random.set_state(self._numpy)  # noqa: NPY002

    def _now(self) -> dict[str, Hashable]:
        shared = {_PYTHON: random.getstate(), _NUMPY: _plain(np.random.get_state())}  # noqa: NPY002
        return {**shared, **{f"the generator {name}": _state_of(value) for name, value in self._own.items()}}


def _state_of(generator: _Generator) -> Hashable:
    if isinstance(generator, np.random.Generator):
        return _plain(generator.bit_generator.state)
    return _plain(generator.getstate() if isinstance(generator, random.Random) else generator.get_state())


def _plain(value: Any) -> Hashable:
    if isinstance(value, np.ndarray):
        return value.tobytes()
    if isinstance(value, Mapping):
        return tuple((key, _plain(item)) for key, item in value.items())
    return tuple(map(_plain, value)) if isinstance(value, tuple | list) else value


def draw_message(name: str, drawn: str, forward: Callable[[], object]) -> str:
    """Why a forward that draws outside torch cannot be recorded.

    Args:
        name: of the module. drawn: of `Generators.drawn`. forward: the same again, to find the line.
    """
    return (
        f"the forward of {name} draws from {drawn}{_first_draw(forward)}: each step would draw again, but a recorded forward "
        "repeats one outcome in every step; draw with torch and use the numbers as a tensor, as in "
        "x * (torch.rand(len(x), 1) < 0.9), or draw outside the forward and give the result as an input"
    )


def _first_draw(forward: Callable[[], object]) -> str:
    """The user's line of the first draw; "" where it cannot be seen."""
    found: list[str] = []

    def look(frame: Any, event: str, argument: Any) -> None:
        if event == "c_call" and not found and isinstance(getattr(argument, "__self__", None), _Generator):
            found.append(at_line(traceback.extract_stack(frame)))

    before = sys.getprofile()
    sys.setprofile(look)
    try:
        forward()
    finally:
        sys.setprofile(before)
    return found[0] if found else ""


def changed_attributes(module: nn.Module, before: Iterable[tuple[nn.Module, Mapping[str, Any]]]) -> tuple[str, ...]:
    """Numbers and words in attributes that the forward has left with another value, for people.

    Args:
        module: with all parts. before: of every part, its attributes before the forward.
    """
    names = {id(part): path for path, part in module.named_modules()}
    return tuple(
        f"{f'{names[id(part)]}.' if names.get(id(part)) else ''}{key} ({was!r} to {now!r})"
        for part, attributes in before
        for key, was in attributes.items()
        if isinstance(was, _NUMBERS) and isinstance(now := part.__dict__.get(key), _NUMBERS) and now != was
    )


def change_note(changed: tuple[str, ...]) -> str:
    """What the answer says of `changed_attributes`."""
    return (
        f"the forward changes attributes of its modules: {first_few(changed)}. Every step is taken as the first one, also in "
        "training; keep what changes in a buffer, and use it as a tensor"
    )
