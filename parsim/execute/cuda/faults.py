"""Faults of a GPU, with one message each: memory that runs out, a lost device, a wrong operand.

torch is imported where it is used: planning needs none.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence

from parsim.errors import ExecutionError, OutOfMemoryError, RankLostError
from parsim.units import format_bytes

LOST = ("cuda error", "cudnn_status", "cublas_status", "nccl error: unhandled cuda error", "unspecified launch failure")
ASSERTED = "device-side assert"
ASSERTION = "Assertion `"
"""In what the driver writes of it to stderr, with the comparison that failed."""
STATUS = "_status_"
"""In errors of cuBLAS, cuDNN and others of NVIDIA's libraries."""
REFUSED = (
    "_not_supported",
    "_bad_param",
    "_invalid_value",
    "_arch_mismatch",
    "no kernel image",
    "invalid device function",
    "invalid configuration argument",
    "invalid argument",
    "too many resources requested",
    "operation not supported",
)
"""What a GPU that is well answers to a call that it cannot take."""

NO_MEMORY = ("out of memory", "status_alloc_failed")
"""cuBLAS, cuDNN, NCCL and CUDA's own calls say so in errors that are not torch's OutOfMemoryError."""

LAST_ERROR = "Last error:"
"""In what torch says of an error of NCCL: the cause follows."""
SHARED_MEMORY = "(NCCL communicates through /dev/shm; give a container more of it: docker run --shm-size=1g, or --ipc=host)"

REST = "activations and what comes beside them"


def visible_devices(wanted: Sequence[int], seen: str = "") -> str:
    """CUDA_VISIBLE_DEVICES for the GPUs of some numbers; "" where they are the first ones. seen: the variable as it is."""
    if list(wanted) == list(range(len(wanted))):
        return ""
    names = [name for name in seen.split(",") if name]
    return ",".join(names[number] if number < len(names) else str(number) for number in wanted)


def out_of_memory(
    *, rank: int, step: int, predicted: Mapping[str, int], held: Mapping[str, int], allocated_bytes: int, kept: str
) -> OutOfMemoryError:
    """The message for a rank whose allocation failed in a step (from 0). predicted: the lines of tensors of this rank;
    empty: not known. held: bytes that stay between steps, by line. allocated_bytes: at the failure. kept: about the last
    checkpoint."""
    where = f"rank {rank} ran out of memory in step {step} with {format_bytes(allocated_bytes)} allocated"
    if not predicted:
        return OutOfMemoryError(f"{where}; use more devices or microbatches, or a smaller training.global_batch. {kept}")
    rest = {name: size for name, size in predicted.items() if name not in held}
    seen = {**held, REST: max(0, allocated_bytes - sum(held.values()))}
    foreseen = {**{name: predicted.get(name, 0) for name in held}, REST: sum(rest.values())}
    name = max(seen, key=lambda line: seen[line] - foreseen[line])
    if seen[name] <= foreseen[name]:
        return OutOfMemoryError(
            f"{where}, {format_bytes(sum(predicted.values()))} of tensors predicted: no line was short, so memory "
            "beside tensors (context, communicators, what the allocator loses, other processes) takes more than predicted. "
            f"{kept}"
        )
    largest = max(rest, key=lambda line: rest[line]) if name == REST and rest else ""
    detail = f" (predicted mostly as {largest}, {format_bytes(rest[largest])})" if largest else ""
    return OutOfMemoryError(
        f"{where}. The line that was short is {name}: {format_bytes(seen[name])} where {format_bytes(foreseen[name])} were "
        f"predicted{detail}. {kept}"
    )


def first_line(message: str) -> str:
    """What the message of an error says at first; of NCCL, which names the cause at the end, that too."""
    lines = [line.strip() for line in message.strip().splitlines()]
    if not lines:
        return ""
    cause = next((line for before, line in itertools.pairwise(lines) if before == LAST_ERROR and line), "")
    hint = f" {SHARED_MEMORY}" if "shared memory segment" in cause else ""
    return f"{lines[0]}: {cause}{hint}" if cause else lines[0]


