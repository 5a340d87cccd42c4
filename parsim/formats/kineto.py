"""Traces of the PyTorch profiler (Kineto, Chrome trace JSON): what ran on every stream, and which operator launched it.

A trace of a GPU holds kernels and copies with the device's times; the host's launches carry the same `correlation`. A trace of
a CPU holds operators alone: the outermost ones of each thread are what it computed. Steps are the `ProfilerStep#N` ranges of
`profiler.step()`. Times in the file are microseconds. An event without a name, a finite start or a length is left out and
counted.

The arithmetic of an operator follows from the shapes of its inputs (`record_shapes=True`): products, convolutions and
attention, nearly all arithmetic of a network. A multiply-add counts as 2. Other operators do no counted arithmetic, and their
time is reported as such. A causal attention counts half, where the concrete inputs say so; sequences of one packed array count
as equally long. Leaves out: transposed convolutions, whose positions are counted as those of plain ones.

Source: github pytorch/kineto, libkineto/src/output_json.cpp (keys of the events); traces written by torch 2.13 here.
"""

from __future__ import annotations

import itertools
import math
import re
import sqlite3
from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np

from parsim.errors import ImportedFileError
from parsim.formats.source import FileFormat, SourceFile, count, finite, listed, shown
from parsim.numeric import Floats, Ints

