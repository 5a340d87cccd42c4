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
from typing import Any

import pytest

pytest.importorskip("torch")

import torch
import torch.distributed as dist
from torch.distributed import DistStoreError, PrefixStore, TCPStore
from torch.multiprocessing.spawn import start_processes

from parsim.errors import ExecutionError
from parsim.execute.processes.exchange import done_by_rank_0, gather_values, value_of_rank_0
from parsim.execute.processes.group import ProcessPlace
from parsim.execute.processes.rendezvous import ADDRESS_VARIABLE, FILE_VARIABLE, TOKEN_VARIABLE, open_store
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
        sizes = [torch.zeros(1, dtype=torch.int64) for _ in range(2)]
        dist.all_gather(sizes, torch.tensor([content.numel()]))
        padded = torch.zeros(max(int(size) for size in sizes), dtype=torch.uint8)
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
