"""The GPU that a driver's name means: "NVIDIA H100 80GB HBM3" is the part h100-sxm."""

from __future__ import annotations

import re

from parsim.hardware.parts import GpuPart, load_gpu

PATTERNS: tuple[tuple[str, str], ...] = (
    (r"GB300", "gb300"),
    (r"B300", "b300"),
    (r"GB200", "gb200"),
    (r"B200", "b200"),
    (r"H200", "h200"),
    (r"H800(?!.*PCIe)(?!.*NVL)", "h800-sxm"),
    (r"\bH20\b", "h20"),
    (r"H100.*PCIe", "h100-pcie"),
    (r"H100.*(HBM3|SXM)", "h100-sxm"),
    (r"A100.*PCI.*80", "a100-pcie-80gb"),
    (r"A100.*PCI.*40", "a100-pcie-40gb"),
    (r"A100.*SXM.*80", "a100-sxm-80gb"),
    (r"A100.*SXM.*40", "a100-sxm-40gb"),
    (r"A800.*SXM.*80", "a800-sxm-80gb"),
    (r"V100.*SXM3.*32", "v100-sxm3-32gb"),
    (r"V100.*SXM2.*32", "v100-sxm-32gb"),
    (r"V100.*SXM2.*16", "v100-sxm-16gb"),
    (r"V100.*PCI.*32", "v100-pcie-32gb"),
    (r"V100.*PCI.*16", "v100-pcie-16gb"),
    (r"RTX 4090", "rtx-4090"),
    (r"RTX 3090", "rtx-3090"),
    (r"RTX PRO 6000 Blackwell Server", "rtx-pro-6000"),
    (r"RTX A6000", "rtx-a6000"),
    (r"L40S", "l40s"),
    (r"\bL4\b", "l4"),
    (r"\bA40\b", "a40"),
    (r"\bA10G\b", "a10g"),
    (r"\bA10\b", "a10"),
    (r"\bT4\b", "t4"),
    (r"MI355X", "mi355x"),
    (r"MI325X", "mi325x"),
    (r"MI300X", "mi300x"),
)
"""What identifies a GPU in its name, the more particular first. MIG slices are none of these."""


def gpu_named(name: str) -> GpuPart | None:
    """The shipped part of a GPU, by the name that the driver gives it; None for one that is not known."""
    if "MIG" in name:
        return None
    found = next((part for pattern, part in PATTERNS if re.search(pattern, name, re.IGNORECASE)), None)
    return None if found is None else load_gpu(found)