ON_DEVICE = ("kernel", "gpu_memcpy", "gpu_memset")
LAUNCHES = ("cuda_runtime", "cuda_driver", "hip_runtime", "xpu_runtime")
KINDS = ("compute", "communication", "copy")
COMMUNICATION_NAMES: Mapping[str, str] = {
    r"nccl|rccl": "NCCL and RCCL of any release, and torch's ranges `nccl:...`",
    r"^c10d::|gloo:": "torch's operators of a process group, and gloo's ranges",
    r"nvshmem": "NVSHMEM",
    r"(multimem|one_shot|two_shot)\w*_(reduce|gather)": "symmetric memory of torch, from 2.5 on: CUDASymmetricMemoryOps.cu",
    r"cross_device_reduce|AllReduce.*Kernel|allreduce_fusion": "all_reduces of vLLM, SGLang, AIter and FlashInfer",
    r"deep_ep(_cpp)?::|deep_ep.*(dispatch|combine)": "dispatch and combine of experts: DeepEP",
}
"""Patterns of what communicates, by operator or kernel, and whose it is."""
COMMUNICATION = re.compile("|".join(COMMUNICATION_NAMES), re.IGNORECASE)
LOADING = re.compile(r"DataLoader", re.IGNORECASE)
STEP = re.compile(r"ProfilerStep\s?#\s?\d{1,12}")
EXPECTED = 'a trace of torch.profiler (`prof.export_chrome_trace("trace.json.gz")`), with a list `traceEvents`'
MOST_MICROSECONDS = 1e14
"""Latest start after the oldest: three years."""
LONGEST_NAME = 400
NO_SHAPES = "shapes were not recorded, so kernels are not divided by their arithmetic: profile(record_shapes=True)"
NUMBER_TYPES: Mapping[str, tuple[str, ...]] = {
    "float": ("fp32",),
    "double": ("fp64",),
    "c10::BFloat16": ("bf16", "amp_bf16"),
    "c10::Half": ("amp_fp16", "fp16", "bf16"),
}
"""Names of types in a trace, and the precisions of a profile that have such arithmetic."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Activities:
    """What ran, in order of its start; times in seconds from the beginning of the first step.

    Attributes:
        names: distinct names; name: int64 [n] into them. kind: int64 [n] into KINDS.
        streams: texts ("stream 7", "thread 12"); stream: int64 [n].
        start_s, end_s: float64 [n]. launched_s: end of the host's launch (NaN: not known).
        flop: float64 [n], of the operator behind it, shared among its kernels by their time (0: none counted).
    """

    names: tuple[str, ...]
    name: Ints
    kind: Ints
    streams: tuple[str, ...]
    stream: Ints
    start_s: Floats
    end_s: Floats
    launched_s: Floats
    flop: Floats


@dataclass(frozen=True, slots=True, kw_only=True)
class ShapedCall:
    """One call of a product or of an attention on a device: the seconds of its kernels.

    Attributes:
        kind, phase, sizes: as of `parsim.costs.compute.launches.Launch`. causal: an attention whose mask halves the scores.
    """

    kind: str
    phase: str
    sizes: tuple[tuple[str, float], ...]
    flop: float
    seconds: float
    causal: bool = False


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Trace:
    """One rank's trace.

    Attributes:
        on_gpu: activities are those of a GPU. device: its name ("" for a CPU). rank, world_size: of the job, if it says so.
        window_s: seconds of the recorded steps. steps: how many. step_lengths_s: of each, as the host saw it.
        no_shapes: why kernels are not divided by their arithmetic ("": shapes were recorded).
        number_type: in which most arithmetic was done, as torch names it ("" if unknown).
        loading: [m, 2] start and end of what the host did to load data.
        skipped: why events were left out, and how many.
        calls: products and attentions on a device whose shapes were recorded.
    """

    activities: Activities
    on_gpu: bool
    device: str
    rank: int
    world_size: int
    window_s: float
    steps: int
    step_lengths_s: tuple[float, ...]
    no_shapes: str
    number_type: str
    loading: Floats
    skipped: Mapping[str, int]
    notes: tuple[str, ...]
    calls: tuple[ShapedCall, ...] = ()

    @property
    def step_s(self) -> float:
        return self.window_s / self.steps


@dataclass(slots=True)
class _Event:
    """One complete event, in microseconds. owner: number of the counted operator that it lies in; -1: none."""

    name: str
    category: str
    thread: str
    start: float
    end: float
    args: Mapping[str, Any]
    flop: float = 0.0
    owner: int = -1


def read_kineto(source: SourceFile, *, steps: int | None = None) -> Trace:
    """Read a trace.

    Args: source: the file. steps: how many it holds, where it has no ProfilerStep ranges (None: one).
    Raises: ImportedFileError: it is not a trace, it holds no activity, or no activity lies in its steps.
    """
    return trace_of(source.json("a trace"), str(source.path), steps)


def trace_of(document: object, where: str, steps: int | None = None) -> Trace:
    """The activities of trace events, as `read_kineto`.

    Args: document: a list of events, or a table with `traceEvents`. where: the file, for messages. steps: as there.
    Raises: ImportedFileError: as there.
    """
    entries = document.get("traceEvents") if isinstance(document, dict) else document
    if not isinstance(entries, list):
        raise ImportedFileError(f"{where} has no list `traceEvents`; expected {EXPECTED}")
    head: dict[str, Any] = document if isinstance(document, dict) else {}
    skipped: dict[str, int] = {}
    events = _complete_events(entries, skipped)
    marks = sorted(
        {(event.start, event.end) for event in events if event.category == "user_annotation" and STEP.fullmatch(event.name)}
    )
    operators = [event for event in events if event.category == "cpu_op"]
    marks = _with_work(marks, events, skipped)
    on_device = [event for event in events if event.category in ON_DEVICE]
    activities = on_device or _on_host(events, operators)
    if not activities:
        raise ImportedFileError(
            f"{where} holds {len(entries)} events and none of them is a kernel, a copy or an operator; expected {EXPECTED}. "
            "Without `repeat=1` a profiler begins its next cycle after the last recorded step, and an export after the loop "
            "holds that one: schedule(..., repeat=1), and export in on_trace_ready"
        )
    notes: list[str] = []
    begin, end, number = _window(activities, marks, steps, notes)
    _count_flop(operators)
    inside = sorted(
        (event for event in activities if event.end > begin and event.start < end), key=lambda event: (event.start, event.end)
    )
    if not inside:
        raise ImportedFileError(
            f"{where}: nothing ran within its {number} steps; record the steps with the activities of the GPU"
        )
    if len(inside) < len(activities):
        skipped["activities outside the steps"] = len(activities) - len(inside)
    job = head.get("distributedInfo")
    job = job if isinstance(job, dict) else {}
    rank, world = finite(job.get("rank")), finite(job.get("world_size"))
    devices = head.get("deviceProperties")
    names = [entry.get("name") for entry in devices if isinstance(entry, dict)] if isinstance(devices, list) else []
    loading = sorted((event.start, event.end) for event in events if LOADING.search(event.name))
    return Trace(
        activities=_activities(inside, events, operators, begin, end, bool(on_device)),
        on_gpu=bool(on_device),
        device=next((shown(name) for name in names if isinstance(name, str)), ""),
        rank=int(rank) if rank is not None and 0 <= rank < 1e6 else 0,
        world_size=int(world) if world is not None and 1 <= world < 1e6 else 1,
        window_s=(end - begin) * 1e-6,
        steps=number,
        step_lengths_s=tuple((last - first) * 1e-6 for first, last in marks),
        no_shapes="" if any("Input Dims" in event.args or "Input dims" in event.args for event in operators) else NO_SHAPES,
        number_type=_number_type(operators),
        loading=(np.array(loading, dtype=np.float64).reshape(-1, 2) - begin) * 1e-6,
        skipped=skipped,
        notes=tuple(notes),
        calls=_calls(inside, operators) if on_device else (),
    )


def _complete_events(entries: list[Any], skipped: dict[str, int]) -> list[_Event]:
    events: list[_Event] = []
    for entry in entries:
        if not isinstance(entry, dict):
            count(skipped, "events that are no table")
            continue
        if entry.get("ph") != "X":
            continue
        start, length, name = finite(entry.get("ts")), finite(entry.get("dur")), entry.get("name")
        category, args = entry.get("cat"), entry.get("args")
        if start is None or length is None or length < 0 or not isinstance(name, str) or not isinstance(category, str):
            count(skipped, "events without a name, a start or a length")
        elif abs(start) > 1e18 or length > MOST_MICROSECONDS:
            count(skipped, "events at impossible times")
        else:
            thread = f"{shown(entry.get('pid'))}/{shown(entry.get('tid'))}"
            args = args if isinstance(args, dict) else {}
            events.append(_Event(name[:LONGEST_NAME], category.lower(), thread, start, start + length, args))
    oldest = min((event.start for event in events), default=0.0)
    possible = [event for event in events if event.start - oldest <= MOST_MICROSECONDS]
    if len(possible) < len(events):
        count(skipped, "events at impossible times", len(events) - len(possible))
    return possible


def _on_host(events: list[_Event], operators: list[_Event]) -> list[_Event]:
    """What a CPU ran: the outermost operators of each thread, and communication wherever it was recorded."""
    outermost: list[_Event] = []
    reach: dict[str, float] = {}
    for event in sorted(operators, key=lambda event: (event.thread, event.start, -event.end)):
        if event.start >= reach.get(event.thread, -np.inf) and not COMMUNICATION.search(event.name):
            outermost.append(event)
            reach[event.thread] = event.end
    sent = [event for event in events if event.category != "python_function" and COMMUNICATION.search(event.name)]
    return outermost + sent if outermost else []


def _with_work(marks: list[tuple[float, float]], events: list[_Event], skipped: dict[str, int]) -> list[tuple[float, float]]:
    starts = sorted(event.start for event in events if event.category in ("cpu_op", *LAUNCHES, *ON_DEVICE))
    full = [mark for mark in marks if bisect_right(starts, mark[1]) > bisect_right(starts, mark[0])]
    if full and len(full) < len(marks):
        count(skipped, "steps in which nothing ran", len(marks) - len(full))
    return full or marks


def _window(
    activities: list[_Event], marks: list[tuple[float, float]], steps: int | None, notes: list[str]
) -> tuple[float, float, int]:
    """(begin, end, number of steps): from the first step's start to the end of the last one's activities."""
    if marks:
        begin, end = marks[0][0], max(mark[1] for mark in marks)
        return begin, max([end, *(event.end for event in activities if begin <= event.start < end)]), len(marks)
    begin = min(event.start for event in activities)
    if steps is None:
        notes.append(
            "the trace has no ProfilerStep ranges: all of it counts as one step; call profiler.step(), or give --steps"
        )
    return begin, max(*(event.end for event in activities), begin + 1e-3), max(1, steps or 1)


def _count_flop(operators: list[_Event]) -> None:
    """Arithmetic of the outermost counted operator of each nest; those inside it name it as their owner."""
    stacks: dict[str, list[int]] = {}
    order = sorted(range(len(operators)), key=lambda i: (operators[i].thread, operators[i].start, -operators[i].end))
    for index in order:
        event = operators[index]
        stack = stacks.setdefault(event.thread, [])
        while stack and operators[stack[-1]].end <= event.start:
            stack.pop()
        event.owner = operators[stack[-1]].owner if stack else -1
        if event.owner < 0 and (flop := flop_of(event.name, event.args)) is not None:
            event.flop, event.owner = flop, index
        stack.append(index)


def _number_type(operators: list[_Event]) -> str:
    """The type of the first input, weighted by arithmetic."""
    flop_of_type: dict[str, float] = {}
    for event in operators:
        types = event.args.get("Input type")
        if event.flop > 0 and isinstance(types, list):
            first = next((shown(name) for name in types if isinstance(name, str) and name in NUMBER_TYPES), "")
            flop_of_type[first] = flop_of_type.get(first, 0.0) + event.flop
    return max(flop_of_type, key=lambda name: flop_of_type[name]) if flop_of_type else ""


def _activities(
    inside: list[_Event], events: list[_Event], operators: list[_Event], begin: float, end: float, on_gpu: bool
) -> Activities:
    names: dict[str, int] = {}
    streams: dict[str, int] = {}
    name, kind, stream = (np.zeros(len(inside), dtype=np.int64) for _ in range(3))
    start, stop, launched = (np.full(len(inside), np.nan) for _ in range(3))
    launches = {
        key: event.end
        for event in events
        if on_gpu and event.category in LAUNCHES and (key := _key(event.args.get("correlation")))
    }
    for row, event in enumerate(inside):
        name[row] = names.setdefault(shown(event.name), len(names))
        kind[row] = KINDS.index(
            "communication" if COMMUNICATION.search(event.name) else "copy" if event.category == "gpu_memcpy" else "compute"
        )
        label = (
            f"stream {shown(event.args.get('stream', event.thread))}" if on_gpu else f"thread {event.thread.rpartition('/')[2]}"
        )
        stream[row] = streams.setdefault(label, len(streams))
        start[row], stop[row] = max(event.start, begin), min(event.end, end)
        launched[row] = launches.get(_key(event.args.get("correlation")), np.nan)
    return Activities(
        names=tuple(names),
        name=name,
        kind=kind,
        streams=tuple(streams),
        stream=stream,
        start_s=(start - begin) * 1e-6,
        end_s=(stop - begin) * 1e-6,
        launched_s=(launched - begin) * 1e-6,
        flop=_device_flop(inside, operators) if on_gpu else _host_flop(inside, operators),
    )


def _key(value: object) -> str:
    """A correlation or an external id as a key: numbers and texts of numbers are one."""
    return str(value) if isinstance(value, int | str) else ""


def _owners(kernels: list[_Event], operators: list[_Event]) -> list[int]:
    owners = {key: event.owner for event in operators if (key := _key(event.args.get("External id"))) and event.owner >= 0}
    return [
        owners.get(_key(event.args.get("External id", event.args.get("external id"))), -1) if event.category == "kernel" else -1
        for event in kernels
    ]


def _calls(kernels: list[_Event], operators: list[_Event]) -> tuple[ShapedCall, ...]:
    lengths: dict[int, float] = {}
    for event, owner in zip(kernels, _owners(kernels, operators), strict=True):
        if owner >= 0:
            lengths[owner] = lengths.get(owner, 0.0) + (event.end - event.start) * 1e-6
    calls = ((operators[owner], seconds) for owner, seconds in lengths.items() if seconds > 0)
    return tuple(call for event, seconds in calls if (call := _call(event, seconds)) is not None)


def _call(event: _Event, seconds: float) -> ShapedCall | None:
    """The sizes of a product of two matrices, or of an attention; None for what is neither."""
    dims = [entry for entry in event.args.get("Input Dims", event.args.get("Input dims", ())) if isinstance(entry, list)]
    rule = _COUNTED[event.name]
    if len(dims) < rule.first + 2:
        return None
    a, b = dims[rule.first], dims[rule.first + 1]
    if rule.kind == "matmul" and len(a) == len(b) and len(a) >= 2:
        sizes = {"problems": math.prod(a[:-2]), "rows": a[-2], "columns": b[-1], "depth": a[-1]}
    elif rule.kind == "attention" and len(a) == len(b) == 4:
        sizes = {"problems": a[0] * a[3 - rule.tokens], "queries": a[rule.tokens], "keys": b[rule.tokens], "depth": a[3]}
    else:
        return None
    whole = rule.products * 2.0 * math.prod(a) * sizes.get("keys", 0)
    return ShapedCall(
        kind=rule.kind,
        phase=rule.phase,
        sizes=tuple(sizes.items()),
        flop=event.flop,
        seconds=seconds,
        causal=rule.kind == "attention" and event.flop < whole,
    )


def _device_flop(kernels: list[_Event], operators: list[_Event]) -> Floats:
    of_row = _owners(kernels, operators)
    length: dict[int, float] = {}
    for event, owner in zip(kernels, of_row, strict=True):
        length[owner] = length.get(owner, 0.0) + (event.end - event.start)
    return np.array(
        [
            operators[owner].flop * (event.end - event.start) / length[owner] if owner >= 0 and length[owner] > 0 else 0.0
            for event, owner in zip(kernels, of_row, strict=True)
        ],
        dtype=np.float64,
    )


def _host_flop(outermost: list[_Event], operators: list[_Event]) -> Floats:
    rows_of: dict[str, list[int]] = {}
    for row, event in enumerate(outermost):
        rows_of.setdefault(event.thread, []).append(row)
    flop = np.zeros(len(outermost))
    for event in operators:
        rows = rows_of.get(event.thread, [])
        place = bisect_right(rows, event.start, key=lambda row: outermost[row].start)
        if event.flop > 0 and place and outermost[rows[place - 1]].end >= event.end:
            flop[rows[place - 1]] += event.flop
    return flop


InputShapes = Sequence[Sequence[int]]
MOST_FLOP = 1e21
"""Arithmetic of one operator at most; more is a shape that cannot be."""


@dataclass(frozen=True, slots=True)
class _Counted:
    """An operator whose arithmetic is counted.

    Attributes:
        flop: by the shapes and the arguments of a call. kind, phase: of the launch whose formula prices it ("": of none).
        first: place of the first operand among the inputs. tokens: axis of the sequence. products: of attention.
    """

    flop: Callable[[InputShapes, Mapping[str, Any]], float]
    kind: str = ""
    phase: str = "forward"
    first: int = 0
    tokens: int = 2
    products: float = 0.0


def _product(dims: InputShapes, args: Mapping[str, Any], first: int = 0) -> float:
    """[..., m, k] times [..., k, n], inputs `first` and the next."""
    a, b = dims[first], dims[first + 1]
    return 0.0 if len(a) < 2 or len(b) != len(a) or a[-1] != b[-2] else 2.0 * math.prod(a) * b[-1]


def _convolution(dims: InputShapes, args: Mapping[str, Any]) -> float:
    """Output positions follow from stride, padding and dilation, which stand among the concrete inputs."""
    image, weight = dims[0], dims[1]
    if len(image) != len(weight) or len(image) < 3:
        return 0.0
    lists = _integer_lists(args, len(image) - 2)
    ones = [1] * (len(image) - 2)
    padding, stride, dilation = lists[:3] if len(lists) >= 3 else ([0] * len(ones), ones, ones)
    if len(lists) >= 3 and args["name"] in ("aten::convolution", "aten::convolution_overrideable"):
        padding, stride = stride, padding  # these list the stride first, the libraries' own operators the padding
    positions = 1
    for size, kernel, pad, step, spread in zip(image[2:], weight[2:], padding, stride, dilation, strict=True):
        positions *= max(0, (size + 2 * pad - spread * (kernel - 1) - 1) // max(1, step) + 1)
    return 2.0 * image[0] * positions * math.prod(weight)


def _convolution_backward(dims: InputShapes, args: Mapping[str, Any]) -> float:
    """The gradient's own shape gives the positions; once for each of input and weight that needs a gradient."""
    gradient, weight = dims[0], dims[2]
    if len(gradient) != len(weight) or len(gradient) < 3:
        return 0.0
    mask = str(_concrete(args)[-1]) if _concrete(args) else ""
    wanted = max(1, sum("true" in part.lower() for part in mask.split(",")[:2])) if mask.startswith("[") else 2
    return 2.0 * gradient[0] * math.prod(gradient[2:]) * math.prod(weight) * wanted


