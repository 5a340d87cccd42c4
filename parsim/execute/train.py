"""The training of one rank: steps, checkpoints, changes of plan, the score at the end, and going on from a checkpoint."""

from __future__ import annotations

import contextlib
import math
import shutil
import time
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from parsim.data.samples import Samples, StreamSamples
from parsim.errors import ExecutionError, NoSplitError
from parsim.execute.checkpoint import checkpoint
from parsim.execute.checkpoint.checkpoint import set_aside_newer
from parsim.execute.cuda.faults import is_out_of_memory
from parsim.execute.evaluation import BATCH, Validation, score
from parsim.execute.job import SCORE, Job
from parsim.execute.metrics import FILE
from parsim.execute.processes.exchange import done_by_rank_0, gather_values, meet, value_of_rank_0
from parsim.execute.processes.group import ProcessPlace
from parsim.execute.processes.heartbeat import Doing, pulse
from parsim.execute.processes.output import write_progress
from parsim.execute.processes.speed_probe import SpeedProbe
from parsim.execute.rank_run import ProcessGroups, RankRun, run_dataset
from parsim.files import (
    json_text,
    parse_json,
    read_json,
    read_regular,
    write_json_atomically,
    write_problem,
    write_text_atomically,
)
from parsim.model.component import LOSS
from parsim.numeric import keep_nothing, keep_what_is_there
from parsim.program.placed import PlanIndex
from parsim.units import format_seconds

if TYPE_CHECKING:
    from parsim.execute.adaptive import Steering

BOARD = "tensorboard"
"""Folder of event files, where the training writes them."""
RECENT = 20
"""Steps whose mean is shown as the measured step."""
NORMS = 256
"""Norms of gradients are read from the device together, at most so many: each read waits for it."""


class TrainingLog:
    """What a training tells while it runs: a line of progress, and metrics.jsonl with one line per step. The losses of ranks
    are added up where ranks meet anyway: at validations, checkpoints and the end. A resumed training first drops the lines
    behind its checkpoint."""

    def __init__(self, folder: Path, entry: RankRun, steps: int) -> None:
        self._path, self._steps = folder / FILE, steps
        self._first = entry.step_number
        self._written = self._read = 0
        self._seconds: list[float] = []
        self._rates: list[dict[str, float]] = []
        self._norms: list[Any] = []
        self._last = time.perf_counter()
        self._board: Any = None
        if entry.stage.rank == 0:
            _cut(self._path, self._first)
            if entry.run.recipe.tensorboard:
                self._board = _board(folder / BOARD, self._first)

    def begin_step(self, entry: RankRun) -> None:
        self._rates.append(entry.learning_rates)
        self._last = time.perf_counter()

    def end_step(self, entry: RankRun) -> None:
        self._seconds.append(time.perf_counter() - self._last)
        self._norms.append(entry.stage.gradient_norm)
        if len(self._norms) - self._read >= NORMS:
            self._read_norms()

    def _read_norms(self) -> None:
        """Norms as numbers: each is an array of the device until then."""
        unread = [norm for norm in self._norms[self._read :] if norm is not None]
        if unread:  # a plan clips in every step, or in none
            self._norms[self._read :] = torch.cat(unread).tolist()
        self._read = len(self._norms)

    def write(self, entry: RankRun, place: ProcessPlace, validation: dict[str, Any] | None) -> None:
        """Write the steps since the last time, with the scores after the last step where it had some. Every rank calls it."""
        losses = entry.record.losses[self._written :]
        everyone = gather_values(losses)
        first = self._written
        self._written += len(losses)
        if place.rank != 0 or not losses:
            return
        self._read_norms()
        lines = []
        for number, parts in enumerate(zip(*everyone, strict=True), first):
            counted = [loss for loss in parts if loss is not None]
            line: dict[str, Any] = {
                "step": self._first + number + 1,
                **({"loss": math.fsum(counted)} if counted else {}),
                "learning_rate": self._rates[number][""],
                **{f"learning_rate.{name}": rate for name, rate in self._rates[number].items() if name},
                "seconds": self._seconds[number],
            }
            norm = self._norms[number]
            lines.append(line if norm is None else {**line, "gradient_norm": norm})
        self._norms[first : self._written] = [None] * len(losses)
        if validation is not None:
            lines[-1]["validation"] = {name: value for name, value in validation.items() if name != "step"}
        if self._board is not None:
            _show(self._board, lines)
        try:
            with self._path.open("a", encoding="utf-8") as file:
                file.writelines(json_text(line) + "\n" for line in lines)
        except OSError as error:
            raise ExecutionError(f"cannot write {self._path}: {write_problem(error, self._path.parent)}") from error

    @property
    def step_s(self) -> float:
        recent = self._seconds[-RECENT:]
        return sum(recent) / len(recent)

    def progress(self, entry: RankRun, loss: float) -> dict[str, str]:
        """How far the training is, for people. loss: of the rank's own samples."""
        step_s = self.step_s
        predicted_s = entry.run.predicted_step_s
        return {
            "step": f"{entry.step_number}/{self._steps}",
            "loss on its last samples": f"{loss:.4f}",
            "samples/s": f"{entry.run.plan.global_batch / step_s:.4g}",
            "a step takes": format_seconds(step_s),
            **({"predicted": format_seconds(predicted_s)} if predicted_s else {}),
            "ends in": format_seconds(step_s * (self._steps - entry.step_number)),
        }


