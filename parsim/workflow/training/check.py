"""Whether a training can run, looked at before any process starts: its data, schedule and weight decay."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from parsim.errors import ConfigError, MissingDependencyError, ModelError
from parsim.workflow.config import RunConfig

if TYPE_CHECKING:
    from parsim.data import Order, Samples
    from parsim.model.model import Model


def check_training(config: RunConfig, model: Model) -> None:
    """Look at what only the module, the data and torch can tell.

    Raises:
        DataError: data that do not suit the model or the batch. ConfigError: torch refuses the schedule or an argument of the
            optimizer, or a pattern of no_weight_decay matches nothing. ModelError: complex parameters.
            MissingDependencyError: TensorBoard is not installed.
    """
    from parsim.execute.state.optimizer import check_states
    from parsim.execute.training.learning_rate import check_schedule
    from parsim.execute.training.weight_decay import check_exempt
    from parsim.model.build import build_fake, check_real

    training, recipe = config.training, config.training.recipe
    order = _order(config)
    check_real(build_fake(config.model_spec))
    rules = [(training.optimizer, training.resolved_learning_rate, recipe)]
    rules += [(group.optimizer, group.learning_rate, recipe.of(group.name)) for group in recipe.groups]
    for optimizer, _, own in rules:
        check_states(optimizer, own)
    check_exempt((parameter.name for parameter in model.parameters), recipe.no_weight_decay)
    if recipe.evaluation is not None:
        _check_metrics(config, recipe.evaluation.metrics)
        if not recipe.evaluation.every:
            order.steps_per_epoch  # noqa: B018 - an iterable dataset without a length has no epochs
    steps = total_steps(config)
    if recipe.tensorboard:
        check_tensorboard()
    for optimizer, rate, own in rules:
        check_schedule(optimizer, rate, own, steps=steps, order=order)


SHIPPED_IMAGES = ("digits", "cifar10", "cifar100")
"""Datasets that hold images and a class of each."""


def check_images_suit(config: RunConfig) -> None:
    """Raise DataError for a shipped set of images that does not suit the model: found before this machine is calibrated."""
    from parsim.data.dataset import check_images
    from parsim.data.for_model import target_of

    if config.training.dataset not in SHIPPED_IMAGES:
        return
    try:
        target = target_of(config.model_spec)
    except ModelError:  # told by whoever loads the model
        return
    check_images(config.training.dataset, target)


def check_tensorboard() -> None:
    """Raise MissingDependencyError where torch cannot write for TensorBoard."""
    try:
        import torch.utils.tensorboard  # noqa: F401
    except ImportError as error:
        raise MissingDependencyError(
            "training.tensorboard = true needs the package tensorboard: pip install 'parsim[tensorboard]'; or leave it out: "
            "metrics.jsonl in the run folder has the same numbers"
        ) from error


def _check_metrics(config: RunConfig, metrics: tuple[str, ...]) -> None:
    """Raise ConfigError for metrics that what the model predicts has not."""
    from parsim.model.interface import interface_of
    from parsim.model.losses import CLASSES

    interface = interface_of(config.model_spec)
    if metrics and interface.target is None:
        raise ConfigError(
            f"training.evaluation.metrics = {list(metrics)}: {config.model.name} takes its targets itself, so a metric cannot "
            "compare with them; drop metrics, and follow the loss"
        )
    of_classes = [name for name in metrics if name in ("accuracy", "perplexity", "mean_iou")]
    if of_classes and interface.objective.row.targets != CLASSES:
        raise ConfigError(
            f"training.evaluation.metrics: {of_classes[0]} compares classes, and {config.model.name} is trained by "
            f"{interface.objective.loss}; take mean_absolute_error, or a function of your own"
        )


def total_steps(config: RunConfig) -> int:
    """training.steps, or as many as training.epochs takes."""
    if config.training.steps is not None:
        return config.training.steps
    return config.training.epochs * steps_per_epoch(config)


def samples_not_taken(config: RunConfig, steps: int) -> str:
    """A warning for whoever gives the samples of a whole training and expects a run of so many; "" where there is no doubt.

    Args:
        config: of the run. steps: that it takes.
    """
    training = config.training
    if training.samples is None or training.steps is not None:
        return ""
    return (
        f"training.samples = {training.samples:,.0f} is for the time and price of a whole training. This run takes {steps} "
        f"steps of {training.global_batch} samples, by training.epochs; set training.steps for another number"
    )


def steps_per_epoch(config: RunConfig) -> int:
    """Steps of one pass over the data."""
    return _order(config).steps_per_epoch


def _order(config: RunConfig) -> Order:
    """In which training reads its samples, the first of which is looked at."""
    data, held_out, order = training_data(config)
    for samples, first in ((held_out, 0), (data, int(order.indices(0)[0]))):
        if samples is not None:
            samples.values(np.array([first], dtype=np.int64))
    return order


def training_data(config: RunConfig) -> tuple[Samples, Samples | None, Order]:
    """The samples of the training, those that it validates with (None: it does not), and the order in which it reads.

    Raises:
        DataError: data that do not suit the model or the batch.
    """
    from parsim.data import order_of, train_and_validation
    from parsim.data.for_model import dataset_for

    training = config.training

    def load(split: str) -> Samples:
        return dataset_for(config.model_spec, training.dataset, root=training.data_root, split=split, seed=training.seed)

    looks = training.recipe.evaluation
    held_out: Samples | None = None
    if looks is None:
        data = load("train")
    else:
        data, held_out = train_and_validation(load, looks.validation, training.seed)
    return data, held_out, order_of(data, training.global_batch, training.seed)