def _grouped_product(dims: InputShapes, args: Mapping[str, Any]) -> float:
    """[tokens, k] times [groups, k, n], each token in one group; [m, tokens] times [tokens, n]; or one product per group."""
    a, b = dims[0], dims[1]
    if len(a) == len(b) or len(a) < 2:
        return _product(dims, args)
    return 0.0 if (len(a), len(b)) != (2, 3) or a[1] != b[1] else 2.0 * math.prod(a) * b[2]


def _attention(phase: str, causal: int, *, tokens: int = 2) -> _Counted:
    """Scores and values, two products (five in the backward, whose first input is the gradient), of queries and keys.

    causal: place of the flag among the concrete inputs. tokens: their axis: 2 of [batch, heads, tokens, width], 1 of
    [batch, tokens, heads, width]. Three axes are packed sequences [tokens, heads, width], whose ends follow the values.
    """

    first, products = {"forward": (0, 2.0), "backward": (1, 5.0)}[phase]

    def flop(dims: InputShapes, args: Mapping[str, Any]) -> float:
        q, k = dims[first], dims[first + 1]
        concrete = _concrete(args)
        share = 0.5 if len(concrete) > causal and str(concrete[causal]).lower() == "true" else 1.0
        if len(q) == len(k) == 4:
            return share * products * 2.0 * math.prod(q) * k[tokens]
        ends = [shape for shape in dims[first + 3 :] if len(shape) == 1 and shape[0] > 1]
        if tokens == 1 and len(q) == len(k) == 3 and ends:
            return share * products * 2.0 * math.prod(q) * k[0] / (ends[0][0] - 1)
        return 0.0

    return _Counted(flop, "attention", phase, first, tokens, products)


