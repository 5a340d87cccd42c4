"""What a step takes: gossip, averaging and stale gradients on clusters of V100s, beside the synchronous all_reduce.

Seconds of computation are the cost model's for ResNet-50 in fp32; those of communication its closed forms over the links and
cards of the cluster. A step's seconds are split into terms that sum to it:

    step = compute + barrier + latency + volume - hidden

compute: the mean step of a rank. barrier: what waiting adds, measured with free communication under the noise of STEP_SIGMA
(a lognormal factor per rank and step, an assumption). latency: the exchange of no bytes. volume: the rest of the exchange.
hidden: what computation covers, and what receivers with a faster
exchange than the slowest spare.
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable
from dataclasses import dataclass, fields
from functools import cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from experiments.relaxed.arrivals import merge_events
from experiments.relaxed.clock import round_seconds
from parsim.costs.communication.algorithms import exchange_seconds
from parsim.costs.communication.collectives import estimate_collective, estimate_send_recv
from parsim.costs.costs import Costs
from parsim.hardware.cluster import Cluster, cluster_from_profile
from parsim.hardware.compose import load_profile
from parsim.model.formats import Numerics
from parsim.model.load import load_model
from parsim.model.spec import ModelSpec
from parsim.plans.mesh import Mesh
from parsim.plans.mixing import Ada, MixingGraph, mixing_graph
from parsim.plans.synchronisation import parse_synchronisation
from parsim.predict.evaluate import simulated_step
from parsim.predict.problem import PlanningProblem
from parsim.search.by_hand import custom_plan
from parsim.work import Collective, Compute, OptimizerStep, Phase, SendRecv

Row = dict[str, Any]
STEP_SIGMA = 0.05
ROUNDS = 40
IMAGES = 1_281_167
BATCH = 32
ADA_START, ADA_GRAPHS, ADA_LEAST = 64, 6, 8
"""Ada's lattices have 64, 32, ..., 2 neighbours; from more than so many GPUs on."""
MODULES = 3
"""Decoupled modules of the stale-gradient row: three GPUs of a socket."""


@dataclass(frozen=True, kw_only=True)
class Terms:
    """Seconds per step (of `BATCH` samples on every GPU)."""

    compute_s: float
    barrier_s: float
    latency_s: float
    volume_s: float
    step_s: float

    @property
    def hidden_s(self) -> float:
        return self.compute_s + self.barrier_s + self.latency_s + self.volume_s - self.step_s


@cache
def resnet50() -> Any:
    return load_model(ModelSpec(name="resnet50"))


def phase_seconds(cluster: Cluster, batch: int) -> list[tuple[float, float]]:
    """Forward and backward of each component of ResNet-50, and the update as the last entry's backward."""
    model = resnet50()
    costs = Costs(model=model, cluster=cluster)
    seconds = [
        tuple(
            costs.estimate(Compute(component=component.name, phase=phase, samples=batch), 0).median_s
            for phase in (Phase.FORWARD, Phase.BACKWARD)
        )
        for component in model.components
    ]
    update = costs.estimate(OptimizerStep(elements=model.parameter_count, tensors=len(model.parameters)), 0).median_s
    return [*((float(forward), float(backward)) for forward, backward in seconds), (0.0, update)]


def noisy(n: int, seconds: float, sigma: float = STEP_SIGMA) -> Callable[[int], NDArray[np.float64]]:
    """Seconds of round t for n ranks: lognormal factors of mean 1."""
    return lambda t: seconds * np.random.default_rng([7, t, n]).lognormal(-0.5 * sigma**2, sigma, n)


def weight_bytes() -> int:
    return 4 * int(resnet50().parameter_count)


