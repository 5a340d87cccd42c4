"""How the ranks of a launch find one another: a key-value store that only they can use, and that unpickles nothing.

On one machine the store is a file in a folder of mode 0700 (PARSIM_STORE_FILE). Over several machines it is a TCP store whose
listener is bound to the address that was named (PARSIM_RENDEZVOUS=HOST:PORT) and that serves only who knows the token of the
run (PARSIM_TOKEN). Agents of torchrun meet in such a store too (`rendezvous_of`). Ranks that somebody's own torchrun started
use torchrun's store.

Leaves out: encryption. Gradients cross the network as gloo and NCCL send them.
"""

from __future__ import annotations

import atexit
import contextlib
import datetime
import hmac
import json
import os
import secrets
import select
import socket
import struct
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from parsim.errors import ExecutionError

if TYPE_CHECKING:
    from torch.distributed import Store
    from torch.distributed.elastic.rendezvous import RendezvousHandler, RendezvousParameters

FILE_VARIABLE = "PARSIM_STORE_FILE"
ADDRESS_VARIABLE = "PARSIM_RENDEZVOUS"
TOKEN_VARIABLE = "PARSIM_TOKEN"
_SHORTEST_TOKEN = 16


# A key-value store over TCP that serves those alone who know the token of a run, and unpickles nothing.
#
# Both ends send a random nonce, and rank 0 adds HMAC(token, both nonces). Another HMAC of them is the key of the connection.
# Each message is JSON behind its length and HMAC(key, direction, number of the message, text). Whoever lacks the token can
# neither read, set or delete a key, nor answer in the name of rank 0. Its connection is closed at its first message.
#
# A process of the run that ends closes its connection. Whoever waits for a key then, or later, hears of it at once.
#
# Leaves out: encryption, and a stranger who opens connections until rank 0 has no file descriptors left.


_NONCE_BYTES, _DIGEST_BYTES = 16, 32
_MOST_BYTES, _MOST_BYTES_OF_A_STRANGER = 2**26, 2**16
"""Of a message; and of the first one, before its sender is known."""
_STRANGER_S, _ANSWER_S = 10.0, 30.0
"""How long a connection may be silent before its first message, and an answer may take beyond the wait that was asked for."""
_LOOK_S, _RETRY_S = 0.5, 0.1
_LAST_S = 5.0
"""How long rank 0 stays at most for others that still have an answer to read."""
_WATCH_S, _GRACE_S = 20.0, 20.0
"""How long a rank waits for the end of the run in one request; and for its collectives to tell first that a rank has died."""
_TO_SERVER, _TO_CLIENT = b"request", b"answer"


class _Channel:
    """Messages over one connection, numbered in each direction. Reading one under another key raises PermissionError."""

    def __init__(self, connection: socket.socket, key: bytes, outward: bytes, inward: bytes) -> None:
        self._connection, self._key, self._outward, self._inward = connection, key, outward, inward
        self._sent = self._received = 0

    def _digest(self, direction: bytes, number: int, text: bytes) -> bytes:
        return hmac.digest(self._key, direction + struct.pack("!Q", number) + text, "sha256")

    def send(self, message: Any) -> None:
        text = json.dumps(message).encode()
        digest = self._digest(self._outward, self._sent, text)
        self._sent += 1
        self._connection.sendall(struct.pack("!I", len(text)) + digest + text)

    def receive(self, most_bytes: int = _MOST_BYTES) -> Any:
        (length,) = struct.unpack("!I", _read(self._connection, 4))
        if length > most_bytes:
            raise PermissionError(f"a message of {length} bytes")
        digest, text = _read(self._connection, _DIGEST_BYTES), _read(self._connection, length)
        if not hmac.compare_digest(digest, self._digest(self._inward, self._received, text)):
            raise PermissionError("a message under another token")
        self._received += 1
        return json.loads(text)


def _read(connection: socket.socket, size: int) -> bytes:
    content = bytearray()
    while len(content) < size:
        part = connection.recv(min(size - len(content), 2**20))
        if not part:
            raise ConnectionResetError("connection closed by peer")
        content += part
    return bytes(content)


def _settle(connection: socket.socket) -> None:
    """Send at once, and notice within a minute that the other machine is gone."""
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    limits = (("TCP_KEEPIDLE", 20), ("TCP_KEEPINTVL", 10), ("TCP_KEEPCNT", 3), ("TCP_USER_TIMEOUT", 50_000))
    for name, value in limits:  # the last bounds what was sent and not acknowledged, which no keepalive does
        if hasattr(socket, name):  # macOS lacks the first and the last
            connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


def _proof(token: bytes, nonces: bytes) -> bytes:
    return hmac.digest(token, b"server" + nonces, "sha256")


