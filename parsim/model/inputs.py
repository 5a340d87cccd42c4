"""The inputs of a model: name, shape and type of each, and batches made of them. Needs torch only to make batches.

A name is that of an argument of `forward`. A name with dots lies inside an argument: "batch.image" is the entry "image" of
the dict `batch`, "states.0" the first of the list `states`.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from parsim.errors import ModelError, near_matches

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn

FLOATS = ("float32", "float64", "float16", "bfloat16", "complex64", "complex128")
INTEGERS = ("int64", "int32", "int16", "int8", "uint8")
DTYPES = (*FLOATS, *INTEGERS, "bool")
IGNORED = -100
"""A target that counts in no loss and no metric: torch's own `ignore_index`."""
IGNORED_SHARE = 0.25
"""Of labels that may be left out, how many are in an example: enough that samples differ in it."""
DEFAULT_DTYPE = "float32"
KEYS = ("shape", "dtype", "high", "low", "constant")
MOST_ELEMENTS = 2**33
"""Of one sample: 34 GB in fp32."""
InputLeaf = TypeVar("InputLeaf")


@dataclass(frozen=True, slots=True)
class ModelInput:
    """One tensor that a model takes.

    Attributes:
        name: of the argument of `forward`, with dots for what lies inside one.
        shape: of ONE sample: () for a number per sample. Of the whole tensor where it is `constant`.
        dtype: torch's name of it. "float32" follows the weights of a run (float64, bfloat16); other types stay.
        high, low: integers are drawn from low .. high - 1. Other types have none. A low of -100 stands for labels: from 0 on,
            and -100 for those that a loss leaves out.
        constant: the same tensor for every batch; its dim 0 is not the batch.

    Raises:
        ModelError: an unknown dtype, a size below 1, too many numbers, or bounds that do not suit the dtype.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str = DEFAULT_DTYPE
    high: int | None = None
    low: int = 0
    constant: bool = False

    def __post_init__(self) -> None:
        where = f"input {self.name}"
        if not self.name or not all(self.name.split(".")):
            raise ModelError(f"input name {self.name!r}: name an argument of forward, with dots for what lies inside one")
        if self.dtype not in DTYPES:
            raise ModelError(f"{where}: dtype {self.dtype!r} is unknown{near_matches(self.dtype, DTYPES)}")
        if any(size < 1 for size in self.shape):
            raise ModelError(f"{where}: the sizes of its shape must be >= 1, got {list(self.shape)}")
        check_size(f"{where}: shape", self.shape)
        if self.dtype not in INTEGERS:
            if self.high is not None or self.low != 0:
                raise ModelError(f"{where}: high and low are for integers, and its dtype is {self.dtype}; drop them")
        elif self.high is not None and self.high <= self.low:
            raise ModelError(f"{where}: high must be above low ({self.low}), got {self.high}")

    @property
    def is_integer(self) -> bool:
        return self.dtype in INTEGERS

    @property
    def has_ignored(self) -> bool:
        """Whether it holds labels, of which a loss leaves out those of -100."""
        return self.is_integer and self.low == IGNORED and (self.high or 0) > 0

    @property
    def least_drawn(self) -> int:
        """The least integer of an example, but for labels that a loss leaves out."""
        return 0 if self.has_ignored else self.low

    @property
    def is_number(self) -> bool:
        """Standard normal in an example batch: neither an integer nor a boolean."""
        return self.dtype in FLOATS

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values, without defaults and without the name, which is the key of it."""
        rest = {"high": self.high, "low": self.low or None, "constant": self.constant or None}
        kept = {key: value for key, value in rest.items() if value is not None}
        return {"shape": list(self.shape), "dtype": self.dtype, **kept}

    @classmethod
    def from_dict(cls, name: str, document: Mapping[str, Any]) -> ModelInput:
        """Inverse of `to_dict`. Raises ModelError if a key is missing, unknown or of the wrong kind."""
        for key in document:
            if key not in KEYS:
                raise ModelError(f"input {name}: unknown key {key!r}{near_matches(key, KEYS)}")
        if "shape" not in document:
            raise ModelError(f"input {name} needs a shape, that of one sample; for example {{ shape = [3, 32, 32] }}")
        shape, dtype, high, low = (document.get(key) for key in KEYS[:4])
        if not isinstance(shape, list | tuple) or any(type(size) is not int for size in shape):
            raise ModelError(f"input {name}: shape must be a list of whole numbers >= 1, got {shape!r}")
        for key, value in (("high", high), ("low", low)):
            if value is not None and type(value) is not int:
                raise ModelError(f"input {name}: {key} must be a whole number, got {value!r}")
        constant = document.get("constant", False)
        if not isinstance(constant, bool):
            raise ModelError(f"input {name}: constant must be true or false, got {constant!r}")
        if dtype is not None and not isinstance(dtype, str):
            raise ModelError(f"input {name}: dtype must be text such as 'int64', got {dtype!r}")
        return cls(name, tuple(shape), dtype=dtype or DEFAULT_DTYPE, high=high, low=low or 0, constant=constant)

    def tensor(self, samples: int, generator: torch.Generator, dtype: torch.dtype) -> Tensor:
        """A batch of B samples: standard normal numbers (`dtype` in place of float32), integers and booleans uniform.
        Raises ModelError for an integer input without `high`."""
        import torch

        shape = self.shape if self.constant else (samples, *self.shape)
        if self.dtype == "bool":
            return torch.randint(2, shape, generator=generator).bool()
        if self.is_integer:
            if self.high is None:
                raise ModelError(
                    f"input {self.name} holds integers, and their range is unknown; give high, their exclusive upper bound, "
                    f'for example {self.name} = {{ shape = {list(self.shape)}, dtype = "{self.dtype}", high = 1000 }}'
                )
            drawn = torch.randint(self.least_drawn, self.high, shape, generator=generator)
            if self.has_ignored:
                drawn[torch.rand(shape, generator=generator) < IGNORED_SHARE] = IGNORED
            return drawn.to(getattr(torch, self.dtype))
        kind = dtype if self.dtype == DEFAULT_DTYPE else getattr(torch, self.dtype)
        exact = torch.complex128 if kind.is_complex else torch.float64
        return torch.randn(shape, generator=generator, dtype=exact).to(kind)

    def zeros(self, samples: int, dtype: torch.dtype) -> Tensor:
        """A batch of zeros (of `low` for integers), for a forward that looks at shapes alone.
        Zeros come from numpy, where pages that nobody reads take no memory; numpy has no bfloat16. Raises ModelError: the batch
        is larger than this machine can hold."""
        import torch

        shape = self.shape if self.constant else (samples, *self.shape)
        kind = dtype if self.dtype == DEFAULT_DTYPE else getattr(torch, self.dtype)
        if self.low or kind == torch.bfloat16:
            return torch.full(shape, self.low, dtype=kind)
        try:
            return torch.from_numpy(np.zeros(shape, dtype=str(kind).removeprefix("torch.")))
        except MemoryError as error:
            raise ModelError(
                f"a batch of {samples} of input {self.name} is too large here: {error}; give a smaller shape"
            ) from error


