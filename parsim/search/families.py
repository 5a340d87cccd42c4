"""The named strategies as families of plans: one row per name.

"adaptive" stands for all of them and the plans whose components each have the best placement: `parsim.search.search`
knows it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

from parsim.errors import ScheduleError
from parsim.plans.mesh import Mesh
from parsim.plans.plan import Plan
from parsim.predict.problem import PlanningProblem
from parsim.registry import Registry
from parsim.search.space import FEW_COMPONENTS, Node, inner_axes, is_large, is_small, meshes
from parsim.search.tensor import ways_of
from parsim.search.tree import Members


@dataclass(frozen=True, slots=True, kw_only=True)
class Strategy:
    """One family of plans.

    Attributes:
        plans: its members; the search bounds, simulates and ranks them. Raises ScheduleError where the family has none for the
            problem. None: all plans on `meshes`.
        meshes: those of its members, all of which the search then considers without listing them.
    """

    plans: Callable[[PlanningProblem], Iterator[Plan]] | None = None
    meshes: Callable[[PlanningProblem], list[Mesh]] | None = None

    def __post_init__(self) -> None:
        if (self.plans is None) == (self.meshes is None):
            raise ScheduleError("a strategy has either plans or meshes; give one of them")

    def __call__(self, problem: PlanningProblem) -> Iterator[Plan]:
        """All members, those that are impossible left out; with recomputation only where it is asked for.

        Raises:
            ScheduleError: there is none.
        """
        if self.plans is not None:
            yield from self.plans(problem)
            return
        assert self.meshes is not None
        name = next((key for key, row in FAMILIES.items() if row is self), "custom")
        members, some = Members(problem, name), self.meshes(problem)
        nodes_of(members, some)
        for mesh in some:
            yield from members.plans(mesh)

    def nodes(self, problem: PlanningProblem, name: str) -> list[Node]:
        """The family `name` as parts with lower bounds.

        Raises:
            ScheduleError: it has no member. The message names every reason.
        """
        assert self.meshes is not None
        return nodes_of(Members(problem, name), self.meshes(problem))


def nodes_of(members: Members, some: list[Mesh]) -> list[Node]:
    """The parts on these meshes: those of most devices, and one part for all that leave more of them idle.

    Raises:
        ScheduleError: there are none, with every reason.
    """
    by_size: dict[int, list[Mesh]] = {}
    for mesh in some:
        by_size.setdefault(mesh.size, []).append(mesh)
    sizes = sorted(by_size, reverse=True)
    reasons: dict[str, None] = {}
    for number, size in enumerate(sizes):
        nodes = _on_meshes(members, by_size[size], reasons)
        if nodes:
            dividing = ([mesh for mesh in by_size[size] if members.divides(mesh)] for size in sizes[number + 1 :])
            fewer = members.of_fewer_devices([some for some in dividing if some], _on_meshes)
            if is_small(members.problem):
                return nodes + fewer
            if all(node.late for node in nodes) and not members.mixed:
                nodes = [replace(node, late=False) for node in nodes]
            return nodes + [replace(node, late=True) for node in fewer]
    raise ScheduleError("; ".join(reasons) or f"{members.strategy} has no mesh of {members.problem.cluster.size} devices")


def _on_meshes(members: Members, some: Sequence[Mesh], reasons: dict[str, None]) -> list[Node]:
    """The parts on these meshes, with the reasons why others have none."""
    nodes: list[Node] = []
    for mesh in some:
        try:
            nodes += members.of_mesh(mesh)
        except ScheduleError as error:
            reasons[str(error)] = None
    return nodes


def mixed_meshes(problem: PlanningProblem) -> list[Mesh]:
    """Meshes with a tp axis on which every component may have a placement of its own, which makes replicas there too. So a dp
    axis beside it adds little, and is left out where a model has many components, as pieces of the sequence are. None where the
    constraints give tp, for then all that can be cut is cut, or where layers are placed alike."""
    constraints = problem.constraints
    if constraints.tp is not None or constraints.layers_alike:
        return []
    few = len(problem.model.components) <= FEW_COMPONENTS
    if inner_axes(problem)[0] > 1 and not few and constraints.cp is None:
        return []
    most = problem.cluster.most_on_a_node if is_large(problem) else problem.cluster.size
    widths = range(2, most + 1)
    return list(meshes(problem, lambda _pp, dp, tp: tp in widths and (few or dp == (constraints.dp or 1)), widths))


def _single(problem: PlanningProblem) -> list[Mesh]:
    """One device, which has whole sequences and all experts."""
    if inner_axes(problem) != (1, 1):
        raise ScheduleError("one device has nothing to divide a sequence or experts over; drop cp and ep")
    return _kept(problem, "single", [Mesh()])


def _dp(problem: PlanningProblem) -> list[Mesh]:
    """A replica per device, of all devices or of fewer."""
    return _kept(problem, "dp", [mesh for mesh in meshes(problem, lambda pp, _, tp: pp == tp == 1, ()) if mesh.size > 1])


def _mp(problem: PlanningProblem) -> list[Mesh]:
    """One replica: a stage per device, every component cut over all devices, and mixtures of both (pp x tp)."""
    some = [mesh for mesh in meshes(problem, lambda _pp, dp, _tp: dp == 1, ways_of(problem)) if mesh.size > 1]
    whole = inner_axes(problem) == (1, 1)
    return _kept(problem, "mp", some or ([Mesh(pp=problem.cluster.size)] if whole else []))  # too few components: it says so


def _hp(problem: PlanningProblem) -> list[Mesh]:
    """Every pp x dp x tp mesh with dp above one and another axis above one."""
    batch = problem.global_batch
    ways = ways_of(problem)
    hybrid = list(meshes(problem, lambda pp, dp, tp: dp > 1 and pp * tp > 1 and batch % dp == 0, ways))
    if not hybrid and not problem.constraints.axes:
        raise ScheduleError(
            f"hp needs dp > 1 and pp * tp > 1 with pp * dp * tp at most {problem.cluster.size} and dp dividing the batch "
            f"({problem.global_batch}); use another number of devices or another batch"
        )
    return _kept(problem, "hp", hybrid or list(meshes(problem, lambda pp, dp, tp: dp > 1 and pp * tp > 1, ways)))


def _kept(problem: PlanningProblem, name: str, some: list[Mesh]) -> list[Mesh]:
    """The meshes that keep the constraints. Raises ScheduleError if none does."""
    kept = [mesh for mesh in some if problem.constraints.allow(mesh)]
    if not kept:
        axes, framework = problem.constraints.axes, problem.constraints.framework
        if framework:
            raise ScheduleError(f"no mesh of {name} has {axes}, which plan.mesh asks for or {framework} runs alone")
        raise ScheduleError(f"plan.mesh asks for {axes}, which no mesh of {name} has; drop it or take another strategy")
    return kept


FAMILIES: Registry[Strategy] = Registry(
    "strategy",
    Strategy,
    {
        "single": Strategy(meshes=_single),
        "dp": Strategy(meshes=_dp),
        "mp": Strategy(meshes=_mp),
        "hp": Strategy(meshes=_hp),
    },
    error=ScheduleError,
)
