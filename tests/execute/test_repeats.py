"""Equal blocks are recorded once: the Model equals that of the full trace, and blocks that may differ are run."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="needs the torch extra")

from torch import Tensor, nn  # noqa: E402

from parsim.model.model import Model  # noqa: E402
from parsim.model.runnable import CallProgram  # noqa: E402
from parsim.model.trace import traced  # noqa: E402
from parsim.model.trace.count import measure  # noqa: E402
from parsim.model.trace.cut import cut, programs  # noqa: E402
from parsim.model.trace.record import run_recorded  # noqa: E402
from parsim.model.tracing.repeats.blocks import Repeats  # noqa: E402

WIDTH, DEPTH = 8, 6


class Block(nn.Module):
    """A block with a number, which its forward does not read."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self.number = number
        self.norm = nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.relu(self.up(self.norm(x))))


class ReadsItsNumber(Block):
    """Every other block adds a term."""

    def forward(self, x: Tensor) -> Tensor:
        made = super().forward(x)
        return made * 2.0 if self.number % 2 else made


class ReadsThroughSharedState(Block):
    """What it does depends on an object that the network changes before every block."""

    state: Any = None

    def forward(self, x: Tensor) -> Tensor:
        made = super().forward(x)
        return made * 2.0 if self.shared.number % 2 else made


class CountsItself(Block):
    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return super().forward(x)


class ReturnsTwo(Block):
    """Also hands on what it was given."""

    def forward(self, x: Tensor, kept: Tensor | None = None) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        kept = x.mean(-1, keepdim=True) if kept is None else kept
        return super().forward(x) + kept, kept


class Normalised(Block):
    """Buffers that the forward changes."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.batch_norm = nn.BatchNorm1d(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return torch.dropout(self.batch_norm(super().forward(x)), 0.1, self.training)


class Stack(nn.Module):
    def __init__(self, make: Callable[[int], nn.Module], depth: int = DEPTH) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(make(number) for number in range(depth))
        self.head = nn.Linear(WIDTH, 3)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(x)


class SharedState:
    number = 0


class SharedStack(Stack):
    def __init__(self) -> None:
        super().__init__(ReadsThroughSharedState)
        self.shared = SharedState()
        for block in self.blocks:
            block.shared = self.shared  # type: ignore[assignment]

    def forward(self, x: Tensor) -> Tensor:
        for number, block in enumerate(self.blocks):
            self.shared.number = number
            x = block(x)
        return self.head(x)


class KeptStack(Stack):
    def __init__(self) -> None:
        super().__init__(ReturnsTwo)

    def forward(self, x: Tensor) -> Tensor:
        kept = None
        for block in self.blocks:
            x, kept = block(x, kept)
        return self.head(x)


class OneBlock(Stack):
    """The same weights again and again, as in ALBERT."""

    def __init__(self) -> None:
        super().__init__(Block, 1)

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(DEPTH):
            x = self.blocks[0](x)
        return self.head(x)


class Widening(Stack):
    """Blocks of the same class with other sizes in the middle."""

    def __init__(self) -> None:
        super().__init__(Block)
        for number in (2, 3):
            self.blocks[number].up, self.blocks[number].down = nn.Linear(WIDTH, 32), nn.Linear(32, WIDTH)  # type: ignore[union-attr]


class Frozen(Stack):
    def __init__(self) -> None:
        super().__init__(Block)
        for block in self.blocks[:3]:
            block.requires_grad_(False)


class Tied(Stack):
    """The last blocks use the weights of the first."""

    def __init__(self) -> None:
        super().__init__(Block)
        for number in (4, 5):
            self.blocks[number].up.weight = self.blocks[0].up.weight  # type: ignore[union-attr]


class Hooked(Stack):
    def __init__(self) -> None:
        super().__init__(Block)
        self.blocks[3].register_forward_hook(lambda module, args, output: output * 2.0)


def copies(module: nn.Module, samples: int = 2, trusted: frozenset[Any] = frozenset()) -> int:
    """Calls of blocks that were not run in one recorded forward. `trusted`: what another recording has confirmed."""
    found: list[Repeats] = []
    opened = Repeats.open

    def noted(self: Repeats) -> Any:
        found.append(self)
        return opened(self)

    Repeats.open = noted  # type: ignore[method-assign]
    try:
        given = (torch.zeros(samples, WIDTH),)
        run_recorded(module, given, {}, loss="cross_entropy", repeats=True, trusted=trusted)
    finally:
        Repeats.open = opened  # type: ignore[method-assign]
    return found[-1].copied


def model(module: nn.Module, granularity: str, *, repeats: bool, monkeypatch: pytest.MonkeyPatch) -> Model:
    with monkeypatch.context() as patched:
        patched.setattr(traced, "measure", lambda *args, **kwargs: measure(*args, **kwargs, repeats=repeats))
        return traced.model_of(module, (torch.zeros(2, WIDTH),), {}, granularity=granularity, loss="cross_entropy")


class AsksItsMask(Block):
    """What it does depends on a mask whose values are known although it is fake."""

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:  # type: ignore[override]
        made = super().forward(x)
        return made * 2.0 if (mask > 2.5).any() else made


class Masked(Stack):
    def __init__(self) -> None:
        super().__init__(AsksItsMask)

    def forward(self, x: Tensor) -> Tensor:
        for number, block in enumerate(self.blocks):
            x = block(x, torch.full((1,), float(number)))
        return self.head(x)


class Routed(Block):
    """Its own code loops over the experts that a token chooses."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.router = nn.Linear(WIDTH, 2)
        self.experts = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        x = super().forward(x)
        chosen = self.router(x).argmax(-1)
        made = torch.zeros_like(x)
        for number, expert in enumerate(self.experts):
            rows = torch.nonzero(chosen == number)[:, 0]
            made = made.index_add(0, rows, expert(x[rows]))
        return x + made


