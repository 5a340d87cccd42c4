"""How ranks meet and exchange values: what listens where, what is unpickled (nothing), and how long they wait for rank 0."""

from __future__ import annotations

import contextlib
import datetime
import os
import pickle
import secrets
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NoReturn

import pytest

pytest.importorskip("torch")


import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed import DistStoreError, PrefixStore, TCPStore
from torch.multiprocessing.spawn import start_processes

from parsim.errors import ExecutionError, RankLostError
from parsim.execute import evaluation as validation
from parsim.execute import mixing, rank_run
from parsim.execute.checkpoint import reshard
from parsim.execute.evaluation import Validation
from parsim.execute.job import EvaluationRule
from parsim.execute.mixing import MEAN, MixingRounds
from parsim.execute.processes import exchange, heartbeat
from parsim.execute.processes.exchange import done_by_rank_0, gather_values, value_of_rank_0
from parsim.execute.processes.group import MOST_SAID, ProcessPlace, error_path, read_error
from parsim.execute.processes.heartbeat import Doing, Pulse, create_beats, read_beats
from parsim.execute.processes.launch import launch
from parsim.execute.processes.output import ROOM_BYTES, LastWords, create_last_words, read_last_words
from parsim.execute.processes.rendezvous import ADDRESS_VARIABLE, FILE_VARIABLE, TOKEN_VARIABLE, open_store
from parsim.execute.rank_run import RankRun, agreeing
from tests.execute.sockets import free_port, sockets_of

SLOW_S, TIMEOUT_S = 2.5, 1.0


@pytest.mark.skipif(not Path("/proc/net").is_dir(), reason="sockets are looked up in /proc")
def test_the_store_of_several_machines_listens_on_the_named_address_alone() -> None:
    before = sockets_of([os.getpid()])
    environment = {ADDRESS_VARIABLE: f"127.0.0.1:{free_port()}", TOKEN_VARIABLE: secrets.token_hex()}
    first = open_store(0, 2, timeout_s=20, environment=environment)
    second = open_store(1, 2, timeout_s=20, environment=environment)
    first.set("greeting", "hello")
    assert second.get("greeting") == b"hello"
    new = sockets_of([os.getpid()]) - before
    assert [entry.local for entry in new if entry.listens] == ["127.0.0.1"]
    assert all(entry.stays_here for entry in new)
    with pytest.raises(ExecutionError, match="does not know the token of this run; start the same launch file on every"):
        open_store(1, 2, timeout_s=20, environment={**environment, TOKEN_VARIABLE: secrets.token_hex()})


def test_the_store_answers_as_that_of_torch() -> None:
    environment = {ADDRESS_VARIABLE: f"127.0.0.1:{free_port()}", TOKEN_VARIABLE: secrets.token_hex()}
    ranks = [open_store(rank, 2, timeout_s=20, environment=environment) for rank in range(2)]
    master = TCPStore("127.0.0.1", 0, is_master=True, timeout=datetime.timedelta(seconds=20), wait_for_workers=False)
    for first, second in (ranks, [master, TCPStore("127.0.0.1", master.port, timeout=datetime.timedelta(seconds=20))]):
        both = [PrefixStore("run", first), PrefixStore("run", second)]
        both[0].set("address", bytes(range(256)))
        assert [store.add("finished", 1) for store in both] == [1, 2]
        assert [store.add("finished", 0) for store in both] == [2, 2]
        assert (both[0].compare_set("once", "", "a"), both[1].compare_set("once", "", "b")) == (b"a", b"a")
        assert both[1].compare_set("once", "a", "c") == b"c"
        assert both[1].compare_set("not there", "a", "c") == b"a"
        assert both[1].multi_get(["address", "once"]) == [bytes(range(256)), b"c"]
        assert [both[1].check([key]) for key in ("once", "not there")] == [True, False]
        both[1].wait(["address"], datetime.timedelta(seconds=1))
        threading.Timer(0.2, both[0].set, ("late", "yes")).start()
        assert both[1].get("late") == b"yes"
        assert [both[1].delete_key("late") for _ in range(2)] == [True, False]
        with pytest.raises(DistStoreError, match="timeout"):
            both[1].wait(["never"], datetime.timedelta(seconds=0.2))