_COUNTED: Mapping[str, _Counted] = {
    **dict.fromkeys(("aten::mm", "aten::bmm", "aten::_scaled_mm"), _Counted(_product, "matmul")),
    **dict.fromkeys(("aten::_grouped_mm", "aten::_scaled_grouped_mm"), _Counted(_grouped_product)),
    **dict.fromkeys(
        ("aten::addmm", "aten::_addmm_activation", "aten::baddbmm"), _Counted(partial(_product, first=1), "matmul", first=1)
    ),
    "aten::convolution_overrideable": _Counted(_convolution),
    **{f"aten::{library}convolution": _Counted(_convolution) for library in ("", "cudnn_", "miopen_", "mkldnn_")},
    "aten::convolution_backward": _Counted(_convolution_backward),
    **{
        name.format(phase, f"_{phase}" * (phase == "backward")): _attention(phase, causal, tokens=tokens)
        for name, tokens, forward, backward in (
            ("aten::_scaled_dot_product_flash_attention{1}", 2, 4, 11),
            ("aten::_scaled_dot_product_efficient_attention{1}", 2, 6, 11),
            ("aten::_scaled_dot_product_cudnn_attention{1}", 2, 6, 14),
            ("aten::_scaled_dot_product_flash_attention_for_cpu{1}", 2, 4, 7),
            ("aten::_flash_attention_{0}", 1, 8, 11),
            ("flash_attn::_flash_attn_{0}", 1, 5, 11),
            ("flash_attn::_flash_attn_varlen_{0}", 1, 9, 15),
        )
        for phase, causal in (("forward", forward), ("backward", backward))
    },
}
"""The counted operators. The outermost one counts: `aten::convolution` and not what it calls."""


