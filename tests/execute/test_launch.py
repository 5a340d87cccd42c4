"""Launches that succeed, fail, hang or are killed: one clear message, and no process left behind."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Collection
from dataclasses import asdict
from pathlib import Path

import pytest

from parsim.errors import ExecutionError, RankLostError
from parsim.execute.processes import launch as launching
from parsim.execute.processes.group import ErrorRecord, error_path, read_error, read_place
from parsim.execute.processes.launch import Ended, failure_of, launch
from parsim.execute.processes.output import MARK_VARIABLE, RankOutput, descendants, kill_launch, marked, read_progress_line

# What a rank does stands in its JOB.json: {"0": [...], "1": [...]}, one list of actions per rank.
WORKER = """
import ctypes, json, os, signal, sys, time
from pathlib import Path
from parsim.errors import DataError, ExecutionError
from parsim.execute.processes.group import close_group, init_group, make_groups, worker_main
from parsim.execute.processes.heartbeat import Doing, pulse


def run(job_path):
    rank = int(os.environ["RANK"])
    folder = job_path.parent
    (folder / f"pid{rank}").write_text(str(os.getpid()))
    place = None
    for action, *arguments in json.loads(job_path.read_text()).get(str(rank), []):
        if action == "say":
            print(*arguments)
        elif action == "complain":
            print(*arguments, file=sys.stderr)
        elif action == "sleep":
            time.sleep(*arguments)
        elif action == "deaf":
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
        elif action == "child":
            if os.fork() == 0:
                os.setsid()
                (folder / f"child{rank}").write_text(str(os.getpid()))
                time.sleep(600)
        elif action == "wait":
            while not (folder / arguments[0]).exists():
                time.sleep(0.01)
        elif action == "signal":
            os.kill(os.getpid(), getattr(signal, arguments[0]))
        elif action == "beat":
            pulse().begin(Doing.PREPARING, "starting", *arguments)
        elif action == "fail once":
            if not (folder / "failed").exists():
                (folder / "failed").write_text("")
                time.sleep(0.5)  # the other one has beaten meanwhile
                raise RuntimeError(*arguments)
        elif action == "interrupt":
            signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background job ignores it
            os.kill(os.getpid(), signal.SIGINT)
        elif action == "crash":
            ctypes.string_at(0)
        elif action == "status":
            os._exit(*arguments)
        elif action == "exit":
            sys.exit(*arguments)
        elif action == "data error":
            raise DataError(*arguments)
        elif action == "value error":
            raise ValueError(*arguments)
        elif action == "join":
            place = init_group(*arguments[:1], timeout_s=arguments[1])
        elif action == "reduce":
            import torch
            value = torch.ones(1) * (rank + 1)
            torch.distributed.all_reduce(value)
            print("sum", value.item())
        elif action == "wrapped reduce":
            import torch
            try:
                torch.distributed.all_reduce(torch.ones(1))
            except RuntimeError as error:
                raise ExecutionError("all_reduce of bucket 3 failed") from error
        elif action == "close":
            print("closed", close_group(place, timeout_s=arguments[0]))
        elif action == "environment":
            print(json.dumps({key: os.environ.get(key) for key in arguments}))
        else:
            raise AssertionError(action)


if __name__ == "__main__":
    worker_main(run)
"""

Actions = list[list[object]]


@pytest.fixture(autouse=True)
def scratch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Temporary files of these launches go here, for us to see what is left, also by parents that are killed."""
    folder = tmp_path / "temporary"
    folder.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    monkeypatch.setenv("TMPDIR", str(folder))
    return folder


def _job(folder: Path, *ranks: Actions) -> Path:
    (folder / "launch_test_worker.py").write_text(WORKER)
    path = folder / "JOB.json"
    path.write_text(json.dumps({str(rank): actions for rank, actions in enumerate(ranks)}))
    return path


def _launch(job: Path, nproc: int, timeout_s: float | None = 60.0, **options: object) -> list[str]:
    lines: list[str] = []
    search = os.pathsep.join([str(job.parent), *filter(None, [os.environ.get("PYTHONPATH")])])
    options.setdefault("env", {"PYTHONPATH": search})
    options.setdefault("on_line", lines.append)
    launch(job, nproc, module="launch_test_worker", timeout_s=timeout_s, **options)  # type: ignore[arg-type]
    return lines


