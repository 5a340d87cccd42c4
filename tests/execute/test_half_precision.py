"""What a real step under autocast keeps, byte by byte, against what the Model alone predicts for it."""

from __future__ import annotations

from dataclasses import replace

import pytest

from experiments.memory.ranks import autocast_peak_bytes
from parsim.hardware.cluster import Cluster, cluster_from_profile
from parsim.hardware.compose import load_profile
from parsim.hardware.devices import NO_ALLOCATOR
from parsim.model.formats import Numerics
from parsim.model.load import load_model
from parsim.model.spec import ModelSpec
from parsim.plans.mesh import Mesh
from parsim.plans.plan import Plan, Stage
from parsim.predict.problem import PlanningProblem
from tests.execute.small_plans import BERT, GPT, VGG, VIT

WIDE = ModelSpec(name="mlp", args=(("width", 256),))


def one_cpu() -> Cluster:
    """One device without context or library workspace: what it holds is tensors."""
    cluster = cluster_from_profile(load_profile("dgx1-v100-32gb"), 1)
    device = cluster.devices[0]
    bare = replace(device.type, kind="cpu", context_bytes=0, allocator=NO_ALLOCATOR)
    return replace(cluster, devices=(replace(device, type=bare),))


def predicted_bytes(spec: ModelSpec, samples: int, precision: str) -> int:
    model = load_model(spec, granularity="layer")
    asked = PlanningProblem(
        model=model, cluster=one_cpu(), global_batch=samples, numerics=Numerics(precision=precision, optimizer="sgd")
    )
    names = tuple(component.name for component in model.components)
    plan = Plan(strategy="single", mesh=Mesh(), global_batch=samples, stages=(Stage(ranks=(0,), components=names),))
    return asked.memory(plan)[0].total_bytes


@pytest.mark.parametrize("spec", [WIDE, VIT, GPT, BERT, VGG], ids=lambda spec: spec.name)
def test_the_peak_of_a_step_under_autocast_is_predicted(spec: ModelSpec) -> None:
    for samples in (8, 32):
        half, full = autocast_peak_bytes(spec, samples), autocast_peak_bytes(spec, samples, autocast=False)
        assert half != full, "autocast was on"
        assert predicted_bytes(spec, samples, "amp_bf16") == pytest.approx(half, rel=0.01)
        assert predicted_bytes(spec, samples, "fp32") == pytest.approx(full, rel=0.01)
