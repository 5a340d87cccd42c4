"""How and when the replicas of a plan come together: after every step, or by a relaxed rule.

all_reduce  gradients are summed in every step: synchronous training
average     replicas train alone for `period_steps` steps, then take the mean of their weights; an outer optimizer may use
            the change of the mean as its gradient (local SGD, federated averaging, DiLoCo). Of streaming DiLoCo it has the
            fragments, which take their turns within a period, and the exchange beside a step (`combination`)
gossip      after `period_steps` steps every replica takes a weighted sum over its neighbours on a graph. It adapts and then
            combines, x <- W (x - eta g(x)); or combines what it began the step with while it computes, x <- W x - eta g(x).
            With push-sum over a directed graph, a mass w goes with x, and gradients are taken at x / w
merge       after `period_steps` steps one replica after another merges its weights into a global model, and goes on from it;
            no replica waits for those behind it (asynchronous averaging, FedAsync)
stale       stages work on different batches at once, and apply gradients that are `delays` steps late: of full decoupling
            (FDG), of locked forwards (DDG; Features Replay with the forward run again), or as they are given. Replicas sum
            gradients; of kind average or gossip with a schedule or delays, replicas of such stages mix their weights

A text form names all that differs from the default: `average/8 outer=nesterov:0.7:0.9`, `gossip/1 ring`,
`merge/8 merge=staleness:0.6:0.5`, `stale schedule=ddg beta=0.5`.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from typing import Annotated, Any

import numpy as np
from pydantic import BeforeValidator, ConfigDict, Field

from parsim.errors import AlgorithmError, PlanError, near_matches
from parsim.hardware.records import Count, Name, Number
from parsim.plans.mesh import Mesh
from parsim.plans.mixing import (
    ADA_KINDS,
    CLOSED_LOOP,
    GRAPHS,
    MERGES,
    Ada,
    LoopState,
    Matrix,
    MergeRule,
    MixingGraph,
    OuterOptimizer,
    averaging_matrix,
    check_column_stochastic,
    check_connected,
    check_doubly_stochastic,
    mixing_graph,
    participation_weights,
    turn_weight,
    unreached,
)

# Which graph replicas gossip on, round by round: a row of GRAPHS, or Ada's lattices, which begin dense and end sparse.
#
#     ring    lattice(neighbours=4)    ada(kind=linear, start=7, least=2, rate=1.0, rounds=50, epochs=4)
#     ada(kind=step, start=14, rate=0.5, milestones=7+14, rounds=11, epochs=20)
#
#     ada(kind=closed_loop, target=0.01, rounds=50)
#
# Ada has `epochs` lattices, each for `rounds` rounds; then its last graph stays. Of a closed loop the next graph follows from
# what replicas measured in the `rounds` rounds before: its rounds are numbered by the place of a lattice, the densest first.


ADA = "ada"


def _milestones(text: str) -> str:
    """Epochs joined by +. Raises ValueError."""
    return "+".join(str(int(epoch)) for epoch in text.split("+"))


_ADA_KEYS: dict[str, Callable[[str], Any]] = {
    "kind": str,
    "start": int,
    "least": int,
    "rate": float,
    "milestones": _milestones,
    "rounds": int,
    "epochs": int,
    "target": float,
}
MOST_EPOCHS = 1000


@dataclass(frozen=True, slots=True)
class MixingSchedule:
    """Attributes: name: a row of GRAPHS, or "ada". settings: sorted pairs, those of the row or of Ada."""

    name: str
    settings: tuple[tuple[str, Any], ...] = ()

    def __post_init__(self) -> None:
        known: Mapping[str, Any] = _ADA_KEYS if self.name == ADA else {}
        if self.name in GRAPHS:
            known = GRAPHS[self.name].defaults
        elif self.name != ADA:
            raise PlanError(f"unknown mixing graph {self.name!r}{near_matches(self.name, (*GRAPHS, ADA))}")
        for key, _ in self.settings:
            if key not in known:
                raise PlanError(f"the graph {self.name} has no setting {key!r}; its settings: {', '.join(known) or 'none'}")
        if self.name == ADA and self._of("kind", "linear") not in ADA_KINDS:
            kind = self._of("kind", "")
            raise PlanError(f"unknown kind of ada {kind!r}{near_matches(kind, ADA_KINDS)}")
        if self.is_closed_loop:
            if self._of("rounds", 0) < 1 or dict(self.settings).keys() & {"epochs", "milestones", "rate"}:
                raise PlanError(
                    f"{self}: a closed loop has rounds >= 1 (between two choices of a graph), a target for the consensus "
                    "distance, and no epochs, milestones or rate; for example ada(kind=closed_loop, target=0.01, rounds=50)"
                )
        elif self.name == ADA and not (1 <= self._of("epochs", 0) <= MOST_EPOCHS and self._of("rounds", 0) >= 1):
            raise PlanError(
                f"ada needs rounds >= 1 (mixing rounds between two changes of the graph) and epochs from 1 to {MOST_EPOCHS} "
                "(how many graphs there are), for example ada(rounds=50, epochs=4)"
            )

    def _of(self, key: str, default: Any) -> Any:
        return dict(self.settings).get(key, default)

    def __str__(self) -> str:
        inside = ", ".join(f"{key}={value}" for key, value in self.settings)
        return f"{self.name}({inside})" if inside else self.name

    def graph(self, number: int, replicas: int) -> MixingGraph:
        """The graph of round `number`. Raises AlgorithmError where the settings do not suit so many replicas."""
        if self.name != ADA:
            return mixing_graph(self.name, replicas, **dict(self.settings))
        if self.is_closed_loop:
            return self._ada(replicas).graph(number)
        epoch = min(number // self._of("rounds", 1), self._of("epochs", 1) - 1)
        return self._ada(replicas).graph(epoch)

    def _ada(self, replicas: int) -> Ada:
        keys = {key: value for key, value in self.settings if key in ("kind", "start", "least", "rate", "target")}
        milestones = tuple(map(int, filter(None, self._of("milestones", "").split("+"))))
        return Ada(n=replicas, milestones=milestones, **keys)

    @property
    def is_closed_loop(self) -> bool:
        return self.name == ADA and self._of("kind", "linear") == CLOSED_LOOP

    def chooses(self, number: int) -> bool:
        """Whether a closed loop chooses a lattice before round `number`."""
        return self.is_closed_loop and number % int(self._of("rounds", 1)) == 0

    def chosen(self, loop: LoopState, replicas: int) -> LoopState:
        """The lattice that a closed loop goes on with, from what mixing took on the one before."""
        return LoopState(self._ada(replicas).place(loop.taken / loop.rounds)) if loop.rounds else loop

    def matrix(self, number: int, replicas: int) -> Matrix:
        return self.graph(number, replicas)(number)

    def cycle(self, replicas: int) -> tuple[int, ...]:
        """Rounds that stand for all: of a graph one period of it, of Ada one round of every graph it comes to. Ada's graphs
        last equally long, so a mean over these rounds is one over the schedule."""
        if self.is_closed_loop:
            return tuple(range(len(self._ada(replicas).lattices)))
        if self.name == ADA:
            return tuple(epoch * self._of("rounds", 1) for epoch in range(self._of("epochs", 1)))
        return tuple(range(self.graph(0, replicas).period))

    def phases(self, replicas: int) -> tuple[tuple[int, str], ...]:
        """How many rounds each of Ada's graphs lasts, and its name; the last one stays. Other graphs have none. Of a closed
        loop how long none of them lasts at least, the densest first."""
        if self.name != ADA:
            return ()
        ada, rounds = self._ada(replicas), self._of("rounds", 1)
        epochs = len(ada.lattices) if self.is_closed_loop else self._of("epochs", 1)
        names = [f"lattice(neighbours={ada.neighbours(epoch)})" for epoch in range(epochs)]
        return tuple((rounds * len(list(same)), name) for name, same in itertools.groupby(names))

    @property
    def is_directed(self) -> bool:
        """Whether only push-sum keeps the mean on it."""
        return self.name in GRAPHS and GRAPHS[self.name].directed

    def check(self, replicas: int) -> None:
        """Raise AlgorithmError unless every replica's weights reach every other, and the settings suit so many."""
        if self.name == "alone":
            raise AlgorithmError(
                "the mixing graph is not connected: on the graph alone replicas never exchange anything; use another graph"
            )
        for number in self.cycle(replicas) if self.name == ADA else (0,):
            graph = self.graph(number, replicas)
            check_connected(graph, period=graph.period)


