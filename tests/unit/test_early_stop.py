"""A second forward that stops early (torch 2.1): the last product of a layer does not run again, and memory stays."""

from __future__ import annotations

from dataclasses import replace

import pytest

from parsim.hardware.cluster import cluster_from_profile
from parsim.hardware.compose import profile_from_parts
from parsim.model.catalogue.sublayers import EAGER, SamplePart, Shape
from parsim.model.catalogue.transformer import transformer
from parsim.model.formats import Numerics
from parsim.plans.mesh import Mesh
from parsim.plans.plan import Plan, Stage
from parsim.predict.problem import PlanningProblem


def test_a_second_forward_that_stops_early_leaves_out_the_last_product_and_no_memory() -> None:
    part = SamplePart(tokens=512, context=512)
    shape = Shape(name="small", layers=2, hidden=1024, heads=8, vocab=32000)
    layer = transformer(shape, replace(EAGER, early_stop=True), part, "layer").component("h.0")
    assert layer.selective is not None
    again = {number for number, _ in layer.selective.operators}
    last = max(number for number, operator in enumerate(layer.operators) if operator.kind == "matmul")
    assert again == set(range(last))
    assert layer.selective.kept == (0, 0)
    assert layer.selective.values == layer.inputs[:1]
    whole = transformer(shape, EAGER, part, "layer")
    early = transformer(shape, replace(EAGER, early_stop=True), part, "layer")
    peaks = []
    for model, recompute in ((whole, ("h.0", "h.1")), (early, ("selective:h.0", "selective:h.1"))):
        cluster = cluster_from_profile(profile_from_parts("a100-sxm-80gb", 1))
        problem = PlanningProblem(
            model=model, cluster=cluster, global_batch=4, numerics=Numerics(precision="bf16", optimizer="adamw_fused")
        )
        plan = Plan(
            strategy="custom",
            mesh=Mesh(),
            stages=(Stage(components=tuple(entry.name for entry in model.components), ranks=(0,)),),
            global_batch=4,
            recompute=recompute,
        )
        peaks.append(problem.memory(plan)[0].total_bytes)
    assert peaks[1] == pytest.approx(peaks[0], rel=0.01)