def _alive(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state not in ("Z", "X")


def _pids(folder: Path) -> list[int]:
    return [int(path.read_text()) for pattern in ("pid*", "child*") for path in folder.glob(pattern) if path.read_text()]


def _wait(condition: object, within_s: float = 30.0) -> bool:
    deadline = time.monotonic() + within_s
    while time.monotonic() < deadline:
        if condition():  # type: ignore[operator]
            return True
        time.sleep(0.02)
    return False


def _failure(folder: Path, *ranks: Actions, timeout_s: float = 60.0) -> str:
    """Launch, expect an ExecutionError, and see that nothing is left; returns the message."""
    with pytest.raises(ExecutionError) as caught:
        _launch(_job(folder, *ranks), len(ranks), timeout_s=timeout_s)
    assert [pid for pid in _pids(folder) if _alive(pid)] == []
    assert list(Path(tempfile.gettempdir()).glob("parsim-launch-*")) == []
    return str(caught.value)


class TestSuccess:
    def test_lines_arrive_whole_and_nothing_is_left(self, tmp_path: Path) -> None:
        (tmp_path / "error-rank1.json").write_text("from an earlier launch")
        talk: Actions = [["say", "one"], ["complain", "two"], ["say", "é" * 3000], ["environment", "OMP_NUM_THREADS"]]
        talk += [["environment", "PYTHONHASHSEED"]]
        variables = ['{"OMP_NUM_THREADS": "1"}', '{"PYTHONHASHSEED": "0"}']
        lines = _launch(_job(tmp_path, talk, talk), 2)
        assert sorted(lines) == sorted(["one", "two", "é" * 3000, *variables] * 2)
        assert [pid for pid in _pids(tmp_path) if _alive(pid)] == []
        assert not list(tmp_path.glob("error-rank*"))

    def test_what_a_rank_leaves_running_is_ended(self, tmp_path: Path) -> None:
        _launch(_job(tmp_path, [["child"], ["wait", "child0"]]), 1)
        assert (tmp_path / "child0").exists()
        assert [pid for pid in _pids(tmp_path) if _alive(pid)] == []

    def test_ranks_of_one_machine_meet_on_the_loopback(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """NCCL would listen on an interface of the network, and could not begin where a firewall closes that."""
        for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
            monkeypatch.delenv(name, raising=False)
        ranks = launching._Ranks(job=tmp_path, nproc=1, module="m", scratch=tmp_path, attempt=0, on_line=None)
        found = ranks._environment(0, {})
        assert found["GLOO_SOCKET_IFNAME"] == "lo"
        assert found["NCCL_SOCKET_IFNAME"] == "=lo", "lo alone would be all interfaces whose names begin so"
        monkeypatch.setenv("NCCL_SOCKET_IFNAME", "eth7")
        assert ranks._environment(0, {})["NCCL_SOCKET_IFNAME"] == "eth7"

    @pytest.mark.slow
    def test_extra_variables_win(self, tmp_path: Path) -> None:
        job = _job(tmp_path, [["environment", "OMP_NUM_THREADS", "GLOO_SOCKET_IFNAME"]])
        lines = _launch(job, 1, env={"PYTHONPATH": str(tmp_path), "OMP_NUM_THREADS": "2", "GLOO_SOCKET_IFNAME": "eth7"})
        assert json.loads(lines[0]) == {"OMP_NUM_THREADS": "2", "GLOO_SOCKET_IFNAME": "eth7"}


class TestFailingRank:
    def test_killed_by_a_signal_while_the_others_wait(self, tmp_path: Path) -> None:
        sleep: Actions = [["sleep", 600]]
        start = time.monotonic()
        message = _failure(tmp_path, sleep, [["complain", "step 7"], ["wait", "pid0"], ["signal", "SIGKILL"]])
        assert message.startswith("rank 1 of 2 was killed by SIGKILL")
        assert message.endswith("its last line: step 7")
        assert time.monotonic() - start < 30

    def test_a_user_error_is_told_in_its_own_words(self, tmp_path: Path) -> None:
        message = _failure(tmp_path, [["sleep", 600]], [["data error", "the batch (3) must be 4; use 4"]])
        assert message == "rank 1 of 2 stopped: the batch (3) must be 4; use 4"

    def test_a_bug_names_the_file_with_the_traceback(self, tmp_path: Path) -> None:
        message = _failure(tmp_path, [["value error", "no such value\nsecond line"]], [["sleep", 600]])
        path = tmp_path / "error-rank0.json"
        assert message == f"rank 0 of 2 failed: ValueError: no such value (traceback in {path})"
        record = read_error(path)
        assert record is not None
        assert "in run" in record.traceback
        assert record.message == "no such value\nsecond line"

    def test_an_exit_status_without_a_record(self, tmp_path: Path) -> None:
        message = _failure(tmp_path, [["say", "well"], ["status", 7]])
        assert message == "rank 0 of 1 ended with exit status 7 and no error record; its last line: well"

    @pytest.mark.parametrize(
        ("actions", "said"),
        [
            (
                [["complain", "old news"], ["exit", 0]],
                r"failed: SystemExit: code that this rank ran called sys.exit\(0\)",
            ),
            ([["complain", "old news"], ["interrupt"]], "was killed by SIGINT"),
        ],
    )
    def test_a_rank_whose_code_ends_it_and_one_that_is_interrupted(self, tmp_path: Path, actions: Actions, said: str) -> None:
        message = _failure(tmp_path, [["sleep", 600]], actions)
        assert re.match(f"rank 1 of 2 {said}", message), message
        assert "old news" not in message, "no cause, but what it wrote before"

    def test_a_rank_that_left_silently_is_told_as_such(self, tmp_path: Path) -> None:
        output = RankOutput(folder=tmp_path, on_line=None)
        lost = ErrorRecord(
            rank=0, attempt=0, kind="R", message="broken pipe", reported=False, peer_lost=True, time_s=1.0, traceback=""
        )
        error_path(tmp_path, 0).write_text(json.dumps(asdict(lost)))
        told = str(failure_of(tmp_path, 2, Ended(attempt=0, statuses={0: 1, 1: 0}), output, None))
        assert told.startswith("rank 1 of 2 ended with exit status 0 before the run was over")
        told = str(failure_of(tmp_path, 2, Ended(attempt=0, statuses={0: 1}), output, None))
        assert told.startswith("rank 1 of 2 did not answer")

    def test_a_disturbed_start_is_made_again_and_told(self, tmp_path: Path) -> None:
        """Ranks that miss one another before their first step: gloo took a stranger for a peer. Later it is a failure."""
        once = [["beat", 0], ["fail once", "connection closed by peer"]]
        lines = _launch(_job(tmp_path, once, [["beat", 0], ["say", "well"]]), 2)
        told = [progress for line in lines if (progress := read_progress_line(line))]
        assert "the start was disturbed and is made again: rank" in str(told)
        (tmp_path / "failed").unlink()
        with pytest.raises(RankLostError, match=r"lost contact with another rank|did not answer|ended with exit status 0"):
            _launch(_job(tmp_path, [["beat", 7], *once[1:]], [["beat", 7], ["sleep", 600]]), 2)

    @pytest.mark.slow
    def test_a_crash_in_compiled_code(self, tmp_path: Path) -> None:
        message = _failure(tmp_path, [["crash"]], [["sleep", 600]])
        assert message.startswith("rank 0 of 2 was killed by SIGSEGV")
        assert message.endswith("Fatal Python error: Segmentation fault")

    @pytest.mark.slow
    def test_a_module_that_cannot_be_imported(self, tmp_path: Path) -> None:
        job = _job(tmp_path, [])
        (tmp_path / "launch_test_worker.py").write_text("import no_such_package")
        with pytest.raises(ExecutionError, match=r"exit status 1 .* No module named 'no_such_package'"):
            _launch(job, 1)

    def test_hanging_ranks_are_stopped_in_time(self, tmp_path: Path) -> None:
        """Also a rank that ignores SIGTERM, and a child that one has put into a session of its own."""
        message = _failure(
            tmp_path, [["deaf"], ["complain", "stuck"], ["child"], ["sleep", 600]], [["sleep", 600]], timeout_s=6.0
        )
        assert message.startswith("the 2 ranks had not finished after 6 s and were stopped")
        assert (
            "rank 0: stuck" in message or not (tmp_path / "child0").exists()
        )  # the latter on a machine too busy to start them

    @pytest.mark.slow
    def test_a_rank_that_fails_for_want_of_a_peer_is_not_blamed(self, tmp_path: Path) -> None:
        join: Actions = [["join", "cpu", 20], ["reduce"]]
        message = _failure(tmp_path, [*join, ["wrapped reduce"]], [*join, ["value error", "the cause"]])
        assert message.startswith("rank 1 of 2 failed: ValueError: the cause")

    @pytest.mark.slow
    def test_a_rank_that_hangs_is_named_when_its_peers_give_up(self, tmp_path: Path) -> None:
        join: Actions = [["join", "cpu", 4], ["reduce"]]
        message = _failure(tmp_path, [*join, ["reduce"]], [*join, ["sleep", 600]])
        assert message.startswith("rank 1 of 2 did not answer")
        assert "rank 0 reported: Timed out waiting 4000ms" in message

    def test_a_process_that_cannot_be_killed_hides_no_failure(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """That of a lost GPU waits in its driver. What had failed was not told, and `--elastic` gave up."""
        killed = kill_launch
        monkeypatch.setattr(launching, "kill_launch", lambda pids, mark: killed(pids, mark) | {2**22 + 1})
        with pytest.raises(RankLostError, match=r"rank 0 of 2 failed: ValueError: no answer.* could not be killed") as seen:
            _launch(_job(tmp_path, [["value error", "no answer"]], [["sleep", 600]]), 2)
        assert seen.value.ranks == (0,)
        with pytest.raises(ExecutionError, match=r"^processes 4194305 of the launch could not be killed"):
            _launch(_job(tmp_path, []), 1)

    def test_a_process_whose_end_never_comes_is_not_waited_for(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """A zombie of which one thread waits in the driver of a lost GPU: it is killed, and can never be reaped."""
        killed: list[tuple[Collection[int], str]] = []
        monkeypatch.setattr(launching, "EXIT_S", 0.2)
        monkeypatch.setattr(launching, "kill_launch", lambda pids, mark: killed.append((pids, mark)) or set())
        try:
            with pytest.raises(RankLostError, match=r"rank 0 of 2 failed: ValueError: no answer.* could not be killed") as seen:
                _launch(_job(tmp_path, [["value error", "no answer"]], [["sleep", 10]]), 2)
        finally:
            kill_launch(*killed[0])
        assert str(seen.value).count(str(max(killed[0][0]))) == 1


class TestBadInput:
    def test_no_process_or_no_job(self, tmp_path: Path) -> None:
        with pytest.raises(ExecutionError, match="at least 1 process, got 0"):
            launch(_job(tmp_path), 0)
        with pytest.raises(ExecutionError, match="no job file"):
            launch(tmp_path / "nothing.json", 1)

    def test_an_error_of_the_listener_ends_the_launch(self, tmp_path: Path) -> None:
        def refuse(line: str) -> None:
            raise RuntimeError(f"no {line}")

        with pytest.raises(RuntimeError, match="no hello"):
            _launch(_job(tmp_path, [["say", "hello"], ["sleep", 600]]), 1, on_line=refuse)
        assert [pid for pid in _pids(tmp_path) if _alive(pid)] == []

    def test_a_rank_outside_torchrun(self) -> None:
        with pytest.raises(ExecutionError, match="start it with `parsim run` or torchrun"):
            read_place({})
        assert read_place({"RANK": "3", "WORLD_SIZE": "4", "TORCHELASTIC_RESTART_COUNT": "2"}).attempt == 2


# A shell's background job, as some CI runs are, ignores SIGINT, and so would what it starts.
PARENT = """
import signal
import sys
signal.signal(signal.SIGINT, signal.default_int_handler)
from pathlib import Path
from parsim.execute.processes.launch import launch
launch(Path(sys.argv[1]), 2, module="launch_test_worker", on_line=print, env={"PYTHONPATH": sys.argv[2]})
"""


@pytest.mark.parametrize(
    "number", [signal.SIGINT, pytest.param(signal.SIGTERM, marks=pytest.mark.slow), signal.SIGKILL], ids=lambda n: n.name
)
def test_an_ended_parent_leaves_no_orphan(tmp_path: Path, number: signal.Signals) -> None:
    job = _job(tmp_path, [["deaf"], ["sleep", 600]], [["sleep", 600]])
    search = os.pathsep.join([str(tmp_path), *filter(None, [os.environ.get("PYTHONPATH")])])
    parent = subprocess.Popen(
        [sys.executable, "-c", PARENT, str(job), search],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        start_new_session=True,
    )
    try:
        assert _wait(lambda: len(_pids(tmp_path)) == 2)
        family = descendants([parent.pid])
        assert len(family) >= 2  # the ranks
        parent.send_signal(number)
        stderr = parent.communicate(timeout=20)[1].decode()
        assert _wait(lambda: not any(_alive(pid) for pid in {*family, *_pids(tmp_path)}), within_s=10)
        if number == signal.SIGINT:
            assert "KeyboardInterrupt" in stderr
        else:
            assert parent.returncode == (143 if number == signal.SIGTERM else -signal.SIGKILL)
    finally:
        for pid in {parent.pid, *descendants([parent.pid]), *_pids(tmp_path)}:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        parent.wait()


@pytest.mark.slow
def test_a_parent_killed_while_the_ranks_start_leaves_no_orphan(tmp_path: Path) -> None:
    """At any moment of the start: before the ranks run, before they know whose children they are."""
    job = _job(tmp_path, [["sleep", 600]], [["sleep", 600]])
    for wait_s in (0.05, 0.5, 1.5, 2.5, 3.0):
        parent = subprocess.Popen([sys.executable, "-c", PARENT, str(job), str(tmp_path)], stdout=subprocess.DEVNULL)
        time.sleep(wait_s)
        family = descendants([parent.pid])
        parent.kill()
        parent.wait()
        assert _wait(lambda: not any(_alive(pid) for pid in {*family, *_pids(tmp_path)}), within_s=10), wait_s  # noqa: B023


def test_orphans_are_found_by_their_mark(tmp_path: Path) -> None:
    """A process whose parent is gone and which sits in a session of its own."""
    path = tmp_path / "pid"
    code = (
        "import os, sys, time\nif os.fork(): os._exit(0)\nos.setsid()\n"
        "open(sys.argv[1], 'w').write(str(os.getpid()))\ntime.sleep(600)"
    )
    environment = {**os.environ, MARK_VARIABLE: "orphan-test"}
    process = subprocess.Popen([sys.executable, "-c", code, str(path)], env=environment, start_new_session=True)
    process.wait()
    assert _wait(lambda: path.exists() and path.read_text())
    orphan = int(path.read_text())
    assert orphan in marked("orphan-test")
    assert marked("another") == set()
    assert kill_launch([process.pid], "orphan-test") == set()
    assert not _alive(orphan)


GROUPS_WORKER = """
import json
from parsim.execute.processes.group import close_group, init_group, make_groups, worker_main
from parsim.execute.processes.heartbeat import Doing, pulse


def run(job_path):
    import torch
    from torch import distributed

    place = init_group("cpu", timeout_s=30)
    pairs = [("dp", (0, 1)), ("dp", (2, 3)), ("all", (0, 1, 2, 3)), ("again", (0, 1, 2, 3)), ("pp 0>2", (0, 2)), ("dp", (0, 1))]
    groups = make_groups(pairs, timeout_s=30)
    result = {"streams": [[name, list(ranks)] for name, ranks in groups], "device": place.device}
    values = {}
    # Both collectives over all ranks are in flight at once, started in opposite orders by odd and even ranks: with one
    # process group for both this would mix them up or deadlock.
    whole = (0, 1, 2, 3)
    order = ["all", "again"] if place.rank % 2 else ["again", "all"]
    tensors = {name: torch.full((100_000,), float(10 if name == "all" else 1000)) + place.rank for name in order}
    works = [distributed.all_reduce(tensors[name], group=groups[name, whole], async_op=True) for name in order]
    for work in works:
        work.wait()
    result["sums"] = {name: tensors[name][0].item() for name in order}
    own = (0, 1) if place.rank < 2 else (2, 3)
    value = torch.tensor([float(place.rank)])
    distributed.all_reduce(value, group=groups["dp", own])
    result["pair"] = value.item()
    received = torch.zeros(1)
    if place.rank == 0:
        distributed.isend(torch.tensor([5.0]), dst=2, group=groups["pp 0>2", (0, 2)]).wait()
    if place.rank == 2:
        distributed.irecv(received, src=0, group=groups["pp 0>2", (0, 2)]).wait()
    result["received"] = received.item()
    result["closed"] = close_group(place)
    (job_path.parent / f"result{place.rank}.json").write_text(json.dumps(result))


if __name__ == "__main__":
    worker_main(run)
"""


@pytest.mark.slow
def test_every_stream_has_a_group_of_its_own(tmp_path: Path) -> None:
    job = _job(tmp_path)
    (tmp_path / "launch_test_worker.py").write_text(GROUPS_WORKER)
    _launch(job, 4)
    results = [json.loads((tmp_path / f"result{rank}.json").read_text()) for rank in range(4)]
    assert [result["sums"] for result in results] == [{"all": 46.0, "again": 4006.0}] * 4
    assert [result["pair"] for result in results] == [1.0, 1.0, 5.0, 5.0]
    assert [result["received"] for result in results] == [0.0, 0.0, 5.0, 0.0]
    assert all(result["closed"] and result["device"] == "cpu" for result in results)
    assert results[3]["streams"] == [["dp", [2, 3]], ["all", [0, 1, 2, 3]], ["again", [0, 1, 2, 3]]]


@pytest.mark.slow
def test_leaving_does_not_wait_for_a_rank_that_hangs(tmp_path: Path) -> None:
    job = _job(tmp_path, [["join", "cpu", 20], ["close", 1.0], ["say", "left"]], [["join", "cpu", 20], ["sleep", 3]])
    lines = _launch(job, 2)
    assert lines[-2:] == ["closed False", "left"]


@pytest.mark.slow
def test_gpus_that_are_not_there_are_an_error(tmp_path: Path) -> None:
    import torch

    if torch.cuda.is_available():
        pytest.skip("this machine has GPUs")
    message = _failure(tmp_path, [["join", "cuda", 20]])
    assert message.startswith("rank 0 of 1 stopped: rank 0 needs GPU 0 of this host, which has 0; torch ")
    assert message.endswith(", or compute on the CPU")


RESUMING_WORKER = """
import json, os, signal
from parsim.data import BatchOrder, Target, load_dataset, part
from parsim.execute.checkpoint.checkpoint import *
from parsim.execute.processes.group import close_group, init_group, worker_main

STEPS = 12


def run(job_path):
    import torch
    from torch import distributed

    job = json.loads(job_path.read_text())
    place = init_group("cpu", timeout_s=20)
    folder = job_path.parent / "checkpoints"
    torch.manual_seed(0)
    network = torch.nn.Sequential(torch.nn.Linear(64, 16), torch.nn.Dropout(0.2), torch.nn.ReLU(), torch.nn.Linear(16, 10))
    torch.manual_seed(place.rank)
    optimizer = torch.optim.SGD(network.parameters(), lr=0.1, momentum=0.9)
    parameters = dict(network.named_parameters())
    data = load_dataset("digits", input_shape=(64,), target=Target(classes=10))
    order = BatchOrder(n=len(data), global_batch=32, seed=4)
    checkpoint = latest_checkpoint(folder)
    start = 0 if checkpoint is None else checkpoint.step
    if checkpoint is not None:
        state = load_state(checkpoint, rank=place.rank)
        restore_tensors(parameters, state.weights)
        restore_optimizer(optimizer, parameters, state.optimizer)
        restore_rng(state.rng)
    print(f"attempt {place.attempt} starts at {start}")
    for step in range(start, STEPS):
        inputs, targets = map(torch.from_numpy, data.batch(part(order.indices(step), replica=place.rank, dp=2)))
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(network(inputs), targets).backward()
        for parameter in network.parameters():
            distributed.all_reduce(parameter.grad)
        if job["kill"] and place.attempt == 0 and step == 7 and place.rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        optimizer.step()
        if step % 3 == 2:
            owned = parameters if place.rank == 0 else {}
            states = {name: optimizer.state[value] for name, value in owned.items()}
            state = RankState(weights=owned, optimizer=states, rng=rng_state())
            save_checkpoint(folder, step + 1, state, seed=4, rank=place.rank, world_size=2)
    if place.rank == 0:
        torch.save(network.state_dict(), job_path.parent / "final.pt")
    close_group(place)


if __name__ == "__main__":
    worker_main(run)
"""


@pytest.mark.slow
def test_training_goes_on_after_a_rank_was_killed_and_ends_with_the_same_weights(tmp_path: Path) -> None:
    import torch

    weights, lines = [], []
    for kill in (False, True):
        folder = tmp_path / str(kill)
        folder.mkdir()
        job = _job(folder)
        job.write_text(json.dumps({"kill": kill}))
        (folder / "launch_test_worker.py").write_text(RESUMING_WORKER)
        lines = _launch(job, 2, timeout_s=120, max_restarts=2 * kill)
        weights.append(torch.load(folder / "final.pt", weights_only=True))
    assert "attempt 1 starts at 6" in lines
    assert all(torch.equal(weights[0][name], weights[1][name]) for name in weights[0])
