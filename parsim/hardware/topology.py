"""Links between devices, switches and hosts. Bandwidths are per lane and direction."""

from __future__ import annotations

from dataclasses import dataclass

from parsim.errors import ProfileError


@dataclass(frozen=True, slots=True, kw_only=True)
class Link:
    """`lanes` parallel lanes between endpoints `a` and `b` ("gpu0", "pcie0", "cpu1", "host0", ...).

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


@dataclass(frozen=True, slots=True, kw_only=True)
class Topology:
    """The link graph; device i is the endpoint `device_name(i)`."""

    links: tuple[Link, ...]

    def between(self, a: str, b: str) -> tuple[Link, ...]:
        return tuple(link for link in self.links if {link.a, link.b} == {a, b})


def device_name(index: int, kind: str) -> str:
    """Endpoint of device `index`: gpu3 or cpu0."""
    return f"{'gpu' if kind == 'cuda' else 'cpu'}{index}"