def _board(folder: Path, steps: int) -> Any:
    """A writer of event files; what an earlier part of the training wrote behind its checkpoint is hidden."""
    from torch.utils.tensorboard import SummaryWriter

    board: Any = SummaryWriter  # torch leaves it without types
    return board(str(folder), purge_step=steps + 1)


def _show(board: Any, lines: Sequence[Mapping[str, Any]]) -> None:
    """The numbers of metrics.jsonl as scalars; those of a validation below validation/."""
    for line in lines:
        scalars = {name: value for name, value in line.items() if name not in ("step", "validation")}
        scalars |= {f"validation/{name}": value for name, value in line.get("validation", {}).items()}
        for name, value in scalars.items():
            board.add_scalar(name, value, line["step"])
    board.flush()


def _cut(path: Path, steps: int) -> None:
    """Keep the lines of the first `steps` steps; one that cannot be read ends them."""
    if not path.is_file():
        return
    lines = []
    for text in read_regular(path).decode("utf-8", errors="replace").splitlines():
        try:
            if not 0 < parse_json(text, allow_nan=True)["step"] <= steps:
                break
        except (ValueError, KeyError, TypeError):
            break
        lines.append(text + "\n")
    write_text_atomically(path, "".join(lines))


class CheckpointTimes:
    """After which steps a checkpoint is written where nobody says: so often that at most a minute or a quarter of the training
    is lost, and never so often that writing takes more than 2% of the time. Every rank asks after every step. All of them come
    to the same steps, by what they measured at the one before."""

    MOST_S, LEAST_S, LOST, SHARE = 60.0, 5.0, 0.25, 0.02
    FIRST_STEPS = 5
    """By which the first one is planned."""
    SLOW_BYTES_PER_S = 200e6
    """With which the first checkpoint is taken to be written, before one was measured: a slow disk."""

    def __init__(self, done: int, state_bytes: int) -> None:
        """done: steps before this launch. state_bytes: what this rank writes."""
        self._began_s = time.monotonic()
        self._guess_s = state_bytes / self.SLOW_BYTES_PER_S
        self._next, self._is_planned = done + self.FIRST_STEPS, False

    def due(self, done: int, step_s: float) -> bool:
        """Whether to write one after step `done`. step_s: mean of the last steps."""
        if done == self._next and not self._is_planned:
            self._is_planned = True
            self._plan(done, step_s, self._guess_s)
            return False
        return done == self._next

    def written(self, done: int, step_s: float, save_s: float) -> str:
        """Plan the next one after one that took `save_s`. Returns in how many seconds it comes, and what they cost."""
        wait_s, save_s = self._plan(done, step_s, save_s)
        share = save_s / (wait_s + save_s)
        return f"after step {done}, in {format_seconds(save_s)}; the next in {format_seconds(wait_s)} ({share:.1%} of the time)"

    def _plan(self, done: int, step_s: float, save_s: float) -> tuple[float, float]:
        """Seconds until the next checkpoint, and of writing one, both of the slowest rank."""
        seen = gather_values([step_s, save_s, time.monotonic() - self._began_s])
        step_s, save_s, trained_s = (max(column) for column in zip(*seen, strict=True))
        wait_s = max(save_s / self.SHARE, min(self.MOST_S, max(self.LEAST_S, self.LOST * trained_s)))
        self._next = done + max(1, math.ceil(wait_s / max(step_s, 1e-9)))
        return wait_s, save_s


SAY_EVERY_S = 1.0
FEWER = 4
"""So many times fewer samples are scored at once where the memory of a GPU does not suffice."""