PRODUCTS = re.compile(
    r"gemm|nvjet|cutlass|Cijk_|xmma|cublas|conv(olution|2d|3d)?_?(fwd|fprop|dgrad|wgrad|bprop)|implicit_convolve|"
    r"flash_(fwd|bwd)|fmha|triton_\w*?_?(mm|bmm|addmm|baddbmm|convolution|attention)(_|\b)",
    re.IGNORECASE,
)
"""Names of kernels that multiply matrices: of cuBLAS, CUTLASS, rocBLAS, cuDNN, flash attention and Triton. Where no operator
with shapes launched one, as inside a compiled region, its arithmetic is not known."""


def flop_of(name: str, args: object) -> float | None:
    """Operations of one call; None for an operator that is not counted or whose shapes were not recorded.

    Args: name: of the operator. args: of its event.
    """
    rule = _COUNTED.get(name)
    if rule is None or not isinstance(args, dict):
        return None
    shapes = args.get("Input Dims", args.get("Input dims"))
    dims = [  # [] for an input that is not a tensor
        list(entry) if isinstance(entry, list) and all(isinstance(n, int) and 0 <= n < 2**48 for n in entry) else []
        for entry in (shapes[:64] if isinstance(shapes, list) else [])
    ]
    try:
        flop = rule.flop(dims, {**args, "name": name})
    except (IndexError, OverflowError):
        return None
    return float(flop) if 0 < flop <= MOST_FLOP else None


