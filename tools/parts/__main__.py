"""Fit published timings and write the parts.

    python -m tools.parts --data FOLDER --out hardware_profiles/parts

FOLDER holds gemm.csv, attention.csv, elementwise.csv, collectives_more.csv, peaks.csv, power.csv, power_limit_training.csv and
sources.csv. The tables are not part of this repository; the parts hold what was fitted to them, with sources and errors.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from parsim.files import write_text_atomically
from parsim.hardware.parts import GpuPart, LinkPart, Network
from parsim.hardware.records import to_text
from tools.parts.catalog import GPUS
from tools.parts.gpus import all_fits
from tools.parts.links import link_parts, network_parts
from tools.parts.part_files import part_of, read_sources, v100_parts


def main() -> None:
    """Write every part, and print the held-out errors."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--only", choices=("gpus", "links"))
    chosen = parser.parse_args()
    read_sources(chosen.data)
    if chosen.only != "gpus":
        for name, document in link_parts(chosen.data).items():
            _write(chosen.out / "links" / f"{name}.json", document, LinkPart)
        for name, document in network_parts().items():
            _write(chosen.out.parent / "networks" / f"{name}.json", document, Network)
    if chosen.only != "links":
        fits = all_fits(chosen.data)
        documents = {gpu.name: part_of(gpu, chosen.data, fits[gpu.name]) for gpu in GPUS} | v100_parts(chosen.data)
        for name, document in documents.items():
            _write(chosen.out / "gpus" / f"{name}.json", document, GpuPart)


def _write(path: Path, document: dict[str, Any], record: type[GpuPart] | type[LinkPart] | type[Network]) -> None:
    record.model_validate(document)
    path.parent.mkdir(parents=True, exist_ok=True)
    write_text_atomically(path, to_text(document))
    held = [
        f"  {fit['kind']} {fit['phase']} {fit['precisions'][0]} without {name}: "
        f"{error['rows']} rows, median {error['median']:.1%}, "
        f"p90 {error['p90']:.1%}, bias {error['bias']:+.1%}"
        for fit in document.get("fits", [])
        for name, error in fit.get("held_out", {}).items()
    ]
    print("\n".join([path.stem, *held]))


if __name__ == "__main__":
    main()
