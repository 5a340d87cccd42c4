"""Loops of Python in a forward: what is counted from a few of their groups equals what is counted from all."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

torch = pytest.importorskip("torch", reason="needs the torch extra")

from torch import Tensor, nn  # noqa: E402

from parsim.model.load import load_model  # noqa: E402
from parsim.model.loops.counts import items_with, moments_with, size_with  # noqa: E402
from parsim.model.loops.repeated_calls import FEWEST, KEPT  # noqa: E402
from parsim.model.model import Model  # noqa: E402
from parsim.model.spec import ModelSpec  # noqa: E402
from parsim.model.trace import count as measure  # noqa: E402
from parsim.model.trace import traced  # noqa: E402
from parsim.model.trace.count import TracedForward  # noqa: E402
from parsim.model.trace.memory import (  # noqa: E402
    Recorded,
    _counts,
    counted_moments,
)
from tests.hugging_face_configs import SMALL  # noqa: E402

WIDTH, LENGTH = 8, 20


class Network(nn.Module):
    """One block with a loop, and a head."""

    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        self.block, self.head = block, nn.Linear(WIDTH, 3)

    def forward(self, x: Tensor) -> Tensor:
        made: Tensor = self.head(self.block(x).relu())
        return made.mean(1)


class Scanning(nn.Module):
    """A block with one loop over the tokens, in `states`."""

    def __init__(self) -> None:
        super().__init__()
        self.given, self.kept = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.cell = nn.LSTMCell(WIDTH, WIDTH)
        self.decay = nn.Parameter(torch.ones(WIDTH))

    def states(self, x: Tensor) -> Tensor:
        raise NotImplementedError

    def forward(self, x: Tensor) -> Tensor:
        return self.states(self.given(x))


class Recurrent(Scanning):
    """h = tanh(W h + x_t), with all states in one tensor."""

    def states(self, x: Tensor) -> Tensor:
        state, found = x.new_zeros(x.shape[0], WIDTH), []
        for step in range(x.shape[1]):
            state = torch.tanh(self.kept(state) + x[:, step])
            found.append(state)
        return torch.stack(found, dim=1)


class Selective(Scanning):
    """The scan of mamba: large tensors in, one row of each per token."""

    def states(self, x: Tensor) -> Tensor:
        rate = torch.exp(self.decay[None, None, :, None] * x[..., None].expand(-1, -1, -1, 4))
        added = x[..., None] * rate
        state, found = x.new_zeros(x.shape[0], WIDTH, 4), []
        for step in range(x.shape[1]):
            state = rate[:, step] * state + added[:, step]
            found.append(torch.matmul(state.to(x.dtype), x[:, step, :4].unsqueeze(-1))[:, :, 0])
        return torch.stack(found, dim=-1).transpose(1, 2) + x * self.decay


class Gated(Scanning):
    """Cells of torch, joined along the features."""

    def states(self, x: Tensor) -> Tensor:
        state, cell = x.new_zeros(x.shape[0], WIDTH), x.new_zeros(x.shape[0], WIDTH)
        found = []
        for step in range(x.shape[1]):
            state, cell = self.cell(x[:, step], (state, cell))
            found.append(state)
        return torch.cat(found, dim=-1).reshape(x.shape)


class Last(Scanning):
    """The last state alone leaves the loop."""

    def states(self, x: Tensor) -> Tensor:
        state = x[:, 0]
        for step in range(1, x.shape[1]):
            state = torch.sigmoid(state * self.decay) * x[:, step]
        return state[:, None]


class Summed(Scanning):
    """A sum over the loop, out of place and in place."""

    def states(self, x: Tensor) -> Tensor:
        state, total, other = x[:, 0], x[:, 0] * 0.0, x[:, 0] * 1.0
        for step in range(x.shape[1]):
            state = torch.tanh(state + x[:, step])
            total = total + state * state
            other.add_(state)
        return (total + other)[:, None]


class Written(Scanning):
    """Every step writes a row of one tensor."""

    def states(self, x: Tensor) -> Tensor:
        found, state = torch.zeros_like(x), x[:, 0]
        for step in range(x.shape[1]):
            state = self.kept(state).tanh()
            found[:, step] = state
        return found


class Two(Scanning):
    """Two lists of what every step makes, and dropout."""

    def states(self, x: Tensor) -> Tensor:
        state, states, gates = x[:, 0], [], []
        for step in range(x.shape[1]):
            gate = torch.sigmoid(self.kept(x[:, step]))
            state = nn.functional.dropout(gate * state, 0.1)
            states.append(state)
            gates.append(gate)
        return torch.stack(states, 1) * torch.stack(gates, 1)


class Backwards(Recurrent):
    """From the last token to the first."""

    def states(self, x: Tensor) -> Tensor:
        state, found = x[:, 0] * 0.0, []
        for step in reversed(range(x.shape[1])):
            state = torch.tanh(self.kept(state) + x[:, step])
            found.append(state)
        return torch.stack(found[::-1], dim=1)


class Alternating(Scanning):
    """Odd and even steps differ: a group has two of them."""

    def states(self, x: Tensor) -> Tensor:
        state, found = x[:, 0], []
        for step in range(x.shape[1]):
            state = torch.tanh(self.kept(state)) if step % 2 else state + x[:, step]
            found.append(state)
        return torch.stack(found, dim=1)


class TwoBack(Scanning):
    """Reads the state before the last one."""

    def states(self, x: Tensor) -> Tensor:
        found = [x[:, 0], x[:, 1]]
        for step in range(2, x.shape[1]):
            found.append(torch.tanh(found[-2] * self.decay + x[:, step]))
        return torch.stack(found, dim=1)


class Bending(Recurrent):
    """Another step from the middle on."""

    def states(self, x: Tensor) -> Tensor:
        state, found = x.new_zeros(x.shape[0], WIDTH), []
        for step in range(x.shape[1]):
            state = torch.tanh(self.kept(state)) if step > x.shape[1] // 2 else state + x[:, step]
            found.append(state)
        return torch.stack(found, dim=1)


class Cumulative(Scanning):
    """Every step makes a larger tensor than the one before."""

    def states(self, x: Tensor) -> Tensor:
        found = x[:, :1]
        for step in range(1, x.shape[1]):
            found = torch.cat([found, torch.tanh(found[:, -1:] + x[:, step : step + 1])], dim=1)
        return found


class Triangular(Scanning):
    """Every step attends to all before."""

    def states(self, x: Tensor) -> Tensor:
        found = []
        for step in range(x.shape[1]):
            scores = torch.softmax((x[:, : step + 1] * x[:, step : step + 1]).sum(-1), dim=-1)
            found.append((scores[..., None] * x[:, : step + 1]).sum(1))
        return torch.stack(found, dim=1)


class Fading(Scanning):
    """A number that changes from step to step."""

    def states(self, x: Tensor) -> Tensor:
        state = x[:, 0]
        for step in range(x.shape[1]):
            state = torch.tanh(state * 0.9**step + x[:, step])
        return state[:, None]


class PicksOne(Recurrent):
    """What a step in the middle makes is used by itself."""

    def states(self, x: Tensor) -> Tensor:
        state, found = x[:, 0], []
        for step in range(x.shape[1]):
            state = torch.tanh(self.kept(state) + x[:, step])
            found.append(state)
        return torch.stack(found, dim=1) + found[LENGTH // 2][:, None]


class Unbound(Scanning):
    """Rows of one call: those that nobody reads would get zeros for a gradient."""

    def states(self, x: Tensor) -> Tensor:
        state = x[:, 0]
        for row in x.unbind(1):
            state = torch.tanh(state * self.decay + row)
        return state[:, None]


class Layered(Scanning):
    """A second loop reads what every step of the first made."""

    def states(self, x: Tensor) -> Tensor:
        rows: list[Tensor] = list(x.unbind(1))
        for _ in range(2):
            state, found = rows[0] * 0.0, []
            for row in rows:
                state = torch.tanh(self.kept(state) + row)
                found.append(state)
            rows = found
        return torch.stack(rows, dim=1)


class TwoLists(Scanning):
    """Steps alike put what they make into one of two lists."""

    def states(self, x: Tensor) -> Tensor:
        state = x[:, 0]
        lists: tuple[list[Tensor], list[Tensor]] = ([], [])
        for step in range(x.shape[1]):
            state = torch.tanh(state + x[:, step])
            lists[step % 2].append(state)
        return torch.stack(lists[0], 1) + torch.stack(lists[1], 1).exp()


SHORTENED = (Recurrent, Selective, Gated, Last, Summed, Two, Backwards, Alternating, TwoBack)
WHOLE = (Written, Cumulative, Triangular, Fading, PicksOne, Layered, TwoLists, Unbound)
"""What is not found, or not shortened."""


def recorded(module: nn.Module, length: int, autocast: torch.dtype | None = None) -> TracedForward:
    """One forward of a network around a block."""
    inputs = (torch.zeros(2, length, WIDTH),)
    return measure.measure(Network(module), inputs, {}, granularity="block", loss="cross_entropy", autocast=autocast)


def counts(run: TracedForward) -> list[Any]:
    """All that is counted of programs in place of those that were recorded, of a block."""
    block = run.recorded(0)
    return [counted_moments(block), dataclasses.astuple(_counts(block, kernels=True))]


def both(run: TracedForward, patch: pytest.MonkeyPatch) -> tuple[list[Any], list[Any], list[bool]]:
    """Counts with a shortened loop and without, and per count whether shortened programs told it."""
    told: list[bool] = []
    own = Recorded.counted

    def counted(block: Recorded, count: Callable[..., Any], together: Callable[..., Any]) -> Any:
        def noted(found: list[Any], times: int) -> Any:
            made = together(found, times)
            told.append(made is not None)
            return made

        return own(block, count, noted)

    with patch.context() as noting:
        noting.setattr(Recorded, "counted", counted)
        fast = counts(run)
    run.loops[0] = None
    return fast, counts(run), told


@pytest.mark.parametrize("kind", SHORTENED)
def test_a_loop_counts_as_its_first_groups_tell(kind: type[Scanning], monkeypatch: pytest.MonkeyPatch) -> None:
    length = 2 * LENGTH if kind in (Alternating, TwoBack) else LENGTH
    for autocast in (None, torch.bfloat16) if kind in (Recurrent, Selective) else (None,):
        fast, slow, told = both(recorded(kind(), length, autocast), monkeypatch)
        assert fast == slow
        assert told == [True, True]


@pytest.mark.parametrize("kind", WHOLE)
def test_other_loops_are_counted_whole(kind: type[Scanning], monkeypatch: pytest.MonkeyPatch) -> None:
    fast, slow, told = both(recorded(kind(), LENGTH), monkeypatch)
    assert fast == slow
    assert told == []


def test_a_loop_that_changes_in_the_middle(monkeypatch: pytest.MonkeyPatch) -> None:
    fast, slow, _ = both(recorded(Bending(), 2 * LENGTH), monkeypatch)
    assert fast == slow


def test_a_short_loop_is_counted_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    assert both(recorded(Recurrent(), FEWEST - 1), monkeypatch)[2] == []


def test_the_model_of_a_loop_with_its_shards(monkeypatch: pytest.MonkeyPatch) -> None:
    def made() -> Model:
        inputs = (torch.zeros(2, LENGTH, WIDTH),)
        return traced.model_of(network, inputs, {}, granularity="sublayer", loss="cross_entropy")

    network = Network(Selective())
    fast = made()
    monkeypatch.setattr(measure, "shortened", lambda program: None)
    assert fast == made()


@pytest.mark.slow
@pytest.mark.hf
def test_the_model_of_a_mamba(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The scan of transformers, with shards and under autocast."""
    pytest.importorskip("transformers", reason="needs the hf extra")
    monkeypatch.setenv("PARSIM_MODEL_CACHE", "off")
    models = []
    for number, shorten in enumerate((measure.shortened, lambda program: None)):
        monkeypatch.setattr(measure, "shortened", shorten)
        path = tmp_path / f"{number}.json"  # of another name, so that nothing is known of it
        path.write_text(json.dumps({**SMALL["mamba"], "num_hidden_layers": 3}))
        models.append(load_model(ModelSpec(name=str(path), args=(("seq", 40),)), granularity="sublayer"))
    fast, slow = models
    assert (fast.components, fast.values) == (slow.components, slow.values)


