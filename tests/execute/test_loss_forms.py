"""Is a loss a sum over samples? Found out on the real module, said in the answer, kept out of runs that divide the batch."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import parsim
from experiments.common.equality import even_plan
from parsim.app.config import parse_config
from parsim.app.launch import check_images_suit, check_loss, steps_per_epoch
from parsim.data import dataset_for
from parsim.errors import PlanError, TraceError
from parsim.model.build import build_module, example_batch, interface_of
from parsim.model.inputs import inputs_from
from parsim.model.load import load_model, model_from_module
from parsim.model.model import COUPLED, MIXING, Model
from parsim.model.objective import Objective
from parsim.model.spec import ModelSpec
from parsim.model.total_loss import loss_form, total_loss
from parsim.plans.mesh import Mesh
from tests.execute.described_modules import Contrastive, OwnLoss, TwoHeads
from tests.execute.described_specs import DESCRIBED

HERE = "tests.execute.described_modules"
CONTRASTIVE = ModelSpec(name=f"{HERE}:Contrastive", input_shape=(6,))
CENTRED = ModelSpec(name="tests.execute.test_loss_forms:Centred", input_shape=(6,))


class Noisy(nn.Module):
    """Draws its noise itself, so that no batch can be compared with its samples."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        noise = torch.randn_like(x)
        return functional.mse_loss(self.layer(x + noise), noise)


class Pairs(nn.Module):
    """All pairs of a batch: sizes grow with its square. `late`: a parameter is used after pairs have met."""

    def __init__(self, *, late: bool) -> None:
        super().__init__()
        self.one, self.other = nn.Linear(6, 4), nn.Linear(6, 4)
        self.scale = nn.Parameter(torch.ones(()))
        self.late = late

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        left = self.one(x) if self.late else self.one(x) * self.scale
        scores = left @ self.other(y).T
        if self.late:
            scores = scores * self.scale
        return functional.cross_entropy(scores, torch.arange(len(scores)))


@pytest.mark.parametrize(
    ("module", "form"),
    [(Contrastive(), COUPLED), (Noisy(), "mean unchecked")],
)
def test_forms(module: nn.Module, form: str) -> None:
    assert model_from_module(module, input_shape=(6,)).loss_form == form
    assert model_from_module(module, torch.randn(5, 6)).loss_form == form


class Centred(nn.Module):
    """Takes the mean of the batch away, so that no sample is alone. Makes a matrix of the default type on the way."""

    def __init__(self, norm: bool = False) -> None:
        super().__init__()
        self.one, self.other = nn.Linear(6, 8), nn.Linear(8, 3)
        self.norm = nn.BatchNorm1d(8) if norm else None

    def forward(self, x: Tensor) -> Tensor:
        y = self.one(x @ torch.eye(6))
        return self.other(y - y.mean(0) if self.norm is None else self.norm(y))


