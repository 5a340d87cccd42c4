"""What it would take to be faster: the search again on changed clusters, one change at a time."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

from parsim.app.answer import Answer
from parsim.app.ask import ask
from parsim.app.config import Question
from parsim.app.doctor import progress
from parsim.errors import ConfigError, ParsimError
from parsim.hardware.cluster import Cluster, cluster_from_profile
from parsim.hardware.profile import Profile, Sourced

MORE_GPUS = 1.5
TIMES = 2.0


@dataclass(frozen=True, slots=True, kw_only=True)
class WhatIf:
    """One change and what it gives.

    Attributes:
        faster: samples per second over those of the answer, less one; None where no plan was found. reaches: the aim.
        plan: a summary. reason: why there is no plan.
    """

    what: str
    faster: float | None
    reaches: bool
    plan: str = ""
    reason: str = ""

    def to_dict(self) -> dict[str, Any]:
        return {
            "change": self.what,
            "faster": self.faster,
            "reaches": self.reaches,
            "plan_summary": self.plan or None,
            "reason": self.reason or None,
        }

    def line(self) -> str:
        """`bandwidth between nodes x 2: +12%, not enough (dp ...)`."""
        if self.faster is None:
            return f"{self.what}: no plan ({self.reason})"
        return f"{self.what}: {self.faster:+.0%}, {'enough' if self.reaches else 'not enough'} ({self.plan})"


@dataclass(frozen=True, slots=True, kw_only=True)
class WhatWould:
    """Attributes: faster: the aim, as a part of samples per second. changes: each alone, the largest gain first."""

    faster: float
    changes: tuple[WhatIf, ...]

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON, under `what_would`."""
        return {"faster": self.faster, "changes": [change.to_dict() for change in self.changes]}

    def lines(self) -> list[str]:
        """The same for people."""
        enough = [change.what for change in self.changes if change.reaches]
        said = ", or ".join(enough) if enough else "none of these changes alone"
        return [
            f"What would be {self.faster:.0%} faster: {said}.",
            *(f"  {change.line()}" for change in self.changes),
        ]


def parse_faster(text: str) -> float:
    """`20%` or `0.2` as 0.2. Raises ConfigError for anything else."""
    number = text.strip()
    try:
        value = float(number.removesuffix("%")) / (100 if number.endswith("%") else 1)
    except ValueError as error:
        raise ConfigError(f"--faster {text!r}: write a share such as 20% or 0.2") from error
    if value >= 1 and not number.endswith("%"):
        raise ConfigError(f"--faster {text!r} would be {value:.0%}: write {number}%, or a share such as 0.2")
    return check_faster(value)


def check_faster(value: float) -> float:
    """Raise ConfigError for an aim that cannot be."""
    if not 0 < value < 100:
        raise ConfigError(f"faster = {value:g}: must be > 0 and < 100; 0.2 means 20% more samples per second")
    return value


def what_would(answer: Answer, faster: float) -> WhatWould:
    """Ask the question again with each change.

    Args:
        answer: to the question as it is. faster: the aim, 0.2 for 20% more samples per second.

    Raises:
        ConfigError: the aim cannot be, or no plan fits as it is.
    """
    check_faster(faster)
    if answer.question.cluster.group is not None:
        raise ConfigError(
            "--faster changes clusters of one kind of GPU, and [[cluster.group]] names several; change the groups"
        )
    if not answer.fits:
        raise ConfigError("--faster compares with the plan that was chosen, and none fits; change the question first")
    base = answer.prediction.throughput_samples_per_s.median
    found: list[WhatIf] = []
    for what, question in _changed(answer):
        try:
            with progress(f"Planning with {what}"):
                other = ask(question())
        except ParsimError as error:
            found.append(WhatIf(what=what, faster=None, reaches=False, reason=str(error).splitlines()[0]))
            continue
        if not other.fits:
            found.append(WhatIf(what=what, faster=None, reaches=False, reason="no plan fits"))
            continue
        gain = other.prediction.throughput_samples_per_s.median / base - 1
        found.append(WhatIf(what=what, faster=gain, reaches=gain >= faster, plan=other.prediction.plan.summary()))
    order = sorted(found, key=lambda change: -1.0 if change.faster is None else change.faster, reverse=True)
    return WhatWould(faster=faster, changes=tuple(order))


