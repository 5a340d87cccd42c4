"""What a model takes of one sample, and samples of the user's own brought into that form."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from parsim.errors import DataError
from parsim.model.inputs import DEFAULT_DTYPE, IGNORED, ModelInput

TARGETS = ("target", "targets", "labels", "label", "y")
"""Names under which a mapping may hold the target."""


@dataclass(frozen=True, slots=True)
class Described:
    """The values of a sample, in the order in which the model takes them.

    Attributes: name: of the dataset, for messages. inputs: with a batch. target: None where the inputs hold it.
    """

    name: str
    inputs: tuple[ModelInput, ...]
    target: ModelInput | None

    @property
    def entries(self) -> dict[str, ModelInput]:
        """By "input:0", ... and "target"."""
        found = {f"input:{place}": entry for place, entry in enumerate(self.inputs)}
        return found if self.target is None else {**found, "target": self.target}

    @property
    def types(self) -> Mapping[str, str]:
        """Types that do not follow the weights, by torch's names."""
        return {value: entry.dtype for value, entry in self.entries.items() if entry.dtype != DEFAULT_DTYPE}

    @property
    def form(self) -> str:
        """A sample in words."""
        names = [*(entry.name for entry in self.inputs), *(() if self.target is None else ("target",))]
        return f"({', '.join(names)})" if len(names) > 1 else names[0]

    def batch(self, samples: Sequence[Any], numbers: Sequence[int]) -> dict[str, NDArray[np.generic]]:
        """Samples one below the other.

        Args:
            numbers: of the samples, for messages.

        Raises:
            DataError: a sample that does not suit the model; it names sample, value, shape and type.
        """
        rows = [self._values(sample, f"sample {number}") for sample, number in zip(samples, numbers, strict=True)]
        return {value: np.ascontiguousarray(np.stack([row[place] for row in rows])) for place, value in enumerate(self.entries)}

    def _values(self, sample: Any, where: str) -> list[NDArray[Any]]:
        parts = self._parts(sample, where)
        return [
            self._checked(entry, np.asarray(_array(part)), where)
            for entry, part in zip(self.entries.values(), parts, strict=True)
        ]

    def _parts(self, sample: Any, where: str) -> list[Any]:
        wanted = len(self.entries)
        if isinstance(sample, Mapping):
            keys = [entry.name for entry in self.inputs]
            if self.target is not None:
                keys.append(next((key for key in TARGETS if key in sample and key not in keys), "target"))
            missing = [key for key in keys if key not in sample]
            if missing:
                raise DataError(
                    f"{self.name}: {where} has no {missing[0]!r} (its keys: {', '.join(map(str, sample))}); the model takes "
                    f"{self.form}, and the target may be called {' or '.join(TARGETS)}"
                )
            return [sample[key] for key in keys]
        if isinstance(sample, tuple | list) and wanted > 1:
            if len(sample) != wanted:
                raise DataError(f"{self.name}: {where} has {len(sample)} values; the model takes {wanted}: {self.form}")
            return list(sample)
        if wanted > 1:
            raise DataError(
                f"{self.name}: {where} is a {type(sample).__name__}; return a tuple {self.form} or a mapping with these names"
            )
        return [sample[0] if isinstance(sample, tuple | list) and len(sample) == 1 else sample]

    def _checked(self, entry: ModelInput, array: NDArray[Any], where: str) -> NDArray[Any]:
        what = f"{self.name}: {entry.name} of {where}"
        if array.shape != entry.shape:
            raise DataError(
                f"{what} has shape {list(array.shape)}, and the model takes {list(entry.shape)}; change the dataset, or "
                "model.input_shape (or inputs, target)"
            )
        kinds = "f" if entry.is_number else "iu" if entry.is_integer else "b"
        if entry.dtype.startswith("complex"):
            kinds = "fc"
        if array.dtype.kind not in kinds:
            raise DataError(
                f"{what} is {array.dtype}, and the model takes {entry.dtype}; convert it in the dataset (images: x / 255)"
            )
        if entry.is_integer and entry.high is not None and array.size:
            seen = array[array != IGNORED] if entry is self.target else array
            if seen.size and (int(seen.min()) < entry.low or int(seen.max()) >= entry.high):
                raise DataError(
                    f"{what} holds {int(seen.min())} to {int(seen.max())}, and the model takes {entry.low} to {entry.high - 1}"
                    + ("; give low = -100 if these are labels, of which its loss ignores -100" if seen.min() == IGNORED else "")
                )
        return array.astype(entry.dtype) if entry.is_integer else array


def _array(value: Any) -> Any:
    """A tensor as an array; bfloat16, which numpy lacks, as float32."""
    if hasattr(value, "detach"):
        value = value.detach().cpu()
        return (value.float() if str(value.dtype) == "torch.bfloat16" else value).numpy()
    return value
