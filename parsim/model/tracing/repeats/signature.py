"""What a module's forward can depend on, besides its inputs: class, attributes, parameters and buffers, in comparable form.

Left out: global variables, and what objects hold more than one level below an attribute.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from dataclasses import dataclass
from functools import partial
from types import FunctionType, MethodType, ModuleType
from typing import Any

import torch
from torch import Tensor, nn

from parsim.model.tracing.repeats.canonical import PLAIN_TYPES, canonical

_OF_TORCH = frozenset(nn.Module().__dict__) - {"training"}
_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
_DEEPEST = 6

Plain = tuple[str, str]
"""(path of a module below the block, name of an attribute)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Signature:
    """Of one module.

    Attributes:
        skeleton: all but plain attributes. plain: numbers, texts and the like, by place.
    """

    skeleton: Hashable
    plain: Mapping[Plain, Hashable]


def has_hooks(module: nn.Module) -> bool:
    """Whether anything but its own forward runs when a module or one inside it is called."""
    return any(
        "forward" in part.__dict__
        or isinstance(part, torch.jit.ScriptModule)
        or any(part.__dict__.get(name) for name in _HOOKS)
        for part in module.modules()
    )


def signature(block: nn.Module, withheld: Mapping[int, Mapping[str, Any]]) -> Signature:
    """Of a module without hooks of its own; a `forward` among the attributes of the instance is left out.

    Args:
        block: the module. withheld: further attributes, by the identity of the module that should have them.
    """
    places: dict[int, str] = {id(part): path for path, part in block.named_modules()}
    plain: dict[Plain, Hashable] = {}
    parts: list[Hashable] = []
    seen: dict[int, Hashable] = {}
    for path, part in block.named_modules():
        others: list[Hashable] = []
        for name, value in sorted({**part.__dict__, **withheld.get(id(part), {})}.items()):
            if name in _OF_TORCH or name == "forward":
                continue
            if type(value) in PLAIN_TYPES:
                plain[path, name] = canonical(value)
                others.append(name)
            else:
                others.append((name, _described(value, places, seen, 0)))
        parts.append(
            (
                path,
                type(part),
                tuple(others),
                tuple((name, _kind(tensor)) for name, tensor in part._parameters.items()),
                tuple((name, _kind(tensor)) for name, tensor in part._buffers.items()),
                tuple((name, None if child is None else places[id(child)]) for name, child in part._modules.items()),
            )
        )
    return Signature(skeleton=tuple(parts), plain=plain)


def _kind(tensor: Tensor | None) -> Hashable:
    if tensor is None:
        return None
    return type(tensor), tensor.shape, tensor.stride(), tensor.dtype, tensor.device, tensor.requires_grad


def _described(value: Any, places: Mapping[int, str], seen: dict[int, Hashable], depth: int) -> Hashable:
    """Containers by what they hold, functions of the block by their place, other objects by identity and attributes."""
    if type(value) in PLAIN_TYPES:
        return canonical(value)
    if depth > _DEEPEST:
        return "object", id(value)
    if isinstance(value, tuple | list):
        return type(value), *(_described(item, places, seen, depth + 1) for item in value)
    if isinstance(value, dict):
        items = ((canonical(key), _described(item, places, seen, depth + 1)) for key, item in value.items())
        return type(value), *items
    if isinstance(value, partial):
        given = (value.args, value.keywords)
        return partial, _described(value.func, places, seen, depth + 1), _described(given, places, seen, depth + 1)
    if isinstance(value, MethodType):
        owner = value.__self__
        return MethodType, value.__func__, places.get(id(owner), id(owner))
    if isinstance(value, nn.Module) and id(value) in places:
        return nn.Module, places[id(value)]
    if isinstance(value, Tensor | FunctionType | ModuleType | type | nn.Module):
        return "object", id(value)
    if id(value) not in seen:
        by_value = canonical(value)
        held = getattr(value, "__dict__", None)
        content = () if held is None else tuple((name, _shallow(item)) for name, item in held.items())
        seen[id(value)] = by_value, content
    return seen[id(value)]


def _shallow(value: Any) -> Hashable:
    return canonical(value) if type(value) in PLAIN_TYPES else id(value)
