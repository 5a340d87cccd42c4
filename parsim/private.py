"""Every name of PyTorch that is not public, in one place; tests/unit/test_private_names.py says which of them a release moved.

Private attributes of public classes (`Tensor._version`, `nn.Module._buffers`) stand where they are used, and in that test.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import _C
from torch._C import DisableTorchFunction, _DisableTorchDispatch, _FunctionBase
from torch._C import _get_default_device as default_device
from torch._guards import detect_fake_mode
from torch._ops import OpOverload, OpOverloadPacket
from torch._subclasses.fake_tensor import (  # type: ignore[attr-defined]
    _DISPATCH_HANDLE_DIRECTLY,
    _DISPATCH_META_HANDLERS,
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
    _BypassDispatchCache,
    _CacheKeyState,
    unset_fake_temporarily,
)
from torch.cuda import _sleep as gpu_sleep
from torch.nn import init
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import (
    TreeSpec,
    register_dataclass,
    tree_flatten,
    tree_flatten_with_path,
    tree_leaves,
    tree_unflatten,
)

__all__ = [
    "_DISPATCH_HANDLE_DIRECTLY",
    "_DISPATCH_META_HANDLERS",
    "DataDependentOutputException",
    "DisableTorchFunction",
    "DynamicOutputShapeException",
    "FakeTensor",
    "FakeTensorMode",
    "OpOverload",
    "OpOverloadPacket",
    "TorchDispatchMode",
    "TreeSpec",
    "_BypassDispatchCache",
    "_CacheKeyState",
    "_DisableTorchDispatch",
    "_FunctionBase",
    "_disable_current_modes",
    "c10d",
    "default_device",
    "detect_fake_mode",
    "gpu_sleep",
    "mutable_data_ptr_guard",
    "register_dataclass",
    "tree_flatten",
    "tree_flatten_with_path",
    "tree_leaves",
    "tree_unflatten",
    "unset_fake_temporarily",
    "without_rejection",
]
c10d: Any = getattr(_C, "_distributed_c10d", None)
"""The bindings of torch.distributed; None in a build without it."""


def mutable_data_ptr_guard(*, warns: bool) -> Callable[[Any], None]:
    """What makes access to the memory of a fake tensor an error, or a warning."""
    guard: Callable[[Any], None] = _C._set_warn_deprecated_on_mutable_data_ptr if warns else _C._set_throw_on_mutable_data_ptr
    return guard


@contextmanager
def without_rejection() -> Iterator[None]:
    """Leave out draws of a truncated normal distribution: they look at values, which fake weights have not."""
    module: Any = init
    drawn = module._no_grad_trunc_normal_
    module._no_grad_trunc_normal_ = lambda tensor, *_, **__: tensor
    try:
        yield
    finally:
        module._no_grad_trunc_normal_ = drawn
