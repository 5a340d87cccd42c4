"""cluster = "this-machine": which kept profile serves a question, and when one is made."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from parsim.app import load as this_machine
from parsim.app.config import Question
from parsim.app.question import question_of
from parsim.errors import ConfigError
from parsim.execute.processes.machine import describe_environment
from parsim.files import HOME_VARIABLE
from parsim.hardware.compose import load_profile
from parsim.hardware.profile import Profile, save_profile
from parsim.model.load import load_model
from parsim.model.model import Model
from parsim.model.spec import ModelSpec

Kept = Callable[..., Path]


def asked(model: str = "mlp", batch: int = 16, **settings: object) -> Question:
    return question_of(model, cluster="this-machine", global_batch=batch, settings=settings)


def measured_profile(model: Model, samples: tuple[int, ...], optimizer: str) -> Profile:
    """A profile of this machine as a calibration writes it, with these points alone."""
    environment = describe_environment()
    text = load_profile("dgx1-v100-32gb").model_dump_json().replace('"gpu', '"cpu')
    base = json.loads(text)
    kind = next(iter(base["device_types"]))
    base["device_types"][kind]["kind"] = "cpu"
    point = {"device_type": kind, "seconds": 0.001, "spread": 0.0, "repeats": 3, "source": next(iter(base["sources"]))}
    base["compute"]["components"] = [
        {"fingerprint": component.fingerprint, "model": model.name, "component": component.name, "phase": phase}
        | {"samples": count, "precision": "fp32", **point}
        for component in model.components
        for phase in ("forward", "backward")
        for count in samples
    ]
    base["compute"]["optimizers"] = [{"optimizer": optimizer, "elements": 10, "tensors": 1, **point}]
    base["provenance"] |= {
        "machine": f"{environment['processor']}, {environment['cores']} cores, Linux",
        "versions": environment["versions"],
        "environment": {"communication_priority": environment["communication_priority"]},
    }
    return Profile.model_validate(base)


@pytest.fixture
def kept(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Kept:
    """Keep a profile in the cache; calibrating is an error that says so."""
    monkeypatch.setenv(HOME_VARIABLE, str(tmp_path))
    monkeypatch.setattr(this_machine, "device_here", lambda: "cpu")

    def not_found(*arguments: object, **options: object) -> None:
        raise ConfigError("calibrates")

    monkeypatch.setattr(this_machine, "calibration_request", not_found)

    def keep(
        name: str = "a.json", samples: tuple[int, ...] = (1, 16), optimizer: str = "sgd_momentum", age_s: float = 0.0
    ) -> Path:
        path = this_machine.profiles_folder() / name
        path.parent.mkdir(parents=True, exist_ok=True)
        save_profile(measured_profile(load_model(ModelSpec(name="mlp")), samples, optimizer), path)
        now = path.stat().st_mtime
        os.utime(path, (now - age_s, now - age_s))
        return path

    return keep


def found(config: Question) -> Path:
    return Path(this_machine.on_this_machine(config).cluster.profile)


def test_the_newest_profile_that_serves_is_taken(kept: Kept) -> None:
    kept("older.json", age_s=100.0)
    newest = kept("newer.json")
    kept("without-the-batch.json", samples=(1, 8), age_s=-100.0)
    assert found(asked()) == newest


@pytest.mark.parametrize(
    "config",
    [
        asked(batch=32),
        asked(model="resnet_small"),
        asked(**{"training.optimizer": "adam"}),
        asked(**{"cluster.devices": 9}),
        asked(**{"model.args": {"width": 48}}),
    ],
    ids=["batch", "model", "optimizer", "devices", "arguments"],
)
def test_what_was_not_measured_is_calibrated(kept: Kept, config: Question) -> None:
    kept()
    with pytest.raises(ConfigError, match="calibrates"):
        found(config)


def test_a_profile_of_another_machine_or_torch_does_not_serve(kept: Kept) -> None:
    path = kept()
    assert found(asked()) == path
    for change in ({"machine": "Another Processor, 2 cores, Linux"}, {"versions": {"torch": "1.0"}}):
        profile = load_profile(str(path))
        save_profile(profile.model_copy(update={"provenance": profile.provenance.model_copy(update=change)}), path)
        with pytest.raises(ConfigError, match="calibrates"):
            found(asked())
        kept()


def test_the_profile_made_for_a_question_serves_it_whatever_was_left_out(kept: Kept) -> None:
    """A calibration leaves out points that contradict others; the question must not be calibrated again each time."""
    path = kept(this_machine.cache_path(asked()).name, samples=(4,))
    assert found(asked()) == path


def test_a_broken_profile_is_named_and_passed_over(kept: Kept, capsys: pytest.CaptureFixture[str]) -> None:
    path = kept(age_s=50.0)
    (path.parent / "broken.json").write_text("{")
    assert found(asked()) == path
    assert "warning: " in (said := capsys.readouterr().err)
    assert "broken.json" in said


def test_other_profiles_stay(kept: Kept) -> None:
    config = question_of("mlp", cluster="dgx2-v100", global_batch=16)
    assert this_machine.on_this_machine(config) is config


def test_several_nodes_are_refused(kept: Kept) -> None:
    with pytest.raises(ConfigError, match="this-machine is one machine"):
        found(asked(**{"cluster.nodes": 2, "cluster.network": "infiniband-100g"}))


def test_a_model_given_as_a_value_cannot_be_calibrated(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv(HOME_VARIABLE, str(tmp_path))
    with pytest.raises(ConfigError, match="was given as a value, and no profile in"):
        this_machine.on_this_machine(asked().sourced(model=load_model(ModelSpec(name="mlp"))))


def test_the_cache_is_where_the_documentation_says(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PARSIM_HOME", str(tmp_path / "own"))
    assert this_machine.profiles_folder() == tmp_path / "own" / "profiles"
    monkeypatch.delenv("PARSIM_HOME")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    assert this_machine.profiles_folder() == tmp_path / "cache" / "parsim" / "profiles"
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert this_machine.profiles_folder() == Path.home() / ".cache" / "parsim" / "profiles"
