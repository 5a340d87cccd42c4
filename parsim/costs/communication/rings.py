"""How many rings a group of devices can run at once: edge-disjoint directed Hamiltonian cycles on the link graph.

NCCL all_reduces along several rings at once, each over its own lanes, so the bandwidth of a group is the number of rings
times the rate of a lane. On an eight-GPU cube mesh that gives 1, 4 and 6 rings for GPUs 0-1, 0-3 and 0-7. Every lane
carries one ring in each direction.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from random import Random

import numpy as np
from numpy.typing import NDArray

from parsim.errors import CostError

MAX_RING_DEVICES = 8
PEELINGS = 100

Ring = tuple[int, ...]


def pack_rings(lanes: Sequence[Sequence[int]]) -> tuple[Ring, ...]:
    """As many edge-disjoint directed Hamiltonian cycles as the multigraph holds.

    Args:
        lanes: lanes[i][j] >= 0 directed lanes from vertex i to vertex j, n x n with 2 <= n <= MAX_RING_DEVICES.

    Returns:
        The rings, each the vertices in order from 0 on (a ring that occurs twice is listed twice); () if there is none.

    The count is exact: no vertex has lanes for more rings, or it is the optimum of an integer programme over all Hamiltonian
    cycles (HiGHS proves it). Which of several optimal packings is returned is not specified. Leaves out rings that pass
    through devices outside the group.

    Raises:
        CostError: if n is out of range or the matrix is not square.
    """
    matrix = tuple(tuple(int(count) for count in row) for row in lanes)
    size = len(matrix)
    if not 2 <= size <= MAX_RING_DEVICES or any(len(row) != size for row in matrix):
        raise CostError(
            f"rings are packed for 2 to {MAX_RING_DEVICES} devices on a square lane matrix, got {size} rows; "
            "relay over other links for larger groups"
        )
    return _pack(matrix)


@lru_cache(maxsize=4096)
def _pack(lanes: tuple[tuple[int, ...], ...]) -> tuple[Ring, ...]:
    size = len(lanes)
    most = min(*map(sum, lanes), *(sum(row[b] for row in lanes) for b in range(size)))
    if most == 0:
        return ()
    return _peel(lanes, most) or _optimal(lanes)


def _peel(lanes: Sequence[Sequence[int]], target: int) -> tuple[Ring, ...]:
    """`target` rings taken off one after the other, the widest lanes first; () if no attempt gets that far."""
    random = Random(0)
    for _ in range(PEELINGS):
        free = [list(row) for row in lanes]
        rings: list[Ring] = []
        while len(rings) < target and (ring := _any_ring(free, random)):
            for a, b in _arcs(ring):
                free[a][b] -= 1
            rings.append(ring)
        if len(rings) == target:
            return tuple(rings)
    return ()


def _any_ring(free: Sequence[Sequence[int]], random: Random) -> Ring:
    """A Hamiltonian cycle of the free lanes, or ()."""
    walk = [0]
    unseen = set(range(1, len(free)))

    def extend() -> bool:
        here = walk[-1]
        if not unseen:
            return free[here][0] > 0
        options = [vertex for vertex in sorted(unseen) if free[here][vertex] > 0]
        random.shuffle(options)
        for vertex in sorted(options, key=lambda vertex: -free[here][vertex]):
            walk.append(vertex)
            unseen.remove(vertex)
            if extend():
                return True
            unseen.add(vertex)
            walk.pop()
        return False

    return tuple(walk) if extend() else ()


def _optimal(lanes: tuple[tuple[int, ...], ...]) -> tuple[Ring, ...]:
    """The integer programme: how often each Hamiltonian cycle is used, within the lanes."""
    cycles = hamiltonian_cycles(lanes)
    if not cycles:
        return ()
    from scipy.optimize import Bounds, LinearConstraint, milp  # 0.3 s: imported where it is used

    used = [(a, b) for a in range(len(lanes)) for b in range(len(lanes)) if a != b and lanes[a][b] > 0]
    row = {arc: number for number, arc in enumerate(used)}
    incidence: NDArray[np.float64] = np.zeros((len(used), len(cycles)))
    for column, cycle in enumerate(cycles):
        for arc in _arcs(cycle):
            incidence[row[arc], column] = 1.0
    capacity = np.array([lanes[a][b] for a, b in used], dtype=float)
    solution = milp(
        -np.ones(len(cycles)),
        constraints=LinearConstraint(incidence, ub=capacity),
        integrality=[np.int64(1)] * len(cycles),
        bounds=Bounds(0.0, float(capacity.max())),
    )
    if solution.x is None:
        raise CostError(f"no ring packing was found for lanes {lanes}: {solution.message}")
    counts = np.rint(solution.x).astype(int)
    return tuple(cycle for cycle, count in zip(cycles, counts.tolist(), strict=True) for _ in range(count))


def hamiltonian_cycles(lanes: Sequence[Sequence[int]]) -> list[Ring]:
    """Every directed cycle from vertex 0 through all vertices, once; at most (n - 1)! of them.

    Args:
        lanes: [n][n], number of lanes from vertex to vertex.
    """
    size = len(lanes)
    found: list[Ring] = []
    walk = [0]
    unseen = set(range(1, size))

    def extend() -> None:
        if not unseen:
            if lanes[walk[-1]][0] > 0:
                found.append(tuple(walk))
            return
        for vertex in sorted(unseen):
            if lanes[walk[-1]][vertex] > 0:
                walk.append(vertex)
                unseen.remove(vertex)
                extend()
                unseen.add(vertex)
                walk.pop()

    extend()
    return found


def _arcs(cycle: Ring) -> list[tuple[int, int]]:
    return [(a, b) for a, b in zip(cycle, (*cycle[1:], cycle[0]), strict=True)]
