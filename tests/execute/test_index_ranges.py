"""Integers that a user declares, and the tables in which a model looks them up: refused only where the input is the index."""

from __future__ import annotations

from collections.abc import Callable

import pytest

torch = pytest.importorskip("torch", reason="needs the torch extra")

from hypothesis import given, settings  # noqa: E402
from hypothesis import strategies as st  # noqa: E402
from torch import Tensor, nn  # noqa: E402

import parsim  # noqa: E402
from parsim.errors import ModelError  # noqa: E402
from parsim.model.inputs import ModelInput  # noqa: E402
from parsim.model.load import model_from_module  # noqa: E402
from parsim.model.trace.record import run_recorded  # noqa: E402
from parsim.model.trace.traced import check_index_ranges, lookups  # noqa: E402

ROWS, WIDTH = 6, 4


class Looks(nn.Module):
    """Looks `ids` up in a table, in the way that it is given."""

    def __init__(self, way: Callable[[Looks, Tensor], Tensor]) -> None:
        super().__init__()
        self.way = way
        self.table, self.bag = nn.Embedding(ROWS, WIDTH), nn.EmbeddingBag(ROWS, WIDTH)
        self.rows, self.head = nn.Parameter(torch.randn(ROWS, WIDTH)), nn.Linear(WIDTH, 3)

    def forward(self, ids: Tensor) -> Tensor:
        made: Tensor = self.head(self.way(self, ids).reshape(len(ids), -1, WIDTH).mean(1))
        return made


def masked(net: Looks, ids: Tensor) -> Tensor:
    """Written into in place."""
    own = ids.clone()
    own[own >= ROWS] = 0
    return net.table(own)  # type: ignore[no-any-return]


INDEX_IS_THE_INPUT: dict[str, Callable[[Looks, Tensor], Tensor]] = {
    "embedding": lambda net, ids: net.table(ids),
    "another shape and type": lambda net, ids: net.table(ids.view(-1).unsqueeze(0).int().to(torch.int64)),
    "embedding_bag": lambda net, ids: net.bag(ids),
    "index": lambda net, ids: net.rows[ids],
    "index behind a slice": lambda net, ids: net.rows.t()[:, ids].permute(1, 2, 0),
    "index_select": lambda net, ids: net.rows.index_select(0, ids.flatten()),
    "one_hot": lambda net, ids: nn.functional.one_hot(ids, ROWS).float() @ net.rows,
}
INDEX_IS_COMPUTED: dict[str, Callable[[Looks, Tensor], Tensor]] = {
    "remainder": lambda net, ids: net.table(ids % ROWS),
    "clamped": lambda net, ids: net.table(ids.clamp(max=ROWS - 1)),
    "shifted": lambda net, ids: net.table((ids - ids).abs()),
    "where": lambda net, ids: net.table(torch.where(ids < ROWS, ids, 0)),
    "masked in place": masked,
    "one column of several": lambda net, ids: net.table(ids[:, 0] * 0),
    "not looked up": lambda net, ids: net.rows[0] * ids[..., None],
}


def check(way: Callable[[Looks, Tensor], Tensor], high: int, low: int = 0) -> list[set[tuple[str, int]]]:
    """As a trace checks a net with declared ids; of two batches the inputs that are indices, with the rows of the table."""
    module, entry = Looks(way), ModelInput("ids", (2,), dtype="int64", high=high, low=low)
    small, large = (run_recorded(module, (torch.zeros(batch, 2, dtype=torch.int64),), {}, loss=None) for batch in (2, 3))
    check_index_ranges(small, large, (entry,), "net")
    return [{(lookup.name, lookup.rows) for lookup in lookups(recording)} for recording in (small, large)]


@pytest.mark.parametrize("kind", INDEX_IS_THE_INPUT)
def test_an_input_as_an_index_beyond_the_table_is_refused(kind: str) -> None:
    with pytest.raises(ModelError, match=rf"ids holds integers from 0 to {ROWS}, and .*must lie from .*give ids high = {ROWS}"):
        check(INDEX_IS_THE_INPUT[kind], ROWS + 1)
    assert check(INDEX_IS_THE_INPUT[kind], ROWS) == [{("input:0", ROWS)}] * 2