_CALL = re.compile(r"(\w+)(?:\((.*)\))?")


def parse_mixing(text: str) -> MixingSchedule:
    """Inverse of `str(schedule)`. Raises PlanError: an unknown graph or setting, or a setting that is not a number."""
    match = _CALL.fullmatch(text.strip())
    if match is None:
        raise PlanError(f"{text!r} is not a mixing graph; write for example ring or lattice(neighbours=4)")
    settings: dict[str, Any] = {}
    for word in filter(None, (part.strip() for part in (match[2] or "").split(","))):
        key, given, value = (part.strip() for part in word.partition("="))
        if not given:
            raise PlanError(f"{text!r}: write settings as key=value, for example lattice(neighbours=4)")
        if key in settings:
            raise PlanError(f"{text!r} gives {key} twice; give it once")
        try:
            settings[key] = (_ADA_KEYS.get(key, int) if match[1] == ADA else int)(value)
        except ValueError as error:
            raise PlanError(f"{text!r}: {key} = {value!r} is not a number") from error
    return MixingSchedule(match[1], tuple(sorted(settings.items())))


def mixing_text(table: Any) -> Any:
    """The text of a table such as {"name": "lattice", "neighbours": 4}; anything else as it is. Raises PlanError."""
    if not isinstance(table, Mapping):
        return table
    words = {key: "+".join(map(str, value)) if isinstance(value, list | tuple) else value for key, value in table.items()}
    settings = ", ".join(f"{key}={value}" for key, value in words.items() if key != "name")
    if "name" not in table:
        raise PlanError('a mixing graph has a name, for example { name = "lattice", neighbours = 4 }')
    return str(parse_mixing(f"{table['name']}({settings})"))


