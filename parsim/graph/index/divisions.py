"""What indexes of plans have worked out and other plans of the same model do not change, kept on the Model.

Most of an index follows from a part of the plan alone: from how the model is divided over ranks, from what is recomputed
besides, or from how gradients are put into buckets. So a plan that differs in microbatches or ZeRO finds it there, and so does
a question about another batch.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable
from typing import TYPE_CHECKING, Any, Generic, Literal, TypeVar, overload

if TYPE_CHECKING:
    from parsim.graph.placed_model import PlacedModel
    from parsim.model.model import Model
    from parsim.plans.plan import Plan

T = TypeVar("T")

MOST = 128
"""Divisions that a Model keeps: those that were asked for last."""

FollowsFrom = Literal["division", "recomputed", "buckets", "zero"]
"""What a result follows from: mesh, stages, placements and order; what is recomputed too; how buckets are filled; and the ZeRO
stage too."""


class Divisions:
    """The results of the indexes of a Model, by the part of a plan from which they follow."""

    def __init__(self) -> None:
        self._known: OrderedDict[Hashable, dict[Hashable, dict[str, object]]] = OrderedDict()

    def of(self, plan: Plan) -> dict[FollowsFrom, dict[str, object]]:
        """By part of the plan and by name; whoever works something out puts it there.

        Args:
            plan: of the model that keeps this.
        """
        stages = tuple([(stage.components, stage.placements) for stage in plan.stages])
        division = plan.mesh, plan.pipeline_order, stages
        known = self._known.setdefault(division, {})
        self._known.move_to_end(division)
        if len(self._known) > MOST:
            self._known.popitem(last=False)
        in_microbatches = plan.zero_stage >= 2
        return {
            "division": known.setdefault((), {}),
            "recomputed": known.setdefault((plan.recompute, plan.segments), {}),
            "buckets": known.setdefault((plan.bucket_bytes, in_microbatches), {}),
            "zero": known.setdefault((plan.bucket_bytes, in_microbatches, plan.zero_stage), {}),
        }

    def forget(self) -> None:
        """As if no plan had been indexed."""
        self._known.clear()

    def __reduce__(self) -> tuple[type[Divisions], tuple[()]]:
        """Not sent to other processes."""
        return Divisions, ()


def divisions_of(model: Model, plan: Plan) -> dict[FollowsFrom, dict[str, object]]:
    """What earlier indexes of the model have worked out for this plan."""
    return model.remembered(Divisions).of(plan)


class shared:
    """A property of an index that is worked out once for all plans of a Model that agree in a part.

    Args:
        part: from which it follows, and from the Model, and nothing else.
    """

    def __init__(self, part: FollowsFrom) -> None:
        self._part: FollowsFrom = part

    def __call__(self, work_out: Callable[[Any], T]) -> SharedProperty[T]:
        return SharedProperty(self._part, work_out)


class SharedProperty(Generic[T]):
    """See `shared`.

    Attributes: part: of the plan from which it follows. work_out: from an index.
    """

    def __init__(self, part: FollowsFrom, work_out: Callable[[Any], T]) -> None:
        self.part: FollowsFrom = part
        self.work_out = work_out
        self.__doc__ = work_out.__doc__

    def __set_name__(self, owner: type[object], name: str) -> None:
        self._name = name

    @overload
    def __get__(self, index: None, owner: type[object]) -> SharedProperty[T]: ...
    @overload
    def __get__(self, index: PlacedModel, owner: type[object]) -> T: ...
    def __get__(self, index: PlacedModel | None, owner: type[object]) -> T | SharedProperty[T]:
        if index is None:
            return self
        known = index.worked_out[self.part]
        if self._name not in known:
            known[self._name] = self.work_out(index)
        found: Any = known[self._name]
        index.__dict__[self._name] = found  # the next one who asks this index does not come here
        return found  # type: ignore[no-any-return]
