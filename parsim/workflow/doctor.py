"""What this machine has, what will therefore work, and how to get what is missing."""

from __future__ import annotations

import importlib.util
from dataclasses import asdict, dataclass
from typing import Any

from parsim.execute.processes.environment import describe_environment, machine_line, memory_limit_bytes
from parsim.hardware.profile import shipped_profiles
from parsim.report.tables import NOTHING, Column, ReportTable
from parsim.units import GIB, format_bytes

COMFORTABLE_MEMORY_BYTES = 4 * GIB


@dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    """One ability: `ok`, what was found, and the way to it where it is missing ("" when nothing is to be done)."""

    name: str
    ok: bool
    found: str
    fix: str = ""


def examine() -> dict[str, Any]:
    """Plain JSON: environment, checks (see Check), and which commands will work here.

    Imports torch where it is installed, to ask it for devices and backends.
    """
    has_torch = importlib.util.find_spec("torch") is not None
    backends, cuda_devices = _ask_torch() if has_torch else ((), ())
    environment = describe_environment()
    checks = [
        Check(name="simulate and plan", ok=True, found=f"profiles: {', '.join(shipped_profiles())}"),
        _torch_check(has_torch, environment["versions"].get("torch", "")),
        Check(
            name="train on CPU processes",
            ok="gloo" in backends,
            found="gloo" if "gloo" in backends else "no gloo in torch.distributed",
            fix="" if "gloo" in backends else "install a torch built with gloo: pip install 'parsim[torch]'",
        ),
        _cuda_check(has_torch, cuda_devices, backends),
        _hugging_face_check(),
        _cores_check(environment),
        _memory_check(),
    ]
    able = {check.name: check.ok for check in checks}
    commands = {
        "plan, simulate, cost, report": True,
        "trace a model, calibrate": able["trace models (torch)"],
        "run, validate, demo": able["train on CPU processes"],
        "calibrate and run with --device cuda": able["train on GPUs"],
    }
    return {"environment": environment, "checks": [asdict(check) for check in checks], "commands": commands}


def _ask_torch() -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Communication backends that torch was built with, and the names of the GPUs it sees."""
    import torch
    import torch.distributed as dist

    backends = [name for name in ("gloo", "nccl") if dist.is_available() and dist.is_backend_available(name)]
    devices = [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
    return tuple(backends), tuple(devices)


def _torch_check(present: bool, version: str) -> Check:
    return Check(
        name="trace models (torch)",
        ok=present,
        found=f"torch {version}" if present else "torch is not installed",
        fix="" if present else "pip install 'parsim[torch]'; without it, plan from a preset or from a Model saved as JSON",
    )


def _cuda_check(has_torch: bool, devices: tuple[str, ...], backends: tuple[str, ...]) -> Check:
    if not has_torch:
        return Check(name="train on GPUs", ok=False, found="torch is not installed", fix="pip install 'parsim[torch]'")
    if not devices:
        return Check(
            name="train on GPUs",
            ok=False,
            found="torch sees no GPU",
            fix="on a machine with NVIDIA GPUs, install the driver and a CUDA build of torch; until then, CPU processes",
        )
    if "nccl" not in backends:
        return Check(name="train on GPUs", ok=False, found="no NCCL in torch.distributed", fix="install a CUDA build of torch")
    return Check(name="train on GPUs", ok=True, found=f"{len(devices)} x {devices[0]}, NCCL")


def _hugging_face_check() -> Check:
    present = importlib.util.find_spec("transformers") is not None
    return Check(
        name="models from a Hugging Face config.json",
        ok=present,
        found="transformers" if present else "transformers is not installed",
        fix="" if present else "pip install 'parsim[hf]'",
    )


def _cores_check(environment: dict[str, Any]) -> Check:
    cores = len(environment["affinity"])
    return Check(
        name="one core per process",
        ok=cores >= 2,
        found=f"{cores} cores; `parsim run --nproc` above that shares them, and each rank slows down accordingly",
        fix="" if cores >= 2 else "two ranks will share one core: expect half the speed, not a wrong answer",
    )


def _memory_check() -> Check:
    memory = memory_limit_bytes()
    enough = memory >= COMFORTABLE_MEMORY_BYTES
    return Check(
        name="memory for the demo",
        ok=enough,
        found=f"{format_bytes(memory)} for this process",
        fix="" if enough else f"the demo wants about {format_bytes(COMFORTABLE_MEMORY_BYTES)}; close other programs",
    )


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
        columns=(Column(name="command"), Column(name="works here")),
        rows=tuple((name, "yes" if works else "NO") for name, works in findings["commands"].items()),
    )
    return checks, commands
