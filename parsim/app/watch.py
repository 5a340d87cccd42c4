"""A WatchedTraining: the step of somebody's own training loop, predicted before it starts and compared while it runs.

The clock is read at the end of every step, and a GPU is waited for only where a window of steps ends. So a window's mean step
counts everything between two steps: loading, logging, the optimizer. A window that `pause` cuts does not count.
Leaves out what differs from rank to rank: each process times itself, and the first one (rank 0) reports.
"""

from __future__ import annotations

import os
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from parsim.app.answer import Answer
from parsim.app.ask import whole
from parsim.app.functions import AskedCluster, AskedModel, ask_aloud, check_nothing_beside, question_by_name, takes_keys
from parsim.app.prediction import Prediction
from parsim.errors import ConfigError, near_matches, require
from parsim.plans.plan import plan_in_words
from parsim.units import format_bytes, format_percent, format_seconds

if TYPE_CHECKING:
    from types import TracebackType

Write = Callable[[Mapping[str, float], int], None]
"""Takes figures by name, and the step."""
Destination = Literal["tensorboard", "wandb", "mlflow", "trackio"]


def _tensorboard() -> Write:
    require("tensorboard", "writing to TensorBoard")
    from torch.utils.tensorboard import SummaryWriter

    writer: Any = SummaryWriter()

    def write(figures: Mapping[str, float], step: int) -> None:
        for name, value in figures.items():
            writer.add_scalar(name, value, step)
        writer.flush()

    return write


def _wandb() -> Write:
    require("wandb", "writing to Weights & Biases")
    import wandb

    if wandb.run is None:
        raise ConfigError("to = 'wandb' writes into the run that is open, and none is: call wandb.init() first")
    return lambda figures, step: wandb.log({**figures, "parsim/step": step})  # its own step is the training's


def _mlflow() -> Write:
    require("mlflow", "writing to MLflow")
    import mlflow

    return lambda figures, step: mlflow.log_metrics(dict(figures), step=step)


def _trackio() -> Write:
    require("trackio", "writing to trackio")
    import trackio

    return lambda figures, step: trackio.log({**figures, "parsim/step": step})


DESTINATIONS: dict[str, Callable[[], Write]] = {
    "tensorboard": _tensorboard,
    "wandb": _wandb,
    "mlflow": _mlflow,
    "trackio": _trackio,
}


