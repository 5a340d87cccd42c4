"""Why a forward cannot be recorded, with the line of the user's code."""

from __future__ import annotations

import traceback
from collections.abc import Iterable
from pathlib import Path

import torch

_STANDARD = str(Path(traceback.__file__).parent)
_MODEL = Path(__file__).parent.parent
_LIBRARIES = (
    str(Path(torch.__path__[0])),
    *(str(_MODEL / part) for part in ("trace", "shard", "objective.py", "total_loss.py")),
)
_PACKED = "pack_padded_sequence"


def value_message(where: str, what: object, line: str = "", why: str = "") -> str:
    """Why a forward that looks at tensor values cannot be recorded."""
    line = line or at_line(traceback.extract_stack())
    because = f": {why}" if why else ""
    if _PACKED in str(what):
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


def _is_standard(filename: str) -> bool:
    """Python's own library, what is installed beside it apart."""
    return filename.startswith(_STANDARD) and "site-packages" not in filename


def at_line(frames: Iterable[traceback.FrameSummary]) -> str:
    """ " at FILE:LINE `code`" of the innermost frame that is the user's; "" if none is."""
    own = [frame for frame in frames if not frame.filename.startswith((*_LIBRARIES, "<")) and not _is_standard(frame.filename)]
    if not own:
        return ""
    return f" at {own[-1].filename}:{own[-1].lineno} `{(own[-1].line or '').strip()}`"
