"""Two ranks in network namespaces of their own, joined by a link of known bandwidth: a slow network on one machine.

Needs root and the commands `ip` and `tc`. The link is a veth pair, both ends shaped by a token bucket; each rank is started by
a torchrun of its own, as on two hosts, and pinned to a core of its own.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from parsim.errors import ExecutionError
from parsim.execute.processes.setup import available_cores

NAMES = ("parsim-a", "parsim-b")
ADDRESSES = ("10.77.0.1", "10.77.0.2")
INTERFACE = "parsim0"
PORT = 29511
POLL_S = 0.05
SMALL_PACKET_BYTES = 16384
BURST_BYTES = 256 * 1024
"""What the bucket lets through at once. A smaller one cannot keep the rate with a timer of 4 ms."""
FASTEST_S = 0.002
"""What the link carries in this time passes at once, too: above 125 MB/s a fixed bucket would limit it."""


def possible() -> str:
    """Why this machine cannot have namespaces; "" if it can."""
    if os.geteuid() != 0:
        return "network namespaces need root"
    missing = [command for command in ("ip", "tc") if shutil.which(command) is None]
    if missing:
        return f"no command {' and '.join(missing)} (package iproute2)"
    probe = f"parsim-{os.getpid()}-probe"
    if subprocess.run(["ip", "netns", "add", probe], capture_output=True, check=False).returncode:
        return "this system makes no network namespaces"
    _ip("netns", "delete", probe)
    return ""


@dataclass(frozen=True)
class ShapedPair:
    """A `launch` whose two ranks talk over the shaped link; make one with `shaped_pair`.

    Attributes: rate_bytes_per_s: of the link at first.
    """

    rate_bytes_per_s: float

    def __call__(
        self,
        job_path: Path,
        nproc: int,
        *,
        module: str = "parsim.execute.worker",
        timeout_s: float | None = None,
        on_line: Callable[[str], None] | None = None,
    ) -> None:
        """Run `python -m MODULE JOB.json` as one rank in each namespace.

        Raises ExecutionError: not two ranks, a rank that failed, or the time ran out; nothing is left running.
        """
        if nproc != len(NAMES):
            raise ExecutionError(f"there are {len(NAMES)} namespaces, one rank in each; {nproc} ranks were asked for")
        cores = available_cores()
        logs = [job_path.parent / f"{name}.log" for name in NAMES]
        processes = []
        try:
            for node, (name, log) in enumerate(zip(NAMES, logs, strict=True)):
                with log.open("wb") as file:
                    command = _command(node, name, cores[node % len(cores)], module, job_path)
                    processes.append(
                        subprocess.Popen(
                            command, stdout=file, stderr=subprocess.STDOUT, env=_environment(), start_new_session=True
                        )
                    )
            _wait(processes, logs, timeout_s, on_line)
        finally:
            for process in processes:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                process.wait()

    def shape(self, rate_bytes_per_s: float, *, burst_s: float = FASTEST_S) -> None:
        """From now on the link has this rate in each direction, whatever runs over it; what it carries in burst_s may go
        through at once. Raises ExecutionError."""
        rate, burst = f"{round(8 * rate_bytes_per_s)}bit", round(rate_bytes_per_s * burst_s)
        shape = ["tbf", "rate", rate, "burst", str(burst), "latency", "100ms"]
        for name in NAMES:
            _run("tc", "-n", name, "qdisc", "replace", "dev", INTERFACE, "root", *shape)


@contextlib.contextmanager
def shaped_pair(rate_bytes_per_s: float, *, changes: bool = False) -> Iterator[ShapedPair]:
    """Two namespaces with a link of this rate in each direction; gone again when left. Raises ExecutionError.

    changes: `shape` will be called: packets stay below the smallest bucket, because one that waits when the bucket becomes
    smaller than itself would wait for ever, and all behind it.
    """
    if why := possible():
        raise ExecutionError(why)
    _remove()
    try:
        for name in NAMES:
            _ip("netns", "add", name)
        _ip("link", "add", INTERFACE, "netns", NAMES[0], "type", "veth", "peer", "name", INTERFACE, "netns", NAMES[1])
        for name, address in zip(NAMES, ADDRESSES, strict=True):
            _ip("-n", name, "address", "add", f"{address}/24", "dev", INTERFACE)
            for device in ("lo", INTERFACE):
                _ip("-n", name, "link", "set", device, "up")
        if changes:
            for name in NAMES:
                _ip("-n", name, "link", "set", "dev", INTERFACE, "gso_max_size", str(SMALL_PACKET_BYTES))
        pair = ShapedPair(rate_bytes_per_s)
        pair.shape(rate_bytes_per_s, burst_s=max(FASTEST_S, BURST_BYTES / rate_bytes_per_s))
        yield pair
    finally:
        _remove()


def _command(node: int, name: str, core: int, module: str, job_path: Path) -> list[str]:
    return [
        *("ip", "netns", "exec", name, "taskset", "-c", str(core)),
        *(sys.executable, "-m", "torch.distributed.run", "--nnodes", str(len(NAMES)), "--node-rank", str(node)),
        *("--nproc-per-node", "1", "--master-addr", ADDRESSES[0], "--master-port", str(PORT)),
        *("-m", module, str(job_path.absolute())),
    ]


def _environment() -> dict[str, str]:
    threads = dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"), "1")
    return {**os.environ, **threads, "GLOO_SOCKET_IFNAME": INTERFACE, "TP_SOCKET_IFNAME": INTERFACE}


def _wait(
    processes: list[subprocess.Popen[bytes]], logs: list[Path], timeout_s: float | None, on_line: Callable[[str], None] | None
) -> None:
    """Until all have ended well. Raises ExecutionError as soon as one has not, with the last it said."""
    deadline = None if timeout_s is None else time.monotonic() + timeout_s
    said = [0] * len(logs)
    while any(process.poll() is None for process in processes):
        for node, log in enumerate(logs):  # the rank that speaks of the training is the last one of the plan
            lines = log.read_text(errors="replace").split("\n")[:-1]  # the last one may not be whole yet
            for line in lines[said[node] :]:
                if on_line is not None:
                    on_line(line)
            said[node] = len(lines)
        failed = [node for node, process in enumerate(processes) if process.poll() not in (None, 0)]
        if failed or (deadline is not None and time.monotonic() > deadline):
            break
        time.sleep(POLL_S)
    for node, process in enumerate(processes):
        if process.poll() != 0:
            last = logs[node].read_text(errors="replace").strip().splitlines()[-1:]
            raise ExecutionError(f"the rank in {NAMES[node]} did not finish (status {process.poll()}): {' '.join(last)}")


def _remove() -> None:
    known = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, check=False).stdout.split()
    for name in NAMES:
        if name in known:
            _ip("netns", "delete", name)


def _ip(*arguments: str) -> None:
    _run("ip", *arguments)


def _run(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise ExecutionError(f"{' '.join(command)} failed: {done.stderr.strip() or done.stdout.strip()}")
