"""Plans and constraints written by hand: patterns of component names with placements, and the plan of strategy "custom".

A pattern is a shell pattern over component names: "layers.*.attention" means that part of every layer, "*" all components.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from difflib import get_close_matches
from fnmatch import fnmatchcase

from parsim.errors import ConfigError, ModelError, near_matches
from parsim.model.catalogue.frameworks import Framework
from parsim.model.component import Component, check_ways
from parsim.model.model import Model
from parsim.plans.layouts import BATCH, KINDS, Placement, parse_placement
from parsim.plans.mesh import Mesh
from parsim.plans.plan import (
    BY_OPERATOR,
    DEFAULT_BUCKET_BYTES,
    NONE,
    SELECTIVE,
    SWITCHES,
    ActivationOffload,
    Plan,
    Recompute,
    check_batch,
    check_pieces,
    check_plan,
    tied_apart,
)
from parsim.plans.synchronisation import ALL_REDUCE, Synchronisation
from parsim.predict.problem import PlanningProblem
from parsim.search.stages import balanced_plan, recomputing_layers
from parsim.search.tensor import tensor_placements

Pins = tuple[tuple[str, Placement], ...]
Forbids = tuple[tuple[str, str], ...]


def components_of(pattern: str, model: Model, key: str) -> tuple[str, ...]:
    """The components a pattern means, in execution order. Raises ConfigError if there are none; `key` says where it stands."""
    names = tuple(component.name for component in model.components)
    matching = tuple(name for name in names if fnmatchcase(name, pattern))
    if not matching:
        alike = {re.sub(r"[0-9]+", "*", name) for name in names}  # of 100 layers one pattern, where no name is near
        near = near_matches(pattern, names if get_close_matches(pattern, names, cutoff=0.5) else alike)
        raise ConfigError(f"{key}.{pattern!r} means no component of {model.name} at granularity {model.granularity}{near}")
    return matching


def placements_by_pattern(patterns: Mapping[str, Placement], model: Model) -> dict[str, Placement]:
    """A placement for every component: that of the first pattern it matches, else batch.

    Raises:
        ConfigError: a pattern without a component, or whose components all belong to earlier patterns; a placement that its
            component cannot have.
    """
    placement_of: dict[str, Placement] = {}
    for pattern, placement in patterns.items():
        names = components_of(pattern, model, "plan.placements")
        free = [name for name in names if name not in placement_of]
        if not free:
            raise ConfigError(
                f"plan.placements.{pattern!r} = {str(placement)!r} never applies: an earlier pattern has placed each of its "
                f"components ({', '.join(names[:3])}{', ...' if len(names) > 3 else ''}); move it up or drop it"
            )
        for name in free:
            _check_rule(model, name, placement, f"plan.placements.{pattern!r}")
            placement_of[name] = placement
    return {component.name: placement_of.get(component.name, BATCH) for component in model.components}


def pins_by_pattern(patterns: Mapping[str, Placement], model: Model, devices: int) -> Pins:
    """(component, placement) of every pinned component, in execution order.

    Raises:
        ConfigError: a pattern without a component, two pins that contradict each other, a placement that its component cannot
            have on any mesh of so many devices.
    """
    pinned: dict[str, tuple[str, Placement]] = {}
    for pattern, placement in patterns.items():
        for name in components_of(pattern, model, "plan.pin"):
            earlier, other = pinned.setdefault(name, (pattern, placement))
            if other != placement:
                raise ConfigError(
                    f"plan.pin contradicts itself: {name} is {other} by {earlier!r} and {placement} by {pattern!r}; drop one"
                )
            _check_rule(model, name, placement, f"plan.pin.{pattern!r}")
            _check_devices(placement, devices, f"plan.pin.{pattern!r}")
    placements = {component.name: pinned[component.name][1] for component in model.components if component.name in pinned}
    if (apart := tied_apart(model, placements)) is not None:
        first, second, parameter = apart
        raise ConfigError(
            f"plan.pin contradicts itself: {first} ({placements[first]}) and {second} ({placements[second]}) share "
            f"the parameter {parameter} and would hold it differently; pin them alike, or only one of them"
        )
    return tuple(placements.items())


def forbids_by_pattern(patterns: Mapping[str, Sequence[str]], model: Model, pins: Pins = ()) -> Forbids:
    """(component, forbidden placement or kind) of every component that has any.

    Raises:
        ConfigError: a pattern without a component, a pin that is forbidden, a component that is left no kind of placement.
    """
    forbidden_by: dict[str, dict[str, str]] = {}
    for pattern, texts in patterns.items():
        for name in components_of(pattern, model, "plan.forbid"):
            forbidden_by.setdefault(name, {}).update(dict.fromkeys(texts, pattern))
    for name, pinned in pins:
        for text in (pinned.kind, str(pinned)):
            if text in forbidden_by.get(name, {}):
                raise ConfigError(
                    f"plan.pin and plan.forbid contradict each other: {name} is pinned to {pinned}, and {text} is forbidden by "
                    f"{forbidden_by[name][text]!r}; drop one"
                )
    for name, forbidden in forbidden_by.items():
        possible = [kind for kind in KINDS if kind != "shard" or model.component(name).shardings]
        if all(kind in forbidden for kind in possible):
            raise ConfigError(
                f"plan.forbid leaves {name} no placement: {', '.join(possible)} are all it can have, and all are forbidden; "
                "allow one of them"
            )
    return tuple((name, text) for name, forbidden in forbidden_by.items() for text in forbidden)


def parse_placements(texts: Mapping[str, str]) -> dict[str, Placement]:
    """Raises PlanError for a text that is not a placement."""
    return {pattern: parse_placement(text) for pattern, text in texts.items()}


def recompute_by_pattern(recompute: Recompute, model: Model) -> Recompute:
    """The choice with every pattern of names as the components that it means.

    Args:
        recompute: "auto", "none", "selective", "full", or names, which may begin with "selective:".

    Raises:
        ConfigError: a pattern means none, or no component that it means keeps less by operator.
    """
    if isinstance(recompute, str):
        if recompute == SELECTIVE:
            _check_by_operator(model, model.components, recompute)
        return recompute
    entries: dict[str, None] = {}
    for entry in recompute:
        pattern = entry.removeprefix(BY_OPERATOR)
        names = components_of(pattern, model, "plan.recompute")
        if entry != pattern:
            _check_by_operator(model, [model.component(name) for name in names], entry)
        entries.update((entry.removesuffix(pattern) + name, None) for name in names)
    return tuple(entries)


def offload_by_pattern(offload: ActivationOffload, model: Model) -> ActivationOffload:
    """The choice of activations with every pattern of names as the components that it means.

    Raises:
        ConfigError: a pattern means none.
    """
    if isinstance(offload, bool):
        return offload
    return tuple({name: None for pattern in offload for name in components_of(pattern, model, "plan.activation_offload")})


def _check_by_operator(model: Model, components: Sequence[Component], asked: str) -> None:
    """Raise ConfigError where none of the components keeps less by operator."""
    if any(component.selective is not None for component in components):
        return
    raise ConfigError(
        f"plan.recompute = {asked!r} would change nothing: it keeps the outputs of products, convolutions and fused attention "
        f"and computes the rest again. No such component of {model.name} keeps less so than it does anyway. (A Model saved "
        'by an earlier version does not tell; trace it again.) Set recompute = "auto", "full" or a list of components'
    )


def _check_rule(model: Model, name: str, placement: Placement, where: str) -> None:
    """The component has the rule, and it divides."""
    if placement.kind != "shard":
        return
    component = model.component(name)
    try:
        check_ways(name, component.sharding(placement.rule), placement.ways, component.shardings)
    except ModelError as error:
        rules = {sharding.rule: sharding.limit for sharding in component.shardings}
        fix = f"choose ways that divide {rules[placement.rule]}" if placement.rule in rules else "choose one of its rules"
        raise ConfigError(
            f"{where} = {str(placement)!r}: {error}; {fix if rules else 'choose'}{', or' if rules else ''} batch, replicate or "
            "place:J"
        ) from error


def _check_devices(placement: Placement, devices: int, where: str) -> None:
    """Some mesh of so many devices has a tp axis for it."""
    if placement.kind == "shard" and (placement.ways < 2 or devices % placement.ways):
        raise ConfigError(
            f"{where} = {str(placement)!r}: ways ({placement.ways}) must be at least 2 and divide the devices ({devices})"
        )
    if placement.kind == "place" and placement.shard >= devices:
        raise ConfigError(f"{where} = {str(placement)!r}: there is no tp rank {placement.shard} on {devices} devices")
    if placement.kind == "replicate" and devices == 1:
        raise ConfigError(f"{where} = {str(placement)!r}: there is nothing to replicate over on one device")


# --- plans ------------------------------------------------------------------------------------------------------------


def custom_plan(
    problem: PlanningProblem,
    mesh: Mesh,
    *,
    placements: Mapping[str, Placement] | None = None,
    microbatches: int = 1,
    pipeline_order: str = "1f1b",
    chunks: int = 1,
    bucket_bytes: int = DEFAULT_BUCKET_BYTES,
    recompute: Recompute = NONE,
    context_exchange: str = "ring",
    synchronisation: Synchronisation = ALL_REDUCE,
) -> Plan:
    """The plan on `mesh` with these placements; its stages are cut so that the slowest is as fast as can be.

    Args:
        placements: by component; None: tensor parallelism as the model allows it.
        context_exchange, synchronisation: as in Plan.

    Raises:
        PlanError: the placements, the batch and the mesh do not go together. ScheduleError: more stages than components, or tp
            does not divide the model. CostError: stages cannot be balanced where a component has no cost.
    """
    check_batch(problem.global_batch, mesh, microbatches)
    problem = problem.on(mesh)
    if placements is None:
        placements = tensor_placements(problem, mesh, microbatches)
    for name, placement in placements.items():
        check_pieces(name, placement, mesh, problem.global_batch, microbatches)
    plan = balanced_plan(
        problem,
        "custom",
        mesh,
        microbatches=microbatches,
        pipeline_order=pipeline_order,
        chunks=chunks,
        bucket_bytes=bucket_bytes,
        placements=placements,
    )
    plan = replace(plan, context_exchange=context_exchange, synchronisation=synchronisation)
    plan = recomputing_layers(problem, plan, recompute)
    check_plan(plan, problem.model)
    return plan


def framework_switches(framework: Framework) -> dict[str, bool]:
    """The switches of every plan as the framework has them."""
    return {key: getattr(framework, key) for key in SWITCHES}
