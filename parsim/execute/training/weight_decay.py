"""Which parameters have no weight decay: norms, biases, or those that a pattern names."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from fnmatch import fnmatchcase

from torch import nn

from parsim.errors import ConfigError, near_matches
from parsim.execute.training.recipe import BIAS, KINDS, NORM


def exempt_names(module: nn.Module, exclude: Sequence[str]) -> frozenset[str]:
    """The parameters of a module without weight decay, by every name they have.

    Args:
        exclude: "norm" (parameters of normalisations), "bias" (names that end so), or patterns of names.
    """
    if not exclude:
        return frozenset()
    named = dict(module.named_parameters(remove_duplicate=False))
    norms = {name for name, child in module.named_modules(remove_duplicate=False) if _is_norm(child)}
    found = {
        id(parameter)
        for name, parameter in named.items()
        if any(_excludes(entry, name, norms) for entry in exclude)  # one name of tied weights is enough
    }
    return frozenset(name for name, parameter in named.items() if id(parameter) in found)


def check_exempt(names: Iterable[str], exclude: Sequence[str]) -> None:
    """Raise ConfigError for a pattern that matches no parameter.

    Args:
        names: of the model's parameters. exclude: of the run file.
    """
    known = list(names)
    for entry in exclude:
        if entry not in KINDS and not any(fnmatchcase(name, entry) for name in known):
            raise ConfigError(
                f"training.no_weight_decay: no parameter matches {entry!r}{near_matches(entry, [*KINDS, *known])}; "
                f'write "{NORM}", "{BIAS}" or a pattern such as "*.bias"'
            )


def _excludes(entry: str, name: str, norms: set[str]) -> bool:
    owner, _, last = name.rpartition(".")
    if entry == NORM:
        return owner in norms
    if entry == BIAS:
        return last.endswith("bias")
    return fnmatchcase(name, entry)


def _is_norm(module: nn.Module) -> bool:
    """torch's own, and classes of others that are named so (LlamaRMSNorm, T5LayerNorm)."""
    kind = type(module).__name__
    return isinstance(module, nn.LayerNorm | nn.GroupNorm | nn.modules.batchnorm._NormBase) or kind.endswith("Norm")