@st.composite
def growing(draw: st.DrawFn) -> tuple[list[list[int]], int, list[int]]:
    """Moments with KEPT groups, how many groups the loop has, and its moments.

    What follows the groups does not look like more than one further group: such moments are not continued.
    """
    sizes = st.integers(0, 3)  # few, so that much looks alike
    per_group = draw(st.integers(0, 4))
    head, tail = draw(st.lists(sizes, max_size=4)), draw(st.lists(sizes, max_size=4))
    group, step = (draw(st.lists(sizes, min_size=per_group, max_size=per_group)) for _ in range(2))
    slope = draw(st.lists(sizes, min_size=len(tail), max_size=len(tail)))
    times = draw(st.integers(6, 20))

    def moments(groups: int) -> list[int]:
        inside = [size + number * grown for number in range(groups) for size, grown in zip(group, step, strict=True)]
        return [*head, *inside, *(size + groups * grown for size, grown in zip(tail, slope, strict=True))]

    three, five = moments(KEPT[0]), moments(KEPT[1])
    same = next((place for place, (one, other) in enumerate(zip(three, five, strict=False)) if one != other), len(three))
    assume(same <= len(head) + (KEPT[0] + 1) * per_group)
    return [moments(kept) for kept in KEPT], times, moments(times)


@given(growing())
@settings(max_examples=300, deadline=None)
def test_moments_that_grow_evenly_are_continued(case: tuple[list[list[int]], int, list[int]]) -> None:
    lists, times, expected = case
    assert moments_with(lists, times) == expected


