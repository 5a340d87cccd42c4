"""Inputs by name, losses and outputs by choice: what is accepted, and with which words the rest is refused."""

from __future__ import annotations

import json
import resource
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from parsim.app.config import parse_config
from parsim.errors import ModelError
from parsim.model.inputs import DTYPES, INTEGERS, ModelInput, arguments, inputs_from, ordered
from parsim.model.load import load_model
from parsim.model.model import Model
from parsim.model.objective import Objective, OutputKind, parse_objective, settle, usual_loss
from parsim.model.spec import ModelSpec
from tests.commands import Told

NAMES = st.text("abcxyz_", min_size=1, max_size=4)
SHAPES = st.lists(st.integers(1, 5), max_size=3).map(tuple)


@st.composite
def model_inputs(draw: st.DrawFn) -> ModelInput:
    dtype = draw(st.sampled_from(DTYPES))
    low = draw(st.integers(-3, 3)) if dtype in INTEGERS and dtype != "uint8" else 0
    high = draw(st.none() | st.integers(low + 1, low + 9)) if dtype in INTEGERS else None
    return ModelInput(draw(NAMES), draw(SHAPES), dtype=dtype, high=high, low=low, constant=draw(st.booleans()))


@given(entry=model_inputs())
def test_inputs_are_read_back(entry: ModelInput) -> None:
    assert ModelInput.from_dict(entry.name, json.loads(json.dumps(entry.to_dict()))) == entry


@given(
    loss=st.sampled_from(["cross_entropy", "mse", "own", "my.module:LOSS"]),
    output=st.none() | st.text(max_size=6),
    classes_dim=st.none() | st.integers(-3, 3),
    target=st.none() | model_inputs(),
)
def test_objectives_are_read_back(loss: str, output: str | None, classes_dim: int | None, target: ModelInput | None) -> None:
    named = None if target is None else ModelInput.from_dict("target", target.to_dict())
    objective = Objective(loss, output, classes_dim, named)
    assert parse_objective(str(objective)) == objective


@given(entries=st.lists(model_inputs(), min_size=1, max_size=4, unique_by=lambda entry: entry.name))
def test_a_spec_with_inputs_is_read_back(entries: list[ModelInput]) -> None:
    spec = ModelSpec(name="m:f", inputs=tuple(entries), loss="mse", output="a", target=None)
    assert ModelSpec.from_dict(json.loads(json.dumps(spec.to_dict()))) == spec


def test_a_spec_without_inputs_is_written_as_before() -> None:
    spec = ModelSpec(name="mlp", args=(("width", 3),), input_shape=(4,))
    assert spec.to_dict() == {"name": "mlp", "args": {"width": 3}, "input_shape": [4]}


def test_a_batch_of_zeros_that_nobody_reads_takes_no_memory() -> None:
    """torch 2.13: `zeros` of 2^30 numbers took 4 GB, and a batch that nobody reads takes none here. More than any machine has
    is a message."""
    torch = pytest.importorskip("torch")
    before = _resident_bytes()
    batch = ModelInput("x", (2**29,)).zeros(2, torch.float32)
    assert (batch.shape, batch.dtype) == ((2, 2**29), torch.float32)
    assert _resident_bytes() - before < 2**28
    assert not batch[1, -5:].any()
    for dtype in DTYPES:
        assert ModelInput("x", (3,), dtype=dtype).zeros(2, torch.float64).dtype == (
            torch.float64 if dtype == "float32" else getattr(torch, dtype)
        )
    with pytest.raises(ModelError, match=r"a batch of 1048576 of input x is too large here"):
        ModelInput("x", (2**33,), dtype="complex128").zeros(2**20, torch.float32)


def _resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


def test_names_with_dots_become_dicts_and_lists() -> None:
    table = {"batch": {"ids": {"shape": [8], "dtype": "int64"}, "states": [{"shape": [2]}, {"shape": [3]}]}, "x": {"shape": []}}
    entries = inputs_from(table)
    assert [entry.name for entry in entries] == ["batch.ids", "batch.states.0", "batch.states.1", "x"]
    assert arguments({entry.name: entry.shape for entry in entries}) == {
        "batch": {"ids": (8,), "states": [(2,), (3,)]},
        "x": (),
    }


def test_inputs_with_a_batch_come_first() -> None:
    entries = ordered(inputs_from({"table": {"shape": [4], "constant": True}, "x": {"shape": [3]}}))
    assert [entry.name for entry in entries] == ["x", "table"]


KINDS = {"a": OutputKind((2, 10), "float32"), "b": OutputKind((2, 3), "float32")}


@pytest.mark.parametrize(
    ("outputs", "objective", "wanted", "message"),
    [
        (KINDS, None, None, r'returns 2 tensors, "a" float32 \[2, 10\].*output = "a"'),
        ({**KINDS, "b": OutputKind((), "float32")}, None, None, r'or another.*output = "b" is one number: the loss'),
        (KINDS, None, "c", r'returns no "?\'?c.*it returns "a"'),
        ({}, None, None, "returns no tensor"),
        ({"": OutputKind((2,), "float32")}, Objective("cross_entropy"), None, "one number per sample.*bce"),
        ({"": OutputKind((2, 1), "float32")}, Objective("cross_entropy"), None, "needs at least 2.*mse"),
        ({"": OutputKind((2, 4), "int64")}, Objective("mse"), None, "no gradient; mse needs floating-point"),
        ({"": OutputKind((3, 4), "float32")}, Objective("mse"), None, "dim 0 is not the batch"),
        ({"": OutputKind((2, 4, 8, 8), "float32")}, Objective("cross_entropy"), None, r"classes_dim = 0 \(4 classes"),
        ({"": OutputKind((2, 4), "float32")}, Objective("cross_entropy", classes_dim=3), None, "0 to 0, or -1"),
        ({"": OutputKind((2, 4), "float32")}, Objective("mse", classes_dim=0), None, "drop classes_dim"),
        ({"": OutputKind((2, 4, 8), "float32")}, Objective("own"), None, "one number per sample"),
        (KINDS, Objective("own"), None, 'loss = "own" needs its loss'),
        (KINDS, Objective("math:hypot"), None, "its targets are unknown"),
        ({"": OutputKind((2, 4), "float32")}, Objective("mse", target=ModelInput("target", (3,))), None, "drop target"),
    ],
)
def test_losses_that_do_not_fit(
    outputs: dict[str, OutputKind], objective: Objective | None, wanted: str | None, message: str
) -> None:
    with pytest.raises(ModelError, match=message):
        settle("net", outputs, 2, objective, tokens=False, output=wanted)


