"""Groups of parameters with optimizers of their own: which parameters are whose, in a Model and by torch's names.

A Model with groups says of each parameter its group and optimizer. Buckets, updates, prices and memory follow from that; the
rates and arguments stay in the recipe, which the executor reads.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from fnmatch import fnmatchcase

from parsim.errors import ConfigError, near_matches
from parsim.execute.training.recipe import UpdateGroup
from parsim.model.component import Component
from parsim.model.model import Model


def group_of(name: str, groups: Sequence[UpdateGroup]) -> UpdateGroup | None:
    """The group of a parameter; None where no pattern matches its name.

    Raises:
        ConfigError: it is in two groups.
    """
    found = [group for group in groups if any(fnmatchcase(name, pattern) for pattern in group.parameters)]
    if len(found) > 1:
        raise ConfigError(
            f"parameter {name} is in training.groups.{found[0].name} and in training.groups.{found[1].name}; one optimizer "
            "updates a parameter: make the patterns narrower"
        )
    return found[0] if found else None


def with_update_groups(model: Model, groups: Sequence[UpdateGroup]) -> Model:
    """The model with the group and optimizer of each trainable parameter, in place of those it had; itself if that is the same.

    Args:
        model: any; tied weights have their first name in it.

    Raises:
        ConfigError: a parameter in two groups, or a pattern that matches none.
    """
    if not groups and not any(parameter.group for parameter in model.parameters):
        return model
    check_patterns((parameter.name for parameter in model.parameters), groups)

    def grouped(component: Component) -> Component:
        changed = []
        for parameter in component.parameters:
            group = group_of(parameter.name, groups) if parameter.trainable else None
            name, optimizer = ("", "") if group is None else (group.name, group.optimizer)
            changed.append(replace(parameter, group=name, optimizer=optimizer))
        return component if tuple(changed) == component.parameters else replace(component, parameters=tuple(changed))

    return replace(model, components=tuple(grouped(component) for component in model.components))


def check_patterns(names: Iterable[str], groups: Sequence[UpdateGroup]) -> None:
    """Raise ConfigError for a pattern that matches no parameter.

    Args:
        names: of the model's parameters.
    """
    known = list(names)
    for group in groups:
        for pattern in group.parameters:
            if not any(fnmatchcase(name, pattern) for name in known):
                raise ConfigError(
                    f"training.groups.{group.name}: no parameter matches {pattern!r}{near_matches(pattern, known)}; write a "
                    f'pattern of names, such as "{known[0].partition(".")[0] if known else "generator"}.*"'
                )
