"""Ranks that start in a hundredth of a second: forked from one process that has imported torch and the worker.

A rank imports for four seconds of processor time before it does anything, and the tests start some hundreds. So
`tests/conftest.py` puts `start` in the place of `launch.start_rank`, except for the files in `STARTED_COLD`, which are about
how processes start and end. Everything else is as in a launch: the rank is a process that leads a session, has the launch's
environment and output files, and runs `rank.main`.
Leaves out: /proc/PID/environ shows the environment of the server, so `marked` and `rank_processes` do not see these ranks.
"""

from __future__ import annotations

import atexit
import json
import os
import random
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from parsim.execute.processes import rank
from parsim.execute.processes.launch import start_rank as start_cold
from parsim.execute.processes.output import PARENT_VARIABLE

STARTED_COLD = ("test_calibration_resume.py", "test_launch.py", "test_live_replanning.py", "test_run_verdict.py")
READ_AT_START = ("OMP_", "MKL_", "OPENBLAS_", "NUMEXPR_", "KMP_", "PYTHONHASHSEED", "LD_", "MALLOC_")
"""Variables with these beginnings have an effect only while an interpreter or a library starts."""


class Server:
    """The process that forks ranks. One request and one answer at a time, each a line of JSON."""

    def __init__(self, environment: Mapping[str, str]) -> None:
        self.environment = {name: value for name, value in environment.items() if name.startswith(READ_AT_START)}
        folders = [str(Path(__file__).parents[1]), *filter(None, [os.environ.get("PYTHONPATH")])]
        inherited = {**os.environ, **self.environment, "PYTHONPATH": os.pathsep.join(folders)}
        here, there = socket.socketpair()
        with there:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "tests.warm_ranks", str(there.fileno())],
                pass_fds=[there.fileno()],
                env=inherited,
                cwd=Path(__file__).parents[1],
                stdin=subprocess.DEVNULL,
            )
        self._socket = here
        self._lines = here.makefile("rw", encoding="utf-8")
        self._lock = threading.Lock()
        atexit.register(self.close)

    def ask(self, request: dict[str, Any]) -> Any:
        with self._lock:
            self._lines.write(json.dumps(request) + "\n")
            self._lines.flush()
            answer = self._lines.readline()
        if not answer:
            raise RuntimeError("the server of warm ranks has ended")
        return json.loads(answer)

    def close(self) -> None:
        self._lines.close()
        self._socket.close()
        self._process.wait()


@dataclass(slots=True)
class WarmRank:
    """What `launch` uses of subprocess.Popen."""

    server: Server
    pid: int
    returncode: int | None = None

    def poll(self) -> int | None:
        if self.returncode is None:
            self.returncode = self.server.ask({"poll": self.pid})
        return self.returncode

    def wait(self, timeout: float) -> int:
        until = time.monotonic() + timeout
        while (status := self.poll()) is None:
            if time.monotonic() > until:
                raise subprocess.TimeoutExpired("rank", timeout)
            time.sleep(0.005)
        return status

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)


_servers: list[Server] = []


def start(
    arguments: Sequence[str], environment: Mapping[str, str], stdout: Path, stderr: Path
) -> WarmRank | subprocess.Popen[bytes]:
    """`launch.start_rank` by a fork; a process of its own where a variable differs that is read at its start."""
    at_start = {name: value for name, value in environment.items() if name.startswith(READ_AT_START)}
    server = next((server for server in _servers if server.environment == at_start), None)
    if server is None:
        if _servers:
            return start_cold(arguments, environment, stdout, stderr)
        _servers.append(server := Server(environment))
    request = {
        "arguments": list(arguments),
        "environment": dict(environment),
        "cwd": os.getcwd(),
        "output": [str(stdout), str(stderr)],
    }
    return WarmRank(server, server.ask(request))


def _serve(lines: Any) -> dict[str, Any] | None:
    """Answer requests until the asking process ends: None. In a forked rank: its request."""
    for line in lines:
        request = json.loads(line)
        if "poll" in request:
            pid, status = os.waitpid(request["poll"], os.WNOHANG)
            answer = os.waitstatus_to_exitcode(status) if pid else None
        else:
            answer = os.fork()
            if answer == 0:
                return request
        lines.write(json.dumps(answer) + "\n")
        lines.flush()
    return None


def _become(request: dict[str, Any], installed: list[str]) -> None:
    """Make of this fork what subprocess.Popen would have made: session, output, environment, folders of modules."""
    os.setsid()
    for number, path in enumerate(request["output"], start=1):
        handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
        os.dup2(handle, number)
        os.close(handle)
    os.chdir(request["cwd"])
    os.environ.clear()
    os.environ.update(request["environment"], **{PARENT_VARIABLE: str(os.getppid())})
    time.tzset()
    sys.path[:] = [request["cwd"], *request["environment"].get("PYTHONPATH", "").split(os.pathsep), *installed]
    random.seed()
    import numpy as np

    np.random.seed()  # noqa: NPY002 - a new interpreter seeds the global generator
    sys.argv = [rank.__file__, *request["arguments"]]


def main() -> None:
    """Serve on the socket whose number is the argument."""
    import parsim.execute.worker

    del sys.modules[parsim.execute.worker.__name__]  # a rank runs it as its main program
    if len(os.listdir("/proc/self/task")) > 1:
        raise RuntimeError("a process that forks ranks must have no second thread")
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    beside = set(os.environ["PYTHONPATH"].split(os.pathsep)) | {sys.path[0]}
    installed = [folder for folder in sys.path if folder not in beside]
    with socket.socket(fileno=int(sys.argv[1])) as connection, connection.makefile("rw", encoding="utf-8") as lines:
        request = _serve(lines)
    if request is not None:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        _become(request, installed)
        rank.main()


if __name__ == "__main__":
    main()
