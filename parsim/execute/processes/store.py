"""A key-value store over TCP that serves those alone who know the token of a run, and unpickles nothing.

Both ends send a random nonce, and rank 0 adds HMAC(token, both nonces). Another HMAC of them is the key of the connection. Each
message is JSON behind its length and HMAC(key, direction, number of the message, text). Whoever lacks the token can neither
read, set or delete a key, nor answer in the name of rank 0. Its connection is closed at its first message.

A process of the run that ends closes its connection. Whoever waits for a key then, or later, hears of it at once.

Leaves out: encryption, and a stranger who opens connections until rank 0 has no file descriptors left.
"""

from __future__ import annotations

import contextlib
import datetime
import hmac
import json
import secrets
import select
import socket
import struct
import threading
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from parsim.errors import ExecutionError

if TYPE_CHECKING:
    from torch.distributed import Store

_NONCE_BYTES, _DIGEST_BYTES = 16, 32
_MOST_BYTES, _MOST_BYTES_OF_A_STRANGER = 2**26, 2**16
"""Of a message; and of the first one, before its sender is known."""
_STRANGER_S, _ANSWER_S = 10.0, 30.0
"""How long a connection may be silent before its first message, and an answer may take beyond the wait that was asked for."""
_LOOK_S, _RETRY_S = 0.5, 0.1
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
    for name, value in (("TCP_KEEPIDLE", 20), ("TCP_KEEPINTVL", 10), ("TCP_KEEPCNT", 3)):
        if hasattr(socket, name):  # macOS lacks the first
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
        threading.Thread(target=self._accept, args=(listener,), daemon=True).start()

    def _accept(self, listener: socket.socket) -> None:
        while True:
            try:
                connection, _ = listener.accept()
            except OSError:  # no file descriptor is free, or the one who called is gone
                time.sleep(_RETRY_S)
                continue
            threading.Thread(target=self._serve, args=(connection,), daemon=True).start()

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
                while True:
                    channel.send(self._answer(connection, *request))
                    request = channel.receive()
            finally:
                with self._changed:
                    self._is_left = True
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
    """One connection to the store of a run, for one request at a time.

    Raises ExecutionError if what listens there lacks the token, TimeoutError if nothing does within `timeout_s`.
    """

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
