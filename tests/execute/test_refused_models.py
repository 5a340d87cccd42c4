"""What cannot be planned or is not what it seems: one message with the place and the way round."""

from __future__ import annotations

import json
import logging
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from parsim.errors import TraceError
from tests.execute.bitwise import assert_equal_to_module

pytest.importorskip("torch", reason="needs the torch extra")

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import parsim
from experiments.common.equality import even_plan
from parsim.app.launch import check_loss
from parsim.app.question import loss_note
from parsim.errors import ModelError, ParsimError, PlanError
from parsim.model import record
from parsim.model.inputs import ModelInput
from parsim.model.load import load_model, model_from_module
from parsim.model.spec import ModelSpec
from parsim.model.trace.record import run_recorded
from parsim.model.trace.traced import check_index_ranges, lookups
from parsim.plans.mesh import Mesh
from tests.hugging_face_configs import SMALL
from tests.traced import trace

HERE = "tests.execute.test_refused_models"
EXAMPLE = torch.zeros(4, 6)


class Returning(nn.Module):
    """A layer, and what `made` makes of its output and input."""

    def __init__(self, made: Callable[[Tensor, Tensor], object], *, frozen: bool = False) -> None:
        super().__init__()
        self.layer, self.made = nn.Linear(6, 3).requires_grad_(not frozen), made

    def forward(self, x: Tensor) -> object:
        return self.made(self.layer(x), x)


def penalty(out: Tensor, x: Tensor) -> Tensor:
    (gradient,) = torch.autograd.grad(out.sum(), x, create_graph=True)
    return gradient.square().sum(1)


def backward(out: Tensor, x: Tensor) -> Tensor:
    out.sum().backward()  # type: ignore[no-untyped-call]
    return out


def nothing(*arguments: Tensor) -> Tensor:
    return torch.zeros(len(arguments[0]), 3)


@pytest.mark.parametrize(
    ("module", "message"),
    [
        (Returning(lambda out, x: out.detach()), "nothing to train: no gradient of its loss reaches its parameters"),
        (Returning(nothing), "nothing to train: no gradient"),
        (Returning(lambda out, x: out, frozen=True), r"nothing to train: all 2 of its parameters are frozen"),
        (nn.Identity(), "nothing to train: it has no parameters"),
        (Returning(penalty), r"takes gradients inside its forward \(grad\) at .*test_refused_models.py:\d+ "),
        (Returning(backward), r"takes gradients inside its forward \(backward\) at .*test_refused_models.py:\d+ "),
        (Returning(lambda out, x: torch.fft.fft(out)), "returns complex64 .* needs real numbers: return .real"),
        (Returning(lambda out, x: out @ torch.zeros(4, 2)), r"test_refused_models.py:\d+ .*must have same reduction dim"),
    ],
)
def test_modules_that_cannot_be_trained_are_refused(module: nn.Module, message: str, caplog: pytest.LogCaptureFixture) -> None:
    """torch 2.13: calls that fail on fake tensors are logged with a traceback; a user is to see the message alone."""
    with caplog.at_level(logging.DEBUG), pytest.raises(ParsimError, match=message):
        model_from_module(module, EXAMPLE)
    assert "Traceback" not in caplog.text


@pytest.mark.filterwarnings("ignore")
def test_packed_weights_cannot_be_trained() -> None:
    module = torch.ao.quantization.quantize_dynamic(nn.Sequential(nn.Linear(6, 3)))  # type: ignore[no-untyped-call]
    with pytest.raises(ParsimError, match=r"0 \(Linear\) holds weights that torch has packed as integers.*prepare_qat"):
        model_from_module(module, EXAMPLE)


def test_weights_and_example_on_two_devices() -> None:
    with torch.device("meta"):
        module = nn.Linear(6, 3)
    with pytest.raises(ParsimError, match="put the example inputs on the device of the weights"):
        model_from_module(module, EXAMPLE)
    assert model_from_module(module, EXAMPLE.to("meta")).parameter_count == 21


