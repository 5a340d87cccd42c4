"""One component run whole and as shards one after another in this process; used by the tests of sharding."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.nn.functional as functional
from torch import Tensor, nn

from parsim.model import Model, ModelSpec, load_model, record
from parsim.model.autograd.cut import backward_component, forward_component
from parsim.model.build import build_module, example_batch, loss_of
from parsim.model.component import FULL, MAXIMUM, PARTIAL, Component, ParameterShard, Sharding
from parsim.model.runnable import Runnable
from parsim.model.shard.apply import assemble, content_of, padded_piece, piece, shard_runnable
from parsim.model.shard.propagate import propagate
from parsim.model.shard.rules import attention_of_shard, drawn_by_shard, heads_of_shard
from parsim.model.trace.memory import LiveBytes

TOLERANCE = 1e-12


def close(found: Tensor, expected: Tensor, what: str, tolerance: float) -> None:
    """Equal to `tolerance` of the largest entry, or of one."""
    assert found.shape == expected.shape, what
    if not expected.dtype.is_floating_point:
        assert torch.equal(found, expected), what
    elif torch.equal(found, expected):  # infinities, too
        return
    elif expected.numel():
        scale = max(1.0, float(expected.abs().max()))
        assert float((found - expected).abs().max()) <= tolerance * scale, what


def value_piece(value: Tensor, content: str, shard: int, ways: int) -> Tensor:
    """What a shard gets of an input or of an output's gradient."""
    if content in (FULL, PARTIAL):
        return value.clone()
    return padded_piece(value, int(content.split(":")[1]), shard, ways)


def together(pieces: Sequence[Tensor], content: str) -> Tensor:
    """The value (or gradient) that the shards have pieces or summands of."""
    if content in (FULL, PARTIAL):
        return torch.stack(list(pieces)).sum(0)
    return torch.cat(list(pieces), dim=int(content.split(":")[1]))


def made_together(pieces: Sequence[Tensor], content: str) -> Tensor:
    """An output: what is full is the same in every shard."""
    if content == FULL:
        assert all(torch.equal(entry, pieces[0]) for entry in pieces)
        return pieces[0]
    if content == MAXIMUM:
        return torch.stack(list(pieces)).amax(0)
    return together(pieces, content)


def drawing_in_pieces(runnable: Runnable, sharding: Sharding, ways: int) -> Runnable:
    """The whole component; what its shards draw for pieces of a tensor, it draws piece by piece from the same streams."""
    program = runnable.program
    decided: dict[str, ParameterShard | None] = {key.name: None for key, _ in program.state}
    decided.update({part.name: part for part in (*sharding.parameters, *sharding.buffers)})
    found = propagate(program, tuple(content_of(text) for text in sharding.inputs), decided, ways)
    ops = []
    for op, outcome in zip(program.ops, found.outcomes, strict=True):
        function = outcome.function.func if isinstance(outcome.function, partial) else outcome.function
        if function in (drawn_by_shard, attention_of_shard):
            content = outcome.contents[0]
            part = ParameterShard(name="mask", dim=content.dim, blocks=content.blocks, runs=content.runs)
            op = replace(op, function=partial(_in_pieces, op.function, part, ways))
        elif function is heads_of_shard and outcome.arguments is not None and outcome.arguments[11]:
            op = replace(op, function=partial(_heads_in_pieces, ways), arguments=outcome.arguments[2:], keywords=())
        ops.append(op)
    return Runnable(replace(program, ops=tuple(ops)), runnable.module)


def _in_pieces(function: Any, part: ParameterShard, ways: int, value: Tensor, *others: Any, **keywords: Any) -> Tensor:
    dropout = keywords.get("dropout_p", others[3] if len(others) > 3 else 0.0)
    if function is functional.scaled_dot_product_attention and not dropout:
        made: Tensor = function(value, *others, **keywords)
        return made
    state, drawn = torch.get_rng_state(), []
    for shard in range(ways):
        torch.set_rng_state(state)
        own = [_heads(entry, value, part, shard, ways) for entry in others]
        named = {name: _heads(entry, value, part, shard, ways) for name, entry in keywords.items()}
        drawn.append(drawn_by_shard(function, shard, piece(value, part, shard, ways), *own, **named))
    return assemble(drawn, part)


