"""The tables of published measurements, CSV files of one folder."""

from __future__ import annotations

import csv
from pathlib import Path

from parsim.errors import DataError


def read_table(data_dir: Path, name: str) -> list[dict[str, str]]:
    """The rows of a table, by column.

    Raises:
        DataError: the folder holds no such file.
    """
    path = data_dir / name
    if not path.is_file():
        raise DataError(f"no {path}; --data must name the folder that holds {name}")
    with path.open(newline="") as file:
        return list(csv.DictReader(file))