@pytest.mark.parametrize(
    ("outputs", "loss", "shape"),
    [
        ({"": OutputKind((), "float32")}, "own", None),
        ({"loss": OutputKind((2,), "float32"), "logits": OutputKind((2, 4), "float32")}, "own", None),
        ({"logits": OutputKind((2, 4), "float32"), "more": OutputKind((2, 9), "float32")}, "cross_entropy", ()),
        ({"": OutputKind((2, 1), "float32")}, "mse", (1,)),
    ],
)
def test_losses_nobody_chose(outputs: dict[str, OutputKind], loss: str, shape: tuple[int, ...] | None) -> None:
    found = settle("net", outputs, 2, None, tokens=False)
    assert str(found.objective) == loss
    assert (None if found.target is None else found.target.shape) == shape

    pair = {"0": OutputKind((2, 7, 40), "float32"), "1": OutputKind((), "float32")}
    number = settle("net", pair, 2, None, tokens=True, output="1")
    assert (number.objective, number.target) == (Objective("own", output="1"), None)
    maps = settle("net", {"": OutputKind((2, 4, 8, 9), "float32")}, 2, Objective("cross_entropy", classes_dim=0), tokens=False)
    assert maps.target == ModelInput("target", (8, 9), dtype="int64", high=4)


def test_the_run_file_describes_inputs_and_loss(tmp_path: Path) -> None:
    text = """
[model]
name = "m:f"
inputs = { x = { shape = [3, 32, 32] }, t = { shape = [], dtype = "int64", high = 1000 } }
loss = "cross_entropy"
output = "logits"
classes_dim = 0
[cluster]
profile = "dgx1-v100-32gb"
[training]
global_batch = 8
"""
    config = parse_config(text)
    assert config.model_spec == ModelSpec(
        name="m:f",
        inputs=(ModelInput("x", (3, 32, 32)), ModelInput("t", (), dtype="int64", high=1000)),
        loss="cross_entropy",
        output="logits",
        classes_dim=0,
    )
    assert parse_config(config.to_toml()) == config


# Every answer names its loss, a run file chooses it, and an output that leaves it open is refused.

ASKED = ["mlp", "--on", "dgx1-v100-32gb", "--batch", "64", "--set", "plan.strategy=dp"]


@pytest.fixture
def printed(told: Told) -> Callable[..., str]:
    return lambda *arguments: told(*arguments)[1]


@pytest.mark.slow
@pytest.mark.parametrize("command", ["plan", "simulate"])
def test_the_answer_names_the_loss(command: str, printed: Callable[..., str]) -> None:
    assert json.loads(printed(command, *ASKED, "--json"))["loss"] == "cross_entropy"
    assert "loss: cross_entropy" in printed(command, *ASKED).splitlines()


def test_a_chosen_loss_is_named_and_traced(printed: Callable[..., str]) -> None:
    pytest.importorskip("torch")
    assert json.loads(printed("plan", *ASKED, "--set", 'model.loss="mse"', "--json"))["loss"] == "mse"


def test_a_saved_model_keeps_its_loss(tmp_path: Path) -> None:
    model = load_model(ModelSpec(name="mlp"))
    model.save(tmp_path / "model.json")
    assert Model.load(tmp_path / "model.json").loss == model.loss == "cross_entropy"


@pytest.mark.parametrize(
    ("output", "tokens", "loss"),
    [((1,), False, "mse"), ((), False, "mse"), ((10,), False, "cross_entropy"), ((128, 50304), True, "cross_entropy")],
)
def test_usual_losses(output: tuple[int, ...], tokens: bool, loss: str) -> None:
    assert usual_loss("net", output, tokens=tokens) == loss


@pytest.mark.parametrize("output", [(3, 32, 32), (20, 64), (2, 3, 4, 5)])
def test_an_output_that_leaves_the_loss_open_is_refused_with_the_choices(output: tuple[int, ...]) -> None:
    with pytest.raises(ModelError, match=r"the loss is ambiguous.*mse.*cross_entropy.*package\.module:ROW"):
        usual_loss("unet", output, tokens=False)


def test_a_unet_is_not_trained_by_a_cross_entropy_over_its_width() -> None:
    torch = pytest.importorskip("torch")
    import parsim
    from tests.execute.operator_modules import UNet

    with pytest.raises(ModelError, match=r"UNet returns \[3, 32, 32\] per sample"):
        parsim.plan(UNet(), cluster="dgx1-v100-32gb", global_batch=64, example_inputs=torch.randn(2, 3, 32, 32))
    chosen = {"model.loss": "mse", "plan.strategy": "dp"}
    images = torch.randn(2, 3, 32, 32)
    answer = parsim.plan(UNet(), cluster="dgx1-v100-32gb", global_batch=64, example_inputs=images, settings=chosen)
    assert answer.to_dict()["loss"] == "mse"
    assert "loss: mse" in answer.lines()
