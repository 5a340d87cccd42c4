"""The bill of materials holds what the lock pins, with its digests, and torch."""

from __future__ import annotations

from pathlib import Path

from tools.sbom import document

ROOT = Path(__file__).resolve().parents[2]


def texts() -> list[str]:
    return [(ROOT / name).read_text() for name in ("requirements.lock", ".ci/install", "pyproject.toml")]


def test_every_pin_is_a_component_with_its_digests() -> None:
    found = document(*texts())
    lock = texts()[0]
    pins = [line for line in lock.splitlines() if "==" in line and not line.startswith("#")]
    assert len(found["components"]) == len(pins) + 1
    hashes = [entry for part in found["components"] for kept in part.get("externalReferences", ()) for entry in kept["hashes"]]
    assert len(hashes) == lock.count("--hash=sha256:")
    bare = [part["name"] for part in found["components"] if "externalReferences" not in part]
    assert bare == ["torch"], "every wheel but that of torch has digests"
    assert document(*texts()) == found


def test_names_are_normalised_and_markers_dropped() -> None:
    lock = f"A_b.c==1.0 ; sys_platform == 'win32' \\\n    --hash=sha256:{'0' * 64}\n"
    (part, _) = document(lock, texts()[1], texts()[2])["components"]
    assert (part["purl"], part["version"]) == ("pkg:pypi/a-b-c@1.0", "1.0")