def _heads_in_pieces(ways: int, *arguments: Any) -> tuple[Tensor, None]:
    """Multi-head attention with dropout as its shards do it, one after another; without dropout torch's own is compared."""
    heads, products, query, key, value, in_weight, in_bias, out_weight, out_bias, *others = arguments
    state, found = torch.get_rng_state(), []
    cut, rows = ParameterShard(name="in", dim=0, blocks=3), ParameterShard(name="out", dim=1)
    for shard in range(ways):
        torch.set_rng_state(state)
        added = None if in_bias is None else piece(in_bias, cut, shard, ways)
        own = (piece(in_weight, cut, shard, ways), added, piece(out_weight, rows, shard, ways), None if shard else out_bias)
        found.append(heads_of_shard(shard, ways, heads, products, query, key, value, *own, *others)[0])
    return torch.stack(found).sum(0), None


def _heads(entry: Any, value: Tensor, part: ParameterShard, shard: int, ways: int) -> Any:
    """A key, value or bias of the heads of one shard; what has no heads as it is."""
    if not isinstance(entry, Tensor) or entry.dim() < 3 or entry.shape[-3] == 1:
        return entry
    dim = part.dim - value.dim() + entry.dim()
    return piece(entry, ParameterShard(name="heads", dim=dim), shard, ways)


def copied(runnable: Runnable) -> Runnable:
    """On a copy of the module that has its own parameters and buffers of the component, and shares the others."""
    own = {*runnable.parameter_names, *runnable.buffer_names}
    tensors = (*runnable.module.named_parameters(), *runnable.module.named_buffers())
    shared = {id(tensor): tensor for name, tensor in tensors if name not in own}
    return Runnable(runnable.program, copy.deepcopy(runnable.module, shared))


def narrowed(runnable: Runnable, sharding: Sharding, shard: int, ways: int) -> Runnable:
    """On a copy of the module that holds the shard's pieces."""
    module, found = runnable.module, copied(runnable)
    local = found.module
    for part in sharding.parameters:
        owner, _, key = part.name.rpartition(".")
        whole = module.get_parameter(part.name)
        held = nn.Parameter(piece(whole.detach(), part, shard, ways), requires_grad=whole.requires_grad)
        local.get_submodule(owner)._parameters[key] = held
    for part in sharding.buffers:
        owner, _, key = part.name.rpartition(".")
        local.get_submodule(owner)._buffers[key] = piece(module.get_buffer(part.name), part, shard, ways)
    return found.bind(local)


class Outcome:
    """Outputs, gradients of inputs and parameters, and buffers after one forward and backward of a runnable."""

    def __init__(self, runnable: Runnable, inputs: Sequence[Tensor], gradients: Sequence[Tensor | None]) -> None:
        for parameter in runnable.parameters():
            parameter.grad = None
        torch.manual_seed(2)
        self.outputs, saved = forward_component(runnable, inputs)
        self.input_gradients = backward_component(saved, gradients)
        self.parameter_gradients = {
            name: parameter.grad for name, parameter in zip(runnable.parameter_names, runnable.parameters(), strict=True)
        }
        self.buffers = {name: runnable.module.get_buffer(name).clone() for name in runnable.buffer_names}