class Product(torch.autograd.Function):
    """A product with a backward by hand, which autocast does not cast."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return x @ weight

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        x, weight = ctx.saved_tensors
        return gradient @ weight.T, x.T @ gradient


class ByHand(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.weight = nn.Linear(6, 6), nn.Parameter(torch.randn(6, 3))

    def forward(self, x: Tensor) -> Tensor:
        made: Tensor = Product.apply(self.first(x), self.weight)  # type: ignore[no-untyped-call]
        return made


@torch.library.custom_op("parsim_tests::doubled", mutates_args=())
def doubled(x: Tensor) -> Tensor:
    return x * 2


doubled.register_fake(torch.empty_like)


def test_a_backward_that_fails_under_autocast_alone_leaves_the_module_to_fp32() -> None:
    """It ended in a traceback."""
    model = model_from_module(ByHand(), EXAMPLE)
    assert model.half_refused.startswith("the backward of ")
    assert "under autocast to half precision" in model.half_refused
    assert any("no autocast" in text for text in model.assumptions)


def test_an_operator_without_a_backward_is_named() -> None:
    with pytest.raises(ParsimError, match=r"backward .* parsim_tests.doubled.* register_autograd"):
        model_from_module(Returning(lambda out, x: torch.ops.parsim_tests.doubled(out)), EXAMPLE)


class AddedUp(nn.Module):
    """Its loss is the sum over the batch, where the mean is meant."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x).square().sum()


def test_a_scalar_that_adds_up_the_batch_is_told_from_one_that_compares_samples() -> None:
    spec = ModelSpec(name=f"{HERE}:AddedUp", input_shape=(6,))
    model = load_model(spec)
    assert "the sum over the batch" in loss_note(model)
    assert "return the mean" in loss_note(model)
    with pytest.raises(PlanError, match=r"adds up the samples of a batch.*4 of 8 samples.*return the mean"):
        check_loss(model, even_plan(spec, Mesh(dp=2), strategy="custom", batch=8), allowed=False)
    check_loss(model, even_plan(spec, Mesh(), strategy="custom", batch=8), allowed=False)


def test_inputs_by_shape_of_a_forward_with_two() -> None:
    class Two(nn.Module):
        def forward(self, x: Tensor, t: Tensor) -> Tensor:
            return x + t

    with pytest.raises(ParsimError, match=r"missing 1 required positional argument: 't'; give every input by name"):
        model_from_module(Two(), EXAMPLE)
    with pytest.raises(ParsimError, match=r"unexpected keyword argument 'tt'.*; it takes x, t"):
        model_from_module(Two(), {"x": EXAMPLE, "tt": EXAMPLE})


LLAMA = {**SMALL["llama"], "num_hidden_layers": 1}


@pytest.mark.hf
def test_configs_that_are_quantised_or_of_impossible_size(tmp_path: Path) -> None:
    pytest.importorskip("transformers", reason="needs the hf extra")
    path = tmp_path / "config.json"
    path.write_text(json.dumps({**LLAMA, "quantization_config": {"quant_method": "fp8"}}))
    answer = parsim.plan(str(path), cluster="dgx1-v100-32gb", devices=1, global_batch=2, strategy="single", seq=8)
    assert any("quantization_config is left out" in text for text in answer.prediction.warnings)
    path.write_text(json.dumps({**LLAMA, "vocab_size": 10**18}))
    with pytest.raises(ModelError, match=r"cannot be built.*correct the sizes"):
        load_model(ModelSpec(name=str(path), input_shape=(8,)))


@pytest.mark.hf
def test_unknown_keys_of_a_config_are_named(tmp_path: Path) -> None:
    """A key that the class of the config does not have may be an option of a newer one; usual metadata is none."""
    pytest.importorskip("transformers", reason="needs the hf extra")
    path = tmp_path / "config.json"
    about = {"torch_dtype": "bfloat16", "_name_or_path": "x", "pretraining_tp": 1, "sliding_window": None}
    path.write_text(json.dumps({**LLAMA, **about, "frobnicate": 5}))
    answer = parsim.plan(str(path), cluster="dgx1-v100-32gb", global_batch=8, strategy="dp", args={"seq": 16})
    assert [text for text in answer.prediction.warnings if "keys of" in text] == [
        "keys of config.json that its class does not list, and which may matter: frobnicate"
    ]
    assert "torch_dtype = bfloat16 is left out: weights are as training.precision says" in answer.prediction.warnings


# Recorded all the same: distributions that check values, scripted functions, tables in plain attributes.

FEATURES = 6


