"""What a rank is set up with: environment, pinning, optimizers."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from parsim.errors import ConfigError
from parsim.execute.environment import describe_environment, machine_line, resident_bytes, versions
from parsim.execute.pinning import available_cores, core_of_rank


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
        "import sys; from parsim.execute.environment import describe_environment as d; "
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
    code = (
        "import os, torch; from parsim.execute.pinning import prepare_rank, available_cores; "
        "cores = available_cores(); pinning = prepare_rank(3, 4); "
        "assert os.sched_getaffinity(0) == {cores[3 % len(cores)]} == {pinning.core}; "
        "assert pinning.shared_by == -(-4 // len(cores)); assert torch.get_num_threads() == pinning.threads == 1; print('ok')"
    )
    if not hasattr(os, "sched_setaffinity"):
        pytest.skip("this system cannot pin processes")
    assert run_python(code) == "ok"
    assert len(available_cores()) >= 1


def test_freed_memory_is_kept() -> None:
    code = """
import resource, torch
from parsim.execute.pinning import keep_freed_memory
kept = keep_freed_memory()
x = torch.ones(12 << 20)
for _ in range(5):
    y = x + 1
    del y
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(5):
    y = x + 1
    del y
print(kept, resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""
    kept, faults = run_python(code).split()
    if kept == "False":
        pytest.skip("no glibc here")
    assert int(faults) < 1000, "48 MiB five times over are 61,440 pages if they are mapped anew"


class TestOptimizer:
    torch = pytest.importorskip("torch")

    def parameters(self, dtype: object = None) -> list:
        torch = self.torch
        generator = torch.Generator().manual_seed(1)
        shapes = [(3, 4), (5,), (2, 2, 2)]
        return [torch.nn.Parameter(torch.randn(s, generator=generator, dtype=torch.float64)) for s in shapes]

    def test_unknown_name_teaches(self) -> None:
        from parsim.execute.optimizer import make_optimizer, state_bytes_per_element

        with pytest.raises(ConfigError, match="sgd_momentum"):
            make_optimizer("sgd_momentun", self.parameters(), 0.1)
        with pytest.raises(ConfigError, match="adam"):
            state_bytes_per_element("adamm")

    def test_flat_gradients_are_views_that_autograd_adds_into(self) -> None:
        from parsim.execute.optimizer import flat_gradients

        parameters = self.parameters()
        flat = flat_gradients(parameters)
        for _ in range(2):
            sum((p**2).sum() for p in parameters).backward()
        expected = self.torch.cat([4 * p.detach().flatten() for p in parameters])
        assert self.torch.equal(flat, expected)
        flat.zero_()
        assert all(not p.grad.any() for p in parameters)

    def test_sgd_momentum_closed_form(self) -> None:
        """With a constant gradient g: x_k = x_0 - lr g sum_{i<k} (1 - 0.9^(i+1)) / 0.1."""
        from parsim.execute.optimizer import flat_gradients, make_optimizer

        parameters = self.parameters()
        start = [p.detach().clone() for p in parameters]
        flat = flat_gradients(parameters)
        flat.fill_(0.5)
        optimizer = make_optimizer("sgd_momentum", parameters, 0.01)
        for _ in range(7):
            optimizer.step()
        moved = 0.01 * 0.5 * sum((1 - 0.9 ** (i + 1)) / 0.1 for i in range(7))
        for before, parameter in zip(start, parameters, strict=True):
            self.torch.testing.assert_close(parameter.detach(), before - moved, rtol=0, atol=1e-13)

    def test_adam_first_step_is_the_learning_rate(self) -> None:
        from parsim.execute.optimizer import flat_gradients, make_optimizer

        for name, decay in (("adam", 0.0), ("adamw", 0.01)):
            parameters = self.parameters()
            start = [p.detach().clone() for p in parameters]
            flat_gradients(parameters).fill_(3.0)
            make_optimizer(name, parameters, 0.1).step()
            for before, parameter in zip(start, parameters, strict=True):
                self.torch.testing.assert_close(parameter.detach(), before * (1 - 0.1 * decay) - 0.1, rtol=0, atol=1e-8)

    @pytest.mark.parametrize("name", ["sgd", "sgd_momentum", "adam", "adamw"])
    def test_state_bytes_are_what_torch_allocates(self, name: str) -> None:
        from parsim.execute.optimizer import flat_gradients, make_optimizer, state_bytes_per_element

        parameters = self.parameters()
        flat = flat_gradients(parameters)
        flat.fill_(1.0)
        optimizer = make_optimizer(name, parameters, 0.1)
        optimizer.step()
        held = sum(
            value.nbytes
            for state in optimizer.state.values()
            for key, value in state.items()
            if self.torch.is_tensor(value) and key != "step"
        )
        assert held == state_bytes_per_element(name, 8) * flat.numel()

    def test_tied_parameters_are_updated_once(self) -> None:
        from parsim.execute.optimizer import distinct, make_optimizer

        parameter = self.torch.nn.Parameter(self.torch.zeros(2))
        parameter.grad = self.torch.ones(2)
        make_optimizer("sgd", [parameter, parameter], 1.0).step()
        assert parameter.tolist() == [-1.0, -1.0]
        assert len(distinct([parameter, parameter])) == 1
