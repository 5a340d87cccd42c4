"""Watching every call below autograd: as a mode of torch, or inside a mode that takes such watches in.

torch hands a call from mode to mode, and each way takes longer than what a watch does. A host (the mode of fake tensors) calls
its watches itself, in the order in which modes would have been called: the last one that was entered first.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from functools import partial
from types import TracebackType
from typing import Any, Self

import torch
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode

DEVICE = torch.ops.prim.device.default
"""Asked of a fake tensor several times per call."""

NextCall = Callable[[Any, Sequence[type], tuple[Any, ...], dict[str, Any]], Any]
"""Runs an operator: (function, types of tensors, arguments, keywords)."""


def _dispatch_again(func: Any, types: Sequence[type], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    del types
    return func(*args, **kwargs)


class CallWatchHost(ABC):
    """A mode that calls watches itself while it is the innermost one.

    Attributes:
        outermost: the watch that was entered last; None: there is none, or one of them is running.
    """

    outermost: NextCall | None = None

    @abstractmethod
    def answer(self, func: Any, types: Sequence[type], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The result of a call, without watches."""


class CallWatch(TorchDispatchMode, ABC):
    """Sees every call below autograd while it is entered."""

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)  # type: ignore[no-untyped-call]

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._entered: list[tuple[CallWatchHost, NextCall | None] | None] = []

    @abstractmethod
    def around(self, call: NextCall, func: Any, types: Sequence[type], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """What a call returns.

        Args:
            call: runs this or another operator as those watch it that were entered before. func, types, args, kwargs: of the
                call, as torch dispatches it.
        """

    def __enter__(self) -> Self:
        innermost = _get_current_dispatch_mode()
        if isinstance(innermost, CallWatchHost):
            before = innermost.outermost
            self._entered.append((innermost, before))
            innermost.outermost = partial(self.around, before or innermost.answer)
        else:
            self._entered.append(None)
            super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None) -> None:
        entered = self._entered.pop()
        if entered is None:
            super().__exit__(kind, error, traceback)  # type: ignore[no-untyped-call]
        else:
            host, before = entered
            host.outermost = before

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # nothing is compiled inside, and the guard against it costs as much as what is done here

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is DEVICE:
            return args[0].device
        return self.around(_dispatch_again, func, types, args, kwargs or {})
