"""The abilities of this machine, the commands that therefore work, and how to get the missing parts.

`look` asks the machine and torch once; `checks_of` and `commands_of` judge what it found, without asking again.
"""

from __future__ import annotations

import importlib.util
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from typing import Any

from parsim.errors import EXTRA_OF, MissingDependencyError
from parsim.execute.processes.machine import describe_environment, machine_line, memory_limit_bytes
from parsim.hardware.profile import shipped_profiles
from parsim.report.tables import NOTHING, Column, ReportTable
from parsim.units import GIB, format_bytes, format_percent, format_seconds

COMFORTABLE_MEMORY_BYTES = 4 * GIB
LEAST_GPU_BYTES = 4 * GIB
"""Free, for a small model, its copies at several batches, and the operators that are timed."""
OTHERS_SHARE = 0.1
"""Of a GPU's memory: more than this in use before anything starts is another program's."""

GPUS, CALIBRATE_ON_GPUS = "train on GPUs", "calibrate --device cuda"
"""Names of their lines."""
WITH_TORCH = "pip install 'parsim[torch]'"
PURPOSES = {
    "numba": "simulate large graphs by compiled loops",
    "plotly": "write report.html and explorer.html",
    "cvxpy": "prove placements by a solver",
    "mcp": "answer an agent",
}
"""Packages that planning can do without, and what each adds."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Gpu:
    """One GPU before this process has used it. capability: its generation, (8, 0) for an A100."""

    name: str
    free_bytes: int
    total_bytes: int
    capability: tuple[int, int] = (0, 0)

    @property
    def in_use(self) -> float:
        """Share of its memory that something holds already."""
        return 1.0 - self.free_bytes / self.total_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """What commands depend on.

    Attributes:
        torch: its version, "" without it. cuda_build: the version of CUDA that torch was built with, "" for a CPU build.
        backends: of torch.distributed. gpu_error: why torch could not say what its GPUs have, "" where it could.
        numba_error: why numba cannot be imported and what to do, "" where it can.
        packages: those of PURPOSES that are installed.
    """

    torch: str = ""
    cuda_build: str = ""
    backends: tuple[str, ...] = ()
    gpus: tuple[Gpu, ...] = ()
    gpu_error: str = ""
    transformers: bool = False
    packages: tuple[str, ...] = ()
    numba_error: str = ""
    cores: int = 1
    memory_bytes: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    """One ability: `ok`, the finding, and how to get it if it is missing ("" if nothing is to be done)."""

    name: str
    ok: bool
    found: str
    fix: str = ""


def examine() -> dict[str, Any]:
    """Plain JSON: environment, checks and commands (see Check; a command's name is how it is called).

    Imports torch where it is installed, to ask it for devices and backends.
    """
    environment = describe_environment()
    found = look(environment)
    return {
        "environment": environment,
        "checks": [asdict(check) for check in checks_of(found)],
        "commands": [asdict(check) for check in commands_of(found)],
    }


def look(environment: dict[str, Any]) -> Found:
    """What this machine has. environment: see `describe_environment`."""
    numba_error = ""
    try:
        import parsim.jit  # noqa: F401
    except MissingDependencyError as error:
        numba_error = str(error)
    here = Found(
        packages=tuple(package for package in PURPOSES if importlib.util.find_spec(package) is not None),
        transformers=importlib.util.find_spec("transformers") is not None,
        numba_error=numba_error,
        cores=len(environment["affinity"]),
        memory_bytes=memory_limit_bytes(),
    )
    if importlib.util.find_spec("torch") is None:
        return here
    import torch
    import torch.distributed as dist

    gpus, gpu_error = [], ""
    try:
        for index in range(torch.cuda.device_count()):
            free, total = torch.cuda.mem_get_info(index)
            name, capability = torch.cuda.get_device_name(index), torch.cuda.get_device_capability(index)
            gpus.append(Gpu(name=name, free_bytes=free, total_bytes=total, capability=capability))
    except RuntimeError as error:  # a driver that is too old, or a GPU that is lost
        gpu_error = str(error).splitlines()[0]
    return replace(
        here,
        torch=torch.__version__,
        cuda_build=torch.version.cuda or "",
        backends=tuple(name for name in ("gloo", "nccl") if dist.is_available() and dist.is_backend_available(name)),
        gpus=tuple(gpus),
        gpu_error=gpu_error,
    )


def checks_of(found: Found) -> tuple[Check, ...]:
    """The abilities of this installation, and how to get the missing ones."""
    what, _, fix = found.numba_error.rpartition("; ")
    no_torch = "torch is not installed"
    lacks_gpus = next(_lacks_of_gpus(found), None)
    if lacks_gpus is not None:
        gpus = Check(name=GPUS, ok=False, found=lacks_gpus[0], fix=lacks_gpus[1])
    else:
        names = ", ".join(dict.fromkeys(gpu.name for gpu in found.gpus))
        free = format_bytes(min(gpu.free_bytes for gpu in found.gpus))
        gpus = Check(name=GPUS, ok=True, found=f"{len(found.gpus)} x {names}, {free} free, NCCL")
    return (
        _check("simulate and plan", not found.numba_error, what or f"profiles: {', '.join(shipped_profiles())}", fix),
        _check(
            "trace models (torch)",
            bool(found.torch),
            f"torch {found.torch}" if found.torch else no_torch,
            f"{WITH_TORCH}; without it, plan built-in models and Models saved as JSON",
        ),
        _check(
            "train on CPU processes",
            "gloo" in found.backends,
            "gloo" if "gloo" in found.backends else "no gloo in torch.distributed" if found.torch else no_torch,
            f"install a torch built with gloo: {WITH_TORCH}",
        ),
        gpus,
        _check(
            "models from a Hugging Face config.json",
            found.transformers,
            "transformers" if found.transformers else "transformers is not installed",
            "pip install 'parsim[hf]'",
        ),
        _check(
            "one core per process",
            found.cores >= 2,
            f"{found.cores} cores; more ranks than cores share them and slow down accordingly",
            "two ranks share one core and run at half the speed; results stay right",
        ),
        _check(
            "memory for the demo",
            found.memory_bytes >= COMFORTABLE_MEMORY_BYTES,
            f"{format_bytes(found.memory_bytes)} for this process",
            f"the demo needs about {format_bytes(COMFORTABLE_MEMORY_BYTES)}; close other programs",
        ),
        *(
            _check(
                purpose,
                package in found.packages,
                package if package in found.packages else f"{package} is not installed",
                f"pip install 'parsim[{EXTRA_OF[package]}]'",
            )
            for package, purpose in PURPOSES.items()
        ),
    )


def _check(name: str, ok: bool, found: str, fix: str) -> Check:
    """A Check whose fix is for a missing ability alone."""
    return Check(name=name, ok=ok, found=found, fix="" if ok else fix)


def _lacks_of_gpus(found: Found) -> Iterator[tuple[str, str]]:
    """What keeps this machine from computing on GPUs, and what to do; the first thing first."""
    if not found.torch:
        yield "torch is not installed", WITH_TORCH
    elif not found.cuda_build:
        yield f"torch {found.torch} was built without CUDA", "install a CUDA build of torch; until then, train on CPU processes"
    elif found.gpu_error:
        yield (
            f"torch cannot use the GPU: {found.gpu_error}",
            "fix the driver (nvidia-smi shows the GPUs that it sees); until then, train on CPU processes",
        )
    elif not found.gpus:
        yield (
            "torch sees no GPU",
            "with NVIDIA GPUs, install the driver; look at CUDA_VISIBLE_DEVICES; until then, train on CPU processes",
        )
    elif "nccl" not in found.backends:
        yield "no NCCL in torch.distributed", "install a CUDA build of torch for Linux, which brings NCCL"


def commands_of(found: Found) -> tuple[Check, ...]:
    """Whether each command works here, by what that command needs."""
    simulation, torch, gloo, gpus, _, _, memory, *_, agent = checks_of(found)
    return (
        _needing(
            "plan, check, simulate, sweep, compare, explore, cost, report, coverage, history, profile, models, import",
            simulation,
            found="built-in models, large ones by name, Models saved as JSON",
        ),
        _needing("plan any other model", simulation, torch, found=torch.found),
        _needing("export, bench-graphs", torch, found=torch.found),
        _needing("calibrate --device cpu", torch, gloo, found=f"up to {found.cores} ranks with a core each"),
        _needing("run and validate on CPU processes", simulation, torch, gloo, found=f"{found.cores} cores"),
        _needing("demo", simulation, torch, gloo, memory, found=memory.found),
        _needing("mcp", simulation, agent, found=agent.found),
        _on_gpus(found, CALIBRATE_ON_GPUS, gpus),
        _on_gpus(found, "run and validate on GPUs", simulation, gpus),
    )


def _needing(name: str, *needed: Check, found: str) -> Check:
    lacking = next((check for check in needed if not check.ok), None)
    return Check(name=name, ok=True, found=found) if lacking is None else replace(lacking, name=name)


def _on_gpus(found: Found, name: str, *needed: Check) -> Check:
    count = len(found.gpus)
    ranks = f"--nproc up to {count}, a GPU each"
    check = _needing(name, *needed, found=ranks)
    if not check.ok:
        return check
    room = [gpu for gpu in found.gpus if gpu.free_bytes >= LEAST_GPU_BYTES]
    if len(room) < count:
        least = min(found.gpus, key=lambda gpu: gpu.free_bytes)
        what = f"{count - len(room)} of {count} GPUs have less than {format_bytes(LEAST_GPU_BYTES)} free"
        free = f"{format_bytes(least.free_bytes)} of {format_bytes(least.total_bytes)}"
        fix = "end what else runs on them, or leave them out with CUDA_VISIBLE_DEVICES"
        return Check(name=name, ok=False, found=f"{what} ({least.name}: {free})", fix=fix)
    most = max(found.gpus, key=lambda gpu: gpu.in_use)
    if most.in_use > OTHERS_SHARE:
        used = f"{format_percent(most.in_use)} of the memory of a {most.name} is in use"
        text = f"{ranks}; {used}: what is timed there shares the GPU"
        return Check(name=name, ok=True, found=text, fix="end what else runs on it")
    return check


# The findings for people.


def sentence(findings: dict[str, Any]) -> str:
    """`parsim works on this machine. What does not: demo (torch is not installed).`"""
    planning, *others = findings["commands"]
    if not planning["ok"]:
        return f"parsim cannot plan on this machine: {planning['found']}."
    by_reason: dict[str, list[str]] = {}
    for command in others:
        if not command["ok"]:
            by_reason.setdefault(command["found"], []).append(command["name"])
    missing = "; ".join(f"{', '.join(names)} ({reason})" for reason, names in by_reason.items())
    return f"parsim works on this machine. What does not: {missing}." if missing else "All of parsim works on this machine."


def tables(findings: dict[str, Any]) -> tuple[ReportTable, ...]:
    """The findings of `examine` for people."""
    environment = findings["environment"]
    versions = ", ".join(f"{name} {version}" for name, version in environment["versions"].items())

    def table(title: str, what: str, works: str, checks: list[dict[str, Any]], *notes: str) -> ReportTable:
        columns = tuple(Column(name=name, wraps=name != works) for name in (what, works, "found", "fix"))
        rows = ((check["name"], "yes" if check["ok"] else "NO", check["found"], check["fix"] or NOTHING) for check in checks)
        return ReportTable(title=title, columns=columns, rows=tuple(rows), notes=notes)

    system = f"{environment['system']}; {versions}"
    return (
        table(machine_line(environment), "ability", "ok", findings["checks"], system),
        table("Commands", "command", "works here", findings["commands"]),
    )


# Warnings, and progress of work that takes more than two seconds: on stderr, for commands, scripts and notebooks alike.


QUIET_S = 2.0

Say = Callable[[str], None]


def warn(text: object) -> None:
    """One line on stderr."""
    print(f"warning: {text}", file=sys.stderr, flush=True)


@contextmanager
def progress(title: str) -> Iterator[Say]:
    """Show on stderr that something is going on; yields a function that says how far it is.

    On a terminal: one line that changes in place. Elsewhere: a line at the start, and one at the end if it took longer than
    two seconds.
    """
    started = time.monotonic()
    if sys.stderr.isatty():
        from rich.console import Console
        from rich.text import Text

        with Console(stderr=True, highlight=False).status(Text(f"{title} ...")) as status:
            yield lambda text: status.update(Text(f"{title}: {text}"))
        print(f"{title}: {format_seconds(time.monotonic() - started)}", file=sys.stderr)
        return
    print(f"{title} ...", file=sys.stderr, flush=True)
    yield lambda text: print(f"  {text}", file=sys.stderr, flush=True)
    elapsed_s = time.monotonic() - started
    if elapsed_s > QUIET_S:
        print(f"{title}: {format_seconds(elapsed_s)}", file=sys.stderr, flush=True)
