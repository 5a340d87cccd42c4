"""Links between devices, switches and hosts. Bandwidths are per lane and direction."""

from __future__ import annotations

from dataclasses import dataclass

from parsim.errors import ProfileError


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


@dataclass(frozen=True, slots=True, kw_only=True)
class Topology:
    """The link graph; device i is the endpoint `device_name(i)`."""

    links: tuple[Link, ...]

    def between(self, a: str, b: str) -> tuple[Link, ...]:
        return tuple(link for link in self.links if {link.a, link.b} == {a, b})

    def lanes(self, a: str, b: str, kind: str) -> int:
        """Lanes of `kind` that join `a` and `b` directly."""
        return sum(link.lanes for link in self.between(a, b) if link.kind == kind)

    def path(self, a: str, b: str, *, without_kind: str | None = None) -> tuple[Link, ...]:
        """The links of a path with the fewest links from `a` to `b`, avoiding `without_kind`; empty if there is none.

        Traffic passes through switches and sockets, never through another device ("gpu...").
        """
        came: dict[str, tuple[str, Link]] = {}
        frontier = [a]
        while frontier and b not in came:
            reached: list[str] = []
            for here in frontier:
                for link in self.links:
                    if link.kind == without_kind or here not in (link.a, link.b):
                        continue
                    there = link.b if link.a == here else link.a
                    if there == a or there in came or (there.startswith("gpu") and there != b):
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
        ends = {end for link in self.links for end in (link.a, link.b) if end.startswith(("socket", "host"))}
        found = [(len(path), end) for end in sorted(ends) if (path := self.path(device, end))]
        return min(found)[1] if found else None


def device_name(index: int, kind: str) -> str:
    """Endpoint of device `index`: gpu3 or cpu0."""
    return f"{'gpu' if kind == 'cuda' else 'cpu'}{index}"
