"""The folder of a running calibration, next to its profile; a later call resumes from its files.

It belongs to one request on one device under one version of torch: times taken under different ones are never mixed.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from calibration.rounds.request import CalibrationRequest
from calibration.rounds.turns import TURNS, read_progress
from parsim.errors import ConfigError
from parsim.execute.processes.machine import describe_environment, gpu_names
from parsim.files import lock, read_json, reading, write_text_atomically

Leftover = Literal["use", "require", "discard"]
"""What to do with a stopped calibration: go on with it if there is one, insist on one, or throw it away."""

SCHEMA_VERSION = 1
WORDS = {
    "schema_version": "way of keeping turns",
    "request": "request (models, batches, ranks, ...)",
    "processor": "processor",
    "cores": "number of cores",
    "gpus": "GPUs",
    "torch": "version of torch",
}


@dataclass(frozen=True, slots=True)
class WorkFolder:
    """`mine.calibration/` beside `mine.json`: JOB (the request), the models, START and turns of the ranks, STATES."""

    path: Path

    @classmethod
    def of(cls, out: Path) -> WorkFolder:
        return cls(out.with_name(f"{out.stem}.calibration").absolute())

    @property
    def job(self) -> Path:
        return self.path / "job.json"

    @property
    def has_turns(self) -> bool:
        return any(self.path.glob(TURNS))

    def remove(self) -> None:
        shutil.rmtree(self.path)

    def save_states(self, before: Mapping[str, Any], after: Mapping[str, Any] | None) -> None:
        """The machine's state before (and after) what is now measured, for every time the calibration was started."""
        number = len(list(self.path.glob("state-*.json"))) - (after is not None)
        write_text_atomically(self.path / f"state-{number:03d}.json", json.dumps([before, after]))

    def states(self) -> list[list[dict[str, Any]]]:
        """Of every start that came to its end: before and after."""
        found = [json.loads(path.read_text()) for path in sorted(self.path.glob("state-*.json"))]
        return [states for states in found if states[1] is not None]


@contextlib.contextmanager
def alone(out: Path) -> Iterator[None]:
    """Nobody else calibrates into `out` meanwhile; a process that dies lets go of it. Raises ConfigError if somebody does."""
    path = out.with_name(f"{out.stem}.calibration.lock").absolute()
    with path.open("w") as file:
        try:
            ours = lock(file.fileno()) and os.path.samestat(os.fstat(file.fileno()), path.stat())
        except OSError:  # just let go of and gone
            ours = False
        if not ours:
            raise ConfigError(f"another calibration is writing {out}; wait until it has ended, or choose another --out")
        try:
            yield
        finally:
            path.unlink(missing_ok=True)


def open_folder(request: CalibrationRequest, out: Path, leftover: Leftover, say: Callable[[str], None]) -> WorkFolder:
    """A folder ready for this request: a new one, or one with the turns of the same request's stopped calibration.

    Raises: ConfigError for an unfinished folder of something else, or if one is required and there is none.
    """
    folder, identity = WorkFolder.of(out), identity_of(request)
    kept = folder.path / "identity.json"
    if folder.path.exists() and (leftover == "discard" or not (kept.is_file() and folder.has_turns)):
        folder.remove()
    if not folder.path.exists():
        if leftover == "require":
            raise ConfigError(f"there is nothing to resume: {folder.path.name} beside {out} holds no turn; drop --resume")
        folder.path.mkdir()
        write_text_atomically(kept, json.dumps(identity, indent=1))
        write_text_atomically(folder.job, request.to_json())
        return folder
    with reading(f"cannot read {kept}", ConfigError, "throw it away with --restart"):
        found = dict(read_json(kept))
    other = [word for key, word in WORDS.items() if found.get(key) != identity[key]]
    if other:
        raise ConfigError(
            f"{folder.path.name} beside {out} is what a stopped calibration left, but of another {' and another '.join(other)}"
            f"{_values(found, identity)}; throw it away with --restart, or choose another --out"
        )
    rounds = sum(done.rounds for done in read_progress(folder.path).values())
    say(f"going on with the calibration that was stopped after {rounds} rounds")
    return folder


def identity_of(request: CalibrationRequest) -> dict[str, Any]:
    """What must be the same for turns to belong together."""
    environment = describe_environment()
    return {
        "schema_version": SCHEMA_VERSION,
        "request": json.loads(request.to_json()),
        "processor": environment["processor"],
        "cores": environment["cores"],
        "gpus": gpu_names() if request.device == "cuda" else [],
        "torch": environment["versions"].get("torch", ""),
    }


def _values(found: Mapping[str, Any], identity: Mapping[str, Any]) -> str:
    short = [key for key in ("processor", "cores", "gpus", "torch") if found.get(key) != identity[key]]
    return f" ({'; '.join(f'{key} {found.get(key)} then, {identity[key]} now' for key in short)})" if short else ""
