"""What a forward hands on to the next one is named; a run does not divide the batch where that comes from samples."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from parsim.app.launch import check_loss
from parsim.errors import PlanError, TraceError
from parsim.model.load import model_from_module
from parsim.model.model import MIXING, Model
from parsim.plans.mesh import Mesh
from parsim.plans.plan import Plan, Stage

WIDTH = 6
X = torch.zeros(4, WIDTH)


class Codebook(nn.Module):
    """Vector quantisation whose codes are moving averages of what was assigned to them, kept in buffers."""

    codes: Tensor
    counts: Tensor
    sums: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.inward, self.outward = nn.Linear(WIDTH, 4), nn.Linear(4, WIDTH)
        self.register_buffer("codes", torch.randn(5, 4))
        self.register_buffer("counts", torch.ones(5))
        self.register_buffer("sums", self.codes.clone())

    def forward(self, x: Tensor) -> Tensor:
        z = self.inward(x)
        chosen = torch.cdist(z, self.codes).argmin(1)
        quantised = self.codes[chosen]
        if self.training:
            with torch.no_grad():
                member = functional.one_hot(chosen, 5).type_as(z)
                self.counts.mul_(0.9).add_(member.sum(0), alpha=0.1)
                self.sums.mul_(0.9).add_(member.t() @ z, alpha=0.1)
                self.codes.copy_(self.sums / self.counts.unsqueeze(1))
        made = self.outward(z + (quantised - z).detach())
        return functional.mse_loss(made, x) + functional.mse_loss(z, quantised.detach())


class Memory(nn.Module):
    """Attends to the rows of the batch before, which a buffer holds; assigned anew in every forward."""

    rows: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.head = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 3)
        self.register_buffer("rows", torch.zeros(2, WIDTH), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        h = self.layer(x)
        scores = (h @ self.rows.t()).softmax(-1)
        made: Tensor = self.head(h + scores @ self.rows)
        self.rows = h[:2].detach()
        return made


class Averaged(nn.Module):
    """A teacher that follows its pupil inside the forward: `by` in place, or by new data."""

    def __init__(self, by: str) -> None:
        super().__init__()
        self.pupil, self.by = nn.Linear(WIDTH, 4), by
        self.teacher = copy.deepcopy(self.pupil).requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            for mine, its in zip(self.pupil.parameters(), self.teacher.parameters(), strict=True):
                if self.by == "data":
                    its.data = its.data * 0.9 + mine.data * 0.1
                else:
                    its.mul_(0.9).add_(mine, alpha=0.1)
            wanted = self.teacher(x + 0.1)
        error: Tensor = (self.pupil(x) - wanted).pow(2).mean(1)
        return error


class Counting(nn.Module):
    """A mean of activations that only an evaluation reads, and running statistics of a BatchNorm."""

    seen: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.norm, self.head = nn.Linear(WIDTH, 4), nn.BatchNorm1d(4), nn.Linear(4, 3)
        self.register_buffer("seen", torch.zeros(4))

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm(self.layer(x))
        if self.training:
            with torch.no_grad():
                self.seen.mul_(0.9).add_(h.mean(0), alpha=0.1)
        else:
            h = h - self.seen
        made: Tensor = self.head(h)
        return made


class Scratch(nn.Module):
    """A buffer that is overwritten before it is read."""

    room: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.head = nn.Linear(WIDTH, 4), nn.Linear(4, 3)
        self.register_buffer("room", torch.zeros(4))

    def forward(self, x: Tensor) -> Tensor:
        self.room.copy_(self.layer.weight.detach().mean(1))
        made: Tensor = self.head(self.layer(x) * self.room)
        return made


def spectral() -> nn.Module:
    return nn.Sequential(nn.utils.parametrizations.spectral_norm(nn.Linear(WIDTH, 4)), nn.ReLU(), nn.Linear(4, 3))


SAMPLES = "computed from the samples of a step and used in later ones: {}. Each replica and microbatch takes its own"
WEIGHTS = "the forward itself updates {}: once per microbatch"


@pytest.mark.parametrize(
    ("module", "form", "note"),
    [
        (Codebook(), MIXING, SAMPLES.format("codes")),
        (Memory(), MIXING, SAMPLES.format("rows")),
        (Averaged("data"), "per sample", WEIGHTS.format("teacher.weight, teacher.bias")),
        (Averaged("in place"), "per sample", WEIGHTS.format("teacher.weight, teacher.bias")),
        (spectral(), "", WEIGHTS.format("0.parametrizations.weight.0._u, 0.parametrizations.weight.0._v")),
        (Counting(), "", None),
        (Scratch(), "", None),
    ],
    ids=["codebook", "memory", "teacher by data", "teacher in place", "spectral norm", "counting", "scratch"],
)
def test_what_a_forward_hands_on_is_named(module: nn.Module, form: str, note: str | None) -> None:
    model = model_from_module(module, X, loss="own" if isinstance(module, Codebook | Averaged) else None)
    assert model.loss_form == form
    assert [text for text in model.assumptions if note is not None and text.startswith(note)] == list(model.assumptions)
    assert bool(model.assumptions) is (note is not None)


def test_a_run_does_not_divide_the_batch_of_a_codebook() -> None:
    model = model_from_module(Codebook(), X)
    for ways in (1, 2):
        stages = (Stage(components=tuple(part.name for part in model.components), ranks=tuple(range(ways))),)
        plan = Plan(strategy="dp", mesh=Mesh(dp=ways), stages=stages, global_batch=4, microbatches=1)
        if ways == 1:
            check_loss(model, plan, allowed=False)
        else:
            with pytest.raises(PlanError, match="mixes the samples of a batch"):
                check_loss(model, plan, allowed=False)


class Recurrent(nn.Module):
    """Keeps the state of the batch before in a plain attribute; or only what others may look at, or a table of its own."""

    def __init__(self, keeps: str) -> None:
        super().__init__()
        self.cell, self.head, self.keeps = nn.GRUCell(WIDTH, 4), nn.Linear(4, 3), keeps
        self.state: tuple[Tensor, ...] | None = None
        self.table: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        if self.keeps == "a table" and self.table is None:
            self.table = torch.linspace(0, 1, 4)
        before = self.state[0] if self.state is not None and self.keeps == "the state" else None
        h: Tensor = self.cell(x, before)
        self.state = (h.detach(),)
        made: Tensor = self.head(h if self.table is None else h + self.table)
        return made


@pytest.mark.parametrize("keeps", ["the state", "a table", "an activation"])
def test_a_state_in_an_attribute_is_named_where_the_next_forward_reads_it(keeps: str) -> None:
    told = model_from_module(Recurrent(keeps), X).assumptions
    if keeps == "the state":
        (note,) = told
        assert note.startswith("the forward keeps a tensor that it computes from its data in state, and the next one reads it")
        assert "Every step is taken as the first one" in note
    else:
        assert told == ()


class Writing(nn.Module):
    """Changes a trained weight in its forward."""

    def __init__(self, write: Callable[[Tensor], object]) -> None:
        super().__init__()
        self.layer, self.write = nn.Linear(WIDTH, 3), write

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.write(self.layer.weight)
        made: Tensor = self.layer(x)
        return made


def _set(weight: Tensor) -> None:
    weight.data = functional.normalize(weight.data)


@pytest.mark.parametrize(
    "write",
    [_set, lambda weight: weight.data.clamp_(-1, 1), lambda weight: weight.copy_(functional.normalize(weight))],
    ids=["set", "data", "in place"],
)
def test_a_forward_that_changes_a_trained_weight_is_refused(write: Callable[[Tensor], object]) -> None:
    with pytest.raises(TraceError, match=r"changes the parameter layer\.weight inside its forward at .*parametrize"):
        model_from_module(Writing(write), X)


def test_an_embedding_that_rescales_its_rows_is_refused() -> None:
    module = nn.Sequential(nn.Embedding(9, 4, max_norm=1.0), nn.Linear(4, 3))
    with pytest.raises(TraceError, match=r"changes the parameter 0\.weight .*in place of max_norm"):
        model_from_module(module, torch.zeros(4, 2, dtype=torch.int64))


def test_notes_are_kept_in_files() -> None:
    model = model_from_module(Codebook(), X)
    assert Model.from_json(model.to_json()) == model