MERGE_KEYS = {"staleness": ("merge_rate", "merge_exponent"), "buffered": ("merge_buffer", "merge_rate")}
"""The numbers of a merge, in the order of its text."""
KINDS = ("all_reduce", "average", "gossip", "merge", "stale")
OUTER_OPTIMIZERS = {"none": 0.0, "sgd": 1.0, "momentum": 0.7, "nesterov": 0.7}
"""Name of an outer optimizer, and its learning rate where none is given."""
OUTER_MOMENTUM = 0.9
SCHEDULES = {"fdg": 2, "ddg": 1, "fr": 1}
"""Name of a schedule of decoupled stages, and how many steps its gradients are late for every stage between them and the last.

Where it is 1, values cross to the next stage in the step in which they are made, and gradients in the step after."""
BACKWARDS = ("stash", "fresh", "replay")
MESSAGE_BYTES = {"bf16": (2, 0), "int8": (1, 4)}
"""Formats in which changes of weights are sent: bytes per element, and per tensor for its scale."""
COMBINATIONS = ("adapt_combine", "combine_adapt")
PUSH_SUM = "push_sum"
MOST_PERIOD = 10**6
DRAWN_ROUNDS = 4
"""Rounds with drawn replicas that are simulated."""

_BELONGS = {
    "period_steps": ("average", "gossip", "merge"),
    "graph": ("gossip",),
    "combination": ("average", "gossip"),
    "fragments": ("average",),
    "message_format": ("average",),
    "push_sum": ("gossip",),
    "weights": ("average", "gossip"),
    "outer_optimizer": ("average",),
    "outer_learning_rate": ("average",),
    "outer_momentum": ("average",),
    "participation": ("average",),
    "seed": ("average",),
    "merge": ("merge",),
    "merge_rate": ("merge",),
    "merge_exponent": ("merge",),
    "merge_buffer": ("merge",),
    "schedule": ("stale", "average", "gossip"),
    "delays": ("stale", "average", "gossip"),
    "backward": ("stale", "average", "gossip"),
    "beta": ("stale", "average", "gossip"),
}
"""Which kinds a key means something for."""

Seed = Annotated[int, Field(strict=True, ge=0, lt=2**63)]
MixingWeights = tuple[tuple[float, ...], ...]


def _rows(weights: Any) -> Any:
    """One row of weights as a table of one row."""
    if isinstance(weights, list | tuple) and weights and not isinstance(weights[0], list | tuple):
        return (tuple(weights),)
    return weights


