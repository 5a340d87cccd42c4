"""Two minutes that decide whether the rest is worth starting: does everything import, does the GPU do what will be asked of it?

    python experiments/one_gpu/smoke.py [--device cuda] [--out DIR]

Every check prints one line and the next one runs, whatever came of it. Exit status 1 if one failed that the programme needs.
"""

from __future__ import annotations

import argparse
import importlib
import json
import pkgutil
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

PACKAGES = ("numpy", "scipy", "pandas", "numba", "simpy", "pydantic", "networkx", "joblib", "rich", "typer", "torch")
OPTIONAL = ("plotly", "cvxpy", "sklearn", "transformers", "triton", "pynvml", "hypothesis", "pytest")
NEEDED, USEFUL = "needed", "useful"
OWN = ("analyse", "cases", "fake_peers", "kernels", "predictions", "programs", "questions", "supervise")

Check = Callable[[str], str]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--out", type=Path, help="writes smoke.json there")
    asked = parser.parse_args()
    checks: list[tuple[str, str, Check]] = [
        ("packages", NEEDED, lambda _: imported(PACKAGES)),
        ("optional packages", USEFUL, lambda _: imported(OPTIONAL)),
        ("parsim, calibration and the programme", NEEDED, lambda _: own_modules()),
        ("a simulated step", NEEDED, lambda _: step_simulated()),
        ("driver", NEEDED, driver_works),
        ("a product behind a sleep", NEEDED, product_timed),
        ("a process group of one rank", NEEDED, group_works),
        ("fp8 products", USEFUL, fp8_works),
        ("clocks and power", USEFUL, board_read),
        ("one step of the executor", NEEDED, executor_steps),
        ("a CUDA graph", USEFUL, graph_works),  # at the end: a failed capture spoils what follows
        ("a step in a CUDA graph", USEFUL, step_captured),
    ]
    rows = []
    for name, weight, check in checks:
        begin_s = time.perf_counter()
        try:
            row: dict[str, Any] = {"check": name, "weight": weight, "ok": True, "found": check(asked.device)}
        except Exception as error:  # the next check says more than a traceback
            row = {"check": name, "weight": weight, "ok": False, "found": f"{type(error).__name__}: {error}"}
        row["seconds"] = round(time.perf_counter() - begin_s, 3)
        rows.append(row)
        print(f"{'ok    ' if row['ok'] else 'FAILED'} {name} ({weight}, {row['seconds']:.1f} s): {row['found']}", flush=True)
    if asked.out is not None:
        asked.out.mkdir(parents=True, exist_ok=True)
        (asked.out / "smoke.json").write_text(json.dumps(rows, indent=1))
    failed = [row["check"] for row in rows if not row["ok"] and row["weight"] == NEEDED]
    print(f"the programme cannot run: {', '.join(failed)}" if failed else "the programme can run")
    return int(bool(failed))


def imported(names: tuple[str, ...]) -> str:
    """Versions. Raises ImportError that names all that are missing."""
    found, missing = [], []
    for name in names:
        try:
            found.append(f"{name} {getattr(importlib.import_module(name), '__version__', '')}".strip())
        except ImportError as error:
            missing.append(f"{name} ({error})")
    if missing:
        raise ImportError(f"missing: {', '.join(missing)}; there: {', '.join(found)}")
    return ", ".join(found)


def own_modules() -> str:
    """Raises ImportError that names every module that does not import, unless it wants an optional package (reports, MILP)."""
    names, broken, without = list(OWN), [], []
    for package in ("parsim", "calibration"):
        path = importlib.import_module(package).__path__
        names += [entry.name for entry in pkgutil.walk_packages(path, f"{package}.") if not entry.name.endswith("__main__")]
    for name in names:
        try:
            importlib.import_module(name)
        except Exception as error:  # parsim's own too, where numba refuses numpy
            optional = isinstance(error, ImportError) and (error.name or "").split(".")[0] in OPTIONAL
            (without if optional else broken).append(f"{name} ({error})")
    if broken:
        raise ImportError(f"{len(broken)} of {len(names)} modules do not import: {', '.join(broken[:5])}")
    left_out = f"; without optional packages not: {', '.join(without)}" if without else ""
    return f"{len(names) - len(without)} of {len(names)} modules{left_out}"


