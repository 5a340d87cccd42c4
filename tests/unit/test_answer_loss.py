"""Every answer names its loss, a run file chooses it, and an output that leaves it open is refused."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from parsim.cli import main
from parsim.errors import ModelError
from parsim.model.load import load_model
from parsim.model.model import Model
from parsim.model.objective import usual_loss
from parsim.model.spec import ModelSpec

ASKED = ["mlp", "--on", "dgx1-v100-32gb", "--batch", "64", "--set", "plan.strategy=dp"]


@pytest.fixture
def printed(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Callable[..., str]:
    def run(*arguments: str) -> str:
        monkeypatch.setattr(sys, "argv", ["parsim", *arguments])
        with pytest.raises(SystemExit) as ended:
            main()
        assert ended.value.code == 0
        return capsys.readouterr().out

    return run


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
