"""The packages that `make setup` installs, as a CycloneDX 1.5 document: `python -m tools.sbom > parsim.cdx.json`.

Read from requirements.lock, with the sha256 of every wheel that it allows, and from .ci/install, which pins torch; no network
is asked, so one lock always gives one document.
"""

from __future__ import annotations

import json
import re
import tomllib
import uuid
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
PIN = re.compile(r"^(?P<name>[A-Za-z0-9._-]+)(\[[^]]*\])?==(?P<version>[^\s;\\]+)", re.MULTILINE)
DIGEST = re.compile(r"--hash=sha256:([0-9a-f]{64})")


def component(name: str, version: str, digests: list[str]) -> dict[str, Any]:
    """One package. `digests`: of its wheels; none where the build depends on the machine."""
    purl = f"pkg:pypi/{re.sub(r'[-_.]+', '-', name).lower()}@{version}"
    found: dict[str, Any] = {"type": "library", "bom-ref": purl, "name": name, "version": version, "purl": purl}
    if digests:
        wheels = [{"alg": "SHA-256", "content": digest} for digest in digests]
        page = f"https://pypi.org/project/{name}/{version}/"
        found["externalReferences"] = [{"type": "distribution", "url": page, "hashes": wheels}]
    return found


def document(lock: str, install: str, project: str) -> dict[str, Any]:
    """The texts of requirements.lock, .ci/install and pyproject.toml as one document."""
    pins = list(PIN.finditer(lock))
    ends = [pin.start() for pin in pins[1:]] + [len(lock)]
    parts = [
        component(pin["name"], pin["version"], DIGEST.findall(lock[pin.end() : end]))
        for pin, end in zip(pins, ends, strict=True)
    ]
    parts += [component("torch", version, []) for version in re.findall(r"install torch==(\S+)", install)]
    own = tomllib.loads(project)["project"]
    serial = uuid.uuid5(uuid.NAMESPACE_URL, lock + install + project)
    return {
        "bomFormat": "CycloneDX",
        "specVersion": "1.5",
        "serialNumber": f"urn:uuid:{serial}",
        "version": 1,
        "metadata": {
            "component": {
                "type": "application",
                "name": own["name"],
                "version": own["version"],
                "licenses": [{"license": {"id": own["license"]}}],
            }
        },
        "components": sorted(parts, key=lambda part: str(part["purl"])),
    }


if __name__ == "__main__":
    texts = [(ROOT / name).read_text(encoding="utf-8") for name in ("requirements.lock", ".ci/install", "pyproject.toml")]
    print(json.dumps(document(*texts), indent=1))
