"""A Model: a DAG of components in an order in which they can run. Plain data; needs no torch; saved as JSON."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, groupby, pairwise
from pathlib import Path

from parsim.errors import ModelError
from parsim.files import (
    NO_CONTROL,
    control_character_in,
    parse_json,
    read_text,
    reading,
    version_problem,
    write_text_atomically,
)
from parsim.model.component import Component, Parameter, Value
from parsim.records import Remembering, check_types, once, plain, record_from
from parsim.units import format_count

SCHEMA_VERSION = 6
COUPLED = "coupled"
"""`Model.loss_form` of a loss that is not a sum over samples."""
ADDED_UP = "added up"
"""`Model.loss_form` of a scalar that is the sum over the batch, where the mean is expected."""
MIXING = "mixing samples"
"""`Model.loss_form` of a module whose output for a sample depends on the other samples, under one of parsim's losses."""
SUBLAYER = "sublayer"
COUNTED = OPERATORS, MEMORY, AUTOCAST = "operators", "memory", "autocast"
"""What a trace counts of every component: its operators; its memory as well; and its memory under autocast."""
GRANULARITIES = ("block", SUBLAYER, "layer")


@dataclass(frozen=True, kw_only=True)
class Model(Remembering):
    """Components in execution order (every producer before its consumers), and the values between them.

    Attributes:
        granularity: one of GRANULARITIES. inputs, outputs: names of Values.
        source: its origin, e.g. "trace of parsim.model.catalogue.networks.resnet50(num_classes=100)".
        loss: its training loss, the text of a `parsim.model.objective.Objective`; "": unknown, or none.
        loss_form: "": a sum over samples. "mean": a scalar taken as the mean over the batch; "per sample": one number each,
            added up; either with "unchecked" if batches were not compared. "coupled": not a sum over samples. "added up":
            a scalar that is the sum and not the mean. "mixing samples": parsim's loss of a module that is not divisible.
        assumptions: of its numbers about the data, for users: balanced experts, the branch of an example.
        half_refused: why its forward could not be recorded under autocast; "": it was, or it was not tried.
    """

    name: str
    granularity: str
    components: tuple[Component, ...]
    values: tuple[Value, ...]
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    source: str = ""
    loss: str = ""
    loss_form: str = ""
    assumptions: tuple[str, ...] = ()
    half_refused: str = ""

    def __repr__(self) -> str:
        """One line: its components and sizes."""
        parameters, flop = format_count(self.parameter_count), format_count(self.forward_flop)
        parts = f"{len(self.components)} components ({self.granularity})"
        return f"Model({self.name}: {parts}, {parameters} parameters, {flop} flop forward per sample)"

    def __post_init__(self) -> None:
        names = [component.name for component in self.components]
        if character := control_character_in({"name": self.name, "components": names, "source": self.source}):
            raise ModelError(f"{character}: {NO_CONTROL}")
        if len(set(names)) != len(names):
            twice = sorted({name for name in names if names.count(name) > 1})
            raise ModelError(f"component names must be unique; given twice: {', '.join(twice)}")
        values = {value.name: value for value in self.values}
        place = {name: number for number, name in enumerate(names)}
        for component in self.components:
            for name in component.inputs + component.outputs:
                if name not in values:
                    raise ModelError(f"component {component.name} names value {name!r}, which the model does not list")
            for name in component.inputs:
                producer = values[name].producer
                if producer is not None and place.get(producer, len(names)) >= place[component.name]:
                    raise ModelError(f"component {component.name} reads {name!r} before {producer} has made it; reorder them")
        made = {(name, component.name) for component in self.components for name in component.outputs}
        named = {(value.name, value.producer) for value in self.values if value.producer is not None}
        for name, maker in sorted(made ^ named):
            raise ModelError(f"value {name!r}: the model and component {maker} do not agree that {maker} makes it")

    @cached_property
    def component_index(self) -> Mapping[str, int]:
        return {component.name: number for number, component in enumerate(self.components)}

    @cached_property
    def fingerprints(self) -> tuple[str, ...]:
        """Per component, kept because each hashes all operators when it is asked for."""
        return tuple(component.fingerprint for component in self.components)

    @cached_property
    def value(self) -> Mapping[str, Value]:
        return {value.name: value for value in self.values}

    @cached_property
    def least_samples(self) -> Mapping[str, int]:
        """Of the components that must see more than one sample at once, how many (`Component.least_samples`)."""
        found = {component.name: component.least_samples for component in self.components}
        return {name: samples for name, samples in found.items() if samples > 1}

    def component(self, name: str) -> Component:
        if name not in self.component_index:
            raise ModelError(f"{self.name} has no component {name!r}")
        return self.components[self.component_index[name]]

    def has_input_gradient(self, component: Component) -> bool:
        """Whether its backward hands a gradient on: not that of a component which reads the batch alone."""
        values = (self.value[name] for name in component.inputs)
        return any(value.producer is not None and value.differentiable for value in values)

    @cached_property
    def work_kind(self) -> Mapping[str, int]:
        """Per component a number, equal for those that do the same work in the same shards, whatever their names."""
        numbers: dict[object, int] = {}
        kinds: dict[str, int] = {}
        for component in self.components:
            work = component.fingerprint, component.divisions, component.inside, component.update_groups
            kinds[component.name] = numbers.setdefault((*work, self.has_input_gradient(component)), len(numbers))
        return kinds

    @cached_property
    def parameters(self) -> tuple[Parameter, ...]:
        """Every parameter once, tied or not."""
        return tuple({p.name: p for component in self.components for p in component.parameters}.values())

    @property
    def parameter_count(self) -> int:
        return sum(parameter.elements for parameter in self.parameters)

    @cached_property
    def trainable_parameters(self) -> tuple[Parameter, ...]:
        """Every parameter that is updated, once."""
        return tuple(parameter for parameter in self.parameters if parameter.trainable)

    @property
    def parameter_bytes(self) -> int:
        return sum(parameter.size_bytes for parameter in self.parameters)

    @property
    def forward_flop(self) -> float:
        """Per sample; half of it is the count of multiply-accumulates."""
        return sum(component.forward_flop for component in self.components)

    @property
    def saved_activation_bytes(self) -> int:
        """Per sample."""
        return sum(component.saved_activation_bytes for component in self.components)

    def consumers(self, value: str) -> tuple[str, ...]:
        return self.readers.get(value, ())

    @cached_property
    def readers(self) -> Mapping[str, tuple[str, ...]]:
        """Components that read a value, in execution order, for every value."""
        readers: dict[str, list[str]] = {value.name: [] for value in self.values}
        for component in self.components:
            for value in dict.fromkeys(component.inputs):
                readers[value].append(component.name)
        return {value: tuple(names) for value, names in readers.items()}

    @cached_property
    def differentiable_components(self) -> frozenset[str]:
        """Components that have a backward: a differentiable output that some backward, or the loss, asks for."""
        needed: set[str] = set()
        values = {name for name in self.outputs if self.value[name].differentiable}
        for component in reversed(self.components):
            if any(value in values for value in component.outputs):
                needed.add(component.name)
                values.update(value for value in component.inputs if self.value[value].differentiable)
        return frozenset(needed)

    @cached_property
    def parameter_users(self) -> Mapping[str, tuple[str, ...]]:
        """Components that use a parameter, in execution order, for every parameter."""
        users: dict[str, list[str]] = {}
        for component in self.components:
            for parameter in component.parameters:
                users.setdefault(parameter.name, []).append(component.name)
        return {name: tuple(names) for name, names in users.items()}

    def to_json(self) -> str:
        """Numbers are per sample; every key that holds bytes says so. A key that is left out has its default."""
        return json.dumps({"schema_version": SCHEMA_VERSION, **plain(self)}, indent=1)

    def save(self, path: Path) -> None:
        write_text_atomically(path, self.to_json())

    @classmethod
    def from_json(cls, text: str, where: str = "model JSON") -> Model:
        """Raises ModelError with the place that is wrong."""
        with reading(f"{where} is not a model", ModelError, "write it with Model.save"):
            document = parse_json(text)
            if problem := version_problem(document, SCHEMA_VERSION):
                raise ModelError(f"{where}: {problem}; or trace the model again")
            del document["schema_version"]
            model: Model = record_from(cls, document)
            check_types(model, "model")
            return model

    @classmethod
    def load(cls, path: Path) -> Model:
        if not path.is_file():
            raise ModelError(f"no model file {path}")
        with reading(f"{path} is not a model", ModelError, "write it with Model.save"):
            return cls.from_json(read_text(path), str(path))


