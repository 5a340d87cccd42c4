"""Who may train in a run folder, and whether a training there can go on as it is asked to."""

from __future__ import annotations

import contextlib
import itertools
import shlex
import shutil
import signal
import sys
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from parsim.app.config import Question, load_config
from parsim.app.config_text import references
from parsim.costs.history import SUFFIX
from parsim.costs.loading import OwnLoading, own_loading_from
from parsim.errors import ConfigError, CostError, ParsimError
from parsim.execute.checkpoint.checkpoint import Checkpoint, discard_unfinished, has_checkpoints, latest_checkpoint
from parsim.execute.job import SCHEDULES, SCORE
from parsim.execute.processes.launch import signals_as_exit
from parsim.execute.processes.output import sole_user
from parsim.files import (
    PARTIAL,
    PRIVATE,
    make_private,
    parse_json,
    parse_toml,
    read_json,
    read_regular,
    read_text,
    reading,
    write_json_atomically,
    write_text_atomically,
)
from parsim.hardware.profile import save_profile
from parsim.plans.plan import Plan

if TYPE_CHECKING:
    from parsim.app.prediction import Prediction

# The folder a run leaves: everything needed to judge it again, without the machine it ran on.


RUN = "run"
"""Name of the only run of a job; that of the folder of its records."""


class FileBelow:
    """An attribute of a folder: the path of a file below its `path`."""

    def __init__(self, *parts: str) -> None:
        self.parts = parts

    def __get__(self, folder: Any, owner: type) -> Path:
        return Path(folder.path, *self.parts)


@dataclass(frozen=True)
class RunFolder:
    """Names of the files of one run below `path`.

    `loading` says what reading a dataset of the user's own costs, `timeline` is the measured step that is the median of the
    recorded ones, `best` the checkpoint with the best validation score.
    """

    path: Path

    config = FileBelow("config.toml")
    model = FileBelow("model.json")
    plan = FileBelow("plan.json")
    profile = FileBelow("profile.json")
    history = FileBelow(f"profile{SUFFIX}")
    loading = FileBelow("loading.json")
    job = FileBelow("job.json")
    result = FileBelow("result.json")
    timeline = FileBelow("timeline.json.gz")
    predicted_timeline = FileBelow("predicted-timeline.json.gz")
    trace = FileBelow("trace.json")
    report = FileBelow("report.html")
    environment = FileBelow("environment.json")
    checkpoints = FileBelow("checkpoints")
    best = FileBelow("best", "checkpoints")

    def records(self, run: str) -> Path:
        """What the ranks wrote down of one run of the job."""
        return self.path / run

    def write_question(self, prediction: Prediction) -> None:
        """Write the question, with the profile and plan that answer it, before anything runs."""
        problem = prediction.problem
        make_private(self.path)
        write_text_atomically(self.config, prediction.question.to_toml())
        problem.model.save(self.model)
        prediction.plan.save(self.plan)
        save_profile(problem.cluster.profile, self.profile)
        problem.history.save(self.history)
        if problem.loading is None:
            self.loading.unlink(missing_ok=True)
        else:
            write_json(self.loading, problem.loading.to_dict())

    def read_config(self) -> Question:
        """The resolved config, with the profile and plan of the same folder. Raises ConfigError if this is not a run folder."""
        if not self.config.is_file():
            raise ConfigError(
                f"{self.path} is not a run folder: it holds no {self.config.name}; give the --out of `parsim run`"
            )
        return load_config(self.config, calls_model=False)

    def read_loading(self) -> OwnLoading | None:
        """What was known of loading when the question was asked. Raises ConfigError for a file that was changed."""
        if not self.loading.is_file():
            return None
        with reading(f"{self.loading} is not what was measured of loading", ConfigError, "simulate or run again"):
            try:
                return own_loading_from(read_json(self.loading))
            except CostError as error:
                raise ValueError(str(error)) from error


def new_folder(path: Path | None, name: str) -> RunFolder:
    """`path`, or runs/NAME, runs/NAME-2, ... that is made here. Raises ConfigError if `path` holds something."""
    if path is not None:
        if path.exists() and (not path.is_dir() or any(path.iterdir())):
            raise ConfigError(f"{path} exists and is not empty; give another --out, or --resume to continue it")
        return RunFolder(path)
    for number in itertools.count(1):
        candidate = Path("runs") / (name if number == 1 else f"{name}-{number}")
        with contextlib.suppress(FileExistsError):
            candidate.mkdir(PRIVATE, parents=True)
            break
    return RunFolder(candidate)


