"""The part of a hardware profile about computation: measured and published points, and the fits to them.

Besides, what all files of hardware_profiles share: their JSON text, and how one is found by name, read and checked.

A list of records under one of TABLE_KEYS is written as {"constants": {...}, "columns": [...], "rows": [[...], ...]}: fields
that all records share once, the others as rows. Reading takes tables and plain lists of records alike.
"""

from __future__ import annotations

import importlib.resources
import json
import os
from collections.abc import Mapping
from pathlib import Path
from types import GenericAlias
from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, GetCoreSchemaHandler, ValidationError
from pydantic_core import CoreSchema, core_schema

from parsim.errors import ProfileError, near_matches
from parsim.files import ESCAPED_CONTROL, NO_CONTROL, control_character_in, parse_json, read_text, version_problem

TABLE_KEYS = ("points", "components", "optimizers", "operator_points")
TABLE_MIN_ROWS = 8
LINE_LENGTH = 200


def to_text(document: dict[str, Any]) -> str:
    """JSON text that ends with a newline: short things on one line, long lists of like records as tables."""
    return _render(_encode(document), 0) + "\n"


def _encode(node: Any) -> Any:
    if isinstance(node, dict):
        return {key: _table(value) if key in TABLE_KEYS else _encode(value) for key, value in node.items()}
    return [_encode(value) for value in node] if isinstance(node, list) else node


def _table(records: Any) -> Any:
    if not isinstance(records, list) or len(records) < TABLE_MIN_ROWS:
        return _encode(records)
    if not all(isinstance(record, dict) and list(record) == list(records[0]) for record in records):
        return _encode(records)
    names = list(records[0])
    constant = [name for name in names if len({json.dumps(record[name]) for record in records}) == 1]
    columns = [name for name in names if name not in constant]
    return {
        "constants": {name: records[0][name] for name in constant},
        "columns": columns,
        "rows": [[record[name] for name in columns] for record in records],
    }


def _render(node: Any, depth: int) -> str:
    inline = json.dumps(node, ensure_ascii=False)
    if len(inline) <= LINE_LENGTH - depth or not isinstance(node, dict | list) or not node:
        return inline
    pad, end = " " * (depth + 1), " " * depth
    if isinstance(node, dict):
        inner = [f"{pad}{json.dumps(key)}: {_render(value, depth + 1)}" for key, value in node.items()]
        return "{\n" + ",\n".join(inner) + "\n" + end + "}"
    return "[\n" + ",\n".join(pad + _render(value, depth + 1) for value in node) + "\n" + end + "]"


def from_text(text: str, where: str, what: str = "profile") -> Any:
    """The document of a text that `to_text` may have written; `what` and `where` name it in errors. Raises ProfileError:
    text that is not JSON, or a table whose rows do not fit its columns."""
    try:
        document = parse_json(text)
    except json.JSONDecodeError as error:
        raise ProfileError(
            f"{what} {where} is not JSON: {error.msg} at line {error.lineno} column {error.colno}; fix it or calibrate again"
        ) from error
    return _decode(document, where, ())


def _decode(node: Any, where: str, path: tuple[str, ...]) -> Any:
    if isinstance(node, list):
        return [_decode(value, where, (*path, str(number))) for number, value in enumerate(node)]
    if not isinstance(node, dict):
        return node
    if path and path[-1] in TABLE_KEYS and "rows" in node:
        return _records(node, where, path)
    return {key: _decode(value, where, (*path, key)) for key, value in node.items()}


def _records(table: dict[str, Any], where: str, path: tuple[str, ...]) -> list[dict[str, Any]]:
    columns, rows, constants = table.get("columns"), table["rows"], table.get("constants", {})
    place = ".".join(path)
    if not isinstance(columns, list) or not isinstance(rows, list) or not isinstance(constants, dict):
        raise ProfileError(f"profile {where} is broken: {place} needs the lists columns and rows; fix it or calibrate again")
    for number, row in enumerate(rows):
        if not isinstance(row, list) or len(row) != len(columns):
            raise ProfileError(
                f"profile {where} is broken: {place}.rows.{number} must have {len(columns)} entries "
                f"({', '.join(map(str, columns))}), got {row!r}; fix it or calibrate again"
            )
    return [{**constants, **dict(zip(columns, row, strict=True))} for row in rows]


# Finding, reading and checking a file.

SCHEMA_VERSION = 1
README = "write it as hardware_profiles/README.md says"


class ProfileRecord(BaseModel):
    """Base of all parts of a profile, a network or a part: unknown keys are errors, values are immutable."""

    model_config = ConfigDict(extra="forbid", frozen=True, defer_build=True)


Record = TypeVar("Record", bound=ProfileRecord)


def shipped(*folder: str) -> list[str]:
    """Names of the JSON files in a folder of hardware_profiles that come with the package."""
    files = importlib.resources.files("hardware_profiles").joinpath(*folder).iterdir()
    return sorted(file.name.removesuffix(".json") for file in files if file.name.endswith(".json"))