@pytest.mark.parametrize("kind", INDEX_IS_COMPUTED)
def test_an_index_computed_of_an_input_is_not(kind: str) -> None:
    assert check(INDEX_IS_COMPUTED[kind], 100) == [set(), set()]


def test_negative_indices_count_from_the_end_of_a_tensor_and_not_of_an_embedding() -> None:
    check(INDEX_IS_THE_INPUT["index"], ROWS, low=-ROWS)
    with pytest.raises(ModelError, match=r"from -1 to 5, .*high = 6 and low = 0"):
        check(INDEX_IS_THE_INPUT["embedding"], ROWS, low=-1)


def test_a_table_that_grows_with_the_batch_has_no_bound() -> None:
    """Samples that are put in another order."""
    indices = check(lambda net, ids: net.rows[:1] * torch.zeros(len(ids), 1)[ids], 100)
    assert indices == [{("input:0", 2)}, {("input:0", 3)}]


def test_example_inputs_of_the_python_api() -> None:
    module = Looks(INDEX_IS_THE_INPUT["embedding"])
    with pytest.raises(ModelError, match=rf"{ROWS + 2}, and module table uses it as an index .* {ROWS} entries"):
        parsim.trace(module, {"ids": torch.tensor([[0, 1], [2, ROWS + 2]])})
    assert parsim.trace(module, torch.tensor([[0, 1], [2, ROWS - 1]])).components


class OwnLoss(nn.Module):
    """Takes its targets itself; classes that are ignored lie beyond the others, as in maps of 255."""

    def __init__(self, ignored: int) -> None:
        super().__init__()
        self.head, self.ignored = nn.Linear(WIDTH, 3), ignored

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        return nn.functional.cross_entropy(self.head(x), labels, ignore_index=self.ignored)


@pytest.mark.parametrize(
    ("ignored", "high", "low", "refused"), [(-100, 4, 0, True), (-100, 3, -100, False), (255, 256, 0, False)]
)
def test_targets_beyond_the_classes(ignored: int, high: int, low: int, refused: bool) -> None:
    """Only the number that is ignored may be no class."""
    inputs = (ModelInput("x", (WIDTH,)), ModelInput("labels", (), dtype="int64", high=high, low=low))
    if refused:
        with pytest.raises(ModelError, match=r"labels holds integers from 0 to 3.*classes of a loss, 3 entries.*high = 3"):
            model_from_module(OwnLoss(ignored), inputs=inputs, loss="own")
    else:
        assert model_from_module(OwnLoss(ignored), inputs=inputs, loss="own").components


@settings(max_examples=30, deadline=None)
@given(
    kind=st.sampled_from(sorted(INDEX_IS_THE_INPUT)), low=st.integers(-8, 8), span=st.integers(1, 12), seed=st.integers(0, 99)
)
def test_what_is_not_refused_runs(kind: str, low: int, span: int, seed: int) -> None:
    """The oracle is the module itself: both ends of the declared range, on real data."""
    module = Looks(INDEX_IS_THE_INPUT[kind])
    entry = ModelInput("ids", (2,), dtype="int64", high=low + span, low=low)
    recordings = [run_recorded(module, (torch.zeros(batch, 2, dtype=torch.int64),), {}, loss=None) for batch in (2, 3)]
    assert len(lookups(recordings[0])) == 1
    data = torch.randint(low, low + span, (2, 2), generator=torch.Generator().manual_seed(seed))
    data[0, 0], data[1, 1] = low, low + span - 1
    try:
        module(data)
        runs = True
    except (IndexError, RuntimeError):
        runs = False
    try:
        check_index_ranges(recordings[0], recordings[1], (entry,), "net")
        planned = True
    except ModelError:
        planned = False
    assert planned == runs
