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

from parsim.errors import MissingDependencyError
from parsim.execute.processes.machine import describe_environment, machine_line, memory_limit_bytes
from parsim.hardware.profile import shipped_profiles
from parsim.report.tables import NOTHING, Column, ReportTable
from parsim.units import GIB, format_bytes, format_percent, format_seconds

COMFORTABLE_MEMORY_BYTES = 4 * GIB
LEAST_GPU_BYTES = 4 * GIB
"""Free, for a small model, its copies at several batches, and the operators that are timed."""
OTHERS_SHARE = 0.1
"""Of a GPU's memory: more than this in use before anything starts is another program's."""

CALIBRATE_ON_GPUS = "calibrate --device cuda"
"""The name of its line."""

WITH_TORCH = "pip install 'parsim[torch]'"


@dataclass(frozen=True, slots=True, kw_only=True)
class Gpu:
    """As torch sees it, before this process has used it. capability: its generation, (8, 0) for an A100."""

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
    """

    torch: str = ""
    cuda_build: str = ""
    backends: tuple[str, ...] = ()
    gpus: tuple[Gpu, ...] = ()
    gpu_error: str = ""
    transformers: bool = False
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
    here = Found(
        transformers=importlib.util.find_spec("transformers") is not None,
        numba_error=_numba_error(),
        cores=len(environment["affinity"]),
        memory_bytes=memory_limit_bytes(),
    )
    if importlib.util.find_spec("torch") is None:
        return here
    import torch
    import torch.distributed as dist

    gpus, error = [], ""
    try:
        for index in range(torch.cuda.device_count()):
            free, total = torch.cuda.mem_get_info(index)
            name, capability = torch.cuda.get_device_name(index), torch.cuda.get_device_capability(index)
            gpus.append(Gpu(name=name, free_bytes=free, total_bytes=total, capability=capability))
    except RuntimeError as failure:  # a driver that is too old, or a GPU that is lost
        error = str(failure).splitlines()[0]
    return replace(
        here,
        torch=torch.__version__,
        cuda_build=torch.version.cuda or "",
        backends=tuple(name for name in ("gloo", "nccl") if dist.is_available() and dist.is_backend_available(name)),
        gpus=tuple(gpus),
        gpu_error=error,
    )


def _numba_error() -> str:
    try:
        import parsim.jit  # noqa: F401
    except MissingDependencyError as error:
        return str(error)
    return ""


# --- abilities --------------------------------------------------------------------------------------------------------


def checks_of(found: Found) -> tuple[Check, ...]:
    """The abilities of this installation, and how to get the missing ones."""
    return (
        _simulation_check(found),
        _torch_check(found),
        _gloo_check(found),
        _gpu_check(found),
        _hugging_face_check(found),
        _cores_check(found),
        _memory_check(found),
    )


def _simulation_check(found: Found) -> Check:
    if found.numba_error:
        what, _, fix = found.numba_error.rpartition("; ")
        return Check(name="simulate and plan", ok=False, found=what, fix=fix)
    return Check(name="simulate and plan", ok=True, found=f"profiles: {', '.join(shipped_profiles())}")


def _torch_check(found: Found) -> Check:
    return Check(
        name="trace models (torch)",
        ok=bool(found.torch),
        found=f"torch {found.torch}" if found.torch else "torch is not installed",
        fix="" if found.torch else f"{WITH_TORCH}; without it, plan built-in models and Models saved as JSON",
    )


def _gloo_check(found: Found) -> Check:
    there = "gloo" in found.backends
    return Check(
        name="train on CPU processes",
        ok=there,
        found="gloo" if there else "no gloo in torch.distributed" if found.torch else "torch is not installed",
        fix="" if there else f"install a torch built with gloo: {WITH_TORCH}",
    )


def _gpu_check(found: Found) -> Check:
    lacks = next(_lacks_of_gpus(found), None)
    if lacks is not None:
        return Check(name="train on GPUs", ok=False, found=lacks[0], fix=lacks[1])
    names = ", ".join(dict.fromkeys(gpu.name for gpu in found.gpus))
    free = min(gpu.free_bytes for gpu in found.gpus)
    return Check(name="train on GPUs", ok=True, found=f"{len(found.gpus)} x {names}, {format_bytes(free)} free, NCCL")


def _lacks_of_gpus(found: Found) -> Iterator[tuple[str, str]]:
    """What keeps this machine from computing on GPUs, and what to do; the first thing first."""
    if not found.torch:
        yield "torch is not installed", WITH_TORCH
    elif not found.cuda_build:
        yield f"torch {found.torch} was built without CUDA", "install a CUDA build of torch; until then, CPU processes"
    elif found.gpu_error:
        yield (
            f"torch cannot use the GPU: {found.gpu_error}",
            "fix the driver (nvidia-smi shows the GPUs that it sees); until then, CPU processes",
        )
    elif not found.gpus:
        yield (
            "torch sees no GPU",
            "on a machine with NVIDIA GPUs, install the driver; look at CUDA_VISIBLE_DEVICES; until then, CPU processes",
        )
    elif "nccl" not in found.backends:
        yield "no NCCL in torch.distributed", "install a CUDA build of torch for Linux, which brings NCCL"


def _hugging_face_check(found: Found) -> Check:
    return Check(
        name="models from a Hugging Face config.json",
        ok=found.transformers,
        found="transformers" if found.transformers else "transformers is not installed",
        fix="" if found.transformers else "pip install 'parsim[hf]'",
    )


def _cores_check(found: Found) -> Check:
    return Check(
        name="one core per process",
        ok=found.cores >= 2,
        found=f"{found.cores} cores; `parsim run --nproc` above that shares them, and each rank slows down accordingly",
        fix="" if found.cores >= 2 else "two ranks will share one core: expect half the speed, not a wrong answer",
    )


def _memory_check(found: Found) -> Check:
    enough = found.memory_bytes >= COMFORTABLE_MEMORY_BYTES
    return Check(
        name="memory for the demo",
        ok=enough,
        found=f"{format_bytes(found.memory_bytes)} for this process",
        fix="" if enough else f"the demo needs about {format_bytes(COMFORTABLE_MEMORY_BYTES)}; close other programs",
    )


# --- commands ---------------------------------------------------------------------------------------------------------


def commands_of(found: Found) -> tuple[Check, ...]:
    """Whether each command works here, by what that command needs."""
    simulation, torch, gloo, memory = _simulation_check(found), _torch_check(found), _gloo_check(found), _memory_check(found)
    return (
        _needing(
            "plan, simulate, sweep, compare, explore, cost, report, coverage, profile, import",
            simulation,
            found="built-in models, large ones by name, Models saved as JSON",
        ),
        _needing("plan any other model", simulation, torch, found=torch.found),
        _needing("export", torch, found=torch.found),
        _needing("calibrate --device cpu", torch, gloo, found=f"up to {found.cores} ranks with a core each"),
        _needing("run, validate on CPU processes", simulation, torch, gloo, found=f"{found.cores} cores"),
        _needing("demo", simulation, torch, gloo, memory, found=memory.found),
        _on_gpus(found, CALIBRATE_ON_GPUS),
        _on_gpus(found, "run, validate on GPUs", simulation),
    )


def _needing(name: str, *needed: Check, found: str) -> Check:
    lacking = next((check for check in needed if not check.ok), None)
    return (
        Check(name=name, ok=True, found=found)
        if lacking is None
        else Check(name=name, ok=False, found=lacking.found, fix=lacking.fix)
    )


def _on_gpus(found: Found, name: str, *needed: Check) -> Check:
    """A rank per GPU, each with room for a model; the line names a GPU that others use."""
    if not (check := _needing(name, *needed, found="")).ok:
        return check
    lacks = next(_lacks_of_gpus(found), None)
    if lacks is not None:
        return Check(name=name, ok=False, found=lacks[0], fix=lacks[1])
    room = [gpu for gpu in found.gpus if gpu.free_bytes >= LEAST_GPU_BYTES]
    if len(room) < len(found.gpus):
        least = min(found.gpus, key=lambda gpu: gpu.free_bytes)
        what = f"{len(found.gpus) - len(room)} of {len(found.gpus)} GPUs have less than {format_bytes(LEAST_GPU_BYTES)} free"
        return Check(
            name=name,
            ok=False,
            found=f"{what} ({least.name}: {format_bytes(least.free_bytes)} of {format_bytes(least.total_bytes)})",
            fix="end what else runs on them, or leave them out with CUDA_VISIBLE_DEVICES",
        )
    ranks = f"--nproc up to {len(found.gpus)}, a GPU each"
    if max(gpu.in_use for gpu in found.gpus) > OTHERS_SHARE:
        most = max(found.gpus, key=lambda gpu: gpu.in_use)
        used = f"{format_percent(most.in_use)} of the memory of a {most.name} is in use"
        return Check(
            name=name, ok=True, found=f"{ranks}; {used}: what is timed there shares the GPU", fix="end what else runs on it"
        )
    return Check(name=name, ok=True, found=ranks)


# --- for people -------------------------------------------------------------------------------------------------------


def sentence(findings: dict[str, Any]) -> str:
    """`All commands work here but calibrate --device cuda: torch 2.13.0+cpu was built without CUDA.`"""
    missing = [entry for entry in findings["commands"] if not entry["ok"]]
    if not missing:
        return "All commands work here."
    reasons = "; ".join(dict.fromkeys(entry["found"] for entry in missing))
    return f"All commands work here but {' and '.join(entry['name'] for entry in missing)}: {reasons}."


def tables(findings: dict[str, Any]) -> tuple[ReportTable, ...]:
    """The findings of `examine` for people."""
    environment = findings["environment"]
    versions = ", ".join(f"{name} {version}" for name, version in environment["versions"].items())
    checks = ReportTable(
        title=machine_line(environment),
        columns=(Column(name="ability"), Column(name="ok"), Column(name="found", wraps=True), Column(name="fix", wraps=True)),
        rows=tuple(
            (check["name"], "yes" if check["ok"] else "NO", check["found"], check["fix"] or NOTHING)
            for check in findings["checks"]
        ),
        notes=(f"{environment['system']}; {versions}",),
    )
    commands = ReportTable(
        title="Commands",
        columns=(
            Column(name="command"),
            Column(name="works here"),
            Column(name="found", wraps=True),
            Column(name="fix", wraps=True),
        ),
        rows=tuple(
            (entry["name"], "yes" if entry["ok"] else "NO", entry["found"], entry["fix"] or NOTHING)
            for entry in findings["commands"]
        ),
    )
    return checks, commands


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
        ending = f"{title}: {format_seconds(time.monotonic() - started)}"
        print(ending, file=sys.stderr)
        return
    print(f"{title} ...", file=sys.stderr, flush=True)
    yield lambda text: print(f"  {text}", file=sys.stderr, flush=True)
    taken = time.monotonic() - started
    if taken > QUIET_S:
        print(f"{title}: {format_seconds(taken)}", file=sys.stderr, flush=True)
