"""Published steps of mixtures of experts that one plan takes with different software: Megatron Bridge's tables by release.

The figures are tokens per second and GPU of Qwen3 30B A3B, sequences of 4096 tokens, batch 512, dp = ep = 8 on 8 B200 in FP8
(NVIDIA-NeMo/Megatron-Bridge, performance page). The release of 25.11 has no CUDA graphs and a microbatch of one sample; that of
26.04.01 has graphs, HybridEP and a microbatch of four. Without graphs a layer took 9.2 ms of a microbatch of one sample (9,299
tokens/s) in 25.11, and up to 17.0 ms (5,020) in others (`parsim.costs.compute.formula.LOW_EXPERT_LAUNCHES`).
"""

from __future__ import annotations

import pytest

from parsim.app.load import fixed_plan, problem_of
from parsim.app.question import question_of
from parsim.predict.evaluate import evaluate

SEQ, BATCH, GPUS = 4096, 512, 8


def tokens_per_s(micro: int, **software: object) -> float:
    settings: dict[str, object] = {
        "model.args.seq": SEQ,
        "training.precision": "fp8",
        "plan.strategy": "custom",
        "plan.mesh": {"dp": GPUS, "ep": GPUS},
        "plan.microbatches": BATCH // (GPUS * micro),
        "software.framework": "megatron-bridge",
        "software.year": 2026,  # containers up to 26.04
    }
    settings |= {f"software.{key}": value for key, value in software.items()}
    asked = question_of("qwen3-30b-a3b", cluster=f"{GPUS}xb200", global_batch=BATCH, settings=settings)
    problem = problem_of(asked)
    plan = fixed_plan(problem, asked)
    assert plan is not None
    return SEQ * BATCH / GPUS / evaluate(problem, plan, samples=0).result.step_s.median


@pytest.mark.slow
def test_switches_tell_releases_apart() -> None:
    graphs, launched = tokens_per_s(4, cuda_graphs=True), tokens_per_s(1)
    assert graphs == pytest.approx(27136, rel=0.3)
    assert 5020 < launched < 9299
    assert tokens_per_s(1, cuda_graphs=True) > 1.5 * launched
    assert tokens_per_s(4, cuda_graphs=True, dispatcher="all_to_all") < graphs
    assert graphs < tokens_per_s(4, cuda_graphs=True, expert_overlap=True)
