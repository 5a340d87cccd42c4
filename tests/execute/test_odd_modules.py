"""Odd but realistic modules train through the executor as plain torch does, or are refused with the way round.

`odd_modules` has those that tests/matrix lacks. Each takes three steps of Adam in float64 as one rank, whole and in two
microbatches. The reference is the module's own forward, with autograd and torch's optimizer.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from typing import NamedTuple

import pytest
import torch

from experiments.common.equality import even_plan
from experiments.common.reference import train_reference
from parsim.data import dataset_for
from parsim.data.samples import order_of
from parsim.errors import ModelError, TraceError
from parsim.execute.loading import Loader
from parsim.execute.rank_run import make_streams
from parsim.execute.runtime import RankProgram
from parsim.execute.stage import StageReplica, seeded_module
from parsim.model.inputs import ModelInput
from parsim.model.load import load_model
from parsim.model.spec import ModelSpec
from parsim.plans.mesh import Mesh
from parsim.program.lower import lower
from parsim.program.placed import PlanIndex
from tests.execute.odd_modules import CLASSES, TOKENS, VOCABULARY, WIDTH
from tests.matrix.catalogue import _SEQUENCE, _VISION

STEPS, BATCH = 3, 4
CPU = torch.device("cpu")
TOLERANCE = 1e-10


class Odd(NamedTuple):
    """One module: what it takes, its loss, and which output that reads."""

    name: str
    inputs: tuple[ModelInput, ...]
    loss: str = "cross_entropy"
    output: str | None = None

    @property
    def spec(self) -> ModelSpec:
        return ModelSpec(name=f"tests.execute.odd_modules:{self.name}", inputs=self.inputs, loss=self.loss, output=self.output)


X, INPUT = ModelInput("x", (WIDTH,)), ModelInput("input", (WIDTH,))


def floats(name: str, *shape: int) -> ModelInput:
    return ModelInput(name, shape)


def whole(name: str, *shape: int, high: int, low: int = 0) -> ModelInput:
    return ModelInput(name, shape, "int64", high, low)


TOKEN = whole("tokens", TOKENS, high=VOCABULARY)
DOMAINS = (X, whole("where", high=2), whole("label", high=CLASSES))
SPOKEN = (floats("frames", 8, 4), whole("labels", 3, high=VOCABULARY, low=1))
LENGTHS = (whole("frame_lengths", high=9, low=7), whole("label_lengths", high=4, low=1))
QUICK = [
    Odd("Recomputing", (X,)),
    Odd("Spectral", (floats("x", 1, 8, 8),), "mse"),
    Odd("Rotary", (TOKEN,)),
    Odd("Speech", (*SPOKEN, *LENGTHS), "own"),
    Odd("SpeechAlone", SPOKEN, "own"),
    Odd("Domains", DOMAINS, "own"),
    Odd("Masked", (X,)),
]
REST = [
    Odd("VAE", (X, floats("noise", 4)), "own", "0"),
    Odd("FlatBags", (whole("indices", 4, high=20),)),
    Odd("NeRF", (floats("origin", 3), floats("direction", 3)), "mse"),
    Odd("KAN", (X,)),
    Odd("old_norms", (INPUT,)),
    Odd("compiled", (INPUT,)),
    Odd("Equilibrium", (X,)),
    Odd("CastInside", (X,)),
    Odd("HalfInside", (X,)),
    Odd("Teacher", (X,)),
    Odd("Quantised", (X,), "own"),
    Odd("Weighted", (X, whole("label", high=CLASSES), floats("value")), "own"),
    Odd("Hyper", (X, floats("task", 4))),
    Odd("StateSpace", (floats("x", 6, WIDTH),)),
]


DRAWING = ("VAE", "MLP", "nn.TransformerEncoder", "nn.TransformerEncoder, norm first")
NOT_TRAINED = (*DRAWING, "branch on values", "branch on values, by example")
"""Rows of the matrix that draw random numbers, of which the reference draws others, or branch on values."""


def rows() -> Iterator[object]:
    """Those of the matrix too, whose own columns stop before a step of the optimizer."""
    for odd in QUICK:
        yield pytest.param(odd.spec, id=odd.name)
    for odd in REST:
        yield pytest.param(odd.spec, id=odd.name, marks=pytest.mark.slow)
    for name, spec in (_VISION | _SEQUENCE).items():
        if name not in NOT_TRAINED:
            yield pytest.param(spec, id=name, marks=pytest.mark.slow)


@pytest.mark.filterwarnings("ignore:.*weight_norm.*:FutureWarning")
@pytest.mark.parametrize("spec", list(rows()))
def test_an_odd_module_trains_as_in_plain_torch(spec: ModelSpec) -> None:
    model = load_model(spec)
    for microbatches in (1, 2):
        plan = even_plan(spec, Mesh(), strategy="single", batch=BATCH, microbatches=microbatches)
        data = dataset_for(spec, "synthetic", root=None, split="train", seed=1)
        settings = {"optimizer": "adam", "learning_rate": 1e-2, "dtype": torch.float64, "seed": 1}
        expected = train_reference(spec, plan, data, steps=STEPS, model=model, **settings)  # type: ignore[arg-type]
        layout = PlanIndex(plan, model)
        stage = StageReplica(spec, layout, 0, device=CPU, **settings)  # type: ignore[arg-type]
        with closing(make_streams(CPU)) as streams:
            program = RankProgram(lower(plan, model), stage, streams, {})
            loader = Loader(data, order_of(data, BATCH, 1), layout, 0, dtype=torch.float64, device=CPU)
            losses = [program.step(loader.batch(step), None, script=program.script(step))[0] / BATCH for step in range(STEPS)]
            loader.close()
        state = stage.state()
        assert losses == pytest.approx(expected.losses, abs=TOLERANCE)
        assert state.weights.keys() == expected.parameters.keys()
        for name, weight in expected.parameters.items():
            assert torch.allclose(state.weights[name], weight, rtol=0, atol=TOLERANCE), name
        for name, buffer in state.buffers.items():
            assert torch.allclose(buffer, expected.buffers[0][name], rtol=0, atol=TOLERANCE), name


@pytest.mark.parametrize(
    ("odd", "message"),
    [
        (Odd("Hooked", (X,)), r"second \(Linear\) has a hook on its backward .*autograd\.Function"),
        (Odd("GradientHook", DOMAINS, "own"), r"registers a hook on a tensor at .*odd_modules\.py:\d+ `turned\.register_hook"),
        (Odd("Penalised", (X,), "own"), r"takes gradients inside its forward \(grad\) at .*`\(gradient,\) = "),
        (
            Odd("Batched", (X,)),
            r"calls its parts otherwise for 3 samples than for 2 \(a loop over the samples\?\).*whole batch",
        ),
        (Odd("SpeechInARow", (*SPOKEN, *LENGTHS), "own"), r"CTC loss of targets in one row at .*\[batch, longest\]"),
    ],
    ids=lambda value: value.name if isinstance(value, Odd) else "",
)
def test_what_a_step_would_leave_out_is_refused(odd: Odd, message: str) -> None:
    with pytest.raises(TraceError, match=message):
        load_model(odd.spec)


def test_complex_buffers_keep_their_imaginary_part() -> None:
    """torch 2.13: `module.to(torch.float64)` drops the imaginary part of complex buffers; `module.double()` keeps it, as is
    done here."""
    for dtype in (torch.float32, torch.float64):
        module = seeded_module(QUICK[2].spec, 0, dtype, CPU)
        assert module.turns.dtype == torch.complex64
        assert module.head.weight.dtype == dtype


def test_complex_parameters_are_priced_as_pairs_and_refused_by_a_run() -> None:
    spec = Odd("Imaginary", (X,)).spec
    turn = next(parameter for parameter in load_model(spec).parameters if parameter.name == "turn")
    assert (turn.elements, turn.element_bytes) == (2 * WIDTH, 4)
    with pytest.raises(ModelError, match=r"parameter turn of Imaginary is complex .*torch\.view_as_complex\(self\.turn\)"):
        seeded_module(spec, 0, torch.float32, CPU)


def test_ctc_counts_whole_targets_and_says_so() -> None:
    model = load_model(QUICK[3].spec)
    assert model.assumptions == ("CTC counted as if every target were as long as its row (the root module)",)