def _key(token: bytes, nonces: bytes) -> bytes:
    return hmac.digest(token, b"connection" + nonces, "sha256")


class StoreServer:
    """The keys of a run, served to every connection by a thread of its own, for as long as this process lives."""

    def __init__(self, listener: socket.socket, token: str) -> None:
        self._token = token.encode()
        self._values: dict[str, str] = {}
        self._changed = threading.Condition()
        self._is_left = False
        self._connections = 0
        atexit.register(self._serve_to_the_end)
        threading.Thread(target=self._accept, args=(listener,), daemon=True).start()

    def _accept(self, listener: socket.socket) -> None:
        while True:
            try:
                connection, _ = listener.accept()
            except OSError:  # no file descriptor is free, or the one who called is gone
                time.sleep(_RETRY_S)
                continue
            threading.Thread(target=self._serve, args=(connection,), daemon=True).start()

    def _serve_to_the_end(self) -> None:
        """Before this process ends: torchrun's agents end together, and some still have an answer to read."""
        with self._changed:
            self._changed.wait_for(lambda: self._connections <= 1, _LAST_S)  # its own one

    def _serve(self, connection: socket.socket) -> None:
        with connection, contextlib.suppress(OSError):  # PermissionError is one
            connection.settimeout(_STRANGER_S)
            nonces = _read(connection, _NONCE_BYTES) + secrets.token_bytes(_NONCE_BYTES)
            connection.sendall(nonces[_NONCE_BYTES:] + _proof(self._token, nonces))
            channel = _Channel(connection, _key(self._token, nonces), outward=_TO_CLIENT, inward=_TO_SERVER)
            request = channel.receive(_MOST_BYTES_OF_A_STRANGER)
            connection.settimeout(None)
            _settle(connection)
            try:
                with self._changed:
                    self._connections += 1
                while True:
                    channel.send(self._answer(connection, *request))
                    request = channel.receive()
            finally:
                with self._changed:
                    self._is_left = True
                    self._connections -= 1
                    self._changed.notify_all()

    def _answer(self, connection: socket.socket, name: str, *given: Any) -> Any:
        """`get` answers the values, None if its time is over, or False if one of the run has ended."""
        with self._changed:
            match name, *given:
                case "get", keys, timeout_s:
                    return self._wait(connection, keys, timeout_s)
                case "set", key, value:
                    self._values[key] = value
                    answer: Any = True
                case "add", key, amount:
                    answer = int(self._values.get(key, "0")) + amount
                    self._values[key] = str(answer)
                case "compare_set", key, expected, desired:
                    if self._values.get(key, "") == expected:
                        self._values[key] = desired
                    answer = self._values.get(key, expected)
                case "delete", key:
                    return self._values.pop(key, None) is not None
                case _:
                    return len(self._values)
            self._changed.notify_all()
            return answer

    def _wait(self, connection: socket.socket, keys: Sequence[str], timeout_s: float) -> Any:
        until_s = time.monotonic() + timeout_s
        while not all(key in self._values for key in keys):
            if self._is_left and timeout_s:
                return False
            if (left_s := until_s - time.monotonic()) <= 0:
                return None
            self._changed.wait(min(left_s, _LOOK_S))
            if select.select([connection], [], [], 0)[0]:  # it sends nothing while it waits: it is gone
                raise ConnectionResetError
        return [self._values[key] for key in keys]


class _Client:
    """One connection to the store of a run, for one request at a time. Raises ExecutionError if what listens there lacks the
    token, TimeoutError if nothing does within `timeout_s`."""

    def __init__(self, host: str, port: int, token: str, timeout_s: float) -> None:
        self._lock = threading.Lock()
        self.address = f"{host}:{port}"
        until_s = time.monotonic() + timeout_s
        while True:
            try:
                self._connection = socket.create_connection((host, port), max(until_s - time.monotonic(), _RETRY_S))
                self._channel = self._greet(token.encode())
                return
            except OSError as error:
                if hasattr(self, "_connection"):
                    self._connection.close()
                if time.monotonic() > until_s:
                    raise TimeoutError(
                        f"timed out after {timeout_s:g} s: no store answers at {self.address} ({error})"
                    ) from error
            time.sleep(_RETRY_S)

    def _greet(self, token: bytes) -> _Channel:
        self._connection.settimeout(_STRANGER_S)
        _settle(self._connection)
        nonces = secrets.token_bytes(_NONCE_BYTES)
        self._connection.sendall(nonces)
        nonces += _read(self._connection, _NONCE_BYTES)
        if not hmac.compare_digest(_read(self._connection, _DIGEST_BYTES), _proof(token, nonces)):
            raise ExecutionError(
                f"what listens on {self.address} does not know the token of this run; start the same launch file on every "
                "machine, or export it again with another --port if another program uses this one"
            )
        return _Channel(self._connection, _key(token, nonces), outward=_TO_SERVER, inward=_TO_CLIENT)

    def ask(self, *request: Any, wait_s: float = 0.0) -> Any:
        """The answer of the store. Raises ConnectionError: rank 0 has ended or does not answer."""
        with self._lock:
            self._connection.settimeout(wait_s + _ANSWER_S)
            try:
                self._channel.send(request)
                return self._channel.receive()
            except TimeoutError as error:
                with contextlib.suppress(OSError):
                    self._connection.shutdown(socket.SHUT_RDWR)  # a late answer is not that of the next request
                raise ConnectionError(f"timed out waiting for the store at {self.address}") from error
            except PermissionError as error:
                raise ExecutionError(f"somebody between this rank and the store at {self.address} changed {error}") from error