class Exchange:
    """Seconds of an exchange over W, per receiver, on a cluster; each matrix is priced once."""

    def __init__(self, cluster: Cluster, size_bytes: float, machines: int = 0) -> None:
        """`machines` > 0: machines of so many GPUs average inside, and W is among shards of machines."""
        self._cluster, self._size, self._per_node = cluster, size_bytes, machines
        self._known: dict[bytes, NDArray[np.float64]] = {}

    def __call__(self, matrix: NDArray[np.float64]) -> NDArray[np.float64]:
        key = np.packbits(matrix != 0).tobytes()
        if key not in self._known:
            self._known[key] = self._by_machine(matrix) if self._per_node else self._by_rank(matrix, self._size)
        return self._known[key]

    def _by_rank(self, matrix: NDArray[np.float64], size_bytes: float) -> NDArray[np.float64]:
        to, sender = np.nonzero((matrix != 0) & ~np.eye(len(matrix), dtype=bool))
        seconds = exchange_seconds(list(zip(sender.tolist(), to.tolist(), strict=True)), size_bytes, self._cluster)
        arrived = np.zeros(len(matrix))
        np.maximum.at(arrived, to, seconds)
        return arrived

    def _by_machine(self, matrix: NDArray[np.float64]) -> NDArray[np.float64]:
        """reduce_scatter inside, shards to the counterparts in the other machine, all_gather inside."""
        inside = all_reduce_s(self._cluster, self._size, tuple(range(self._per_node)))
        place = np.arange(len(matrix)) % self._per_node
        rails = np.where(place[:, None] == place[None, :], matrix, 0.0)
        return inside + self._by_rank(rails, self._size / self._per_node)


def all_reduce_s(cluster: Cluster, size_bytes: float, group: tuple[int, ...] | None = None) -> float:
    everyone = tuple(range(cluster.size)) if group is None else group
    work = Collective(operation="all_reduce", group=everyone, size_bytes=int(size_bytes))
    return estimate_collective(work, cluster).median_s


def gossip_terms(
    cluster: Cluster, graph: MixingGraph, timing: str, compute_s: float, machines: int = 0, more_bytes: int = 0
) -> Terms:
    """A round of gossip: the mean over ROUNDS noisy rounds. `more_bytes` beside the weights: push-sum sends a number too."""
    n = cluster.size

    def seconds(sigma: float, exchange: Callable[[NDArray[np.float64]], Any]) -> float:
        return round_seconds(timing, graph, noisy(n, compute_s, sigma), exchange, n=n, rounds=ROUNDS)

    empty, full = Exchange(cluster, 0.0, machines), Exchange(cluster, weight_bytes() + more_bytes, machines)
    latency = float(np.mean([empty(graph(t)).max() for t in range(graph.period)]))
    whole = float(np.mean([full(graph(t)).max() for t in range(graph.period)]))
    return Terms(
        compute_s=compute_s,
        barrier_s=seconds(STEP_SIGMA, lambda matrix: 0.0) - compute_s,
        latency_s=latency,
        volume_s=whole - latency,
        step_s=seconds(STEP_SIGMA, full),
    )


