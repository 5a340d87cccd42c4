"""What it would take to be faster: the search again on changed clusters, one change at a time."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from fractions import Fraction
from typing import Any, TypeVar

from pydantic import BaseModel

from parsim.app.answer import Answer
from parsim.app.ask import ask
from parsim.app.config import Question
from parsim.app.doctor import progress
from parsim.errors import ConfigError, DoesNotFitError, ParsimError
from parsim.hardware.cluster import cluster_from_profile
from parsim.hardware.parts import Network
from parsim.hardware.profile import Profile

MORE_GPUS = 1.5
TIMES = 2.0
MachinePart = TypeVar("MachinePart", bound=BaseModel)


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
        """Sentences for people."""
        enough = ", or ".join(change.what for change in self.changes if change.reaches) or "none of these changes alone"
        return [f"What would be {self.faster:.0%} faster: {enough}.", *(f"  {change.line()}" for change in self.changes)]


def parse_faster(text: str) -> float:
    """`20%` or `0.2` as 0.2. Raises ConfigError for anything else."""
    number = text.strip()
    try:
        value = float(number.removesuffix("%")) / (100 if number.endswith("%") else 1)
    except ValueError as error:
        raise ConfigError(f"--faster {text!r}: write a share such as 20% or 0.2") from error
    if value >= 1 and not number.endswith("%"):
        raise ConfigError(f"--faster {text!r} would be {value:.0%}: write {number}%, or a share such as 0.2")
    if not 0 < value < 100:
        raise ConfigError(f"faster = {value:g}: must be > 0 and < 100; 0.2 means 20% more samples per second")
    return value


def what_would(answer: Answer, faster: float) -> WhatWould:
    """Ask the question again with each change.

    Args:
        answer: to the question as it is. faster: the aim, 0.2 for 20% more samples per second.

    Raises:
        ConfigError: no plan fits as it is, or the cluster has several kinds of GPU.
    """
    if answer.question.cluster.group is not None:
        raise ConfigError(
            "--faster changes clusters of one kind of GPU, and [[cluster.group]] names several; change the groups"
        )
    if not answer.fits:
        raise ConfigError("--faster compares with the plan that was chosen, and none fits; change the question first")
    base = answer.prediction.throughput_samples_per_s.median
    changes = []
    for what, question in _changed(answer):
        try:
            with progress(f"Planning with {what}"):
                other = ask(question())
            if other.search is not None and other.search.cut_short:
                changes.append(WhatIf(what=what, faster=None, reaches=False, reason="stopped by Ctrl-C, as were all after it"))
                break
            if not other.fits:
                raise DoesNotFitError("no plan fits")
        except ParsimError as error:
            changes.append(WhatIf(what=what, faster=None, reaches=False, reason=str(error).splitlines()[0]))
            continue
        gain = other.prediction.throughput_samples_per_s.median / base - 1
        changes.append(WhatIf(what=what, faster=gain, reaches=gain >= faster, plan=other.prediction.plan.summary()))
    changes.sort(key=lambda change: -1.0 if change.faster is None else change.faster, reverse=True)
    return WhatWould(faster=faster, changes=tuple(changes))


def _changed(answer: Answer) -> Iterator[tuple[str, Callable[[], Question]]]:
    """Every change by its name, and the function that makes the changed question. Raises ParsimError for one that cannot be."""
    cluster, question = answer.problem.cluster, answer.question
    profile, network = cluster.profile, cluster.network
    nodes = max(device.node for device in cluster.devices) + 1
    per_node = len({device.index for device in cluster.devices if device.node == 0})

    def on(profile: Profile = profile, network: Network | None = network, count: int = nodes) -> Question:
        first = None if per_node == len(profile.devices) else per_node
        return question.sourced(cluster=cluster_from_profile(profile, first, nodes=count, network=network))

    if nodes > 1 and network is not None:
        card = _faster(network.card, "bandwidth_bytes_per_s")
        yield f"bandwidth between nodes x {TIMES:g}", lambda: on(network=network.model_copy(update={"card": card}))
    if cluster.size > 1 and profile.links:
        links = {name: _faster(kind, "bandwidth_bytes_per_s") for name, kind in profile.link_kinds.items()}
        yield f"bandwidth inside nodes x {TIMES:g}", lambda: on(profile.model_copy(update={"link_kinds": links}))
    types = {name: _faster(kind, "memory_bytes") for name, kind in profile.device_types.items()}
    yield f"memory of a GPU x {TIMES:g}", lambda: on(profile.model_copy(update={"device_types": types}))
    mesh, batch = question.plan.mesh, question.training.global_batch
    if network is not None or nodes > 1:
        more = _more_nodes(answer, nodes)
        grows = mesh is not None and mesh.dp is not None

        def grown() -> Question:
            changed = on(count=more)
            if mesh is None or mesh.dp is None:
                return changed
            dp, samples = Fraction(mesh.dp * more, nodes), Fraction(batch * more, nodes)
            if dp.denominator > 1 or samples.denominator > 1:
                raise ConfigError(
                    f"plan.mesh.dp = {mesh.dp} and global_batch = {batch} times {more / nodes:g} are no whole numbers"
                )
            plan = question.plan.model_copy(update={"mesh": mesh.model_copy(update={"dp": int(dp)})})
            return changed.changed(plan=plan, training=question.training.model_copy(update={"global_batch": int(samples)}))

        yield f"GPUs{' and batch' if grows else ''} x {more / nodes:.3g} ({more * cluster.size // nodes} GPUs)", grown
    doubled = question.training.model_copy(update={"global_batch": 2 * batch})
    yield "global batch x 2", lambda: question.changed(training=doubled)


def _faster(part: MachinePart, key: str) -> MachinePart:
    """A part of a machine with TIMES one of its numbers."""
    number = getattr(part, key)
    return part.model_copy(update={key: number.model_copy(update={"value": TIMES * number.value})})


def _more_nodes(answer: Answer, nodes: int) -> int:
    """Half as many nodes more; twice as many where the batch divides over the replicas of the choice on those alone."""
    more, dp = max(nodes + 1, round(MORE_GPUS * nodes)), answer.prediction.plan.mesh.dp
    if answer.question.plan.mesh is not None and answer.question.plan.mesh.dp is not None:
        return more  # the batch grows, too

    def divides(count: int) -> bool:
        return dp * count % nodes == 0 and answer.question.training.global_batch % (dp * count // nodes) == 0

    return 2 * nodes if not divides(more) and divides(2 * nodes) else more