class Graph(nn.Module):
    """Nodes are the batch, and edges number them: no part of the batch runs."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 3)

    def forward(self, nodes: Tensor, edges: Tensor) -> Tensor:
        hidden = self.layer(nodes)
        ones = torch.ones_like(edges[1], dtype=torch.float32)
        degree = torch.zeros(len(nodes)).scatter_add_(0, edges[1], ones)
        return torch.zeros_like(hidden).index_add_(0, edges[1], hidden[edges[0]]) / degree.clamp(min=1).unsqueeze(-1)


@pytest.mark.parametrize(
    ("module", "batch", "form"),
    [
        (Centred(), torch.randn(5, 6), MIXING),
        (Centred(norm=True), torch.randn(5, 6), ""),
        (Graph(), (torch.randn(6, 6), torch.tensor([[0, 1, 2, 5], [5, 4, 0, 1]])), MIXING),
    ],
)
def test_forms_of_modules_under_cross_entropy(module: nn.Module, batch: object, form: str) -> None:
    """Running statistics are those of no batch. A module that mixes samples trains otherwise where the batch is divided."""
    assert model_from_module(module, batch).loss_form == form


def test_a_module_that_mixes_samples_is_told_of_by_its_shape_too() -> None:
    assert model_from_module(Centred(), input_shape=(6,)).loss_form == MIXING
    answer = parsim.plan(Centred(), cluster="dgx1-v100-32gb", global_batch=8, devices=2, strategy="dp", input_shape=(6,))
    assert "loss: cross_entropy (the module mixes the samples of a batch" in str(answer)


@pytest.mark.parametrize(("per_sample", "form"), [(False, "mean"), (True, "per sample")])
def test_forms_of_a_module_with_labels(per_sample: bool, form: str) -> None:
    batch = {"x": torch.randn(3, 6), "labels": torch.tensor([0, 4, 2]), "prior": torch.zeros(5)}
    model = model_from_module(OwnLoss(per_sample=per_sample), batch, loss="own")
    assert model.loss_form == form
    assert model.components[-1].name == "loss"
    assert Model.from_json(model.to_json()) == model


def test_all_pairs_are_planned_as_coupled() -> None:
    """With sizes that hold for every batch, whatever the batch of the example."""
    model = model_from_module(Pairs(late=False), (torch.randn(4, 6), torch.randn(4, 6)))
    assert model.loss_form == COUPLED
    loss = model.components[-1]
    assert loss.pair_bytes[0] == 4 * 1, "the logarithms of probabilities of every pair"
    assert loss.at_samples(7).saved_fixed_bytes == loss.saved_fixed_bytes + 4 * 49
    assert loss.at_samples(7).pair_bytes == (0, 0, 0)


def test_pairs_that_meet_before_a_parameter_is_used_are_refused() -> None:
    with pytest.raises(TraceError, match="compares the samples of a batch with each other"):
        model_from_module(Pairs(late=True), (torch.randn(4, 6), torch.randn(4, 6)))


def test_the_answer_says_what_was_assumed() -> None:
    def asked(module: nn.Module) -> parsim.Answer:
        return parsim.plan(
            module, cluster="dgx1-v100-32gb", global_batch=64, devices=2, strategy="dp", example_inputs=torch.randn(4, 6)
        )

    assert "not a sum over samples" in str(asked(Contrastive()).to_dict()["loss_note"])
    assert any("not checked" in line for line in asked(Noisy()).lines())


@pytest.mark.parametrize(
    ("spec", "form", "message"),
    [
        (CONTRASTIVE, COUPLED, r"4 of 8 samples at a time.*allow_coupled_loss"),
        (CENTRED, MIXING, r":Centred mixes the samples.*4 of 8 samples at a time.*strategy = 'single'"),
    ],
)
def test_a_loss_that_does_not_add_up_is_refused_where_the_batch_is_divided(spec: ModelSpec, form: str, message: str) -> None:
    model = load_model(spec)
    assert model.loss_form == form
    divided = even_plan(spec, Mesh(dp=2), strategy="custom", batch=8)
    with pytest.raises(PlanError, match=message):
        check_loss(model, divided, allowed=False)
    check_loss(model, divided, allowed=True)
    check_loss(model, even_plan(spec, Mesh(), strategy="custom", batch=8), allowed=False)


class Heavy(nn.Module):
    """More than 1 GFLOP per sample, by products of squares of 1,000. `seen`: the samples of its forwards."""

    seen: ClassVar[list[int]] = []

    def __init__(self, *, coupled: bool) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(6, 6))
        self.coupled = coupled

    def forward(self, x: Tensor) -> Tensor:
        if type(x) is Tensor:
            self.seen.append(len(x))
        big = x.new_ones(len(x), 1000, 1000)
        hidden = (x @ self.weight) * (big @ big).mean((1, 2)).unsqueeze(-1)
        return (hidden - hidden.mean(0) * self.coupled).square().mean()


@pytest.mark.parametrize(("coupled", "form"), [(True, COUPLED), (False, "mean")])
def test_two_samples_judge_a_module_of_many_flop(coupled: bool, form: str) -> None:
    """Four forwards: of two samples, of each alone, and of two again, with other random numbers or in training mode."""
    Heavy.seen.clear()
    model = model_from_module(Heavy(coupled=coupled), torch.randn(5, 6))
    assert model.forward_flop > 1e9
    assert model.loss_form == form
    assert Heavy.seen[-4:] == [2, 1, 1, 2]


def test_the_tensor_that_a_loss_reads_is_never_guessed() -> None:
    state = {"state": {"mine": torch.randn(3, 4), "theirs": torch.randn(3, 2)}}
    with pytest.raises(parsim.ParsimError, match=r'"value" float32 \[3, 1\], "policy" float32 \[3, 5\]'):
        model_from_module(TwoHeads(), state)
    assert model_from_module(TwoHeads(), state, output="policy").loss == 'cross_entropy(output="policy")'


def test_data_that_do_not_suit_the_model_are_refused_by_the_parent() -> None:
    text = f'''
[model]
name = "{HERE}:Contrastive"
input_shape = [6]
[cluster]
profile = "dgx1-v100-32gb"
[training]
global_batch = 8
steps = 2
dataset = "digits"
'''
    for check in (steps_per_epoch, check_images_suit):
        with pytest.raises(parsim.ParsimError, match=r"digits holds images and one class of each.*synthetic"):
            check(parse_config(text))
    check_images_suit(parse_config(text.replace("digits", "synthetic")))


def test_inputs_by_name_plan_like_an_example_batch() -> None:
    inputs = inputs_from({"state": {"mine": {"shape": [4]}, "theirs": {"shape": [2]}}})
    state = {"state": {"mine": torch.randn(3, 4), "theirs": torch.randn(3, 2)}}
    described = model_from_module(TwoHeads(), inputs=inputs, output="policy")
    assert described == model_from_module(TwoHeads(), state, output="policy")


class EndsInFloat32(nn.Module):
    """As models of transformers do: logits, or the scores of a router, are made in float32."""

    def __init__(self, *, weights: bool) -> None:
        super().__init__()
        self.layer, self.head, self.weights = nn.Linear(64, 64), nn.Linear(64, 10), weights

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.tanh(self.layer(x))
        return functional.linear(hidden.float(), self.head.weight.float()) if self.weights else self.head(hidden).float()


class Squeezes(nn.Module):
    """A batch of one loses its batch. `mixes`: the mean over the batch is taken off."""

    def __init__(self, *, mixes: bool) -> None:
        super().__init__()
        self.layer, self.mixes = nn.Linear(64, 10), mixes

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x - x.mean(0) if self.mixes else x).squeeze()


def _judged(module: nn.Module, samples: int) -> str:
    torch.manual_seed(0)
    inputs, target = {"x": torch.randn(samples, 64)}, torch.randint(0, 10, (samples,))
    return loss_form(module, Objective("cross_entropy"), "", inputs, target, call=lambda given: ((given["x"],), {}))


@pytest.mark.parametrize("weights", [False, True])
def test_rounding_in_float32_is_no_mixing(weights: bool) -> None:
    torch.manual_seed(0)
    assert _judged(EndsInFloat32(weights=weights), 4) == ""


@pytest.mark.parametrize(("mixes", "form"), [(False, ""), (True, MIXING)])
def test_a_module_that_squeezes_a_batch_of_one_is_judged_by_two_samples(mixes: bool, form: str) -> None:
    torch.manual_seed(0)
    assert _judged(Squeezes(mixes=mixes), 2) == form


class OwnStatistics(nn.Module):
    """Batch statistics in training, running ones in evaluation, without a BatchNorm of torch."""

    mean: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.one, self.other = nn.Linear(6, 8), nn.Linear(8, 3)
        self.register_buffer("mean", torch.zeros(8))

    def forward(self, x: Tensor) -> Tensor:
        y = self.one(x)
        mean = y.mean(0) if self.training else self.mean
        return self.other(y - mean)


class Pulling(torch.autograd.Function):
    """Adds a gradient of its own, which need not scale with the one that arrives: RWKV's L2Wrap does not."""

    @staticmethod
    def forward(ctx: Any, loss: Tensor, y: Tensor, scaled: bool) -> Tensor:
        ctx.save_for_backward(y)
        ctx.scaled = scaled
        return loss

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor, None]:
        (y,) = ctx.saved_tensors
        return gradient, 1e-3 * y / len(y) * (gradient if ctx.scaled else 1.0), None


