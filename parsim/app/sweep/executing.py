"""Where points are answered: in this process, in processes of this machine that persist (loky), or on a Dask cluster.

All three yield rows as they come. A worker that dies is replaced, and the points it held are asked again, one at a time. A
point whose process dies twice becomes a row that says so.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, BrokenExecutor, Future, wait
from dataclasses import dataclass, field, replace
from functools import lru_cache, partial
from io import RawIOBase
from pathlib import Path
from typing import TYPE_CHECKING, Any

from parsim.app.answer import Answer
from parsim.app.ask import answer_of, whole
from parsim.app.config import Question
from parsim.app.large import HOUR_S, running_costs
from parsim.app.load import cluster_of, model_of, problem_of
from parsim.app.run_folder import FileBelow
from parsim.app.sections import ClusterSection
from parsim.app.sweep.points import SweepPoint, code_digest, file_stamp
from parsim.costs.adjustments import HardwareScale
from parsim.errors import ConfigError, ExecutionError, MissingDependencyError, ParsimError
from parsim.execute.processes.setup import available_cores
from parsim.files import finite, lock, parse_json, read_json, version_problem, write_atomically, write_json_atomically
from parsim.hardware.cluster import Cluster
from parsim.model.model import Model
from parsim.plans.plan import Plan, plan_in_words
from parsim.predict.problem import PlanningProblem
from parsim.predict.result import Interval
from parsim.report.trace import sketch

if TYPE_CHECKING:
    import pandas as pd
    from distributed import Client

# One point, answered: in this process or in a worker. Models, profiles and clusters are loaded once per process.


MOST_MODELS = 8
"""That are sent to workers; a sweep over more of them is traced where it is priced."""
MOST_CLUSTERS = 32
"""That a process keeps."""
Row = dict[str, Any]
Numbered = tuple[int, Row]
"""A row with the number of its point."""


@dataclass(frozen=True, kw_only=True)
class SharedValues:
    """What workers need beside the points: sent once to each.

    Attributes: models: by `model_key`: traced once, in the process that started the sweep. cluster: where it was given as a
        value. folders: that this process imports from.
    """

    models: Mapping[str, Model] = field(default_factory=dict)
    cluster: Cluster | None = None
    folders: tuple[str, ...] = ()


NOTHING_SHARED = SharedValues()


def model_key(config: Question) -> str:
    """Equal for questions of one Model."""
    return json.dumps(
        [config.model.model_dump(mode="json"), config.model_spec.to_dict(), config.training.precision], sort_keys=True
    )


def evaluate_points(points: Sequence[SweepPoint], shared: SharedValues) -> list[Numbered]:
    """Rows of points, each with the point's number."""
    sys.path.extend(path for path in shared.folders if path not in sys.path)
    return [(point.number, evaluate_point(point, shared)) for point in points]


def evaluate_point(point: SweepPoint, shared: SharedValues = NOTHING_SHARED) -> Row:
    """The row of a point. An error of the question is a row with the reason, and so is a fault of parsim."""
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
        reason = (str(error).splitlines() or [""])[0][:300]
        return failed_row(f"a fault of parsim, please report it: {type(error).__name__}: {reason}")


def _answered(point: SweepPoint, shared: SharedValues) -> Row:
    question, scale = point.question, point.scale
    assert question is not None
    source = question.source
    cluster = source.cluster or shared.cluster or _cluster_at(question.cluster)
    if (memory := float(scale.get("scale.memory", 1.0))) != 1.0:
        cluster = _with_memory(cluster, memory)
    model = source.model or shared.models.get(model_key(question))
    faster = HardwareScale(
        computation=float(scale.get("scale.compute", 1.0)), communication=float(scale.get("scale.links", 1.0))
    )
    problem = replace(problem_of(question, model=model, cluster=cluster), scale=faster)
    if problem not in _LAST:
        _LAST[:] = [problem]
    return row_of(whole(answer_of(question, _LAST[0])), point.samples_per_epoch)