def connect(host: str, port: int, token: str, timeout: datetime.timedelta) -> Store:
    """The store that a `StoreServer` serves there, as torch takes one. Raises as `_Client`."""
    from torch.distributed import DistStoreError
    from torch.distributed import Store as AnyStore

    client = _Client(host, port, token, timeout.total_seconds())

    def values(keys: Sequence[str], timeout_s: float) -> list[bytes]:
        answer = client.ask("get", list(keys), timeout_s, wait_s=timeout_s)
        if answer is None:
            raise DistStoreError(f"wait timeout after {timeout_s:g} s, keys: {', '.join(keys)}"[:500])
        if answer is False:
            raise ConnectionError("connection closed by peer: another rank has left the store")
        return [value.encode("latin-1") for value in answer]

    def limit_s() -> float:
        of_torch: Any = made  # whose stubs lack it
        return float(of_torch.timeout.total_seconds())

    class AuthenticatedStore(AnyStore):
        """C++ looks methods up by these names."""

        def set(self, key: str, value: bytes | str) -> None:
            client.ask("set", key, _text(value))

        def get(self, key: str) -> bytes:
            return values([key], limit_s())[0]

        def add(self, key: str, amount: int) -> int:
            return int(client.ask("add", key, amount))

        def compare_set(self, key: str, expected: bytes | str, desired: bytes | str) -> bytes:
            answer: str = client.ask("compare_set", key, _text(expected), _text(desired))
            return answer.encode("latin-1")

        def check(self, keys: Sequence[str]) -> bool:
            return isinstance(client.ask("get", list(keys), 0.0), list)

        def wait(self, keys: Sequence[str], timeout: datetime.timedelta | None = None) -> None:
            values(keys, limit_s() if timeout is None else timeout.total_seconds())

        def deleteKey(self, key: str) -> bool:
            return bool(client.ask("delete", key))

        def getNumKeys(self) -> int:
            return int(client.ask("count"))

        def clone(self) -> Store:
            return connect(host, port, token, datetime.timedelta(seconds=limit_s()))

    made: Store = AuthenticatedStore()
    made.set_timeout(timeout)
    _held.append(made)
    return made


def _text(value: bytes | str) -> str:
    return (value.encode() if isinstance(value, str) else bytes(value)).decode("latin-1")


_held: list[Store] = []
"""C++ that holds one of these calls its methods only as long as Python holds it too."""


def is_launched(environment: Mapping[str, str] = os.environ) -> bool:
    """Whether `launch` started this rank: it watches all ranks, and holds the run folder."""
    return FILE_VARIABLE in environment


def open_store(rank: int, world_size: int, *, timeout_s: float, environment: Mapping[str, str] = os.environ) -> Store:
    """The store of this run, whichever way its ranks were started. Waits until it is there. Raises as `bound_store`."""
    from torch.distributed import FileStore
    from torch.distributed.rendezvous import rendezvous

    timeout = datetime.timedelta(seconds=timeout_s)
    store: Store
    if path := environment.get(FILE_VARIABLE):
        store = FileStore(path, world_size)
    elif address := environment.get(ADDRESS_VARIABLE):
        store = bound_store(address, environment.get(TOKEN_VARIABLE, ""), rank, world_size, timeout)
    else:
        store, _, _ = next(rendezvous("env://", rank, world_size, timeout=timeout))
    store.set_timeout(timeout)
    return store


