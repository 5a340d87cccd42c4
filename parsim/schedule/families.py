"""The named strategies as families of plans: every member worth judging, one function per family, one row per name.

"adaptive" stands for all of them and the placements of `mixed_plans`; `parsim.schedule.search` knows it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from parsim.errors import ScheduleError
from parsim.plans.mesh import Mesh
from parsim.plans.plan import DEFAULT_BUCKET_BYTES, Plan, Stage
from parsim.predict.planning_problem import PlanningProblem
from parsim.registry import Registry
from parsim.schedule.placement.objective import Solution
from parsim.schedule.tensor import Best, adaptive_plans, uniform_plans, useful_plans

BUCKET_BYTES = (DEFAULT_BUCKET_BYTES, 4 * 1024 * 1024, 100 * 1024 * 1024)
MOST_MICROBATCHES = 64


def _powers_of_two(samples: int, most: int) -> list[int]:
    """1, 2, 4, ... that divide the replica's samples."""
    counts, count = [], 1
    while count <= min(samples, most):
        if samples % count == 0:
            counts.append(count)
        count *= 2
    return counts


def _whole_model(problem: PlanningProblem, strategy: str, replicas: int, bucket_choices: tuple[int, ...]) -> Iterator[Plan]:
    mesh = Mesh(dp=replicas)
    names = tuple(component.name for component in problem.model.components)
    if problem.global_batch % replicas:
        raise ScheduleError(
            f"global_batch ({problem.global_batch}) is not divisible by dp ({replicas}); "
            f"use a multiple of {replicas}, e.g. {max(1, round(problem.global_batch / replicas)) * replicas}"
        )
    for microbatches in _powers_of_two(problem.global_batch // replicas, MOST_MICROBATCHES):
        plans = [
            Plan(
                strategy=strategy,
                mesh=mesh,
                stages=(Stage(components=names, ranks=mesh.stage_ranks(0)),),
                global_batch=problem.global_batch,
                microbatches=microbatches,
                bucket_bytes=bucket_bytes,
                zero_stage=problem.zero_stage,
            )
            for bucket_bytes in bucket_choices
        ]
        yield from plans
        if all(entry.fits for entry in problem.memory(plans[0])):
            return  # more accumulation than memory asks for only costs


def single_plans(problem: PlanningProblem) -> Iterator[Plan]:
    """Plans on one device, with as many accumulation steps as memory may need.

    Args:
        problem: model, cluster and batch.
    """
    return _whole_model(problem, "single", 1, (DEFAULT_BUCKET_BYTES,))


def dp_plans(problem: PlanningProblem) -> Iterator[Plan]:
    """Plans with a replica per device, with bucket sizes around the default of PyTorch's DDP.

    Args:
        problem: model, cluster and batch.

    Raises:
        ScheduleError: the batch does not divide over the devices.
    """
    return _whole_model(problem, "dp", problem.cluster.size, _useful_buckets(problem))


def _useful_buckets(problem: PlanningProblem) -> tuple[int, ...]:
    """Bucket sizes that differ for this model: all that hold the whole model are one."""
    trained_bytes = sum(parameter.size_bytes for parameter in problem.model.trainable_parameters)
    useful = [size for size in BUCKET_BYTES if size < trained_bytes]
    return tuple(useful) or (DEFAULT_BUCKET_BYTES,)


def mp_plans(problem: PlanningProblem) -> Iterator[Plan]:
    """Plans with one replica: one stage per device, every component cut over all devices, and mixtures of both (pp x tp).

    Args:
        problem: model, cluster and batch.

    Raises:
        ScheduleError: no member exists; the message names the reason.
    """
    counts = _powers_of_two(problem.global_batch, MOST_MICROBATCHES)
    best, found = Best(), False
    no_pipeline: ScheduleError | None = None
    try:
        for plan in pipeline_plans(problem, "mp", Mesh(pp=problem.cluster.size), best):
            found = True
            yield plan
    except ScheduleError as error:
        no_pipeline = error
    for plan in uniform_plans(problem, "mp", replicated=False, microbatches=counts, best=best):
        found = True
        yield plan
    if not found and no_pipeline is not None:
        raise no_pipeline


def hp_plans(problem: PlanningProblem) -> Iterator[Plan]:
    """Plans on every pp x dp x tp mesh with dp above one and one other axis above one.

    Args:
        problem: model, cluster and batch.

    Raises:
        ScheduleError: no member exists.
    """
    best, found = Best(), False
    counts = _powers_of_two(problem.global_batch, MOST_MICROBATCHES)
    for pp in range(2, problem.cluster.size):
        if problem.cluster.size % pp == 0 and pp <= len(problem.model.components):
            mesh = Mesh(pp=pp, dp=problem.cluster.size // pp)
            if problem.global_batch % mesh.dp == 0:
                found = True
                yield from pipeline_plans(problem, "hp", mesh, best)
    for plan in uniform_plans(problem, "hp", replicated=True, microbatches=counts, best=best):
        found = True
        yield plan
    if not found:
        raise ScheduleError(
            f"hp needs dp > 1 and pp * tp > 1 with pp * dp * tp = {problem.cluster.size} and dp dividing the batch "
            f"({problem.global_batch}); use another number of devices or another batch"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Strategy:
    """One family of plans.

    Attributes:
        plans: its members, those that are likely best first; the search prices, simulates and ranks them. Raises ScheduleError
            where the family has none for the problem.
    """

    plans: Callable[[PlanningProblem], Iterator[Plan]]

    def __call__(self, problem: PlanningProblem) -> Iterator[Plan]:
        return self.plans(problem)


FAMILIES: Registry[Strategy] = Registry(
    "strategy",
    Strategy,
    {
        "single": Strategy(plans=single_plans),
        "dp": Strategy(plans=dp_plans),
        "mp": Strategy(plans=mp_plans),
        "hp": Strategy(plans=hp_plans),
    },
    error=ScheduleError,
)


def mixed_plans(problem: PlanningProblem, solutions: list[Solution] | None = None) -> Iterator[Plan]:
    """The best placement of every component by itself (`parsim.schedule.tensor`), with every bucket size of `dp_plans`.

    Args:
        problem: model, cluster and batch. solutions: a list that receives the solver's answers.
    """
    for plan in adaptive_plans(problem, microbatches=microbatch_counts(problem), solutions=solutions):
        for bucket_bytes in _useful_buckets(problem):
            yield replace(plan, bucket_bytes=bucket_bytes)


def microbatch_counts(problem: PlanningProblem) -> list[int]:
    """The numbers of microbatches that `mixed_plans` tries, in its order.

    Args:
        problem: model, cluster and batch.
    """
    return _powers_of_two(problem.global_batch, MOST_MICROBATCHES)


def pipeline_plans(problem: PlanningProblem, strategy: str, mesh: Mesh, best: Best | None = None) -> Iterator[Plan]:
    """Both pipeline orders and the microbatch counts that help, each with its own uneven stages.

    Args:
        problem: model, cluster and batch. strategy: name that the plans get.
        mesh: pp and dp. best: the fastest found so far, shared between calls.

    Raises:
        ScheduleError: the batch or the components do not divide so far, or no cut fits for any count.
    """
    if mesh.pp > len(problem.model.components):
        raise ScheduleError(
            f"{strategy} wants {mesh.pp} stages and {problem.model.name} has {len(problem.model.components)} components; "
            'use fewer devices or granularity "layer"'
        )
    if problem.global_batch % mesh.dp:
        raise ScheduleError(f"global_batch ({problem.global_batch}) is not divisible by dp ({mesh.dp}); use a multiple of it")
    counts = _powers_of_two(problem.global_batch // mesh.dp, MOST_MICROBATCHES)
    yield from useful_plans(problem, strategy, mesh, microbatches=counts, best=best)
