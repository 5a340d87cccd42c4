"""The layout of a profile's JSON: short things on one line, and long lists of like records as tables.

A list of records under one of TABLE_KEYS is written as {"constants": {...}, "columns": [...], "rows": [[...], ...]}: fields
that all records share once, the others as rows. Reading takes tables and plain lists of records alike.
"""

from __future__ import annotations

import json
from typing import Any

from parsim.errors import ProfileError
from parsim.files import ESCAPED_CONTROL, NO_CONTROL, control_character_in, parse_json

TABLE_KEYS = ("points", "components", "optimizers", "operator_points")
TABLE_MIN_ROWS = 8
LINE_LENGTH = 200


def to_text(document: dict[str, Any]) -> str:
    """JSON text that ends with a newline; `from_text` reads it back to the same document."""
    return _render(_encode(document), 0) + "\n"


def from_text(text: str, where: str, what: str = "profile") -> Any:
    """Raises ProfileError for text that is not JSON, or a table whose rows do not fit its columns.

    Errors name the document as `what` and `where`.
    """
    try:
        document = parse_json(text)
    except json.JSONDecodeError as error:
        raise ProfileError(
            f"{what} {where} is not JSON: {error.msg} at line {error.lineno} column {error.colno}; fix it or calibrate again"
        ) from error
    return _decode(document, where, ())


def check_texts(text: str, document: Any, where: str, what: str = "profile") -> None:
    """Raise ProfileError for a name or text of the document, read from `text`, that holds a control character."""
    if ESCAPED_CONTROL.search(text) and (found := control_character_in(document)):
        raise ProfileError(f"{what} {where} is broken: {found}: {NO_CONTROL}")


def _encode(node: Any) -> Any:
    if isinstance(node, dict):
        return {key: _table(value) if key in TABLE_KEYS else _encode(value) for key, value in node.items()}
    return [_encode(value) for value in node] if isinstance(node, list) else node


def _table(records: Any) -> Any:
    if not isinstance(records, list) or len(records) < TABLE_MIN_ROWS:
        return _encode(records)
    if not all(isinstance(record, dict) and list(record) == list(records[0]) for record in records):
        return _encode(records)
    names = list(records[0])
    constant = [name for name in names if len({json.dumps(record[name]) for record in records}) == 1]
    columns = [name for name in names if name not in constant]
    return {
        "constants": {name: records[0][name] for name in constant},
        "columns": columns,
        "rows": [[record[name] for name in columns] for record in records],
    }


def _decode(node: Any, where: str, path: tuple[str, ...]) -> Any:
    if isinstance(node, list):
        return [_decode(value, where, (*path, str(number))) for number, value in enumerate(node)]
    if not isinstance(node, dict):
        return node
    if path and path[-1] in TABLE_KEYS and "rows" in node:
        return _records(node, where, path)
    return {key: _decode(value, where, (*path, key)) for key, value in node.items()}


def _records(table: dict[str, Any], where: str, path: tuple[str, ...]) -> list[dict[str, Any]]:
    columns, rows, constants = table.get("columns"), table["rows"], table.get("constants", {})
    place = ".".join(path)
    if not isinstance(columns, list) or not isinstance(rows, list) or not isinstance(constants, dict):
        raise ProfileError(f"profile {where} is broken: {place} needs the lists columns and rows; fix it or calibrate again")
    records: list[dict[str, Any]] = []
    for number, row in enumerate(rows):
        if not isinstance(row, list) or len(row) != len(columns):
            raise ProfileError(
                f"profile {where} is broken: {place}.rows.{number} must have {len(columns)} entries "
                f"({', '.join(map(str, columns))}), got {row!r}; fix it or calibrate again"
            )
        records.append({**constants, **dict(zip(columns, row, strict=True))})
    return records


def _render(node: Any, depth: int) -> str:
    inline = json.dumps(node, ensure_ascii=False)
    if len(inline) <= LINE_LENGTH - depth or not isinstance(node, dict | list) or not node:
        return inline
    pad, end = " " * (depth + 1), " " * depth
    if isinstance(node, dict):
        inner = [f"{pad}{json.dumps(key)}: {_render(value, depth + 1)}" for key, value in node.items()]
        return "{\n" + ",\n".join(inner) + "\n" + end + "}"
    return "[\n" + ",\n".join(pad + _render(value, depth + 1) for value in node) + "\n" + end + "]"
