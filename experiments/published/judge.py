"""Claims of predicted published runs, from results.json."""

from __future__ import annotations

from typing import Any

from experiments.common.claims import Claim, claim

AIMS = {
    "Megatron, Selene": 3.0,
    "multi-node A100 (vTrain)": 8.0,
    "FSDP, A100 (mosaic)": 5.0,
    "FSDP, H100 (mosaic)": 8.0,
}
"""Mean error in percent, by factors fitted on other sources."""


def claims(document: dict[str, Any]) -> list[Claim]:
    """The promises of the design for rows that nobody looked at.

    Args:
        document: results.json; an empty one compares nothing.
    """
    groups = document.get("groups", {})
    found = []
    for name, aim in AIMS.items():
        error = groups.get(name, {}).get("held_out")
        text = f"{name}: the mean error is at most {aim:.0f}%"
        rows = groups.get(name, {}).get("rows", 0)
        found.append(
            claim(text, None if error is None else error <= aim, "" if error is None else f"{error:.1f}% of {rows} rows")
        )
    fits = document.get("does_not_fit")
    told = "" if fits is None else f"{len(fits)} of {document['rows']} rows do not"
    return [*found, claim("Every published run is predicted to fit", None if fits is None else not fits, told)]
