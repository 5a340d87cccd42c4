"""A model as one rank of a context-parallel or expert-parallel group has it.

A sample is divided over cp ranks by its sequence: every rank has tokens / cp of it, and all work on tokens is divided. Queries
are those of its own tokens. Keys and values are all, and come from the other ranks (`InnerExchange`). Under a causal mask
pieces are taken to be cut so that all ranks have the same work (each an early and a late part of the sequence).

Experts are divided over ep ranks: a rank holds every ep-th part of them, and the tokens of ep ranks visit these. With
balanced experts it has the work that it would have alone, over fewer weights. The fullest rank of ep has more visits than
the mean (`ExpertRouting`). A capacity factor replaces this: every expert computes that many times its mean, padded.

Sources: Liu et al., "Ring Attention with Blockwise Transformers" (2023); Fedus et al., "Switch Transformers" (2022), section
2.2.

Leaves out: halos of convolutions along the sequence (refused), and tokens that a capacity drops.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, replace
from fractions import Fraction
from statistics import NormalDist
from typing import Any, Literal, TypeVar

from parsim.errors import PlanError
from parsim.model.component import (
    Component,
    DividedSize,
    Footprint,
    InnerExchange,
    Operator,
    OperatorShard,
    Sharding,
    Size,
    Value,
)
from parsim.model.model import Model

# How tokens reach the experts that they visit, and come back: the bytes that travel, the fullest rank, and what hides them.
#
# A dispatcher either sends a token once for every expert that it visits ("all_to_all"), or once to every rank and node among
# them ("deepep", "hybridep"). Of k visits spread at random over n places, n (1 - (1 - 1/n)^k) places have at least one.
#
# The fullest of ep ranks has more visits than the mean, by the mean of the largest of ep normal deviates. Their spread is that
# of tokens that choose at random, and of experts that are chosen more often than others (`ExpertRouting.skew`).
#
# Sources: Megatron Core's MoE guide (--moe-token-dispatcher-type, --overlap-moe-expert-parallel-comm, --delay-wgrad-compute);
# deepseek-ai/DeepEP README @dd758caf4518: tokens are forwarded from the network to NVLink, so each crosses once per node.
#
# Leaves out: experts that are chosen together, nodes to which a router keeps, and multiprocessors that a dispatcher takes.

Dispatcher = Literal["all_to_all", "deepep", "hybridep"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertRouting:
    """Attributes:
    capacity_factor: visits that an expert has room for (and computes, padded) over their mean; 0: as many as come.
    skew: standard deviation of the visits of single experts over their mean, beyond chance; 0: balanced.
    dispatcher: what sends the tokens.
    overlapped: exchanges run beside the computation of another microbatch.
    delayed: gradients of the experts' weights are computed when the exchange behind them has begun.
    """

    capacity_factor: float = 0.0
    skew: float = 0.0
    dispatcher: Dispatcher = "all_to_all"
    overlapped: bool = False
    delayed: bool = False

    @property
    def sends_once(self) -> bool:
        """Whether a token travels once to each rank and node, however many experts it visits there."""
        return self.dispatcher != "all_to_all"

    def load(self, visits: float, experts: int, ways: int) -> float:
        """Visits of the fullest of so many ranks over their mean.
        `visits`: the mean of a rank. `experts`: of a rank."""
        return self.capacity_factor or busiest_share(visits, ways, self.skew / math.sqrt(experts))


BALANCED = ExpertRouting()


def busiest_share(visits: float, ways: int, skew: float = 0.0) -> float:
    """Visits of the fullest of so many ranks over their mean, if every visit chooses a rank at random.

    1 + m sqrt((1 - 1/n) / mean + skew^2), with m the mean of the largest of n standard normal numbers (Blom's approximation).

    Args:
        visits: the mean of a rank. ways: ranks. skew: relative standard deviation of how likely ranks are chosen.
    """
    if ways == 1 or visits <= 0:
        return 1.0
    largest = NormalDist().inv_cdf((ways - 0.375) / (ways + 0.25))
    return min(float(ways), 1.0 + largest * math.sqrt((1 - 1 / ways) / visits + skew**2))


def places_visited(places: int, visits: int) -> float:
    """The mean number of different places among so many visits, each at a place chosen at random."""
    return places * (1 - (1 - 1 / places) ** visits)


# The model of one rank.

EXPERTS = re.compile(r"(^|\.)experts?\b")
"""In the name of a parameter: it belongs to an expert."""


def divided_model(
    model: Model, *, cp: int, ep: int, element_bytes: int, ring: bool = True, routing: ExpertRouting = BALANCED
) -> Model:
    """The model of one rank; the same object for cp = ep = 1 without a capacity factor.

    `model`: whole. `cp`, `ep`: ranks over which the sequence and the experts are divided. `element_bytes`: of keys, values and
    tokens as they are sent. `ring`: keys and values come one piece after the other, so two are held at once; else all of them.
    `routing`: of tokens to experts. Raises PlanError: the model has no attention (cp) or no experts (ep) that parsim knows;
    sizes that do not divide.
    """
    if cp == ep == 1 and not routing.capacity_factor:
        return model
    if cp > 1 and not any(operator.kind == "attention" for c in model.components for operator in c.operators):
        raise PlanError(
            f"mesh.cp = {cp} divides the sequence that attention reads, and {model.name} has no attention operator; use cp = 1 "
            "(attention written as separate products is not divided)"
        )
    counts = {name: count for c in model.components if (count := _expert_count(c)) for name in (c.name,)}
    if (ep > 1 or routing.capacity_factor) and not counts:
        raise PlanError(
            f"mesh.ep = {ep}, capacity_factor = {routing.capacity_factor:g}: {model.name} has no experts: no component with "
            "parameters named .experts. and a product over several of them; use ep = 1 and no capacity factor"
        )
    for name, count in counts.items():
        if count % ep:
            nearest = max(ways for ways in range(1, ep) if count % ways == 0)
            raise PlanError(f"mesh.ep = {ep} must divide the {count} experts of {name}; the nearest below that does: {nearest}")
    components = tuple(_component(c, cp, ep, element_bytes, ring, routing) for c in model.components)
    values = model.values if cp == 1 else tuple(_value(value, cp) for value in model.values)
    return replace(model, components=components, values=values)


def experts_of(model: Model) -> int:
    """The greatest number of ranks over which the experts of all components can be divided; 1: there are none."""
    return math.gcd(*(_expert_count(component) for component in model.components)) or 1


def tokens_of(model: Model) -> int:
    """Tokens of a sample that attention reads and that can be divided; 1: parsim knows of none."""
    return math.gcd(*(dict(o.shape)["q"] for c in model.components for o in c.operators if o.kind == "attention")) or 1


def _expert_count(component: Component) -> int:
    """Experts of a component, by the products over several of them; 0: none."""
    if not any(EXPERTS.search(parameter.name) for parameter in component.parameters):
        return 0
    return max((dict(operator.shape).get("problems", 1) for operator in _experts(component).values()), default=0)


def _experts(component: Component) -> dict[int, Operator]:
    """By number the operators that experts run: products of parameters over several problems."""
    return {
        number: operator
        for number, operator in enumerate(component.operators)
        if operator.kind == "matmul" and operator.parameter_bytes and dict(operator.shape).get("problems", 1) > 1
    }


def _component(component: Component, cp: int, ep: int, element_bytes: int, ring: bool, routing: ExpertRouting) -> Component:
    context = _context_bytes(component, element_bytes) if cp > 1 else 0
    made = _piece(component, cp, context, ring) if cp > 1 else component
    experts = _experts(made) if _expert_count(component) else {}
    visits = max((_rows(operator) for operator in experts.values()), default=0)
    sent = visits * max((dict(operator.shape)["k"] for operator in list(experts.values())[:1]), default=0) * element_bytes
    load = routing.load(visits, max(1, _expert_count(component) // ep), ep) if experts else 1.0
    if experts and (ep > 1 or routing.capacity_factor):
        made = replace(
            made,
            operators=tuple(
                _expert(operator, ep, load) if number in experts else operator for number, operator in enumerate(made.operators)
            ),
            parameters=tuple(
                replace(parameter, elements=parameter.elements // ep, expert_ways=ep)
                if ep > 1 and EXPERTS.search(parameter.name)
                else parameter
                for parameter in made.parameters
            ),
        )
    inside = InnerExchange(
        context_ways=cp if context else 1,
        context_bytes=context,
        expert_ways=ep if experts else 1,
        expert_bytes=round(sent * (load if routing.skew else routing.capacity_factor or 1.0)) if ep > 1 else 0,
        expert_visits=_visits_of_token(component) if experts and routing.sends_once else 0,
        overlapped=routing.overlapped,
        delayed=routing.delayed,
        experts=tuple(experts),
    )
    return replace(made, inside=inside) if inside.context_ways > 1 or inside.expert_ways > 1 else made


def _rows(operator: Operator) -> int:
    """Visits of one sample to all experts."""
    shape = dict(operator.shape)
    return shape["m"] * shape["problems"]


def _visits_of_token(component: Component) -> int:
    """How many experts each token visits, by the products that see every token once."""
    products = [dict(operator.shape) for operator in component.operators if operator.kind == "matmul"]
    tokens = max((shape["m"] for shape in products if shape.get("problems", 1) == 1), default=0)
    visits = max(shape["m"] * shape["problems"] for shape in products if shape.get("problems", 1) > 1)
    return max(1, round(visits / tokens)) if tokens else 1


def _expert(operator: Operator, ep: int, load: float) -> Operator:
    """On one of ep ranks: fewer experts, each with the visits of all of them."""
    shape = dict(operator.shape)
    shape["problems"] //= ep
    shape["m"] = math.ceil(shape["m"] * ep * load)
    share = shape["m"] * shape["problems"] / _rows(operator)
    return replace(
        operator,
        shape=tuple(shape.items()),
        forward_flop=operator.forward_flop * share,
        activation_bytes=round(operator.activation_bytes * share),
        parameter_bytes=operator.parameter_bytes // ep,
    )


def _context_bytes(component: Component, element_bytes: int) -> int:
    """Keys and values of one sample, which a group exchanges: of as many heads as queries unless "kv_heads" says less."""
    total = 0
    for operator in component.operators:
        if operator.kind == "attention":
            shape = dict(operator.shape)
            depth = shape["d"] + shape.get("dv", shape["d"])
            total += operator.count * shape.get("kv_heads", shape["heads"]) * depth * shape["kv"] * element_bytes
    return total


def _piece(component: Component, cp: int, context_bytes: int, ring: bool) -> Component:
    """One of cp pieces of the sequence of a component."""
    operators = tuple(_token_operator(component.name, operator, cp) for operator in component.operators)
    held = 2 * context_bytes // cp if ring else context_bytes

    def cut(part: OperatorShard) -> OperatorShard:
        before, after = component.operators[part.number].activation_bytes, operators[part.number].activation_bytes
        share = Fraction(after, before) if before else Fraction(0)
        return replace(part, activation_bytes=min(after, int(part.activation_bytes * share)))

    shardings = tuple(
        replace(_piece_memory(sharding, cp, held), operators=tuple(map(cut, sharding.operators)))
        for sharding in component.shardings
    )
    return replace(_piece_memory(component, cp, held), operators=operators, shardings=shardings)


Memory = TypeVar("Memory", Component, Sharding, Footprint[Size], Footprint[DividedSize])


def _piece_memory(memory: Memory, cp: int, held: int) -> Memory:
    """Memory of one of cp pieces of the sequence, which holds so many bytes of keys and values while it computes."""

    def piece(size: Any, more: int = 0) -> Any:
        if isinstance(size, DividedSize):
            return size._replace(
                bytes_per_sample=size.bytes_per_sample // cp,
                divided_bytes_per_sample=size.divided_bytes_per_sample // cp + more,
            )
        return size[0] // cp + more, size[1]

    changed: dict[str, Any] = {
        "saved_activation_bytes": memory.saved_activation_bytes // cp,
        "forward_peaks": tuple(piece(size, held) for size in memory.forward_peaks),
        "backward_peaks": tuple(piece(size, 2 * held) for size in memory.backward_peaks),
        "selective": memory.selective and memory.selective.resized(piece, lambda size: piece(size, held)),
        "split_backward": None,
    }
    if isinstance(memory, Component | Sharding) and memory.half is not None:
        changed["half"] = _piece_memory(memory.half, cp, held)
    return replace(memory, **changed)


_TOKENS = {"matmul": "m", "attention": "q", "embedding": "rows", "memory_bound": "elements"}
"""By kind of operator the size that grows with the tokens."""


def _token_operator(component: str, operator: Operator, cp: int) -> Operator:
    """The operator over one piece of the sequence."""
    if operator.batch == "none":
        return operator
    if operator.kind not in _TOKENS:
        raise PlanError(f"mesh.cp = {cp}: {component} has a {operator.kind}, which is not divided along a sequence; use cp = 1")
    shape, size = dict(operator.shape), _TOKENS[operator.kind]
    is_mean = bool(operator.parameter_bytes) and shape.get("problems", 1) > 1  # the visits of an expert
    if shape[size] % cp and operator.kind != "memory_bound" and not is_mean:
        raise PlanError(
            f"mesh.cp = {cp} must divide the sequence: {component} has a {operator.kind} with {size} = {shape[size]}; "
            f"the nearest below that divides it: {max(ways for ways in range(1, cp) if shape[size] % ways == 0)}"
        )
    shape[size] = -(-shape[size] // cp)
    share = Fraction(1, cp)
    if operator.kind == "attention":  # keys and values are whole
        queries, keys = shape["q"], shape["kv"]
        share = Fraction(queries + keys, queries * cp + keys)
    elif operator.kind == "matmul" and operator.batch == "batch" and not operator.parameter_bytes:
        m, n, k = shape["m"], shape["n"], shape["k"]
        share = Fraction(m * (n + k) + n * k, m * cp * (n + k) + n * k)
    return replace(
        operator,
        shape=tuple(shape.items()),
        forward_flop=operator.forward_flop / cp,
        activation_bytes=round(operator.activation_bytes * share),
    )


def _value(value: Value, cp: int) -> Value:
    def piece(size: int) -> int:
        return -(-size // cp)

    return replace(
        value,
        bytes_per_sample=piece(value.bytes_per_sample),
        storage_bytes_per_sample=piece(value.storage_bytes_per_sample),
        half=value.half and replace(value.half, bytes_per_sample=piece(value.half.bytes_per_sample)),
    )