def step_simulated() -> str:
    """numba compiles for the numpy that is there."""
    from questions import GRANULARITY, REHEARSED

    from parsim.engines.static import simulate
    from parsim.model.load import load_model
    from parsim.program.lower import lower

    question = REHEARSED.held_out[0]
    model = load_model(question.spec, granularity=GRANULARITY)
    graph = lower(question.plan(tuple(component.name for component in model.components)), model)
    end_s = float(simulate(graph, [1e-3] * len(graph.tasks)).end_s.max())
    if not 1e-3 <= end_s <= 1e-3 * (len(graph.tasks) + 0.5):
        raise RuntimeError(f"{len(graph.tasks)} tasks of 1 ms each on one rank end after {1e3 * end_s:g} ms")
    return f"{len(graph.tasks)} tasks in {1e3 * end_s:g} ms"


def driver_works(device: str) -> str:
    from parsim.units import format_bytes
    from tools.gpu.device import open_device

    opened = open_device(device)
    clock = opened.clock
    begin = clock.mark()
    clock.hold(0.02)
    end = clock.mark()
    early = clock.passed(end)
    clock.synchronize()
    seconds = clock.elapsed_s(begin, end)
    if clock.queues and (early or not 0.01 < seconds < 0.06):
        raise RuntimeError(
            f"a hold of 20 ms took {1e3 * seconds:.1f} ms, and had{'' if early else ' not'} ended when it was queued"
        )
    return f"{opened.name}, {format_bytes(opened.memory_bytes)}, cache {format_bytes(opened.cache_bytes)}"


def product_timed(device: str, precision: str = "bf16", side: int = 2048) -> str:
    from tools.gpu.device import open_device
    from tools.gpu.products import PRECISIONS, Product, measure_product

    side = side if device == "cuda" else 64
    product = Product(rows=side, columns=side, depth=side)
    row = measure_product(open_device(device), product, PRECISIONS[precision], least_s=0.1)
    rate, queued = 1e-12 * row["flop_per_s"], "queued" if row["queued"] else "not queued"
    return f"{precision} {product}: {rate:.4g} TFLOP/s, {queued}, off by {row['relative_error']:.1e}"


def group_works(device: str) -> str:
    """The calibration and every run begin by it, with NCCL on a GPU."""
    import torch
    import torch.distributed as dist

    backend, number = ("nccl", 0) if device == "cuda" else ("gloo", None)
    where = torch.device(device, number) if number is not None else torch.device(device)
    dist.init_process_group(
        backend, store=dist.HashStore(), rank=0, world_size=1, device_id=where if device == "cuda" else None
    )
    try:
        values = torch.full((1024,), 3.0, device=where)
        dist.all_reduce(values)
        dist.barrier()
        if not bool((values == 3.0).all()):
            raise RuntimeError(f"an all_reduce of one rank gave {values[0].item()}, not 3")
    finally:
        dist.destroy_process_group()
    version = ".".join(map(str, torch.cuda.nccl.version())) if device == "cuda" else ""
    return f"{backend} {version}".strip()


def fp8_works(device: str) -> str:
    return product_timed(device, "fp8")


def graph_works(device: str) -> str:
    from tools.gpu.device import open_device
    from tools.gpu.launches import graph_cost

    return f"{1e6 * graph_cost(open_device(device))['device_per_kernel_s']:.2f} us per kernel"


def board_read(device: str) -> str:
    from tools.gpu.board import find_reader
    from tools.gpu.device import open_device

    reader, source = find_reader(open_device(device).uuid)
    if reader is None:
        raise RuntimeError(source)
    return f"{source}: {reader()}"


def executor_steps(device: str) -> str:
    import math

    import torch
    from programs import ExecutorStep
    from questions import REHEARSED

    executor = ExecutorStep(REHEARSED.held_out[0], torch.device(device))
    losses = []
    for _ in range(3):
        executor.step()
        losses.append(executor.last_loss)
    executor.streams.close()
    if not all(map(math.isfinite, losses)) or losses[2] >= losses[0]:
        raise RuntimeError(f"the loss does not fall: {losses}")
    return f"{REHEARSED.held_out[0].name}, losses {', '.join(f'{loss:.4f}' for loss in losses)}"


def step_captured(device: str) -> str:
    import torch
    from programs import graphed
    from questions import REHEARSED

    program = graphed(REHEARSED.held_out[0], torch.device(device))
    program.step()
    loss = program.loss()
    program.close()
    return f"{REHEARSED.held_out[0].name}, loss {loss:.4f}"


if __name__ == "__main__":
    sys.exit(main())
