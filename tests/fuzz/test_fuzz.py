"""A share of `make fuzz`: other cases in every run would fail at random, so the seed is fixed."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("torch")

from tests.fuzz.fuzzing import Reader, fuzz, readers

CASES = 40


@pytest.fixture(scope="module")
def every(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[Reader]]:
    folder = tmp_path_factory.mktemp("fuzz")
    return folder, readers(folder)


def test_whole_files_are_read(every: tuple[Path, list[Reader]]) -> None:
    folder, found = every
    for reader in found:
        path = folder / "cases" / reader.file
        path.write_bytes(reader.sample)
        assert reader.read(path) is not None, reader.name


def test_damaged_files_are_read_or_refused(every: tuple[Path, list[Reader]]) -> None:
    folder, found = every
    for reader in found:
        assert fuzz(reader, folder / "cases", CASES, seed=1)[1] == []
