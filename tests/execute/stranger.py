"""Somebody on the network of an exported run without its token, who makes noise.

Reads "HOST PORT" from stdin and sends 64 KiB of zeros to each, over connections that stay open.
"""

from __future__ import annotations

import contextlib
import socket
import sys


def noise() -> None:
    kept = []
    for line in sys.stdin:
        host, port = line.split()
        with contextlib.suppress(OSError):
            kept.append(socket.create_connection((host, int(port)), 2))
            kept[-1].sendall(bytes(65_536))


if __name__ == "__main__":
    noise()
