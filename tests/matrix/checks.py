"""What the matrix asks of every model: one function per column, each of which returns a short text for its cell.

A function raises AssertionError where parsim is wrong, and a ParsimError where parsim refuses the model.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import FlopCounterMode

from experiments.common.shards import assert_shards_equal_whole, values_of
from parsim.data import dataset_for
from parsim.data.samples import BatchOrder
from parsim.errors import ParsimError
from parsim.execute.loading import Loader
from parsim.execute.rank_run import make_streams, watching
from parsim.execute.runtime import RankProgram
from parsim.execute.stage import StageReplica
from parsim.hardware.cluster import Cluster, cluster_from_profile
from parsim.hardware.compose import load_profile
from parsim.model import record
from parsim.model.build import Interface, build_module, example_batch, interface_of, loss_of
from parsim.model.formats import Numerics
from parsim.model.load import load_model
from parsim.model.model import Model
from parsim.model.runnable import Runnable
from parsim.model.spec import ModelSpec
from parsim.plans.mesh import Mesh
from parsim.plans.plan import Plan, Stage
from parsim.predict.problem import PlanningProblem
from parsim.program.lower import lower
from parsim.program.placed import PlanIndex
from parsim.search.search import search
from tests.execute.bitwise import assert_same_state, backward_components, forward_components

SAMPLES = 4
MEMORY_TOLERANCE = 0.03
LONGEST = 240
FLOAT64_TOLERANCE = 1e-10
SINGLE_INSIDE = 5e-6
"""Models that compute some steps in float32 whatever their weights are."""


@dataclass
class Subject:
    """A model under test; what several checks need is made once."""

    spec: ModelSpec

    @cached_property
    def interface(self) -> Interface:
        return interface_of(self.spec)

    @cached_property
    def model(self) -> Model:
        return load_model(self.spec)

    def module(self) -> nn.Module:
        torch.manual_seed(0)
        return build_module(self.spec)

    def batch(self, samples: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
        return dict(example_batch(self.spec, samples, seed=seed, dtype=dtype)[0])


def trace(subject: Subject) -> str:
    """Components of the trace with its loss."""
    return f"{len(subject.model.components)} components"


def bitwise(subject: Subject) -> str:
    """Executed components against the module: outputs, gradients, buffers, in training and evaluation, twice in a row."""
    for training in (True, False):
        module = subject.module().train(training)
        expected, cut = module, copy.deepcopy(module)
        args, kwargs = subject.interface.arguments(subject.batch(SAMPLES))
        components = record(cut, kwargs if kwargs else args, control_flow=subject.spec.control_flow)
        for seed in (1, 2):
            given = _leaves(subject.batch(SAMPLES, seed))
            cut_given = _leaves(subject.batch(SAMPLES, seed))
            expected.zero_grad()
            cut.zero_grad()
            args, kwargs = subject.interface.arguments(given)
            torch.manual_seed(seed)
            wanted = [leaf for leaf in tree_leaves(_plain(expected(*args, **kwargs))) if isinstance(leaf, Tensor)]
            names = [f"input:{number}" for number in range(len(cut_given))]
            flat = [leaf for leaf in tree_leaves(subject.interface.arguments(cut_given)) if isinstance(leaf, Tensor)]
            torch.manual_seed(seed)
            values, saved = forward_components(components, dict(zip(names, flat, strict=True)))
            made = [value for name, value in values.items() if not name.startswith("input:")]
            found: list[tuple[str, Tensor]] = []
            for number, leaf in enumerate(wanted):
                name = next((name for name in values if _same(values[name], leaf) and name not in dict(found)), None)
                assert name is not None, f"output {number} of {len(made)} values differs from the module's"
                found.append((name, leaf))
            flows = [(name, leaf) for name, leaf in found if leaf.requires_grad]
            gradients = {name: torch.randn_like(leaf) for name, leaf in flows}
            torch.autograd.backward([leaf for _, leaf in flows], [gradients[name].clone() for name, _ in flows])
            backward_components(components, saved, gradients)
            assert_same_state(expected, cut)
    return "equal"


def _plain(output: object) -> object:
    """Fields of a dataclass or of a model output."""
    return vars(output) if hasattr(output, "__dict__") and not isinstance(output, Tensor) else output


def _same(one: Tensor, other: Tensor) -> bool:
    return one.shape == other.shape and one.dtype == other.dtype and bool(torch.equal(one, other))


def _leaves(batch: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: x.detach().clone().requires_grad_(x.is_floating_point()) for name, x in batch.items()}


def shards(subject: Subject) -> str:
    """Every sharding of every component, over two and four ranks, against the whole in float64."""
    model = load_model(subject.spec, granularity="sublayer")
    sharded = [component for component in model.components if component.shardings]
    if not sharded:
        return "none"
    recorded, values = _recorded(subject, torch.float64)
    if any(list(runnable.input_names) != list(model.component(runnable.name).inputs) for runnable in recorded):
        recorded, values = _recorded(subject, torch.float32)  # casts to float32 make other components of float64
    runnables = {runnable.name: runnable for runnable in recorded}
    for component in sharded:
        runnable = runnables[component.name]
        single = any(values[name].dtype == torch.float32 for name in (*runnable.input_names, *runnable.output_names))
        tolerance = SINGLE_INSIDE if single or subject.spec.name.endswith(".json") else FLOAT64_TOLERANCE
        for sharding in component.shardings:
            inputs = [values[name] for name in runnable.input_names]
            for ways in (2, 4):
                if sharding.limit % ways == 0:
                    assert_shards_equal_whole(runnable, component, sharding, ways, inputs, tolerance)
    share = sum(component.forward_flop for component in sharded) / max(1.0, model.forward_flop)
    return f"{len(sharded)} of {len(model.components)}, {100 * share:.0f}% of flop"


def _recorded(subject: Subject, dtype: torch.dtype) -> tuple[tuple[Runnable, ...], dict[str, Tensor]]:
    """By sublayer with the loss, and every value of one forward of two samples; no weight is zero, as biases are at first."""
    module = subject.module().to(dtype)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    batch, target = example_batch(subject.spec, 2, dtype=dtype)
    args, kwargs = subject.interface.arguments(batch)
    flow, loss = subject.spec.control_flow, loss_of(subject.spec)
    recorded = record(module, kwargs if kwargs else args, granularity="sublayer", loss=loss, control_flow=flow)
    flat = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
    given = {f"input:{number}": leaf for number, leaf in enumerate(flat)}
    return recorded, values_of(recorded, given if target is None else {**given, "target": target})


def flop(subject: Subject) -> str:
    """Forward flop against torch's counter on a real forward."""
    counted = SAMPLES * subject.model.forward_flop
    operators = [operator for component in subject.model.components for operator in component.operators]
    counted += sum(operator.forward_flop * operator.count for operator in operators if operator.batch == "none")
    args, kwargs = subject.interface.arguments(subject.batch(SAMPLES))
    module = subject.module()
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        module(*args, **kwargs)
    expected = counter.get_total_flops()
    if math.isclose(counted, expected, rel_tol=1e-9):
        return "equal"
    assert counted >= expected * (1 - 1e-9), f"{counted:.6g} flop, torch counts {expected:.6g}"
    return f"torch counts {100 * expected / counted:.0f}% of it" if expected else "torch counts none"


