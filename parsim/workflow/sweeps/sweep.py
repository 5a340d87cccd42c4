"""`parsim.sweep`: one question at many points."""

from __future__ import annotations

import shlex
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from parsim.errors import ConfigError
from parsim.units import format_seconds
from parsim.workflow.progress import Say, progress
from parsim.workflow.sweeps.axes import Axis, axes_of
from parsim.workflow.sweeps.designs import SweptSettings, grid, saltelli, sobol_sample
from parsim.workflow.sweeps.executing import here, here_or_in_processes, in_processes, on_dask
from parsim.workflow.sweeps.folder import RowLog, SweepFolder
from parsim.workflow.sweeps.goal import parse_goal
from parsim.workflow.sweeps.points import BaseQuestion, SweepPoint, points_of
from parsim.workflow.sweeps.result import Sweep
from parsim.workflow.sweeps.rows import COLUMNS, FAILED
from parsim.workflow.toml_text import value_text

if TYPE_CHECKING:
    from parsim.workflow.public.functions import AskedCluster, AskedModel

SAY_EVERY_S = 5.0


def sweep(
    model: AskedModel,
    over: Mapping[str, Any] | Sequence[str],
    *,
    cluster: AskedCluster | None = None,
    global_batch: int | None = None,
    settings: Mapping[str, object] | None = None,
    overrides: Sequence[str] = (),
    example_inputs: Any = None,
    sample: int | None = None,
    sensitivity: int | None = None,
    seed: int = 0,
    goal: str | None = None,
    samples_per_epoch: int | None = None,
    jobs: int | None = None,
    on: str | None = None,
    out: str | Path | None = None,
) -> Sweep:
    """Evaluate one question at many points: a grid, or a sample, over any keys of a run file.

    Args:
        model, cluster, global_batch, settings, overrides, example_inputs: as for `plan`, without the swept ones.
        over: key -> values, such as {"cluster.nodes": [1, 2, 4], "training.global_batch": "256:4096:x2"}; or strings in the
            form of `--over`. Further keys: "scale.compute", "scale.links", "scale.memory", factors on the hardware.
        sample: number of points of a Sobol sequence, instead of the whole grid. sensitivity: N * (fields + 2) points from which
            Sobol indices are computed; N is a power of two. seed: of both.
        goal: picks a point, such as "min cost where epoch < 2h".
        samples_per_epoch: of the data, for the time and price of an epoch.
        jobs: processes; 1: only this one; default: this one, and one per core once that pays for their start.
        on: the address of a Dask scheduler, such as "tcp://10.0.0.1:8786", whose workers evaluate the points.
        out: a folder for the rows, points.csv and points.parquet; points in it are reused.

    Returns:
        A row per point; a point that fails has the reason in its row.

    Raises:
        ParsimError: ConfigError for an unknown field, an empty range, a goal that cannot be read, or no Dask cluster;
            MissingDependencyError without SALib or dask; ExecutionError for a full disk.

    >>> found = sweep("mlp", {"cluster.devices": [1, 2], "plan.strategy": ["dp"]}, cluster="dgx1-v100-32gb", global_batch=64)
    >>> [row["status"] for row in found.rows]
    ['ok', 'ok']
    """
    axes = axes_of(over)
    designed, design = _designed(axes, sample, sensitivity, seed)
    base = _base(
        BaseQuestion(
            model=model,
            cluster=_cluster(cluster),
            global_batch=global_batch,
            settings=dict(settings or {}),
            overrides=tuple(overrides),
            example_inputs=example_inputs,
            samples_per_epoch=_positive("samples_per_epoch", samples_per_epoch),
        ),
        axes,
        designed,
    )
    if goal:  # its form and its units; whether a column has values shows once the rows are there
        parse_goal(goal, [{"status": FAILED}], [*COLUMNS, *(axis.key for axis in axes)])
    place = _place(jobs, on)
    folder = None if out is None else SweepFolder(Path(out))
    if folder is not None:
        folder.check_usable()
    points = points_of(base, designed)
    asked = Sweep(
        title=_title(points, model),
        axes=axes,
        settings=tuple(designed),
        answers=(),
        design=design,
        seed=seed,
        goal=goal or "",
        asked=_words(base),
        folder=None if folder is None else folder.path,
    )
    found = _answered(asked, points, place, folder)
    if folder is not None and (note := folder.write_tables(found.table())):
        found = replace(found, notes=(note,))
    return found


