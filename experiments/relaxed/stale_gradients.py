"""Decoupled backpropagation with stale gradients: what it learns, what it delays, and what an epoch takes.

python -m experiments.relaxed.stale_gradients [--quick] [--seeds N] [--json]
python -m experiments.relaxed.stale_gradients --draw    # docs/pictures/stale.svg from results.json; runs nothing
"""

from __future__ import annotations

import io
import itertools
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from experiments.common.catalogue import ROOT, recorded
from experiments.common.running import part_parser, show
from experiments.relaxed.coloured_digits import coloured_digits
from experiments.relaxed.decoupled import (
    TickEngine,
    TickRule,
    balanced_speedup,
    cut_sequential,
    decoupling,
    epoch_by_ticks_s,
)
from parsim.files import write_text_atomically
from parsim.plans.mixing import mixing_graph
from parsim.relaxed.problems import LearningProblem, load_problem, perceptron
from parsim.report.legend import SERIES
from parsim.report.picture import LOOK

HIDDEN, BATCH, EPOCHS = (48, 48, 48), 32, 20
SPECIFIED_SEEDS = 2
"""Seeds behind each specified accuracy; ours are other draws, so the difference is also given in its standard errors."""


@dataclass(frozen=True, kw_only=True)
class Case:
    """One row of the accuracy table; `expected` is the accuracy this project was specified with, where it has one."""

    name: str
    modules: int
    rule: TickRule
    groups: int = 1
    graph: str | None = None
    expected: float | None = None


def sgd(schedule: str, mode: str, rate: float, momentum: float = 0.0, **more: Any) -> TickRule:
    return TickRule(schedule=schedule, mode=mode, learning_rate=rate, momentum=momentum, **more)


CASES = (
    Case(name="bp lr .05", modules=1, rule=sgd("bp", "stash", 0.05), expected=0.971),
    Case(name="fdg K=2 stash lr .05", modules=2, rule=sgd("fdg", "stash", 0.05), expected=0.967),
    Case(name="fdg K=2 fresh lr .05", modules=2, rule=sgd("fdg", "fresh", 0.05), expected=0.967),
    Case(name="fdg K=2 replay lr .05", modules=2, rule=sgd("fdg", "replay", 0.05), expected=0.964),
    Case(name="fdg K=4 stash lr .05", modules=4, rule=sgd("fdg", "stash", 0.05), expected=0.967),
    Case(name="fdg K=4 fresh lr .05", modules=4, rule=sgd("fdg", "fresh", 0.05), expected=0.972),
    Case(name="fdg K=4 replay lr .05", modules=4, rule=sgd("fdg", "replay", 0.05), expected=0.968),
    Case(name="fdg K=4 stash lr .05 beta .5", modules=4, rule=sgd("fdg", "stash", 0.05, beta=0.5), expected=0.942),
    Case(name="bp lr .1", modules=1, rule=sgd("bp", "stash", 0.1), expected=0.979),
    Case(name="fdg K=4 stash lr .1", modules=4, rule=sgd("fdg", "stash", 0.1), expected=0.985),
    Case(name="fdg K=4 fresh lr .1", modules=4, rule=sgd("fdg", "fresh", 0.1), expected=0.985),
    Case(name="fdg K=4 replay lr .1", modules=4, rule=sgd("fdg", "replay", 0.1), expected=0.975),
    Case(name="bp lr .01 momentum .9", modules=1, rule=sgd("bp", "stash", 0.01, 0.9), expected=0.982),
    Case(name="fdg K=4 stash lr .01 momentum .9", modules=4, rule=sgd("fdg", "stash", 0.01, 0.9), expected=0.963),
    Case(name="fdg K=4 fresh lr .01 momentum .9", modules=4, rule=sgd("fdg", "fresh", 0.01, 0.9), expected=0.979),
    Case(name="fdg K=4 replay lr .01 momentum .9", modules=4, rule=sgd("fdg", "replay", 0.01, 0.9), expected=0.940),
    Case(name="fdg K=4 backward first lr .1", modules=4, rule=sgd("fdg", "stash", 0.1, order="backward_first")),
    Case(name="ddg K=4 lr .1", modules=4, rule=sgd("ddg", "fresh", 0.1)),
    Case(name="features replay K=4 lr .1", modules=4, rule=sgd("ddg", "replay", 0.1)),
    Case(name="adl K=4 M=8 lr .4", modules=4, rule=sgd("fdg", "stash", 0.4, accumulate=8)),
    Case(name="2 groups x K=4 averaged lr .1", modules=4, groups=2, rule=sgd("fdg", "stash", 0.1)),
    Case(name="4 groups x K=4 averaged lr .1", modules=4, groups=4, rule=sgd("fdg", "stash", 0.1)),
    Case(name="4 groups x K=4 ring consensus lr .1", modules=4, groups=4, graph="ring", rule=sgd("fdg", "stash", 0.1)),
)

IMAGES, TEST_IMAGES, IMAGE_EPOCHS = 8192, 2000, 12
GRID = ((1, 1), (2, 1), (4, 1), (1, 2), (2, 2), (4, 2))
"""K and S of the runs on images; K = 1 is backpropagation."""

