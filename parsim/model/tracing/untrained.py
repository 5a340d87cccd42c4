"""Parameters that a loss is not reached from: a pooler beside the head that is trained, the head of another task.

Autograd gives them no gradient, so torch's optimizers leave them as they are, weight decay included. They are planned as frozen
ones are: without gradient, optimizer state or communication.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from torch import Tensor

from parsim.errors import first_few
from parsim.model.tracing.recorder import Recording, storage_key


def may_be_untrained(recording: Recording) -> bool:
    """Whether a parameter seems not to reach the loss, by the calls that were recorded; storages stand for values.

    Args:
        recording: with its loss. Where the forward depends on data, another batch may reach what this one does not.
    """
    if recording.decisions or recording.loss_value is None:
        return False
    tensors = recording.tensors
    reached = {storage_key(tensors[recording.loss_value])}
    numbers = {recording.loss_value}
    for op in reversed(recording.ops):
        made = [*(number for _, number in op.outputs), *op.mutated]
        if any(number in numbers or storage_key(tensors[number]) in reached for number in made):
            flows = [number for number in op.reads if tensors[number].requires_grad]
            numbers.update(flows)
            reached.update(storage_key(tensors[number]) for number in flows)
    return any(number not in numbers for number in _trainable(recording))


def untrained(recording: Recording) -> tuple[str, ...]:
    """Names of the trainable parameters that autograd finds no way to from the loss.

    Args:
        recording: with its loss, and without copies of blocks, which autograd has not seen.
    """
    assert recording.loss_value is not None
    assert not recording.copies
    reached = _leaves(recording.tensors[recording.loss_value])
    return tuple(
        recording.state[number].name for number in _trainable(recording) if id(recording.tensors[number]) not in reached
    )


def _trainable(recording: Recording) -> Iterable[int]:
    kinds = ((number, key) for number, key in recording.state.items() if key.kind == "parameter")
    return [number for number, _ in kinds if recording.tensors[number].requires_grad]


def _leaves(loss: Tensor) -> set[int]:
    """Identities of the tensors in which a backward from `loss` leaves a gradient."""
    waiting, seen, found = [loss.grad_fn], set[object](), set[int]()
    while waiting:
        node = waiting.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if hasattr(node, "variable"):
            found.add(id(node.variable))
        waiting += [following for following, _ in node.next_functions]
    return found


def untrained_note(names: Sequence[str]) -> str:
    """What the answer says."""
    return f"no gradient of the loss reaches {first_few(names)}: not trained, as if frozen"
