"""The V100's forms as parts: the numbers and fits of the shipped profiles of machines that have them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from calibration.parts.catalog import V100_FORMS, ZEUS_ROWS
from calibration.parts.gpus import HALF_PRECISIONS
from calibration.parts.part_files import zeus_watts
from parsim.hardware.compose import load_profile
from parsim.hardware.profile import Profile

UNITS = "github sitar-lab/NeuSight scripts/asplos/data/device_configs/Tesla_V100-PCIE-32GB.json @6945927d9afc, Num_Sm"
CHIP = ("peak_flop_per_s", "memory_bandwidth_bytes_per_s")


def v100_parts(folder: Path) -> dict[str, dict[str, Any]]:
    """The part of every form, by name."""
    found: dict[str, dict[str, Any]] = {}
    for name, (profile_name, link, description) in V100_FORMS.items():
        profile = load_profile(profile_name)
        found[name] = _part(name, profile, link, description)
        if name in ZEUS_ROWS:
            watts = zeus_watts(folder, *ZEUS_ROWS[name], found[name]["sources"])
            found[name]["busy_power_w"] = {"value": watts, "source": "busy"}
    wide = {**found["v100-pcie-16gb"], "name": "v100-pcie-32gb", "description": "NVIDIA V100-PCIe, 32 GB."}
    wide["sources"] = {
        **wide["sources"],
        "memory-32gb": {"kind": "datasheet", "text": "github cli99/llm-analysis v100-pcie-32gb.json @d841e40aec8c; secondary"},
    }
    wide["memory_bytes"] = {"value": float(32 * 2**30), "source": "memory-32gb"}
    return {**found, "v100-pcie-32gb": wide}


def _part(name: str, profile: Profile, link: str, description: str) -> dict[str, Any]:
    (entry,) = profile.device_types.values()
    fits: dict[tuple[str, str, str], dict[str, Any]] = {}
    for fit in profile.compute.operator_fits:
        if fit.precision not in ("fp32", "amp_fp16"):
            continue
        fits[fit.kind, fit.phase, fit.precision] = {
            "kind": fit.kind,
            "phase": fit.phase,
            "form": fit.form,
            "precisions": [fit.precision],
            "coefficients": {key: value for key, value in fit.coefficients.items() if key not in CHIP},
            "relative_sigma": fit.relative_sigma,
            "min_flop": fit.min_flop,
            "max_flop": fit.max_flop,
            "points": fit.points,
            "source": fit.source,
        }
    efficiencies = [
        {
            "precisions": [found.precision],
            "factor": found.factor,
            "spread": found.spread,
            "points": found.points,
            "source": found.source,
        }
        for found in profile.compute.efficiencies
        if found.precision in ("fp32", *HALF_PRECISIONS)
    ]
    numbers = {
        "memory_bytes": entry.memory_bytes.model_dump(),
        "memory_bandwidth_bytes_per_s": entry.memory_bandwidth_bytes_per_s.model_dump(),
        "context_bytes": entry.context_bytes.model_dump(),
        "peak_flop_per_s": {
            key: number.model_dump() for key, number in entry.peak_flop_per_s.items() if key in ("fp32", "fp64", "amp_fp16")
        },
    }
    used = {value["source"] for key, value in numbers.items() if key != "peak_flop_per_s"}
    used |= {number["source"] for number in numbers["peak_flop_per_s"].values()}
    used |= {fit["source"] for fit in fits.values()} | {found["source"] for found in efficiencies}
    sources = {key: profile.sources[key].model_dump() for key in sorted(used)}
    sources["units"] = {"kind": "datasheet", "text": UNITS}
    return {
        "schema_version": 1,
        "name": name,
        "description": description,
        "sources": sources,
        "kind": entry.kind,
        **numbers,
        "multiprocessors": {"value": 80.0, "source": "units"},
        "link": link,
        "host_link": "pcie-3",
        "gpus_per_node": 16 if link == "nvswitch-2" else 8,
        "fits": list(fits.values()),
        "efficiencies": efficiencies,
    }