@dataclass(kw_only=True, eq=False)
class WatchedTraining:
    """What `parsim.watch` returns. Call `step` at the end of every optimizer step, or give a trainer `lightning()` or
    `hugging_face()`.

    Attributes:
        prediction: of the step. every: steps of a window; the first one warms up and does not count.
        steps: optimizer steps so far. windows_s: the mean step of each window that counts.
    """

    prediction: Prediction
    every: int
    writes: tuple[Write, ...] = ()
    steps: int = 0
    windows_s: list[float] = field(default_factory=list)
    _since: float | None = None
    _in_window: int = 0
    _warm: bool = False

    def __enter__(self) -> WatchedTraining:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if kind is None:
            self._say(str(self))

    def step(self) -> None:
        """One optimizer step has ended."""
        self.steps += 1
        if self._since is not None:
            self._in_window += 1
            if self._in_window < self.every:
                return
        _wait_for_gpu()
        now, since = time.perf_counter(), self._since
        self._since, self._in_window = now, 0
        if since is None:
            return
        if self._warm:
            self.windows_s.append((now - since) / self.every)
            for write in self.writes:
                write(self.figures(), self.steps)
            self._since = time.perf_counter()  # writing is no part of the next window
        self._warm = True

    def pause(self) -> None:
        """Validation, a checkpoint or anything else that is no step: the window that it cuts is left out."""
        self._since = None

    @property
    def measured_s(self) -> float | None:
        """Seconds of the median window's mean step; None before the first one."""
        return statistics.median(self.windows_s) if self.windows_s else None

    @property
    def as_predicted(self) -> bool | None:
        """Whether that lies in the predicted 90% interval; None before the first window."""
        interval = self.prediction.step_s
        return None if self.measured_s is None else interval.p05 <= self.measured_s <= interval.p95

    def figures(self) -> dict[str, float]:
        """What is written: the newest window and the prediction, in seconds and bytes."""
        predicted, figures = self.prediction.step_s, {}
        if self.windows_s:
            figures = {"parsim/step_s": self.windows_s[-1], "parsim/of_predicted": self.windows_s[-1] / predicted.median}
        if (peak := _peak_gpu_bytes()) is not None:
            figures |= {"parsim/peak_memory_bytes": float(peak)}
            figures |= {"parsim/predicted_peak_memory_bytes": float(max(self.prediction.peak_memory_bytes))}
        return {"parsim/predicted_step_s": predicted.median, **figures}

    def __str__(self) -> str:
        problem, interval = self.prediction.problem, self.prediction.step_s
        low, high = format_seconds(interval.p05), format_seconds(interval.p95)
        within = f"{format_seconds(interval.median)} (90% interval {low} to {high})"
        told = f"{problem.model.name} on {problem.cluster.name}, {plan_in_words(self.prediction.plan)}: predicted {within}"
        if self.measured_s is None:
            return f"{told}; nothing measured yet ({self.steps} steps of the {2 * self.every + 1} that two windows take)"
        apart = self.measured_s / interval.median - 1
        more = f"{format_percent(abs(apart))} {'more' if apart >= 0 else 'less'}"
        inside = "inside" if self.as_predicted else "outside"
        counted = f"{len(self.windows_s)} windows of {self.every} steps"
        peak, predicted_peak = _peak_gpu_bytes(), format_bytes(max(self.prediction.peak_memory_bytes))
        memory = "" if peak is None else f"; peak memory {format_bytes(peak)}, predicted {predicted_peak}"
        return f"{told}, measured {format_seconds(self.measured_s)} over {counted}: {more}, {inside} the interval{memory}"

    def lightning(self) -> Any:
        """A callback for a Lightning Trainer. Raises MissingDependencyError without lightning."""
        return lightning_callback(self)

    def hugging_face(self) -> Any:
        """A callback for a Hugging Face Trainer. Raises MissingDependencyError without transformers."""
        return hugging_face_callback(self)

    def check_trainer(self, *, world_size: int, global_batch: int | None = None) -> None:
        """Raises ConfigError if what trains is not what was predicted."""
        plan = self.prediction.plan
        if world_size != plan.world_size:
            raise ConfigError(
                f"{world_size} processes train, and the prediction is for {plan.world_size} ({plan_in_words(plan)}); "
                "name the cluster and the devices that train in parsim.watch"
            )
        if global_batch is not None and global_batch != plan.global_batch:
            raise ConfigError(
                f"the trainer takes {global_batch} samples per step, and the prediction is for {plan.global_batch}; give "
                f"parsim.watch global_batch={global_batch}"
            )

    def _say(self, text: str) -> None:
        if _rank() == 0:
            print(f"parsim: {text}", file=sys.stderr, flush=True)


# A WatchedTraining as the callback of a trainer, which says when a step ends and what interrupts it.


def lightning_callback(watch: WatchedTraining) -> Any:
    """`lightning.pytorch.Callback`. A step ends where `trainer.global_step` grows, so accumulated batches are one step."""
    require("lightning", "a Lightning callback")
    from lightning.pytorch import Callback

    class WatchCallback(Callback):  # type: ignore[misc]
        seen = 0

        def on_train_start(self, trainer: Any, pl_module: Any) -> None:
            watch.check_trainer(world_size=trainer.world_size)
            self.seen = trainer.global_step

        def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
            if trainer.global_step > self.seen:
                self.seen = trainer.global_step
                windows = len(watch.windows_s)
                watch.step()
                if len(watch.windows_s) > windows and trainer.is_global_zero:
                    for logger in trainer.loggers:
                        logger.log_metrics(watch.figures(), step=trainer.global_step)

        def on_validation_start(self, trainer: Any, pl_module: Any) -> None:
            watch.pause()

        def on_save_checkpoint(self, trainer: Any, pl_module: Any, checkpoint: Any) -> None:
            watch.pause()

        def on_train_end(self, trainer: Any, pl_module: Any) -> None:
            watch.__exit__(None, None, None)

    return WatchCallback()