def shipped_text(*path: str) -> str:
    return importlib.resources.files("hardware_profiles").joinpath(*path[:-1], f"{path[-1]}.json").read_text("utf-8")


def is_path(name_or_path: str) -> bool:
    return name_or_path.endswith(".json") or os.sep in name_or_path


def load_record(
    record: type[Record], folder: tuple[str, ...], what: str, name_or_path: str, aliases: Mapping[str, str]
) -> Record:
    """A network or a part by shipped name, by alias or by the path of a JSON file in a folder of hardware_profiles.

    `what`: it is, for messages. Raises ProfileError: an unknown name (with near matches), or a broken file (with the path of
    the wrong key).
    """
    describe = "describe your own in a JSON file as hardware_profiles/README.md says, and give its path"
    if is_path(name_or_path):
        try:
            return parse_record(record, read_text(Path(name_or_path)), name_or_path, what)
        except (OSError, ValueError) as error:
            raise ProfileError(f"cannot read {what} {name_or_path}: {error}; {describe}") from error
    names = shipped(*folder)
    name = aliases.get(name_or_path.lower(), name_or_path.lower())
    if name not in names:
        near = near_matches(name, [*names, *aliases])
        near = near if "did you mean" in near else ""
        describe += "; the machine that you use now is this-machine" if what == "GPU" else ""
        raise ProfileError(f"unknown {what} {name_or_path!r}{near}; known: {', '.join(names)}; or {describe}")
    return parse_record(record, shipped_text(*folder, name), name, what)


def parse_record(record: type[Record], text: str, where: str, what: str, *, otherwise: str = README) -> Record:
    """Check the JSON text of a profile, a network or a part.

    `what` and `where` name it in messages; `otherwise`: what to do instead of a repair. Raises ProfileError: the first wrong
    keys and their values.
    """
    document = from_text(text, where, what)
    if isinstance(document, dict) and (problem := version_problem(document, SCHEMA_VERSION)):
        raise ProfileError(f"{what} {where} is broken: {problem}; or {otherwise}")
    if ESCAPED_CONTROL.search(text) and (character := control_character_in(document)):
        raise ProfileError(f"{what} {where} is broken: {character}: {NO_CONTROL}")
    try:
        return record.model_validate(document)
    except ValidationError as error:
        raise ProfileError(f"{what} {where} is broken: {problems_text(error, what)}; fix these or {otherwise}") from error


def problems_text(error: ValidationError, document: str = "profile") -> str:
    """The first three wrong keys of a document, each with its path, the rule and the value."""

    def short(value: object) -> str:
        text = repr(value)
        return text if len(text) <= 60 else text[:57] + "..."

    problems = [
        f"{'.'.join(str(part) for part in problem['loc']) or document}: {problem['msg'].removeprefix('Value error, ')} "
        f"(got {short(problem['input'])})"
        for problem in error.errors()[:3]
    ]
    more = f" (+{error.error_count() - 3} more)" if error.error_count() > 3 else ""
    return "; ".join(problems) + more


def source_keys(node: object) -> set[str]:
    """All values under a key `source` or `..._source`, anywhere below a node of a JSON document."""
    if isinstance(node, list):
        return set().union(*map(source_keys, node))
    if not isinstance(node, dict):
        return set()
    sources = {value for key, value in node.items() if isinstance(value, str) and key.endswith("source")}
    return sources.union(*map(source_keys, node.values()))


# Types of values.

Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]
Count = Annotated[int, Field(ge=1, le=10**12, strict=True)]
NonNegative = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Number = Annotated[float, Field(strict=True, allow_inf_nan=False)]
Name = Annotated[str, Field(strict=True, min_length=1)]


class PairsOf:
    """A pydantic annotation: a table that its record keeps as sorted pairs, so that the record can be hashed.

    `values` is the type of a value. Lists among the values become tuples.
    """

    def __init__(self, values: Any) -> None:
        self.values = values

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        checked = core_schema.no_info_before_validator_function(
            lambda pairs: dict(pairs) if isinstance(pairs, tuple | list) else pairs,
            handler.generate_schema(GenericAlias(dict, (str, self.values))),
        )
        return core_schema.no_info_after_validator_function(
            sorted_pairs, checked, serialization=core_schema.plain_serializer_function_ser_schema(dict)
        )


def sorted_pairs(table: Mapping[str, Any]) -> tuple[tuple[str, Any], ...]:
    """The entries of a table in a fixed order, lists as tuples."""
    return tuple((key, tuple(value) if isinstance(value, list) else value) for key, value in sorted(table.items()))


class ConfigSection(BaseModel):
    """Base of the tables of a run file: unknown keys are errors, values are immutable."""

    model_config = ConfigDict(extra="forbid", frozen=True, validate_default=True, defer_build=True)


# Measured and published computation, and the fits to it.


