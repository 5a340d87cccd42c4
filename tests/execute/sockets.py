"""Which sockets a tree of processes holds, from /proc; and a port that none holds."""

from __future__ import annotations

import contextlib
import ipaddress
import os
import random
import socket
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

PROC = Path("/proc")
LISTEN = "0A"


def free_port() -> int:
    """A port of the loopback that nobody listens on, below those that the kernel gives to connections."""
    for port in random.sample(range(20_000, 32_000), 100):
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port
    raise AssertionError("none of 100 drawn ports is free")


@dataclass(frozen=True, order=True)
class Socket:
    """One TCP or UDP socket: local and remote address; the remote one of a listener is unspecified."""

    protocol: str
    local: str
    remote: str
    listens: bool

    @property
    def stays_here(self) -> bool:
        """Whether nobody outside this machine can reach it, nor it anybody outside."""
        local, remote = ipaddress.ip_address(self.local), ipaddress.ip_address(self.remote)
        return local.is_loopback and (remote.is_loopback or remote.is_unspecified)


def sockets_of(pids: Iterable[int]) -> set[Socket]:
    """All internet sockets that these processes hold open at this moment."""
    inodes = {inode for pid in pids for inode in _inodes(pid)}
    found = set()
    for protocol in ("tcp", "tcp6", "udp", "udp6"):
        with contextlib.suppress(OSError):
            for line in (PROC / "net" / protocol).read_text().splitlines()[1:]:
                fields = line.split()
                if fields[9] in inodes:
                    found.add(Socket(protocol, _address(fields[1]), _address(fields[2]), fields[3] == LISTEN))
    return found


def _inodes(pid: int) -> set[str]:
    found = set()
    with contextlib.suppress(OSError):
        for entry in (PROC / str(pid) / "fd").iterdir():
            with contextlib.suppress(OSError):
                target = os.readlink(entry)
                if target.startswith("socket:["):
                    found.add(target.removeprefix("socket:[").removesuffix("]"))
    return found


def _address(text: str) -> str:
    """The kernel's hexadecimal words, each in the order of this machine's bytes."""
    word = text.partition(":")[0]
    packed = b"".join(bytes.fromhex(word[at : at + 8])[::-1] for at in range(0, len(word), 8))
    address = ipaddress.ip_address(packed)
    mapped = getattr(address, "ipv4_mapped", None)
    return str(mapped or address)
