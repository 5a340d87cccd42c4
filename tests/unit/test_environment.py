"""What a rank is set up with: environment and pinning."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from parsim.execute.processes.machine import describe_environment, machine_line, resident_bytes, versions
from parsim.execute.processes.setup import available_cores, core_of_rank


def run_python(code: str) -> str:
    finished = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    return finished.stdout.strip()


def test_environment_is_json_without_host_user_or_path() -> None:
    environment = describe_environment()
    text = json.dumps(environment)
    assert os.uname().nodename not in text
    assert os.path.expanduser("~") + "/" not in text
    assert environment["cores"] >= len(environment["affinity"]) >= 1
    assert 0 < environment["memory_limit_bytes"] <= environment["memory_bytes"]
    assert machine_line(environment).startswith(environment["processor"])


def test_versions_come_from_metadata() -> None:
    import numpy as np

    found = versions()
    assert found["numpy"] == np.__version__
    assert found["python"] == ".".join(map(str, sys.version_info[:3]))


def test_environment_loads_no_torch() -> None:
    code = (
        "import sys; from parsim.execute.processes.machine import describe_environment as d; "
        "state = d()['torch']; print('torch' in sys.modules, state['loaded'])"
    )
    assert run_python(code) == "False False"


def test_resident_memory_grows_with_what_is_held() -> None:
    before = resident_bytes()
    held = bytearray(os.urandom(1)) * (64 << 20)
    assert resident_bytes() - before > 48 << 20
    del held


@given(cores=st.lists(st.integers(0, 300), min_size=1, max_size=16, unique=True), ranks=st.integers(1, 64))
def test_ranks_are_spread_evenly(cores: list[int], ranks: int) -> None:
    counts = [0] * len(cores)
    for rank in range(ranks):
        counts[cores.index(core_of_rank(rank, tuple(cores)))] += 1
    assert max(counts) - min(counts) <= 1
    assert max(counts) == -(-ranks // len(cores))


def test_prepare_rank_pins_one_core_and_one_thread() -> None:
    pytest.importorskip("torch")
    code = (
        "import os, torch; from parsim.execute.processes.setup import prepare_rank, available_cores; "
        "cores = available_cores(); pinning = prepare_rank(3, 4); "
        "assert os.sched_getaffinity(0) == {cores[3 % len(cores)]} == {pinning.core}; "
        "assert pinning.shared_by == -(-4 // len(cores)); assert torch.get_num_threads() == pinning.threads == 1; print('ok')"
    )
    if not hasattr(os, "sched_setaffinity"):
        pytest.skip("this system cannot pin processes")
    assert run_python(code) == "ok"
    assert len(available_cores()) >= 1


def test_freed_memory_is_kept() -> None:
    pytest.importorskip("torch")
    code = """
import resource, torch
from parsim.execute.processes.setup import keep_freed_memory
kept = keep_freed_memory()
x = torch.ones(12 << 20)
for _ in range(15):
    y = x + 1
    del y
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(10):
    y = x + 1
    del y
print(kept, resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""
    kept, faults = run_python(code).split()
    if kept == "False":
        pytest.skip("no glibc here")
    assert int(faults) < 30_000, "48 MiB ten times over are 122,880 pages if they are mapped anew"