_LAST: list[PlanningProblem] = []
"""The problem of the point before: points that differ in the strategy alone ask it again, with all that it remembers."""
_CLUSTERS: dict[tuple[object, ...], Cluster] = {}
"""By table and files: the same object for the same [cluster], so that its look-ups are made once."""


def _cluster_at(table: ClusterSection) -> Cluster:
    named = [text for text in (table.profile, table.network, table.gpu, table.link) if text is not None]
    stamps = [file_stamp(text) for text in named if text.endswith((".json", ".toml"))]
    key = (table.model_dump_json(exclude={"history"}), *stamps)
    if key not in _CLUSTERS:
        if len(_CLUSTERS) >= MOST_CLUSTERS:
            _CLUSTERS.clear()
        _CLUSTERS[key] = cluster_of(table)
    return _CLUSTERS[key]


@lru_cache(maxsize=MOST_CLUSTERS)
def _with_memory(cluster: Cluster, factor: float) -> Cluster:
    types = {
        device.type.name: replace(device.type, memory_bytes=int(factor * device.type.memory_bytes))
        for device in cluster.devices
    }
    return replace(cluster, devices=tuple(replace(device, type=types[device.type.name]) for device in cluster.devices))


def shared_values(points: Sequence[SweepPoint]) -> SharedValues:
    """Load the Models of these points here, once, for all workers; a model that cannot be loaded is left to its points."""
    questions = {model_key(point.question): point.question for point in points if point.question is not None}
    models = {key: question.source.model for key, question in questions.items() if question.source.model is not None}
    for key, question in list(questions.items())[:MOST_MODELS]:
        if key not in models:
            with contextlib.suppress(ParsimError):  # every point of it says why
                models[key] = model_of(question)
    cluster = next((question.source.cluster for question in questions.values() if question.source.cluster is not None), None)
    return SharedValues(models=models, cluster=cluster, folders=tuple(path for path in sys.path if path))


def without_values(point: SweepPoint) -> SweepPoint:
    """The point as it is sent to a worker, which has the values already."""
    if point.question is None:
        return point
    return replace(point, question=point.question.sourced(model=None, cluster=None))


Submit = Callable[[Sequence[SweepPoint]], "Future[list[Numbered]]"]

WORTH_PROCESSES_S = 20.0
"""Work left from which processes are started where no number was given: each takes some seconds to start."""
CHUNK_S = 1.0
"""Work that is sent to a worker at once, as far as it is known."""
MOST_IN_CHUNK = 64
IN_FLIGHT = 3
"""Chunks per worker that are sent ahead."""
CONNECT_S = 10.0
PARENT_S = 1.0
"""How often a worker looks whether its parent is alive."""
THREADS = dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "NUMBA_NUM_THREADS"), "1")
"""A worker per core needs no threads beside it."""

DIED = (
    "its worker process died twice (killed, or out of memory); ask it alone with `parsim plan` to see why, or give the sweep "
    "fewer processes (--jobs)"
)


def here(points: Sequence[SweepPoint]) -> Iterator[Numbered]:
    """Rows of points, answered in this process, in order."""
    for point in points:
        yield point.number, evaluate_point(point)


def here_or_in_processes(points: Sequence[SweepPoint]) -> Iterator[Numbered]:
    """Rows of points: here while they are few or fast, else in a process per core that this process may use."""
    cores, begun = len(available_cores()), time.perf_counter()
    for answered, point in enumerate(points, 1):
        yield point.number, evaluate_point(point)
        if answered == 1:  # it compiled and loaded what all others only use
            begun = time.perf_counter()
            continue
        remaining_s = (time.perf_counter() - begun) / (answered - 1) * (len(points) - answered)
        if cores > 1 and remaining_s > WORTH_PROCESSES_S:
            yield from in_processes(points[answered:], cores)
            return


