"""What all parts of a hardware profile have in common."""

from __future__ import annotations

from typing import Annotated

from pydantic import AliasChoices, BaseModel, ConfigDict, Field

Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]
Count = Annotated[int, Field(ge=1, strict=True)]
NonNegative = Annotated[float, Field(ge=0, allow_inf_nan=False)]


OLD_KEYS = {"post_wait_s": "resume_s", "core_sharing": "crowding"}
"""What keys of a profile were called before. Files with the old ones load; new files have the new ones."""


def either_key(key: str) -> AliasChoices:
    """A key of OLD_KEYS by its new or its old name."""
    return AliasChoices(key, OLD_KEYS[key])


class ProfileRecord(BaseModel):
    """Base of all parts: unknown keys are errors, values are immutable."""

    model_config = ConfigDict(extra="forbid", frozen=True)