@dataclass(frozen=True, slots=True)
class _Clock:
    """How far a sweep is, in words. The first point is not counted: it compiles and loads what all others only use."""

    total: int
    first_s: float

    def text(self, done: int, failed: int, now_s: float) -> str:
        left_s = (now_s - self.first_s) / max(done - 1, 1) * (self.total - done)
        failures = f", {failed} failed" if failed else ""
        return f"{done} of {self.total} points{failures}, about {format_seconds(left_s)} left"


def _answered(
    asked: Sweep,
    points: Sequence[SweepPoint],
    place: Callable[[Sequence[SweepPoint]], Iterator[tuple[int, dict[str, Any]]]],
    folder: SweepFolder | None,
) -> Sweep:
    """The sweep with its answers. Equal points are asked once, and points that the folder holds not at all."""
    keys = {point.key for point in points}
    with nullcontext() if folder is None else folder.writing() as log:
        known: dict[str, dict[str, Any]] = {}
        if folder is not None:
            folder.write_description(asked.description(), points)
            known = folder.known(keys)
        reused = sum(point.key in known for point in points)
        order = _neighbours({point.key: point for point in points if point.key not in known}.values())
        if order:
            with progress(f"Sweeping {asked.title}") as say:
                _ask_all(order, place, log, known, say)
    return replace(asked, answers=tuple(known[point.key] for point in points), reused=reused)


def _ask_all(
    order: Sequence[SweepPoint],
    place: Callable[[Sequence[SweepPoint]], Iterator[tuple[int, dict[str, Any]]]],
    log: RowLog | None,
    known: dict[str, dict[str, Any]],
    say: Say,
) -> None:
    """Fill `known`, and the log, row by row."""
    by_number = {point.number: point for point in order}
    clock, said_s, failed, done = _Clock(len(order), time.monotonic()), time.monotonic(), 0, 0
    try:
        for done, (number, row) in enumerate(place(order), start=1):
            point = by_number[number]
            if log is not None:
                log.add(point, row)
            known[point.key] = row
            failed += row["status"] == FAILED
            if done == 1:
                clock = _Clock(len(order), time.monotonic())
            elif time.monotonic() - said_s > SAY_EVERY_S:
                said_s = time.monotonic()
                say(clock.text(done, failed, said_s))
    except KeyboardInterrupt:
        kept = "they are kept, and the same command continues" if log is not None else "give out= to keep them"
        say(f"stopped after {done} of {len(order)} points; {kept}")
        raise


def _neighbours(points: Iterable[SweepPoint]) -> list[SweepPoint]:
    """Points of one cluster and one model beside one another, so that a process loads both once.

    Of these, points that differ in the strategy alone, so that one takes over what the search of the other found.
    """
    first: dict[str, int] = {}

    def place(point: SweepPoint) -> tuple[str, str, int, int]:
        if point.question is None:
            return "", "", point.number, point.number
        config = point.question.config
        same = f"{config.model_dump_json(exclude={'plan': {'strategy'}})} {sorted(point.scale.items())}"
        alike = first.setdefault(same, point.number)
        return config.cluster.model_dump_json(), config.model.model_dump_json(), alike, point.number

    return sorted(points, key=place)


