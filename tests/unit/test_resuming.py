"""Whether a training can go on as it is asked to, and what is told of one that is ended. Nothing is launched here."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from parsim.app.config import Question, load_config
from parsim.app.run_folder import RunFolder, ending_told, resumption
from parsim.app.train import check_options
from parsim.errors import ConfigError

RUN = """\
[model]
name = "mlp"
[cluster]
profile = "dgx1-v100-32gb"
devices = 2
[training]
global_batch = 16
{training}
[plan]
strategy = "dp"
"""
COSINE = 'steps = 20\n[training.schedule]\nname = "CosineAnnealingLR"'
LOOKS = 'steps = 20\n[training.evaluation]\nmetrics = ["accuracy"]'


def config_of(folder: Path, training: str) -> Question:
    file = folder / "RUN.toml"
    file.write_text(RUN.format(training=training))
    return load_config(file)


def going_on(folder: Path, before: str, after: str) -> str:
    """What is told of a training that goes on with other keys."""
    kept = RunFolder(folder / "kept")
    kept.path.mkdir()
    kept.config.write_text(config_of(folder, before).to_toml())
    return "\n".join(resumption(kept, config_of(folder, after), 20).warnings)


@pytest.mark.parametrize(
    ("before", "after", "told"),
    [
        (COSINE, COSINE.replace("20", "40"), "T_max is left out: CosineAnnealingLR was over 20 steps, and is over 40 steps"),
        (COSINE, COSINE.replace("steps = 20", "epochs = 3"), "was over 20 steps, and is over 3 epochs from here on"),
        (COSINE, COSINE, ""),
        (f"{COSINE}\nT_max = 20", f"{COSINE}\nT_max = 20".replace("steps = 20", "steps = 40"), ""),
        ("steps = 20", "steps = 40", ""),
    ],
)
def test_a_schedule_over_the_whole_training_changes_with_its_length(tmp_path: Path, before: str, after: str, told: str) -> None:
    found = going_on(tmp_path, before, after)
    assert told in found
    assert bool(told) == ("training.schedule" in found)


@pytest.mark.parametrize(
    ("after", "told"),
    [
        (f'{LOOKS}\nmonitor = "accuracy"', r"was 'loss \(min\)', now 'accuracy \(max\)'"),
        (f'{LOOKS}\nmode = "max"', r"was 'loss \(min\)', now 'loss \(max\)'"),
        (
            f"ema = {{ decay = 0.9, evaluate = true }}\n{LOOKS}",
            r"was 'loss .*', now 'loss \(min, of the averaged weights\)'",
        ),
    ],
)
def test_scores_of_two_kinds_are_never_compared(tmp_path: Path, after: str, told: str) -> None:
    with pytest.raises(ConfigError, match=f"training.evaluation.monitor {told}"):
        going_on(tmp_path, LOOKS, after)


def test_another_model_of_the_same_name_is_refused_with_what_differs(tmp_path: Path) -> None:
    """Before, the message said "model was mlp, now mlp"."""
    with pytest.raises(ConfigError, match=r"\(model.args was \{'width': 64\}, now \{\}\)"):
        going_on(tmp_path, "steps = 20\n[model.args]\nwidth = 64", "steps = 20")


def test_a_negative_distance_of_checkpoints_is_refused() -> None:
    with pytest.raises(ConfigError, match="checkpoint_every = -1: must be >= 0"):
        check_options(adaptive=False, resume=False, out=None, checkpoint_every=-1)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP, signal.SIGINT], ids=lambda number: number.name)
def test_a_training_that_is_ended_between_two_launches_says_so(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], number: signal.Signals
) -> None:
    """While another plan is searched, or the results are written: no rank runs then."""
    given = signal.getsignal(signal.SIGHUP)
    signal.signal(signal.SIGHUP, signal.SIG_DFL)  # under nohup it is ignored, and stays so
    before = {each: signal.getsignal(each) for each in (signal.SIGTERM, signal.SIGHUP, signal.SIGINT)}
    expected = KeyboardInterrupt if number == signal.SIGINT else SystemExit
    with pytest.raises(expected), ending_told(RunFolder(tmp_path), 20):
        os.kill(os.getpid(), number)
    after = {each: signal.getsignal(each) for each in before}
    signal.signal(signal.SIGHUP, given)
    assert capsys.readouterr().err.startswith(f"parsim: ended by {number.name}. No checkpoint was written")
    assert after == before