def _concrete(args: Mapping[str, Any]) -> list[Any]:
    value = args.get("Concrete Inputs")
    return value if isinstance(value, list) else []


def _integer_lists(args: Mapping[str, Any], length: int) -> list[list[int]]:
    """The concrete inputs that are lists of integers, such as "[1, 1]", spread to one number per dim."""
    lists: list[list[int]] = []
    for entry in _concrete(args)[:32]:
        text = str(entry)
        if not (text.startswith("[") and text.endswith("]")) or len(text) > 64:
            continue
        parts = [part.strip() for part in text[1:-1].split(",")]
        if all(part.isascii() and part.isdigit() and len(part) < 9 for part in parts):
            numbers = [int(part) for part in parts]
            lists.append(numbers if len(numbers) == length else numbers[:1] * length)
    return lists


# SQLite exports of Nsight Systems (`nsys export --type sqlite`): kernels, copies and launches of one GPU.
#
# The rows become the trace events of the profiler, so windows, gaps and the ledger mean the same. Steps are NVTX ranges such as
# "step 3", "iteration 3" or "ProfilerStep#3". Shapes are not in the file, hence no arithmetic either. The database is opened
# from memory, and its tables alone are read: no views and virtual tables. Work and sizes of values are bounded.
#
# Source: docs.nvidia.com/nsight-systems, "SQLite Schema Reference" (tables, columns, process numbers in global ids).


