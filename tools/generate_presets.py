"""Write every preset: `python tools/generate_presets.py [STEM ...]`. Needs torch; computes nothing but shapes."""

from __future__ import annotations

import gzip
import json
import sys
from dataclasses import replace
from pathlib import Path

from parsim.model.catalogue.zoo import PRESETS, SUFFIX
from parsim.model.load import trace_spec
from parsim.model.model import GRANULARITIES
from parsim.model.spec import ModelSpec


def generate(stem: str, granularity: str) -> str:
    """One line of a preset file: a Model as compact JSON."""
    name, args = PRESETS[stem]
    model = replace(trace_spec(ModelSpec(name=name, args=tuple(args.items())), granularity), loss="")  # the zoo's row has it
    return json.dumps(json.loads(model.to_json()), separators=(",", ":"))


def main(stems: list[str]) -> None:
    """Write the given presets, or all, into `parsim/model/catalogue/presets`."""
    for stem in stems or list(PRESETS):
        path = Path(__file__).parent.parent / "parsim/model/catalogue/presets" / f"{stem}{SUFFIX}"
        text = "".join(f"{generate(stem, granularity)}\n" for granularity in GRANULARITIES)
        path.write_bytes(gzip.compress(text.encode(), mtime=0))
        print(f"{path.name}: {path.stat().st_size} bytes")


if __name__ == "__main__":
    main(sys.argv[1:])
