"""A watch sees the same calls as a mode of torch and inside the mode of fake tensors."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from torch._subclasses.fake_tensor import FakeTensorMode  # noqa: E402
from torch.utils._python_dispatch import TorchDispatchMode  # noqa: E402

from parsim.model.trace.fakes import (  # noqa: E402
    CallWatch,
    NextCall,
    QuickFakeMode,
)


class Named(CallWatch):
    """Notes its name and the operator before and after every call."""

    def __init__(self, name: str, seen: list[str]) -> None:
        super().__init__()
        self._name = name
        self._seen = seen

    def around(self, call: NextCall, func: Any, types: Sequence[type], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        self._seen.append(f"{self._name} before {func}")
        result = call(func, types, args, kwargs)
        self._seen.append(f"{self._name} after {func}")
        return result


class Plain(TorchDispatchMode):
    """A mode that is not a watch."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


def step() -> None:
    """Views, products, a composite function, writes in place and a backward."""
    weight = torch.empty(6, 4, requires_grad=True)
    x = torch.empty(3, 6)
    y = torch.nn.functional.layer_norm(x @ weight, (4,))
    y = (torch.stack([y[:, 0], y[:, 1]]).softmax(0) * 2).relu_()
    torch.nn.functional.cross_entropy(y, torch.zeros(2, dtype=torch.int64)).backward()


def seen_under(fakes: Any, between: bool = False) -> list[str]:
    seen: list[str] = []
    with fakes, Named("outer", seen):
        if between:
            with Plain(), Named("inner", seen):
                step()
        else:
            with Named("inner", seen):
                step()
    return seen


@pytest.mark.parametrize("between", [False, True])
def test_watches_see_the_same_calls_inside_the_mode_of_fake_tensors(between: bool) -> None:
    as_modes = seen_under(FakeTensorMode(), between)  # type: ignore[no-untyped-call]
    assert len(as_modes) > 60
    assert as_modes[:2] == ["inner before aten.empty.memory_format", "outer before aten.empty.memory_format"]
    for _ in range(2):  # the answers are asked for, and then found again
        assert seen_under(QuickFakeMode(), between) == as_modes


def test_no_watch_stays_after_an_error() -> None:
    fakes = QuickFakeMode()
    seen: list[str] = []
    with fakes:
        with pytest.raises(RuntimeError), Named("one", seen):
            torch.empty(2, 3) @ torch.empty(2, 3)
        assert seen
        assert fakes.outermost is None
        seen.clear()
        torch.empty(2)
    assert not seen


def test_a_watch_may_run_another_operator() -> None:
    seen: list[str] = []

    class Instead(CallWatch):
        """A tensor of zeros in the place of every product."""

        def around(
            self, call: NextCall, func: Any, types: Sequence[type], args: tuple[Any, ...], kwargs: dict[str, Any]
        ) -> Any:
            if func is not torch.ops.aten.mm.default:
                return call(func, types, args, kwargs)
            return call(torch.ops.aten.zeros.default, types, ([7],), {"dtype": torch.float64})

    with QuickFakeMode(), Named("below", seen), Instead():
        made = torch.empty(2, 3) @ torch.empty(3, 2)
    assert made.shape == (7,)
    assert made.dtype is torch.float64
    assert [entry for entry in seen if "mm" in entry] == []
    assert seen[-1] == "below after aten.zeros.default"