MAGIC = b"SQLite format 3\x00"
KERNELS, COPIES, SETS, RUNTIME = (f"CUPTI_ACTIVITY_KIND_{name}" for name in ("KERNEL", "MEMCPY", "MEMSET", "RUNTIME"))
RANGES, GPUS, TEXTS = "NVTX_EVENTS", "TARGET_INFO_GPU", "StringIds"
NSYS_EXPECTED = "the output of `nsys export --type sqlite REPORT.nsys-rep`, recorded with --trace=cuda,nvtx"
NSYS_EVENTS: Mapping[str, tuple[str, str]] = {
    KERNELS: ("kernel", "kernel"),
    COPIES: ("gpu_memcpy", "Memcpy"),
    SETS: ("gpu_memset", "Memset"),
}
"""By table: the category of its events, and their name where the table has none."""
MOST_ROWS = 3_000_000
MOST_VALUE_BYTES = 10_000_000
STEPS_BETWEEN_LOOKS, MOST_LOOKS = 100_000, 3_000
"""Bound on the work of SQLite's virtual machine: the rows of the largest file take a fifth of it."""
NVTX_STEP = re.compile(
    r"(?:ProfilerStep\s?#|(?:train(?:ing)?[ _]?)?(?:step|iteration|iter))[ _#:=]{0,3}(\d{1,12})", re.IGNORECASE
)


NSYS_NO_SHAPES = "Nsight Systems records no shapes, so kernels are not divided by their arithmetic"


def read_nsys(source: SourceFile, *, steps: int | None = None, ranks: Sequence[int] | None = None) -> Trace:
    """Read an export.

    Args: source: the file. steps: how many it holds, where no NVTX range marks them. ranks: the number of one GPU (None: the
        lowest of the file).
    Raises: ImportedFileError: no database, a damaged one, no kernel, or no kernel on that GPU; several numbers in `ranks`.
    """
    if ranks is not None and len(ranks) != 1:
        raise ImportedFileError(f"--ranks names {len(ranks)} GPUs, and a timeline is of one; give one number")
    try:
        connection = sqlite3.connect(":memory:")
        try:
            connection.deserialize(source.data)
            return _read_database(connection, source, steps, None if ranks is None else ranks[0])
        finally:
            connection.close()
    except (sqlite3.Error, UnicodeDecodeError, OverflowError, MemoryError) as error:
        raise ImportedFileError(f"{source.path} cannot be read as SQLite: {shown(error)}; expected {NSYS_EXPECTED}") from error


def _read_database(connection: sqlite3.Connection, source: SourceFile, steps: int | None, device: int | None) -> Trace:
    tables = _Tables(connection)
    if KERNELS not in tables.columns:
        raise ImportedFileError(f"{source.path} has no table {KERNELS}: no kernel was recorded; expected {NSYS_EXPECTED}")
    gpus = {number for (number,) in tables.rows(KERNELS, "deviceId") if isinstance(number, int)}
    if not gpus:
        raise ImportedFileError(f"{source.path} has a table {KERNELS} without a kernel; expected {NSYS_EXPECTED}")
    gpu = min(gpus) if device is None else device
    if gpu not in gpus:
        raise ImportedFileError(f"{source.path} has kernels of GPU {listed(sorted(gpus))}, and none of GPU {gpu}")
    events, others = _device_events(tables, gpu)
    events += _host_events(tables)
    first = min((event["start"] for event in events if isinstance(event["start"], int)), default=0)
    for event in events:  # nanoseconds as microseconds from the first start, where whole numbers keep their digits
        start, end = event.pop("start"), event.pop("end")
        whole = isinstance(start, int) and isinstance(end, int)
        event |= {"ph": "X", "pid": 0}
        event |= {"ts": (start - first) / 1e3 if whole else None, "dur": (end - start) / 1e3 if whole else None}
    names = list(tables.rows(GPUS, "id", "name"))
    of_gpu = [name for number, name in names if number == gpu] or [name for _, name in names]
    properties = [{"name": name} for name in of_gpu if isinstance(name, str)]
    trace = trace_of({"traceEvents": events, "deviceProperties": properties}, str(source.path), steps)
    notes = trace.notes
    if len(gpus) > 1 and device is None:
        notes += (f"kernels of {len(gpus)} GPUs: GPU {gpu} is taken; give --ranks N for another",)
    skipped = dict(trace.skipped) | ({"activities of other GPUs": others} if others else {})
    return replace(trace, notes=notes, skipped=skipped, rank=gpu, no_shapes=NSYS_NO_SHAPES)


