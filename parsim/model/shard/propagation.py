"""Contents carried through the calls of one component: the content of each tensor in a shard, and the form of each call."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby

from parsim.model.component import FULL, MAXIMUM, ParameterShard
from parsim.model.runnable import CallProgram, Op
from parsim.model.shard.content import SHARD, WHOLE, Content, First, Piece, Refused, RuleOutcome, Step, operands_of
from parsim.model.shard.rules import rule_of
from parsim.model.shard.unlisted import consumed_in_runs, drawing_calls, tables_of_experts, whole_call


@dataclass(frozen=True, slots=True, kw_only=True)
class Propagation:
    """A component done in shards.

    Attributes:
        outcomes: per call. contents: by slot. parts: how parameters and buffers are cut, by name; the others stay whole.
        outputs: per output its content at the boundary: "partial", "maximum", "shard:d" or "full" (shard 0 takes its gradient).
        limit: what the number of shards must divide. rule: its name, as in `Sharding.rule`.
        whole_weights: matrices, kernels and tables that every shard applies whole.
        only_pieces: whether some full input is used piece by piece alone (it might as well come cut).
    """

    outcomes: tuple[RuleOutcome, ...]
    contents: Mapping[int, Content]
    parts: Mapping[str, ParameterShard]
    outputs: tuple[str, ...]
    limit: int
    rule: str
    whole_weights: int
    only_pieces: bool


def propagate(
    program: CallProgram, inputs: Sequence[Content], decided: Mapping[str, ParameterShard | None], ways: int = 1
) -> Propagation:
    """Run the rules over the calls of `program`.

    Args:
        inputs: content per input. decided: per weight met with a full input how it is cut, None for not at all.
        ways: the number of shards, which the arguments of rewritten calls are for.

    Raises:
        Refused: if the component cannot be done so. Undecided: if a weight is met that `decided` does not name.
    """
    state = {slot: key.name for key, slot in program.state}
    contents: dict[int, Content] = dict.fromkeys((*state, *(slot for _, slot in program.constants)), WHOLE)
    contents.update({slot: content for (_, slot, _), content in zip(program.inputs, inputs, strict=True)})
    outcomes: list[RuleOutcome] = []
    uses: dict[str, ParameterShard | None] = {}
    drawing, runs, tables = drawing_calls(program), consumed_in_runs(program), tables_of_experts(program)
    for number, op in enumerate(program.ops):
        step = Step(
            op=op,
            contents=contents,
            tensors=program.tensors,
            state=state,
            decided=decided,
            ways=ways,
            runs=runs,
            tables=tables,
            draws=number in drawing,
        )
        outcome = _answer(step)
        for slot in operands_of(op):
            if slot in state:
                how = outcome.converted.get(slot)
                part = _part(state[slot], how)
                if uses.setdefault(state[slot], part) != part:
                    raise Refused(f"{state[slot]} is used in two ways: {uses[state[slot]]} and {part}")
        for (_, slot), content in zip(op.outputs, outcome.contents, strict=True):
            if contents.get(slot, content) != content:
                raise Refused(f"{_name(op)} changes in place what was {contents[slot].form} and becomes {content.form}")
            contents[slot] = content
        outcomes.append(outcome)
    if any(contents[slot].form != FULL for _, slot in program.buffer_writes):
        raise Refused("a buffer is assigned a tensor that is not full")
    outputs = _outputs(program, contents)
    return Propagation(
        outcomes=tuple(outcomes),
        contents=contents,
        parts={name: part for name, part in uses.items() if part is not None},
        outputs=outputs,
        limit=_limit(program, contents, outcomes),
        rule=_rule_name([outcome.label for outcome in outcomes]),
        whole_weights=sum(outcome.whole_weight for outcome in outcomes),
        only_pieces=_only_pieces(program, contents, outcomes),
    )


def _part(name: str, how: First | Piece | None) -> ParameterShard | None:
    return ParameterShard(name=name, dim=how.dim, blocks=how.blocks, runs=how.runs) if type(how) is Piece else None


def _answer(step: Step) -> RuleOutcome:
    if any(step.contents[slot].form == MAXIMUM for slot in step.operands()):
        raise Refused(f"{_name(step.op)} of the maximum of a part")
    outcome = (rule_of(step.op.function) or whole_call)(step)
    if len(outcome.contents) != len(step.op.outputs):
        raise Refused(f"{_name(step.op)} makes {len(step.op.outputs)} tensors, and its rule describes {len(outcome.contents)}")
    return outcome


def _outputs(program: CallProgram, contents: Mapping[int, Content]) -> tuple[str, ...]:
    found = []
    for name, slot, _ in program.outputs:
        content = contents[slot]
        if content.form == SHARD:
            if content.blocks > 1 or content.runs or content.dim == 0:
                raise Refused(f"output {name} is cut in several runs or along dim 0")
            found.append(f"{SHARD}:{content.dim}")
            continue
        found.append(content.form)
    return tuple(found)


def _limit(program: CallProgram, contents: Mapping[int, Content], outcomes: Sequence[RuleOutcome]) -> int:
    cuts = [(slot, *content[1:]) for slot, content in contents.items() if content.form == SHARD]
    for outcome in outcomes:
        cuts += [(slot, *how) for slot, how in outcome.converted.items() if type(how) is Piece]
    return math.gcd(
        *(size for slot, dim, blocks, runs in cuts for size in runs or (program.tensors[slot].shape[dim] // blocks,)),
        *(outcome.limit for outcome in outcomes),
    )


def _only_pieces(program: CallProgram, contents: Mapping[int, Content], outcomes: Sequence[RuleOutcome]) -> bool:
    uses: dict[int, set[type[First | Piece | None]]] = {}
    for op, outcome in zip(program.ops, outcomes, strict=True):
        for slot in operands_of(op):
            uses.setdefault(slot, set()).add(type(outcome.converted.get(slot)))
    return any(contents[slot].form == FULL and uses.get(slot) == {Piece} for _, slot, flows in program.inputs if flows)


def _rule_name(labels: Sequence[str]) -> str:
    """In order, repetitions dropped; columns before an attention over own heads are "heads", over own queries "queries"."""
    names: list[str] = []
    for label in labels:
        if label in ("attention", "queries"):
            names = [("heads" if label == "attention" else label) if name == "column" else name for name in names]
        elif label:
            names.append(label)
    return "+".join(name for name, _ in groupby(names)) or "follow"


def _name(op: Op) -> str:
    return str(getattr(op.function, "__qualname__", op.function))
