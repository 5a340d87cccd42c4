"""The content of a tensor inside one shard of a component, and the interface of a sharding rule to one recorded call.

All rules keep one invariant. The gradient of a *full* tensor is, in each shard, a summand of the true one. The gradient
of a *partial* tensor (a summand of the true value) is the whole true one. The gradient of a *shard* is its own piece. So
a full tensor may become a piece or a summand inside a shard at no cost, and nothing may become full.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from parsim.errors import ModelError
from parsim.model.component import FULL, MAXIMUM, PARTIAL, ParameterShard
from parsim.model.runnable import Nested, Op, Ref, TensorKind

SHARD = "shard"


class Content(NamedTuple):
    """`form` is full, partial, maximum or shard.
    Of a shard, dim `dim` is `blocks` equal runs, each cut into as many pieces as ranks; `runs`: their sizes if not equal."""

    form: str
    dim: int = 0
    blocks: int = 1
    runs: tuple[int, ...] = ()

    @property
    def text(self) -> str:
        """The name that `Sharding` has for it: "full", "partial", "maximum" or "shard:d"."""
        return f"{SHARD}:{self.dim}" if self.form == SHARD else self.form


WHOLE = Content(FULL)
SUMMAND = Content(PARTIAL)
LARGEST_OF_PART = Content(MAXIMUM)
"""Of a value without a gradient: the whole one is the largest of the shards'. No call may go on with it."""


def cut_along(dim: int, blocks: int = 1, runs: tuple[int, ...] = ()) -> Content:
    """A piece of dim `dim`."""
    return Content(SHARD, dim, blocks, runs)


class ShardNumber(NamedTuple):
    """Stands in rewritten arguments for the number of the shard."""


class Refused(ModelError):
    """A call cannot be done in shards with these contents."""


class Undecided(Exception):
    """Whether to cut a weight is open: one of `options` (None: keep it whole) must be chosen for `name`."""

    def __init__(self, name: str, options: tuple[ParameterShard | None, ...]) -> None:
        super().__init__(name)
        self.name = name
        self.options = options


@dataclass(frozen=True, slots=True, kw_only=True)
class RuleOutcome:
    """A rule's answer for one call.

    Attributes:
        contents: per output of the call.
        converted: as what operands (by slot) that are full enter the call. As a summand: shard 0 takes it, the others zeros.
            As a piece: every shard takes its own; a parameter or buffer taken so is held as that piece.
        function, arguments: what to call instead, if not what was recorded (with its arguments, converted ones replaced).
        label: what was done to a weight: column, row, vocabulary, channels_out, channels_in; or "attention".
        whole_weight: a matrix, kernel or table was used without being cut.
        limit: what the number of shards must divide beyond the sizes that are cut (heads); 0: nothing.
    """

    contents: tuple[Content, ...]
    converted: Mapping[int, Content] = field(default_factory=dict)
    function: Callable[..., Any] | None = None
    arguments: tuple[Any, ...] | None = None
    label: str = ""
    whole_weight: bool = False
    limit: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """One recorded call as a rule sees it; shapes are those of the uncut tensors.

    Attributes:
        contents, state: by slot; `state` names parameters and buffers. decided: per weight how it is cut (None: not).
        ways: how many shards there are; 1 while only contents are asked for.
        runs: slots whose last dim the calls after it take apart in unequal runs, with the sizes.
        tables: slots that products with experts read as their tables.
        draws: whether a call without a rule may draw random numbers, or does what cannot be seen.
    """

    op: Op
    contents: Mapping[int, Content]
    tensors: Sequence[TensorKind]
    state: Mapping[int, str]
    decided: Mapping[str, ParameterShard | None]
    ways: int
    runs: Mapping[int, tuple[int, ...]] = field(default_factory=dict)
    tables: frozenset[int] = frozenset()
    draws: bool = False

    @property
    def name(self) -> str:
        """What the call's function is called, for messages."""
        return self.op.name

    def given(self, name: str, place: int, default: Any = None) -> Any:
        """The argument called `name`, or at `place`."""
        return self.op.argument(name, place, default)

    def operands(self) -> tuple[int, ...]:
        """The slots the call reads, each once, in order."""
        return operands_of(self.op)

    @property
    def forms(self) -> set[str]:
        """The forms of all that the call reads."""
        return {self.contents[slot].form for slot in self.operands()}

    def content(self, value: Any) -> Content:
        """Full for what is not a tensor."""
        return self.contents[value.slot] if type(value) is Ref else WHOLE

    def shape(self, value: Ref) -> tuple[int, ...]:
        return self.tensors[value.slot].shape

    def made(self, number: int = 0) -> tuple[int, ...]:
        """Shape of an output."""
        return self.tensors[self.op.outputs[number][1]].shape

    def same(self, content: Content) -> RuleOutcome:
        """Every output has this content."""
        return RuleOutcome(contents=(content,) * len(self.op.outputs))

    def whole(self, *, weight: bool = True) -> RuleOutcome:
        """Every shard makes the whole call. `weight`: with a matrix, kernel or table that is not cut."""
        return RuleOutcome(contents=(WHOLE,) * len(self.op.outputs), whole_weight=weight)

    def local(self, shape: Sequence[int], dim: int) -> tuple[int, ...]:
        """The shape of a shard that is cut in `dim`."""
        return tuple(size // self.ways if place == dim else size for place, size in enumerate(shape))

    def decision(self, weight: Ref, options: Iterable[tuple[int, int]], runs_dim: int | None = None) -> ParameterShard | None:
        """How a weight is cut: None, or one of the (dim, blocks) its sizes allow. Raises Undecided.
        `runs_dim`: the dim that makes the output's last one, which may be cut in the runs that the output is taken apart in."""
        name = self.state.get(weight.slot)
        if name is None:
            return None
        if name not in self.decided:
            shape = self.shape(weight)
            cuts = [
                ParameterShard(name=name, dim=dim, blocks=blocks)
                for dim, blocks in options
                if shape[dim] % blocks == 0 and shape[dim] > blocks
            ]
            runs = self.runs.get(self.op.outputs[0][1])
            if runs_dim is not None and runs is not None:
                cuts.append(ParameterShard(name=name, dim=runs_dim, runs=runs))
            raise Undecided(name, (*cuts, None))
        return self.decided[name]


Rule = Callable[[Step], RuleOutcome]


def operands_of(op: Op) -> tuple[int, ...]:
    """The slots a call reads, each once, in order."""
    return tuple(dict.fromkeys(_refs((*op.arguments, *(value for _, value in op.keywords)))))


def _refs(values: Iterable[Any]) -> Iterator[int]:
    for value in values:
        if type(value) is Ref:
            yield value.slot
        elif type(value) is Nested:
            yield from _refs(value.items)