class _Tables:
    """The tables of the file that matter, by their columns; rows are bounded in number, size and work."""

    def __init__(self, connection: sqlite3.Connection) -> None:
        connection.text_factory = lambda content: content.decode("utf-8", errors="replace")
        connection.execute("PRAGMA trusted_schema = OFF")
        connection.setlimit(sqlite3.SQLITE_LIMIT_LENGTH, MOST_VALUE_BYTES)
        looks = itertools.count()
        connection.set_progress_handler(lambda: int(next(looks) > MOST_LOOKS), STEPS_BETWEEN_LOOKS)
        self.connection = connection
        tables = connection.execute("SELECT name, sql FROM sqlite_master WHERE type = 'table'").fetchall()
        self.columns = {
            name: {str(row[1]) for row in connection.execute(f'PRAGMA table_info("{name}")')}
            for name, definition in tables
            if name in (*NSYS_EVENTS, RUNTIME, RANGES, GPUS, TEXTS) and "virtual" not in str(definition).lower()[:30]
        }
        if "globalPid" not in self.columns.get(KERNELS, ()) or "globalTid" not in self.columns.get(RUNTIME, ()):
            for table in self.columns:  # of one process, which correlation numbers tell apart
                self.columns[table] -= {"globalPid"} | ({"globalTid"} if table == RUNTIME else set())
        self.texts: dict[Any, Any] = dict(self.rows(TEXTS, "id", "value"))

    def rows(self, table: str, *wanted: str) -> Iterator[tuple[Any, ...]]:
        """Rows of a table of the file; a column that it does not have is NULL."""
        if table not in self.columns:
            return
        names = ", ".join(f'"{name}"' if name in self.columns[table] else "NULL" for name in wanted)
        for number, row in enumerate(self.connection.execute(f'SELECT {names} FROM "{table}"')):
            if number == MOST_ROWS:
                raise ImportedFileError(f"the table {table} has more than {MOST_ROWS:,} rows; record fewer steps")
            yield row

    def text(self, value: object) -> str:
        """A text, or the text of a number."""
        text = self.texts.get(value) if isinstance(value, int) else value
        return text if isinstance(text, str) else ""


def _process(identity: object) -> int:
    """The process number in a global id: its bits 24 to 47."""
    return identity >> 24 & 0xFFFFFF if isinstance(identity, int) else 0


def _device_events(tables: _Tables, gpu: int) -> tuple[list[dict[str, Any]], int]:
    events: list[dict[str, Any]] = []
    others = 0
    wanted = ("start", "end", "deviceId", "streamId", "correlationId", "globalPid", "shortName", "demangledName")
    for table, (category, fallback) in NSYS_EVENTS.items():
        for start, end, on, stream, correlation, process, short, long in tables.rows(table, *wanted):
            if on != gpu:
                others += 1
                continue
            name = tables.text(long) or tables.text(short) or fallback
            args = {"stream": stream, "correlation": f"{_process(process)}/{correlation}"}
            events.append({"cat": category, "name": name, "start": start, "end": end, "tid": stream, "args": args})
    return events, others


def _host_events(tables: _Tables) -> list[dict[str, Any]]:
    """Launches and NVTX ranges, of which those that mark a step get torch's name for it."""
    events: list[dict[str, Any]] = []
    for start, end, correlation, thread, name in tables.rows(RUNTIME, "start", "end", "correlationId", "globalTid", "nameId"):
        args = {"correlation": f"{_process(thread)}/{correlation}"}
        label = tables.text(name) or "launch"
        events.append({"cat": "cuda_runtime", "name": label, "start": start, "end": end, "tid": thread, "args": args})
    for start, end, text, number, thread in tables.rows(RANGES, "start", "end", "text", "textId", "globalTid"):
        label = text if isinstance(text, str) and text else tables.text(number)
        if end is None or not label:
            continue
        step = NVTX_STEP.fullmatch(label.strip())
        name = f"ProfilerStep#{step[1]}" if step else label
        events.append({"cat": "user_annotation", "name": name, "start": start, "end": end, "tid": thread, "args": {}})
    return events


FORMATS = {
    "kineto": FileFormat(
        layouts="traces of a GPU or a CPU, plain or gzipped; into a profile: products and attention",
        refuses="a trace without steps or kernels",
        what="a trace of torch.profiler, .json or .json.gz",
        reads="trace",
        sniff=lambda source: source.begins("{", "[") and b'"traceEvents"' in source.data,
        read=read_kineto,
        options=("steps",),
    ),
    "nsys": FileFormat(
        layouts="SQLite exports",
        refuses="a database without kernels",
        what="an SQLite export of Nsight Systems",
        reads="trace",
        sniff=lambda source: (
            source.data.startswith(MAGIC) and (b"CUPTI_ACTIVITY_KIND" in source.data or b"NVTX_EVENTS" in source.data)
        ),
        read=read_nsys,
        options=("steps", "ranks"),
    ),
}