class Wrapped(nn.Module):
    """A mean of squares and that gradient."""

    def __init__(self, *, scaled: bool) -> None:
        super().__init__()
        self.layer, self.scaled = nn.Linear(6, 3), scaled

    def forward(self, x: Tensor) -> Tensor:
        y = self.layer(x)
        return Pulling.apply(y.square().mean(), y, self.scaled)


@pytest.mark.parametrize(
    ("module", "form"),
    [
        (OwnStatistics(), MIXING),
        (nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Dropout(0.5), nn.Linear(8, 3)), ""),
        (Wrapped(scaled=False), COUPLED),
        (Wrapped(scaled=True), "mean"),
    ],
    ids=["own statistics", "torch's parts", "unscaled gradient", "scaled gradient"],
)
def test_forms_in_training_and_of_gradients(module: nn.Module, form: str) -> None:
    """torch 2.13: BatchNorm and dropout differ between training and evaluation, and a loss of one's own that does so is found
    by its gradients."""
    assert model_from_module(module, torch.randn(5, 6)).loss_form == form


class Prompted(nn.Module):
    """A mean over the labels that count: those of a prompt do not."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.head = nn.Embedding(9, 4), nn.Linear(4, 9)

    def forward(self, tokens: Tensor, labels: Tensor) -> Tensor:
        logits = self.head(self.table(tokens))
        return functional.cross_entropy(logits.flatten(0, 1), labels.flatten())


@pytest.mark.parametrize(("low", "form"), [(0, "mean"), (-100, COUPLED)])
def test_labels_that_may_be_ignored_make_a_mean_of_what_counts(low: int, form: str) -> None:
    """Where samples differ in how many labels count, the mean over a batch is not that of its samples."""
    described = {
        "tokens": {"shape": [6], "dtype": "int64", "high": 9},
        "labels": {"shape": [6], "dtype": "int64", "high": 9, "low": low},
    }
    inputs = inputs_from(described)
    spec = ModelSpec(name="tests.execute.test_loss_forms:Prompted", inputs=inputs, loss="own")
    assert load_model(spec).loss_form == form
    generator = torch.Generator().manual_seed(0)
    drawn = inputs[1].tensor(200, generator, torch.float32)
    made = torch.as_tensor(dataset_for(spec, "synthetic", root=None).inputs["labels"])
    for labels in (drawn, made):
        assert set(labels.flatten().tolist()) == ({*range(9), -100} if low else set(range(9)))


# Losses of models of several inputs, with outputs in structures. `test_equality` trains them.

BATCH = 8


@pytest.mark.parametrize("spec", DESCRIBED, ids=[f"{spec.name.partition(':')[2]} {spec.loss}" for spec in DESCRIBED])
def test_losses_add_up_over_microbatches(spec: ModelSpec) -> None:
    """The sum over eight samples is that of two halves, whatever form the loss has; a scalar is the mean of its batch."""
    interface = interface_of(spec)
    module = build_module(spec).double()
    inputs, target = example_batch(spec, BATCH, dtype=torch.float64)
    constants = {entry.name for entry in interface.inputs if entry.constant}

    def total(first: int, last: int) -> float:
        given = {name: tensor if name in constants else tensor[first:last] for name, tensor in inputs.items()}
        args, kwargs = interface.arguments(given)
        wanted = None if target is None else target[first:last]
        return float(total_loss(interface.objective, module(*args, **kwargs), wanted, last - first).detach())

    assert total(0, BATCH) == pytest.approx(total(0, 3) + total(3, BATCH), rel=1e-12)


# What a forward hands on to the next one is named; a run does not divide the batch where that comes from samples.

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
