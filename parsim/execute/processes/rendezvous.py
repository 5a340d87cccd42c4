"""How the ranks of a launch find one another: a key-value store that only they can use, and that unpickles nothing.

On one machine the store is a file in a folder of mode 0700 (PARSIM_STORE_FILE). Over several machines it is a TCP store whose
listener is bound to the address that was named (PARSIM_RENDEZVOUS=HOST:PORT), sealed by a token of the run (PARSIM_TOKEN, see
`sealed`). Agents of torchrun meet in such a store too (`torchrun_agent`). Ranks that somebody's own torchrun started use
torchrun's store.

Leaves out: encryption, and a stranger who keeps the store busy or deletes its keys. Whoever reaches its port can read the
values (addresses and ports of ranks) and can end a start, but cannot join the run or send a rank elsewhere. Gradients cross
the network as gloo and NCCL send them.
"""

from __future__ import annotations

import datetime
import hashlib
import hmac
import os
import secrets
import socket
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from parsim.errors import ExecutionError

if TYPE_CHECKING:
    from torch.distributed import Store

FILE_VARIABLE = "PARSIM_STORE_FILE"
ADDRESS_VARIABLE = "PARSIM_RENDEZVOUS"
TOKEN_VARIABLE = "PARSIM_TOKEN"
_SHORTEST_TOKEN = 16
_DIGEST_BYTES, _NONCE_BYTES = 32, 16


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


def bound_store(address: str, token: str, rank: int, world_size: int, timeout: datetime.timedelta) -> Store:
    """A TCP store, sealed by the token of the run. Rank 0 listens on the address, HOST:PORT, and on no other.

    Raises ExecutionError: an address without a port or a token, or one that is not of this machine.
    """
    from torch.distributed import TCPStore

    host, colon, port = address.rpartition(":")
    if not colon or not port.isdigit() or not host:
        raise ExecutionError(f"{ADDRESS_VARIABLE}={address!r} must be HOST:PORT, such as 10.0.0.1:29500")
    if len(token) < _SHORTEST_TOKEN:
        raise ExecutionError(
            f"{TOKEN_VARIABLE} must be the same random text of >= {_SHORTEST_TOKEN} characters on every machine; make one with "
            "`python -c 'import secrets; print(secrets.token_hex())'`"
        )
    if rank != 0:
        store = TCPStore(host, int(port), world_size, is_master=False, timeout=timeout)
        return sealed(store, token)
    listener = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((host, int(port)))
        listener.listen(world_size)
    except OSError as error:
        listener.close()
        raise ExecutionError(
            f"rank 0 cannot listen on {address} ({error.strerror}); {ADDRESS_VARIABLE} must name a free port of an interface "
            "of the machine that runs rank 0"
        ) from error
    store = TCPStore(
        host,
        int(port),
        world_size,
        is_master=True,
        timeout=timeout,
        wait_for_workers=False,
        master_listen_fd=listener.detach(),
        use_libuv=True,
    )
    return sealed(store, token)


def sealed(store: Store, token: str) -> Store:
    """The store, in which keys and values carry digests that only who knows the token can make.

    A key is stored as HMAC(token, key), so that a list of keys tells nothing. A value is stored behind HMAC(token, key, nonce,
    value), with a new nonce each time. Reading a value that somebody else wrote raises ExecutionError. Leaves out: an earlier
    value of the same key, written again.
    """
    from torch.distributed import Store as AnyStore

    secret = token.encode()

    def name(key: str) -> str:
        return hmac.digest(secret, b"key" + key.encode(), "sha256").hex()

    def digest_of(key: str, content: bytes) -> bytes:
        return hmac.digest(secret, b"value" + hashlib.sha256(key.encode()).digest() + content, "sha256")

    def seal(key: str, value: bytes | str) -> bytes:
        content = secrets.token_bytes(_NONCE_BYTES) + (value.encode() if isinstance(value, str) else bytes(value))
        return digest_of(key, content) + content

    def unseal(key: str, stored: bytes) -> bytes:
        content = stored[_DIGEST_BYTES:]
        if not hmac.compare_digest(stored[:_DIGEST_BYTES], digest_of(key, content)):
            raise ExecutionError(
                f"somebody without the token of this run wrote {key!r} into its store; give only the machines of the run "
                f"access to the port of {ADDRESS_VARIABLE}, and start it again"
            )
        return content[_NONCE_BYTES:]

    def change(key: str, changed: Callable[[bytes], bytes | str | None]) -> bytes:
        """Set the key to what follows from its value (b"": none), whoever sets it meanwhile; None: leave it. The value then."""
        while True:
            stored = store.get(name(key)) if store.check([name(key)]) else b""
            value = unseal(key, stored) if stored else b""
            follows = changed(value)
            if follows is None:
                return value
            after = seal(key, follows)
            if store.compare_set(name(key), stored, after) == after:  # type: ignore[arg-type]
                return unseal(key, after)

    class SealedStore(AnyStore):
        """What torch takes for a store. C++ looks methods up by these names."""

        def set(self, key: str, value: bytes | str) -> None:
            store.set(name(key), seal(key, value))  # type: ignore[arg-type]

        def get(self, key: str) -> bytes:
            return unseal(key, store.get(name(key)))

        def add(self, key: str, amount: int) -> int:
            return int(change(key, lambda value: str(int(value or b"0") + amount)))

        def compare_set(self, key: str, expected: bytes | str, desired: bytes | str) -> bytes:
            before = expected.encode() if isinstance(expected, str) else bytes(expected)
            return change(key, lambda value: desired if value == before else None)

        def check(self, keys: Sequence[str]) -> bool:
            return store.check([name(key) for key in keys])

        def wait(self, keys: Sequence[str], timeout: datetime.timedelta | None = None) -> None:
            names = [name(key) for key in keys]
            store.wait(names) if timeout is None else store.wait(names, timeout)

        def deleteKey(self, key: str) -> bool:
            return store.delete_key(name(key))

        def getNumKeys(self) -> int:
            return store.num_keys()

        def setTimeout(self, timeout: datetime.timedelta) -> None:
            store.set_timeout(timeout)

        def clone(self) -> Store:
            of_torch: Any = store  # whose stubs lack it
            return sealed(of_torch.clone(), token)

    made: Store = SealedStore()
    _sealed.append(made)
    return made


_sealed: list[Store] = []
"""C++ that holds one of these calls its methods only as long as Python holds it too."""
