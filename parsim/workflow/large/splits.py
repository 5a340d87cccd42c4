"""Splits that a named transformer does not have: axes of plan.mesh that divide neither heads, nor layers, nor experts."""

from __future__ import annotations

from collections.abc import Mapping

from parsim.errors import ConfigError
from parsim.model.named.names import named, sequence_of, shape_of
from parsim.units import nearest_divisors
from parsim.workflow.config import RunConfig


def check_splits(config: RunConfig) -> None:
    """Check the axes that the question gives against the sizes of the model.

    Args:
        config: of a question; any other model passes.

    Raises:
        ConfigError: with the nearest axis that divides.
    """
    row, mesh = named(config.model.name), config.plan.mesh
    if row is None or row.shape is None or mesh is None:
        return
    args = dict(config.model.args)
    shape, name = shape_of(config.model.name, args), config.model.name
    if mesh.tp is not None:
        _divides("tp", mesh.tp, "heads", shape.heads, name)
        _divides("tp", mesh.tp, "inside of the MLP", shape.inner, name)
        if config.plan.sequence_parallel is not False and args.get("sequence_parallel", True):
            _divides("tp", mesh.tp, "tokens of a sample", _tokens(config, args), name)
    if mesh.pp is not None:
        stages = mesh.pp * (config.plan.chunks or 1)
        if stages > shape.layers:
            raise ConfigError(
                f"plan.mesh.pp = {mesh.pp} with {config.plan.chunks or 1} chunks are {stages} stages, and {name} has "
                f"{shape.layers} layers; the nearest: pp * chunks <= {shape.layers}"
            )
    if mesh.ep is not None and shape.experts:
        _divides("ep", mesh.ep, "experts", shape.experts, name)
    if mesh.cp is not None:
        _divides("cp", mesh.cp, "tokens of a sample", _tokens(config, args), name)


def _tokens(config: RunConfig, args: Mapping[str, object]) -> int:
    shape = config.model.input_shape
    return shape[0] if shape else sequence_of(config.model.name, dict(args))


def _divides(axis: str, ways: int, what: str, size: int, name: str) -> None:
    if size % ways:
        raise ConfigError(
            f"plan.mesh.{axis} = {ways} must divide the {what} ({size:,}) of {name}; the nearest that do: "
            f"{nearest_divisors(size, ways)}"
        )
