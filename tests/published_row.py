"""A row of published training that everything is stated of, for the tests of `experiments/published`."""

from __future__ import annotations

ROW = {
    "id": "megatron-x-1",
    "hardware": "A100-80GB SXM",
    "gpus": "8",
    "model": "GPT",
    "layers": "4",
    "hidden": "1024",
    "heads": "16",
    "seq": "1024",
    "global_batch": "16",
    "micro_batch": "2",
    "tp": "2",
    "pp": "2",
    "dp": "2",
    "recompute": "full",
    "precision": "bf16",
    "unit": "s/iteration",
}

BLANK = dict.fromkeys(("source", "params", "cp", "ep", "vpp", "zero_stage", "value", "notes"), "")
"""The columns that it leaves empty."""


def row_with(**values: str) -> dict[str, str]:
    """The row with other values, as a line of a file."""
    return BLANK | ROW | values
