"""What exchanging weights costs on machines of several GPUs that share one network interface.

Between machines, all the messages that enter or leave a machine in one exchange share its interface, each direction apart;
inside, each GPU has its own links. Latencies add up per message sent by one GPU, one after the other.

Leaves out: contention in the switches, the reduction arithmetic, protocol overheads (give effective bandwidths), and the
socket a GPU sits on. Parameters are the caller's; `parsim.costs` prices what a profile has measured.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from parsim.algorithms.graphs import connections
from parsim.costs.communication.alpha_beta import ring_all_reduce_s
from parsim.errors import AlgorithmError


@dataclass(frozen=True, slots=True, kw_only=True)
class MachineNetwork:
    """n GPUs on machines of `per_node`, numbered machine by machine.

    Attributes:
        network_bytes_per_s, network_latency_s: of a machine's interface, each direction. local_*: of a GPU's links inside.
    """

    n: int
    per_node: int
    network_bytes_per_s: float
    network_latency_s: float
    local_bytes_per_s: float
    local_latency_s: float

    def __post_init__(self) -> None:
        if self.n < 1 or self.per_node < 1 or self.n % self.per_node:
            raise AlgorithmError(f"per_node ({self.per_node}) must divide the GPUs ({self.n})")
        if min(self.network_bytes_per_s, self.local_bytes_per_s) <= 0 or min(self.network_latency_s, self.local_latency_s) < 0:
            raise AlgorithmError("bandwidths must be > 0 bytes/s and latencies >= 0 s")

    @property
    def nodes(self) -> int:
        """Machines."""
        return self.n // self.per_node

    def all_reduce_s(self, size_bytes: float) -> float:
        """One ring over all GPUs, passing each machine's interface once each way; inside one machine, its links."""
        if self.nodes == 1:
            return ring_all_reduce_s(size_bytes, self.n, self.local_latency_s, 1.0 / self.local_bytes_per_s)
        per_byte = max(1.0 / self.network_bytes_per_s, 1.0 / self.local_bytes_per_s)
        crossings = 2 * (self.n - 1) / self.n * self.nodes
        latency = crossings * self.network_latency_s + (2 * (self.n - 1) - crossings) * self.local_latency_s
        return latency + ring_all_reduce_s(size_bytes, self.n, 0.0, per_byte)

    def hierarchical_all_reduce_s(self, size_bytes: float) -> float:
        """reduce_scatter inside, rings over the machines per shard on the shared interface, all_gather inside."""
        inside = ring_all_reduce_s(size_bytes, self.per_node, self.local_latency_s, 1.0 / self.local_bytes_per_s)
        return inside + ring_all_reduce_s(size_bytes, self.nodes, self.network_latency_s, 1.0 / self.network_bytes_per_s)

    def mixing_s(self, matrix: NDArray[np.float64], size_bytes: float) -> float:
        """One exchange of S bytes over every link of W, GPU to GPU: the busiest interface or GPU, and the latencies."""
        if matrix.shape != (self.n, self.n):
            raise AlgorithmError(f"{self.n} GPUs need a mixing matrix [{self.n}, {self.n}], got {list(matrix.shape)}")
        to, sender = np.nonzero((matrix != 0) & ~np.eye(self.n, dtype=bool))
        outside = to // self.per_node != sender // self.per_node
        leaving = np.bincount(sender[outside] // self.per_node, minlength=self.nodes)
        entering = np.bincount(to[outside] // self.per_node, minlength=self.nodes)
        sent, received = (np.bincount(place[~outside], minlength=self.n) for place in (sender, to))
        network = max(leaving.max(), entering.max()) * size_bytes / self.network_bytes_per_s
        local = max(sent.max(), received.max()) * size_bytes / self.local_bytes_per_s
        latencies = (
            np.bincount(sender[outside], minlength=self.n).max() * self.network_latency_s + sent.max() * self.local_latency_s
        )
        return float(max(network, local) + latencies)

    def machine_mixing_s(self, node_matrix: NDArray[np.float64], size_bytes: float) -> float:
        """W (x) 11^T/g: average inside (an all_reduce), then S bytes per link of `node_matrix` [nodes, nodes] between machines,
        each GPU its shard, at once on the shared interface."""
        if node_matrix.shape != (self.nodes, self.nodes):
            raise AlgorithmError(
                f"{self.nodes} machines need a matrix [{self.nodes}, {self.nodes}], got {list(node_matrix.shape)}"
            )
        inside = ring_all_reduce_s(size_bytes, self.per_node, self.local_latency_s, 1.0 / self.local_bytes_per_s)
        peers = connections(node_matrix)
        return inside + peers * (size_bytes / self.network_bytes_per_s + self.network_latency_s)
