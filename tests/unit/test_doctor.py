"""What `parsim doctor` says of machines that are not this one: every command's line by what that command needs."""

from __future__ import annotations

from dataclasses import asdict, replace

import pytest

from parsim.app.doctor import Found, Gpu, checks_of, commands_of, examine, sentence, tables
from parsim.cli import COMMANDS
from parsim.units import GIB

H100 = Gpu(name="NVIDIA H100", free_bytes=79 * GIB, total_bytes=80 * GIB)
BARE = Found(cores=4, memory_bytes=16 * GIB, packages=("numba", "plotly", "cvxpy", "mcp"))
CPU_ONLY = replace(BARE, torch="2.13.0+cpu", backends=("gloo",))
NO_GPU = replace(BARE, torch="2.11.0+cu130", cuda_build="13.0", backends=("gloo", "nccl"))
GPUS = replace(NO_GPU, gpus=(H100, H100))

ALWAYS = "plan, check, simulate, sweep, compare, explore, cost, report, coverage, history, profile, models, import"
ON_CPU = ("plan any other model", "calibrate --device cpu", "run and validate on CPU processes", "demo")
ON_GPU = ("calibrate --device cuda", "run and validate on GPUs")


def works(found: Found) -> dict[str, bool]:
    return {check.name: check.ok for check in commands_of(found)}


@pytest.mark.parametrize(
    ("found", "on_cpu", "on_gpu", "why"),
    [
        (BARE, False, False, "torch is not installed"),
        (CPU_ONLY, True, False, "built without CUDA"),
        (NO_GPU, True, False, "sees no GPU"),
        (replace(NO_GPU, gpu_error="the driver is too old"), True, False, "driver is too old"),
        (replace(GPUS, backends=("gloo",)), True, False, "no NCCL"),
        (replace(GPUS, gpus=(H100, replace(H100, free_bytes=GIB))), True, False, "1 of 2 GPUs have less than 4 GiB free"),
        (GPUS, True, True, "--nproc up to 2"),
        (replace(GPUS, gpus=(replace(H100, free_bytes=40 * GIB),)), True, True, "50.0% of the memory"),
    ],
)
def test_a_command_works_where_what_it_needs_is(found: Found, on_cpu: bool, on_gpu: bool, why: str) -> None:
    said = works(found)
    assert said[ALWAYS]
    assert [said[name] for name in ON_CPU] == [on_cpu] * len(ON_CPU)
    assert [said[name] for name in ON_GPU] == [on_gpu] * len(ON_GPU)
    for check in commands_of(found):
        assert check.ok or check.fix, f"{check.name} does not work and nothing says how to get it"
        if check.name in ON_GPU:
            assert why in check.found
    (gpu,) = (check for check in checks_of(found) if check.name == "train on GPUs")
    assert gpu.ok or not on_gpu


def test_every_command_of_doctor_exists_and_every_command_is_named() -> None:
    words = {word for name in works(GPUS) for word in name.replace(",", "").split() if word in COMMANDS or "," in name}
    said = {word for word in words if not {word} & {"on", "CPU", "processes", "GPUs"}}
    assert said == set(COMMANDS) - {"doctor"}


def test_calibration_and_training_on_a_cpu_need_gloo_and_planning_does_not() -> None:
    said = works(replace(CPU_ONLY, backends=()))
    assert said["plan any other model"]
    assert not any(said[name] for name in ON_CPU[1:])


def test_the_demo_needs_memory_and_calibrating_does_not() -> None:
    said = works(replace(CPU_ONLY, memory_bytes=GIB))
    assert not said["demo"]
    assert said["calibrate --device cpu"]


def test_the_tables_show_every_command_of_this_machine() -> None:
    findings = examine()
    _, commands = tables(findings)
    assert [row[0] for row in commands.rows] == [entry["name"] for entry in findings["commands"]]
    assert {row[1] for row in commands.rows} <= {"yes", "NO"}


def test_the_first_sentence_names_each_reason_once() -> None:
    def said(found: Found) -> str:
        return sentence({"commands": [asdict(check) for check in commands_of(found)]})

    assert said(GPUS) == "All of parsim works on this machine."
    assert said(CPU_ONLY) == (
        "parsim works on this machine. What does not: calibrate --device cuda, run and validate on GPUs (torch 2.13.0+cpu was "
        "built without CUDA)."
    )
    assert said(BARE).count("torch is not installed") == 1
    assert said(replace(BARE, numba_error="numba cannot be imported; reinstall it")).startswith("parsim cannot plan on this")
