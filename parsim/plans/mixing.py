"""How workers mix their models: over graphs, in averages, or by merges in turn.

A mixing graph gives the weight with which each worker sends to each other in round t, as a matrix W_t of n workers. Row i of
W_t holds what worker i takes of each: x_i <- sum_j W_ij x_j. Worker j sends to the i with W_ij > 0. A new graph is a function
of (n, t, settings) and a row of GRAPHS; it repeats after `period` rounds, so training never unrolls it. Rows and
columns sum to 1, which keeps the mean of the workers; of directed graphs columns alone do, and push-sum keeps it.

Source: weights and offsets as this project's specification of the decentralised systems states them; Metropolis-Hastings
weights, and the exponential graphs of D-PSGD, SGP and BlueFog, from general knowledge of those works.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from itertools import pairwise
from typing import Any, Generic, Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

from parsim.errors import AlgorithmError, near_matches

Matrix = NDArray[np.float64]
Settings = dict[str, int]

STOCHASTIC_TOLERANCE = 1e-9
"""How far sums of rows and columns may be from 1 before a matrix is refused."""


def circulant(n: int, offsets: dict[int, float]) -> Matrix:
    """W_ij = offsets[(i - j) mod n]: worker j sends to j + offset, with that weight. Offsets that coincide mod n add up."""
    row = np.zeros(n)
    for offset, weight in offsets.items():
        row[offset % n] += weight
    index = np.arange(n)
    matrix: Matrix = row[(index[:, None] - index[None, :]) % n]
    return matrix


def is_circulant(matrix: Matrix) -> bool:
    """Whether every row is the one before, turned by one place."""
    index = np.arange(len(matrix))
    return bool((matrix == matrix[:, 0][(index[:, None] - index[None, :]) % len(matrix)]).all())


def eigenvalues(matrix: Matrix) -> NDArray[np.complex128]:
    """Of a circulant the FFT of its first column, that of the constant vector first; of a symmetric matrix by eigvalsh: exact
    to rounding. The general solver, for others, is good to the square root of that for a defective matrix."""
    if is_circulant(matrix):
        return np.fft.fft(matrix[:, 0])
    solve = np.linalg.eigvalsh if np.array_equal(matrix, matrix.T) else np.linalg.eigvals
    return np.asarray(solve(matrix), dtype=np.complex128)


def uniform_circulant(n: int, offsets: set[int]) -> Matrix:
    """`circulant` with equal weights, 1/(number of different offsets) each; 0 is the worker itself and always among them."""
    distinct = {offset % n for offset in offsets} | {0}
    return circulant(n, dict.fromkeys(distinct, 1.0 / len(distinct)))


def metropolis_hastings(adjacency: NDArray[np.bool_]) -> Matrix:
    """W_ij = 1/max(d_i + 1, d_j + 1) over the edges of an undirected graph, the rest on the diagonal: doubly stochastic.

    adjacency: bool [n, n], symmetric; its diagonal does not count. Raises AlgorithmError where it is not symmetric.
    """
    edges = adjacency & ~np.eye(len(adjacency), dtype=bool)
    if (edges != edges.T).any():
        raise AlgorithmError("Metropolis-Hastings weights need an undirected graph: make the adjacency symmetric")
    degree = edges.sum(1)
    weights: Matrix = edges / (np.maximum(degree[:, None], degree[None, :]) + 1.0)
    weights[np.diag_indices_from(weights)] = 1.0 - weights.sum(1)
    return weights


def closest_factors(n: int) -> tuple[int, int]:
    """r <= c with r c = n and r as large as can be: 4 x 8 for 32, 28 x 36 for 1008, 1 x n for a prime."""
    rows = max(divisor for divisor in range(1, math.isqrt(n) + 1) if n % divisor == 0)
    return rows, n // rows


def _complete(n: int, t: int, settings: Settings) -> Matrix:
    """Everyone to everyone, 1/n."""
    return np.full((n, n), 1.0 / n)


def _alone(n: int, t: int, settings: Settings) -> Matrix:
    """W = I: independent training (not connected, on purpose)."""
    return np.eye(n)


def _ring(n: int, t: int, settings: Settings) -> Matrix:
    """Neighbours +-1, 1/3 each (n = 2: 1/2)."""
    return uniform_circulant(n, {-1, 1})


def _lattice(n: int, t: int, settings: Settings) -> Matrix:
    """Ring lattice: neighbours +-1 .. +-k/2, 1/(k+1) each; k >= n-1 is the complete graph."""
    neighbours = settings["neighbours"]
    if neighbours >= n - 1:
        return np.full((n, n), 1.0 / n)
    if neighbours < 2 or neighbours % 2:
        raise AlgorithmError(
            f"a ring lattice needs an even number of neighbours >= 2 (half on either side), got {neighbours} for {n} workers; "
            f"use {max(2, neighbours - neighbours % 2)}, or {n - 1} for the complete graph"
        )
    half = neighbours // 2
    return uniform_circulant(n, set(range(-half, half + 1)))


def _torus(n: int, t: int, settings: Settings) -> Matrix:
    """r x c with the closest factors, four neighbours, 1/5 each; neighbours that coincide (r or c = 2) count once."""
    rows, columns = closest_factors(n)
    place = np.arange(n)
    row, column = place // columns, place % columns
    adjacency = np.eye(n, dtype=bool)
    for down, right in ((1, 0), (-1, 0), (0, 1), (0, -1)):
        adjacency[place, (row + down) % rows * columns + (column + right) % columns] = True
    matrix: Matrix = adjacency / adjacency.sum(1)[:, None]
    return matrix


def _exponential(n: int, t: int, settings: Settings) -> Matrix:
    """i sends to i + 2^p for p = 0 .. tau-1, tau = ceil(log2 n), 1/(tau+1) each: directed."""
    return uniform_circulant(n, {2**power for power in range(rounds_of_one_peer(n))})


def _one_peer_exponential(n: int, t: int, settings: Settings) -> Matrix:
    """In round t, i sends to i + 2^(t mod tau), weights 1/2 and 1/2; n = 2^tau: tau rounds average exactly."""
    if n == 1:
        return np.eye(1)
    return circulant(n, {0: 0.5, 2 ** (t % rounds_of_one_peer(n)): 0.5})


def _hierarchical(between: Callable[[int, int, Settings], Matrix]) -> Callable[[int, int, Settings], Matrix]:
    """Nodes of `per_node` workers average inside; in the last of `every` rounds they also mix with others, as in `between`."""

    def matrix(n: int, t: int, settings: Settings) -> Matrix:
        per_node, every = settings["per_node"], settings["every"]
        if per_node < 1 or n % per_node:
            raise AlgorithmError(f"per_node ({per_node}) must divide the workers ({n})")
        if every < 1:
            raise AlgorithmError(f"every ({every}): nodes mix among themselves in every round (1) or in one of several")
        nodes = between(n // per_node, t // every, settings) if (t + 1) % every == 0 else np.eye(n // per_node)
        mixed: Matrix = np.kron(nodes, np.full((per_node, per_node), 1.0 / per_node))
        return mixed

    return matrix


def _rounds_of_nodes(n: int, settings: Settings) -> int:
    """Rounds after which hierarchical one-peer mixing repeats; settings that contradict n are refused elsewhere."""
    return rounds_of_one_peer(max(1, n // max(1, settings["per_node"]))) * settings["every"]


def _random_directed(n: int, t: int, settings: Settings) -> Matrix:
    """i sends to i + 1 and to links - 1 others, drawn once; a sender divides what it has equally: columns alone sum to 1."""
    links = min(settings["links"], n - 1)
    if settings["links"] < 1:
        raise AlgorithmError(f"every worker of random_directed sends to at least 1 other, got links = {settings['links']}")
    matrix, rng = np.eye(n), np.random.default_rng([settings["seed"], n])
    for worker in range(n if n > 1 else 0):
        others = rng.permutation(np.setdiff1d(np.arange(n), (worker, (worker + 1) % n)))[: links - 1]
        matrix[[(worker + 1) % n, *others], worker] = 1.0
    shares: Matrix = matrix / matrix.sum(0)
    return shares


def _star(n: int, t: int, settings: Settings) -> Matrix:
    """Worker 0 with each other one, Metropolis-Hastings weights: 1/n on every edge."""
    adjacency = np.zeros((n, n), dtype=bool)
    adjacency[0, 1:] = adjacency[1:, 0] = True
    return metropolis_hastings(adjacency)


def _mesh(n: int, t: int, settings: Settings) -> Matrix:
    """r x c grid without wrapping (closest factors), Metropolis-Hastings weights."""
    rows, columns = closest_factors(n)
    place = np.arange(n).reshape(rows, columns)
    adjacency = np.zeros((n, n), dtype=bool)
    for first, second in ((place[:-1], place[1:]), (place[:, :-1], place[:, 1:])):
        adjacency[first.ravel(), second.ravel()] = adjacency[second.ravel(), first.ravel()] = True
    return metropolis_hastings(adjacency)


def rounds_of_one_peer(n: int) -> int:
    """tau = ceil(log2 n), at least 1: rounds after which a one-peer exponential graph repeats."""
    return max(1, math.ceil(math.log2(n)))


@dataclass(frozen=True, slots=True, kw_only=True)
class GraphFamily:
    """A row of GRAPHS: the matrix of (n, t, settings), after how many rounds it repeats, and its settings. directed: rows do
    not sum to 1, so that only push-sum keeps the mean."""

    matrix: Callable[[int, int, Settings], Matrix]
    period: Callable[[int, Settings], int] = lambda n, settings: 1
    defaults: Settings = field(default_factory=dict)
    directed: bool = False


NODES: Settings = {"per_node": 1, "every": 1}
"""Of hierarchical graphs: workers of a node, and in one of how many rounds nodes mix among themselves."""

GRAPHS: dict[str, GraphFamily] = {
    "alone": GraphFamily(matrix=_alone),
    "complete": GraphFamily(matrix=_complete),
    "exponential": GraphFamily(matrix=_exponential),
    "hierarchical": GraphFamily(matrix=_hierarchical(_complete), period=lambda n, settings: settings["every"], defaults=NODES),
    "hierarchical_one_peer": GraphFamily(matrix=_hierarchical(_one_peer_exponential), period=_rounds_of_nodes, defaults=NODES),
    "hierarchical_ring": GraphFamily(matrix=_hierarchical(_ring), period=lambda n, settings: settings["every"], defaults=NODES),
    "lattice": GraphFamily(matrix=_lattice, defaults={"neighbours": 4}),
    "mesh": GraphFamily(matrix=_mesh),
    "one_peer_exponential": GraphFamily(matrix=_one_peer_exponential, period=lambda n, settings: rounds_of_one_peer(n)),
    "random_directed": GraphFamily(matrix=_random_directed, defaults={"links": 2, "seed": 0}, directed=True),
    "ring": GraphFamily(matrix=_ring),
    "star": GraphFamily(matrix=_star),
    "torus": GraphFamily(matrix=_torus),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class MixingGraph:
    """A graph of GRAPHS over n workers, which repeats after `period` rounds; called with a round number it gives W_t."""

    name: str
    n: int
    settings: tuple[tuple[str, int], ...] = ()
    period: int = 1

    def __call__(self, t: int) -> Matrix:
        """W_t, float64 [n, n]; read-only, shared between calls."""
        return _cached_matrix(self.name, self.n, t % self.period, self.settings)

    def __str__(self) -> str:
        inside = ", ".join([str(self.n), *(f"{key}={value}" for key, value in self.settings)])
        return f"{self.name}({inside})"

    def connections(self, t: int) -> int:
        """The most messages that one worker sends in round t."""
        return connections(self(t))


@lru_cache(maxsize=64)
def _cached_matrix(name: str, n: int, t: int, settings: tuple[tuple[str, int], ...]) -> Matrix:
    matrix = GRAPHS[name].matrix(n, t, dict(settings))
    matrix.setflags(write=False)
    return matrix


def mixing_graph(name: str, n: int, **settings: int) -> MixingGraph:
    """The graph `name` of GRAPHS over n workers. Raises AlgorithmError: an unknown graph or setting, or a wrong n."""
    if name not in GRAPHS:
        raise AlgorithmError(f"unknown mixing graph {name!r}{near_matches(name, GRAPHS)}")
    if n < 1:
        raise AlgorithmError(f"a mixing graph needs at least one worker, got {n}")
    family = GRAPHS[name]
    for key in settings:
        if key not in family.defaults:
            known = ", ".join(family.defaults) or "none"
            raise AlgorithmError(f"the graph {name} has no setting {key!r}; its settings: {known}")
    chosen = {**family.defaults, **settings}
    ordered = tuple(sorted(chosen.items()))
    _cached_matrix(name, n, 0, ordered)  # refuses settings that contradict n
    return MixingGraph(name=name, n=n, settings=ordered, period=family.period(n, chosen))


def connections(matrix: Matrix) -> int:
    """The most other workers that one worker sends to: the largest number of entries off the diagonal in a column."""
    links = matrix != 0
    return int((links.sum(0) - links.diagonal()).max())


def stochastic_error(matrix: Matrix) -> tuple[float, float]:
    """The largest distance from 1 of a row's sum and of a column's sum."""
    return float(np.abs(matrix.sum(1) - 1.0).max()), float(np.abs(matrix.sum(0) - 1.0).max())


def check_doubly_stochastic(matrix: Matrix, *, tolerance: float = STOCHASTIC_TOLERANCE) -> None:
    """Raise AlgorithmError unless the matrix is square, without negative entries, and rows and columns sum to 1: rows that do
    not lose or invent weight, columns that do not change the mean of the workers."""
    if matrix.ndim != 2 or matrix.shape[0] != matrix.shape[1]:
        raise AlgorithmError(f"a mixing matrix must be square [n, n], got shape {list(matrix.shape)}")
    rows, columns = stochastic_error(matrix)
    if not (rows <= tolerance and columns <= tolerance) or (matrix < 0).any():
        raise AlgorithmError(
            f"a mixing matrix must be doubly stochastic: entries >= 0 (least {matrix.min():.3g}), sums of rows and columns 1 "
            f"(off by up to {rows:.3g} and {columns:.3g}). Use metropolis_hastings on an undirected graph"
        )


def check_column_stochastic(matrix: Matrix) -> None:
    """Raise AlgorithmError unless the matrix is square, and what each worker keeps and sends is all that it has."""
    columns = stochastic_error(matrix)[1]
    if not columns <= STOCHASTIC_TOLERANCE or (matrix < 0).any():
        raise AlgorithmError(
            f"push-sum needs a column-stochastic matrix: entries >= 0 (least {matrix.min():.3g}) and columns that sum to 1, "
            f"off by up to {columns:.3g}; divide each column by its sum"
        )


def unreached(matrices: list[Matrix]) -> tuple[int, ...]:
    """Workers that do not hear of worker 0, or that worker 0 does not hear of, however long the matrices repeat."""
    links = np.zeros(matrices[0].shape, dtype=bool)
    for matrix in matrices:
        links |= matrix != 0
    return tuple(np.flatnonzero(~(_reached(links) & _reached(links.T))).tolist())


def check_connected(graph: Callable[[int], Matrix], *, period: int = 1) -> None:
    """Raise AlgorithmError unless every worker's weights reach every other within repetitions of W_0 .. W_(period-1)."""
    apart = unreached([graph(t) for t in range(period)])
    if apart:
        shown = ", ".join(map(str, apart[:8])) + (", ..." if len(apart) > 8 else "")
        others = ", ".join(sorted(set(GRAPHS) - {"alone"}))
        raise AlgorithmError(
            f"the mixing graph is not connected: {len(apart)} workers exchange nothing with worker 0, not even through others "
            f"({shown}); add links or use another graph ({others}); independent training on purpose is the graph alone"
        )


