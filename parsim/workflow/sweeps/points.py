"""Points of a sweep: each a question of its own, with a key that covers everything its answer depends on."""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import hardware_profiles
import parsim
from parsim.errors import ParsimError
from parsim.workflow.question import Question, is_run_file, question_of
from parsim.workflow.references import references, root_of
from parsim.workflow.sweeps.designs import SweptSettings
from parsim.workflow.sweeps.fields import SCALES
from parsim.workflow.this_machine import on_this_machine

if TYPE_CHECKING:
    from parsim.hardware.cluster import Cluster
    from parsim.model.model import Model

KEY_LETTERS = 32
IN_PLACE = {"cluster.profile": "cluster", "training.global_batch": "global_batch"}
"""Fields that a question without a run file takes as arguments."""


@dataclass(frozen=True, kw_only=True)
class BaseQuestion:
    """What every point asks, apart from what is swept.

    Attributes:
        model, cluster, global_batch, settings, overrides, example_inputs: as `parsim.plan` takes them.
        samples_per_epoch: for the time and the price of an epoch; None: not known.
    """

    model: Any
    cluster: Any = None
    global_batch: int | None = None
    settings: Mapping[str, Any] = field(default_factory=dict)
    overrides: Sequence[str] = ()
    example_inputs: Any = None
    samples_per_epoch: int | None = None

    def at(self, settings: SweptSettings) -> Question:
        """The question of one point. Raises ParsimError."""
        changes = {key: value for key, value in settings.items() if key not in SCALES}
        given: dict[str, Any] = {"cluster": self.cluster, "global_batch": self.global_batch}
        if not (isinstance(self.model, str | Path) and is_run_file(self.model)):
            given |= {IN_PLACE[key]: changes.pop(key) for key in IN_PLACE if key in changes}
        base = {key: value for key, value in self.settings.items() if key not in changes}
        kept = [text for text in self.overrides if text.partition("=")[0].strip() not in changes]
        question = question_of(
            self.model, settings={**base, **changes}, overrides=kept, example_inputs=self.example_inputs, **given
        )
        return replace(question, config=on_this_machine(question.config, question.model))


@dataclass(frozen=True, kw_only=True)
class SweepPoint:
    """One point.

    Attributes:
        number: its place in the sweep. settings: what was swept. key: of its content; equal keys have equal answers.
        question: None where `problem` says why there is none.
    """

    number: int
    settings: SweptSettings
    key: str
    question: Question | None = None
    problem: str = ""
    samples_per_epoch: int | None = None

    @property
    def scale(self) -> SweptSettings:
        return {key: value for key, value in self.settings.items() if key in SCALES}


def points_of(base: BaseQuestion, designed: Sequence[SweptSettings]) -> list[SweepPoint]:
    """Every point with its question; a point that asks for what cannot be says why, and the others are asked.

    Args:
        base: of all points. designed: what is swept, point by point.
    """
    value = _value_digest(base)
    points: list[SweepPoint] = []
    for number, settings in enumerate(designed):
        try:
            question = base.at(settings)
            content: dict[str, Any] = {"config": question.config.to_dict(), "files": _files(question)}
            found: dict[str, Any] = {"question": question}
        except ParsimError as error:
            content = {"settings": settings, "problem": str(error)}
            found = {"problem": str(error)}
        scale = {key: entry for key, entry in settings.items() if key in SCALES and entry != 1}
        whole = {**content, "scale": scale, "epoch": base.samples_per_epoch, "values": value, "code": code_digest()}
        key = hashlib.sha256(json.dumps(whole, sort_keys=True, default=str).encode()).hexdigest()[:KEY_LETTERS]
        points.append(SweepPoint(number=number, settings=settings, key=key, samples_per_epoch=base.samples_per_epoch, **found))
    return points


@lru_cache(maxsize=1)
def code_digest() -> str:
    """Of parsim's own source, the shipped profiles, and the packages that trace models."""
    digest = hashlib.sha256()
    for package, pattern in ((parsim, "*.py"), (hardware_profiles, "*.json")):
        root = Path(str(package.__file__)).parent
        for path in sorted(root.rglob(pattern)):
            digest.update(str(path.relative_to(root)).encode())
            digest.update(path.read_bytes())
    for name in ("torch", "transformers", "numpy"):
        try:
            digest.update(f"{name} {importlib.metadata.version(name)}".encode())
        except importlib.metadata.PackageNotFoundError:
            digest.update(f"{name} absent".encode())
    return digest.hexdigest()


def _value_digest(base: BaseQuestion) -> str:
    """Of a model or a cluster that was given as a value and not by name."""
    from parsim.hardware.cluster import Cluster
    from parsim.model.model import Model

    digest = hashlib.sha256()
    if not isinstance(base.model, str | Path):
        model: Model = base.model
        if not isinstance(model, Model):
            traced = base.at({}).model if base.cluster is not None and base.global_batch is not None else None
            digest.update(repr(type(base.model)).encode())
            if traced is None:
                return digest.hexdigest()
            model = traced
        digest.update(model.to_json().encode())
    if isinstance(base.cluster, Cluster):
        digest.update(_cluster_text(base.cluster).encode())
    return digest.hexdigest()


def _cluster_text(cluster: Cluster) -> str:
    network = "" if cluster.network is None else cluster.network.model_dump_json()
    return f"{cluster.name} {[device.index for device in cluster.devices]} {cluster.profile.model_dump_json()} {network}"


def _files(question: Question) -> dict[str, str]:
    """The content of every file that a config names, by path."""
    from parsim.costs.feedback.history import history_path

    config = question.config
    cluster = config.cluster
    named = [config.model.name, cluster.profile, cluster.network, cluster.gpu, cluster.link, config.plan.strategy]
    paths = [Path(text) for text in named if text is not None and text.endswith((".json", ".toml"))]
    if (history := history_path(cluster.profile or "", cluster.history)) is not None:
        paths.append(history)
    if config.model.import_folder is not None:
        for name in references(config.to_dict()).values():
            root = Path(config.model.import_folder) / root_of(name)
            paths += sorted(root.rglob("*.py")) if root.is_dir() else [root.with_suffix(".py")]
    return {str(path): _file_digest(path) for path in paths}


def _file_digest(path: Path) -> str:
    try:
        found = path.stat()
    except OSError:
        return "absent"
    return _digest_at(str(path), found.st_mtime_ns, found.st_size, found.st_ino)


@lru_cache(maxsize=4096)
def _digest_at(path: str, modified_ns: int, size_bytes: int, number: int) -> str:
    try:
        return hashlib.sha256(Path(path).read_bytes()).hexdigest()
    except OSError:
        return f"unreadable {modified_ns} {size_bytes} {number}"
