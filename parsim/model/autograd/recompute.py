"""Forward of a component that keeps only its inputs, and the same forward again when its backward needs saved tensors.

The second run has the same inputs, generator states (so dropout draws the same mask) and buffers as the first. Its
changes to buffers are discarded, so running statistics are updated once.

By operator (`forward_keeping_calls`), the outputs of some operators are kept too and not computed again. Inputs that nothing
reads again are not kept (`parsim.model.autograd.kept_calls`).

Leaves out: whatever else a forward may read that changes between the two runs (a global, a file).
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from parsim.model.autograd.cut import Forward, Saved, forward_component
from parsim.model.autograd.kept_calls import FirstForward, KeptCalls, Like, SecondForward, generator_state, set_generator_state
from parsim.model.runnable import Runnable

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


def forward_keeping_inputs(
    runnable: Runnable, inputs: Sequence[Tensor], device: torch.device, *, draws: bool = True, on_host: bool = True
) -> tuple[tuple[Tensor, ...], RecomputeInputs]:
    """Run `runnable` on `inputs` without saving anything for a backward. Returns outputs, and what `recompute` needs.

    Args:
        draws: it may draw random numbers. If it does not, generators are left alone, which others may use meanwhile.
        on_host: on a GPU, also from the generator of the CPU. If it does not, that one is left alone.
    """
    kept = RecomputeInputs(
        inputs=tuple(value.detach() for value in inputs),
        buffers=tuple(buffer.clone() for buffer in runnable.buffers()),
        generators=_generator_states(device, draws, on_host),
    )
    with torch.no_grad():
        outputs, _ = forward_component(runnable, inputs)
    return outputs, kept


def forward_keeping_calls(
    runnable: Runnable, inputs: Sequence[Tensor], device: torch.device, *, draws: bool = True, on_host: bool = True
) -> tuple[tuple[Tensor, ...], RecomputeInputs]:
    """The same, keeping the outputs of operators that are dear to compute and that something needs again.

    Raises TraceError if the component writes in place into an input that is read again.
    """
    buffers = runnable.buffers()
    copies, states = tuple(buffer.clone() for buffer in buffers), _generator_states(device, draws, on_host)
    given = (*runnable.parameters(), *(constant for constant, _ in runnable.program.constants))
    outputs, calls = first_forward(runnable, inputs, FirstForward((*inputs, *given, *buffers)), buffers)
    kept = tuple(value.detach() if read else Like.of(value) for value, read in zip(inputs, calls.inputs, strict=True))
    return outputs, RecomputeInputs(inputs=kept, buffers=copies, generators=states, calls=calls)


def first_forward(
    forward: Forward, inputs: Sequence[Tensor], watch: FirstForward, buffers: Sequence[Tensor] = ()
) -> tuple[tuple[Tensor, ...], KeptCalls]:
    """A forward that keeps what is dear to compute, and saves nothing else.

    Gradients are on, as in the second forward, because some functions of torch call other operators without them.

    Args:
        forward: of a component. inputs: of it. watch: new, with all that the forward is given.
        buffers: of which there are copies from before.

    Raises: TraceError as `FirstForward.ended` does.
    """
    with torch.autograd.graph.saved_tensors_hooks(watch.saved, _read_too_early), watch:
        outputs, _ = forward_component(forward, inputs)
    return outputs, watch.ended(inputs, outputs, buffers)


def second_forward(forward: Forward, inputs: Sequence[Tensor | Like], calls: KeptCalls) -> Saved:
    """What is not kept once more, saving for the backward.

    Args:
        forward, calls: of `first_forward`. inputs: as it had them, or what those were like that nothing reads again.

    Raises:
        TraceError: the forward makes other calls than the first time.
    """
    given = [value.room() if isinstance(value, Like) else value for value in inputs]
    with SecondForward(calls):
        return forward_component(forward, given)[1]


def _read_too_early(nothing: object) -> Tensor:
    raise AssertionError(f"a first forward saves {nothing}, and no backward runs before the second one")


def recompute(runnable: Runnable, kept: RecomputeInputs) -> Saved:
    """Run the forward again, saving for its backward. Generators and buffers are afterwards as they were before."""
    with _generators_of(kept), runnable.reading_buffers(kept.buffers):
        if kept.calls is not None:
            return second_forward(runnable, kept.inputs, kept.calls)
        return forward_component(runnable, [value for value in kept.inputs if isinstance(value, Tensor)])[1]


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


def _generator_states(device: torch.device, draws: bool, on_host: bool) -> dict[torch.device, Tensor]:
    """Of the generators that a forward may draw from."""
    if not draws:
        return {}
    places = [*([CPU] if on_host or device.type == "cpu" else []), *([device] if device.type == "cuda" else [])]
    return {place: generator_state(place) for place in places}