@dataclass(frozen=True, slots=True, kw_only=True)
class Synchronisation:
    """[plan.synchronisation] of a run file, and the rule of a Plan.

    Attributes:
        kind: one of KINDS. period_steps: local steps before each round.
        graph: of gossip, as text: "ring", "lattice(neighbours=4)", "ada(rounds=50, epochs=4)".
        combination: of gossip and average, one of COMBINATIONS: the exchange follows the step, or goes on beside it.
        message_format: of average, a key of MESSAGE_BYTES: replicas gather the rounded changes of one another since the last
            round, and sum them in full; left out: weights are summed as they are.
        fragments: of average, parts of the model that are averaged in turn, one after every period_steps / fragments steps.
        push_sum: of gossip, for graphs and weights whose columns alone sum to 1: what a replica sends and keeps is all it has.
        weights: of average, one row with the weight of every replica; of gossip, a row per replica in place of a graph. Left
            out: equal weights, and those of the graph.
        outer_optimizer: a key of OUTER_OPTIMIZERS, for average. outer_learning_rate: 0 stands for the optimizer's own.
        outer_momentum: of momentum and nesterov.
        participation: the fraction of replicas that is drawn for every round of average; the others wait. seed: of the draws.
        merge: of merge, one of MERGES: (g + w) / 2 as the reference does, the exact mean of a round, less of late work, or the
            mean change of so many arrivals.
        merge_rate, merge_exponent: of the merge "staleness", which takes rate * (1 + s)^-exponent of weights s merges late; of
            "buffered" the rate that its mean change is multiplied by.
        merge_buffer: of "buffered" (FedBuff), the arrivals whose mean change makes one change of the global model.
        schedule: of stale, and of average and gossip where stages are stale too, a key of SCHEDULES; left out: fdg of stale.
            "fr" is ddg with backward = "replay".
        delays: of stale in place of a schedule, per stage, how many steps late its gradients are. They end with 0, and from a
            stage to the next fall by 2 (nothing is awaited), 1 (values are) or 0 (values and gradients are).
        backward: of stale, one of BACKWARDS: with the weights and activations of the forward; with its activations and the
            weights of now; or with the weights of now, which run the forward again from the stage's input.
        beta: of stale, in [0, 1]: every boundary of stages multiplies the gradient by it.
    """

    __pydantic_config__ = ConfigDict(extra="forbid")

    kind: Name = "all_reduce"
    period_steps: Count = 1
    graph: Annotated[str, Field(strict=True), BeforeValidator(mixing_text)] = ""
    combination: Name = "adapt_combine"
    fragments: Count = 1
    message_format: Name = ""
    push_sum: Annotated[bool, Field(strict=True)] = False
    weights: Annotated[tuple[tuple[Number, ...], ...], BeforeValidator(_rows)] = ()
    outer_optimizer: Name = "none"
    outer_learning_rate: Number = 0.0
    outer_momentum: Number = OUTER_MOMENTUM
    participation: Number = 1.0
    seed: Seed = 0
    merge: Name = "half"
    merge_rate: Number = 1.0
    merge_exponent: Number = 0.5
    merge_buffer: Count = 1
    schedule: Name = ""
    delays: tuple[Seed, ...] = ()
    backward: Name = "stash"
    beta: Number = 1.0

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise PlanError(f"unknown synchronisation {self.kind!r}{near_matches(self.kind, KINDS)}")
        for key in self._given():
            if self.kind not in _BELONGS[key]:
                raise PlanError(
                    f"synchronisation.{key} belongs to kind {' or '.join(_BELONGS[key])}, and the kind is {self.kind}; drop it"
                )
        if not 1 <= self.period_steps <= MOST_PERIOD:
            raise PlanError(
                f"synchronisation.period_steps = {self.period_steps}: a round follows after 1 to {MOST_PERIOD} local steps; "
                "1 is after every step"
            )
        if not 0 < self.participation <= 1:
            raise PlanError(
                f"synchronisation.participation = {self.participation:g}: the fraction of replicas that take part in a round "
                "lies above 0 and is at most 1"
            )
        if self.seed < 0:
            raise PlanError(f"synchronisation.seed = {self.seed}: a seed of draws is at least 0")
        if self.seed and self.participation == 1:
            raise PlanError(
                f"synchronisation.seed = {self.seed} draws the replicas of a round, and participation = 1 takes all; drop it, "
                "or set participation below 1"
            )
        self._check_outer()
        self._check_fragments()
        self._check_merge()
        if self.kind == "gossip":
            if bool(self.graph) == bool(self.weights):
                what = "both a graph and weights" if self.graph else "neither a graph nor weights"
                raise PlanError(f'gossip has {what}; give one of them, for example graph = "ring"')
            if self.graph:
                object.__setattr__(self, "graph", str(parse_mixing(self.graph)))
        self._check_combination()
        self._check_stages()

    def _given(self) -> list[str]:
        return [entry.name for entry in fields(self)[1:] if getattr(self, entry.name) != entry.default]

    def _check_outer(self) -> None:
        name = self.outer_optimizer
        if name not in OUTER_OPTIMIZERS:
            raise PlanError(f"unknown synchronisation.outer_optimizer {name!r}{near_matches(name, OUTER_OPTIMIZERS)}")
        if name == "none" and self.outer_learning_rate:
            raise PlanError('synchronisation.outer_learning_rate needs an outer_optimizer: "sgd", "momentum" or "nesterov"')
        if name in ("none", "sgd") and self.outer_momentum != OUTER_MOMENTUM:
            raise PlanError(f'synchronisation.outer_momentum belongs to "momentum" and "nesterov", not to {name!r}; drop it')
        if not 0 <= self.outer_learning_rate < math.inf or not 0 <= self.outer_momentum < 1:
            raise PlanError(
                f"an outer optimizer has a learning rate above 0 and a momentum in [0, 1), got "
                f"{self.outer_learning_rate:g} and {self.outer_momentum:g}"
            )

    def _check_stages(self) -> None:
        if self.schedule and self.schedule not in SCHEDULES:
            raise PlanError(f"unknown synchronisation.schedule {self.schedule!r}{near_matches(self.schedule, SCHEDULES)}")
        if self.backward not in BACKWARDS:
            raise PlanError(f"unknown synchronisation.backward {self.backward!r}{near_matches(self.backward, BACKWARDS)}")
        if self.schedule == "fr" and self.backward != "stash":
            raise PlanError(f'schedule = "fr" is "ddg" that replays, and backward = {self.backward!r}; drop one of them')
        if not 0 <= self.beta <= 1:
            raise PlanError(f"synchronisation.beta = {self.beta:g} shrinks gradients and lies in [0, 1]; 1 does not shrink")
        if self.is_stale and self.mixes:
            for key, usual in (("combination", "adapt_combine"), ("participation", 1.0), ("push_sum", False), ("fragments", 1)):
                if getattr(self, key) != usual:
                    raise PlanError(
                        f"synchronisation.{key} = {getattr(self, key)} is not built for stages that are stale; drop it, or "
                        "schedule and delays"
                    )
        elif not self.is_stale and (self.backward, self.beta) != ("stash", 1.0):
            raise PlanError(
                f'synchronisation.backward and beta belong to stale stages, and {self.kind} has none; add schedule = "fdg", or '
                "drop them"
            )
        if not self.delays:
            return
        if self.schedule:
            raise PlanError(f"synchronisation.delays stand in place of schedule = {self.schedule!r}; drop one of them")
        falls = [own - later for own, later in itertools.pairwise(self.delays)]
        if self.delays[-1] or not set(falls) <= {0, 1, 2}:
            raise PlanError(
                f"synchronisation.delays = {list(self.delays)}: the last stage has delay 0, and from a stage to the next a "
                "delay falls by 2 (neither waits), by 1 (values are awaited) or by 0 (gradients too); use for example "
                f"{[2 * later for later in reversed(range(len(self.delays)))]}"
            )

    def _check_combination(self) -> None:
        if self.combination not in COMBINATIONS:
            raise PlanError(
                f"unknown synchronisation.combination {self.combination!r}{near_matches(self.combination, COMBINATIONS)}"
            )
        if not self.combines_first:
            return
        if self.push_sum:
            raise PlanError(
                'synchronisation.push_sum divides what has been mixed by its mass, and "combine_adapt" adds a step to it '
                'afterwards; use combination = "adapt_combine" with push_sum'
            )
        if self.participation < 1:
            raise PlanError(
                'synchronisation.combination = "combine_adapt" exchanges beside a step of every replica, and participation = '
                f'{self.participation:g} lets some wait; use "adapt_combine", or drop participation'
            )

    def _check_fragments(self) -> None:
        message_format = self.message_format
        if message_format and message_format not in MESSAGE_BYTES:
            near = near_matches(message_format, MESSAGE_BYTES)
            raise PlanError(f"unknown synchronisation.message_format {message_format!r}{near}")
        if self.fragments == 1:
            return
        if self.fragments < 1 or self.period_steps % self.fragments:
            raise PlanError(
                f"synchronisation.fragments = {self.fragments} take turns within period_steps = {self.period_steps}, and must "
                f"divide it; use period_steps = {max(1, self.fragments) * -(-self.period_steps // max(1, self.fragments))}"
            )
        if self.participation < 1:
            raise PlanError(
                f"synchronisation.participation = {self.participation:g} draws replicas for a whole period, in which fragments "
                "have several rounds; drop one of them"
            )

    def _check_merge(self) -> None:
        if self.merge not in MERGES:
            raise PlanError(f"unknown synchronisation.merge {self.merge!r}{near_matches(self.merge, MERGES)}")
        usual = {"merge_rate": 1.0, "merge_exponent": 0.5, "merge_buffer": 1}
        for key, value in usual.items():
            takes = MERGE_KEYS.get(self.merge, ())
            if key not in takes and getattr(self, key) != value:
                owners = " and ".join(f'"{name}"' for name, keys in MERGE_KEYS.items() if key in keys)
                raise PlanError(f"synchronisation.{key} belongs to {owners}, not to {self.merge!r}; drop it")
        if not 0 < self.merge_rate <= 1 or not 0 <= self.merge_exponent < math.inf:
            raise PlanError(
                f"a merge has a rate in (0, 1] and an exponent from 0 on, got {self.merge_rate:g} and {self.merge_exponent:g}"
            )
        if self.merge_buffer < 1:
            raise PlanError(f"synchronisation.merge_buffer = {self.merge_buffer}: a buffer holds at least one arrival")

    @property
    def is_relaxed(self) -> bool:
        """Whether replicas, or stages, hold weights that synchronous training would not have."""
        return self.kind != "all_reduce"

    @property
    def is_stale(self) -> bool:
        return self.kind == "stale" or bool(self.schedule or self.delays)

    @property
    def mixes(self) -> bool:
        """Whether weights are exchanged in rounds."""
        return self.kind in ("average", "gossip", "merge")

    @property
    def combines_first(self) -> bool:
        """Whether weights are exchanged as they are when the step begins, beside its computation."""
        return self.combination == "combine_adapt"

    @property
    def outer(self) -> OuterOptimizer | None:
        """What is done with the change of the mean; None: it is taken as it is."""
        name = self.outer_optimizer
        if name == "none":
            return None
        momentum = self.outer_momentum if name in ("momentum", "nesterov") else 0.0
        rate = self.outer_learning_rate or OUTER_OPTIMIZERS[name]
        return OuterOptimizer(lr=rate, momentum=momentum, nesterov=name == "nesterov")

    @property
    def is_closed_loop(self) -> bool:
        return bool(self.graph) and self.mixing.is_closed_loop

    @property
    def mixing(self) -> MixingSchedule:
        """Who takes what of whom, round by round, for gossip on a graph."""
        return parse_mixing(self.graph)

    def delay_of(self, stage: int, stages: int) -> int:
        """How many steps after its forward a stage applies the gradient of a batch: of fdg 2 (K - 1 - stage)."""
        return self.delays[stage] if self.delays else SCHEDULES[self.schedule or "fdg"] * (stages - 1 - stage)

    def forward_lag(self, stage: int, stages: int) -> int:
        """How many steps after the first stage a stage runs a batch forward."""
        delays = [self.delay_of(other, stages) for other in range(stage + 1)]
        return sum(own - later == 2 for own, later in itertools.pairwise(delays))

    def backward_lag(self, stage: int, stages: int) -> int:
        """How many steps after the first stage has run a batch forward a stage runs it backward."""
        return self.forward_lag(stage, stages) + self.delay_of(stage, stages)

    def steps_to_fill(self, stages: int) -> int:
        """Steps after which every stage of a stale pipeline runs a forward and a backward in every step."""
        return self.backward_lag(0, stages)

    @property
    def replays(self) -> bool:
        """Whether a stage runs a batch forward again before its backward."""
        return self.backward == "replay" or self.schedule == "fr"

    @property
    def stashes(self) -> bool:
        """Whether a batch that waits keeps a copy of the weights that it ran forward with."""
        return self.backward == "stash" and not self.replays

    @property
    def round_steps(self) -> int:
        """Steps from one round to the next: a period has one per fragment."""
        return self.period_steps // self.fragments

    def message_bytes(self, elements: int, tensors: int) -> int:
        """Bytes of the rounded change of so many elements in so many tensors."""
        element_bytes, scale_bytes = MESSAGE_BYTES[self.message_format]
        return elements * element_bytes + tensors * scale_bytes

    def due(self, step: int) -> bool:
        """Whether a round follows step `step` >= 0."""
        return self.mixes and (step + 1) % self.round_steps == 0

    def check(self, mesh: Mesh, *, zero_stage: int) -> None:
        """Raise PlanError unless replicas of a mesh can be synchronised so: enough of them, states that are not divided over
        replicas (zero_stage of the plan), a connected graph, weights that sum to one, delays that stages can have."""
        if not self.is_relaxed:
            return
        if zero_stage:
            raise PlanError(
                f"zero_stage = {zero_stage} divides states over the replicas, and with synchronisation {self.kind!r} replicas "
                "have states of their own; set zero_stage = 0"
            )
        if mesh.cp * mesh.ep > 1:
            raise PlanError(f"synchronisation {self.kind!r} is not built for mesh.cp and mesh.ep above 1; use dp, pp and tp")
        if self.is_stale:
            self._check_delays(mesh)
        if not self.mixes:
            return
        if mesh.dp < 2:
            raise PlanError(f"synchronisation {self.kind!r} needs at least 2 replicas, and dp = {mesh.dp}; use all_reduce")
        if self.is_closed_loop and mesh.pp * mesh.tp > 1:
            raise PlanError(
                "a closed loop measures whole replicas, and stages and shards hold parts of them; use mesh.pp = mesh.tp = 1, "
                "or Ada of kind linear, exponential or step"
            )
        try:
            self._check_weights(mesh.dp)
        except AlgorithmError as error:
            raise PlanError(f"synchronisation {self}: {error}") from error

    def _check_delays(self, mesh: Mesh) -> None:
        if mesh.pp < 2:
            raise PlanError(
                'synchronisation "stale" needs at least 2 stages: with mesh.pp = 1 there is no delay; use all_reduce'
            )
        if mesh.tp > 1:
            raise PlanError('synchronisation "stale" is not built for mesh.tp above 1; use dp and pp')
        if self.delays and len(self.delays) != mesh.pp:
            raise PlanError(
                f"synchronisation.delays = {list(self.delays)} are of {len(self.delays)} stages, and the mesh has {mesh.pp}; "
                'give one per stage, or a schedule such as "ddg"'
            )

    def _check_weights(self, replicas: int) -> None:
        if self.kind == "merge":
            self.merge_rule(replicas)
            return
        if self.is_closed_loop and self.push_sum:
            raise AlgorithmError("lattices keep the mean by themselves, so a closed loop has no push_sum; drop it")
        if self.kind == "average":
            if self.weights:
                if len(self.weights) != 1:
                    raise AlgorithmError(f"average has one row of weights, got {len(self.weights)}")
                averaging_matrix(replicas, _array(self.weights)[0])
            return
        if self.graph:
            if self.mixing.is_directed and not self.push_sum:
                alike = ", ".join(name for name, family in GRAPHS.items() if not family.directed and name != "alone")
                raise AlgorithmError(
                    f"on the directed graph {self.graph} rows of weights do not sum to 1; set push_sum = true, or use {alike}"
                )
            self.mixing.check(replicas)
            return
        if {len(row) for row in self.weights} != {replicas} or len(self.weights) != replicas:
            raise AlgorithmError(
                f"{replicas} replicas need {replicas} rows of {replicas} weights, got {len(self.weights)} rows"
            )
        matrix = _array(self.weights)
        (check_column_stochastic if self.push_sum else check_doubly_stochastic)(matrix)
        if apart := unreached([matrix]):
            raise AlgorithmError(
                f"the weights connect nothing with replica 0 for {len(apart)} replicas ({', '.join(map(str, apart[:8]))}); add "
                "weights between them"
            )

    def matrix(self, number: int, replicas: int) -> Any:
        """W of round `number` (of a closed loop the place of a lattice): float64 [replicas, replicas], row i what replica i
        takes of each (before an outer optimizer). Of merge float64 [1, replicas], the weight of every turn (`turn_weight`)."""
        if self.kind == "merge":
            return np.array([[self.turn_weight(number, replica, replicas) for replica in range(replicas)]])
        if self.kind == "gossip":
            return self.mixing.matrix(number, replicas) if self.graph else _array(self.weights)
        return averaging_matrix(replicas, self.shares(number, replicas))

    def turn_weight(self, number: int, replica: int, replicas: int) -> float:
        """How much of its own weights a replica that merges gives the global model in round `number`."""
        return turn_weight(self.merge_rule(replicas), number, replica)

    def merge_rule(self, replicas: int) -> MergeRule:
        rate, exponent, buffer = self.merge_rate, self.merge_exponent, self.merge_buffer
        return MergeRule(kind=self.merge, workers=replicas, rate=rate, exponent=exponent, buffer=buffer)

    def cycle(self, replicas: int) -> tuple[int, ...]:
        """Numbers of the rounds that stand for all: one where all are alike, one per fragment, a few of drawn replicas."""
        if self.graph:
            return self.mixing.cycle(replicas)
        return tuple(range(DRAWN_ROUNDS if self.participation < 1 else self.fragments))

    def shares(self, number: int, replicas: int) -> Any:
        """The weight of every replica in an average, 0 for those that do not take part. float64 [replicas]."""
        base = _array(self.weights)[0] if self.weights else None
        return participation_weights(replicas, self.participation, number, seed=self.seed, weights=base)

    def takes_part(self, number: int, replicas: int) -> tuple[bool, ...]:
        """Which replicas make the local steps before round `number`."""
        if self.kind != "average" or self.participation == 1.0:
            return (True,) * replicas
        return tuple(bool(share > 0) for share in self.shares(number, replicas))

    def __str__(self) -> str:
        words = [f"{self.kind}/{self.period_steps}" if self.mixes else self.kind]
        for key in self._given():
            match key:
                case "graph":
                    words.append(self.graph)
                case "push_sum":
                    words.append(PUSH_SUM)
                case "weights":
                    words.append("weights=" + ";".join(",".join(map(repr, row)) for row in self.weights))
                case "outer_optimizer":
                    assert self.outer is not None
                    rate = f":{self.outer.lr!r}" + (f":{self.outer.momentum!r}" if self.outer_optimizer != "sgd" else "")
                    words.append(f"outer={self.outer_optimizer}{rate}")
                case "merge":
                    numbers = "".join(f":{getattr(self, number)!r}" for number in MERGE_KEYS.get(self.merge, ()))
                    words.append(f"merge={self.merge}{numbers}")
                case "delays":
                    words.append(f"delays={','.join(map(str, self.delays))}")
                case _ if key in _READERS:
                    words.append(f"{key}={getattr(self, key)}")
        return " ".join(words)

    def to_dict(self) -> dict[str, Any]:
        document = {"kind": self.kind, **{key: getattr(self, key) for key in self._given()}}
        if self.weights:
            document["weights"] = [list(row) for row in self.weights]
        if self.delays:
            document["delays"] = list(self.delays)
        return document

    @classmethod
    def from_dict(cls, document: Mapping[str, Any]) -> Synchronisation:
        """Inverse of `to_dict`. Raises PlanError for what contradicts itself, TypeError for an unknown key."""
        table = dict(document)
        if "weights" in table:
            table["weights"] = tuple(tuple(row) for row in table["weights"])
        if "delays" in table:
            table["delays"] = tuple(table["delays"])
        return cls(**table)


