"""Who may train in a run folder, and whether a training there can go on as it is asked to."""

from __future__ import annotations

import contextlib
import shlex
import shutil
import signal
import sys
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from parsim.app.config import Question, load_config
from parsim.app.config_text import references
from parsim.costs.history import NO_HISTORY, SUFFIX, History, read_history
from parsim.costs.loading import OwnLoading, own_loading_from
from parsim.errors import ConfigError, CostError
from parsim.execute.checkpoint.checkpoint import Checkpoint, discard_unfinished, has_checkpoints, latest_checkpoint
from parsim.execute.job import SCHEDULES, SCORE
from parsim.execute.processes.launch import signals_as_exit
from parsim.execute.processes.output import sole_user
from parsim.files import (
    PARTIAL,
    parse_json,
    parse_toml,
    read_json,
    read_regular,
    read_text,
    reading,
    write_json_atomically,
    write_text_atomically,
)
from parsim.hardware.compose import load_profile
from parsim.hardware.profile import Profile, save_profile
from parsim.model.model import Model
from parsim.model.spec import ModelSpec
from parsim.plans.plan import Plan

# The folder a run leaves: everything needed to judge it again, without the machine it ran on.


@dataclass(frozen=True, slots=True)
class RunFolder:
    """Names of the files of one run below `path`."""

    path: Path

    @property
    def config(self) -> Path:
        return self.path / "config.toml"

    @property
    def model(self) -> Path:
        return self.path / "model.json"

    @property
    def plan(self) -> Path:
        return self.path / "plan.json"

    @property
    def profile(self) -> Path:
        return self.path / "profile.json"

    @property
    def history(self) -> Path:
        return self.path / f"profile{SUFFIX}"

    @property
    def loading(self) -> Path:
        """What reading a dataset of the user's own costs; only of such a run."""
        return self.path / "loading.json"

    @property
    def job(self) -> Path:
        return self.path / "job.json"

    @property
    def result(self) -> Path:
        return self.path / "result.json"

    @property
    def timeline(self) -> Path:
        """The measured step that is the median of the recorded ones."""
        return self.path / "timeline.json.gz"

    @property
    def predicted_timeline(self) -> Path:
        return self.path / "predicted-timeline.json.gz"

    @property
    def trace(self) -> Path:
        return self.path / "trace.json"

    @property
    def report(self) -> Path:
        return self.path / "report.html"

    @property
    def environment(self) -> Path:
        return self.path / "environment.json"

    @property
    def checkpoints(self) -> Path:
        return self.path / "checkpoints"

    @property
    def best(self) -> Path:
        """The checkpoint with the best validation score."""
        return self.path / "best" / "checkpoints"

    def records(self, run: str) -> Path:
        """What the ranks wrote down of one run of the job."""
        return self.path / run

    def write_question(
        self,
        config: Question,
        model: Model,
        plan: Plan,
        profile: Profile,
        history: History = NO_HISTORY,
        loading: OwnLoading | None = None,
    ) -> None:
        """Write the question, with the profile and plan that answer it, before anything runs."""
        self.path.mkdir(parents=True, exist_ok=True)
        write_text_atomically(self.config, config.to_toml())
        model.save(self.model)
        plan.save(self.plan)
        save_profile(profile, self.profile)
        history.save(self.history)
        if loading is None:
            self.loading.unlink(missing_ok=True)
        else:
            write_json(self.loading, loading.to_dict())

    def read_config(self) -> Question:
        """The resolved config, with the profile and plan of the same folder. Raises ConfigError if this is not a run folder."""
        if not self.config.is_file():
            raise ConfigError(
                f"{self.path} is not a run folder: it holds no {self.config.name}; give the --out of `parsim run`"
            )
        return load_config(self.config, calls_model=False)

    def read_profile(self) -> Profile:
        return load_profile(str(self.profile))

    def read_loading(self) -> OwnLoading | None:
        """What was known of loading when the question was asked. Raises ConfigError for a file that was changed."""
        if not self.loading.is_file():
            return None
        with reading(f"{self.loading} is not what was measured of loading", ConfigError, "simulate or run again"):
            try:
                return own_loading_from(read_json(self.loading))
            except CostError as error:
                raise ValueError(str(error)) from error

    def read_history(self, profile: Profile) -> History:
        """The validations that were known when the folder's question was asked."""
        return read_history(self.history, profile)


def new_folder(path: Path | None, name: str) -> RunFolder:
    """`path`, or runs/NAME, runs/NAME-2, ... that is made here. Raises ConfigError if `path` holds something."""
    if path is not None:
        if path.exists() and (not path.is_dir() or any(path.iterdir())):
            raise ConfigError(f"{path} exists and is not empty; give another --out, or --resume to continue it")
        return RunFolder(path)
    number = 1
    while True:
        candidate = Path("runs") / (name if number == 1 else f"{name}-{number}")
        try:
            candidate.mkdir(parents=True)
            return RunFolder(candidate)
        except FileExistsError:
            number += 1


def write_json(path: Path, document: dict[str, Any]) -> None:
    """Atomically: a stopped process leaves the old file or the new one."""
    write_json_atomically(path, document, indent=1)