def _reached(links: NDArray[np.bool_]) -> NDArray[np.bool_]:
    reached = np.zeros(len(links), dtype=bool)
    reached[0] = True
    frontier = reached.copy()
    while frontier.any():
        frontier = links[:, frontier].any(1) & ~reached
        reached |= frontier
    return reached


@dataclass(frozen=True, slots=True, kw_only=True)
class Ada:
    """The mixing graph adapts during training, dense early and sparse late: a ring lattice of k_e neighbours in epoch e.

    Source: the idea is the Ada paper's (arXiv 2509.12213, abstract); its schedule and constants could not be obtained. So the
    schedules are ours, as this project's specification states them.

    Attributes:
        kind: a row of ADA_SCHEDULES. n: workers. start: k_0; None: n - 1 (complete). least: k_min.
        rate: gamma; neighbours less per epoch (linear), or the factor per epoch (exponential) or per milestone (step).
        milestones: of step, ascending: the epochs from which on there are gamma times as many.
        target: of closed_loop (after consensus control, Kong et al. 2021), the most that the consensus distance
            D = (1/n) sum_i |x_i - mean|^2 behind a mixing may be: k of an epoch follows from what mixing took from D before.
    """

    n: int
    kind: str = "linear"
    start: int | None = None
    least: int = 2
    rate: float = 1.0
    milestones: tuple[int, ...] = ()
    target: float = 0.0

    def __post_init__(self) -> None:
        if self.kind not in ADA_KINDS:
            raise AlgorithmError(f"unknown Ada schedule {self.kind!r}{near_matches(self.kind, ADA_KINDS)}")
        if self.n < 3 or self.least < 2 or self.first < self.least:
            raise AlgorithmError(
                f"Ada needs n >= 3 workers and 2 <= least <= start, got n {self.n}, least {self.least}, start {self.first}"
            )
        if not 0 <= self.rate < math.inf or (self.kind != "linear" and not 0 < self.rate <= 1):
            raise AlgorithmError(
                f"rate must be >= 0 neighbours per epoch (linear) or a factor in (0, 1] (exponential, step), got {self.rate}"
            )
        if (self.kind == "step") != bool(self.milestones) or any(
            second <= first for first, second in pairwise((0, *self.milestones))
        ):
            raise AlgorithmError(
                f"Ada of kind {self.kind} has milestones {list(self.milestones)}: step has ascending epochs from 1 on, for "
                "example 7+14, and no other kind has any"
            )

        if (self.kind == CLOSED_LOOP) != (self.target != 0) or not 0 <= self.target < math.inf:
            raise AlgorithmError(
                f"Ada of kind {self.kind} has target {self.target:g}: closed_loop needs a target > 0 for the consensus "
                "distance, and no other kind has one"
            )
        if self.kind == CLOSED_LOOP and self.rate != 1.0:
            raise AlgorithmError(f"closed_loop has a target and no rate, got rate {self.rate:g}; drop it")

    @property
    def first(self) -> int:
        return self.n - 1 if self.start is None else self.start

    @property
    def lattices(self) -> tuple[int, ...]:
        """Numbers of neighbours that a closed loop chooses from, k_0 first."""
        kinds = {allowed_neighbours(wanted, self.n, self.least) for wanted in range(self.least, self.first + 1)}
        return tuple(sorted(kinds, reverse=True))

    def place(self, taken: float) -> int:
        """Place in `lattices` of the sparsest whose predicted D is at most `target`; 0 where none is. taken: D before a mixing
        less D behind it, the mean over rounds."""
        for place in reversed(range(len(self.lattices))):
            rho = 1.0 - lattice_gap(self.n, self.lattices[place])
            if predicted_consensus(max(taken, 0.0), rho) <= self.target:
                return place
        return 0

    def neighbours(self, epoch: int) -> int:
        """k for `epoch` (from 0): even, or n - 1. Of a closed loop that of a place in `lattices`."""
        if self.kind == CLOSED_LOOP:
            return self.lattices[min(epoch, len(self.lattices) - 1)]
        return allowed_neighbours(ADA_SCHEDULES[self.kind](self, epoch), self.n, self.least)

    def graph(self, epoch: int) -> MixingGraph:
        return mixing_graph("lattice", self.n, neighbours=self.neighbours(epoch))