ALL_REDUCE, STALE = Synchronisation(), Synchronisation(kind="stale")


def _array(weights: MixingWeights) -> Any:
    return np.array(weights, dtype=np.float64)


def parse_synchronisation(text: str) -> Synchronisation:
    """Inverse of `str(synchronisation)`. Raises PlanError."""
    head, *words = _words(text)
    kind, has_period, period = head.partition("/")
    found: dict[str, Any] = {"kind": kind}
    seen: set[str] = set()
    try:
        if has_period:
            found["period_steps"] = int(period)
        for word in words:
            name, given, value = word.partition("=")
            if word != PUSH_SUM and (not given or "(" in name):
                name = "graph"
            if name in seen:
                raise PlanError(f"{text!r} is not a synchronisation: {word!r} is a second {name}; give one")
            seen.add(name)
            match name:
                case "graph":
                    found["graph"] = word
                case "outer":
                    found["outer_optimizer"], *numbers = value.split(":")
                    found |= _numbers(word, ("outer_learning_rate", "outer_momentum"), numbers)
                case "merge":
                    found["merge"], *numbers = value.split(":")
                    found |= _numbers(word, MERGE_KEYS.get(found["merge"], ()), numbers)
                case _ if name in _READERS:
                    found[name] = _READERS[name](value)
                case _:
                    near = near_matches(name, _READERS)
                    raise PlanError(f"{text!r} is not a synchronisation: {word!r} is neither a graph nor a key{near}")
    except ValueError as error:
        raise PlanError(f"{text!r} is not a synchronisation: {error}; write e.g. `average/8` or `gossip/1 ring`") from error
    return Synchronisation(**found)