def _designed(
    axes: tuple[Axis, ...], sample: int | None, sensitivity: int | None, seed: int
) -> tuple[list[SweptSettings], str]:
    if sample is not None and sensitivity is not None:
        raise ConfigError("--sample and --sensitivity both choose the points; give one of them")
    if sensitivity is not None:
        return saltelli(axes, sensitivity, seed), "saltelli"
    if sample is not None:
        return sobol_sample(axes, sample, seed), "sample"
    return grid(axes), "grid"


def _base(base: BaseQuestion, axes: Sequence[Axis], designed: Sequence[SweptSettings]) -> BaseQuestion:
    """With an nn.Module traced once. Raises ConfigError where the sweep would change what was given as a value."""
    from parsim.model.model import Model

    for name, value in (("cluster", base.cluster), ("model", base.model)):
        swept = [axis.key for axis in axes if axis.key.startswith(f"{name}.")]
        if swept and value is not None and not isinstance(value, str | Path):
            raise ConfigError(f"the {name} was given as a value, which --over {swept[0]} cannot change; give its name instead")
    if base.model is None or isinstance(base.model, str | Path | Model):
        return base
    question = base.at(designed[0])
    return replace(
        base,
        model=question.model,
        example_inputs=None,
        settings={key: value for key, value in base.settings.items() if not key.startswith("model.")},
        overrides=tuple(text for text in base.overrides if not text.startswith("model.")),
    )


def _place(jobs: int | None, on: str | None) -> Callable[[Sequence[SweepPoint]], Iterator[tuple[int, dict[str, Any]]]]:
    """Where points are answered."""
    if on is not None:
        if jobs is not None:
            raise ConfigError(f"--jobs {jobs} is for this machine, and --on {on} has its own workers; drop one of them")
        return lambda points: on_dask(points, on)
    if jobs is None:
        return here_or_in_processes
    if jobs < 1:
        raise ConfigError(f"--jobs {jobs}: give at least one process")
    return here if jobs == 1 else lambda points: in_processes(points, jobs)


def _cluster(cluster: Any) -> Any:
    from parsim.workflow.public.calibration import Calibration

    return cluster.path if isinstance(cluster, Calibration) else cluster


def _words(base: BaseQuestion) -> str:
    """`resnet50 --on dgx1-v100-32gb --batch 1024 --set plan.zero_stage=1`; empty for a model that was given as a value."""
    if not isinstance(base.model, str | Path):
        return ""
    words = [str(base.model)]
    words += ["--on", str(base.cluster)] if isinstance(base.cluster, str | Path) else []
    words += ["--batch", str(base.global_batch)] if base.global_batch is not None else []
    changes = [*(f"{key}={value_text(value)}" for key, value in base.settings.items() if value is not None), *base.overrides]
    return shlex.join([*words, *(word for change in changes for word in ("--set", change))])


def _title(points: Sequence[SweepPoint], model: Any) -> str:
    """`resnet50 on dgx1-v100-32gb`, of the first point that is a question."""
    for point in points:
        if point.question is not None:
            clusters = [entry.question.config.cluster for entry in points if entry.question is not None]
            machines = {cluster.machine for cluster in clusters}
            nodes = {1 if cluster.group is not None else cluster.nodes for cluster in clusters}
            names = {entry.question.config.model.name for entry in points if entry.question is not None}
            name = next(iter(names)) if len(names) == 1 else f"{len(names)} models"
            return f"{Path(name).name if '/' in name else name} on {_several(machines, nodes)}"
    return str(model)


def _several(machines: set[str], nodes: set[int]) -> str:
    shown = sorted(Path(name).name if "/" in name else name for name in machines)
    if len(shown) > 1:
        return f"{len(shown)} machines"
    return shown[0] if len(nodes) > 1 or 1 in nodes else f"{min(nodes)} x {shown[0]}"


def _positive(name: str, value: int | None) -> int | None:
    if value is not None and value < 1:
        raise ConfigError(f"{name} = {value}: must be >= 1")
    return value