def write_json(path: Path, document: dict[str, Any]) -> None:
    """Atomically: a stopped process leaves the old file or the new one."""
    write_json_atomically(path, document, indent=1)


SAME = ("global_batch", "seed", "dataset", "data_root", "dtype", "optimizer", "allow_coupled_loss")
"""Keys of [training] with which another training begins."""
MENTIONED = (
    "learning_rate",
    "groups",
    "precision",
    "master_weights",
    "optimizer_args",
    "weight_decay",
    "no_weight_decay",
    "schedule",
    "clip_norm",
    "ema",
)
"""Keys of [training] that may change on the way; a message names them."""


@contextlib.contextmanager
def held(folder: RunFolder) -> Iterator[None]:
    """Nobody else trains in the folder meanwhile; a process that dies lets go of it.

    Raises: ConfigError: another process trains there.
    """
    make_private(folder.path)
    with sole_user(folder.path) as is_sole:
        if not is_sole:
            raise ConfigError(
                f"another process is training in {folder.path}; wait until it has ended, end it, or give another --out"
            )
        yield


@contextlib.contextmanager
def ending_told(folder: RunFolder, steps: int) -> Iterator[None]:
    """Where the user or the system ends the process inside, say where the training of `steps` steps stands."""
    with signals_as_exit():
        try:
            yield
        except (KeyboardInterrupt, SystemExit) as ending:
            number = signal.SIGINT if isinstance(ending, KeyboardInterrupt) else int(ending.code or 0) - 128
            name = signal.Signals(number).name if number in set(signal.Signals) else "an exit"
            text = f"parsim: ended by {name}. {what_is_left(folder, steps)}"
            print(text, file=sys.stderr, flush=True)
            ending.add_note(text)  # told
            raise


@dataclass(frozen=True, slots=True, kw_only=True)
class Resumption:
    """Where a training goes on.

    Attributes: step: steps that are done. is_finished: there is nothing left to do, and a result. warnings: for the user.
    """

    step: int
    is_finished: bool
    warnings: tuple[str, ...]


def resumption(folder: RunFolder, config: Question, steps: int) -> Resumption:
    """Whether the training of the folder can go on as `config` asks, up to step `steps`, and from where.

    Removes what a killed training left half written. Called while the folder is held.

    Raises: ConfigError: no run folder, a training of something else, checkpoints that are all damaged, or one beyond `steps`.
    """
    before = folder.read_config()
    _check_same(folder, before, config)
    remove_partial_files(folder)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        checkpoint = latest_checkpoint(folder.checkpoints)
    texts = [str(warning.message) for warning in caught]
    if checkpoint is None and has_checkpoints(folder.checkpoints):
        raise ConfigError(
            f"no checkpoint in {folder.checkpoints} can be read ({texts[0] if texts else 'none is complete'}); to start "
            "again, give another --out, or remove that folder"
        )
    then, now = before.training, config.training
    for key in MENTIONED:
        if getattr(then, key) != getattr(now, key):
            texts.append(f"training.{key} was {getattr(then, key)}, and is {getattr(now, key)} from here on")
    # A schedule over the whole training has other rates where the training has become longer.
    was, length = (f"{part.epochs} epochs" if part.steps is None else f"{part.steps} steps" for part in (then, now))
    over = "" if now.schedule is None else SCHEDULES[now.schedule.name].length
    if now.schedule is not None and over and over not in dict(now.schedule.arguments) and was != length:
        texts.append(
            f"training.schedule.{over} is left out: {now.schedule.name} was over {was}, and is over {length} from here on, "
            "with other rates; set it to keep them"
        )
    if checkpoint is None:
        texts.append(f"{folder.path} holds no checkpoint yet: the training starts at step 0")
        return Resumption(step=0, is_finished=False, warnings=tuple(texts))
    step = checkpoint.step
    if step > steps:
        raise ConfigError(
            f"the training in {folder.path} has made {step} steps already, and {steps} are asked for; set training.steps "
            f"above {step} to continue, or give another --out"
        )
    is_finished = folder.result.is_file() and step == steps
    with contextlib.suppress(OSError, ValueError, AttributeError):  # an early stop is in the result, where it can be read
        is_finished |= parse_json(read_regular(folder.result), allow_nan=True).get("stopped_early_at") == step
    if is_finished:
        texts.append(f"the training in {folder.path} has made its {steps} steps; set training.steps higher to continue it")
    return Resumption(step=step, is_finished=is_finished, warnings=tuple(texts))