ADA_SCHEDULES: dict[str, Callable[[Ada, int], float]] = {
    "exponential": lambda ada, epoch: ada.first * ada.rate**epoch,
    "linear": lambda ada, epoch: ada.first - math.floor(ada.rate * epoch),
    "step": lambda ada, epoch: ada.first * ada.rate ** sum(milestone <= epoch for milestone in ada.milestones),
}
"""k of an epoch, before it is made even and kept between k_min and n - 1: k_0 gamma^e, k_0 - floor(gamma e), and k_0 gamma^m
behind m milestones."""


CLOSED_LOOP = "closed_loop"
ADA_KINDS = (*ADA_SCHEDULES, CLOSED_LOOP)


@dataclass(frozen=True, slots=True)
class LoopState:
    """Where Ada's closed loop stands: the place of its lattice, and since then what mixing took from D, in so many rounds."""

    place: int = 0
    taken: float = 0.0
    rounds: int = 0


FIRST_LOOP = LoopState()


@lru_cache(maxsize=1024)
def lattice_gap(n: int, neighbours: int) -> float:
    """1 - max_m |1 + 2 sum_(d=1..k/2) cos(2 pi m d / n)| / (k+1), m = 1 .. n-1; 1 when k >= n-1."""
    if neighbours >= n - 1:
        return 1.0
    m = np.arange(1, n)[:, None]
    d = np.arange(1, neighbours // 2 + 1)[None, :]
    values = (1.0 + 2.0 * np.cos(2.0 * np.pi * m * d / n).sum(1)) / (neighbours + 1)
    return float(1.0 - np.abs(values).max())


def predicted_consensus(drift: float, rho: float) -> float:
    """D = drift rho^2 / (1 - rho^2) after mixing, in the steady state.

    From D = rho^2 (D + drift): each local step adds `drift`, independent between steps and workers, and each mixing leaves
    rho^2 of the distance. Too high where the distance is spread over modes that mix faster than the slowest; too low where
    the drift points the same way at every step (shards of different distributions).
    """
    if not 0 <= rho < 1 or drift < 0:
        raise AlgorithmError(f"a prediction needs 0 <= rho < 1 and drift >= 0, got {rho} and {drift}")
    return drift * rho**2 / (1.0 - rho**2)


def allowed_neighbours(wanted: float, n: int, least: int = 2) -> int:
    """The largest even k <= wanted, but at least `least`; n-1 (complete) where it reaches that, or no lattice is left."""
    whole = math.floor(wanted)
    even = max(2, whole - whole % 2, least + least % 2)
    return n - 1 if max(whole, even) >= n - 1 else even


# Averages of whole models: means with weights, merges in arrival order, and the outer optimizer.
#
# Written with +, - and * by a float alone, so the same functions take NumPy arrays, torch tensors and, in the tests, exact
# fractions. A new merge is a function and a row of MERGES.
#
# Source of `half`: `aggregate_parameters_async` of bsc-wdc/dislib, dislib/pytorch/pytorch_distributed.py. The others are the
# rules known as FedAsync (`staleness`), FedBuff (`buffered`) and DiLoCo (`OuterOptimizer`), from general knowledge.


class Linear(Protocol):
    """What can be added, subtracted and scaled."""

    def __add__(self, other: Any, /) -> Any: ...
    def __sub__(self, other: Any, /) -> Any: ...
    def __mul__(self, other: Any, /) -> Any: ...


V = TypeVar("V", bound=Linear)


@dataclass(frozen=True, slots=True, kw_only=True)
class MergeRule:
    """A row of MERGES with its numbers.

    workers: P, how many arrivals make a round (`running`). rate: omega_0 of `staleness`, and what `buffered` multiplies its
    mean change by. exponent: a of `staleness`. buffer: m, the arrivals `buffered` waits for.
    """

    kind: str = "half"
    workers: int
    rate: float = 1.0
    exponent: float = 0.5
    buffer: int = 1

    def __post_init__(self) -> None:
        if self.kind not in MERGES:
            raise AlgorithmError(f"unknown merge {self.kind!r}{near_matches(self.kind, MERGES)}")
        if self.workers < 1 or not 1 <= self.buffer <= self.workers:
            raise AlgorithmError(
                f"a merge needs workers >= 1 and a buffer between 1 and workers, got {self.workers} and {self.buffer}"
            )
        if not 0 < self.rate <= 1 or self.exponent < 0:
            raise AlgorithmError(f"rate must be in (0, 1] and exponent >= 0, got {self.rate} and {self.exponent}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Arrival(Generic[V]):
    """A worker's model as it reaches the global one, and that from which it began its local work.

    staleness: merges of others since it read `start`. share: its number of samples over the mean of all workers.
    """

    weights: V
    start: V
    staleness: int = 0
    share: float = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Merged(Generic[V]):
    """The global model and what its merge remembers: merges so far, shares in the current round or buffer, buffered change."""

    weights: V
    merges: int = 0
    in_round: int = 0
    share_in_round: float = 0.0
    buffered: V | None = None


def merge_half(state: Merged[V], arrival: Arrival[V], rule: MergeRule) -> Merged[V]:
    """g <- (g + w)/2, as the reference does. The last arrival weighs 1/2, the first of P 2^-P: about 3 workers count. Knows no
    sample counts. With one worker it halves every epoch's progress."""
    return replace(state, weights=(state.weights + arrival.weights) * 0.5)


def merge_running(state: Merged[V], arrival: Arrival[V], rule: MergeRule) -> Merged[V]:
    """g <- g + s/(S + s) (w - g), s the arrival's share, S the shares before it in this round of P arrivals: after a round g is
    the exact mean of its arrivals, weighted by samples."""
    fresh = state.in_round % rule.workers == 0
    before = 0.0 if fresh else state.share_in_round
    weight = arrival.share / (before + arrival.share)
    merged = arrival.weights if fresh else state.weights + (arrival.weights - state.weights) * weight
    in_round = 1 if fresh else state.in_round + 1
    return replace(state, weights=merged, in_round=in_round, share_in_round=before + arrival.share)


def merge_staleness(state: Merged[V], arrival: Arrival[V], rule: MergeRule) -> Merged[V]:
    """g <- g + omega (w - g), omega = min(1, rate * share * (1 + staleness)^-exponent): late work counts less (FedAsync)."""
    weight = min(1.0, rule.rate * arrival.share * (1.0 + arrival.staleness) ** -rule.exponent)
    return replace(state, weights=state.weights + (arrival.weights - state.weights) * weight)


def merge_buffered(state: Merged[V], arrival: Arrival[V], rule: MergeRule) -> Merged[V]:
    """Collect the changes w - start of m arrivals, then g <- g + rate * their mean weighted by share (FedBuff)."""
    change = (arrival.weights - arrival.start) * arrival.share
    total: V = change if state.buffered is None else state.buffered + change
    shares, count = state.share_in_round + arrival.share, state.in_round + 1
    if count < rule.buffer:
        return replace(state, buffered=total, in_round=count, share_in_round=shares)
    merged = state.weights + total * (rule.rate / shares)
    return replace(state, weights=merged, buffered=None, in_round=0, share_in_round=0.0)


MERGES: dict[str, Callable[[Merged[Any], Arrival[Any], MergeRule], Merged[Any]]] = {
    "half": merge_half,
    "running": merge_running,
    "staleness": merge_staleness,
    "buffered": merge_buffered,
}


def merge(state: Merged[V], arrival: Arrival[V], rule: MergeRule) -> Merged[V]:
    """The global model after one arrival. Order matters; the arrivals are exclusive."""
    after = MERGES[rule.kind](state, arrival, rule)
    return replace(after, merges=state.merges + 1)


def arrival_weights(rule: MergeRule, arrivals: int) -> NDArray[np.float64]:
    """How much of g counts after `arrivals` workers that all began from g_0 merged in turn: float64 [1 + arrivals], of g_0
    and of each arrival in order. Half: 2^-P of g_0, then 2^-P ... 1/4, 1/2. They sum to 1."""
    unit = np.eye(1 + arrivals)
    state = Merged(weights=unit[0])
    for number in range(arrivals):
        state = merge(state, Arrival(weights=unit[1 + number], start=unit[0], staleness=number), rule)
    return np.asarray(state.weights, dtype=np.float64)


def turn_weight(rule: MergeRule, number: int, worker: int) -> float:
    """omega of a turn, where workers 0, 1, ... merge in turn in every round and each goes on from the global model: g <- g +
    omega (w - g); of `buffered` g <- g + omega (sum of the buffered changes), and 0 while the buffer fills."""
    turn = number * rule.workers + worker
    in_round = turn % rule.buffer if rule.kind == "buffered" else worker
    state = Merged(weights=0.0, in_round=in_round, share_in_round=float(in_round))
    return float(merge(state, Arrival(weights=1.0, start=0.0, staleness=_staleness(rule, number, worker)), rule).weights)


def _staleness(rule: MergeRule, number: int, worker: int) -> int:
    """Merges of others since a worker had its turn; in round 0 since all began."""
    read = 0 if number == 0 else (number - 1) * rule.workers + worker + 1
    return number * rule.workers + worker - read


def merged_in_turn(
    rule: MergeRule, state: Merged[V], weights: Sequence[V], starts: Sequence[V], number: int
) -> tuple[Merged[V], list[V]]:
    """A round in which workers merge in turn: the global model behind it, and the one that each worker goes on from. starts:
    the models from which they began the round."""
    goes_on: list[V] = []
    for worker, (own, start) in enumerate(zip(weights, starts, strict=True)):
        arrival = Arrival(weights=own, start=start, staleness=_staleness(rule, number, worker))
        state = merge(state, arrival, rule)
        goes_on.append(state.weights)
    return state, goes_on


def effective_workers(weights: NDArray[np.float64]) -> float:
    """1 / sum omega^2 of weights that sum to 1: how many equal workers would average the noise as well."""
    return float(1.0 / np.square(weights).sum())


def averaging_matrix(workers: int, weights: NDArray[np.float64] | None = None) -> NDArray[np.float64]:
    """Averaging as a mixing matrix [P, P]: each row holds the weights (None: 1/P, the complete graph)."""
    row = np.full(workers, 1.0 / workers) if weights is None else np.asarray(weights, dtype=np.float64)
    if row.shape != (workers,):
        raise AlgorithmError(f"averaging needs {workers} weights, one per replica, got {row.size}: {row.tolist()}")
    if not (row >= 0).all() or not abs(row.sum() - 1.0) <= 1e-12:
        raise AlgorithmError(f"averaging needs weights >= 0 that sum to 1, and the sum of {row.tolist()} is {row.sum():.6g}")
    return np.tile(row, (workers, 1))


def participation_weights(
    workers: int, fraction: float, round_number: int, *, seed: int = 0, weights: NDArray[np.float64] | None = None
) -> NDArray[np.float64]:
    """Partial participation: max(1, round(fraction * P)) workers drawn by (seed, round_number) alone, their weights scaled to
    sum to 1. The others have weight 0: they do no local work, and begin the next round from the average, as all do."""
    if not 0 < fraction <= 1:
        raise AlgorithmError(f"the participating fraction must be in (0, 1], got {fraction}")
    count = max(1, round(fraction * workers))
    base = np.full(workers, 1.0 / workers) if weights is None else np.asarray(weights, dtype=np.float64)
    order = np.random.default_rng([seed, round_number, workers]).permutation(workers)
    chosen = order[base[order] > 0][:count]
    drawn = np.zeros(workers)
    drawn[chosen] = base[chosen]
    scaled: NDArray[np.float64] = drawn / drawn.sum()
    return scaled


@dataclass(frozen=True, slots=True, kw_only=True)
class OuterOptimizer:
    """SGD over rounds: the change of a round, previous - mean, is its gradient (DiLoCo's usual: lr 0.7, Nesterov 0.9). lr 1 and
    momentum 0 is plain averaging."""

    lr: float = 0.7
    momentum: float = 0.9
    nesterov: bool = True

    def __post_init__(self) -> None:
        if self.lr <= 0 or not 0 <= self.momentum < 1:
            raise AlgorithmError(f"an outer optimizer needs lr > 0 and momentum in [0, 1), got {self.lr} and {self.momentum}")

    def step(self, previous: V, mean: V, velocity: V | None) -> tuple[V, V]:
        """The next global model and velocity; `velocity` is None before the first round."""
        gradient: V = previous - mean
        moved: V = gradient if velocity is None else velocity * self.momentum + gradient
        direction = gradient + moved * self.momentum if self.nesterov else moved
        return previous - direction * self.lr, moved
