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
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.utils.checkpoint
from torch import nn
from torch.distributions import Distribution

from parsim.errors import TraceError, first_few


def check_supported(module: nn.Module) -> None:
    """Refuse a module with a part that cannot be recorded or run: a TraceError with the part, its kind and the way round."""
    for name, part in module.named_modules():
        reason = _reason(part)
        if reason is not None:
            raise TraceError(f"{name or 'the root module'} ({type(part).__name__}) {reason}")


_SCRIPTED = "is compiled by torch.jit, which hides its calls; give the Python {} it was made of"


def _reason(part: nn.Module) -> str | None:
    """Why a part cannot be recorded or run; None if it can."""
    if isinstance(part, torch.jit.ScriptModule):
        return _SCRIPTED.format("module")
    if isinstance(part, nn.SyncBatchNorm):
        return (
            "normalises over all ranks by collectives of its own, which no plan knows; use BatchNorm, which normalises over "
            "the samples of a rank, or GroupNorm"
        )
    if isinstance(part, nn.Embedding | nn.EmbeddingBag) and part.sparse:
        return "makes sparse gradients, which no bucket can hold; set sparse=False"
    if type(part).__module__.startswith("torch.ao.nn.quantized"):
        return (
            "holds weights that torch has packed as integers, which cannot be trained; give the module before it is quantised, "
            "or one prepared for quantisation-aware training (torch.ao.quantization.prepare_qat)"
        )
    if part._backward_hooks or part._backward_pre_hooks:
        return (
            "has a hook on its backward (register_full_backward_hook), which a recorded forward does not run; change gradients "
            "in a torch.autograd.Function, or drop the hook"
        )
    if any(isinstance(parameter, nn.parameter.UninitializedParameter) for parameter in part._parameters.values()):
        return "has parameters without a shape; call the module once on a batch before it is traced"
    return None


def hint(module: nn.Module, message: str) -> str:
    """What to do about an error of the innermost module that ran; "" where nothing special is known."""
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
    Distributions do not check their arguments, which would look at values; torch.compile switches that off, too."""
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
        raise TraceError(f"a function{at_line(traceback.extract_stack())} {_SCRIPTED.format('function')}")
    return function(*args, **kwargs)


class _InSight:
    """In place of torch's CheckpointFunction (use_reentrant=True), which runs the function out of sight, without gradients."""

    @staticmethod
    def apply(function: Callable[..., Any], _preserve_rng_state: bool, *args: Any) -> Any:
        """Nothing in it gets a gradient unless one of its arguments does, as in torch."""
        differentiable = any(isinstance(value, torch.Tensor) and value.requires_grad for value in args)
        with torch.set_grad_enabled(torch.is_grad_enabled() and differentiable):
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
_Generator = random.Random | np.random.RandomState | np.random.Generator