@given(growing(), st.data())
@settings(max_examples=300, deadline=None)
def test_a_third_count_that_differs_is_noticed(case: tuple[list[list[int]], int, list[int]], data: st.DataObject) -> None:
    (three, five, four), times, expected = case
    assert moments_with([three, five], times) == expected
    if four:
        place = data.draw(st.integers(0, len(four) - 1))
        four[place] += data.draw(st.sampled_from([-1, 1]))
        assert moments_with([three, five, four], times) is None
    assert moments_with([three, five, [*four, 0]], times) is None


@given(
    st.lists(st.integers(0, 2), max_size=4), st.lists(st.integers(0, 2), max_size=4), st.lists(st.integers(0, 2), max_size=4)
)
def test_items_and_sizes_are_continued(head: list[int], group: list[int], tail: list[int]) -> None:
    lists = [[*head, *group * kept, *tail] for kept in KEPT]
    assert items_with(lists, 17) == [*head, *group * 17, *tail]
    assert size_with([sum(entry) for entry in lists], 17) == sum(head) + 17 * sum(group) + sum(tail)
    assert size_with([1, 2], 17) is None
    assert size_with([1, 3, 3], 17) is None
    if group:
        assert items_with([*lists[:2], lists[1]], 17) is None


@st.composite
def steps(draw: st.DrawFn) -> tuple[tuple[tuple[str, int], ...], frozenset[int], int]:
    """What every step does with its state, row and earlier results; which results leave; tokens."""
    kinds = st.sampled_from(("tanh", "exp", "row", "linear", "mul", "add", "add_", "view", "detach", "dropout", "softmax"))
    calls = tuple(draw(st.lists(st.tuples(kinds, st.integers(0, 5)), min_size=1, max_size=6)))
    leaving = draw(st.sets(st.integers(0, len(calls)), max_size=2))
    return calls, frozenset(leaving), draw(st.integers(FEWEST + 2, FEWEST + 6))


