"""The folder a run leaves: everything needed to judge it again, without the machine it ran on."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from parsim.costs.feedback.history import NO_HISTORY, SUFFIX, History, read_history
from parsim.costs.loading import OwnLoading, own_loading_from
from parsim.errors import ConfigError, CostError
from parsim.files import read_json, reading, write_json_atomically, write_text_atomically
from parsim.hardware.profile import Profile, load_profile, save_profile
from parsim.model.model import Model
from parsim.plans.plan import Plan
from parsim.workflow.config import RunConfig, load_config


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
        config: RunConfig,
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

    def read_config(self) -> RunConfig:
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
