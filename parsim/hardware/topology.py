"""Links between devices, switches, hosts and the network. Bandwidths are per lane and direction.

An endpoint is a role and a number: devices gpu3, cpu0, xpu1; switches pcie0, nvswitch1; host memory socket0, host0; nic2; the
switches of a network leaf0, spine0. On a cluster of several nodes whatever is not a device says where it is: node7/pcie0.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property, lru_cache

from parsim.errors import ProfileError

DEVICE_ROLES = ("gpu", "cpu", "xpu")
HOST_ROLES = ("socket", "host")
NIC_ROLE = "nic"
NETWORK_ROLES = ("leaf", "spine")
SOCKETS = "smp"
"""The kind of a link between the sockets of a machine."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Link:
    """`lanes` parallel lanes between endpoints `a` and `b` ("gpu0", "pcie0", "socket1", "cpu3", ...).

    Attributes:
        kind: "nvlink", "pcie", "shm", "smp", ... links of one kind share fitted parameters.
        bandwidth_bytes_per_s: of one lane, in each direction. latency_s: one way.
    """

    a: str
    b: str
    kind: str
    lanes: int
    bandwidth_bytes_per_s: float
    latency_s: float

    def __post_init__(self) -> None:
        if self.a == self.b or self.lanes < 1 or self.bandwidth_bytes_per_s <= 0 or self.latency_s < 0:
            raise ProfileError(f"link {self.a}-{self.b} needs two ends, lanes >= 1, bandwidth > 0 and latency >= 0")

    @property
    def capacity_bytes_per_s(self) -> float:
        """Bytes per second of all lanes together, in each direction."""
        return self.lanes * self.bandwidth_bytes_per_s

    def other(self, end: str) -> str:
        return self.b if end == self.a else self.a


@dataclass(frozen=True)
class Topology:
    """The link graph; device i is the endpoint `parsim.hardware.devices.device_name(i)`."""

    links: tuple[Link, ...]

    def __hash__(self) -> int:
        return self._hash

    def __getstate__(self) -> dict[str, tuple[Link, ...]]:
        return {"links": self.links}  # the kept hash of texts holds in one process only

    @cached_property
    def _hash(self) -> int:
        return hash(self.links)

    @cached_property
    def _at(self) -> Mapping[str, tuple[Link, ...]]:
        links: dict[str, list[Link]] = {}
        for link in self.links:
            links.setdefault(link.a, []).append(link)
            links.setdefault(link.b, []).append(link)
        return {end: tuple(here) for end, here in links.items()}

    @property
    def ends(self) -> tuple[str, ...]:
        """Every endpoint that a link names, in order of appearance."""
        return tuple(self._at)

    def at(self, end: str) -> tuple[Link, ...]:
        """The links with one end at `end`; () for an endpoint that has none."""
        return self._at.get(end, ())

    def between(self, a: str, b: str) -> tuple[Link, ...]:
        return tuple(link for link in self.at(a) if link.other(a) == b)

    def lanes(self, a: str, b: str, kind: str) -> int:
        """Lanes of `kind` that join `a` and `b` directly."""
        return sum(link.lanes for link in self.between(a, b) if link.kind == kind)

    def path(self, a: str, b: str, *, only_kind: str | None = None) -> tuple[Link, ...]:
        """The links of a path with the fewest links from `a` to `b` (on links of `only_kind` alone); empty if there is none.

        Traffic passes through switches, sockets and the network, never through another device.
        """
        came: dict[str, tuple[str, Link]] = {}
        frontier = [a]
        while frontier and b not in came:
            reached: list[str] = []
            for here in frontier:
                for link in self.at(here):
                    there = link.other(here)
                    if there == a or there in came or (there != b and role_of(there) in DEVICE_ROLES):
                        continue
                    if only_kind is not None and link.kind != only_kind:
                        continue
                    came[there] = (here, link)
                    reached.append(there)
            frontier = reached
        walk: list[Link] = []
        here = b
        while here in came:
            here, link = came[here]
            walk.append(link)
        return tuple(reversed(walk))

    def socket_of(self, device: str) -> str | None:
        """The nearest host memory ("socket0", "host0") of a device, or None where the links name none."""
        seen, frontier = {device}, [device]
        while frontier:
            hosts = [end for end in frontier if role_of(end) in HOST_ROLES]
            if hosts:
                return min(hosts)
            ahead = dict.fromkeys(link.other(end) for end in frontier for link in self.at(end))
            frontier = [end for end in ahead if end not in seen and role_of(end) not in DEVICE_ROLES]
            seen.update(frontier)
        return None

    def parts(self) -> tuple[frozenset[str], ...]:
        """The endpoints that hang together, the largest part first; one part if the topology is connected.

        Devices join here as well: two GPUs with a common neighbour are connected even where no traffic passes through it.
        """
        parts: list[frozenset[str]] = []
        seen: set[str] = set()
        for first in self.ends:
            if first in seen:
                continue
            part, frontier = set[str](), [first]
            while frontier:
                part.update(frontier)
                frontier = list({link.other(end) for end in frontier for link in self.at(end)} - part)
            seen |= part
            parts.append(frozenset(part))
        return tuple(sorted(parts, key=len, reverse=True))


@lru_cache(maxsize=65536)
def role_of(end: str) -> str:
    """The role of an endpoint: "gpu" of gpu3, "pcie" of node7/pcie0."""
    return end.rpartition("/")[2].rstrip("0123456789")


def walk_of(path: tuple[Link, ...], start: str) -> tuple[tuple[str, str, Link], ...]:
    """The links of a path that begins at `start`, each as (from, to, link)."""
    steps: list[tuple[str, str, Link]] = []
    here = start
    for link in path:
        there = link.other(here)
        steps.append((here, there, link))
        here = there
    return tuple(steps)