def _changed(answer: Answer) -> Iterator[tuple[str, Callable[[], Question]]]:
    cluster, question = answer.problem.cluster, answer.question
    nodes = max(device.node for device in cluster.devices) + 1

    def on(other: Callable[[], Cluster]) -> Callable[[], Question]:
        return lambda: question.sourced(cluster=other())

    if nodes > 1 and cluster.network is not None:
        yield f"bandwidth between nodes x {TIMES:g}", on(lambda: _with_network(cluster, nodes))
    if cluster.size > 1 and cluster.profile.links:
        yield f"bandwidth inside nodes x {TIMES:g}", on(lambda: _again(_faster_links(cluster.profile), cluster, nodes))
    yield f"memory of a GPU x {TIMES:g}", on(lambda: _again(_more_memory(cluster.profile), cluster, nodes))
    if cluster.network is not None or nodes > 1:
        more = _more_nodes(answer, nodes)
        table = question.plan.mesh
        both = "" if table is None or table.dp is None else " and batch"

        def grown() -> Question:
            config = _with_replicas(question, more / nodes)
            return config.sourced(cluster=_again(cluster.profile, cluster, more))

        yield f"GPUs{both} x {more / nodes:.3g} ({more * cluster.size // nodes} GPUs)", grown
    batch = question.training.model_copy(update={"global_batch": 2 * question.training.global_batch})
    yield "global batch x 2", lambda: question.changed(training=batch)


def _more_nodes(answer: Answer, nodes: int) -> int:
    """Half as many nodes more; twice as many where the batch divides over the replicas of the choice on those alone."""
    more, dp = max(nodes + 1, round(MORE_GPUS * nodes)), answer.prediction.plan.mesh.dp
    if answer.question.plan.mesh is not None and answer.question.plan.mesh.dp is not None:
        return more  # the batch grows, too

    def divides(count: int) -> bool:
        return dp * count % nodes == 0 and answer.question.training.global_batch % (dp * count // nodes) == 0

    return 2 * nodes if not divides(more) and divides(2 * nodes) else more


def _again(profile: Profile, cluster: Cluster, nodes: int) -> Cluster:
    """The same cluster of another profile or another number of nodes. Raises ProfileError."""
    per_node = len({device.index for device in cluster.devices if device.node == 0})
    chosen = None if per_node == len(profile.devices) else per_node
    return cluster_from_profile(profile, chosen, nodes=nodes, network=cluster.network)


def _times(number: Sourced) -> Sourced:
    return number.model_copy(update={"value": TIMES * number.value})


def _with_network(cluster: Cluster, nodes: int) -> Cluster:
    assert cluster.network is not None
    card = cluster.network.card
    faster = card.model_copy(update={"bandwidth_bytes_per_s": _times(card.bandwidth_bytes_per_s)})
    network = cluster.network.model_copy(update={"card": faster})
    return _again(cluster.profile, replace(cluster, network=network), nodes)


def _faster_links(profile: Profile) -> Profile:
    kinds = {
        name: kind.model_copy(update={"bandwidth_bytes_per_s": _times(kind.bandwidth_bytes_per_s)})
        for name, kind in profile.link_kinds.items()
    }
    return profile.model_copy(update={"link_kinds": kinds})


def _more_memory(profile: Profile) -> Profile:
    types = {
        name: kind.model_copy(update={"memory_bytes": _times(kind.memory_bytes)}) for name, kind in profile.device_types.items()
    }
    return profile.model_copy(update={"device_types": types})


def _with_replicas(config: Question, factor: float) -> Question:
    """With as many more replicas, and a batch for them, where the mesh names them; other axes stay. Raises ConfigError."""
    mesh, batch = config.plan.mesh, config.training.global_batch
    if mesh is None or mesh.dp is None:
        return config
    grown = mesh.dp * factor
    if grown != int(grown) or batch * factor != int(batch * factor):
        raise ConfigError(f"plan.mesh.dp = {mesh.dp} and global_batch = {batch} times {factor:g} are no whole numbers")
    plan = config.plan.model_copy(update={"mesh": mesh.model_copy(update={"dp": int(grown)})})
    training = config.training.model_copy(update={"global_batch": int(batch * factor)})
    return config.model_copy(update={"plan": plan, "training": training})
