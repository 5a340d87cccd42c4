"""Seconds of one shard of each component that can be cut, beside the whole component.

A shard exchanges nothing inside, so a rank can run it alone: shard 0, on its pieces of inputs, parameters and output gradients.
Components are run forward one after the other and backward in reverse, as in a step; those that do the same work are run once.
Every round runs the whole components and then each way of cutting them, so that only their ratio need be right. On a GPU it is
that of the device's seconds: the host queues as many kernels for a shard as for the whole.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from calibration.measure.components import Case, pausing_streams
from calibration.measure.device import DTYPES, autocast
from calibration.rounds.request import CalibrationRequest
from calibration.rounds.turns import WARM_UP, CalibrationSection, Entries
from parsim.execute.cuda.driver import warm_gpu
from parsim.execute.optimizer import flat_gradients
from parsim.execute.streams import Streams
from parsim.model.autograd.cut import Saved, backward_component, forward_component
from parsim.model.component import FULL, Component, Sharding, narrow
from parsim.model.model import Model
from parsim.model.runnable import Runnable
from parsim.model.shard.apply import piece, shard_runnable
from parsim.program.taskgraph import COMPUTE
from parsim.work import Phase

KEPT_RUNS = 2
MIN_ROUNDS = 2
MOST_BATCHES = 3


class ShardChoice(NamedTuple):
    """A component and how it is cut; rule "" and 1 way: whole."""

    component: str
    rule: str = ""
    ways: int = 1


@dataclass(kw_only=True)
class MeasuredShard:
    """A whole component or a shard of one, ready to run forward and backward again and again.

    Attributes:
        state: (where the module keeps a parameter or buffer, its key, what this part has there).
        seconds: of the last forward and backward, once `run_parts` has run.
    """

    cut: ShardChoice
    runnable: Runnable
    inputs: tuple[Tensor, ...]
    gradients: tuple[Tensor | None, ...]
    state: list[tuple[dict[str, Any], str, Tensor]]
    seconds: dict[Phase, float] = field(default_factory=dict)

    def install(self) -> None:
        for holder, key, tensor in self.state:
            holder[key] = tensor


def useful_cuts(models: Sequence[Model], request: CalibrationRequest) -> list[list[ShardChoice]]:
    """Per model the shards worth measuring; of components and shards that do the same work the first one only.

    Quick: of each component the rule that divides most of its work.
    """
    seen: set[str] = set()
    found: list[list[ShardChoice]] = []
    for model in models:
        cuts = []
        for component in model.components:
            rules = [entry for entry in component.shardings if any(entry.limit % ways == 0 for ways in request.ways)]
            if request.quick and rules:
                rules = [min(rules, key=lambda entry: _work_left(component, entry))]
            for entry in rules:
                for ways in request.ways:
                    if entry.limit % ways == 0:
                        fingerprint = narrow(component, entry.rule, ways).fingerprint
                        if fingerprint not in seen and fingerprint != component.fingerprint:
                            cuts.append(ShardChoice(component.name, entry.rule, ways))
                        seen.add(fingerprint)
        found.append(cuts)
    return found


def _work_left(component: Component, sharding: Sharding) -> tuple[float, int]:
    """Flop, and bytes of parameters, of one of many shards."""
    part = narrow(component, sharding.rule, sharding.limit)
    return part.forward_flop, part.parameter_bytes


def useful_batches(samples: Sequence[int], quick: bool) -> tuple[int, ...]:
    """The largest local batch, which a sharded stage sees first; not quick: the middle and the smallest too."""
    ordered = sorted(set(samples))
    if quick or len(ordered) <= 1:
        return tuple(ordered[-1:])
    return tuple(sorted({ordered[0], ordered[len(ordered) // 2], ordered[-1]}))[-MOST_BATCHES:]


def shard_section(
    cases: Sequence[Case], active: int, group: dist.ProcessGroup | None, request: CalibrationRequest, device: torch.device
) -> CalibrationSection | None:
    """Every shard beside its whole; None where nothing can be cut. group: of the `active` ranks that compute at once; None on
    the others, which wait.

    Entries of `shards`, per model and samples: `parts`, lists of component, rule, ways, phase, seconds, seconds of the whole.
    """
    models = {case.number: case.stage.layout.model for case in cases}
    cuts = useful_cuts([models[number] for number in sorted(models)], request)
    chosen = [
        case
        for case in cases
        if cuts[case.number]
        and case.samples in useful_batches([other.samples for other in cases if other.number == case.number], request.quick)
    ]
    if not chosen:
        return None
    with autocast(request.precision, device):
        prepared = [(case, sweeps_of(case, cuts[case.number])) for case in chosen]

    def measure(number: int) -> Entries:
        dist.barrier()
        if group is None:
            return {}
        found = []
        warm_gpu(device, DTYPES[request.precision])
        with contextlib.closing(pausing_streams(device)) as streams:
            streams.holding = True
            for case, sweeps in prepared:
                dist.barrier(group=group)
                for _ in range(1 if number == WARM_UP else KEPT_RUNS):
                    for parts in sweeps:
                        with autocast(request.precision, device):
                            run_parts(parts, streams)
                    _restore(case, sweeps[0])
                    place = {"model": case.number, "samples": case.samples, "ranks_active": active}
                    found.append({**place, "parts": _compared(sweeps)})
        return {"shards": found}

    return CalibrationSection(
        name="shards",
        budget_s=request.budgets_s["shards"],
        min_rounds=MIN_ROUNDS,
        max_rounds=request.max_rounds,
        measure=measure,
    )


def sweeps_of(case: Case, cuts: Sequence[ShardChoice]) -> list[list[MeasuredShard]]:
    """First the whole components that are cut, then one list of parts for the first way of cutting each, the second, ..."""
    values = _values(case, {cut.component for cut in cuts})
    ways_of: dict[str, list[ShardChoice]] = {}
    for cut in cuts:
        ways_of.setdefault(cut.component, []).append(cut)
    most = max(len(ways) for ways in ways_of.values())
    chosen = [[ShardChoice(name) for name in ways_of]]
    chosen += [[ways[number] for ways in ways_of.values() if number < len(ways)] for number in range(most)]
    return [[make_part(case, cut, values) for cut in sweep] for sweep in chosen]


def _values(case: Case, names: set[str]) -> dict[str, Tensor]:
    """The whole values that these components read, from one forward of everything before them."""
    runnables = case.stage.runnables
    wanted = {value for name in names for value in runnables[name].input_names}
    there = case.batch()
    with torch.no_grad():
        for runnable in runnables.values():
            if wanted <= there.keys():
                break
            outputs = runnable([there[value] for value in runnable.input_names])
            there.update(zip(runnable.output_names, outputs, strict=True))
    return {name: there[name] for name in wanted}


def make_part(case: Case, cut: ShardChoice, values: dict[str, Tensor]) -> MeasuredShard:
    """Shard 0 of the component, or all of it, with the inputs it would get and random gradients of its outputs."""
    runnable = case.stage.runnables[cut.component]
    inputs = tuple(values[name] for name in runnable.input_names)
    divided = {}
    if cut.rule:
        sharding = case.stage.layout.model.component(cut.component).sharding(cut.rule)
        inputs = tuple(_own(value, how, cut.ways) for value, how in zip(inputs, sharding.inputs, strict=True))
        divided = {part.name: part for part in (*sharding.parameters, *sharding.buffers)}
        runnable = shard_runnable(runnable, sharding, 0, cut.ways)
    state: list[tuple[dict[str, Any], str, Tensor]] = []
    own = []
    for name in runnable.parameter_names + runnable.buffer_names:
        path, _, key = name.rpartition(".")
        owner = runnable.module.get_submodule(path)
        is_parameter = name in runnable.parameter_names
        holder: dict[str, Any] = owner._parameters if is_parameter else owner._buffers
        tensor: Tensor = holder[key]
        if cut.rule:
            with torch.no_grad():
                local = piece(tensor, divided[name], 0, cut.ways) if name in divided else tensor.clone()
            tensor = torch.nn.Parameter(local) if is_parameter else local
            own += [tensor] if is_parameter else []
        state.append((holder, key, tensor))
    part = MeasuredShard(cut=cut, runnable=runnable, inputs=inputs, gradients=(), state=state)
    if own:
        flat_gradients(own)
    whole_state = [(holder, key, holder[key]) for holder, key, _ in state]
    part.install()
    with torch.no_grad():
        outputs = runnable(inputs)
    for holder, key, tensor in whole_state:
        holder[key] = tensor
    flows = runnable.output_differentiable
    part.gradients = tuple(torch.randn_like(out) if wanted else None for out, wanted in zip(outputs, flows, strict=True))
    return part


def _own(value: Tensor, how: str, ways: int) -> Tensor:
    """Shard 0's share of an input: all of it, or its piece of a dim."""
    if how == FULL:
        return value
    dim = int(how.removeprefix("shard:"))
    return value.narrow(dim, 0, value.shape[dim] // ways).contiguous()


def run_parts(parts: Sequence[MeasuredShard], streams: Streams) -> None:
    """Forward of all, then backward of all in reverse; leaves their seconds."""
    saved: dict[int, Saved] = {}
    count = len(parts)
    for number, part in enumerate(parts):
        part.install()
        streams.compute(number, COMPUTE, [], lambda number=number, part=part: _forward(saved, number, part))  # type: ignore[misc]
    for number, part in reversed(list(enumerate(parts))):
        streams.compute(count + number, COMPUTE, [], lambda number=number, part=part: _backward(saved, number, part))  # type: ignore[misc]
    for entry in streams.finish():
        part = parts[entry.task % count]
        part.seconds[Phase.FORWARD if entry.task < count else Phase.BACKWARD] = entry.end_s - entry.ready_s


def _forward(saved: dict[int, Saved], number: int, part: MeasuredShard) -> None:
    saved[number] = forward_component(part.runnable, part.inputs)[1]


def _backward(saved: dict[int, Saved], number: int, part: MeasuredShard) -> None:
    backward_component(saved.pop(number), part.gradients)


def _restore(case: Case, whole: Sequence[MeasuredShard]) -> None:
    """The module as the executor left it: whole parameters, no gradients."""
    for part in whole:
        part.install()
    for flat in case.stage.buckets.values():
        flat.zero_()


def _compared(sweeps: Sequence[Sequence[MeasuredShard]]) -> list[list[Any]]:
    """Every shard's seconds beside the whole's."""
    whole = {part.cut.component: part.seconds for part in sweeps[0]}
    return [
        [*part.cut, phase.value, seconds, whole[part.cut.component][phase]]
        for parts in sweeps[1:]
        for part in parts
        for phase, seconds in part.seconds.items()
    ]
