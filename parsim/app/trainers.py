"""A Watch as the callback of Lightning's and Hugging Face's trainers, which say when a step ends and what interrupts it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from parsim.errors import require

if TYPE_CHECKING:
    from parsim.app.watch import Watch


def lightning_callback(watch: Watch) -> Any:
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


def hugging_face_callback(watch: Watch) -> Any:
    """`transformers.TrainerCallback`, which also checks the samples of a step. Its `on_step_end` is one optimizer step."""
    require("transformers", "a Hugging Face callback")
    from transformers import TrainerCallback

    class WatchCallback(TrainerCallback):  # type: ignore[misc]
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
