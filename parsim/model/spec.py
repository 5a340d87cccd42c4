"""Model specs: a name of the zoo, a user's factory, or a Hugging Face config, with arguments, a shape and a loss.

Needs no torch. `build` makes the module, `interface` its batches, `load` its Model.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Annotated, Any, Final, Literal

from pydantic import (
    AfterValidator,
    BeforeValidator,
    Field,
    PlainSerializer,
    StrictBool,
    StrictInt,
    StrictStr,
    ValidationError,
    WrapValidator,
)

from parsim.errors import ModelError, near_matches
from parsim.hardware.records import ConfigSection, Name, Number, PairsOf
from parsim.model.catalogue.names import (
    check_own,
    config_path,
    document_of,
    is_transformer,
    known_names,
    named,
    normalised,
    sequence_of,
    shape_of,
    zoo_name,
)
from parsim.model.catalogue.zoo import ZOO, ZooRow
from parsim.model.inputs import ModelInput, check_size, inputs_from, ordered
from parsim.model.objective import TARGET, Objective, parse_objective
from parsim.model.tuning import TuningKey
from parsim.registry import as_key_error

OBJECTIVE_KEYS = ("output", "classes_dim", "target")
REFUSE: Final = "refuse"
EXAMPLE: Final = "example"
CONTROL_FLOW = (REFUSE, EXAMPLE)
TomlScalar = StrictBool | StrictInt | Number | StrictStr
_NEEDED = {
    "classes_dim": 'loss = "cross_entropy"',
    "target": 'loss = "package:function", a function (output, target) of your own',
}


COUNTS = ("layers", "depth")
"""Arguments that count layers."""
MOST_LAYERS = 4096
"""Of a model: more take minutes and gigabytes before a search begins."""


class ModelKeys(ConfigSection):
    """What [model] of a run file says of the module.

    Attributes:
        name: a key of the zoo, "package.module:factory", or the path of a Hugging Face config.json or of a saved Model.
        args: keyword arguments of the factory (for a config: values that replace its own). A run file has them as a table.
        input_shape: of ONE sample, e.g. (3, 224, 224); tokens: (seq,). None takes the model's default.
            With one input it says all; `inputs` is for others.
        inputs: what `forward` takes, by the names of its arguments: x = { shape, dtype, high, low, constant }; tables and lists
            nest. None: one input of `input_shape`, integers where the sample has one dim and the model an embedding, else
            floats.
        loss: a row of `parsim.model.objective`, "own" (the module returns it), "package:function" (output, target) or
            "package.module:ROW". None takes the model's default, or what its output calls for.
        output: which of several outputs the loss reads: a key, a field or a place ("0"). None: `logits`, or the only one.
        classes_dim: the dim of one sample along which cross_entropy finds its classes: 0 for maps [classes, height, width].
        target: the targets of a loss of one's own: { shape, dtype, high }. None: numbers like the output.
        control_flow: "refuse" code that depends on the values of tensors, or follow an "example": a random batch, weights of
            seed 0.
    """

    name: Annotated[Name, AfterValidator(zoo_name)]
    args: Annotated[tuple[tuple[str, TomlScalar], ...], PairsOf(TomlScalar)] = ()
    input_shape: tuple[int, ...] | None = None
    loss: Name | None = None
    inputs: (
        Annotated[
            tuple[ModelInput, ...],
            BeforeValidator(lambda table: ordered(inputs_from(table)) if isinstance(table, Mapping) else table),
            WrapValidator(as_key_error),
            PlainSerializer(lambda inputs: {each.name: each.to_dict() for each in inputs}),
        ]
        | None
    ) = None
    output: Name | None = None
    classes_dim: Annotated[int, Field(strict=True)] | None = None
    target: (
        Annotated[
            ModelInput,
            BeforeValidator(lambda table: ModelInput.from_dict(TARGET, table) if isinstance(table, Mapping) else table),
            WrapValidator(as_key_error),
            PlainSerializer(ModelInput.to_dict),
        ]
        | None
    ) = None
    control_flow: Literal["refuse", "example"] = REFUSE

    def objective(self, usual: str | None = None) -> Objective | None:
        """The loss that is asked for; None where neither the spec nor `usual` names one.
        Raises ModelError for an unknown loss, or for keys that belong to a loss which is not named."""
        loss = self.loss or usual
        if loss is not None:
            keys = {key: value for key in OBJECTIVE_KEYS if (value := getattr(self, key)) is not None}
            return replace(parse_objective(loss), **keys)
        for key, example in _NEEDED.items():
            if getattr(self, key) is not None:
                raise ModelError(f"{self.name}: {key} belongs to a loss; give loss, too, for example {example}")
        return None


class ModelSpec(ModelKeys):
    """How a module is built: what [model] says of it, and `tune`, what is trained of it (None: everything)."""

    tune: TuningKey | None = None

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values; what has its default is left out, but for args and input_shape."""
        return {"name": self.name, "args": {}, "input_shape": None, **self.model_dump(mode="json", exclude_defaults=True)}

    @classmethod
    def from_dict(cls, document: Mapping[str, Any]) -> ModelSpec:
        """Inverse of `to_dict`. Raises ModelError if a key is missing, unknown or of the wrong kind."""
        values = {key: value for key, value in document.items() if value is not None}
        if "inputs" in values:
            values["inputs"] = inputs_from(values["inputs"])  # in the order of the document
        try:
            return cls.model_validate(values)
        except ValidationError as error:
            raise ModelError(f"not a model: {document!r} ({error!r}); give name, args and input_shape") from error