def train(
    job: Job, entry: RankRun, place: ProcessPlace, groups: ProcessGroups, probe: SpeedProbe | None = None
) -> RankRun | None:
    """Train to step `job.steps`, with checkpoints and switches of plan; then score the result on the test samples. Before and
    after the steps, ranks with a `probe` measure the speed of their cores. Returns the run as it ended, perhaps under another
    plan; None: an earlier launch has done all that."""
    folder = Path(job.output) / "checkpoints"
    entry.checkpoints = folder
    if job.resume:
        _resume(entry, folder, place)
        if value_of_rank_0(done_by_rank_0(place, lambda: _has_ended(job, entry))):
            if place.rank == 0:
                text = f"the training in {job.output} has ended at step {entry.step_number}: nothing is left to do"
                warnings.warn(text, stacklevel=1)
            entry.close()
            return None
    said_s = time.monotonic()
    steering: Steering | None = None
    if job.adaptive is not None:
        from parsim.execute.adaptive import Steering  # the search, with numba: a quarter of a rank's imports

        steering = Steering(job.adaptive, entry.run, job.steps, place, built_s=entry.rebuilt_s(place, groups))
    validation: Validation | None = None
    if (rule := entry.run.recipe.evaluation) is not None:
        every = rule.every or entry.order.steps_per_epoch
        validation = Validation(rule=rule, folder=Path(job.output) / "best" / "checkpoints", every=every, steps=job.steps)
        validation.begin(entry, place)
    stopped: int | None = None
    log = TrainingLog(Path(job.output), entry, job.steps)
    times = None if job.checkpoint_every is not None else CheckpointTimes(entry.step_number, _state_bytes(entry))
    keep_what_is_there()
    done_by_rank_0(place, lambda: None)  # rank 0 has read the profile meanwhile
    pace_s = _looks(probe)
    warm, warmup_steps = 0, min(job.warmup_steps, job.steps - entry.step_number - 1)  # at least one step is timed
    while entry.step_number < job.steps:
        log.begin_step(entry)
        if warm < warmup_steps:
            entry.step(keep=True)
            entry.forget_times()
            warm += 1
        else:
            entry.timed(1)
        log.end_step(entry)
        done, plan = entry.step_number, entry.run.plan
        for switch in job.switches:
            if switch.step == done:
                entry = entry.switched(switch.plan, place, groups)
        if steering is not None and job.adaptive is not None and steering.due(done):
            entry = _steer(job, steering, entry, place, groups)
        if entry.run.plan is not plan:
            keep_nothing()
            keep_what_is_there()  # without what the plan before held
            if entry.counters is not None:
                entry.counters.give_back()  # NCCL takes memory of its own for the groups of the new plan
        scores: dict[str, Any] | None = None
        if validation is not None and validation.due(done):
            stopped = done if validation.look(entry, place) else None
            scores = validation.seen[-1]
        saves = done in (job.steps, stopped) or bool(job.checkpoint_every and done % job.checkpoint_every == 0)
        by_time = times is not None and not saves and times.due(done, log.step_s)
        saves |= by_time
        if saves or scores is not None:
            log.write(entry, place, scores)
        if saves:
            began_s = time.monotonic()
            entry.save(folder)
            if times is not None and by_time:
                text = times.written(done, log.step_s, time.monotonic() - began_s)
                if place.rank == 0:
                    write_progress({"checkpoint": text})
            if validation is not None:
                validation.has_saved(place)
        speaker, share = _speaker(entry.layout)
        says = time.monotonic() - said_s > SAY_EVERY_S or done == job.steps
        if place.rank == speaker and entry.own_loss is not None and says:
            said_s = time.monotonic()
            write_progress(log.progress(entry, entry.own_loss / share))
        if stopped is not None:
            break
    entry.record.pace_s = pace_s + _looks(probe)
    looks = {} if validation is None else validation.to_dict(stopped)
    done_by_rank_0(place, lambda: _score_last(job, entry, folder, steering, looks))
    entry.checkpoints = None  # from here on steps are made for their times and their memory alone
    if not entry.record.rounds:
        entry.timed(1)
        entry.record.losses.clear()
    entry.measure_memory()
    return entry


def _state_bytes(entry: RankRun) -> int:
    held = entry.stage.resident_tensors()
    return sum(tensor.nbytes for line in ("parameters", "optimizer_state") for tensor in held[line])


def _looks(probe: SpeedProbe | None) -> list[float]:
    meet()
    seconds = [] if probe is None else [probe.seconds()]
    meet()
    return seconds


def _resume(entry: RankRun, folder: Path, place: ProcessPlace) -> None:
    """Go on from the newest checkpoint that every rank can read. Raises ExecutionError if there are some and none can be."""
    pulse().begin(Doing.PREPARING, "reading a checkpoint")
    if place.rank == 0:
        checkpoint.discard_unfinished(folder)  # of ranks that were ended while they wrote: the others wait for rank 0
    candidates = (candidate.step for candidate in checkpoint.checkpoints(folder))
    problem = ""
    while (step := value_of_rank_0(done_by_rank_0(place, lambda: next(candidates, None)))) is not None:
        problem = ""
        try:
            entry.resume(checkpoint.checkpoint_at(folder, step))
        except ExecutionError as error:
            problem = str(error)
        problem = next(filter(None, gather_values(problem)), "")
        if not problem:
            if place.rank == 0:
                set_aside_newer(folder, step)
                write_progress({"resumed": f"at step {step}"})
            return
        if place.rank == 0:
            warnings.warn(problem, stacklevel=1)
    if value_of_rank_0(done_by_rank_0(place, lambda: checkpoint.has_checkpoints(folder))):
        raise ExecutionError(
            f"no checkpoint in {folder} can be used{f' ({problem})' if problem else ''}; the warnings say why; to start "
            "again, give another --out, or remove that folder"
        )