def memory(subject: Subject) -> str:
    """Peak of live bytes of a real step on one rank against the prediction."""
    problem = PlanningProblem(
        model=subject.model, cluster=_one_cpu(), global_batch=SAMPLES, numerics=Numerics(optimizer="adam")
    )
    names = tuple(component.name for component in subject.model.components)
    plan = Plan(strategy="single", mesh=Mesh(), global_batch=SAMPLES, stages=(Stage(ranks=(0,), components=names),))
    (predicted,) = problem.memory(plan)
    layout, graph = PlanIndex(plan, subject.model), lower(plan, subject.model)
    device = torch.device("cpu")
    stage = StageReplica(
        subject.spec, layout, 0, optimizer="adam", learning_rate=1e-4, dtype=torch.float32, seed=0, device=device
    )
    data = dataset_for(subject.spec, "synthetic", root=None)
    order = BatchOrder(n=len(data), global_batch=SAMPLES, seed=0)
    loader = Loader(data, order, layout, 0, dtype=torch.float32, device=device)
    streams = make_streams(device)
    program = RankProgram(graph, stage, streams, {})
    try:
        program.step(loader.batch(0))
        with watching(stage) as watch:
            program.watch = watch
            program.step(loader.batch(1))
            measured = watch.live.peak_bytes
    finally:
        loader.close()
        streams.close()
    error = sum(predicted.tensor_lines.values()) / measured - 1
    assert abs(error) <= MEMORY_TOLERANCE, f"{100 * error:+.1f}% of {measured} bytes"
    return f"{100 * error:+.2f}%"


def _one_cpu() -> Cluster:
    """A machine of the tests, one process."""
    return cluster_from_profile(load_profile("dgx1-v100-32gb"), devices=1)


def simulate(subject: Subject) -> str:
    """The best plan on 8 V100s at 64 samples; no faster than its flop at the peak."""
    cluster = cluster_from_profile(load_profile("dgx1-v100-32gb"))
    problem = PlanningProblem(model=subject.model, cluster=cluster, global_batch=64)
    found = search(problem, ("single", "dp", "mp"), samples=0)
    assert found.chosen is not None, "nothing fits"
    step_s = found.chosen.result.step_s.median
    peak = cluster.devices[0].type.peak_flop_per_s["fp32"] * cluster.size
    assert step_s >= 64 * subject.model.forward_flop / peak / 4, "below the roofline"
    return f"{found.chosen.result.strategy} {1e3 * step_s:.2f} ms"


CHECKS: dict[str, Callable[[Subject], str]] = {
    "trace": trace,
    "bitwise": bitwise,
    "shards": shards,
    "flop": flop,
    "memory": memory,
    "simulate": simulate,
}


def run_checks(spec: ModelSpec) -> dict[str, str]:
    """A text per column: what was found, "refused: ..." or "FAILS: ...". No failure of one column stops another."""
    subject = Subject(spec)
    cells: dict[str, str] = {}
    for name, check in CHECKS.items():
        try:
            cells[name] = check(subject)
        except ParsimError as error:
            cells[name] = f"refused: {error}"
        except Exception as error:  # a crash is what the matrix is there to show
            cells[name] = f"FAILS: {type(error).__name__}: {str(error).strip().partition(chr(10))[0][:LONGEST]}"
    return cells