def in_processes(points: Sequence[SweepPoint], jobs: int) -> Iterator[Numbered]:
    """Rows of points, as they come, from processes that persist and get the Models once."""
    from joblib.externals.loky import ProcessPoolExecutor

    shared = shared_values(points)

    def open_pool(workers: int) -> ProcessPoolExecutor:
        return ProcessPoolExecutor(max_workers=workers, initializer=_begin_worker, initargs=(shared, os.getpid()), env=THREADS)

    waiting: list[SweepPoint] = [without_values(point) for point in points]
    while waiting:
        pool = open_pool(min(jobs, len(waiting)))
        answered: set[int] = set()
        sent: list[SweepPoint] = []
        try:
            for number, row in _stream(waiting, partial(pool.submit, _in_worker), jobs, sent):
                answered.add(number)
                yield number, row
            return
        except BrokenExecutor:
            suspects = [point for point in sent if point.number not in answered]
        finally:
            _stop(pool)
        waiting = [point for point in waiting if point.number not in answered and point not in suspects]
        yield from _one_at_a_time(suspects, open_pool)


def _one_at_a_time(suspects: Sequence[SweepPoint], open_pool: Callable[[int], Any]) -> Iterator[Numbered]:
    """Points that were asked while a worker died: each alone, so that the next death names its point."""
    pool = open_pool(1)
    try:
        for point in suspects:
            try:
                yield from pool.submit(_in_worker, [point]).result()
            except BrokenExecutor:
                _stop(pool)
                pool = open_pool(1)
                yield point.number, failed_row(DIED)
    finally:
        _stop(pool)


def _stop(pool: Any) -> None:
    pool.shutdown(wait=True, kill_workers=True)


_SHARED: SharedValues = NOTHING_SHARED
"""Of this worker process."""


def _begin_worker(shared: SharedValues, parent: int) -> None:
    """What a worker process does first. It ends with its parent: loky's workers would wait for a killed one for ever. Ctrl-C,
    which a terminal sends to all, is the parent's to answer: a search that is cut short here would be a row like others."""
    global _SHARED
    _SHARED = shared
    signal.signal(signal.SIGINT, signal.SIG_IGN)

    def end_with_parent() -> None:
        while os.getppid() == parent:
            time.sleep(PARENT_S)
        os._exit(1)

    threading.Thread(target=end_with_parent, daemon=True).start()


def _in_worker(points: Sequence[SweepPoint]) -> list[Numbered]:
    return evaluate_points(points, _SHARED)


def _stream(points: Sequence[SweepPoint], submit: Submit, workers: int, sent: list[SweepPoint]) -> Iterator[Numbered]:
    """Send points in chunks, some ahead, and yield their rows as they come.

    Raises BrokenExecutor: a worker died; its chunks are among `sent`, which is filled with what was sent.
    """
    begun, done, place = time.perf_counter(), 0, 0
    running: set[Future[list[Numbered]]] = set()
    while place < len(points) or running:
        while place < len(points) and len(running) < IN_FLIGHT * workers:
            size = _chunk_size(len(points) - place, workers, done, time.perf_counter() - begun)
            chunk = list(points[place : place + size])
            sent.extend(chunk)
            place += size
            running.add(submit(chunk))
        finished, running = wait(running, return_when=FIRST_COMPLETED)
        for future in finished:
            rows = future.result()
            done += len(rows)
            yield from rows