def _has_ended(job: Job, entry: RankRun) -> bool:
    """Whether an earlier launch has ended this training, with its score and records; removes those of an earlier part. A launch
    file may be run again. `parsim run` looks for itself, before it starts any process."""
    output = Path(job.output)
    records, result = output / entry.run.name, output / SCORE
    try:
        ended = read_json(result)
        last = ended.get("stopped_early_at") or job.steps
    except (OSError, ValueError, AttributeError):
        last = None
    if last == entry.step_number and all((records / f"rank{rank}.json").is_file() for rank in range(job.world_size)):
        return True
    result.unlink(missing_ok=True)
    shutil.rmtree(records, ignore_errors=True)
    return False


def _score_last(job: Job, entry: RankRun, folder: Path, steering: Steering | None, looks: dict[str, Any]) -> None:
    pulse().begin(Doing.PREPARING, "scoring")
    last = checkpoint.latest_checkpoint(folder)
    if last is None:
        raise ExecutionError(f"the checkpoint that was just written to {folder} cannot be read")
    result = dict(looks)
    with contextlib.suppress(NoSplitError):  # of one's own: training samples are all there is
        samples = run_dataset(entry.run, "test")
        samples = samples.whole() if isinstance(samples, StreamSamples) else samples
        result = {**_scored_in_memory(entry, checkpoint.load_state(last), samples), **looks}
    write_json_atomically(Path(job.output) / SCORE, result)
    write_progress({name: value for name, value in result.items() if name not in looks})
    if steering is not None:
        decisions = [decision.to_dict() for decision in steering.decisions]
        write_json_atomically(Path(job.output) / "decisions.json", decisions, indent=1)


def _scored_in_memory(entry: RankRun, state: checkpoint.RankState, samples: Samples) -> dict[str, Any]:
    """The score, with as many samples at once as the GPU of rank 0 has memory for beside what it trains with. A model that is
    trained in parts may not fit there as a whole. Its training has ended well all the same, and its weights are in the
    checkpoint."""
    at_once = BATCH
    while at_once:
        try:
            return score(entry.run, state, samples, entry.stage.device, at_once=at_once)
        except RuntimeError as error:
            if not is_out_of_memory(error):
                raise
            at_once //= FEWER
    reason = f"the whole model with one sample needs more memory than {entry.stage.device} has left"
    warnings.warn(f"the test samples were not scored: {reason}", stacklevel=1)
    return {"not_scored": reason}


def _steer(job: Job, steering: Steering, entry: RankRun, place: ProcessPlace, groups: ProcessGroups) -> RankRun:
    """Show the controller the last window; change plan if it says so."""
    assert job.adaptive is not None
    times = entry.record.steps[-job.adaptive.window_steps :]
    step_s = mean_round_s(entry.record.rounds, len(times))
    plan = steering.decide(entry.run.plan, entry.layout.model, entry.step_number, times, step_s)
    if plan is not None or steering.ends(entry.step_number):
        entry.forget_times()
    if plan is None:
        return entry
    if place.rank == 0:
        write_progress({"step": entry.step_number, "new plan": plan.summary(), "because": steering.decisions[-1].reason})
    began = time.monotonic()
    after = entry.switched(plan, place, groups)
    steering.has_switched(time.monotonic() - began)
    return after


def mean_round_s(rounds: Sequence[tuple[float, float, int]], steps: int) -> float:
    """Mean seconds of the last `steps` of (begin, end, steps) rounds, a step each; 0 without any. What passes between them (a
    decision, a planning) is not a part of it."""
    last = rounds[len(rounds) - steps :]
    return sum(end - start for start, end, _ in last) / len(last) if last else 0.0


def _speaker(layout: PlanIndex) -> tuple[int, float]:
    """The last rank whose loss counts, and the share of the batch that it sees."""
    plan, placement = layout.plan, layout.placement[LOSS]
    mesh = plan.mesh
    shard = {"place": placement.shard, "replicate": 0}.get(placement.kind, mesh.tp - 1)
    share = placement.batch_ways(mesh.tp) / mesh.tp / mesh.dp
    return plan.stages[-1].ranks[(mesh.dp - 1) * mesh.tp + shard], share