@pytest.mark.parametrize("sent", [b"", b"\0" * 65_536, b"\xff" * 4096, b"GET / HTTP/1.0\r\n\r\n"])
def test_a_stranger_neither_reads_nor_writes_a_key(sent: bytes) -> None:
    """It reaches the port and sends anything: it is sent away, and the run goes on."""
    address, token = f"127.0.0.1:{free_port()}", secrets.token_hex()
    environment = {ADDRESS_VARIABLE: address, TOKEN_VARIABLE: token}
    first, second = (open_store(rank, 2, timeout_s=20, environment=environment) for rank in range(2))
    first.set("address", "10.0.0.1:1234")
    with socket.create_connection(("127.0.0.1", int(address.rpartition(":")[2])), 5) as stranger:
        said = b""
        with contextlib.suppress(OSError):
            stranger.sendall(sent)
            stranger.shutdown(socket.SHUT_WR)
            while part := stranger.recv(4096):
                said += part
    assert len(said) in (0, 48), "a nonce and a proof, whatever it sends"
    assert second.get("address") == b"10.0.0.1:1234"
    with pytest.raises(DistStoreError, match="timeout"):  # and no rank is taken for gone
        second.wait(["never"], datetime.timedelta(seconds=0.1))


def test_a_stranger_with_the_client_of_torch_is_sent_away() -> None:
    environment = {ADDRESS_VARIABLE: f"127.0.0.1:{free_port()}", TOKEN_VARIABLE: secrets.token_hex()}
    first = open_store(0, 2, timeout_s=20, environment=environment)
    first.set("address", "10.0.0.1:1234")
    host, _, port = environment[ADDRESS_VARIABLE].partition(":")
    with pytest.raises(RuntimeError):
        TCPStore(host, int(port), is_master=False, timeout=datetime.timedelta(seconds=2)).set("address", "10.0.0.9:1")
    assert first.get("address") == b"10.0.0.1:1234"


def test_ranks_that_wait_hear_at_once_that_another_has_ended() -> None:
    environment = {ADDRESS_VARIABLE: f"127.0.0.1:{free_port()}", TOKEN_VARIABLE: secrets.token_hex()}
    first = open_store(0, 2, timeout_s=60, environment=environment)
    other = "from tests.execute.test_rendezvous import open_store; open_store(1, 2, timeout_s=60).set('here', 'yes')"
    ended = subprocess.Popen([sys.executable, "-c", other], env=os.environ | environment)
    first.wait(["here"])
    begin_s = time.monotonic()
    with pytest.raises(ConnectionError, match="connection closed by peer: another rank has left the store"):
        first.get("address of rank 1")
    assert time.monotonic() - begin_s < 30
    assert first.get("here") == b"yes", "what is there can still be read"
    assert ended.wait() == 0


@pytest.mark.parametrize(
    ("address", "token", "said"),
    [
        ("nowhere", "x" * 64, "must be HOST:PORT"),
        ("127.0.0.1:29500", "short", "random text of >= 16 characters"),
        ("192.0.2.1:29500", "x" * 64, "cannot listen on 192.0.2.1:29500"),
    ],
)
def test_addresses_that_cannot_be(address: str, token: str, said: str) -> None:
    with pytest.raises(ExecutionError, match=said):
        open_store(0, 1, timeout_s=5, environment={ADDRESS_VARIABLE: address, TOKEN_VARIABLE: token})


def test_the_store_of_one_machine_is_a_file(tmp_path: Path) -> None:
    environment = {FILE_VARIABLE: str(tmp_path / "store")}
    store = open_store(0, 1, timeout_s=5, environment=environment)
    store.set("a", "b")
    assert (tmp_path / "store").is_file()


def test_no_source_of_a_rank_unpickles_what_another_sent() -> None:
    root = Path(__file__).resolve().parents[2]
    objects = ("_object(", "_object_list(", "pickle.load")
    for path in (*(root / "parsim" / "execute").rglob("*.py"), *(root / "calibration").rglob("*.py")):
        text = path.read_text()
        assert [name for name in objects if name in text.replace("parse_object(", "")] == [], path


