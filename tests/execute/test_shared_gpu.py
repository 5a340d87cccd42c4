"""Ranks that share a GPU on purpose, and GPUs that cannot be used: what is told, and that staged communication is right."""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from parsim.errors import ExecutionError
from parsim.execute.cuda import gpu as rank_gpu
from parsim.execute.cuda.gpu import NCCL, NCCL_APART, STAGED, check_gpus, gpu_of, rank_variables, sharing, take_gpu, usable_gpus
from parsim.units import GIB
from tests.virtual_cuda import VirtualDriver

FOLDER = Path(__file__).resolve().parents[2] / "experiments" / "one_gpu"
TOO_OLD = (
    "The NVIDIA driver on your system is too old (found version 11040). Please update your GPU driver by downloading and "
    "installing a new version from the URL: http://www.nvidia.com/Download/index.aspx"
)


@pytest.fixture
def gpus(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Has torch see so many GPUs, `used` bytes of each taken."""
    for name in (*rank_gpu.CUDA_VARIABLES, *NCCL_APART, "NCCL_HOSTID", "PARSIM_SHARE_GPU"):
        monkeypatch.setenv(name, "")  # put back as it was afterwards
        monkeypatch.delenv(name)

    def see(count: int, *, used: int = 0, error: str = "") -> list[int]:
        taken: list[int] = []

        def init() -> None:
            raise RuntimeError(error or "No CUDA GPUs are available")

        monkeypatch.setattr(torch.version, "cuda", "13.0")
        monkeypatch.setattr(torch.cuda, "is_available", lambda: count > 0)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
        monkeypatch.setattr(torch.cuda, "init", init)
        monkeypatch.setattr(torch.cuda, "set_device", lambda device: taken.append(device.index))
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (80 * GIB - used, 80 * GIB))
        return taken

    return see


def test_a_driver_that_is_too_old_is_named_wherever_gpus_are_asked_for(gpus: Any) -> None:
    """It was told as "this host has 0 GPUs; set cluster.devices = 1 and plan again"."""
    gpus(0, error=TOO_OLD)
    count, _why = usable_gpus()
    assert count == 0
    with pytest.raises(
        ExecutionError, match=r"2 ranks, one GPU each, and this host has none. .* driver on your system is too old"
    ):
        check_gpus(2, measures=False)
    with pytest.raises(ExecutionError, match=r"rank 1 needs GPU 1 of this host, which has 0; .*too old.*nvidia-smi"):
        take_gpu(1, 1, alone=True)


def test_more_ranks_than_gpus_is_one_message_before_anything_starts(gpus: Any) -> None:
    gpus(4)
    check_gpus(4, measures=True)
    with pytest.raises(ExecutionError, match=r"8 ranks, one GPU each, and this host has 4 GPUs .* cluster.devices = 4"):
        check_gpus(8, measures=False)
    gpus(1)
    with pytest.raises(ExecutionError, match=r"2 ranks, one GPU each, and this host has 1 GPU \(see"):
        check_gpus(2, measures=False)
    gpus(0, error="No driver.")
    with pytest.raises(ExecutionError, match=r"1 rank, which needs a GPU, and this host has none\. .*No driver\."):
        check_gpus(1, measures=False)


def test_a_build_without_cuda_and_an_empty_list_of_gpus_are_told_apart(gpus: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    gpus(0)
    assert "No CUDA GPUs are available" in usable_gpus()[1]
    monkeypatch.setattr(torch.version, "cuda", None)
    assert usable_gpus()[1].startswith(f"torch {torch.__version__} was built without CUDA")


def test_another_process_is_looked_for_before_nccl_takes_memory(gpus: Any) -> None:
    taken = gpus(2, used=12 * GIB)
    with pytest.raises(ExecutionError, match=r"rank 3 finds 12 GiB of cuda:1 in use before it has allocated anything"):
        take_gpu(3, 1, alone=True)
    assert take_gpu(3, 1, alone=False) == torch.device("cuda", 1)
    assert taken == [1, 1]


def test_a_gpu_that_cannot_be_taken_is_one_message(gpus: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    gpus(1)

    def fails(device: torch.device) -> None:
        raise RuntimeError("CUDA error: CUDA-capable device(s) is/are busy or unavailable\nmore")

    monkeypatch.setattr(torch.cuda, "set_device", fails)
    with pytest.raises(ExecutionError, match=r"rank 0 cannot use cuda:0: CUDA error: .* unavailable. `nvidia-smi`"):
        take_gpu(0, 0, alone=True)


def test_streams_of_a_rank_have_queues_of_their_own(gpus: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    gpus(1)
    take_gpu(0, 0, alone=True)
    assert os.environ["CUDA_DEVICE_MAX_CONNECTIONS"] == "32"
    monkeypatch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", "1")
    take_gpu(0, 0, alone=True)
    assert os.environ["CUDA_DEVICE_MAX_CONNECTIONS"] == "1", "what somebody has set stays"


def test_without_the_switch_a_gpu_is_not_shared(gpus: Any) -> None:
    gpus(1)
    with pytest.raises(ExecutionError, match="rank 1 needs GPU 1 of this host, which has 1; use at most 1 processes"):
        take_gpu(1, 1, alone=True)
    with pytest.raises(ExecutionError, match=r"the plan has 2 ranks"):
        check_gpus(2, measures=False)
    assert "NCCL_HOSTID" not in os.environ


@pytest.mark.parametrize("way", [NCCL, STAGED])
def test_with_the_switch_ranks_take_turns_at_the_gpus_and_are_not_timed(
    gpus: Any, monkeypatch: pytest.MonkeyPatch, way: str
) -> None:
    gpus(2, used=12 * GIB)  # of the other ranks
    monkeypatch.setenv("PARSIM_SHARE_GPU", way)
    check_gpus(4, measures=False)
    with pytest.raises(ExecutionError, match=r"4 ranks on 2 GPUs .* their times mean nothing"):
        check_gpus(4, measures=True)
    assert [take_gpu(rank, rank, alone=True).index for rank in range(4)] == [0, 1, 0, 1]
    assert os.environ.get("NCCL_HOSTID") == ("parsim-rank-3" if way == NCCL else None)
    gpus(0)
    with pytest.raises(ExecutionError, match="this host has none"):
        check_gpus(2, measures=False)


@pytest.mark.parametrize(("name", "value"), [("CUDA_MODULE_LOADING", "EAGER"), ("NCCL_LAUNCH_ORDER_IMPLICIT", "1")])
def test_what_is_set_for_ranks_that_share_is_not_for_others(
    gpus: Any, monkeypatch: pytest.MonkeyPatch, name: str, value: str
) -> None:
    """The first launch of a kernel loads it and waits until the GPU is idle, so never where a receive waits for its peer. But
    kernels that are loaded at once take memory that profiles leave out, and NCCL's order is one that no prediction knows."""
    monkeypatch.setenv(name, "")
    monkeypatch.delenv(name)
    gpus(1)
    take_gpu(0, 0, alone=False)
    assert name not in os.environ
    monkeypatch.setenv("PARSIM_SHARE_GPU", NCCL)
    take_gpu(0, 0, alone=False)
    assert os.environ[name] == value


def test_ranks_look_like_different_hosts_to_nccl() -> None:
    environment = {"PARSIM_SHARE_GPU": NCCL}
    one, other = (rank_variables(rank, environment) for rank in (0, 1))
    assert one["NCCL_HOSTID"] != other["NCCL_HOSTID"]
    assert {key: one[key] for key in one if key != "NCCL_HOSTID"} == NCCL_APART
    assert rank_variables(0, {}) == rank_variables(0, {"PARSIM_SHARE_GPU": STAGED}) == {}
    assert gpu_of(1, 1, {}) is None
    assert gpu_of(1, 1, environment) == 0
    with pytest.raises(ExecutionError, match="PARSIM_SHARE_GPU='yes' must be nccl or staged"):
        sharing({"PARSIM_SHARE_GPU": "yes"})


@pytest.fixture
def correct(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    monkeypatch.syspath_prepend(str(FOLDER))
    module = importlib.import_module("correct")
    monkeypatch.setattr(module, "SHARED_TIMEOUT_S", 900)  # of a busy machine
    yield module
    for name in ("correct", "questions", "fake_peers"):
        sys.modules.pop(name, None)


def assert_right(rows: list[dict[str, Any]], count: int) -> None:
    assert len(rows) == count
    assert all(row["ok"] for row in rows), "\n".join(f"{row['what']}: {row['found']}" for row in rows if not row["ok"])


@pytest.mark.slow
@pytest.mark.xdist_group("launch")
def test_staged_ranks_train_what_one_process_does(correct: ModuleType) -> None:
    """Every operation that plans use (all_reduce, all_gather, reduce_scatter, all_to_all, broadcast, send, recv) on copies."""
    plans = {name: plan for name, plan in correct.shared_plans()[2].items() if name in ("dp, ZeRO 3", "pp, 1f1b", "tp")}
    assert_right(correct.ranks_sharing(2, plans, "cpu", STAGED), 3)


@pytest.mark.slow
@pytest.mark.xdist_group("launch")
@pytest.mark.parametrize("way", ["", STAGED])
@pytest.mark.parametrize("ranks", [2, 4])
def test_every_shared_plan_trains_what_one_process_does(correct: ModuleType, ranks: int, way: str) -> None:
    plans = correct.shared_plans()[ranks]
    assert_right(correct.ranks_sharing(ranks, plans, "cpu", way), len(plans))


def test_ranks_alone_issue_and_overlap_as_simulated(correct: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    """What `correct.py` does on a GPU, in virtual time; and with communication that waits for nothing, every plan fails."""
    plans = {4: {name: plan for name, plan in correct.shared_plans()[4].items() if name != "dp 2 x pp 2"}}
    monkeypatch.setattr(correct, "shared_plans", lambda: plans)
    rows = list(correct.ranks_alone(VirtualDriver(clock_s=100.0), torch.clone))
    assert_right(rows, 3)
    for row in rows:
        assert "for issue order and overlap only" in row["what"]
        assert row["found"].startswith("no task begins 0.00% of the step from its time")
    careless = VirtualDriver(clock_s=100.0, careless=frozenset(range(1, 999)))
    rows = list(correct.ranks_alone(careless, torch.clone))
    assert [row["ok"] for row in rows] == [False] * 3


@pytest.fixture
def timed(correct: ModuleType, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """A clock that launches move by what they `take`, up to their timeout; `nccl`: whether it lets ranks share a GPU."""
    told: dict[str, Any] = {"now_s": 0.0, "takes_s": 50.0, "nccl": True, "launches": [], "timeouts_s": []}

    def passes(most_s: float) -> None:
        told["timeouts_s"].append(most_s)
        told["now_s"] += min(told["takes_s"], most_s)
        if told["takes_s"] > most_s:
            raise ExecutionError("time is up")

    def launched(job: Path, ranks: int, *, timeout_s: float, env: dict[str, str] | None = None) -> None:
        way = (env or {}).get("PARSIM_SHARE_GPU", "")
        told["launches"].append((ranks, way))
        if way == NCCL and not told["nccl"]:
            told["now_s"] += 20.0
            raise ExecutionError("Duplicate GPU detected")
        passes(timeout_s)

    def alone(plan: Any, *_: object) -> list[Any]:
        told["now_s"] += 5.0
        return [correct.IssuedStep(ends_s={}, makespan_s=1.0, latest_s=0.0, hidden=0.5, simulated_hidden=0.5)] * (
            plan.world_size
        )

    monkeypatch.setattr(correct, "SHARED_TIMEOUT_S", 100)
    monkeypatch.setattr(correct, "launch", launched)
    monkeypatch.setattr(correct, "beside_plain_training", lambda *_: {"ok": True, "found": ""})
    monkeypatch.setattr(correct, "steps_alone", alone)
    monkeypatch.setattr(correct, "TorchCudaDriver", lambda _: None)
    return told


def checked(correct: ModuleType, timed: dict[str, Any], budget_s: float) -> list[dict[str, Any]]:
    return list(correct.checks("cuda", lambda: budget_s - timed["now_s"]))


@pytest.mark.parametrize("budget_s", [60.0, 200.0, 380.0, 10_000.0])
@pytest.mark.parametrize("takes_s", [20.0, 1000.0])
@pytest.mark.parametrize("nccl", [True, False])
def test_checks_end_within_their_budget_and_say_what_was_not_run(
    correct: ModuleType, timed: dict[str, Any], budget_s: float, takes_s: float, nccl: bool
) -> None:
    timed["takes_s"], timed["nccl"] = takes_s, nccl
    rows = checked(correct, timed, budget_s)
    assert timed["now_s"] <= budget_s + 5.0, "one rank alone"
    assert timed["launches"][:2] == [(1, ""), (2, NCCL)][: len(timed["launches"])]
    assert min(timed["timeouts_s"]) >= correct.LAUNCH_S
    told = " ".join(row["what"] for row in rows)
    for plans in correct.shared_plans().values():
        assert all(name in told for name in plans), "run or not, every plan is named"
    assert all(row["found"].startswith("not run: ") for row in rows if row.get("not_run", False))
    left_out = [row["found"] for row in rows if row.get("not_run", False)]
    if takes_s == 1000.0:
        assert left_out
    elif budget_s == 10_000.0 and nccl:
        assert (len(rows), left_out) == (4 + 7 + 4 + 11, [])
        assert timed["launches"] == [(1, ""), (2, NCCL), (4, NCCL), (1, ""), (1, ""), (1, "")]
    elif budget_s == 10_000.0:  # NCCL that refuses two ranks is not asked for four
        assert left_out == ["not run: NCCL did not take two ranks on one GPU"]
        assert timed["launches"][:4] == [(1, ""), (2, NCCL), (2, STAGED), (4, STAGED)]


def test_the_command_has_a_budget(
    correct: ModuleType, timed: dict[str, Any], monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    prepared: list[int] = []
    monkeypatch.setattr(correct, "prepare_cuda", prepared.append)
    monkeypatch.setattr(correct, "usable_gpus", lambda: (1, ""))
    monkeypatch.setattr(sys, "argv", ["correct.py", "--budget", "0.5"])
    assert correct.main() == 1
    assert prepared == [0], "ranks that run alone have as many queues as others"
    said = capsys.readouterr().out.splitlines()
    assert timed["launches"] == []
    assert said[0].startswith("NOT RUN ")
    assert said[-1] == f"nothing was checked; {len(said) - 1} not run"


def test_a_launch_that_fails_is_a_row_and_only_nccl_may_refuse(correct: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuses(*_: object, **__: object) -> None:
        raise ExecutionError("rank 0 of 2 failed: DistBackendError: Duplicate GPU detected")

    monkeypatch.setattr(correct, "launch", refuses)
    for way in (NCCL, STAGED):
        (row,) = correct.ranks_sharing(2, {"dp": correct.shared_plans()[2]["dp"]}, "cpu", way)
        assert (row["ok"], row["refused"]) == (False, way == NCCL)
        assert "Duplicate GPU" in row["found"]