# Layers: runs of components that repeat, whatever they are called.
#
# Two components are alike if they do the same work. A model is divided where the longest repetition begins and ends, and what
# lies before and behind it again. A layer begins where least enters it: in a transformer before the first norm, where the
# stream alone does, and not behind it, where what the norm has made does too. The last norm is like those of layers, and the
# first layer may begin with a component that is like no other.


LAYER = re.compile(r"h\.(\d+)(?:\.|$)")
"""The name of a component in a layer of a transformer by name."""

Runs = tuple[tuple[int, int], ...]
"""Of each its first component, and one past its last."""


@once
def layers_of(model: Model) -> Runs:
    """The layers of several components, in order; none of a model whose layers are components."""
    changes = [0] * (len(model.components) + 1)
    for value in model.values:
        if value.producer is not None and (readers := model.readers[value.name]):
            size = value.bytes_per_sample
            changes[model.component_index[value.producer] + 1] += size
            changes[model.component_index[readers[-1]] + 1] -= size
    prints = model.fingerprints
    found = repeated_blocks(prints, list(accumulate(changes)))
    return tuple((first, last) for first, last in found if len(set(prints[first:last])) > 1)


def all_layers_of(model: Model) -> Runs:
    """The layers, in order: by their names in a transformer by name; else runs of components that repeat, or components that
    are like one beside them."""
    numbers = [named[1] if (named := LAYER.match(component.name)) else "" for component in model.components]
    if any(numbers):
        ends = list(accumulate(len(list(run)) for _, run in groupby(numbers)))
        return tuple((first, last) for first, last in pairwise((0, *ends)) if numbers[first])
    if several := layers_of(model):
        return several
    prints = ("", *model.fingerprints, "")
    neighbours = enumerate(zip(prints, prints[1:], prints[2:], strict=False))
    return tuple((number, number + 1) for number, (before, own, behind) in neighbours if own in (before, behind))