_READERS: dict[str, Callable[[str], Any]] = {
    "combination": str,
    "fragments": int,
    "message_format": str,
    PUSH_SUM: lambda text: True,
    "weights": lambda text: tuple(tuple(map(float, row.split(","))) for row in text.split(";")),
    "outer": str,
    "participation": float,
    "seed": int,
    "merge": str,
    "schedule": str,
    "delays": lambda text: tuple(map(int, text.split(","))),
    "backward": str,
    "beta": float,
}
"""How the words of the text form are read; numbers follow the names of outer optimizers and merges."""


def _numbers(word: str, names: tuple[str, ...], numbers: list[str]) -> dict[str, float]:
    """The numbers behind a name, in order; those that are left out keep their defaults. Raises PlanError for too many."""
    if len(numbers) > len(names):
        takes = f"at most {len(names)} ({', '.join(names)})" if names else "none"
        raise PlanError(f"{word!r} has {len(numbers)} numbers, and takes {takes}; drop the rest")
    kinds = {"merge_buffer": int}
    return {name: kinds.get(name, float)(number) for name, number in zip(names, numbers, strict=False)}


def _words(text: str) -> list[str]:
    """Split at spaces outside brackets."""
    words, depth = [""], 0
    for letter in text.strip():
        depth += (letter == "(") - (letter == ")")
        if letter == " " and not depth:
            words.append("")
        else:
            words[-1] += letter
    return [word for word in words if word] or [""]