def check_size(where: str, shape: tuple[int, ...]) -> None:
    """Raise ModelError where one sample has more than `MOST_ELEMENTS` numbers; `where`: for the message."""
    if math.prod(max(1, size) for size in shape) > MOST_ELEMENTS:
        raise ModelError(f"{where} {list(shape)} is more than {MOST_ELEMENTS:,} numbers per sample; give a smaller one")


def ordered(inputs: Iterable[ModelInput]) -> tuple[ModelInput, ...]:
    """Inputs with the batch in dim 0 first: the first one tells how many samples there are.
    Raises ModelError: no input has a batch, or two have one name."""
    entries = tuple(inputs)
    names = [entry.name for entry in entries]
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise ModelError(f"inputs must have names of their own; given twice: {', '.join(twice)}")
    for name in names:
        if inside := next((other for other in names if other.startswith(f"{name}.")), None):
            raise ModelError(f"input {name} is a tensor, so {inside} cannot lie inside it; rename one of them")
    if all(entry.constant for entry in entries):
        raise ModelError("a model needs an input whose dim 0 is the batch; every input given is constant")
    return (*(entry for entry in entries if not entry.constant), *(entry for entry in entries if entry.constant))


def arguments(values: Mapping[str, InputLeaf]) -> dict[str, Any]:
    """Keyword arguments of `forward` from values by input name.
    Names with dots become dicts, and lists where the parts are numbered from 0."""
    nested: dict[str, Any] = {}
    for name, value in values.items():
        *path, last = name.split(".")
        place = nested
        for part in path:
            place = place.setdefault(part, {})
        place[last] = value
    return {name: _listed(value) for name, value in nested.items()}


def _listed(value: Any) -> Any:
    if not isinstance(value, dict):
        return value
    items = {key: _listed(entry) for key, entry in value.items()}
    if sorted(items) == sorted(str(place) for place in range(len(items))):
        return [items[str(place)] for place in range(len(items))]
    return items


