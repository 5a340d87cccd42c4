"""A share of `make fuzz`: other cases in every run would fail at random, so the seed is fixed."""

from __future__ import annotations

import argparse
from pathlib import Path

import pytest

pytest.importorskip("torch")

from parsim.errors import ConfigError
from tests.fuzz import fuzzing
from tests.fuzz.fuzzing import Reader, failure_of, fuzz, play, readers, recorded, table
from tests.quick import some_quick

CASES = 40
OF_OTHER_TOOLS = ("nccl.txt", "trace.json", "topo.txt", "lstopo.xml", "nsys.sqlite", "deepspeed.json")


@pytest.fixture(scope="module")
def every(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[Reader]]:
    folder = tmp_path_factory.mktemp("fuzz")
    return folder, readers(folder)


def test_whole_files_are_read(every: tuple[Path, list[Reader]]) -> None:
    folder, found = every
    for reader in found:
        path = folder / "cases" / reader.file
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(reader.sample)
        assert reader.read(path) is not None, reader.name


@pytest.mark.parametrize("planned", some_quick((False, True), False))
def test_damaged_files_are_read_or_refused(every: tuple[Path, list[Reader]], planned: bool) -> None:
    folder, found = every
    for reader in found:
        if reader.is_planned == planned:
            assert fuzz(reader, folder / "cases", CASES, seed=1)[1] == {}


@pytest.mark.parametrize(
    "text",
    [
        "        1024   256   float  sum  -1 " + "1.0 " * 50_000,
        "1 " * 200_000,
        "# Rank 0 " * 50_000,
        "GPU0 " * 50_000,
        "[" * 100_000,
        '{"traceEvents": ' + "[" * 5_000 + "]" * 5_000 + "}",
        '{"train_batch_size": ' + "9" * 5_000 + "}",
        "\x1b[" * 100_000,
    ],
    ids=lambda text: text.strip()[:12],
)
def test_files_of_other_tools_that_are_made_to_be_slow_are_not(every: tuple[Path, list[Reader]], text: str) -> None:
    folder, found = every
    for reader in found:
        if reader.file in OF_OTHER_TOOLS:
            assert failure_of(reader, folder / "cases", text.encode()) == "", reader.name


def test_the_record_goes_on_where_it_ends_and_forgets_what_was_mended(tmp_path: Path) -> None:
    broken = True

    def read(path: Path) -> object:
        if path.read_bytes() != b"{}" and broken:
            raise KeyError("a")
        raise ConfigError("no")

    reader = Reader("kind", b"{}", "file", read)
    asked = argparse.Namespace(record=tmp_path / "record", seed=3, count=5, seconds=100.0)
    assert play([reader], tmp_path, asked)["kind"].tried == 5
    before = recorded(asked.record)["kind"]
    assert before.failing
    assert set(before.failing) <= set(range(5))
    asked.count, broken = 8, False
    play([reader], tmp_path, asked)
    after = recorded(asked.record)["kind"]
    assert (after.tried, after.failing) == (8, [])
    assert "| `kind` | 8 | 0 |" in table({"kind": after})
    assert recorded(asked.record, seed=4) == {}


def test_a_reader_that_computes_for_long_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fuzzing, "LIMIT_S", 0.05)

    def read(path: Path) -> object:
        while True:
            path.name.encode()

    assert fuzzing.failure_of(Reader("kind", b"{}", "file", read), tmp_path, b"").startswith("took longer than 0.05 s")