class Drawn(Scanning):
    """A loop of any steps."""

    def __init__(self, calls: tuple[tuple[str, int], ...], leaving: frozenset[int]) -> None:
        super().__init__()
        self.calls, self.leaving = calls, leaving

    def states(self, x: Tensor) -> Tensor:
        state = x[:, 0] * 1.0
        left: dict[int, list[Tensor]] = {number: [] for number in self.leaving}
        for step in range(x.shape[1]):
            made = [state]
            for kind, other in self.calls:
                made.append(self._one(kind, made[-1], made[other % len(made)], x[:, step]))
            state = made[-1]
            for number, found in left.items():
                found.append(made[number])
        whole = [torch.stack(found, 1).sum(1) for found in left.values()]
        return sum(whole, state)[:, None]

    def _one(self, kind: str, last: Tensor, other: Tensor, row: Tensor) -> Tensor:
        match kind:
            case "row":
                return last * row
            case "linear":
                return self.kept(last)  # type: ignore[no-any-return]
            case "mul":
                return last * other
            case "add":
                return last + other
            case "add_":
                return (last + 0.0).add_(other)
            case "view":
                return last.view(last.shape[0], 2, -1).flatten(1)
            case "detach":
                return last + other.detach()
            case "dropout":
                return nn.functional.dropout(last, 0.5)
            case "softmax":
                return torch.softmax(last, -1)
        return getattr(last, kind)()  # type: ignore[no-any-return]


def check_loop(drawn: tuple[tuple[tuple[str, int], ...], frozenset[int], int]) -> None:
    calls, leaving, length = drawn
    run = recorded(Drawn(calls, leaving), length)
    fast = counts(run)
    run.loops[0] = None
    assert fast == counts(run)


@given(steps())
@settings(max_examples=4, deadline=None)
def test_loops_of_any_steps(drawn: tuple[tuple[tuple[str, int], ...], frozenset[int], int]) -> None:
    check_loop(drawn)


@pytest.mark.slow
@given(steps())
@settings(max_examples=40, deadline=None)
def test_many_loops_of_any_steps(drawn: tuple[tuple[tuple[str, int], ...], frozenset[int], int]) -> None:
    check_loop(drawn)