# Epoch times in seconds printed for WRN-28-10 on CIFAR-10, batch 128 (table image of github.com/ZHUANGHP/FDG), and the GPU
# utilisations printed beside FDG: time * utilisation is what each module computes in an epoch.
BATCHES_PER_EPOCH = 391
BP_S, BP_UTILISATION = 219.1, 0.95
PRINTED_S = {
    2: {"ddg": 160.3, "fr": 208.2, "fdg": 118.3},
    3: {"ddg": 139.3, "fr": 173.4, "fdg": 89.6},
    4: {"ddg": 133.9, "fr": 151.9, "fdg": 74.1},
}
FDG_UTILISATION = {2: (0.96, 0.80), 3: (0.80, 0.87, 0.72), 4: (0.67, 0.87, 0.74, 0.46)}
WAYS = {"ddg": ("ddg", False), "fr": ("ddg", True), "fdg": ("fdg", False)}


def batches(problem: LearningProblem, groups: int, seed: int, epochs: int) -> Iterator[list[tuple[torch.Tensor, torch.Tensor]]]:
    """Each group reads its own contiguous part of one permutation per epoch, 32 samples a tick."""
    for epoch in range(epochs):
        order = torch.from_numpy(np.random.default_rng([seed, epoch]).permutation(len(problem)))
        parts = order[: len(order) // groups * groups].view(groups, -1)
        for first in range(0, parts.shape[1] - BATCH + 1, BATCH):
            yield [(problem.inputs[part], problem.targets[part]) for part in parts[:, first : first + BATCH]]


def accuracy(case: Case, problem: LearningProblem, seed: int, epochs: int) -> tuple[float, int]:
    """Test accuracy after the drain, and the largest staleness of an update in updates."""
    model = perceptron(problem, HIDDEN, seed=seed, dtype=torch.float64)
    graph = mixing_graph(case.graph, case.groups) if case.graph is not None else None
    engine = TickEngine(cut_sequential(model, case.modules), problem.loss, case.rule, groups=case.groups, mixing=graph)
    engine.run(batches(problem, case.groups, seed, epochs))
    staleness = max(max(agent.staleness) for agent in engine.agents[0])
    return problem.score(engine.predict(problem.test_inputs)), staleness


def accuracy_table(seeds: int, epochs: int) -> list[dict[str, Any]]:
    problem, rows = load_problem("digits", dtype=torch.float64), []
    for case in CASES:
        found = [accuracy(case, problem, seed, epochs) for seed in range(seeds)]
        scores = np.array([score for score, _ in found])
        deviation = float(scores.std(ddof=1)) if seeds > 1 else 0.0
        error = deviation * (1 / seeds + 1 / SPECIFIED_SEEDS) ** 0.5
        row: dict[str, Any] = {
            "case": case.name,
            "K": case.modules,
            "S": case.groups,
            "mode": case.rule.mode,
            "accuracy": round(float(scores.mean()), 4),
            "deviation": round(deviation, 4),
            "seeds": seeds,
            "scores": [round(float(score), 6) for score in scores],
            "staleness_updates": max(staleness for _, staleness in found),
            "expected": case.expected,
            "standard_errors": None
            if case.expected is None or not error
            else round((scores.mean() - case.expected) / error, 2),
        }
        print(f"{row['case']:40s} {row['accuracy']:.3f} ± {row['deviation']:.3f}", file=sys.stderr, flush=True)
        rows.append(row)
    return rows


def convolutions(seed: int) -> nn.Sequential:
    """Four convolutions of 8 to 64 channels with BatchNorm and stride 2, and a linear layer; images of 3 x 32 x 32."""
    widths = (3, 8, 16, 32, 64)
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        layers: list[nn.Module] = []
        for before, after in itertools.pairwise(widths):
            layers += [nn.Conv2d(before, after, 3, stride=2, padding=1, bias=False), nn.BatchNorm2d(after), nn.ReLU()]
        return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(widths[-1], 10))


def image_rows(seeds: int, epochs: int, images: int) -> list[dict[str, Any]]:
    """K modules in S groups on images in CIFAR-10's format: test accuracy behind every epoch, and behind the drain."""
    problem, rows = coloured_digits(images, TEST_IMAGES), []
    for modules, groups in GRID:
        rule = sgd("fdg" if modules > 1 else "bp", "stash", 0.05)
        steps = len(problem) // groups // BATCH
        for seed in range(seeds):
            engine = TickEngine(cut_sequential(convolutions(seed), modules), problem.loss, rule, groups=groups)
            stream, scores = batches(problem, groups, seed, epochs), []
            for _ in range(epochs):
                engine.run(islice(stream, steps), drain=False)
                scores.append(round(problem.score(engine.predict(problem.test_inputs)), 6))
            engine.run((), drain=True)
            last = round(problem.score(engine.predict(problem.test_inputs)), 6)
            rows.append({"K": modules, "S": groups, "seed": seed, "scores": scores, "drained": last})
            print(f"images K={modules} S={groups} seed {seed}: {last:.3f}", file=sys.stderr, flush=True)
    return rows


