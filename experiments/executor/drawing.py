"""Plans at random, from all that a search can answer: a question is drawn, then a way down the tree that the search opens.

A question has a machine of `processes` devices, equal or not, and keys of `[plan]` as a user may give them. Every node of the
tree is opened by the search's own code (`parsim.search.families`, `members`). So what is met at the end of a way is a plan
that the search of this question considers. Only the choice among nodes is random, where the search takes the least bound.

Some plans are then put on devices that are too small for them. What the search puts in their place is taken: recomputation by
bytes freed per second, or other stages.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from random import Random

from experiments.executor.models import SUBJECTS, Subject
from experiments.search.problems import ClusterDraw, built_cluster
from parsim.errors import ParsimError
from parsim.execute.job import PLAIN, TrainingRecipe
from parsim.hardware.cluster import Cluster
from parsim.model.formats import Numerics
from parsim.model.model import Model
from parsim.plans.constraints import PlanConstraints
from parsim.plans.layouts import Placement
from parsim.plans.mesh import Mesh
from parsim.plans.pipeline import PIPELINE_ORDERS
from parsim.plans.plan import AUTO, BY_OPERATOR, FULL, NONE, SELECTIVE, ZERO_STAGES, Plan, Recompute
from parsim.predict.problem import PlanningProblem
from parsim.program.placed import PlanIndex
from parsim.search.families import FAMILIES, mixed_meshes, nodes_of
from parsim.search.prices import placements_of
from parsim.search.space import Node
from parsim.search.tree import Members

AMPLE_BYTES = 2**40
MOST_TRIES = 300
CLIP_NORM = 0.3
"""Of all gradients together, where they are clipped."""

FREE, PINNED, IDLE = "free", "pinned", "idle"
KINDS = (FREE, FREE, PINNED, PINNED, IDLE, *PIPELINE_ORDERS)
"""Of questions, by turns: a few of every kind are in any ten plans."""
FAMILIES_OF = {
    FREE: ("dp", "dp", "dp", "mp", "hp", "hp", "adaptive"),
    PINNED: ("adaptive",),
    IDLE: ("single", "mp", "mp", "mp"),
}
PIPELINES = ("mp", "hp", "hp", "adaptive")
ON_FOUR = {("mp", IDLE), *(("adaptive", name) for name in PIPELINE_ORDERS)}
"""What takes more than two devices."""

MICROBATCHES = (1, 1, 2, 2, 2, 4, 4, 4, 8)
BUCKET_BYTES = (None, 2**9, 2**11, 2**13)
OPTIMIZERS = (("sgd_momentum", 2e-3), ("adam", 1e-3), ("adamw", 1e-3))


@dataclass(frozen=True, kw_only=True)
class DrawnPlan:
    """One plan, and how it is trained.

    Attributes:
        number: of the draw. with (subject, processes, seed) it says all.
        family: that the search opened. tight: whether it stands for a plan that did not fit.
    """

    subject: str
    processes: int
    seed: int
    number: int
    plan: Plan
    granularity: str
    family: str
    tight: bool
    optimizer: str
    learning_rate: float
    recipe: TrainingRecipe = PLAIN

    @property
    def name(self) -> str:
        return f"{self.subject}-{self.processes}-{self.seed}-{self.number}"

    def describe(self) -> str:
        """What it is, and the command that runs it alone."""
        return (
            f"{self.name}: {self.plan.summary()} {self.granularity} {self.optimizer}\n"
            f"  again: python -m experiments.executor.plans_executed --models {self.subject} --nproc {self.processes} "
            f"--seed {self.seed} --only {self.number}\n  plan: {json.dumps(json.loads(self.plan.to_json()))}"
        )


def drawn(subject: str, processes: int, seed: int, number: int) -> DrawnPlan:
    """The plan of that number, which leaves some of the machine's devices idle or none; the same for the same arguments. Raises
    ValueError: none was met in MOST_TRIES questions."""
    random, own = Random(f"{subject} {processes} {seed} {number}"), SUBJECTS[subject]
    optimizer, rate = random.choice(OPTIMIZERS)
    clips = random.random() < 0.15
    granularity = random.choice(own.granularities)
    model = own.model(granularity)
    for _ in range(MOST_TRIES):
        problem, family = _question(own, model, processes, number, optimizer, clips, random)
        try:
            plan = _at_random(_nodes(problem, family), random)
            tight = plan is not None and problem.recompute == AUTO and random.random() < 0.7
            if tight and plan is not None:
                plan = _to_fit(problem, plan, family, random)
        except ParsimError:  # this way ends: the batch does not divide, a value cannot be cut, pins have no placement
            continue
        if plan is None or not plan.executable or _least_samples(plan, model) < own.least_samples:
            continue
        return DrawnPlan(
            subject=subject,
            processes=processes,
            seed=seed,
            number=number,
            plan=plan,
            granularity=granularity,
            family=family,
            tight=tight,
            optimizer=optimizer,
            learning_rate=rate,
            recipe=TrainingRecipe(clip_norm=CLIP_NORM) if clips else PLAIN,
        )
    raise ValueError(f"no plan of {subject} on {processes} processes in {MOST_TRIES} questions")


def _least_samples(plan: Plan, model: Model) -> int:
    layout = PlanIndex(plan, model)
    return min(layout.local_samples(component.name) for component in model.components)


# --- questions --------------------------------------------------------------------------------------------------------


def _question(
    subject: Subject, model: Model, processes: int, number: int, optimizer: str, clips: bool, random: Random
) -> tuple[PlanningProblem, str]:
    """A problem on devices with ample memory, and the family of plans to look into."""
    kind = KINDS[number % len(KINDS)]
    families = FAMILIES_OF.get(kind, PIPELINES)
    families = tuple(name for name in families if processes > 2 or (name != "hp" and (name, kind) not in ON_FOUR))
    family = random.choice(families)
    batch = random.choice(subject.batches)
    return (
        PlanningProblem(
            model=model,
            cluster=_machine(processes, random.randrange(3)),
            global_batch=batch,
            numerics=Numerics(optimizer=optimizer),
            recompute=random.choice((AUTO, AUTO, AUTO, NONE, FULL, SELECTIVE, _some(model, random), _some(model, random))),
            constraints=PlanConstraints(
                microbatches=random.choice(MICROBATCHES),
                bucket_bytes=random.choice(BUCKET_BYTES),
                pipeline_order=kind if kind in PIPELINE_ORDERS else None,
                **_axes(family, kind, processes, random),
            ),
            pins=_pins(model, processes, batch, random) if family == "adaptive" else (),
            clip_gradients=clips,
        ),
        family,
    )


def _axes(family: str, kind: str, processes: int, random: Random) -> dict[str, int]:
    """Axes of a mesh that are asked for: of a pipeline its stages, and of one that leaves devices idle all of them."""
    if kind == IDLE and family != "single":
        size = random.randint(2, processes - 1)
        return {"pp": (pp := random.choice([pp for pp in range(1, size + 1) if size % pp == 0])), "dp": 1, "tp": size // pp}
    if kind == PINNED and processes > 2 and random.random() < 0.7:
        return {"pp": 1, "dp": 1}  # all on the tp axis, of which shards may take a part
    if kind not in PIPELINE_ORDERS:
        return {}
    if family == "adaptive":
        return {"pp": 2}
    stages = [pp for pp in range(2, processes + 1) if family == "mp" or processes // pp > 1]
    return {"pp": random.choice(stages)}


def _some(model: Model, random: Random) -> Recompute:
    """Some components by name, whole or by operator."""
    names = [component.name for component in model.components]
    return tuple(random.choice(("", BY_OPERATOR)) + name for name in names if random.random() < 0.5) or NONE


def _pins(model: Model, processes: int, batch: int, random: Random) -> tuple[tuple[str, Placement], ...]:
    """Placements that some components must have; shards as often as everything else together.

    Components that share a parameter are left free, because they must hold it in the same way.
    """
    share = random.choice((0.2, 0.5, 1.0))
    tp = random.choice([ways for ways in (2, processes) if ways <= processes])
    users = Counter(parameter.name for component in model.components for parameter in component.parameters)
    found = []
    for component in model.components:
        options = placements_of(component, Mesh(tp=tp), batch, places=range(tp))
        shards = [option for option in options if option.kind == "shard"]
        chosen = random.choice(shards if shards and random.random() < 0.5 else options)
        if random.random() < share and all(users[parameter.name] == 1 for parameter in component.parameters):
            found.append((component.name, chosen))
    return tuple(found)


@lru_cache(maxsize=64)
def _machine(devices: int, kind: int, memory_bytes: int = AMPLE_BYTES) -> Cluster:
    """Devices at a switch: all equal, the first faster, or the last."""
    kinds = (0,) * devices if kind == 0 else (1, *(0,) * (devices - 1)) if kind == 1 else (*(0,) * (devices - 1), 1)
    return built_cluster(
        ClusterDraw(
            kinds=kinds,
            peak_flop_per_s=(1e10, 3e10),
            memory_bandwidth=(1e10, 2e10),
            wiring="switch",
            link_bandwidth=(1e9, 1e8, 1e10)[kind],
            link_latency_s=(1e-5, 1e-6, 1e-4)[kind],
            memory_bytes=(memory_bytes, memory_bytes),
        )
    )


# --- ways down the tree -----------------------------------------------------------------------------------------------


def _nodes(problem: PlanningProblem, family: str) -> list[Node]:
    """The parts of a family as `search` begins with them."""
    if family != "adaptive":
        return FAMILIES[family].nodes(problem, family)
    some = mixed_meshes(problem)
    return nodes_of(Members(problem, family, mixed=True), some) if some else []


def _at_random(nodes: Sequence[Node], random: Random) -> Plan | None:
    """A plan below some nodes; None where the way ends."""
    while nodes:
        node = random.choice(nodes)
        if node.opened is None:
            return node.plan
        nodes = node.opened()
    return None


def _to_fit(problem: PlanningProblem, plan: Plan, family: str, random: Random) -> Plan | None:
    """What the search puts in the place of a plan that does not fit, on devices with a part of the memory for its activations.

    The recomputation that makes it fit, or other stages; None where nothing fits.
    """
    fullest = max(problem.memory(plan), key=lambda entry: entry.high_bytes)
    limit = int(fullest.high_bytes - random.uniform(0.05, 0.9) * fullest.line("activations"))
    small = tuple(replace(device, type=replace(device.type, memory_bytes=limit)) for device in problem.cluster.devices)
    short = replace(problem, cluster=replace(problem.cluster, devices=small))
    (node,) = Members(short, family, mixed=family == "adaptive").given([plan])
    others = [each for leaf in _leaves(node, random) if leaf.instead is not None for each in leaf.instead()]
    fitting = [leaf.plan for part in others for leaf in _leaves(part, random) if leaf.plan is not None]
    fitting = [found for found in fitting if all(entry.fits for entry in short.memory(found))]
    return random.choice(fitting) if fitting else None


def _leaves(node: Node, random: Random) -> list[Node]:
    """Single plans below a node, at most two of each part."""
    if node.opened is None:
        return [node]
    parts = node.opened()
    return [leaf for part in random.sample(parts, min(2, len(parts))) for leaf in _leaves(part, random)]


ORDERS = tuple(f"order {name}" for name in PIPELINE_ORDERS)
ZERO = tuple(f"zero {stage}" for stage in ZERO_STAGES)
PLACEMENTS = ("batch-sharded", "sharded", "replicated", "placed on one rank")
FEATURES = (
    *ORDERS,
    *ZERO,
    *PLACEMENTS,
    "axis dp",
    "axis tp",
    "axis pp",
    "placements mixed in a stage",
    "uneven stages",
    "several stages per rank",
    "several microbatches",
    "several buckets",
    "idle devices",
    "recomputed: none",
    "recomputed: whole",
    "recomputed: by operator",
    "recomputed: some components",
    "recomputed to fit",
    "gradients clipped",
    "adam",
    "adamw",
    "sgd_momentum",
    "two axes or more",
    "shards in groups",
)
"""What is counted; the last two take four processes."""


def features_of(drawn: DrawnPlan) -> list[str]:
    """Those of FEATURES that a plan has."""
    plan, layout = drawn.plan, PlanIndex(drawn.plan, SUBJECTS[drawn.subject].model(drawn.granularity))
    placed = [[placement for _, placement in stage.placed()] for stage in plan.stages]
    every = [placement for stage in placed for placement in stage]
    kinds = {placement.kind for placement in every} if plan.mesh.tp > 1 else set()
    sizes = {len(stage.components) for stage in plan.stages}
    whole, some = plan.recomputed, {name for name in plan.recomputed_by_operator if layout.recomputes_by_operator(name)}
    axes = {name for name in ("dp", "tp", "pp") if getattr(plan.mesh, name) > 1}
    divided = [bucket for bucket in layout.buckets if len(bucket.group) > 1]
    stages = {layout.zero_stage_of(bucket) if plan.zero_stage else 0 for bucket in divided} or {0}
    has = {
        f"order {plan.pipeline_order}": plan.mesh.pp > 1,
        **{f"zero {stage}": True for stage in stages},
        **{name: kind in kinds for name, kind in zip(PLACEMENTS, ("batch", "shard", "replicate", "place"), strict=True)},
        **{f"axis {name}": True for name in axes},
        "two axes or more": len(axes) > 1,
        "placements mixed in a stage": plan.mesh.tp > 1 and any(len(set(stage)) > 1 for stage in placed),
        "shards in groups": any(placement.kind == "shard" and placement.ways < plan.mesh.tp for placement in every),
        "uneven stages": len(sizes) > 1,
        "several stages per rank": plan.chunks > 1,
        "several microbatches": plan.microbatches > 1,
        "several buckets": any(sum(rank in bucket.group for bucket in divided) > 1 for rank in range(plan.world_size)),
        "idle devices": plan.world_size < drawn.processes,
        "recomputed: none": not whole and not some,
        "recomputed: whole": bool(whole),
        "recomputed: by operator": bool(some),
        "recomputed: some components": isinstance(plan.recompute, tuple),
        "recomputed to fit": drawn.tight and bool(whole or some),
        "gradients clipped": plan.clip_gradients,
        drawn.optimizer: True,
    }
    return [name for name in FEATURES if has.get(name)]


def counted(plans: Iterable[DrawnPlan]) -> dict[str, int]:
    """How many of the plans have each feature, in the order of FEATURES."""
    found = Counter(name for drawn in plans for name in features_of(drawn))
    return {name: found[name] for name in FEATURES}