def when_left(last_key: str, end: Callable[[str], None], environment: Mapping[str, str] = os.environ) -> None:
    """Call `end` with a message once another rank has left the bound store without `last_key` in it, or rank 0 is gone.

    Collectives tell at once of a rank that died, so this waits for them first. Of a machine that is switched off they tell
    after their timeout, the connections to the store within a minute. A run without a bound store is not watched.
    """
    if FILE_VARIABLE in environment or (address := environment.get(ADDRESS_VARIABLE)) is None:
        return
    host, _, port = address.rpartition(":")
    client = _Client(host, int(port), environment.get(TOKEN_VARIABLE, ""), _ANSWER_S)

    def watch() -> None:
        try:
            while (answer := client.ask("get", [last_key], _WATCH_S, wait_s=_WATCH_S)) is None:
                pass
            gone = "" if answer else "another rank has left the run, or its machine is gone"
        except (OSError, ExecutionError) as error:
            gone = f"the machine of rank 0 is gone ({error})"
        if gone:
            time.sleep(_GRACE_S)
            end(f"{gone}; start the same launch file on every machine to continue")

    threading.Thread(target=watch, daemon=True).start()


def bound_store(address: str, token: str, rank: int, world_size: int, timeout: datetime.timedelta) -> Store:
    """A TCP store under the token of the run. Rank 0 listens on the address, HOST:PORT, and on no other. Raises ExecutionError:
    an address without a port or a token, one that is not of this machine, or where another listens."""
    host, colon, port = address.rpartition(":")
    if not colon or not port.isdigit() or not host:
        raise ExecutionError(f"{ADDRESS_VARIABLE}={address!r} must be HOST:PORT, such as 10.0.0.1:29500")
    if len(token) < _SHORTEST_TOKEN:
        raise ExecutionError(
            f"{TOKEN_VARIABLE} must be the same random text of >= {_SHORTEST_TOKEN} characters on every machine; make one with "
            "`python -c 'import secrets; print(secrets.token_hex())'`"
        )
    if rank == 0:
        try:
            family = socket.AF_INET6 if ":" in host else socket.AF_INET
            listener = socket.create_server((host, int(port)), family=family, backlog=max(128, world_size))
        except OSError as error:
            raise ExecutionError(
                f"rank 0 cannot listen on {address} ({error.strerror}); {ADDRESS_VARIABLE} must name a free port of an "
                "interface of the machine that runs rank 0"
            ) from error
        StoreServer(listener, token)
    return connect(host, int(port), token, timeout)


# `python -m parsim.execute.processes.rendezvous ARGUMENTS OF TORCHRUN`: agents that meet where only the run can.
#
# torchrun's own store listens on every interface of the first machine. This rendezvous ("parsim") keeps torchrun's agents and
# restarts, and puts their keys into a bound store under the token of the run.
#
# Leaves out: machines that join later (as under torchrun's `static`), and restarts of several machines: each agent counts its
# own, so the ranks of one can be in another attempt than those of others.


BACKEND = "parsim"
"""Value of --rdzv-backend."""
TIMEOUT_S = 600
"""How long machines wait for one another, unless --rdzv-conf says otherwise (timeout=SECONDS)."""


def rendezvous_of(parameters: RendezvousParameters) -> RendezvousHandler:
    """Where the agents of a launch meet: --rdzv-endpoint HOST:PORT, --nnodes, and in --rdzv-conf `rank`, the number of this
    machine. Raises ExecutionError as `bound_store`.
    """
    from torch.distributed import PrefixStore
    from torch.distributed.elastic.rendezvous import RendezvousInfo, RendezvousStoreInfo
    from torch.distributed.elastic.rendezvous.static_tcp_rendezvous import StaticTCPRendezvous

    host, _, port = parameters.endpoint.rpartition(":")

    class BoundRendezvous(StaticTCPRendezvous):
        """torchrun's static one, in a bound store; the ranks have a store of their own."""

        def get_backend(self) -> str:
            return BACKEND

        @property
        def use_agent_store(self) -> bool:
            return False

        def next_rendezvous(self) -> RendezvousInfo:
            if self._store is None:
                token = os.environ.get(TOKEN_VARIABLE, "")
                self._store = bound_store(parameters.endpoint, token, self.rank, self.world_size, self.timeout)
            store = PrefixStore(self.run_id, self._store)
            place = RendezvousStoreInfo(self.master_addr, self.master_port)
            return RendezvousInfo(store, self.rank, self.world_size, place)

    timeout_s, rank = int(parameters.get("timeout", TIMEOUT_S)), int(parameters.get("rank", 0))
    handler: RendezvousHandler = BoundRendezvous(host, int(port or 0), rank, parameters.max_nodes, parameters.run_id, timeout_s)
    return handler


def main() -> None:
    from torch.distributed import run
    from torch.distributed.elastic.rendezvous import rendezvous_handler_registry

    rendezvous_handler_registry.register(BACKEND, rendezvous_of)
    run.main(sys.argv[1:])


if __name__ == "__main__":
    main()