class Sampling(nn.Module):
    """A VAE of torch.distributions, which check their arguments by default."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.decoder = nn.Linear(FEATURES, 4), nn.Linear(2, FEATURES)

    def forward(self, x: Tensor) -> Tensor:
        mean, scale = self.encoder(x).chunk(2, -1)
        posterior = torch.distributions.Normal(mean, scale.exp())
        prior = torch.distributions.Normal(torch.zeros_like(mean), torch.ones_like(mean))
        made = self.decoder(posterior.rsample())
        divergence: Tensor = torch.distributions.kl_divergence(posterior, prior).sum(-1)
        error: Tensor = (made - x).pow(2).sum(-1)
        return error + divergence


@torch.jit.script
def swish(x: Tensor) -> Tensor:
    return x * torch.sigmoid(x)


class Scripted(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one, self.two, self.head = nn.Linear(FEATURES, 8), nn.Linear(8, 8), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        made: Tensor = self.head(swish(self.two(swish(self.one(x)))))
        return made


class Table(nn.Module):
    """Complex angles in a plain attribute."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.head = nn.Linear(FEATURES, FEATURES), nn.Linear(FEATURES, 3)
        self.angles = torch.polar(torch.ones(FEATURES // 2), torch.arange(FEATURES // 2).float())

    def forward(self, x: Tensor) -> Tensor:
        self.angles = self.angles.to(x.device)
        turned = torch.view_as_complex(self.layer(x).unflatten(-1, (-1, 2))) * self.angles
        made: Tensor = self.head(torch.view_as_real(turned).flatten(-2).type_as(x))
        return made


@pytest.mark.parametrize("module", [Sampling(), Scripted(), Table()], ids=lambda module: type(module).__name__)
def test_they_are_recorded(module: nn.Module) -> None:
    checks = torch.distributions.Distribution._validate_args
    torch.distributions.Distribution.set_default_validate_args(True)
    try:
        with torch.jit.optimized_execution(False):  # a scripted function called often gets gradients that round otherwise
            assert_equal_to_module(module, (torch.randn(4, FEATURES),), "block")
        assert torch.distributions.Distribution._validate_args, "a forward outside checks as before"
    finally:
        torch.distributions.Distribution.set_default_validate_args(checks)
    assert type(swish) is torch.jit.ScriptFunction
    assert swish(torch.zeros(2)).sum() == 0


@pytest.mark.parametrize("name", ["Sampling", "Scripted", "Table"])
def test_they_are_planned_by_name(name: str) -> None:
    assert load_model(ModelSpec(name=f"{HERE}:{name}", input_shape=(FEATURES,))).assumptions == ()


def test_a_scripted_function_without_its_python_code_is_refused() -> None:
    bare = torch.jit.CompilationUnit("def double(x):\n    return x * 2\n").double

    class Bare(Scripted):
        def forward(self, x: Tensor) -> Tensor:
            made: Tensor = self.head(bare(self.one(x)))
            return made

    with pytest.raises(
        TraceError,
        match=r"a function at .*`made: Tensor = self\.head\(bare.* is compiled by torch\.jit, .*give the Python function",
    ):
        model_from_module(Bare(), torch.zeros(4, FEATURES))


# A forward that draws outside torch is refused with its line; attributes that it changes are named in the answer.


class Dropped(nn.Module):
    """A layer that is left out in some steps, by numbers that `draw` makes."""

    def __init__(self, draw: Callable[[], float]) -> None:
        super().__init__()
        self.draw = draw
        self.first, self.second, self.head = nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        if self.training and self.draw() < 0.5:
            x = self.second(x)
        made: Tensor = self.head(x)
        return made


class OwnGenerator(Dropped):
    """A generator among the attributes of a part."""

    def __init__(self, generator: random.Random | np.random.Generator) -> None:
        super().__init__(generator.random)
        self.second.generator = generator


class Annealed(nn.Module):
    """A weight that grows with the calls of its forward, in a plain attribute; and one in a buffer."""

    calls: Tensor

    def __init__(self, *, buffer: bool) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 3)
        self.register_buffer("calls", torch.zeros(()))
        self.step, self.buffer = 0, buffer

    def forward(self, x: Tensor) -> Tensor:
        if self.buffer:
            self.calls += 1
            made: Tensor = self.layer(x) * self.calls
            return made
        self.step += 1
        made = self.layer(x) * min(1.0, self.step / 1000)
        return made


@pytest.mark.parametrize(
    ("module", "named"),
    [
        (Dropped(random.random), "Python's random"),
        (Dropped(lambda: random.choice([0.1, 0.9])), "Python's random"),
        (Dropped(np.random.rand), "numpy.random"),  # type: ignore[arg-type]
        (OwnGenerator(random.Random(0)), "the generator second.generator"),
        (OwnGenerator(np.random.default_rng(0)), "the generator second.generator"),
    ],
)
def test_draws_outside_torch_are_refused_and_the_generators_stay(module: nn.Module, named: str) -> None:
    before = states()
    for call in (lambda: trace(module, EXAMPLE), lambda: record(module, EXAMPLE)):
        with pytest.raises(TraceError, match=rf"draws from {named}.* draw with torch"):
            call()
    if not isinstance(module, OwnGenerator):
        assert states() == before


def states() -> tuple[object, object]:
    """Of both global generators."""
    return random.getstate(), np.random.get_state()[1].tolist()  # noqa: NPY002 - what users' code draws from


def test_the_line_of_the_draw_is_named() -> None:
    with pytest.raises(TraceError, match=r"test_refused_models.py:\d+ `if self.training and self.draw\(\) < 0.5:`"):
        trace(Dropped(random.random), EXAMPLE)


def test_draws_of_torch_are_recorded() -> None:
    class Kept(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(6, 6)

        def forward(self, x: Tensor) -> Tensor:
            made: Tensor = x + self.layer(x) * (torch.rand(len(x), 1) < 0.9)
            return made

    assert trace(Kept(), EXAMPLE).model.assumptions == ()


def test_attributes_that_a_forward_changes_are_named_in_the_answer() -> None:
    module = Annealed(buffer=False)
    answer = parsim.plan(module, cluster="dgx1-v100-32gb", devices=2, global_batch=8, strategy="dp", example_inputs=EXAMPLE)
    (note,) = [text for text in answer.prediction.warnings if "changes attributes" in text]
    assert "step (0 to 1)" in note
    assert "buffer" in note
    assert module.step == 0
    assert trace(Annealed(buffer=True), EXAMPLE).model.assumptions == ()


# Integers that a user declares, and the tables in which a model looks them up: refused only where the input is the index.

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


Drops = Callable[[Tensor, float], object]
CERTAIN: dict[str, tuple[Drops, float, bool]] = {
    "none is below 0": (lambda drawn, rate: drawn < rate, 0.0, False),
    "all are below 1": (lambda drawn, rate: drawn < rate, 1.0, True),
    "0 is not above any": (lambda drawn, rate: rate > drawn, 0, False),
    "all are at least 0": (lambda drawn, rate: drawn >= rate, 0.0, True),
    "none is at most -1": (lambda drawn, rate: drawn <= rate, -1.0, False),
    "all are above -1": (lambda drawn, rate: torch.gt(drawn, rate), -1.0, True),
    "none is above 1": (lambda drawn, rate: drawn > rate, 1, False),
}
UNCERTAIN: dict[str, tuple[Drops, float]] = {
    "a rate between": (lambda drawn, rate: drawn < rate, 0.1),
    "0 can be drawn": (lambda drawn, rate: drawn <= rate, 0.0),
    "0 may be all there is": (lambda drawn, rate: drawn > rate, 0.0),
    "another comparison beside it": (lambda drawn, rate: (drawn < rate) | (drawn < 0.5), 0.0),
    "another comparison before it": (lambda drawn, rate: (drawn < 0.5) | (drawn < rate), 0.0),
    "numbers that were shifted": (lambda drawn, rate: drawn.sub_(1.0) < rate, 0.0),
    "not a comparison": (lambda drawn, rate: (drawn + rate) < 0.5, float("inf")),
    "another distribution": (lambda drawn, rate: torch.randn([]) < rate, 0.0),
}


class Dropping(nn.Module):
    """Leaves its second layer out where `drops` says so."""

    def __init__(self, drops: Drops, rate: float) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)
        self.drops, self.rate = drops, rate

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        return x if self.drops(torch.rand([]), self.rate) else self.second(x)


@pytest.mark.parametrize("name", CERTAIN)
def test_a_layer_that_is_never_or_always_dropped_is_recorded_so(name: str) -> None:
    drops, rate, dropped = CERTAIN[name]
    torch.manual_seed(0)
    module, before = Dropping(drops, rate), torch.get_rng_state()
    components = record(module, torch.ones(2, 4))
    assert torch.equal(torch.get_rng_state(), before)
    names = {parameter for component in components for parameter in component.parameter_names}
    assert ("second.weight" in names) != dropped
    assert "first.weight" in names


@pytest.mark.parametrize("name", UNCERTAIN)
def test_what_a_random_number_decides_is_refused(name: str) -> None:
    with pytest.raises(TraceError, match="depends on the data"):
        record(Dropping(*UNCERTAIN[name]), torch.ones(2, 4))
