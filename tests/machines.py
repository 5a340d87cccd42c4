"""Machines of the shipped profiles, and the same with devices of other sizes."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from parsim.hardware.cluster import Cluster, cluster_from_profile
from parsim.hardware.compose import load_profile

PROFILES = {name: load_profile(name) for name in ("dgx1-v100-32gb", "pcie-8xv100")}


def machine(devices: int = 8, name: str = "dgx1-v100-32gb", **changes: Any) -> Cluster:
    """The first devices of a machine; `changes` are fields of their types, such as memory_bytes."""
    return with_types(cluster_from_profile(PROFILES[name], devices), **changes)


def with_types(cluster: Cluster, **changes: Any) -> Cluster:
    return replace(cluster, devices=tuple(replace(each, type=replace(each.type, **changes)) for each in cluster.devices))