def draw(rows: list[dict[str, Any]], path: Path) -> None:
    """Accuracy over epochs and over updates of each K and S, as a mean over seeds."""
    import matplotlib as mpl
    from matplotlib.figure import Figure

    drawn = io.BytesIO()
    with mpl.rc_context(LOOK):
        picture = Figure(figsize=(10, 3.6), layout="constrained")
        by_epoch, by_update = picture.subplots(1, 2, sharey=True)
        for (modules, groups), colour in zip(GRID, SERIES, strict=False):
            scores = [row["scores"] for row in rows if (row["K"], row["S"]) == (modules, groups)]
            epochs = 1 + np.arange(len(scores[0]))
            name = f"{'backpropagation' if modules == 1 else f'{modules} modules'}, {groups} group{'s' * (groups > 1)}"
            by_epoch.plot(epochs, np.mean(scores, axis=0), color=colour, label=name)
            by_update.plot(epochs * (IMAGES // groups // BATCH), np.mean(scores, axis=0), color=colour)
        by_epoch.set(xlabel="epochs", ylabel="test accuracy")
        by_update.set(xlabel="updates")
        picture.legend(*by_epoch.get_legend_handles_labels(), loc="outside lower center", ncols=3, frameon=False)
        picture.savefig(drawn, format="svg", metadata={"Date": None})
    write_text_atomically(path, drawn.getvalue().decode())


def time_table() -> list[dict[str, Any]]:
    """Printed epochs beside ours, whose one overhead makes the largest relative error as small as it can be."""
    cells: list[tuple[str, int, float, float]] = []
    for count, printed in PRINTED_S.items():
        busy_s = [printed["fdg"] * utilisation / BATCHES_PER_EPOCH for utilisation in FDG_UTILISATION[count]]
        for name, (schedule, replay) in WAYS.items():
            cells.append((name, count, _epoch_s(schedule, busy_s, replay), printed[name]))
    cells.append(("bp", 1, _epoch_s("bp", [BP_S * BP_UTILISATION / BATCHES_PER_EPOCH], False), BP_S))
    ratios = np.array([printed for _, _, _, printed in cells]) / np.array([seconds for _, _, seconds, _ in cells])
    factor = float(2.0 / (1.0 / ratios.min() + 1.0 / ratios.max()))
    return [
        {
            "algorithm": name,
            "K": count,
            "busy_only_s": round(seconds, 2),
            "overhead": round(factor - 1.0, 4),
            "simulated_s": round(seconds * factor, 1),
            "printed_s": printed,
            "error": round(seconds * factor / printed - 1.0, 4),
        }
        for name, count, seconds, printed in cells
    ]


def _epoch_s(schedule: str, busy_s: list[float], replay: bool) -> float:
    """An epoch whose modules compute so long per batch, the forward a third of it."""
    forward_s = [seconds / 3.0 for seconds in busy_s]
    backward_s = [seconds - part for seconds, part in zip(busy_s, forward_s, strict=True)]
    return epoch_by_ticks_s(schedule, forward_s, backward_s, BATCHES_PER_EPOCH, replay=replay)


def speedup_table() -> list[dict[str, Any]]:
    """Balanced modules: speed-up over bp by the closed form and tick by tick, and what staleness and memory it costs."""
    rows = []
    fdg = decoupling("fdg")
    for count in (2, 4, 8):
        for ticks in (20, 391):
            bp, stale = (epoch_by_ticks_s(name, [1.0] * count, [2.0] * count, ticks) for name in ("bp", "fdg"))
            delay = fdg.delay(1, count)
            rows.append(
                {
                    "K": count,
                    "batches": ticks,
                    "closed_form": round(balanced_speedup(count, ticks), 4),
                    "simulated": round(bp / stale, 4),
                    "largest_delay_ticks": delay,
                    "batches_of_activations_held": sum(fdg.delay(k, count) + 1 for k in range(1, count + 1)),
                    "weight_copies_first_module": delay,
                }
            )
    return rows


def main() -> None:
    parser = part_parser(__doc__, "one seed, five epochs")
    parser.add_argument("--seeds", type=int, default=10)
    parser.add_argument("--draw", action="store_true", help="docs/pictures/stale.svg from results.json; run nothing")
    options = parser.parse_args()
    if options.draw:
        draw((recorded("stale_gradients") or {})["images"], ROOT / "docs" / "pictures" / "stale.svg")
        return
    torch.set_num_threads(1)
    began = time.perf_counter()
    seeds, epochs = (1, 5) if options.quick else (options.seeds, EPOCHS)
    images = image_rows(1, 1, 640) if options.quick else image_rows(3, IMAGE_EPOCHS, IMAGES)
    tables = {
        "accuracy": accuracy_table(seeds, epochs),
        "images": images,
        "epoch_times": time_table(),
        "speedup": speedup_table(),
    }
    show(tables | {"wall_s": time.perf_counter() - began}, as_json=options.json)


if __name__ == "__main__":
    main()
