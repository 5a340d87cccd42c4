"""[plan.synchronisation] of a run file: a table, or its text form in one line."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import Field, StrictInt, StrictStr
from pydantic_core import PydanticCustomError

from parsim.errors import PlanError
from parsim.hardware.record import Count
from parsim.plans.mixing_schedule import mixing_text
from parsim.plans.synchronisation import Synchronisation, parse_synchronisation
from parsim.workflow.cluster_section import ConfigSection, Name, Number


class SynchronisationTable(ConfigSection):
    """plan.synchronisation: how and when replicas come together; left out, gradients are summed in every step."""

    kind: Name
    """all_reduce, average, gossip, merge or stale."""
    period_steps: Count | None = None
    """Local steps before each round of average, gossip and merge; left out: 1."""
    graph: Name | dict[Name, StrictInt | Number | StrictStr] | None = None
    """Of gossip: "ring", or a table { name = "lattice", neighbours = 4 }; Ada: { name = "ada", rounds = 50, epochs = 4 }."""
    weights: tuple[Number, ...] | tuple[tuple[Number, ...], ...] | None = None
    """Of average: one per replica, which sum to 1. Of gossip: a row per replica, in place of a graph."""
    outer_optimizer: Name | None = None
    """Of average: "sgd", "momentum" or "nesterov" takes the change of the mean as its gradient."""
    outer_learning_rate: Annotated[float, Field(strict=True, gt=0, allow_inf_nan=False)] | None = None
    outer_momentum: Annotated[float, Field(strict=True, ge=0, lt=1)] | None = None
    participation: Number | None = None
    """Of average: the fraction of replicas drawn for every round."""
    seed: Annotated[int, Field(strict=True, ge=0, lt=2**63)] | None = None
    """Of the draws of participation."""
    merge: Name | None = None
    """Of merge: "half" (left out), "running" or "staleness"."""
    merge_rate: Annotated[float, Field(strict=True, gt=0, le=1)] | None = None
    """Of "staleness": how much of weights that are not late counts; left out: 1."""
    merge_exponent: Annotated[float, Field(strict=True, ge=0, allow_inf_nan=False)] | None = None
    """Of "staleness": how fast late weights lose; left out: 0.5."""
    delays: tuple[Annotated[int, Field(strict=True, ge=0)], ...] | None = None
    """Of stale: steps by which each stage's gradients are late; left out: 2 (K - 1), ..., 2, 0."""

    def value(self) -> Synchronisation:
        """The same as plans take it. Raises PlanError for what contradicts itself."""
        table: dict[str, Any] = self.model_dump(exclude_none=True)
        if "graph" in table:
            table["graph"] = mixing_text(table["graph"])
        rows = table.get("weights", ())
        if rows and not isinstance(rows[0], tuple | list):
            table["weights"] = (tuple(rows),)
        return Synchronisation.from_dict(table)


def as_table(value: Any) -> Any:
    """The table of a text such as "average/8"; anything else as it is, for whoever checks it next.

    Args:
        value: of plan.synchronisation.
    """
    if not isinstance(value, str):
        return value
    try:
        return parse_synchronisation(value).to_dict()
    except PlanError as error:
        raise PydanticCustomError("described", "{rule}", {"rule": str(error)}) from error


def checked(value: SynchronisationTable | None) -> SynchronisationTable | None:
    """The table itself. Raises what pydantic reports for a key that contradicts another.

    Args:
        value: of plan.synchronisation, with keys of the right types.
    """
    if value is not None:
        try:
            value.value()
        except PlanError as error:
            raise PydanticCustomError("described", "{rule}", {"rule": str(error)}) from error
    return value
