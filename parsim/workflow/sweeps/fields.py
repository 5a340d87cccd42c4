"""Fields that a sweep can vary: every key of a run file, and three factors on the hardware."""

from __future__ import annotations

import typing

from parsim.errors import ConfigError, near_matches
from parsim.workflow.cluster_section import ConfigSection
from parsim.workflow.config import RunConfig

SCALES = {
    "scale.compute": "computation and optimizer are this many times as fast",
    "scale.links": "every collective and transfer is this many times as fast",
    "scale.memory": "every device has this many times the memory",
}
"""Factors on the hardware, which no run file has: they answer what matters."""

LARGEST_SCALE = 1e6


def known_fields() -> list[str]:
    """Every field by its dotted name; `model.args.*` stands for any argument of the model."""
    return [*_below(RunConfig, ""), *SCALES]


def check_field(key: str) -> None:
    """Raise ConfigError, with near matches, for a field that no run file has."""
    known = known_fields()
    if key in known or any(key.startswith(f"{name[:-1]}") and key != name[:-2] for name in known if name.endswith(".*")):
        return
    near = near_matches(key, known)
    if near.startswith("; known"):
        near = near_matches(key.rpartition(".")[2], {name.rpartition(".")[2] for name in known})
        near = near if not near.startswith("; known") else "; keys are those of a run file (docs/run-file.md)"
    raise ConfigError(f"--over {key}: a sweep varies keys of a run file, and {', '.join(SCALES)}; there is no {key}{near}")


def is_whole(key: str) -> bool:
    """Whether the values of a field are whole numbers: samples between two ends are then rounded."""
    if key in SCALES:
        return False
    section: type[ConfigSection] = RunConfig
    for part in key.split("."):
        field = section.model_fields.get(part)
        if field is None:
            return key.startswith("model.args.")
        tables = _tables(field.annotation)
        if not tables:
            return _holds(field.annotation, int) and not _holds(field.annotation, float)
        section = tables[0]
    return False


def _below(section: type[ConfigSection], path: str) -> list[str]:
    found: list[str] = []
    for name, field in section.model_fields.items():
        tables = _tables(field.annotation)
        if path:
            found.append(f"{path}{name}")
        if _holds(field.annotation, dict):
            found.append(f"{path}{name}.*")
        for table in tables:
            found += _below(table, f"{path}{name}.")
    return found


def _tables(annotation: object) -> list[type[ConfigSection]]:
    if isinstance(annotation, type) and issubclass(annotation, ConfigSection):
        return [annotation]
    return [table for member in typing.get_args(annotation) for table in _tables(member)]


def _holds(annotation: object, kind: type) -> bool:
    """Whether a value of this kind may stand in a field: itself, or a member of a union."""
    if annotation is kind or typing.get_origin(annotation) is kind:
        return True
    origin = typing.get_origin(annotation)
    if origin in (tuple, list, dict, set) or origin is typing.Literal:
        return False
    return any(_holds(member, kind) for member in typing.get_args(annotation))