def all_reduce_terms(cluster: Cluster, compute_s: float, backward_s: float = 0.0, period: int = 1) -> Terms:
    """An all_reduce every `period` steps, of which `backward_s` seconds can be hidden at best."""
    n = cluster.size
    rounds = max(1, ROUNDS // period) * period if period < ROUNDS else period
    steps, slowest = noisy(n, compute_s), 0.0
    for first in range(0, rounds, period):
        slowest += float(sum(steps(t) for t in range(first, first + period)).max())
    whole, latency = all_reduce_s(cluster, weight_bytes()) / period, all_reduce_s(cluster, 0) / period
    waited = slowest / rounds
    return Terms(
        compute_s=compute_s,
        barrier_s=waited - compute_s,
        latency_s=latency,
        volume_s=whole - latency,
        step_s=waited + max(whole - backward_s, latency),
    )


def merge_terms(cluster: Cluster, compute_s: float, steps: int) -> Terms:
    """Commutative merging at every epoch's end, one worker after another at rank 0: its weights there, merged, and back."""
    n = cluster.size
    if n == 1:
        return Terms(compute_s=compute_s, barrier_s=0.0, latency_s=0.0, volume_s=0.0, step_s=compute_s)
    there = SendRecv(source=n - 1, destination=0, size_bytes=weight_bytes())
    empty = SendRecv(source=n - 1, destination=0, size_bytes=0)
    memory = cluster.devices[0].type.memory_bandwidth_bytes_per_s
    latency = 2.0 * estimate_send_recv(empty, cluster).median_s
    merge = 2.0 * estimate_send_recv(there, cluster).median_s + 3.0 * weight_bytes() / memory
    epochs = 5

    def epoch_s(worker: int, epoch: int) -> float:
        """The sum of `steps` noisy steps, by its mean and deviation."""
        draw = float(np.random.default_rng([11, worker, epoch]).standard_normal())
        return compute_s * (steps + STEP_SIGMA * steps**0.5 * draw)

    events = merge_events(epoch_s, n, merge_s=merge, epochs=epochs)
    return Terms(
        compute_s=compute_s,
        barrier_s=float(np.mean([event.start_s - event.ready_s for event in events])) / steps,
        latency_s=latency / steps,
        volume_s=(merge - latency) / steps,
        step_s=float(np.mean([event.end_s for event in events if event.epoch == epochs - 1])) / epochs / steps,
    )


def ada_terms(cluster: Cluster, timing: str, compute_s: float) -> Terms:
    """Ada on ring lattices that begin with ADA_START neighbours and halve: the mean over its graphs, each counted alike."""
    ada = Ada(n=cluster.size, kind="exponential", start=min(ADA_START, cluster.size - 2), rate=0.5)
    graphs = [ada.graph(epoch) for epoch in range(ADA_GRAPHS)]
    terms = [gossip_terms(cluster, graph, timing, compute_s) for graph in graphs]
    return Terms(**{term.name: float(np.mean([getattr(each, term.name) for each in terms])) for term in fields(Terms)})


def stale_terms(cluster: Cluster, batch: int, schedule: str) -> Terms:
    """Decoupled modules of MODULES GPUs each, gradients all_reduced among equal modules; a tick is 3 x 32 samples.

    fdg    every module runs a forward and a backward, each of another batch
    ddg    a batch's forward passes through all modules first, then all run their backward
    fr     as ddg, and every backward runs its forward again

    MODULES divide the GPUs. Exchanges follow the computation of their tick; modules differ in work, so the barrier holds that
    difference too, and with ddg and fr the wait for the forwards before.
    """
    n = cluster.size
    phases = phase_seconds(cluster, MODULES * batch)
    edges = balanced_edges([forward + backward for forward, backward in phases])
    forward, backward = (
        np.array([sum(entry[side] for entry in phases[first:last]) for first, last in itertools.pairwise(edges)])
        for side in (0, 1)
    )
    own = {"fdg": forward + backward, "ddg": backward, "fr": forward + backward}[schedule]
    before = np.zeros(MODULES) if schedule == "fdg" else forward

    def tick_s(factors: NDArray[np.float64]) -> float:
        """Of one draw of noise: the forwards of a chain one after another, then the slowest module."""
        by_chain = factors.reshape(-1, MODULES)
        slowest: np.float64 = ((by_chain @ before)[:, None] + by_chain * own).max()
        return float(slowest)

    waited = float(np.mean([tick_s(noisy(n, 1.0)(t)) for t in range(ROUNDS)]))
    busy = float((own + (0.0 if schedule == "fdg" else forward)).mean())
    latency, whole = (_stale_exchange_s(cluster, edges, batch, share, in_turn=schedule != "fdg") for share in (0.0, 1.0))
    return Terms(compute_s=busy, barrier_s=waited - busy, latency_s=latency, volume_s=whole - latency, step_s=waited + whole)


def _stale_exchange_s(cluster: Cluster, edges: list[int], batch: int, share: float, *, in_turn: bool) -> float:
    """Sums of gradients among equal modules, and activations between them: at once, or one after another."""
    model = resnet50()
    parameters = [4 * sum(entry.elements for entry in component.parameters) for component in model.components]
    groups = tuple(tuple(range(k, cluster.size, MODULES)) for k in range(MODULES))
    cuts = [model.value[model.components[last - 1].outputs[0]] for last in edges[1:-1]]
    reduced = [
        estimate_collective(
            Collective(operation="all_reduce", group=group, size_bytes=int(share * sum(parameters[edges[k] : edges[k + 1]]))),
            cluster,
            groups,
        ).median_s
        for k, group in enumerate(groups)
    ]
    sent = [
        estimate_send_recv(
            SendRecv(source=k, destination=k + 1, size_bytes=int(share * cut.bytes_per_sample * MODULES * batch)), cluster
        ).median_s
        for k, cut in enumerate(cuts)
    ]
    return max(reduced) + (sum(sent) if in_turn else max(sent))


def balanced_edges(seconds: list[float]) -> list[int]:
    """Where to cut components into MODULES consecutive parts so that the slowest is as fast as can be (exhaustive)."""
    count = len(seconds) - 1
    total = np.concatenate([[0.0], np.cumsum(seconds)])
    best = min(
        ((a, b) for a in range(1, count - 1) for b in range(a + 1, count)),
        key=lambda cut: max(total[cut[0]], total[cut[1]] - total[cut[0]], total[-1] - total[cut[1]]),
    )
    return [0, *best, len(seconds)]


def algorithms(cluster: Cluster, batch: int) -> dict[str, Terms]:
    """Every algorithm's terms on a cluster."""
    phases = phase_seconds(cluster, batch)
    compute_s, backward_s = sum(map(sum, phases)), sum(backward for _, backward in phases[:-1])
    n, per_node = cluster.size, len(cluster.profile.devices)
    epoch_steps = max(1, IMAGES // (n * batch))
    ways = {
        "all_reduce": all_reduce_terms(cluster, compute_s),
        "all_reduce behind the backward (at best)": all_reduce_terms(cluster, compute_s, backward_s),
        "local SGD, every 8 steps": all_reduce_terms(cluster, compute_s, period=8),
        "epoch averaging": all_reduce_terms(cluster, compute_s, period=epoch_steps),
        "merging at one server per epoch": merge_terms(cluster, compute_s, epoch_steps),
    }
    timings = ("adapt_combine", "combine_adapt")
    for name, timing in itertools.product(("ring", "torus", "exponential", "one_peer_exponential"), timings):
        ways[f"{name}, {timing}"] = gossip_terms(cluster, mixing_graph(name, n), timing, compute_s)
    machines = mixing_graph("hierarchical_one_peer", n, per_node=per_node)
    for timing in timings:
        ways[f"machine one-peer, {timing}"] = gossip_terms(cluster, machines, timing, compute_s, per_node)
    if n > ADA_LEAST:
        ways |= {f"Ada, {timing}": ada_terms(cluster, timing, compute_s) for timing in timings}
    peers = mixing_graph("one_peer_exponential", n)
    ways["push-sum, one peer, adapt_combine"] = gossip_terms(cluster, peers, "adapt_combine", compute_s, more_bytes=4)
    if n % MODULES == 0:
        for schedule in ("fdg", "ddg", "fr"):
            ways[f"stale gradients ({schedule}, 3 modules)"] = stale_terms(cluster, batch, schedule)
    return ways


def time_rows(nodes: tuple[int, ...]) -> list[Row]:
    """ResNet-50, fp32, 32 images per GPU, on Summit nodes of six V100s."""
    profile = load_profile("summit-v100")
    rows = []
    for count in nodes:
        cluster = cluster_from_profile(profile, nodes=count, network="infiniband-100g" if count > 1 else None)
        found = algorithms(cluster, BATCH)
        for name, terms in found.items():
            rows.append(
                {
                    "gpus": cluster.size,
                    "algorithm": name,
                    **{f"{term}_ms": 1e3 * getattr(terms, f"{term}_s") for term in ("compute", "barrier", "latency", "volume")},
                    "hidden_ms": 1e3 * terms.hidden_s,
                    "step_ms": 1e3 * terms.step_s,
                    "epoch_s": terms.step_s * IMAGES / (cluster.size * BATCH),
                    "against_all_reduce": terms.step_s / found["all_reduce"].step_s,
                }
            )
        print(f"times on {cluster.size} GPUs", file=sys.stderr, flush=True)
    return rows


BLUEFOG_BATCH, BLUEFOG_NODES = 64, 16


def scaling_rows() -> list[Row]:
    """Scaling efficiency at 128 GPUs: the step on one GPU over that on 128, without noise, 8 V100s a node on 25 Gb/s."""
    cluster = cluster_from_profile(load_profile("p3-16xlarge"), nodes=BLUEFOG_NODES, network="ethernet-25g")
    phases = phase_seconds(cluster, BLUEFOG_BATCH)
    compute_s, backward_s = sum(map(sum, phases)), sum(backward for _, backward in phases[:-1])
    n, reduced = cluster.size, all_reduce_s(cluster, weight_bytes())
    ways: dict[str, tuple[float, float]] = {
        "all_reduce after the backward": (reduced, compute_s + reduced),
        "all_reduce behind the backward, at best": (reduced, compute_s + max(0.0, reduced - backward_s)),
    }
    for name, machines in (("one_peer_exponential", 0), ("hierarchical_one_peer", 8)):
        graph = mixing_graph(name, n, per_node=machines) if machines else mixing_graph(name, n)
        exchange = Exchange(cluster, weight_bytes(), machines)
        worst = float(np.mean([exchange(graph(t)).max() for t in range(graph.period)]))
        level = "machine" if machines else "rank"
        for timing in ("combine_adapt", "adapt_combine"):
            rounds = graph.period * 4
            step_s = round_seconds(timing, graph, lambda t: compute_s, exchange, n=n, rounds=rounds)
            ways[f"one-peer, {level} level, {timing}"] = (worst, step_s)
    published = {"all_reduce after the backward": 0.66, "one-peer, machine level, combine_adapt": 0.95}
    return [
        {
            "way": name,
            "compute_ms": 1e3 * compute_s,
            "exchange_ms": 1e3 * exchange_s,
            "step_ms": 1e3 * step_s,
            "efficiency": compute_s / step_s,
            "published": published.get(name),
        }
        for name, (exchange_s, step_s) in ways.items()
    ]


RULES = {
    "all_reduce": "all_reduce",
    "ring": "gossip/1 ring",
    "one_peer_exponential": "gossip/1 one_peer_exponential",
    "exponential": "gossip/1 exponential",
}
"""Graph, and the text of its plan's synchronisation. A plan exchanges after the step (adapt_combine)."""


def epoch_rows(nodes: tuple[int, ...]) -> list[dict[str, Any]]:
    """One epoch of ResNet-50 on Summit nodes without noise: the step of a plan times the rounds, and the replicas' clock."""
    rows = []
    for count in nodes:
        cluster = cluster_from_profile(load_profile("summit-v100"), nodes=count, network="infiniband-100g")
        problem = PlanningProblem(
            model=resnet50(),
            cluster=cluster,
            global_batch=cluster.size * BATCH,
            numerics=Numerics(precision="fp32", optimizer="sgd"),
        )
        rounds = IMAGES // (cluster.size * BATCH)
        compute_s = sum(map(sum, phase_seconds(cluster, BATCH)))
        exchange, reduced = Exchange(cluster, weight_bytes()), all_reduce_s(cluster, weight_bytes())
        for graph, text in RULES.items():
            everyone = graph == "all_reduce"
            clock_s = round_seconds(  # a step is one number, an exchange one per receiver, sums over neighbours are free
                "all_reduce" if everyone else "adapt_combine",
                mixing_graph("complete" if everyone else graph, cluster.size),
                lambda t, compute_s=compute_s: compute_s,
                (lambda matrix, reduced=reduced: reduced) if everyone else exchange,
                n=cluster.size,
                rounds=rounds,
            )
            plan = custom_plan(problem, Mesh(dp=cluster.size), synchronisation=parse_synchronisation(text))
            step_s = simulated_step(problem, plan).step_s
            rows.append(
                {
                    "gpus": cluster.size,
                    "way": graph,
                    "rounds": rounds,
                    "step_ms": 1e3 * step_s,
                    "epoch_s": rounds * step_s,
                    "epoch_by_clock_s": rounds * clock_s,
                }
            )
            print(f"{cluster.size} GPUs, {graph}: {rounds * step_s:.3f} s", file=sys.stderr, flush=True)
    return rows
