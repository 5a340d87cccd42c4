"""A CUDA build of torch without a GPU computes steps on fake tensors of `cuda:0`: shapes, types and devices, and no numbers.

Fake tensors refuse operands of two devices, as kernels do, and autocast casts as on a GPU. Autograd's engine asks for a real
device, so `Backward` walks the graph in its place. Where the host reads a number of the device, it reads 0.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.autograd import Variable
from torch.autograd.function import BackwardCFunction
from torch.autograd.graph import GradientEdge, get_gradient_edge

from parsim.execute import stage
from parsim.model.autograd import cut as halves
from parsim.model.trace import recorder
from parsim.model.trace.fakes import QuickFakeMode

GPU = torch.device("cuda:0")
_READ = torch.ops.aten._local_scalar_dense.default


class Backward:
    """The engine of autograd in Python, one thread, node by node.

    Attributes: prehooks: of nodes, called with the gradients that arrive.
    """

    def __init__(self) -> None:
        self.prehooks: dict[Any, list[Any]] = {}

    def run_backward(
        self,
        roots: Sequence[Tensor | GradientEdge],
        gradients: Sequence[Tensor | None],
        keep_graph: bool,
        create_graph: bool,
        inputs: Sequence[Tensor | GradientEdge] = (),
        allow_unreachable: bool = False,
        accumulate_grad: bool = False,
    ) -> tuple[Tensor | None, ...]:
        """As torch's: gradients of `inputs`, or into `.grad` of these (none named: of all leaves)."""
        del keep_graph, allow_unreachable
        assert not create_graph
        wanted = [_edge(entry) for entry in inputs]
        found: dict[tuple[Any, int], Tensor | None] = {}
        arriving: dict[Any, list[Tensor | None]] = {}
        with torch.no_grad():
            for root, given in zip(roots, gradients, strict=True):
                assert given is not None or isinstance(root, Tensor)
                _add(arriving, *_edge(root), torch.ones_like(root) if given is None else given)
            order = list(reversed(halves.nodes_below([_edge(root)[0] for root in roots])))
            reaching = _reaching(order, {node for node, _ in wanted}) if wanted else set(order)
            for node in order:
                if node not in arriving or node not in reaching:
                    continue
                given = arriving.pop(node)
                found.update({(own, place): given[place] for own, place in wanted if own is node})
                for hook in self.prehooks.get(node, ()):
                    hook(tuple(given))
                leaf = getattr(node, "variable", None)
                if leaf is not None:
                    if accumulate_grad:
                        _accumulate(leaf, given[0])
                    continue
                if any(after in reaching for after, _ in node.next_functions if after is not None):
                    made = node.apply(*given) if isinstance(node, BackwardCFunction) else node(*given)
                    for (after, place), gradient in zip(node.next_functions, _as_tuple(made), strict=False):
                        if after is not None and gradient is not None:
                            _add(arriving, after, place, gradient)
        return tuple(found.get(edge) for edge in wanted)

    def note(self, frontier: Any) -> Any:
        """In place of a prehook of torch, which runs in torch's engine alone."""
        self.prehooks.setdefault(frontier.node, []).append(frontier.arrived.append)
        return _Hook(self, frontier.node)


class _Hook:
    def __init__(self, engine: Backward, node: Any) -> None:
        self.engine, self.node = engine, node

    def remove(self) -> None:
        self.engine.prehooks.pop(self.node)


def _as_tuple(made: Any) -> tuple[Any, ...]:
    return made if isinstance(made, tuple) else (made,)


def _edge(entry: Tensor | GradientEdge) -> tuple[Any, int]:
    edge = entry if isinstance(entry, GradientEdge) else get_gradient_edge(entry)
    return edge.node, edge.output_nr