def inputs_from(document: Mapping[str, Any], prefix: str = "") -> tuple[ModelInput, ...]:
    """Inputs of a table: { x = { shape = [3, 32, 32] }, batch = { ids = { shape = [128], dtype = "int64" } } }.

    A table (or list) without a shape holds further inputs. Raises ModelError: as ModelInput; or an entry that is not a table.
    """
    inputs: list[ModelInput] = []
    for key, table in document.items():
        name = f"{prefix}{key}"
        if isinstance(table, list | tuple) and table:
            table = {str(place): item for place, item in enumerate(table)}
        if not isinstance(table, Mapping) or not table:
            raise ModelError(f"input {name} must be a table with a shape, got {table!r}; for example {{ shape = [3, 32, 32] }}")
        holds_tables = all(
            isinstance(item, Mapping) or (isinstance(item, list) and all(isinstance(each, Mapping) for each in item))
            for item in table.values()
        )
        if isinstance(table.get("shape"), list | tuple) or not holds_tables:
            inputs.append(ModelInput.from_dict(name, table))
        else:
            inputs += inputs_from(table, f"{name}.")
    return tuple(inputs)


def module_inputs(
    module: nn.Module, inputs: tuple[ModelInput, ...] | None, shape: tuple[int, ...] | None, name: str
) -> tuple[tuple[ModelInput, ...], bool]:
    """What a module takes, checked against its forward, with the range of integers filled in from its embeddings.

    `inputs`: as described; None: the one input of `shape`, which is a row of tokens where the sample has one dim and the module
    an nn.Embedding. `name`: of the model, for messages. Returns (inputs, whether the only one is positional). Raises
    ModelError: neither inputs nor a shape; a name that forward does not take; an argument that is missing; integers whose range
    nothing tells.
    """
    from torch import nn

    tables = [part.num_embeddings for part in module.modules() if isinstance(part, nn.Embedding)]
    vocabulary = getattr(getattr(module, "config", None), "vocab_size", None)
    parameters = list(inspect.signature(module.forward).parameters.values())
    takes = [parameter.name for parameter in parameters if parameter.kind in _NAMED]
    needs = [each.name for each in parameters if each.kind in _NAMED and each.default is inspect.Parameter.empty]
    if inputs is None and shape is None:
        raise ModelError(_missing_inputs(name, needs))
    if inputs is None:
        assert shape is not None
        positional = not parameters or parameters[0].kind not in _NAMED  # *args alone
        first = "input" if positional else parameters[0].name
        if len(shape) == 1 and tables:
            return (ModelInput(first, shape, dtype="int64", high=vocabulary or tables[0]),), positional
        return (ModelInput(first, shape),), positional
    names = list(dict.fromkeys(each.name.split(".")[0] for each in inputs))
    any_name = any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in parameters)
    forward = f"{name}: forward of {type(module).__name__}"
    for argument in () if any_name else names:
        if argument not in takes:
            listing = f" (it takes {', '.join(takes)})" if takes else " (it takes no argument by name)"
            near = near_matches(argument, takes)
            raise ModelError(f"{forward} has no argument {argument!r}{'' if near.startswith('; known') else near}{listing}")
    for argument in needs:
        if argument not in names:
            raise ModelError(
                f"{forward} needs {argument!r}, which inputs do not give; it takes {', '.join(takes)}, and inputs give "
                f"{', '.join(names)}; add {argument} = {{ shape = [...] }}"
            )
    bound = vocabulary or min(tables, default=None)
    bounded = tuple(replace(each, high=bound) if bound and each.is_integer and each.high is None else each for each in inputs)
    for each in bounded:
        if each.is_integer and each.high is None:
            raise ModelError(
                f"{name}: input {each.name} holds integers and no embedding tells their range; give high, which they stay "
                f'below, for example {each.name} = {{ shape = {list(each.shape)}, dtype = "{each.dtype}", high = 1000 }}'
            )
    return bounded, False


_NAMED = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)


def _missing_inputs(name: str, needs: list[str]) -> str:
    """How to describe the inputs of a module of which nothing was said."""
    if len(needs) < 2:
        return f"{name} needs an input_shape: the shape of one sample, e.g. [3, 224, 224] or [seq]"
    tables = ", ".join(f"{argument} = {{ shape = [...] }}" for argument in needs)
    return (
        f"{name} needs inputs: its forward takes {', '.join(needs)}. In [model] write inputs = {{ {tables} }} with the shape "
        'of one sample each, and dtype = "int64", high = N for numbers below N; in Python give example_inputs, a batch'
    )