def hugging_face_callback(watch: WatchedTraining) -> Any:
    """`transformers.TrainerCallback`, which also checks the samples of a step. Its `on_step_end` is one optimizer step."""
    require("transformers", "a Hugging Face callback")
    from transformers import TrainerCallback

    class WatchCallback(TrainerCallback):
        def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            ranks = args.world_size
            samples = args.train_batch_size * args.gradient_accumulation_steps * ranks
            watch.check_trainer(world_size=ranks, global_batch=samples)

        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            watch.step()

        def on_evaluate(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            watch.pause()

        def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            watch.pause()

        def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            watch.__exit__(None, None, None)

    return WatchCallback()


@takes_keys
def watch(
    model: AskedModel | Answer | Prediction,
    cluster: AskedCluster | None = None,
    *,
    global_batch: int | None = None,
    to: Destination | tuple[Destination, ...] = (),
    every: int = 20,
    example_inputs: Any = None,
    settings: Mapping[str, object] | None = None,
    overrides: Sequence[str] = (),
    **keys: Any,
) -> WatchedTraining:
    """Predict the step of a training loop of your own, and compare while it runs.

    Call `step()` of the result after every optimizer step, or give a trainer its `lightning()` or `hugging_face()`.

    Args:
        model, cluster, global_batch, example_inputs, keys, settings, overrides: as for `plan`. strategy: "single" by default,
            "dp" where more processes train (WORLD_SIZE). Or an Answer (its chosen plan) or a Prediction alone.
        to: "tensorboard", "wandb", "mlflow", "trackio" or several: where each window's mean step goes, beside the prediction.
        every: steps of a window.

    Raises:
        ParsimError: as `plan`; ConfigError if other processes train than the plan has ranks; MissingDependencyError.

    >>> from parsim import simulate
    >>> predicted = simulate("mlp", cluster="dgx1-v100-32gb", global_batch=64, devices=1, strategy="single")
    >>> watch(predicted, every=2).steps
    0
    """
    if every < 1:
        raise ConfigError(f"every = {every}: a window has at least one step")
    names = (to,) if isinstance(to, str) else tuple(to)
    for name in names:
        if name not in DESTINATIONS:
            listed = ", ".join(DESTINATIONS)
            raise ConfigError(f"to = {name!r} is no destination{near_matches(name, DESTINATIONS)}; there are {listed}")
    if isinstance(model, Answer | Prediction):
        beside = {"cluster": cluster, "global_batch": global_batch, "settings": settings, "example_inputs": example_inputs}
        check_nothing_beside(model, overrides=overrides or None, **beside, **keys)
        prediction = model.chosen if isinstance(model, Answer) else model
    else:
        if not any("strategy" in text for text in (*keys, *(settings or {}), *overrides)):
            keys["strategy"] = "single" if (world_size_here() or 1) == 1 else "dp"
        prediction = whole(
            ask_aloud(question_by_name(model, cluster, global_batch, settings, keys, overrides, example_inputs))
        ).prediction
    writes = tuple(DESTINATIONS[name]() for name in names) if _rank() == 0 else ()
    watching = WatchedTraining(prediction=prediction, every=every, writes=writes)
    if (processes := world_size_here()) is not None:
        watching.check_trainer(world_size=processes)
    watching._say(str(watching).partition(";")[0])
    return watching


def world_size_here() -> int | None:
    """Processes that train together, of torch.distributed or a launcher's environment; None: neither says it."""
    torch = sys.modules.get("torch")
    if torch is not None and torch.distributed.is_available() and torch.distributed.is_initialized():
        return int(torch.distributed.get_world_size())
    return int(os.environ["WORLD_SIZE"]) if os.environ.get("WORLD_SIZE", "").isdigit() else None


def _rank() -> int:
    return int(os.environ["RANK"]) if os.environ.get("RANK", "").isdigit() else 0


def _wait_for_gpu() -> None:
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_initialized():
        torch.cuda.synchronize()


def _peak_gpu_bytes() -> int | None:
    torch = sys.modules.get("torch")
    used = torch is not None and torch.cuda.is_initialized()
    return int(torch.cuda.max_memory_allocated()) if torch is not None and used else None
