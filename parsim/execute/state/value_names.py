"""Whether a rank calls the values of a model by the names that the plan was made with."""

from __future__ import annotations

from collections.abc import Mapping

from parsim.errors import ExecutionError
from parsim.model.model import Model
from parsim.model.runnable import CallProgram


def check_names(model: Model, recorded: Mapping[str, CallProgram]) -> None:
    """Ranks address what they exchange by the names of the Model.

    Args:
        model: that the plan was made for. recorded: by this rank, of the same module.

    Raises:
        ExecutionError: if a value has another name here, as where a forward iterates over a set.
    """
    for component in model.components:
        program = recorded[component.name]
        for kind, planned, here in (
            ("reads", component.inputs, [name for name, _, _ in program.inputs]),
            ("makes", component.outputs, [name for name, _, _ in program.outputs]),
        ):
            if list(dict.fromkeys(planned)) != list(dict.fromkeys(here)):
                raise ExecutionError(
                    f"{component.name} {kind} {', '.join(planned)} in the model that was planned, but {', '.join(here)} on "
                    "this rank: its forward runs in another order here, as one that iterates over a set does. Sort what it "
                    "iterates over, or plan and run with PYTHONHASHSEED=0 (parsim sets it for the ranks that it starts)"
                )
