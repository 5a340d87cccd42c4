"""A rank whose output cannot be written still ends by itself, with its record."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("torch")

from parsim.execute.processes.group import error_path, read_error

FULL = Path("/dev/full")
RANK = """
from parsim.execute.processes.group import worker_main

def run(path):
    raise ValueError("a fault of the rank")

worker_main(run)
"""


@pytest.mark.skipif(not FULL.exists(), reason="this system has no /dev/full, whose writes fail as on a full disk")
def test_a_rank_whose_output_is_full_ends_with_status_1_and_its_record(tmp_path: Path) -> None:
    with FULL.open("w") as full:
        done = subprocess.run([sys.executable, "-c", RANK, str(tmp_path / "job.json")], stdout=full, stderr=full, check=False)
    assert done.returncode == 1
    found = read_error(error_path(tmp_path, 0))
    assert found is not None
    assert found.message == "a fault of the rank"
