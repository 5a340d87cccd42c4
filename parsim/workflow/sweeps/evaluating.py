"""One point, answered: in this process or in a worker. Models, profiles and clusters are loaded once per process."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from parsim.costs.hardware_scale import HardwareScale
from parsim.errors import ParsimError
from parsim.workflow.config import RunConfig
from parsim.workflow.sweeps.points import SweepPoint
from parsim.workflow.sweeps.rows import failed_row, row_of

if TYPE_CHECKING:
    from parsim.hardware.cluster import Cluster
    from parsim.model.model import Model
    from parsim.predict.planning_problem import PlanningProblem

MOST_MODELS = 8
"""That are sent to workers; a sweep over more of them is traced where it is priced."""


@dataclass(frozen=True, kw_only=True)
class SharedValues:
    """What workers need beside the points: sent once to each.

    Attributes:
        models: by `model_key`: traced once, in the process that started the sweep. cluster: where it was given as a value.
        folders: that this process imports from.
    """

    models: Mapping[str, Model] = field(default_factory=dict)
    cluster: Cluster | None = None
    folders: tuple[str, ...] = ()


NOTHING_SHARED = SharedValues()


def model_key(config: RunConfig) -> str:
    """Equal for questions of one Model. Args: config: of a point."""
    return json.dumps([config.model.model_dump(mode="json"), config.training.precision], sort_keys=True)


def evaluate_points(points: Sequence[SweepPoint], shared: SharedValues = NOTHING_SHARED) -> list[tuple[int, dict[str, Any]]]:
    """Rows of points, each with the point's number.

    Args:
        points: of one sweep. shared: values that they have in common.
    """
    sys.path.extend(path for path in shared.folders if path not in sys.path)
    return [(point.number, evaluate_point(point, shared)) for point in points]


def evaluate_point(point: SweepPoint, shared: SharedValues = NOTHING_SHARED) -> dict[str, Any]:
    """The row of a point. An error of the question is a row with the reason, and so is a fault of parsim.

    Args:
        point: to answer. shared: values that it has in common with others.
    """
    if point.question is None:
        return failed_row(point.problem)
    try:
        return _answered(point, shared)
    except ParsimError as error:
        return failed_row(str(error))
    except (
        ArithmeticError,
        AssertionError,
        AttributeError,
        LookupError,
        MemoryError,
        TypeError,
        ValueError,
        RuntimeError,
    ) as error:
        said = (str(error).splitlines() or [""])[0][:300]
        return failed_row(f"a fault of parsim, please report it: {type(error).__name__}: {said}")


def _answered(point: SweepPoint, shared: SharedValues) -> dict[str, Any]:
    from parsim.workflow.ask import answer_of
    from parsim.workflow.load import problem_of

    question = point.question
    assert question is not None
    config = question.config
    cluster = shared.cluster if question.cluster is None else question.cluster
    cluster = cluster if cluster is not None else cluster_at(config)
    scale = point.scale
    if (memory := float(scale.get("scale.memory", 1.0))) != 1.0:
        cluster = with_memory(cluster, memory)
    model = question.model if question.model is not None else shared.models.get(model_key(config))
    problem = problem_of(config, model=model, cluster=cluster)
    faster = HardwareScale(
        computation=float(scale.get("scale.compute", 1.0)), communication=float(scale.get("scale.links", 1.0))
    )
    problem = _LAST.known(replace(problem, scale=faster))
    answer = answer_of(question.on_devices(cluster.size), problem)
    return row_of(answer, point.samples_per_epoch)


class _LastProblem:
    """The problem of the point before. Points that differ in the strategy ask the same one, with all that it remembers."""

    def __init__(self) -> None:
        self._problem: PlanningProblem | None = None

    def known(self, problem: PlanningProblem) -> PlanningProblem:
        """The one before where it is equal, else this one. Args: problem: of a point."""
        if self._problem != problem:
            self._problem = problem
        return self._problem

    def forget(self) -> None:
        """As if no point had been asked."""
        self._problem = None


_LAST = _LastProblem()


def cluster_at(config: RunConfig) -> Cluster:
    """The cluster of a config; the same object for the same [cluster], so that its look-ups are made once.

    Args:
        config: of a point.

    Raises:
        ProfileError: as `parsim.workflow.load.cluster_of`.
    """
    table = config.cluster
    files = tuple(_stamp(text) for text in (table.profile, table.network, table.gpu, table.link))
    return _cluster(table.model_dump_json(exclude={"history"}), files, _Uncompared(config))


class _Uncompared:
    """A value that goes through a cache without being part of its key."""

    def __init__(self, config: RunConfig) -> None:
        self.config = config

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Uncompared)

    def __hash__(self) -> int:
        return 0


@lru_cache(maxsize=32)
def _cluster(table: str, files: tuple[object, ...], given: _Uncompared) -> Cluster:
    from parsim.workflow.load import cluster_of

    return cluster_of(given.config)


def _stamp(text: str | None) -> object:
    """Changes with the content of a file; None for a name."""
    if text is None or not text.endswith((".json", ".toml")):
        return None
    try:
        found = os.stat(text)
    except OSError:
        return "absent"
    return (found.st_mtime_ns, found.st_size, found.st_ino)


@lru_cache(maxsize=32)
def with_memory(cluster: Cluster, factor: float) -> Cluster:
    """A cluster whose devices hold `factor` times as much.

    Args:
        cluster: as it is. factor: above 0.
    """
    types = {
        device.type.name: replace(device.type, memory_bytes=int(factor * device.type.memory_bytes))
        for device in cluster.devices
    }
    return replace(cluster, devices=tuple(replace(device, type=types[device.type.name]) for device in cluster.devices))


def shared_values(points: Sequence[SweepPoint]) -> SharedValues:
    """Load the Models of these points here, once, for all workers; a model that cannot be loaded is left to its points.

    Args:
        points: that workers will answer.
    """
    from parsim.workflow.load import model_of

    configs = {model_key(point.question.config): point.question.config for point in points if point.question is not None}
    models: dict[str, Model] = {}
    cluster = None
    for point in points:
        if point.question is not None and point.question.cluster is not None:
            cluster = point.question.cluster
        if point.question is not None and point.question.model is not None:
            models[model_key(point.question.config)] = point.question.model
    for key, config in list(configs.items())[:MOST_MODELS]:
        if key in models:
            continue
        try:
            models[key] = model_of(config)
        except ParsimError:
            continue  # every point of it says why
    return SharedValues(models=models, cluster=cluster, folders=tuple(path for path in sys.path if path))


def without_values(point: SweepPoint) -> SweepPoint:
    """The point as it is sent to a worker, which has the values already. Args: point: of a sweep."""
    if point.question is None or (point.question.model is None and point.question.cluster is None):
        return point
    return replace(point, question=replace(point.question, model=None, cluster=None))