class ComponentPoint(ProfileRecord):
    """One measured component: `seconds` is the median over repeats with `ranks_active` ranks computing at once.

    Attributes:
        issue_s: on a GPU, what the host takes to queue it; `seconds` are the device's alone then. None: not measured apart.
    """

    fingerprint: str
    model: str
    component: str
    phase: Literal["forward", "backward"]
    samples: Annotated[int, Field(ge=1)]
    device_type: str
    precision: str
    ranks_active: int = 1
    seconds: Positive
    spread: NonNegative
    repeats: int
    issue_s: NonNegative | None = None
    source: str


class OptimizerPoint(ProfileRecord):
    """One measured optimizer step (zeroing included) over `elements` scalars in `tensors` arrays; issue_s as of a component."""

    optimizer: str
    elements: int
    tensors: int
    device_type: str
    ranks_active: int = 1
    seconds: Positive
    spread: NonNegative
    repeats: int
    issue_s: NonNegative | None = None
    source: str


KernelPhase = Literal["forward", "backward", "backward_input", "backward_weight"]


class OperatorPoint(ProfileRecord):
    """One published or measured kernel.

    Published: kind and shape as in `parsim.model.component.Operator`, with the batch in `samples`. Measured on this machine:
    kind, function and sizes as in `parsim.costs.compute.launches` (samples 1), the median over repeats with `ranks_active`
    ranks computing at once.
    """

    kind: str
    function: str = ""
    phase: KernelPhase
    shape: dict[str, int]
    samples: int
    device_type: str
    precision: str
    ranks_active: int = 1
    seconds: Positive
    spread: NonNegative | None = None
    repeats: int = 1
    source: str


FitForm = Literal["saturation", "tiles", "fused_attention"]
"""The formula of a fit (`parsim.costs.compute.formula`)."""


class HeldOut(ProfileRecord):
    """Errors of predicted seconds, |log(predicted / measured)|, on rows that the fit had not seen; bias: the median of log."""

    rows: int
    median: NonNegative
    p90: NonNegative
    bias: float


class KernelFit(ProfileRecord):
    """Fitted time of one kernel of `kind` in `phase`.

    Attributes:
        form: the formula its coefficients enter. variant: of several fits of one kind (the library of an attention); the first
            one listed is used.
        held_out: what the fit was judged on, by what was left out of it.
    """

    kind: str
    phase: KernelPhase
    form: FitForm = "saturation"
    variant: str = ""
    held_out: dict[str, HeldOut] = {}
    coefficients: dict[str, float]
    relative_sigma: NonNegative
    min_flop: NonNegative
    max_flop: NonNegative
    points: int
    source: str


class OperatorFit(KernelFit):
    precision: str
    device_type: str


class WholeModels(ProfileRecord):
    """What whole models reach of the throughput that their operators alone would have.

    Seconds from operators are divided by `factor`; `spread` is the relative spread of the rows it was fitted to around it.
    """

    factor: Positive
    spread: NonNegative
    points: int
    source: str


class Efficiency(WholeModels):
    precision: str
    device_type: str


class OperatorSurface(ProfileRecord):
    """Fitted time of one launch by its sizes: see `parsim.costs.compute.surfaces` for the terms.

    Attributes:
        relative_sigma: spread of held-out points. reach_doublings: how far they lay from the points that were kept.
        sigma_per_doubling: what a question further away adds.
    """

    kind: str
    function: str
    phase: str
    precision: str
    device_type: str
    seconds_per_term: dict[str, NonNegative]
    relative_sigma: NonNegative
    reach_doublings: NonNegative
    sigma_per_doubling: NonNegative
    points: int
    source: str


class Composition(ProfileRecord):
    """What a component takes beside the sum of its launches: see `parsim.costs.compute.surfaces`.

    Attributes:
        factors: by kind of operator, on its launches' seconds.
        issue_component_s, issue_launch_s: on a GPU, what the host takes to queue a component, and each of its launches; None:
            not measured apart. issue_kinds_s: and each launch of a kind beyond that.
        component_sigma: spread of single components, step_sigma of the computation of whole steps, both of models whose
            components the fit had not seen. models, points: how much it was fitted to.
    """

    phase: Literal["forward", "backward"]
    precision: str
    device_type: str
    component_s: NonNegative
    launch_s: NonNegative
    seconds_per_parameter_byte: NonNegative
    seconds_per_activation_byte: NonNegative
    factors: dict[str, NonNegative]
    issue_component_s: NonNegative | None = None
    issue_launch_s: NonNegative | None = None
    issue_kinds_s: dict[str, NonNegative] = {}
    component_sigma: NonNegative
    step_sigma: NonNegative
    models: int
    points: int
    source: str


class ComputeRecords(ProfileRecord):
    components: list[ComponentPoint] = []
    optimizers: list[OptimizerPoint] = []
    operator_points: list[OperatorPoint] = []
    operator_fits: list[OperatorFit] = []
    operator_surfaces: list[OperatorSurface] = []
    compositions: list[Composition] = []
    efficiencies: list[Efficiency] = []