class Generators:
    """The generators of Python, of numpy and in the attributes of a module's parts, as they were when this was made."""

    def __init__(self, module: nn.Module) -> None:
        self._of_parts: dict[str, _Generator] = {
            qualified(path, name): value
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
        """Give the two global ones the states that they had."""
        random.setstate(self._python)
        np.random.set_state(self._numpy)  # noqa: NPY002

    def _now(self) -> dict[str, Hashable]:
        states = {"Python's random": random.getstate(), "numpy.random": _plain(np.random.get_state())}  # noqa: NPY002
        for name, generator in self._of_parts.items():
            if isinstance(generator, np.random.Generator):
                state: Any = generator.bit_generator.state
            else:
                state = generator.getstate() if isinstance(generator, random.Random) else generator.get_state()
            states[f"the generator {name}"] = _plain(state)
        return states


def _plain(value: Any) -> Hashable:
    """The state of a generator in a form that can be compared."""
    if isinstance(value, np.ndarray):
        return value.tobytes()
    if isinstance(value, Mapping):
        return tuple((key, _plain(item)) for key, item in value.items())
    return tuple(map(_plain, value)) if isinstance(value, tuple | list) else value


def draw_message(name: str, drawn: str, forward: Callable[[], object]) -> str:
    """Why a forward that draws outside torch cannot be recorded.
    `name`: of the module. `drawn`: of `Generators.drawn`. `forward`: the same again, to find the line."""
    return (
        f"the forward of {name} draws from {drawn}{_first_draw(forward)}: each step would draw again, but a recorded forward "
        "repeats one outcome in every step; draw with torch and use the numbers as a tensor, as in "
        "x * (torch.rand(len(x), 1) < 0.9), or draw outside the forward and give the result as an input"
    )


def _first_draw(forward: Callable[[], object]) -> str:
    """The user's line of the first draw; "" where it cannot be seen."""
    lines: list[str] = []

    def look(frame: Any, event: str, argument: Any) -> None:
        if event == "c_call" and not lines and isinstance(getattr(argument, "__self__", None), _Generator):
            lines.append(at_line(traceback.extract_stack(frame)))

    before = sys.getprofile()
    sys.setprofile(look)
    try:
        forward()
    finally:
        sys.setprofile(before)
    return lines[0] if lines else ""


def changed_attributes(before: Iterable[tuple[str, nn.Module, Mapping[str, Any]]]) -> tuple[str, ...]:
    """Numbers and words in attributes that the forward has left with another value, for people.
    `before`: name and attributes of every part of a module, before the forward."""
    return tuple(
        f"{qualified(path, key)} ({was!r} to {now!r})"
        for path, part, attributes in before
        for key, was in attributes.items()
        if isinstance(was, _NUMBERS) and isinstance(now := part.__dict__.get(key), _NUMBERS) and now != was
    )


def qualified(path: str, name: str) -> str:
    """The name of an attribute of a module; "" is the path of the root module."""
    return f"{path}.{name}" if path else name


def change_note(changed: tuple[str, ...]) -> str:
    """What the answer says of `changed_attributes`."""
    return (
        f"the forward changes attributes of its modules: {first_few(changed)}. Every step is taken as the first one, also in "
        "training; keep what changes in a buffer, and use it as a tensor"
    )


# Why a forward cannot be recorded, with the line of the user's code.


_STANDARD = str(Path(traceback.__file__).parent)
_MODEL = Path(__file__).parent.parent
_LIBRARIES = (
    str(Path(torch.__path__[0])),
    *(str(_MODEL / part) for part in ("trace", "shard", "objective.py", "total_loss.py")),
)
"""Files that are not the user's."""


def value_message(where: str, what: object, line: str = "", why: str = "") -> str:
    """Why a forward that looks at tensor values cannot be recorded."""
    line = line or at_line(traceback.extract_stack())
    because = f": {why}" if why else ""
    if "pack_padded_sequence" in str(what):
        return (
            f"{where} packs sequences by their lengths ({what}){line}: they depend on data and cannot be recorded{because}; "
            "give the padded batch to the recurrent layer and pick each last step by index (gather), or sort the data into "
            "batches of one length"
        )
    if "_ctc_loss" in str(what):
        return (
            f"{where} takes a CTC loss of targets in one row{line}, whose sizes depend on their lengths; give padded targets "
            "[batch, longest], and both lengths as inputs"
        )
    return (
        f"{where} looks at the values of a tensor ({what}){line}, so what it does depends on the data and cannot be "
        f"recorded{because}; rewrite that step with torch.where or masks, keep the value outside the forward, or trace the "
        'branch that an example batch takes (example_inputs with data, and control_flow="example")'
    )


def gradient_message(where: str, what: str) -> str:
    """Why a forward that takes gradients itself cannot be recorded."""
    return (
        f"{where} takes gradients inside its forward ({what}){at_line(traceback.extract_stack())}: a step's backward is cut at "
        "the ends of components, and cannot be differentiated again; leave the gradient penalty or inner step out of what is "
        "planned, or write the gradient as ordinary torch functions of the weights"
    )


def weight_message(where: str, name: str) -> str:
    """Why a forward that changes a trained parameter in place cannot be recorded."""
    return (
        f"{where} changes the parameter {name} inside its forward{at_line(traceback.extract_stack())}: replicas see other "
        "samples, and under ZeRO a rank changes a copy, so the weights of ranks would drift apart; compute what is used from "
        "the weight instead (torch.nn.utils.parametrize, or functional.normalize in place of max_norm), and leave the weight "
        "to the optimizer"
    )


def hook_message(where: str) -> str:
    """Why a forward that hangs a hook on a tensor cannot be recorded."""
    return (
        f"{where} registers a hook on a tensor{at_line(traceback.extract_stack())}: a step's backward does not run it, and "
        "what it sees would depend on the plan; change the gradient in a torch.autograd.Function, or drop the hook"
    )


def backward_message(component: str, error: Exception, *, half: bool) -> str:
    """Why the backward of a component cannot be counted. half: it runs under autocast."""
    way = (
        "decorate its forward and backward with torch.amp.custom_fwd and custom_bwd" if half else "register_autograd gives one"
    )
    under = " under autocast to half precision" if half else ""
    return f"the backward of {component} fails{under}: {error}; an operator of your own needs one that runs: {way}"


def at_line(frames: Iterable[traceback.FrameSummary]) -> str:
    """ " at FILE:LINE `code`" of the innermost frame that is the user's; "" if none is."""
    for frame in reversed(list(frames)):
        standard = frame.filename.startswith(_STANDARD) and "site-packages" not in frame.filename
        if not standard and not frame.filename.startswith((*_LIBRARIES, "<")):
            return f" at {frame.filename}:{frame.lineno} `{(frame.line or '').strip()}`"
    return ""
