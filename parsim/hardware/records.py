"""The part of a hardware profile about computation: measured and published points, and the fits to them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from types import GenericAlias
from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, GetCoreSchemaHandler, ValidationError
from pydantic_core import CoreSchema, core_schema

from parsim.errors import ProfileError
from parsim.files import ESCAPED_CONTROL, NO_CONTROL, control_character_in, parse_json, version_problem

# The layout of a profile's JSON: short things on one line, and long lists of like records as tables.
#
# A list of records under one of TABLE_KEYS is written as {"constants": {...}, "columns": [...], "rows": [[...], ...]}: fields
# that all records share once, the others as rows. Reading takes tables and plain lists of records alike.


TABLE_KEYS = ("points", "components", "optimizers", "operator_points")
TABLE_MIN_ROWS = 8
LINE_LENGTH = 200


def to_text(document: dict[str, Any]) -> str:
    """JSON text that ends with a newline; `from_text` reads it back to the same document."""
    return _render(_encode(document), 0) + "\n"


def from_text(text: str, where: str, what: str = "profile") -> Any:
    """Raises ProfileError for text that is not JSON, or a table whose rows do not fit its columns.

    Errors name the document as `what` and `where`.
    """
    try:
        document = parse_json(text)
    except json.JSONDecodeError as error:
        raise ProfileError(
            f"{what} {where} is not JSON: {error.msg} at line {error.lineno} column {error.colno}; fix it or calibrate again"
        ) from error
    return _decode(document, where, ())


def check_texts(text: str, document: Any, where: str, what: str = "profile") -> None:
    """Raise ProfileError for a name or text of the document, read from `text`, that holds a control character."""
    if ESCAPED_CONTROL.search(text) and (found := control_character_in(document)):
        raise ProfileError(f"{what} {where} is broken: {found}: {NO_CONTROL}")


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
    records: list[dict[str, Any]] = []
    for number, row in enumerate(rows):
        if not isinstance(row, list) or len(row) != len(columns):
            raise ProfileError(
                f"profile {where} is broken: {place}.rows.{number} must have {len(columns)} entries "
                f"({', '.join(map(str, columns))}), got {row!r}; fix it or calibrate again"
            )
        records.append({**constants, **dict(zip(columns, row, strict=True))})
    return records


def _render(node: Any, depth: int) -> str:
    inline = json.dumps(node, ensure_ascii=False)
    if len(inline) <= LINE_LENGTH - depth or not isinstance(node, dict | list) or not node:
        return inline
    pad, end = " " * (depth + 1), " " * depth
    if isinstance(node, dict):
        inner = [f"{pad}{json.dumps(key)}: {_render(value, depth + 1)}" for key, value in node.items()]
        return "{\n" + ",\n".join(inner) + "\n" + end + "}"
    return "[\n" + ",\n".join(pad + _render(value, depth + 1) for value in node) + "\n" + end + "]"


# The common base of all parts of a hardware profile.


Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]
Count = Annotated[int, Field(ge=1, strict=True)]
NonNegative = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Number = Annotated[float, Field(strict=True, allow_inf_nan=False)]
Name = Annotated[str, Field(strict=True, min_length=1)]


LEAST_BYTES_PER_S = 1e6
"""Of a link, a network card or a memory: what is slower was meant in GB/s, or in MB/s."""

LEAST_FLOP_PER_S = 1e6
"""Of a device: what is slower was meant in TFLOP/s."""

LEAST_MEMORY_BYTES = 2**16
"""Of a device: what is less was meant in GiB."""

LONGEST_LATENCY_S = 1.0
"""Of a link: what is longer was meant in microseconds."""


def check_rate(key: str, value: float) -> None:
    """Raise ValueError for bytes per second that no link, card or memory has.

    Args:
        key: of the value, for the message.
    """
    if value < LEAST_BYTES_PER_S:
        raise ValueError(f"{key} = {value:g} bytes/s: must be >= {LEAST_BYTES_PER_S:g}{meant(value, 'GB/s', 1e9)}")


def check_latency(key: str, value: float) -> None:
    """Raise ValueError for seconds that no message waits."""
    if value > LONGEST_LATENCY_S:
        raise ValueError(f"{key} = {value:g} s: must be <= {LONGEST_LATENCY_S:g}{meant(value, 'us', 1e-6)}")


def check_device(bytes_of: Mapping[str, float], peaks: Mapping[str, float]) -> None:
    """Raise ValueError for a device that could do nothing or hold nothing.

    Args:
        bytes_of: `memory_bytes` and `memory_bandwidth_bytes_per_s`. peaks: `peak_flop_per_s`, by precision.
    """
    memory = bytes_of["memory_bytes"]
    if memory < LEAST_MEMORY_BYTES:
        raise ValueError(f"memory_bytes = {memory:g}: must be >= {LEAST_MEMORY_BYTES}{meant(memory, 'GiB', 2**30)}")
    check_rate("memory_bandwidth_bytes_per_s", bytes_of["memory_bandwidth_bytes_per_s"])
    for precision, peak in peaks.items():
        if peak < LEAST_FLOP_PER_S:
            fix = meant(peak, "TFLOP/s", 1e12) or f"; leave {precision} out if the device cannot compute in it"
            raise ValueError(f"peak_flop_per_s.{precision} = {peak:g} FLOP/s: must be >= {LEAST_FLOP_PER_S:g}{fix}")


def meant(value: float, unit: str, factor: float) -> str:
    """The likely slip: a number in another unit, and how to write it."""
    return f"; {unit} meant? then write {value * factor:g}" if value else ""


SCHEMA_VERSION = 1
"""Of profiles, networks and parts."""

README = "write it as hardware_profiles/README.md says"


class PairsOf:
    """A pydantic annotation: a table that its record keeps as sorted pairs, so that the record can be hashed.

    `values` is the type of a value. Lists among the values become tuples.
    """

    def __init__(self, values: Any) -> None:
        self.values = values

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        checked = core_schema.no_info_before_validator_function(
            _as_table, handler.generate_schema(GenericAlias(dict, (str, self.values)))
        )
        return core_schema.no_info_after_validator_function(
            sorted_pairs, checked, serialization=core_schema.plain_serializer_function_ser_schema(dict)
        )


def _as_table(pairs: Any) -> Any:
    return dict(pairs) if isinstance(pairs, tuple | list) else pairs


def sorted_pairs(table: Mapping[str, Any]) -> tuple[tuple[str, Any], ...]:
    """The entries of a table in a fixed order, lists as tuples."""
    return tuple((key, tuple(value) if isinstance(value, list) else value) for key, value in sorted(table.items()))


class ConfigSection(BaseModel):
    """Base of the tables of a run file: unknown keys are errors, values are immutable."""

    model_config = ConfigDict(extra="forbid", frozen=True, validate_default=True)


class ProfileRecord(BaseModel):
    """Base of all parts: unknown keys are errors, values are immutable."""

    model_config = ConfigDict(extra="forbid", frozen=True)


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


class OperatorPoint(ProfileRecord):
    """One published or measured kernel.

    Published: kind and shape as in `parsim.model.component.Operator`, with the batch in `samples`. Measured on this machine:
    kind, function and sizes as in `parsim.costs.compute.launches` (samples 1), the median over repeats with `ranks_active`
    ranks computing at once.
    """

    kind: str
    function: str = ""
    phase: Literal["forward", "backward", "backward_input", "backward_weight"]
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


KernelPhase = Literal["forward", "backward", "backward_input", "backward_weight"]


class HeldOut(ProfileRecord):
    """Errors of predicted seconds, |log(predicted / measured)|, on rows that the fit had not seen; bias: the median of log."""

    rows: int
    median: NonNegative
    p90: NonNegative
    bias: float


class OperatorFit(ProfileRecord):
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
    precision: str
    device_type: str
    coefficients: dict[str, float]
    relative_sigma: NonNegative
    min_flop: NonNegative
    max_flop: NonNegative
    points: int
    source: str


class Efficiency(ProfileRecord):
    """What whole models reach of the throughput that their operators alone would have, on one device type in one precision.

    Seconds from operators are divided by `factor`; `spread` is the relative spread of the rows it was fitted to around it.
    """

    precision: str
    device_type: str
    factor: Positive
    spread: NonNegative
    points: int
    source: str


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


def source_keys(node: object) -> set[str]:
    """All values under a key `source` or `..._source`, anywhere below a node.

    Args:
        node: of a JSON document.
    """
    found: set[str] = set()
    left = [node]
    while left:
        entry = left.pop()
        if isinstance(entry, dict):
            found.update(value for key, value in entry.items() if isinstance(value, str) and key.endswith("source"))
            left.extend(value for value in entry.values() if isinstance(value, dict | list))
        elif isinstance(entry, list):
            left.extend(value for value in entry if isinstance(value, dict | list))
    return found


Record = TypeVar("Record", bound=ProfileRecord)


def parse_record(record: type[Record], text: str, where: str, what: str, *, otherwise: str = README) -> Record:
    """Check the JSON text of a profile, a network or a part.

    Args:
        record: what the text describes. where: its name in messages. what: it is. otherwise: what to do instead of a repair.

    Raises:
        ProfileError: names the first wrong keys and their values.
    """
    document = from_text(text, where, what)
    if isinstance(document, dict) and (problem := version_problem(document, SCHEMA_VERSION)):
        raise ProfileError(f"{what} {where} is broken: {problem}; or {otherwise}")
    check_texts(text, document, where, what)
    try:
        return record.model_validate(document)
    except ValidationError as error:
        raise ProfileError(f"{what} {where} is broken: {problems_text(error, what)}; fix these or {otherwise}") from error


def problems_text(error: ValidationError, whole: str = "profile") -> str:
    """The first three wrong keys, each with its path, the rule and the value.

    Args:
        error: of pydantic. whole: name of the document itself.
    """
    problems = [
        f"{'.'.join(str(part) for part in problem['loc']) or whole}: {problem['msg'].removeprefix('Value error, ')} "
        f"(got {_short(problem['input'])})"
        for problem in error.errors()[:3]
    ]
    more = f" (+{error.error_count() - 3} more)" if error.error_count() > 3 else ""
    return "; ".join(problems) + more


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."
