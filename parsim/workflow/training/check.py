"""Whether a training can run, looked at before any process starts: its data, schedule and weight decay."""

from __future__ import annotations

from typing import TYPE_CHECKING

from parsim.workflow.config import RunConfig

if TYPE_CHECKING:
    from parsim.data import Order
    from parsim.model.model import Model


def check_training(config: RunConfig, model: Model) -> None:
    """Look at what only the module, the data and torch can tell.

    Raises:
        DataError: data that do not suit the model or the batch. ConfigError: torch refuses the schedule or an argument of the
            optimizer, or a pattern of no_weight_decay matches nothing.
    """
    from parsim.execute.state.optimizer import check_states
    from parsim.execute.training.learning_rate import check_schedule
    from parsim.execute.training.weight_decay import check_exempt

    training, recipe = config.training, config.training.recipe
    order = _order(config)
    check_states(training.optimizer, recipe)
    check_exempt((parameter.name for parameter in model.parameters), recipe.no_weight_decay)
    steps = total_steps(config)
    check_schedule(training.optimizer, training.resolved_learning_rate, recipe, steps=steps, order=order)


def total_steps(config: RunConfig) -> int:
    """training.steps, or as many as training.epochs takes."""
    if config.training.steps is not None:
        return config.training.steps
    return config.training.epochs * steps_per_epoch(config)


def steps_per_epoch(config: RunConfig) -> int:
    """Steps of one pass over the data."""
    return _order(config).steps_per_epoch


def _order(config: RunConfig) -> Order:
    """In which training reads its samples, the first of which is looked at."""
    from parsim.data import order_of
    from parsim.data.for_model import dataset_for

    training = config.training
    data = dataset_for(config.model_spec, training.dataset, root=training.data_root, seed=training.seed)
    order = order_of(data, training.global_batch, training.seed)
    data.values(order.indices(0)[:1])
    return order
