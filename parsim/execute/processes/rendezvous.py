"""How the ranks of a launch find one another: a key-value store that only they can use, and that unpickles nothing.

On one machine the store is a file in a folder of mode 0700 (PARSIM_STORE_FILE). Over several machines it is a TCP store whose
listener is bound to the address that was named (PARSIM_RENDEZVOUS=HOST:PORT) and that serves only who knows the token of the
run (PARSIM_TOKEN, see `store`). Agents of torchrun meet in such a store too (`torchrun_agent`). Ranks that somebody's own
torchrun started use torchrun's store.

Leaves out: encryption. Gradients cross the network as gloo and NCCL send them.
"""

from __future__ import annotations

import datetime
import os
import socket
from collections.abc import Mapping
from typing import TYPE_CHECKING

from parsim.errors import ExecutionError
from parsim.execute.processes.store import StoreServer, connect

if TYPE_CHECKING:
    from torch.distributed import Store

FILE_VARIABLE = "PARSIM_STORE_FILE"
ADDRESS_VARIABLE = "PARSIM_RENDEZVOUS"
TOKEN_VARIABLE = "PARSIM_TOKEN"
_SHORTEST_TOKEN = 16


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
    """A TCP store under the token of the run. Rank 0 listens on the address, HOST:PORT, and on no other.

    Raises ExecutionError: an address without a port or a token, one that is not of this machine, or where another listens.
    """
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