def resolve(spec: ModelSpec) -> ModelSpec:
    """A spec with every argument and the input shape spelled out (zoo), and the arguments in one order.
    Raises ModelError: an unknown name or argument, or a shape that does not suit the model."""
    if spec.input_shape is not None:
        check_size("input_shape", spec.input_shape)
    if is_transformer(spec.name):
        return _resolve_named(spec)
    if (row_by_name := named(spec.name)) is not None:
        spec = spec.model_copy(update={"name": config_path(row_by_name)})
    if ":" in spec.name or is_config(spec.name):
        if any(size < 1 for size in spec.input_shape or ()):
            raise ModelError(f"input_shape sizes must be >= 1, got {spec.input_shape}")
        if spec.inputs is not None and spec.input_shape is not None:
            raise ModelError(f"{spec.name}: inputs and input_shape both describe the inputs; drop input_shape")
        inputs = None if spec.inputs is None else ordered(spec.inputs)
        return spec.model_copy(update={"args": tuple(sorted(spec.args)), "inputs": inputs})
    row = zoo_row(spec.name)
    if spec.inputs is not None:
        raise ModelError(f"{spec.name} of the zoo has its own input; drop inputs, and give input_shape for another size")
    defaults, args = dict(row.args), dict(spec.args)
    for name in args:
        if name not in defaults:
            raise ModelError(f"{spec.name} has no argument {name!r}{near_matches(name, defaults)}")
    shape = spec.input_shape or row.input_shape
    if len(shape) != len(row.input_shape) or min(shape) < 1:
        expected = "[channels, height, width]" if row.inputs == "image" else "[seq]"
        raise ModelError(f"input_shape of {spec.name} must be {expected} with sizes >= 1, got {list(shape)}")
    if row.inputs == "tokens":
        seq = args.setdefault("seq", shape[0])
        if spec.input_shape is None:
            shape = (int(str(seq)),)
        if shape[0] > int(str(seq)):
            raise ModelError(f"input_shape [{shape[0]}] exceeds the argument seq ({seq}) of {spec.name}; raise seq")
    for name, value in args.items():
        if type(value) is not type(defaults[name]) and not (isinstance(defaults[name], float) and isinstance(value, int)):
            raise ModelError(f"argument {name} of {spec.name} must be like {defaults[name]!r}, got {value!r}")
        if isinstance(defaults[name], float):
            args[name] = float(str(value))
            if not 0.0 <= float(str(value)) < 1.0:
                raise ModelError(f"argument {name} of {spec.name} must be >= 0 and < 1, got {value!r}")
        elif isinstance(value, int) and value < 1:
            raise ModelError(f"argument {name} of {spec.name} must be >= 1, got {value!r}; for example {defaults[name]}")
        check_count(spec.name, name, value)
    loss = None if spec.loss == row.loss else spec.loss
    every = tuple(sorted({**defaults, **args}.items()))
    # no model of the zoo depends on its data
    return spec.model_copy(update={"args": every, "input_shape": shape, "loss": loss, "control_flow": REFUSE})


def _resolve_named(spec: ModelSpec) -> ModelSpec:
    """A transformer by name, with the length of its samples. Raises ModelError for arguments that do not suit it."""
    if spec.inputs is not None or spec.output is not None or spec.loss not in (None, "cross_entropy"):
        raise ModelError(f"{spec.name} has its own input and loss (tokens, cross_entropy); drop inputs, output and loss")
    args = dict(spec.args)
    if spec.input_shape is not None:
        if len(spec.input_shape) != 1 or args.get("seq", spec.input_shape[0]) != spec.input_shape[0]:
            raise ModelError(f"input_shape of {spec.name} must be [seq], the same as the argument seq, got {spec.input_shape}")
        args["seq"] = spec.input_shape[0]
    check_own(spec.name, args)
    check_count(spec.name, "layers", shape_of(spec.name, args).layers)
    args["seq"] = seq = sequence_of(spec.name, args)
    document_of(spec.name, args)
    return spec.model_copy(update={"args": tuple(sorted(args.items())), "input_shape": (seq,), "loss": None})


def check_count(model: str, argument: str, value: object) -> None:
    """Raise ModelError where an argument of a model counts more layers than a search ends with."""
    if argument in COUNTS and isinstance(value, int) and value > MOST_LAYERS:
        raise ModelError(f"argument {argument} of {model} must be <= {MOST_LAYERS}, got {value}")


def is_known(name: str) -> bool:
    """Whether a text is the name of a model that parsim ships, small or large."""
    return zoo_name(name) in ZOO or named(name) is not None


def takes_usual(name: str) -> bool:
    """Whether a model by that name takes the precision that is usual for transformers, where a question leaves it open."""
    return named(name) is not None or is_config(name)


def is_config(name: str) -> bool:
    """Whether the name of a ModelSpec is the path of a Hugging Face config."""
    return name.endswith(".json")


def zoo_row(name: str) -> ZooRow:
    """The row of a model of the zoo. Raises ModelError with near matches for an unknown name."""
    if name not in ZOO:
        package, _, factory = name.rpartition(".")
        if package and factory.isidentifier() and not factory.islower():  # a class after its module
            raise ModelError(f"unknown model {name!r}; the class {factory} of {package} is written {package}:{factory}")
        near = near_matches(normalised(name), [*ZOO, *known_names()])
        near = near if near.startswith("; did you") else f"{near_matches('', ZOO)}, and large ones such as llama3-8b"
        raise ModelError(f"unknown model {name!r}{near}; or give package.module:factory, or a Hugging Face config.json")
    return ZOO[name]