def _exchange(place: ProcessPlace) -> None:
    assert gather_values({"rank": place.rank, "nan": None, "long": [0.1] * (1 + 1000 * place.rank)})[1]["rank"] == 1
    begin_s = time.monotonic()
    for number in range(2):  # the second wait is not answered by the first
        made = done_by_rank_0(place, lambda number=number: time.sleep(SLOW_S * (1 - number)) or ["made", number])
        assert value_of_rank_0(made) == ["made", number]
    assert time.monotonic() - begin_s > SLOW_S > TIMEOUT_S


def _refuse_a_pickle(place: ProcessPlace) -> None:
    """What a stranger would send in rank 1's name."""

    class Attack:
        def __reduce__(self) -> tuple[Callable[..., Any], tuple[str]]:
            return os.mkdir, ("ran",)

    content = torch.frombuffer(bytearray(pickle.dumps(Attack())), dtype=torch.uint8)
    if place.rank == 0:
        with pytest.raises(ValueError, match=r"codec|JSON|Expecting"):
            gather_values("harmless")
    else:
        lengths = torch.tensor([0, content.numel()])
        dist.all_reduce(lengths)
        padded = torch.zeros(int(lengths.max()), dtype=torch.uint8)
        padded[: content.numel()] = content
        dist.all_gather([torch.empty_like(padded) for _ in range(2)], padded)
    assert not Path("ran").exists()


def _rank(rank: int, work: Callable[[ProcessPlace], None], folder: Path) -> None:
    torch.set_num_threads(1)  # a thread pool does not survive a fork
    os.chdir(folder)
    store = dist.FileStore(str(folder / "store"), 2)  # type: ignore[attr-defined]
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2, timeout=datetime.timedelta(seconds=TIMEOUT_S))
    work(ProcessPlace(rank=rank, world_size=2, local_rank=rank, local_world_size=2, attempt=0, store=store))
    dist.destroy_process_group()
    Path(f"ended{rank}").touch()


@pytest.mark.parametrize("work", [_exchange, _refuse_a_pickle])
def test_ranks_wait_for_rank_0_longer_than_any_collective(work: Callable[[ProcessPlace], None], tmp_path: Path) -> None:
    start_processes(_rank, args=(work, tmp_path), nprocs=2, start_method="fork")  # type: ignore[no-untyped-call]
    assert sorted(path.name for path in tmp_path.glob("ended*")) == ["ended0", "ended1"]


# A rank that waits for others between steps says so: the launcher would take it for one that hangs, and end the run.


@pytest.fixture
def doing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[], Doing]:
    """What this rank, which trains, tells the launcher at this moment."""
    path = tmp_path / "beats"
    create_beats(path, 1)
    own = Pulse(path, 0)
    monkeypatch.setattr(heartbeat, "_pulses", [own])
    own.begin(Doing.WORKING, "training", 3)
    return lambda: read_beats(path, 1)[0].doing


def test_a_rank_that_takes_weights_of_another_plan_waits(doing: Callable[[], Doing], monkeypatch: pytest.MonkeyPatch) -> None:
    """Weights may take minutes over the slow link for which the plan is changed."""
    seen: list[Doing] = []
    monkeypatch.setattr(dist, "broadcast", lambda tensor, holder: seen.append(doing()))
    reshard._sent(reshard._Kind((2,), torch.float32), None, 1, torch.device("cpu"))
    assert seen == [Doing.WAITING]
    assert doing() is Doing.WORKING


def test_ranks_that_agree_on_an_overflow_wait(doing: Callable[[], Doing], monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Doing] = []
    monkeypatch.setattr(dist, "all_reduce", lambda flag, op, group: seen.append(doing()))
    agreeing(None)(torch.zeros(1))  # type: ignore[arg-type]
    assert seen == [Doing.WAITING]


def test_replicas_that_take_the_mean_of_their_weights_wait(doing: Callable[[], Doing], monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Doing] = []
    rounds: Any = MixingRounds.__new__(MixingRounds)
    rounds._stage, rounds._replicas = SimpleNamespace(layout=None, rank=0, parameters={}), 2
    rounds._groups, rounds.masses = {(MEAN, (0, 1)): None}, {}
    monkeypatch.setattr(mixing, "mixing_peers", lambda *_: [(0, 1)])
    monkeypatch.setattr(MixingRounds, "_buckets", lambda self: [SimpleNamespace(number=0, parameters=())])
    monkeypatch.setattr(MixingRounds, "_packed", lambda self, bucket: torch.zeros(1))
    monkeypatch.setattr(dist, "all_reduce", lambda flat, group: seen.append(doing()))
    assert rounds.mean_weights() == {}
    assert seen == [Doing.WAITING]