class DetachedBetween(Stack):
    """From the detached weight on, operators are counted as with frozen parameters."""

    def __init__(self) -> None:
        super().__init__(Block, depth=8)

    def forward(self, x: Tensor) -> Tensor:
        for number, block in enumerate(self.blocks):
            x = block(x)
            if number == 3:
                x = x + (x.detach() @ self.head.weight.detach().t()).mean()
        return self.head(x)


CASES: dict[str, tuple[Callable[[], nn.Module], int]] = {
    "equal": (lambda: Stack(Block), DEPTH - 3),
    "two": (lambda: Stack(Block, 2), 0),
    "reads its number": (lambda: Stack(ReadsItsNumber), 0),
    "shared state": (SharedStack, 0),
    "counts itself": (lambda: Stack(CountsItself), 0),
    "returns two": (KeptStack, DEPTH - 3),
    "buffers": (lambda: Stack(Normalised), DEPTH - 3),
    "one block": (OneBlock, DEPTH - 3),
    "widening": (Widening, 1),
    "frozen": (Frozen, 1),
    "tied": (Tied, 1),
    "hooked": (Hooked, 2),
    "asks its mask": (Masked, 0),
    "routed": (lambda: Stack(Routed), 0),
    "routed and not": (lambda: Stack(lambda number: (Block, Routed)[number > 3](number), 8), 1),
    "detached between": (DetachedBetween, 5),
}
"""Modules, and how many of their blocks are copied. The first block differs: its input needs no gradient. Two more are run."""


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("granularity", ["block", "layer"])
def test_the_model_equals_that_of_the_full_trace(name: str, granularity: str, monkeypatch: pytest.MonkeyPatch) -> None:
    module = CASES[name][0]()
    before = [dict(part.__dict__) for part in module.modules()]
    fast = model(module, granularity, repeats=True, monkeypatch=monkeypatch)
    for part, attributes in zip(module.modules(), before, strict=True):
        assert part.__dict__.keys() == attributes.keys()
    assert fast == model(module, granularity, repeats=False, monkeypatch=monkeypatch)


@pytest.mark.parametrize("name", CASES)
def test_how_many_blocks_are_copied(name: str) -> None:
    make, expected = CASES[name]
    assert copies(make()) == expected


def program_values(program: CallProgram) -> dict[str, Any]:
    values = {entry.name: getattr(program, entry.name) for entry in dataclasses.fields(program)}
    return {**values, "constants": [(id(constant), slot) for constant, slot in program.constants]}


@pytest.mark.parametrize("granularity", ["block", "sublayer", "layer"])
@pytest.mark.parametrize("name", ["equal", "shared state", "returns two", "buffers", "one block", "widening", "frozen", "tied"])
def test_programs_of_copies_equal_those_made_of_their_calls(name: str, granularity: str) -> None:
    module = CASES[name][0]()
    recording = run_recorded(module, (torch.zeros(2, WIDTH),), {}, loss="cross_entropy", repeats=True)
    intervals = cut(recording, module, granularity)
    shared = programs(recording, intervals)
    assert bool(recording.copies) == bool(CASES[name][1])
    if name == "equal":
        assert len({id(program.ops) for program in shared}) < len(shared)
    recording.copies.clear()
    assert intervals == cut(recording, module, granularity)
    assert list(map(program_values, shared)) == list(map(program_values, programs(recording, intervals)))


@pytest.mark.parametrize(("name", "more"), [("equal", 1), ("reads its number", 0), ("counts itself", 0), ("frozen", 1)])
def test_one_run_is_enough_where_another_batch_has_confirmed_the_kind(name: str, more: int) -> None:
    make, expected = CASES[name]
    module = make()
    confirmed = run_recorded(module, (torch.zeros(2, WIDTH),), {}, loss="cross_entropy", repeats=True).confirmed
    assert copies(module, 3) == expected
    assert copies(module, 3, confirmed) >= expected + more
    assert bool(confirmed) == bool(more)


def test_a_failing_forward_says_what_the_full_trace_says() -> None:
    class Fails(Block):
        def forward(self, x: Tensor) -> Tensor:
            if self.number == 4:
                raise ValueError("the fourth")
            return super().forward(x)

    with pytest.raises(Exception, match="the fourth"):
        run_recorded(Stack(Fails), (torch.zeros(2, WIDTH),), {}, loss=None, repeats=True)