def is_out_of_memory(error: BaseException) -> bool:
    """Whether a GPU's memory was too small, whoever asked for it: torch's allocator, a library, NCCL, or CUDA itself."""
    import torch

    if isinstance(error, torch.OutOfMemoryError):
        return True
    return isinstance(error, RuntimeError) and any(phrase in str(error).lower() for phrase in NO_MEMORY)


@contextlib.contextmanager
def told_outside_steps(rank: int, device: str, doing: Callable[[], str]) -> Iterator[None]:
    """Inside, a GPU's fault becomes one message, as it does in a step: OutOfMemoryError, RankLostError or ExecutionError.
    doing: what the rank does now, in words."""
    try:
        yield
    except RuntimeError as error:
        if not device.startswith("cuda"):
            raise
        error = as_the_device_says(error, device)
        reason = _reason(error)
        if is_out_of_memory(error):
            raise OutOfMemoryError(
                f"rank {rank} ran out of memory on {device} outside a training step ({doing()}): {reason}. Use more devices, "
                "a higher plan.zero_stage or pipeline stages"
            ) from error
        if is_failed_assertion(error):
            raise failed_assertion(rank, f"outside a training step ({doing()})", error) from error
        if is_lost_device(error):
            raise RankLostError(
                f"rank {rank} lost {device} outside a training step ({doing()}): {reason}. `nvidia-smi` and the system log "
                "(Xid) say whether the GPU is well",
                (rank,),
                device_lost=True,
            ) from error
        raise


def is_lost_device(error: BaseException) -> bool:
    """Whether a GPU stopped answering: nothing can be computed on it by this process any more."""
    import torch

    text = str(error).lower()
    if is_out_of_memory(error) or any(phrase in text for phrase in (ASSERTED, *REFUSED)):
        return False
    accelerator = getattr(torch, "AcceleratorError", None)
    if accelerator is not None and isinstance(error, accelerator):
        return True
    return isinstance(error, RuntimeError) and any(phrase in text for phrase in LOST)


def as_the_device_says(error: RuntimeError, device: str) -> RuntimeError:
    """The error that stands behind one of a library, which knows only that its call failed: a kernel before it may have ended
    all work on the device. It is asked without waiting for it, as a receive may wait there for a peer.
    """
    import torch

    if device.startswith("cuda") and STATUS in str(error).lower() and not is_out_of_memory(error):
        try:
            torch.cuda.current_stream(torch.device(device)).query()
        except RuntimeError as device_error:
            return device_error
    return error


def _reason(error: BaseException) -> str:
    return first_line(str(error)) or type(error).__name__


def is_failed_assertion(error: BaseException) -> bool:
    """Whether a kernel found an operand that it must not have, where a CPU raises an IndexError. The process cannot go on."""
    return isinstance(error, RuntimeError) and ASSERTED in str(error).lower()


def failed_assertion(rank: int, where: str, error: BaseException, kept: str = "") -> ExecutionError:
    """The message for a kernel that found a wrong operand. where: "in step 3". kept: about the last checkpoint."""
    return ExecutionError(
        f"rank {rank} stopped {where}: {_reason(error)}. The GPU is well. A kernel was given an index beyond its table, such "
        "as a target that is no class, or a token beyond the vocabulary. CUDA_LAUNCH_BLOCKING=1 says where. Correct the data "
        f"or the model's sizes. {kept}".rstrip()
    )


def lost_device(rank: int, device: str, step: int, error: BaseException, kept: str) -> RankLostError:
    return RankLostError(
        f"rank {rank} lost {device} in step {step}: {_reason(error)}. {kept} `nvidia-smi` and the system log (Xid) say whether "
        "the GPU is well",
        (rank,),
        device_lost=True,
    )


def checkpoint_text(step: int | None) -> str:
    if step is None:
        return "No checkpoint was written yet: the training starts again."
    return f"The checkpoint of step {step} is kept: `parsim run --resume` continues from there."