class Reached(Exception):
    """The rank has come so far."""


def test_what_comes_between_steps_has_more_time_than_a_step(
    doing: Callable[[], Doing], monkeypatch: pytest.MonkeyPatch
) -> None:
    """To build another plan, and to make the samples of the validation, a rank may read files for longer than it may hang."""
    seen: list[Doing] = []

    def reached(*_: object) -> NoReturn:
        seen.append(doing())
        raise Reached

    entry: Any = SimpleNamespace(layout=SimpleNamespace(model=None), run=None)
    place: Any = SimpleNamespace(rank=0)
    monkeypatch.setattr(rank_run, "PlanIndex", reached)
    with pytest.raises(Reached):
        RankRun.switched(entry, None, place, None)  # type: ignore[arg-type]
    heartbeat.pulse().begin(Doing.WORKING, "training", 4)
    monkeypatch.setattr(validation, "run_dataset", reached)
    with pytest.raises(Reached):
        Validation(rule=EvaluationRule(), folder=Path("best"), every=1, steps=9).look(entry, place)
    assert seen == [Doing.PREPARING, Doing.PREPARING]


# A rank whose output cannot be written still ends by itself, with its record; and tells why where there is no room for one.

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


FULL_RANK = """
import os, resource
from pathlib import Path
from parsim.execute.processes.group import worker_main

def run(path):
    if os.environ["RANK"] == "1":
        resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))
        Path(path).with_name("more").write_text("no room")

worker_main(run)
"""


@pytest.mark.xdist_group("launch")
def test_a_rank_that_can_write_no_file_tells_the_launcher_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither its output nor its record can be written, as on a full disk."""
    (tmp_path / "full_rank.py").write_text(FULL_RANK)
    (tmp_path / "job.json").write_text("{}")
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(RankLostError) as caught:
        launch(tmp_path / "job.json", 2, module="full_rank")
    assert str(caught.value).startswith("rank 1 of 2 failed: OSError: [Errno 27] File too large")
    assert "(its traceback could not be written)" in str(caught.value)
    assert not error_path(tmp_path, 1).exists()


def test_last_words_are_those_of_their_rank(tmp_path: Path) -> None:
    path = tmp_path / "words"
    create_last_words(path, 3)
    first, last = LastWords(path, 0), LastWords(path, 2)
    assert first.say("a" * 100)
    assert first.say("better \U0001f600")
    assert last.say("\U0001f600" * MOST_SAID)
    assert not last.say("x" * ROOM_BYTES)
    assert read_last_words(path, 0) == "better \U0001f600"
    assert read_last_words(path, 1) == ""
    assert read_last_words(path, 2) == "\U0001f600" * MOST_SAID
    assert read_last_words(tmp_path / "nowhere", 0) == ""
    assert not LastWords().say("nobody listens")


class Clock:
    """A store that has what is asked for from `ready_s` on; every question takes 0.1 ms."""

    def __init__(self, ready_s: float) -> None:
        self.ready_s, self.now_s, self.asked = ready_s, 0.0, 0

    def check(self, keys: list[str]) -> bool:
        self.asked += 1
        self.now_s += 1e-4
        return self.now_s >= self.ready_s

    def sleep(self, seconds: float) -> None:
        self.now_s += seconds


@given(ready_s=st.floats(0.0, 3600.0))
def test_a_rank_goes_on_a_sixteenth_late_at_most_and_asks_rarely(ready_s: float) -> None:
    clock = Clock(ready_s)
    place = ProcessPlace(rank=1, world_size=2, local_rank=1, local_world_size=2, attempt=0, store=clock)  # type: ignore[arg-type]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("torch.distributed.get_rank", lambda: 1)
        patch.setattr("parsim.execute.processes.exchange.time.sleep", clock.sleep)
        patch.setattr("parsim.execute.processes.exchange.time.monotonic", lambda: clock.now_s)
        assert exchange.done_by_rank_0(place, lambda: pytest.fail("rank 1 does the work")) is None
    assert clock.now_s - ready_s <= 5e-4 + ready_s / 16
    assert clock.asked <= 20 + 200 + ready_s / 0.5
