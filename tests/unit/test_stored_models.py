"""Models kept by content: the same answer, from any path, and nothing damaged or outdated is ever taken."""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest

from parsim.errors import ModelError
from parsim.model import ModelSpec, load_model
from parsim.model import load as stored
from parsim.model.component import Component, Parameter
from parsim.model.model import Model
from tests.models import chain_model


def small(name: str = "m") -> Model:
    component = Component(name="c", inputs=(), outputs=(), parameters=(Parameter(name="w", elements=3),))
    return Model(name=name, granularity="block", components=(component,), values=(), inputs=(), outputs=(), loss="mse")


@pytest.fixture(autouse=True)
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv(stored.SWITCH, str(tmp_path / "models"))
    return tmp_path / "models"


def test_round_trip(place: Path) -> None:
    key = stored.key_of({"config": "{}"})
    assert stored.read(key) is None
    stored.write(key, small())
    assert stored.read(key) == small()
    assert [path.suffix for path in place.iterdir()] == [".model"]


def test_keys_follow_the_content_and_the_versions(monkeypatch: pytest.MonkeyPatch) -> None:
    keys = {stored.key_of({"config": text, "granularity": kind}) for text in ("{}", "{ }") for kind in ("block", "layer")}
    monkeypatch.setattr(stored, "_versions", lambda: {"parsim": "another"})
    assert len({*keys, stored.key_of({"config": "{}", "granularity": "block"})}) == 5


@pytest.mark.parametrize("damage", ["cut", "flipped", "empty", "text", "folder"])
def test_damage_is_traced_anew(place: Path, damage: str) -> None:
    key = stored.key_of({})
    stored.write(key, small())
    path = place / f"{key}.model"
    whole = path.read_bytes()
    if damage == "folder":
        path.unlink()
        path.mkdir()
    else:
        flipped = bytes([*whole[:-1], whole[-1] ^ 1])
        path.write_bytes({"cut": whole[:-5], "flipped": flipped, "empty": b"", "text": b"\xff\xfe no model"}[damage])
    assert stored.read(key) is None


def test_writers_at_once_leave_one_whole_file(place: Path) -> None:
    key = stored.key_of({})
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda _: stored.write(key, small()), range(40)))
    assert stored.read(key) == small()
    assert [path.name for path in place.iterdir()] == [f"{key}.model"]


def test_the_oldest_go_first(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stored, "MOST_FILES", 3)
    keys = [stored.key_of({"n": number}) for number in range(5)]
    for number, key in enumerate(keys):
        stored.write(key, small())
        if number < 4:
            os.utime(place / f"{key}.model", (number, number))
    assert len(list(place.glob("*.model"))) == 3
    assert stored.read(keys[0]) is None
    assert stored.read(keys[4]) is not None


@pytest.mark.parametrize("off", ["off", "0", "no"])
def test_the_switch(monkeypatch: pytest.MonkeyPatch, off: str) -> None:
    monkeypatch.setenv(stored.SWITCH, off)
    assert stored.folder() is None
    stored.write("key", small())
    assert stored.read("key") is None


def test_folders(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv(stored.SWITCH)
    monkeypatch.delenv("PARSIM_HOME", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert stored.folder() == tmp_path / "parsim" / "models"
    monkeypatch.setenv("PARSIM_HOME", str(tmp_path / "home"))
    assert stored.folder() == tmp_path / "home" / "models"


def test_a_folder_that_cannot_be_written_is_no_error(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv(stored.SWITCH, str(tmp_path / "file" / "below"))
    stored.write("key", small())
    assert stored.read("key") is None


def test_a_model_whose_parts_disagree_is_refused_before_it_is_planned() -> None:
    """Found by damaging saved models: each was read well, and crashed a search."""
    whole = chain_model((1e6, 2e6))
    assert Model.from_json(whole.to_json()) == whole
    first = next(value for value in whole.values if value.producer is not None)
    for producer in (None, "nobody", whole.components[1].name):
        values = tuple(replace(value, producer=producer) if value == first else value for value in whole.values)
        with pytest.raises(ModelError, match=r"do not agree|before"):
            replace(whole, values=values)
    text = whole.to_json().replace("1000000.0", "1e308")
    assert text != whole.to_json()
    with pytest.raises(ModelError, match=r"forward_flop: expected a finite number, got 1e\+308"):
        Model.from_json(text)


def test_a_model_without_its_shards_is_the_same_otherwise(place: Path) -> None:
    """Plans without tensor parallelism need none, and a file that has them serves as well."""
    spec = ModelSpec(name="mlp", args=(("width", 32),))
    bare = load_model(spec, sharded=False)
    assert len([*place.iterdir()]) == 1
    whole = load_model(spec)
    assert any(component.shardings for component in whole.components)
    assert bare == replace(whole, components=tuple(replace(each, shardings=()) for each in whole.components))
    assert len([*place.iterdir()]) == 2