def _add(arriving: dict[Any, list[Tensor | None]], node: Any, place: int, gradient: Tensor) -> None:
    """As torch does before a node: the gradient takes the shape and the type of what the forward made; devices must agree."""
    like = node._input_metadata[place]
    if tuple(gradient.shape) != tuple(like.shape):
        gradient = gradient.sum_to_size(tuple(like.shape))
    if gradient.device != like.device and gradient.dim():
        raise RuntimeError(f"{node.name()} takes a gradient on {like.device}, got one on {gradient.device}")
    gradient = gradient.to(device=like.device, dtype=like.dtype)
    given = arriving.setdefault(node, [None] * len(node._input_metadata))
    before = given[place]
    given[place] = gradient if before is None else before + gradient


def _accumulate(leaf: Tensor, gradient: Tensor | None) -> None:
    assert gradient is not None
    if leaf.grad is None:
        leaf.grad = gradient.clone()
    else:
        leaf.grad += gradient


def _reaching(order: Sequence[Any], targets: set[Any]) -> set[Any]:
    """The nodes from which a target can be reached."""
    found: set[Any] = set()
    for node in reversed(order):
        if node in targets or any(after in found for after, _ in node.next_functions if after is not None):
            found.add(node)
    return found


@contextlib.contextmanager
def python_engine() -> Iterator[Backward]:
    """Inside, every backward is `Backward`'s."""
    engine = Backward()
    with patch.object(Variable, "_execution_engine", engine), patch.object(halves, "_note", engine.note):
        yield engine


class FakeGpuMode(QuickFakeMode):
    """Attributes: reads: how often the host has read a number of the device, which waits for it."""

    def __init__(self) -> None:
        super().__init__()
        self.reads = 0

    def __torch_dispatch__(self, func: Any, types: Sequence[type], args: Any = (), kwargs: Any = None) -> Any:
        if func is not _READ:
            return super().__torch_dispatch__(func, types, args, kwargs)
        on_host = args[0].device.type == "cpu"
        self.reads += not on_host
        number = float(on_host)  # counters of optimizers, which divide by them, lie on the host
        return number if args[0].is_floating_point() else int(number)


def _show(tensor: FakeTensor, other: Tensor) -> None:
    """As `tensor.data = other`, from one device to another, too."""
    Tensor.data.__set__(tensor, other)  # type: ignore[attr-defined]
    tensor.fake_device = other.device


def _apply(module: nn.Module, function: Callable[[Tensor], Tensor], recurse: bool = True) -> nn.Module:
    """As torch's, which swaps fake parameters for others and then refuses those that somebody holds."""
    assert recurse
    for owner in module.modules():
        for parameter in owner._parameters.values():
            if parameter is not None:
                parameter.data = function(parameter.data)
        owner._buffers.update({key: function(buffer) for key, buffer in owner._buffers.items() if buffer is not None})
    return module


@contextlib.contextmanager
def fake_gpu() -> Iterator[FakeGpuMode]:
    """Inside, `parsim.execute` runs on `GPU`, for a build of torch with CUDA."""
    stage.recorded_programs.cache_clear()  # recordings hold constants, which are fake ones of one mode
    with contextlib.ExitStack() as stack:
        stack.callback(stage.recorded_programs.cache_clear)
        stack.enter_context(python_engine())
        stack.enter_context(patch.object(FakeTensor, "data", property(Tensor.data.__get__, _show), create=True))  # type: ignore[attr-defined]
        stack.enter_context(patch.object(nn.Module, "_apply", _apply))
        stack.enter_context(patch.object(stage, "move_hollow", lambda module, to: module._apply(lambda tensor: tensor.to(to))))
        # integers that code may branch on are computed for real, which here nothing can
        stack.enter_context(patch.object(recorder, "_compute_exactly", lambda *_: recorder._INEXACT))
        # autocast of a GPU asks for the device
        stack.enter_context(patch("torch.cuda.amp.common.amp_definitely_not_available", return_value=False))
        stack.enter_context(patch("torch.cuda.is_bf16_supported", return_value=True))
        stack.enter_context(patch("torch.cuda.set_device"))
        stack.enter_context(patch("torch.cuda.default_generators", (torch.Generator(),)))
        stack.enter_context(patch("torch.cuda.get_rng_state", return_value=torch.get_rng_state()))
        stack.enter_context(patch("torch.cuda.set_rng_state"))
        yield stack.enter_context(FakeGpuMode())