def _check_same(folder: RunFolder, before: Question, config: Question) -> None:
    old, new = _identity(before), _identity(config)
    if before.model.name == config.model.name:  # two models of one name differ in arguments or inputs
        for identity, question in ((old, before), (new, config)):
            identity |= {f"model.{key}": value for key, value in question.model_spec.to_dict().items()}
    changes = [
        f"{key} was {old.get(key)!r}, now {new.get(key)!r}"
        for key in dict.fromkeys([*old, *new])
        if old.get(key) != new.get(key)
    ]
    if before.model.name != config.model.name:
        changes.append(f"model was {before.model.name}, now {config.model.name}")
    if changes:
        raise ConfigError(
            f"{folder.path} holds another training ({'; '.join(changes)}); give the same settings to continue, or give another "
            "--out"
        )


def _identity(question: Question) -> dict[str, Any]:
    """What of [training] decides which training this is: the samples, the optimizers, and the score of the best checkpoint."""
    training, looks = question.training, question.training.evaluation
    validation = monitor = "not asked for"
    if looks is not None:
        validation = "left out" if looks.validation is None else f"{looks.validation:g}"
        averaged = ", of the averaged weights" if training.ema is not None and training.ema.evaluate else ""
        monitor = f"{looks.monitor} ({'max' if looks.larger_is_better else 'min'}{averaged})"
    return {
        **{f"training.{key}": getattr(training, key) for key in SAME},
        "training.evaluation.validation": validation,
        "training.groups (parameters and optimizer)": training.optimizer_of_group,
        "training.evaluation.monitor": monitor,
    }


def forget_results(folder: RunFolder) -> None:
    """Remove what an earlier part of the training left: times and results of a plan that may be another from here on."""
    shutil.rmtree(folder.records(RUN), ignore_errors=True)
    for path in (folder.result, folder.path / SCORE, folder.path / "decisions.json"):
        path.unlink(missing_ok=True)


def is_measured(folder: RunFolder, plan: Plan, *, step: int, steps: int) -> bool:
    """Whether all ranks of a training under this plan that ends at `steps`, and is at `step`, have left their records and its
    score, so that none has to run again."""
    records = (folder.records(RUN) / f"rank{rank}.json" for rank in range(plan.world_size))
    with contextlib.suppress(OSError, ValueError, AttributeError, ParsimError):
        last = read_json(folder.path / SCORE).get("stopped_early_at") or steps
        return bool(last == step) and all(path.is_file() for path in records) and Plan.load(folder.plan) == plan
    return False


def remove_partial_files(folder: RunFolder) -> None:
    """Remove what killed processes left half written in the folder. Called while it is held, and nobody writes."""
    for path in (*folder.path.glob(f".*{PARTIAL}"), *folder.path.glob(f"*/.*{PARTIAL}")):
        with contextlib.suppress(OSError):
            path.unlink()
    discard_unfinished(folder.checkpoints)
    discard_unfinished(folder.best)


def what_is_left(folder: RunFolder, steps: int) -> str:
    """After a training has failed or was ended: its last checkpoint, and the command that goes on. Removes the rest."""
    remove_partial_files(folder)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        checkpoint: Checkpoint | None = latest_checkpoint(folder.checkpoints)
    if not folder.path.is_dir():
        return "The folder is gone; if it was moved, continue there: parsim run FOLDER/config.toml --out FOLDER --resume."
    if checkpoint is None and has_checkpoints(folder.checkpoints):
        return f"No checkpoint in {folder.checkpoints} can be read; --resume says why."
    if checkpoint is None:
        return f"No checkpoint was written: {folder.path} holds no checkpoint to continue from (see --checkpoint-every)."
    command = ["parsim", "run", str(folder.config), "--out", str(folder.path), "--resume"]
    with contextlib.suppress(OSError, ValueError):
        command += ["--allow-code"] if references(parse_toml(read_text(folder.config))) else []
    where = f"The checkpoint of step {checkpoint.step} of {steps} is in {checkpoint.folder}"
    return f"{where}; continue with: {shlex.join(command)}"
