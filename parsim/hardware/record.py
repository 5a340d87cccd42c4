"""What all parts of a hardware profile have in common."""

from __future__ import annotations

from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field

Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]
NonNegative = Annotated[float, Field(ge=0, allow_inf_nan=False)]


class ProfileRecord(BaseModel):
    """Base of all parts: unknown keys are errors, values are immutable."""

    model_config = ConfigDict(extra="forbid", frozen=True)
