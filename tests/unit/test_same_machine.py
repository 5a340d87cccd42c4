"""What is said when a profile's machine is not this one, and what a machine's state says. `simulate` and `plan` do not ask."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from calibration.rounds import environment as states
from calibration.rounds.environment import clocks_text, core_clocks_hz, machine_state, parse_ticks, stolen_share
from parsim.execute.processes.machine import describe_environment, is_measured, profile_differences
from parsim.hardware.compose import load_profile
from parsim.hardware.profile import DeviceTypeEntry, Profile
from parsim.hardware.records import ComponentPoint
from tests.unit.test_profile import minimal

HERE: dict[str, Any] = {"processor": "AMD EPYC, 3rd", "cores": 2, "versions": {"torch": "2.13.0"}}
POINT = {
    "fingerprint": "f",
    "model": "m",
    "component": "c",
    "phase": "forward",
    "samples": 4,
    "device_type": "toy",
    "precision": "fp32",
    "seconds": 1e-3,
    "spread": 0.1,
    "repeats": 9,
    "source": "made up",
}


def measured_on(machine: str, torch: str = "2.13.0") -> Profile:
    profile = Profile.model_validate(minimal())
    provenance = profile.provenance.model_copy(update={"machine": machine, "versions": {"torch": torch}})
    compute = profile.compute.model_copy(update={"components": [ComponentPoint.model_validate(POINT)]})
    return profile.model_copy(update={"provenance": provenance, "compute": compute})


def on_gpus(profile: Profile, name: str) -> Profile:
    entry: DeviceTypeEntry = profile.device_types["toy"].model_copy(update={"kind": "cuda"})
    devices = [device.model_copy(update={"type": name}) for device in profile.devices]
    return profile.model_copy(update={"device_types": {name: entry}, "devices": devices})


def test_nothing_is_said_of_the_same_machine_or_of_published_profiles() -> None:
    assert profile_differences(measured_on("AMD EPYC, 3rd, 2 cores, Linux 6.1 x86_64"), HERE) == ()
    published = load_profile("dgx1-v100-32gb")
    assert not is_measured(published)
    assert profile_differences(published, HERE, []) == ()


@pytest.mark.parametrize(
    ("machine", "torch", "words"),
    [
        (
            "Intel Xeon, 2 cores, Linux",
            "2.13.0",
            ("measured on Intel Xeon", "this machine has AMD EPYC, 3rd"),
        ),
        ("AMD EPYC, 3rd, 64 cores, Linux", "2.13.0", ("measured with 64 cores", "this machine has 2", "calibrate again")),
        ("AMD EPYC, 3rd, 2 cores, Linux", "2.11.0", ("torch 2.11.0", "here is 2.13.0", "calibrate again")),
        ("by hand", "2.13.0", ("measured on by hand",)),
    ],
)
def test_another_processor_core_count_or_torch_is_said_with_both_values(
    machine: str, torch: str, words: tuple[str, ...]
) -> None:
    (warning,) = profile_differences(measured_on(machine, torch), HERE)
    assert all(word in warning for word in words), warning


def test_gpus_count_by_name_and_the_processor_beside_them_does_not() -> None:
    profile = on_gpus(measured_on("Intel Xeon, 64 cores, Linux"), "Tesla V100")
    assert profile_differences(profile, HERE, ["Tesla V100", "Tesla V100"]) == ()
    assert profile_differences(profile, HERE, None) == ()
    (warning,) = profile_differences(profile, HERE, ["A100"])
    assert "measured on Tesla V100, this machine has A100" in warning
    (none,) = profile_differences(profile, HERE, [])
    assert "this machine has no GPU" in none


# --- the state of a machine -------------------------------------------------------------------------------------------


def test_this_machine_tells_plain_json_without_host_user_or_path() -> None:
    state = machine_state()
    text = json.dumps(state)
    assert os.uname().nodename not in text
    assert "/" not in text
    if Path("/proc/stat").is_file():
        assert state["ticks"]["user"] > 0
    if Path("/proc/cpuinfo").is_file() and "core_hz" in state:
        assert len(state["core_hz"]) == describe_environment()["cores"]
        assert all(1e8 < clock < 1e10 for clock in state["core_hz"].values())


def test_clocks_and_governors_of_a_machine_that_tells(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for core, khz in enumerate((1_500_000, 3_000_000)):
        folder = tmp_path / f"cpu{core}" / "cpufreq"
        folder.mkdir(parents=True)
        (folder / "scaling_cur_freq").write_text(f"{khz}\n")
        (folder / "scaling_governor").write_text("performance\n")
    monkeypatch.setattr(states, "CPUS", tmp_path)
    state = machine_state()
    assert state["core_hz"] == {"0": 1.5e9, "1": 3e9}
    assert clocks_text(state) == "clocks 1.50 to 3.00 GHz, governor performance"
    monkeypatch.setattr(states, "CPUS", tmp_path / "none")
    assert core_clocks_hz("model name\t: x\ncpu MHz\t\t: 2450.000\ncpu MHz\t\t: 2000.5\n") == {"0": 2.45e9, "1": 2.0005e9}
    assert clocks_text({}) == "clock unknown, governor unknown"


@given(st.lists(st.integers(0, 10**9), min_size=8, max_size=8), st.lists(st.integers(0, 10**6), min_size=8, max_size=8))
def test_stolen_share_is_of_the_ticks_that_passed(start: list[int], passed: list[int]) -> None:
    def state(ticks: list[int]) -> dict[str, Any]:
        return {"ticks": parse_ticks("cpu  " + " ".join(map(str, ticks)) + " 0 0\ncpu0 1 2 3\n")}

    end = [before + more for before, more in zip(start, passed, strict=True)]
    share = stolen_share(state(start), state(end))
    assert share == (passed[-1] / sum(passed) if sum(passed) else None)
    assert stolen_share({}, {}) is None


@pytest.mark.parametrize(("then", "now"), [(True, False), (False, True), (True, True), (None, True)])
def test_priority_of_communication_is_compared(then: bool | None, now: bool) -> None:
    profile = measured_on("AMD EPYC, 3rd, 2 cores, Linux 6.1 x86_64")
    environment = {} if then is None else {"communication_priority": then}
    profile = profile.model_copy(update={"provenance": profile.provenance.model_copy(update={"environment": environment})})
    found = profile_differences(profile, {**HERE, "communication_priority": now})
    assert len(found) == (then is not None and then != now)
    if found:
        assert f"communication will be {'faster' if now else 'slower'} than predicted" in found[0]