LONGEST_LAYER = 64
"""Components of a repeated block at most."""


def repeated_blocks(prints: Sequence[str], entering: Sequence[int] = ()) -> Runs:
    """The blocks of several components, in order: of each the first component, and one past the last.
    `prints`: of every component, equal for those that are alike. `entering`: by component the bytes per sample that enter it
    and those behind it from those before; none: alike for all."""
    found = _longest_repetition(prints)
    if found is None:
        return ()
    first, last, period = found
    entering = entering or [0] * len(prints)
    last = max(range(last - period + 1, last + 1), key=lambda end: (-sum(entering[end - period : first : -period]), end))
    starts = list(range(last, first, -period))
    begin = max(0, starts[-1] - period) if starts[-1] > first else first
    bounds = sorted({begin, *starts})
    before = repeated_blocks(prints[:begin], entering[:begin])
    behind = repeated_blocks(prints[last:], entering[last:])
    return (*before, *pairwise(bounds), *((one + last, two + last) for one, two in behind))


def _longest_repetition(prints: Sequence[str]) -> tuple[int, int, int] | None:
    """First component, one past the last, and length of the block that is repeated; the shortest block where several do."""
    best: tuple[int, int, int] | None = None
    for period in range(2, min(LONGEST_LAYER, len(prints) // 2) + 1):
        first = None
        for number in range(len(prints) - period + 1):
            same = number < len(prints) - period and prints[number] == prints[number + period]
            if same and first is None:
                first = number
            if not same and first is not None:
                last = number + period
                if last - first >= 2 * period - 1 and (best is None or last - first > best[1] - best[0]):
                    best = first, last, period
                first = None
    return best
