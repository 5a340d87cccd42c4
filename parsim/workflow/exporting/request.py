"""What an export is asked for, and what came of it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from parsim.app.config import Question
from parsim.app.run_folder import RunFolder
from parsim.errors import ConfigError
from parsim.plans.plan import Plan

if TYPE_CHECKING:
    from parsim.app.prediction import Prediction


@dataclass(frozen=True, kw_only=True)
class ExportRequest:
    """One export of a folder of `parsim run` or `parsim simulate --out`.

    Attributes:
        folder: with the question and the plan. format: its name in FORMATS. out: the file or folder to write (None: the
            format's own name below the folder). options: further ones that were given, of `ExportFormat.options`.
    """

    folder: RunFolder
    format: str
    out: Path | None = None
    options: Mapping[str, Any] = field(default_factory=dict)

    def target(self, name: str) -> Path:
        """What to write: as asked, or `name` in the folder."""
        return self.folder.path / name if self.out is None else self.out

    @cached_property
    def config(self) -> Question:
        """The resolved question. Raises ConfigError: it is not a run folder."""
        return self.folder.read_config()

    @cached_property
    def plan(self) -> Plan:
        """The plan that was run or simulated. Raises ConfigError: the folder holds none."""
        _ = self.config
        if not self.folder.plan.is_file():
            raise ConfigError(f"{self.folder.path} holds no {self.folder.plan.name}; simulate or run again")
        return Plan.load(self.folder.plan)

    @cached_property
    def prediction(self) -> Prediction:
        """The plan, priced anew from the profile of the folder. Raises ConfigError: it is not a complete run folder."""
        from parsim.app.ask import ask_again

        return ask_again(self.folder)


@dataclass(frozen=True, slots=True, kw_only=True)
class Exported:
    """What was written.

    Attributes:
        format: its name. file: the file, or the folder of several. summary: one sentence.
        left_out: what the format cannot express, with what it means for whoever uses the file.
        found: further keys of the JSON.
    """

    format: str
    file: Path
    summary: str
    left_out: Mapping[str, str] = field(default_factory=dict)
    found: Mapping[str, Any] = field(default_factory=dict)

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON, as `parsim export --json` prints it."""
        return {"file": str(self.file), "format": self.format, **self.found, "left_out": dict(self.left_out)}

    def lines(self) -> list[str]:
        """For people: what was written, and what was left out."""
        return [self.summary, *(f"Left out: {what}: {why}" for what, why in self.left_out.items())]


@dataclass(frozen=True, slots=True, kw_only=True)
class ExportFormat:
    """One format: what it is, for people; what writes it; and the further options that it takes."""

    what: str
    write: Callable[[ExportRequest], Exported]
    options: tuple[str, ...] = ()
