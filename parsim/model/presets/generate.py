"""Write every preset: `python -m parsim.model.presets.generate [STEM ...]`. Needs torch; computes nothing but shapes."""

from __future__ import annotations

import json
import sys
from pathlib import Path

from parsim.model.model import Model
from parsim.model.presets import GRANULARITY, PRESETS
from parsim.model.spec import ModelSpec, trace_spec


def generate(stem: str) -> str:
    """The text of one preset file: a Model as compact JSON."""
    name, args = PRESETS[stem]
    model: Model = trace_spec(ModelSpec(name=name, args=tuple(args.items())), GRANULARITY)
    return json.dumps(json.loads(model.to_json()), separators=(",", ":")) + "\n"


def main(stems: list[str]) -> None:
    """Write the given presets, or all, beside this file."""
    for stem in stems or list(PRESETS):
        path = Path(__file__).parent / f"{stem}.json"
        path.write_text(generate(stem))
        print(f"{path.name}: {path.stat().st_size} bytes")


if __name__ == "__main__":
    main(sys.argv[1:])