def _chunk_size(remaining: int, workers: int, done: int, spent_s: float) -> int:
    """About `CHUNK_S` of work, and no more than leaves some for every worker."""
    if not done:
        return 1
    each_s = spent_s * workers / done
    return max(1, min(int(CHUNK_S / max(each_s, 1e-3)), MOST_IN_CHUNK, remaining // (2 * workers)))


def on_dask(points: Sequence[SweepPoint], address: str) -> Iterator[Numbered]:
    """Rows of points, as they come, from the workers of a Dask cluster that runs already.

    Args: points: to answer. address: of its scheduler, such as tcp://10.0.0.1:8786.
    Raises: MissingDependencyError: without dask. ConfigError: no cluster is there, or its workers have another parsim.
        ExecutionError: the cluster went away in the middle.
    """
    client = _connect(address)
    try:
        workers = _check_workers(client, address)
        shared = client.scatter(shared_values(points), broadcast=True)

        def submit(chunk: Sequence[SweepPoint]) -> Any:  # impure: an equal chunk that is asked again is another task
            return client.submit(evaluate_points, list(chunk), shared, pure=False)

        yield from _dask_stream([without_values(point) for point in points], submit, workers, client.loop, address)
    finally:
        with contextlib.suppress(Exception):
            client.close(timeout=5)


def _connect(address: str) -> Client:
    try:
        from distributed import Client
    except ImportError as error:
        raise MissingDependencyError(f"--on {address} needs dask; install parsim[cluster]") from error
    try:
        return Client(address, timeout=CONNECT_S, set_as_default=False)
    except (OSError, ValueError, TimeoutError) as error:
        raise ConfigError(
            f"no Dask scheduler answers at {address} within {CONNECT_S:g} s ({type(error).__name__}); start one with `dask "
            "scheduler` and workers with `dask worker`, or leave --on out to use this machine"
        ) from error


def _check_workers(client: Client, address: str) -> int:
    """How many threads of workers there are, all with this very parsim."""
    digests: dict[str, Any] = client.run(code_digest, on_error="return")
    # A worker with an OSError died just now.
    answers = {worker: digest for worker, digest in digests.items() if not isinstance(digest, OSError)}
    for digest in answers.values():
        if isinstance(digest, BaseException):
            raise ConfigError(
                f"the workers at {address} cannot import parsim ({type(digest).__name__}: {digest}); install this version there"
            )
    if not answers:
        raise ConfigError(f"the Dask cluster at {address} has no workers; start one with `dask worker {address}`")
    other = [worker for worker, digest in answers.items() if digest != code_digest()]
    if other:
        raise ConfigError(
            f"{len(other)} of {len(answers)} workers at {address} have another parsim; install this version there"
        )
    return sum(client.nthreads().values())


def _dask_stream(
    points: Sequence[SweepPoint], submit: Callable[[Sequence[SweepPoint]], Any], workers: int, loop: Any, address: str
) -> Iterator[Numbered]:
    """What `_stream` does, with Dask's futures: Dask itself asks again what a dead worker held, some times."""
    from distributed import CancelledError, KilledWorker, as_completed

    begun, done, place = time.perf_counter(), 0, 0
    coming = as_completed(loop=loop)
    chunks: dict[Any, Sequence[SweepPoint]] = {}

    def send(chunk: Sequence[SweepPoint]) -> None:
        future = submit(chunk)
        chunks[future.key] = chunk
        coming.add(future)

    while place < len(points) or chunks:
        while place < len(points) and len(chunks) < IN_FLIGHT * workers:
            size = _chunk_size(len(points) - place, workers, done, time.perf_counter() - begun)
            send(points[place : place + size])
            place += size
        try:
            future = next(coming)
            rows = future.result()
        except KilledWorker:
            chunk = chunks.pop(future.key)
            if len(chunk) == 1:
                yield chunk[0].number, failed_row(DIED)
            for point in chunk if len(chunk) > 1 else ():
                send([point])
            continue
        except (CancelledError, OSError, StopIteration) as error:
            raise ExecutionError(
                f"the Dask cluster at {address} is gone ({type(error).__name__}); the points that were answered are kept: "
                "give the same command again to continue"
            ) from error
        del chunks[future.key]
        done += len(rows)
        yield from rows


# The folder of a sweep: every row as soon as it is known, so that a sweep that was stopped goes on; tables at the end.
#
# `points.jsonl` has a line per answered point, under the key of its content. Lines are only appended. A killed process or a
# full disk leaves at most the last line broken, which is cut off when the sweep goes on. Points of earlier sweeps in the same
# folder are found again by their keys, whatever was swept then. `sweep.json` says what was asked last; `points.csv` and
# `points.parquet` are its table.


SCHEMA_VERSION = 1
HEADER = {"schema_version": SCHEMA_VERSION, "holds": "points of parsim sweep"}
NO_PARQUET = "points.parquet is not written, since pyarrow is not installed (parsim[data]); points.csv holds the same"


@dataclass(frozen=True)
class SweepFolder:
    """Names of the files below `path`."""

    path: Path

    description = FileBelow("sweep.json")
    log = FileBelow("points.jsonl")
    csv = FileBelow("points.csv")
    parquet = FileBelow("points.parquet")
    explorer = FileBelow("explorer.html")

    def check_usable(self) -> None:
        """Raise ConfigError where the folder holds something else than a sweep."""
        if self.path.exists() and not self.path.is_dir():
            raise ConfigError(f"{self.path} is a file; give --out a folder")
        if self.path.is_dir() and any(self.path.iterdir()) and not (self.log.is_file() or self.description.is_file()):
            raise ConfigError(f"{self.path} is neither empty nor a folder of a sweep; give another --out")

    def known(self, keys: set[str]) -> dict[str, dict[str, Any]]:
        """The rows that the log has of these keys. A broken last line is cut off; a broken line in the middle is asked again.

        Raises: ConfigError: the file is not a log of this parsim.
        """
        if not self.log.is_file():
            return {}
        complete_bytes, rows = 0, {}
        with self.log.open("rb") as file:
            for number, line in enumerate(file):
                document: Any = None
                with contextlib.suppress(ValueError):
                    document = parse_json(line)
                if number == 0 and (not isinstance(document, dict) or version_problem(document, SCHEMA_VERSION)):
                    if line.endswith(b"\n"):
                        raise ConfigError(f"{self.log} is not a log of a sweep of this parsim; give another --out")
                    break
                if line.endswith(b"\n"):
                    complete_bytes += len(line)
                if isinstance(document, dict) and document.get("key") in keys and isinstance(document.get("row"), dict):
                    rows[str(document["key"])] = dict(document["row"])
        if complete_bytes < self.log.stat().st_size:
            with self.log.open("r+b") as file:
                file.truncate(complete_bytes)
        return rows

    @contextlib.contextmanager
    def writing(self) -> Iterator[RowLog]:
        """The log, open for more rows, by one sweep at a time. Raises: ConfigError: another sweep writes here now."""
        self.path.mkdir(parents=True, exist_ok=True)
        with self.log.open("ab", buffering=0) as file:  # nothing waits in a buffer that a full disk would refuse again
            if not lock(file.fileno()):
                raise ConfigError(f"another sweep writes into {self.path} now; wait for it, or give another --out")
            log = RowLog(self.log, file)
            if file.tell() == 0:
                log.write(HEADER)
            yield log

    def write_description(self, document: Mapping[str, Any], points: Sequence[SweepPoint]) -> None:
        """What was asked, and the keys of its points in order."""
        listed = [{"key": point.key, "settings": point.settings} for point in points]
        write_json_atomically(self.description, {"schema_version": SCHEMA_VERSION, **document, "points": listed})

    def read_description(self) -> dict[str, Any]:
        """What was asked last. Raises ConfigError if this is not a folder of a sweep."""
        try:
            document = read_json(self.description)
        except (OSError, ValueError) as error:
            raise ConfigError(f"{self.path} is not a folder of a sweep ({error}); give the --out of `parsim sweep`") from error
        problem = version_problem(document, SCHEMA_VERSION) if isinstance(document, dict) else "it holds no table"
        if problem:
            raise ConfigError(f"{self.description}: {problem}; sweep again")
        points = document.get("points")
        if not isinstance(points, list) or not all(
            isinstance(point, dict) and isinstance(point.get("settings"), dict) and isinstance(point.get("key"), str)
            for point in points
        ):
            raise ConfigError(f"{self.description} lists no points; sweep again")
        read: dict[str, Any] = document
        return read

    def write_tables(self, table: pd.DataFrame) -> str:
        """points.csv, and points.parquet where pyarrow is there. Returns a note where it is not, else ""."""
        write_atomically(self.csv, lambda file: file.write(table.to_csv(index=False).encode()))
        try:
            import pyarrow  # noqa: F401
        except ImportError:
            return NO_PARQUET
        flat = table.copy()
        for name in flat.columns:
            kinds = {type(value) for value in flat[name] if value is not None and value == value}
            if kinds & {list, dict} or (len(kinds) > 1 and str in kinds):  # Parquet refuses texts and numbers under one name
                flat[name] = flat[name].map(
                    lambda value: value if value is None or isinstance(value, str) else json.dumps(value)
                )
        write_atomically(self.parquet, lambda file: flat.to_parquet(file, index=False))
        return ""


@dataclass(frozen=True, slots=True)
class RowLog:
    """A log that is open for appending. Attributes: path: for messages. file: at its end."""

    path: Path
    file: RawIOBase

    def add(self, point: SweepPoint, row: Mapping[str, Any]) -> None:
        """One answered point; it is in the hands of the operating system when this returns."""
        self.write({"key": point.key, "settings": point.settings, "row": row})

    def write(self, document: Mapping[str, Any]) -> None:
        """One line. Raises ExecutionError: the disk takes no more; what was written before stays."""
        try:
            line = json.dumps(finite(document), allow_nan=False).encode() + b"\n"
            while line:  # a disk that is nearly full takes a part of it
                line = line[self.file.write(line) :]
        except OSError as error:
            raise ExecutionError(
                f"{self.path}: {error.strerror}; the points before are kept: make room and give the same command again"
            ) from error


# The row of a point: what it answers, with the unit in every column's name.


OK, DOES_NOT_FIT, FAILED = "ok", "does_not_fit", "failed"
MILLION = 1e6
JOULES_PER_KWH = 3.6e6

CATEGORIES = ("compute_s", "exposed_communication_s", "bubble_s", "load_s", "host_s", "idle_s")
"""Of a step, mean over the ranks; they sum to `one_step_s`."""


def _three(name: str) -> list[str]:
    """The columns of a median and of its 90% interval."""
    return [name.format(part) for part in ("", "_p05", "_p95")]


COLUMNS = (
    *("status", "reason", "strategy", "division", "plan", "plan_in_words", "devices", "global_batch"),
    *_three("step{}_s"),
    *_three("throughput{}_samples_per_s"),
    *_three("epoch{}_s"),
    *_three("usd_per_million_samples{}"),
    *_three("usd_per_epoch{}"),
    *_three("kwh_per_million_samples{}"),
    *_three("kwh_per_epoch{}"),
    *_three("peak_memory{}_bytes"),
    *("memory_limit_bytes", "fit_probability", "communication_fraction", "bubble_fraction", "one_step_s"),
    *CATEGORIES,
    *("tokens_per_s", "mfu"),
    *_three("run{}_s"),
    *_three("run_usd{}"),
    *_three("run_kwh{}"),
    "warnings",
)
"""After the swept fields, in every table; then `memory_LINE_bytes` of the fullest rank. A row also has `timeline`, a sketch."""

SKETCHED_RANKS = 4
"""Of a timeline in the explorer."""
MEMORY_PREFIX, MEMORY_SUFFIX = "memory_", "_bytes"


def failed_row(reason: str) -> dict[str, Any]:
    """The row of a point without an answer. Args: reason: the error's own message."""
    return {"status": FAILED, "reason": reason}


def row_of(answer: Answer, samples_per_epoch: int | None) -> dict[str, Any]:
    """Columns of a point that was answered; what is not known is left out.

    Args: answer: to the point's question. samples_per_epoch: of the data; None: not known.
    """
    evaluation, problem = answer.evaluation, answer.problem
    result, cluster = evaluation.result, problem.cluster
    step, batch = result.step_s, problem.global_batch
    fullest = max(evaluation.memory, key=lambda rank: rank.total_bytes)
    least = min(evaluation.memory, key=lambda rank: (rank.fit_probability, -rank.total_bytes))
    risk = "may run out of memory" if least.fits else "does not fit"
    row: dict[str, Any] = {
        "status": OK if result.fits else DOES_NOT_FIT,
        "reason": "" if least.fits and least.is_safe else f"{risk}: {least.describe()}",
        "strategy": result.strategy,
        "division": division(result.plan),
        "plan": result.plan.summary(),
        "plan_in_words": plan_in_words(result.plan),
        "devices": cluster.size,
        "global_batch": batch,
        **_interval("step{}_s", step),
        **_interval("throughput{}_samples_per_s", result.throughput_samples_per_s),
        "peak_memory_bytes": fullest.total_bytes,
        "peak_memory_p05_bytes": fullest.low_bytes,
        "peak_memory_p95_bytes": fullest.high_bytes,
        "memory_limit_bytes": fullest.limit_bytes,
        "fit_probability": result.fit_probability,
        "communication_fraction": result.communication_fraction,
        "bubble_fraction": result.bubble_fraction,
        "warnings": "; ".join(result.warnings),
    }
    ranks = evaluation.breakdown
    row |= {name: sum(getattr(rank, name) for rank in ranks) / len(ranks) for name in CATEGORIES}
    row["one_step_s"] = sum(row[name] for name in CATEGORIES)
    row |= _spent(answer, samples_per_epoch)
    # The sketch shows the first rank of a few stages: the first ones and the last.
    first = {result.plan.stage_of_rank(rank): rank for rank in reversed(evaluation.folding.ranks)}
    stages = sorted(first)
    stages[SKETCHED_RANKS - 1 :] = stages[SKETCHED_RANKS - 1 :][-1:]
    lanes = sketch(evaluation.compiled, evaluation.timeline, [first[stage] for stage in stages])
    row["timeline"] = [list(lane) for lane in lanes]
    row["memory_lines"] = {name: size for name, size in fullest.lines if size}
    return row


def _spent(answer: Answer, samples_per_epoch: int | None) -> dict[str, Any]:
    """Time, price and energy per epoch, per million samples and of the whole run, as far as they are known."""
    problem, result = answer.problem, answer.evaluation.result
    step, batch = result.step_s, problem.global_batch
    operation = running_costs(answer.question, problem)
    usd_per_s = None if operation.usd_per_hour is None else operation.usd_per_hour * problem.cluster.size / HOUR_S
    watts = None if operation.busy_power_w is None else operation.busy_power_w * result.plan.world_size
    spent: dict[str, Any] = {}
    for name, rate in (("usd", usd_per_s), ("kwh", None if watts is None else watts / JOULES_PER_KWH)):
        if rate is None:
            continue
        spent |= _interval(f"{name}_per_million_samples{{}}", step.times(rate * MILLION / batch))
        if samples_per_epoch is not None:
            spent |= _interval(f"{name}_per_epoch{{}}", step.times(rate * -(-samples_per_epoch // batch)))
    if samples_per_epoch is not None:
        spent |= _interval("epoch{}_s", step.times(-(-samples_per_epoch // batch)))
    figures = answer.prediction.quoted
    if figures is not None:
        spent |= {"tokens_per_s": figures.tokens_per_s.median, "mfu": figures.mfu}
        if (run := figures.run) is not None:
            totals = {"run{}_s": run.losses.days * 24 * HOUR_S, "run_usd{}": run.usd, "run_kwh{}": run.energy_kwh}
            for column, value in totals.items():
                spent |= {} if value is None else _interval(column, step.times(value / step.median))
    return spent


def division(plan: Plan) -> str:
    """`pp2 dp4 zero1`: how the work is divided, without microbatches and buckets."""
    parts = [f"{axis}{size}" for axis in ("pp", "dp", "tp", "cp", "ep") if (size := getattr(plan.mesh, axis)) > 1]
    parts += [f"zero{plan.zero_stage}"] if plan.zero_stage else []
    parts += [f"dp_shard{plan.mesh.dp_shard}"] if plan.mesh.dp_shard else []
    return " ".join(parts) or "one device"


def _interval(name: str, interval: Interval) -> dict[str, float]:
    return dict(zip(_three(name), (interval.median, interval.p05, interval.p95), strict=True))
