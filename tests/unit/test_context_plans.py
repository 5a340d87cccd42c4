"""Divided sequences and experts as a user asks for them: run files, answers, refusals."""

from __future__ import annotations

from pathlib import Path

import pytest

import parsim
from parsim.errors import ConfigError, ParsimError

RUN = """
[model]
name = "gpt"
[cluster]
gpu = "h100-sxm"
gpus_per_node = 8
[training]
global_batch = 16
precision = "amp_bf16"
optimizer = "adamw"
dataset = "synthetic"
[plan]
"""


def run_file(folder: Path, plan: str) -> Path:
    path = folder / "RUN.toml"
    path.write_text(RUN + plan)
    return path


def test_a_divided_sequence_is_simulated_and_told(tmp_path: Path) -> None:
    found = parsim.simulate(
        run_file(tmp_path, 'strategy = "custom"\nmesh = { dp = 4, cp = 2 }\ncontext_exchange = "all_gather"')
    )
    document = found.to_dict()
    assert document["plan"]["mesh"] == {"pp": 1, "dp": 4, "tp": 1, "cp": 2}
    assert document["plan"]["executable"] is False
    assert document["plan"]["context_exchange"] == "all_gather"
    assert "cp=2" in repr(found)
    assert len(document["peak_memory_bytes"]) == 8


def test_a_search_keeps_the_pieces_of_the_sequence(tmp_path: Path) -> None:
    chosen = parsim.plan(run_file(tmp_path, 'strategy = "dp"\nmesh = { cp = 2 }')).to_dict()["chosen"]
    assert chosen["plan"]["mesh"] == {"pp": 1, "dp": 4, "tp": 1, "cp": 2}


@pytest.mark.parametrize(
    ("plan", "message"),
    [
        ('strategy = "custom"\nmesh = { dp = 8, ep = 2 }', "has no experts"),
        ('strategy = "custom"\nmesh = { dp = 4, cp = 3 }', r"cp \(3\) = 12 must equal the devices \(8\)"),
        ('strategy = "custom"\nmesh = { dp = 8, ep = 3 }', r"ep \(3\) must divide dp \(8\)"),
        ('strategy = "custom"\nmesh = { dp = 8 }\ncontext_exchange = "ring"', "context_exchange"),
        ('strategy = "dp"\nmesh = { cp = 2 }\ncontext_exchange = "all_gather"', "context_exchange"),
        ('strategy = "custom"\nmesh = { dp = 8 }\ncapacity_factor = 0.5', "capacity_factor"),
    ],
)
def test_what_cannot_be_is_refused_with_the_rule(tmp_path: Path, plan: str, message: str) -> None:
    with pytest.raises((ConfigError, ParsimError), match=message):
        parsim.simulate(run_file(tmp_path, plan))