SAME = ("global_batch", "seed", "dataset", "data_root", "dtype", "optimizer", "allow_coupled_loss")
"""Keys of [training] with which another training begins."""
TOLD = (
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

    Raises:
        ConfigError: another process trains there.
    """
    folder.path.mkdir(parents=True, exist_ok=True)
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
            print(f"parsim: ended by {name}. {what_is_left(folder, steps)}", file=sys.stderr, flush=True)
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

    Raises:
        ConfigError: no run folder, a training of something else, checkpoints that are all damaged, or one beyond `steps`.
    """
    before = folder.read_config()
    _check_same(folder, before, config)
    remove_partial_files(folder)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        found = latest_checkpoint(folder.checkpoints)
    told = [str(entry.message) for entry in caught]
    if found is None and has_checkpoints(folder.checkpoints):
        raise ConfigError(
            f"no checkpoint in {folder.checkpoints} can be read ({told[0] if told else 'none is complete'}); to start "
            "again, give another --out, or remove that folder"
        )
    for key in TOLD:
        then, now = getattr(before.training, key), getattr(config.training, key)
        if then != now:
            told.append(f"training.{key} was {then}, and is {now} from here on")
    told += _other_length(before, config)
    if found is None:
        told.append(f"{folder.path} holds no checkpoint yet: the training starts at step 0")
        return Resumption(step=0, is_finished=False, warnings=tuple(told))
    if found.step > steps:
        raise ConfigError(
            f"the training in {folder.path} has made {found.step} steps already, and {steps} are asked for; set training.steps "
            f"above {found.step} to continue, or give another --out"
        )
    is_finished = folder.result.is_file() and (found.step == steps or _stopped_at(folder) == found.step)
    if is_finished:
        told.append(f"the training in {folder.path} has made its {steps} steps; set training.steps higher to continue it")
    return Resumption(step=found.step, is_finished=is_finished, warnings=tuple(told))


def _stopped_at(folder: RunFolder) -> int | None:
    """The step at which the finished training of a folder stopped early."""
    try:
        found = parse_json(read_regular(folder.result), allow_nan=True).get("stopped_early_at")
    except (OSError, ValueError, AttributeError):
        return None
    return found if isinstance(found, int) else None


def _check_same(folder: RunFolder, before: Question, config: Question) -> None:
    changed = [(f"training.{key}", getattr(before.training, key), getattr(config.training, key)) for key in SAME]
    changed.append(("training.evaluation.validation", _held_out(before), _held_out(config)))
    then, now = before.training.optimizer_of_group, config.training.optimizer_of_group
    changed.append(("training.groups (parameters and optimizer)", then, now))
    changed.append(("training.evaluation.monitor", _followed(before), _followed(config)))
    changed += _changed_model(before.model_spec, config.model_spec)
    other = [(key, then, now) for key, then, now in changed if then != now]
    if other:
        said = "; ".join(f"{key} was {_text(then)}, now {_text(now)}" for key, then, now in other)
        raise ConfigError(
            f"{folder.path} holds another training ({said}); give the same settings to continue, or give another --out"
        )


def _changed_model(before: ModelSpec, now: ModelSpec) -> list[tuple[str, Any, Any]]:
    """What the two specs say differently, by key: two models of one name differ in arguments or inputs."""
    if before.name != now.name:
        return [("model", before, now)]
    then_said, now_said = before.to_dict(), now.to_dict()
    keys = dict.fromkeys([*then_said, *now_said])
    return [(f"model.{key}", then_said.get(key), now_said.get(key)) for key in keys]


def _held_out(config: Question) -> str:
    """What decides on which samples a training trains."""
    looks = config.training.evaluation
    if looks is None:
        return "not asked for"
    return "left out" if looks.validation is None else f"{looks.validation:g}"


def _followed(config: Question) -> str:
    """The score that decides which checkpoint is the best."""
    looks = config.training.evaluation
    if looks is None:
        return "not asked for"
    averaged = config.training.ema is not None and config.training.ema.evaluate
    return f"{looks.monitor} ({'max' if looks.larger_is_better else 'min'}{', of the averaged weights' if averaged else ''})"


def _other_length(before: Question, config: Question) -> list[str]:
    """A schedule over the whole training has other rates where the training has become longer."""
    schedule = config.training.schedule
    then, now = (
        f"{entry.training.epochs} epochs" if entry.training.steps is None else f"{entry.training.steps} steps"
        for entry in (before, config)
    )
    length = "" if schedule is None else SCHEDULES[schedule.name].length
    if schedule is None or not length or length in dict(schedule.arguments) or then == now:
        return []
    return [
        f"training.schedule.{length} is left out: {schedule.name} was over {then}, and is over {now} from here on, with other "
        f"rates; set it to keep them"
    ]


def _text(value: Any) -> str:
    return value.name if hasattr(value, "name") else repr(value)


def forget_results(folder: RunFolder, run: str) -> None:
    """Remove what an earlier part of the training left: times and results of a plan that may be another from here on."""
    shutil.rmtree(folder.records(run), ignore_errors=True)
    for path in (folder.result, folder.path / SCORE, folder.path / "decisions.json"):
        path.unlink(missing_ok=True)


def remove_partial_files(folder: RunFolder) -> None:
    """Of processes that were killed while they wrote into the folder. Called while it is held, and nobody writes."""
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
        found: Checkpoint | None = latest_checkpoint(folder.checkpoints)
    allowed: list[str] = []
    if found is None:
        return f"No checkpoint was written: {folder.path} holds no checkpoint to continue from (see --checkpoint-every)."
    with contextlib.suppress(OSError, ValueError):
        allowed = ["--allow-code"] if references(parse_toml(read_text(folder.config))) else []
    command = shlex.join(["parsim", "run", str(folder.config), "--out", str(folder.path), "--resume", *allowed])
    return f"The checkpoint of step {found.step} of {steps} is in {found.folder}; continue with: {command}"