def assert_shards_equal_whole(
    runnable: Runnable,
    component: Component,
    sharding: Sharding,
    ways: int,
    inputs: Sequence[Tensor],
    tolerance: float = TOLERANCE,
) -> None:
    """Values, gradients and buffers of all shards together are those of the whole; `inputs` are whole.

    Where the shards draw random numbers for a cut tensor, the whole draws the same ones piece by piece.
    """
    torch.manual_seed(1)
    with torch.no_grad():
        made = copied(runnable)(list(inputs))
    flows = runnable.output_differentiable
    gradients = [torch.randn_like(y) if flow else None for y, flow in zip(made, flows, strict=True)]
    whole = Outcome(copied(drawing_in_pieces(runnable, sharding, ways)), inputs, gradients)
    shards = []
    for shard in range(ways):
        local = narrowed(runnable, sharding, shard, ways)
        given = [value_piece(x, c, shard, ways) for x, c in zip(inputs, sharding.inputs, strict=True)]
        back = [None if g is None else value_piece(g, c, shard, ways) for g, c in zip(gradients, sharding.outputs, strict=True)]
        shards.append(Outcome(shard_runnable(local, sharding, shard, ways), given, back))
    where = f"{component.name} {sharding.rule}/{ways}"
    for number, (expected, content) in enumerate(zip(whole.outputs, sharding.outputs, strict=True)):
        close(
            made_together([shard.outputs[number] for shard in shards], content),
            expected,
            f"output {number} of {where}",
            tolerance,
        )
    for number, (gradient, content) in enumerate(zip(whole.input_gradients, sharding.inputs, strict=True)):
        found = [shard.input_gradients[number] for shard in shards]
        assert [entry is None for entry in found] == [gradient is None] * ways, f"gradient of input {number} of {where}"
        if gradient is not None:
            close(together(_tensors(found), content), gradient, f"gradient of input {number} of {where}", tolerance)
    parts = {part.name: part for part in (*sharding.parameters, *sharding.buffers)}
    for name, gradient in whole.parameter_gradients.items():
        found = [shard.parameter_gradients[name] for shard in shards]
        if gradient is None:
            assert found == [None] * ways, f"gradient of {name} in {where}"
        elif name in parts:
            close(assemble(_tensors(found), parts[name]), gradient, f"gradient of {name} in {where}", tolerance)
        else:
            close(torch.stack(_tensors(found)).sum(0), gradient, f"gradient of {name} in {where}", tolerance)
    for name, buffer in whole.buffers.items():
        held = [shard.buffers[name] for shard in shards]
        if name in parts:
            close(assemble(held, parts[name]), buffer, f"buffer {name} of {where}", tolerance)
        else:
            for entry in held:
                close(entry, buffer, f"buffer {name} of {where}", tolerance)


def _tensors(found: Sequence[Tensor | None]) -> list[Tensor]:
    assert all(entry is not None for entry in found), "every shard has a gradient"
    return [entry for entry in found if entry is not None]


def values_of(runnables: Sequence[Runnable], given: dict[str, Tensor]) -> dict[str, Tensor]:
    """Every value of a model by name, from one forward without gradients; buffers are left as they were."""
    values: dict[str, Tensor] = dict(given)
    kept: dict[int, Any] = {id(r.module): copy.deepcopy(r.module.state_dict()) for r in runnables}
    with torch.no_grad():
        for runnable in runnables:
            made = runnable([values[name] for name in runnable.input_names])
            values.update(zip(runnable.output_names, made, strict=True))
    for runnable in runnables[:1]:
        runnable.module.load_state_dict(kept[id(runnable.module)])
    return values


def traced_and_recorded(name: str, samples: int, **arguments: Any) -> tuple[Model, tuple[Runnable, ...], dict[str, Tensor]]:
    """A model of the zoo by sublayer, its runnables in float32, and every value of one forward over so many samples."""
    spec = ModelSpec(name=name, args=tuple(arguments.items()))
    model = load_model(spec, granularity="sublayer")
    torch.manual_seed(0)
    inputs, target = example_batch(spec, samples)
    runnables = record(build_module(spec), inputs, granularity="sublayer", loss=loss_of(spec))
    return model, runnables, values_of(runnables, {"input:0": next(iter(inputs.values())), "target": target})


def bytes_of(local: Runnable, given: list[Tensor], first: Sequence[bool], autocast: bool = False) -> tuple[int, int, int]:
    """Bytes at the fullest moment of a forward; what it keeps; and the most of the backward beyond that.

    Args:
        given: the inputs, of which nobody else may keep one. The list is emptied.
        first: per input whether this component is the first to save it, so that its backward lets go of it.
        autocast: whether the forward runs under the CPU's autocast.
    """
    for parameter in local.parameters():
        parameter.grad = torch.zeros_like(parameter)
    with LiveBytes() as live:
        for tensor, counts in zip(given, first, strict=True):
            if counts:
                live.track(tensor)
        inputs = live.current_bytes
        for tensor in (*given, *local.parameters(), *local.buffers(), *(p.grad for p in local.parameters())):
            assert tensor is not None
            live.ignore(tensor)
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
            outputs, saved = forward_component(local, given)
        forward = live.peak_bytes - inputs
        given.clear()
        del tensor
        flows = local.output_differentiable
        shapes = [(value.shape, value.dtype) if flow else None for value, flow in zip(outputs, flows, strict=True)]
        del outputs
        kept = live.current_bytes
        live.peak_bytes = 0
        if any(shape is not None for shape in shapes):
            backward_component(saved, [None if kind is None else torch.ones(kind[0], dtype=kind[1]) for kind in shapes])
        return forward, kept, live.peak_bytes - kept
